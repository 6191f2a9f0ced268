"""Clients of node agents: the pool of channels, and the loop that keeps candidate leases alive."""

from kvtier_operator.agents.pool import GrpcAgents

__all__ = ["GrpcAgents"]
