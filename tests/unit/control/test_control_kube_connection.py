"""How the operator's connections are made: nothing is looked for at each request that cannot be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier_operator.kube.client import load_configuration

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.mark.parametrize(
    "environment, asked",
    [
        pytest.param({}, False, id="no-proxy"),
        pytest.param({"HTTPS_PROXY": "http://proxy:3128"}, True, id="a-proxy"),
        pytest.param(
            {"https_proxy": "http://proxy:3128", "NO_PROXY": "10.0.0.1"}, True, id="in-small-letters"
        ),
    ],
)
async def test_the_environment_is_asked_only_where_it_names_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], asked: bool
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kubeconfig = tmp_path / "kubeconfig"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    configuration = await load_configuration(str(kubeconfig))
    assert configuration.client_session_kwargs == {"trust_env": asked}
    assert configuration.host == "https://127.0.0.1:6443"
