"""Boxes of paged keys over a pool's life: pages filled in any pieces, given up, used again by others."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier_kernels.ops.page_minmax import (
    page_minmax_append_torch,
    page_minmax_build_torch,
    page_minmax_torch,
)

PAGES, TOKENS, HEADS, DIM = 5, 4, 2, 16
PAGE = st.integers(0, PAGES - 1)


class PoolOfPages(RuleBasedStateMachine):
    """The model: how many rows of each page count. A box is that of these rows, whatever was there before."""

    @initialize(seed=st.integers(0, 2**16))
    def empty(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.k = torch.full((PAGES, TOKENS, HEADS, DIM), torch.nan)
        self.kmin, self.kmax = (torch.full((PAGES, HEADS, DIM), torch.nan) for _ in range(2))
        self.sealed = torch.zeros(PAGES, dtype=torch.uint8)
        self.rows: dict[int, int] = {}

    def write(self, page: int, first: int, count: int) -> None:
        self.k[page, first : first + count] = torch.randn(count, HEADS, DIM, generator=self.g)

    @rule(pages=st.sets(PAGE, min_size=1), count=st.integers(0, TOKENS))
    def use_again(self, pages: set[int], count: int) -> None:
        for page in pages:
            self.k[page] = torch.nan
            self.write(page, 0, count)
            self.rows[page] = count
        ids = torch.tensor(sorted(pages), dtype=torch.int32)
        filled = torch.full_like(ids, count)
        page_minmax_build_torch(self.k, ids, filled, self.kmin, self.kmax, self.sealed)

    @rule()
    def one_row_each(self) -> None:
        ids = [page for page, rows in self.rows.items() if rows < TOKENS]
        for page in ids:
            self.write(page, self.rows[page], 1)
        slots = torch.tensor([self.rows[page] for page in ids], dtype=torch.int32)
        page_minmax_append_torch(
            self.k, torch.tensor(ids, dtype=torch.int32), slots, self.kmin, self.kmax, self.sealed
        )
        self.rows |= {page: self.rows[page] + 1 for page in ids}

    @rule(page=PAGE, count=st.integers(1, TOKENS))
    def several_rows(self, page: int, count: int) -> None:
        first = self.rows.get(page, 0)
        count = min(count, TOKENS - first)
        self.write(page, first, count)
        ids, lo, n = (torch.tensor([x, -1], dtype=torch.int32) for x in (page, first, count))
        page_minmax_torch(self.k, ids, lo, n, self.kmin, self.kmax, self.sealed)
        self.rows[page] = first + count

    @invariant()
    def boxes_are_those_of_the_rows(self) -> None:
        for page, rows in self.rows.items():
            assert bool(self.sealed[page]) == (rows == TOKENS)
            if rows:
                assert torch.equal(self.kmin[page], self.k[page, :rows].amin(0))
                assert torch.equal(self.kmax[page], self.k[page, :rows].amax(0))
            else:
                assert bool((self.kmin[page] == torch.inf).all() and (self.kmax[page] == -torch.inf).all())


PoolOfPages.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
TestPoolOfPages = PoolOfPages.TestCase
