"""A real Kubernetes API server for tests and the demo, on loopback, with nothing installed beforehand.

It knows etcd, kube-apiserver, certificates and kubectl; it must not know our resources or processes.
"""

from .build import BuildError, ControlPlaneBinaries, find_argo_rollouts, find_binaries, find_helm
from .choice import ChoiceError, Refused, chosen_kubeconfig
from .cluster import Cluster, KubectlError
from .pki import Certificate, CertificateAuthority
from .plane import LocalControlPlane, StartError, open_cluster
from .waiting import EventuallyError, eventually, eventually_async

__all__ = [
    "BuildError",
    "Certificate",
    "CertificateAuthority",
    "ChoiceError",
    "Cluster",
    "ControlPlaneBinaries",
    "EventuallyError",
    "KubectlError",
    "LocalControlPlane",
    "Refused",
    "StartError",
    "chosen_kubeconfig",
    "eventually",
    "eventually_async",
    "find_argo_rollouts",
    "find_binaries",
    "find_helm",
    "open_cluster",
]
