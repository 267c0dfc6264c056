"""What the rules say."""

from __future__ import annotations

from omni_ws.engine.llm.computed import UNKNOWN


def is_unknown(said: str) -> bool:
    """Whether it is all of an answer to what no rule fits."""
    return any(said in wordings for wordings in UNKNOWN.values())
