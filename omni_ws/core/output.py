"""OutputSequencer: numbers what goes out, one final a request, nothing after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import FinishReason, OutputModality, TokenLogprob, ToolCallFragment, Usage, Word


class OutputChunk(Struct, frozen=True, kw_only=True):
    """One unit of output: ``text`` for text and transcripts, ``tool_call``, or ``payload`` in ``format`` for audio.

    ``start_ms`` is the place on the response's audio time line (for transcripts: on the input's).
    """

    request_id: str
    sequence_id: int
    modality: OutputModality
    text: str = ""
    payload: bytes = b""
    format: AudioFormat | None = None
    start_ms: int | None = None
    interim: bool = False
    words: tuple[Word, ...] = ()
    tool_call: ToolCallFragment | None = None
    #: Of the tokens in ``text``, where they were asked for.
    logprobs: tuple[TokenLogprob, ...] = ()
    #: Which of several answers to the same request this belongs to.
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalChunk:
    """The last output of a request."""

    request_id: str
    sequence_id: int
    finish_reason: FinishReason
    usage: Usage
    #: Of each choice, where several answers were asked for.
    finish_reasons: tuple[FinishReason, ...] = ()


AnyOutput: TypeAlias = OutputChunk | FinalChunk


class OutputSequencer:
    """``sequence_id`` counts from 0 over the whole session. A number after a request's final is a caller's bug."""

    def __init__(self) -> None:
        self.next_sequence_id = 0
        self._open: set[str] = set()

    def open(self, request_id: str) -> None:
        self._open.add(request_id)

    def take_number(self, request_id: str) -> int:
        if request_id not in self._open:
            raise RuntimeError(f"{request_id} is not open for output")
        number = self.next_sequence_id
        self.next_sequence_id += 1
        return number

    def take_back(self, count: int) -> None:
        """The last ``count`` numbers were not used after all."""
        self.next_sequence_id -= count

    def finish(
        self,
        request_id: str,
        finish_reason: FinishReason,
        usage: Usage,
        *,
        finish_reasons: tuple[FinishReason, ...] = (),
    ) -> FinalChunk:
        number = self.take_number(request_id)
        self._open.discard(request_id)
        return FinalChunk(
            request_id=request_id,
            sequence_id=number,
            finish_reason=finish_reason,
            usage=usage,
            finish_reasons=finish_reasons,
        )
