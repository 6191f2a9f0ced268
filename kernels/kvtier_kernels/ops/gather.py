"""Rows of paged tensors for the CPU paths, one list a head, as one block that products read well.

It exists because indexing with three index tensors copies element by element, where a list of whole rows is
copied row by row: five times as fast, measured with rows of 256 to 512 bytes. It must not know what a row is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_rows(cache: Tensor, page: Tensor, slot: Tensor, heads: Tensor) -> Tensor:
    """float32 [L,n,d]: row slot[i,j] of page[i,j] of KV head heads[i].

    cache: [N,P,Hk,d] of any float dtype and strides; page, slot: int64 [L,n]; heads: int64 [L].
    """
    _, tokens, hk, d = cache.shape
    if not cache.is_contiguous():
        return cache[page, slot, heads.unsqueeze(1)].float()
    flat = (page * tokens + slot) * hk + heads.unsqueeze(1)
    return cache.view(-1, d).index_select(0, flat.flatten()).view(*page.shape, d).float()


def zero_rows(rows: Tensor, keep: Tensor) -> Tensor:
    """rows [L,n,d] with those that `keep` [L,n] leaves out set to 0, in place; little work where few are."""
    gone = (~keep).nonzero(as_tuple=True)
    if gone[0].numel():
        rows[gone] = 0
    return rows


def all_heads(count: int, of: int, like: Tensor) -> Tensor:
    """int64 [count]: which of `of` heads each of `count` consecutive ones belongs to."""
    return torch.arange(count, device=like.device) * of // count
