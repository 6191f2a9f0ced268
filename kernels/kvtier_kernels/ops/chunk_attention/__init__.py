"""State of queries over one aligned chunk of rows: the CPU path of decode and prefill."""

from kvtier_kernels.ops.chunk_attention.ref import chunk_state_ref
from kvtier_kernels.ops.chunk_attention.torch_impl import ShapeError, chunk_state

__all__ = ["ShapeError", "chunk_state", "chunk_state_ref"]
