"""CallMicrophone: the packets of a caller's track as an unbroken stream of audio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from aiortc import RTCRtpReceiver

from omni_ws.audio.compressed import SAMPLE_RATE, OpusPacketDecoder
from omni_ws.core.reorder import CLOCK_RATE, JitterBuffer, MediaPacket, PacketOutcome
from omni_ws.errors import InvalidFrame
from omni_ws.metrics import Metrics

logger = logging.getLogger(__name__)

#: How much of a gap is concealed. Behind that libopus has faded out what was heard before it.
CONCEALED_SEC: Final = 0.1
#: A longer gap is not filled: the caller's clock has jumped.
MAX_GAP_SEC: Final = 10.0
#: Audio that comes faster than it is spoken is taken up to so much: the longest gap, and what was held up on its way.
MAX_AHEAD_SEC: Final = 12.0
#: The longest packet of Opus (RFC 6716, 3.2.5).
_MAX_PACKET_SEC: Final = 0.12
#: Where aiortc keeps its own buffer. That waits for 320 ms at the first loss, and keeps the delay to the call's end.
_BUFFER: Final = "_RTCRtpReceiver__jitter_buffer"
#: What its decoder's thread reads. None ends the thread, which has nothing to do here.
_DECODER_QUEUE: Final = "_RTCRtpReceiver__decoder_queue"


class CallMicrophone:
    """Orders the packets, decodes them, fills what is missing, and calls ``hear`` with pcm16 of SAMPLE_RATE.

    Everything happens on the event loop: to decode a packet of 20 ms takes 0.04 ms. So no call gets more than the time
    that it lasts: what would be more than ``MAX_AHEAD_SEC`` ahead of the clock is dropped before it is decoded.
    """

    def __init__(self, hear: Callable[[bytes], None], metrics: Metrics) -> None:
        self._hear = hear
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._buffer = JitterBuffer()
        self._decoder = OpusPacketDecoder()
        #: The time stamp that follows what was decoded; None before the first packet.
        self._expected: int | None = None
        #: How much audio there was beyond the time that has passed, and when that was so.
        self._ahead = 0.0
        self._ahead_at = self._loop.time()
        #: Whether packets behind that were lost.
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def connect(self, receiver: RTCRtpReceiver) -> None:
        """Take the packets of ``receiver`` before it buffers and decodes them itself."""
        if not hasattr(receiver, _BUFFER):
            raise RuntimeError("this version of aiortc keeps its jitter buffer elsewhere")
        setattr(receiver, _BUFFER, self)
        getattr(receiver, _DECODER_QUEUE).put(None)

    def add(self, packet: Any) -> tuple[bool, None]:
        """What aiortc calls with each packet of the track. Returns that it has nothing more to do."""
        if not self._closed:
            now = self._loop.time()
            # A packet of padding alone, with which senders measure the network, has a number like all others.
            passed = self._buffer.receive(
                packet.sequence_number, packet.timestamp, bytes(packet.payload), now=now, source=packet.ssrc
            )
            self._pass_on(passed)
            self._arm()
        return False, None

    def close(self) -> None:
        self._closed = True
        self._disarm()

    def _arm(self) -> None:
        self._disarm()
        if (due := self._buffer.get_timer()) is not None:
            self._timer = self._loop.call_at(due, self._on_timer, due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, due: float) -> None:
        self._timer = None
        self._pass_on(self._buffer.pass_over(max(self._loop.time(), due)))  # a timer may fire a little early
        if not self._closed:
            self._arm()

    def _pass_on(self, packets: Iterable[MediaPacket]) -> None:
        counts, self._buffer.counts = self._buffer.counts, {}
        for packet in packets:
            if packet.begins and self._expected is not None:
                self._decoder, self._expected, self._lost = OpusPacketDecoder(), None, False
            self._lost = self._lost or packet.lost > 0
            if not packet.payload:
                continue
            gap = self._gap(packet)
            try:
                if not self._keeps_pace(gap / CLOCK_RATE):
                    raise InvalidFrame("the audio of a call comes faster than it is spoken")
                audio = self._fill(gap) + self._decoder.decode(packet.payload)
            except InvalidFrame:
                counts[PacketOutcome.DROPPED] = counts.get(PacketOutcome.DROPPED, 0) + 1
                continue
            self._ahead += self._decoder.seconds + gap / CLOCK_RATE
            self._lost = False
            self._expected = (packet.timestamp + round(self._decoder.seconds * CLOCK_RATE)) % (1 << 32)
            if not self._closed:
                self._hear(audio)
        for outcome, number in counts.items():
            self._metrics.webrtc_packets.labels(outcome.value).inc(number)

    def _keeps_pace(self, gap_sec: float) -> bool:
        """Whether there is time for a gap and a packet."""
        now = self._loop.time()
        self._ahead = max(0.0, self._ahead - (now - self._ahead_at))
        self._ahead_at = now
        return self._ahead + gap_sec + _MAX_PACKET_SEC <= MAX_AHEAD_SEC

    def _gap(self, packet: MediaPacket) -> int:
        """The ticks between what was decoded and this packet; 0 where it is no gap to be filled."""
        if self._expected is None:
            return 0
        ticks = (packet.timestamp - self._expected) % (1 << 32)
        return 0 if ticks > MAX_GAP_SEC * CLOCK_RATE else ticks  # or it overlaps with what was decoded

    def _fill(self, ticks: int) -> bytes:
        """The audio of a gap: concealed where it was lost, else left out as silence."""
        size = 2 * (ticks * SAMPLE_RATE // CLOCK_RATE)
        filled = bytearray()
        if self._lost:
            self._metrics.webrtc_concealed_seconds.inc(ticks / CLOCK_RATE)
            wanted = min(size, int(2 * SAMPLE_RATE * CONCEALED_SEC))
            while len(filled) < wanted and (made := self._decoder.conceal()):
                filled += made
        return bytes(filled[:size].ljust(size, b"\0"))
