"""MagicPIG: the published sample and its weights, how they average over seeds, and where they fail."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, Guarantee, Query, Selection, Shape
from kvtier_core.selectors.families import magic_pig as module
from kvtier_core.selectors.families.magic_pig import HashedKeys, MagicPig, Projector, check_sample
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector

PAIR = Shape(query_heads=1, kv_heads=1, head_dim=4, scale=1.0)


def family(
    bits: int = 3,
    tables: int = 12,
    tokens: int = 1000,
    shape: Shape = SMALL,
    seed: int = 0,
    policy: str = "truncate",
    sink: int = 2,
    recent: int = 3,
    **more: Any,
) -> MagicPig:
    declared = selector(
        "magicPig",
        {"hashBits": bits, "tables": tables} | more,
        {"tokens": tokens, "capPolicy": policy},
        persistentRows={"sink": sink, "recent": recent},
        seed=seed,
    )
    return MagicPig.from_manifest(declared, shape, 16)


def chance(q: np.ndarray, k: np.ndarray, bits: int, tables: int, least: int) -> float:
    """The binomial tail, by its definition."""
    cosine = float(q @ k) / float(np.linalg.norm(q) * np.linalg.norm(k))
    r = (1 - math.acos(max(-1.0, min(1.0, cosine))) / math.pi) ** bits
    return sum(math.comb(tables, j) * r**j * (1 - r) ** (tables - j) for j in range(least, tables + 1))


def published(
    fam: MagicPig, planes: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> list[tuple[list[int], list[float]]]:
    """Rows and weights of each query head as the algorithm is written: float64, one sign at a time."""
    rows, wide, turn = k.shape[0], k.double().numpy(), planes.double().numpy()
    used = min(fam.mean_rows, 2 ** int(math.log2(rows)))
    static = [i for i in range(rows) if i < fam.persistent.sink or i >= rows - max(1, fam.persistent.recent)]
    found = []
    for head in range(fam.shape.query_heads):
        mine = wide[:, head // fam.shape.group]
        centred = mine - mine[:used].mean(0)
        one = q[0, head].double().numpy()
        weights = dict.fromkeys(static, 0.0)
        for i in range(rows):
            agree = 0
            for t in range(fam.tables):
                columns = turn[:, t * fam.bits : (t + 1) * fam.bits]
                agree += bool(((centred[i] @ columns > 0) == (one @ columns > 0)).all())
            if i not in weights and agree >= fam.min_tables:
                u = chance(one, centred[i], fam.bits, fam.tables, fam.min_tables)
                weights[i] = -math.log(u + (1e-4 if fam.facts.variant == "referenceCode" else 0.0))
        found.append((sorted(weights), [weights[i] for i in sorted(weights)]))
    return found


@settings(max_examples=50)
@given(
    seed=st.integers(0, 5000),
    rows=st.integers(1, 90),
    bits=st.integers(1, 5),
    tables=st.integers(2, 14),
    least=st.integers(1, 2),
    variant=st.sampled_from(module.VARIANTS),
)
def test_it_is_the_published_algorithm(
    seed: int, rows: int, bits: int, tables: int, least: int, variant: str
) -> None:
    fam = family(bits, tables, seed=seed, minTables=least, variant=variant)
    k, v = rows_of(seed, rows)
    q = query_of(seed + 1)
    index = fam.build(SOURCE, k, v, NO_EVIDENCE)
    selection = fam.select(index, Query(q, rows, SOURCE))
    assert selection.log_weight is not None
    for head, (want, weights) in enumerate(published(fam, index.projector.planes, q, k)):
        assert selection.positions[head].tolist() == want
        assert selection.log_weight[head].tolist() == pytest.approx(weights, abs=2e-4, rel=2e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda q, k: q @ k.T, id="logit"),
        pytest.param(lambda q, k: np.abs(k).sum(1), id="size-of-the-key"),
        pytest.param(lambda q, k: -np.arange(len(k), dtype=float), id="oldest"),
    ],
)
def test_another_score_would_read_other_rows(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above must be able to fail: as many rows, chosen by this score, are other rows."""
    real = module.lsh_collide_torch

    def ranked(q: Any, codes: Any, keys: Any, *tables: Any, min_hits: int, cap: int) -> Any:
        hit = real(q, codes, keys, *tables, min_hits=min_hits, cap=cap)
        ids, bounds = hit.ids.clone(), hit.indptr.tolist()
        for head, (low, high) in enumerate(itertools.pairwise(bounds)):
            scores = wrong(q[0, head].numpy(), keys[0, head // SMALL.group].numpy())
            best = np.argsort(-scores, kind="stable")[: high - low]
            ids[low:high] = torch.from_numpy(np.sort(best).astype(np.int32))
        return hit._replace(ids=ids)

    monkeypatch.setattr(module, "lsh_collide_torch", ranked)
    differs = False
    for seed in range(4):
        fam = family(seed=seed)
        k, v = rows_of(seed, 60)
        q = query_of(seed)
        index = fam.build(SOURCE, k, v, NO_EVIDENCE)
        selection = fam.select(index, Query(q, 60, SOURCE))
        want = [rows for rows, _ in published(fam, index.projector.planes, q, k)]
        differs |= [rows.tolist() for rows in selection.positions] != want
    assert differs


def sums(selection: Selection, logits: np.ndarray, values: np.ndarray, head: int) -> tuple[float, float]:
    """Numerator and denominator of the estimate of one query head, for one channel of V."""
    assert selection.log_weight is not None
    rows = selection.positions[head]
    weights = np.exp(logits[head, rows] + selection.log_weight[head].astype(np.float64))
    return float(weights @ values[rows]), float(weights.sum())


@pytest.mark.parametrize("tokens", [1000, 6], ids=["uncapped", "capped"])
def test_both_sums_are_right_on_average_over_planes(tokens: int) -> None:
    """Over 250 draws of the planes, each mean lies within four standard errors of the true sum."""
    k, v = rows_of(3, 24, spread=0.3)
    q = query_of(4, spread=0.5)
    logits, values = logits_of(q, k), v[:, 0, 0].double().numpy()
    drawn: list[list[tuple[float, float]]] = [[] for _ in range(SMALL.query_heads)]
    for seed in range(250):
        fam = family(3, 20, tokens, seed=seed)
        selection = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(q, 24, SOURCE, seed=seed))
        for head in range(SMALL.query_heads):
            drawn[head].append(sums(selection, logits, values, head))
    for head in range(SMALL.query_heads):
        weights = np.exp(logits[head])
        for at, true in enumerate((weights @ values, weights.sum())):
            one = np.array([pair[at] for pair in drawn[head]])
            error = one.std(ddof=1) / math.sqrt(len(one))
            assert error > 0
            assert abs(one.mean() - true) < 4 * error


def test_the_ratio_is_biased_and_more_tables_bring_it_to_the_answer() -> None:
    k, v = rows_of(5, 40, spread=0.4)
    q = query_of(6, spread=0.7)
    logits, values = logits_of(q, k), v[:, 0, 0].double().numpy()
    true = [float(np.exp(row) @ values / np.exp(row).sum()) for row in logits[: SMALL.group]]
    errors = []
    for tables in (8, 40, 400):
        off = []
        for seed in range(40):
            fam = family(5, tables, seed=seed)
            selection = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(q, 40, SOURCE))
            for head in range(SMALL.group):
                top, bottom = sums(selection, logits, values, head)
                off.append(top / bottom - true[head])
        errors.append(math.sqrt(float(np.mean(np.square(off)))))
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]


def pair_at(cosine: float, norm: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A query and keys k, -k, 0: their mean over the first two is 0 and k lies at `cosine` to the query."""
    key = torch.tensor([cosine, math.sqrt(1 - cosine * cosine), 0.0, 0.0]) * norm
    return torch.tensor([[[1.0, 0, 0, 0]]]), torch.stack([key, -key, torch.zeros(4)]).unsqueeze(1)


@pytest.mark.parametrize(
    ("cosine", "bits", "tables", "least", "u"),
    [
        (0.8, 10, 150, 2, 0.9999979513),
        (0.3, 10, 150, 2, 0.2136672780),
        (0.3, 10, 150, 1, 0.5789259135),
        (0.0, 2, 3, 2, 10 / 64),
    ],
    ids=["C7.18", "C7.20-two", "C7.20-one", "C7.21"],
)
def test_the_chances_of_the_specification(
    cosine: float, bits: int, tables: int, least: int, u: float
) -> None:
    q, k = pair_at(cosine)
    for seed in range(60):
        fam = family(bits, tables, shape=PAIR, seed=seed, minTables=least, sink=0, recent=1)
        selection = fam.select(fam.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 3, SOURCE))
        assert selection.log_weight is not None
        if 0 in selection.units[0]:
            weight = float(selection.log_weight[0][selection.positions[0].tolist().index(0)])
            assert math.exp(-weight) == pytest.approx(u, rel=2e-5)
            return
    raise AssertionError("not sampled in 60 draws")


def test_the_finite_outcomes_of_the_specification() -> None:
    """C7.22 to C7.25: the corrected softmax is the ratio; its mean is biased, the numerator's is not."""
    logit, value, u = np.array([0.0, 1.0, 0.5]), np.array([0.0, 1.0, -1.0]), np.array([1.0, 0.4, 0.7])
    outs, ratio, numerator = [], 0.0, 0.0
    for a, b in itertools.product((0, 1), repeat=2):
        rows = np.array([0, *([1] if a else []), *([2] if b else [])])
        made = given_sample(rows, -np.log(u[rows]))
        top, bottom = sums(made, logit[None], value, 0)
        outs.append(top / bottom)
        share = (0.4 if a else 0.6) * (0.7 if b else 0.3)
        ratio, numerator = ratio + share * outs[-1], numerator + share * top
    assert outs == pytest.approx([0.0, -0.7019654870, 0.8717242308, 0.4374327088], abs=1e-6)
    exact = np.exp(logit) @ value / np.exp(logit).sum()
    assert [exact, ratio] == pytest.approx([0.1992845053, -0.0677374384], abs=1e-6)
    assert numerator == pytest.approx(math.e - math.exp(0.5), abs=1e-6)


def given_sample(rows: np.ndarray, weights: np.ndarray) -> Selection:
    """A selection of those rows with those weights, as of a real one, that passes the check."""
    fam = family(shape=PAIR, sink=1, recent=1)
    q, k = pair_at(0.5)
    real = fam.select(fam.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 3, SOURCE))
    made = replace(real, positions=(rows,), log_weight=(weights.astype(np.float32),))
    check_sample(made, np.array([0]))
    return made


def test_one_centre_for_all_rows_changes_nothing_but_the_hashing() -> None:
    """C7.26: keys that are all moved by one vector hash, weigh and answer as before."""
    k, v = rows_of(8, 50)
    q = query_of(9)
    moved = k + torch.linspace(-1, 1, SMALL.head_dim)
    fam = family(4, 16)
    one = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(q, 50, SOURCE))
    other = fam.select(fam.build(SOURCE, moved, v, NO_EVIDENCE), Query(q, 50, SOURCE))
    values = v[:, 0, 0].double().numpy()
    for head in range(SMALL.group):
        assert one.positions[head].tolist() == other.positions[head].tolist()
        top, bottom = sums(one, logits_of(q, k), values, head)
        up, down = sums(other, logits_of(q, moved), values, head)
        assert top / bottom == pytest.approx(up / down, abs=1e-5)


def test_a_large_key_at_a_middling_angle_holds_the_mass_and_is_rarely_sampled() -> None:
    """The adversary of the anchor: cos .3 with the published K and L, a fifth of draws find it."""
    q, k = pair_at(0.3, norm=60.0)
    found = 0
    for seed in range(60):
        fam = family(10, 150, shape=PAIR, seed=seed, sink=0, recent=1)
        selection = fam.select(fam.build(SOURCE, k, k, NO_EVIDENCE), Query(q, 3, SOURCE))
        found += 0 in selection.units[0]
    share = np.exp(logits_of(q, k, PAIR)[0])
    assert share[0] / share.sum() > 0.999
    assert 4 <= found <= 22


def test_each_query_head_samples_for_itself_over_tables_of_its_kv_head() -> None:
    fam = family(4, 16)
    k, v = rows_of(1, 80)
    q = query_of(2)
    index = fam.build(SOURCE, k, v, NO_EVIDENCE)
    lists = {tuple(rows.tolist()) for rows in fam.select(index, Query(q, 80, SOURCE)).positions}
    assert len(lists) == SMALL.query_heads
    twins = q.clone()
    twins[0, 1] = twins[0, 0]
    selection = fam.select(index, Query(twins, 80, SOURCE))
    assert selection.positions[0].tolist() == selection.positions[1].tolist()


@pytest.mark.parametrize(
    ("policy", "outcome"), [("truncate", 5), ("dense", 75), ("error", Reason.CAP_VIOLATION)], ids=str
)
def test_a_sample_over_the_budget_ends_by_its_policy(policy: str, outcome: object) -> None:
    fam = family(1, 12, 5, policy=policy)
    k, v = rows_of(1, 80)
    index = fam.build(SOURCE, k, v, NO_EVIDENCE)
    query = Query(query_of(2), 80, SOURCE, seed=7)
    if isinstance(outcome, Reason):
        with pytest.raises(CoreError) as refused:
            fam.select(index, query)
        assert refused.value.reason is outcome
        return
    selection = fam.select(index, query)
    assert selection.receipt.got_units == (outcome,) * 6
    assert all(wanted > 5 for wanted in selection.receipt.uncapped)
    assert selection.log_weight is not None
    if policy == "dense":
        assert not any(weights.any() for weights in selection.log_weight)
        return
    again = fam.select(index, query)
    others = fam.select(index, replace(query, seed=8))
    same = [rows.tolist() for rows in selection.positions]
    assert [rows.tolist() for rows in again.positions] == same
    assert [rows.tolist() for rows in others.positions] != same


def test_appending_is_building_and_a_cut_is_building_less() -> None:
    fam = family(4, 10, meanTokens=100)
    k, v = rows_of(4, 300)
    index = fam.build(SOURCE, k[:70], v[:70], NO_EVIDENCE)
    first = index
    for row in range(70, 300):
        index = fam.append(index, k[row : row + 1], v[row : row + 1], NO_EVIDENCE)
    cut = fam.edit(index, Edit(first=90, epoch=0, truncated=True))
    assert isinstance(cut, HashedKeys)
    for grown, rows in ((index, 300), (cut, 90), (first, 70)):
        whole = fam.build(SOURCE, k[:rows], v[:rows], NO_EVIDENCE)
        assert np.array_equal(grown.codes.entries, whole.codes.entries)
        assert torch.equal(grown.mean, whole.mean)
        assert grown.tabled == whole.tabled
        query = Query(query_of(1), rows, SOURCE)
        one, other = fam.select(grown, query), fam.select(whole, query)
        assert [r.tolist() for r in one.positions] == [r.tolist() for r in other.positions]
    assert first.facts.covered == 70
    assert first.facts.digest != index.facts.digest


def _contract(**changed: Any) -> Any:
    return lambda index: replace(index, contract=replace(index.contract, **changed))


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        pytest.param(_contract(min_tables=1), Reason.COLLISION_RULE, "weighs rows by 1", id="N7-31"),
        pytest.param(_contract(bits=4), Reason.SELECTOR_STATE_MIXED, "hashBits", id="N7-32"),
        pytest.param(_contract(tables=13), Reason.SELECTOR_STATE_MIXED, "tables", id="N7-33"),
        pytest.param(
            lambda index: replace(index, projector=Projector.drawn(1, 1, 16, 3, 12)),
            Reason.SELECTOR_STATE_MIXED,
            "projector",
            id="N7-37",
        ),
        pytest.param(
            lambda index: replace(index, mean=index.mean + 1),
            Reason.SELECTOR_STATE_MIXED,
            "mean",
            id="N7-38",
        ),
        pytest.param(
            lambda index: replace(index, codes=index.codes.first(9)),
            Reason.SELECTOR_STATE_MIXED,
            "codes",
            id="codes",
        ),
        pytest.param(
            lambda index: replace(index, centred=index.centred.first(9)),
            Reason.SELECTOR_STATE_MIXED,
            "keys",
            id="keys",
        ),
        pytest.param(
            lambda index: replace(index, tabled=32), Reason.SELECTOR_STATE_MIXED, "buckets", id="buckets"
        ),
        pytest.param(
            lambda index: replace(index, facts=replace(index.facts, selector_digest="sha256:00")),
            Reason.SELECTOR_STALE,
            "another selector",
            id="other-parameters",
        ),
        pytest.param(
            lambda index: replace(
                index, facts=replace(index.facts, source=replace(SOURCE, position_epoch=1))
            ),
            Reason.POSITION_CONTRACT_MISMATCH,
            "position epoch 1",
            id="other-positions",
        ),
    ],
)
def test_parts_of_other_generations_are_refused(spoil: Any, reason: Reason, words: str) -> None:
    fam = family()
    k, v = rows_of(2, 70)
    index = fam.build(SOURCE, k, v, NO_EVIDENCE)
    with pytest.raises(CoreError) as refused:
        fam.select(spoil(index), Query(query_of(1), 70, SOURCE))
    assert refused.value.reason is reason
    assert words in refused.value.message


def _weights(change: Any) -> Any:
    return lambda one: replace(one, log_weight=tuple(change(weights.copy()) for weights in one.log_weight))


def _put(at: int, value: float) -> Any:
    def change(weights: np.ndarray) -> np.ndarray:
        weights[at] = value
        return weights

    return _weights(change)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(_put(5, np.inf), Reason.ZERO_PROBABILITY, id="N7-34"),
        pytest.param(_put(5, -0.1), Reason.PROBABILITY_RANGE, id="N7-35"),
        pytest.param(_put(5, np.nan), Reason.PROBABILITY_RANGE, id="no-number"),
        pytest.param(_put(0, 0.5), Reason.PROBABILITY_RANGE, id="N7-36"),
        pytest.param(lambda one: replace(one, log_weight=None), Reason.ESTIMATOR_CONTRACT, id="N7-39"),
        pytest.param(_weights(lambda weights: weights[1:]), Reason.ESTIMATOR_CONTRACT, id="short"),
        pytest.param(
            lambda one: replace(one, receipt=replace(one.receipt, detail={})),
            Reason.ESTIMATOR_CONTRACT,
            id="no-estimator",
        ),
        pytest.param(
            lambda one: replace(one, receipt=replace(one.receipt, guarantee=Guarantee.EXACT)),
            Reason.UNDECLARED_APPROXIMATION,
            id="N7-40",
        ),
    ],
)
def test_a_sample_that_is_none_is_refused(spoil: Any, reason: Reason) -> None:
    fam = family(2, 12)
    k, v = rows_of(2, 70)
    selection = fam.select(fam.build(SOURCE, k, v, NO_EVIDENCE), Query(query_of(1), 70, SOURCE))
    static = np.array([0, 1, 67, 68, 69])
    check_sample(selection, static)
    with pytest.raises(CoreError) as refused:
        check_sample(spoil(selection), static)
    assert refused.value.reason is reason


def test_a_key_that_is_no_number_is_no_sample() -> None:
    fam = family(1, 8)
    k, v = rows_of(2, 40)
    k[35, 0, 0] = torch.nan
    index = fam.build(SOURCE, k, v, NO_EVIDENCE)
    q = query_of(1)
    codes = module.lsh_hash_torch(q, index.projector.planes, bits=1)[0, 0].numpy()
    assert (codes == 0).sum() >= 2
    with pytest.raises(CoreError) as refused:
        fam.select(index, Query(q, 40, SOURCE))
    assert refused.value.reason is Reason.PROBABILITY_RANGE


@pytest.mark.parametrize(
    ("parameters", "reason", "words"),
    [
        ({"tables": 3}, Reason.MANIFEST_INVALID, "magicPig.hashBits must be given"),
        ({"hashBits": 17, "tables": 3}, Reason.MANIFEST_INVALID, "from 1 to 16, not 17"),
        ({"hashBits": 2, "tables": 1}, Reason.COLLISION_RULE, "minTables 2 of magicPig.tables 1"),
        ({"hashBits": 16, "tables": 900}, Reason.MANIFEST_INVALID, "2^16 buckets"),
        ({"hashBits": 2, "tables": 9, "variant": "mine"}, Reason.MANIFEST_INVALID, "one of paper"),
        ({"hashBits": 2, "tables": 9, "planes": 1}, Reason.MANIFEST_INVALID, "no parameters planes"),
    ],
    ids=["absent", "too-large", "rule", "memory", "variant", "unknown"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, Any], reason: Reason, words: str) -> None:
    with pytest.raises(CoreError) as refused:
        MagicPig.from_manifest(selector("magicPig", parameters, {"tokens": 4}), SMALL, 16)
    assert refused.value.reason is reason
    assert words in refused.value.message
