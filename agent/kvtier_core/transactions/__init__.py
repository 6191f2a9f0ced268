"""Moves of blocks between tiers, and what must hold meanwhile: pins, single-flight, eviction, deletion."""

from kvtier_core.transactions.moves import Completion as Completion
from kvtier_core.transactions.moves import LiveView as LiveView
from kvtier_core.transactions.moves import Move as Move
from kvtier_core.transactions.moves import completion_reason as completion_reason
from kvtier_core.transactions.reasons import MoveKind as MoveKind
from kvtier_core.transactions.reasons import MoveReason as MoveReason
from kvtier_core.transactions.reasons import MoveRefused as MoveRefused
from kvtier_core.transactions.reasons import TxnState as TxnState
from kvtier_core.transactions.transfers import Transactions as Transactions
