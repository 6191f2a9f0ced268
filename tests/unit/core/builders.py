"""Small engines, frames and faults for the core's tests."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvtier_core.engine import CacheEngine
from kvtier_core.receipts import SessionHandle, SessionSpec, StepAnswer, StepMode, StepRequest
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind, TierCapability, TierMount
from kvtier_core.tiers.fileops import Buffer, FileOps, OsFileOps
from kvtier_crds.canonical import Parameters
from kvtier_crds.manifest import (
    Budget,
    CapPolicy,
    Checksum,
    Contract,
    Dtype,
    Exactness,
    Geometry,
    Medium,
    Model,
    PersistentRows,
    Placement,
    PositionContract,
    Rope,
    RuntimeManifest,
    Selector,
    Tenancy,
    Tier,
    TierRole,
)

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, CHUNK, PAGE = 2, 4, 2, 16, 64, 8
SCALE = HEAD_DIM**-0.5
SLOT = 2 * KV_HEADS * CHUNK * HEAD_DIM * 4
BLOCK = 4096 + -(-SLOT // 4096) * 4096
CANDIDATE = "sha256:" + "c" * 64


class Unsynced(OsFileOps):
    """For tests in which no machine loses power: what was written is read from the system's cache."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class FakeClock:
    """Seconds that move when told, or by `tick` at each reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 100.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass(frozen=True)
class TierBudget:
    """Slots of one tier of a small engine."""

    name: str
    medium: Medium
    slots: int
    role: TierRole = TierRole.RESIDENT
    checksum: Checksum = Checksum.XXH3

    @property
    def budget_bytes(self) -> int:
        return max(1, self.slots * (BLOCK if self.medium is Medium.NVME else SLOT))


def gpu(slots: int) -> TierBudget:
    return TierBudget("hbm", Medium.GPU, slots)


def cpu(slots: int, checksum: Checksum = Checksum.XXH3) -> TierBudget:
    return TierBudget("ram", Medium.CPU, slots, checksum=checksum)


def nvme(slots: int, checksum: Checksum = Checksum.XXH3) -> TierBudget:
    return TierBudget("flash", Medium.NVME, slots, TierRole.BACKING, checksum)


def manifest(tiers: Sequence[TierBudget], layers: int = LAYERS) -> RuntimeManifest:
    return RuntimeManifest(
        device_kind="simulated",
        tenancy=Tenancy(namespace="serving", cache_uid="0b5c1c2e-cache"),
        model=Model(
            artifact_digest="sha256:" + "1" * 64,
            checkpoint="step-1",
            geometry=Geometry(
                layers=layers,
                query_heads=QUERY_HEADS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype=Dtype.FLOAT32,
            ),
            rope=Rope(theta="10000"),
            position_contract=PositionContract.POST_ROPE,
        ),
        page_tokens=PAGE,
        chunk_tokens=CHUNK,
        tiers=tuple(
            Tier(
                tier_class_name=tier.name,
                medium=tier.medium,
                role=tier.role,
                budget_bytes=tier.budget_bytes,
                codec="identity",
                checksum=tier.checksum,
            )
            for tier in tiers
        ),
        placement=Placement(policy="recency"),
        contract=Contract(exactness=Exactness.EXACT, tolerance="0.001"),
    )


def keeping(persistence: str = "node") -> dict[str, TierCapability]:
    """Capabilities with which `nvme` outlives its process."""
    return {"flash": dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence=persistence)}


def quest(tokens: int = 24, sink: int = 0, recent: int = 0, dense: tuple[int, ...] = ()) -> Selector:
    return Selector(
        family="quest",
        parameters=Parameters({}),
        budget=Budget(tokens=tokens, cap_policy=CapPolicy.TRUNCATE),
        persistent_rows=PersistentRows(sink=sink, recent=recent),
        dense_layers=dense,
    )


@contextmanager
def engine(
    folder: Path,
    tiers: Sequence[TierBudget],
    *,
    files: FileOps | None = None,
    clock: Callable[[], float] | None = None,
    layers: int = LAYERS,
    capabilities: dict[str, TierCapability] | None = None,
    folders: dict[str, Path] | None = None,
    **options: object,
) -> Iterator[CacheEngine]:
    """A small engine that is stopped at the end; stopping checks that all capacity came back."""
    mounts = {
        tier.name: TierMount(
            tier.name,
            MediumKind(tier.medium.value),
            folder=(folders or {}).get(tier.name, folder) if tier.medium is Medium.NVME else None,
            capability=(capabilities or {}).get(tier.name),
        )
        for tier in tiers
    }
    built = CacheEngine(
        manifest(tiers, layers),
        mounts,
        clock or FakeClock(),
        files=files,
        probe=False,
        **options,  # type: ignore[arg-type]
    )
    try:
        yield built
    finally:
        built.stop()


@dataclass
class Rows:
    """All K, V and Q of one sequence: float32 [layers, tokens, heads, d]."""

    k: Tensor
    v: Tensor
    q: Tensor

    @classmethod
    def random(cls, tokens: int, seed: int = 0, layers: int = LAYERS) -> Rows:
        generator = torch.Generator().manual_seed(seed)
        shape = (layers, tokens)
        return cls(
            torch.randn(*shape, KV_HEADS, HEAD_DIM, generator=generator),
            torch.randn(*shape, KV_HEADS, HEAD_DIM, generator=generator),
            torch.randn(*shape, QUERY_HEADS, HEAD_DIM, generator=generator),
        )


@dataclass
class Driver:
    """Feeds a sequence to a session as a model would: a prefill in blocks, then token by token."""

    engine: CacheEngine
    rows: Rows
    handle: SessionHandle
    position: int = 0
    step: int = 0
    answers: list[StepAnswer] = field(default_factory=list)

    @classmethod
    def open(cls, built: CacheEngine, rows: Rows, selector: Selector | None = None, **spec: object) -> Driver:
        terms = SessionSpec(
            "team-a",
            SCALE,
            int(rows.k.shape[1]),
            selector=selector,
            candidate_digest=CANDIDATE if selector else None,
            **spec,  # type: ignore[arg-type]
        )
        return cls(built, rows, built.open_session(terms))

    def request(self, layer: int, first: int, last: int, **changes: object) -> StepRequest:
        fields: dict[str, object] = {
            "session_id": self.handle.session_id,
            "generation": self.handle.generation,
            "step": self.step,
            "layer": layer,
            "first_row_position": first,
            "k": self.rows.k[layer, first:last],
            "v": self.rows.v[layer, first:last],
            "first_query_position": first,
            "q": self.rows.q[layer, first:last],
            "committed_frontier": 0 if self.step == 0 else self.position,
        }
        return StepRequest(**{**fields, **changes})  # type: ignore[arg-type]

    def forward(
        self, tokens: int, mode: StepMode | None = None, block: int = 20, **changes: object
    ) -> Tensor:
        """One step over `tokens` new rows in all layers; returns outputs [layers, tokens, Hq, d]."""
        first, last = self.position, self.position + tokens
        layers = []
        for layer in range(self.rows.k.shape[0]):
            parts = []
            for lo in range(first, last, block):
                answer = self.engine.step(
                    self.request(layer, lo, min(last, lo + block), **changes), mode or StepMode()
                )
                self.answers.append(answer)
                parts.append(answer.out)
            layers.append(torch.cat(parts))
        self.position, self.step = last, self.step + 1
        return torch.stack(layers)

    def play(self, prefill: int, decode: int, mode: StepMode | None = None, block: int = 20) -> Tensor:
        """A prefill and `decode` tokens; returns outputs [layers, prefill + decode, Hq, d]."""
        parts = [self.forward(prefill, block=block)]
        parts += [self.forward(1, mode) for _ in range(decode)]
        return torch.cat(parts, dim=1)

    def close(self) -> int:
        return self.engine.close_session(self.handle.session_id, self.handle.generation)


def dense_reference(rows: Rows, tokens: int) -> Tensor:
    """Causal attention in float64, obvious and slow: [layers, tokens, Hq, d]."""
    group = QUERY_HEADS // KV_HEADS
    k = rows.k[:, :tokens].double().repeat_interleave(group, dim=2)
    v = rows.v[:, :tokens].double().repeat_interleave(group, dim=2)
    logits = torch.einsum("lqhd,lkhd->lhqk", rows.q[:, :tokens].double(), k) * SCALE
    later = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), diagonal=1)
    return torch.einsum("lhqk,lkhd->lqhd", logits.masked_fill(later, -torch.inf).softmax(-1), v)


@dataclass
class Fault:
    """One fault at the `at`-th call (from 0) of `operation`. kind: an errno, `short`, `flip` or `lost`."""

    operation: str
    at: int
    kind: int | str
    sticky: bool = False


class FaultyFiles:
    """Real files with planned faults; counts its calls by operation. Threads of a tier share it."""

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.faults = list(faults)
        self.calls: dict[str, int] = {}
        self._real = OsFileOps()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _hit(self, operation: str) -> Fault | None:
        with self._lock:
            at = self.calls.get(operation, 0)
            self.calls[operation] = at + 1
        for fault in self.faults:
            if fault.operation == operation and (fault.at == at or (fault.sticky and at >= fault.at)):
                if isinstance(fault.kind, int):
                    raise OSError(fault.kind, os.strerror(fault.kind))
                return fault
        return None

    def make_folder(self, path: Path) -> None:
        self._hit("make_folder")
        self._real.make_folder(path)

    def open(self, path: Path, flags: int) -> int:
        self._hit("open")
        return self._real.open(path, flags)

    def lock(self, fd: int) -> None:
        self._hit("lock")
        self._real.lock(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._hit("truncate")
        self._real.truncate(fd, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._hit("allocate")
        self._real.allocate(fd, offset, size)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        fault = self._hit("read")
        done = self._real.read(fd, buffers, offset)
        if fault is None:
            return done
        if fault.kind == "short":
            return done - 512
        target = buffers[0]
        # Bytes behind the header's fields and behind the payload are padding that nobody reads.
        (length,) = struct.unpack_from("<Q", target, 80)
        at = self._random.choice([self._random.randrange(108), 4096 + self._random.randrange(length)])
        for buffer in buffers:
            if at < len(buffer):
                buffer[at] ^= 1 << self._random.randrange(8)
                break
            at -= len(buffer)
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        fault = self._hit("write")
        if fault is not None and fault.kind == "lost":
            return sum(len(buffer) for buffer in buffers)
        if fault is not None and fault.kind == "short":
            view = memoryview(buffers[0])
            return self._real.write(fd, [view[:4096]], offset)
        return self._real.write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._hit("sync")
        self._real.sync(fd)

    def close(self, fd: int) -> None:
        self._real.close(fd)

    def remove(self, path: Path) -> None:
        self._real.remove(path)

    def size(self, fd: int) -> int:
        return self._real.size(fd)

    def sync_folder(self, path: Path) -> None:
        self._real.sync_folder(path)

    def names(self, path: Path) -> list[str]:
        return self._real.names(path)


DISK_ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EACCES": errno.EACCES}
