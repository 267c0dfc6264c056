"""AsksBack: an OutputWriter that asks what the user meant, where a small model declines words without a sense."""

from __future__ import annotations

from typing import Final

from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import EngineOutput, Finished, OutputFilter, OutputWriter, TextOutput
from omni_ws.engine.llm.computed import kind_of
from omni_ws.engine.llm.questions import plain_words, requests

#: What Qwen says to what it must not help with, and also to words without a sense, such as "10 of close" for a card.
_DECLINED: Final = ("I'm sorry, I can't assist with that.", "I'm sorry, but I can't assist with that.")
_MOST_WORDS: Final = 5


def perhaps_misheard(said: str) -> str:
    """Return the words of ``said`` if they are few and no question or request, and so may be misheard; else ""."""
    words = said.strip(" \t\n.,!?…")
    few = bool(words) and words.count(" ") < _MOST_WORDS
    polite = few and len([*requests(plain_words(words))]) > 1  # "can you …"
    return words if few and not polite and kind_of(words) == "statement" else ""


class AsksBack(OutputFilter):
    """An OutputWriter that replaces an answer which only declines by a question for the meaning of ``words``.

    The beginning of an answer is held back as long as it may be such an answer.
    """

    def __init__(self, out: OutputWriter, words: str) -> None:
        super().__init__(out)
        self._question = f'Sorry, what do you mean by "{words}"?'
        #: The text that is held back; None once the answer is passed on.
        self._held: str | None = ""

    def write(self, output: EngineOutput) -> None:
        if self._held is not None:
            if isinstance(output, TextOutput):
                self._held += output.text
                if any(declined.startswith(self._held) for declined in _DECLINED):
                    return
                output = TextOutput(self._held)
            elif self._held in _DECLINED and isinstance(output, Finished) and output.reason is FinishReason.STOP:
                self._out.write(TextOutput(self._question))
            elif self._held:
                self._out.write(TextOutput(self._held))
            self._held = None
        self._out.write(output)
