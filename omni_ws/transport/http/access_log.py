"""AccessLog: one line and one count for each HTTP request."""

from __future__ import annotations

import logging

from omni_ws.metrics import HTTP_METHODS, Metrics
from omni_ws.service.observing.log_lines import level_of, write_line
from omni_ws.transport.http.served_request import ServedRequest

logger = logging.getLogger("omni_ws.http")

#: Asked for all the time by machines that watch the server: worth a line only to whoever looks for it.
_WATCHED = frozenset({"/health", "/metrics"})


class AccessLog:
    """Is called with each request that is over."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, answered: ServedRequest) -> None:
        # Clients invent methods, too.
        method = answered.method if answered.method in HTTP_METHODS else "other"
        route = answered.route or "unmatched"
        self._metrics.http_requests.labels(method, route, answered.status).inc()
        if answered.status != 101:
            self._metrics.http_request_seconds.labels(route).observe(answered.seconds)
        level = logging.INFO if answered.error is None else level_of(answered.error)
        if answered.route in _WATCHED and answered.status == 200:
            level = logging.DEBUG
        write_line(
            logger,
            level,
            "http request",
            method=method,
            route=route,
            status=answered.status,
            code=None if answered.error is None else answered.error.code,
            client=answered.client or None,
            session_id=answered.session_id or None,
            received_bytes=answered.received_bytes,
            sent_bytes=answered.sent_bytes,
            seconds=round(answered.seconds, 4),
        )
