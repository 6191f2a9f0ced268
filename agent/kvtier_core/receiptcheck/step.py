"""The receipt of one attention step against what the step read, before its answer leaves.

Why it exists: an answer over some rows that calls itself exact is the one error nobody downstream can see. It
must not know how rows were read.
"""

from __future__ import annotations

from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import full_support_digest
from kvtier_core.receipts import ExactnessClass, PublishArm, StepReceipt


def check_step(
    receipt: StepReceipt, *, visible: int, baseline_digest: str, histories: int, support: str | None = None
) -> None:
    """visible: rows that the query may read. histories: producers of the session's rows. support: digest of
    the visible rows, None when they are all rows [0, visible).

    SUPPORT_GAP: called exact, yet not over all visible rows. UNDECLARED_APPROXIMATION: called exact over a
    history that is not, or approximate in the baseline's name. MANIFEST_MISMATCH: an exact arm under another
    manifest than the baseline's.
    """
    approximate = receipt.exactness is ExactnessClass.APPROXIMATE
    if not approximate and (
        receipt.rows_attended != visible
        or receipt.support_digest != (support or full_support_digest(visible))
    ):
        raise CoreError(Reason.SUPPORT_GAP, f"{receipt.rows_attended} of {visible} rows in an exact answer")
    if receipt.exactness is ExactnessClass.EXACT and histories > 1:
        raise CoreError(Reason.UNDECLARED_APPROXIMATION, "exact over rows of an approximate history")
    if approximate and receipt.arm is not PublishArm.CANDIDATE:
        raise CoreError(Reason.UNDECLARED_APPROXIMATION, "an approximate answer of the exact arm")
    if receipt.arm is PublishArm.EXACT and receipt.manifest_digest != baseline_digest:
        raise CoreError(Reason.MANIFEST_MISMATCH, "the exact arm runs the baseline and no other manifest")
