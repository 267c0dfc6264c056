"""An echo canceller between a microphone and a loudspeaker, which each have a thread and a rate of their own."""

from __future__ import annotations

from typing import Final

import numpy as np
import soxr

from omni_ws.audio.echo import EchoRemover
from omni_ws.client.audio import PlaybackBuffer
from omni_ws.installing import install_command

#: What is played waits at least so long for the piece of the microphone that may have its echo: the length of a piece.
LEAST_LAG_MS: Final = 20
#: Waiting for half of what the devices are late hides callbacks that come late, and is still ahead of the echo.
LAG_SHARE: Final = 0.5
#: Devices whose clocks differ let played audio pile up. More is dropped, and the canceller finds the new delay.
MOST_LAG_MS: Final = 250
#: A piece of which the canceller leaves less than this share of its energy is silenced.
LEFT_OVER: Final = 10 ** (-12 / 10)


class NoEchoCanceller(Exception):
    """The library is missing, or cannot work at the rate of a device; the message tells which."""


class EchoBetween:
    """Takes what a loudspeaker plays out of what a microphone hears; both are 16-bit mono.

    Each device calls its method from its own thread, with every piece of audio in turn. ``latency_ms`` is how late the
    two are together, by what they say; how late the echo is, up to half a second, is found out. Raises NoEchoCanceller.
    """

    def __init__(self, *, microphone_rate: int, loudspeaker_rate: int, latency_ms: float = 0) -> None:
        if microphone_rate % 100:
            raise NoEchoCanceller(f"it does not work at the microphone's rate of {microphone_rate} Hz")
        try:
            self._remover = EchoRemover(microphone_rate, left_over=LEFT_OVER)
        except ImportError:
            raise NoEchoCanceller(f"the library pywebrtc-audio is missing: {install_command('talk')}") from None
        self._resampler = soxr.ResampleStream(loudspeaker_rate, microphone_rate, 1, dtype="int16")
        bytes_per_ms = 2 * microphone_rate // 1000
        self._most_bytes = MOST_LAG_MS * bytes_per_ms
        lag_ms = min(MOST_LAG_MS / 2, max(LEAST_LAG_MS, LAG_SHARE * latency_ms))
        #: What was played and is yet to be heard, at the rate of the microphone.
        self._played = PlaybackBuffer(prefill_bytes=round(lag_ms) * bytes_per_ms)
        self._listening = False

    def played(self, audio: bytes) -> None:
        """Note what the loudspeaker is given, silence included."""
        if not self._listening:
            return
        if self._played.buffered_bytes > self._most_bytes:
            self._played.clear()
        self._played.write(self._resampler.resample_chunk(np.frombuffer(audio, "<i2")).tobytes())

    def heard(self, audio: bytes) -> bytes:
        """Return what the microphone hears without the echo."""
        self._listening = True
        near = np.frombuffer(audio, "<i2")
        far = np.frombuffer(self._played.read(len(audio)), "<i2")
        return self._remover.process(near, far).tobytes()
