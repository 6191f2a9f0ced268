"""A person's command as an intent: addressed to the attempt, stage and step that the person saw.

Why it exists: an intent that is late, repeated or meant for another step must be refused by the operator, so
everything that it is judged by is taken from one read, and the write is tied to that read. It must not know
how an intent is obeyed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from kubectl_kvtier.outcomes import Exit, Failure
from kubectl_kvtier.ports import Api, Changed, Json, of_metadata
from kubectl_kvtier.rollouts import read_rollout, status_of
from kvtier_crds.models import KVRollout
from kvtier_crds.models.kvrollout import Verb
from kvtier_crds.models.rolloutstatus import IntentResult, LastIntent
from kvtier_crds.models.stages import StatusStage

PLURAL = "kvrollouts"
TRIES = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """Where the rollout stood when the person decided."""

    attempt: int
    stage: str
    step: int


def seen(rollout: KVRollout) -> Seen:
    status = status_of(rollout)
    return Seen(max(1, status.attempt or 1), str(status.stage or StatusStage.OFF), status.step or 0)


def intent_for(rollout: KVRollout, verb: Verb) -> Json:
    """The next intent; its seq is above every one that was ever written or answered."""
    at, status = seen(rollout), status_of(rollout)
    before = [rollout.spec.intent.seq if rollout.spec.intent else 0]
    before.append(status.last_intent.seq if status.last_intent else 0)
    return {
        "seq": max(before) + 1,
        "verb": verb.value,
        "attempt": at.attempt,
        "expectedStage": at.stage,
        "expectedStep": at.step,
    }


async def send(api: Api, name: str, verb: Verb, *, dry_run: bool = False) -> tuple[Json, Json]:
    """Writes the intent; (what was written, the object as written). Failure NEGATIVE when the rollout went on
    to another step meanwhile: the person decided about the one before; and when it has no status yet.
    dry_run: the API server judges all of it, rights too, and keeps nothing."""
    document = await api.get(PLURAL, name)
    if not status_of(read_rollout(document)).observed_generation:
        raise Failure(
            Exit.NEGATIVE,
            f"nothing was sent: no operator has looked at {name} yet, and {verb.value} would be refused: it "
            "has no attempt that could be meant; to keep it from running, delete it",
        )
    decided = seen(read_rollout(document))
    for _ in range(TRIES):
        rollout = read_rollout(document)
        now = seen(rollout)
        if now != decided:
            raise Failure(
                Exit.NEGATIVE,
                f"nothing was sent: {name} went from {decided.stage} step {decided.step} to {now.stage} "
                f"step {now.step}, attempt {now.attempt}, meanwhile",
            )
        intent = intent_for(rollout, verb)
        try:
            written = await api.patch(PLURAL, name, _operations(document, intent), dry_run=dry_run)
        except Changed:
            document = await api.get(PLURAL, name)
            continue
        return intent, written
    raise Failure(Exit.FAILED, f"{name} changed at each of {TRIES} tries; nothing was sent")


async def answer(api: Api, name: str, seq: int, seconds: float) -> LastIntent:
    """What the operator made of intent `seq`. Failure TIMED_OUT when it says nothing within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            async for document in api.follow(PLURAL, name):
                last = status_of(read_rollout(document)).last_intent
                if last is not None and last.seq >= seq:
                    return last
    except TimeoutError:
        pass
    except Failure as failure:
        raise Failure(failure.status, f"the intent is written as seq {seq}; {failure}") from failure
    raise Failure(
        Exit.TIMED_OUT,
        f"the intent is written as seq {seq}, and no operator has answered it within {seconds:g} s; "
        f"`kubectl kvtier status {name}` shows what became of it",
    )


def judged(name: str, seq: int, last: LastIntent) -> str:
    """What to tell; Failure NEGATIVE when the intent was not accepted."""
    if last.seq > seq:
        return f"seq {seq} was overtaken by seq {last.seq} ({last.verb}: {last.result})"
    if last.result is not IntentResult.ACCEPTED:
        why = f": {last.message}" if last.message else ""
        raise Failure(Exit.NEGATIVE, f"{name}: {last.verb} seq {seq} was refused, {last.result}{why}")
    return f"{name}: {last.verb} seq {seq} accepted" + (f", {last.message}" if last.message else "")


def _operations(document: dict[str, Any], intent: Json) -> list[Json]:
    return [
        *(
            {"op": "test", "path": f"/metadata/{name}", "value": of_metadata(document, name)}
            for name in ("uid", "resourceVersion")
        ),
        {"op": "add", "path": "/spec/intent", "value": intent},
    ]
