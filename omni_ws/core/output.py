"""Output chunks, and OutputSequencer, which numbers them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from msgspec import Struct

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import FinishReason, Hearing, OutputModality, TokenLogprob, ToolCallFragment, Usage, Word
from omni_ws.errors import ContextLengthExceeded, OmniError

#: OpenAI's finish reason of an answer that was cut because of what it says.
CONTENT_FILTER: Final = "content_filter"
#: The code of the warning for a finish reason that FinishReason lacks.
FINISH_REASON_WARNING: Final = "finish_reason"


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
    #: Of text: whether it says that the model does not answer.
    refusal: bool = False
    #: Of a transcript: how it came about, where the recogniser says it.
    hearing: Hearing | None = None


class AnswerWarning(Struct, frozen=True):
    """What was done otherwise than asked in an answer that has not failed."""

    code: str
    message: str
    param: str | None = None


def context_full(context: int) -> AnswerWarning:
    """What is told of an answer that was cut off where the context, of so many tokens, was full."""
    return AnswerWarning(
        ContextLengthExceeded.wire.code,
        f"the answer was cut off: with it the context of {context} tokens is full; send less, or shorten the history",
    )


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
    #: Of each choice: the reason by a name that FinishReason lacks, None where it has it. Empty where it has all.
    foreign_reasons: tuple[str | None, ...] = ()
    #: What the answer had to do without, such as a part of the engine, and what was done otherwise than asked.
    warnings: tuple[OmniError | AnswerWarning, ...] = ()
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

    __slots__ = ("_late", "_open", "next_sequence_id")

    def __init__(self) -> None:
        self.next_sequence_id = 0
        self._open: dict[str, None] = {}  # which is smaller than a set, while it is empty
        #: Requests that are finished but for a late transcript.
        self._late: dict[str, None] = {}

    def open(self, request_id: str) -> None:
        """Allow output of ``request_id``."""
        self._open[request_id] = None

    def take_number(self, request_id: str) -> int:
        """Return the next number, for an output of ``request_id``."""
        if request_id not in self._open:
            raise RuntimeError(f"{request_id} is not open for output")
        return self._next()

    def take_late_number(self, request_id: str) -> int:
        """Return the next number for the late transcript of a request, which is finished with it."""
        if request_id not in self._late:
            raise RuntimeError(f"{request_id} has no late transcript")
        del self._late[request_id]
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
        foreign_reasons: tuple[str | None, ...] = (),
        warnings: tuple[OmniError | AnswerWarning, ...] = (),
        words: WordsKnown = WordsKnown.ALL,
        ref: str | None = None,
        turn_id: str | None = None,
    ) -> FinalChunk:
        """Number and return the final of a request. Only a late transcript may follow it, where ``words`` says so."""
        number = self.take_number(request_id)
        del self._open[request_id]
        if words is WordsKnown.NOT_YET:
            self._late[request_id] = None
        return FinalChunk(
            request_id=request_id,
            sequence_id=number,
            finish_reason=finish_reason,
            usage=usage,
            finish_reasons=finish_reasons,
            foreign_reasons=foreign_reasons,
            warnings=warnings,
            words=words,
            ref=ref,
            turn_id=turn_id,
        )
