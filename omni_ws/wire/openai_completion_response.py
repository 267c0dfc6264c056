"""Responses of ``/v1/completions``: ``text_completion`` objects, whole and in chunks."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omni_ws.core.chunks import FinalChunk, OutputChunk, OutputModality, TokenLogprob
from omni_ws.wire.openai_chat_response import finish_reasons, finite_logprob, usage_object, warning_objects


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What the response to a completion request contains, besides the answers.

    ``choices`` is the number of answers to all prompts together. ``created`` is in seconds of Unix time.
    """

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
    """Text that has not been sent, with the ``logprobs`` of its tokens."""

    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=_no_logprobs)


class _Logprobs:
    """Computes the text offsets of one choice's tokens, in characters; a character may span several tokens."""

    def __init__(self) -> None:
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, tokens: Iterable[TokenLogprob], placed: dict[str, list[Any]]) -> None:
        """Append ``tokens`` to ``placed``, the ``logprobs`` of a choice."""
        for token in tokens:
            placed["tokens"].append(token.token)
            placed["token_logprobs"].append(finite_logprob(token.logprob))
            # OpenAI includes the sampled token even when it is not among the most probable ones.
            top = {one.token: finite_logprob(one.logprob) for one in (*token.top, token)}
            placed["top_logprobs"].append(None if token.logprob is None else top)
            placed["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(token.data))


class _Choices:
    """The unsent text of all choices; the base of both forms of a response."""

    def __init__(self, options: CompletionOptions) -> None:
        self._options = options
        self._pieces = [_Piece() for _ in range(options.choices)]
        self._logprobs = [_Logprobs() for _ in range(options.choices)]

    def _choice(self, index: int, finish_reason: str | None) -> dict[str, Any]:
        """Return the pending piece of a choice, and start the next one."""
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
    """Encodes a streamed completion.

    Text is sent one output late, because the last text of a choice carries its finish reason: no chunk is sent empty
    for the sake of that.
    """

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield the chunk that the output completes, if any."""
        if chunk.modality is not OutputModality.TEXT:
            return
        if chunk.text and self._pieces[chunk.choice].text:
            yield self._object([self._choice(chunk.choice, None)])
        self._keep(chunk)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the last chunk of each choice, and the usage if requested."""
        options = self._options
        usage = usage_object(chunk.usage)
        for index, reason in enumerate(finish_reasons(chunk, options.choices)):
            last = index == options.choices - 1
            extra: dict[str, Any] = {"usage": usage} if last and options.usage_on_final_chunk else {}
            if last and (warnings := warning_objects(chunk)):
                extra["warnings"] = warnings
            yield self._object([self._choice(index, reason)], **extra)
        if options.include_usage and not options.usage_on_final_chunk:
            yield self._object([], usage=usage)


class Completion(_Choices):
    """Accumulates a whole ``text_completion`` from the outputs that a stream would encode."""

    def output(self, chunk: OutputChunk) -> None:
        """Add an output."""
        if chunk.modality is OutputModality.TEXT:
            self._keep(chunk)

    def final(self, chunk: FinalChunk) -> dict[str, Any]:
        """Return the response."""
        reasons = finish_reasons(chunk, self._options.choices)
        choices = [self._choice(index, reason) for index, reason in enumerate(reasons)]
        warnings = warning_objects(chunk)
        extra = {"warnings": warnings} if warnings else {}
        return self._object(choices, usage=usage_object(chunk.usage), **extra)
