"""Which cluster the user has asked for: a local one, or their own.

``KUBECONFIG`` alone is no wish. It is set in many shells, and what runs here installs CRDs, creates Nodes and
deletes namespaces; so a user's own cluster is used only when it is asked for by name.

Standard library only, and runnable as a script: ``make`` checks the wish before it installs or builds. It
must not know how a cluster is started or used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import Enum

OWN, LOCAL = "own", "local"
WISH_VARIABLE = "KVTIER_CLUSTER"
NAMED_VARIABLE = "KVTIER_KUBECONFIG"
KUBECTL_VARIABLE = "KUBECONFIG"


class Refused(Enum):
    """Why no cluster can be used as asked. Stable."""

    UNKNOWN_WISH = "UnknownWish"
    KUBECONFIG_UNSET = "KubeconfigUnset"
    KUBECONFIG_MISSING = "KubeconfigMissing"
    KUBECONFIG_UNREADABLE = "KubeconfigUnreadable"
    KUBECONFIG_UNUSABLE = "KubeconfigUnusable"
    CLUSTER_UNREACHABLE = "ClusterUnreachable"


class ChoiceError(RuntimeError):
    """The cluster that was asked for cannot be had; nothing was touched. `reason` says why."""

    def __init__(self, reason: Refused, message: str) -> None:
        super().__init__(f"{message} ({reason.value})")
        self.reason = reason


def chosen_kubeconfig(environ: Mapping[str, str], *, named: str | None = None, wish: str = "") -> str | None:
    """The kubeconfig of the user's own cluster, as kubectl takes it in ``KUBECONFIG``; None for a local one.

    The first of: `named`, a path from the command line; the wish, from there (`wish`, empty for none) or from
    KVTIER_CLUSTER, where ``own`` means KUBECONFIG; KVTIER_KUBECONFIG, a path. Raises ChoiceError.
    """
    wish = wish or environ.get(WISH_VARIABLE, "")
    if wish not in ("", OWN, LOCAL):
        raise ChoiceError(Refused.UNKNOWN_WISH, f"no cluster is called {wish!r}: {OWN} or {LOCAL}")
    if named:
        return _readable(named, "the kubeconfig that is named")
    if wish == OWN:
        return _readable(environ.get(KUBECTL_VARIABLE, ""), KUBECTL_VARIABLE)
    if wish != LOCAL and (path := environ.get(NAMED_VARIABLE)):
        return _readable(path, NAMED_VARIABLE)
    return None


def _readable(value: str, source: str) -> str:
    """The files of a list like kubectl's that exist; all of them must be readable, and one must be there."""
    paths = [os.path.expanduser(one) for one in value.split(os.pathsep) if one]
    if not paths:
        raise ChoiceError(
            Refused.KUBECONFIG_UNSET, f"your own cluster was asked for, and {source} names no file: export it"
        )
    there = [one for one in paths if os.path.exists(one)]
    if not there:
        raise ChoiceError(Refused.KUBECONFIG_MISSING, f"{source}: {value} does not exist")
    for one in there:
        if not os.path.isfile(one) or not os.access(one, os.R_OK):
            raise ChoiceError(Refused.KUBECONFIG_UNREADABLE, f"{source}: {one} cannot be read as a file")
    return os.pathsep.join(os.path.abspath(one) for one in there)


def main() -> int:
    """Prints the choice, ``local`` or a kubeconfig; status 1 and the reason when it cannot be had."""
    try:
        kubeconfig = chosen_kubeconfig(os.environ)
    except ChoiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(kubeconfig or LOCAL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
