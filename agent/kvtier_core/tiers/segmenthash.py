"""XXH3-64 of a payload and of each of its segments, read once, as machine code.

Why it exists: a block that is stored is held to its seal and gets a checksum for each segment. By a library
both are a pass over memory of their own, and the second a call for every few KiB. XXH3 takes its bytes in
blocks of 1 KiB, and what a block adds to the state does not depend on the state: so whole and segment share
it wherever a segment begins at a block. Numbers are the library's; a test compares them. It must not know
headers, tiers or Python objects.

Source: the XXH3 specification (xxHash 0.8, `doc/xxhash_spec.md`), "XXH3 algorithm for long inputs", without
seed, with the default secret.

Compiled when it is first asked for, in about 0.05 s; None where `kvtier_kernels.compiled.missing` says why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvtier_core.tiers.staging import address_of
from kvtier_kernels import compiled

Value = Any
"""An llvmlite value; the library states no types."""

BLOCK = 1024
_LANES, _STRIPE, _STRIPES = 8, 64, 16
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364ea"
    "c5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b"
    "16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST_AT, _SCRAMBLE_AT, _MERGE_AT = 121, 128, 11
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
_START = (
    _PRIME32[2], _PRIME64[0], _PRIME64[1], _PRIME64[2], _PRIME64[3], _PRIME32[1], _PRIME64[4], _PRIME32[0],
)  # fmt: skip
_AVALANCHE = 0x165667919E3779F9

UNLOCKED_BYTES = 64 << 10
"""From so many bytes on (about 5 us) a call lets other threads run."""


@dataclass(frozen=True, slots=True)
class SegmentHash:
    """held, freed: `int64 (data, blocks, blocks a segment, sums)`, the second without the interpreter's
    lock. engine: owns the code."""

    held: Callable[[int, int, int, int], int]
    freed: Callable[[int, int, int, int], int]
    engine: Any

    def sums(self, data: memoryview, segment: int) -> tuple[int, bytes]:
        """XXH3-64 of `data` and of each `segment` bytes of it, the last may be shorter, as 8 bytes each,
        little-endian. Both lengths are multiples of BLOCK and not zero; who asks sees to that."""
        size = len(data)
        sums = (ctypes.c_uint64 * -(-size // segment))()
        call = self.held if size < UNLOCKED_BYTES else self.freed
        whole = call(address_of(data), size // BLOCK, segment // BLOCK, ctypes.addressof(sums))
        return whole, bytes(sums)


@cache
def segment_hash() -> SegmentHash | None:
    """This process's."""
    if compiled.missing():
        return None
    from llvmlite import ir

    from kvtier_kernels.compiled.machine import built

    module = ir.Module("kvtier_segments")
    _Sums(ir, module).emit()
    engine = built(module)
    address, number = engine.get_function_address("sums"), ctypes.c_int64
    kinds = (ctypes.PYFUNCTYPE, ctypes.CFUNCTYPE)
    held, freed = (kind(ctypes.c_uint64, number, number, number, number)(address) for kind in kinds)
    return SegmentHash(held, freed, engine)


class _Sums:
    """Emits `int64 sums(int64 data, int64 blocks, int64 blocks a segment, int64 sums)`: the whole's is
    returned, the segments' are written."""

    def __init__(self, ir: Any, module: Any) -> None:
        self._ir = ir
        self._i64 = ir.IntType(64)
        self._wide = ir.VectorType(self._i64, _LANES)
        kind = ir.FunctionType(self._i64, [self._i64] * 4)
        self._function = ir.Function(module, kind, "sums")
        self._b = ir.IRBuilder(self._function.append_basic_block("entry"))

    def emit(self) -> None:
        b, n = self._b, self._number
        data, blocks, step, sums = self._function.args
        place, mine, all_of = b.alloca(self._i64), b.alloca(self._wide), b.alloca(self._wide)
        b.store(n(0), place)
        b.store(self._lanes(_START), all_of)
        segment = b.append_basic_block("segment")
        inner, body, last = (b.append_basic_block(name) for name in ("inner", "body", "last"))
        done = b.append_basic_block("done")
        b.branch(segment)

        b.position_at_end(segment)
        first = b.load(place, typ=self._i64)
        left = b.sub(blocks, first)
        count = b.select(b.icmp_unsigned("<", step, left), step, left)
        end = b.sub(b.add(first, count), n(1))
        b.store(self._lanes(_START), mine)
        b.branch(inner)

        b.position_at_end(inner)
        at = b.load(place, typ=self._i64)
        b.cbranch(b.icmp_unsigned("<", at, end), body, last)

        b.position_at_end(body)
        before, final = self._block(data, at)
        added = b.add(before, self._part(final, _STRIPE // _LANES * (_STRIPES - 1)))
        for state in (mine, all_of):
            b.store(self._scrambled(b.add(b.load(state, typ=self._wide), added)), state)
        b.store(b.add(at, n(1)), place)
        b.branch(inner)

        b.position_at_end(last)
        before, final = self._block(data, end)
        ending = b.add(before, self._part(final, _LAST_AT))
        found = self._merged(b.add(b.load(mine, typ=self._wide), ending), count)
        index = b.udiv(first, step)
        b.store(found, b.inttoptr(b.add(sums, b.shl(index, n(3))), self._pointer()))
        whole = b.load(all_of, typ=self._wide)
        added = b.add(before, self._part(final, _STRIPE // _LANES * (_STRIPES - 1)))
        b.store(self._scrambled(b.add(whole, added)), all_of)
        following = b.add(end, n(1))
        b.store(following, place)
        b.cbranch(b.icmp_unsigned("<", following, blocks), segment, done)

        b.position_at_end(done)
        b.ret(self._merged(b.add(whole, ending), blocks))

    def _block(self, data: Value, index: Value) -> tuple[Value, Value]:
        """What all stripes of a block but the last add to a state, and the last one's bytes."""
        b = self._b
        start = b.add(data, b.mul(index, self._number(BLOCK)))
        stripes = [self._stripe(b.add(start, self._number(_STRIPE * at))) for at in range(_STRIPES)]
        total = products = None
        for at, stripe in enumerate(stripes[:-1]):
            product = self._product(stripe, _STRIPE // _LANES * at)
            total = stripe if total is None else b.add(total, stripe)
            products = product if products is None else b.add(products, product)
        return b.add(self._swapped(total), products), stripes[-1]

    def _part(self, stripe: Value, secret_at: int) -> Value:
        """What one stripe adds."""
        return self._b.add(self._swapped(stripe), self._product(stripe, secret_at))

    def _stripe(self, address: Value) -> Value:
        return self._b.load(self._b.inttoptr(address, self._pointer()), typ=self._wide, align=1)

    def _product(self, stripe: Value, secret_at: int) -> Value:
        b = self._b
        keyed = b.xor(stripe, self._secret(secret_at))
        return b.mul(b.and_(keyed, self._all(0xFFFFFFFF)), b.lshr(keyed, self._all(32)))

    def _swapped(self, stripe: Value) -> Value:
        i32 = self._ir.IntType(32)
        order = self._ir.Constant(self._ir.VectorType(i32, _LANES), [at ^ 1 for at in range(_LANES)])
        return self._b.shuffle_vector(stripe, stripe, order)

    def _scrambled(self, state: Value) -> Value:
        b = self._b
        mixed = b.xor(b.xor(state, b.lshr(state, self._all(47))), self._secret(_SCRAMBLE_AT))
        return b.mul(mixed, self._all(_PRIME32[0]))

    def _merged(self, state: Value, blocks: Value) -> Value:
        b, n = self._b, self._number
        wide, lane = self._ir.IntType(128), self._ir.IntType(32)
        found = b.mul(b.mul(blocks, n(BLOCK)), n(_PRIME64[0]))
        for pair in range(_LANES // 2):
            first, second = (
                b.zext(
                    b.xor(
                        b.extract_element(state, self._ir.Constant(lane, at)),
                        n(self._word(_MERGE_AT + 8 * at)),
                    ),
                    wide,
                )
                for at in (2 * pair, 2 * pair + 1)
            )
            product = b.mul(first, second)
            high = b.trunc(b.lshr(product, self._ir.Constant(wide, 64)), self._i64)
            found = b.add(found, b.xor(b.trunc(product, self._i64), high))
        found = b.mul(b.xor(found, b.lshr(found, n(37))), n(_AVALANCHE))
        return b.xor(found, b.lshr(found, n(32)))

    def _pointer(self) -> Any:
        return self._ir.PointerType()

    def _number(self, value: int) -> Value:
        return self._ir.Constant(self._i64, value)

    def _lanes(self, values: tuple[int, ...]) -> Value:
        return self._ir.Constant(self._wide, list(values))

    def _all(self, value: int) -> Value:
        return self._lanes((value,) * _LANES)

    def _secret(self, at: int) -> Value:
        return self._lanes(tuple(self._word(at + 8 * lane) for lane in range(_LANES)))

    @staticmethod
    def _word(at: int) -> int:
        return int.from_bytes(_SECRET[at : at + 8], "little")
