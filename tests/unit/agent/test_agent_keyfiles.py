"""Keys as files: read by reference, rotated by a line, destroyed by removal, and never taken for destroyed
when their folder is away."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from kvtier_agent.config import ConfigError
from kvtier_agent.config import _key_dir as option
from kvtier_agent.keyfiles import CURRENT, KeyDirectory, MountedKeys
from kvtier_core.errors import CoreError, Reason

KEY = bytes(range(32))
TENANT = bytes([7]) * 32


def folder_of(place: Path, **files: bytes) -> Path:
    place.mkdir(exist_ok=True)
    for name, data in files.items():
        (place / name.replace("_", "-")).write_bytes(data)
    return place


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(KEY, id="raw"),
        pytest.param(KEY.hex().encode(), id="hex"),
        pytest.param(KEY.hex().upper().encode() + b"\n", id="hex-and-newline"),
        pytest.param(base64.b64encode(KEY) + b"\n", id="base64"),
        pytest.param(b" " * 31 + b"\n", id="raw-that-looks-like-text"),
    ],
)
def test_a_key_is_read_however_it_is_written(tmp_path: Path, written: bytes) -> None:
    keys = KeyDirectory(folder_of(tmp_path, CURRENT=b"k1\n", k1=written))
    assert keys.current(TENANT) == "k1"
    assert keys.key("k1") == (KEY if written != b" " * 31 + b"\n" else written)


@pytest.mark.parametrize("written", [b"", b"short", KEY[:31], b"z" * 64, KEY * 2], ids=str)
def test_what_is_no_key_is_not_taken_for_a_destroyed_one(tmp_path: Path, written: bytes) -> None:
    keys = KeyDirectory(folder_of(tmp_path, CURRENT=b"k1", k1=written))
    for ask in (lambda: keys.key("k1"), lambda: keys.current(TENANT)):
        with pytest.raises(CoreError) as refused:
            ask()
        assert refused.value.reason is Reason.STORAGE_UNAVAILABLE


def test_a_new_line_rotates_and_old_keys_stay_as_long_as_their_files(tmp_path: Path) -> None:
    keys = KeyDirectory(folder_of(tmp_path, CURRENT=b"k1", k1=KEY, k2=KEY[::-1]))
    assert keys.current(TENANT) == "k1"
    (tmp_path / CURRENT).write_bytes(b"k2\n")
    assert keys.current(TENANT) == "k2"
    assert keys.key("k1") == KEY
    (tmp_path / "k1").unlink()
    assert keys.key("k1") is None


def test_a_namespace_of_its_own_key_ends_with_it(tmp_path: Path) -> None:
    folder_of(tmp_path, CURRENT=b"k1", k1=KEY)
    own = tmp_path / TENANT.hex()
    own.write_bytes(KEY[::-1])
    keys = KeyDirectory(tmp_path)
    assert keys.current(TENANT) == TENANT.hex()
    assert keys.current(b"") == "k1"
    own.unlink()
    assert keys.key(TENANT.hex()) is None


def test_without_a_current_key_nothing_is_written(tmp_path: Path) -> None:
    assert KeyDirectory(folder_of(tmp_path, k1=KEY)).current(TENANT) is None


@pytest.mark.parametrize("line", [b"k9", b"../k1", b"", b"CURRENT", b"\xff"], ids=str)
def test_a_current_that_names_no_key_is_a_fault(tmp_path: Path, line: bytes) -> None:
    keys = KeyDirectory(folder_of(tmp_path, CURRENT=line, k1=KEY))
    with pytest.raises(CoreError) as refused:
        keys.current(TENANT)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE


@pytest.mark.parametrize("reference", ["../k1", "/etc/passwd", "", CURRENT, ".k1", "a" * 65])
def test_a_reference_is_a_name_and_no_path(tmp_path: Path, reference: str) -> None:
    assert KeyDirectory(folder_of(tmp_path, CURRENT=b"k1", k1=KEY)).key(reference) is None


def test_a_folder_that_is_away_or_empty_destroys_no_key(tmp_path: Path) -> None:
    for place in (tmp_path / "away", folder_of(tmp_path / "empty"), folder_of(tmp_path / "c", CURRENT=b"k1")):
        keys = KeyDirectory(place)
        with pytest.raises(CoreError) as refused:
            keys.key("k1")
        assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
        with pytest.raises(ConfigError, match="--key-dir"):
            option(str(place))


def test_the_option_is_a_folder_with_a_key(tmp_path: Path) -> None:
    assert option("") is None
    assert option(str(folder_of(tmp_path, k1=KEY))) == tmp_path


def test_the_keys_of_a_secret_are_those_of_its_folder_and_no_other(tmp_path: Path) -> None:
    folder_of(tmp_path / "secrets", x=b"")
    folder_of(tmp_path / "secrets" / "chat", CURRENT=b"k1", k1=KEY)
    folder_of(tmp_path / "own", CURRENT=b"k9", k9=KEY[::-1])
    keys = MountedKeys(tmp_path / "own", tmp_path / "secrets")
    chat, own = keys("chat"), keys("")
    assert chat is not None and chat.current(TENANT) == "k1"
    assert own is not None and own.current(TENANT) == "k9"
    assert MountedKeys(None, tmp_path / "secrets")("") is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("absent", "the key folder", id="not-mounted"),
        pytest.param("empty", "holds no key", id="no-key-yet"),
        pytest.param("uncurrent", "no entry CURRENT", id="no-current"),
        pytest.param("../own", "is not mounted", id="leaves-the-folder"),
        pytest.param("Upper", "is not mounted", id="no-name-of-a-secret"),
    ],
)
def test_a_cache_that_names_keys_is_never_kept_without_them(tmp_path: Path, name: str, words: str) -> None:
    folder_of(tmp_path / "secrets", x=b"")
    folder_of(tmp_path / "secrets" / "empty", CURRENT=b"k1")
    folder_of(tmp_path / "secrets" / "uncurrent", k1=KEY)
    folder_of(tmp_path / "own", CURRENT=b"k9", k9=KEY)
    for keys in (MountedKeys(tmp_path / "own", tmp_path / "secrets"), MountedKeys(tmp_path / "own", None)):
        with pytest.raises(CoreError) as refused:
            keys(name)
        assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
        assert name in refused.value.message
    with pytest.raises(CoreError, match=words):
        MountedKeys(None, tmp_path / "secrets")(name)
