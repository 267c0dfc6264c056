"""The trace that a client named for its sessions (W3C Trace Context)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Final

#: Header fields of the running task, unchecked, as the client sent them.
incoming_trace: ContextVar[Mapping[str, str] | None] = ContextVar("incoming_trace", default=None)

_FIELDS: Final = ("traceparent", "tracestate")


def take_trace(header: Callable[[str], str | None]) -> None:
    """Let sessions that the running task opens belong to the trace that these headers name, or to none.

    ``header`` returns the value of a header field, or None.
    """
    found = {name: value for name in _FIELDS if (value := header(name)) is not None}
    incoming_trace.set(found if "traceparent" in found else None)
