"""CallSpeaker: the answers of a call as a track of Opus packets, sent at the pace at which they are heard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av import Packet

from omni_ws.audio.compressed import PACKET_BYTES, OpusPacketEncoder
from omni_ws.engine.threads import Work, run_work

PACKET_SEC: Final = 0.02
#: A track this far behind the clock goes on from now, instead of catching up with all of it.
MAX_LATE_SEC: Final = 0.1
#: Sent at once after a pause, ahead of the clock: a player waits for more than one packet before it begins.
HEAD_START_SEC: Final = 2 * PACKET_SEC
_CLOCK_RATE: Final = 48_000


@dataclass(slots=True)
class _Spoken:
    """The audio of a response that was not sent yet."""

    response_id: str
    audio: bytearray = field(default_factory=bytearray)
    started: bool = False
    ended: bool = False


class CallSpeaker(MediaStreamTrack):
    """A track that sends what there is to say, and nothing in between: a player takes pauses for silence.

    ``on_started`` and ``on_stopped`` are called with the id of a response when its audio begins and has been sent.
    """

    kind = "audio"

    def __init__(self, on_started: Callable[[str], None], on_stopped: Callable[[str], None]) -> None:
        super().__init__()
        self._on_started = on_started
        self._on_stopped = on_stopped
        self._now = asyncio.get_running_loop().time
        self._encoder = OpusPacketEncoder()
        self._spoken: deque[_Spoken] = deque()
        self._changed = asyncio.Event()
        self._due = self._origin = self._now()

    def say(self, response_id: str, audio: bytes) -> None:
        """Audio of a response, behind what was said before. pcm16 of 24 kHz."""
        if not self._spoken or self._spoken[-1].response_id != response_id:
            if self._spoken:
                self._spoken[-1].ended = True
            self._spoken.append(_Spoken(response_id))
        self._spoken[-1].audio += audio
        self._changed.set()

    def finish(self, response_id: str) -> None:
        """There is no more audio of this response."""
        for spoken in self._spoken:
            if spoken.response_id == response_id:
                spoken.ended = True
        self._changed.set()

    def clear(self) -> list[str]:
        """Drop what was not sent. Returns the ids of the responses that were being heard."""
        heard = [spoken.response_id for spoken in self._spoken if spoken.started]
        self._spoken.clear()
        return heard

    def stop(self) -> None:
        self._spoken.clear()
        self._changed.set()
        super().stop()

    async def recv(self) -> Packet[Any]:
        """The next packet, when it is due. Raises MediaStreamError at the end of the track."""
        while True:
            while not self._sayable and self.readyState == "live":
                self._changed.clear()
                await self._changed.wait()
            if self.readyState != "live":
                raise MediaStreamError
            now = self._now()
            if now < self._due:
                await asyncio.sleep(self._due - now)
            elif now - self._due > MAX_LATE_SEC:
                self._due = now - HEAD_START_SEC
            if (audio := self._take()) is None:  # it was cleared meanwhile
                continue
            packet = Packet(await run_work(Work.CALLS, self._encoder.encode, audio))
            packet.pts = round((self._due - self._origin) * _CLOCK_RATE)
            packet.time_base = Fraction(1, _CLOCK_RATE)
            self._due += PACKET_SEC
            return packet

    @property
    def _sayable(self) -> bool:
        """Whether there is a packet to send, or an end to tell of."""
        return bool(self._spoken) and (self._spoken[0].ended or len(self._spoken[0].audio) >= PACKET_BYTES)

    def _take(self) -> bytes | None:
        """The next 20 ms; None where there are none."""
        while self._sayable:
            spoken = self._spoken[0]
            if spoken.audio:
                if not spoken.started:
                    spoken.started = True
                    self._on_started(spoken.response_id)
                audio = bytes(spoken.audio[:PACKET_BYTES].ljust(PACKET_BYTES, b"\0"))
                del spoken.audio[:PACKET_BYTES]
                return audio
            self._spoken.popleft()
            if spoken.started:
                self._on_stopped(spoken.response_id)
        return None
