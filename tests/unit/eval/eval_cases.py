"""What tests of the evaluation share: a tiny random decoder, bytes as tokens, and small plans."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kvtier_core.selectors.contract import Shape
from kvtier_eval.forward import Decoder
from kvtier_eval.plan import Plan, Settings, make_plan
from kvtier_eval.replay import Regime
from kvtier_eval.tasks import Material, Task
from kvtier_eval.texts import Corpus

CORPUS = Corpus("The quick brown fox jumps over the lazy dog, again and again. " * 80, "00" * 32, "3.x")
SHAPE = Shape(query_heads=6, kv_heads=2, head_dim=16, scale=0.25)
SMALL = Settings(
    prompts=2,
    steps=3,
    seed=5,
    regime=Regime.OWN_ROWS,
    sink=2,
    recent=8,
    dense_layers=(0,),
    append_every=2,
    detail_every=1,
)


@dataclass(frozen=True)
class ByteCodec:
    """A token a byte, in a frame of angle brackets."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    @property
    def frame(self) -> tuple[str, str]:
        return "<u>", "</u><a>"


MATERIAL = Material(ByteCodec(), tuple(CORPUS.text.encode()))


@functools.cache
def tiny_model() -> Any:
    """A decoder of 3 layers with random weights and sharp attention, GQA 3, 256 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=SHAPE.query_heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        max_position_embeddings=4096,
        initializer_range=0.2,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@functools.cache
def tiny_decoder() -> Decoder:
    return Decoder(tiny_model())


def small_plan(
    *,
    settings: Settings = SMALL,
    tasks: tuple[Task, ...] = (Task.COPY_SPAN,),
    length: int = 160,
    families: tuple[str, ...] = ("certifiedScan",),
    budgets: tuple[int, ...] = (16,),
    quick: bool = False,
) -> Plan:
    return make_plan(
        model="tiny",
        model_digest="sha256:" + "11" * 32,
        corpus=CORPUS,
        code_digest="sha256:" + "22" * 32,
        shape=SHAPE,
        settings=settings,
        tasks=tasks,
        lengths=[length],
        budgets=budgets,
        names=families,
        quick=quick,
    )
