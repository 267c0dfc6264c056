"""KeptSpeech: the audio of one request, kept for the history until its words are known."""

from __future__ import annotations

from typing import Final

from omni_ws.audio.container import parse_audio_format
from omni_ws.core.chunks import AudioFormat, InputChunk, Modality
from omni_ws.core.history import MAX_SPEECH_BYTES, RUN_OVERHEAD_BYTES, TOKENS_PER_SEC, Speech
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget

#: Charged for each chunk of a run besides its bytes, until the run is joined.
SPEECH_OVERHEAD_BYTES: Final = 64


class KeptSpeech:
    """The audio of one request's input, kept for the history until its words are known.

    ``audio`` is the format of chunks that name none.

    What is kept is charged to ``budget``, up to half of it: the rest is for input that the engine has not taken.
    """

    def __init__(self, audio: AudioFormat, budget: ByteBudget, *, max_tokens: int, unwanted: str | None = None) -> None:
        """``unwanted`` is the reason why no audio can be kept, if that is known before any has come."""
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

    @classmethod
    def of(cls, ledger: Ledger, audio: AudioFormat, *, unwanted: str | None) -> KeptSpeech | None:
        """Return a KeptSpeech for a request; None if the ledger keeps no history."""
        history = ledger.history
        if not history.max_tokens:
            return None
        return cls(audio, history.budget, max_tokens=history.max_tokens, unwanted=unwanted)

    def append(self, chunk: InputChunk) -> None:
        payload = chunk.payload
        self.began = self.began or bool(payload)
        if self.lost is not None or not payload:
            return
        continues = bool(self._runs) and self._runs[-1][0] == chunk.format
        cost = len(payload) + SPEECH_OVERHEAD_BYTES + (0 if continues else RUN_OVERHEAD_BYTES)
        if chunk.format is None:
            self._audio_ms += len(payload) / self._bytes_per_ms
        else:
            self._audio_ms += parse_audio_format(chunk.format, self._audio).duration_ms(len(payload))
        if self._audio_ms * TOKENS_PER_SEC > self._max_tokens * 1000 or self._charged + cost > MAX_SPEECH_BYTES:
            self._lose("it exceeds the history's token limit")
        elif self._budget.over_half(cost):
            self._lose("the server's memory for speech is full")
        else:
            self._budget.take(cost)
            self._charged += cost
            if not continues:
                self._runs.append((chunk.format, []))
            self._runs[-1][1].append(payload)

    def hand_over(self, *, audio_ms: float) -> Speech | None:
        """Return what is kept, and keep it no longer; None if it was lost.

        The caller then owes ``Speech.held_bytes`` to the budget. ``audio_ms`` is the length as the engine decoded it;
        0 if that is not known.
        """
        if audio_ms * TOKENS_PER_SEC > self._max_tokens * 1000:
            self._lose("it exceeds the history's token limit")
        if self.lost is not None:
            return None
        chunks = tuple(InputChunk(Modality.AUDIO, b"".join(run), format=name) for name, run in self._runs)
        speech = Speech(chunks, self._audio, max(self._audio_ms, audio_ms))
        self._charged -= speech.held_bytes
        self._lose("it was passed on")
        return speech

    def release(self) -> None:
        """Drop what is kept, and refund it. Idempotent."""
        self._lose("it was released")

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._runs.clear()
        self._budget.give(self._charged)
        self._charged = 0
