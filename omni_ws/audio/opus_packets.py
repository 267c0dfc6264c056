"""Opus packets without a container, as RTP carries them (RFC 7587): 24 kHz, mono, pcm16 on this side."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import av
import av.error
import numpy as np

from omni_ws.errors import InvalidFrame

SAMPLE_RATE: Final = 24_000
#: Audio in a packet that is sent: 20 ms.
PACKET_SAMPLES: Final = SAMPLE_RATE // 50
PACKET_BYTES: Final = 2 * PACKET_SAMPLES
#: The longest packet is 120 ms, at most (RFC 6716, 3.2.1).
MAX_PACKET_BYTES: Final = 1500
#: The bits of a packet's first byte that tell mode and length of its frames. Those left say how many: 0 means one.
_CONFIG_BITS: Final = 0xFC
#: What stands for a lost packet before any has come: silence of 20 ms.
_SILENT: Final = b"\xf8"


class OpusPacketDecoder:
    """Decodes the packets of one stream in their order, and conceals the ones that are lost.

    libav offers no call for a lost packet. A packet whose frame is empty means the same to libopus (RFC 6716, 3.1):
    it goes on with what was heard, and fades it out. Forward error correction needs a call that libav does not offer.
    """

    def __init__(self) -> None:
        self._codec = av.CodecContext.create("libopus", "r")
        self._resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        self._lost = _SILENT
        #: Length of the last packet in seconds.
        self.seconds = 0.0
        self._decoded_seconds = 0.0

    def decode(self, packet: bytes) -> bytes:
        """The audio of a packet. Raises InvalidFrame for what is not Opus."""
        if not 0 < len(packet) <= MAX_PACKET_BYTES:
            raise InvalidFrame("an RTP packet holds no Opus")
        audio = self._decoded(packet)
        self._lost = bytes([packet[0] & _CONFIG_BITS])
        self.seconds = self._decoded_seconds
        return audio

    def conceal(self) -> bytes:
        """What probably was in a lost packet: as long as one frame of the packet before it."""
        return self._decoded(self._lost)

    def _decoded(self, packet: bytes) -> bytes:
        try:
            frames = self._codec.decode(av.Packet(packet))
        except av.error.FFmpegError:
            raise InvalidFrame("an RTP packet holds no Opus") from None
        self._decoded_seconds = sum(frame.samples / frame.sample_rate for frame in frames)
        made = [even for frame in frames for even in self._resampler.resample(frame)]
        return b"".join(np.ascontiguousarray(frame.to_ndarray()).tobytes() for frame in made)


class OpusPacketEncoder:
    """Encodes pieces of 20 ms. Each packet repeats the one before it in few bits, for a player that has lost that."""

    def __init__(self, *, bit_rate: int = 32_000) -> None:
        codec = self._codec = av.CodecContext.create("libopus", "w")
        codec.sample_rate = SAMPLE_RATE
        codec.format, codec.layout = "s16", "mono"
        codec.bit_rate = bit_rate
        codec.time_base = Fraction(1, SAMPLE_RATE)
        codec.options = {
            "application": "voip",
            "frame_duration": "20",
            "fec": "1",
            "packet_loss": "5",
            "compression_level": "5",
        }

    def encode(self, audio: bytes) -> bytes:
        """The packet of PACKET_BYTES of audio."""
        frame = av.AudioFrame.from_ndarray(np.frombuffer(audio, "<i2")[None, :], format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        return b"".join(bytes(packet) for packet in self._codec.encode(frame))
