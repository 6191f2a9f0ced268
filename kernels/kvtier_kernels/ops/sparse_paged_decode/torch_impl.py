"""Sparse paged decode on the CPU: one gather and one softmax a request over all its lists at once.

It must not know how units were chosen. Lists of a request are padded to its longest; padding is row 0 of
the pool, read as zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.gather import all_heads, head_rows, zero_rows
from kvtier_kernels.state import AttentionState, LogitFrame, identity

_LOWEST = torch.finfo(torch.float32).min


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    indptr: Tensor,
    units: Tensor,
    last_unit_len: Tensor,
    log_weight: Tensor | None,
    unit_tokens: int,
    max_units: int | None,
) -> int:
    """Shapes, dtypes and, on the CPU, ids; returns S, the lists of a request. Raises ShapeError."""
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ShapeError(
            f"want q [B,Hq,d], caches [N,P,Hk,d], got {tuple(q.shape)}, {tuple(k_cache.shape)}, "
            f"{tuple(v_cache.shape)}"
        )
    batch, hq, d = q.shape
    hk, kd = k_cache.shape[2:]
    if kd != d or hk == 0 or hq % hk:
        raise ShapeError(f"q has {hq} heads of {d}, the cache {hk} of {kd}")
    ids = {"page_table": page_table, "indptr": indptr, "units": units, "last_unit_len": last_unit_len}
    if wrong := [name for name, x in ids.items() if x.dtype != torch.int32]:
        raise ShapeError(f"{', '.join(wrong)} must be int32")
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise ShapeError(f"{batch} requests, page_table {tuple(page_table.shape)}")
    lists = last_unit_len.numel()
    if indptr.shape != (lists + 1,) or units.dim() != 1 or unit_tokens < 1:
        raise ShapeError(
            f"{lists} lists of units of {unit_tokens}, indptr {tuple(indptr.shape)}, "
            f"units {tuple(units.shape)}"
        )
    if batch and lists not in (batch, batch * hk, batch * hq):
        raise ShapeError(f"{lists} lists for {batch} requests: want 1, {hk} or {hq} lists each")
    if log_weight is not None and (log_weight.shape != units.shape or log_weight.dtype != torch.float32):
        raise ShapeError(
            f"log_weight is float32 like units, got {log_weight.dtype} {tuple(log_weight.shape)}"
        )
    if units.device.type == "cpu":
        if max_units is not None and lists and int(indptr.diff().max()) > max_units:
            raise ShapeError(f"a list of {int(indptr.diff().max())} units, max_units is {max_units}")
        _check_ids(page_table, k_cache, indptr, units, last_unit_len, unit_tokens)
    return lists // batch if batch else 1


def _check_ids(
    page_table: Tensor, k_cache: Tensor, indptr: Tensor, units: Tensor, last_unit_len: Tensor, tokens: int
) -> None:
    steps = indptr.diff()
    if int(indptr[0]) != 0 or int(indptr[-1]) > units.numel() or bool((steps < 0).any()):
        raise ShapeError(f"indptr must ascend from 0 to at most {units.numel()}")
    if bool(((last_unit_len < 0) | (last_unit_len > tokens)).any()):
        raise ShapeError(f"last_unit_len must lie in [0, {tokens}]")
    used = units[: int(indptr[-1])].long()
    read = torch.full_like(used, tokens)
    some = steps > 0
    read[indptr[1:][some].long() - 1] = last_unit_len[some].long()
    ends = torch.where((used >= 0) & (read > 0), used * tokens + read, 0)
    room = page_table.shape[1] * k_cache.shape[1]
    if ends.numel() and int(ends.max()) > room:
        raise ShapeError(f"a unit ends at token {int(ends.max())}, past the table's {room}")


def sparse_paged_decode_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    indptr: Tensor,
    units: Tensor,
    last_unit_len: Tensor,
    log_weight: Tensor | None,
    *,
    scale: float,
    unit_tokens: int,
    max_units: int | None = None,
    split_tokens: int = 256,
) -> AttentionState:
    """See the package. Inputs of any float dtype, widened to float32 after the gather. `max_units` and
    `split_tokens` are there for the signature: lists are looked at, and not split."""
    lists = check_inputs(
        q, k_cache, v_cache, page_table, indptr, units, last_unit_len, log_weight, unit_tokens, max_units
    )
    batch, hq, d = q.shape
    frame = LogitFrame(scale)
    if not batch:
        return replace(identity((0, hq), d, frame), estimated=log_weight is not None)
    answers = [
        _request(
            q[b].float() * scale,
            k_cache,
            v_cache,
            page_table[b],
            indptr[b * lists : (b + 1) * lists + 1],
            units,
            last_unit_len[b * lists : (b + 1) * lists],
            log_weight,
            unit_tokens,
        )
        for b in range(batch)
    ]
    m, l, u = (torch.stack(x) for x in zip(*answers, strict=True))
    return AttentionState(m=m, l=l, u=u, frame=frame, estimated=log_weight is not None)


def _request(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    indptr: Tensor,
    units: Tensor,
    last_unit_len: Tensor,
    log_weight: Tensor | None,
    unit_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [Hq], u [Hq,d]) of one request; q is scaled."""
    page, hk = k_cache.shape[1:3]
    hq, d = q.shape
    first, end = indptr[:-1].long(), indptr[1:].long()
    width = int((end - first).max()) * unit_tokens
    if not width:
        return q.new_full((hq,), -torch.inf), q.new_zeros(hq), q.new_zeros(hq, d)
    slot = torch.arange(width)
    place = first[:, None] + slot // unit_tokens
    there = place < end[:, None]
    place = torch.where(there, place, 0)
    unit, inside = units[place].long(), slot % unit_tokens
    there &= (unit >= 0) & ((place < end[:, None] - 1) | (inside < last_unit_len[:, None]))
    token = torch.where(there, unit * unit_tokens + inside, 0)
    heads = hk if there.shape[0] <= hk else hq
    of_list = all_heads(heads, there.shape[0], q)
    seen, token = there[of_list], token[of_list]
    where = (pages[token // page].long(), token % page, all_heads(heads, hk, q))
    k, v = (zero_rows(head_rows(x, *where), seen) for x in (k_cache, v_cache))
    s = torch.bmm(q.view(heads, hq // heads, d), k.transpose(1, 2))
    if log_weight is not None:
        s += torch.where(there, log_weight[place], 0.0)[of_list].unsqueeze(1)
    s = s.masked_fill_(~seen.unsqueeze(1), -torch.inf)
    m = s.amax(-1)
    p = torch.exp(s - m.clamp_min(_LOWEST).unsqueeze(-1))
    return m.view(hq), p.sum(-1).view(hq), torch.bmm(p, v).view(hq, d)
