"""What was promised of each block, kept apart from the store: which bytes its key may give, and whether it
must still be there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier_core.blockstore.lasting import Lasting
from kvtier_core.blockstore.reads import Fetch
from kvtier_core.blockstore.reservation import Reservation

SIZE = 4096


@dataclass(eq=False)
class Block:
    """version: the bytes that its key stands for, others after each deletion. live: acknowledged as stored
    and not deleted. safe: neither a crash nor a fault may have cost it. durable: its writer was told that no
    crash costs it. deleting: an order runs."""

    tenant: int
    number: int
    version: int = 1
    live: bool = False
    droppable: bool = False
    safe: bool = True
    durable: bool = False
    deleting: bool = False

    @property
    def key(self) -> bytes:
        return hashlib.sha256(f"{self.tenant}/{self.number}".encode()).digest()

    @property
    def name(self) -> str:
        return f"{self.tenant}/{self.number}"

    @property
    def must_be_there(self) -> bool:
        return self.live and self.safe and not self.droppable and not self.deleting

    def content(self) -> bytes:
        return np.random.default_rng([self.tenant, self.number, self.version]).bytes(SIZE)

    def deleted(self) -> None:
        """The order is done: from here the key stands for other bytes."""
        self.version += 1
        self.live = self.deleting = self.durable = False
        self.safe = True


def tenant_digest(tenant: int) -> bytes:
    return hashlib.sha256(f"tenant {tenant}".encode()).digest()


@dataclass(eq=False)
class HeldFetch:
    scope: Fetch
    blocks: list[Block]
    versions: list[int]
    seen: int = 0


@dataclass(eq=False)
class HeldPin:
    scope: Any
    blocks: list[Block]
    versions: list[int]


@dataclass(eq=False)
class HeldStore:
    scope: Reservation
    blocks: list[Block]
    versions: list[int]
    droppable: bool


@dataclass(eq=False)
class HeldWrite:
    """A writer that waits until its blocks are durable."""

    scope: Lasting
    blocks: list[Block]
    versions: list[int]
