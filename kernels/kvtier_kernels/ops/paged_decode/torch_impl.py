"""Paged decode on the CPU: one state per aligned chunk, merged ascending, each chunk read once.

It exists as the shipping fallback and gives the bits of the chunk path, whatever the page table. A chunk
whose pages follow each other is read in place; scattered pages are gathered into a buffer of a chunk's size,
which stays in the core's cache. It must not know who filled the pages.
"""

from __future__ import annotations

from concurrent.futures import Executor

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state, products
from kvtier_kernels.ops.chunk_attention.decode import merge_first, reads_in_place
from kvtier_kernels.ops.chunk_attention.torch_impl import ALIGN_BYTES
from kvtier_kernels.state import AttentionState, LogitFrame, identity

_GROUP = 16
_GATHERED = 2
_SHARES = 4
_LOWEST = torch.finfo(torch.float32).min


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


@torch.no_grad()
def paged_decode_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    split_tokens: int = 256,
    workers: Executor | None = None,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather.

    workers: threads that attend shares of the chunks side by side; the bits are the same. Give torch one
    thread then: those of a product as small as these only wait for each other."""
    check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
    _, hq, d = q.shape
    frame = LogitFrame(scale)
    caches = _Caches(k_cache, v_cache, split_tokens)
    answers = [identity((1, hq), d, frame)]
    for b, n in enumerate(seq_lens.tolist()):
        if n:
            pages = page_table[b, : -(-n // k_cache.shape[1])].long()
            answers.append(_one(q[b : b + 1].float(), caches, pages, n, frame, workers))
        else:
            answers.append(identity((1, hq), d, frame))
    return AttentionState(
        m=torch.cat([a.m for a in answers])[1:],
        l=torch.cat([a.l for a in answers])[1:],
        u=torch.cat([a.u for a in answers])[1:],
        frame=frame,
    )


States = tuple[Tensor, Tensor, Tensor]


def _one(
    q: Tensor, caches: _Caches, pages: Tensor, n: int, frame: LogitFrame, workers: Executor | None
) -> AttentionState:
    """One request of n >= 1 rows: q [1, Hq, d], its pages ascending."""
    scaled = (q * frame.scale)[0]
    whole = n // caches.split if caches.whole_chunks else 0
    share = max(1, whole if workers is None else -(-whole // _SHARES))

    def attend(first: int) -> list[States]:
        return caches.states(scaled, pages, first, min(whole, first + share))

    shares = range(0, whole, share)
    done = map(attend, shares) if workers is None else workers.map(attend, shares)
    parts = [states for states_of_share in done for states in states_of_share]
    for lo in range(whole * caches.split, n, caches.split):
        k, v = caches.rows(pages, lo, min(n, lo + caches.split))
        state = chunk_state(q, k, v, scale=frame.scale, q_pos0=n - 1, row_pos0=lo, frame=frame)
        parts.append((state.m, state.l, state.u))
    m, l, u = (torch.cat(part) for part in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
    m, l, u = merge_first(m, l, u)
    return AttentionState(m.unsqueeze(0), l.unsqueeze(0), u.unsqueeze(0), frame)


class _Caches:
    """K and V [N, P, Hk, d] read in chunks of `split` rows. whole_chunks: whether full chunks can be read
    without padding."""

    def __init__(self, k: Tensor, v: Tensor, split: int) -> None:
        self._k, self._v = k, v
        self.split = split
        _, self._page, self._heads, self._d = k.shape
        self._pages = split // self._page
        self.whole_chunks = reads_in_place(split, self._d)
        self._in_place = _lies_well(k) and _lies_well(v)

    def states(self, scaled: Tensor, pages: Tensor, first: int, last: int) -> list[States]:
        """(m, l [n, Hq], u [n, Hq, d]) of the query [Hq, d] over full chunks [first, last), by groups."""
        buffer = self._k.new_empty(_GATHERED * self._pages, self._page, self._heads, self._d)
        table = pages[first * self._pages : last * self._pages].view(last - first, self._pages)
        return [self._group(scaled, table[lo : lo + _GROUP], buffer) for lo in range(0, last - first, _GROUP)]

    def _group(self, scaled: Tensor, pages: Tensor, buffer: Tensor) -> States:
        hq, d = scaled.shape
        heads, count, rows = self._heads, len(pages), self.split
        group = hq // heads
        width = products.padded(group)
        packed = scaled.view(heads, group, d)
        wide = pad(packed, (0, 0, 0, width - group)) if width != group else packed
        spans = self._spans(pages)
        s = torch.empty(count, heads, width, rows)
        for lo, hi, start in spans:
            keys = self._chunks(self._k, start, pages[lo:hi], buffer)
            for k, into in zip(keys.unbind(0), s[lo:hi].unbind(0), strict=True):
                if start is not None:
                    # Reads the chunk in one sweep: the product jumps from row to row, too far for a prefetch.
                    k.sum()
                torch.bmm(wide, k.transpose(1, 2), out=into)
        m = s.amax(-1)
        p = s.sub_(m.clamp_min(_LOWEST).unsqueeze(-1)).exp_()
        l = p.sum(-1)
        u = torch.empty(count, heads, width, d)
        fast = products.agrees(width, rows, d)
        for lo, hi, start in spans:
            values = self._chunks(self._v, start, pages[lo:hi], buffer)
            if fast:
                products.value_products(p[lo:hi].numpy(), values.numpy(), out=u[lo:hi].numpy())
                continue
            for weights, v, into in zip(p[lo:hi], values, u[lo:hi], strict=True):
                into.copy_(products.torch_value_products(weights, v, rows))
        return (
            m[:, :, :group].reshape(count, hq),
            l[:, :, :group].reshape(count, hq),
            u[:, :, :group].reshape(count, hq, d),
        )

    def _spans(self, pages: Tensor) -> list[tuple[int, int, int | None]]:
        """Chunks [lo, hi) of a table [n, pages] that are read as one piece from a first page on, all of whose
        pages follow it; or, without one, that are gathered together."""
        starts = pages[:, 0].tolist()
        follow = [False] * len(starts)
        if self._in_place:
            follow = (pages[:, 1:] - pages[:, :-1] == 1).all(1).tolist()
        spans: list[tuple[int, int, int | None]] = []
        lo = 0
        while lo < len(starts):
            hi = lo + 1
            if follow[lo]:
                while hi < len(starts) and follow[hi] and starts[hi] == starts[hi - 1] + self._pages:
                    hi += 1
            else:
                while hi < min(len(starts), lo + _GATHERED) and not follow[hi]:
                    hi += 1
            spans.append((lo, hi, starts[lo] if follow[lo] else None))
            lo = hi
        return spans

    def _chunks(self, cache: Tensor, start: int | None, pages: Tensor, buffer: Tensor) -> Tensor:
        """Chunks of a table [n, pages] as float32 [n, Hk, split, d]: in place from the first page on, else
        copied to the buffer."""
        count = len(pages)
        if start is not None:
            rows = cache[start : start + count * self._pages]
        else:
            into = buffer[: count * self._pages]
            rows = torch.index_select(cache, 0, pages.flatten(), out=into).float()
        return rows.view(count, self.split, self._heads, self._d).transpose(1, 2)

    def rows(self, pages: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """K and V [hi - lo, Hk, d], copied."""
        chosen = pages[lo // self._page : -(-hi // self._page)]
        k, v = (x[chosen].flatten(0, 1)[: hi - lo].float() for x in (self._k, self._v))
        return k, v


def _lies_well(cache: Tensor) -> bool:
    """Whether pages that follow each other are one block of float32 rows that a product takes in place."""
    step = ALIGN_BYTES // 4
    _, page, heads, d = cache.shape
    return (
        cache.dtype is torch.float32
        and cache.stride(3) == 1
        and cache.stride(2) >= d
        and cache.stride(2) % step == 0
        and cache.stride(1) >= heads * cache.stride(2)
        and cache.stride(0) == page * cache.stride(1)
        and cache.data_ptr() % ALIGN_BYTES == 0
    )
