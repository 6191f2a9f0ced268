"""The demo's report: one HTML file that opens anywhere, with plots inside it.

Takes plain records (what was observed) and draws them; it computes no verdict
and knows no process, cluster or cache.
"""

from __future__ import annotations

import html
import io
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # the backend must be chosen first
from matplotlib.figure import Figure

from .claims import Checked

STAGES = ("Off", "Shadow", "Canary", "Ramp", "Full", "ExactBaseline")
STYLE = """<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; color: #111 }
table { border-collapse: collapse; margin: .5rem 0 }
td { padding: .25rem .7rem; border-bottom: 1px solid #e5e7eb; vertical-align: top }
.ok td:first-child { color: #15803d }
.bad td { background: #fef2f2; color: #b91c1c }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: 12px }
svg { max-width: 100%; height: auto }
</style>"""
INK = {"candidate": "#c2410c", "baseline": "#1d4ed8", "limit": "#6b7280", "bound": "#0f766e"}


@dataclass(frozen=True)
class StagePoint:
    """A rollout's stage as seen at ``at`` seconds since the start."""

    at: float
    rollout: str
    stage: str
    phase: str


@dataclass(frozen=True)
class GatePoint:
    """A gate of a rollout's status as seen at ``at`` seconds; None where the status had none."""

    at: float
    rollout: str
    gate: str
    verdict: str
    value: float | None
    bound: float | None
    limit: float | None
    stage: str


@dataclass(frozen=True)
class BytesPoint:
    """Used bytes of one tier of one node."""

    at: float
    node: str
    tier: str
    used: int
    simulated: bool


@dataclass(frozen=True)
class RequestPoint:
    """One answered request of the workload."""

    at: float
    arm: str
    tokens: int
    seconds: float
    seconds_per_token: float | None


@dataclass
class Observations:
    """Everything the report draws, in the order it was seen."""

    stages: list[StagePoint] = field(default_factory=list)
    gates: list[GatePoint] = field(default_factory=list)
    tiers: list[BytesPoint] = field(default_factory=list)
    requests: list[RequestPoint] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    screens: list[tuple[str, str]] = field(default_factory=list)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def plot_stages(points: list[StagePoint]) -> str:
    """Stage of each rollout over time, as steps."""
    figure, axes = plt.subplots(figsize=(9, 2.6))
    for name in dict.fromkeys(p.rollout for p in points):
        rows = [p for p in points if p.rollout == name and p.stage in STAGES]
        axes.step([p.at for p in rows], [STAGES.index(p.stage) for p in rows], where="post", label=name)
    axes.set_yticks(range(len(STAGES)), STAGES)
    axes.set_xlabel("seconds since the start")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _svg(figure)


def plot_gates(points: list[GatePoint]) -> str:
    """Value, bound and limit over time, a panel per rollout and gate; zero-tolerance gates are left out."""
    keys = [
        k
        for k in dict.fromkeys((p.rollout, p.gate) for p in points)
        if any(p.value is not None and p.limit for p in points if (p.rollout, p.gate) == k)
    ]
    if not keys:
        return "<p>No gate had a value.</p>"
    rows = (len(keys) + 2) // 3
    figure, grid = plt.subplots(rows, 3, figsize=(11, 2.3 * rows), squeeze=False)
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    for axes, (rollout, gate) in zip(grid.flat, keys, strict=False):
        mine = [p for p in points if (p.rollout, p.gate) == (rollout, gate)]
        for name in ("value", "bound", "limit"):
            xs = [p.at for p in mine if getattr(p, name) is not None]
            ys = [getattr(p, name) for p in mine if getattr(p, name) is not None]
            style = "--" if name == "limit" else "-"
            axes.plot(xs, ys, style, color=INK.get(name, INK["candidate"]), label=name, linewidth=1.2)
        axes.set_title(f"{rollout}: {gate} ({mine[-1].verdict})", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    grid.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return _svg(figure)


def plot_tiers(points: list[BytesPoint]) -> str:
    """Used bytes by node and tier over time, MiB."""
    figure, axes = plt.subplots(figsize=(9, 2.6))
    for key in dict.fromkeys((p.node, p.tier, p.simulated) for p in points):
        mine = [p for p in points if (p.node, p.tier, p.simulated) == key]
        label = f"{key[0]} {key[1]}" + (" (simulated)" if key[2] else "")
        axes.step([p.at for p in mine], [p.used / 2**20 for p in mine], where="post", label=label)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("MiB used")
    axes.grid(alpha=0.25)
    if points:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _svg(figure)


def plot_requests(points: list[RequestPoint], bucket_s: float = 10.0) -> str:
    """Output tokens per second of the whole workload, and seconds per token by arm."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 2.6))
    buckets: dict[int, int] = {}
    for p in points:
        buckets[int(p.at // bucket_s)] = buckets.get(int(p.at // bucket_s), 0) + p.tokens
    if buckets:
        xs = range(min(buckets), max(buckets) + 1)
        left.step([x * bucket_s for x in xs], [buckets.get(x, 0) / bucket_s for x in xs], where="post")
    left.set_title("tokens per second, all requests", fontsize=9)
    for arm in ("baseline", "candidate"):
        mine = [p for p in points if p.arm == arm and p.seconds_per_token is not None]
        xs, ys = [p.at for p in mine], [p.seconds_per_token for p in mine]
        right.plot(xs, ys, ".", ms=3, color=INK[arm], label=arm)
    right.set_title("seconds per output token", fontsize=9)
    right.set_ylim(bottom=0)
    if points:
        right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("seconds since the start")
        axes.grid(alpha=0.25)
    return _svg(figure)


def _claim_rows(results: tuple[Checked, ...]) -> str:
    rows = []
    for r in results:
        mark = "holds" if r.holds else "FAILS"
        rows.append(
            f'<tr class="{"ok" if r.holds else "bad"}"><td>{mark}</td>'
            f"<td>{html.escape(r.claim.sentence)}</td><td>{html.escape(r.facts)}</td></tr>"
        )
    return "\n".join(rows)


def write_report(path: Path, seen: Observations, results: tuple[Checked, ...], seconds: float) -> None:
    """Write the whole report to ``path``; no network is needed to read it."""
    facts = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in seen.facts)
    screens = "".join(
        f"<h3>{html.escape(title)}</h3><pre>{html.escape(text)}</pre>" for title, text in seen.screens
    )
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvtier demo</title>
{STYLE}</head><body>
<h1>kvtier demo</h1>
<p>{made}, {seconds:.0f} s on {html.escape(platform.platform())}. GPU tiers on a CPU device are simulated:
their bandwidth is a memory copy's.</p>
<h2>Claims</h2><table>{_claim_rows(results)}</table>
<h2>Stages over time</h2>{plot_stages(seen.stages)}
<h2>Gate values, bounds and limits</h2>{plot_gates(seen.gates)}
<h2>Bytes by tier</h2>{plot_tiers(seen.tiers)}
<h2>Service</h2>{plot_requests(seen.requests)}
<h2>Facts</h2><table>{facts}</table>
<h2>What a person saw</h2>{screens}
</body></html>
""")
