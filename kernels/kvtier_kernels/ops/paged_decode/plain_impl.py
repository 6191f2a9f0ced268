"""Paged decode by plain tensor operations, with the bits of the compiled kernels: what runs where nothing is
compiled, and what caps logits anywhere.

It must not know who filled the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention.plain import state_plain
from kvtier_kernels.ops.paged_decode.arguments import check_inputs, frame_of, gathered, room, spans
from kvtier_kernels.state import AttentionState, States, fold_plain


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
    window: int | None = None,
    softcap: float | None = None,
    out: States | None = None,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather."""
    check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens, window, softcap)
    m, l, u = room(out, q)
    m.fill_(-torch.inf), l.zero_(), u.zero_()
    scaled = q.float() * scale
    for b, n in enumerate(seq_lens.tolist()):
        for lo, hi in spans(n, split_tokens, window):
            k, v = (gathered(x, page_table[b], lo, hi) for x in (k_cache, v_cache))
            seen = torch.tensor([hi - lo])
            fold_plain((m[b], l[b], u[b]), state_plain(scaled[b : b + 1], k, v, seen, softcap=softcap))
    return AttentionState(m, l, u, frame=frame_of(scale, softcap))
