"""From a manifest and a node's devices to live tiers, and back to the manifest that they amount to.

Why it exists: an agent proves what it runs by rebuilding the manifest from the objects that run, so building
and describing belong together. It must not know sessions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier_core.checksums import SUPPORTED
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import CODEC_IDENTITY, ChunkLayout
from kvtier_core.placements.policy import check_policy
from kvtier_core.tiers.arena import MAX_SEGMENTS, SEGMENT_BYTES, ArenaOptions
from kvtier_core.tiers.base import (
    DEFAULT_CAPABILITY,
    MediumKind,
    Tier,
    TierCapability,
    TierMount,
    slot_stride,
    slots_for,
)
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import FileOps
from kvtier_core.tiers.gpu import GpuTier
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.tiers.nvme.crypto import KeyProvider
from kvtier_core.tiers.nvme.datakeys import KEYS_SUFFIX, DataKeys, EphemeralKeys
from kvtier_core.tiers.nvme.tier import PERSISTENT
from kvtier_core.tiers.nvme.verify import store_path
from kvtier_core.tiers.staging import block_bytes
from kvtier_crds.manifest import (
    NUMERICS_VERSION,
    Admission,
    Checksum,
    Contract,
    Dtype,
    Exactness,
    Medium,
    Model,
    Placement,
    RuntimeManifest,
    Tenancy,
    TierRole,
)
from kvtier_crds.manifest import Tier as TierEntry

SIMULATED = "simulated"
MAX_IO_THREADS = 64


@dataclass(frozen=True, slots=True)
class LiveTier:
    """A tier with what the manifest says of it and the tier itself does not know."""

    tier: Tier
    role: TierRole
    budget_bytes: int

    def entry(self) -> TierEntry:
        tier = self.tier
        return TierEntry(
            tier_class_name=tier.name,
            medium=Medium(tier.medium.value),
            role=self.role,
            budget_bytes=self.budget_bytes,
            codec=CODEC_IDENTITY,
            checksum=Checksum(tier.capability.checksum),
        )


@dataclass(frozen=True, slots=True)
class LiveConfiguration:
    """What runs, in parts. `manifest()` is their exact manifest."""

    tenancy: Tenancy
    model: Model
    page_tokens: int
    layout: ChunkLayout
    tiers: tuple[LiveTier, ...]
    placement: Placement
    contract: Contract
    admission: Admission | None = None

    def device_kind(self) -> str:
        for live in self.tiers:
            if isinstance(live.tier, GpuTier):
                return device_kind(live.tier.device)
        return SIMULATED

    def manifest(self) -> RuntimeManifest:
        geometry = self.model.geometry.model_copy(
            update={"kv_heads": self.layout.kv_heads, "head_dim": self.layout.head_dim}
        )
        return RuntimeManifest(
            numerics_version=NUMERICS_VERSION,
            device_kind=self.device_kind(),
            tenancy=self.tenancy,
            model=self.model.model_copy(update={"geometry": geometry}),
            page_tokens=self.page_tokens,
            chunk_tokens=self.layout.chunk_tokens,
            tiers=tuple(live.entry() for live in self.tiers),
            placement=self.placement,
            selector=None,
            contract=self.contract,
        ).admitting(self.admission)


def device_kind(device: torch.device) -> str:
    """`simulated` on the CPU device, else `cuda-sm<major><minor>`: part of the numerics class."""
    if device.type != "cuda":
        return SIMULATED
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}"


def check_manifest(manifest: RuntimeManifest) -> None:
    """What this core can run. NUMERICS_MISMATCH, MANIFEST_INVALID, UNSUPPORTED; each names the field."""
    if manifest.numerics_version != NUMERICS_VERSION:
        raise CoreError(
            Reason.NUMERICS_MISMATCH,
            f"numericsVersion {manifest.numerics_version} is not this core's {NUMERICS_VERSION}",
        )
    geometry = manifest.model.geometry
    if geometry.dtype is not Dtype.FLOAT32:
        raise CoreError(Reason.UNSUPPORTED, f"geometry.dtype {geometry.dtype} is not float32")
    if manifest.selector is not None or manifest.contract.exactness is not Exactness.EXACT:
        raise CoreError(
            Reason.MANIFEST_INVALID, "an engine runs the exact manifest; selectors come with a step"
        )
    check_policy(manifest.placement, geometry)
    for tier in manifest.tiers:
        where = f"tiers[{tier.tier_class_name}]"
        if tier.codec != CODEC_IDENTITY:
            raise CoreError(Reason.TIER_INCAPABLE, f"{where}.codec {tier.codec} is not {CODEC_IDENTITY}")
        if tier.checksum.value not in SUPPORTED:
            legal = ", ".join(SUPPORTED)
            raise CoreError(
                Reason.TIER_INCAPABLE, f"{where}.checksum {tier.checksum} cannot run; legal: {legal}"
            )
        if tier.medium is Medium.REMOTE:
            raise CoreError(Reason.TIER_INCAPABLE, f"{where}.medium remote cannot run on a single node")


@dataclass(frozen=True, slots=True)
class Node:
    """What a node gives a cache besides its devices. clock: seconds that deadlines are stated in. keys: for
    blocks at rest; None: storage is not encrypted. A tier's persistence comes with its mount: where bytes may
    outlive a process is the node's to say and changes no answer, so the manifest's digest does not have
    it."""

    files: FileOps
    clock: Callable[[], float] | None = None
    keys: KeyProvider | None = None


def build_tiers(
    manifest: RuntimeManifest, mounts: Mapping[str, TierMount], layout: ChunkLayout, node: Node
) -> tuple[LiveTier, ...]:
    """The manifest's tiers on this node's devices, in its order. Closes what it opened when one fails."""
    built: list[LiveTier] = []
    try:
        for entry in manifest.tiers:
            mount = mounts.get(entry.tier_class_name)
            if mount is None or mount.medium.value != entry.medium.value:
                have = ", ".join(f"{name} ({m.medium.value})" for name, m in sorted(mounts.items()))
                raise CoreError(
                    Reason.TIER_INCAPABLE,
                    f"this node has no {entry.medium.value} tier {entry.tier_class_name}; has: {have}",
                    {"tier_class": entry.tier_class_name},
                )
            tier = _build(manifest, entry, mount, layout, node)
            built.append(LiveTier(tier, entry.role, entry.budget_bytes))
    except CoreError:
        close_tiers(built)
        raise
    return tuple(built)


def _build(
    manifest: RuntimeManifest, entry: TierEntry, mount: TierMount, layout: ChunkLayout, node: Node
) -> Tier:
    capability = _capability(entry, mount)
    name = entry.tier_class_name
    if mount.medium is MediumKind.GPU:
        device = torch.device("cpu" if mount.cuda_index is None else f"cuda:{mount.cuda_index}")
        kind = device_kind(device)
        if kind != manifest.device_kind:
            raise CoreError(
                Reason.NUMERICS_MISMATCH,
                f"the manifest is of device kind {manifest.device_kind}, tier {name} runs on {kind}",
                {"tier_class": name},
            )
        slots = slots_for(entry.budget_bytes, slot_stride(layout))
        return GpuTier(name, layout, slots, device=device, capability=capability, clock=node.clock)
    if mount.medium is MediumKind.CPU:
        slots = slots_for(entry.budget_bytes, slot_stride(layout))
        options = ArenaOptions(segment_bytes=segment_bytes(slots * slot_stride(layout)))
        return CpuTier(name, layout, slots, capability=capability, clock=node.clock, options=options)
    if mount.folder is None:
        raise CoreError(Reason.STORAGE_UNAVAILABLE, f"tier {name} has no folder on this node")
    return NvmeTier(
        name,
        layout,
        slots_for(entry.budget_bytes, block_bytes(layout)),
        folder=mount.folder,
        file_key=manifest.tenancy.cache_uid,
        files=node.files,
        capability=capability,
        o_direct=mount.o_direct,
        clock=node.clock,
        options=nvme_options(mount, _own_keys(manifest, mount.folder, capability, node)),
    )


def _own_keys(
    manifest: RuntimeManifest, folder: Path, capability: TierCapability, node: Node
) -> KeyProvider | None:
    """Data keys of this store alone, wrapped under the node's: whoever overwrites them has erased it."""
    if node.keys is None:
        return None
    if capability.persistence not in PERSISTENT:
        return EphemeralKeys(node.keys)
    path = store_path(folder, manifest.tenancy.cache_uid).with_suffix(KEYS_SUFFIX)
    return DataKeys(path, node.keys, node.files)


def nvme_options(mount: TierMount, keys: KeyProvider | None) -> NvmeOptions:
    """A queue is as deep as there are threads, and these are bounded."""
    options = NvmeOptions(keys=keys, budget=mount.budget, pace=mount.pace)
    if mount.queue_depth is None:
        return options
    return dataclasses.replace(options, threads=max(1, min(MAX_IO_THREADS, mount.queue_depth)))


def segment_bytes(size: int) -> int | None:
    """How much of a host tier of `size` bytes one namespace takes at a time: rows of sessions and blocks of
    tenants never share a segment, so a small tier must have small ones. None: the arena's own choice."""
    share = max(1, -(-size // MAX_SEGMENTS))
    return share if share < SEGMENT_BYTES else None


def _capability(entry: TierEntry, mount: TierMount) -> TierCapability:
    declared = mount.capability or DEFAULT_CAPABILITY[mount.medium]
    return dataclasses.replace(declared, checksum=entry.checksum.value)


def close_tiers(tiers: list[LiveTier] | tuple[LiveTier, ...]) -> None:
    for live in tiers:
        live.tier.close()
