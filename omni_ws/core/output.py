"""Output chunks, and OutputSequencer, which numbers them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from msgspec import Struct

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import FinishReason, OutputModality, TokenLogprob, ToolCallFragment, Usage, Word
from omni_ws.errors import OmniError


class OutputChunk(Struct, frozen=True):
    """One unit of output.

    The modality selects the field with the content: ``text`` for text and transcripts, ``tool_call``, or ``payload``
    (in ``format``) for audio. ``start_ms`` is the position on the time line of the answer's audio or, for transcripts,
    of the input's. An ``interim`` transcript is replaced by the next one; the others are settled.
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
    #: Log-probabilities of the tokens of ``text``, when the request asks for them.
    logprobs: tuple[TokenLogprob, ...] = ()
    #: The index of the answer, for requests that ask for several (OpenAI's ``n``).
    choice: int = 0
    #: Whether it is what remained to be written down of a request that has had its final.
    late: bool = False
    #: Of a late one: whether its recognition has failed, so that nothing more is known.
    failed: bool = False
    #: Of a transcript: the speech turn.
    turn_id: str | None = None


class WordsKnown(Enum):
    """What is known of the words that were spoken in a request."""

    #: They are still being written down.
    NOT_YET = "not yet"
    #: All of them, which may be none.
    ALL = "all"
    #: Recognition has failed, was refused, or took too long.
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalChunk:
    """The last output of a request."""

    request_id: str
    sequence_id: int
    finish_reason: FinishReason
    usage: Usage
    #: The finish reason of each choice, for requests that ask for several answers.
    finish_reasons: tuple[FinishReason, ...] = ()
    #: Failures of parts of the engine that the answer had to do without.
    warnings: tuple[OmniError, ...] = ()
    #: What was done otherwise than asked, and told nowhere else.
    remarks: tuple[OmniError, ...] = ()
    #: NOT_YET: a late transcript will follow.
    words: WordsKnown = WordsKnown.ALL
    #: The client's name for the request, and the speech turn that opened or joined it.
    ref: str | None = None
    turn_id: str | None = None


AnyOutput: TypeAlias = OutputChunk | FinalChunk


class OutputSequencer:
    """Numbers the output of a session, across its requests, from 0.

    Each request is opened, numbered and finished once; numbering output of a request that is not open is a bug of the
    caller and raises RuntimeError.
    """

    def __init__(self) -> None:
        self.next_sequence_id = 0
        self._open: set[str] = set()
        #: Requests that are finished but for a late transcript.
        self._late: set[str] = set()

    def open(self, request_id: str) -> None:
        """Allow output of ``request_id``."""
        self._open.add(request_id)

    def take_number(self, request_id: str) -> int:
        """Return the next number, for an output of ``request_id``."""
        if request_id not in self._open:
            raise RuntimeError(f"{request_id} is not open for output")
        return self._next()

    def take_late_number(self, request_id: str) -> int:
        """Return the next number for the late transcript of a request, which is finished with it."""
        if request_id not in self._late:
            raise RuntimeError(f"{request_id} has no late transcript")
        self._late.discard(request_id)
        return self._next()

    def _next(self) -> int:
        number = self.next_sequence_id
        self.next_sequence_id += 1
        return number

    def take_back(self, count: int) -> None:
        """Return the last ``count`` numbers, whose outputs were not sent."""
        self.next_sequence_id -= count

    def finish(
        self,
        request_id: str,
        finish_reason: FinishReason,
        usage: Usage,
        *,
        finish_reasons: tuple[FinishReason, ...] = (),
        warnings: tuple[OmniError, ...] = (),
        remarks: tuple[OmniError, ...] = (),
        words: WordsKnown = WordsKnown.ALL,
        ref: str | None = None,
        turn_id: str | None = None,
    ) -> FinalChunk:
        """Number and return the final of a request. Only a late transcript may follow it, where ``words`` says so."""
        number = self.take_number(request_id)
        self._open.discard(request_id)
        if words is WordsKnown.NOT_YET:
            self._late.add(request_id)
        return FinalChunk(
            request_id=request_id,
            sequence_id=number,
            finish_reason=finish_reason,
            usage=usage,
            finish_reasons=finish_reasons,
            warnings=warnings,
            remarks=remarks,
            words=words,
            ref=ref,
            turn_id=turn_id,
        )
