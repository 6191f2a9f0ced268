"""Memory that ends while the directory grows: nothing is lost and nothing is half there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier_core.directory import NO_LINE, Directory, keyindex


class Scarce:
    """numpy, as the index sees it, whose call number `at` finds no memory; calls are counted from 0."""

    def __init__(self, at: int | None, real: Any = np) -> None:
        self.at = at
        self.calls = 0
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if isinstance(found, type) or not callable(found):
            return found
        if isinstance(found, np.ufunc):
            return _Function(self, found)
        return self._counted(found)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == self.at:
                raise MemoryError(f"call {self.at}, of {function}")
            return function(*args, **options)

        return call


class _Function:
    """A function over arrays: itself and its `accumulate`."""

    def __init__(self, scarce: Scarce, function: np.ufunc) -> None:
        self.accumulate = scarce._counted(function.accumulate)
        self._call = scarce._counted(function)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def keys_of(count: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def one_by_one(directory: Directory, keys: NDArray[np.uint8]) -> None:
    for key in keys:
        directory.insert_block(bytes(key))


def at_once(directory: Directory, keys: NDArray[np.uint8]) -> None:
    numbers = np.arange(len(keys))
    directory.restore_blocks(keys, tier=0, slots=numbers, slot_generations=numbers)


@pytest.mark.parametrize(
    ("add", "capacity", "held", "more"),
    [
        pytest.param(one_by_one, 3000, 60, 60, id="one by one"),
        pytest.param(at_once, 20_000, 900, 700, id="at once, in several shards"),
    ],
)
def test_memory_that_ends_at_any_allocation_costs_no_key(
    monkeypatch: pytest.MonkeyPatch,
    add: Callable[[Directory, NDArray[np.uint8]], None],
    capacity: int,
    held: int,
    more: int,
) -> None:
    old, new = keys_of(held, seed=1), keys_of(more, seed=2)
    failed = 0
    while True:
        directory = Directory(capacity=capacity)
        lines = [directory.insert_block(bytes(key)) for key in old]
        scarce = Scarce(failed)
        with monkeypatch.context() as patched:
            patched.setattr(keyindex, "np", scarce)
            try:
                add(directory, new)
            except MemoryError:
                failed += 1
            else:
                break
        directory.check()
        assert directory.find_many(old).tolist() == lines
        there = directory.find_many(new) != NO_LINE
        if add is at_once:
            assert not there.any(), "a restore is whole or nothing"
        assert there.sum() == len(directory) - held
        add(directory, new[~there])
        directory.check()
        assert (directory.find_many(new) != NO_LINE).all() and directory.find_many(old).tolist() == lines
    assert failed > 15, "nothing grew, so nothing was tried"
