"""SpeechOutput: encodes the audio of one answer, places it on the time line and paces it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from omni_ws.audio.encoder import AudioEncoder
from omni_ws.audio.samples import Samples
from omni_ws.audio.wav import wav_header
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.service.conversation.playback import Playback

#: Longer pieces, and all compressed audio, are encoded in a worker thread. For short raw pieces the switch would cost
#: more than the encoding.
_INLINE_SAMPLES: Final = 24_000
#: Audio that is early by less is sent: clocks round, and a timer may fire a little early.
_LEAST_SLEEP_MS: Final = 0.5


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """A piece of encoded audio, and where it begins in the answer."""

    payload: bytes
    start_ms: int


class SpeechOutput:
    """Turns the samples of one answer into audio of the format ``target``.

    With ``max_lead_ms`` no audio is returned earlier than that before its playback is due; with None, at once.
    """

    def __init__(self, target: AudioFormat, playback: Playback, *, max_lead_ms: float | None) -> None:
        #: Duration of the audio that was encoded so far.
        self.made_ms: float = 0
        self._target = target
        self._playback = playback
        self._max_lead_ms = max_lead_ms
        self._encoder: AudioEncoder | None = None
        self._source_rate = 0
        self._header_left = len(wav_header(sample_rate=target.sample_rate, channels=1, data_bytes=None))

    def is_immediate(self, samples: Samples, sample_rate: int) -> bool:
        """Whether ``encode_now`` may encode these samples: they are short and raw, are due, and continue the answer."""
        if not self._target.is_raw or len(samples) > _INLINE_SAMPLES:
            return False
        if self._encoder is not None and sample_rate != self._source_rate:
            return False
        return self._ahead_ms(self.made_ms) < _LEAST_SLEEP_MS

    def encode_now(self, samples: Samples, sample_rate: int) -> EncodedAudio | None:
        """Encode samples that are ``is_immediate``. None while the resampler buffers them all."""
        payload = self._opened(sample_rate).encode(samples)
        return self._place(payload, len(samples) * 1000 / sample_rate)

    async def encode(self, samples: Samples, sample_rate: int) -> EncodedAudio | None:
        """Encode samples, and wait until they are due. None while the encoder buffers them all.

        Raises ValueError if the sample rate changes within the answer.
        """
        encoder = self._opened(sample_rate)
        if self._target.is_raw and len(samples) <= _INLINE_SAMPLES:
            payload = encoder.encode(samples)
        else:
            payload = await asyncio.to_thread(encoder.encode, samples)
        return await self._paced(self._place(payload, len(samples) * 1000 / sample_rate))

    async def flush(self) -> EncodedAudio | None:
        """Encode what the encoder has buffered, at the end of the answer. None if that is nothing."""
        if self._encoder is None:
            return None
        if self._target.is_raw:
            payload = self._encoder.flush()
        else:
            payload = await asyncio.to_thread(self._encoder.flush)
        return await self._paced(self._place(payload, 0))

    def _opened(self, sample_rate: int) -> AudioEncoder:
        if self._encoder is None:
            self._encoder = AudioEncoder(self._target, source_rate=sample_rate)
            self._source_rate = sample_rate
        elif sample_rate != self._source_rate:
            raise ValueError("the sample rate must not change within an answer")
        return self._encoder

    def _place(self, payload: bytes, source_ms: float) -> EncodedAudio | None:
        """Place encoded audio behind what was encoded before; None if it is empty."""
        start_ms = self.made_ms
        # Raw audio is measured by its bytes, which include the delay of the resampler; compressed audio by its source.
        size = len(payload)
        if self._target.encoding is AudioEncoding.WAV:
            header = min(size, self._header_left)
            self._header_left -= header
            self.made_ms += self._target.duration_ms(size - header)
        else:
            self.made_ms += self._target.duration_ms(size) if self._target.is_raw else source_ms
        return EncodedAudio(payload, round(start_ms)) if payload else None

    async def _paced(self, audio: EncodedAudio | None) -> EncodedAudio | None:
        """Wait until the audio is due."""
        if audio is not None:
            # Again after the sleep: a report meanwhile may have set the position back.
            while (ahead_ms := self._ahead_ms(audio.start_ms)) >= _LEAST_SLEEP_MS:  # noqa: ASYNC110 - waits for time, not for an event
                await asyncio.sleep(ahead_ms / 1000)
        return audio

    def _ahead_ms(self, start_ms: float) -> float:
        """Milliseconds until audio at ``start_ms`` may be sent; 0 or less when it is due."""
        return 0 if self._max_lead_ms is None else start_ms - self._playback.position_ms - self._max_lead_ms
