"""SpeechOutput: encodes the audio of one answer, places it on the time line and paces it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from omni_ws.audio.encoder import AudioEncoder
from omni_ws.audio.samples import Pcm16, Samples
from omni_ws.audio.wav import wav_header
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.engine.threads import Work, run_work

#: Longer pieces, and all compressed audio, are encoded in a worker thread. For short raw pieces the switch would cost
#: more than the encoding.
_INLINE_SAMPLES: Final = 24_000
#: Audio that is early by less is sent: clocks round, and a timer may fire a little early.
_LEAST_SLEEP_MS: Final = 0.5


class SpeechOutput:
    """Turns the samples of one answer into audio of the format ``target``.

    With ``max_lead_ms`` no audio is returned earlier than that before its playback is due; with None, at once.
    ``due_ms`` tells in how many milliseconds the audio at a place of the answer will be played, and ``released`` waits
    while the playback is held.
    """

    def __init__(
        self,
        target: AudioFormat,
        due_ms: Callable[[float], float],
        *,
        max_lead_ms: float | None,
        released: Callable[[], Awaitable[None]],
    ) -> None:
        #: Where the latest audio begins in the answer, and where it ends.
        self.start_ms: float = 0
        self.end_ms: float = 0
        self._target = target
        self._is_raw = target.is_raw
        self._bytes_per_second = target.bytes_per_second
        self._due_ms = due_ms
        self._max_lead_ms = max_lead_ms
        self._released = released
        self._encoder: AudioEncoder | None = None
        self._source_rate = 0
        self._header_left = len(wav_header(sample_rate=target.sample_rate, channels=1, data_bytes=None))

    def encode_now(self, samples: Samples | Pcm16, sample_rate: int) -> bytes | None:
        """Encode samples as ``encode`` does. None, and nothing is done, where that would wait."""
        if not self._is_raw or len(samples) > _INLINE_SAMPLES or sample_rate != self._source_rate:
            return None
        if self._max_lead_ms is not None and self._ahead_ms(self.end_ms) >= _LEAST_SLEEP_MS:
            return None
        assert self._encoder is not None
        payload = self._encoder.encode(samples)
        self.start_ms = self.end_ms
        self.end_ms += len(payload) * 1000 / self._bytes_per_second
        return payload

    async def encode(self, samples: Samples | Pcm16, sample_rate: int) -> bytes:
        """Encode samples, and wait until they are due. Returns b"" while the encoder buffers them all.

        Raises ValueError if the sample rate changes within the answer.
        """
        if self._encoder is None:
            self._encoder = AudioEncoder(self._target, source_rate=sample_rate)
            self._source_rate = sample_rate
        elif sample_rate != self._source_rate:
            raise ValueError("the sample rate must not change within an answer")
        if self._is_raw and len(samples) <= _INLINE_SAMPLES:
            payload = self._encoder.encode(samples)
        else:
            payload = await run_work(Work.ENCODING, self._encoder.encode, samples)
        return await self._place(payload, len(samples) * 1000 / sample_rate)

    async def flush(self) -> bytes:
        """Encode what the encoder has buffered, at the end of the answer, and wait until it is due."""
        if self._encoder is None:
            return b""
        if self._is_raw:
            payload = self._encoder.flush()
        else:
            payload = await run_work(Work.ENCODING, self._encoder.flush)
        return await self._place(payload, 0)

    async def _place(self, payload: bytes, source_ms: float) -> bytes:
        self.start_ms = self.end_ms
        # Raw audio is measured by its bytes, which include the delay of the resampler; compressed audio by its source.
        size = len(payload)
        if self._target.encoding is AudioEncoding.WAV:
            header = min(size, self._header_left)
            self._header_left -= header
            self.end_ms += self._target.duration_ms(size - header)
        else:
            self.end_ms += self._target.duration_ms(size) if self._is_raw else source_ms
        if payload:
            # Again after the sleep: a report, or a hold, may have set the position back meanwhile.
            while (ahead_ms := self._ahead_ms(self.start_ms)) >= _LEAST_SLEEP_MS:
                await asyncio.sleep(ahead_ms / 1000)
                await self._released()
        return payload

    def _ahead_ms(self, start_ms: float) -> float:
        """Milliseconds until audio at ``start_ms`` may be sent; 0 or less when it is due."""
        return 0 if self._max_lead_ms is None else self._due_ms(start_ms) - self._max_lead_ms
