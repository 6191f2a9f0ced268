"""One prompt under full attention: its rows, what it answers, and the evidence that selectors may ask for.

Why it exists: every selector of a prompt is judged on the same K/V and the same tokens, so they are made
once. It must not know any selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtier_core.selectors.contract import Need, Shape
from kvtier_eval.forward import Decoder
from kvtier_eval.tasks import Prompt, Task

NEEDLE_SHARE = 0.1
"""A head whose first query puts more than this on the evidence, under full attention, is a needle head."""
SHORT_CONTEXT = 512


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Queries [T, Hq, d] of the last T of n rows [n, Hk, d], each over the rows up to its own: [T, Hq, d]."""
    t, n = q.shape[0], k.shape[0]
    mask = None if t == n else torch.ones(t, n, dtype=torch.bool).tril(n - t)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


class Recorder:
    """Full attention that keeps every row, and what else is asked for. Rows of a layer: [n, Hk, d]."""

    def __init__(self, layers: int, shape: Shape, keep: frozenset[Need]) -> None:
        self._shape = shape
        self._keep = keep
        empty = torch.empty(0, shape.kv_heads, shape.head_dim)
        self.k = [empty] * layers
        self.v = [empty] * layers
        self.q = [torch.empty(0, shape.query_heads, shape.head_dim)] * layers
        self.hidden: list[Tensor] = [torch.empty(0)] * layers
        self.surprisal = torch.empty(0, dtype=torch.float64)
        """[n], of the context's rows, when it was asked for; 0 of the first."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        self.k[layer] = torch.cat([self.k[layer], k])
        self.v[layer] = torch.cat([self.v[layer], v])
        if Need.PREFILL_QUERIES in self._keep:
            self.q[layer] = torch.cat([self.q[layer], q])
        if Need.PREVIOUS_HIDDEN_STATE in self._keep:
            before = self.hidden[layer]
            self.hidden[layer] = torch.cat([before, hidden]) if len(before) else hidden
        return causal_attention(q, self.k[layer], self.v[layer], self._shape.scale)

    def cut(self, rows: int) -> None:
        """Forgets rows from `rows` on."""
        for part in (self.k, self.v, self.q, self.hidden):
            part[:] = [one[:rows] for one in part]

    def drop(self, first: int, last: int, inv_freq: Tensor) -> None:
        """Rows [first, last) go; keys behind them turn back by as many positions."""
        angle = -float(last - first) * inv_freq.double()
        cos, sin = (torch.cat([part, part]).float() for part in (angle.cos(), angle.sin()))
        for layer, k in enumerate(self.k):
            tail = k[last:]
            half = tail.shape[-1] // 2
            turned = torch.cat([-tail[..., half:], tail[..., :half]], dim=-1)
            self.k[layer] = torch.cat([k[:first], tail * cos + turned * sin])
        for part in (self.v, self.q, self.hidden):
            part[:] = [torch.cat([one[:first], one[last:]]) if len(one) else one for one in part]


@dataclass(frozen=True, slots=True)
class Forced:
    """Tokens that a selector is led along. inputs: what it reads, the context's last token first. targets:
    what should follow each. k, v: per layer, rows of `inputs` under full attention. logs: float32 [T,
    vocabulary], ln P under full attention. surprisal: float64 [T] of `inputs`, given what stands before
    each."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    logs: Tensor
    surprisal: Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt under full attention.

    rows: of the context but its last token. before: rows as they were before something was dropped, None when
    nothing was. mark: rows of the context but its last. gold: led along the right answer. own: along full
    attention's own tokens; the same object when they are the same. matched: leading tokens of the answer that
    full attention gives. evidence: rows now. needle_heads: (layer, query head). short_losses: float64 [T]
    with only the last 512 rows, for perplexity. reprefill: tokens of the answer that full attention gives
    without the dropped rows, prefilled anew.
    """

    prompt: Prompt
    rows: Recorder
    before: Recorder | None
    mark: int
    gold: Forced
    own: Forced
    matched: int
    evidence: tuple[tuple[int, int], ...]
    needle_heads: tuple[tuple[int, int], ...]
    short_losses: Tensor | None = None
    reprefill: int | None = None

    @property
    def answered(self) -> bool:
        return not self.prompt.task.asks or self.matched >= self.prompt.needed


def matched(logs: Tensor, targets: Sequence[int]) -> int:
    """Leading tokens that greedy decoding gives: the first of the largest at every step."""
    same = (logs.argmax(-1) == torch.tensor(list(targets))).tolist()
    return same.index(False) if False in same else len(same)


def prepare(decoder: Decoder, prompt: Prompt, keep: frozenset[Need]) -> Prepared:
    recorder = Recorder(decoder.layers, decoder.shape, keep)
    ids, gold = list(prompt.ids), list(prompt.gold)
    before, now = None, ids
    if prompt.dropped is None:
        states = decoder.run(ids[:-1], 0, recorder)
    else:
        first, last = prompt.dropped
        states = decoder.run(ids[: prompt.indexed], 0, recorder)
        before = _copied(recorder, decoder, keep)
        if Need.SURPRISAL in keep:
            before.surprisal = _surprisal(decoder, states, ids[: prompt.indexed])
        recorder.drop(first, last, decoder.inv_freq)
        now = ids[:first] + ids[last:]
        at = prompt.indexed - (last - first)
        later = decoder.run(now[at:-1], at, recorder)
        states = torch.cat([states[:first], states[last:], later])
    mark = len(now) - 1
    first_surprisal = torch.zeros(1, dtype=torch.float64)
    if Need.SURPRISAL in keep:
        recorder.surprisal = _surprisal(decoder, states, now[:-1])
        first_surprisal = decoder.losses(states[-1:], now[-1:])
    right = _forced(decoder, recorder, mark, [now[-1], *gold[:-1]], gold, first_surprisal)
    hits = matched(right.logs, gold)
    own = right
    if prompt.task.asks and hits < len(gold):
        own = _greedy(decoder, recorder, mark, now[-1], len(gold), first_surprisal)
    evidence = tuple(_moved(span, prompt.dropped) for span in prompt.evidence)
    needles = _needle_heads(decoder, recorder, own, evidence, mark)
    recorder.cut(mark)
    return Prepared(
        prompt,
        recorder,
        before,
        mark,
        right,
        own,
        hits,
        evidence,
        needles,
        _short(decoder, now, gold) if prompt.task is Task.PERPLEXITY else None,
        None if prompt.dropped is None else _reprefill(decoder, now, gold),
    )


def _surprisal(decoder: Decoder, states: Tensor, ids: Sequence[int]) -> Tensor:
    """float64 [n] of tokens `ids`, from the states of as many or one less of them."""
    later = decoder.losses(states[: len(ids) - 1], list(ids[1:]))
    return torch.cat([torch.zeros(1, dtype=torch.float64), later])


def _copied(recorder: Recorder, decoder: Decoder, keep: frozenset[Need]) -> Recorder:
    """Tensors are never written in place, so the lists are enough."""
    made = Recorder(decoder.layers, decoder.shape, keep)
    made.k, made.v, made.q, made.hidden = (
        list(part) for part in (recorder.k, recorder.v, recorder.q, recorder.hidden)
    )
    return made


def _forced(
    decoder: Decoder,
    recorder: Recorder,
    mark: int,
    inputs: Sequence[int],
    targets: Sequence[int],
    first_surprisal: Tensor,
) -> Forced:
    recorder.cut(mark)
    logs = decoder.logits(decoder.run(list(inputs), mark, recorder)).log_softmax(-1)
    return _along(recorder, mark, inputs, targets, logs, first_surprisal)


def _along(
    recorder: Recorder,
    mark: int,
    inputs: Sequence[int],
    targets: Sequence[int],
    logs: Tensor,
    first_surprisal: Tensor,
) -> Forced:
    k, v = (tuple(one[mark:].clone() for one in part) for part in (recorder.k, recorder.v))
    losses = -logs.double().gather(1, torch.tensor(list(targets))[:, None])[:, 0]
    surprisal = torch.cat([first_surprisal, losses[:-1]])
    return Forced(tuple(inputs), tuple(targets), k, v, logs, surprisal)


def _greedy(
    decoder: Decoder, recorder: Recorder, mark: int, last: int, count: int, first_surprisal: Tensor
) -> Forced:
    recorder.cut(mark)
    inputs, targets, logs = [last], [], []
    for at in range(count):
        logs.append(decoder.logits(decoder.run([inputs[-1]], mark + at, recorder)).log_softmax(-1))
        targets.append(int(logs[-1].argmax()))
        inputs.append(targets[-1])
    return _along(recorder, mark, inputs[:-1], targets, torch.cat(logs), first_surprisal)


def _moved(span: tuple[int, int], dropped: tuple[int, int] | None) -> tuple[int, int]:
    if dropped is None or span[0] < dropped[0]:
        return span
    by = dropped[1] - dropped[0]
    return span[0] - by, span[1] - by


class _FirstQueries:
    """Full attention that notes what the first query of each head puts on the evidence."""

    def __init__(self, recorder: Recorder, shape: Shape, wanted: Tensor) -> None:
        self._recorder = recorder
        self._shape = shape
        self._wanted = wanted
        self.found: list[tuple[int, int]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        k = torch.cat([self._recorder.k[layer], k])
        v = torch.cat([self._recorder.v[layer], v])
        logits = torch.einsum("hgd,nhd->hgn", q[0].view(self._shape.kv_heads, -1, self._shape.head_dim), k)
        shares = (logits * self._shape.scale).softmax(-1)[..., self._wanted].sum(-1).flatten()
        self.found += [(layer, head) for head, share in enumerate(shares.tolist()) if share > NEEDLE_SHARE]
        return causal_attention(q, k, v, self._shape.scale)


def _needle_heads(
    decoder: Decoder, recorder: Recorder, own: Forced, evidence: Sequence[tuple[int, int]], mark: int
) -> tuple[tuple[int, int], ...]:
    if not evidence:
        return ()
    recorder.cut(mark)
    wanted = torch.cat([torch.arange(first, last) for first, last in evidence])
    probe = _FirstQueries(recorder, decoder.shape, wanted)
    decoder.run([own.inputs[0]], mark, probe)
    return tuple(probe.found)


def _short(decoder: Decoder, ids: Sequence[int], gold: Sequence[int]) -> Tensor:
    """Losses of the answer with only the end of the context."""
    kept = list(ids[-SHORT_CONTEXT:])
    states = decoder.run(kept + list(gold[:-1]), 0, Recorder(decoder.layers, decoder.shape, frozenset()))
    return decoder.losses(states[len(kept) - 1 :], list(gold))


def _reprefill(decoder: Decoder, ids: Sequence[int], gold: Sequence[int]) -> int:
    recorder = Recorder(decoder.layers, decoder.shape, frozenset())
    decoder.run(list(ids[:-1]), 0, recorder)
    logs = decoder.logits(decoder.run([ids[-1], *gold[:-1]], len(ids) - 1, recorder))
    return matched(logs, gold)
