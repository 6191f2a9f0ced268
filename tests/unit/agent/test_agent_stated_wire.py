"""What a client leaves out of a block's source on the wire is refused by its name, never filled in."""

from __future__ import annotations

import pytest

from kvtier.v1 import attention_pb2, blocks_pb2
from kvtier_agent.stated_wire import stated_source
from kvtier_core.blockkey import BlockSource
from kvtier_core.errors import CoreError, Reason
from kvtier_core.stated import AgentFacts, StatedSource, block_source
from tests.engine.agent_process import baseline_manifest

FACTS = AgentFacts("team-a", 0, 1, 1)


def message() -> blocks_pb2.BlockSource:
    """All that the baseline manifest's client states."""
    model = baseline_manifest().model
    geometry = model.geometry
    return blocks_pb2.BlockSource(
        model_artifact_digest=model.artifact_digest,
        checkpoint=model.checkpoint,
        adapters=blocks_pb2.AdapterSet(),
        geometry=attention_pb2.Geometry(
            layers=geometry.layers,
            query_heads=geometry.query_heads,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype.value,
        ),
        numerics_version="engine/1",
        device_kind="cuda-sm90",
        rope=blocks_pb2.RopeConfig(theta=model.rope.theta, interleaved=model.rope.interleaved),
        position_contract=model.position_contract.value,
        visibility_mask="causal",
        visibility_support="all",
        dtype="float32",
        codec="identity",
        layout="kv-head-major-f32/1",
        producer="exact",
        first_layer=0,
        end_layer=1,
        first_kv_head=0,
        end_kv_head=1,
        block_tokens=16,
        hash_version=1,
    )


def source(said: blocks_pb2.BlockSource) -> BlockSource:
    return block_source(stated_source(said), baseline_manifest(), FACTS)


# Where one word of the wire is only part of one that is stated.
NAMED = {
    "rope.theta": "rope",
    "rope.interleaved": "rope",
    "first_layer": "layers",
    "end_layer": "layers",
    "first_kv_head": "kv_heads",
    "end_kv_head": "kv_heads",
}
FIELDS = [field.name for field in blocks_pb2.BlockSource.DESCRIPTOR.fields if field.name != "branch"]


def test_what_is_stated_in_full_arrives_in_full() -> None:
    said = stated_source(message())
    assert None not in [getattr(said, name) for name in StatedSource.__slots__]
    assert source(message()).layers == (0, 1)


@pytest.mark.parametrize("field", [*FIELDS, "rope.theta", "rope.interleaved"])
def test_what_is_left_out_is_refused_by_its_name(field: str) -> None:
    said = message()
    owner, _, name = field.rpartition(".")
    (getattr(said, owner) if owner else said).ClearField(name)
    with pytest.raises(CoreError) as refused:
        source(said)
    assert refused.value.reason is Reason.IDENTITY_INCOMPLETE
    assert refused.value.facts == {"field": NAMED.get(field, field)}


def test_no_adapters_is_a_statement_and_no_set_is_none() -> None:
    said = message()
    assert stated_source(said).adapters == ()
    said.adapters.adapters.add(name="lora-a", digest="sha256:" + "a" * 64)
    with pytest.raises(CoreError) as refused:
        source(said)
    assert refused.value.reason is Reason.ADAPTER_MISMATCH


def test_a_branch_is_private() -> None:
    said = message()
    said.branch.path.append("session-1")
    said.branch.request_generation = 7
    private = source(said)
    assert (private.branch, private.binding.request_generation) == (("session-1",), 7)
    assert private.seal() != source(message()).seal()


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (blocks_pb2.BlockSource(geometry=attention_pb2.Geometry(layers=1)), "geometry.query_heads"),
        (blocks_pb2.BlockSource(rope=blocks_pb2.RopeConfig(theta="x", interleaved=False)), "rope.theta"),
        (
            blocks_pb2.BlockSource(rope=blocks_pb2.RopeConfig(theta="1", interleaved=False, scaling="{}")),
            "rope.type",
        ),
    ],
    ids=["geometry", "theta", "scaling"],
)
def test_what_is_not_well_formed_is_refused(part: blocks_pb2.BlockSource, field: str) -> None:
    said = message()
    said.MergeFrom(part)
    if part.HasField("geometry"):
        said.geometry.CopyFrom(part.geometry)
    with pytest.raises(CoreError) as refused:
        stated_source(said)
    assert refused.value.reason is Reason.BAD_ARGUMENT
    assert refused.value.facts["field"] == field
