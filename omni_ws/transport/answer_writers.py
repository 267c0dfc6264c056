"""Answers over HTTP: what a session says, written the way a route's clients read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Protocol

from omni_ws.core.chunks import OutputModality
from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.outbox import Message
from omni_ws.transport.error_answer import error_object
from omni_ws.transport.http1 import HttpExchange
from omni_ws.wire import sse
from omni_ws.wire.frames import ResponseStarted
from omni_ws.wire.openai_answer import finished_well

SSE_HEADERS: Final = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    # Asks proxies not to collect the events before passing them on.
    ("X-Accel-Buffering", "no"),
)


class EventEncoder(Protocol):
    """Makes the JSON objects of a stream out of outputs."""

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]: ...

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]: ...


async def write_events(
    exchange: HttpExchange,
    messages: AsyncIterator[Message],
    encoder: EventEncoder,
    *,
    done: bool = True,
    head_at_start: bool,
    heartbeat_sec: float,
) -> None:
    """An answer as server-sent events.

    ``head_at_start`` sends the 200 when work starts, for input that is still on its way; otherwise it waits for the
    first output, so that whatever fails before is told by its status. An error after the head becomes an
    ``event: error``, and the stream ends there, without [DONE].
    """
    try:
        async for message in _with_heartbeats(exchange, messages, heartbeat_sec):
            match message:
                case ResponseStarted() if head_at_start:
                    await exchange.start(200, SSE_HEADERS)
                case OutputChunk() | FinalChunk():
                    events = encoder.output(message) if isinstance(message, OutputChunk) else encoder.final(message)
                    _check(message)
                    if not exchange.head_sent:
                        await exchange.start(200, SSE_HEADERS)
                    for event in events:
                        await exchange.write(sse.event(event))
                    if isinstance(message, FinalChunk):
                        break
                case _:
                    pass
        if done:
            await exchange.write(sse.DONE)
    except OmniError as error:
        if not exchange.head_sent:
            raise
        await exchange.write(error_event(error))
    await exchange.end()


def error_event(error: OmniError) -> bytes:
    """Both shapes that readers look for: the fields at the top level, and OpenAI's object under ``error``."""
    fields = error_object(error)
    return sse.event({**fields, "error": fields}, name="error")


async def write_raw_audio(exchange: HttpExchange, messages: AsyncIterator[Message], media_type: str) -> None:
    """The bytes of the audio as they are made. An error after the first of them can only cut the answer short."""
    async for message in messages:
        match message:
            case OutputChunk(modality=OutputModality.AUDIO, payload=payload):
                if not exchange.head_sent:
                    await exchange.start(200, [("Content-Type", media_type)])
                await exchange.write(payload)
            case FinalChunk():
                _check(message)
                if not exchange.head_sent:
                    await exchange.start(200, [("Content-Type", media_type)])
                break
            case _:
                pass
    await exchange.end()


async def gather(messages: AsyncIterator[Message]) -> tuple[list[OutputChunk], FinalChunk]:
    """Everything that a session says to its one request."""
    outputs: list[OutputChunk] = []
    async for message in messages:
        if isinstance(message, OutputChunk):
            outputs.append(message)
        elif isinstance(message, FinalChunk):
            _check(message)
            return outputs, message
    raise AssertionError("a session ends with a final or an error")


def _check(message: OutputChunk | FinalChunk) -> None:
    """HTTP has no way to say "cancelled": a request that was cut short is an error."""
    if isinstance(message, FinalChunk) and not finished_well(message):
        raise EngineFailed("the request was ended before its answer was complete")


async def _with_heartbeats(
    exchange: HttpExchange, messages: AsyncIterator[Message], heartbeat_sec: float
) -> AsyncIterator[Message]:
    """The messages; a comment goes out whenever none has come for a while, once the head is out."""
    iterator = aiter(messages)
    following: asyncio.Future[Message] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(iterator))
            while not (await asyncio.wait({following}, timeout=heartbeat_sec or None))[0]:
                if exchange.head_sent:
                    await exchange.write(sse.HEARTBEAT)
            try:
                message = following.result()
            except StopAsyncIteration:
                return
            yield message
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait({following})
