"""A store's own data keys, wrapped under the keys that are given from outside, in one small file beside it.

Why it exists: to erase a cache by its key, that key must be the cache's alone and must lie where it can be
overwritten. A mounted key is neither: it serves other caches, and it belongs to whoever mounts it. So blocks
are encrypted under random data keys, one for each outer key that new blocks are written under, and only
these, wrapped, are kept. Overwriting the file leaves no way to open a block, though every block and the outer
key be there. It must not know blocks, nor when a cache ends.

The file is a row of frames: magic 4s | length u32 | SHA-256 of the payload | payload, JSON of one wrapped
key. A key is used only after its frame is durable, so a torn last frame is of a key that nobody used. An
erased file begins with a frame that says so and names the keys that were in it, and holds zeros after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.fileops import FileOps
from kvtier_core.tiers.nvme.crypto import KEY_BYTES, NONCE_BYTES, KeyProvider

KEYS_SUFFIX = ".keys"
PREFIX = "data:"
_HEAD = struct.Struct(">4sI32s")
_MAGIC = b"KVTK"
_DOMAIN = b"kvtier data key wrap v1\0"
_ID_BYTES = 8
_PAGE = 4096
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """id: names it in the headers of blocks. outer: reference of the key that it is wrapped under."""

    id: str
    outer: str
    nonce: bytes
    wrapped: bytes


@dataclass(frozen=True, slots=True)
class KeysErased:
    """The receipt: durable, and the same however often it is asked for. keys: ids of what was erased, empty
    when a crash in the middle took the list with it. file: name of the key file."""

    file: str
    keys: tuple[str, ...]


class DataKeys:
    """The keys of one store as a KeyProvider, over `outer`. Made before the store is opened; reads and writes
    only while it is, under its lock. Thread-safe. Raises CoreError: STORAGE_UNAVAILABLE.

    What a store wrote under outer keys themselves, before it had data keys, stays readable by them."""

    def __init__(
        self, path: Path, outer: KeyProvider, files: FileOps, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._path = path
        self._outer = outer
        self._files = files
        self._random = random
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def current(self, namespace: bytes) -> str | None:
        outer = self._outer.current(namespace)
        if outer is None:
            return None
        with self._lock:
            loaded = self._load()
            if loaded.erased is not None:
                return None
            found = loaded.newest.get(outer)
            if found is None:
                found = self._make(loaded, outer)
            return None if found is None else found.id

    def key(self, reference: str) -> bytes | None:
        if not reference.startswith(PREFIX):
            return self._outer.key(reference)
        with self._lock:
            found = self._load().by_id.get(reference)
        if found is None:
            return None
        outer = self._outer.key(found.outer)
        if outer is None:
            return None
        try:
            return _wrapping(outer, found.id, self._path).decrypt(
                found.nonce, found.wrapped, _bound(found.outer)
            )
        except InvalidTag as error:
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE,
                f"{self._path.name}: key {found.id} does not open under {found.outer} as it is now",
            ) from error

    def _make(self, loaded: _Loaded, outer: str) -> WrappedKey | None:
        under = self._outer.key(outer)
        if under is None:
            return None
        name = PREFIX + self._random(_ID_BYTES).hex()
        nonce = self._random(NONCE_BYTES)
        wrapped = _wrapping(under, name, self._path).encrypt(nonce, self._random(KEY_BYTES), _bound(outer))
        made = WrappedKey(name, outer, nonce, wrapped)
        frame = _framed({"id": name, "outer": outer, "nonce": nonce.hex(), "wrapped": wrapped.hex()})
        if loaded.end + len(frame) > _MOST_BYTES:
            # One byte more, and no opening would read any of them.
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE, f"the keys {self._path.name}: {len(loaded.by_id)} fill the file"
            )
        try:
            fd = self._files.open(self._path, os.O_RDWR | os.O_CREAT)
            try:
                _write(self._files, fd, frame, loaded.end)
                self._files.sync(fd)
            finally:
                self._files.close(fd)
            # Each time: the file may be there of an attempt that ended before its name was durable.
            self._files.sync_folder(self._path.parent)
        except OSError as error:
            raise _unavailable(self._path, error) from error
        loaded.add(made)
        loaded.end += len(frame)
        return made

    def _load(self) -> _Loaded:
        if self._loaded is None:
            try:
                data = _content(self._path, self._files)
            except OSError as error:
                raise _unavailable(self._path, error) from error
            self._loaded = _parsed(data or b"", self._path)
        return self._loaded


class EphemeralKeys:
    """Keys that only this process has, one for each outer key: for stores that do not outlive it. What is
    left of them on the device opens under nothing."""

    def __init__(self, outer: KeyProvider, random: Callable[[int], bytes] = os.urandom) -> None:
        self._outer = outer
        self._random = random
        self._lock = threading.Lock()
        self._by_outer: dict[str, tuple[str, bytes]] = {}
        self._by_id: dict[str, tuple[str, bytes]] = {}

    def current(self, namespace: bytes) -> str | None:
        outer = self._outer.current(namespace)
        if outer is None:
            return None
        with self._lock:
            found = self._by_outer.get(outer)
            if found is None:
                found = self._by_outer[outer] = (
                    PREFIX + self._random(_ID_BYTES).hex(),
                    self._random(KEY_BYTES),
                )
                self._by_id[found[0]] = (outer, found[1])
            return found[0]

    def key(self, reference: str) -> bytes | None:
        with self._lock:
            found = self._by_id.get(reference)
        return None if found is None or self._outer.key(found[0]) is None else found[1]


def erase_data_keys(path: Path, files: FileOps) -> KeysErased | None:
    """Overwrites the data keys of a store that is closed, durably; None where there never were any. May be
    repeated, after a crash at any point too. STORAGE_UNAVAILABLE: not known to be erased, ask again."""
    try:
        data = _content(path, files)
        if data is None:
            return None
        known = _tombstone(data)
        if known is not None and not any(data[_HEAD.size + _payload_length(data) :]):
            return KeysErased(path.name, known)
        keys = known if known is not None else tuple(key.id for key in _readable(data))
        frame = _framed({"erased": list(keys)})
        fd = files.open(path, os.O_RDWR)
        try:
            _write(files, fd, bytearray(frame.ljust(max(len(data), _PAGE), b"\0")), 0)
            files.sync(fd)
        finally:
            files.close(fd)
    except OSError as error:
        raise _unavailable(path, error) from error
    return KeysErased(path.name, keys)


class _Loaded:
    """What a file says. end: where the next frame goes."""

    def __init__(self) -> None:
        self.by_id: dict[str, WrappedKey] = {}
        self.newest: dict[str, WrappedKey] = {}
        self.erased: tuple[str, ...] | None = None
        self.end = 0

    def add(self, key: WrappedKey) -> None:
        self.by_id[key.id] = self.newest[key.outer] = key


def _parsed(data: bytes, path: Path) -> _Loaded:
    """A whole frame after one that is not means that a key was damaged, not torn: STORAGE_UNAVAILABLE, since
    to go on would give up blocks that a good copy of the file opens."""
    loaded = _Loaded()
    loaded.erased = _tombstone(data)
    if loaded.erased is not None:
        return loaded
    while (payload := _payload(data, loaded.end)) is not None:
        loaded.add(_key(payload))
        loaded.end += _HEAD.size + len(payload)
    later = data.find(_MAGIC, loaded.end)
    while later >= 0:
        if _payload(data, later) is not None:
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE, f"{path.name} is damaged between bytes {loaded.end} and {later}"
            )
        later = data.find(_MAGIC, later + 1)
    return loaded


def _readable(data: bytes) -> list[WrappedKey]:
    """All whole frames, wherever they lie."""
    found: list[WrappedKey] = []
    at = data.find(_MAGIC)
    while at >= 0:
        payload = _payload(data, at)
        if payload is not None and "id" in json.loads(payload):
            found.append(_key(payload))
        at = data.find(_MAGIC, at + 1)
    return found


def _tombstone(data: bytes) -> tuple[str, ...] | None:
    payload = _payload(data, 0)
    fields = json.loads(payload) if payload is not None else {}
    return tuple(map(str, fields["erased"])) if "erased" in fields else None


def _key(payload: bytes) -> WrappedKey:
    fields = json.loads(payload)
    return WrappedKey(
        str(fields["id"]),
        str(fields["outer"]),
        bytes.fromhex(fields["nonce"]),
        bytes.fromhex(fields["wrapped"]),
    )


def _framed(fields: dict[str, object]) -> bytearray:
    payload = json.dumps(fields).encode()
    return bytearray(_HEAD.pack(_MAGIC, len(payload), hashlib.sha256(payload).digest()) + payload)


def _payload_length(data: bytes) -> int:
    return int(_HEAD.unpack_from(data, 0)[1])


def _payload(data: bytes, at: int) -> bytes | None:
    if at + _HEAD.size > len(data):
        return None
    magic, length, digest = _HEAD.unpack_from(data, at)
    payload = data[at + _HEAD.size : at + _HEAD.size + length]
    whole = magic == _MAGIC and len(payload) == length and hashlib.sha256(payload).digest() == digest
    return payload if whole else None


def _content(path: Path, files: FileOps) -> bytes | None:
    """None: there is no such file."""
    try:
        if path.name not in files.names(path.parent):
            return None
    except FileNotFoundError:
        return None
    fd = files.open(path, os.O_RDWR)
    try:
        size = files.size(fd)
        if size > _MOST_BYTES:
            raise OSError(f"{size} bytes are no file of keys")
        buffer = bytearray(size)
        if size and files.read(fd, [buffer], 0) != size:
            raise OSError("it was read short")
        return bytes(buffer)
    finally:
        files.close(fd)


def _write(files: FileOps, fd: int, data: bytearray, offset: int) -> None:
    if files.write(fd, [data], offset) != len(data):
        raise OSError("it was written short")


def _wrapping(outer: bytes, name: str, path: Path) -> AESGCM:
    """The wrapping key: of this store and this data key alone, so that nothing wrapped opens elsewhere."""
    bound = _DOMAIN + path.stem.encode() + b"\0" + name.encode()
    return AESGCM(HKDF(hashes.SHA256(), KEY_BYTES, None, bound).derive(outer))


def _bound(outer: str) -> bytes:
    return _DOMAIN + outer.encode()


def _unavailable(path: Path, error: OSError) -> CoreError:
    return CoreError(Reason.STORAGE_UNAVAILABLE, f"the keys {path.name}: {error.strerror or error}")
