"""AudioSocketLink: the TCP connection of a call from Asterisk, in the place of a WebSocket.

A message is a frame of AudioSocket: a byte for its kind, two for the length of its payload, the high one first, and the
payload. The first frame holds the UUID that the dialplan gave the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast
from uuid import UUID

from websockets.frames import CloseCode

from omni_ws.core.quota import ByteBudget
from omni_ws.errors import InvalidFrame, OmniError, PayloadTooLarge, SessionTimeout
from omni_ws.transport.http.hang_up import HangUp, HangUpWatch
from omni_ws.transport.native.connection import RESTS, FrameReceiver, Pause

HANG_UP: Final = 0x00
IDENTIFIER: Final = 0x01
KEY: Final = 0x03
#: Signed linear, 16 bits, the low byte first, mono, 8 kHz.
AUDIO: Final = 0x10
FAILURE: Final = 0xFF
#: Audio at 12 to 192 kHz, one kind for each rate.
OTHER_AUDIO: Final = range(0x11, 0x19)
HEADER_BYTES: Final = 3
#: A frame of audio has 20 ms as a rule, and a second at most.
MAX_AUDIO_BYTES: Final = 16_000
_LENGTHS: Final = {IDENTIFIER: 16, KEY: 1}
_FRAMES_PER_PASS: Final = 64
#: Unsent bytes from which on no more are written: a quarter of a second.
MAX_UNSENT_BYTES: Final = 4096
CLOSE_TIMEOUT_SEC: Final = 5.0


def encode_frame(kind: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return bytes((kind, *len(payload).to_bytes(2, "big"))) + payload


class AudioSocketLink(asyncio.Protocol):
    """Gives whole frames to its receiver; see SoleLink. Frames of unknown kinds are passed over.

    ``accepted`` is called once it is connected. There is nothing to ping: the kernel notices dead networks.
    """

    def __init__(self, accepted: Callable[[AudioSocketLink], None]) -> None:
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._receiver: FrameReceiver | None = None
        self._received = bytearray()
        #: What is still to come of a frame that is passed over.
        self._passed_over = 0
        self._pauses = Pause.NONE
        self._pass_scheduled = False
        self._failed = False
        self._first: asyncio.Future[UUID | None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._watch = HangUpWatch(self._loop, self._check_hang_up)
        self._pace_timer: asyncio.TimerHandle | None = None
        #: Of each number of bytes received, the seconds for which to pause reading.
        self.input_pace: Callable[[int], float] = lambda size: 0
        #: Called with what is wrong with a frame. After that nothing more is taken.
        self.refused: Callable[[OmniError], None] = self.refuse
        #: Whether the peer has yet to take what was written.
        self.paused = False
        self.heard_at = self._loop.time()

    @property
    def client(self) -> str:
        """The address of the peer."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return peer[0] if peer else ""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reading(self) -> bool:
        return not self._pauses & ~Pause.PASS

    async def identified(self, timeout: float) -> UUID | None:
        """Waits for the first frame; None when the peer disconnects first.

        Raises what is wrong with the frame, and SessionTimeout after ``timeout`` seconds.
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

    def attach(self, receiver: FrameReceiver, account: ByteBudget | None = None) -> None:
        """From now on frames go to ``receiver``."""
        self._receiver = receiver
        self.heard_at = self._loop.time()
        if not self.is_open:
            receiver.connection_closing()
        self.resume_reading(Pause.EARLY)

    # writing

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        """Send a whole frame without waiting."""
        if self._transport is not None and self.is_open:
            self._transport.write(data)

    def end_pass(self) -> None:
        """Nothing: audio and keys are little work."""

    def write_ping(self) -> None:
        """Nothing: see the class."""

    def touch(self) -> float:
        self.heard_at = self._loop.time()
        return self.heard_at

    def fail(self, code: CloseCode, reason: str) -> None:
        self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    async def close_in_time(self, code: int, reason: str) -> None:
        """Hang up, and abort when that takes longer than CLOSE_TIMEOUT_SEC. A hang-up has neither code nor reason."""
        self._failed = True  # nothing more is taken
        if self._transport is None:
            return
        self.write_message(encode_frame(HANG_UP), is_text=False)
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
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._accepted(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self._receiver is not None:
            self._receiver.resume_output()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        if self._pace_timer is not None:
            self._pace_timer.cancel()
        self._received.clear()
        if not self._first.done():
            self._first.set_result(None)
        if not self._lost.done():
            self._lost.set_result(None)
        if self._receiver is not None:
            self._receiver.connection_closing()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        if self._failed:
            return
        self._received += data
        if (seconds := self.input_pace(len(data))) > 0:
            self.pause_reading(Pause.PACE)
            if self._pace_timer is not None:
                self._pace_timer.cancel()
            self._pace_timer = self._loop.call_later(seconds, self._pace_kept)
        if not self._pauses:
            self._take_frames()

    # reading

    def pause_reading(self, reason: Pause) -> None:
        if not self._pauses and self._transport is not None and self.is_open:
            self._transport.pause_reading()
        rested = self._pauses & RESTS
        self._pauses |= reason
        if reason & RESTS and self._transport is not None:
            self._watch.begin(self._transport)
        if reason & RESTS and not rested and self._receiver is not None:
            self._receiver.reading_changed()

    def resume_reading(self, reason: Pause) -> None:
        if not self._pauses & reason:
            return
        self._pauses &= ~reason
        if not self._pauses & RESTS:
            self._watch.end()
            if reason & RESTS and self._receiver is not None:
                self._receiver.reading_changed()
        if self._pauses == Pause.PASS or (self._received and not self._pauses):
            self._schedule_pass()
        elif not self._pauses and self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def _pace_kept(self) -> None:
        self._pace_timer = None
        self.resume_reading(Pause.PACE)

    def _check_hang_up(self, found: HangUp) -> None:
        """A peer that has closed its sending side has hung up."""
        if found is not HangUp.UNKNOWN and self._transport is not None:
            self._transport.abort()

    def _schedule_pass(self) -> None:
        self.pause_reading(Pause.PASS)
        if not self._pass_scheduled:
            self._pass_scheduled = True
            self._loop.call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._pass_scheduled = False
        if self._pauses == Pause.PASS:
            self._pauses = Pause.NONE
            self._take_frames()
            if not self._pauses and self._transport is not None and self.is_open:
                self._transport.resume_reading()

    # frames

    def _take_frames(self) -> None:
        """Hands over whole frames, at most so many in a pass that other connections get their share."""
        received, start = self._received, 0
        try:
            for _ in range(_FRAMES_PER_PASS):
                skipped = min(self._passed_over, len(received) - start)
                self._passed_over -= skipped
                start += skipped
                if self._failed or self._pauses or len(received) - start < HEADER_BYTES:
                    return
                kind, size = received[start], int.from_bytes(received[start + 1 : start + HEADER_BYTES], "big")
                if not self._checked(kind, size):
                    start += HEADER_BYTES
                    self._passed_over = size
                    continue
                end = start + HEADER_BYTES + size
                if end > len(received):
                    return
                frame, start = bytes(received[start:end]), end
                self._give(frame)
            self._schedule_pass()
        except OmniError as error:
            self._failed = True
            self.refused(error)
        finally:
            del received[:start]

    def _checked(self, kind: int, size: int) -> bool:
        """Whether a frame is wanted, by its header alone. Raises InvalidFrame or PayloadTooLarge."""
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
