"""SpokenTurns: the spoken turns of a conversation as its client is told of them, uncertain onsets included."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from omni_ws.audio.onset_meter import SpeechLull
from omni_ws.core.chunks import StartTrigger
from omni_ws.service.conversation.mere_acknowledgements import Verdict, has_asked
from omni_ws.service.conversation.onsets import Onset
from omni_ws.service.conversation.turn_words import TurnWords
from omni_ws.service.failure import new_id
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


@dataclasses.dataclass(slots=True)
class _Speech:
    """A speech turn, and the request that it is about to open, has opened or has joined; that may have ended since."""

    turn_id: str
    request_id: str | None = None
    request: Request | None = None
    #: Where it began, in milliseconds of the session's audio.
    began_ms: int = 0

    def joins(self, request: Request) -> None:
        self.request, self.request_id = request, request.request_id
        request.joined_by(self.turn_id)


class SpokenTurns:
    """Takes what the TurnListener of ``conversation`` hears, and tells the client.

    An uncertain onset opens a request aside (``sets_aside``). ``_decide`` makes it one that interrupts, or takes it
    back.
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
        """Report that speech has begun. ``is_input``: it joins the open request, or its next event opens one."""
        owner = self._conversation
        opens = is_input and owner.receiving is None and owner.stream.current is None
        speech = self.current = _Speech(turn_id, new_id("req_") if opens else None, began_ms=audio_ms)
        self.words.begin()
        if is_input and owner.receiving is not None:
            speech.joins(owner.receiving)
        self._tell(SpeechStartedFrame(audio_ms=audio_ms, turn_id=turn_id, request_id=speech.request_id))

    def stopped(self, turn_id: str, audio_ms: int) -> None:
        """Report that the speech that began last has ended."""
        if self.onset is not None:
            self.onset.ends(audio_ms)
            return
        speech, self.current = self.current, None
        request = None if speech is None else speech.request
        request_id = request.request_id if request is not None and request.answerable else None
        self._tell(SpeechStoppedFrame(audio_ms=audio_ms, turn_id=turn_id, request_id=request_id))

    def sounds(self, voiced_ms: int, *, clear: bool) -> None:
        """Take how long the speech over an answer is voiced by now, and whether it is clear."""
        if self.onset is not None:
            self.onset.sounds(voiced_ms, clear=clear)
            return
        request = None if self.current is None else self.current.request
        if request is not None and request.lull is not None and voiced_ms > request.lull.voiced_ms:
            request.note_lull(None)  # the voice goes on: what was measured of it tells nothing of the rest

    def lulls(self, lull: SpeechLull) -> None:
        """Take what is measured of speech over an answer, as it is quiet for now."""
        if self.onset is not None:
            self.onset.lulls(lull)
        elif self.current is not None and self.current.request is not None:
            self.current.request.note_lull(lull)

    def breathes(self, audio_ms: int) -> None:
        """Take a pause of the speech in progress, whose speaker has more to say."""
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
        """Continue the speech in progress of another conversation."""
        self.current = _Speech(turn_id)
        if self._conversation.receiving is not None:
            self.current.joins(self._conversation.receiving)

    def withdraw_wordless(self) -> bool:
        """Cancel the request of the speech in progress if its recogniser has found no word for long; return whether.

        Other input than speech, such as typed text, then opens a request of its own, and waits for no babble.
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
        """The request of the uncertain onset."""
        return None if self.onset is None else self.onset.request

    def began(self, turn_id: str, audio_ms: int, *, told: bool = False) -> None:
        """Report an uncertain onset, unless the client was ``told`` of it; the next event opens its request."""
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
        """Dismiss an uncertain onset that the client was told of before a restore, as none is found again."""
        self._tell(SpeechDismissedFrame(turn_id=turn_id, audio_ms=audio_ms))

    def sets_aside(self, request: Request) -> bool:
        """Take a request that speech opens as that of the uncertain onset, if there is one."""
        if self.onset is None:
            return False
        self.onset.opens(request)
        self._conversation.queue.listen_aside(request)
        return True

    def is_input(self) -> None:
        """Confirm the uncertain onset, if there is one: the client has sent other input to its turn."""
        if self.onset is not None:
            self.onset.is_input()

    def dismiss(self, *, rest_untold: bool = False) -> None:
        """Dismiss the uncertain onset, if there is one; ``rest_untold``: see ``Onset``."""
        if self.onset is not None:
            self.onset.dismiss(rest_untold=rest_untold)

    @property
    def _holds(self) -> bool:
        turns = self._conversation.configuration.effective.turn_detection
        return turns is not None and turns.interrupt_resume and self._conversation.engine.capabilities.transcripts

    def _has_asked(self) -> bool:
        """Return whether the last sentence that was heard of the answer that plays is a question."""
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
