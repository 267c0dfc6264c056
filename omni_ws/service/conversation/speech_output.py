"""The audio of one answer on its way out: in the client's format, placed on the time line, paced if asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from omni_ws.audio.encoder import AudioEncoder
from omni_ws.audio.samples import Samples
from omni_ws.audio.wav import wav_header
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.service.conversation.playback import Playback

#: Longer pieces, and everything that is compressed, are encoded in a worker thread; short raw pieces cost less than
#: the hop would.
_INLINE_SAMPLES: Final = 24_000
#: What is ahead by less goes out: clocks round, and a timer may fire a little early.
_LEAST_SLEEP_MS: Final = 0.5


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    payload: bytes
    start_ms: int


class SpeechOutput:
    """``max_lead_ms`` keeps the output at most so far ahead of its own playing; None sends as fast as it comes."""

    def __init__(self, target: AudioFormat, playback: Playback, *, max_lead_ms: float | None) -> None:
        #: How long what was encoded is.
        self.made_ms: float = 0
        self._target = target
        self._playback = playback
        self._max_lead_ms = max_lead_ms
        self._encoder: AudioEncoder | None = None
        self._source_rate = 0
        self._header_left = len(wav_header(sample_rate=target.sample_rate, channels=1, data_bytes=None))

    async def encode(self, samples: Samples, sample_rate: int) -> EncodedAudio | None:
        """None while the encoder still holds everything back."""
        if self._encoder is None:
            self._encoder = AudioEncoder(self._target, source_rate=sample_rate)
            self._source_rate = sample_rate
        elif sample_rate != self._source_rate:
            raise ValueError("an answer has one sample rate")
        if self._target.is_raw and len(samples) <= _INLINE_SAMPLES:
            payload = self._encoder.encode(samples)
        else:
            payload = await asyncio.to_thread(self._encoder.encode, samples)
        return await self._place(payload, len(samples) * 1000 / sample_rate)

    async def flush(self) -> EncodedAudio | None:
        """What the encoder held back, at the end of the answer."""
        if self._encoder is None:
            return None
        if self._target.is_raw:
            payload = self._encoder.flush()
        else:
            payload = await asyncio.to_thread(self._encoder.flush)
        return await self._place(payload, 0)

    async def _place(self, payload: bytes, source_ms: float) -> EncodedAudio | None:
        start_ms = self.made_ms
        # Where they can, the bytes themselves say how long the audio is, delays of the resampler included.
        size = len(payload)
        if self._target.encoding is AudioEncoding.WAV:
            header = min(size, self._header_left)
            self._header_left -= header
            self.made_ms += self._target.duration_ms(size - header)
        else:
            self.made_ms += self._target.duration_ms(size) if self._target.is_raw else source_ms
        if not payload:
            return None
        await self._pace(start_ms)
        return EncodedAudio(payload, round(start_ms))

    async def _pace(self, start_ms: float) -> None:
        # Again after the sleep: the client may have said meanwhile that it is not as far as it seemed.
        while (ahead_ms := self._ahead_ms(start_ms)) >= _LEAST_SLEEP_MS:  # noqa: ASYNC110 - there is no event in time
            await asyncio.sleep(ahead_ms / 1000)

    def _ahead_ms(self, start_ms: float) -> float:
        """How much too early it is for this part of the answer."""
        return 0 if self._max_lead_ms is None else start_ms - self._playback.position_ms - self._max_lead_ms
