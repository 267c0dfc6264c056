"""The trace that the work under way belongs to, where a client named one (W3C Trace Context)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Final

#: Header fields as the client sent them; whoever uses them checks them.
incoming_trace: ContextVar[Mapping[str, str] | None] = ContextVar("incoming_trace", default=None)

_FIELDS: Final = ("traceparent", "tracestate")


def take_trace(header: Callable[[str], str | None]) -> None:
    """Sessions that the running task opens belong to the trace of this head, or to none."""
    found = {name: value for name in _FIELDS if (value := header(name)) is not None}
    incoming_trace.set(found if "traceparent" in found else None)
