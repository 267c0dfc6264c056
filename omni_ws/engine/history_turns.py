"""Cuts a history into whole turns, so that an engine whose model reads less can leave out the oldest."""

from __future__ import annotations

from collections.abc import Sequence

from omni_ws.engine.base import Message


def whole_turns(history: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return the turns, oldest first; together they are the history.

    A turn begins with a user message and includes the answer, its tool calls, and their results, which cannot be left
    out one without the other.
    """
    turns: list[list[Message]] = []
    for message in history:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]
