"""The access log: one record, one line and one count for each HTTP request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from omni_ws.errors import OmniError
from omni_ws.metrics import HTTP_METHODS, Metrics
from omni_ws.service.observing.log_lines import level_of, write_line

logger = logging.getLogger("omni_ws.http")

#: Routes that monitoring requests all the time; successes are logged at debug level.
_MONITORED = frozenset({"/health", "/metrics"})


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """What is known of one request once it is over.

    Nothing in it is text of the client's but ``method`` and ``client``. ``route`` is the template of the path, "" where
    none matched. ``status`` is 0 where the client disconnected before the response. ``error`` may also be one that
    occurred after the head of the response. Bytes are those of the bodies.
    """

    method: str
    route: str
    status: int
    seconds: float = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    client: str = ""
    error: OmniError | None = None
    session_id: str = ""


#: Called with the record of every request, refused and upgraded ones included.
LogAccess = Callable[[AccessRecord], None]


def discard_record(record: AccessRecord) -> None:
    """A LogAccess that keeps nothing."""


class AccessLog:
    """Logs and counts requests: a LogAccess."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, record: AccessRecord) -> None:
        # A label of clients' own invention would make the number of time series unbounded.
        method = record.method if record.method in HTTP_METHODS else "other"
        route = record.route or "unmatched"
        self._metrics.http_requests.labels(method, route, record.status).inc()
        if record.status != 101:
            self._metrics.http_request_seconds.labels(route).observe(record.seconds)
        level = logging.INFO if record.error is None else level_of(record.error)
        if record.route in _MONITORED and record.status == 200:
            level = logging.DEBUG
        write_line(
            logger,
            level,
            "http request",
            method=method,
            route=route,
            status=record.status,
            code=None if record.error is None else record.error.code,
            client=record.client or None,
            session_id=record.session_id or None,
            received_bytes=record.received_bytes,
            sent_bytes=record.sent_bytes,
            seconds=round(record.seconds, 4),
        )
