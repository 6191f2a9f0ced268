"""The source binding of what is read against that of who reads: fourteen fields, one reason each.

Why it exists: a copy, an index or a snapshot of the same shape may come from another model, tenant or
history, and only this tells. It must not know blocks or tiers. Fields and order: specification A.5, reasons:
N.2.
"""

from __future__ import annotations

from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding

REASONS: tuple[tuple[str, Reason], ...] = (
    ("logical_cache_abi_sha256", Reason.ABI_MISMATCH),
    ("cache_layout_manifest_sha256", Reason.CODEC_OR_LAYOUT_MISMATCH),
    ("visibility_policy_manifest_sha256", Reason.VISIBILITY_POLICY_MISMATCH),
    ("model_artifact_sha256", Reason.MODEL_MISMATCH),
    ("checkpoint_generation", Reason.MODEL_MISMATCH),
    ("adapter_set_sha256", Reason.ADAPTER_MISMATCH),
    ("position_contract_sha256", Reason.POSITION_CONTRACT_MISMATCH),
    ("rope_config_sha256", Reason.ROPE_MISMATCH),
    ("tenant_namespace", Reason.TENANT_MISMATCH),
    ("namespace_generation", Reason.NAMESPACE_STALE),
    ("request_generation", Reason.REQUEST_STALE),
    ("cache_generation", Reason.STALE_CACHE_GENERATION),
    ("publication_generation", Reason.PUBLICATION_STALE),
    ("committed_frontier", Reason.FRONTIER_MISMATCH),
)


def check_binding(expected: SourceBinding, got: SourceBinding) -> None:
    """Raises the reason of the first field that differs; the fact `field` names it. Values are not told: they
    may be another tenant's."""
    if expected == got:
        return
    for name, reason in REASONS:
        if getattr(expected, name) != getattr(got, name):
            raise CoreError(reason, f"{name} of the source is another", {"field": name})
