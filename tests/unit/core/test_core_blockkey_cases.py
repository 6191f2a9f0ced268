"""Blocks served to the wrong request, as users of other caches reported them: each with a small input.

The numbers are those of the study of reports (section 4 of the data plane anchors); 22 is beside the golden
vectors, since it needs another process.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvtier_core.blockkey import BlockSource, chain_keys, namespace_digest
from kvtier_core.errors import CoreError, Reason
from kvtier_core.stated import AgentFacts, StatedSource, block_source
from kvtier_crds.manifest import Adapter, Geometry, Rope, RopeScaling, RuntimeManifest
from tests.unit.core.builders import gpu, manifest

LORA_A, LORA_B = ("lora-a", "sha256:" + "a" * 64), ("lora-b", "sha256:" + "b" * 64)
TENANT_A = AgentFacts("team-a", 0, 1, 1)
IDS = np.arange(32, dtype=np.int64)


def cache(*adapters: tuple[str, str], checkpoint: str = "step-1") -> RuntimeManifest:
    base = manifest([gpu(8)])
    listed = tuple(Adapter(name=name, digest=digest) for name, digest in adapters)
    model = base.model.model_copy(update={"adapters": listed, "checkpoint": checkpoint})
    return base.model_copy(update={"model": model})


def stated(of: RuntimeManifest, **changes: object) -> StatedSource:
    """All that a client of this cache states, for the model without adapters."""
    model = of.model
    said = StatedSource(
        model_artifact_digest=model.artifact_digest,
        checkpoint=model.checkpoint,
        adapters=(),
        geometry=model.geometry,
        numerics_version="engine/1",
        device_kind="cuda-sm90",
        rope=model.rope,
        position_contract=model.position_contract.value,
        visibility_mask="causal",
        visibility_support="all",
        dtype="float32",
        codec="identity",
        layout="kv-head-major-f32/1",
        producer="exact",
        layers=(0, 2),
        kv_heads=(0, 2),
        block_tokens=8,
    )
    return dataclasses.replace(said, **changes)  # type: ignore[arg-type]


def keys(source: BlockSource) -> set[bytes]:
    return {key.tobytes() for key in chain_keys(source, IDS)}


def never_meet(*sources: BlockSource) -> bool:
    found = [keys(source) for source in sources]
    return len(set().union(*found)) == sum(map(len, found))


def refusal(said: StatedSource, of: RuntimeManifest, facts: AgentFacts = TENANT_A) -> CoreError:
    with pytest.raises(CoreError) as refused:
        block_source(said, of, facts)
    return refused.value


def test_what_is_stated_in_full_is_a_source() -> None:
    of = cache()
    assert keys(block_source(stated(of), of, TENANT_A)) == keys(block_source(stated(of), of, TENANT_A))


def test_case_17_an_adapter_never_finds_rows_made_under_another() -> None:
    of = cache(LORA_A, LORA_B)
    sets = [(), (LORA_A,), (LORA_B,), (LORA_A, LORA_B), (LORA_B, LORA_A)]
    assert never_meet(*(block_source(stated(of, adapters=each), of, TENANT_A) for each in sets))
    assert refusal(stated(of, adapters=None), of).facts == {"field": "adapters"}


def test_case_18_an_adapter_reloaded_under_its_name_finds_nothing_of_its_earlier_weights() -> None:
    old, new = cache(LORA_A), cache((LORA_A[0], LORA_B[1]))
    before = block_source(stated(old, adapters=(LORA_A,)), old, TENANT_A)
    after = block_source(stated(new, adapters=((LORA_A[0], LORA_B[1]),)), new, TENANT_A)
    assert never_meet(before, after)
    assert refusal(stated(new, adapters=(LORA_A,)), new).reason is Reason.ADAPTER_MISMATCH


def test_case_19_new_weights_find_nothing_of_the_old_ones() -> None:
    old, new = cache(), cache(checkpoint="step-2")
    assert never_meet(block_source(stated(old), old, TENANT_A), block_source(stated(new), new, TENANT_A))
    assert refusal(stated(old), new).reason is Reason.MODEL_MISMATCH


def test_case_20_a_tenant_finds_nothing_of_another_in_any_tier() -> None:
    of = cache()
    one, two = (block_source(stated(of), of, AgentFacts(name, 0, 1, 1)) for name in ("team-a", "team-b"))
    again = block_source(stated(of), of, AgentFacts("team-a", 1, 1, 1))
    assert never_meet(one, two, again)
    # Tiers and their headers know a block by this key and this namespace only.
    assert len({namespace_digest(source) for source in (one, two, again)}) == 3


def test_case_21_a_request_whose_namespace_cannot_be_carried_is_refused() -> None:
    of = cache()
    refused = refusal(stated(of), of, AgentFacts("", 0, 1, 1))
    assert (refused.reason, refused.facts) == (Reason.IDENTITY_INCOMPLETE, {"field": "tenant"})


def test_case_24_a_layout_is_declared_and_never_guessed() -> None:
    # K and V fused and apart have the same shape when there are two KV heads.
    of = cache()
    apart, fused = (
        block_source(stated(of, layout=name), of, TENANT_A)
        for name in ("kv-head-major-f32/1", "kv-fused-f32/1")
    )
    assert never_meet(apart, fused)
    assert refusal(stated(of, layout=""), of).facts == {"field": "layout"}


def test_case_26_groups_of_layers_with_other_heads_have_layouts_of_their_own() -> None:
    of = cache()
    groups = [
        block_source(stated(of, layers=layers, kv_heads=heads, layout=layout), of, TENANT_A)
        for layers, heads, layout in (
            ((0, 1), (0, 2), "kv-head-major-f32/1"),
            ((1, 2), (0, 2), "kv-head-major-f32/1"),
            ((1, 2), (0, 1), "mla-latent-f32/1"),
        )
    ]
    assert never_meet(*groups)


OPTIONAL = {"branch", "request_generation"}


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(StatedSource) if field.name not in OPTIONAL]
)
def test_a_client_that_cannot_state_a_field_is_refused_by_its_name(field: str) -> None:
    of = cache()
    refused = refusal(stated(of, **{field: None}), of)
    assert (refused.reason, refused.facts) == (Reason.IDENTITY_INCOMPLETE, {"field": field})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model_artifact_digest", "sha256:" + "9" * 64, Reason.MODEL_MISMATCH),
        ("checkpoint", "step-9", Reason.MODEL_MISMATCH),
        ("adapters", (LORA_A,), Reason.ADAPTER_MISMATCH),
        ("rope", Rope(theta="500000"), Reason.ROPE_MISMATCH),
        ("rope", Rope(theta="10000", scaling=RopeScaling(type="yarn")), Reason.ROPE_MISMATCH),
        ("rope", Rope(theta="10000", interleaved=True), Reason.ROPE_MISMATCH),
        ("position_contract", "preRope", Reason.POSITION_CONTRACT_MISMATCH),
        ("visibility_mask", "window-512", Reason.VISIBILITY_POLICY_MISMATCH),
        ("visibility_support", "evicted", Reason.VISIBILITY_POLICY_MISMATCH),
        ("layers", (0, 3), Reason.BAD_ARGUMENT),
        ("kv_heads", (1, 3), Reason.BAD_ARGUMENT),
        ("hash_version", 2, Reason.UNSUPPORTED),
    ],
)
def test_what_the_cache_declares_otherwise_is_refused(field: str, value: object, reason: Reason) -> None:
    of = cache()
    assert refusal(stated(of, **{field: value}), of).reason is reason


@pytest.mark.parametrize("field", ["layers", "query_heads", "kv_heads", "head_dim"])
def test_another_geometry_is_refused(field: str) -> None:
    of = cache()
    other = of.model.geometry.model_dump() | {field: getattr(of.model.geometry, field) * 2}
    refused = refusal(stated(of, geometry=Geometry.model_validate(other)), of)
    assert refused.reason is Reason.GEOMETRY_MISMATCH


@pytest.mark.parametrize("field", ["numerics_version", "device_kind"])
def test_rows_of_other_numerics_are_other_rows(field: str) -> None:
    of = cache()
    assert never_meet(
        block_source(stated(of), of, TENANT_A), block_source(stated(of, **{field: "other"}), of, TENANT_A)
    )
