"""When a step is opened again because what its window has measured lets the next one be judged.

A design effect is used only by windows that open after it was measured, and a ratio gate's blocks are counted
only above an earlier window's quantile; so the first windows of an attempt measure. No gate that waits for
one could pass in such a window, so none of the false-promotion budget was at stake, and none is spent. It
must not move anything.
"""

from __future__ import annotations

from kvtier_evidence.design import MIN_BLOCKS
from kvtier_evidence.metrics import Kind
from kvtier_evidence.verdicts import Reason
from kvtier_operator.rollout.evaluation import current_look
from kvtier_operator.rollout.inputs import Inputs
from kvtier_operator.rollout.moves import current_step
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import RolloutState


def newly_measured(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> tuple[str, ...]:
    """Gates that must pass here, cannot without a design effect, and could in a window that opened now; empty
    while one of them has nothing new to offer."""
    look, window = current_look(state, inputs), state.window
    if look is None or window is None:
        return ()
    gates = {gate.name: gate for gate in spec.gates_of(current_step(state, spec)) if gate.required}
    waiting = [
        item
        for item in look.verdicts
        if item.name in gates and item.reason == Reason.DESIGN_EFFECT_UNKNOWN.value
    ]
    blocks = {one.gate: one.blocks for one in look.effects}
    known, told = dict(window.pair_thresholds), dict(look.pair_thresholds)
    for item in waiting:
        gate = gates[item.name]
        if gate.metric.kind is Kind.RATIO and item.name not in known:
            # A quantile of a few requests is not where to count.
            if item.name not in told or item.n < gate.min_samples:
                return ()
        elif blocks.get(item.name, 0) < MIN_BLOCKS:
            return ()
    return tuple(item.name for item in waiting)
