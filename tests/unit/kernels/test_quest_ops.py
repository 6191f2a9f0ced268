"""Quest's boxes and scores against their references and their bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.ops.quest import quest_boxes, quest_boxes_ref, quest_score, quest_score_ref


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 256], ids=str)
@pytest.mark.parametrize(("hq", "hk", "d"), [(9, 3, 64), (4, 4, 128), (8, 1, 64)])
def test_boxes_and_scores_equal_the_reference(rows: int, hq: int, hk: int, d: int) -> None:
    g = torch.Generator().manual_seed(rows + hq)
    k, q = torch.randn(rows, hk, d, generator=g), torch.randn(hq, d, generator=g)
    kmin, kmax = quest_boxes(k, 16)
    rmin, rmax = quest_boxes_ref(k, 16)
    assert torch.equal(kmin.double(), rmin)
    assert torch.equal(kmax.double(), rmax)
    score = quest_score(q, kmin, kmax)
    assert score.shape == (hk, -(-rows // 16))
    torch.testing.assert_close(score.double(), quest_score_ref(q, rmin, rmax), rtol=1e-5, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 80),
    page=st.sampled_from([1, 4, 16]),
    group=st.integers(1, 8),
    spread=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_score_bounds_every_logit_of_its_page(
    seed: int, rows: int, page: int, group: int, spread: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    hk, d = 2, 64
    k = torch.randn(rows, hk, d, generator=g) * spread
    q = torch.randn(hk * group, d, generator=g)
    kmin, kmax = quest_boxes(k, page)
    score = quest_score(q, kmin, kmax)
    exact = torch.einsum("hgd,rhd->hgr", q.double().view(hk, group, d), k.double()).amax(1)
    box = torch.maximum(kmin.abs(), kmax.abs()).double()
    weight = torch.einsum("hgd,phd->hgp", q.double().abs().view(hk, group, d), box).amax(1)
    for r in range(rows):
        slack = d * 2.0**-23 * weight[:, r // page]
        assert torch.all(score[:, r // page].double() + slack >= exact[:, r])


def test_a_mean_over_the_group_would_lose_the_bound() -> None:
    """Opposite query heads: their mean sees nothing, the maximum sees both."""
    k = torch.zeros(16, 1, 64)
    k[3, 0, 0] = 5.0
    q = torch.zeros(2, 64)
    q[0, 0], q[1, 0] = 1.0, -1.0
    assert float(quest_score(q, *quest_boxes(k, 16))) == 5.0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="page_tokens"):
        quest_boxes(torch.zeros(4, 1, 8), 0)
    with pytest.raises(ValueError, match="do not divide"):
        quest_score(torch.zeros(3, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
