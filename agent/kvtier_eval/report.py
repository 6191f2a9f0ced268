"""A run's report: JSON for programs, and one HTML page for people.

Why it exists: every cell that was registered is shown, losers and cells without results too, under the words
that limit what it means. It must not compute: `summary` does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from html import escape
from typing import Any

from kvtier_eval import metrics, summary
from kvtier_eval.charts import Bar, Point, intervals, scatter
from kvtier_eval.plan import BASELINES
from kvtier_eval.summary import CellSummary, Report

LIMITS = (
    "Results are of this model alone. What does not transfer to large models: a head of few channels (a "
    "method that reads 16 of 64 reads a quarter of K, of 128 an eighth), few KV heads with small groups, few "
    "heads that retrieve, contexts of a few thousand rows, and a model that often fails with full attention. "
    "Bytes are counted, not timed."
)
QUICK = "A quick run: too few prompts for any verdict. It shows that things work, and nothing about quality."
_STYLE = (
    "body{font:14px sans-serif;margin:24px;max-width:1500px;color:#222}"
    "table{border-collapse:collapse;margin:8px 0}"
    "td,th{border:1px solid #ddd;padding:3px 7px;text-align:right}th{background:#f5f5f5}"
    "td:first-child,th:first-child{text-align:left}.note{background:#fff6d6;padding:8px 12px}"
    "code{background:#f2f2f2}"
)


def as_json(report: Report) -> str:
    """Numbers that are not defined are null."""
    body = {
        "plan": report.plan.digest,
        "registered": report.plan.model_dump(mode="json"),
        "complete": report.complete,
        "limits": LIMITS,
        "quick": QUICK if report.plan.quick else None,
        "cells": [_cell(one) for one in report.cells],
        "notRun": [one.model_dump(mode="json") for one in report.not_run],
    }
    return json.dumps(_finite(body), indent=1, allow_nan=False) + "\n"


def _cell(one: CellSummary) -> dict[str, Any]:
    body = dataclasses.asdict(one)
    body["cell"] = {"id": one.cell.id, **one.cell.model_dump(mode="json")}
    return {_camel(name): value for name, value in body.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 7) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def as_html(report: Report) -> str:
    """One page without anything outside it."""
    plan = report.plan
    groups: dict[str, list[CellSummary]] = {}
    for one in report.cells:
        groups.setdefault(f"{one.cell.task} at {one.cell.length} tokens", []).append(one)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>kvtier-eval</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>Selectors on {escape(plan.model)}</h1>",
        f"<p class='note'>{escape(QUICK)}</p>" if plan.quick else "",
        "" if report.complete else "<p class='note'>This run was cut short: not every cell is complete.</p>",
        f"<p class='note'>{escape(LIMITS)}</p>",
        f"<p>Plan <code>{plan.digest}</code>, written before the run. {escape(plan.stop_rule)}</p>",
        f"<p>Model <code>{plan.model_digest}</code>; text <code>sha256:{plan.corpus_digest}</code> of Python "
        f"{escape(plan.python)}.</p>",
        f"<p>Settings: <code>{escape(plan.settings.model_dump_json())}</code></p>",
    ]
    for title, cells in groups.items():
        parts += [f"<h2>{escape(title)}</h2>", _plots(cells, title), _table(cells)]
    parts += ["<h2>Cells without results, and prompts that were refused</h2>", _missing(report), _words()]
    return "".join(parts) + "</html>\n"


def _label(one: CellSummary) -> str:
    return f"{one.cell.selector} {one.cell.budget}" if one.cell.budget else one.cell.selector


def _plots(cells: list[CellSummary], title: str) -> str:
    names = {kind.value for kind in BASELINES}
    bars = [
        Bar(
            _label(one),
            one.conditional.rate,
            one.conditional.low,
            one.conditional.high,
            one.cell.selector in names,
        )
        for one in cells
        if one.conditional is not None
    ]
    points = [
        Point(
            _label(one),
            one.means["rowBytes"] + one.means["indexBytes"],
            max(one.kl_mean, 1e-7),
            one.cell.selector in names,
        )
        for one in cells
    ]
    made = ""
    if bars:
        made += "<p>Answered, of prompts that full attention answers (Wilson interval)</p>"
        made += intervals(bars, f"{title}: answered")
    made += "<p>KL from full attention against bytes read of rows and index, per prompt</p>"
    return made + scatter(points, f"{title}: KL", "bytes", "KL, nats")


_HEAD = (
    "selector", "prompts", "full", "answered", "if full answers", "interval", "lost / won", "p (Holm)",
    "verdict", "KL", "KL p95", "KL max", "top-1", "matched", "excess", "excess p10", "excess min", "mass",
    "recall@8", "recall@32", "recall@128", "support", "needle", "needle min", "out err", "out err p90",
    "Wo err", "|v| mass", "certified", "stability", "row MB", "index MB", "fetched MB", "loss +",
    "long range +", "re-prefill",
)  # fmt: skip


def _table(cells: list[CellSummary]) -> str:
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in _row(cell)) + "</tr>" for cell in cells
    )
    return "<table><tr>" + "".join(f"<th>{escape(one)}</th>" for one in _HEAD) + f"</tr>{rows}</table>"


def _row(one: CellSummary) -> list[str]:
    rate, given, full = one.rate, one.conditional, one.full
    get, worst = one.means.get, one.worst.get
    return [
        _label(one),
        str(one.prompts),
        f"{full.hits}/{full.tries}" if full else "",
        f"{rate.hits}/{rate.tries}" if rate else "",
        f"{given.hits}/{given.tries}" if given else "",
        f"{given.low:.2f} to {given.high:.2f}" if given else "",
        f"{one.paired.only_second} / {one.paired.only_first}" if one.paired else "",
        _number(one.adjusted_p),
        one.verdict.value,
        *(_number(value) for value in (one.kl_mean, one.kl_p95, one.kl_max, one.top1, one.matched)),
        *(_number(value) for value in (get("excess"), one.excess_p10, one.excess_min, get("mass"))),
        *(_number(get(name)) for name in ("recall8", "recall32", "recall128", "support", "needle")),
        _number(worst("needleMin")),
        *(_number(value) for value in (get("outError"), worst("outErrorP90"), get("woError"))),
        *(_number(get(name)) for name in ("valueMass", "certified", "stability")),
        *(f"{one.means[name] / 1e6:.1f}" for name in ("rowBytes", "indexBytes", "fetchedBytes")),
        *(_number(value) for value in (one.loss_growth, one.long_range_growth, one.reprefill_matched)),
    ]


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3g}"


def _missing(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.cell)}</td><td>{one.why}</td><td>{escape(one.detail)}</td></tr>"
        for one in report.not_run
    )
    return (
        f"<table><tr><th>cell</th><th>why</th><th>detail</th></tr>{rows}</table>" if rows else "<p>None.</p>"
    )


def _words() -> str:
    texts = (metrics.__doc__ or "", summary.__doc__ or "")
    return "<h2>Definitions</h2>" + "".join(f"<pre>{escape(text.strip())}</pre>" for text in texts)
