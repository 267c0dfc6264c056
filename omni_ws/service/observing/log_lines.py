"""Lines of the log that say what became of something: a word, and named facts."""

from __future__ import annotations

import logging

from omni_ws.errors import EngineError, EngineOverloaded, OmniError, ShuttingDown

Fact = str | int | float | bool | None


def write_line(logger: logging.Logger, level: int, message: str, **facts: Fact) -> None:
    """Facts that are None are left out. How they are written is the business of the log's format."""
    if logger.isEnabledFor(level):
        known = {name: fact for name, fact in facts.items() if fact is not None}
        logger.log(level, message, extra={"facts": known})


def level_of(error: OmniError) -> int:
    """What is the server's own fault is an error; what it had no room for a warning; what clients do wrong is news."""
    if isinstance(error, EngineError):
        return logging.ERROR
    if isinstance(error, EngineOverloaded | ShuttingDown):
        return logging.WARNING
    return logging.INFO
