"""ClientSession: the interface of the client for applications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

import msgspec

from omni_ws.client.connection import (
    DEFAULT_URL,
    ConnectionLost,
    Endpoint,
    ServerError,
    chunk_encoder,
    encode_config,
    open_session,
)
from omni_ws.client.events import Answer, AnswerCollector, ErrorEvent, Event, Final
from omni_ws.client.link import ClientLimits, Link, call_is_gone
from omni_ws.client.outgoing import PIECE_BYTES, SentKind, pieces_of
from omni_ws.client.routes import Route
from omni_ws.core.chunks import MAX_REF_CHARACTERS, FinishReason, InputChunk, Modality
from omni_ws.errors import OmniError, PayloadTooLarge
from omni_ws.wire.frames import (
    FinishFrame,
    HistoryGetFrame,
    HistoryTruncateFrame,
    OutputAckFrame,
    PingFrame,
)
from omni_ws.wire.server_frames import SessionCreatedFrame, SessionUpdatedFrame
from omni_ws.wire.session_config import InputAudioConfig, OutputAudioConfig, merge

_encode = msgspec.json.Encoder().encode


@asynccontextmanager
async def connect(
    url: str | Sequence[str] = DEFAULT_URL,
    *,
    api_key: str | None = None,
    binary: bool = True,
    config: Mapping[str, Any] | None = None,
    ssl: SSLContext | None = None,
    reconnect: bool = False,
    open_timeout: float = 10,
    limits: ClientLimits = ClientLimits(),  # noqa: B008  # frozen
) -> AsyncIterator[ClientSession]:
    """Open a session, which is closed at the end of the block.

    Raises ConnectionFailed if no server answers, and the error of the server if it refuses the session or ``config``.

    With ``reconnect`` a session whose connection is lost is resumed over another one (:class:`Resumed`), where servers
    share a store also at another server: ``url`` may be several, and a name may have several addresses or get a new
    one. If the session has ended, or the server does not resume sessions, a fresh one gets the configuration and all
    unfinished requests, whole and numbered from 0 (:class:`Reconnected`).

    A ``greeting`` in ``config`` is the first answer of the session, before that to any request: take it with
    ``answer``, or from the events. A fresh session does not repeat a greeting that has ended.
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
    """A session with a server, made by :func:`connect`. Belongs to one event loop.

    Send methods return once the frame is queued for the socket, and wait while the send buffer, the window or the
    server's credit is exhausted. Read events concurrently: while more than ``ClientLimits.event_bytes`` of them wait,
    the socket is not read, so acknowledgements do not arrive either.

    Consume the events by only one of ``events``, ``response`` and ``answer`` at a time.

    Each request has a name, its ``ref``: the one that its first chunk was sent with, or else a generated one. The
    events, errors and the answer of the request have that name, so matching them never depends on their order. Speech
    that the server detects has a ``turn_id`` instead.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sending = asyncio.Lock()
        self._answers = AnswerCollector()

    # state

    @property
    def session_id(self) -> str:
        """The id of the current session; it changes with a Reconnected event."""
        return self._link.created.session_id

    @property
    def created(self) -> SessionCreatedFrame:
        """The ``session_created`` frame: limits, defaults and the model."""
        return self._link.created

    @property
    def config(self) -> SessionUpdatedFrame | None:
        """The configuration in effect, as the server reported it; None before the first report."""
        return self._link.incoming.config

    @property
    def input_audio(self) -> InputAudioConfig:
        """The format that ``send_audio`` takes."""
        config = self.config
        return config.input_audio if config else self.created.input_audio

    @property
    def output_audio(self) -> OutputAudioConfig:
        """The format of the audio of answers."""
        return self._link.incoming.output_audio

    @property
    def route(self) -> Route | None:
        """The URL, and the address, of the server of the moment, or of the last attempt to reach one."""
        return self._link.route

    @property
    def resumable(self) -> bool:
        """Whether another server could continue the session now; True as long as no server says otherwise."""
        return self._link.incoming.resumable

    @property
    def last_output_sequence_id(self) -> int:
        """The highest number of an output that was received, or -1."""
        return self._link.incoming.last_output_sequence_id

    @property
    def queued_event_bytes(self) -> int:
        """The size of the events that were received and not consumed."""
        return self._link.events.queued

    # sending

    async def configure(self, **fields: Any) -> SessionUpdatedFrame:
        """Change configuration fields from the next request on; None restores a default.

        Return the configuration in effect. Raises the error of the server if it refuses; nothing has changed then.
        """
        frame = encode_config(fields)
        self._link.check_open()
        reply = self._link.incoming.expect_configuration()
        self._link.send_control(SentKind.CONFIG, frame)
        updated = await reply
        self._link.want(fields)
        return updated

    async def send_audio(
        self, audio: bytes, *, end: bool = False, timestamp_ms: int | None = None, ref: str | None = None
    ) -> int:
        """Send audio in the format of ``input_audio``; return its sequence number.

        Chunks may be cut anywhere; large ones are sent in pieces, and the number is that of the last piece. ``end``
        ends the input of the request. ``ref`` is your name for the request that the chunk opens, of 1 to 64 characters.

        With ``turn_detection`` configured, audio opens no request: the server opens one when it detects speech. Such
        audio is not sent again after a Reconnected.
        """
        chunk = InputChunk(Modality.AUDIO, audio, timestamp_ms=timestamp_ms, end_of_input=end, ref=ref)
        return await self.send_chunk(chunk)

    async def send_text(self, text: str, *, end: bool = False, ref: str | None = None) -> int:
        """Send text, in pieces if it is long; return the number of the last. ``end`` ends the input of the request.

        ``ref`` is your name for the request, if the text opens one.
        """
        return await self.send_chunk(InputChunk(Modality.TEXT, text.encode(), end_of_input=end, ref=ref))

    async def send_tool_result(self, call_id: str, result: str, *, end: bool = False, ref: str | None = None) -> int:
        """Send the result of a tool call of an earlier answer; it may be empty.

        ``end`` ends the input, which starts the next request to the model; it would also end speech that has just
        begun. Without it, servers that name requests start the request once all calls of that answer have their
        results. Raises SessionConflict if a lost session made the call: no other session knows the call.
        """
        if call_id in self._link.lost_calls and call_id not in self._link.incoming.calls:
            raise call_is_gone(ref)
        chunk = InputChunk(Modality.TEXT, result.encode(), end_of_input=end, tool_call_id=call_id, ref=ref)
        return await self.send_chunk(chunk)

    async def send_image(
        self,
        image: bytes,
        *,
        format: str | None = None,
        end: bool = False,
        timestamp_ms: int | None = None,
        ref: str | None = None,
    ) -> int:
        """Send one image. ``format`` is its MIME type; with None the server detects it. ``ref``: see ``send_text``."""
        return await self.send_chunk(
            InputChunk(Modality.IMAGE, image, format=format, timestamp_ms=timestamp_ms, end_of_input=end, ref=ref)
        )

    async def send_chunk(self, chunk: InputChunk) -> int:
        """Number and send a chunk of any modality; return its sequence number.

        Numbers start over in a fresh session. -1 means that the request had already ended and the chunk was dropped.
        A large chunk of audio, text or a video file is sent in pieces, all with its timestamp; the number is that of
        the last.

        Waits for the send buffer, the window and, for a limited time, credit. If it is cancelled while it waits,
        nothing was sent, or only the first pieces. Raises PayloadTooLarge if a picture or the result of a tool exceeds
        the server's limit, and the error that ended the session if it has ended.
        """
        number, _ = await self._send(chunk)
        return number

    async def _send(self, chunk: InputChunk) -> tuple[int, str | None]:
        """Send a chunk; return its number, and the name of its request."""
        if chunk.timestamp_ms is not None and chunk.timestamp_ms < 0:
            raise ValueError("timestamp_ms must not be negative")
        if chunk.ref is not None and not 1 <= len(chunk.ref) <= MAX_REF_CHARACTERS:
            raise ValueError(f"a ref has 1 to {MAX_REF_CHARACTERS} characters")
        self._check_size(chunk)
        number, ref = -1, chunk.ref
        async with self._sending:
            for piece in pieces_of(chunk, min(PIECE_BYTES, self.created.limits.max_chunk_bytes)):
                await self._link.wait_for_room(len(piece.payload))
                for part in pieces_of(piece, self.created.limits.max_chunk_bytes):  # a fresh session may accept less
                    self._check_size(part)
                    number, ref = self._link.send(part), self._link.outgoing.last_ref
        return number, ref

    def _check_size(self, chunk: InputChunk) -> None:
        """Raises PayloadTooLarge for a chunk that is larger than the server accepts, and cannot be cut."""
        limit = self.created.limits.max_chunk_bytes
        largest = max(len(piece.payload) for piece in pieces_of(chunk, limit))
        if largest > limit:
            raise PayloadTooLarge(f"a chunk may hold {limit} bytes, this one has {largest}", param="payload")

    async def finish(self) -> None:
        """End the input of the open request. Does nothing if none is open.

        Raises EmptyInput if the server refused every chunk of it.
        """
        async with self._sending:
            self._link.check_open()
            if self._link.outgoing.finish():
                self._link.send_control(SentKind.FINISH, _encode(FinishFrame()))

    async def cancel(self, request_id: str | None = None, *, ref: str | None = None) -> None:
        """Cancel the request with this id or name, and end its input. Its Final still arrives.

        With neither, it cancels the running and the open request. While a microphone is open, that includes speech that
        has just begun: pass an id or a name. A name also works before the request has an id.
        """
        self._link.check_open()
        if ref is not None:
            request = self._link.outgoing.waiting(ref)
            if request is not None:
                self._link.stop(request)
            return
        self._link.outgoing.cancel(request_id)
        self._link.cancel(request_id)

    async def truncate_history(self, request_id: str) -> int:
        """Drop a request and all later ones from the history; the next request sees only what was before them.

        Return the number of requests that were dropped, 0 if an earlier truncation dropped this one. Raises
        SessionConflict while a request is open or being answered, and InvalidValue for a request that the history
        does not have; nothing has changed then.
        """
        self._link.check_open()
        frame = _encode(HistoryTruncateFrame(request_id))
        reply = self._link.incoming.expect_truncation(request_id, frame)
        self._link.send_control(SentKind.TRUNCATE, frame)
        return await reply

    async def history(self, *, original: bool = False) -> list[dict[str, Any]]:
        """Return the history as requests see it now: what ``history_items`` of a new session's ``config`` takes.

        The first item may be a summary of what was said before. ``original``: all messages that the server keeps, and
        no summary.
        """
        self._link.check_open()
        reply = self._link.incoming.expect_history()
        self._link.send_control(SentKind.HISTORY, _encode(HistoryGetFrame(original)))
        return await reply

    async def acknowledge_output(self, *, played_ms: float | None = None, request_id: str | None = None) -> None:
        """Acknowledge all output received so far.

        ``played_ms`` reports how much of the answer to ``request_id`` has been played: the server paces audio by it,
        and computes what was heard before a barge-in. Without ``request_id`` it is about the answer that plays
        according to the server.
        """
        self._link.check_open()
        if self.last_output_sequence_id >= 0:
            frame = OutputAckFrame(self.last_output_sequence_id, played_ms, request_id)
            self._link.write_soon(_encode(frame), True)

    async def ping(self) -> float:
        """Ping the server. Return the round-trip time in seconds, including the time in the queue of frames."""
        self._link.check_open()
        number, pong = self._link.incoming.expect_pong()
        loop = asyncio.get_running_loop()
        sent = loop.time()
        self._link.write_soon(_encode(PingFrame(number)), True)
        await pong
        return loop.time() - sent

    # receiving

    async def events(self) -> AsyncIterator[Event]:
        """Yield all events until the session ends.

        Raises the error that ended the session, unless it ended in order: by ``close``, or after a Closing event.
        """
        while (event := await self._link.events.get()) is not None:
            yield event
        ending = self._link.ending
        if ending is not None and not ending.orderly:
            raise ending.error

    async def response(self, ref: str | None = None) -> AsyncIterator[Event]:
        """Yield events up to and including the next Final or, with ``ref``, the Final of the request of this name.

        Events of other requests are among them. Raises the error that ends the session, and that of an ErrorEvent with
        ``blocks_request`` (for the request of this name).
        """
        while (event := await self._link.events.get()) is not None:
            yield event
            if isinstance(event, Final | ErrorEvent) and ref not in (None, event.ref):
                continue
            if isinstance(event, Final):
                return
            if isinstance(event, ErrorEvent) and event.blocks_request:
                raise event.error
        self._link.check_open()

    async def answer(self, ref: str | None = None) -> Answer:
        """Return the answer to the request of this name or, without ``ref``, the next answer.

        Raises the error with which the request ended. Answers to other requests that arrive meanwhile are kept for
        later calls. What the server says unasked between the answers is skipped; a greeting is not. Transcripts that
        arrive after the Final (``late``) are not in the answer. If the call is cancelled, it cancels its request, and
        nothing else, and drops the events that still arrive for that request.
        """
        request = self._link.outgoing.waiting(ref)
        try:
            while (answer := self._answers.take(ref)) is None:
                event = await self._link.events.get()
                if event is None:
                    self._link.check_open()
                    raise ConnectionLost("the session has ended")
                self._answers.add(event)
        except (asyncio.CancelledError, OmniError):
            if request is not None and request in self._link.outgoing.requests:
                self._link.abandon(request)
                self._answers.drop(request.request_id or "")
                self._link.stop(request)
            raise
        if answer.finish_reason in (FinishReason.ERROR, None):
            raise answer.errors[-1] if answer.errors else ServerError("the request failed", code="engine_failed")
        return answer

    async def ask_text(self, text: str, *, ref: str | None = None) -> Answer:
        """Send a text as a whole request named ``ref``; return the answer to this request."""
        _, name = await self._send(InputChunk(Modality.TEXT, text.encode(), end_of_input=True, ref=ref))
        return await self.answer(name)

    # closing

    async def close(self, *, flush: bool = True) -> None:
        """Close the session. Writes queued frames first unless ``flush`` is False. Idempotent."""
        await self._link.close(flush=flush)
