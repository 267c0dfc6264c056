"""AnswerReader: converts vLLM's output for one answer to text, thought, tool calls and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from omni_ws.core.chunks import FinishReason, TokenLogprob
from omni_ws.engine.base import TextOutput, ThoughtOutput, ToolCallOutput
from omni_ws.engine.vllm.token_logprobs import AlignedLogprobs
from omni_ws.engine.vllm.tool_calls import AnswerParts, AnswerSplitter
from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

AnswerOutput: TypeAlias = TextOutput | ThoughtOutput | ToolCallOutput

#: Text that a parser may hold back before it is known to be the answer's, in characters.
_MOST_HELD_BACK: Final = 1024
_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


class AnswerReader:
    """Reads the ``choice``-th answer to a request, piece by piece.

    ``splitter`` finds tool calls and thought in its text, ``logprobs`` assigns tokens to text; None where not
    requested. With ``names_end`` the token that ends the answer is reported among those with log-probabilities. An
    answer that is not ``wanted``, as that of a request for an echo alone, has no content: vLLM generates at least one
    token.
    """

    def __init__(
        self,
        choice: int,
        *,
        logprobs: AlignedLogprobs | None,
        splitter: AnswerSplitter | None,
        names_end: bool = False,
        wanted: bool = True,
    ) -> None:
        self.choice = choice
        self._wanted = wanted
        #: Whether text is all there is to read.
        self._plain = wanted and logprobs is None and splitter is None
        self._names_end = names_end
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self._logprobs = logprobs
        self._splitter = splitter
        self._thinking = splitter is not None and splitter.thinks
        #: Generated text that was not yielded: the tool parser holds back what may become a call.
        self._held_text = ""

    def read(self, piece: CompletionOutput, prompt: Sequence[int]) -> Iterable[AnswerOutput]:
        """Return the content of vLLM's next output; ``prompt`` is the prompt's tokens. Raises EngineFailed."""
        if self._plain and piece.finish_reason is None:
            self.tokens += len(piece.token_ids)
            return (TextOutput(piece.text, (), self.choice),) if piece.text else ()
        return self._read(piece, prompt) if self._wanted else self._skip(piece)

    def _read(self, piece: CompletionOutput, prompt: Sequence[int]) -> Iterator[AnswerOutput]:
        self.tokens += len(piece.token_ids)
        finished = piece.finish_reason is not None
        if self._logprobs is not None:
            self._note_tokens(self._logprobs, piece, prompt)
        parts = AnswerParts(piece.text)
        if self._splitter is not None and (piece.text or piece.token_ids or finished):
            parts = self._splitter.read(piece.text, piece.token_ids, prompt, finished=finished)
        tokens = self._tokens_of(parts, piece)
        if parts.thought:
            yield ThoughtOutput(parts.thought, self.choice)
        if parts.text or tokens:
            yield TextOutput(parts.text, tokens, self.choice)
        for call in parts.calls:
            yield ToolCallOutput(call, self.choice)
        if piece.finish_reason is not None:
            self.finish_reason = self._reason(piece.finish_reason)

    def _skip(self, piece: CompletionOutput) -> tuple[()]:
        if piece.finish_reason is not None:
            self._reason(piece.finish_reason)
            self.finish_reason = FinishReason.LENGTH
        return ()

    def _note_tokens(self, logprobs: AlignedLogprobs, piece: CompletionOutput, prompt: Sequence[int]) -> None:
        tokens = list(piece.token_ids)
        ends = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
        if tokens and ends and not self._names_end:
            tokens.pop()  # the end token is not part of the text
        logprobs.add(tokens, (piece.logprobs or [])[: len(tokens)], prompt)

    def _tokens_of(self, parts: AnswerParts, piece: CompletionOutput) -> tuple[TokenLogprob, ...]:
        if self._logprobs is None:
            return ()
        self._held_text += piece.text
        text = parts.text
        if self._thinking:
            # What was generated before the text of the answer is thought.
            begins = self._held_text.rfind(text) if text else len(self._held_text) - _MOST_HELD_BACK
            self._logprobs.take(max(0, begins))
            self._held_text = self._held_text[max(0, begins) :]
            if not text:
                return ()
            self._thinking = False
        if not self._held_text.startswith(text) or (self._splitter is not None and self._splitter.called):
            self._logprobs = None  # the rest is a tool call, whose tokens are not text
            return ()
        self._held_text = self._held_text[len(text) :]
        tokens = self._logprobs.take(len(text))
        if piece.finish_reason is not None:
            tokens += self._logprobs.rest(cut=isinstance(piece.stop_reason, str))
        return tokens

    def _reason(self, reason: str) -> FinishReason:
        if reason not in _REASONS:
            raise EngineFailed(f"unexpected finish reason of the Thinker: {reason!r}")
        called = self._splitter is not None and self._splitter.called
        return FinishReason.TOOL_CALLS if called and reason == "stop" else _REASONS[reason]
