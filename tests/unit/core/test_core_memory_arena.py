"""Host memory of a cache: sealed, one namespace a segment, mapped by clients that cannot write."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers import base, transfer
from kvtier_core.tiers.arena import ArenaOptions, HugePages
from kvtier_core.tiers.base import BlockIdentity, SlotRef, seal_checksum, tensor_bytes
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.hostmemory import LinuxHostMemory
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem

LAYOUT = ChunkLayout(kv_heads=2, chunk_tokens=16, head_dim=16)
ODD = ChunkLayout(kv_heads=1, chunk_tokens=16, head_dim=20)
BUILT: list[CpuTier] = []
A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def tier(slots: int = 4, layout: ChunkLayout = LAYOUT, per_segment: int = 2, **options: object) -> CpuTier:
    stride = base.slot_stride(layout)
    built = CpuTier(
        "ram",
        layout,
        slots,
        host=options.pop("host", None),  # type: ignore[arg-type]
        options=ArenaOptions(segment_bytes=per_segment * stride, **options),  # type: ignore[arg-type]
    )
    BUILT.append(built)
    return built


@pytest.fixture(autouse=True)
def _close_what_was_built() -> Iterator[None]:
    yield
    while BUILT:
        BUILT.pop().close()


def payload(seed: int = 0, layout: ChunkLayout = LAYOUT) -> torch.Tensor:
    return torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed))


def named(data: torch.Tensor, layout: ChunkLayout = LAYOUT) -> BlockIdentity:
    return BlockIdentity(bytes(32), 7, 1, 16, layout.payload_bytes, seal_checksum(data))


def put(target: CpuTier, data: torch.Tensor, namespace: bytes = A) -> SlotRef:
    ref = target.reserve(7, namespace)
    target.write(ref, data, named(data, target.layout))
    target.validate(ref, named(data, target.layout))
    target.publish(ref)
    return ref


def refused(reason: Reason, call: Callable[..., object], *args: object) -> CoreError:
    with pytest.raises(CoreError) as error:
        call(*args)
    assert error.value.reason is reason, error.value
    return error.value


CLIENT = """
import errno, mmap, os, sys
fd, offset, length, size = (int(text) for text in sys.argv[1:])
view = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
sys.stdout.write(view[offset:offset + length].hex() + "\\n")
def refusal(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno]
    except TypeError:
        return "READONLY"
    return "WRITTEN"
def reopened():
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    os.pwrite(writable, b"x", offset)
def remapped():
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    mmap.mmap(writable, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)[offset] = 1
def assign():
    view[offset] = 1
print(refusal(assign))
print(refusal(lambda: mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE | mmap.PROT_READ)))
print(refusal(lambda: os.pwrite(fd, b"x", offset)))
print(refusal(lambda: os.ftruncate(fd, 0)))
print(refusal(reopened))
print(refusal(remapped))
sys.stdout.flush()
sys.stdin.readline()
print(view[offset:offset + length].hex())
"""


def test_a_client_maps_a_published_slot_and_cannot_write_it() -> None:
    ram = tier()
    data = payload(3)
    ref = put(ram, data)
    shared = ram.share(ref)
    assert shared.segment.seals == "shrink+grow+future_write+seal"
    assert shared.offset % 4096 == 0
    arguments = [shared.segment.descriptor, shared.offset, shared.length, shared.segment.length]
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *map(str, arguments)],
        pass_fds=[shared.segment.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None
        seen = client.stdout.readline().strip()
        answers = [client.stdout.readline().strip() for _ in range(6)]
        # The map is shared: what we write later is what the client reads, without a copy.
        ram.payload(ref.slot).fill_(2.0)
        rest, _ = client.communicate("\n", timeout=120)
    assert seen == tensor_bytes(data).hex()
    assert answers == ["READONLY", "EACCES", "EBADF", "EINVAL", "EPERM", "EPERM"]
    assert rest.strip() == tensor_bytes(torch.full(LAYOUT.shape, 2.0)).hex()


def test_the_owner_itself_can_neither_resize_nor_write_by_descriptor() -> None:
    host = LinuxHostMemory()
    fd = host.create("probe", 4096, huge=False)
    memory = host.map(fd, 4096)
    host.seal(fd)
    memory[:4] = b"kept"
    for call in (
        lambda: os.ftruncate(fd, 8192),
        lambda: os.ftruncate(fd, 0),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: host.map(fd, 4096),
    ):
        with pytest.raises(PermissionError):
            call()
    assert memory[:4] == b"kept"
    os.close(fd)


def test_only_published_slots_are_shared_and_none_of_another_life() -> None:
    ram = tier()
    ref = ram.reserve(7, A)
    refused(Reason.NOT_VISIBLE, ram.share, ref)
    ram.release(ref)
    refused(Reason.RECYCLED_DESTINATION, ram.share, ref)


def test_namespaces_never_share_a_segment_and_none_sees_anothers_bytes() -> None:
    ram = tier(slots=4, per_segment=2)
    first = put(ram, payload(1), A)
    other = put(ram, payload(2), B)
    mine, theirs = ram.share(first).segment, ram.share(other).segment
    assert (mine.namespace, theirs.namespace) == (A, B)
    assert mine.segment != theirs.segment
    assert os.fstat(mine.descriptor).st_ino != os.fstat(theirs.descriptor).st_ino
    assert [item.segment for item in ram.shared_segments(A)] == [mine.segment]
    assert ram.shared_segments(C) == ()
    # A third namespace finds no idle segment although two slots are free.
    assert ram.arena.free_in(C) == 0
    error = refused(Reason.NO_DESTINATION_CAPACITY, ram.reserve, 9, C)
    assert error.facts["used_slots"] == "2"
    old = os.dup(mine.descriptor)
    ram.release(first)
    assert ram.arena.free_in(C) == 2
    ref = ram.reserve(9, C)
    body = ram.landing(ref).body
    assert not any(body)
    again = ram.arena.shared(ref.slot // 2)
    assert (again.segment, again.namespace, again.generation) == (mine.segment, C, mine.generation + 1)
    # The client that mapped the segment under A keeps A's memory, and never sees C's.
    assert os.fstat(old).st_ino != os.fstat(again.descriptor).st_ino
    body[:4] = b"ours"
    with mmap.mmap(old, mine.length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as view:
        assert view[:4] != b"ours"
    os.close(old)


def test_segments_that_change_hands_cost_no_descriptors() -> None:
    ram = tier(slots=4, per_segment=2)
    put(ram, payload(0), A)
    counts = []
    # Only what this test leaves behind is looked through at each collection.
    gc.collect()
    gc.freeze()
    for turn in range(6):
        ref = put(ram, payload(turn), bytes([turn]) * 32)
        ram.release(ref)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    gc.unfreeze()
    assert len(set(counts)) == 1
    assert ram.arena.namespaces == 2


def test_a_slot_is_reused_within_its_namespace_before_a_new_segment_is_claimed() -> None:
    ram = tier(slots=4, per_segment=2)
    refs = [ram.reserve(1, A) for _ in range(2)]
    ram.release(refs[0])
    assert ram.reserve(1, A).slot == refs[0].slot
    assert len(ram.shared_segments(A)) == 1


def test_a_landing_is_the_slots_own_memory_on_whole_pages() -> None:
    ram = tier(slots=3, layout=ODD, per_segment=3)
    assert ODD.payload_bytes % 4096
    assert ram.slot_bytes % 4096 == 0
    data = payload(5, ODD)
    ref = ram.reserve(7, A)
    landing = ram.landing(ref)
    assert len(landing.body) == ODD.payload_bytes
    assert torch.frombuffer(landing.body, dtype=torch.uint8).data_ptr() % 4096 == 0
    landing.body[:] = tensor_bytes(data)
    refused(Reason.NOT_VISIBLE, ram.validate, ref, named(data, ODD))
    ram.filled(ref)
    ram.validate(ref, named(data, ODD))
    ram.publish(ref)
    assert torch.equal(ram.view(ref), data)
    refused(Reason.NOT_VISIBLE, ram.filled, ref)
    ram.quarantine(ref)
    refused(Reason.NOT_VISIBLE, ram.landing, ref)


class Sink:
    def __init__(self) -> None:
        self.events: list[tuple[str, int, Reason | None]] = []

    def done(self, index: int, error: CoreError | None) -> None:
        self.events.append(("done", index, error.reason if error else None))

    def drained(self, index: int) -> None:
        self.events.append(("drained", index, None))


class WritesToMemory(TorchDispatchMode):
    """Counts tensor operations that write a payload's worth of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler runs here, and to tell it to stay away would import it, for seconds."""
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator, dict-item]
        name = str(func)
        views = ("view", "as_strided", "select", "slice", "detach", "frombuffer")
        whole = isinstance(result, torch.Tensor) and result.numel() >= LAYOUT.floats
        if whole and not any(view in name for view in views):
            self.ops.append(name)
        return result


@pytest.mark.parametrize("how", ["submit_write", "submit_read", "write"])
def test_one_copy_moves_a_block_and_no_other_is_made(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    ram = tier()
    data = payload(4)
    host = bytearray(tensor_bytes(data))
    moved: list[int] = []

    def counted(target: memoryview, source: memoryview) -> None:
        moved.append(len(source))
        transfer.move_bytes(target, source)

    monkeypatch.setattr(base, "move_bytes", counted)
    sink = Sink()
    ref = ram.reserve(7, A) if how != "submit_read" else put(ram, data)
    item = TransferItem(ref, named(data), Landing(memoryview(host)))
    with WritesToMemory() as writes:
        if how == "submit_write":
            ram.submit_write([item], 1.0, sink)
        elif how == "submit_read":
            host[:] = bytes(len(host))
            ram.submit_read([item], 1.0, sink)
        else:
            ram.write(ref, data, named(data))
    if how == "write":
        assert (moved, writes.ops) == ([], ["aten.copy_.default"])
        return
    assert sink.events == [("done", 0, None), ("drained", 0, None)]
    assert (moved, writes.ops) == ([LAYOUT.payload_bytes], [])
    assert bytes(host) == bytes(tensor_bytes(data))
    if how == "submit_write":
        ram.publish(ref)
        assert torch.equal(ram.view(ref), data)


def test_a_damaged_source_is_refused_where_it_lands() -> None:
    ram = tier()
    data = payload(4)
    damaged = bytearray(tensor_bytes(data))
    damaged[100] ^= 1
    ref = ram.reserve(7, A)
    sink = Sink()
    ram.submit_write([TransferItem(ref, named(data), Landing(memoryview(damaged)))], 1.0, sink)
    assert sink.events == [("done", 0, Reason.CHECKSUM_MISMATCH), ("drained", 0, None)]
    refused(Reason.NOT_VISIBLE, ram.publish, ref)


def test_a_deletion_zeroes_the_copy_and_what_a_namespace_left_behind() -> None:
    """A client that mapped the segment must not go on reading what was deleted."""
    ram = tier(slots=4, per_segment=4)
    kept, evicted, deleted = (put(ram, payload(seed), A) for seed in range(3))
    left = ram.body(evicted.slot)
    ram.release(evicted)
    assert any(left)
    sink = Sink()
    ram.submit_erase([EraseItem(ref=deleted), EraseItem(ref=evicted)], 1.0, sink)
    assert [event for event in sink.events if event[0] == "done"] == [
        ("done", 0, None),
        ("done", 1, Reason.RECYCLED_DESTINATION),
    ]
    assert not any(ram.body(deleted.slot))
    assert any(left)
    ram.submit_erase([EraseItem(namespace=A)], 1.0, sink)
    assert not any(left)
    assert torch.equal(ram.view(kept), payload(0))
    ram.submit_erase([EraseItem(namespace=B)], 1.0, sink)


# What the machine can refuse.


class Refusing(LinuxHostMemory):
    """A machine without one thing, named by the operation that fails."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.bound: list[int] = []
        self.committed: list[int] = []

    def _may(self, name: str) -> None:
        if name in self.codes:
            raise OSError(self.codes[name], os.strerror(self.codes[name]))

    def create(self, name: str, size: int, *, huge: bool) -> int:
        self._may("huge" if huge else "create")
        return super().create(name, size, huge=huge)

    def map(self, fd: int, size: int) -> mmap.mmap:
        self._may("map")
        return super().map(fd, size)

    def commit(self, fd: int, size: int) -> None:
        self._may("commit")
        self.committed.append(size)
        super().commit(fd, size)

    def advise_huge(self, memory: mmap.mmap) -> str:
        self._may("advise")
        return super().advise_huge(memory)

    def bind(self, memory: mmap.mmap, node: int) -> None:
        self._may("bind")
        super().bind(memory, node)
        self.bound.append(node)

    def close(self, fd: int) -> None:
        super().close(fd)


@pytest.mark.parametrize(
    ("codes", "options", "probe", "fact"),
    [
        (
            {"huge": errno.ENOMEM},
            {"huge_pages": HugePages.EXPLICIT},
            "huge_pages",
            "explicit refused: ENOMEM",
        ),
        (
            {"huge": errno.EINVAL},
            {"huge_pages": HugePages.EXPLICIT},
            "huge_pages",
            "explicit refused: EINVAL",
        ),
        ({"advise": errno.EINVAL}, {}, "huge_pages", "none (EINVAL)"),
        ({}, {"huge_pages": HugePages.OFF}, "huge_pages", "off"),
        ({"bind": errno.EPERM}, {"numa_node": 0}, "numa", "node 0 refused: EPERM"),
        ({"bind": errno.ENOSYS}, {"numa_node": 0}, "numa", "node 0 refused: ENOSYS"),
    ],
    ids=["no huge pages", "no huge memfd", "no advice", "off", "numa forbidden", "numa unknown"],
)
def test_what_the_machine_has_not_is_a_fact_and_no_failure(
    codes: dict[str, int], options: dict[str, object], probe: str, fact: str
) -> None:
    ram = tier(host=Refusing(**codes), **options)
    data = payload()
    assert torch.equal(ram.view(put(ram, data)), data)
    assert fact in ram.measured.probes[probe]


@pytest.mark.parametrize("operation", ["create", "map", "commit"])
def test_memory_that_cannot_be_had_is_a_refusal_that_passes(operation: str) -> None:
    host = Refusing(**{operation: errno.ENOMEM})
    ram = tier(host=host, commit=True)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        error = refused(Reason.NO_DESTINATION_CAPACITY, ram.reserve, 1, A)
        assert error.facts["errno"] == "ENOMEM"
    assert len(os.listdir("/proc/self/fd")) == before
    assert ram.slots.used == 0
    host.codes.clear()
    assert ram.reserve(1, A).slot >= 0
    assert host.committed == [2 * ram.slot_bytes]


def test_memory_is_bound_to_the_node_of_the_device_where_the_kernel_can() -> None:
    host = Refusing()
    ram = tier(host=host, numa_node=0)
    ref = put(ram, payload())
    assert ram.measured.probes["numa"] in (
        "node 0 preferred",
        "node 0 refused: ENOSYS",
        "node 0 refused: EPERM",
    )
    assert ram.measured.probes["numa_nodes"]
    assert torch.equal(ram.view(ref), payload())


def test_memory_that_a_frame_claims_in_inference_mode_can_be_written_afterwards() -> None:
    ram = tier()
    with torch.inference_mode():
        first = put(ram, payload(1))
    ram.view(first).fill_(1.0)
    assert torch.equal(ram.view(put(ram, payload(2))), payload(2))


def test_a_budget_no_machine_has_is_refused_at_once() -> None:
    refused(Reason.NO_DESTINATION_CAPACITY, lambda: CpuTier("ram", LAYOUT, 1 << 50))


def test_closing_gives_descriptors_back_and_leaves_views_alive() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    ram = tier(slots=8, per_segment=2)
    refs = [put(ram, payload(seed), bytes([seed]) * 32) for seed in range(4)]
    view = ram.view(refs[2])
    ram.close()
    assert torch.equal(view, payload(2))
    BUILT.clear()
    del view, ram
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_arena_that_is_dropped_gives_descriptors_back() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    ram = tier(slots=8, per_segment=2)
    for seed in range(4):
        put(ram, payload(seed), bytes([seed]) * 32)
    assert len(os.listdir("/proc/self/fd")) > before
    BUILT.clear()
    del ram
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


class ArenaMachine(RuleBasedStateMachine):
    """Reserve, publish and release in several namespaces, against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.ram = tier(slots=7, per_segment=2)
        self.live: dict[SlotRef, tuple[bytes, int]] = {}
        self.dead: list[SlotRef] = []
        self.seed = 0

    @rule(namespace=st.sampled_from([A, B, C]))
    def put(self, namespace: bytes) -> None:
        owners: dict[int, set[bytes]] = {}
        for ref, (owner, _) in self.live.items():
            owners.setdefault(ref.slot // 2, set()).add(owner)
        mine = [segment for segment in range(4) if owners.get(segment, set()) <= {namespace}]
        room = sum((1 if segment == 3 else 2) for segment in mine)
        held = sum(1 for owner, _ in self.live.values() if owner == namespace)
        self.seed += 1
        if held == room:
            refused(Reason.NO_DESTINATION_CAPACITY, self.ram.reserve, self.seed, namespace)
            return
        ref = self.ram.reserve(self.seed, namespace)
        data = payload(self.seed)
        self.ram.write(ref, data, named(data))
        self.ram.validate(ref, named(data))
        self.ram.publish(ref)
        self.live[ref] = (namespace, self.seed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.live, key=lambda item: (item.slot, item.generation))))
        del self.live[ref]
        self.ram.release(ref)
        self.dead.append(ref)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def late_call(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.dead))
        refused(Reason.RECYCLED_DESTINATION, self.ram.share, ref)
        refused(Reason.RECYCLED_DESTINATION, self.ram.release, ref)

    @invariant()
    def bytes_and_owners_hold(self) -> None:
        assert self.ram.slots.used == len(self.live)
        for ref, (namespace, seed) in self.live.items():
            shared = self.ram.share(ref)
            assert shared.segment.namespace == namespace
            assert torch.equal(self.ram.view(ref), payload(seed))

    def teardown(self) -> None:
        self.ram.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
