"""Health: the standard health checking service (grpc.health.v1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse
SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # without types
    """Reports one status for all of ``services`` and for the server as a whole, at first NOT_SERVING.

    The servicer of ``grpc_health`` itself is not used: there, a change of the status waits until every watching client
    has read it.
    """

    def __init__(self, services: Collection[str]) -> None:
        self._services = {"", *services}
        self._status = _Status.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Change the status, and wake all watchers."""
        self._status = _Status.SERVING if serving else _Status.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # named by the protocol
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _Status(status=self._status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._services else _Status.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                yield _Status(status=status)
            else:
                await changed.wait()
