"""Requests of one window as arrays: who serves them, in which arm, and how they depend on each other.

Marginal laws are exact whatever the dependence: a unit takes its own uniform number or, with a probability
that gives the wanted correlation, the one of its block or of its session. Knows no gate's verdict.

Section 10 of the evidence specification, and what it says was not simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri
from scipy.stats import multivariate_normal

from kvtier_evidence.grid import SUB, edge
from kvtier_evidence.metrics import Stage

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MEDIAN_SECONDS = 0.03
SESSION_STOP = 0.25
"""Sessions of geometric length, 4 requests on average."""
TAIL_SHARE, TAIL_FROM, TAIL_INDEX = 0.03, 1.5, 2.5
"""Of the heavy law: Pareto above 1.5 medians."""
AGENT_SCALES = np.exp(np.asarray([-0.25, -0.1, 0.0, 0.15, 0.3]))
STALL_SHARE, STALL_SIZES = 0.4, 10
STALL_MEAN = STALL_SHARE * (1 + STALL_SIZES) / 2.0
"""Mean number of an atom: none for 60 %, else 1 to 10 alike."""
_EDGES = np.asarray([edge(j - SUB) for j in range(SUB)])


@dataclass(frozen=True)
class Step:
    """One window: requests of the blast radius per look of 10 s, and compared ones besides."""

    stage: Stage
    index: int
    fraction: float
    served: int
    compared: int
    looks: int


@dataclass(frozen=True)
class Truth:
    """What a candidate is: share of compared requests over the limit, ratio of times, mean stall."""

    output: float = 0.001
    tail: float = 1.0
    stall: float = 0.004
    slow: float = 1.0
    """Share of the requests, the slowest, that `tail` slows; 1: all of them alike."""


@dataclass(frozen=True)
class Traffic:
    """sigma: of the lognormal time. block, session: correlation of two units of one (agent, look) or session
    among the worst 1 %; rare: half of a block or more is hit at once, and seldom.
    shock: sd of an AR(.7) factor on the time of both arms. drift: log amplitude of the day on both arms'
    times and on their number. swing: the one-arm values go from 1 + swing to 1 - swing times the truth and
    never have a running average under it; negative: never one over it. restarts: chance per look that an
    agent restarts and takes its unread units with it; where it has units over the limit, eight times that.
    """

    sigma: float = 0.35
    heavy: bool = False
    agents: int = 5
    block: float = 0.0
    rare: bool = False
    session: float = 0.0
    shock: float = 0.0
    drift: float = 0.0
    swing: float = 0.0
    restarts: float = 0.0


@dataclass(frozen=True)
class Units:
    """Arrays of one window's units, all of the same length; sorted by look."""

    look: Ints
    agent: Ints
    session: Ints
    candidate: Flags
    value: Ints
    """Served: the grid's bin of the time per token. Compared: 1 over the limit, else 0."""
    stall: Ints
    """Served: number of the atom."""


@dataclass(frozen=True)
class Window:
    step: Step
    truth: Truth
    served: Units
    compared: Units


def draw_window(rng: np.random.Generator, traffic: Traffic, step: Step, truth: Truth) -> Window:
    """All units that one window can hold."""
    served = _arrivals(rng, traffic, step, step.served, step.fraction)
    compared = _arrivals(rng, traffic, step, step.compared, 1.0)
    swing = traffic.swing * np.cos(math.pi * (np.arange(step.looks) + 0.5) / step.looks)
    share = truth.output * (1.0 + swing)
    above = _uniforms(rng, traffic, step, compared) > 1.0 - share[compared.look]
    bins = np.zeros(len(served.look), np.int64)
    stall = np.zeros(len(served.look), np.int64)
    if step.served:
        bins = grid_index(_times(rng, traffic, step, truth, served))
        u = _uniforms(rng, traffic, step, served)
        # The mean moves with the odds of a stall, the sizes stay.
        odds = STALL_SHARE * (1.0 + swing[served.look])
        place = ((u - (1.0 - odds)) / odds * STALL_SIZES).astype(np.int64) + 1
        place = np.clip(place, 1, STALL_SIZES)
        stall = np.where(u < 1.0 - odds, 0, place)
    return Window(
        step,
        truth,
        Units(served.look, served.agent, served.session, served.candidate, bins, stall),
        Units(
            compared.look,
            compared.agent,
            compared.session,
            compared.candidate,
            above.astype(np.int64),
            stall[:0],
        ),
    )


def grid_index(x: Floats) -> Ints:
    """`kvtier_evidence.grid.index` of positive finite values."""
    mantissa, exponent = np.frexp(x)
    return (exponent.astype(np.int64) - 1) * SUB + np.searchsorted(_EDGES, mantissa) - 1


def _arrivals(
    rng: np.random.Generator, traffic: Traffic, step: Step, per_look: int, fraction: float
) -> Units:
    """Sessions begin at any look and have one request per look; each keeps its agent and its arm."""
    total = per_look * step.looks
    empty = np.zeros(0, np.int64)
    if not total:
        return Units(empty, empty, empty, np.zeros(0, np.bool_), empty, empty)
    weight = 1.0 + 0.5 * (traffic.drift > 0.0) * np.sin(2.0 * math.pi * np.arange(step.looks) / step.looks)
    if traffic.session > 0.0:
        count = round(total * SESSION_STOP)
        lengths = rng.geometric(SESSION_STOP, count)
        session = np.repeat(np.arange(count), lengths)
        nth = np.arange(len(session)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        start = rng.choice(step.looks, count, p=weight / weight.sum())
        # Later requests than the window's last look come from sessions that began before it.
        look = (start[session] + nth) % step.looks
    else:
        count = total
        session = np.arange(total)
        look = (
            rng.choice(step.looks, total, p=weight / weight.sum()) if traffic.drift else session // per_look
        )
    agent = rng.integers(0, traffic.agents, count)[session]
    candidate = (rng.random(count) < fraction)[session]
    order = np.argsort(look, kind="stable")
    return Units(look[order], agent[order], session[order], candidate[order], empty, empty)


def _uniforms(rng: np.random.Generator, traffic: Traffic, step: Step, units: Units) -> Floats:
    n = len(units.look)
    u = rng.random(n)
    if traffic.block > 0.0:
        place = units.look * traffic.agents + units.agent
        common = rng.random(step.looks * traffic.agents)[place]
        if traffic.rare:
            u = np.where(rng.random(n) < math.sqrt(traffic.block), common, u)
        else:
            u = _mixed(u, common, traffic.block)
    if traffic.session > 0.0 and n:
        common = rng.random(int(units.session.max()) + 1)[units.session]
        u = np.where(rng.random(n) < math.sqrt(traffic.session), common, u)
    return u


def _mixed(own: Floats, common: Floats, correlation: float) -> Floats:
    """Uniform numbers of normal ones that share a part, such that being among the worst 1 % has the wanted
    correlation."""
    rho = _normal_correlation(correlation)
    z = math.sqrt(rho) * ndtri(np.clip(common, 1e-12, 1.0 - 1e-12))
    z += math.sqrt(1.0 - rho) * ndtri(np.clip(own, 1e-12, 1.0 - 1e-12))
    return np.asarray(ndtr(z), np.float64)


@cache
def _normal_correlation(wanted: float) -> float:
    """Of two normal numbers whose exceedances of their 99 % quantiles have correlation `wanted`."""
    z = float(ndtri(0.99))

    def both(rho: float) -> float:
        return float(multivariate_normal.cdf([-z, -z], cov=[[1.0, rho], [rho, 1.0]]))

    low, high = 0.0, 0.999
    for _ in range(40):
        middle = (low + high) / 2.0
        reached = (both(middle) - 1e-4) / (0.01 * 0.99)
        low, high = (middle, high) if reached < wanted else (low, middle)
    return high


def _times(rng: np.random.Generator, traffic: Traffic, step: Step, truth: Truth, units: Units) -> Floats:
    """Seconds per token; the candidate's p99 is `truth.tail` times the baseline's at every look."""
    u = np.clip(_uniforms(rng, traffic, step, units), 1e-12, 1.0 - 1e-12)
    if traffic.heavy:
        body = np.exp(traffic.sigma * ndtri(np.minimum(u / (1.0 - TAIL_SHARE), 1.0 - 1e-12)))
        rest = np.clip((1.0 - u) / TAIL_SHARE, 1e-12, 1.0)
        x = np.where(u < 1.0 - TAIL_SHARE, body, TAIL_FROM * rest ** (-1.0 / TAIL_INDEX))
    else:
        x = np.exp(traffic.sigma * ndtri(u))
    shocks = np.zeros(step.looks)
    level = 0.0
    for look, noise in enumerate(rng.standard_normal(step.looks) * traffic.shock):
        level = 0.7 * level + math.sqrt(1.0 - 0.49) * noise
        shocks[look] = level
    slowed = units.candidate & (u >= 1.0 - truth.slow)
    day = traffic.drift * np.sin(2.0 * math.pi * np.arange(step.looks) / step.looks)
    scales = AGENT_SCALES[np.arange(traffic.agents) % len(AGENT_SCALES)]
    factor = np.exp(shocks + day)[units.look] * scales[units.agent] * np.where(slowed, truth.tail, 1.0)
    return np.asarray(MEDIAN_SECONDS * x * factor, np.float64)
