"""Replay against transformers itself: the same rows and tokens must give the same probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier_core.selectors.contract import NO_EVIDENCE, Need, Query, Source
from kvtier_eval.baselines import Baseline, Kind
from kvtier_eval.metrics import Collector, read_mask, token_metrics
from kvtier_eval.prepare import Prepared, matched, prepare
from kvtier_eval.replay import Regime, Replay, Setup
from kvtier_eval.tasks import Prompt, Task, make_prompt
from tests.unit.eval.eval_cases import MATERIAL, SHAPE, tiny_decoder, tiny_model

OWN, OF_FULL = Regime.OWN_ROWS, Regime.FULL_ROWS


def prepared_for(task: Task, *, index: int = 0, keep: frozenset[Need] = frozenset()) -> Prepared:
    prompt = make_prompt(task, MATERIAL, length=240, steps=6, seed=2, index=index)
    return prepare(tiny_decoder(), prompt, keep)


def family(kind: Kind, *, tokens: int = 24, dense: tuple[int, ...] = ()) -> Baseline:
    return Baseline(kind, SHAPE, tokens, sink=2, recent=8, dense_layers=frozenset(dense), page=4, seed=3)


def replay(
    kind: Kind,
    prepared: Prepared,
    regime: Regime = OWN,
    *,
    dense: tuple[int, ...] = (),
    collector: Collector | None = None,
) -> Tensor:
    setup = Setup(2, 8, regime, append_every=3)
    made = Replay(
        tiny_decoder(),
        family(kind, dense=dense),
        prepared,
        prepared.own,
        setup,
        seed=1,
        collector=collector,
    )
    return made.logs()


def by_transformers(prepared: Prepared, visible: Tensor | None = None) -> Tensor:
    """ln P of the model's own forward over all tokens. visible: bool [n, n], which rows a row sees."""
    ids = [*prepared.prompt.ids[:-1], *prepared.own.inputs]
    mask = None
    if visible is not None:
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
    with torch.no_grad():
        out = tiny_model()(torch.tensor([ids]), attention_mask=mask, use_cache=False)
    return out.logits[0, -len(prepared.own.inputs) :].log_softmax(-1)


@pytest.mark.parametrize("regime", list(Regime))
@pytest.mark.parametrize("task", [Task.COPY_SPAN, Task.APPENDED_NEEDLE, Task.PERPLEXITY])
def test_every_row_read_is_the_models_own_answer(task: Task, regime: Regime) -> None:
    prepared = prepared_for(task)
    torch.testing.assert_close(prepared.own.logs, by_transformers(prepared), rtol=1e-4, atol=1e-4)
    got = replay(Kind.FULL, prepared, regime)
    torch.testing.assert_close(got, prepared.own.logs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", [(), (0,), (0, 1, 2)])
def test_recent_rows_are_a_mask_of_transformers(dense: tuple[int, ...]) -> None:
    """The last rows depend on no query, so one masked forward of the whole sequence says the same."""
    prepared = prepared_for(Task.COPY_SPAN)
    count = prepared.mark + len(prepared.own.inputs)
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    for row in range(prepared.mark, count):
        visible[row, 2 : row + 1 - 8 - 24] = False
    if len(dense) == 3:
        visible = torch.ones(count, count, dtype=torch.bool).tril()
    got = replay(Kind.RECENT, prepared, OWN, dense=dense)
    if dense == (0,):
        assert not torch.allclose(got, by_transformers(prepared, visible), atol=1e-3)
    else:
        torch.testing.assert_close(got, by_transformers(prepared, visible), rtol=1e-4, atol=1e-4)


def test_the_regimes_differ_when_rows_are_left_out() -> None:
    prepared = prepared_for(Task.COPY_SPAN)
    own, of_full = (replay(Kind.RECENT, prepared, regime) for regime in (OWN, OF_FULL))
    assert not torch.allclose(own[-1], of_full[-1], atol=1e-3)


def test_tokens_that_nobody_forces_are_the_models_own() -> None:
    prepared = prepared_for(Task.PASSKEY)
    assert not prepared.answered and prepared.gold is not prepared.own
    assert prepared.own.logs.argmax(-1).tolist() == list(prepared.own.targets)
    assert prepared.own.inputs[1:] == prepared.own.targets[:-1]
    torch.testing.assert_close(prepared.own.logs, by_transformers(prepared), rtol=1e-4, atol=1e-4)


def test_a_prompt_that_is_answered_is_forced_once() -> None:
    """The answer is what the model says anyway."""
    prompt = make_prompt(Task.PASSKEY, MATERIAL, length=240, steps=6, seed=2, index=0)
    said = prepare(tiny_decoder(), prompt, frozenset()).own.targets
    easy = Prompt(prompt.task, prompt.ids, said, prompt.evidence, prompt.position, prompt.indexed)
    prepared = prepare(tiny_decoder(), easy, frozenset())
    assert prepared.answered and prepared.gold is prepared.own and prepared.matched == len(said)
    assert matched(prepared.own.logs, [said[0], (said[1] + 1) % 256, *said[2:]]) == 1


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.RECENT, Kind.ORACLE_ROW])
def test_dropped_rows_are_gone_and_the_rest_moved(kind: Kind) -> None:
    prepared = prepared_for(Task.DROP_REPOSITION)
    prompt = prepared.prompt
    assert prompt.dropped is not None and prepared.before is not None
    first, last = prompt.dropped
    assert len(prepared.rows.k[0]) == prepared.mark == len(prompt.ids) - (last - first) - 1
    # In the first layer keys depend on nothing but token and position.
    anew = Prompt(prompt.task, prompt.ids[:first] + prompt.ids[last:], prompt.gold, (), 0.5, prepared.mark)
    fresh = prepare(tiny_decoder(), anew, frozenset())
    torch.testing.assert_close(prepared.rows.k[0], fresh.rows.k[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(prepared.rows.k[2], fresh.rows.k[2], atol=1e-2), "layers above saw what is gone"
    assert prepared.reprefill == matched(fresh.gold.logs, list(prompt.gold))
    got = token_metrics(prepared.own.logs, replay(kind, prepared), prepared.own.targets)
    assert (max(got.kl) < 1e-6) is (kind is Kind.FULL)


def test_evidence_is_of_the_rows_it_stands_for() -> None:
    keep = frozenset([Need.PREFILL_QUERIES, Need.PREVIOUS_HIDDEN_STATE, Need.SURPRISAL])
    prepared = prepared_for(Task.PERPLEXITY, keep=keep)
    ids = [*prepared.prompt.ids[:-1], *prepared.own.inputs]
    with torch.no_grad():
        out = tiny_model()(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    logs = out.logits[0].double().log_softmax(-1)
    losses = [0.0] + [-float(logs[at, token]) for at, token in enumerate(ids[1:])]
    found = [*prepared.rows.surprisal.tolist(), *prepared.own.surprisal.tolist()]
    assert found == pytest.approx(losses, abs=1e-3)
    for layer in range(3):
        torch.testing.assert_close(
            prepared.rows.hidden[layer], out.hidden_states[layer][0, : prepared.mark], rtol=1e-4, atol=1e-4
        )
        assert len(prepared.rows.q[layer]) == prepared.mark


def test_needle_heads_are_those_that_look_at_the_evidence() -> None:
    prepared = prepared_for(Task.APPENDED_NEEDLE)
    with torch.no_grad():
        tiny_model().set_attn_implementation("eager")
        ids = torch.tensor([prepared.prompt.ids])
        weights = tiny_model()(ids, output_attentions=True, use_cache=False).attentions
        tiny_model().set_attn_implementation("sdpa")
    ((first, last),) = prepared.evidence
    wanted = {
        (layer, head)
        for layer, all_heads in enumerate(weights)
        for head, row in enumerate(all_heads[0, :, -1])
        if float(row[first:last].sum()) > 0.1
    }
    assert set(prepared.needle_heads) == wanted and wanted


@pytest.mark.parametrize("kind", [Kind.ORACLE_ROW, Kind.ORACLE_PAGE, Kind.RANDOM, Kind.RECENT])
def test_baselines_spend_the_budget_and_no_more(kind: Kind) -> None:
    torch.manual_seed(4)
    k, q = torch.randn(200, 2, 16), torch.randn(1, 6, 16)
    source = Source(b"x", 1)
    index = family(kind).build(source, k[:195], k[:195], NO_EVIDENCE)
    selection = family(kind).select(index, Query(q, 200, source, tail=k[195:]))
    for rows, units in zip(selection.positions, selection.units, strict=True):
        assert len(rows) == 2 + 8 + 24 and len(units) == (6 if kind is Kind.ORACLE_PAGE else 24)
        assert np.all(np.diff(rows) > 0) and set(range(192, 200)) <= set(rows.tolist())


@pytest.mark.parametrize("unit, kind", [(1, Kind.ORACLE_ROW), (4, Kind.ORACLE_PAGE)])
def test_no_choice_of_units_keeps_more_than_the_oracle(unit: int, kind: Kind) -> None:
    """Against every other choice that swaps one unit, over the mass of the group."""
    torch.manual_seed(5)
    k, q = 2 * torch.randn(120, 2, 16), torch.randn(1, 6, 16)
    source = Source(b"x", 1)
    oracle = family(kind)
    selection = oracle.select(oracle.build(source, k, k, NO_EVIDENCE), Query(q, 120, source))
    p = (torch.einsum("hgd,nhd->hgn", q[0].double().view(2, 3, 16), k.double()) * 0.25).softmax(-1)
    read = read_mask(selection, SHAPE, 120)
    for head in range(2):
        shares = p[head].sum(0).numpy()
        candidates = np.arange(2, 112)
        units = np.unique(candidates // unit)
        worth = {int(one): float(shares[candidates[candidates // unit == one]].sum()) for one in units}
        chosen = set(selection.units[head].tolist())
        assert min(worth[one] for one in chosen) >= max(worth[one] for one in set(worth) - chosen)
        assert read[3 * head].sum() == len(selection.positions[head])


def test_a_random_choice_follows_its_seed() -> None:
    torch.manual_seed(6)
    k, source = torch.randn(100, 2, 16), Source(b"x", 1)
    one = family(Kind.RANDOM)
    index = one.build(source, k, k, NO_EVIDENCE)
    q = torch.randn(1, 6, 16)
    first, again, other = (one.select(index, Query(q, 100, source, seed=seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first.positions, again.positions, strict=True))
    assert not np.array_equal(first.positions[0], other.positions[0])


def test_heads_are_measured_where_rows_are_selected() -> None:
    prepared = prepared_for(Task.COPY_SPAN, index=1)
    collector = Collector(3, SHAPE, prepared.needle_heads, prepared.evidence, hot=48)
    replay(Kind.ORACLE_ROW, prepared, dense=(0,), collector=collector)
    found = collector.result()
    by_head = found["excessByHead"]
    assert isinstance(by_head, list) and [one is None for one in by_head] == [True] * 6 + [False] * 12
    persistent = Collector(3, SHAPE, (), (), hot=48)
    replay(Kind.PERSISTENT_ONLY, prepared, dense=(0,), collector=persistent)
    excess = [one["excess"]["mean"] for one in (found, persistent.result())]  # type: ignore[index]
    assert excess[0] > 0.2 and excess[1] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("append_every", [0, 9])
def test_an_index_may_not_lag_behind_the_recent_rows(append_every: int) -> None:
    with pytest.raises(ValueError, match="append_every"):
        Setup(2, 8, OWN, append_every=append_every)
