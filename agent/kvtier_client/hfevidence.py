"""What a transformers decoder can tell a selector: hidden states, weights, surprisals; and how it is asked.

It exists so that hooks are in a model only while a session's selector needs them. What it cannot vouch for by
trying it out (another norm, another rotation, logits that are changed behind the head) it does not offer. It
must not know sessions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kvtier.weights import WeightsShape
from kvtier_client.errors import KvtierError
from kvtier_client.rowevidence import LayerGiven
from kvtier_core.errors import Reason
from kvtier_core.rope import RopeTable
from kvtier_core.rowevidence import LayerWeights, Need

_AT_ONCE = 128
_CLOSE = 1e-4
# Of a config: logits that are not what the head computes.
_CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "final_logits_softcapping")
# Rotations whose angles depend on the length of the context.
_MOVING_ROPE = ("dynamic", "longrope")


class PassWatcher(Protocol):
    """A cache that a pass of the model was given."""

    def pass_begins(self, ids: Tensor | None) -> None:
        """ids: tokens int64 [B, N], None when the model was given embeddings."""

    def pass_ends(self, states: Tensor) -> None:
        """The decoder's last hidden states [B, N, d_model]."""

    def pass_logits(self, logits: Tensor) -> None:
        """What the head made of the last positions, [B, K, vocabulary]."""


class ModelEvidence:
    """Of one model. `gives` says what it can tell; `watch` turns hooks on, `unwatch` off, counted. Not for
    several threads at once: one engine drives a model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._body = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._layers = list(getattr(self._body, "layers", ()))
        config = model.config
        self.hidden_size = int(getattr(config, "hidden_size", 0))
        self._inputs: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._watchers: dict[int, tuple[PassWatcher, frozenset[Need]]] = {}
        self._current: PassWatcher | None = None
        self._digests: dict[tuple[str, int], str] = {}
        self._rope = self._rotation()
        gives = {Need.PREFILL_QUERIES}
        if self._layers and self.hidden_size:
            gives.add(Need.PREVIOUS_HIDDEN_STATE)
            if self._projects_as_stated():
                gives.add(Need.WEIGHTS)
        if self._head is not None and not any(getattr(config, name, None) for name in _CHANGED_LOGITS):
            gives.add(Need.SURPRISAL)
        self.gives = frozenset(gives)

    @property
    def stated_size(self) -> int:
        """Of a hidden state, as OpenSession states it; 0 for a model that gives none."""
        wide = self.gives & {Need.PREVIOUS_HIDDEN_STATE, Need.WEIGHTS}
        return self.hidden_size if wide else 0

    # --- passes ----------------------------------------------------------------------------------------

    def watch(self, cache: object, watcher: PassWatcher, needs: frozenset[Need]) -> None:
        """Tells `watcher` of the passes that are given `cache`, for what `needs` names. What needs no hook
        costs none."""
        wanted = needs & {Need.PREVIOUS_HIDDEN_STATE, Need.SURPRISAL}
        if wanted:
            self._watchers[id(cache)] = watcher, wanted
            self._hook()

    def unwatch(self, cache: object) -> None:
        """Idempotent."""
        if self._watchers.pop(id(cache), None) is not None:
            self._hook()

    @property
    def watching(self) -> int:
        """Caches whose passes are looked at."""
        return len(self._watchers)

    def input_of(self, layer: int) -> Tensor | None:
        """[B, N, d_model] of the pass that runs, of a layer that has begun; of the last two only."""
        return self._inputs.get(layer)

    def _hook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._inputs = [], {}
        needs = frozenset().union(*(wanted for _, wanted in self._watchers.values()))
        if Need.PREVIOUS_HIDDEN_STATE in needs:
            self._hooks += [
                layer.register_forward_pre_hook(self._keep(at), with_kwargs=True)
                for at, layer in enumerate(self._layers)
            ]
        if Need.SURPRISAL in needs:
            self._hooks += [
                self._body.register_forward_pre_hook(self._begin, with_kwargs=True),
                self._body.register_forward_hook(self._end, with_kwargs=True),
                self._head.register_forward_hook(self._logits),
            ]

    def _keep(self, at: int) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[at] = args[0] if args else kwargs["hidden_states"]
            # The input of a prefill is as large as its tokens: only the layer before is asked for.
            self._inputs.pop(at - 2, None)

        return hook

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = (self._watchers.get(id(given)) for given in (*args, *kwargs.values()))
        self._current = next((one[0] for one in found if one is not None), None)
        if self._current is not None:
            ids = kwargs.get("input_ids", args[0] if args and isinstance(args[0], Tensor) else None)
            self._current.pass_begins(ids)

    def _end(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._current is not None:
            self._current.pass_ends(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    def _logits(self, _: Any, args: tuple[Any, ...], output: Tensor) -> None:
        if self._current is not None:
            self._current.pass_logits(output)

    # --- surprisals ------------------------------------------------------------------------------------

    def losses(self, states: Tensor, ids: Tensor) -> NDArray[np.float64]:
        """-ln P float64 [n] of tokens ids [n], each after its state [n, d_model], by the model's own head."""
        parts = []
        with torch.no_grad():
            for some, wanted in zip(torch.split(states, _AT_ONCE), torch.split(ids, _AT_ONCE), strict=True):
                logits = functional.linear(some, self._head.weight, getattr(self._head, "bias", None))
                parts.append(loss_of(logits, wanted))
        return np.concatenate(parts) if parts else np.empty(0)

    # --- weights ---------------------------------------------------------------------------------------

    def layer_weights(self, layer: int) -> LayerWeights:
        """Of the projection to queries, the norm before it and the rotation behind it."""
        attention, norm = self._layers[layer].self_attn, self._layers[layer].input_layernorm
        bias = attention.q_proj.bias
        return LayerWeights(
            query=attention.q_proj.weight.detach().T,
            bias=None if bias is None else bias.detach(),
            norm_weight=norm.weight.detach(),
            norm_eps=float(norm.variance_epsilon),
            inv_freq=None if self._rope is None else self._rope.frequencies,
            interleaved=self._rope is not None and self._rope.interleaved,
        )

    def layers_given(self, fingerprint: str, layers: Sequence[int]) -> list[LayerGiven]:
        """As they travel; their digests are computed once a layer and model. UNSUPPORTED when this model does
        not give weights."""
        if Need.WEIGHTS not in self.gives:
            raise KvtierError(Reason.UNSUPPORTED, "this model's projections cannot be stated")
        return [self._given(fingerprint, layer) for layer in layers]

    def _given(self, fingerprint: str, layer: int) -> LayerGiven:
        weights = self.layer_weights(layer)
        shape = WeightsShape(
            hidden_size=weights.query.shape[0],
            queries=weights.query.shape[1],
            has_bias=weights.bias is not None,
            norm_eps=weights.norm_eps,
            frequencies=0 if weights.inv_freq is None else len(weights.inv_freq),
            interleaved=weights.interleaved,
        )
        digest = self._digests.get((fingerprint, layer))
        if digest is None:
            digest = shape.digest(fingerprint, layer, _bytes_of(weights))
            self._digests[fingerprint, layer] = digest
        return LayerGiven(layer, shape, digest, lambda: _bytes_of(weights))

    def _projects_as_stated(self) -> bool:
        """Whether queries are the projection of an RMS norm, tried out on the first layer, and turned as
        `_rotation` found."""
        attention: Any = getattr(self._layers[0], "self_attn", None)
        norm: Any = getattr(self._layers[0], "input_layernorm", None)
        projection = getattr(attention, "q_proj", None)
        if not isinstance(projection, torch.nn.Linear) or getattr(attention, "q_norm", None) is not None:
            return False
        if self._rope is None or not hasattr(norm, "variance_epsilon"):
            return False
        if projection.weight.dtype is not torch.float32:
            return False
        weights = self.layer_weights(0)
        h = torch.randn(4, self.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + weights.norm_eps)
            stated = (normed * weights.norm_weight) @ weights.query
            if weights.bias is not None:
                stated = stated + weights.bias
            return _alike(stated, projection(norm(h)))

    def _rotation(self) -> RopeTable | None:
        """How the model turns queries, tried out against its own function; None: not as a position's angle
        times a constant, or not to be found."""
        rotary: Any = getattr(self._body, "rotary_emb", None)
        frequencies = getattr(rotary, "inv_freq", None)
        attention = getattr(self._layers[0], "self_attn", None) if self._layers else None
        turn: Any = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
        if frequencies is None or turn is None or getattr(rotary, "rope_type", "default") in _MOVING_ROPE:
            return None
        heads = int(self._model.config.num_attention_heads)
        width = int(getattr(self._model.config, "head_dim", None) or self.hidden_size // heads)
        x = torch.randn(1, 1, 3, width, generator=torch.Generator().manual_seed(1))
        positions = torch.tensor([[1, 7, 90]])
        with torch.no_grad():
            try:
                turned = turn(x, x, *rotary(x, positions))[0][0, 0]
            except (RuntimeError, TypeError, ValueError):
                return None
        for interleaved in (False, True):
            table = RopeTable(frequencies.detach().double(), interleaved)
            made = [table.turned(x[0, 0, at], int(positions[0, at])) for at in range(3)]
            if _alike(torch.stack(made), turned):
                return table
        return None


def loss_of(logits: Tensor, ids: Tensor) -> NDArray[np.float64]:
    """-ln P float64 [n] of tokens ids [n] under logits [n, vocabulary], never below 0."""
    wide = logits.detach().double()
    chosen = wide.gather(1, ids[:, None])[:, 0]
    # A probability of 1 may come out a rounding above it.
    made: NDArray[np.float64] = (wide.logsumexp(1) - chosen).clamp_min(0.0).numpy()
    return made


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= _CLOSE * (1 + other.abs().max()))


def _bytes_of(weights: LayerWeights) -> bytes:
    parts = [weights.query, *(() if weights.bias is None else (weights.bias,)), weights.norm_weight]
    made = b"".join(np.ascontiguousarray(part.numpy(), dtype="<f4").tobytes() for part in parts)
    if weights.inv_freq is None:
        return made
    return made + np.ascontiguousarray(weights.inv_freq.double().numpy(), dtype="<f8").tobytes()
