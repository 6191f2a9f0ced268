"""Evidence on a local channel: where it lies in the ring, and what of it a session did not ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.local import frames as wire
from kvtier_agent.rowevidence import EvidenceAsked
from kvtier_core.rowevidence import Need
from tests.unit.agent.local_channel_rig import FRAME_BYTES, ChannelRig, channel_rig

EVERYTHING = EvidenceAsked(frozenset(Need), frozenset([0, 1]), 5)
STATE = np.arange(5, dtype=np.float32).tobytes()
NATS = np.array([0.25, 3.0, 1e-3]).tobytes()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path) as made:
        yield made


def test_evidence_reaches_the_engine_as_it_was_sent(rig: ChannelRig) -> None:
    """States behind the queries, surprisals behind those at a multiple of 8, copied before they are looked
    at."""
    rig.engine.asked = EVERYTHING
    with rig.channel(rig.opened()) as channel:
        frame = channel.frame(layer=1, evidence=wire.EvidenceRecord(0, 1, 3, 7))
        place = wire.evidence_place(FRAME_BYTES, len(STATE))
        channel.put(FRAME_BYTES, STATE)
        channel.put(place, NATS)
        rig.engine.hook = lambda: channel.put(0, b"\xff" * (place + len(NATS))) and None
        [answer] = channel.ask(frame)
        assert not answer.HasField("error"), answer.error
    [computed] = rig.engine.frames
    given = computed.evidence
    assert given is not None and given.hidden is not None and given.surprisal is not None
    assert (given.hidden.shape, given.hidden.tobytes(), given.hidden_layer) == ((1, 5), STATE, 0)
    assert (given.surprisal.first, given.surprisal.values.tobytes()) == (7, NATS)


REFUSED = [
    pytest.param(None, wire.EvidenceRecord(0, 1, 0, 0), "hidden was not asked for", id="hidden-of-nobody"),
    pytest.param(None, wire.EvidenceRecord(0, 0, 1, 0), "surprisal was not asked for", id="nats-of-nobody"),
    pytest.param(EVERYTHING, wire.EvidenceRecord(0, 2, 0, 0), "hidden has 10 floats", id="two-states"),
    pytest.param(EVERYTHING, wire.EvidenceRecord(1, 1, 0, 0), "evidence.hidden_layer 1", id="its-own-layer"),
    pytest.param(EVERYTHING, wire.EvidenceRecord(0, 0, 1, -1), "must not be negative", id="negative"),
]


@pytest.mark.parametrize(("asked", "evidence", "words"), REFUSED)
def test_evidence_that_was_not_asked_for_is_refused_in_its_place(
    rig: ChannelRig, asked: EvidenceAsked | None, evidence: wire.EvidenceRecord, words: str
) -> None:
    rig.engine.asked = asked
    with rig.channel(rig.opened()) as channel:
        [answer] = channel.ask(channel.frame(layer=1, evidence=evidence))
        assert words in answer.error.message
        assert channel.works()
