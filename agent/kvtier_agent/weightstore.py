"""Weights of a model's layers, given by engines and kept for the sessions of a cache, once for each tenant.

Why it exists: a rehearsal needs a layer's projection, which is the same in every session and larger than a
session's frames; so an agent takes it once and by its digest. What a tenant's engine says of the model binds
that tenant alone: another's sessions are neither refused for it nor told of it. It knows no message and no
tensor. On the event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtier.weights import WeightsShape
from kvtier_agent.rowevidence import MAX_HIDDEN_SIZE
from kvtier_core.errors import CoreError, Reason

# Of one cache. Weights are in no tier's budget.
MAX_BYTES = 1 << 30
# Users that have closed and are not forgotten yet, besides as many as are open.
_MOST_CLOSED = 64
# As many layers of tenants are looked at for those that no open session uses, besides as many as are used.
_MOST_UNUSED = 1024


@dataclass(frozen=True, slots=True)
class GivenWeights:
    """data: as they travel (`WeightsShape`), and nobody's to change."""

    shape: WeightsShape
    digest: str
    data: bytearray


@dataclass(slots=True)
class _Held:
    """look_at: as many users are looked at for those that have closed."""

    weights: GivenWeights
    users: set[str] = field(default_factory=set)
    look_at: int = _MOST_CLOSED


class WeightStore:
    """Of one cache. For a tenant a layer has one set of weights as long as an open session uses it. Equal
    weights of several tenants are kept once."""

    def __init__(self, is_open: Callable[[str], bool], max_bytes: int = MAX_BYTES) -> None:
        """is_open: whether a session of that id is."""
        self._is_open = is_open
        self._max_bytes = max_bytes
        self._layers: dict[tuple[str, int], _Held] = {}
        self._look_at = _MOST_UNUSED
        self._arriving = 0

    @property
    def held_bytes(self) -> int:
        return sum({id(held.weights): len(held.weights.data) for held in self._layers.values()}.values())

    def held(self, tenant: str, layer: int, digest: str) -> GivenWeights | None:
        """Those of this digest that the tenant gave. MODEL_MISMATCH: its open sessions use others."""
        held = self._layers.get((tenant, layer))
        if held is None:
            return None
        if held.weights.digest == digest:
            return held.weights
        self._forget_closed(held)
        if held.users:
            raise CoreError(
                Reason.MODEL_MISMATCH,
                f"weights {digest[:19]} of layer {layer} are not {held.weights.digest[:19]}, which sessions "
                "of the same model and tenant use",
                {"layer": layer, "digest": held.weights.digest},
            )
        return None

    @contextmanager
    def arriving(self, size: int) -> Iterator[None]:
        """Room for bytes that are on their way; weights that no open session uses make it.
        NO_DESTINATION_CAPACITY with the numbers."""
        self._check_room(size)
        self._arriving += size
        try:
            yield
        finally:
            self._arriving -= size

    def _check_room(self, size: int) -> None:
        for key, held in list(self._layers.items()):
            if self.held_bytes + self._arriving + size <= self._max_bytes:
                return
            self._forget_if_unused(key, held)
        others = self.held_bytes + self._arriving
        if others + size > self._max_bytes:
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"{size} bytes of weights beside {others}; a cache keeps at most {self._max_bytes}",
                {"limit": self._max_bytes, "held": others, "asked": size},
            )

    def put(self, tenant: str, layer: int, weights: GivenWeights) -> GivenWeights:
        """Those that are kept, which may have come meanwhile. Refuses as `held`; room was taken before."""
        found = self.held(tenant, layer, weights.digest)
        if found is not None:
            return found
        name = (weights.digest, weights.shape)
        same = (one.weights for one in self._layers.values())
        kept = next((one for one in same if (one.digest, one.shape) == name), weights)
        if len(self._layers) >= self._look_at:
            # Equal weights take no room, so nothing else would ever forget tenants that have gone.
            for key, held in list(self._layers.items()):
                self._forget_if_unused(key, held)
            self._look_at = 2 * len(self._layers) + _MOST_UNUSED
        self._layers[tenant, layer] = _Held(kept)
        return kept

    def used(self, tenant: str, layer: int, session_id: str) -> None:
        """By a session, as long as it is open."""
        self._use(self._layers[tenant, layer], session_id)

    def forked(self, parent: str, child: str) -> None:
        """The child uses what its parent uses."""
        for held in self._layers.values():
            if parent in held.users:
                self._use(held, child)

    def users(self, tenant: str, layer: int) -> int:
        """Sessions that are remembered as its users, some of which may have closed."""
        return len(self._layers[tenant, layer].users)

    def _use(self, held: _Held, session_id: str) -> None:
        held.users.add(session_id)
        if len(held.users) >= held.look_at:
            self._forget_closed(held)
            held.look_at = 2 * len(held.users) + _MOST_CLOSED

    def _forget_if_unused(self, key: tuple[str, int], held: _Held) -> None:
        self._forget_closed(held)
        if not held.users:
            del self._layers[key]

    def _forget_closed(self, held: _Held) -> None:
        held.users = {user for user in held.users if self._is_open(user)}


def check_shape(shape: WeightsShape, head_dim: int) -> None:
    """SELECTOR_GEOMETRY naming the field."""
    if not 1 <= shape.hidden_size <= MAX_HIDDEN_SIZE:
        raise _geometry(f"hidden_size {shape.hidden_size}: 1 to {MAX_HIDDEN_SIZE}")
    if not (math.isfinite(shape.norm_eps) and shape.norm_eps >= 0):
        raise _geometry(f"norm_eps {shape.norm_eps}: a finite number of 0 or more")
    if not 0 <= 2 * shape.frequencies <= head_dim:
        raise _geometry(f"frequencies {shape.frequencies}: at most half of a head dim of {head_dim}")


def checked_weights(
    shape: WeightsShape, digest: str, data: bytearray, model_fingerprint: str, layer: int
) -> GivenWeights:
    """CHECKSUM_MISMATCH: the bytes are not those that the digest names, for this model and layer.
    SELECTOR_GEOMETRY: a number is not finite."""
    if shape.digest(model_fingerprint, layer, data) != digest:
        raise CoreError(
            Reason.CHECKSUM_MISMATCH,
            f"the weights of layer {layer} are not those of this model that {digest[:19]} names",
            {"layer": layer},
        )
    tail = 8 * shape.frequencies
    floats = np.frombuffer(data, dtype="<f4", count=(len(data) - tail) // 4)
    angles = np.frombuffer(data, dtype="<f8", offset=len(data) - tail)
    if not (np.isfinite(floats).all() and np.isfinite(angles).all()):
        raise _geometry(f"the weights of layer {layer} are not finite")
    return GivenWeights(shape, digest, data)


def _geometry(message: str) -> CoreError:
    return CoreError(Reason.SELECTOR_GEOMETRY, message)
