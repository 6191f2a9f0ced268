"""What the operator would answer to a KVRollout's spec that the schema takes, in its words: `Invalid`.

Its own parser is asked, which is pure; lint must not have an opinion of its own. It must not know the other
objects of the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kubectl_kvtier.lint.findings import Finding, Severity
from kvtier_operator.rollout.spec import read_spec
from kvtier_operator.rollout.vocabulary import Blocker


def cannot_run(spec: dict[str, Any], where: str) -> Iterator[Finding]:
    """spec: of a KVRollout, with its defaults. An error where it would be `Invalid`, a note on what would
    have no effect. Probe sets lie in ConfigMaps, which are not looked at."""
    parsed = read_spec(spec, {}, None)
    if parsed.spec is None:
        yield Finding(Severity.ERROR, where, "spec", f"{parsed.blocker}: {parsed.error}")
        return
    if parsed.spec.unwaited:
        yield Finding(Severity.ERROR, where, "spec", f"{Blocker.SPEC_INVALID}: {parsed.spec.unwaited}")
    for gate, stage in parsed.spec.idle_limits:
        field = f"spec.gates[{gate}].perStage"
        said = f"{field}: {stage} is no stage of this rollout, so its limit has no effect"
        yield Finding(Severity.NOTE, where, field, said)
