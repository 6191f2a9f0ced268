"""`kvtier-agent inspect`: of a running socket, and of stores without an agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_agent.cli import main
from kvtier_client.blocks import Keys
from tests.engine.agent_process import CACHE
from tests.engine.block_doubles import flip
from tests.engine.block_server import BlockServer, block_server, payload_of, source_of, tokens_of

SOURCE = source_of()
BLOCKS = 24


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BlockServer]:
    with block_server(tmp_path / "disk", memory=16) as running:
        yield running


def filled(server: BlockServer) -> list[bytes]:
    tokens = tokens_of(BLOCKS)
    answer = server.client().store(
        SOURCE, tokens, [payload_of(at) for at in range(BLOCKS)], committed_frontier=len(tokens)
    )
    return [block.key for block in answer]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["inspect", *arguments])
    return status, capsys.readouterr().out


def live(server: BlockServer, *more: str) -> tuple[str, ...]:
    return ("--socket", str(server.socket_path), "--cache", f"{CACHE.namespace}/{CACHE.name}", *more)


def test_totals_say_what_is_in_which_tier(server: BlockServer, capsys: pytest.CaptureFixture[str]) -> None:
    filled(server)
    status, out = run(capsys, *live(server, "--json"))
    report: dict[str, Any] = json.loads(out)
    assert status == 0
    tiers = {tier["tierClass"]: tier for tier in report["tiers"]}
    assert (tiers["dram"]["capacityBlocks"], tiers["dram"]["persistent"]) == (16, False)
    assert (tiers["nvme"]["medium"], tiers["nvme"]["persistent"]) == ("nvme", True)
    assert tiers["dram"]["publishedBlocks"] + tiers["nvme"]["publishedBlocks"] >= BLOCKS
    assert report["counters"]["credits_released_twice"] == 0
    assert report["blocks"] == []
    status, out = run(capsys, *live(server))
    assert status == 0
    assert "OUTLIVES AGENT" in out and "dram" in out and "backend_reads" in out


def test_a_tenants_blocks_are_listed_with_their_places(
    server: BlockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = filled(server)
    status, out = run(capsys, *live(server, "--tenant", "team-a", "--limit", "100", "--json"))
    report = json.loads(out)
    assert status == 0
    assert {block["key"] for block in report["blocks"]} == {key.hex() for key in keys}
    assert {block["state"] for block in report["blocks"]} <= {"published", "moving"}
    places = {copy["tierClass"] for block in report["blocks"] for copy in block["replicas"]}
    assert places == {"dram", "nvme"}
    _, out = run(capsys, *live(server, "--tenant", "team-a", "--limit", "3"))
    assert out.count("published") + out.count("moving") >= 3
    assert "and more" in out
    _, out = run(capsys, *live(server, "--tenant", "team-b"))
    assert "tenant team-b has no blocks" in out


def test_a_key_is_explained_in_each_of_its_states(
    server: BlockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = filled(server)
    client = server.client()
    pinned = client.lookup(SOURCE, tokens_of(1), pin_seconds=60)
    asked = live(server, "--tenant", "team-a", "--key")
    status, out = run(capsys, *asked, keys[0].hex())
    assert status == 0
    assert "published: a lookup finds it" in out and "1 readers" in out
    client.load(SOURCE, tokens_of(1), found=pinned)
    client.delete(SOURCE, Keys((keys[0],)))
    status, out = run(capsys, *asked, keys[0].hex())
    assert status == 0 and "deleted" in out and "reason MISS" in out
    status, out = run(capsys, *asked, "00" * 32)
    assert status == 0 and "unknown" in out


def test_an_agent_that_does_not_answer_or_refuses_is_a_report(
    server: BlockServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = ("--socket", str(tmp_path / "none"), "--cache", "serving/chat", "--timeout", "1")
    status, out = run(capsys, *nobody)
    assert status == 1 and "none" in out
    other = ("--socket", str(server.socket_path), "--cache", "serving/other", "--json")
    status, out = run(capsys, *other)
    assert (status, json.loads(out)["error"]["reason"]) == (1, "CACHE_UNKNOWN")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--socket", "s"],
        ["--socket", "s", "--cache", "chat"],
        ["--socket", "s", "--store", "p"],
        ["--socket", "s", "--cache", "a/b", "--key", "00" * 32],
        ["--socket", "s", "--cache", "a/b", "--tenant", "t", "--key", "00"],
        ["--socket", "s", "--cache", "a/b", "--tenant", "t", "--key", "zz" * 32],
        ["--socket", "s", "--cache", "a/b", "--key-dir", "d"],
        ["--socket", "s", "--cache", "a/b", "--limit", "0"],
        ["--socket", "s", "--cache", "a/b", "--timeout", "0"],
        ["--store", "p", "--cache", "a/b"],
        ["--store", "p", "--tenant", "t"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *arguments])
    assert ended.value.code == 2
    assert "usage: kvtier-agent inspect" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.count("kvtier-agent inspect --") >= 5


# Offline.


def left_behind(folder: Path) -> tuple[Path, int]:
    """A store with blocks on it, whose server has ended; how many there are."""
    with block_server(folder, memory=16) as server:
        filled(server)
        path = server.flash.path
        return path, server.store.directory.replicas.counts[1]


def test_a_store_that_is_whole_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, blocks = left_behind(tmp_path / "disk")
    status, out = run(capsys, "--store", str(tmp_path), "--json")
    report = json.loads(out)
    assert (status, report["whole"]) == (0, True)
    (store,) = report["stores"]
    assert store["path"] == str(path)
    assert store["slots"]["GOOD"] >= blocks > 0
    assert store["superblock"]["clean"] is True
    status, out = run(capsys, "--store", str(path))
    assert status == 0 and "all is whole" in out and "closed in order" in out


def test_a_flipped_bit_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = left_behind(tmp_path / "disk")
    flip(path, payload_of(0))
    status, out = run(capsys, "--store", str(tmp_path), "--json")
    report = json.loads(out)
    assert (status, report["whole"]) == (1, False)
    (finding,) = report["stores"][0]["findings"]
    assert (finding["verdict"], len(finding["key"])) == ("DAMAGED_PAYLOAD", 64)
    status, out = run(capsys, "--store", str(tmp_path))
    assert status == 1 and "DAMAGED_PAYLOAD" in out and "something is wrong" in out


def test_a_store_in_use_and_a_place_without_one_are_reported(
    server: BlockServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(capsys, "--store", str(server.flash.path), "--json")
    assert (status, json.loads(out)["stores"][0]["error"]["reason"]) == (1, "STORAGE_LOCKED")
    (tmp_path / "empty").mkdir()
    for place in ("empty", "missing"):
        status, out = run(capsys, "--store", str(tmp_path / place))
        assert status == 1 and place in out
