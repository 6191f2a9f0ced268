"""A frame is accepted as a whole or not at all: order, repeats, deadlines, full tiers, broken disks."""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import SessionSpec, StepRequest
from kvtier_core.tiers.base import MediumKind, TierMount
from kvtier_crds.manifest import Checksum, Dtype, Medium, Placement
from tests.unit.core.builders import (
    BLOCK,
    CHUNK,
    DISK_ERRORS,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    SCALE,
    SLOT,
    Driver,
    FakeClock,
    Fault,
    FaultyFiles,
    Rows,
    TierBudget,
    cpu,
    engine,
    gpu,
    manifest,
    nvme,
)

TOKENS = 4 * CHUNK + 5
TIERS = [gpu(3), cpu(2), nvme(64)]


def refused(reason: Reason, call: Callable[..., object], *args: object, **named: object) -> CoreError:
    with pytest.raises(CoreError) as error:
        call(*args, **named)
    assert error.value.reason is reason, error.value
    return error.value


Change = dict[str, object]
ORDER: dict[str, tuple[Change, Reason]] = {
    "unknown session": ({"session_id": "nobody"}, Reason.SESSION_UNKNOWN),
    "old generation": ({"generation": 0}, Reason.GENERATION_STALE),
    "layer out of range": ({"layer": LAYERS}, Reason.FRAME_INVALID),
    "negative layer": ({"layer": -1}, Reason.FRAME_INVALID),
    "layer skipped": ({"layer": 1}, Reason.STEP_ORDER),
    "step skipped": ({"step": 2}, Reason.STEP_ORDER),
    "step repeated with new rows": ({"step": 0, "layer": 0}, Reason.STEP_ORDER),
    "hole before the rows": ({"first_row_position": 11}, Reason.FRONTIER_MISMATCH),
    "rows from before": ({"first_row_position": 9}, Reason.FRONTIER_MISMATCH),
    "query beyond the rows": ({"first_query_position": 11}, Reason.FRONTIER_MISMATCH),
    "commit beyond the rows": ({"committed_frontier": 12}, Reason.FRONTIER_MISMATCH),
    "negative position": ({"first_query_position": -1}, Reason.FRAME_INVALID),
    "v of another length": ({"v": torch.zeros(2, KV_HEADS, HEAD_DIM)}, Reason.FRAME_INVALID),
    "k of another geometry": (
        {"k": torch.zeros(1, KV_HEADS + 1, HEAD_DIM), "v": torch.zeros(1, KV_HEADS + 1, HEAD_DIM)},
        Reason.FRAME_INVALID,
    ),
    "q of another geometry": ({"q": torch.zeros(1, QUERY_HEADS, HEAD_DIM - 1)}, Reason.FRAME_INVALID),
    "half precision": ({"q": torch.zeros(1, QUERY_HEADS, HEAD_DIM).half()}, Reason.FRAME_INVALID),
    "no query": ({"q": torch.zeros(0, QUERY_HEADS, HEAD_DIM)}, Reason.FRAME_INVALID),
    "flat k": ({"k": torch.zeros(4)}, Reason.FRAME_INVALID),
}


@pytest.mark.parametrize(("change", "reason"), ORDER.values(), ids=ORDER.keys())
def test_a_frame_out_of_order_is_refused_and_changes_nothing(
    tmp_path: Path, change: Change, reason: Reason
) -> None:
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, Rows.random(20))
        driver.forward(10)
        before = built.stats()
        refused(reason, built.step, dataclasses.replace(driver.request(0, 10, 11), **change))  # type: ignore[arg-type]
        assert built.stats() == before
        driver.forward(1)


def test_a_layer_may_not_run_ahead_of_layer_0_nor_fall_behind(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, Rows.random(20))
        built.step(driver.request(0, 0, 10))
        refused(Reason.FRONTIER_MISMATCH, built.step, driver.request(1, 0, 11))
        built.step(driver.request(1, 0, 8))
        driver.step = 1
        refused(Reason.STEP_ORDER, built.step, driver.request(0, 10, 11))
        driver.step = 0
        built.step(driver.request(1, 8, 10))
        driver.step = 1
        built.step(driver.request(0, 10, 11))


def test_a_session_starts_with_layer_0(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, Rows.random(20))
        refused(Reason.STEP_ORDER, built.step, driver.request(1, 0, 1))
        driver.step = 7
        driver.forward(3)


def test_a_byte_identical_repeat_is_answered_again(tmp_path: Path) -> None:
    """The answer was lost; the client replays the step from its first layer."""
    rows = Rows.random(TOKENS + 1)
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        first = [built.step(driver.request(layer, TOKENS, TOKENS + 1)) for layer in range(LAYERS)]
        used = built.stats()
        again = [built.step(driver.request(layer, TOKENS, TOKENS + 1)) for layer in range(LAYERS)]
        assert built.stats() == used
        for one, two in zip(first, again, strict=True):
            assert torch.equal(one.out, two.out)
            assert one.receipt.support_digest == two.receipt.support_digest
            assert (one.repeated, two.repeated) == (False, True)
        driver.position, driver.step = TOKENS + 1, 2


def test_a_repeated_prefill_frame_sees_only_rows_up_to_its_queries(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS)
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows)
        parts = [built.step(driver.request(0, lo, min(lo + 20, TOKENS))).out for lo in range(0, TOKENS, 20)]
        again = [built.step(driver.request(0, lo, min(lo + 20, TOKENS))).out for lo in range(0, TOKENS, 20)]
    assert torch.equal(torch.cat(parts), torch.cat(again))


def test_a_repeat_with_other_bytes_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, Rows.random(TOKENS + 1))
        driver.forward(TOKENS)
        built.step(driver.request(0, TOKENS, TOKENS + 1))
        k = driver.rows.k[0, TOKENS:].clone()
        k.view(torch.int32)[0, 0, 0] ^= 1
        refused(Reason.FRONTIER_MISMATCH, built.step, driver.request(0, TOKENS, TOKENS + 1, k=k))
        # Zero and minus zero are equal numbers and different bytes.
        zeros = torch.zeros_like(k)
        other = Driver.open(
            built, Rows(zeros[None].repeat(LAYERS, 1, 1, 1), *(Rows.random(1).v, Rows.random(1).q))
        )
        built.step(other.request(0, 0, 1))
        refused(Reason.FRONTIER_MISMATCH, built.step, other.request(0, 0, 1, k=-zeros))


def test_queries_without_new_rows_are_answered(tmp_path: Path) -> None:
    rows = Rows.random(40)
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, rows)
        whole = driver.forward(40)
        driver.step, driver.position = 0, 40
        last = driver.request(LAYERS - 1, 40, 40, q=rows.q[-1, 30:40], first_query_position=30)
        assert torch.equal(built.step(last).out, whole[-1, 30:40])


def test_rows_past_max_tokens_are_refused(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, Rows.random(10))
        driver.forward(10)
        driver.rows = Rows.random(11)
        error = refused(Reason.FRAME_INVALID, built.step, driver.request(0, 10, 11))
        assert error.facts == {"max_tokens": "10"}


@pytest.mark.parametrize("allowed", range(5))
def test_a_deadline_between_chunks_leaves_the_session_as_it_was(tmp_path: Path, allowed: int) -> None:
    """The clock ticks once a reading; the deadline passes before chunk `allowed`."""
    clock = FakeClock(tick=1.0)
    rows = Rows.random(TOKENS + CHUNK)
    with engine(tmp_path / "a", [gpu(64)], clock=clock) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        before = built.stats()
        late = driver.request(0, TOKENS, TOKENS + CHUNK, deadline=clock.now + allowed + 0.5)
        error = refused(Reason.DEADLINE, built.step, late)
        assert error.facts["chunk"] == str(allowed)
        assert built.stats() == before
        out = driver.forward(CHUNK)
    with engine(tmp_path / "b", [gpu(64)]) as built:
        other = Driver.open(built, rows)
        other.forward(TOKENS)
        assert torch.equal(other.forward(CHUNK), out)


def test_too_little_budget_is_refused_with_numbers(tmp_path: Path) -> None:
    with engine(tmp_path, [gpu(1), nvme(64)]) as built:
        error = refused(Reason.NO_DESTINATION_CAPACITY, Driver.open, built, Rows.random(8))
        assert "2 open chunks wanted" in error.message
        assert error.facts["hbm"] == "1 of 1 slots free"
    with engine(tmp_path, [gpu(2), nvme(3)]) as built:
        error = refused(Reason.NO_DESTINATION_CAPACITY, Driver.open, built, Rows.random(3 * CHUNK))
        assert f"{3 * CHUNK} tokens need 6 chunks" in error.message
        Driver.open(built, Rows.random(2 * CHUNK)).close()
    with engine(tmp_path, [nvme(64)]) as built:
        refused(Reason.NO_DESTINATION_CAPACITY, Driver.open, built, Rows.random(8))


@pytest.mark.parametrize("frame", [1, 20, CHUNK, 2 * CHUNK], ids=lambda n: f"frames of {n}")
def test_a_full_cache_refuses_the_frame_and_keeps_what_it_has(tmp_path: Path, frame: int) -> None:
    """7 slots: 4 open chunks, 2 sealed ones of another session, 1 more. When the other leaves, the refused
    step goes on where it was: its first frames are repeats."""
    rows = Rows.random(2 * CHUNK)
    outs: list[torch.Tensor] = []
    refusals = 0
    with engine(tmp_path, [gpu(5), nvme(2)]) as built:
        other = Driver.open(built, Rows.random(CHUNK + 1, seed=4))
        other.forward(CHUNK + 1)
        driver = Driver.open(built, rows)
        while driver.position < 2 * CHUNK:
            count = min(frame, 2 * CHUNK - driver.position)
            try:
                outs.append(driver.forward(count, block=count))
            except CoreError as caught:
                error = caught
                refusals += 1
                before = built.stats()
                refused(Reason.NO_DESTINATION_CAPACITY, driver.forward, count, block=count)
                assert built.stats() == before
                other.close()
                outs.append(driver.forward(count, block=count))
        driver.close()
        assert [tier.used_bytes for tier in built.stats().tiers] == [0, 0]
    assert refusals == 1
    assert error.reason is Reason.NO_DESTINATION_CAPACITY
    with engine(tmp_path / "b", [gpu(64)]) as built:
        assert torch.equal(torch.cat(outs, dim=1), Driver.open(built, rows).forward(2 * CHUNK))


IO_FAULTS = [
    *[(o, code) for o in ("allocate", "write", "read") for code in (errno.EIO, errno.ENOSPC)],
    ("write", "short"),
    ("read", "short"),
    ("read", "flip"),
]


@pytest.mark.parametrize("frame", [9, 3 * CHUNK], ids=lambda n: f"frames of {n}")
@pytest.mark.parametrize(
    ("operation", "kind"),
    IO_FAULTS,
    ids=[f"{o}-{errno.errorcode[k] if isinstance(k, int) else k}" for o, k in IO_FAULTS],
)
def test_any_io_may_fail_once_and_no_bit_changes(
    tmp_path: Path, operation: str, kind: int | str, frame: int
) -> None:
    """An I/O of the run fails. A read is tried again by the next plan in the same frame; after a failed write
    the client repeats the frame. Answers are those of a sound disk."""
    rows = Rows.random(3 * CHUNK + 2)
    tiers = [cpu(LAYERS), nvme(64)]
    with engine(tmp_path / "sound", [gpu(64)]) as built:
        want = Driver.open(built, rows).forward(3 * CHUNK + 2)
    counting = FaultyFiles()
    run(tmp_path / "count", tiers, rows, counting, frame)
    calls = counting.calls.get(operation, 0)
    start = 0 if operation == "allocate" else 1
    assert calls > start
    everything_healed = 0
    for at in range(start, calls, -(-calls // 5)):
        files = FaultyFiles(Fault(operation, at, kind), seed=at)
        got, failures, healed = run(tmp_path / f"{at}", tiers, rows, files, frame)
        assert torch.equal(got, want)
        reasons = {"short": "SHORT_COPY", "flip": "CHECKSUM_MISMATCH"}
        reason = reasons.get(kind, "STORAGE_UNAVAILABLE")  # type: ignore[call-overload]
        if operation == "read" and not failures:
            # A run of neighbours that fails as a whole is read again block by block, by the tier itself.
            assert healed in ([], [(("supportPartition", reason),)]), at
            everything_healed += len(healed)
        else:
            assert {one.value for one in failures} == {reason}, (at, failures)
            everything_healed += 1
    assert everything_healed


@pytest.mark.parametrize("frame", [9, 3 * CHUNK], ids=lambda n: f"frames of {n}")
def test_a_write_that_the_disk_lost_is_noticed_while_the_rows_still_exist(tmp_path: Path, frame: int) -> None:
    """Reported as done and never done: only the read back before publishing can tell."""
    rows = Rows.random(3 * CHUNK + 2)
    with engine(tmp_path / "sound", [gpu(64)]) as built:
        want = Driver.open(built, rows).forward(3 * CHUNK + 2)
    for at in (1, 2, 3):
        files = FaultyFiles(Fault("write", at, "lost"))
        got, failures, _ = run(tmp_path / f"{at}", [cpu(LAYERS), nvme(64)], rows, files, frame)
        assert failures == [Reason.CHECKSUM_MISMATCH]
        assert torch.equal(got, want)


def run(
    folder: Path, tiers: list[TierBudget], rows: Rows, files: FaultyFiles, frame: int
) -> tuple[torch.Tensor, list[Reason], list[tuple[tuple[str, str], ...]]]:
    """Plays all rows in one step, each frame tried twice; returns outputs, what was refused, and which plans
    failed before another answered."""
    failures: list[Reason] = []
    healed: list[tuple[tuple[str, str], ...]] = []
    with engine(folder, tiers, files=files) as built:
        driver = Driver.open(built, rows)
        tokens = int(rows.k.shape[1])
        layers = []
        for layer in range(LAYERS):
            parts = []
            for lo in range(0, tokens, frame):
                request = driver.request(layer, lo, min(lo + frame, tokens))
                try:
                    answer = built.step(request)
                except CoreError as error:
                    failures.append(error.reason)
                    answer = built.step(request)
                parts.append(answer.out)
                if answer.receipt.failed_plans:
                    healed.append(answer.receipt.failed_plans)
            layers.append(torch.cat(parts))
        assert driver.close() == tokens
        assert [tier.used_bytes for tier in built.stats().tiers] == [0, 0]
    return torch.stack(layers), failures, healed


@pytest.mark.parametrize("code", DISK_ERRORS.values(), ids=DISK_ERRORS.keys())
def test_a_dead_disk_is_a_condition_and_memory_goes_on(tmp_path: Path, code: int) -> None:
    files = FaultyFiles(Fault("allocate", 0, code, sticky=True), Fault("write", 1, code, sticky=True))
    with engine(tmp_path, [cpu(LAYERS), nvme(64)], files=files) as built:
        driver = Driver.open(built, Rows.random(CHUNK + 1))
        driver.forward(CHUNK - 1)
        error = refused(Reason.STORAGE_UNAVAILABLE, driver.forward, 2)
        assert errno.errorcode[code] in error.message
        conditions = {tier.class_name: tier.condition for tier in built.stats().tiers}
        assert conditions["ram"] == "Ready"
        assert conditions["flash"].startswith("STORAGE_UNAVAILABLE: ")
        driver.close()
        again = Driver.open(built, Rows.random(CHUNK - 1))
        again.forward(CHUNK - 1)


def test_damage_on_disk_is_a_refusal_and_never_an_answer(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(LAYERS), nvme(64)]) as built:
        driver = Driver.open(built, Rows.random(3 * CHUNK))
        driver.forward(2 * CHUNK + 1)
        (path,) = tmp_path.glob("*.blocks")
        data = bytearray(path.read_bytes())
        for slot in range(len(data) // BLOCK):
            data[slot * BLOCK + 4096 + 5] ^= 16
        path.write_bytes(data)
        error = refused(Reason.CHECKSUM_MISMATCH, driver.forward, 1)
        assert error.facts["logical"].startswith("0x")
        chunks = built.list_chunks(driver.handle.session_id, driver.handle.generation)
        assert chunks == []
        driver.close()


def test_close_frees_everything_wherever_it_is_called(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS)
    with engine(tmp_path, TIERS) as built:
        for layer in range(LAYERS):
            for at in range(0, TOKENS, 20):
                driver = Driver.open(built, rows)
                for done in range(layer):
                    for lo in range(0, TOKENS, 20):
                        built.step(driver.request(done, lo, min(lo + 20, TOKENS)))
                for lo in range(0, at, 20):
                    built.step(driver.request(layer, lo, lo + 20))
                driver.close()
                stats = built.stats()
                assert [tier.used_bytes for tier in stats.tiers] == [0, 0, 0]
                assert (stats.sessions, stats.chunks) == (0, 0)
        refused(Reason.SESSION_UNKNOWN, driver.close)
        refused(Reason.SESSION_UNKNOWN, built.step, driver.request(0, 0, 1))


def test_a_session_id_of_a_closed_session_is_another_session(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        first = Driver.open(built, Rows.random(4), session_id="chosen")
        refused(Reason.BAD_ARGUMENT, Driver.open, built, Rows.random(4), session_id="chosen")
        first.close()
        second = Driver.open(built, Rows.random(4), session_id="chosen")
        assert second.handle.generation > first.handle.generation
        refused(Reason.GENERATION_STALE, first.close)
        refused(Reason.GENERATION_STALE, built.step, first.request(0, 0, 1))


def test_a_stopped_engine_refuses_and_leaves_no_file(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        driver = Driver.open(built, Rows.random(3 * CHUNK))
        driver.forward(3 * CHUNK)
        assert list(tmp_path.glob("*.blocks"))
        built.stop()
        assert not list(tmp_path.glob("*.blocks"))
        built.stop()
        refused(Reason.DRAINING, built.open_session, SessionSpec("t", SCALE, 1))
        refused(Reason.DRAINING, built.step, driver.request(0, 0, 1))


def test_threads_may_share_an_engine(tmp_path: Path) -> None:
    rows = [Rows.random(2 * CHUNK, seed) for seed in range(4)]
    outs: dict[int, torch.Tensor] = {}
    with engine(tmp_path / "a", [gpu(9), cpu(3), nvme(64)]) as built:
        drivers = [Driver.open(built, one) for one in rows]

        def play(index: int) -> None:
            outs[index] = drivers[index].play(CHUNK + 5, 10)

        threads = [threading.Thread(target=play, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for index, one in enumerate(rows):
        with engine(tmp_path / f"{index}", [gpu(64)]) as built:
            assert torch.equal(outs[index], Driver.open(built, one).play(CHUNK + 5, 10))


def test_published_chunks_are_listed_and_read_as_they_were_written(tmp_path: Path) -> None:
    rows = Rows.random(3 * CHUNK + 2)
    with engine(tmp_path, [gpu(3), cpu(1), nvme(64)]) as built:
        driver = Driver.open(built, rows)
        session = (driver.handle.session_id, driver.handle.generation)
        driver.forward(3 * CHUNK + 1)
        assert built.list_chunks(*session) == []
        driver.forward(1)
        found = built.list_chunks(*session)
        assert [(info.layer, info.chunk) for info in found] == [
            (la, c) for la in range(LAYERS) for c in range(3)
        ]
        assert {info.tier_class for info in found} == {"hbm", "ram", "flash"}
        assert built.list_chunks(*session, offset=2, limit=3) == found[2:5]
        for info in found:
            again, data = built.read_chunk(*session, info.layer, info.chunk, info.generation)
            assert again == info
            assert len(data) == info.bytes == SLOT
            span = slice(info.chunk * CHUNK, (info.chunk + 1) * CHUNK)
            want = built.layout.assemble(rows.k[info.layer, span], rows.v[info.layer, span])
            assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(want.shape), want)
        one = found[0]
        refused(Reason.GENERATION_STALE, built.read_chunk, *session, one.layer, one.chunk, one.generation + 1)
        refused(Reason.NOT_VISIBLE, built.read_chunk, *session, 0, 3, 1)
        refused(Reason.NOT_VISIBLE, built.read_chunk, *session, 0, 99, 1)
        refused(Reason.NOT_VISIBLE, built.read_chunk, *session, LAYERS, 0, 1)


def test_the_live_manifest_is_rebuilt_from_what_runs(tmp_path: Path) -> None:
    asked = manifest(TIERS)
    with engine(tmp_path, TIERS) as built:
        assert built.live_manifest() == asked
        assert built.live_manifest().digest() == asked.digest()
        tier = built._live.tiers[1].tier
        tier.capability = dataclasses.replace(tier.capability, checksum="crc32c")
        assert built.live_manifest().digest() != asked.digest()


def test_a_manifest_that_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    base = manifest([cpu(4)])
    geometry = base.model.geometry
    half = base.model.model_copy(update={"geometry": geometry.model_copy(update={"dtype": Dtype.FLOAT16})})
    entry = base.tiers[0]

    def entry_of(**change: object) -> dict[str, object]:
        return {"tiers": (entry.model_copy(update=change),)}

    cpu_only = {"ram": TierMount("ram", MediumKind.CPU)}
    cases = [
        ({"numerics_version": "f32/9"}, cpu_only, Reason.NUMERICS_MISMATCH, "numericsVersion"),
        ({"model": half}, cpu_only, Reason.UNSUPPORTED, "float16"),
        ({"placement": Placement(policy="lru")}, cpu_only, Reason.MANIFEST_INVALID, "lru"),
        (entry_of(codec="fp8"), cpu_only, Reason.TIER_INCAPABLE, "fp8"),
        (entry_of(checksum=Checksum.BLAKE3), cpu_only, Reason.TIER_INCAPABLE, "blake3"),
        (entry_of(medium=Medium.REMOTE), cpu_only, Reason.TIER_INCAPABLE, "remote"),
        ({}, {}, Reason.TIER_INCAPABLE, "ram"),
        ({}, {"ram": TierMount("ram", MediumKind.NVME)}, Reason.TIER_INCAPABLE, "ram"),
        (entry_of(medium=Medium.NVME),
         {"ram": TierMount("ram", MediumKind.NVME)}, Reason.STORAGE_UNAVAILABLE, "folder"),
        ({"device_kind": "cuda-sm90", **entry_of(medium=Medium.GPU)},
         {"ram": TierMount("ram", MediumKind.GPU)}, Reason.NUMERICS_MISMATCH, "cuda-sm90"),
    ]  # fmt: skip
    for change, devices, reason, text in cases:
        asked = base.model_copy(update=change)
        error = refused(reason, CacheEngine, asked, devices, FakeClock())
        assert text in error.message


def test_tiers_are_measured_and_simulation_is_named(tmp_path: Path) -> None:
    import time

    mounts = {
        "hbm": TierMount("hbm", MediumKind.GPU),
        "ram": TierMount("ram", MediumKind.CPU),
        "flash": TierMount("flash", MediumKind.NVME, folder=tmp_path),
    }
    built = CacheEngine(manifest(TIERS), mounts, time.monotonic)
    stats = {tier.class_name: tier for tier in built.stats().tiers}
    assert all(tier.read_bytes_per_second > 0 and tier.write_bytes_per_second > 0 for tier in stats.values())
    assert [stats[name].simulated for name in ("hbm", "ram", "flash")] == [True, False, False]
    assert stats["flash"].probes["o_direct"] in ("true", "false")
    assert float(stats["flash"].probes["fsync_seconds"]) > 0
    assert stats["flash"].pinned_bytes >= 2 * BLOCK
    assert stats["hbm"].used_bytes == stats["ram"].used_bytes == stats["flash"].used_bytes == 0
    built.stop()


def test_time_of_storage_is_hidden_or_waited_for_and_nothing_else(tmp_path: Path) -> None:
    """The clock moves only inside reads, by 2 s each, on threads of the tier; neighbours are one read."""
    clock, reads, one_by_one = FakeClock(), [], threading.Lock()

    class Slow(FaultyFiles):
        def read(self, fd: int, buffers: object, offset: int) -> int:
            with one_by_one:
                clock.now += 2.0
                reads.append(offset)
            return super().read(fd, buffers, offset)  # type: ignore[arg-type]

    with engine(tmp_path, [cpu(LAYERS), nvme(64)], files=Slow(), clock=clock) as built:
        driver = Driver.open(built, Rows.random(3 * CHUNK + 1))
        driver.forward(3 * CHUNK)
        reads.clear()
        answer = built.step(driver.request(0, 3 * CHUNK, 3 * CHUNK + 1))
        assert answer.receipt.bytes_by_tier["flash"] == 3 * SLOT
        assert 1 <= len(reads) <= 3
        assert answer.receipt.stall_seconds + answer.receipt.hidden_seconds == 2.0 * len(reads)


def test_frames_of_a_wrong_kind_are_not_requests() -> None:
    with pytest.raises(TypeError):
        StepRequest(session_id="x")  # type: ignore[call-arg]
