"""Sparse paged decode on the CPU: one state for each split of a list, merged ascending, rows read where they
are.

All units give the bits of paged decode. It must not know how units were chosen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.compiled.layout import LANES
from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.chunk_attention.decode import no_rows
from kvtier_kernels.ops.chunk_attention.jobs import Integers, readable
from kvtier_kernels.ops.chunk_attention.listed import Floats, Lists, attend_lists
from kvtier_kernels.state import AttentionState, LogitFrame, States


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
    """See the package. Rows are read where their pages lie; those of half precision, or of a last dimension
    that is no multiple of 16, from a copy in float32. `max_units` is there for the signature: lists are
    looked at."""
    lists = check_inputs(
        q, k_cache, v_cache, page_table, indptr, units, last_unit_len, log_weight, unit_tokens, max_units
    )
    if split_tokens < 1:
        raise ShapeError(f"a split of {split_tokens} tokens")
    batch, hq, d = q.shape
    totals = no_rows(batch, hq, d)
    chosen = _Chosen(indptr, units, last_unit_len, log_weight, unit_tokens)
    for b in range(batch):
        tokens, counts, bias = chosen.of(slice(b * lists, (b + 1) * lists))
        if len(tokens):
            scaled = q[b].float() * scale
            own = totals[0][b], totals[1][b], totals[2][b]
            where = (
                page_table[b].numpy()[tokens // k_cache.shape[1]].astype(np.int64),
                tokens % k_cache.shape[1],
            )
            _request(scaled, k_cache, v_cache, where, (counts, bias, split_tokens), own)
    return AttentionState(*totals, frame=LogitFrame(scale), estimated=log_weight is not None)


class _Chosen:
    """Lists of units as lists of tokens."""

    def __init__(
        self, indptr: Tensor, units: Tensor, last: Tensor, log_weight: Tensor | None, unit_tokens: int
    ) -> None:
        self._indptr, self._last = indptr.numpy().astype(np.int64), last.numpy()
        self._units = units.numpy().astype(np.int64)
        self._weight = None if log_weight is None else log_weight.numpy()
        self._size = unit_tokens

    def of(self, lists: slice) -> tuple[Integers, Integers, Floats | None]:
        """Tokens of some lists, one after the other, how many are each one's, and their weights."""
        starts, ends = self._indptr[:-1][lists], self._indptr[1:][lists]
        units = self._units[starts[0] : ends[-1]]
        take = np.where(units >= 0, self._size, 0)
        some = ends > starts
        at = ends[some] - 1 - starts[0]
        take[at] = np.where(units[at] >= 0, self._last[lists][some], 0)
        behind = np.cumsum(take)
        tokens = np.repeat(units * self._size - (behind - take), take) + np.arange(take.sum())
        upto = np.concatenate(([0], behind))
        counts = upto[ends - starts[0]] - upto[starts - starts[0]]
        weight = self._weight
        return tokens, counts, None if weight is None else np.repeat(weight[starts[0] : ends[-1]], take)


def _request(
    scaled: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    where: tuple[Integers, Integers],
    listed: tuple[Integers, Floats | None, int],
    totals: States,
) -> None:
    """One request's q [Hq,d] over tokens at (page, place in it), list after list."""
    counts, bias, split = listed
    if where[0].min() < 0 or where[0].max() >= k_cache.shape[0]:
        # Rows are read by their addresses, and one that is none would be foreign memory.
        raise ShapeError(f"page ids of rows must lie in [0, {k_cache.shape[0]})")
    if readable(k_cache) and readable(v_cache):
        keys, values = (where[0] * x.stride(0) + where[1] * x.stride(1) for x in (k_cache, v_cache))
        lists = Lists(keys, values, counts, bias, split)
        attend_lists(scaled.contiguous(), k_cache, v_cache, lists, totals)
        return
    k, v = (_copied(x, where, counts) for x in (k_cache, v_cache))
    rows = np.arange(len(where[0])) * k.stride(0)
    d = scaled.shape[1]
    wide = totals[2] if k.shape[2] == d else totals[2].new_zeros(len(scaled), k.shape[2])
    query = pad(scaled, (0, k.shape[2] - d)).contiguous()
    attend_lists(query, k, v, Lists(rows, rows, counts, bias, split), (totals[0], totals[1], wide))
    totals[2].copy_(wide[:, :d])


def _copied(x: Tensor, where: tuple[Integers, Integers], counts: Integers) -> Tensor:
    """float32 [n, heads, d], d a multiple of 16: all heads of one list for all, else the list's own."""
    page, inside = (torch.from_numpy(part) for part in where)
    heads = x.shape[2]
    if len(counts) == 1:
        rows = x[page, inside]
    else:
        own = np.repeat(np.arange(heads), len(counts) // heads)
        rows = x[page, inside, torch.from_numpy(np.repeat(own, counts))].unsqueeze(1)
    return pad(rows.float(), (0, -x.shape[3] % LANES)).contiguous()
