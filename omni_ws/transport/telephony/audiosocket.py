"""Calls from Asterisk over its AudioSocket protocol, on a TCP port of its own.

A message is a frame: one byte for its kind, two bytes for the length of the payload (big-endian), and the payload. The
first frame holds the UUID that the dialplan gave the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final
from uuid import UUID

from websockets.frames import CloseCode

from omni_ws.core.chunks import AudioEncoding, AudioFormat, OutputChunk, OutputModality
from omni_ws.errors import InvalidFrame, OmniError, PayloadTooLarge, SessionTimeout
from omni_ws.service import unexpected
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.sessions.session import Session
from omni_ws.transport.http.application import Application
from omni_ws.transport.native.connection import Pause
from omni_ws.transport.native.keep_alive import NO_PINGS
from omni_ws.transport.native.tcp_link import Playout, TcpLink, TcpPort
from omni_ws.transport.recording import begin_recording
from omni_ws.transport.telephony.call import TELEPHONY_ORIGIN, PhoneCall, PhoneCalls

logger = logging.getLogger(__name__)

_AUDIO_FORMAT: Final = {"format": AudioEncoding.PCM16.value, "sample_rate": 8000}


class AudioSocketCalls(PhoneCalls):
    """The front end that listens for Asterisk, and opens a session for each call.

    If the server has API keys, the UUID of a call must be one of them.
    """

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._port = TcpPort("AudioSocket", flag="--telephony.audiosocket-port")
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int | None:
        """The port on which the server listens for Asterisk; None if it does not listen."""
        return self._port.number

    async def open_ports(self) -> None:
        settings = self._config.telephony
        if settings.audiosocket_port is not None:
            make = partial(AudioSocketLink, self._accept)
            await self._port.open(make, settings.audiosocket_host, settings.audiosocket_port)

    def _accept(self, link: AudioSocketLink) -> None:
        if len(self._calls) >= self._config.limits.max_connections:
            link.abort()
            return
        call = asyncio.create_task(self._serve(link), name="call over AudioSocket")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _serve(self, link: AudioSocketLink) -> None:
        """Serve one connection, from its first frame to its close."""
        self._openings.add(link.refuse)
        try:
            identifier = await link.identified(self._config.http.header_timeout_sec)
            if identifier is None:
                return
            key = self._authenticator.authenticate_header(f"Bearer {identifier}")
            link.limit_input(self._sessions.admission.input_pace(key))
            settings = self._config.telephony
            fields = {"instructions": settings.audiosocket_instructions, "greeting": settings.audiosocket_greeting}
            given = {name: text for name, text in fields.items() if text is not None}
            session = await self._open(key, link.client, _AUDIO_FORMAT, **given)
        except OmniError as error:
            logger.info("refused a call over AudioSocket from %s: %s", link.client, error.message)
            await link.close_in_time(0, error.message)
            return
        finally:
            self._openings.discard(link.refuse)
        begin_recording(self._recorder, session, TELEPHONY_ORIGIN, key)
        call = AudioSocketCall(link, session, thinking_sound=settings.thinking_sound)
        session.attach(call)
        session.conversation.greet()
        await call.serve()

    def end_all(self, error: OmniError) -> None:
        self._port.close()
        super().end_all(error)

    async def wait_closed(self) -> None:
        if self._calls:
            await asyncio.wait(tuple(self._calls))
        await super().wait_closed()
        await self._port.wait_closed()


# A call.


class AudioSocketCall(PhoneCall):
    """A phone call: receives frames of audio and keys, and sends audio in real time. A hang-up ends the call."""

    def __init__(self, link: AudioSocketLink, session: Session, *, thinking_sound: bool) -> None:
        super().__init__(link, session, rounds=NO_PINGS, thinking_sound=thinking_sound)
        self._link = link
        self._playout: PacedPlayout = PacedPlayout(self._send, self._report, self.output_ready)

    async def serve(self) -> None:
        """Serve the call to its end, and hang up."""
        try:
            await self.run()
        finally:
            self._playout.close()

    def _close_code(self, error: OmniError) -> int:
        return CloseCode.NORMAL_CLOSURE  # a hang-up has none

    # input

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if not self._listening:
            return
        kind, payload = data[0], bytes(data[HEADER_BYTES:])
        try:
            if kind == AUDIO:
                self._record(payload, by_user=True)
                self._hear(payload)
            elif kind == KEY:
                self._press(payload.decode("latin-1"))
            elif kind in (HANG_UP, FAILURE):
                self._session.end(None)
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the input of a call"))

    # output

    def resume_output(self) -> None:
        self._playout.resume()
        self.output_ready()

    def _record(self, audio: bytes, *, by_user: bool, request_id: str | None = None) -> None:
        if self._session.recording is not None and audio:
            self._session.recording.sound(audio, TELEPHONE, by_user=by_user, request_id=request_id)

    def _send(self, audio: bytes) -> bool:
        self._record(audio, by_user=False, request_id=self._playout.playing)
        self._link.write_message(encode_frame(AUDIO, audio), is_text=False)
        return not self._link.paused

    def _clear(self) -> None:
        self._playout.clear()

    def _flush(self) -> None:
        """Pass the messages of the outbox to the playout, as long as the playout has room for them."""
        self._flush_scheduled = False
        while self._link.is_open and self._playout.takes(self._outbox.next):
            if (message := self._take_message()) is not None:
                self._playout.play(message)
        self._check_silent()


# The connection and its frames.

HANG_UP: Final = 0x00
IDENTIFIER: Final = 0x01
KEY: Final = 0x03
#: Audio: signed linear PCM, 16 bits, little-endian, mono, 8 kHz.
AUDIO: Final = 0x10
FAILURE: Final = 0xFF
#: Audio at 12 to 192 kHz, one kind for each rate.
OTHER_AUDIO: Final = range(0x11, 0x19)
HEADER_BYTES: Final = 3
#: A frame of audio has 20 ms as a rule, and a second at most.
MAX_AUDIO_BYTES: Final = 16_000
_LENGTHS: Final = {IDENTIFIER: 16, KEY: 1}
#: Unsent bytes at which writing stops: a quarter of a second of audio.
MAX_UNSENT_BYTES: Final = 4096


def encode_frame(kind: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return bytes((kind, *len(payload).to_bytes(2, "big"))) + payload


class AudioSocketLink(TcpLink):
    """A TcpLink with the frames of AudioSocket. Frames of unknown kinds are ignored.

    ``accepted`` is called once the link is connected.
    """

    def __init__(self, accepted: Callable[[AudioSocketLink], None]) -> None:
        super().__init__(max_unsent=MAX_UNSENT_BYTES)
        self._accepted = accepted
        #: Bytes still to come of a frame that is ignored.
        self._passed_over = 0
        self._first: asyncio.Future[UUID | None] = self.loop.create_future()

    async def identified(self, timeout: float) -> UUID | None:
        """Wait for the first frame, and return the UUID in it; None if the peer disconnects first.

        Raises InvalidFrame for any other first frame, SessionTimeout after ``timeout`` seconds, and the error given to
        ``refuse``.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._first
        except TimeoutError:
            raise SessionTimeout(f"no UUID within {timeout:g} seconds") from None

    def refuse(self, error: OmniError) -> None:
        """Make ``identified`` raise ``error``."""
        if not self._first.done():
            self._first.set_exception(error)

    def _write_farewell(self) -> None:
        self.write_message(encode_frame(HANG_UP), is_text=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._accepted(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._first.done():
            self._first.set_result(None)
        super().connection_lost(exc)

    # frames

    def _take_frame(self, received: bytearray, start: int) -> int:
        if self._passed_over:
            skipped = min(self._passed_over, len(received) - start)
            self._passed_over -= skipped
            return start + skipped
        if len(received) - start < HEADER_BYTES:
            return start
        kind, size = received[start], int.from_bytes(received[start + 1 : start + HEADER_BYTES], "big")
        if not self._checked(kind, size):
            self._passed_over = size
            return start + HEADER_BYTES
        end = start + HEADER_BYTES + size
        if end > len(received):
            return start
        self._give(bytes(received[start:end]))
        return end

    def _frames_refused(self, error: OmniError) -> None:
        if self._receiver is None:
            self.refuse(error)
        else:
            super()._frames_refused(error)

    def _checked(self, kind: int, size: int) -> bool:
        """Return whether frames with this header are used, and not ignored. Raises InvalidFrame or PayloadTooLarge."""
        if not self._first.done() and kind != IDENTIFIER:
            raise InvalidFrame("the first frame must hold the UUID of the call")
        if kind in OTHER_AUDIO:
            raise InvalidFrame("audio must be signed linear at 8 kHz (kind 0x10)")
        if kind == AUDIO and size > MAX_AUDIO_BYTES:
            raise PayloadTooLarge(f"a frame of audio may have {MAX_AUDIO_BYTES} bytes, not {size}")
        if kind == AUDIO and size % 2:
            raise InvalidFrame("a sample of audio has two bytes")
        if size != _LENGTHS.get(kind, size):
            raise InvalidFrame(f"a frame of kind {kind:#04x} must have {_LENGTHS[kind]} bytes, not {size}")
        return kind in (HANG_UP, IDENTIFIER, KEY, AUDIO, FAILURE)

    def _give(self, frame: bytes) -> None:
        if not self._first.done():
            self.pause_reading(Pause.EARLY)
            self._first.set_result(UUID(bytes=frame[HEADER_BYTES:]))
        elif self._receiver is not None:
            self._receiver.receive_message(frame, is_text=False)


# What the caller hears.

#: pcm16 at 8 kHz has 16 bytes a millisecond.
BYTES_PER_MS: Final = 16
TELEPHONE: Final = AudioFormat(sample_rate=8000)
FRAME_SEC: Final = 0.02
FRAME_BYTES: Final = 20 * BYTES_PER_MS
#: A playout is full with this much audio: 2 s. One output may go beyond.
ROOM_BYTES: Final = 2000 * BYTES_PER_MS
#: If playback is this far behind the clock, it goes on from now, instead of catching up.
MAX_LATE_SEC: Final = 0.1


class PacedPlayout(Playout):
    """A Playout that sends the audio of answers in real time, 20 ms at a time. Between answers it sends nothing.

    ``send`` is called with each frame of pcm16. If it returns False, sending pauses until ``resume`` is called.
    ``report`` is called with the request id and the position in its answer, in milliseconds, up to which audio was
    played. ``progressed`` is called after each frame, and at the end of each answer.
    """

    def __init__(
        self, send: Callable[[bytes], bool], report: Callable[[str, float], None], progressed: Callable[[], None]
    ) -> None:
        super().__init__(FRAME_BYTES, TELEPHONE)
        self._send = send
        self._report = report
        self._progressed = progressed
        self._loop = asyncio.get_running_loop()
        self._held = False
        #: When the next frame is due. It is never before the last one was heard.
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        #: The answer whose audio is being sent; None for other sound.
        self.playing: str | None = None

    def takes(self, message: ServerMessage | None) -> bool:
        """Return whether there is room for a message. One without sound never waits: the caller may interrupt by it."""
        sounds = isinstance(message, OutputChunk) and message.modality is OutputModality.AUDIO
        return message is not None and not (sounds and self.waiting >= ROOM_BYTES)

    def play(self, message: ServerMessage) -> None:
        """Queue the audio of one of the session's messages; drop what is queued if the message silences the answers."""
        if self.hear(message):
            self.clear()
        self._arm()

    def resume(self) -> None:
        """Continue sending: the link has room again."""
        self._held = False
        self._arm()

    def close(self) -> None:
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None or self._held or not self.ready:
            return
        now = self._loop.time()
        if now - self._due > MAX_LATE_SEC:
            self._due = now
        self._timer = self._loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if (played := self.take()) is not None:
            self._report(played.answer_id, played.position / BYTES_PER_MS)
            if played.audio:
                self._due += FRAME_SEC
                self.playing = played.answer_id
                self._held = not self._send(played.audio)
                self.playing = None
        self._arm()
        self._progressed()
