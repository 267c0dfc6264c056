"""Answers of ``/v1/completions``: objects ``text_completion``, whole and in chunks."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omni_ws.core.chunks import OutputModality, TokenLogprob
from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.wire.openai_chat_response import finish_reasons, finite_logprob, usage_object


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """``choices`` are all the answers that are given, to whichever prompt."""

    completion_id: str
    created: int
    model: str
    choices: int = 1
    logprobs: bool = False
    include_usage: bool = False
    usage_on_final_chunk: bool = False


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


@dataclass(slots=True)
class _Piece:
    """Text that is under way, and the ``logprobs`` of the tokens that it is made of."""

    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=_no_logprobs)


class _Logprobs:
    """Places of tokens in the text of one choice, in characters: a character may be spread over several tokens."""

    def __init__(self) -> None:
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, tokens: Iterable[TokenLogprob], placed: dict[str, list[Any]]) -> None:
        """Adds the tokens, which follow those before, to the ``logprobs`` of a choice."""
        for token in tokens:
            placed["tokens"].append(token.token)
            placed["token_logprobs"].append(finite_logprob(token.logprob))
            # The token itself is among them whether it is one of the likeliest or not.
            top = {one.token: finite_logprob(one.logprob) for one in (*token.top, token)}
            placed["top_logprobs"].append(None if token.logprob is None else top)
            placed["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(token.data))


class _Choices:
    """What the two forms of an answer have in common."""

    def __init__(self, options: CompletionOptions) -> None:
        self._options = options
        self._pieces = [_Piece() for _ in range(options.choices)]
        self._logprobs = [_Logprobs() for _ in range(options.choices)]

    def _choice(self, index: int, finish_reason: str | None) -> dict[str, Any]:
        """The piece that is under way, which ends here."""
        piece, self._pieces[index] = self._pieces[index], _Piece()
        logprobs = piece.logprobs if self._options.logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _keep(self, chunk: OutputChunk) -> None:
        piece = self._pieces[chunk.choice]
        piece.text += chunk.text
        self._logprobs[chunk.choice].place(chunk.logprobs, piece.logprobs)

    def _object(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "id": self._options.completion_id,
            "object": "text_completion",
            "created": self._options.created,
            "model": self._options.model,
            "choices": choices,
            **extra,
        }


class CompletionStream(_Choices):
    """The chunks of a streamed completion.

    Each piece of text waits for the one behind it, since the last of a choice has its finish reason, and no chunk is
    empty only to bring that.
    """

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        if chunk.modality is not OutputModality.TEXT:
            return
        if chunk.text and self._pieces[chunk.choice].text:
            yield self._object([self._choice(chunk.choice, None)])
        self._keep(chunk)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        options = self._options
        usage = usage_object(chunk.usage)
        for index, reason in enumerate(finish_reasons(chunk, options.choices)):
            last = index == options.choices - 1
            extra = {"usage": usage} if last and options.usage_on_final_chunk else {}
            yield self._object([self._choice(index, reason)], **extra)
        if options.include_usage and not options.usage_on_final_chunk:
            yield self._object([], usage=usage)


class Completion(_Choices):
    """A whole completion, gathered from the same outputs that a stream would have carried."""

    def output(self, chunk: OutputChunk) -> None:
        if chunk.modality is OutputModality.TEXT:
            self._keep(chunk)

    def final(self, chunk: FinalChunk) -> dict[str, Any]:
        reasons = finish_reasons(chunk, self._options.choices)
        choices = [self._choice(index, reason) for index, reason in enumerate(reasons)]
        return self._object(choices, usage=usage_object(chunk.usage))
