"""Keys of encryption at rest as files of a folder, each named by its reference.

Why it exists: keys come from outside (a mounted Secret, a KMS agent's folder) and are never copied: what is
stored names the file, and removing the file is the end of what was written under it. It must not know blocks
or ciphers.

    <folder>/CURRENT        one line: the name of the key that new blocks are written under
    <folder>/<name>         32 bytes, as they are, as 64 hex digits, or as base64
    <folder>/<64 hex>       a key of one namespace alone, named by the namespace's digest; it comes first

A new line in CURRENT rotates: older blocks stay readable as long as their file is there.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.keyform import KEY_BYTES, MAX_REFERENCE_BYTES

CURRENT = "CURRENT"
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_REFERENCE_BYTES - 1}}}")
_SECRET = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_MOST_BYTES = 4096


class KeyDirectory:
    """A KeyProvider over a folder. Files are read when they are asked for, so a change needs no restart.

    A folder that is missing or holds no key at all is a mount that failed and not the end of its keys:
    STORAGE_UNAVAILABLE, so that nobody drops what can still be opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def current(self, namespace: bytes) -> str | None:
        own = namespace.hex()
        if own and self._read(own) is not None:
            return own
        named = self._read(CURRENT)
        if named is None:
            self._check_mounted()
            return None
        name = named.decode("utf-8", "replace").strip()
        if not _NAME.fullmatch(name) or name == CURRENT:
            raise CoreError(Reason.STORAGE_UNAVAILABLE, f"{CURRENT} of the key folder names no key")
        if self.key(name) is None:
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE, f"{CURRENT} of the key folder names {name}, which is not there"
            )
        return name

    def key(self, reference: str) -> bytes | None:
        if not _NAME.fullmatch(reference) or reference == CURRENT:
            return None
        data = self._read(reference)
        if data is None:
            self._check_mounted()
            return None
        return _decoded(reference, data)

    def check(self) -> None:
        """Whether there is a key at all. STORAGE_UNAVAILABLE."""
        self._check_mounted()

    def _read(self, name: str) -> bytes | None:
        try:
            with open(self._folder / name, "rb") as file:
                return file.read(_MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from error

    def _check_mounted(self) -> None:
        try:
            names = [path.name for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from error
        if not any(name != CURRENT for name in names):
            raise self._unavailable("it holds no key")

    def _unavailable(self, why: str) -> CoreError:
        return CoreError(Reason.STORAGE_UNAVAILABLE, f"the key folder {self._folder}: {why}")


class MountedKeys:
    """The keys by name: one folder for the agent's own, and below another one a folder for each Secret."""

    def __init__(self, own: Path | None, secrets: Path | None) -> None:
        self._own, self._secrets = own, secrets

    def __call__(self, name: str) -> KeyDirectory | None:
        """The agent's own keys, or none, for the empty name. STORAGE_UNAVAILABLE when the Secret is not
        mounted or holds no key: rows are never kept in plain text where keys were asked for."""
        if not name:
            return None if self._own is None else KeyDirectory(self._own)
        if self._secrets is None or not _SECRET.fullmatch(name):
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE,
                f"Secret {name} is not mounted on this agent: name it in its AgentPool's spec.keySecretRefs",
            )
        keys = KeyDirectory(self._secrets / name)
        keys.check()
        if keys.current(b"") is None:
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE,
                f"Secret {name} has no entry {CURRENT}, which names the key to use",
            )
        return keys


def _decoded(reference: str, data: bytes) -> bytes:
    """STORAGE_UNAVAILABLE for what is no key: it may be half written."""
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text.decode("ascii"))
        decoded = base64.b64decode(text, validate=True)
        if len(decoded) == KEY_BYTES:
            return decoded
    except (ValueError, binascii.Error):
        pass
    raise CoreError(
        Reason.STORAGE_UNAVAILABLE,
        f"the file of key {reference} has not {KEY_BYTES} bytes, raw, hex or base64",
    )
