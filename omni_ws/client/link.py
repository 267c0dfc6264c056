"""Link: the connection under a session, and the next one where the first is lost. One reader, one writer, one owner."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from omni_ws.client.connection import Endpoint, OpenedConnection, open_session, resume_session
from omni_ws.client.connection import ResumedConnection as ResumedConnection
from omni_ws.client.ending import Ending, ending_of
from omni_ws.client.event_queue import EventQueue
from omni_ws.client.events import Final, Reconnected, Resumed
from omni_ws.client.failures import ConnectionLost, is_retryable
from omni_ws.client.incoming import IncomingFrames
from omni_ws.client.outgoing import OutgoingInput, OutgoingRequest
from omni_ws.client.sent_frames import SentFrame, SentFrames, SentKind
from omni_ws.core.chunks import FinishReason, InputChunk
from omni_ws.errors import InvalidFrame, OmniError, SessionNotFound
from omni_ws.wire.frames import OutputAckFrame

#: The server keeps what it said until it is told that it arrived: every so many outputs.
OUTPUTS_PER_ACK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds in bytes and seconds."""

    #: What waits to be written to the socket.
    send_buffer_bytes: int = 256 << 10
    #: What may be under way without an acknowledgement, whatever the server's credit says.
    window_bytes: int = 4 << 20
    #: What is kept of unfinished requests to send it again; only with ``reconnect``.
    keep_bytes: int = 16 << 20
    #: What waits for the user of the events; beyond it the socket is not read.
    event_bytes: int = 32 << 20
    #: While there is no credit: how often to ask for it, and how long until it is taken for what it is, advice.
    credit_probe_sec: float = 0.25
    credit_patience_sec: float = 5
    #: Waits before each attempt to reconnect; begun anew once a session was good for anything.
    reconnect_delays: tuple[float, ...] = (0, 0.25, 0.5, 1, 2, 4, 8, 8)
    close_timeout: float = 5


class Link:
    """Frames go in by ``write_soon`` and come out as events.

    ``encode`` makes a frame of a chunk, and says if it is text. A fresh session is first configured as ``wanted``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        opened: OpenedConnection,
        *,
        wanted: dict[str, Any],
        encode: Callable[[InputChunk], tuple[bytes, bool]],
        reconnect: bool,
        limits: ClientLimits,
    ) -> None:
        self.limits = limits
        self.wanted: Mapping[str, Any] = wanted
        self.outgoing = OutgoingInput(
            window_bytes=limits.window_bytes, keep_bytes=limits.keep_bytes if reconnect else 0
        )
        self.events = EventQueue(limits.event_bytes)
        #: Why nothing more can be sent, once that is so.
        self.ending: Ending | None = None
        self._endpoint = endpoint
        self._encode = encode
        self._reconnect = reconnect
        self._sent = SentFrames()
        #: What the session can be resumed with, and the output that was last acknowledged.
        self._resume_token: str | None = None
        self._acknowledged_output = -1
        self._outbox: deque[tuple[bytes, bool]] = deque()
        self._outbox_bytes = 0
        self._outbox_changed = asyncio.Event()
        self._room = asyncio.Event()
        self._attach(opened)
        self._life = asyncio.create_task(self._live(), name=f"client of {opened.created.session_id}")

    def _attach(self, opened: OpenedConnection) -> None:
        self.websocket: ClientConnection = opened.websocket
        self.created = opened.created
        self._resume_token = opened.created.resume_token
        self._acknowledged_output = -1
        self._sent.clear()
        self.incoming = IncomingFrames(opened.created, opened.updated, self.outgoing)
        self.outgoing.open_microphone = opened.updated is not None and opened.updated.turn_detection is not None

    # sending

    def check_open(self) -> None:
        """Raises what ended the session."""
        if self.ending is not None:
            raise self.ending.error

    def write_soon(self, frame: bytes, is_text: bool) -> None:
        """Frames leave in the order of these calls."""
        self._outbox.append((frame, is_text))
        self._outbox_bytes += len(frame)
        self._outbox_changed.set()

    def say(self, kind: SentKind, frame: bytes) -> None:
        """Write soon what has no number, and again where it may not have arrived."""
        self._remember(SentFrame(self.outgoing.next_sequence_id, kind, frame, is_text=True))
        self.write_soon(frame, True)

    def _remember(self, frame: SentFrame) -> None:
        if self._reconnect and self._resume_token is not None:
            self._sent.add(frame)

    def send(self, chunk: InputChunk) -> int:
        """Number a chunk and write it soon; -1 where its request is over and will not be worked on any more."""
        numbered = self.outgoing.add(chunk, output_audio=self.incoming.output_audio)
        if numbered is None or numbered.sequence_id is None:
            return -1
        frame, is_text = self._encode(numbered)
        self._remember(SentFrame(numbered.sequence_id, SentKind.CHUNK, frame, is_text))
        self.write_soon(frame, is_text)
        return numbered.sequence_id

    async def wait_for_room(self, size: int) -> None:
        """Until this much may be sent: the socket takes it, and acknowledgements have come for enough of the rest.

        Credit is advice: without any, and without an acknowledgement under way that could bring some, it is asked
        for now and then, and in the end done without.
        """
        patience = self.limits.credit_patience_sec
        while True:
            self.check_open()
            buffered = self._outbox_bytes >= self.limits.send_buffer_bytes
            if not buffered and (self.outgoing.has_room(size) or (self.outgoing.starved and patience <= 0)):
                return
            self._room.clear()
            if buffered or not self.outgoing.starved:
                await self._room.wait()
                continue
            try:
                async with asyncio.timeout(self.limits.credit_probe_sec):
                    await self._room.wait()
            except TimeoutError:
                patience -= self.limits.credit_probe_sec
                self._probe_credit()

    def _probe_credit(self) -> None:
        """A chunk that was accepted long ago is dropped and acknowledged at once, with the credit of the moment."""
        known = self.outgoing.acknowledged_sequence_id - 1
        if known >= 0 and not self._outbox:
            self.write_soon(b'{"type":"input_chunk","sequence_id":%d}' % known, True)

    def abandon(self, request: OutgoingRequest) -> None:
        """Nobody wants a request any more: cancel it, and let nothing of it be seen."""
        request.muted = True
        request_id = request.request_id
        if request_id is not None:
            self.events.discard(lambda event: getattr(event, "request_id", None) == request_id)

    # the life of the connection

    async def close(self, *, flush: bool) -> None:
        """Write what waits, say goodbye, end the tasks. Idempotent."""
        if flush and self.ending is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.close_timeout):
                    await self._flushed()
        # From here on nobody takes events; a reader that waits for room goes on, up to the goodbye of the server.
        self.events.close()
        self._end(Ending(ConnectionLost("the session was closed"), orderly=True, retryable=False))
        try:
            async with asyncio.timeout(self.limits.close_timeout):
                await self.websocket.close()
        except TimeoutError:
            pass
        finally:
            self.websocket.transport.abort()
            self._life.cancel()
            await asyncio.wait([self._life])
        if not self._life.cancelled():
            self._life.result()

    async def _flushed(self) -> None:
        while self._outbox and self.ending is None and self.websocket.close_code is None:
            self._room.clear()
            await self._room.wait()

    async def _live(self) -> None:
        ending = Ending(ConnectionLost("the client failed"), orderly=False, retryable=False)
        delays = iter(self.limits.reconnect_delays)
        try:
            while True:
                ending = await self._converse()
                self._room.set()
                if self.ending is not None or not (self._reconnect and ending.retryable):
                    return
                if self.incoming.heard_anything:
                    delays = iter(self.limits.reconnect_delays)
                self.incoming.fail_pings(ending.error)
                match await self._reopen(delays, ending):
                    case OpenedConnection() as opened:
                        self._replay(opened)
                    case again:
                        self._go_on(again)
        except (OmniError, ConnectionError) as error:
            ending = Ending(error, orderly=False, retryable=False)
        finally:
            self._end(ending)

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
        self.events.close()
        self.incoming.fail(self.ending.error)
        self._room.set()

    async def _converse(self) -> Ending:
        """One connection, until it is closed."""
        writer = asyncio.create_task(self._write(), name=f"{self._life.get_name()}, writing")
        try:
            return await self._read()
        finally:
            writer.cancel()
            await asyncio.wait([writer])

    async def _write(self) -> None:
        with suppress(ConnectionClosed):  # the reader sees it, too
            while True:
                while self._outbox:
                    frame, is_text = self._outbox[0]
                    await self.websocket.send(frame, text=is_text)
                    self._outbox.popleft()
                    self._outbox_bytes -= len(frame)
                    self._room.set()
                self._outbox_changed.clear()
                await self._outbox_changed.wait()

    async def _read(self) -> Ending:
        incoming = self.incoming
        try:
            async for message in self.websocket:
                event = incoming.receive(message)
                self._sent.accepted(self.outgoing.acknowledged_sequence_id)
                self._acknowledge_output()
                self._room.set()
                if event is not None:
                    await self.events.put(event)
        except ConnectionClosed:
            pass
        except InvalidFrame as error:
            await self.websocket.close(1002, "not a frame of this protocol")
            return Ending(error, orderly=False, retryable=False)
        return ending_of(self.websocket, incoming.closing, incoming.last_error)

    def _acknowledge_output(self) -> None:
        last = self.incoming.last_output_sequence_id
        if self._resume_token is not None and last >= self._acknowledged_output + OUTPUTS_PER_ACK:
            self._acknowledged_output = last
            self.write_soon(msgspec.json.encode(OutputAckFrame(last)), True)

    async def _reopen(self, delays: Iterator[float], ending: Ending) -> OpenedConnection | ResumedConnection:
        """The session, or a fresh one where that is over. Raises what stands in the way for good."""
        # Unless the server, which has ended it, said so.
        resume_token = self._resume_token if isinstance(ending.error, ConnectionLost) and not ending.orderly else None
        last: Exception = ending.error
        for delay in delays:
            if resume_token is None and self.outgoing.lost:
                raise _too_long_to_be_kept() from ending.error
            asked_for = getattr(last, "retry_after_ms", None) or 0
            await asyncio.sleep(max(delay * random.uniform(0.5, 1), asked_for / 1000))
            try:
                if resume_token is not None:
                    return await resume_session(
                        self._endpoint,
                        self.created.session_id,
                        resume_token,
                        self.incoming.last_output_sequence_id,
                        self.wanted,
                    )
                return await open_session(self._endpoint, self.wanted)
            except SessionNotFound as error:
                resume_token, last = None, error
            except ConnectionError as error:
                last = error
            except OmniError as error:
                if not is_retryable(error):
                    raise
                last = error
        raise ConnectionLost(f"the connection was lost and could not be made again: {last}") from last

    def _replay(self, opened: OpenedConnection) -> None:
        """Everything that was unfinished, from its beginning; without a pause, so that nothing gets between."""
        if self.outgoing.lost:
            opened.websocket.transport.abort()
            raise _too_long_to_be_kept()
        self.incoming.fail(ConnectionLost("the connection was lost"))
        self._attach(opened)
        self._outbox.clear()
        self._outbox_bytes = 0
        chunks, cancelled = self.outgoing.restart()
        for request in cancelled:
            if not request.muted:
                self.events.put_nowait(Final(request.request_id or "", None, FinishReason.CANCELLED, None))
        self.events.put_nowait(Reconnected(opened.created.session_id, len(chunks)))
        for chunk in chunks:
            self.write_soon(*self._encode(chunk))
        self._room.set()

    def _go_on(self, again: ResumedConnection) -> None:
        """What did not arrive is sent again, in its order; without a pause, so that nothing gets between."""
        resumed = again.resumed
        self.websocket = again.websocket
        self._resume_token = resumed.resume_token
        self.incoming.resumed()
        frames = self._sent.again(resumed.next_sequence_id, self._may_be_sent_again)
        self.events.put_nowait(Resumed(resumed.session_id, len(frames), resumed.replayed))
        self._outbox.clear()
        self._outbox_bytes = 0
        for frame in frames:
            self.write_soon(frame.frame, frame.is_text)
        self._room.set()

    def _may_be_sent_again(self, kind: SentKind) -> bool:
        """What may have arrived and would do no harm a second time."""
        match kind:
            case SentKind.CONFIG:
                return self.incoming.awaits_configuration
            case SentKind.CANCEL:
                return len(self.outgoing.requests) == 1  # it could meet another request otherwise
            case _:
                return True


def _too_long_to_be_kept() -> ConnectionLost:
    return ConnectionLost("the connection was lost, and the input was too long to be kept")
