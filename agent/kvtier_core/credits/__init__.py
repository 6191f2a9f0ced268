"""Capacity as credits: nothing moves or stays that was not reserved, and what was reserved comes back
once."""

from kvtier_core.credits.ledger import Ledger, ResourceUse
from kvtier_core.credits.payers import BlockSlots, LinkPayer
from kvtier_core.credits.resources import (
    NO_TENANT,
    PINNED,
    QUEUE,
    STAGING,
    CreditRefused,
    Grant,
    Limit,
    LinkStage,
    Release,
    Resource,
    ResourceKind,
    Unit,
    link,
    slots,
)
from kvtier_core.credits.slotledger import CreditLedger, Pressure

__all__ = [
    "NO_TENANT",
    "PINNED",
    "QUEUE",
    "STAGING",
    "BlockSlots",
    "CreditLedger",
    "CreditRefused",
    "Grant",
    "Ledger",
    "Limit",
    "LinkPayer",
    "LinkStage",
    "Pressure",
    "Release",
    "Resource",
    "ResourceKind",
    "ResourceUse",
    "Unit",
    "link",
    "slots",
]
