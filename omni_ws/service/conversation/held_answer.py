"""HeldAnswer: an answer that speech interrupted, held until it is known whether that speech had words.

What a listener says who wants the speaker to go on ("yeah", "I see") counts as none, unless the answer has just asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    PartFailed,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
    TranscriptOutput,
)
from omni_ws.service.conversation.acknowledgements import is_acknowledgement
from omni_ws.service.conversation.request import Request

#: How long an answer is held at most: speech that goes on for longer counts as having words.
MAX_HOLD_SEC: Final = 10.0


class HeldAnswer:
    """The answer to ``request``, which the turn of the request ``by`` interrupted.

    ``give_up`` is called once the turn has words, or after MAX_HOLD_SEC.
    """

    def __init__(self, request: Request, by: Request, *, give_up: Callable[[], None]) -> None:
        self.request = request
        self.by = by
        #: Settled transcripts of the turn that were not taken for words.
        self._passed_over: list[TranscriptOutput] = []
        #: Whether it is known how the turn ended for this answer.
        self.decided = False
        #: Whether the turn begins only when all is known that was said before.
        self.looked_at_later = False
        self._give_up = give_up
        self._limit = asyncio.get_running_loop().call_later(MAX_HOLD_SEC, give_up)

    def decide(self) -> None:
        """It is not held any more."""
        self.decided = True
        self._limit.cancel()

    def take_passed_over(self) -> list[TranscriptOutput]:
        """What was said before the turn turned out to have words."""
        passed_over, self._passed_over = self._passed_over, []
        return passed_over

    def judge(self, output: EngineOutput, *, transcribes_first: bool) -> bool | None:
        """Whether the turn has words, by this output of its answer; None where that does not tell.

        If it has, the held answer is given up. ``transcribes_first``: see EngineCapabilities.
        """
        only_speech = self.by.only_speech
        if only_speech and isinstance(output, TranscriptOutput) and self._acknowledges(output):
            return None
        words = _has_words(output, only_after_transcripts=transcribes_first and only_speech)
        if words:
            self._give_up()
        return words

    def _acknowledges(self, transcript: TranscriptOutput) -> bool:
        """Whether all that was said so far is a mere acknowledgement. What is settled of it is passed over."""
        said = "".join([*(earlier.text for earlier in self._passed_over), transcript.text])
        if not is_acknowledgement(said) or self.request.asks:
            return False
        if not transcript.interim:
            self._passed_over.append(transcript)
        return True


def _has_words(output: EngineOutput, *, only_after_transcripts: bool) -> bool | None:
    match output:
        case TranscriptOutput(text=text):
            return True if text.strip() else None
        case PartFailed():
            return True  # nobody knows
        case TextOutput(text=""):
            return None
        case TextOutput() | AudioOutput() | ToolCallOutput() | ThoughtOutput():
            return not only_after_transcripts
        case _:
            return None
