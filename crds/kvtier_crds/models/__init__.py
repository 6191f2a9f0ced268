"""The six kinds, one module each. `KINDS` is the order in which they are generated and documented."""

from kvtier_crds.models.agentpool import AgentPool
from kvtier_crds.models.common import Resource
from kvtier_crds.models.kvcache import KVCache
from kvtier_crds.models.kvnode import KVNode
from kvtier_crds.models.kvrollout import KVRollout
from kvtier_crds.models.kvselector import KVSelector
from kvtier_crds.models.tierclass import TierClass

KINDS: tuple[type[Resource], ...] = (TierClass, AgentPool, KVNode, KVCache, KVSelector, KVRollout)

__all__ = ["KINDS", "AgentPool", "KVCache", "KVNode", "KVRollout", "KVSelector", "Resource", "TierClass"]
