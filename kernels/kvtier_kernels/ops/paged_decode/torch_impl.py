"""Paged decode on the CPU: gather one aligned chunk at a time, attend it, merge ascending.

It exists as the shipping fallback and gives the bits of the chunk path, whatever the page table.
It must not know who filled the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.state import AttentionState, LogitFrame, identity, merge_ascending


def check_inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, split_tokens: int
) -> None:
    """Shapes, dtypes and lengths of every implementation. Raises ShapeError.

    Lengths on a GPU are not looked at: that would wait for the device on every call.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ShapeError(
            f"want q [B,Hq,d], caches [N,P,Hk,d], got {tuple(q.shape)}, {tuple(k_cache.shape)}, "
            f"{tuple(v_cache.shape)}"
        )
    batch, hq, d = q.shape
    _, page, hk, kd = k_cache.shape
    if kd != d or hk == 0 or hq % hk:
        raise ShapeError(f"q has {hq} heads of {d}, the cache {hk} of {kd}")
    if page_table.shape[0] != batch or seq_lens.shape != (batch,):
        raise ShapeError(f"{batch} requests, page_table {tuple(page_table.shape)}, {tuple(seq_lens.shape)}")
    if page_table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ShapeError(f"page_table and seq_lens are int32, got {page_table.dtype}, {seq_lens.dtype}")
    if split_tokens < 1 or split_tokens % page:
        raise ShapeError(f"a split of {split_tokens} tokens is not whole pages of {page}")
    if (
        batch
        and seq_lens.device.type == "cpu"
        and (int(seq_lens.min()) < 0 or int(seq_lens.max()) > page_table.shape[1] * page)
    ):
        raise ShapeError(f"seq_lens must lie in [0, {page_table.shape[1] * page}]")


def paged_decode_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    split_tokens: int = 256,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather."""
    check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
    _, hq, d = q.shape
    page = k_cache.shape[1]
    frame = LogitFrame(scale)
    answers = [identity((1, hq), d, frame)]
    for b, n in enumerate(seq_lens.tolist()):
        parts = []
        for lo in range(0, n, split_tokens):
            hi = min(n, lo + split_tokens)
            pages = page_table[b, lo // page : -(-hi // page)].long()
            k = k_cache[pages].flatten(0, 1)[: hi - lo].float()
            v = v_cache[pages].flatten(0, 1)[: hi - lo].float()
            one = q[b : b + 1].float()
            parts.append(chunk_state(one, k, v, scale=scale, q_pos0=n - 1, row_pos0=lo, frame=frame))
        answers.append(merge_ascending(parts) if parts else identity((1, hq), d, frame))
    return AttentionState(
        m=torch.cat([a.m for a in answers])[1:],
        l=torch.cat([a.l for a in answers])[1:],
        u=torch.cat([a.u for a in answers])[1:],
        frame=frame,
    )
