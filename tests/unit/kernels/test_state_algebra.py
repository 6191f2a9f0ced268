"""The state algebra: identity, merge, order, frames and the traps of empty states."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kvtier_kernels.state import (
    AttentionState,
    FrameMismatch,
    LogitFrame,
    finalize,
    identity,
    merge,
    merge_ascending,
)

FRAME = LogitFrame(0.125)


def state_of(logits: torch.Tensor, values: torch.Tensor, frame: LogitFrame = FRAME) -> AttentionState:
    """State of one query and head over rows, straight from the definition."""
    if logits.numel() == 0:
        return identity((1,), values.shape[1], frame)
    m = logits.max()
    w = torch.exp(logits - m)
    return AttentionState(m=m[None], l=w.sum()[None], u=(w @ values)[None], frame=frame)


@pytest.mark.parametrize("cuts", [(0,), (5,), (3, 3), (1, 2, 9), (0, 12)], ids=str)
def test_merge_of_parts_is_the_whole(cuts: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    s, v = torch.randn(12, generator=g) * 30, torch.randn(12, 8, generator=g)
    bounds = [0, *cuts, 12]
    parts = [state_of(s[a:b], v[a:b]) for a, b in itertools.pairwise(bounds)]
    o, lse = finalize(merge_ascending(parts))
    want = torch.softmax(s.double(), 0) @ v.double()
    torch.testing.assert_close(o[0].double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[0].double(), torch.logsumexp(s.double(), 0), rtol=0, atol=1e-5)


def test_identity_changes_no_bit_on_either_side() -> None:
    g = torch.Generator().manual_seed(2)
    a = AttentionState(
        torch.randn(3, 9, generator=g),
        torch.rand(3, 9, generator=g),
        torch.randn(3, 9, 64, generator=g),
        FRAME,
    )
    for got in (merge(a, identity((3, 9), 64, FRAME)), merge(identity((3, 9), 64, FRAME), a)):
        assert torch.equal(got.m, a.m)
        assert torch.equal(got.l, a.l)
        assert torch.equal(got.u, a.u)


def test_empty_with_empty_stays_empty_and_finalizes_to_zero() -> None:
    e = identity((2, 4), 64, FRAME)
    both = merge(e, e)
    assert torch.all(both.m == -math.inf)
    assert torch.all(both.l == 0)
    o, lse = finalize(both)
    assert torch.all(o == 0)
    assert torch.all(lse == -math.inf)


@pytest.mark.parametrize(("low", "high"), [(-3e38, 3e38), (0.0, 1e4), (-1e4, -1e4)])
def test_huge_logits_do_not_overflow(low: float, high: float) -> None:
    v = torch.eye(2)
    o, _ = finalize(merge(state_of(torch.tensor([low]), v[:1]), state_of(torch.tensor([high]), v[1:])))
    want = torch.softmax(torch.tensor([low, high]).double(), 0)
    torch.testing.assert_close(o[0].double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [LogitFrame(0.25), LogitFrame(0.125, key_shift_id=7), LogitFrame(0.125, rope_epoch=1)],
    ids=["scale", "key-shift", "rope-epoch"],
)
def test_frames_that_differ_do_not_merge(other: LogitFrame) -> None:
    with pytest.raises(FrameMismatch):
        merge(identity((1,), 4, FRAME), identity((1,), 4, other))


def test_merge_ascending_is_the_left_fold() -> None:
    g = torch.Generator().manual_seed(3)
    parts = [state_of(torch.randn(5, generator=g), torch.randn(5, 8, generator=g)) for _ in range(6)]
    fold = parts[0]
    for p in parts[1:]:
        fold = merge(fold, p)
    got = merge_ascending(iter(parts))
    assert torch.equal(got.u, fold.u)
    assert torch.equal(got.l, fold.l)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_ascending([])


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match="shapes disagree"):
        AttentionState(torch.zeros(2), torch.zeros(3), torch.zeros(2, 4), FRAME)
    with pytest.raises(ValueError, match="float32"):
        AttentionState(torch.zeros(2).double(), torch.zeros(2), torch.zeros(2, 4), FRAME)


@pytest.mark.parametrize(("a", "b"), [(False, False), (True, False), (False, True)])
def test_what_merges_with_an_estimate_is_an_estimate(a: bool, b: bool) -> None:
    parts = [
        AttentionState(torch.zeros(2), torch.ones(2), torch.zeros(2, 4), FRAME, estimated=e) for e in (a, b)
    ]
    assert merge(*parts).estimated is (a or b)
