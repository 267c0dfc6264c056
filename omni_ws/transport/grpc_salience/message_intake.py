"""MessageIntake: bounds the memory and the time that the messages of calls take."""

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

#: A message that takes longer is slow, and waits among the slow ones.
PROMPT_SEC: Final = 0.5
#: Time-out of a message that needs no key. Longer than the event loop of a loaded server is ever blocked.
KEYLESS_SEC: Final = 5.0
#: Calls without a key at once, which watch the health or ask what services there are. They take no place of others.
MAX_KEYLESS_CALLS: Final = 64
#: Messages up to this size are not charged: a call takes as much anyway, and closing a session must be possible when
#: the budget is exhausted.
SMALL_BYTES: Final = 64 * 1024
#: Limit for a message that is not small. 64 MiB can hold 32 million fields, which take seconds and gigabytes to parse.
MAX_FIELDS: Final = 65_536


class MessageIntake(grpc.aio.ServerInterceptor):
    """Authenticates calls of ``service`` before it reads their message, and charges ``budget`` while they hold it.

    gRPC assembles messages internally and reports neither the length of a message nor how much of it has arrived. But
    it buffers at most 64 KiB of a message that is not being read. So only as many are read at once as fit into
    ``budget`` if each has ``max_message_bytes``. Half of these slots are for prompt messages: a call waits for one, and
    leaves it after ``PROMPT_SEC``. The other half are for slow messages, each for up to ``timeout_sec``: when they are
    taken, a message that turns out slow is refused.

    Calls of other services, such as health checks, need no key. Their messages time out after ``KEYLESS_SEC``.
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
        slots = max(1, budget.capacity // (2 * max_message_bytes))
        self._prompt = asyncio.Semaphore(slots)
        self._slow = asyncio.Semaphore(slots)
        #: Calls at once: those without a key, and those with one.
        self._calls = [0, 0]
        #: Never cancelled, since gRPC writes into the buffer of a read until the call ends, which ends the read too.
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
        # Registered as streaming requests, calls arrive here before their message does.
        if handler.response_streaming:

            async def stream(_: object, context: Any) -> AsyncIterator[Any]:
                with self._call(has_key) as share:
                    if handler.request_streaming:
                        events = handler.stream_stream(self._read_requests(context, handler), context)
                    else:
                        request = await self._read_request(context, handler, share, has_key=has_key)
                        events = handler.unary_stream(request, context)
                    if inspect.isawaitable(events):  # a handler that writes to the context itself
                        await events
                        return
                    async with aclosing(events):
                        async for event in events:
                            yield event

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

        async def answer(_: object, context: Any) -> Any:
            with self._call(has_key) as share:
                request = await self._read_request(context, handler, share, has_key=has_key)
                return await handler.unary_unary(request, context)

        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _call(self, has_key: bool) -> Iterator[Share]:
        share = Share(self._budget)
        self._calls[has_key] += 1
        try:
            yield share
        finally:
            self._calls[has_key] -= 1
            share.resize(0)

    async def _read_request(self, context: CallContext, handler: Any, share: Share, *, has_key: bool) -> Any:
        try:
            if has_key:
                self._check_key(context)
            self._check_room(has_key)
            message = await (self._read_message(context) if has_key else self._read_keyless_message(context))
            if message is grpc.aio.EOF:
                raise InvalidValue("the call has no message")
            if len(message) > SMALL_BYTES:
                share.resize(len(message))
                if has_more_fields(message, MAX_FIELDS):
                    raise InvalidValue(f"at most {MAX_FIELDS} fields per message; pack append_tokens into one")
            try:
                return handler.request_deserializer(message)
            except DecodeError:
                raise InvalidValue("the message cannot be decoded as the request of this call") from None
        except OmniError as error:
            share.resize(0)
            await refuse(context, error)

    def _check_room(self, has_key: bool) -> None:
        """Raises EngineOverloaded where there are more calls than may be."""
        most = self._max_calls if has_key else MAX_KEYLESS_CALLS
        if self._calls[has_key] > most:
            raise EngineOverloaded(f"at most {most} concurrent calls; retry later", retry_after_ms=SLOT_RETRY_MS)

    async def _read_message(self, context: CallContext) -> Any:
        async with self._prompt:
            reading = self._read(context)
            await asyncio.wait({reading}, timeout=PROMPT_SEC)
        if not reading.done():
            if self._slow.locked():
                raise EngineOverloaded(
                    "too many calls are still sending their message; retry later", retry_after_ms=SLOT_RETRY_MS
                )
            async with self._slow:
                await asyncio.wait({reading}, timeout=self._timeout_sec)
        return self._result(reading, self._timeout_sec)

    async def _read_keyless_message(self, context: CallContext) -> Any:
        reading = self._read(context)
        await asyncio.wait({reading}, timeout=KEYLESS_SEC)
        return self._result(reading, KEYLESS_SEC)

    async def _read_requests(self, context: CallContext, handler: Any) -> AsyncGenerator[Any, None]:
        """Yield the messages of a streaming call without a key, until one times out."""
        try:
            self._check_room(has_key=False)
        except EngineOverloaded as error:
            await refuse(context, error)
        try:
            while (message := await self._read_keyless_message(context)) is not grpc.aio.EOF:
                yield handler.request_deserializer(message)
        except SessionTimeout:
            return

    def _read(self, context: CallContext) -> asyncio.Task[Any]:
        reading: asyncio.Task[Any] = asyncio.create_task(context.read(), name="gRPC message")
        self._reading.add(reading)
        reading.add_done_callback(self._read_done)
        return reading

    def _read_done(self, reading: asyncio.Task[Any]) -> None:
        self._reading.discard(reading)
        if not reading.cancelled():
            reading.exception()  # retrieved, so that it is not logged: the call has ended

    @staticmethod
    def _result(reading: asyncio.Task[Any], limit: float) -> Any:
        if not reading.done():
            raise SessionTimeout(f"the message was incomplete after {limit:g} seconds")
        return reading.result()
