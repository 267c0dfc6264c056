"""What a conversation is charged for its history, besides speech."""

from __future__ import annotations

from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import beyond_ordinary


def weighed(ledger: Ledger) -> int:
    """What texts, marks and ids take now, beyond what any session has: computed anew, not what is charged."""
    return beyond_ordinary(ledger.history.memory + sum(entry.memory for entry in ledger._entries.values()))
