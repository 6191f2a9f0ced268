"""The certified scan: bounds that no row breaks, a share that is really read, and nothing known by chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import NO_EVIDENCE, Edit, Query, Shape
from kvtier_core.selectors.families.certified_scan import CertifiedScan, CodedKeys, coded
from kvtier_kernels.state import AttentionState, LogitFrame
from tests.unit.selectors.selector_cases import SMALL, SOURCE, logits_of, query_of, rows_of, selector

SMOLLM = Shape(query_heads=9, kv_heads=3, head_dim=64, scale=0.125)


def family(
    most: str = "0.05", tokens: int = 40, shape: Shape = SMALL, policy: str = "truncate", **more: object
) -> CertifiedScan:
    declared = selector(
        "certifiedScan",
        {"maxOmittedMass": most},
        {"tokens": tokens, "capPolicy": policy},
        **({"persistentRows": {"sink": 2, "recent": 4}} | more),
    )
    return CertifiedScan.from_manifest(declared, shape, 16)


def built(scan: CertifiedScan, seed: int, count: int, **more: float) -> tuple[CodedKeys, torch.Tensor]:
    k, v = rows_of(seed, count, scan.shape, **more)
    return scan.build(SOURCE, k, v, NO_EVIDENCE), k


@pytest.mark.parametrize("shape", [SMALL, SMOLLM], ids=["small", "smollm"])
@pytest.mark.parametrize(
    ("q_spread", "k_spread"),
    [(1.0, 1.0), (1e-3, 1e3), (1e3, 1e-3), (30.0, 30.0), (1e-20, 1e-18)],
    ids=["plain", "small-q", "small-k", "loud", "denormal"],
)
def test_no_logit_lies_outside_its_bounds(shape: Shape, q_spread: float, k_spread: float) -> None:
    """Over a million logits in all cases together, in float64 and as float32 attention rounds them."""
    scan = family(shape=shape)
    count = 4096 if shape is SMALL else 2048
    for seed in range(5):
        index, k = built(scan, seed, count, spread=k_spread)
        q = query_of(100 + seed, shape, spread=q_spread)
        lower, upper = scan.bounds(index, q[0].numpy())
        truth = logits_of(q, k, shape)
        rounded = np.stack(
            [(k[:, h // shape.group] @ (q[0, h] * shape.scale)).numpy() for h in range(shape.query_heads)]
        )
        for logits in (truth, rounded):
            assert (lower <= logits).all()
            assert (logits <= upper).all()


def test_the_bounds_are_tight_enough_to_be_of_use() -> None:
    scan = family(shape=SMOLLM)
    index, k = built(scan, 1, 512)
    lower, upper = scan.bounds(index, query_of(2, SMOLLM)[0].numpy())
    assert np.median(upper - lower) < 0.25 * logits_of(query_of(2, SMOLLM), k, SMOLLM).std()


@given(
    seed=st.integers(0, 10_000), count=st.integers(8, 200), most=st.sampled_from(["0", "0.01", "0.2", "1"])
)
def test_the_share_read_is_at_least_what_was_certified(seed: int, count: int, most: str) -> None:
    scan = family(most, tokens=1000)
    index, k = built(scan, seed, count)
    q = query_of(seed + 1)
    selection = scan.select(index, Query(q, count, SOURCE))
    weights = np.exp(logits_of(q, k))
    share = weights / weights.sum(axis=1, keepdims=True)
    assert selection.receipt.omitted_mass is not None
    for head in range(SMALL.query_heads):
        rows = selection.positions[head // SMALL.group]
        omitted = 1.0 - share[head, rows].sum()
        assert omitted <= selection.receipt.omitted_mass[head] + 1e-12
        assert selection.receipt.omitted_mass[head] <= float(most) + 1e-12


def upper_bounds(q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """[Hq, n], as the description says: a key is its codes of 1/127 of its largest channel, wrong by half a
    step in each channel, whatever the sign of q there."""
    keys, query = k.double().numpy(), q[0].double().numpy()
    step = np.abs(keys).max(-1, keepdims=True) / 127
    image = np.rint(keys / step) * step
    out = [
        query[head] @ image[:, head // SMALL.group].T
        + np.abs(query[head]).sum() * step[:, head // SMALL.group, 0] / 2
        for head in range(SMALL.query_heads)
    ]
    bounds: np.ndarray = SMALL.scale * np.array(out)
    return bounds


def best_rows(scores: np.ndarray, counts: list[int]) -> list[list[int]]:
    """Of each KV head, as many by the largest score of its group; neither the two first nor the four last."""
    free = np.arange(2, COUNT - 4)
    grouped = scores.reshape(SMALL.kv_heads, SMALL.group, -1).max(axis=1)[:, free]
    return [
        sorted(free[np.argsort(-one, kind="stable")[:count]].tolist())
        for one, count in zip(grouped, counts, strict=True)
    ]


def boxes(q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """Quest's: a row counts what the box of its page of 16 allows."""
    keys, query = k.double().numpy(), q[0].double().numpy()
    out = np.empty((SMALL.query_heads, len(keys)))
    for first in range(0, len(keys), 16):
        page = keys[first : first + 16]
        for head in range(SMALL.query_heads):
            mine = page[:, head // SMALL.group]
            largest = np.maximum(query[head] * mine.max(0), query[head] * mine.min(0)).sum()
            out[head, first : first + 16] = largest
    return out


def summed(q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """SparQ's rule for a group: the sum of its heads' logits and not the largest."""
    grouped = logits_of(q, k).reshape(SMALL.kv_heads, SMALL.group, -1).sum(axis=1)
    return np.repeat(grouped, SMALL.group, axis=0)


WANTED, COUNT = 12, 150


def of_seed(seed: int) -> tuple[CertifiedScan, CodedKeys, torch.Tensor, torch.Tensor]:
    scan = family("0.000001", tokens=WANTED)
    k, v = rows_of(seed, COUNT, SMALL)
    return scan, scan.build(SOURCE, k, v, NO_EVIDENCE), k, query_of(seed + 1)


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_read_by_the_bound_of_the_description(seed: int) -> None:
    scan, index, k, q = of_seed(seed)
    chosen = [one.tolist() for one in scan.select(index, Query(q, COUNT, SOURCE)).units]
    assert all(chosen)
    assert chosen == best_rows(upper_bounds(q, k), [len(one) for one in chosen])


@pytest.mark.parametrize("wrong", [boxes, summed], ids=["quest", "sparq"])
def test_another_score_would_read_other_rows(
    wrong: Callable[[torch.Tensor, torch.Tensor], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above must be able to fail."""
    differs = False
    for seed in range(8):
        scan, index, k, q = of_seed(seed)
        scores = wrong(q, k)

        def replaced(*_: object, scores: np.ndarray = scores) -> tuple[np.ndarray, np.ndarray]:
            return scores - 1, scores

        with monkeypatch.context() as patched:
            patched.setattr(CertifiedScan, "bounds", replaced)
            chosen = [one.tolist() for one in scan.select(index, Query(q, COUNT, SOURCE)).units]
        differs |= chosen != best_rows(upper_bounds(q, k), [len(one) for one in chosen])
    assert differs


def attended(selection_rows: tuple[np.ndarray, ...], q: torch.Tensor, k: torch.Tensor) -> AttentionState:
    logits = torch.from_numpy(logits_of(q, k)).float()
    m, l = torch.empty(1, SMALL.query_heads), torch.empty(1, SMALL.query_heads)
    for head in range(SMALL.query_heads):
        mine = logits[head, torch.from_numpy(selection_rows[head // SMALL.group])]
        m[0, head], l[0, head] = mine.max(), torch.exp(mine - mine.max()).sum()
    return AttentionState(m, l, torch.zeros(1, SMALL.query_heads, 4), LogitFrame(SMALL.scale))


def test_the_certificate_after_attention_is_sound_and_no_weaker_than_the_one_before() -> None:
    scan = family("1", tokens=12)
    index, k = built(scan, 3, 150)
    q = query_of(4)
    selection = scan.select(index, Query(q, 150, SOURCE))
    certified = selection.certified(attended(selection.positions, q, k))
    weights = np.exp(logits_of(q, k))
    assert certified is not None and selection.receipt.omitted_mass is not None
    for head, (sound, before) in enumerate(zip(certified, selection.receipt.omitted_mass, strict=True)):
        rows = selection.positions[head // SMALL.group]
        true = weights[head, rows].sum() / weights[head].sum()
        assert 1 - before - 1e-4 <= sound <= true


@pytest.mark.parametrize(
    ("policy", "outcome"), [("truncate", 6), ("dense", 144), ("error", Reason.CAP_VIOLATION)], ids=str
)
def test_a_budget_that_does_not_reach_the_bound_ends_by_its_policy(policy: str, outcome: object) -> None:
    scan = family("0", tokens=6, policy=policy)
    index, _ = built(scan, 5, 150)
    query = Query(query_of(6), 150, SOURCE)
    if isinstance(outcome, Reason):
        with pytest.raises(CoreError) as refused:
            scan.select(index, query)
        assert refused.value.reason is outcome
        return
    receipt = scan.select(index, query).receipt
    assert receipt.got_units == (outcome, outcome)
    assert receipt.uncapped == (144, 144)
    assert receipt.omitted_mass is not None
    assert (max(receipt.omitted_mass) > 0) == (policy == "truncate")


def test_a_row_of_which_nothing_is_known_is_read() -> None:
    scan = family("1", tokens=3)
    k, v = rows_of(7, 60)
    k[20, 0, 3] = torch.nan
    k[30, 1, 0] = torch.inf
    selection = scan.select(scan.build(SOURCE, k, v, NO_EVIDENCE), Query(query_of(8), 60, SOURCE))
    assert 20 in selection.units[0]
    assert 30 in selection.units[1]
    assert 20 not in selection.units[1]


def test_appending_row_by_row_is_building_at_once_and_old_handles_stay() -> None:
    scan = family()
    k, v = rows_of(9, 40)
    index = scan.build(SOURCE, k[:10], v[:10], NO_EVIDENCE)
    first = index
    for row in range(10, 40):
        index = scan.append(index, k[row : row + 1], v[row : row + 1], NO_EVIDENCE)
    whole = scan.build(SOURCE, k, v, NO_EVIDENCE)
    assert np.array_equal(index.codes.entries, whole.codes.entries)
    assert np.array_equal(index.scales.entries, whole.scales.entries)
    assert first.facts.covered == 10
    query = Query(query_of(1), 40, SOURCE)
    one, other = scan.select(index, query), scan.select(whole, query)
    assert [rows.tolist() for rows in one.positions] == [rows.tolist() for rows in other.positions]


def test_an_edit_cuts_and_an_index_of_other_positions_is_refused() -> None:
    scan = family()
    index, _ = built(scan, 2, 30)
    cut = scan.edit(index, Edit(first=12, epoch=1, truncated=True))
    assert isinstance(cut, CodedKeys) and cut.facts.covered == 12
    with pytest.raises(CoreError) as refused:
        scan.select(cut, Query(query_of(1), 13, SOURCE))
    assert refused.value.reason is Reason.POSITION_CONTRACT_MISMATCH
    moved = replace(SOURCE, position_epoch=1)
    assert scan.select(cut, Query(query_of(1), 13, moved)).receipt.unindexed == 1


@given(st.integers(0, 1000), st.floats(1e-30, 1e30))
def test_half_a_step_is_the_largest_error_of_a_channel(seed: int, spread: float) -> None:
    k, _ = rows_of(seed, 8, spread=spread)
    codes, scales = coded(k.numpy())
    error = np.abs(k.double().numpy() - codes * scales[..., None].astype(np.float64))
    assert (error <= scales[..., None].astype(np.float64) / 2 * (1 + 1e-12)).all()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "certifiedScan.maxOmittedMass must be given"),
        ({"maxOmittedMass": "1.5"}, "must be a decimal from 0 to 1, not '1.5'"),
        ({"maxOmittedMass": "many"}, "must be a decimal from 0 to 1"),
        ({"maxOmittedMass": "0.1", "bits": 8}, "has no parameters bits; legal: maxOmittedMass"),
    ],
    ids=["absent", "too-large", "no-number", "unknown"],
)
def test_parameters_are_refused_by_name(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(CoreError) as refused:
        CertifiedScan.from_manifest(selector("certifiedScan", parameters, {"tokens": 4}), SMALL, 16)
    assert refused.value.reason is Reason.MANIFEST_INVALID
    assert words in refused.value.message
