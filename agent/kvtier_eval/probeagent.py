"""The two arms of a running agent, for the model in this process: probe sessions by the transformers adapter.

Why it exists: the candidate must be measured where it runs. It must not know plans or gates.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.hf import KvtierCache, attach
from kvtier_core.errors import Reason
from kvtier_eval.probing import Answer, Arm, Attempt, ProbePrompt

TENANT = "kvtier-probe"
FRAME_SECONDS = 60.0
_REASONS = frozenset(Reason)
_APPROXIMATE = "APPROXIMATE"


class AgentTarget:
    """Implements probing.Target; a context manager, in which the model attends through the agent and tells
    selectors what they need of it."""

    def __init__(
        self,
        client: AttentionClient,
        model: Any,
        namespace: str,
        name: str,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._sleep = sleep
        self._model = model
        self._namespace, self._name = namespace, name
        # What it states proves nothing: the digest of the weights is the plan's to name.
        self._fingerprint = declared_fingerprint(client, namespace, name)
        self._attachment = attach(model)

    def __enter__(self) -> AgentTarget:
        return self

    def __exit__(self, *raised: object) -> None:
        self._attachment.detach()

    def attempt(self) -> Attempt | None:
        """Of the candidate that the agent holds now."""
        about = self._client.describe_cache(self._namespace, self._name)
        if not about.candidate_digest:
            return None
        return Attempt(about.window.rollout_uid, about.window.attempt, about.candidate_digest)

    @contextlib.contextmanager
    def open(self, arm: Arm, tokens: int) -> Iterator[_Session]:
        """KvtierError NO_CANDIDATE where the agent holds none."""
        cache = KvtierCache(
            self._client,
            namespace=self._namespace,
            name=self._name,
            model_fingerprint=self._fingerprint,
            config=self._model.config,
            evidence=self._attachment.evidence,
            tenant=TENANT,
            probe=True,
            forced_arm="candidate" if arm is Arm.CANDIDATE else "baseline",
            max_tokens=tokens,
            deadline_seconds=FRAME_SECONDS,
        )
        with cache:
            yield _Session(self._model, cache, self._sleep)


class _Session:
    """Implements probing.ProbeSession."""

    def __init__(self, model: Any, cache: KvtierCache, sleep: Callable[[float], None]) -> None:
        self._model = model
        self._cache = cache
        self._sleep = sleep

    @property
    def attempt(self) -> Attempt | None:
        opened = self._cache.opened
        if not opened.HasField("window"):
            return None
        window = opened.window
        return Attempt(window.rollout_uid, window.attempt, window.candidate_digest)

    @torch.no_grad()
    def answer(self, prompt: ProbePrompt, pause: float = 0.0) -> Answer:
        """Greedy, up to the first wrong token."""
        *context, last = prompt.passes
        for ids in context:
            self._model(torch.tensor([ids]), cache=self._cache, use_cache=True, logits_to_keep=1)
        # What a prefill says of itself is not a step of an answer.
        lost = _lost([one.fallback for one in self._cache.take_receipts()])
        if pause:
            self._sleep(pause)
        approximate = matched = 0
        fallbacks: set[str] = set()
        step = torch.tensor([last])
        for wanted in prompt.gold[: prompt.needed]:
            logits = self._model(step, cache=self._cache, use_cache=True, logits_to_keep=1).logits
            receipts = self._cache.take_receipts()
            approximate += any(one.exactness == _APPROXIMATE for one in receipts)
            reasons = [one.fallback for one in receipts if one.fallback]
            lost = lost or _lost(reasons)
            fallbacks.update(reasons)
            if int(logits[0, -1].argmax()) != wanted:
                break
            matched += 1
            step = torch.tensor([[wanted]])
        return Answer(matched, approximate, tuple(sorted(fallbacks)), lost)

    def report(self, gate: str, probe_set: str, prompt: str, difference: float) -> str:
        answer = self._cache.report_outcome(
            probe_gate=gate, probe_set_digest=probe_set, prompt_digest=prompt, difference=difference
        )
        return "" if answer.counted else answer.why_not or "no reason given"


def _lost(fallbacks: list[str]) -> str:
    """Why the agent took the candidate away. The core's own fallbacks are reasons of the wire's closed set;
    release control speaks of causes."""
    gone = (one for one in fallbacks if one and (one not in _REASONS or one == Reason.LEASE_EXPIRED))
    return next(gone, "")
