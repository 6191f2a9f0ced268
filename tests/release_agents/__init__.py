"""Many node agents in one process: production Node, Control and registration over engines without rows.

For the bench of release control at scale, and for what cluster tests need of made-up evidence. Fences,
leases, manifests, proofs, deltas, the KVNode and its Lease are the agent's own code; only the engine and what
its requests would have counted are not. It must not know the operator.
"""
