"""A decoder of transformers whose attention is whatever we hand it, one call for many tokens.

Why it exists: full attention and every selector must see the same model, and an attention function that is
given per call needs no state of the process. It must not know tasks, selectors or metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvtier_core.selectors.contract import LayerWeights, Shape

ATTENTION_NAME = "kvtier_eval"
_ARGUMENT = "kvtier_eval_attender"
_LOGITS_AT_ONCE = 256


class Attender(Protocol):
    """Answers one layer's queries."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """q float32 [T, Hq, d], k and v [T, Hk, d]: of the tokens of this call, after RoPE. hidden [T,
        d_model]: the layer's input. Returns [T, Hq, d]."""


class UnknownModel(ValueError):
    """The model is not built as this evaluation needs it."""


class Decoder:
    """A causal language model in float32 with grouped queries. UnknownModel when a part is not there."""

    def __init__(self, model: Any) -> None:
        self._model = model
        body = model.get_decoder()
        try:
            self._layers = list(body.layers)
            one = self._layers[0]
            for part in (one.self_attn.q_proj, one.self_attn.o_proj, one.input_layernorm, body.rotary_emb):
                assert part is not None
        except (AttributeError, AssertionError, IndexError) as error:
            raise UnknownModel(f"{type(model).__name__}: {error}") from error
        config = model.config
        heads = int(config.num_attention_heads)
        d = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.shape = Shape(
            heads,
            int(getattr(config, "num_key_value_heads", None) or heads),
            d,
            float(one.self_attn.scaling),
        )
        self.layers = len(self._layers)
        self.vocabulary = int(config.vocab_size)
        self.inv_freq: Tensor = body.rotary_emb.inv_freq.detach().float()
        self._body = body
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)

    @torch.no_grad()
    def run(self, ids: list[int], first: int, attender: Attender) -> Tensor:
        """The last hidden states float32 [T, d_model] of tokens at positions first, first + 1, ..."""
        inputs: dict[int, Tensor] = {}
        with self._attending(inputs):
            out = self._body(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(first, first + len(ids))[None],
                use_cache=False,
                **{_ARGUMENT: _Call(attender, inputs)},
            )
        states: Tensor = out.last_hidden_state[0]
        return states

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """float32 [T, vocabulary]"""
        parts = [self._model.lm_head(part).float() for part in torch.split(states, _LOGITS_AT_ONCE)]
        return torch.cat(parts)

    @torch.no_grad()
    def losses(self, states: Tensor, targets: list[int]) -> Tensor:
        """-ln P(target) float64 [T] of the token after each state."""
        wanted = torch.tensor(targets)
        parts = []
        for part, ids in zip(
            torch.split(states, _LOGITS_AT_ONCE), torch.split(wanted, _LOGITS_AT_ONCE), strict=True
        ):
            logs = self._model.lm_head(part).double().log_softmax(-1)
            parts.append(-logs.gather(1, ids[:, None])[:, 0])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    @torch.no_grad()
    def projected(self, layer: int, heads: Tensor) -> Tensor:
        """What answers [T, Hq, d] add to the residual stream, less a bias: [T, d_model]."""
        weight: Tensor = self._layers[layer].self_attn.o_proj.weight
        return heads.flatten(1) @ weight.T.to(heads.dtype)

    def weights(self, layer: int) -> LayerWeights:
        """What a rehearsal of this layer needs."""
        one = self._layers[layer]
        bias = one.self_attn.q_proj.bias
        norm = one.input_layernorm
        return LayerWeights(
            query=one.self_attn.q_proj.weight.detach().T.contiguous(),
            bias=None if bias is None else bias.detach(),
            norm_weight=norm.weight.detach(),
            norm_eps=float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))),
            inv_freq=self.inv_freq,
        )

    @contextmanager
    def _attending(self, inputs: dict[int, Tensor]) -> Iterator[None]:
        """Our attention and the layers' inputs, for the time of one call."""
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation(ATTENTION_NAME)
        hooks = [
            layer.register_forward_pre_hook(_keep(at, inputs), with_kwargs=True)
            for at, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._model.set_attn_implementation(before)


class _Call:
    def __init__(self, attender: Attender, inputs: dict[int, Tensor]) -> None:
        self.attender = attender
        self.inputs = inputs


def _keep(layer: int, inputs: dict[int, Tensor]) -> Any:
    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        inputs[layer] = hidden[0]

    return hook


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, T, d] in, [1, T, Hq, d] out."""
    call: _Call = given[_ARGUMENT]
    layer = int(module.layer_idx)
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    return call.attender.attend(layer, q, k, v, call.inputs[layer])[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Who attends knows which rows a query sees."""
