"""Turns of a history: whole ones, the oldest of which an engine may leave out; and what was said last, unanswered."""

from __future__ import annotations

from collections.abc import Sequence

from omni_ws.core.history import Message, Speech


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


def earlier_speech(history: Sequence[Message]) -> list[Speech]:
    """Return the speech in it whose words nobody knows, the newest first."""
    return [part.speech for message in reversed(history) for part in reversed(message.parts) if part.speech is not None]


def unanswered(history: Sequence[Message]) -> str:
    """Return what the user said last where nothing was answered: who goes on after that continues it."""
    texts: list[str] = []
    for message in reversed(history):
        if message.role != "user":
            break
        texts.append(message.text)
    return " ".join(filter(None, reversed(texts)))
