"""Health: the standard service that tells whether calls are taken (grpc.health.v1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse
SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """All of ``services``, and the whole server, are in one state. At first they do not serve.

    The library's own makes whoever changes the state wait until every client that watches it has read of it.
    """

    def __init__(self, services: Collection[str]) -> None:
        self._services = {"", *services}
        self._status = _Status.NOT_SERVING
        self._changed = asyncio.Event()

    def tell(self, *, serving: bool) -> None:
        self._status = _Status.SERVING if serving else _Status.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # the names of the calls are those of the definition
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return _Status(status=self._status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._services else _Status.SERVICE_UNKNOWN
            if status != told:
                told = status
                yield _Status(status=status)
            else:
                await changed.wait()
