"""Sessions over TCP without WebSocket: TcpPort accepts connections, TcpLink is one of them; and Playout.

Playout cuts the audio of answers into packets for phone calls, where the server decides when each packet is played.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from websockets.frames import CloseCode

from omni_ws.audio.pcm import Ducker
from omni_ws.core.chunks import AudioFormat, FinalChunk, FinishReason, OutputChunk, OutputModality
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import OmniError
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.transport.http.connections import (
    HangUp,
    Recheck,
    hang_up,
    notice_dead_networks,
)
from omni_ws.transport.native.connection import CLOSE_TIMEOUT_SEC, FrameReceiver, Pause, PausedReading
from omni_ws.wire.server_frames import BackchannelFrame, SpeechConfirmedFrame, SpeechDismissedFrame, SpeechStartedFrame

logger = logging.getLogger(__name__)

_FRAMES_PER_PASS: Final = 64


class TcpPort:
    """A TCP port besides the HTTP port. It need not be opened."""

    def __init__(self, protocol: str, *, flag: str) -> None:
        """``protocol`` is the protocol's name in messages; ``flag`` is the command-line flag that sets the port."""
        self._protocol = protocol
        self._flag = flag
        self._server: asyncio.Server | None = None

    @property
    def number(self) -> int | None:
        """The port number, once the port is open; None before."""
        if self._server is None or not self._server.sockets:
            return None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def open(self, make: Callable[[], asyncio.Protocol], host: str, port: int) -> None:
        """Listen on ``port``, and call ``make`` for each connection.

        Raises OSError, with advice, if the port is in use.
        """
        try:
            self._server = await asyncio.get_running_loop().create_server(make, host, port)
        except OSError as error:
            raise OSError(
                f"{self._protocol} cannot listen on {host}, port {port}, {error.strerror}: stop the process that uses "
                f"the port, or choose another with {self._flag} (0: any)"
            ) from error
        for listening in self._server.sockets:
            notice_dead_networks(listening)
        logger.info("%s listens on %s, port %d", self._protocol, host, self.number)

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    async def wait_closed(self) -> None:
        """Wait until all connections are gone."""
        if self._server is not None:
            await self._server.wait_closed()


class TcpLink(PausedReading, asyncio.Protocol):
    """A TCP connection in place of a WebSocket (a SoleLink): passes whole frames to its receiver.

    A subclass finds the frames. There are no pings unless the subclass sends them: the kernel notices dead networks.
    """

    _watch: Recheck

    def __init__(self, *, max_unsent: int) -> None:
        """Writing pauses at ``max_unsent`` unsent bytes."""
        self.loop = asyncio.get_running_loop()
        self._max_unsent = max_unsent
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._failed = False
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._watch = Recheck(self._check_hang_up)
        #: Whether writing should pause: the peer has not taken what was written.
        self.paused = False
        self.heard_at = self.loop.time()

    @property
    def client(self) -> str:
        """The address of the peer."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return peer[0] if peer else ""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def attach(self, receiver: FrameReceiver, account: ByteBudget | None = None) -> None:
        """Pass frames to ``receiver`` from now on. ``account`` is not charged."""
        self._receiver = receiver
        self.heard_at = self.loop.time()
        if not self.is_open:
            receiver.connection_closing()
        self.resume_reading(Pause.EARLY)

    # writing

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        """Send a whole frame without waiting. Does nothing once the link is closing."""
        if self._transport is not None and self.is_open:
            self._transport.write(data)

    def write_ping(self) -> None:
        """Do nothing: see the class."""

    def _write_farewell(self) -> None:
        """Tell the peer that the connection is about to close, if the protocol has a frame for that."""

    def fail(self, code: CloseCode, reason: str) -> None:
        self.abort()

    def abort(self) -> None:
        """Close the connection immediately; unsent bytes are lost."""
        if self._transport is not None:
            self._transport.abort()

    async def close_in_time(self, code: int, reason: str) -> None:
        """Close the connection, whatever the arguments; abort it if that takes longer than CLOSE_TIMEOUT_SEC."""
        self._failed = True  # nothing more is taken
        if self._transport is None:
            return
        self._write_farewell()
        self._transport.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_SEC):
                await asyncio.shield(self._lost)
        if not self._lost.done():
            self._transport.abort()
            await self._lost

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._max_unsent)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self._receiver is not None:
            self._receiver.resume_output()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        self._end_pace()
        self._received.clear()
        if not self._lost.done():
            self._lost.set_result(None)
        if self._receiver is not None:
            self._receiver.connection_closing()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        if self._failed:
            return
        self._received += data
        if self._input_pace is not None:
            self._keep_pace(self._input_pace(len(data)))
        if not self._pauses:
            self._take_frames()

    # reading

    def _stop_reading(self) -> None:
        if self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._pauses or self._received:
            self._schedule_pass()
        elif self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def _check_hang_up(self) -> None:
        """Close the connection if the peer has closed its sending side: it has hung up."""
        if self._transport is not None and hang_up(self._transport) is not HangUp.UNKNOWN:
            self._transport.abort()

    def _next_pass(self) -> None:
        self._pass_scheduled = False
        if self._pauses == Pause.PASS:
            self._pauses = Pause.NONE
            self._take_frames()
            if not self._pauses and self._transport is not None and self.is_open:
                self._transport.resume_reading()

    # frames

    @abstractmethod
    def _take_frame(self, received: bytearray, start: int) -> int:
        """Pass on the frame that begins at ``start``, and return where it ends; return ``start`` if it is incomplete.

        Raises the error that ends the session when a frame is invalid: the bounds of all further frames are unknown
        then.
        """

    def _frames_refused(self, error: OmniError) -> None:
        """Handle an error that ``_take_frame`` raised."""
        if self._receiver is not None:
            self._receiver.input_refused(error)

    def _take_frames(self) -> None:
        """Pass on whole frames, at most _FRAMES_PER_PASS in one pass of the event loop."""
        start = 0
        try:
            for _ in range(_FRAMES_PER_PASS):
                if self._failed or self._pauses:
                    return
                end = self._take_frame(self._received, start)
                if end == start:
                    return
                start = end
            self._schedule_pass()
        except OmniError as error:
            self._failed = True  # nothing more is taken
            self._frames_refused(error)
        finally:
            del self._received[:start]


# Playout: the audio of answers, cut into packets, for calls, in which the server decides when it is played.


class Played(NamedTuple):
    """A packet of an answer's audio, to be played now; empty ``audio`` marks the end of the answer.

    ``position`` is where the packet begins in the answer's audio, in bytes.
    """

    answer_id: str
    position: int
    audio: bytes


@dataclass(slots=True)
class _Answer:
    """An answer in a Playout, with its audio that is still queued."""

    answer_id: str
    audio: bytearray = field(default_factory=bytearray)
    #: Bytes of audio taken so far.
    taken: int = 0
    ended: bool = False

    def end(self) -> None:
        """Note that no more audio of the answer follows."""
        self.ended = True

    def take(self, size: int) -> bytes:
        """Remove and return ``size`` bytes of audio, or all that is left if that is less."""
        audio = bytes(self.audio[:size])
        del self.audio[:size]
        self.taken += len(audio)
        return audio


class Playout:
    """A queue of answers' audio, removed packet by packet. Has no socket and no clock.

    The audio is pcm16 or mu-law in the format ``audio``. The last packet of an answer is filled up with ``silence``,
    which is one byte. The volume of packets is lowered while the caller speaks and it is undecided whether this
    interrupts the answer.
    """

    def __init__(self, packet_bytes: int, audio: AudioFormat, *, silence: bytes = b"\0") -> None:
        #: Bytes of queued audio.
        self.waiting = 0
        self._ducker = Ducker(audio)
        self._packet_bytes = packet_bytes
        self._silence = silence
        self._answers: deque[_Answer] = deque()

    @property
    def unplayed(self) -> bool:
        """Whether the queue holds any answer, or the rest of one."""
        return bool(self._answers)

    @property
    def ready(self) -> bool:
        """Whether ``take`` would return a whole packet, the last packet of an answer, or the end of an answer."""
        return bool(self._answers) and (self._answers[0].ended or len(self._answers[0].audio) >= self._packet_bytes)

    def hear(self, message: ServerMessage) -> bool:
        """Queue the audio of one of the session's messages, if the message has any.

        A message about the caller's speech may change the volume. Returns True if the message silences the answers:
        then call ``clear`` to drop the audio that is still queued.
        """
        match message:
            case OutputChunk(modality=OutputModality.AUDIO):
                self.say(message.request_id, message.payload)
            case FinalChunk(finish_reason=FinishReason.CANCELLED):
                return any(answer.answer_id == message.request_id for answer in self._answers)
            case FinalChunk():
                self.finish(message.request_id)
            case BackchannelFrame(turn_id=turn_id, payload=payload):
                self.say(turn_id, payload)
                self.finish(turn_id)
            case SpeechStartedFrame(certain=False):
                self.duck(True)
            case SpeechDismissedFrame():
                self.duck(False)
            case SpeechStartedFrame() | SpeechConfirmedFrame():  # the caller interrupts
                self.duck(False)
                return True
        return False

    def duck(self, lowered: bool) -> None:
        """Lower the volume of the packets that are taken from now on, or restore their full volume."""
        self._ducker.duck(lowered)
        if not self._answers:
            self._ducker.settle()

    def say(self, answer_id: str, audio: bytes) -> None:
        """Queue audio of the answer ``answer_id`` after all audio queued before."""
        if not self._answers or self._answers[-1].answer_id != answer_id:
            if self._answers:
                self._answers[-1].end()
            self._answers.append(_Answer(answer_id))
        self._answers[-1].audio.extend(audio)
        self.waiting += len(audio)

    def finish(self, answer_id: str) -> None:
        """Note that no more audio of the answer ``answer_id`` follows."""
        for answer in self._answers:
            if answer.answer_id == answer_id:
                answer.end()

    def take(self, most: int | None = None) -> Played | None:
        """Remove and return the next packet; None if none is ready.

        With ``most``, several whole packets are joined and returned as one, of at most ``most`` bytes.
        """
        if not self.ready:
            return None
        answer = self._answers[0]
        if not answer.audio:
            self._answers.popleft()
            return Played(answer.answer_id, answer.taken, b"")
        whole = len(answer.audio) // self._packet_bytes * self._packet_bytes
        position = answer.taken
        audio = answer.take(min(whole, most or self._packet_bytes) or self._packet_bytes)
        self.waiting -= len(audio)
        packet = self._ducker.apply(audio.ljust(self._packet_bytes, self._silence))
        return Played(answer.answer_id, position, packet)

    def clear(self) -> list[str]:
        """Discard all queued audio. Returns the ids of the answers that were partly taken before."""
        heard = [answer.answer_id for answer in self._answers if answer.taken]
        self._answers.clear()
        self._ducker.settle()
        self.waiting = 0
        return heard
