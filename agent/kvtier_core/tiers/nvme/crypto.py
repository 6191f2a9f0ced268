"""Encryption at rest: AES-256-GCM of each segment of a payload, bound to the block's header.

Why it exists: storage outlives processes and tenants. The header is the associated data, so a ciphertext that
is moved under another header, of the same tenant even, does not open; destroying a namespace's key makes its
blocks unreadable at once. It must not know files or where keys are kept: a provider gives them by reference.

Nonces: each opening of a store draws a 128-bit salt, and each (reference, salt, namespace) has a key of its
own, derived by HKDF-SHA256. Under such a key nonces are counted from zero and the count never repeats, within
the process because it only grows, beyond it because no other process draws that salt. So neither a restart
nor a disk that is restored from a copy can repeat a nonce, and nothing about nonces must be durable. Salt and
nonce lie in the header. The count has the last eight bytes; the first four are 1 + the segment's index, so
that no segment opens in another's place. A block of version 2 is one message, whose nonce has zeros there.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier_core.checksums import Running
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import BlockHeader, associated_data
from kvtier_core.tiers.keyform import KEY_BYTES as KEY_BYTES
from kvtier_core.tiers.keyform import MAX_REFERENCE_BYTES as MAX_REFERENCE_BYTES
from kvtier_core.tiers.segments import SegmentTable

SALT_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
_CACHED_KEYS = 1024
_HOT_BYTES = 128 << 10
_DOMAIN = b"kvtier block encryption v1\0"


class KeyProvider(Protocol):
    """Keys by reference. Raises CoreError(STORAGE_UNAVAILABLE) when it cannot tell at the moment."""

    def current(self, namespace: bytes) -> str | None:
        """The reference of the key that blocks of a namespace are written under; None: there is none, and
        nothing of that namespace may be written."""

    def key(self, reference: str) -> bytes | None:
        """32 bytes; None: destroyed for ever."""


class MemoryKeys:
    """A random key per namespace, gone with the process: for blocks that must not outlive it, and for
    tests."""

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self._random = random
        self._keys: dict[str, bytes] = {}
        self._destroyed: set[bytes] = set()
        self._lock = threading.Lock()

    def current(self, namespace: bytes) -> str | None:
        with self._lock:
            if namespace in self._destroyed:
                return None
            reference = _reference(namespace)
            self._keys.setdefault(reference, self._random(KEY_BYTES))
            return reference

    def key(self, reference: str) -> bytes | None:
        with self._lock:
            return self._keys.get(reference)

    def destroy(self, namespace: bytes) -> None:
        """Crypto-erase."""
        with self._lock:
            self._destroyed.add(namespace)
            self._keys.pop(_reference(namespace), None)


@dataclass(frozen=True, slots=True)
class _Derived:
    cipher: AESGCM
    mask: bytes


class BlockCipher:
    """Encrypts and decrypts payloads of one opening of a store. Thread-safe."""

    def __init__(self, keys: KeyProvider, random: Callable[[int], bytes]) -> None:
        self._keys = keys
        self._salt = random(SALT_BYTES)
        self._count = itertools.count()
        self._derived: OrderedDict[tuple[str, bytes, bytes], _Derived] = OrderedDict()
        self._forgotten = 0
        self._lock = threading.Lock()

    def begin(self, namespace: bytes) -> tuple[str, bytes, bytes]:
        """(key reference, salt, nonce) for one new block. KEY_UNAVAILABLE without a key."""
        reference = self._keys.current(namespace)
        if reference is None:
            raise CoreError(Reason.KEY_UNAVAILABLE, "the namespace has no key to write under")
        if not 0 < len(reference.encode()) <= MAX_REFERENCE_BYTES:
            raise CoreError(
                Reason.BAD_ARGUMENT, f"a key reference of {len(reference)} characters does not fit"
            )
        return reference, self._salt, next(self._count).to_bytes(NONCE_BYTES, "big")

    def mask(self, sealed_by: tuple[str, bytes, bytes], namespace: bytes, seal: int) -> int:
        """The seal as it is written: a checksum of plain bytes would let a thief confirm a guess."""
        reference, salt, nonce = sealed_by
        derived = self._key(reference, salt, namespace)
        (pad,) = struct.unpack("<Q", hashlib.sha256(derived.mask + nonce).digest()[:8])
        return seal ^ int(pad)

    def seal_of(self, header: BlockHeader) -> int:
        """The seal of a header, unmasked. KEY_UNAVAILABLE."""
        nonce = header.nonce
        return self.mask((header.reference, header.salt, nonce), header.namespace, header.seal)

    def encrypt(
        self, sealed_by: tuple[str, bytes, bytes], namespace: bytes, header: bytearray, plain: memoryview,
        target: memoryview, segment: int, before: Running, after: Running,
    ) -> bytes:  # fmt: skip
        """Writes the ciphertext to `target` (len(plain) + TAG_BYTES, the rest scratch) and returns the tags
        of its segments, one after the other. before, after: are given the plain payload and the ciphertext,
        part by part, while these are in the caches."""
        reference, salt, nonce = sealed_by
        cipher, bound = self._key(reference, salt, namespace).cipher, associated_data(header)
        tags, hot = [], max(segment, _HOT_BYTES // segment * segment)
        for first in range(0, len(plain), hot):
            part = plain[first : first + hot]
            before.add(part)
            for start in range(first, first + len(part), segment):
                end = min(start + segment, len(plain))
                # The tag arrives where the next segment's ciphertext will.
                room = target[start : end + TAG_BYTES]
                cipher.encrypt_into(_nonce(nonce, start // segment), plain[start:end], bound, room)
                tags.append(bytes(target[end : end + TAG_BYTES]))
            after.add(target[first : first + len(part)])
        return b"".join(tags)

    def decrypt(self, header: BlockHeader, page: memoryview, stored: memoryview, target: memoryview) -> None:
        """Decrypts `stored` (payload + room for TAG_BYTES) of version 2 into `target`. CHECKSUM_MISMATCH when
        it is not what was encrypted under this header; KEY_UNAVAILABLE. After an error `target` holds nothing
        of it."""
        derived = self._key(header.reference, header.salt, header.namespace)
        _open(derived.cipher, header, header.nonce, header.tag, associated_data(page), stored, target)

    def decrypt_segments(
        self, header: BlockHeader, page: memoryview, table: SegmentTable, first: int, stored: memoryview,
        target: memoryview,
    ) -> None:  # fmt: skip
        """As `decrypt`, of segments from `first` on: `stored` has len(target) bytes of them and room for
        TAG_BYTES, and is scratch afterwards."""
        cipher = self._key(header.reference, header.salt, header.namespace).cipher
        bound = associated_data(page)
        starts = range(0, len(target), table.segment)
        # From the last: a tag is put where the segment behind it began, which has been opened by then.
        for at in range(len(starts) - 1, -1, -1):
            start, end = starts[at], min(starts[at] + table.segment, len(target))
            nonce, tag = _nonce(header.nonce, first + at), table.entry(first + at)
            try:
                _open(cipher, header, nonce, tag, bound, stored[start:], target[start:end])
            except CoreError:
                target[:] = bytes(len(target))
                raise

    def forget(self) -> None:
        """Drops derived keys, so that a key destroyed at the provider opens nothing here any more."""
        with self._lock:
            self._derived.clear()
            self._forgotten += 1

    def _key(self, reference: str, salt: bytes, namespace: bytes) -> _Derived:
        name = (reference, salt, namespace.ljust(KEY_BYTES, b"\0"))
        with self._lock:
            found = self._derived.get(name)
            if found is not None:
                self._derived.move_to_end(name)
                return found
            forgotten = self._forgotten
        key = self._keys.key(reference)
        if key is None:
            raise CoreError(
                Reason.KEY_UNAVAILABLE, f"key {reference} is destroyed", {"key_reference": reference}
            )
        if len(key) != KEY_BYTES:
            raise CoreError(Reason.BAD_ARGUMENT, f"key {reference} has {len(key)} bytes, not {KEY_BYTES}")
        both = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt, _DOMAIN + name[2]).derive(key)
        derived = _Derived(AESGCM(both[:KEY_BYTES]), both[KEY_BYTES:])
        with self._lock:
            # A key that was destroyed meanwhile must not come back into the cache.
            if forgotten == self._forgotten:
                self._derived[name] = derived
            if len(self._derived) > _CACHED_KEYS:
                self._derived.popitem(last=False)
        return derived


def _nonce(nonce: bytes, segment: int) -> bytes:
    return (segment + 1).to_bytes(4, "big") + nonce[4:]


def _open(
    cipher: AESGCM, header: BlockHeader, nonce: bytes, tag: bytes, bound: bytes, stored: memoryview,
    target: memoryview,
) -> None:  # fmt: skip
    stored[len(target) : len(target) + TAG_BYTES] = tag
    try:
        cipher.decrypt_into(nonce, stored[: len(target) + TAG_BYTES], bound, target)
    except InvalidTag:
        target[:] = bytes(len(target))
        raise CoreError(
            Reason.CHECKSUM_MISMATCH, f"slot {header.slot} is not what was encrypted under its header"
        ) from None


def _reference(namespace: bytes) -> str:
    return f"memory:{hashlib.sha256(namespace).hexdigest()[:32]}"
