"""KeptSpeech: the audio of a request, kept for the history until its words are known."""

from __future__ import annotations

import math
from typing import Final

from omni_ws.audio.mime import parse_audio_format
from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.messages import Speech
from omni_ws.core.quota import ByteBudget

#: What a second of speech counts in a history. Qwen2-Audio and Qwen2.5-Omni read one token for 40 ms.
TOKENS_PER_SEC: Final = 25
#: What the speech of a request, and that in a history, may hold. At 25 tokens a second a history of 4096 tokens takes
#: 5 MB of 16 kHz pcm16; other formats take more.
MAX_SPEECH_BYTES: Final = 16 << 20
#: What a run of audio of one format costs to hold besides its bytes.
RUN_OVERHEAD_BYTES: Final = 256
#: The same for each chunk of a run, until the run is joined.
CHUNK_OVERHEAD_BYTES: Final = 64


def tokens_of(speech: Speech) -> int:
    return math.ceil(speech.audio_ms * TOKENS_PER_SEC / 1000)


def held_bytes(speech: Speech) -> int:
    """What is charged for it."""
    return sum(len(chunk.payload) + RUN_OVERHEAD_BYTES for chunk in speech.chunks)


class KeptSpeech:
    """Takes the audio chunks of one request. ``audio`` is the format of chunks that name none.

    What is kept is charged to ``budget``, up to half of it: the rest is for input that was not worked on.
    """

    def __init__(self, audio: AudioFormat, budget: ByteBudget, *, max_tokens: int, unwanted: str | None = None) -> None:
        """``unwanted`` is the reason why none can be kept, where that is known before any has come."""
        #: Whether there was any audio.
        self.began = False
        #: Why it is not kept; None while it is.
        self.lost = unwanted
        self._audio = audio
        self._bytes_per_ms = audio.bytes_per_second / 1000
        self._budget = budget
        self._max_tokens = max_tokens
        self._audio_ms = 0.0
        self._charged = 0
        #: Neighbouring chunks of one format are one run. They are joined once: a buffer that grows would be copied
        #: again and again while somebody speaks.
        self._runs: list[tuple[str | None, list[bytes]]] = []

    def append(self, chunk: InputChunk) -> None:
        payload = chunk.payload
        self.began = self.began or bool(payload)
        if self.lost is not None or not payload:
            return
        continues = bool(self._runs) and self._runs[-1][0] == chunk.format
        cost = len(payload) + CHUNK_OVERHEAD_BYTES + (0 if continues else RUN_OVERHEAD_BYTES)
        if chunk.format is None:
            self._audio_ms += len(payload) / self._bytes_per_ms
        else:
            self._audio_ms += parse_audio_format(chunk.format, self._audio).duration_ms(len(payload))
        if self._audio_ms * TOKENS_PER_SEC > self._max_tokens * 1000 or self._charged + cost > MAX_SPEECH_BYTES:
            self._lose("it exceeds the history's token limit")
        elif self._budget.held + cost > self._budget.capacity // 2:
            self._lose("the server's memory for speech is full")
        else:
            self._budget.take(cost)
            self._charged += cost
            if not continues:
                self._runs.append((chunk.format, []))
            self._runs[-1][1].append(payload)

    def hand_over(self, *, audio_ms: float) -> Speech | None:
        """What is kept, for which the taker gives back ``held_bytes``; None where it is lost.

        ``audio_ms`` is its length as the engine decoded it; 0 where that is not known.
        """
        if audio_ms * TOKENS_PER_SEC > self._max_tokens * 1000:
            self._lose("it exceeds the history's token limit")
        if self.lost is not None:
            return None
        chunks = tuple(InputChunk(Modality.AUDIO, b"".join(run), format=name) for name, run in self._runs)
        speech = Speech(chunks, self._audio, max(self._audio_ms, audio_ms))
        self._charged -= held_bytes(speech)
        self._lose("it was passed on")
        return speech

    def release(self) -> None:
        """Nothing is held any more. Idempotent."""
        self._lose("it was released")

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._runs.clear()
        self._budget.give(self._charged)
        self._charged = 0
