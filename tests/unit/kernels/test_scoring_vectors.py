"""The worked numbers of SparQ, PQ, centroids and LSH, by the names of their vectors, and the cases in which
each score ranks wrongly: a score is a ranking and never a certificate, and these tests say where it fails."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvtier_kernels.ops.centroid_score import centroid_estimate_torch, centroid_score_torch
from kvtier_kernels.ops.pq import pq_lut_torch, pq_score_torch
from kvtier_kernels.ops.sparq_score import (
    sparq_alpha_torch,
    sparq_dims,
    sparq_remainder,
    sparq_score_torch,
)
from kvtier_kernels.ops.topk_units.torch_impl import topk_units_torch
from kvtier_kernels.state import AttentionState, LogitFrame, finalize, merge

I32 = torch.int32


def lens(*n: int) -> Tensor:
    return torch.tensor(n, dtype=I32)


def best(score: Tensor, k: int) -> list[int]:
    """Ids of the k best of one list, ascending."""
    chosen = topk_units_torch(score.reshape(1, -1), lens(score.numel()), lens(k))
    return [int(i) for i in chosen.units[: int(chosen.indptr[1])]]


def kept_mass(logits: Tensor, rows: list[int]) -> float:
    return float(torch.softmax(logits.double(), -1)[rows].sum())


def state(logits: Tensor, v: Tensor, scale: float) -> AttentionState:
    """Exact state of one query head over rows, float64 sums."""
    m = logits.double().max()
    w = torch.exp(logits.double() - m)
    parts = (m.reshape(1, 1), w.sum().reshape(1, 1), (w @ v.double()).reshape(1, 1, -1))
    return AttentionState(*(x.float() for x in parts), LogitFrame(scale))


class TestSparqToy:
    """T6 (C6.06 to C6.11)."""

    scale = 0.5
    q = torch.tensor([[[0.5, -0.5, -2.0, 1.5]]])
    k = torch.tensor(
        [[-1, 1, -1, 0], [-0.5, 0, 1, 0.5], [-1, 0, -0.5, -0.5], [-1, 1, -1, -0.5], [-0.5, 0, -0.5, -1]]
    )
    v = torch.tensor([[0.5, 1], [0.5, -1], [0, -0.5], [0, 1], [1, 1]])

    def scored(self) -> tuple[Tensor, Tensor, Tensor]:
        dims = sparq_dims(self.q, 1, 2)
        s = sparq_score_torch(self.q, self.k.T[None, None], dims, lens(5), scale=self.scale)
        return dims, s.score, s.lse

    def test_c6_06_and_07_channels_and_distribution(self) -> None:
        dims, score, lse = self.scored()
        assert dims.tolist() == [[[2, 3]]]
        want = [0.4123424484, 0.0653186358, 0.1528867495, 0.26952042, 0.0999317463]
        torch.testing.assert_close(
            torch.exp(score - lse).flatten().double(), torch.tensor(want).double(), atol=1e-6, rtol=0
        )

    def test_c6_08_to_11_one_row_is_missed_and_the_mean_makes_up_for_part(self) -> None:
        dims, score, lse = self.scored()
        forced = score.clone()
        forced[..., 4] = math.inf
        rows = best(forced, 3)
        logits = self.k @ self.q.flatten() * self.scale
        assert (rows, best(logits, 3)) == ([0, 3, 4], [0, 2, 3])
        ids = torch.tensor(rows, dtype=I32)
        alpha = sparq_alpha_torch(self.q, self.k.T[None, None], dims, lse, lens(0, 3), ids, scale=self.scale)
        assert float(alpha) == pytest.approx(0.7817946147, abs=1e-6)
        exact = state(logits[rows], self.v[rows], self.scale)
        rest = sparq_remainder(exact, alpha, lse, self.v.mean(0).view(1, 1, 2))
        dense = torch.softmax(logits, 0) @ self.v
        plain = finalize(exact)[0].flatten()
        mended = finalize(merge(exact, rest))[0].flatten()
        torch.testing.assert_close(plain, torch.tensor([0.4357395879, 1.0]), atol=1e-6, rtol=0)
        assert float((plain - dense).abs().max()) == pytest.approx(0.4702462476, abs=1e-6)
        assert float((mended - dense).abs().max()) == pytest.approx(0.3175024779, abs=1e-6)
        assert rest.estimated and merge(exact, rest).estimated

    def test_c6_15_a_group_shares_channels_by_summed_size(self) -> None:
        q = torch.tensor([[[1, -3, 0.5, 0.2], [2, 0.1, -0.4, 1]]])
        assert sparq_dims(q, 1, 2).tolist() == [[[0, 1]]]


@pytest.mark.parametrize(
    ("alpha", "want"),
    [
        pytest.param(1.0, [3.0, -1.0], id="all"),
        pytest.param(0.25, [0.75 * 7 + 0.25 * 3, 0.75 * 5 - 0.25], id="quarter"),
        pytest.param(0.0, [7.0, 5.0], id="none"),
        pytest.param(1e-37, [7.0, 5.0], id="next-to-none"),
    ],
)
def test_the_remainder_weighs_the_mean_by_what_was_not_selected(alpha: float, want: list[float]) -> None:
    exact = state(torch.tensor([2.0]), torch.tensor([[3.0, -1.0]]), 1.0)
    mean = torch.tensor([[[7.0, 5.0]]])
    rest = sparq_remainder(exact, torch.tensor([[alpha]]), torch.tensor([[9.0]]), mean)
    o = finalize(merge(exact, rest))[0].flatten()
    torch.testing.assert_close(o, torch.tensor(want), atol=1e-5, rtol=0)


def test_with_nothing_selected_the_mean_answers_alone_with_the_approximate_mass() -> None:
    nothing = AttentionState(
        torch.full((1, 1), -math.inf), torch.zeros(1, 1), torch.zeros(1, 1, 2), LogitFrame(1.0)
    )
    rest = sparq_remainder(nothing, torch.zeros(1, 1), torch.full((1, 1), 9.0), torch.ones(1, 1, 2))
    o, lse = finalize(merge(nothing, rest))
    assert (o.tolist(), lse.tolist()) == ([[[1.0, 1.0]]], [[9.0]])
    with pytest.raises(ValueError, match="SPARQ_MASS"):
        sparq_remainder(nothing, torch.full((1, 1), 1.5), torch.zeros(1, 1), torch.ones(1, 1, 2))


class TestNothingLeftOut:
    """Each approximation becomes the thing itself when it leaves nothing out."""

    g = torch.Generator().manual_seed(4)
    q = torch.randn(1, 4, 16, generator=g)
    k = torch.randn(1, 2, 30, 16, generator=g)
    logits = torch.einsum("hgd,hnd->hgn", q.view(2, 2, 16), k[0]) * 0.25
    lse = torch.logsumexp(logits, -1).flatten()[None]
    shares = torch.softmax(logits, -1).sum(1)[None]

    def test_sparq_with_all_channels_is_the_logits_and_all_rows_hold_everything(self) -> None:
        k_t, dims = self.k.transpose(2, 3).contiguous(), sparq_dims(self.q, 2, 16)
        got = sparq_score_torch(self.q, k_t, dims, lens(30), scale=0.25)
        torch.testing.assert_close(got.score, self.logits.sum(1)[None])
        torch.testing.assert_close(got.lse, self.lse)
        ids = torch.arange(30, dtype=I32).repeat(2)
        alpha = sparq_alpha_torch(self.q, k_t, dims, got.lse, lens(0, 30, 60), ids, scale=0.25)
        torch.testing.assert_close(alpha, torch.ones(1, 4))

    def test_pq_with_the_keys_as_codebook_is_the_softmax(self) -> None:
        codes = torch.arange(30, dtype=torch.uint8).expand(1, 2, 1, 30)
        got = pq_score_torch(pq_lut_torch(self.q, self.k.unsqueeze(2)), codes, lens(30), scale=0.25)
        torch.testing.assert_close(got.score, self.shares)
        torch.testing.assert_close(got.lse, self.lse)

    def test_clusters_of_one_row_are_the_softmax_and_the_exact_state(self) -> None:
        one = torch.ones(1, 2, 30, dtype=I32)
        for by_rows in (False, True):
            got = centroid_score_torch(self.q, self.k, one, scale=0.25, by_rows=by_rows)
            torch.testing.assert_close(got.score, self.shares)
            torch.testing.assert_close(got.lse, self.lse)
        v = torch.randn(1, 2, 30, 8, generator=self.g)
        o, lse = finalize(centroid_estimate_torch(self.q, self.k, one, v, one > 0, scale=0.25))
        torch.testing.assert_close(lse, self.lse)
        torch.testing.assert_close(o.view(2, 2, 8), torch.softmax(self.logits, -1) @ v[0])


def test_sparq_ranks_wrongly_when_the_deciding_channel_is_dropped() -> None:
    """q = (2, -1.9): one channel of two says that three loose keys win; together they cancel."""
    q = torch.tensor([[[2.0, -1.9]]])
    k = torch.tensor([[1.5, 1.5]] * 3 + [[1.0, -4.0]])
    score = sparq_score_torch(q, k.T[None, None], sparq_dims(q, 1, 1), lens(4), scale=1.0).score
    rows = best(score, 3)
    assert rows == [0, 1, 2]
    assert kept_mass(k @ q.flatten(), rows) == pytest.approx(0.0002, abs=1e-4)


def test_sparq_ranks_wrongly_for_a_quiet_head_of_a_loud_group() -> None:
    """The loud head owns the summed |q|; the quiet head's channel is never read, its best row never found."""
    q = torch.tensor([[[9.0, 0.0], [0.0, 3.0]]])
    k = torch.tensor([[1.0, 0.0], [0.9, 0.0], [0.0, 5.0]])
    dims = sparq_dims(q, 1, 1)
    score = sparq_score_torch(q, k.T[None, None], dims, lens(3), scale=1.0).score
    assert dims.tolist() == [[[0]]] and best(score, 2) == [0, 1]
    assert kept_mass(k @ q[0, 1], [0, 1]) < 1e-6


class TestProductQuantisationToy:
    """T7-PQ (C7.01 to C7.04)."""

    q = torch.tensor([[[1.0, 0, 0, 1]]])
    k = torch.tensor([[0.9, 0, 0, 0.9], [1.1, 0, 0, 0], [0, 0, 0, 1.2], [-1, 0, 0, -1]])
    cent = torch.tensor([[[[[0.0, 0], [2, 0]], [[0, 0], [0, 2]]]]])
    codes = torch.tensor([[[[0, 1, 0, 0], [0, 0, 1, 0]]]], dtype=torch.uint8)

    def test_c7_01_every_code_is_the_nearest(self) -> None:
        parts = self.k.view(4, 2, 1, 2)
        far = ((parts - self.cent[0, 0].unsqueeze(0)) ** 2).sum(-1)
        assert far.argmin(-1).T.tolist() == self.codes[0, 0].tolist()

    def test_c7_02_to_04_tables_scores_and_the_best_row_missed(self) -> None:
        lut = pq_lut_torch(self.q, self.cent)
        assert lut[0, 0, :, 0].tolist() == [[0, 2], [0, 2]]
        got = pq_score_torch(lut, self.codes, lens(4), scale=1.0)
        approximate = torch.tensor([0.0, 2, 2, 0])
        torch.testing.assert_close(got.score.flatten(), torch.softmax(approximate, 0))
        exact = self.k @ self.q.flatten()
        assert (int(exact.argmax()), best(got.score, 2)) == (0, [1, 2])
        torch.testing.assert_close(exact - approximate, torch.tensor([1.8, -0.9, -0.8, -2.0]))

    def test_a_shared_codebook_is_expanded(self) -> None:
        q = torch.randn(3, 2, 4)
        shared = self.cent.expand(3, -1, -1, -1, -1)
        torch.testing.assert_close(pq_lut_torch(q, shared), pq_lut_torch(q, shared.contiguous()))


def test_pq_ranks_wrongly_when_keys_drift_after_the_codebook_was_made() -> None:
    """Centroids e1 and e2; a later key (10, 9.9) has code e1 and scores 1 where the truth is 20."""
    q = torch.tensor([[[1.0, 1.01]]])
    k = torch.tensor([[1.0, 0], [0, 1], [0, 1], [10, 9.9]])
    codes = torch.tensor([[[[0, 1, 1, 0]]]], dtype=torch.uint8)
    score = pq_score_torch(pq_lut_torch(q, torch.eye(2).view(1, 1, 1, 2, 2)), codes, lens(4), scale=1.0).score
    rows = best(score, 2)
    assert rows == [1, 2]
    assert kept_mass(k @ q.flatten(), rows) < 1e-6


class TestSqueezedToy:
    """C7.13 to C7.16: a softmax over clusters that counts their rows."""

    q = torch.tensor([[[1.0, 0]]])
    cent = torch.tensor([[[[1.0, 0], [1.4, 0], [-2, 0]]]])
    counts = torch.tensor([[[2, 4, 2]]], dtype=I32)

    def score(self, by_rows: bool) -> Tensor:
        got = centroid_score_torch(self.q, self.cent, self.counts, scale=1 / math.sqrt(2), by_rows=by_rows)
        return got.score.flatten()

    def test_c7_13_and_14_shares_of_a_row(self) -> None:
        want = torch.tensor([0.1324971480, 0.1758099941, 0.0158828638])
        torch.testing.assert_close(self.score(True), want, atol=1e-6, rtol=0)
        assert float(self.score(True) @ self.counts.flatten().float()) == pytest.approx(1.0, abs=1e-6)

    def test_c7_15_and_16_a_threshold_misses_the_best_row_and_counts_matter(self) -> None:
        """Cluster A holds keys 3 and -1, so its mean hides the best row of all."""
        assert (self.score(True) > 0.15).tolist() == [False, True, False]
        assert (self.score(False) > 0.15).tolist() == [True, True, False]


def test_centroids_rank_wrongly_when_a_cluster_mixes_norms() -> None:
    """99 keys e1 and one 10 e1 lie in one cosine cluster, whose mean is 1.09; another lies at 1.3."""
    q = torch.tensor([[[1.0, 0]]])
    keys = torch.cat([torch.ones(99), torch.tensor([10.0]), torch.full((100,), 1.3)])
    cent = torch.tensor([[[[1.09, 0], [1.3, 0]]]])
    counts = torch.tensor([[[100, 100]]], dtype=I32)
    score = centroid_score_torch(q, cent, counts, scale=1.0).score
    assert best(score, 1) == [1]
    assert kept_mass(keys, list(range(100, 200))) < 0.02


class TestEstimate:
    """The state of clusters nobody reads."""

    @staticmethod
    def clustered(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        label = torch.randint(0, 6, (60,), generator=g)
        k = torch.randn(6, 8, generator=g)[label] + spread * torch.randn(60, 8, generator=g)
        v = torch.randn(60, 4, generator=g)
        one = torch.nn.functional.one_hot(label, 6).float()
        counts = one.sum(0)
        cent = (one.T @ k / counts.clamp_min(1).unsqueeze(1)).view(1, 1, 6, 8)
        q = torch.randn(1, 2, 8, generator=g)
        return q, k, v, cent, counts.to(I32).view(1, 1, 6), (one.T @ v).view(1, 1, 6, 4)

    @pytest.mark.parametrize("seed", range(5))
    def test_it_never_overestimates_the_mass(self, seed: int) -> None:
        """Jensen: n exp(q.mean) <= sum exp(q.k)."""
        q, k, _, cent, counts, v_sum = self.clustered(seed, 0.7)
        take = torch.ones_like(counts, dtype=torch.bool)
        _, lse = finalize(centroid_estimate_torch(q, cent, counts, v_sum, take, scale=1.0))
        true = torch.logsumexp(q[0] @ k.T, -1)
        assert torch.all(lse[0] <= true + 1e-5) and torch.all(lse[0] < true)

    def test_clusters_without_spread_are_exact(self) -> None:
        q, k, v, cent, counts, v_sum = self.clustered(7, 0.0)
        take = torch.ones_like(counts, dtype=torch.bool)
        got = centroid_estimate_torch(q, cent, counts, v_sum, take, scale=1.0)
        o, lse = finalize(got)
        logits = q[0] @ k.T
        torch.testing.assert_close(o[0], torch.softmax(logits, -1) @ v, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[0], torch.logsumexp(logits, -1), atol=1e-5, rtol=0)
        assert got.estimated

    def test_one_that_holds_the_needle_misses_it(self) -> None:
        """A key of 12 among 15 of 0 has the mean 0.75; the estimate gives it e^0.75 for e^12."""
        k = torch.zeros(16, 1)
        k[3] = 12
        cent, counts = k.mean(0).view(1, 1, 1, 1), torch.tensor([[[16]]], dtype=I32)
        take = torch.ones(1, 1, 1, dtype=torch.bool)
        v = torch.zeros(16, 1)
        v[3] = 1
        got = centroid_estimate_torch(
            torch.ones(1, 1, 1), cent, counts, v.sum(0).view(1, 1, 1, 1), take, scale=1.0
        )
        o, lse = finalize(got)
        assert float(lse) == pytest.approx(math.log(16) + 0.75, abs=1e-5)
        assert float(o) == pytest.approx(1 / 16, abs=1e-6)
        assert float((torch.softmax(k, 0) * v).sum()) > 0.9999
