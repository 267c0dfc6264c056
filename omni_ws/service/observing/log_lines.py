"""Structured log lines: a message of one word, and named facts."""

from __future__ import annotations

import logging

from omni_ws.errors import EngineError, EngineOverloaded, OmniError, ShuttingDown

Fact = str | int | float | bool | None


def write_line(logger: logging.Logger, level: int, message: str, **facts: Fact) -> None:
    """Log a message with facts, for the formatter to render. Facts that are None are left out."""
    if logger.isEnabledFor(level):
        known = {name: fact for name, fact in facts.items() if fact is not None}
        logger.log(level, message, extra={"facts": known})


def level_of(error: OmniError) -> int:
    """The log level of an error: ERROR for faults of the server, WARNING for lack of capacity, else INFO."""
    if isinstance(error, EngineError):
        return logging.ERROR
    if isinstance(error, EngineOverloaded | ShuttingDown):
        return logging.WARNING
    return logging.INFO
