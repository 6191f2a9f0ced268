"""Writes what is generated from the metrics that operator and agent register: a Grafana dashboard, alert
rules for Prometheus, and the reference page. Every expression is checked against the metrics that exist.

    monitoring.py OUT       writes OUT/charts/kvtier/monitoring/* and OUT/docs/reference/metrics.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from kvtier_agent.blockmetrics import BlockMetrics, StoreCollector
from kvtier_agent.indexworker import IndexCollector
from kvtier_agent.telemetry import Metrics as AgentMetrics
from kvtier_agent.tiermetrics import HolderCollector, WriteBudgetCollector
from kvtier_operator.metrics import Metrics as OperatorMetrics


@dataclass(frozen=True)
class Metric:
    """One family as it is registered. `exposed`: the name of its samples."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def exposed(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        """Grafana's name of it."""
        return "s" if "seconds" in self.name else "bytes" if "bytes" in self.name else "short"


def families() -> dict[str, list[Metric]]:
    """By process, in the order of names."""
    operator, agent = CollectorRegistry(), CollectorRegistry()
    OperatorMetrics(operator)
    AgentMetrics(agent)
    BlockMetrics(agent)
    StoreCollector(agent, lambda: (), lambda: 0.0)
    WriteBudgetCollector(agent, SimpleNamespace(all=lambda: ()))  # type: ignore[arg-type]
    HolderCollector(agent, lambda: ())
    nothing = SimpleNamespace(states=lambda: (), audits=SimpleNamespace(read=dict))
    IndexCollector(agent, nothing)  # type: ignore[arg-type]
    return {"operator": _read(operator), "agent": _read(agent)}


def _read(registry: CollectorRegistry) -> list[Metric]:
    known = [one for one in registry._collector_to_names if hasattr(one, "_labelnames")]
    labels = {one._name: tuple(one._labelnames) for one in known}
    found = {}
    for family in registry.collect():
        names = labels.get(family.name) or tuple(getattr(family, "_labelnames", ()))
        found[family.name] = Metric(family.name, family.type, names, family.documentation)
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    wait: str
    severity: str
    says: str

    @property
    def runbook(self) -> str:
        """In the repository: where it is served is its owner's to say."""
        return f"docs/runbooks/alerts.md#{self.name.lower()}"


ALERTS = (
    Alert(
        "KvtierNoLeader",
        "max(kvtier_operator_leader) < 1 or absent(kvtier_operator_leader)",
        "2m",
        "critical",
        "No operator leads: candidates return to the baseline when their leases end; see "
        "docs/runbooks/operator.md.",
    ),
    Alert(
        "KvtierTwoLeaders",
        "sum(kvtier_operator_leader) > 1",
        "1m",
        "warning",
        "Two operators say that they lead. Fences keep them apart; look why the Lease was lost.",
    ),
    Alert(
        "KvtierRollback",
        "sum by (cause) (increase(kvtier_operator_rollbacks_total[10m])) > 0",
        "0m",
        "warning",
        "A rollout returned to the exact baseline; the cause has a page in docs/runbooks.",
    ),
    Alert(
        "KvtierReconcileErrors",
        "sum by (kind) (rate(kvtier_operator_reconcile_duration_seconds_count"
        '{result=~"error|deadline"}[5m])) > 0',
        "10m",
        "warning",
        "Reconciles of a kind keep failing; log and Events say why, docs/runbooks/operator.md what to do.",
    ),
    Alert(
        "KvtierQueueWaits",
        "histogram_quantile(0.99, sum by (kind, le) "
        "(rate(kvtier_operator_queue_wait_seconds_bucket[5m]))) > 5",
        "10m",
        "warning",
        "Objects wait more than 5 s for their turn, so evidence is looked at late.",
    ),
    Alert(
        "KvtierLooksLate",
        "histogram_quantile(0.99, sum by (le) "
        "(rate(kvtier_operator_look_lateness_intervals_bucket[5m]))) > 2",
        "10m",
        "warning",
        "Evidence of rollouts is looked at over two intervals late, so harm is found that much later.",
    ),
    Alert(
        "KvtierQueueFull",
        "increase(kvtier_operator_queue_refused_total[5m]) > 0",
        "0m",
        "warning",
        "A queue was full; everything is listed again.",
    ),
    Alert(
        "KvtierApiErrors",
        'sum(rate(kvtier_operator_api_request_duration_seconds_count{code!~"[234].."}[5m])) > 0.1',
        "5m",
        "warning",
        "The API server fails the operator's requests; renewals of leases read from it first.",
    ),
    Alert(
        "KvtierAgentsUnreachable",
        "sum(rate(kvtier_operator_agent_rpc_duration_seconds_count"
        '{code=~"UNAVAILABLE|DEADLINE_EXCEEDED"}[5m])) > 0.1',
        "2m",
        "critical",
        "Agents do not answer: leases end, steps hold, and later rollouts return as AgentLost.",
    ),
    Alert(
        "KvtierAgentEventLoopLate",
        "kvtier_agent_event_loop_lag_seconds > 1",
        "2m",
        "warning",
        "An agent's loop is over a second late: it is short of CPU, and revocations wait.",
    ),
    Alert(
        "KvtierManifestDiffers",
        "kvtier_agent_manifest_differences > 0",
        "0m",
        "critical",
        "An agent runs another manifest than was applied or granted; its KVNode says of which cache.",
    ),
    Alert(
        "KvtierAgentCannotRegister",
        "rate(kvtier_agent_registration_failures_total[5m]) > 0",
        "5m",
        "warning",
        "An agent cannot write its KVNode or Lease and will be taken for dead.",
    ),
    Alert(
        "KvtierPlansFail",
        "sum by (plan, code) (rate(kvtier_agent_plan_failures_total[5m])) > 0.1",
        "5m",
        "warning",
        "A plan of attention keeps failing before another one answers.",
    ),
    Alert(
        "KvtierTransfersStall",
        "sum(rate(kvtier_agent_transfer_stall_seconds_total[5m])) > "
        "sum(rate(kvtier_agent_transfer_hidden_seconds_total[5m]))",
        "15m",
        "warning",
        "More transfer time is exposed than hidden: the tiers are too slow for these contexts.",
    ),
    Alert(
        "KvtierFlashWritesPutOff",
        "rate(kvtier_agent_tier_write_budget_refusals_total[15m]) > 0",
        "30m",
        "warning",
        "Writes to a storage tier are put off to spare it: its write budget is used up.",
    ),
)


def check(alerts: tuple[Alert, ...], known: dict[str, list[Metric]]) -> None:
    """Raises ValueError for a metric or a label that nothing registers."""
    labels: dict[str, set[str]] = {}
    for metric in (one for many in known.values() for one in many):
        suffixes = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        for suffix in suffixes:
            extra = {"le"} if suffix == "_bucket" else set()
            labels[metric.exposed + suffix] = {*metric.labels, *extra}
    for alert in alerts:
        for name, selector in re.findall(r"(kvtier_\w+)(?:\{([^}]*)\})?", alert.expression):
            if name not in labels:
                raise ValueError(f"{alert.name}: nothing registers {name}")
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            used |= {x for by in re.findall(r"by \(([^)]*)\)", alert.expression) for x in by.split(", ")}
            if not used <= labels[name]:
                raise ValueError(f"{alert.name}: {name} has no label {sorted(used - labels[name])}")


def alert_rules() -> dict[str, Any]:
    rules = [
        {
            "alert": one.name,
            "expr": one.expression,
            "for": one.wait,
            "labels": {"severity": one.severity},
            "annotations": {"summary": one.says, "runbook": one.runbook},
        }
        for one in ALERTS
    ]
    return {"groups": [{"name": "kvtier", "rules": rules}]}


def queries(metric: Metric) -> list[tuple[str, str]]:
    """Expression and legend of a panel."""
    by = ", ".join(metric.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    if metric.kind == "histogram":
        over = f"sum by ({', '.join((*metric.labels, 'le'))}) (rate({metric.name}_bucket[$__rate_interval]))"
        return [(f"histogram_quantile({q}, {over})", f"p{q * 100:g} {legend}".strip()) for q in (0.5, 0.99)]
    inner = metric.exposed if metric.kind == "gauge" else f"rate({metric.exposed}[$__rate_interval])"
    return [(f"sum by ({by}) ({inner})" if by else f"sum({inner})", legend or metric.name)]


def panel(metric: Metric, number: int, place: int, top: int) -> dict[str, Any]:
    per_second = metric.kind == "counter" and metric.unit != "s"
    unit = {"bytes": "Bps", "short": "cps"}[metric.unit] if per_second else metric.unit
    return {
        "id": number,
        "type": "timeseries",
        "title": metric.name.removeprefix("kvtier_"),
        "description": metric.text,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "gridPos": {"h": 7, "w": 8, "x": 8 * (place % 3), "y": top + 7 * (place // 3)},
        "targets": [
            {"expr": expression, "legendFormat": legend, "refId": chr(65 + i)}
            for i, (expression, legend) in enumerate(queries(metric))
        ],
    }


def dashboard(known: dict[str, list[Metric]]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top, number = 0, 1
    for process, metrics in known.items():
        panels.append(
            {
                "id": number,
                "type": "row",
                "title": process,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
                "panels": [],
            }
        )
        top, number = top + 1, number + 1
        for place, metric in enumerate(metrics):
            panels.append(panel(metric, number, place, top))
            number += 1
        top += 7 * (-(-len(metrics) // 3))
    return {
        "uid": "kvtier",
        "title": "kvtier",
        "tags": ["kvtier"],
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}]
        },
        "panels": panels,
    }


def reference(known: dict[str, list[Metric]]) -> Iterator[str]:
    yield "# Metrics\n"
    yield "Generated by `make generate` from what operator and agent register; as is the dashboard in"
    yield "`charts/kvtier/monitoring/dashboard.json` and the alert rules beside it. Labels name no objects.\n"
    for process, metrics in known.items():
        yield f"## {process}\n"
        yield "| Metric | Type | Labels | Meaning |"
        yield "|---|---|---|---|"
        for one in metrics:
            names = ", ".join(f"`{label}`" for label in one.labels) or "-"
            yield f"| `{one.exposed}` | {one.kind} | {names} | {one.text.rstrip('.')} |"
        yield ""
    yield "## Alerts\n"
    yield "| Alert | Fires when, for | Meaning |"
    yield "|---|---|---|"
    for alert in ALERTS:
        expression = alert.expression.replace("|", "\\|")
        link = f"[{alert.name}](../runbooks/alerts.md#{alert.name.lower()})"
        yield f"| {link} ({alert.severity}) | `{expression}`, {alert.wait} | {alert.says} |"
    yield ""
    yield "Which cause a rollout returned for is in its status and Events: [runbooks](../runbooks/README.md)."


def main(out: Path) -> None:
    known = families()
    check(ALERTS, known)
    monitoring, page = out / "charts/kvtier/monitoring", out / "docs/reference/metrics.md"
    monitoring.mkdir(parents=True, exist_ok=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    (monitoring / "dashboard.json").write_text(json.dumps(dashboard(known), indent=1) + "\n")
    text = yaml.safe_dump(alert_rules(), sort_keys=False, width=110)
    (monitoring / "alerts.yaml").write_text(text)
    page.write_text("\n".join(reference(known)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
