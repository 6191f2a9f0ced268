"""How an op's outputs are judged against its float64 reference, output by output.

It exists so that each op states its gate once, next to its reference. It must not know which
implementation gave an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.state import AttentionState

# Gates of o against fp64, as a factor on max|V|: p is rounded once to the working dtype.
O_GATE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}
# lse never sees the rounding of p, so it is the sharpest: 2e-5 (1 + max|s|).
LSE_GATE = 2e-5


@dataclass(frozen=True)
class Exact:
    """Equal values of equal shape and kind; NaN equals NaN. A float is compared as float64."""


@dataclass(frozen=True)
class Within:
    """|got - want| <= bound(inputs, want), elementwise, where want is finite; what is not finite must be
    equal, NaN to NaN. bound: a number, or what gives one or a tensor that broadcasts to want."""

    bound: float | Callable[[Mapping[str, Any], Tensor], Tensor | float]


Comparison = Exact | Within


def findings(
    comparisons: Mapping[str, Comparison],
    inputs: Mapping[str, Any],
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
) -> list[str]:
    """What is wrong with `got`, one line an output; empty when it holds."""
    if not (comparisons.keys() == got.keys() == want.keys()):
        return [f"outputs {sorted(got)}, reference {sorted(want)}, comparisons {sorted(comparisons)}"]
    out = []
    for name, rule in comparisons.items():
        a, b = got[name].detach().cpu(), want[name].detach().cpu()
        if a.shape != b.shape:
            out.append(f"{name}: shape {tuple(a.shape)}, want {tuple(b.shape)}")
        elif text := _unlike(rule, inputs, a, b):
            out.append(f"{name}: {text}")
    return out


def _unlike(rule: Comparison, inputs: Mapping[str, Any], got: Tensor, want: Tensor) -> str:
    if got.is_floating_point() != want.is_floating_point() or (got.dtype == torch.bool) != (
        want.dtype == torch.bool
    ):
        return f"dtype {got.dtype}, want {want.dtype}"
    if not want.numel():
        return ""
    a, b = (got.double(), want.double()) if want.is_floating_point() else (got.long(), want.long())
    same = (a == b) | ((a != a) & (b != b))
    if isinstance(rule, Exact):
        return "" if bool(same.all()) else f"{_first(~same, a, b)} ({int((~same).sum())} of {b.numel()})"
    finite = torch.isfinite(b)
    if not bool(same[~finite].all()):
        return "not finite: " + _first(~finite & ~same, a, b)
    bound = rule.bound(inputs, want) if callable(rule.bound) else rule.bound
    limit = torch.as_tensor(bound, dtype=torch.float64).cpu().expand(b.shape)
    over = finite & ~((a - b).abs() <= limit)
    return f"{_first(over, a, b)}, allowed {float(limit[over][0]):.3e}" if bool(over.any()) else ""


def _first(where: Tensor, got: Tensor, want: Tensor) -> str:
    at = tuple(where.nonzero()[0].tolist())
    return f"at {at}: {got[at].item()!r}, want {want[at].item()!r}"


def named(result: Any) -> dict[str, Tensor]:
    """A single tensor as "out"; a mapping or a NamedTuple of tensors under its own names."""
    if isinstance(result, Tensor):
        return {"out": result}
    if isinstance(result, Mapping):
        return dict(result)
    if hasattr(result, "_asdict"):
        return dict(result._asdict())
    raise TypeError(f"no names for the tensors of a {type(result).__name__}")


def state_outputs(result: Any) -> dict[str, Tensor]:
    """(o, lse, empty) of an AttentionState or of a reference's (m, l, u).

    o = u / l, or u without rows, which must be 0; lse = m + ln l; empty: m is -inf and l is 0. With rows,
    a state is compared by what it means: m may be any reference point of them.
    """
    m, l, u = (result.m, result.l, result.u) if isinstance(result, AttentionState) else result
    divisor = torch.where(l == 0, 1.0, l)
    return {"o": u / divisor.unsqueeze(-1), "lse": m + torch.log(l), "empty": (l == 0) & (m == -torch.inf)}


def state_comparisons(values: str = "v_cache", query: str = "q") -> dict[str, Comparison]:
    """Gates of an attention op whose V is the input `values` and whose working dtype is `query`'s."""

    def o_gate(inputs: Mapping[str, Any], want: Tensor) -> float:
        v = inputs[values]
        rows = torch.nan_to_num(v.float(), nan=0.0, posinf=0.0, neginf=0.0)
        return O_GATE[inputs[query].dtype] * max(1.0, float(rows.abs().max()) if rows.numel() else 0.0)

    def lse_gate(inputs: Mapping[str, Any], want: Tensor) -> Tensor:
        return LSE_GATE * (1 + want.abs())

    return {"o": Within(o_gate), "lse": Within(lse_gate), "empty": Exact()}
