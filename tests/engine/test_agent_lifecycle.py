"""A real agent process from start to end: bad arguments, broken folders, drain, crash and restart."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.v1 import attention_pb2, common_pb2, control_pb2
from tests.cluster.kvtier_localplane.pki import CertificateAuthority
from tests.engine.agent_process import (
    CALL_SECONDS,
    NODE,
    agent_arguments,
    baseline_manifest,
    detail_of,
    exit_of,
    quest_candidate,
    running_agent,
)
from tests.engine.attention_driver import Engine

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since a Unix socket's path may hold about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


def reason_of(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return common_pb2.Reason.Name(detail_of(refused.value).reason)


@pytest.fixture
def arguments(folder: Path) -> list[str]:
    authority = CertificateAuthority("ca", folder / "pki")
    return agent_arguments(folder, NODE, authority.issue(NODE, folder / "pki"), [])


@pytest.mark.parametrize("shared", ["--state-dir", "--tier"])
def test_two_agents_never_share_a_folder(folder: Path, arguments: list[str], shared: str) -> None:
    with running_agent(folder=folder) as first:
        others = {"--state-dir": str(folder / "state2"), "--run-dir": str(folder / "run2")}
        if shared == "--state-dir":
            others["--state-dir"] = str(folder / "state")
        tier = '{"className":"nvme","medium":"nvme","capacity":"1Mi","device":{"path":"%s"}}'
        extra = ["--tier", tier % (folder / "nvme")] if shared == "--tier" else []
        words = [*arguments, *(word for pair in others.items() for word in pair), *extra]
        status, message = exit_of(folder / "second", words)
        assert status == 2
        assert shared in message
        assert "another agent holds" in message
        assert first.state().boot_id == first.boot_id


def test_an_unusable_tier_folder_is_said_and_the_agent_stays_up(folder: Path) -> None:
    (folder / "nvme").write_text("a file where a folder should be")
    with running_agent(folder=folder) as agent, Engine(agent.socket_path) as engine:
        conditions = {tier.tier_class: tier.condition for tier in agent.state().tiers}
        assert conditions["gpu-sim"] == conditions["dram"] == "Ready"
        assert conditions["nvme"].startswith("StorageUnavailable: ")
        assert reason_of(lambda: agent.apply_baseline(baseline_manifest())) == "STORAGE_UNAVAILABLE"
        without = baseline_manifest(budgets={"nvme": 0})
        assert agent.apply_baseline(without).running_digest == without.digest()
        session = engine.open(without)
        session.forward(3)
        session.close()


def test_fences_that_cannot_be_stored_are_not_acknowledged(folder: Path) -> None:
    with running_agent(folder=folder) as agent:
        manifest = baseline_manifest()
        agent.apply_baseline(manifest)
        fences = folder / "state" / "fences"
        fences.rename(folder / "state" / "gone")
        assert reason_of(lambda: agent.grant(manifest, quest_candidate(manifest))) == "FENCE_NOT_DURABLE"
        [cache] = agent.state().caches
        assert cache.highest_fence == 1
        assert not cache.HasField("candidate")
        (folder / "state" / "gone").rename(fences)
        request = agent.grant(manifest, quest_candidate(manifest))
        assert agent.state().caches[0].candidate.digest == request.digest
        fences.rename(folder / "state" / "gone")
        # A revocation ends permission first: what cannot be acknowledged is still safe.
        assert reason_of(lambda: agent.revoke()) == "FENCE_NOT_DURABLE"
        assert not agent.state().caches[0].HasField("candidate")


def test_a_crash_keeps_the_fence_and_serves_the_baseline(folder: Path) -> None:
    manifest = baseline_manifest()
    candidate = quest_candidate(manifest)
    with running_agent(folder=folder) as agent:
        agent.apply_baseline(manifest)
        granted = agent.grant(manifest, candidate)
        with Engine(agent.socket_path) as engine:
            session = engine.open(manifest)
            session.forward(3)
            before = session.opened
            agent.kill()
    with running_agent(folder=folder, from_nothing=True) as again, Engine(again.socket_path) as engine:
        assert again.boot_id != agent.boot_id
        [cache] = again.state().caches
        assert cache.highest_fence == granted.fence.value
        assert cache.baseline_digest == manifest.digest()
        assert not cache.HasField("candidate")
        assert (cache.returned_reason, cache.returned_fence) == ("BootRestart", granted.fence.value)
        assert cache.returned_rollout_uid == "rollout-uid"
        assert reason_of(lambda: again.control.Grant(granted, timeout=CALL_SECONDS)) == "BOOT_ID_MISMATCH"
        session = engine.open(manifest)
        assert session.opened.arm == attention_pb2.ARM_BASELINE
        assert session.opened.session_id != before.session_id
        session.send(session.frame(0, 1, 0, session_id=before.session_id))
        assert common_pb2.Reason.Name(session.receive().error.reason) == "SESSION_UNKNOWN"
        # Told again, with the new boot id, the same grant is a repeat that begins a lease.
        granted.boot_id = again.boot_id
        assert again.control.Grant(granted, timeout=CALL_SECONDS).candidate_digest == candidate.digest()
        stale = common_pb2.Fence(value=1)
        assert reason_of(lambda: again.apply_baseline(manifest, fence=stale)) == "FENCE_STALE"
        proof = again.prove(granted.fence.value)
        assert proof.candidate_digest == candidate.digest()


def test_sigterm_lets_work_in_flight_finish_and_takes_no_session(folder: Path) -> None:
    manifest = baseline_manifest()
    with (
        running_agent(folder=folder, extra=("--drain", "100")) as agent,
        Engine(agent.socket_path) as engine,
    ):
        agent.apply_baseline(manifest)
        session = engine.open(manifest)
        session.forward(1500)
        frames = [session.frame(0, 128, 1500 + 128 * i) for i in range(8)]
        for frame in frames:
            session.send(frame)
        assert not session.receive().HasField("error")
        agent.process.terminate()
        refused: list[str] = []

        def ask() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    engine.open(manifest, session_root_id="late")
                except grpc.RpcError as error:
                    refused.append(str(error))
                    return

        asker = threading.Thread(target=ask)
        asker.start()
        answers = [session.receive() for _ in frames[1:]]
        asker.join(60)
        assert not [answer.error for answer in answers if answer.HasField("error")]
        assert refused
        assert "DRAINING" in refused[0] or "UNAVAILABLE" in refused[0]
        session.end_stream()
        assert agent.process.wait(60) == 0
        assert not agent.socket_path.exists()


def test_idle_sessions_expire_and_give_their_memory_back(folder: Path) -> None:
    manifest = baseline_manifest()
    with (
        running_agent(folder=folder, extra=("--session-idle", "3")) as agent,
        Engine(agent.socket_path) as engine,
    ):
        agent.apply_baseline(manifest)
        session = engine.open(manifest)
        session.forward(300)
        session.end_stream()
        deadline = time.monotonic() + 60
        while agent.state().caches[0].sessions:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while sum(tier.used_bytes for tier in agent.state().tiers):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_agent_without_a_cache_says_so_and_ends_at_once(folder: Path) -> None:
    extra = ("--drain", "1000")
    with running_agent(folder=folder, extra=extra) as agent, Engine(agent.socket_path) as engine:
        state: control_pb2.GetStateResponse = agent.state()
        assert not state.caches
        assert state.manifest_set_digest.startswith("sha256:e3b0c442")
        assert reason_of(lambda: engine.open(baseline_manifest())) == "CACHE_UNKNOWN"
        assert agent.terminate(90) == 0
