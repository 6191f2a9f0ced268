"""Checksums of segments: machine code and the plain way give the library's numbers, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import crc32c
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.checksums import Running, checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers import segments
from kvtier_core.tiers.segmenthash import BLOCK, segment_hash
from kvtier_core.tiers.staging import address_of
from kvtier_kernels import compiled

MOST = 40 * BLOCK
BYTES = random.Random(1).randbytes(MOST + 64)
OF: dict[str, Callable[[bytes], int]] = {"xxh3": xxhash.xxh3_64_intdigest, "crc32c": crc32c.crc32c}


def expected(kind: str, data: bytes, segment: int) -> bytes:
    parts = (data[at : at + segment] for at in range(0, len(data), segment))
    return b"".join(int(OF[kind](part)).to_bytes(8, "little") for part in parts)


def test_there_is_machine_code_wherever_the_kernels_have_some() -> None:
    assert (segment_hash() is None) is bool(compiled.missing())


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.integers(1, MOST // BLOCK),
    step=st.integers(1, MOST // BLOCK + 1),
    start=st.integers(0, 63),
    kind=st.sampled_from(["random", "zeros", "ones"]),
)
def test_machine_code_and_library_agree_at_any_length_and_alignment(
    blocks: int, step: int, start: int, kind: str
) -> None:
    code = segment_hash()
    assert code is not None, compiled.missing()
    size, segment = blocks * BLOCK, step * BLOCK
    made = {"random": BYTES, "zeros": bytes(len(BYTES)), "ones": b"\xff" * len(BYTES)}[kind]
    data = made[start : start + size]
    room = bytearray(made)
    for view in (memoryview(made), memoryview(room)):
        whole, entries = code.sums(view[start : start + size], segment)
        assert whole == xxhash.xxh3_64_intdigest(data)
        assert entries == expected("xxh3", data, segment)
    assert bytes(room) == made, "it only reads"


@pytest.mark.parametrize("size", [BLOCK, 63 * BLOCK, 64 * BLOCK, 2048 * BLOCK], ids=str)
def test_calls_that_keep_the_interpreter_and_calls_that_do_not_agree(size: int) -> None:
    code = segment_hash()
    assert code is not None, compiled.missing()
    data = random.Random(size).randbytes(size)
    assert code.sums(memoryview(data), 8192) == (checksum("xxh3", data), expected("xxh3", data, 8192))


@pytest.mark.parametrize("plain", [False, True], ids=["compiled", "plain"])
@pytest.mark.parametrize("segment", [0, 4096, 16384])
@pytest.mark.parametrize("size", [1, 239, 4096, 4097, 5120, 10240, 40960, 300000], ids=str)
@pytest.mark.parametrize("kind", OF)
def test_seal_checksum_and_segments_are_what_they_are_one_by_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, size: int, segment: int, plain: bool
) -> None:
    if plain:
        monkeypatch.setattr(segments, "segment_hash", lambda: None)
    data = memoryview(random.Random(size).randbytes(size))
    found = segments.sums(kind, data, segment)
    assert found.seal == checksum("xxh3", data)
    assert found.whole == checksum(kind, data)
    assert found.entries == (expected(kind, bytes(data), segment) if segment else b"")
    if segment:
        assert segments.checksums(kind, data, segment) == found.entries


@pytest.mark.parametrize("kind", ["none", "md5"])
def test_what_checks_nothing_makes_no_table(kind: str) -> None:
    with pytest.raises(CoreError) as refused:
        segments.sums(kind, memoryview(bytes(8192)), 4096)
    assert refused.value.reason is Reason.MANIFEST_INVALID


@pytest.mark.parametrize("kind", ["xxh3", "crc32c", "none"])
def test_a_running_checksum_is_that_of_the_whole(kind: str) -> None:
    running = Running(kind)
    for at in range(0, len(BYTES), 1000):
        running.add(BYTES[at : at + 1000])
    assert running.value == checksum(kind, BYTES)


def test_an_address_is_that_of_the_first_byte() -> None:
    room = bytearray(64)
    assert address_of(memoryview(room)[5:]) == address_of(memoryview(room)) + 5
    assert address_of(memoryview(room).toreadonly()) == address_of(memoryview(room))
