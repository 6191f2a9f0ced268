"""The one client of the API server: typed verbs over kubernetes.aio. Knows no reconcile."""

from kvtier_operator.kube.client import KubeClient, connect, load_configuration
from kvtier_operator.kube.resources import RESOURCES, Resource, key_of

__all__ = ["RESOURCES", "KubeClient", "Resource", "connect", "key_of", "load_configuration"]
