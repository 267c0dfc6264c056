"""Uncertain onsets: sounds over an answer of which it is not known yet whether they interrupt it (``duck``).

*What it is.* The client lowers the volume of the answer and plays on; the server sends on. The sound is admitted to a
request *aside* (``RequestQueue.listen_aside``): the engine recognises it, but the client is not told of the request.
The Onset collects the evidence: how long the sound is voiced and whether it is clear (OnsetMeter), its transcripts, and
the probability that it is a backchannel. The Onset decides once, and its owner then confirms or dismisses the sound.

*Deciding.* The first of these cases that is sure decides:

- the sound is voiced for more than ``LONG_MS``: an interruption if it is clear, else none;
- it is clear, the voice goes on, and there are words: ``sure_words`` decides;
- the sound is quiet again: no interruption if it was not clear, otherwise ``judged`` decides. Where that is unsure, the
  next transcripts do, for which the Onset waits ``WAIT_SEC`` at most, or ``LIKELY_WAIT_SEC`` if the sound is rather a
  backchannel (the answer plays on meanwhile). After the wait it is an interruption if the answer can be held until the
  words are known; otherwise the probability alone decides. A voice that goes on ends the wait;
- input joins the turn: an interruption;
- a new onset begins, or ``LIMIT_SEC`` pass without any of these (audio no longer arrives): the evidence so far decides.
  While no client is connected, LIMIT_SEC starts over again and again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, TypeAlias

from omni_ws.audio.sound_levels import SpeechLull
from omni_ws.core.chunks import InputChunk, StartTrigger, other_readings
from omni_ws.core.ledger import Ledger
from omni_ws.core.ledger_entry import LedgerEntry
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
from omni_ws.service import new_id
from omni_ws.service.conversation.turn_words import TurnWords
from omni_ws.service.observing.observer import SpeechHeard
from omni_ws.wire.server_frames import (
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation
    from omni_ws.service.conversation.request import Request


#: Seconds for which a sound that has ended waits for its transcript, if the sound alone does not suffice for a verdict.
WAIT_SEC: Final = 0.35
#: The same for a sound that is probably a backchannel: to hear "stop" late is better than to miss it.
LIKELY_WAIT_SEC: Final = 1.0
#: How long an onset is uncertain at most, if audio no longer arrives.
LIMIT_SEC: Final = 3.0
#: From this many words on, a transcript cannot be a hum that was misrecognised, while the voice goes on.
ENOUGH_WORDS: Final = 4
#: From this probability on a sound without known words is a backchannel, if nothing better will be known.
LIKELY_BACKCHANNEL: Final = 0.5


def sure_words(text: str, language: str | None) -> bool:
    """Return whether an unfinished transcript is surely an interruption: by its first words, or by its length."""
    return begins_with_stop_word(text, language or "en") or (
        len(text.split()) >= ENOUGH_WORDS
        and judged(text, None, language, voiced_ms=0, after_question=False) is not Verdict.BACKCHANNEL
    )


class Onset:
    """One uncertain onset. When it is decided, ``verdict`` is set and ``decide`` is called with this Onset, once.

    ``audio_ms`` is where the sound began, in milliseconds of the session's audio. ``after_question``: the answer has
    just asked something. ``holds``: an interruption whose words are not known holds the answer until they are.
    ``waits`` returns whether LIMIT_SEC must start over instead of ending the wait.
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
        #: Whether the client gets no further events about a dismissed sound that goes on.
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
        """Note that ``request``, which is *aside*, has opened for this onset."""
        self.request = request
        request.is_aside(self)

    @property
    def audio(self) -> list[InputChunk]:
        """The audio of the sound so far: the input of ``request``."""
        if self.request is None:
            return []
        return [*(self.request.given or ()), *self.request.session.buffered]

    @property
    def audio_length_ms(self) -> int:
        """The length of ``audio``."""
        return 0 if self.request is None else round(self.request.session.received.audio_ms)

    # what the listener tells

    def sounds(self, voiced_ms: int, *, clear: bool) -> None:
        """Note for how long the sound has been voiced so far, and whether it is clear."""
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
        """Note that the sound has become quiet."""
        if self.verdict is not None:
            return
        self._voiced_ms, self.clear, self.lull = lull.voiced_ms, lull.clear, lull
        self._stale = not self._known and not self._guessed
        self._look()
        if self.verdict is None and self._wait is None:
            seconds = LIKELY_WAIT_SEC if self._is_likely else WAIT_SEC
            self._wait = asyncio.get_running_loop().call_later(seconds, self._wait_is_over)

    def lasts(self, *, clear: bool) -> None:
        """Note that the sound has been voiced for more than LONG_MS."""
        self.clear = clear
        self._end(Verdict.INTERRUPTION if clear else Verdict.BACKCHANNEL)

    def ends(self, audio_ms: int) -> None:
        """Note that the turn has ended at ``audio_ms``."""
        self.stopped_ms = audio_ms
        if self.lull is None:
            self.lulls(SpeechLull(self._voiced_ms, self.clear, audio_ms))

    def is_input(self) -> None:
        """Decide for an interruption: within the turn, the client has sent other input, or has ended the input."""
        self.has_words = True
        self._end(Verdict.INTERRUPTION)

    # what the engine tells

    def hear(self, output: EngineOutput, *, transcribes_first: bool) -> None:
        """Note an output of the engine for ``request``; ``transcribes_first``: see EngineCapabilities."""
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
        """Decide now, by the evidence so far."""
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
        """Decide that the sound is no turn, whatever the evidence.

        ``rest_untold``: if the sound goes on, the client gets no further events about it.
        """
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
        """The verdict on a sound that is quiet again, by the evidence so far."""
        text = self._text
        verdict = self._judged(text)
        if self._stale and verdict is Verdict.INTERRUPTION and text and not sure_words(text, self._language):
            # "Got it" may be spelled as "God", and a hum as any words, until it is heard whole.
            sound = self._judged(None)
            return Verdict.UNSURE if sound is Verdict.BACKCHANNEL else sound
        return verdict

    @property
    def _is_likely(self) -> bool:
        """Whether the sound alone, without its words, is more likely a backchannel than not."""
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
        """The words so far; "" if the sound has none, None while that is not known."""
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


# SpokenTurns: the spoken turns of a conversation as its client is told of them, uncertain onsets included.


@dataclasses.dataclass(slots=True)
class _Speech:
    """A speech turn, and its request: the one that it will open, has opened or has joined.

    The request may have ended.
    """

    turn_id: str
    request_id: str | None = None
    request: Request | None = None
    #: Where it began, in milliseconds of the session's audio.
    began_ms: int = 0

    def joins(self, request: Request) -> None:
        self.request, self.request_id = request, request.request_id
        request.joined_by(self.turn_id)


class SpokenTurns:
    """Receives what the TurnListener of ``conversation`` detects, and tells the client of it.

    An uncertain onset opens a request that is *aside* (``sets_aside``): the engine recognises its speech, but the
    client is not told of it. ``_decide`` turns the request into one that interrupts, or withdraws it.
    """

    def __init__(self, conversation: Conversation, now: Callable[[], float]) -> None:
        self._conversation = conversation
        self._now = now
        #: What the engine tells of the words of the speech in progress.
        self.words = TurnWords(
            lambda: conversation.engine.capabilities,
            heard=self._is_heard,
            asked=conversation.ledger.last_said,
            on_told=self._words_told,
        )
        #: The speech in progress.
        self.current: _Speech | None = None
        #: The uncertain onset of speech over an answer, until it is decided.
        self.onset: Onset | None = None

    def started(self, turn_id: str, audio_ms: int, *, is_input: bool) -> None:
        """Tell the client that speech has begun.

        ``is_input``: the speech joins the open request, or opens one with its next event.
        """
        owner = self._conversation
        opens = is_input and owner.receiving is None and owner.stream.current is None
        speech = self.current = _Speech(turn_id, new_id("req_") if opens else None, began_ms=audio_ms)
        self.words.begin()
        if is_input and owner.receiving is not None:
            speech.joins(owner.receiving)
        self._tell(SpeechStartedFrame(audio_ms=audio_ms, turn_id=turn_id, request_id=speech.request_id))

    def stopped(self, turn_id: str, audio_ms: int) -> None:
        """Tell the client that the latest speech has ended; if its onset is uncertain, once that is confirmed."""
        if self.onset is not None:
            self.onset.ends(audio_ms)
            return
        speech, self.current = self.current, None
        request = None if speech is None else speech.request
        request_id = request.request_id if request is not None and request.answerable else None
        self._tell(SpeechStoppedFrame(audio_ms=audio_ms, turn_id=turn_id, request_id=request_id))

    def sounds(self, voiced_ms: int, *, clear: bool) -> None:
        """Note for how long the speech over an answer has been voiced so far, and whether it is clear."""
        if self.onset is not None:
            self.onset.sounds(voiced_ms, clear=clear)
            return
        request = None if self.current is None else self.current.request
        if request is not None and request.lull is not None and voiced_ms > request.lull.voiced_ms:
            request.note_lull(None)  # the voice goes on: what was measured of it tells nothing of the rest

    def lulls(self, lull: SpeechLull) -> None:
        """Note the measurements of speech over an answer. The speech is quiet for now."""
        if self.onset is not None:
            self.onset.lulls(lull)
        elif self.current is not None and self.current.request is not None:
            self.current.request.note_lull(lull)

    def breathes(self, audio_ms: int) -> None:
        """Note a pause in the speech in progress, whose speaker has more to say."""
        if self.current is not None and self.onset is None:
            self._conversation.unasked.murmurs.take_breath(self.current.turn_id, self.current.began_ms, audio_ms)

    def _is_heard(self) -> bool:
        """Return whether the engine has the request of the speech in progress. Called by any thread."""
        request = self._conversation.receiving
        return request is not None and request.answering

    def _words_told(self) -> None:
        if (listener := self._conversation.listener) is not None:
            # Behind the output of the engine that tells the words, as this may end its input.
            asyncio.get_running_loop().call_soon(listener.words_told)

    def restore(self, turn_id: str) -> None:
        """Continue the speech that was in progress when a conversation was saved."""
        self.current = _Speech(turn_id)
        if self._conversation.receiving is not None:
            self.current.joins(self._conversation.receiving)

    def withdraw_wordless(self) -> bool:
        """Cancel the request of the speech in progress if no word has been recognised for long; return whether it was.

        Other input than speech, such as typed text, then opens a request of its own, and does not wait for the noise to
        end.
        """
        owner, request = self._conversation, self._conversation.receiving
        if self.onset is not None or request is None or not request.only_speech or not self.words.wordless():
            return False
        owner.take_events(owner.stream.end_input(StartTrigger.VAD, None))
        owner.queue.withdraw_wordless(request)
        return True

    # uncertain onsets

    @property
    def aside(self) -> Request | None:
        """The request of the uncertain onset; None without one."""
        return None if self.onset is None else self.onset.request

    def began(self, turn_id: str, audio_ms: int, *, told: bool = False) -> None:
        """Begin an uncertain onset, and tell the client of it, unless it was ``told`` already.

        The caller opens the onset's request next.
        """
        self.current = _Speech(turn_id, new_id("req_"), began_ms=audio_ms)
        self.words.begin()
        self.onset = Onset(
            turn_id,
            audio_ms,
            after_question=self._has_asked(),
            holds=self._holds,
            waits=lambda: self._conversation.detached,
            decide=self._decide,
        )
        if not told:
            self._tell(SpeechStartedFrame(audio_ms=audio_ms, turn_id=turn_id, certain=False))

    def not_found(self, turn_id: str, audio_ms: int) -> None:
        """Dismiss an uncertain onset from before a restore: the client was told of it, but it is not found again."""
        self._tell(SpeechDismissedFrame(turn_id=turn_id, audio_ms=audio_ms))

    def sets_aside(self, request: Request) -> bool:
        """If there is an uncertain onset, make ``request`` the request of that onset. Returns whether there is one."""
        if self.onset is None:
            return False
        self.onset.opens(request)
        self._conversation.queue.listen_aside(request)
        return True

    def is_input(self) -> None:
        """Confirm the uncertain onset, if there is one: the client has sent other input within its turn."""
        if self.onset is not None:
            self.onset.is_input()

    def dismiss(self, *, rest_untold: bool = False) -> None:
        """Dismiss the uncertain onset, if there is one. ``rest_untold``: see ``Onset.dismiss``."""
        if self.onset is not None:
            self.onset.dismiss(rest_untold=rest_untold)

    @property
    def _holds(self) -> bool:
        turns = self._conversation.configuration.effective.turn_detection
        return turns is not None and turns.interrupt_resume and self._conversation.engine.capabilities.transcripts

    def _has_asked(self) -> bool:
        """Return whether the last sentence that the user has heard of the playing answer is a question."""
        ledger, now = self._conversation.ledger, self._now()
        answer = ledger.at_play(now)
        return answer is not None and has_asked(ledger, answer, now)

    def _decide(self, onset: Onset) -> None:
        owner, request, self.onset = self._conversation, onset.request, None
        if onset.verdict is Verdict.BACKCHANNEL or request is None:
            self._take_back(onset)
            return
        self._tell(SpeechConfirmedFrame(turn_id=onset.turn_id, request_id=request.request_id, audio_ms=onset.audio_ms))
        request.note_lull(onset.lull)
        owner.queue.take_in(request)
        owner.admit_request(request, interrupts=True, has_words=onset.has_words)
        owner.queue.wake()
        if onset.stopped_ms is not None:
            self.stopped(onset.turn_id, onset.stopped_ms)

    def _take_back(self, onset: Onset) -> None:
        owner, request, self.current = self._conversation, onset.request, None
        if request is not None:
            owner.withdraw_request(request)
        if owner.listener is not None:
            owner.listener.dismissed(rest_untold=onset.rest_untold)
        self._tell(SpeechDismissedFrame(turn_id=onset.turn_id, audio_ms=onset.audio_ms))

    def _tell(
        self, frame: SpeechStartedFrame | SpeechConfirmedFrame | SpeechDismissedFrame | SpeechStoppedFrame
    ) -> None:
        self._conversation.observed.notify(SpeechHeard(frame))
        self._conversation.outbox.put_nowait(frame)
        self._conversation.unasked.note_quiet(self._now())


# What short speech over an answer means, by its words and its sound; and questions of the speaker.
#
# The lists of words are in ``short_words``, a file a language; ``any.toml`` counts in every language.


#: The languages that have word lists.
LANGUAGES: Final = frozenset({"de", "en", "es", "fr", "it", "pt"})
#: A text of more words is no mere acknowledgement, and no mere "stop".
MOST_WORDS: Final = 6
#: A recogniser makes no more words than this of a hum.
_MOST_WORDS_OF_A_HUM: Final = 4
#: If fewer words of a sentence were heard, the listener answers the sentence before it: to react takes a moment.
_LEAST_HEARD_WORDS: Final = 3

#: Without known words, a sound is a backchannel from the first probability on, and an interruption up to the second.
#: The sound of "yeah" and "okay" tells little, and words are known soon: so only clear cases are decided early.
SURE_BACKCHANNEL: Final = 0.85
SURE_WORDS: Final = 0.1
#: From here on a text that recognisers make of hums counts as a hum.
_RATHER_BACKCHANNEL: Final = 0.5
#: Sound that lasts longer is no backchannel, unless its words are.
LONGEST_BACKCHANNEL_MS: Final = 800

_BETWEEN_WORDS: Final = re.compile(r"[^\w']+|_")
_SENTENCE: Final = re.compile(r"[^.!?…。？！]*(?:[.!?…。？！]+|$)", re.DOTALL)
_QUESTION_MARKS: Final = re.compile(r"[?？؟]")

_Words: TypeAlias = tuple[str, ...]


class Verdict(Enum):
    """The verdict on speech over an answer."""

    #: It invites the speaker to go on, or has no meaning.
    BACKCHANNEL = "backchannel"
    INTERRUPTION = "interruption"
    #: An interruption that asks for silence, not for an answer.
    STOP = "stop"
    #: The evidence does not suffice yet.
    UNSURE = "unsure"


def judged(
    text: str | None,
    probability: float | None,
    language: str | None,
    *,
    voiced_ms: int,
    after_question: bool,
    others: Sequence[str] = (),
) -> Verdict:
    """Return the verdict on speech over an answer. While the speech has not paused, only an INTERRUPTION is reliable.

    ``text`` has the words recognised so far: None if nothing is known yet, "" if there are none. ``probability`` is the
    result of ``backchannel_probability``, and ``voiced_ms`` is for how long there was a voice. ``after_question``: the
    assistant has just asked something, so that "yeah" is an answer. ``others`` are alternatives that the recogniser
    finds almost as likely as ``text``. UNSURE is returned only while words are not known.
    """
    sure = probability is not None and probability >= SURE_BACKCHANNEL and voiced_ms <= LONGEST_BACKCHANNEL_MS
    if text is not None and _words(text):
        rather = probability is not None and probability >= _RATHER_BACKCHANNEL
        language = language or "en"
        verdict = _judged_by_words(text, language, sure=sure, rather=rather, after_question=after_question)
        surely_words = probability is not None and probability <= SURE_WORDS
        if verdict is Verdict.INTERRUPTION and not (after_question or surely_words):
            return Verdict.BACKCHANNEL if _is_misspelled([text, *others], language) else verdict
        return verdict
    if text is not None:
        # recognisers miss short words, and a loud "stop" is one
        surely_words = probability is not None and probability <= SURE_WORDS
        return Verdict.INTERRUPTION if surely_words else Verdict.BACKCHANNEL
    if voiced_ms > LONGEST_BACKCHANNEL_MS or (probability is not None and probability <= SURE_WORDS):
        return Verdict.INTERRUPTION
    return Verdict.BACKCHANNEL if sure and not after_question else Verdict.UNSURE


def _judged_by_words(text: str, language: str, *, sure: bool, rather: bool, after_question: bool) -> Verdict:
    """Return the verdict on known words. ``sure``, ``rather``: the sound was surely, or probably, a backchannel.

    For a hum a recogniser may write any words, such as "The moment." or "Lambda". If the sound was surely a hum, the
    words count only if they interrupt. Some words are so often written for hums that "probably" suffices for them.
    """
    if is_stop_word(text, language):
        return Verdict.STOP
    if after_question:
        return Verdict.INTERRUPTION
    if is_acknowledgement(text, language):
        return Verdict.BACKCHANNEL
    words, known = _words(text), _list_of(language)
    hum = sure and len(words) <= _MOST_WORDS_OF_A_HUM and not begins_with_stop_word(text, language)
    misheard = rather and _divides(words, (known.misheard, known.acknowledgements))
    return Verdict.BACKCHANNEL if hum or misheard else Verdict.INTERRUPTION


def _is_misspelled(readings: Sequence[str], language: str) -> bool:
    """Return whether a reading is an acknowledgement ("Got it", not "God it"), and no reading interrupts.

    False if any reading has more than MOST_WORDS words: the short readings have then left words out.
    """
    if any(len(_words(reading)) > MOST_WORDS for reading in readings):
        return False
    return any(is_acknowledgement(reading, language) for reading in readings) and not any(
        begins_with_stop_word(reading, language) or is_stop_word(reading, language) for reading in readings
    )


def is_acknowledgement(text: str, language: str = "en") -> bool:
    """Return whether a text consists only of phrases that invite the speaker to go on, such as "yeah, I see"."""
    return _divides(_words(text), (_list_of(language).acknowledgements,))


def is_stop_word(text: str, language: str = "en") -> bool:
    """Return whether a whole utterance means stop: "wait", "okay, stop please"."""
    words, known = _words(text), _list_of(language)
    around = (known.stop, known.beside_stop, known.acknowledgements)
    return _divides(words, around) and not _divides(words, around[1:])


def begins_with_stop_word(text: str, language: str = "en") -> bool:
    """Return whether an unfinished text begins with words that interrupt, after any acknowledgements."""
    words, known = _words(text), _list_of(language)
    places = _ends(words, (known.acknowledgements,))
    if len(words) in places:  # "no way", "ach was"
        return False
    return any(ends for place in places for ends in known.stop.ends(words, place) + known.interrupts.ends(words, place))


def asks(text: str, heard: int) -> bool:
    """Return whether the last sentence of which something was heard is a question.

    ``heard``: characters heard of ``text``.
    """
    sentences = [found for found in _SENTENCE.finditer(text) if found[0].strip() and found.start() < heard]
    if len(sentences) > 1:
        last = sentences[-1]
        if last.end() > heard and len(text[last.start() : heard].split()) < _LEAST_HEARD_WORDS:
            sentences.pop()  # it has only just begun
    return bool(sentences) and _QUESTION_MARKS.search(sentences[-1][0]) is not None


def has_asked(ledger: Ledger, answer: LedgerEntry, now: float) -> bool:
    """Return whether the last sentence that the user has heard of an answer by ``now`` is a question."""
    return asks(answer.said.joined(), len(ledger.answer_if_cut(answer, now).text))


# Lists of phrases


@dataclass(frozen=True, slots=True)
class _Phrases:
    known: frozenset[_Words]
    longest: int

    def ends(self, words: _Words, place: int) -> list[int]:
        """Return the ends of all phrases that begin at index ``place`` of ``words``."""
        last = min(place + self.longest, len(words))
        return [end for end in range(place + 1, last + 1) if words[place:end] in self.known]


@dataclass(frozen=True, slots=True)
class _ShortWords:
    acknowledgements: _Phrases
    misheard: _Phrases
    stop: _Phrases
    beside_stop: _Phrases
    interrupts: _Phrases


def _ends(words: _Words, lists: tuple[_Phrases, ...]) -> set[int]:
    """Return the indexes up to which the words can be divided into phrases of the lists."""
    begins = {0}
    for place in range(len(words)):
        if place in begins:
            begins.update(end for phrases in lists for end in phrases.ends(words, place))
    return begins


def _divides(words: _Words, lists: tuple[_Phrases, ...]) -> bool:
    """Return whether all the words can be divided into phrases of the lists, and are at most MOST_WORDS."""
    return 0 < len(words) <= MOST_WORDS and len(words) in _ends(words, lists)


def _words(text: str) -> _Words:
    return tuple(_BETWEEN_WORDS.sub(" ", text.replace("’", "'").lower()).split())


def _list_of(language: str) -> _ShortWords:
    """Return the phrases of ``language``, a tag as clients write it: "en", "pt-BR"."""
    plain = re.split("[-_]", language.lower(), maxsplit=1)[0]
    return _read(plain if plain in LANGUAGES else "any")


@cache
def _read(language: str) -> _ShortWords:
    every, own = _file("any"), _file(language) if language != "any" else {}
    return _ShortWords(
        *(
            _Phrases(frozenset(phrases), max(map(len, phrases), default=0))
            for name in _ShortWords.__annotations__
            for phrases in [[_words(each) for each in every.get(name, []) + own.get(name, [])]]
        )
    )


def _file(language: str) -> dict[str, list[str]]:
    file = files(__package__).joinpath("short_words", f"{language}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
