"""What is known of the client of the sessions that a task opens: its trace (W3C Trace Context), and where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Final

from omni_ws.config.startup import is_loopback

#: Header fields of the running task, unchecked, as the client sent them.
incoming_trace: ContextVar[Mapping[str, str] | None] = ContextVar("incoming_trace", default=None)

#: Whether the client of the running task is on this machine.
near_client: ContextVar[bool] = ContextVar("near_client", default=False)

#: Header fields of proxies, behind which a client may be anywhere.
_FORWARDING: Final = ("forwarded", "x-forwarded-for")
_FIELDS: Final = ("traceparent", "tracestate")


def take_trace(header: Callable[[str], str | None]) -> None:
    """Let sessions that the running task opens belong to the trace that these headers name, or to none.

    ``header`` returns the value of a header field, or None.
    """
    found = {name: value for name in _FIELDS if (value := header(name)) is not None}
    incoming_trace.set(found if "traceparent" in found else None)


def take_place(client: str, header: Callable[[str], str | None]) -> None:
    """Let sessions that the running task opens know whether the client with this address is on this machine."""
    near_client.set(is_loopback(client) and all(header(name) is None for name in _FORWARDING))
