"""Uncertain onsets: sounds over an answer of which it is not known yet whether they interrupt it (``duck``).

*What it is.* The client has lowered its sound and plays on; the server sends on. The sound is admitted to a request
*aside* (``RequestQueue.listen_aside``), which the engine recognises and nobody is told of. The Onset collects what is
known: how long the sound is voiced and whether it is clear (OnsetMeter), its transcripts, and the probability that it
is a backchannel. It decides once, and its owner then confirms or dismisses it.

*Deciding.* The first that is sure decides:

- voiced for more than ``LONG_MS``: an interruption if it is clear, else none;
- words while the voice goes on, if it is clear: ``sure_words``;
- quiet: none if it was not clear, otherwise by ``judged``, and where that is unsure by the next transcripts, for
  ``WAIT_SEC`` at most, or ``LIKELY_WAIT_SEC`` if it is rather a backchannel, as the answer plays on meanwhile; then it
  is an interruption where the answer can be held until its words are known, otherwise the probability alone decides; a
  voice that goes on meanwhile ends the wait;
- input that joins the turn: an interruption;
- a new onset, or ``LIMIT_SEC`` without any of these (audio no longer arrives): by what is known. While no client is
  connected, LIMIT_SEC begins again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from omni_ws.audio.onset_meter import SpeechLull
from omni_ws.core.chunks import InputChunk, other_readings
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    Finished,
    PartFailed,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
    TranscriptGuess,
    TranscriptOutput,
    WordsComplete,
)
from omni_ws.service.conversation.mere_acknowledgements import Verdict, begins_with_stop_word, judged

if TYPE_CHECKING:
    from omni_ws.service.conversation.request import Request

#: How long a sound that is over waits for its transcript, if the sound alone tells too little.
WAIT_SEC: Final = 0.35
#: The same, if it is a backchannel rather than not: to hear "stop" late is better than to miss it.
LIKELY_WAIT_SEC: Final = 1.0
#: How long an onset is uncertain at most, if audio no longer arrives.
LIMIT_SEC: Final = 3.0
#: This many words are words, and not a hum as a recogniser spells it, while the voice goes on.
ENOUGH_WORDS: Final = 4
#: From this probability on a sound without known words is a backchannel, if nothing better will be known.
LIKELY_BACKCHANNEL: Final = 0.5


def sure_words(text: str, language: str | None) -> bool:
    """Return whether a transcript that may go on tells that the speaker interrupts: by its beginning, or its length."""
    return begins_with_stop_word(text, language or "en") or (
        len(text.split()) >= ENOUGH_WORDS
        and judged(text, None, language, voiced_ms=0, after_question=False) is not Verdict.BACKCHANNEL
    )


class Onset:
    """One uncertain onset. ``decide`` is called once, with it; ``verdict`` is known then.

    ``after_question``: the answer has just asked something. ``holds``: an interruption without known words holds the
    answer until they are known. ``waits`` returns whether time decides nothing now.
    """

    def __init__(
        self,
        turn_id: str,
        audio_ms: int,
        *,
        after_question: bool,
        holds: bool = False,
        waits: Callable[[], bool],
        decide: Callable[[Onset], None],
    ) -> None:
        self.turn_id = turn_id
        self.audio_ms = audio_ms
        #: The request aside, once it has opened.
        self.request: Request | None = None
        self.verdict: Verdict | None = None
        #: Whether the client is told nothing of a dismissed sound that goes on.
        self.rest_untold = False
        #: Whether words, or other input, have made it an interruption: the answer is then not held until words come.
        self.has_words = False
        #: Whether the sound is clear; where it ended, in milliseconds of the session's audio; None if it has not.
        self.clear = False
        self.stopped_ms: int | None = None
        #: Its last lull, if it is quiet now.
        self.lull: SpeechLull | None = None
        self._after_question = after_question
        self._holds = holds
        self._waits = waits
        self._decide = decide
        self._voiced_ms = 0
        self._settled = ""
        self._interim = ""
        #: Readings of the latest words that are almost as likely.
        self._others: tuple[str, ...] = ()
        self._language: str | None = None
        #: Whether no better transcript will come; and whether recognition has failed.
        self._known = False
        self._deaf = False
        #: Whether the sound fell quiet before its words were known, and no words have come since.
        self._stale = False
        #: Whether the latest words are a guess: of the whole sound, if that is over.
        self._guessed = False
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(LIMIT_SEC, self._time_is_up)
        self._wait: asyncio.TimerHandle | None = None

    def opens(self, request: Request) -> None:
        """Note that ``request`` has opened aside."""
        self.request = request
        request.is_aside(self)

    @property
    def audio(self) -> list[InputChunk]:
        """The audio that its request was given."""
        if self.request is None:
            return []
        return [*(self.request.given or ()), *self.request.session.buffered]

    @property
    def audio_length_ms(self) -> int:
        """The length of that audio."""
        return 0 if self.request is None else round(self.request.session.received.audio_ms)

    # what the listener tells

    def sounds(self, voiced_ms: int, *, clear: bool) -> None:
        """Note how long the sound is voiced by now, and whether it is clear."""
        if self.verdict is not None:
            return
        if self.lull is not None and voiced_ms > self.lull.voiced_ms:
            self.lull = None
            self._stop_waiting()
        became_clear = clear and not self.clear
        self._voiced_ms, self.clear = voiced_ms, clear
        if became_clear:
            self._look()

    def lulls(self, lull: SpeechLull) -> None:
        """Note that the sound is quiet."""
        if self.verdict is not None:
            return
        self._voiced_ms, self.clear, self.lull = lull.voiced_ms, lull.clear, lull
        self._stale = not self._known and not self._guessed
        self._look()
        if self.verdict is None and self._wait is None:
            seconds = LIKELY_WAIT_SEC if self._is_likely else WAIT_SEC
            self._wait = asyncio.get_running_loop().call_later(seconds, self._wait_is_over)

    def lasts(self, *, clear: bool) -> None:
        """Note that the sound is voiced for more than LONG_MS."""
        self.clear = clear
        self._end(Verdict.INTERRUPTION if clear else Verdict.BACKCHANNEL)

    def ends(self, audio_ms: int) -> None:
        """Note that the turn has ended at ``audio_ms``."""
        self.stopped_ms = audio_ms
        if self.lull is None:
            self.lulls(SpeechLull(self._voiced_ms, self.clear, audio_ms))

    def is_input(self) -> None:
        """Note that the client has sent more input to its turn, or has ended the input."""
        self.has_words = True
        self._end(Verdict.INTERRUPTION)

    # what the engine tells

    def hear(self, output: EngineOutput, *, transcribes_first: bool) -> None:
        """Note an output of the engine for its request; ``transcribes_first``: see EngineCapabilities."""
        if self.verdict is not None or self.request is None:
            return
        match output:
            case TranscriptOutput(text=text, interim=interim):
                self._others = tuple(f"{self._settled} {other}" for other in other_readings(output.hearing))
                self._settled, self._interim = (self._settled, text) if interim else (self._settled + text, "")
                self._language = self.request.language_of(output)
                self._stale = self._guessed = False
            case TranscriptGuess(text=text):
                self._others = tuple(f"{self._settled} {other}" for other in other_readings(output.hearing))
                self._interim, self._language = text, self.request.language_of(output) or self._language
                self._guessed = bool(text)
                self._stale = self._stale and not text
            case PartFailed():
                self._deaf = True
            case WordsComplete() | Finished():
                self._known = True
            case TextOutput() | AudioOutput() | ToolCallOutput() | ThoughtOutput() if transcribes_first:
                self._known = True
            case _:
                return
        self._look()

    # deciding

    def settle(self) -> None:
        """Decide now, by what is known."""
        if self.verdict is not None:
            return
        if not self.clear:
            self._end(Verdict.BACKCHANNEL)
            return
        verdict = self._verdict
        self.has_words = verdict in (Verdict.INTERRUPTION, Verdict.STOP) and self._text is not None
        if verdict is Verdict.UNSURE:
            dismissed = self._is_likely and not self._holds
            verdict = Verdict.BACKCHANNEL if dismissed else Verdict.INTERRUPTION
        self._end(verdict)

    def dismiss(self, *, rest_untold: bool = False) -> None:
        """Decide that it is no turn, whatever is known. ``rest_untold``: the client hears nothing of what follows."""
        self.rest_untold = rest_untold
        self._end(Verdict.BACKCHANNEL)

    def _look(self) -> None:
        text = self._text
        if self.lull is None:
            if self.clear and text and sure_words(text, self._language):
                self.has_words = True
                self._end(Verdict.INTERRUPTION)
            return
        if not self.clear:
            self._end(Verdict.BACKCHANNEL)
            return
        if self._verdict is Verdict.UNSURE and not self._known and not self._deaf:
            return
        self.settle()

    @property
    def _verdict(self) -> Verdict:
        """The verdict on the sound, which is quiet, by what is known."""
        text = self._text
        verdict = self._judged(text)
        if self._stale and verdict is Verdict.INTERRUPTION and text and not sure_words(text, self._language):
            # "Got it" may be spelled as "God", and a hum as any words, until it is heard whole.
            sound = self._judged(None)
            return Verdict.UNSURE if sound is Verdict.BACKCHANNEL else sound
        return verdict

    @property
    def _is_likely(self) -> bool:
        """Whether the sound, without known words, is a backchannel rather than not."""
        probability = None if self.lull is None else self.lull.probability
        return probability is not None and probability >= LIKELY_BACKCHANNEL and not self._after_question

    def _judged(self, text: str | None) -> Verdict:
        probability = None if self.lull is None else self.lull.probability
        return judged(
            text,
            probability,
            self._language,
            voiced_ms=self._voiced_ms,
            after_question=self._after_question,
            others=self._others,
        )

    @property
    def _text(self) -> str | None:
        """The words so far; empty if there are none, None as long as nobody knows."""
        text = self._settled + self._interim
        return text if text.strip() or (self._known and not self._deaf) else None

    def _wait_is_over(self) -> None:
        self._wait = None
        self.settle()

    def _time_is_up(self) -> None:
        if self._waits():
            self._limit = asyncio.get_running_loop().call_later(LIMIT_SEC, self._time_is_up)
        else:
            self.settle()

    def _stop_waiting(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def _end(self, verdict: Verdict) -> None:
        if self.verdict is not None:
            return
        self.verdict = verdict
        self._limit.cancel()
        self._stop_waiting()
        self._decide(self)
