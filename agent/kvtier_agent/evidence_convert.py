"""Counts of a window to the wire's form; adds and judges nothing."""

from __future__ import annotations

from kvtier.v1 import control_pb2, evidence_pb2
from kvtier_evidence.delta import Delta
from kvtier_evidence.grid import Histogram
from kvtier_evidence.window import WindowCounts


def delta_message(delta: Delta) -> control_pb2.ReadEvidenceResponse:
    return control_pb2.ReadEvidenceResponse(
        epoch=delta.epoch,
        from_seq=delta.from_seq,
        to_seq=delta.to_seq,
        full=delta.full,
        increments=counts_message(delta.increments),
        total_units=delta.total_units,
        settled_cohort=delta.settled_cohort,
        assigned_units=delta.assigned_units,
    )


def counts_message(counts: WindowCounts) -> evidence_pb2.WindowCounts:
    message = evidence_pb2.WindowCounts(
        zero_tolerance=counts.zero_tolerance,
        sessions_candidate=counts.sessions_candidate,
        sessions_total=counts.sessions_total,
        assignment_disagreements=counts.assignment_disagreements,
    )
    for (metric, arm), values in sorted(counts.metrics.items()):
        message.metrics.append(
            evidence_pb2.MetricCounts(
                metric=metric,
                arm=arm,
                histogram=histogram_message(values.histogram),
                above_up=values.above_up,
                above_down=values.above_down,
                warmup=histogram_message(values.warmup),
                warmup_above_down=values.warmup_above_down,
            )
        )
    for (gate, probe_set, prompt), pair in sorted(counts.probes.items()):
        missing = pair.lo != pair.hi
        message.probes.append(
            evidence_pb2.ProbePair(
                gate=gate,
                probe_set_digest=probe_set,
                prompt_digest=prompt,
                difference=0.0 if missing else pair.lo,
                missing=missing,
            )
        )
    for gate, sums in counts.blocks.items():
        message.blocks[gate].blocks = sums.blocks
        message.blocks[gate].sums.update(sums.sums)
    return message


def histogram_message(histogram: Histogram) -> evidence_pb2.Histogram:
    return evidence_pb2.Histogram(
        bins=histogram.bins,
        zero=histogram.zero,
        missing=histogram.missing,
        n=histogram.n,
        scale_shift=histogram.shift,
    )
