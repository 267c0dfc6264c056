"""One HTTP request, from its head to the end of its answer, and the account that is given of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from omni_ws.errors import OmniError, OriginNotAllowed
from omni_ws.service.failure import unexpected
from omni_ws.service.observing.trace_context import take_trace
from omni_ws.transport.http import cors
from omni_ws.transport.http.application import Application
from omni_ws.transport.http.body import PeerGone
from omni_ws.transport.http.error_response import sole_cause
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What became of a request; bytes are those of bodies.

    ``route`` is the template of its path, "" where there is none; ``status`` is 0 where the client left before any.
    ``error`` also tells what went wrong after the answer began. ``session_id`` is that of the session it was for.
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


#: Hears of every request once it is over. What a client wrote is not in it, but for what the server knows the name of.
Account = Callable[[ServedRequest], None]


def no_account(answered: ServedRequest) -> None:
    pass


def refused(request: HttpRequest | None, status: int, *, client: str, error: OmniError | None = None) -> ServedRequest:
    """Of what never became an exchange."""
    method = "" if request is None else request.method
    return ServedRequest(method, "", status, client=client, error=error)


async def answer_request(
    application: Application, exchange: HttpExchange, *, origin_allowed: bool, account: Account
) -> None:
    """Raises PeerGone, and what an answer could not be sent for."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    error: OmniError | None = None
    take_trace(exchange.request.headers.get)
    try:
        error = await _answer(application, exchange, origin_allowed=origin_allowed)
    finally:
        exchange.over()
        request = exchange.request
        account(
            ServedRequest(
                request.method,
                exchange.route,
                exchange.status,
                seconds=loop.time() - begun,
                received_bytes=exchange.received_bytes,
                sent_bytes=exchange.sent_bytes,
                client=request.client,
                error=error or exchange.error,
                session_id=exchange.session_id,
            )
        )


async def _answer(application: Application, exchange: HttpExchange, *, origin_allowed: bool) -> OmniError | None:
    request = exchange.request
    try:
        if not origin_allowed and (request.method not in cors.SAFE_METHODS or cors.is_preflight(request)):
            raise OriginNotAllowed("pages of this origin may not use this server")
        await application.handle(exchange)
        if not exchange.head_sent:
            raise RuntimeError(f"the handler of {_where(exchange)} returned without an answer")
        await exchange.end()
    except Exception as raised:
        cause = sole_cause(raised)
        if isinstance(cause, PeerGone):
            raise cause from None
        error = cause if isinstance(cause, OmniError) else unexpected(raised, where=_where(exchange))
        await exchange.respond_error(error)
        return error
    return None


def _where(exchange: HttpExchange) -> str:
    """Not the path itself: clients write anything there."""
    return f"{exchange.request.method} {exchange.route or 'a request'}"
