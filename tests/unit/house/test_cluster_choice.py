"""Which cluster is used: never the one of KUBECONFIG unless the user has asked for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.kvtier_localplane.choice import ChoiceError, Refused, chosen_kubeconfig
from tests.e2e.demo.__main__ import parse

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with the kubeconfigs ``mine``, ``named`` and ``given``, and a folder."""
    for name in ("mine", "named", "given"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "environ, named, wish, chosen",
    [
        pytest.param({}, None, "", None, id="nothing"),
        pytest.param({"KUBECONFIG": "mine"}, None, "", None, id="kubeconfig-is-no-wish"),
        pytest.param({"KUBECONFIG": "mine"}, None, "local", None, id="local"),
        pytest.param({"KUBECONFIG": "mine"}, None, "own", "mine", id="own"),
        pytest.param(
            {"KUBECONFIG": "mine", "KVTIER_CLUSTER": "own"}, None, "", "mine", id="own-by-environment"
        ),
        pytest.param(
            {"KUBECONFIG": "mine", "KVTIER_CLUSTER": "own"}, None, "local", None, id="command-line-first"
        ),
        pytest.param({"KVTIER_KUBECONFIG": "named"}, None, "", "named", id="named-by-environment"),
        pytest.param({"KVTIER_KUBECONFIG": "named"}, None, "local", None, id="local-before-named"),
        pytest.param(
            {"KUBECONFIG": "mine", "KVTIER_KUBECONFIG": "named"}, None, "own", "mine", id="own-is-kubeconfig"
        ),
        pytest.param(
            {"KUBECONFIG": "mine", "KVTIER_KUBECONFIG": "named"}, "given", "own", "given", id="path-first"
        ),
        pytest.param({"KUBECONFIG": "gone:mine::named"}, None, "own", "mine:named", id="list"),
        pytest.param({"KUBECONFIG": "gone"}, None, "", None, id="accident-is-not-even-looked-at"),
    ],
)
def test_the_choice(
    files: Path, environ: dict[str, str], named: str | None, wish: str, chosen: str | None
) -> None:
    found = chosen_kubeconfig(environ, named=named, wish=wish)
    wanted = None if chosen is None else ":".join(str(files / one) for one in chosen.split(":"))
    assert found == wanted


@pytest.mark.parametrize(
    "environ, named, wish, reason, message",
    [
        pytest.param({}, None, "own", Refused.KUBECONFIG_UNSET, "KUBECONFIG names no file", id="unset"),
        pytest.param({"KUBECONFIG": ""}, None, "own", Refused.KUBECONFIG_UNSET, "names no file", id="empty"),
        pytest.param({"KUBECONFIG": ":"}, None, "own", Refused.KUBECONFIG_UNSET, "names no file", id="colon"),
        pytest.param(
            {"KUBECONFIG": "gone"},
            None,
            "own",
            Refused.KUBECONFIG_MISSING,
            "gone does not exist",
            id="missing",
        ),
        pytest.param(
            {"KUBECONFIG": "mine:folder"},
            None,
            "own",
            Refused.KUBECONFIG_UNREADABLE,
            "folder cannot be read as a file",
            id="folder",
        ),
        pytest.param(
            {"KVTIER_KUBECONFIG": "gone"},
            None,
            "",
            Refused.KUBECONFIG_MISSING,
            "KVTIER_KUBECONFIG",
            id="named",
        ),
        pytest.param({}, "gone", "", Refused.KUBECONFIG_MISSING, "gone does not exist", id="given"),
        pytest.param(
            {"KVTIER_CLUSTER": "prod"}, None, "", Refused.UNKNOWN_WISH, "own or local", id="unknown-wish"
        ),
    ],
)
def test_what_cannot_be_had_is_a_typed_error(
    files: Path,
    environ: dict[str, str],
    named: str | None,
    wish: str,
    reason: Refused,
    message: str,
) -> None:
    with pytest.raises(ChoiceError, match=message) as refused:
        chosen_kubeconfig(environ, named=named, wish=wish)
    assert refused.value.reason is reason


def test_a_file_without_the_right_to_read_it_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the answer of the system is stood in for."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (str(path) == "mine" and mode == os.R_OK))
    with pytest.raises(ChoiceError, match="mine cannot be read") as refused:
        chosen_kubeconfig({"KUBECONFIG": "mine"}, wish="own")
    assert refused.value.reason is Refused.KUBECONFIG_UNREADABLE


def test_the_demo_uses_an_own_cluster_only_by_its_option() -> None:
    assert (parse([]).cluster, parse([]).kubeconfig) == ("", None)
    assert parse(["--cluster", "own"]).cluster == "own"


@pytest.mark.parametrize(
    "words, environment, status, said",
    [
        pytest.param(["CLUSTER=own"], {}, 2, "KubeconfigUnset", id="own-without-kubeconfig"),
        pytest.param(["CLUSTER=own"], {"KUBECONFIG": "/gone"}, 2, "KubeconfigMissing", id="own-missing"),
        pytest.param(["CLUSTER=prod"], {}, 2, "UnknownWish", id="unknown"),
        # Neither a KUBECONFIG nor a CLUSTER that happens to be in the environment is a wish.
        pytest.param([], {"KUBECONFIG": "/gone", "CLUSTER": "own"}, 0, "build.py", id="accident"),
    ],
)
def test_make_checks_the_wish_before_anything_is_made(
    tmp_path: Path, words: list[str], environment: dict[str, str], status: int, said: str
) -> None:
    """`controlplane` with a stand-in for Python that runs choice.py and only names what else it was given."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in */choice.py) exec {sys.executable} "$@" ;; *) echo "$@" >&2 ;; esac\n'
    )
    python.chmod(0o755)
    kept = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["make", "--no-print-directory", "controlplane", f"PYTHON={python}", *words],
        cwd=REPOSITORY,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert (status == 0) == ("build.py" in done.stderr)
