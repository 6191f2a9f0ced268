"""Evidence on every wire: asked for by the agent, checked by name, bound to the model; and weights, once.

A real agent process under a grant of a family that needs everything; the wires are those of the conformance
suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.v1 import attention_pb2, common_pb2
from kvtier.weights import WeightsShape
from kvtier_crds.manifest import RuntimeManifest, model_fingerprint
from tests.engine.agent_process import CACHE, Agent, baseline_manifest, detail_of, running_agent, until
from tests.engine.attention_driver import CALL_SECONDS, Engine, wire_geometry
from tests.engine.evidence_replay import candidate, selector
from tests.engine.wire_drivers import WIRES, Answer, Frame, Opened, connector

pytestmark = pytest.mark.timeout(600)

KINDS = attention_pb2.EvidenceKind
EVERYTHING = [number for number in KINDS.values() if number]
PROMPT = 60
WIDTH = 24
HEADS, HEAD_DIM, KV_HEADS = 6, 64, 2
SHAPE = WeightsShape(WIDTH, HEADS * HEAD_DIM, True, 1e-5, 32, False)


@pytest.fixture(scope="module")
def manifest() -> RuntimeManifest:
    return baseline_manifest()


@pytest.fixture(scope="module")
def agent(manifest: RuntimeManifest) -> Iterator[Agent]:
    with running_agent() as started:
        started.apply_baseline(manifest)
        yield started


@pytest.fixture(scope="module")
def engine(agent: Agent) -> Iterator[Engine]:
    with Engine(agent.socket_path) as made:
        yield made


def opening(manifest: RuntimeManifest, **change: Any) -> attention_pb2.OpenSessionRequest:
    fields: dict[str, Any] = {
        "cache": CACHE,
        "model_fingerprint": model_fingerprint(manifest.model),
        "geometry": wire_geometry(manifest.model.geometry),
        "score_scale": HEAD_DIM**-0.5,
        "tenant": "beta",
        "session_root_id": "root",
        "max_tokens": 1024,
        "local_channel_version": 1,
        "gives": EVERYTHING,
        "hidden_size": WIDTH,
    }
    return attention_pb2.OpenSessionRequest(**{**fields, **change})


def reason(error: common_pb2.ErrorDetail) -> str:
    return common_pb2.Reason.Name(error.reason)


class Rig:
    """One session under a family's grant, on one wire, with a prefill of PROMPT rows."""

    def __init__(
        self, agent: Agent, engine: Engine, manifest: RuntimeManifest, kind: str, family: str
    ) -> None:
        chosen = candidate(manifest, selector(family))
        agent.grant(manifest, chosen, rollout_uid=f"{family}-{kind}")
        self.engine, self.manifest = engine, manifest
        self.opened: Opened = engine.attention.OpenSession(opening(manifest), timeout=CALL_SECONDS)
        assert self.opened.arm == attention_pb2.ARM_CANDIDATE
        connect = connector(kind, engine.attention, wire_geometry(manifest.model.geometry), WIDTH)
        self.wire = connect([self.opened])
        self.rng = np.random.default_rng(2)
        self.sequence = 0
        for layer in range(2):
            [answer] = self.ask(self.frame(layer, 0, 0, PROMPT))
            assert not answer.HasField("error"), answer.error

    def frame(self, layer: int, step: int, first: int, n: int, **evidence: Any) -> Frame:
        rows = [
            self.rng.standard_normal((n, heads, HEAD_DIM), dtype=np.float32).tobytes()
            for heads in (KV_HEADS, KV_HEADS, HEADS)
        ]
        self.sequence += 1
        given = attention_pb2.FrameEvidence(**evidence) if evidence else None
        return Frame(
            session_id=self.opened.session_id,
            generation=self.opened.generation,
            boot_id=self.opened.boot_id,
            tenant="beta",
            step=step,
            layer=layer,
            first_row_position=first,
            k=rows[0],
            v=rows[1],
            first_query_position=first,
            q=rows[2],
            sequence=self.sequence,
            evidence=given,
        )

    def ask(self, frame: Frame) -> list[Answer]:
        self.wire.send([frame])
        return self.wire.receive()

    def approximate(self, frame: Frame) -> Answer:
        """A repeat is answered again, so a frame may be asked for until its index is built, which waits for a
        processor that nobody else uses."""
        answers: list[Answer] = []

        def approximate() -> bool:
            [answer] = self.ask(frame)
            assert not answer.HasField("error"), answer.error
            answers.append(answer)
            return answer.receipt.exactness == attention_pb2.APPROXIMATE

        until(approximate)
        reasons = {answer.receipt.fallback for answer in answers[:-1]}
        assert reasons <= {"DEPENDENCY_UNPUBLISHED", "INDEX_FRONTIER_LAG"}
        return answers[-1]

    def weights(self, *layers: int, seed: int = 0) -> list[attention_pb2.GiveWeightsRequest]:
        return [part for layer in layers for part in parts_of(self, layer, numbers(seed))]

    def give(self, parts: Sequence[attention_pb2.GiveWeightsRequest]) -> attention_pb2.GiveWeightsResponse:
        answer: attention_pb2.GiveWeightsResponse = self.engine.attention.GiveWeights(
            iter(parts), timeout=CALL_SECONDS
        )
        return answer

    def close(self) -> None:
        """Idempotent."""
        if self.opened.session_id:
            self.wire.close()
            request = attention_pb2.CloseSessionRequest(
                session_id=self.opened.session_id, generation=self.opened.generation, tenant="beta"
            )
            self.engine.attention.CloseSession(request, timeout=CALL_SECONDS)
            self.opened = Opened()


def numbers(seed: int = 0) -> bytearray:
    made = np.random.default_rng(seed).standard_normal((SHAPE.size_bytes - 8 * 32) // 4, dtype=np.float32)
    return bytearray(made.tobytes() + (np.arange(32) / 10).tobytes())


def parts_of(
    rig: Rig, layer: int, data: bytes | bytearray, **change: Any
) -> list[attention_pb2.GiveWeightsRequest]:
    """A layer's header, with fields changed, and its bytes."""
    fingerprint = model_fingerprint(rig.manifest.model)
    fields: dict[str, Any] = {
        "session_id": rig.opened.session_id,
        "generation": rig.opened.generation,
        "boot_id": rig.opened.boot_id,
        "tenant": "beta",
        "model_fingerprint": fingerprint,
        "layer": layer,
        "has_bias": SHAPE.has_bias,
        "norm_eps": SHAPE.norm_eps,
        "frequencies": SHAPE.frequencies,
        "interleaved": SHAPE.interleaved,
        "digest": SHAPE.digest(fingerprint, layer, data),
        "size_bytes": len(data),
    }
    header = attention_pb2.LayerWeightsHeader(**{**fields, **change})
    made = [attention_pb2.GiveWeightsRequest(header=header)]
    return [*made, *([attention_pb2.GiveWeightsRequest(data=bytes(data))] if data else [])]


@pytest.fixture
def rig_of(agent: Agent, engine: Engine, manifest: RuntimeManifest) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def made(kind: str, family: str = "infinigen") -> Rig:
        rigs.append(Rig(agent, engine, manifest, kind, family))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


def state(seed: int = 1, rows: int = 1) -> bytes:
    return np.random.default_rng(seed).standard_normal(rows * WIDTH, dtype=np.float32).tobytes()


def doubles(*values: float) -> bytes:
    return np.array(values, dtype="<f8").tobytes()


# --- what a session asks for -----------------------------------------------------------------------------

ASKED = {
    "retrievalAttention": ({KINDS.PREFILL_QUERIES, KINDS.FIXED_CONTEXT}, []),
    "emLlm": ({KINDS.PREFILL_QUERIES, KINDS.SURPRISAL}, []),
    "infinigen": ({KINDS.PREFILL_QUERIES, KINDS.PREVIOUS_HIDDEN_STATE, KINDS.WEIGHTS}, [1]),
    "infLlm": ({KINDS.PREFILL_QUERIES}, []),
    "squeezedAttention": ({KINDS.FIXED_CONTEXT}, []),
}


@pytest.mark.parametrize("family", sorted(ASKED))
def test_an_agent_asks_for_what_the_sessions_selector_needs(rig_of: Callable[..., Rig], family: str) -> None:
    told = rig_of("grpc", family).opened.evidence
    assert (set(told.kinds), list(told.layers)) == ASKED[family]


@pytest.mark.parametrize("family", sorted(ASKED))
def test_a_session_whose_engine_lacks_a_need_is_exact_and_says_what_is_missing(
    agent: Agent, engine: Engine, manifest: RuntimeManifest, family: str
) -> None:
    agent.grant(manifest, candidate(manifest, selector(family)), rollout_uid=f"lacks-{family}")
    opened = engine.open(manifest, gives=[], hidden_size=0).opened
    assert opened.arm == attention_pb2.ARM_BASELINE
    assert opened.manifest_digest == manifest.digest()
    assert not opened.HasField("evidence") and not opened.HasField("window")
    detail = opened.candidate_refused
    assert reason(detail) == "UNSUPPORTED"
    wanted = {kind_name(kind) for kind in ASKED[family][0]}
    assert set(detail.facts["missing"].split(",")) == wanted
    assert all(name in detail.message for name in wanted)
    driver = engine.open(manifest, gives=[], hidden_size=0, session_root_id="another")
    driver.forward(30)
    for answer in driver.forward(1):
        assert answer.receipt.exactness == attention_pb2.EXACT
        assert answer.receipt.fallback == "UNSUPPORTED"
        assert answer.receipt.producer_digest == manifest.digest()
    # A probe of the candidate would measure the baseline, so it is not opened at all.
    with pytest.raises(grpc.RpcError) as refused:
        engine.open(manifest, gives=[], hidden_size=0, probe=True, forced_arm=attention_pb2.ARM_CANDIDATE)
    assert reason(detail_of(refused.value)) == "UNSUPPORTED"
    assert detail_of(refused.value).facts["missing"] == detail.facts["missing"]
    # What a baseline's probe is opened for needs nothing.
    engine.open(manifest, gives=[], hidden_size=0, probe=True, forced_arm=attention_pb2.ARM_BASELINE)


def kind_name(kind: int) -> str:
    first, *rest = KINDS.Name(kind).lower().split("_")
    return first + "".join(word.capitalize() for word in rest)


UNOPENED = [
    pytest.param({"gives": [99], "hidden_size": 0}, "gives: 99 is none of PREFILL_QUERIES, ", id="unknown"),
    pytest.param({"gives": [0], "hidden_size": 0}, "gives: 0 is none of", id="unspecified"),
    pytest.param({"gives": [1, 1], "hidden_size": 0}, "gives: a kind is stated twice", id="twice"),
    pytest.param({"hidden_size": 0}, "hidden_size is 0; legal: 1 to 65536", id="no-width"),
    pytest.param({"hidden_size": 65537}, "hidden_size is 65537", id="too-wide"),
    pytest.param({"hidden_size": -4}, "hidden_size is -4", id="negative-width"),
    pytest.param({"gives": [1, 4]}, "legal: 0 without hidden states and weights", id="width-of-nothing"),
    pytest.param({"fixed_context_tokens": -1}, "fixed_context_tokens is -1; legal: 0 to", id="negative"),
    pytest.param({"fixed_context_tokens": 4097}, "fixed_context_tokens is 4097", id="beyond-max-tokens"),
    pytest.param(
        {"gives": [1], "hidden_size": 0, "fixed_context_tokens": 5}, "0 without FIXED_CONTEXT", id="unstated"
    ),
]


@pytest.mark.parametrize(("change", "words"), UNOPENED)
def test_what_no_engine_gives_is_refused_by_name(
    engine: Engine, manifest: RuntimeManifest, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        engine.open(manifest, **({"gives": EVERYTHING, "hidden_size": WIDTH} | change))
    detail = detail_of(refused.value)
    assert reason(detail) == "BAD_ARGUMENT"
    assert words in detail.message


# --- frames ----------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")
REFUSED = [
    pytest.param("emLlm", 0, {"hidden": state()}, "FRAME_INVALID", "hidden was not asked for", id="hidden"),
    pytest.param(
        "infinigen", 0, {"hidden": state()}, "FRAME_INVALID", "not asked for in layer 0", id="dense-layer"
    ),
    pytest.param(
        "infinigen",
        1,
        {"hidden": state(rows=2)},
        "FRAME_INVALID",
        "1 queries of 24 were due",
        id="two-states",
    ),
    pytest.param(
        "infinigen",
        1,
        {"hidden": np.full(WIDTH, NAN, np.float32).tobytes()},
        "FRAME_INVALID",
        "hidden is not finite",
        id="nan",
    ),
    pytest.param(
        "infinigen",
        1,
        {"hidden": np.full(WIDTH, -INF, np.float32).tobytes()},
        "FRAME_INVALID",
        "hidden is not finite",
        id="infinite",
    ),
    pytest.param(
        "infinigen",
        1,
        {"hidden": state(), "hidden_layer": 1},
        "LAYER_DISTANCE",
        "evidence.hidden_layer 1",
        id="its-own-layer",
    ),
    pytest.param(
        "infinigen", 1, {"surprisal": doubles(1)}, "FRAME_INVALID", "surprisal was not asked", id="surprisal"
    ),
    pytest.param(
        "emLlm", 0, {"surprisal": doubles(0, NAN)}, "FRAME_INVALID", "surprisal is not finite", id="nan-nats"
    ),
    pytest.param(
        "emLlm",
        0,
        {"surprisal": doubles(1), "surprisal_first": -1},
        "FRAME_INVALID",
        "surprisal_first must not be negative",
        id="negative-first",
    ),
    pytest.param(
        "emLlm",
        0,
        {"surprisal": doubles(0, -2)},
        "EVENT_BOUNDARY",
        "finite number of 0 or more",
        id="below-0",
    ),
    pytest.param(
        "emLlm",
        0,
        {"surprisal": doubles(1), "surprisal_first": 3},
        "EVENT_BOUNDARY",
        "those of rows [0, 0) are known",
        id="gap",
    ),
    pytest.param(
        "emLlm",
        0,
        {"surprisal": doubles(*[1.0] * (PROMPT + 2))},
        "EVENT_BOUNDARY",
        f"there are {PROMPT + 1} rows",
        id="of-rows-to-come",
    ),
    pytest.param(
        "emLlm",
        0,
        {"surprisal": bytes(8 * ((1 << 17) + 1))},
        "FRAME_INVALID",
        "at most 131072 a frame",
        id="too-many",
    ),
    pytest.param(
        "squeezedAttention",
        0,
        {"surprisal": doubles(1)},
        "FRAME_INVALID",
        "not asked for",
        id="of-rows-alone",
    ),
]


@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize(("family", "layer", "evidence", "wanted", "words"), REFUSED)
def test_evidence_that_is_wrong_is_refused_by_name_and_changes_nothing(
    rig_of: Callable[..., Rig],
    kind: str,
    family: str,
    layer: int,
    evidence: dict[str, Any],
    wanted: str,
    words: str,
) -> None:
    rig = rig_of(kind, family)
    for before in range(layer):
        [answer] = rig.ask(rig.frame(before, 1, PROMPT, 1))
        assert not answer.HasField("error"), answer.error
    [answer] = rig.ask(rig.frame(layer, 1, PROMPT, 1, **evidence))
    assert answer.HasField("error") and reason(answer.error) == wanted
    assert words in answer.error.message
    [good] = rig.ask(rig.frame(layer, 1, PROMPT, 1))
    assert not good.HasField("error") and good.receipt.frontier == PROMPT + 1


@pytest.mark.parametrize(("field", "size"), [("hidden", 4), ("surprisal", 8)])
def test_bytes_that_are_no_numbers_are_refused(rig_of: Callable[..., Rig], field: str, size: int) -> None:
    rig = rig_of("grpc", "infinigen" if field == "hidden" else "emLlm")
    [answer] = rig.ask(rig.frame(0, 1, PROMPT, 1, **{field: bytes(size + 1)}))
    assert reason(answer.error) == "FRAME_INVALID"
    assert f"evidence.{field} has {size + 1} bytes" in answer.error.message


def test_every_wire_gives_the_same_selections_of_the_same_evidence(rig_of: Callable[..., Rig]) -> None:
    seen: dict[str, list[tuple[bytes, str]]] = {}
    for kind in WIRES:
        rig = rig_of(kind)
        rig.give(rig.weights(1))
        told = []
        for step in range(1, 4):
            rig.ask(rig.frame(0, step, PROMPT - 1 + step, 1))
            frame = rig.frame(1, step, PROMPT - 1 + step, 1, hidden=state(step), hidden_layer=0)
            answer = rig.approximate(frame)
            told.append((answer.out, answer.receipt.support_digest))
        seen[kind] = told
        rig.close()
    for kind in WIRES[1:]:
        assert seen[kind] == seen["grpc"]
    assert len({digest for _, digest in seen["grpc"]}) == 3


@pytest.mark.parametrize("kind", WIRES)
def test_surprisals_of_a_prompt_come_with_the_step_behind_it(rig_of: Callable[..., Rig], kind: str) -> None:
    rig = rig_of(kind, "emLlm")
    nats = np.random.default_rng(4).exponential(3.0, PROMPT + 1)
    first = rig.frame(0, 1, PROMPT, 1, surprisal=nats.astype("<f8").tobytes())
    assert rig.approximate(first).receipt.frontier == PROMPT + 1
    assert rig.approximate(rig.frame(1, 1, PROMPT, 1)).receipt.frontier == PROMPT + 1


# --- weights ---------------------------------------------------------------------------------------------


def test_weights_that_an_agent_has_are_bound_by_their_digest_alone(rig_of: Callable[..., Rig]) -> None:
    one = rig_of("grpc")
    asked = parts_of(one, 1, numbers(9), size_bytes=0)[:1]
    assert list(one.give(asked).missing) == [1]
    assert list(one.give(one.weights(1, seed=9)).bound) == [1]
    other = rig_of("local")
    answer = other.give(parts_of(other, 1, numbers(9), size_bytes=0)[:1])
    assert (list(answer.bound), list(answer.missing)) == ([1], [])
    frame = other.frame(1, 1, PROMPT, 1, hidden=state(), hidden_layer=0)
    other.ask(other.frame(0, 1, PROMPT, 1))
    other.approximate(frame)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"norm_eps": 2e-5}, id="norm"),
        pytest.param({"interleaved": True}, id="rotation"),
        pytest.param({"frequencies": 31}, id="frequencies"),
    ],
)
def test_a_digest_of_other_weights_than_the_header_says_binds_nothing(
    rig_of: Callable[..., Rig], change: dict[str, Any]
) -> None:
    one = rig_of("grpc")
    one.give(one.weights(1, seed=9))
    with pytest.raises(grpc.RpcError) as refused:
        one.give(parts_of(one, 1, numbers(9), size_bytes=0, **change)[:1])
    assert reason(detail_of(refused.value)) == "CHECKSUM_MISMATCH"


def changed(**change: Any) -> Callable[[Rig], list[attention_pb2.GiveWeightsRequest]]:
    layer = change.pop("layer", 1)
    return lambda rig: parts_of(rig, layer, numbers(), **change)


def with_nan(rig: Rig) -> list[attention_pb2.GiveWeightsRequest]:
    data = numbers()
    data[400:404] = np.float32(NAN).tobytes()
    return parts_of(rig, 1, data)


def of_other_bytes(rig: Rig) -> list[attention_pb2.GiveWeightsRequest]:
    parts = parts_of(rig, 1, numbers())
    parts[1].data = bytes(numbers(1))
    return parts


UNGIVEN = [
    pytest.param(
        lambda rig: parts_of(rig, 1, numbers())[1:], "BAD_ARGUMENT", "without a layer's", id="headless"
    ),
    pytest.param(
        lambda rig: parts_of(rig, 1, numbers())[:1], "BAD_ARGUMENT", "layer 1 has 0 of", id="no-bytes"
    ),
    pytest.param(
        lambda rig: parts_of(rig, 1, numbers())[:1] * 2,
        "BAD_ARGUMENT",
        "layer 1 has 0 of",
        id="early",
    ),
    pytest.param(
        lambda rig: [*parts_of(rig, 1, numbers()), *parts_of(rig, 1, numbers())[1:]],
        "BAD_ARGUMENT",
        "without a layer's",
        id="too-many-bytes",
    ),
    pytest.param(changed(boot_id="another"), "BOOT_ID_MISMATCH", "", id="boot"),
    pytest.param(changed(session_id="nobody"), "SESSION_UNKNOWN", "", id="session"),
    pytest.param(changed(generation=77), "GENERATION_STALE", "", id="generation"),
    pytest.param(changed(tenant="alpha"), "TENANT_MISMATCH", "", id="tenant"),
    pytest.param(
        changed(model_fingerprint="sha256:" + "0" * 64), "MODEL_MISMATCH", "weights of model", id="model"
    ),
    pytest.param(changed(layer=0), "UNSUPPORTED", "layer 0 were not asked for", id="dense-layer"),
    pytest.param(changed(layer=2), "UNSUPPORTED", "layer 2 were not asked for", id="no-such-layer"),
    pytest.param(changed(size_bytes=8), "PAYLOAD_GEOMETRY", f"gives {SHAPE.size_bytes}", id="size"),
    pytest.param(changed(has_bias=False), "PAYLOAD_GEOMETRY", "size_bytes", id="shape"),
    pytest.param(changed(frequencies=33), "SELECTOR_GEOMETRY", "frequencies 33", id="frequencies"),
    pytest.param(changed(norm_eps=NAN), "SELECTOR_GEOMETRY", "norm_eps nan", id="norm"),
    pytest.param(changed(norm_eps=2e-5), "CHECKSUM_MISMATCH", "not those of this model", id="other-norm"),
    pytest.param(changed(interleaved=True), "CHECKSUM_MISMATCH", "not those of this model", id="other-rope"),
    pytest.param(changed(digest="sha256:00"), "CHECKSUM_MISMATCH", "not those of this model", id="digest"),
    pytest.param(of_other_bytes, "CHECKSUM_MISMATCH", "not those of this model", id="other-bytes"),
    pytest.param(with_nan, "SELECTOR_GEOMETRY", "are not finite", id="nan"),
]


@pytest.mark.parametrize(("parts", "wanted", "words"), UNGIVEN)
def test_weights_that_are_not_the_models_are_refused(
    rig_of: Callable[..., Rig],
    parts: Callable[[Rig], list[attention_pb2.GiveWeightsRequest]],
    wanted: str,
    words: str,
) -> None:
    rig = rig_of("grpc")
    with pytest.raises(grpc.RpcError) as refused:
        rig.give(parts(rig))
    detail = detail_of(refused.value)
    assert reason(detail) == wanted
    assert words in detail.message


def test_sessions_of_one_model_have_the_same_weights_as_long_as_one_is_open(
    rig_of: Callable[..., Rig],
) -> None:
    """Equal shape and model, other numbers: one of the two engines does not run what it says."""
    one, other = rig_of("grpc"), rig_of("local")
    one.give(one.weights(1, seed=1))
    for parts in (other.weights(1, seed=2), parts_of(other, 1, numbers(2), size_bytes=0)[:1]):
        with pytest.raises(grpc.RpcError) as refused:
            other.give(parts)
        assert reason(detail_of(refused.value)) == "MODEL_MISMATCH"
    other.give(other.weights(1, seed=1))
    one.close()
    other.close()
    third = rig_of("grpc")
    assert list(third.give(third.weights(1, seed=2)).bound) == [1]


def test_a_session_that_needs_no_weights_takes_none(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of("grpc", "infLlm")
    with pytest.raises(grpc.RpcError) as refused:
        rig.give(rig.weights(1))
    assert reason(detail_of(refused.value)) == "UNSUPPORTED"
