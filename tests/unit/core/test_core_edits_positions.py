"""Views of rows: the specification's worked numbers (AKV-01 to 10 and 13 to 21), and any edits against a list
of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier_core.appends import LayerState, Session
from kvtier_core.cost import ideal_compute_seconds
from kvtier_core.edits import checks
from kvtier_core.edits.history import record
from kvtier_core.edits.requests import Drop
from kvtier_core.errors import CoreError, Reason
from kvtier_core.positions import UNEDITED, PositionView, canonical_ranges
from kvtier_core.receipts import SessionSpec
from kvtier_core.rope import RopeTable, rope_table
from kvtier_core.units import FlopPerSecond, FlopPerToken
from kvtier_crds.canonical import Parameters
from kvtier_crds.manifest import Model, PositionContract, RopeScaling
from tests.unit.core.blockkey_cases import binding
from tests.unit.core.builders import cpu, manifest


def dropped(frontier: int, *ranges: tuple[int, int]) -> PositionView:
    return UNEDITED.drop(frontier, canonical_ranges(ranges))


def positions(view: PositionView, frontier: int, *rows: int) -> list[int | None]:
    return [view.position_of(frontier, row) for row in rows]


def test_akv_01_six_blocks_of_sixteen_are_96_positions() -> None:
    view = dropped(256, *((16 * block, 16 * block + 16) for block in range(6))).compact(256)
    assert [part.delta for part in view.segments] == [-96]


def test_akv_02_and_03_a_drop_of_2500() -> None:
    hidden = dropped(4000, (1000, 3500))
    view = hidden.compact(4000)
    assert [part.delta for part in view.segments] == [0, -2500]
    assert view.count(4000) == view.next_position(4000) == 1500
    assert positions(view, 4000, 999, 1000, 3499, 3500, 3999) == [999, None, None, 1000, 1499]
    # Until they are repositioned, nobody has moved.
    assert positions(hidden, 4000, 999, 1000, 3499, 3500, 3999) == [999, None, None, 3500, 3999]
    assert hidden.next_position(4000) == 4000


def test_akv_04_two_drops() -> None:
    view = dropped(50, (10, 20), (30, 35)).compact(50)
    assert positions(view, 50, 9, 20, 29, 35, 40) == [9, 10, 19, 20, 25]


def test_akv_05_what_follows_packs_behind_what_is_left() -> None:
    view = dropped(1152, (256, 1024)).compact(1152)
    assert positions(view, 1152, 1024, 1151) == [256, 383]


def plain(theta: float, half: int, interleaved: bool = True) -> RopeTable:
    exponents = torch.arange(half, dtype=torch.float64) / half
    return RopeTable(theta**-exponents, interleaved)


def normal(seed: int) -> torch.Tensor:
    return torch.randn(128, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_akv_06_and_07_turns_add_up_and_both_sides_may_shift() -> None:
    table, k, q = plain(1e4, 64), normal(1), normal(2)
    moved = table.turned(table.turned(k, 3600), -2500)
    assert (moved - table.turned(k, 1100)).abs().max() < 1e-9
    before = table.turned(q, 4000) @ table.turned(k, 3600)
    assert abs(before - table.turned(q, 1500) @ moved) < 1e-8
    # The query is turned instead of the key.
    assert abs(table.turned(table.turned(q, 1500), 2500) @ table.turned(k, 3600) - before) < 1e-8


def test_akv_08_by_hand() -> None:
    turned = plain(1.0, 1).turned(torch.tensor([1.0, 0.0], dtype=torch.float64), -4)
    assert turned.tolist() == pytest.approx([-0.653644, 0.756802], abs=1e-6)


def test_akv_09_pairings_differ() -> None:
    k = normal(3)
    halves = torch.cat((k[0::2], k[1::2]))
    interleaved, half_split = plain(1e4, 64).turned(k, 96), plain(1e4, 64, False).turned(k, 96)
    assert (interleaved - half_split).abs().max() > 0.1
    # The same pairs in the other order are the same turn.
    same = plain(1e4, 64, False).turned(halves, 96)
    assert torch.equal(torch.cat((interleaved[0::2], interleaved[1::2])), same)


class Flops(TorchDispatchMode):
    """Counts numbers that are multiplied, added or subtracted, of tensors as large as `of`."""

    def __init__(self, of: int) -> None:
        super().__init__()
        self.of, self.count = of, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        arithmetic = func._schema.name in ("aten::mul", "aten::add", "aten::sub")
        if arithmetic and out.numel() == self.of:
            self.count += out.numel()
        return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_akv_13_a_turn_is_six_operations_a_pair(interleaved: bool) -> None:
    table, keys = plain(1e4, 64, interleaved), torch.randn(50, 128, dtype=torch.float16)
    pairs = keys.numel() // 2
    with Flops(pairs) as counted:
        table.turned(keys, -96)
    assert counted.count / pairs == 6
    # Nothing is written back, so that bytes are those of the keys alone.
    assert counted.count / keys.nbytes == 1.5


def test_akv_14_what_a_prefill_of_32k_takes_at_least() -> None:
    attention = 2 * 80 * 8192 * 32_000
    seconds = ideal_compute_seconds(32_000, FlopPerToken(2 * 70e9 + attention), FlopPerSecond.tera(8 * 989))
    assert seconds == pytest.approx(0.736, rel=2e-3)


def test_akv_10_a_half_of_hidden_rows() -> None:
    view = dropped(64, *((first, first + 4) for first in range(0, 64, 8)))
    assert 1 - view.count(64) / 64 == 0.5


# Streams of equal tokens: what was computed under another view is not shared.

A, B = 4000, 100
WITHOUT = "sha256:base"


class Histories:
    """Sessions of the same tokens, by what production keeps of their edits: the producers of their rows."""

    def __init__(self) -> None:
        self.digests = [WITHOUT]

    def _intern(self, found: str) -> int:
        if found not in self.digests:
            self.digests.append(found)
        return self.digests.index(found)

    def of(self, *script: int | Drop) -> tuple[list[str], list[tuple[int, str]]]:
        """So many rows appended, or drops, in turn. The producer of each row, and each edit with its row."""
        session = Session(
            number=1,
            session_id="s",
            generation=1,
            spec=SessionSpec("t", 1.0, 0),
            source=binding(),
            layers=[LayerState(open_tier=0)],
            open_grant=0,
            producers=[(0, 0)],
        )
        rows = 0
        for part in script:
            if isinstance(part, int):
                rows += part
                continue
            view = checks.dropped(session.positions, rows, part)
            if view != session.positions:
                record(session, view, rows, self._intern, self.digests.__getitem__)
        edits = [(point.row, self.digests[point.producer]) for point in session.edits]
        return [self.digests[session.producer_at(row)] for row in range(rows)], edits

    def shared(self, stored: Sequence[int | Drop], asked: Sequence[int | Drop]) -> tuple[int, int]:
        """(rows, edits) of the longest common prefix: what of `stored` may serve `asked`."""
        (left, left_edits), (right, right_edits) = self.of(*stored), self.of(*asked)
        rows = _alike(left, right)
        same = _alike(left_edits, right_edits)
        return rows, sum(row < rows for row, _ in left_edits[:same])


def _alike(left: Sequence[object], right: Sequence[object]) -> int:
    found = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        found += 1
    return found


STORED = (A, Drop(((1000, 3500),)), B)
STREAMS = [
    pytest.param((A, Drop(((1000, 3500),)), 50), (4050, 1), id="AKV-15-same-drop-shorter-tail"),
    pytest.param((A, B), (4000, 0), id="AKV-16-no-drop"),
    pytest.param((A, Drop(((1000, 3400),)), B), (4000, 0), id="AKV-17-another-end"),
    pytest.param((A, Drop(((2000, 3500),)), Drop(((1000, 2000),)), B), (4100, 1), id="AKV-18-two-touching"),
    pytest.param((A, 10, Drop(((1000, 3500),)), B - 10), (4000, 0), id="AKV-19-later"),
    pytest.param((A, Drop(((1000, 3500),)), Drop(()), B), (4100, 1), id="empty-drops-are-none"),
]


@pytest.mark.parametrize(("asked", "wanted"), STREAMS)
def test_streams_match_up_to_the_first_drop_that_differs(
    asked: tuple[int | Drop, ...], wanted: tuple[int, int]
) -> None:
    assert Histories().shared(STORED, asked) == wanted


def test_akv_20_and_21_tokens_alone_would_match_too_much() -> None:
    histories, plainly = Histories(), (A, B)
    tokens = [list(range(len(histories.of(*one)[0]))) for one in (STORED, plainly)]
    assert _alike(*tokens) == 4100
    assert histories.shared(STORED, plainly) == (4000, 0)
    # Where both are kept, each has a whole answer, and it is its own.
    kept = (STORED, plainly)
    assert [max(histories.shared(one, asked) for one in kept) for asked in (plainly, STORED)] == [
        (4100, 0),
        (4100, 1),
    ]


# Any edits.


class Listed:
    """Rows as a list of [row, stored, position]; hidden ones are not in it."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.frontier = 0
        self.next = 0

    def append(self, count: int) -> None:
        for _ in range(count):
            self.rows.append((self.frontier, self.next, self.next))
            self.frontier, self.next = self.frontier + 1, self.next + 1


edits = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 30), st.integers(1, 9)),
    st.tuples(st.just("drop2"), st.integers(0, 30), st.integers(1, 9)),
    st.tuples(st.just("compact"), st.just(0), st.just(0)),
    st.tuples(st.just("move"), st.integers(0, 30), st.integers(-3, 9)),
    st.tuples(st.just("truncate"), st.integers(0, 30), st.just(0)),
)


@given(st.lists(edits, max_size=14))
@settings(max_examples=400, deadline=None)
def test_any_edits_are_those_of_a_list(script: list[tuple[str, int, int]]) -> None:
    view, listed = UNEDITED, Listed()
    for kind, at, by in script:
        at = min(at, listed.next)
        before = view
        if kind == "append":
            listed.append(at or 1)
        elif kind in ("drop", "drop2"):
            ranges = [(at, min(at + by, listed.next))]
            if kind == "drop2":
                ranges = [(max(0, at - 2), min(at + 1, listed.next)), *ranges, ranges[0]]
            ranges = [item for item in ranges if item[0] < item[1]]
            view = view.drop(listed.frontier, canonical_ranges(ranges))
            listed.rows = [row for row in listed.rows if not any(s <= row[2] < e for s, e in ranges)]
        elif kind == "compact":
            view = view.compact(listed.frontier)
            listed.rows = [(row, stored, new) for new, (row, stored, _) in enumerate(listed.rows)]
            listed.next = len(listed.rows)
            assert view.compact(listed.frontier) == view
        elif kind == "move":
            if at == listed.next or at + by < 0:
                continue
            moved = [(r, s, p + by if p >= at else p) for r, s, p in listed.rows]
            ordered = all(a[2] < b[2] for a, b in pairwise(moved))
            if not ordered:
                with pytest.raises(ValueError, match="taken"):
                    view.reposition(listed.frontier, [(at, listed.next, at + by)])
                continue
            view = view.reposition(listed.frontier, [(at, listed.next, at + by)])
            listed.rows = moved
            listed.next = moved[-1][2] + 1 if moved else 0
        else:
            row, view = view.truncate(listed.frontier, at)
            listed.rows = [item for item in listed.rows if item[2] < at]
            assert row == (listed.rows[-1][0] + 1 if listed.rows else 0)
            listed.frontier, listed.next = row, at
        frontier = listed.frontier
        seen = [
            (part.first + i, part.stored + i, part.position + i)
            for part in view.upto(frontier)
            for i in range(part.rows)
        ]
        assert seen == listed.rows
        assert view.next_position(frontier) == listed.next
        assert view.count(frontier) == len(listed.rows)
        # An edit that changes nothing is no edit, and what undoes itself is none.
        unmoved = [(row, row, row) for row in range(frontier)]
        assert view.edited == (listed.rows != unmoved or listed.next != frontier)
        if (
            kind != "append"
            and seen
            == [
                (part.first + i, part.stored + i, part.position + i)
                for part in before.upto(frontier)
                for i in range(part.rows)
            ]
            and before.next_position(frontier) == listed.next
            and frontier >= before.tail_row
        ):
            assert view == before
        _check_pieces(view, listed, 4)


def _check_pieces(view: PositionView, listed: Listed, size: int) -> None:
    pieces = list(view.pieces(size, listed.frontier))
    rows = [(piece.chunk * size + i, piece.delta) for piece in pieces for i in range(piece.first, piece.last)]
    assert rows == [(row, now - stored) for row, stored, now in listed.rows]
    assert all(0 <= piece.first < piece.last <= size for piece in pieces)
    whole = {row // size for row, _ in rows}
    assert set(view.hidden_chunks(size, listed.frontier)) == set(range(listed.frontier // size)) - whole


def model(kind: str | None, **parameters: str | bool) -> Model:
    given = manifest([cpu(1)]).model
    scaling = None if kind is None else RopeScaling(type=kind, parameters=Parameters(parameters))
    return given.model_copy(update={"rope": given.rope.model_copy(update={"scaling": scaling})})


REFUSED = [
    pytest.param("dynamic", {"factor": "2"}, "scaling.type 'dynamic'.*legal: default, lin", id="dynamic-ntk"),
    pytest.param("longrope", {}, "scaling.type 'longrope'", id="longrope"),
    pytest.param("linear", {}, "parameters.factor is None; legal: a number above 0", id="no-factor"),
    pytest.param("linear", {"factor": "-1"}, "parameters.factor is '-1'", id="negative"),
    pytest.param("linear", {"factor": "many"}, "parameters.factor is 'many'", id="no-number"),
    pytest.param("default", {"partial_rotary_factor": "0.32"}, "gives 5 rotary dimensions of 16", id="odd"),
    pytest.param("default", {"partial_rotary_factor": "1.5"}, "gives 24 rotary", id="too-wide"),
]


@pytest.mark.parametrize(("kind", "parameters", "message"), REFUSED)
def test_a_model_whose_angles_are_not_linear_is_refused_by_field(
    kind: str, parameters: dict[str, str], message: str
) -> None:
    with pytest.raises(CoreError, match=message) as refused:
        rope_table(model(kind, **parameters))
    assert refused.value.reason is Reason.UNSUPPORTED
    assert refused.value.facts["field"].startswith("model.rope.scaling")


def test_unrotated_rows_are_refused() -> None:
    given = model(None).model_copy(update={"position_contract": PositionContract.PRE_ROPE})
    with pytest.raises(CoreError, match="positionContract is preRope, legal: postRope") as refused:
        rope_table(given)
    assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("share", ["1", "0.5", "0.25"], ids=lambda share: f"partial-{share}")
def test_only_the_rotary_part_turns_and_a_turn_and_back_is_no_turn(interleaved: bool, share: str) -> None:
    given = model("default", partial_rotary_factor=share)
    table = rope_table(
        given.model_copy(update={"rope": given.rope.model_copy(update={"interleaved": interleaved})})
    )
    width = int(16 * float(share))
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(5))
    turned = table.turned(x, 12345)
    assert torch.equal(turned[..., width:], x[..., width:])
    back = table.turned(turned, -12345)
    ulp = torch.finfo(torch.float32).eps
    assert (back - x).abs().max() <= 2 * ulp * x.abs().max()
    assert table.turned(x, 0) is x
    # By complex numbers, one pair at a time.
    for pair in range(width // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
        angle = 12345 * 10000 ** (-2 * pair / width)
        a, b = x[..., first].double(), x[..., second].double()
        assert torch.allclose(
            turned[..., first].double(), a * math.cos(angle) - b * math.sin(angle), atol=1e-6
        )
        assert torch.allclose(
            turned[..., second].double(), a * math.sin(angle) + b * math.cos(angle), atol=1e-6
        )
