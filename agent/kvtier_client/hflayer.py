"""One layer of a cache without rows, and the functions through which transformers hands it its rows.

It exists so that an unchanged model attends through its cache. It keeps a length and what was expected of the
model, and must not know sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from kvtier_client.errors import KvtierError
from kvtier_client.session import Geometry
from kvtier_core.errors import Reason

# The rows' way from update() to the attention function: transformers hands the key tensor through.
_HANDLE = "_kvtier_layer"
# Tensors among a model's further arguments that are no part of its attention; positions are looked at.
_CHANGES_NOTHING = frozenset({"position_ids", "cache_position"})
_CHANGES = frozenset({"sliding_window", "softcap"})
# Padding's way from the mask function to the attention function.
_PADDING = "_kvtier_padding"


class LayerOwner(Protocol):
    """The cache of a layer."""

    geometry: Geometry
    pads: list[int]

    @property
    def batch_size(self) -> int: ...

    @property
    def score_scale(self) -> float: ...

    def take_padding(self, pads: list[int] | None, seen: int) -> None: ...

    def attend(self, layer: int, seen: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class KvtierLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The length of one layer. `update` hands new rows on and keeps none."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LayerOwner, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._cache = cache
        self._index = index
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the new rows only, marked with this layer; the attention function sends them."""
        g = self._cache.geometry
        if key_states.shape[0] != self._cache.batch_size:
            refuse(f"a batch of {key_states.shape[0]} in a cache of {self._cache.batch_size}")
        if key_states.dtype != torch.float32:
            refuse(f"rows of {key_states.dtype}: sessions hold float32")
        if (key_states.shape[1], key_states.shape[3]) != (g.kv_heads, g.head_dim):
            raise KvtierError(
                Reason.GEOMETRY_MISMATCH,
                f"rows of {key_states.shape[1]} heads of {key_states.shape[3]}, the session has "
                f"{g.kv_heads} of {g.head_dim}",
            )
        if value_states.shape != key_states.shape:
            widths = value_states.shape[3], key_states.shape[3]
            refuse("values of {} beside keys of {}: sessions hold one width".format(*widths))
        setattr(key_states, _HANDLE, self)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, Hq, N, d], key, value [B, Hk, N, d] of N new positions; returns [B, N, Hq, d]."""
        out = self._cache.attend(self._index, self._length, query, key, value)
        self._length += key.shape[2]
        return out

    def expect(
        self, scaling: float | None, position_ids: Tensor | None, pads: list[int] | None, new: int
    ) -> None:
        """Scale and positions are part of what the session was opened for; so is what was padding."""
        scale = self._cache.score_scale
        if scaling is not None and scaling != scale:
            raise KvtierError(
                Reason.GEOMETRY_MISMATCH, f"the model scales by {scaling}, the session by {scale}"
            )
        if self._index:
            return
        self._cache.take_padding(pads, self._length)
        if position_ids is not None:
            self._expect_positions(position_ids, new)

    def _expect_positions(self, position_ids: Tensor, new: int) -> None:
        size, seen = self._cache.batch_size, self._length
        pads = self._cache.pads
        if position_ids.shape[-1] == new and position_ids.numel() in (new, size * new):
            rows = position_ids.reshape(-1, new).expand(size, new)
            want = torch.arange(seen, seen + new)
            for row, pad in zip(rows, pads, strict=True):
                skip = max(0, pad - seen)
                if not torch.equal(row[skip:], want[skip:] - pad):
                    break
            else:
                return
        raise KvtierError(
            Reason.POSITION_CONTRACT_MISMATCH,
            f"positions must continue at {seen}, one by one, less each sequence's padding",
        )

    def get_seq_length(self) -> int:
        return self._length

    def stand_at(self, length: int) -> None:
        """After an edit of the cache, which is of all layers at once."""
        self._length = length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The whole context; the agent applies causality."""
        return self._length + query_length, 0

    def reset(self) -> None:
        refuse("a cache cannot be reset: close it and open another")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        refuse("beam search needs copies of a session's rows")

    def crop(self, tokens_to_remove: int) -> None:
        refuse("rows of one layer cannot be taken back: crop the cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        refuse("copies of a sequence: one sequence per session")

    def batch_select_indices(self, indices: Tensor) -> None:
        refuse("one sequence per session")

    def offload(self) -> None:
        """Rows are where the agent put them."""

    def prefetch(self) -> None:
        """Rows are where the agent put them."""


def kvtier_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, Hq, N, d], key and value [B, Hk, N, d], new rows only.
    Returns ([B, N, Hq, d], None)."""
    layer = getattr(key, _HANDLE, None)
    if not isinstance(layer, KvtierLayer):
        refuse("no KvtierCache: pass one as `cache` to the model or to generate")
    pads: list[int] | None = getattr(attention_mask, _PADDING, None)
    if attention_mask is not None and pads is None:
        refuse("a mask of one's own: only causal attention over the whole context")
    if dropout:
        refuse("attention dropout")
    if query.requires_grad or key.requires_grad:
        refuse("gradients: call the model under torch.no_grad()")
    _refuse_other_attention(module, kwargs)
    layer.expect(scaling, kwargs.get("position_ids"), pads, query.shape[2])
    return layer.attend(query, key, value), None


def _refuse_other_attention(module: torch.nn.Module, given: dict[str, Any]) -> None:
    """What a model hands over besides q, k and v that makes its attention another function: named, since an
    answer without it would be wrong without looking so."""
    for name, value in given.items():
        if name in _CHANGES_NOTHING or value is None:
            continue
        # Sinks, biases, lists of rows and of packed sequences, also those that nobody has thought of yet.
        if name in _CHANGES or isinstance(value, Tensor):
            refuse(f"{name}: only plain causal attention over the whole context")
    if given.get("is_causal", getattr(module, "is_causal", True)) is False:
        refuse("is_causal=False: only causal attention over the whole context")


def kvtier_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: which positions are no padding, [B, kv_length]; None when none is padding.
    A mask that would change the answer otherwise is refused.

    It must be registered: transformers gives a model whose attention has no mask function no mask at all,
    so padding would be attended silently.
    """
    if mask_function is not causal_mask_function:
        refuse("only causal attention over the whole context")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.shape != (batch_size, kv_length):
        refuse(f"a mask of {tuple(attention_mask.shape)} over {kv_length} positions of {batch_size}")
    seen = attention_mask.to(torch.bool)
    pads = kv_length - seen.sum(dim=1)
    if not torch.equal(seen, torch.arange(kv_length) >= pads[:, None]) or int(pads.max()) == kv_length:
        refuse("padding that is not at the left, or nothing but padding")
    padding = seen.clone()
    setattr(padding, _PADDING, [int(pad) for pad in pads])
    return padding


def refuse(what: str) -> NoReturn:
    raise KvtierError(Reason.UNSUPPORTED, what)
