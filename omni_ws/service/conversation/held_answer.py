"""HeldAnswer: an answer that speech interrupted, held until it is known whether that speech had words."""

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
from omni_ws.service.conversation.request import Request
from omni_ws.wire.server_frames import ResponseStartedFrame

#: How long an answer is held at most: speech that goes on for longer counts as having words.
MAX_HOLD_SEC: Final = 10.0


class HeldAnswer:
    """The answer to ``request``, which the turn of the request ``by`` interrupted.

    ``give_up`` is called once the turn has words, or after MAX_HOLD_SEC.
    """

    def __init__(self, request: Request, by: Request, *, give_up: Callable[[], None]) -> None:
        self.request = request
        self.by = by
        #: Announces the answer to the turn, once that has words.
        self.announcement: ResponseStartedFrame | None = None
        #: Whether it is known how the turn ended for this answer.
        self.decided = False
        self._give_up = give_up
        self._limit = asyncio.get_running_loop().call_later(MAX_HOLD_SEC, give_up)

    def decide(self) -> None:
        """It is not held any more."""
        self.decided = True
        self._limit.cancel()

    def judge(self, output: EngineOutput, *, transcribes_first: bool) -> bool | None:
        """Whether the turn has words, by this output of its answer; None where that does not tell.

        If it has, the held answer is given up. ``transcribes_first``: see EngineCapabilities.
        """
        words = _has_words(output, only_after_transcripts=transcribes_first and self.by.only_speech)
        if words:
            self._give_up()
        return words


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
