"""One reconcile per kind: a pure plan and a thin apply. KVRollout's plan is `kvtier_operator.rollout`."""

from __future__ import annotations

from kvtier_operator.ports import Deps, Reconciler
from kvtier_operator.reconcile.agentpool import AgentPoolReconciler
from kvtier_operator.reconcile.kvcache import KVCacheReconciler
from kvtier_operator.reconcile.kvnode import KVNodeReconciler
from kvtier_operator.reconcile.kvrollout import KVRolloutReconciler
from kvtier_operator.reconcile.kvselector import KVSelectorReconciler
from kvtier_operator.reconcile.tierclass import TierClassReconciler
from kvtier_operator.rollout.feed import LookSource


def build_reconcilers(deps: Deps, looks: LookSource) -> list[Reconciler]:
    """One for each of the six kinds. looks: where rollouts have their evidence from."""
    return [
        TierClassReconciler(deps),
        KVSelectorReconciler(deps),
        AgentPoolReconciler(deps),
        KVNodeReconciler(deps),
        KVCacheReconciler(deps),
        KVRolloutReconciler(deps, looks),
    ]
