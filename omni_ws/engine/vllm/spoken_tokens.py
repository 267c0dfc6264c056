"""SpokenTokens: which tokens of an answer are spoken: those whose text is passed on as text of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from omni_ws.engine.vllm.aligned_tokens import AlignedTokens
from omni_ws.engine.vllm.tool_calls import AnswerSplitter

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput

#: The place of a token in the answer, and the token.
Placed: TypeAlias = tuple[int, int]

#: Text that a parser may hold back before it is known to be the answer's, in characters.
_MOST_HELD_BACK: Final = 1024


class SpokenTokens:
    """Finds the spoken tokens of one answer, piece by piece.

    Not spoken are tool calls and thought, which ``splitter`` takes out of the text, and what a stop string cuts off.
    Tokens are held back as long as their text is. The last token of an answer is never spoken: it is the end, or the
    model has not gone on from it, and the Talker of Qwen2.5 reads its state.
    """

    def __init__(self, tokenizer: Any, parameters: SamplingParams, splitter: AnswerSplitter | None) -> None:
        self._splitter = splitter
        self._thinking = splitter is not None and splitter.thinks
        #: None where all text is passed on, and soon.
        self._aligned: AlignedTokens[Placed] | None = None
        if splitter is not None or parameters.stop:
            self._aligned = AlignedTokens(tokenizer, parameters)
        self._count = 0
        #: Generated text that was neither passed on nor given up.
        self._held = ""

    def read(self, piece: CompletionOutput, prompt: Sequence[int], text: str) -> Iterable[Placed]:
        """Return the tokens that are spoken now that ``text`` is passed on, of all up to vLLM's output ``piece``."""
        tokens: list[Placed] = list(enumerate(piece.token_ids, self._count))
        self._count += len(tokens)
        finished = piece.finish_reason is not None
        if finished and tokens:
            tokens.pop()
        if self._aligned is None:
            return tokens
        self._aligned.add([token for _, token in tokens], tokens, prompt)
        self._held += piece.text
        spoken = self._of_text(self._aligned, text)
        if finished and not isinstance(piece.stop_reason, str) and not self._takes_out:
            spoken += self._aligned.rest(cut=False)
        return spoken

    @property
    def _takes_out(self) -> bool:
        """Whether what is generated now is no text of the answer."""
        return self._thinking or (self._splitter is not None and self._splitter.called)

    def _of_text(self, aligned: AlignedTokens[Placed], text: str) -> tuple[Placed, ...]:
        if not text:
            if self._takes_out:
                self._give_up(aligned, len(self._held) - _MOST_HELD_BACK)
            return ()
        begins = 0
        if self._takes_out or not self._held.startswith(text):
            # The parser took something out before it, at most all of what is held.
            begins = self._held.rfind(text)
        if begins < 0:
            return ()
        self._give_up(aligned, begins)
        self._thinking = False
        self._held = self._held[len(text) :]
        return aligned.take(len(text))

    def _give_up(self, aligned: AlignedTokens[Placed], characters: int) -> None:
        if characters > 0:
            aligned.take(characters)
            self._held = self._held[characters:]
