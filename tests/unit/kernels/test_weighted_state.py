"""Weighted rows: the estimator's definition in float64, and states that say what they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.chunk_attention.weighted import weighted_state
from kvtier_kernels.state import LogitFrame, finalize, merge

FRAME = LogitFrame(0.3)


def drawn(seed: int, rows: int, group: int = 3, d: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*size, generator=generator) for size in ((1, group, d), (rows, d), (rows, d)))
    return q, k, v, 3 * torch.randn(rows, generator=generator)


@given(seed=st.integers(0, 1000), rows=st.integers(1, 40), cut=st.integers(0, 40))
def test_it_is_the_definition_and_parts_merge_to_the_whole(seed: int, rows: int, cut: int) -> None:
    q, k, v, w = drawn(seed, rows)
    logits = FRAME.scale * (q[0].double() @ k.double().T) + w.double()
    want = logits.softmax(-1) @ v.double()
    whole = weighted_state(q, k, v, w, FRAME)
    out, lse = finalize(whole)
    assert whole.estimated
    torch.testing.assert_close(out[0].double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), rtol=0, atol=1e-5)
    cut = min(cut, rows)
    parts = merge(
        weighted_state(q, k[:cut], v[:cut], w[:cut], FRAME),
        weighted_state(q, k[cut:], v[cut:], w[cut:], FRAME),
    )
    torch.testing.assert_close(finalize(parts)[0], out, rtol=0, atol=2e-6)


def test_a_weight_of_one_is_plain_attention() -> None:
    q, k, v, _ = drawn(1, 20)
    plain = chunk_state(q, k.unsqueeze(1), v.unsqueeze(1), scale=FRAME.scale, q_pos0=100, row_pos0=0)
    weighted = weighted_state(q, k, v, torch.zeros(20), FRAME)
    torch.testing.assert_close(finalize(weighted)[0], finalize(plain)[0], rtol=0, atol=2e-6)


def test_no_rows_are_the_identity_and_a_row_of_no_weight_is_none() -> None:
    q, k, v, w = drawn(2, 4)
    empty = weighted_state(q, k[:0], v[:0], w[:0], FRAME)
    assert torch.isneginf(empty.m).all() and not empty.l.any()
    w[1] = -torch.inf
    kept = torch.tensor([0, 2, 3])
    without = weighted_state(q, k[kept], v[kept], w[kept], FRAME)
    torch.testing.assert_close(finalize(weighted_state(q, k, v, w, FRAME))[0], finalize(without)[0])
    none = weighted_state(q, k[:1], v[:1], torch.tensor([-torch.inf]), FRAME)
    assert not none.l.any() and not none.u.any()


@pytest.mark.parametrize("wrong", ["queries", "values", "weights", "width"])
def test_shapes_that_do_not_fit_are_refused(wrong: str) -> None:
    q, k, v, w = drawn(3, 5)
    given_ = {
        "queries": (torch.cat([q, q]), k, v, w),
        "values": (q, k, v[:4], w),
        "weights": (q, k, v, w[:4]),
        "width": (q, k[:, :4], v, w),
    }[wrong]
    with pytest.raises(ShapeError):
        weighted_state(*given_, FRAME)
