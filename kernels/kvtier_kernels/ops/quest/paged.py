"""Quest's scores for a batch over a pool of pages, on the CPU: one gather and two products a request.

It must not know which pages are mandatory or how many may be read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.gather import all_heads, head_rows

REDUCTIONS = ("max", "none")


def check_inputs(
    q: Tensor, kmin: Tensor, kmax: Tensor, page_table: Tensor, n_pages: Tensor, reduce: str
) -> None:
    """Shapes, dtypes and, on the CPU, lengths. Raises ShapeError."""
    if q.dim() != 3 or kmin.dim() != 3 or kmin.shape != kmax.shape or kmin.shape[2] != q.shape[2]:
        raise ShapeError(
            f"want q [B,Hq,d], kmin and kmax [N,Hk,d], got {tuple(q.shape)}, {tuple(kmin.shape)}, "
            f"{tuple(kmax.shape)}"
        )
    batch, hq, _ = q.shape
    hk = kmin.shape[1]
    if hk == 0 or hq % hk:
        raise ShapeError(f"{hq} query heads do not divide over {hk} KV heads")
    if page_table.dim() != 2 or page_table.shape[0] != batch or n_pages.shape != (batch,):
        raise ShapeError(f"{batch} requests, page_table {tuple(page_table.shape)}, {tuple(n_pages.shape)}")
    if page_table.dtype != torch.int32 or n_pages.dtype != torch.int32:
        raise ShapeError(f"page_table and n_pages are int32, got {page_table.dtype}, {n_pages.dtype}")
    if reduce not in REDUCTIONS:
        raise ShapeError(f"reduce is one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    if (
        n_pages.device.type == "cpu"
        and batch
        and not 0 <= int(n_pages.min()) <= int(n_pages.max()) <= page_table.shape[1]
    ):
        raise ShapeError(f"n_pages must lie in [0, {page_table.shape[1]}]")
    if n_pages.device.type == page_table.device.type == "cpu" and page_table.numel():
        there = torch.arange(page_table.shape[1]) < n_pages.unsqueeze(1)
        highest = int(page_table.masked_fill(~there, -1).max())
        if highest >= kmin.shape[0]:
            raise ShapeError(f"page {highest} of {kmin.shape[0]}")


def quest_score_paged_torch(
    q: Tensor, kmin: Tensor, kmax: Tensor, page_table: Tensor, n_pages: Tensor, *, reduce: str = "max"
) -> Tensor:
    """See the package. Inputs of any float dtype, widened to float32 after the gather."""
    check_inputs(q, kmin, kmax, page_table, n_pages, reduce)
    batch, hq, d = q.shape
    hk, width = kmin.shape[1], page_table.shape[1]
    out = torch.full((batch, hk if reduce == "max" else hq, width), -torch.inf)
    for b, n in enumerate(n_pages.tolist()):
        where = (page_table[b, :n] >= 0).nonzero().flatten()
        pages = page_table[b, where].long().expand(hk, -1)
        groups = q[b].float().view(hk, hq // hk, d)
        low, high = (
            head_rows(x.unsqueeze(1), pages, torch.zeros_like(pages), all_heads(hk, hk, q)).transpose(1, 2)
            for x in (kmin, kmax)
        )
        upper = torch.bmm(groups.clamp_min(0), high)
        upper += torch.bmm(groups.clamp_max(0), low)
        out[b, :, where] = upper.amax(1) if reduce == "max" else upper.view(hq, -1)
    return out
