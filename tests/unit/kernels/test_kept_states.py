"""One query over chunks of which some come to other places at each call: the bits of chunks that all stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.ops.chunk_attention.decode import Reading, decode_states
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom
from kvtier_kernels.ops.chunk_attention.keptstates import KeptStates
from kvtier_kernels.ops.chunk_attention.outputs import attend
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun, chunk_runs
from kvtier_kernels.state import LogitFrame

ROWS = 128
GEOMETRIES = [(9, 3, 64), (4, 2, 16), (16, 1, 64), (8, 8, 128), (5, 1, 80)]
# Full chunks in ascending order: whether each stays.
PLACES = {
    "one comes": [False],
    "all come": [False] * 6,
    "the oldest come": [False, False, True, True],
    "every second": [True, False, True, False, True],
    "runs of each": [True, True, False, False, False, True, False],
}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def runs_of(payloads: Sequence[Tensor]) -> list[ChunkRun]:
    return chunk_runs([one[0] for one in payloads], [one[1] for one in payloads])


class Given:
    """Chunks [2, Hk, ROWS, d], the last one open; those that come do so in one of three buffers."""

    def __init__(
        self, geometry: tuple[int, int, int], stays: Sequence[bool], scale: float, room: DecodeRoom
    ) -> None:
        self.geometry, self.stays, self.scale = geometry, stays, scale
        self.made = torch.Generator().manual_seed(len(stays))
        _, heads, d = geometry
        self.payloads = [torch.randn(2, heads, ROWS, d, generator=self.made) for _ in range(len(stays) + 1)]
        self.buffers = [torch.full((2, heads, ROWS, d), torch.nan) for _ in range(3)]
        parts: list[ChunkRun | int] = []
        for stay, payload in zip(stays, self.payloads, strict=False):
            parts += runs_of([payload]) if stay else [1]
        compiled = library()
        assert compiled is not None
        [open_run] = runs_of(self.payloads[-1:])
        self.kept = KeptStates(compiled, room, parts, open_run, scale)
        self.coming = [at for at, stay in enumerate(stays) if not stay]

    def query(self) -> Tensor:
        hq, _, d = self.geometry
        return torch.randn(1, hq, d, generator=self.made)

    def ask(self, q: Tensor, visible: int, together: int = 2) -> Tensor:
        self.kept.begin(q, visible)
        for first in range(0, len(self.coming), together):
            some = self.coming[first : first + together]
            places = [self.buffers[(first + visible + at) % 3] for at in range(len(some))]
            for place, chunk in zip(places, some, strict=True):
                place.copy_(self.payloads[chunk])
            self.kept.take(first, [run for place in places for run in runs_of([place])])
            for place in places:
                place.fill_(torch.nan)
        return self.kept.output()

    def want(self, q: Tensor, visible: int) -> Tensor:
        whole = [Reading(run, (0,), ROWS) for run in runs_of(self.payloads[:-1])]
        return attend(q * self.scale, [*whole, Reading(runs_of(self.payloads[-1:])[0], (0,), visible)])


@pytest.mark.parametrize("stays", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_wherever_chunks_come_to_the_bits_are_those_of_chunks_that_stay(
    geometry: tuple[int, int, int], stays: list[bool]
) -> None:
    given = Given(geometry, stays, 80**-0.5, DecodeRoom(*geometry, ROWS, queries=8 + 1))
    for visible, together in ((1, 1), (17, 3), (64, 2), (ROWS, 1)):
        q = given.query()
        assert same(given.ask(q, visible, together), given.want(q, visible))


@pytest.mark.parametrize("stays", PLACES.values(), ids=PLACES.keys())
def test_states_that_can_be_looked_at_are_those_of_their_chunks_alone(stays: list[bool]) -> None:
    geometry = GEOMETRIES[0]
    given = Given(geometry, stays, 0.125, DecodeRoom(*geometry, ROWS, queries=16))
    q = given.query()
    given.ask(q, 5)
    for at, chunk in enumerate(given.coming):
        payload = given.payloads[chunk]
        want = decode_states(q, [payload[0]], [payload[1]], LogitFrame(0.125))
        m, l, u = (torch.from_numpy(part) for part in given.kept.states(at, at + 1))
        assert same(m, want.m) and same(l, want.l) and same(u, want.u)


def test_states_of_chunks_that_are_no_neighbours_are_not_given_as_one() -> None:
    geometry = GEOMETRIES[0]
    given = Given(geometry, [False, True, False, False], 0.125, DecodeRoom(*geometry, ROWS, queries=8))
    given.ask(given.query(), 1)
    assert given.kept.states(1, 3)[0].shape == (2, 1, 9)
    with pytest.raises(ValueError, match="no neighbours"):
        given.kept.states(0, 2)


def test_a_room_for_fewer_states_is_refused() -> None:
    geometry = GEOMETRIES[1]
    Given(geometry, [False, False], 1.0, DecodeRoom(*geometry, ROWS, queries=4))
    with pytest.raises(ValueError, match="in a room of 3"):
        Given(geometry, [False, False], 1.0, DecodeRoom(*geometry, ROWS, queries=3))


def test_calls_that_share_a_room_do_not_mix() -> None:
    geometry = GEOMETRIES[0]
    room = DecodeRoom(*geometry, ROWS, queries=8)
    two = [Given(geometry, [False, True], 0.125, room), Given(geometry, [True] * 2 + [False] * 3, 0.5, room)]
    for visible in range(1, 6):
        for given in two:
            q = given.query()
            assert same(given.ask(q, visible), given.want(q, visible))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("chunk", [0, 1], ids=["comes", "stays"])
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_what_is_not_finite_is_as_it_is_in_any_call(part: int, chunk: int, value: float) -> None:
    geometry = GEOMETRIES[0]
    given = Given(geometry, [False, True, False], 0.125, DecodeRoom(*geometry, ROWS, queries=8))
    # Behind the query: it is not read.
    given.payloads[-1][part, :, 5:] = value
    q = given.query()
    assert torch.isfinite(given.ask(q, 5)).all()
    given.payloads[chunk][part, 1, 7, 3] = value
    got, want = given.ask(q, 5), given.want(q, 5)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_calls_in_parts_of_a_room_may_overlap_and_a_part_that_is_too_small_is_refused() -> None:
    """Their chunks come in any order, here the last first."""
    geometry = GEOMETRIES[0]
    room = DecodeRoom(*geometry, ROWS, queries=32)
    alone = DecodeRoom(*geometry, ROWS, queries=8)
    some = [Given(geometry, stays, 0.125, alone) for stays in PLACES.values() if len(stays) < 7]
    queries = [one.query() for one in some]
    first = 0
    for one, q in zip(some, queries, strict=True):
        one.kept.begin(q, 9, room.part(first, one.kept.least))
        first += one.kept.least
    for at in reversed(range(6)):
        for one in some:
            if at < len(one.coming):
                one.kept.take(at, runs_of([one.payloads[one.coming[at]]]))
    for one, q in zip(some, queries, strict=True):
        assert same(one.kept.output(), one.want(q, 9))
    with pytest.raises(ValueError, match="in a room of"):
        some[0].kept.begin(queries[0], 1, room.part(0, some[0].kept.least - 1))
    for at, count in ((-1, 2), (0, 33), (31, 2), (3, 0)):
        with pytest.raises(ValueError, match="of a room of 32"):
            room.part(at, count)
