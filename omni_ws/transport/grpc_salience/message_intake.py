"""MessageIntake: when the message of a call is read, how long it may take to come, and what it counts for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineOverloaded, InvalidValue, OmniError, SessionTimeout
from omni_ws.service.sessions.admission import SLOT_RETRY_MS
from omni_ws.transport.grpc_salience.refusals import CallContext, refuse
from omni_ws.wire.protobuf_fields import has_more_fields

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

#: How long a message may take to come before it is one of the slow ones.
PROMPT_SEC: Final = 0.5
#: How long one may take that needs no key: more than a loaded server's loop is ever held up.
KEYLESS_SEC: Final = 5.0
#: Messages up to this size are not counted: a call holds as much anyway, and who has to close sessions because the
#: server is full must be able to.
SMALL_BYTES: Final = 64 * 1024
#: Of a large message. In 64 MiB there is room for 32 million, and seconds and gigabytes go by until they are parsed.
MAX_FIELDS: Final = 65_536


class MessageIntake(grpc.aio.ServerInterceptor):
    """Calls of ``service`` need a key before their message is read, and count in ``budget`` while they hold it.

    gRPC puts messages together out of sight, and tells neither how long one is nor how much of it is there. But it
    takes no more than 64 KiB of a message that is not being read, so no more are read at once than would fill
    ``budget`` if each were of ``max_message_bytes``: half of them for a moment, to which the next call waits; half of
    them for up to ``timeout_sec``, beyond which a slow one is refused. Calls of other services need no key; their
    messages have a few seconds.
    """

    def __init__(
        self,
        *,
        service: str,
        check_key: Callable[[CallContext], object],
        budget: ByteBudget,
        max_message_bytes: int,
        timeout_sec: float,
        max_calls: int,
    ) -> None:
        self._prefix = f"/{service}/"
        self._check_key = check_key
        self._budget = budget
        self._timeout_sec = timeout_sec
        self._max_calls = max_calls
        places = max(1, budget.capacity // (2 * max_message_bytes))
        self._prompt = asyncio.Semaphore(places)
        self._slow = asyncio.Semaphore(places)
        self._calls = 0
        #: Never cancelled: gRPC writes into what a read was given until the call is over, which ends the read.
        self._reading: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        has_key = handler_call_details.method.startswith(self._prefix)
        # Declared as streams of messages, calls come to us before their message does.
        if handler.response_streaming:

            async def stream(_: object, context: Any) -> AsyncIterator[Any]:
                with self._call() as share:
                    if handler.request_streaming:
                        events = handler.stream_stream(self._requests(context, handler), context)
                    else:
                        request = await self._request(context, handler, share, has_key=has_key)
                        events = handler.unary_stream(request, context)
                    if inspect.isawaitable(events):  # it writes its answers itself
                        await events
                        return
                    async with aclosing(events):
                        async for event in events:
                            yield event

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

        async def answer(_: object, context: Any) -> Any:
            with self._call() as share:
                request = await self._request(context, handler, share, has_key=has_key)
                return await handler.unary_unary(request, context)

        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _call(self) -> Iterator[Share]:
        share = Share(self._budget)
        self._calls += 1
        try:
            yield share
        finally:
            self._calls -= 1
            share.resize(0)

    async def _request(self, context: CallContext, handler: Any, share: Share, *, has_key: bool) -> Any:
        try:
            if has_key:
                self._check_key(context)
            if self._calls > self._max_calls:
                raise EngineOverloaded(f"{self._max_calls} calls run already", retry_after_ms=SLOT_RETRY_MS)
            message = await (self._own_message(context) if has_key else self._keyless_message(context))
            if message is grpc.aio.EOF:
                raise InvalidValue("the call has no message")
            if len(message) > SMALL_BYTES:
                share.resize(len(message))
                if has_more_fields(message, MAX_FIELDS):
                    raise InvalidValue(f"the message has more than {MAX_FIELDS} fields; append_tokens is one if packed")
            try:
                return handler.request_deserializer(message)
            except DecodeError:
                raise InvalidValue("the message is not the one that this call takes") from None
        except OmniError as error:
            share.resize(0)
            await refuse(context, error)

    async def _own_message(self, context: CallContext) -> Any:
        async with self._prompt:
            reading = self._read(context)
            await asyncio.wait({reading}, timeout=PROMPT_SEC)
        if not reading.done():
            if self._slow.locked():
                raise EngineOverloaded("too many messages come slowly", retry_after_ms=SLOT_RETRY_MS)
            async with self._slow:
                await asyncio.wait({reading}, timeout=self._timeout_sec)
        return self._result(reading, self._timeout_sec)

    async def _keyless_message(self, context: CallContext) -> Any:
        reading = self._read(context)
        await asyncio.wait({reading}, timeout=KEYLESS_SEC)
        return self._result(reading, KEYLESS_SEC)

    async def _requests(self, context: CallContext, handler: Any) -> AsyncGenerator[Any, None]:
        """Those of a service that needs no key; who pauses has said all."""
        try:
            while (message := await self._keyless_message(context)) is not grpc.aio.EOF:
                yield handler.request_deserializer(message)
        except SessionTimeout:
            return

    def _read(self, context: CallContext) -> asyncio.Task[Any]:
        reading: asyncio.Task[Any] = asyncio.create_task(context.read(), name="gRPC message")
        self._reading.add(reading)
        reading.add_done_callback(self._over)
        return reading

    def _over(self, reading: asyncio.Task[Any]) -> None:
        self._reading.discard(reading)
        if not reading.cancelled():
            reading.exception()  # that the call is over; whoever waited knows

    @staticmethod
    def _result(reading: asyncio.Task[Any], limit: float) -> Any:
        if not reading.done():
            raise SessionTimeout(f"the message did not come whole within {limit:g} seconds")
        return reading.result()
