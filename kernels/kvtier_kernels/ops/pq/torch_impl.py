"""Product-quantised scores on the CPU (Zhang et al., "PQCache", 2024): a table per query, then sums of it.

It exists to rank rows by a byte or two each. It must not know how codebooks are trained, nor which rows are
mandatory. Every code may be the nearest and the ranking still be wrong: the error of a row is q.(k - k'),
and the best row may be the one whose remainder points along q.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import Scores, check_heads, check_lens, want


def check_lut(q: Tensor, cent: Tensor) -> int:
    """Query heads a KV head. Raises ShapeError."""
    want(
        cent.dim() == 5 and cent.is_floating_point(),
        f"want cent [B,Hk,m,C,d/m] of floats, got {tuple(cent.shape)}",
    )
    group = check_heads(q, cent.shape[1])
    batch, _, m, entries, width = cent.shape
    want(1 <= entries <= 256, f"a code is one byte: {entries} entries a codebook")
    want(
        q.shape[0] == batch and m * width == q.shape[2],
        f"PQ_GEOMETRY: {m} parts of {width} channels of a head dim of {q.shape[2]}, "
        f"{batch} codebooks for {q.shape[0]} requests",
    )
    return group


def pq_lut_torch(q: Tensor, cent: Tensor) -> Tensor:
    """Products of each part of a query with each entry of that part's codebook.

    q: [B,Hq,d]; cent: [B,Hk,m,C,d/m], C at most 256; one codebook for all requests is `expand`ed. Returns
    float32 [B,Hk,m,G,C]: lut[j,g,c] = q_g[part j] . cent[j,c]. Raises ShapeError.
    """
    group = check_lut(q, cent)
    batch, hk, m, _, width = cent.shape
    parts = q.float().view(batch, hk, group, m, width).transpose(2, 3)
    return parts @ cent.float().transpose(-1, -2)


def check_codes(lut: Tensor, codes: Tensor, seq_lens: Tensor) -> None:
    """Raises ShapeError; PQ_GEOMETRY for a code past the codebook, where it costs no wait for a GPU."""
    want(
        lut.dim() == 5 and lut.dtype == torch.float32,
        f"want lut float32 [B,Hk,m,G,C], got {lut.dtype} {tuple(lut.shape)}",
    )
    want(
        codes.dtype == torch.uint8 and codes.dim() == 4 and codes.shape[:3] == lut.shape[:3],
        f"want codes uint8 [B,Hk,m,N] with B, Hk, m of {tuple(lut.shape)}, "
        f"got {codes.dtype} {tuple(codes.shape)}",
    )
    check_lens(seq_lens, codes.shape[0], codes.shape[3])


def pq_score_torch(lut: Tensor, codes: Tensor, seq_lens: Tensor, *, scale: float) -> Scores:
    """Sum over the query heads of a KV head of softmax over the rows' approximate logits.

    lut: float32 [B,Hk,m,G,C]; codes: uint8 [B,Hk,m,N], part by part, so that one part's codes are
    contiguous; seq_lens: int32 [B], rows past it are not looked at. Formula: s_t = scale sum_j
    lut[j,g,code_j(t)]; score_t = sum_g exp(s_t - lse_g). Raises ShapeError, PQ_GEOMETRY for a code past
    the codebook of a row that is there.
    """
    check_codes(lut, codes, seq_lens)
    batch, hk, m, group, entries = lut.shape
    score = torch.full((batch, hk, codes.shape[3]), -math.inf, device=lut.device)
    lse = torch.full((batch, hk, group), -math.inf, device=lut.device)
    for b, n in enumerate(seq_lens.tolist()):
        if n == 0:
            continue
        there = codes[b, ..., :n].int()
        want(
            entries == 256 or int(there.max()) < entries,
            f"PQ_GEOMETRY: a code past the codebook of {entries} entries",
        )
        for h in range(hk):
            s = lut[b, h, 0].index_select(1, there[h, 0])
            for j in range(1, m):
                s += lut[b, h, j].index_select(1, there[h, j])
            s *= scale
            lse[b, h] = torch.logsumexp(s, 1)
            score[b, h, :n] = torch.exp(s - lse[b, h, :, None]).sum(0)
    return Scores(score, lse.flatten(1))
