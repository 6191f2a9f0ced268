"""The guide to tiers says what runs: its example is run, twice, and its class is one that the API takes."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import yaml

from kvtier_agent.cli import main
from kvtier_agent.keyfiles import MountedKeys
from kvtier_crds.models.tierclass import TierClass

GUIDE = Path(__file__).parents[3] / "docs/guides/tiers.md"


def example(language: str) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0])


def test_the_class_of_the_guide_is_valid() -> None:
    TierClass.model_validate(yaml.safe_load(example("yaml")))


def test_the_keys_of_the_guide_are_keys(tmp_path: Path) -> None:
    [secret] = [
        document
        for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        for document in yaml.safe_load_all(block)
        if document and document["kind"] == "Secret"
    ]
    place = tmp_path / secret["metadata"]["name"]
    place.mkdir()
    for name, value in secret["stringData"].items():
        (place / name).write_text(value)
    keys = MountedKeys(None, tmp_path)(place.name)
    assert keys is not None and keys.current(bytes(32)) == "k1"


def test_the_example_of_the_guide_runs_and_its_store_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(example("python"), str(GUIDE), "exec")
    for _ in range(2):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code, {"__name__": "guide"})
        lines = said.getvalue().splitlines()
        assert lines[0].startswith("32 blocks are found; ")
        kept = int(re.findall(r"restart (\d+) blocks", lines[1])[0])
        assert 32 - 8 <= kept <= 32, "at most what fits into memory was not on flash"
        assert lines[2].startswith("deleted in every tier: True")
    assert main(["inspect", "--store", "kv-example"]) == 0
    assert "all is whole" in capsys.readouterr().out
