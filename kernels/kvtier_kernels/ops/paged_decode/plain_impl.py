"""Paged decode by plain tensor operations: what machines without compiled kernels run, with the same bits.

It must not know who filled the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention.decode import no_rows
from kvtier_kernels.ops.chunk_attention.plain import state_plain
from kvtier_kernels.ops.paged_decode.torch_impl import check_inputs
from kvtier_kernels.state import AttentionState, LogitFrame, fold_plain


@torch.no_grad()
def paged_decode_plain(
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
    batch, hq, d = q.shape
    page = k_cache.shape[1]
    totals = no_rows(batch, hq, d)
    scaled = q.float() * scale
    for b, n in enumerate(seq_lens.tolist()):
        own = totals[0][b], totals[1][b], totals[2][b]
        for lo in range(0, n, split_tokens):
            hi = min(n, lo + split_tokens)
            pages = page_table[b, lo // page : -(-hi // page)].long()
            k, v = (x[pages].flatten(0, 1)[: hi - lo].float() for x in (k_cache, v_cache))
            fold_plain(own, state_plain(scaled[b : b + 1], k, v, torch.tensor([hi - lo])))
    return AttentionState(*totals, frame=LogitFrame(scale))
