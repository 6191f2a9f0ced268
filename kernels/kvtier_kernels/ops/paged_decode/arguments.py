"""What every implementation of paged decode is given: the checks, the rows that a query sees, and the room
for the answer.

Why it exists: a window and a cap must mean one thing, whoever computes. It must not know how rows are
attended.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.state import LogitFrame, States

LEAST_CAP, MOST_CAP = 2.0**-64, 2.0**64
"""Between these no quotient or product of a logit and its cap leaves float32 where the answer does not."""


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    split_tokens: int,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Shapes, dtypes, options, lengths and page ids of every implementation. Raises ShapeError.

    Lengths and ids on a GPU are not looked at: that would wait for the device on every call.
    """
    check_shapes(q, k_cache, v_cache, page_table, seq_lens, split_tokens, window, softcap)
    batch, page = q.shape[0], k_cache.shape[1]
    if (
        batch
        and seq_lens.device.type == "cpu"
        and (int(seq_lens.min()) < 0 or int(seq_lens.max()) > page_table.shape[1] * page)
    ):
        raise wrong_lengths(page_table.shape[1] * page)
    if batch and seq_lens.device.type == page_table.device.type == "cpu":
        # Pages are read by their addresses, and one that is none would be foreign memory.
        first, ends = torch.arange(page_table.shape[1]) * page, seq_lens.unsqueeze(1)
        mapped = first < ends
        if window is not None:
            oldest = ends - min(window, page_table.shape[1] * page)
            mapped = torch.maximum(first, oldest) < torch.minimum(first + page, ends)
        ids = page_table[mapped]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= k_cache.shape[0]):
            raise wrong_pages(k_cache.shape[0])


def check_shapes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    split_tokens: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """`check_inputs` without a look at lengths and ids."""
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
    if window is not None and (type(window) is not int or window < 0):
        raise ShapeError(f"window is None or an int, 0 rows or more, not {window!r}")
    if softcap is not None and (
        isinstance(softcap, bool)
        or not isinstance(softcap, int | float)
        or not LEAST_CAP <= softcap <= MOST_CAP
    ):
        raise ShapeError(f"softcap is None or a number from 2^-64 to 2^64, above 0, not {softcap!r}")


def wrong_lengths(most: int) -> ShapeError:
    return ShapeError(f"seq_lens must lie in [0, {most}]")


def wrong_pages(pool: int) -> ShapeError:
    return ShapeError(f"page ids of rows must lie in [0, {pool})")


def room(out: States | None, q: Tensor) -> States:
    """m, l [B,Hq] and u [B,Hq,d] for the answer, not initialised: the caller's, or new. Raises ShapeError."""
    batch, hq, d = q.shape
    if out is None:
        m, l = (q.new_empty((batch, hq), dtype=torch.float32) for _ in range(2))
        return m, l, q.new_empty((batch, hq, d), dtype=torch.float32)
    shapes = (batch, hq), (batch, hq), (batch, hq, d)
    for name, x, shape in zip("mlu", out, shapes, strict=True):
        if x.shape != shape or x.dtype is not torch.float32 or x.device != q.device or not x.is_contiguous():
            raise ShapeError(
                f"out's {name} is float32 {list(shape)}, contiguous, on {q.device}, not {x.dtype} "
                f"{list(x.shape)} with strides {list(x.stride())} on {x.device}"
            )
    return out


def frame_of(scale: float, softcap: float | None) -> LogitFrame:
    return LogitFrame(scale, softcap=None if softcap is None else float(softcap))


def oldest_row(n: int, window: int | None) -> int:
    """The first of n rows that the query sees: it stands at the last one. n: none."""
    return 0 if window is None else max(0, n - window)


def spans(n: int, split: int, window: int | None) -> Iterator[tuple[int, int]]:
    """[lo, hi) of the rows that the query sees of each chunk in which it sees any, ascending. Chunks begin at
    multiples of `split` whatever the window is."""
    oldest = oldest_row(n, window)
    if oldest < n:
        for lo in range(oldest // split * split, n, split):
            yield max(lo, oldest), min(n, lo + split)


def gathered(cache: Tensor, ids: Tensor, lo: int, hi: int) -> Tensor:
    """float32 [hi - lo, Hk, d]: a copy of these rows of one request. ids: int32 [X]."""
    page = cache.shape[1]
    first = lo // page
    # Whole pages at once: with ids between brackets they would be copied element by element.
    rows = cache.index_select(0, ids[first : -(-hi // page)]).flatten(0, 1)
    return rows[lo - first * page : hi - first * page].float()
