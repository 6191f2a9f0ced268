"""Every flag that cannot be used is refused at the start, by name, with exit status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier_agent.cli import build_parser, main
from kvtier_agent.config import AgentConfig, ConfigError, Medium, TierConfig
from kvtier_agent.nodeuid import NodeUidError, NodeUidReason


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_text("pem")
    return [
        *("--node-name", "node-a", "--node-uid", "uid-a", "--pool", "serving/pool", "--no-kubernetes"),
        *("--state-dir", str(tmp_path / "s"), "--run-dir", "/tmp/r", "--listen", "127.0.0.1:0"),
        *("--tls-cert", str(tmp_path / "tls.crt"), "--tls-key", str(tmp_path / "tls.key")),
        *("--tls-ca", str(tmp_path / "ca.crt")),
    ]


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        pytest.param("--tls-key", "/nonexistent", "--tls-key /nonexistent: no such file", id="key"),
        pytest.param("--pool", "pool", "--pool 'pool' must be NAMESPACE/NAME", id="pool"),
        pytest.param("--listen", "localhost", "--listen 'localhost' must be HOST:PORT", id="listen"),
        pytest.param("--advertise", "a:b", "--advertise 'a:b' must be HOST:PORT", id="advertise"),
        pytest.param("--node-name", "No_Name", "--node-name 'No_Name'", id="node-name"),
        pytest.param("--node-uid", "../x", "--node-uid '../x'", id="node-uid"),
        pytest.param("--node-uid", "", "--node-uid is required with --no-kubernetes", id="no-node-uid"),
        pytest.param("--operator-name", "", "--operator-name must have 1 to 253", id="no-operator-name"),
        pytest.param("--operator-name", "node-a", "'node-a' is this node's own name", id="own-name"),
        pytest.param("--metrics-port", "70000", "--metrics-port 70000", id="metrics-port"),
        pytest.param("--session-idle", "0", "--session-idle 0.0", id="session-idle"),
        pytest.param("--index-cpu-share", "0", "must be above 0 and at most 1", id="no-index-share"),
        pytest.param("--index-cpu-share", "1.5", "must be above 0 and at most 1", id="index-share"),
        pytest.param("--index-cpu-share", "half", "--index-cpu-share", id="index-share-text"),
        pytest.param("--index-memory", "lots", "--index-memory", id="index-memory"),
        pytest.param("--run-dir", "/tmp/" + "x" * 120, "--run-dir: the socket path", id="socket-path"),
        pytest.param("--tier", "{", "--tier is not JSON", id="tier-json"),
        pytest.param("--tier", "[]", "--tier must be a JSON object", id="tier-object"),
        pytest.param("--tier", '{"className":"a","medium":"tape"}', "'tape' must be one of", id="medium"),
        pytest.param("--tier", '{"klass":"a"}', "unknown fields ['klass']", id="unknown-field"),
    ],
)
def test_bad_arguments(
    arguments: list[str], flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, flag, value]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"className":"a","medium":"cpu","capacity":"lots"}', "--tier a: capacity"),
        ('{"className":"a","medium":"cpu","capacity":0}', "must be at least 1"),
        ('{"className":"a","medium":"nvme","capacity":"1Mi"}', "needs device.path"),
        ('{"className":"a","medium":"nvme","capacity":"1Mi","device":{"path":"rel"}}', "absolute path"),
        ('{"className":"a","medium":"gpu","capacity":"1Mi","device":{"cudaIndex":-1}}', "cudaIndex"),
    ],
    ids=["capacity", "no-capacity", "nvme-path", "relative-path", "cuda-index"],
)
def test_bad_tiers(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TierConfig.parse(text)


def test_a_class_given_twice(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    tier = '{"className":"dram","medium":"cpu","capacity":"1Mi"}'
    assert main([*arguments, "--tier", tier, "--tier", tier]) == 2
    assert "className ['dram'] given twice" in capsys.readouterr().err


def test_tier_sizes_and_simulation() -> None:
    tier = TierConfig.parse('{"className":"g","medium":"gpu","capacity":"1Gi","reserve":"64Mi"}')
    assert (tier.medium, tier.capacity_bytes, tier.reserve_bytes) == (Medium.GPU, 1 << 30, 64 << 20)
    assert tier.simulated
    real = TierConfig.parse(
        '{"className":"g","medium":"gpu","deviceKind":"cuda-sm90","capacity":1024,"device":{"cudaIndex":0}}'
    )
    assert not real.simulated


def test_a_name_is_no_uid_where_it_would_own_something(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments.remove("--no-kubernetes")
    assert main([*arguments, "--node-uid", "node-a"]) == 2
    assert "--node-uid 'node-a' is the node's name; leave it out" in capsys.readouterr().err


def test_without_a_uid_nothing_is_claimed_before_it_is_known(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(transport: object, node_name: str) -> str:
        raise NodeUidError(NodeUidReason.TOKEN_UNBOUND, f"no Node {node_name}")

    monkeypatch.setattr("kvtier_agent.nodeuid.find_node_uid", nobody)
    arguments.remove("--no-kubernetes")
    tier = {"className": "n", "medium": "nvme", "capacity": "1Mi", "device": {"path": str(tmp_path / "n")}}
    assert main([*arguments, "--node-uid", "", "--tier", json.dumps(tier)]) == 3
    assert "kvtier-agent: TokenUnbound: no Node node-a" in capsys.readouterr().err
    assert not (tmp_path / "n").exists() and not (tmp_path / "s").exists()


def test_addresses_and_places(arguments: list[str]) -> None:
    config = AgentConfig.from_arguments(build_parser().parse_args(arguments))
    assert config.socket_path == Path("/tmp/r/node-a/engine.sock")
    assert config.advertise == config.listen
    assert (config.pool_namespace, config.pool_name) == ("serving", "pool")


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "(default: /var/lib/kvtier)" in " ".join(capsys.readouterr().out.split())


def test_no_abbreviations(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--metrics", "1"])
