"""AnswerReader: what vLLM tells of an answer while it writes it, as what a client gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from omni_ws.core.chunks import FinishReason, TokenLogprob, ToolCallFragment
from omni_ws.engine.base import TextOutput, ToolCallOutput
from omni_ws.engine.vllm.token_logprobs import AlignedLogprobs
from omni_ws.engine.vllm.tool_calls import ToolCallReader
from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


class AnswerReader:
    """One of the answers to a request, the ``choice``-th. ``tools`` finds the calls in it."""

    def __init__(
        self,
        choice: int,
        *,
        logprobs: AlignedLogprobs | None,
        tools: ToolCallReader | None,
        names_end: bool = False,
    ) -> None:
        """``names_end``: the token that ends the answer is among those with a log-probability."""
        self.choice = choice
        self._names_end = names_end
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self._logprobs = logprobs
        self._tools = tools
        #: What the model wrote and nobody was told yet: the reader of calls waits to see what it becomes.
        self._unsaid = ""

    def read(self, piece: CompletionOutput, prompt: Sequence[int]) -> Iterator[TextOutput | ToolCallOutput]:
        """What the next piece says. ``prompt`` is what the answer follows. Raises EngineFailed."""
        self.tokens += len(piece.token_ids)
        finished = piece.finish_reason is not None
        if self._logprobs is not None:
            self._note_tokens(self._logprobs, piece, prompt)
        text = piece.text
        calls: tuple[ToolCallFragment, ...] = ()
        if self._tools is not None and (piece.text or piece.token_ids or finished):
            text, calls = self._tools.read(piece.text, piece.token_ids, prompt, finished=finished)
        tokens = self._tokens_of(text, piece)
        if text or tokens:
            yield TextOutput(text, tokens, self.choice)
        for call in calls:
            yield ToolCallOutput(call, self.choice)
        if piece.finish_reason is not None:
            self.finish_reason = self._reason(piece.finish_reason)

    def skip(self, piece: CompletionOutput) -> None:
        """vLLM writes one token at least, and none was asked for. Raises EngineFailed."""
        if piece.finish_reason is not None:
            self._reason(piece.finish_reason)
            self.finish_reason = FinishReason.LENGTH

    def _note_tokens(self, logprobs: AlignedLogprobs, piece: CompletionOutput, prompt: Sequence[int]) -> None:
        told = list(piece.token_ids)
        ends = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
        if told and ends and not self._names_end:
            told.pop()  # the token that ends the answer is none of its text
        logprobs.add(told, (piece.logprobs or [])[: len(told)], prompt)

    def _tokens_of(self, text: str, piece: CompletionOutput) -> tuple[TokenLogprob, ...]:
        if self._logprobs is None:
            return ()
        self._unsaid += piece.text
        if not self._unsaid.startswith(text) or (self._tools is not None and self._tools.called):
            self._logprobs = None  # from here on it is a call, and its tokens are no text
            return ()
        self._unsaid = self._unsaid[len(text) :]
        tokens = self._logprobs.take(len(text))
        if piece.finish_reason is not None:
            tokens += self._logprobs.rest(cut=isinstance(piece.stop_reason, str))
        return tokens

    def _reason(self, reason: str) -> FinishReason:
        if reason not in _REASONS:
            raise EngineFailed(f"the Thinker's engine ended the answer with {reason!r}")
        called = self._tools is not None and self._tools.called
        return FinishReason.TOOL_CALLS if called and reason == "stop" else _REASONS[reason]
