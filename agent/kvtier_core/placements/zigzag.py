"""FlexGen's zig-zag block schedule, run by events instead of assumed: five streams, two buffers a hop.

Why it exists: "the largest of five terms" assumes that all five always overlap. Here each GPU batch of each
layer is a step of five tasks with their real dependencies and bounded buffers, so the difference to the
closed form is a number. It must not know how shares were chosen.

Order: for each token, for each layer, for each GPU batch of the block. The weights of the next layer come in
slices, one beside each batch (zig-zag: they are loaded once for the whole block).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_core.exact_placements import PlacementReason, PlacementRefused
from kvtier_core.placements.events import Program, Simulated, simulate
from kvtier_core.placements.flexgen import JointInputs, LayerTerms, Priced, Term

BUFFERS = 2
AHEAD = 4 * BUFFERS
"""Steps that the first of the five streams can be ahead of the last: the buffers of four hops."""


@dataclass(frozen=True, slots=True)
class ZigzagRun:
    """simulated: of the block until `tokens` tokens of each sequence were generated. closed: seconds of the
    closed form for the same. longer: seconds by which the simulation may be longer: filling and draining,
    the five terms of one batch in each phase. shorter: by which it may be shorter, since the closed form adds
    the phases up: where they are bound by different streams, decode begins while up to AHEAD steps of the
    prefill drain. Both hold for blocks of 8 steps or more; in smaller ones a token waits for the rows of the
    one before it."""

    simulated: Simulated
    closed: float
    longer: float
    shorter: float


def run_block(given: JointInputs, plan: Priced, tokens: int) -> ZigzagRun:
    """Simulates a block's prefill, which gives the first token, and tokens - 1 decode steps at the mean
    context. TIME_MODEL for a plan that was not priced, or no token."""
    if plan.prefill is None or plan.decode is None or tokens < 1:
        raise PlacementRefused(PlacementReason.TIME_MODEL, "only a priced plan can be run")
    program, batches = Program(), plan.point.batches
    block = _Block(program, given.layers * batches)
    for _ in range(given.layers * batches):
        block.step(plan.prefill, batches)
    for _ in range((tokens - 1) * given.layers * batches):
        block.step(plan.decode, batches)
    closed = given.layers * (plan.prefill.seconds + (tokens - 1) * plan.decode.seconds)
    longer = sum(plan.prefill.named.values()) + (sum(plan.decode.named.values()) if tokens > 1 else 0.0)
    two = tokens > 1 and plan.prefill.bound is not plan.decode.bound
    shorter = AHEAD * min(plan.prefill.seconds, plan.decode.seconds) if two else 0.0
    return ZigzagRun(simulate(program), closed, longer / batches, shorter / batches)


class _Block:
    """Steps in order. `around`: steps between two visits of one layer and batch."""

    def __init__(self, program: Program, around: int) -> None:
        self._program = program
        self._around = around
        self._done: dict[Term, list[int]] = {term: [] for term in Term}

    def step(self, terms: LayerTerms, batches: int) -> None:
        number = len(self._done[Term.COMPUTE])
        took = {term: seconds / batches for term, seconds in terms.named.items()}
        # A visit reads what the visit before it wrote.
        written_disk = self._ago(Term.CPU_TO_DISK, self._around)
        written_cpu = self._ago(Term.GPU_TO_CPU, self._around)
        # A buffer is free once what was in it has left.
        hop = self._add(Term.DISK_TO_CPU, took, number, self._ago(Term.CPU_TO_GPU, BUFFERS), written_disk)
        hop = self._add(Term.CPU_TO_GPU, took, number, hop, self._ago(Term.COMPUTE, BUFFERS), written_cpu)
        hop = self._add(Term.COMPUTE, took, number, hop, self._ago(Term.GPU_TO_CPU, BUFFERS))
        hop = self._add(Term.GPU_TO_CPU, took, number, hop, self._ago(Term.CPU_TO_DISK, BUFFERS))
        self._add(Term.CPU_TO_DISK, took, number, hop)

    def _ago(self, term: Term, steps: int) -> int | None:
        done = self._done[term]
        # Asked before this step's own task of the term is added.
        return done[-steps] if len(done) >= steps else None

    def _add(self, term: Term, took: dict[Term, float], number: int, *after: int | None) -> int:
        task = self._program.add(f"{term.value} {number}", term.value, took[term], after)
        self._done[term].append(task)
        return task
