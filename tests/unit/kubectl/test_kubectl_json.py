"""What programs read: the fields of each command's JSON, whatever state its objects are in; and streams that
cannot take all that is said."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kubectl_kvtier import commands
from kubectl_kvtier.cli import main, make_parser
from kubectl_kvtier.completion import script
from kubectl_kvtier.outcomes import Exit, Failure
from kubectl_kvtier.ports import Json
from kvtier_crds.models.rolloutstatus import Phase
from tests.unit.crds.crds_samples import example
from tests.unit.kubectl.kubectl_samples import NOW, MemoryApi, at, document

ROLLOUT = {
    *("namespace", "name", "cache", "phase", "stage", "step", "attempt", "fence", "verdict", "candidate"),
    *("baseline", "nodes", "nodesTotal", "gates", "cause", "explanation"),
}
REASON = {"sentence", "waits_for", "finished", "negative"}
FIELDS: dict[str, set[str]] = {
    "status quest-on-chat": ROLLOUT,
    "status": ROLLOUT,
    "explain quest-on-chat": REASON,
    "explain cache/chat": REASON,
    "history quest-on-chat": {"rollouts", "events"},
    "history cache/chat": {"rollouts", "revisions"},
    "pause quest-on-chat --no-wait": {"seq", "verb", "attempt", "expectedStage", "expectedStep"},
    "top": {"nodes", "caches"},
}


def world(rollout: Json, cache: Json | None = None) -> MemoryApi:
    api = MemoryApi()
    chat = copy.deepcopy(example("KVCache", "chat"))
    chat["metadata"]["uid"] = "u-2"
    api.put("kvrollouts", rollout)
    api.put("kvcaches", cache or chat)
    return api


async def said(api: MemoryApi, words: str) -> Any:
    """The document, or the Failure in its place."""
    stream = io.StringIO()
    arguments = make_parser().parse_args([*words.split(), "-o", "json"])
    try:
        await commands.in_cluster(api, arguments, commands.Out(stream, True, lambda: NOW))
    except Failure as failure:
        assert stream.getvalue() == ""
        return failure
    return json.loads(stream.getvalue())


@pytest.mark.parametrize("words", FIELDS)
async def test_no_field_is_renamed_or_removed(words: str) -> None:
    found = await said(world(document()), words)
    assert set(found[0] if isinstance(found, list) else found) == FIELDS[words]


def states() -> Iterator[tuple[str, Json]]:
    plain = document()
    for name, status in [
        ("null", None),
        ("empty", {}),
        ("of-tomorrow", {"phase": "Dreaming"}),
        ("with-a-field-of-tomorrow", {**plain["status"], "dreams": [1]}),
        ("no-time", {"phase": "Completed", "grantExpires": "yesterday"}),
        ("off-the-ladder", {"phase": "Progressing", "stage": "Ramp", "step": 9}),
        *((f"bare-{phase}", {"phase": str(phase)}) for phase in Phase),
    ]:
        yield name, {**plain, "status": status}
    yield "no-status", {name: part for name, part in plain.items() if name != "status"}
    yield "no-spec", {**plain, "spec": {}}
    for held in (["kvtier.dev/rollout", "example.com/other"], []):
        gone = {"deletionTimestamp": at(-100), "finalizers": held}
        yield f"deleted-{len(held)}", {**plain, "metadata": {**plain["metadata"], **gone}}


STATES = dict(states())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("words", FIELDS)
async def test_whatever_an_object_says_there_is_one_document_or_one_line(words: str, state: str) -> None:
    found = await said(world(copy.deepcopy(STATES[state])), words)
    if isinstance(found, Failure):
        assert str(found) and "\n" not in str(found)
    else:
        rows = found if isinstance(found, list) else [found]
        assert all(FIELDS[words] == set(row) or "unreadable" in row for row in rows)


async def test_a_status_with_no_time_where_one_stands_hides_no_other() -> None:
    api = world(document())
    other = copy.deepcopy(STATES["no-time"])
    other["metadata"]["name"] = "other"
    api.put("kvrollouts", other)
    good, bad = await said(api, "status")
    assert good["name"] == "quest-on-chat"
    assert bad["name"] == "other" and "'yesterday' is no time" in bad["unreadable"]


async def test_that_an_approval_has_ended_is_said() -> None:
    ended = {
        "type": "Progressing",
        "status": "False",
        "reason": "ApprovalEnded",
        "message": "the approval ended when next began",
        "lastTransitionTime": at(-60),
    }
    found = await said(
        world(document(phase="Completed", stage="Full", conditions=[ended])), "explain quest-on-chat"
    )
    assert "is complete, but the approval ended when next began" in found["sentence"]


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
async def test_where_the_tree_has_no_characters_it_is_drawn_in_ascii(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    arguments = make_parser().parse_args(["status", "quest-on-chat"])
    await commands.in_cluster(world(document()), arguments, commands.Out(stream, False, lambda: NOW))
    stream.seek(0)
    assert "|- * Canary (5%)" in stream.read()


def test_a_name_that_the_locale_does_not_have_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "{apiVersion: kvtier.dev/v1alpha1, kind: KVCache, metadata: {name: Größe✔}}", encoding="utf-8"
    )
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["lint", "-f", str(path)]) == Exit.NEGATIVE
    shown.seek(0)
    assert r"KVCache/Gr\xf6\xdfe\u2714" in shown.read()


def test_standard_input_is_utf_8_whatever_the_locale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a: \xff"), encoding="latin-1"))
    assert main(["lint", "-f", "-"]) == Exit.USAGE
    assert "-: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err


def test_an_output_that_is_full_is_a_failure_with_a_word() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "kubectl_kvtier.cli", "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == Exit.FAILED
    assert ended.stderr == "kubectl kvtier: cannot be written: [Errno 28] No space left on device\n"


def test_the_script_for_bash_is_one() -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=script("bash"), text=True, capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
