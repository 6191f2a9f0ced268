"""The rows of the table: what is at its limit, what is inside, what harms, and under which traffic.

Data only. Section 10 of the evidence specification names them; the last group is what it had not simulated.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_evidence.metrics import Stage
from tests.soak.gates.traffic import Step, Traffic, Truth
from tests.soak.gates.walk import Scenario

SHADOW = Step(Stage.SHADOW, 0, 0.0, 0, 100, 40)
CANARY = Step(Stage.CANARY, 0, 0.05, 2000, 100, 40)
LADDER = (
    SHADOW,
    CANARY,
    Step(Stage.RAMP, 0, 0.10, 1000, 100, 40),
    Step(Stage.RAMP, 1, 0.25, 500, 100, 40),
    Step(Stage.RAMP, 2, 0.50, 400, 100, 40),
    Step(Stage.FULL, 0, 0.98, 2000, 100, 40),
)
SAFE = Truth()
AT = Truth(output=0.01, tail=1.25, stall=0.02)
ROUGH = Traffic(heavy=True, shock=0.04, block=0.05, session=0.25)


def _at(output: bool = False, tail: bool = False, stall: bool = False) -> Truth:
    return Truth(
        AT.output if output else SAFE.output,
        AT.tail if tail else SAFE.tail,
        AT.stall if stall else SAFE.stall,
    )


def _inside(share: float) -> Truth:
    """That share of each allowance is used; of a ratio's, of the excess over 1."""
    return Truth(0.01 * share, 1.0 + 0.25 * share, 0.02 * share)


def _times(factor: float) -> Truth:
    return Truth(0.01 * factor, 1.25 * factor, 0.02 * factor)


def _whole(name: str, *truths: Truth, traffic: Traffic | None = None, **changes: object) -> Scenario:
    base = Scenario(name, name.partition(":")[0], LADDER, truths, traffic or Traffic())
    return replace(base, **changes)  # type: ignore[arg-type]


LIMIT_ROWS = (
    _whole("at limit: output", _at(output=True)),
    _whole("at limit: tail", SAFE, _at(tail=True)),
    _whole("at limit: stall", SAFE, _at(stall=True)),
    _whole("at limit: all", AT),
    _whole("at limit: all, from a random step", SAFE, AT, from_random=True),
    _whole("at limit: output, blocks .05", _at(output=True), traffic=Traffic(block=0.05), effect=""),
    _whole("at limit: output, blocks .25", _at(output=True), traffic=Traffic(block=0.25), effect=""),
    _whole(
        "at limit: output, rare blocks .25",
        _at(output=True),
        traffic=Traffic(block=0.25, rare=True),
        effect="",
    ),
    _whole(
        "at limit: tail, heavy, blocks .05",
        SAFE,
        _at(tail=True),
        traffic=replace(ROUGH, session=0.0),
        effect="",
    ),
    _whole("at limit: stall, blocks .25", SAFE, _at(stall=True), traffic=Traffic(block=0.25), effect=""),
)
INSIDE_ROWS = tuple(
    _whole(f"inside: {share:.0%} of each allowance", _inside(share)) for share in (0.25, 0.5, 0.75)
)
HARM_ROWS = (
    *(_whole(f"harm: {factor:g}x", _times(factor), harms=True) for factor in (1.2, 1.5, 2.0, 5.0)),
    *(
        _whole(f"harm: {factor:g}x from a random step", SAFE, _times(factor), from_random=True, harms=True)
        for factor in (1.5, 2.0, 5.0)
    ),
)
NEW_ROWS = (
    _whole("sessions: output at limit", _at(output=True), traffic=Traffic(session=0.5), effect=""),
    _whole("sessions: all at limit, rough", AT, traffic=ROUGH, effect=""),
    _whole("sessions: tail at limit", SAFE, _at(tail=True), traffic=Traffic(session=0.5), effect=""),
    _whole("sessions: half of each allowance", _inside(0.5), traffic=ROUGH, effect=""),
    _whole("drift: all at limit at the worst hour", AT, traffic=Traffic(drift=0.3, swing=0.4), harms=True),
    _whole("drift: tail at limit", SAFE, _at(tail=True), traffic=Traffic(drift=0.3)),
    _whole("drift: 75 % inside, worst hour last", _inside(0.75), traffic=Traffic(drift=0.3, swing=-0.3)),
    _whole(
        "restarts: output at limit",
        _at(output=True),
        traffic=Traffic(restarts=0.02),
        gates=("output", "stall"),
    ),
    _whole("restarts: 75 % inside", _inside(0.75), traffic=Traffic(restarts=0.02), gates=("output", "stall")),
    _whole(
        "restarts: 2x", _times(2.0), traffic=Traffic(restarts=0.02), gates=("output", "stall"), harms=True
    ),
)


def _single(
    name: str,
    gates: tuple[str, ...],
    step: Step,
    truth: Truth,
    *,
    tail_limit: str = "1.05",
    heavy: bool = False,
) -> Scenario:
    """One gate in one window, its cell weighing 1/30: how many units until a decision."""
    return Scenario(
        name,
        name.partition(":")[0],
        (step,),
        (truth,),
        Traffic(sigma=0.35, heavy=heavy),
        gates,
        tail_limit,
        min_samples=1,
        cells=30,
    )


def _out(per_look: int, looks: int) -> Step:
    return Step(Stage.SHADOW, 0, 0.0, 0, per_look, looks)


def _served(fraction: float, candidates: int, looks: int) -> Step:
    return Step(Stage.CANARY, 0, fraction, round(candidates / fraction), 0, looks)


# Lognormal .5 at twice the limit in value: 17 % lie over it.
DETECT_ROWS = (
    _single("detect: p99 error, value 2x", ("output",), _out(5, 60), Truth(output=0.17)),
    _single("detect: p99 error, value 1.5x", ("output",), _out(10, 80), Truth(output=0.065)),
    _single("detect: p99 error, share 2x", ("output",), _out(200, 50), Truth(output=0.02)),
    _single("detect: p99 error, share 5x", ("output",), _out(20, 60), Truth(output=0.05)),
    _single("detect: proportion 5 %, 2x", ("proportion",), _out(25, 80), Truth(output=0.10)),
    _single("detect: tail 2x, f 5 %", ("tail",), _served(0.05, 10, 60), Truth(tail=2.1)),
    _single("detect: tail 2x, f 5 %, heavy", ("tail",), _served(0.05, 10, 60), Truth(tail=2.1), heavy=True),
    _single("detect: tail 2x, f 25 %", ("tail",), _served(0.25, 25, 80), Truth(tail=2.1)),
    _single("detect: tail 2x, f 50 %", ("tail",), _served(0.5, 50, 100), Truth(tail=2.1)),
    _single("detect: slowest 10 % 2x, f 5 %", ("tail",), _served(0.05, 10, 60), Truth(tail=2.1, slow=0.1)),
    _single("detect: slowest 10 % 2x, f 25 %", ("tail",), _served(0.25, 50, 60), Truth(tail=2.1, slow=0.1)),
    _single("detect: stall 2x", ("stall",), _served(0.25, 20, 60), Truth(stall=0.04)),
)
"""The 2x rows are goal G2."""
G2 = {
    "detect: p99 error, value 2x": 100,
    "detect: proportion 5 %, 2x": 1050,
    "detect: tail 2x, f 5 %": 250,
    "detect: tail 2x, f 5 %, heavy": 250,
    "detect: tail 2x, f 25 %": 1100,
    "detect: tail 2x, f 50 %": 3400,
    "detect: slowest 10 % 2x, f 5 %": 250,
    "detect: slowest 10 % 2x, f 25 %": 1100,
    "detect: stall 2x": 400,
}
GUARDED = {"detect: tail 2x, f 5 %": 70, "detect: tail 2x, f 5 %, heavy": 70, "detect: tail 2x, f 25 %": 70}
"""G2 of the median guard, whose figure is for a slowdown of the whole distribution at f <= 25 %. Counted is
whatever fails a row first: the guard alone is no sooner."""
POWER_ROWS = (
    *(
        _single(f"power: p99 error, {share:.2%} above", ("output",), _out(each, looks), Truth(output=share))
        for share, each, looks in ((0.001, 25, 100), (0.0025, 50, 100), (0.005, 100, 120), (0.0075, 400, 120))
    ),
    _single("power: tail 1.25, f 5 %", ("tail",), _served(0.05, 100, 50), SAFE, tail_limit="1.25"),
    _single("power: tail 1.25, f 25 %", ("tail",), _served(0.25, 100, 50), SAFE, tail_limit="1.25"),
    _single("power: tail 1.25, f 50 %", ("tail",), _served(0.5, 100, 50), SAFE, tail_limit="1.25"),
    _single(
        "power: tail 1.25, f 5 %, heavy",
        ("tail",),
        _served(0.05, 200, 50),
        SAFE,
        tail_limit="1.25",
        heavy=True,
    ),
    _single("power: tail 1.10, f 25 %", ("tail",), _served(0.25, 300, 50), SAFE, tail_limit="1.10"),
    *(
        _single(f"power: stall mean {mean:g}", ("stall",), _served(0.25, 20, 120), Truth(stall=mean))
        for mean in (0.005, 0.01, 0.015)
    ),
)
ALL = (*LIMIT_ROWS, *INSIDE_ROWS, *HARM_ROWS, *NEW_ROWS, *DETECT_ROWS, *POWER_ROWS)
BY_NAME = {one.name: one for one in ALL}
