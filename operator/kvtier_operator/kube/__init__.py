"""The one client of the API server. Knows no reconcile."""

from kvtier_operator.kube.access import load_access
from kvtier_operator.kube.client import KubeClient
from kvtier_operator.kube.resources import RESOURCES, Resource, key_of
from kvtier_operator.kube.transport import Transport, connect

__all__ = ["RESOURCES", "KubeClient", "Resource", "Transport", "connect", "key_of", "load_access"]
