"""One file of semantics for every op and implementation, driven by the registry's entries.

`-k OP` runs one op; KVTIER_KERNELS_DEVICE=cuda runs the Triton kernels compiled, on that device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier_kernels.compare import findings
from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.spec import Case, Hazard, Invariance, KernelSpec, Refusal
from kvtier_kernels.testing.inputs import fresh
from tests.kernels.harness import SPECS, every, run, unlike, wanted


@pytest.mark.parametrize(("spec", "backend", "case"), every("cases"))
def test_equals_the_fp64_reference(spec: KernelSpec, backend: str, case: Case) -> None:
    inputs = spec.make_inputs(case)
    assert not findings(spec.comparisons, inputs, run(spec, backend, inputs), wanted(spec.name, case.id))


@pytest.mark.parametrize(("spec", "backend", "change"), every("invariances"))
def test_what_must_not_matter_changes_no_bit(spec: KernelSpec, backend: str, change: Invariance) -> None:
    for id in change.cases:
        inputs = spec.make_inputs(spec.case(id))
        tensors = [n for n, x in inputs.items() if isinstance(x, torch.Tensor)]
        plain = run(spec, backend, inputs)
        other = run(spec, backend, change.change(fresh(inputs, tensors)))
        assert not unlike(plain, change.undo(other) if change.undo else other), id


@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in SPECS if s.stability.alone])
def test_a_request_has_the_bits_that_it_has_alone(spec: KernelSpec) -> None:
    """On Triton: no launch looks at how many others there are, or how long they are."""
    said = spec.stability
    assert said.alone is not None
    inputs = spec.make_inputs(spec.case(said.requests))
    together = run(spec, "triton", inputs)
    count = len(next(iter(together.values())))
    assert count > 1, "a case of one request shows nothing"
    for at in range(count):
        alone = run(spec, "triton", said.alone(inputs, at))
        assert not unlike({name: out[at : at + 1] for name, out in together.items()}, alone), at


@pytest.mark.parametrize(("spec", "backend", "refusal"), every("refusals"))
def test_bad_inputs_are_refused(spec: KernelSpec, backend: str, refusal: Refusal) -> None:
    """On the CPU, also for a GPU: values on a device are not looked at, and nothing is launched."""
    inputs = spec.make_inputs(spec.case(refusal.case)) | dict(refusal.change)
    with pytest.raises(ShapeError, match=refusal.match):
        run(spec, backend, inputs, device="cpu")


BACKENDS = [pytest.param(s, b, id=f"{s.name}-{b}") for s in SPECS for b in s.implementations]


@pytest.mark.parametrize(("spec", "backend"), BACKENDS)
def test_running_again_gives_the_same_bits_and_only_declared_inputs_change(
    spec: KernelSpec, backend: str
) -> None:
    """On the case with the most lengths that is not hostile: the one with the most parts to order."""
    case = max((c for c in spec.cases if Hazard.FAR not in c.traits), key=lambda c: len(c.seq_lens))
    inputs = spec.make_inputs(case)
    kept = fresh(inputs, [n for n, x in inputs.items() if isinstance(x, torch.Tensor)])
    assert not unlike(run(spec, backend, inputs), run(spec, backend, inputs))
    assert not unlike(_tensors(inputs), _tensors(kept))


def _tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
