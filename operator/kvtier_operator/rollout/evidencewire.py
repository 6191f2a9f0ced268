"""Counts from the wire's form to the evidence package's; malformed numbers raise ValueError."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from kvtier.v1 import control_pb2 as control
from kvtier.v1 import evidence_pb2 as evidence
from kvtier_evidence.delta import Delta
from kvtier_evidence.design import BlockSums
from kvtier_evidence.gates import Pair
from kvtier_evidence.grid import Histogram
from kvtier_evidence.metrics import METRICS, Arm
from kvtier_evidence.window import MetricCounts, WindowCounts, WindowKey

_KEYS = {(name, str(arm)): (sys.intern(name), sys.intern(str(arm))) for name in METRICS for arm in Arm}
"""One object of each: every agent of every window tells of the same few."""


def delta_of(message: control.ReadEvidenceResponse) -> Delta:
    return Delta(
        epoch=message.epoch,
        from_seq=message.from_seq,
        to_seq=message.to_seq,
        full=message.full,
        increments=counts_of(message.increments),
        total_units=message.total_units,
        settled_cohort=message.settled_cohort,
        assigned_units=message.assigned_units,
    )


def counts_of(message: evidence.WindowCounts) -> WindowCounts:
    metrics: dict[tuple[str, str], MetricCounts] = {}
    for row in message.metrics:
        key = row.metric, row.arm
        key = _KEYS.get(key, key)
        if key in metrics:
            raise ValueError(f"metric {row.metric} of arm {row.arm} twice in one reply")
        metrics[key] = MetricCounts(
            histogram=histogram_of(row.histogram),
            above_up=_by_gate(row.above_up),
            above_down=_by_gate(row.above_down),
            warmup=histogram_of(row.warmup),
            warmup_above_down=_by_gate(row.warmup_above_down),
        )
    probes = {
        (row.gate, row.probe_set_digest, row.prompt_digest): Pair.of(None if row.missing else row.difference)
        for row in message.probes
    }
    return WindowCounts(
        metrics=metrics,
        zero_tolerance=_by_gate(message.zero_tolerance),
        sessions_candidate=message.sessions_candidate,
        sessions_total=message.sessions_total,
        assignment_disagreements=message.assignment_disagreements,
        probes=probes,
        blocks={
            sys.intern(gate): BlockSums(row.blocks, {sys.intern(name): v for name, v in row.sums.items()})
            for gate, row in message.blocks.items()
        },
    )


def _by_gate(counts: Mapping[str, int]) -> dict[str, int]:
    return {sys.intern(name): count for name, count in counts.items()}


def histogram_of(message: evidence.Histogram) -> Histogram:
    return Histogram(
        bins=dict(message.bins),
        zero=message.zero,
        missing=message.missing,
        n=message.n,
        shift=message.scale_shift,
    )


def key_message(key: WindowKey) -> evidence.WindowKey:
    return evidence.WindowKey(
        rollout_uid=key.rollout_uid,
        attempt=key.attempt,
        stage=key.stage,
        step=key.step,
        candidate_digest=key.candidate_digest,
        baseline_digest=key.baseline_digest,
        gates_digest=key.gates_digest,
        opening_fence=key.opening_fence,
    )
