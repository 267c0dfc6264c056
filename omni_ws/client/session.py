"""ClientSession: one conversation with a server, as its user sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

import msgspec

from omni_ws.client.connection import DEFAULT_URL, Endpoint, encode_config, open_session
from omni_ws.client.events import Answer, AnswerBuilder, ErrorEvent, Event, Final
from omni_ws.client.failures import ServerError
from omni_ws.client.frames import chunk_encoder
from omni_ws.client.link import ClientLimits, Link
from omni_ws.client.sent_frames import SentKind
from omni_ws.core.chunks import FinishReason, InputChunk, Modality
from omni_ws.errors import OmniError, PayloadTooLarge
from omni_ws.wire.frames import (
    CancelFrame,
    FinishFrame,
    OutputAckFrame,
    PingFrame,
)
from omni_ws.wire.server_frames import SessionCreatedFrame, SessionUpdatedFrame
from omni_ws.wire.session_config import InputAudioConfig, OutputAudioConfig, merge

_encode = msgspec.json.Encoder().encode


@asynccontextmanager
async def connect(
    url: str = DEFAULT_URL,
    *,
    api_key: str | None = None,
    binary: bool = True,
    config: Mapping[str, Any] | None = None,
    ssl: SSLContext | None = None,
    reconnect: bool = False,
    open_timeout: float = 10,
    limits: ClientLimits = ClientLimits(),  # noqa: B008  # frozen
) -> AsyncIterator[ClientSession]:
    """A session, closed at the end of the block.

    Raises ConnectionFailed where no server answers, and the server's error where it refuses the session or ``config``.
    With ``reconnect`` a session whose connection was lost is resumed over another: see Resumed. Where the server has
    ended it, or does not resume sessions, a fresh one gets the configuration and every unfinished request again, whole
    and numbered from 0: see Reconnected.
    """
    endpoint = Endpoint(url=url, api_key=api_key, binary=binary, ssl=ssl, open_timeout=open_timeout)
    wanted = merge({}, config or {})
    opened = await open_session(endpoint, wanted)
    link = Link(
        endpoint, opened, wanted=wanted, encode=chunk_encoder(binary=binary), reconnect=reconnect, limits=limits
    )
    session = ClientSession(link)
    try:
        yield session
    except BaseException:
        await session.close(flush=False)
        raise
    await session.close()


class ClientSession:
    """Made by ``connect``. For one event loop.

    Sending returns when a chunk is on its way to the socket, and waits while too much is. Whoever sends much reads
    events at the same time: beyond ``ClientLimits.event_bytes`` nothing is read any more, acknowledgements included.
    Use ``events`` or ``response``, not both at once.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sending = asyncio.Lock()

    # what is known

    @property
    def session_id(self) -> str:
        return self._link.created.session_id

    @property
    def created(self) -> SessionCreatedFrame:
        """What the server said when the session was created."""
        return self._link.created

    @property
    def config(self) -> SessionUpdatedFrame | None:
        """The effective configuration; None until something was configured."""
        return self._link.incoming.config

    @property
    def input_audio(self) -> InputAudioConfig:
        config = self.config
        return config.input_audio if config else self.created.input_audio

    @property
    def output_audio(self) -> OutputAudioConfig:
        return self._link.incoming.output_audio

    @property
    def last_output_sequence_id(self) -> int:
        """The highest number of an output received, or -1."""
        return self._link.incoming.last_output_sequence_id

    @property
    def queued_event_bytes(self) -> int:
        """What has arrived and was not taken yet."""
        return self._link.events.queued

    # sending

    async def configure(self, **fields: Any) -> SessionUpdatedFrame:
        """From the next request on; None restores a default. Raises the server's error; nothing has changed then."""
        frame = encode_config(fields)
        self._link.check_open()
        reply = self._link.incoming.expect_configuration()
        self._link.say(SentKind.CONFIG, frame)
        updated = await reply
        self._link.wanted = merge(self._link.wanted, fields)
        return updated

    async def send_audio(self, audio: bytes, *, end: bool = False, timestamp_ms: int | None = None) -> int:
        """Audio in the session's input format; borders between chunks mean nothing. Returns its sequence_id.

        With ``turn_detection`` configured it opens no request: the server does, when it hears speech. Such audio is not
        sent again after a Reconnected.
        """
        return await self.send_chunk(InputChunk(Modality.AUDIO, audio, timestamp_ms=timestamp_ms, end_of_input=end))

    async def send_text(self, text: str, *, end: bool = False) -> int:
        return await self.send_chunk(InputChunk(Modality.TEXT, text.encode(), end_of_input=end))

    async def send_tool_result(self, call_id: str, result: str, *, end: bool = False) -> int:
        """What came of a tool call of an earlier answer; it may be empty. With ``end`` the model goes on at once."""
        return await self.send_chunk(InputChunk(Modality.TEXT, result.encode(), end_of_input=end, tool_call_id=call_id))

    async def send_image(
        self, image: bytes, *, format: str | None = None, end: bool = False, timestamp_ms: int | None = None
    ) -> int:
        """One image a chunk. ``format`` is its MIME type; None lets the server look."""
        return await self.send_chunk(
            InputChunk(Modality.IMAGE, image, format=format, timestamp_ms=timestamp_ms, end_of_input=end)
        )

    async def send_chunk(self, chunk: InputChunk) -> int:
        """Any chunk; its number is given here and returned (numbers start anew on a fresh session).

        Waits for room in the send buffer, for acknowledgements and, for a while, for credit. Raises PayloadTooLarge
        for more than a chunk may hold, and what ended the session where it has ended. A call that is cancelled while
        it waits has sent nothing.
        """
        size = len(chunk.payload)
        limit = self.created.limits.max_chunk_bytes
        if size > limit:
            raise PayloadTooLarge(f"a chunk may hold {limit} bytes, this one has {size}", param="payload")
        if chunk.timestamp_ms is not None and chunk.timestamp_ms < 0:
            raise ValueError("timestamp_ms is 0 or more")
        async with self._sending:
            await self._link.wait_for_room(size)
            return self._link.send(chunk)

    async def finish(self) -> None:
        """The input of the open request ends here. Nothing happens where none is open.

        Raises EmptyInput where the server has refused all of it.
        """
        async with self._sending:
            self._link.check_open()
            if self._link.outgoing.finish():
                self._link.say(SentKind.FINISH, _encode(FinishFrame()))

    async def cancel(self, request_id: str | None = None) -> None:
        """Stop the named request, or the running one, and close its input. Its Final still comes."""
        self._link.check_open()
        self._link.outgoing.cancel(request_id)
        kind = SentKind.CANCEL if request_id is None else SentKind.CANCEL_BY_ID
        self._link.say(kind, _encode(CancelFrame(request_id)))

    async def acknowledge_output(self, *, played_ms: float | None = None) -> None:
        """Tell the server that all output so far has arrived, and how much of the running answer was heard."""
        self._link.check_open()
        if self.last_output_sequence_id >= 0:
            frame = OutputAckFrame(self.last_output_sequence_id, played_ms)
            self._link.write_soon(_encode(frame), True)

    async def ping(self) -> float:
        """The time to the server and back, in seconds, behind everything that waits to be sent."""
        self._link.check_open()
        number, pong = self._link.incoming.expect_pong()
        loop = asyncio.get_running_loop()
        sent = loop.time()
        self._link.write_soon(_encode(PingFrame(number)), True)
        await pong
        return loop.time() - sent

    # receiving

    async def events(self) -> AsyncIterator[Event]:
        """Everything, until the session ends.

        Raises what ended it, unless it was closed in good order: by ``close``, or by the server after a Closing.
        """
        while (event := await self._link.events.get()) is not None:
            yield event
        ending = self._link.ending
        if ending is not None and not ending.orderly:
            raise ending.error

    async def response(self) -> AsyncIterator[Event]:
        """The events up to the Final of the next request that ends.

        Raises what ended the session before that, and the error of an ErrorEvent that ``blocks_request``.
        """
        while (event := await self._link.events.get()) is not None:
            yield event
            if isinstance(event, Final):
                return
            if isinstance(event, ErrorEvent) and event.blocks_request:
                raise event.error
        self._link.check_open()

    async def answer(self) -> Answer:
        """The whole answer to the next request. Raises the error that it ended with.

        Where the caller gives up (is cancelled), the request is cancelled, and nothing of it is seen again.
        """
        builder = AnswerBuilder()
        request = self._link.outgoing.requests[0] if self._link.outgoing.requests else None
        try:
            async for event in self.response():
                builder.add(event)
        except (asyncio.CancelledError, OmniError):
            if request is not None and request in self._link.outgoing.requests:
                self._link.abandon(request)
                self._link.outgoing.cancel(request.request_id)
                kind = SentKind.CANCEL if request.request_id is None else SentKind.CANCEL_BY_ID
                self._link.say(kind, _encode(CancelFrame(request.request_id)))
            raise
        answer = builder.build()
        if answer.finish_reason is FinishReason.ERROR:
            raise answer.errors[-1] if answer.errors else ServerError("the request failed", code="engine_failed")
        return answer

    async def ask_text(self, text: str) -> Answer:
        """Send a text as a whole request and return the whole answer."""
        await self.send_text(text, end=True)
        return await self.answer()

    # the end

    async def close(self, *, flush: bool = True) -> None:
        """What was sent so far is written first, unless ``flush`` is False. Idempotent."""
        await self._link.close(flush=flush)
