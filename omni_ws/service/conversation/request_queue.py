"""The queue of a conversation's requests: answers one after the other, in the order in which they opened."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

import msgspec
from msgspec.structs import replace

from omni_ws.core.chunks import (
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputChunk,
    OutputModality,
    Task,
    Usage,
    WordsKnown,
)
from omni_ws.core.history import Message
from omni_ws.core.ledger import Ledger
from omni_ws.core.ledger_entry import LedgerEntry
from omni_ws.core.request_input import InputSettings, RequestInput
from omni_ws.core.start_policy import ON_END_ONLY
from omni_ws.engine.answer_limit import count_words, go_on
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputFilter,
    OutputWriter,
    TextOutput,
)
from omni_ws.errors import EngineFailed, OmniError, ends_session
from omni_ws.service import of_request
from omni_ws.service.conversation.answer_writer import (
    AnswerWriter,
    final_chunk,
    late_transcript,
    started_frame,
    transcript_chunk,
)
from omni_ws.service.conversation.interrupted import CutTurns, Due, EarlierTurns, HeldAnswer
from omni_ws.service.conversation.output_log import ASR_TIMEOUT_SEC, OutputLog, OutputSequencer
from omni_ws.service.conversation.request import Remark, Request, RequestState, SavedRequest
from omni_ws.service.observing.observer import ObservedSession, OutputMade


class SavedQueue(msgspec.Struct, kw_only=True):
    """A RequestQueue in a form that can be written to bytes.

    ``late`` are the ids of requests that had their finals while their words were still being transcribed.
    """

    requests: list[SavedRequest]
    opened: int
    next_output: int
    late: list[str]


class RequestQueue:
    """The requests of a conversation: gives the first to the engine, and every request exactly one final.

    Finals are written in the order of the queue, with exceptions: a request that is refused as it opens, and one that
    is cancelled while it is answered, have their finals immediately; so do all that another request interrupts, unless
    their words are still being transcribed (``cancel``). The next answer waits until the engine's call for the one
    before has ended.

    The user's words are not lost with an answer. If an answer is cut off before all speech of its request is
    transcribed, the engine goes on with the transcription alone, as a *cut turn* (CutTurns), while it works on the next
    request. If the history keeps nothing of the answer, the next request's message begins with the words of the cut
    turn, and its answer waits for them.

    With ``interrupt_resume``, speech only holds the answer that it interrupts, and the engine begins with the new
    request. If the new request has words, or anything else happens, the held answer is cancelled before anything of the
    new one is sent. If the new request has no words, it has its final, and the held answer goes on. If that stays
    unknown for too long, the held answer goes on meanwhile, and words still cancel it.

    With ``duck``, a request that an uncertain onset opens is *aside* (``listen_aside``): the engine recognises its
    speech while the answer goes on, and it is not in ``requests``. ``take_in`` makes it a request like any other, which
    interrupts; ``withdraw`` drops it.

    An error is sent before the final of its request. If the error ends the session, ``run`` raises it after that final.

    ``patience`` is the longest wait for the words of a cut turn, in seconds. ``progressed`` is called when the engine
    has begun with the first request, or is done with it before its input has ended; ``ended`` when the final of a
    request is in the output log, and the request has left the queue; ``released`` when nothing works on the request any
    more, which may be long after. None of the three may raise.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: OutputLog,
        *,
        ledger: Ledger,
        observed: ObservedSession,
        patience: float = ASR_TIMEOUT_SEC,
        progressed: Callable[[], None] = lambda: None,
        ended: Callable[[Request], None] = lambda request: None,
        released: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._ledger = ledger
        self._observed = observed
        self._progressed = progressed
        self._ended = ended
        self._released = released
        self._sequencer = OutputSequencer()
        self._wake = WakeUp()
        #: The tasks that answer requests: the first one, and the one after an answer that is held or being cancelled.
        self._answers: dict[Request, asyncio.Task[None]] = {}
        #: The tasks that transcribe cut turns.
        self._hearing: dict[Request, asyncio.Task[None]] = {}
        self._cut = CutTurns(patience)
        self._cut_timer: asyncio.TimerHandle | None = None
        #: The answer to the first request, while it is held.
        self._held: HeldAnswer | None = None
        #: The aside request: that of an uncertain onset.
        self._aside: Request | None = None
        #: Whether ``run`` has ended, or is about to.
        self._stopped = False
        #: The error that ends the session.
        self._failure: BaseException | None = None
        #: See ``end_all``.
        self._error_at_end: OmniError | None = None
        #: The requests without a final. The first that is not cut is being answered, or will be next.
        self.requests: list[Request] = []
        #: How many requests have opened, the greeting included.
        self.opened = 0
        #: Set by ``close``.
        self.closing = False

    @property
    def current(self) -> Request | None:
        """The request that is being answered; None if none is."""
        return next((request for request in self.requests if request.answering), None)

    @property
    def waiting(self) -> list[Request]:
        """The requests whose answer is under way or still to come."""
        return [request for request in self.requests if request not in self._cut]

    @property
    def stopped_by_cancel(self) -> Request | None:
        """The request that a cancel without a request id stops: the one whose answer is under way, or about to begin.

        If there is none, the newest cut turn without a final; None if there is no such turn either.
        """
        first = next(iter(self.waiting), None)
        if first in self._answers:
            return first
        works = any(not request.timeline.withdrawn for request in self._answers)
        if first is not None and first.state is RequestState.WAITING and not works:
            return first
        return next((request for request in reversed(self.requests) if request in self._cut), None)

    @property
    def holding(self) -> Request | None:
        """The turn that interrupted the held answer: a cancel without a request id stops both. None if none is held."""
        return None if self._held is None else self._held.by

    def find(self, request_id: str) -> Request | None:
        """Return the request of this id; None if it has its final, or is aside."""
        return next((request for request in self.requests if request.request_id == request_id), None)

    # saved

    def saved(self) -> SavedQueue:
        """Return the requests without a final, and the counters.

        Transcription that goes on after a final is given up.
        """
        return SavedQueue(
            requests=[request.saved() for request in self.requests],
            opened=self.opened,
            next_output=self._sequencer.next_sequence_id,
            late=[one.request_id for one in self._cut.unwritten()],
        )

    def restore(self, saved: SavedQueue, requests: Iterable[Request]) -> None:
        """Take over the state of a saved queue, with ``requests`` made from ``saved.requests``.

        Each of ``saved.late`` gets an empty late transcript, which says that recognition failed.
        """
        self.opened, self._sequencer = saved.opened, OutputSequencer(saved.next_output, late=saved.late)
        for request in requests:
            self._sequencer.open(request.request_id)
            self.requests.append(request)
        for request_id in saved.late:
            number = self._sequencer.take_late_number(request_id)
            chunk = OutputChunk(request_id, number, OutputModality.TRANSCRIPT, late=True, failed=True)
            self._put_transcript(chunk)
        self._wake.set()

    @property
    def next_output(self) -> int:
        """The number of the next output."""
        return self._sequencer.next_sequence_id

    def number_from(self, next_output: int) -> None:
        """Number outputs from ``next_output`` on, as another server has sent those before."""
        self._sequencer.number_from(next_output)

    # requests

    def open(self, request: Request) -> None:
        """Number a request that opens, so that it can have outputs and a final, even if it is never appended."""
        request.numbered(self.opened)
        self.opened += 1
        self._sequencer.open(request.request_id)

    def append(self, request: Request, *, before_results: bool = False) -> None:
        """Queue a request. Call ``wake`` when it has started or failed.

        ``before_results``: the request is answered before requests of tool results whose answers have not begun.
        """
        if self._held is not None and self._held.by is not request and not waits_to_tell(request):
            self._give_up()
        self._put_off_telling(request)
        place = len(self.requests)
        while before_results and place and waits_to_tell(self.requests[place - 1]):
            place -= 1
        self.requests.insert(place, request)
        if request.answering:  # as it was aside before
            self._speak_or_wait(request)

    def listen_aside(self, request: Request) -> None:
        """Let the engine recognise the request of an uncertain onset. Call ``wake`` when it has started."""
        self._aside = request

    def take_in(self, request: Request) -> None:
        """Make the aside request a normal request: its onset is confirmed. ``interrupt`` and ``append`` follow."""
        self._aside = None
        request.is_sure()

    def withdraw(self, request: Request) -> None:
        """Drop the aside request as if it had never opened: its onset was no turn."""
        self._aside = None
        self._sequencer.withdraw(request.request_id)
        request.withdraw()
        request.know_words(WordsKnown.NEVER)
        if (answer := self._answers.get(request)) is not None:
            answer.cancel()
        self._release(request)
        self._wake.set()

    def announce_remark(self, request: Request, remark: Remark) -> None:
        """Make a newly opened request a remark, start it, and announce it, even if it is refused afterwards.

        By its ``response_started`` a client knows that the remark is the answer to none of its own requests.
        """
        started = request.say_unasked(remark)
        self._outbox.put_nowait(started_frame(request))
        request.note_announced()
        request.timeline.mark_policy_fired(started)
        request.timeline.mark_input_ended()
        self._wake.set()

    def interrupt(self, *, by: Request, has_words: bool = False) -> None:
        """Cancel open requests and the playback, or hold the answer, for the new request ``by``; ``append`` follows.

        Requests of tool results whose answers have not begun stay, and are answered after ``by``. ``has_words``: the
        speech of ``by`` is known to have words, so that nothing is held.
        """
        self._put_off_telling(by)
        if not has_words and self._may_hold(by):
            self._hold(self.waiting[0], by)
            return
        self._ledger.silence(by.timeline.now())
        for earlier in self.waiting:
            if not waits_to_tell(earlier):
                self.cancel(earlier, by=by)

    def _put_off_telling(self, by: Request) -> None:
        """If the user speaks, cancel a telling of which nothing was heard yet: it waits for another pause."""
        for earlier in self.waiting if by.timeline.by_speech else ():
            if earlier.tells and not self._ledger.has_heard(earlier.entry, by.timeline.now()):
                self.cancel(earlier, by=by)

    def wake(self) -> None:
        """Have the queue look at its requests again, as the state of one has changed."""
        self._begin_beside()
        self._wake.set()

    def cancel(self, request: Request, *, by: Request | None = None) -> None:
        """Cancel a queued request; ``by`` is the request that interrupts it, if one does.

        A request that is being answered has its final immediately, and its unsent outputs are dropped; only if it is
        interrupted while its words are still being transcribed does the final wait for them. A waiting request that a
        client cancels has its final in the order of the queue.
        """
        if request in self._cut:
            self._cut.hurry(request, now=self._now())
            self._settle()
            return
        if self._held is not None and self._held.by is request:
            self._give_up()
        held = self._let_go(request)
        answering = request.answering or held is not None
        request.cancel(by=by)
        if answering and (held is None or held.resumed):
            request.entry.withdraw(self._withdraw(request))
        if answering or by is not None:
            self._cut_off(request, at_once=by is None)
        if held is not None:
            self._speak_or_wait(held.by)
        self._wake.set()

    def withdraw_wordless(self, request: Request) -> None:
        """Cancel a request whose input has ended and in which nobody has said a word: it is not transcribed."""
        request.know_words(WordsKnown.ALL)
        if request in self.requests:
            self.cancel(request)

    def _withdraw(self, request: Request) -> list[OutputChunk]:
        withdrawn = self._outbox.withdraw(request.request_id)
        self._sequencer.take_back(len(withdrawn))
        return withdrawn

    def end(self, request: Request, reason: FinishReason, finished: Finished | None = None) -> None:
        """End a request: write its error, if it has one, and its final, and release the request. Idempotent.

        Does nothing for a cut turn. ``reason`` is overridden by the cancellation or the error of the request.
        ``finished`` is the Finished of the engine.
        """
        if request.state is RequestState.FINISHED or request in self._cut:
            return
        held = self._held
        if held is not None and held.request is request and not held.resumed:
            self._let_go(request)  # the session ends while the answer is held
        held = self._held
        if held is not None and held.by is request and not (request.answering and request.only_speech):
            self._give_up()
        request.know_words(WordsKnown.NEVER)
        if request.state is RequestState.CANCELLED:
            reason = FinishReason.CANCELLED
        if request.error is not None:
            if not isinstance(request.error, EngineFailed):  # whose param is no field, but a part of the engine
                request.error.param = request.field_names(request.error.param)
            ref = request.session.ref_of(request.error.sequence_id)
            failure = of_request(request.error, request.request_id, engine=self._engine, ref=ref)
            self._outbox.put_nowait(failure)
            reason = FinishReason.ERROR
        if reason is FinishReason.CANCELLED:
            request.settle()
        if reason is FinishReason.ERROR and not (
            isinstance(request.error, EngineFailed) and request.error.keeps_answer
        ):
            self._ledger.finish(request.entry, whole=False, remembered=False)
        else:
            cut = reason in (FinishReason.CANCELLED, FinishReason.ERROR)
            self._remember(request, None if cut else finished)
        self._write_final(request, reason, finished)
        self._release(request)
        if self._held is not None and self._held.by is request:
            self._go_on(self._held)
        self._wake.set()

    def refuse(self, request: Request, error: OmniError) -> None:
        """End a request immediately with ``error``, and its answer, if that has begun."""
        request.fail(error)
        self.end(request, FinishReason.ERROR)
        if (answer := self._answers.get(request)) is not None:
            answer.cancel()

    def _write_final(self, request: Request, reason: FinishReason, finished: Finished | None = None) -> None:
        if reason is FinishReason.CANCELLED:
            self._send_transcripts(request)
        final = final_chunk(request, reason, finished, sequencer=self._sequencer)
        request.timeline.mark_ended(
            final,
            request.error or (self._error_at_end if reason is FinishReason.ERROR else None),
            received_chunks=request.session.received.chunks,
            received_bytes=request.session.received.bytes,
            player=request.player,
            content=request.entry,
        )
        self._outbox.put_nowait(final)
        if request.ref is not None:
            self._ledger.history.name(request.request_id, request.ref)
        request.finish()
        if request in self.requests:
            self.requests.remove(request)
        self._ended(request)

    def _release(self, request: Request) -> None:
        request.release()
        self._released(request)

    def end_all(self, error: OmniError | None) -> None:
        """Write the finals of all requests, without waiting for anything, as the session ends, in ``error`` if any."""
        self._error_at_end = error
        reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
        self._cut.give_all_up(now=self._now())
        self._settle()
        for request in tuple(self.requests):
            self.end(request, reason)

    # turns that are cut off

    def _cut_off(self, request: Request, *, at_once: bool) -> None:
        """End the answer to a cancelled request, and let the engine transcribe the rest of the speech if it can.

        ``at_once``: the final does not wait for the transcription.
        """
        answer = self._answers.get(request)
        if hears := self._hears_on(request):
            if answer is None:
                answer = self._start_task(request)
                request.timeline.note_heard_later()
            self._answers.pop(request, None)
            self._hearing[request] = answer
            request.hear_on()
            self._outbox.wake_writers()
        elif answer is not None:
            answer.cancel()
        if not hears:
            request.know_words(WordsKnown.NEVER)
            request.settle()
        self._cut.add(request, known=not hears, at_once=at_once, now=self._now())
        self._settle()

    def _hears_on(self, request: Request) -> bool:
        """Return whether the engine will transcribe the rest of a request's speech after its answer is cut off."""
        able = self._engine.capabilities
        if request.words_known or not able.transcripts or request.started is None or request.without_audio:
            return False
        return able.hears_on or able.transcribes_first or request.config.task is Task.TRANSCRIBE

    def _settle(self) -> None:
        """Do the steps that are due for cut turns, and let requests that waited for these turns send their answers."""
        for due, request in self._cut.due(now=self._now()):
            match due:
                case Due.GIVE_UP:
                    if (hearing := self._hearing.get(request)) is not None:
                        hearing.cancel()
                    request.know_words(WordsKnown.NEVER)
                case Due.WORDS:
                    if request.words is not WordsKnown.ALL:
                        request.settle()
                    self._remember(request, None)
                case Due.FINAL:
                    self._write_final(request, FinishReason.CANCELLED)
                case Due.LATE_WORDS:
                    self._put_transcript(late_transcript(request, sequencer=self._sequencer))
            if request.remembered and request.state is RequestState.FINISHED:
                self._release(request)
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        when = self._cut.get_timer()
        self._cut_timer = None if when is None else asyncio.get_running_loop().call_at(when, self._settle)
        for request in self.waiting:
            if request.held_back:
                self._speak_or_wait(request)
        self._begin_beside()
        self._wake.set()

    def _words_over(self, request: Request) -> None:
        """Note that the engine has ended the transcription of a cut turn."""
        self._hearing.pop(request, None)
        request.know_words(WordsKnown.NEVER)
        if self._cut.known(request):
            self._settle()
        self._wake.set()

    def _speak_or_wait(self, request: Request) -> None:
        """Let a request that the engine works on send its answer, or hold it back until earlier cut turns are done."""
        if not request.answering and not request.unannounced:
            return  # the engine has not begun with it
        if self._cut.before(request):
            request.hold_back()
            return
        request.let_speak()
        if request.unannounced and (self._held is None or self._held.by is not request):
            self._announce(request)

    def _send_transcripts(self, request: Request) -> None:
        """Send the settled transcripts of a request that were not sent yet."""
        unsent = request.take_unsent()
        if unsent:
            self._announce(request)  # unless it was held back until it ended, this was done before
        for transcript in unsent:
            self._put_transcript(transcript_chunk(request, transcript, sequencer=self._sequencer))

    def _put_transcript(self, chunk: OutputChunk) -> None:
        if self._observed.observers.listening_to_outputs:
            self._observed.notify(OutputMade(chunk))
        self._outbox.put_nowait(chunk)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # an answer that is held

    def _may_hold(self, by: Request) -> bool:
        """Return whether the answer in progress can be held, and can go on if ``by`` turns out to have no words."""
        detection = by.config.turn_detection
        if detection is None or not detection.interrupt_resume or not by.timeline.by_speech:
            return False
        if not self._engine.capabilities.transcripts or by.session.settings.mode is InputMode.SNAPSHOT:
            return False
        waiting = [one for one in self.waiting if not waits_to_tell(one)]
        if len(waiting) != 1 or waiting[0].state is not RequestState.ANSWERING:
            return False
        first = waiting[0]
        return self._ledger.can_resume(first.entry, by.timeline.now())

    def _hold(self, request: Request, by: Request) -> None:
        request.hold(self._withdraw(request))
        resume = partial(self._send_rest, request)
        self._held = HeldAnswer(request, by, give_up=self._give_up, resume=resume)
        by.interrupt_held(self._held)

    def _let_go(self, request: Request) -> HeldAnswer | None:
        """Stop holding the answer to ``request``. Returns the HeldAnswer; None if the answer was not held."""
        held = self._held
        if held is None or held.request is not request:
            return None
        self._held = None
        held.decide()
        return held

    def _give_up(self) -> None:
        """Cancel the held answer: the turn that interrupted it has words, or another request opens."""
        held = self._held
        if held is None:
            return
        if held.request.state is RequestState.FINISHED:  # it went on, and is over
            self._let_go(held.request)
            self._speak_or_wait(held.by)
        else:
            self.cancel(held.request, by=held.by)

    def _go_on(self, held: HeldAnswer) -> None:
        """Let the held answer go on, as the turn had no words. Audio that was not heard is sent again first."""
        self._let_go(held.request)
        if not held.resumed:
            self._send_rest(held.request)

    def _send_rest(self, request: Request) -> None:
        for chunk in request.go_on():
            number = self._sequencer.take_number(request.request_id)
            self._outbox.put_nowait(replace(chunk, sequence_id=number))

    def _begin_beside(self) -> None:
        """Give the engine the turn over an answer that is held or goes on, to learn whether the turn has words."""
        if self._aside is not None and self._aside.state is RequestState.WAITING and self._may_listen(self._aside):
            self._begin(self._aside)
        if self._held is None or self._held.by.state is not RequestState.WAITING:
            return
        if self._may_begin(self._held.by):
            self._begin(self._held.by)
        elif not self._held.looked_at_later:
            self._held.look_later(self.wake)

    def _may_listen(self, request: Request) -> bool:
        """Return whether the engine may begin with the aside request.

        It may not if the history that the request sees would change when its onset is confirmed.
        """
        waiting = self.waiting
        if request.session.settings.mode is InputMode.SNAPSHOT or len(waiting) > 1:
            return False
        if waiting and waiting[0].state is not RequestState.ANSWERING:
            return False
        return self._may_begin(request)

    def _answer_under(self, request: Request) -> Request | None:
        """Return the request whose answer is held, or goes on, while ``request`` is spoken; None without one."""
        if self._held is not None and self._held.by is request:
            return self._held.request
        if self._aside is request:
            return next(iter(self.waiting), None)
        return None

    def _remember(self, request: Request, finished: Finished | None) -> None:
        """Add the request to the history."""
        audio_ms = 0 if finished is None else finished.usage.input_audio_ms
        request.enter_history(whole=finished is not None, audio_ms=audio_ms)
        request.note_remembered()

    def close(self) -> None:
        """Let ``run`` return after the last answer."""
        self.closing = True
        self._wake.set()

    # answers

    async def run(self) -> None:
        """Answer requests until cancelled or, after ``close``, until none is left.

        Raises the error of a request that ends the session.
        """
        try:
            while self._busy or not self.closing:
                await self._wake.wait()
                self._wake.clear()
                self._advance()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._stopped = True
            for task in (*self._answers.values(), *self._hearing.values()):
                task.cancel()
            for task in (*self._answers.values(), *self._hearing.values()):
                await _over(task)
            if self._cut_timer is not None:
                self._cut_timer.cancel()

    @property
    def _busy(self) -> bool:
        return bool(self.requests or self._answers or self._hearing)

    def _advance(self) -> None:
        """Begin with the next request, if nothing is being answered."""
        while self._failure is None and not self._answers:
            waiting = self.waiting
            if not waiting or waiting[0].state is RequestState.OPEN:
                return
            first = waiting[0]
            if first.state is RequestState.WAITING and first.started is not None:
                if self._may_begin(first):
                    self._begin(first)
                return
            if first.state is RequestState.CANCELLED:
                self._cut_off(first, at_once=True)
            else:
                self._over(first)

    def _over(self, request: Request) -> None:
        """End a request whose answer has ended, or that gets no answer."""
        self.end(request, FinishReason.CANCELLED)
        if request.error is not None and ends_session(request.error):
            self._failure = request.error
        self._wake.set()

    def _may_begin(self, request: Request) -> bool:
        """Return whether the engine may begin with a request, as the history that the request sees is complete.

        Turns with which the request's own message begins (EarlierTurns) may still be being transcribed. A request that
        has only tool results waits while the user speaks: its answer would talk over the user.
        """
        if request.session.only_results and any(one.speaks for one in self.waiting):
            return False
        if not request.sees_history:
            return True
        pending = self._cut.pending_before(request)
        under = self._answer_under(request)
        if under is not None and not under.words_known:
            pending.append(under)
        return not any(earlier.leaves_answer for earlier in pending)

    def _begin(self, request: Request) -> None:
        """Have the engine begin with a request whose start policy has fired."""
        request.begin_answer(held_back=self._cut.before(request))
        self._answers[request] = self._start_task(request)
        self._progressed()

    def _start_task(self, request: Request) -> asyncio.Task[None]:
        # Before the task runs: the answer may be cut off first, and its words are announced nevertheless.
        request.to_announce()
        writing = self._write_answer(request)
        task = asyncio.create_task(writing, name=f"answer {request.request_id}")
        task.add_done_callback(partial(self._task_over, request))
        return task

    def _task_over(self, request: Request, task: asyncio.Task[None]) -> None:
        self._answers.pop(request, None)
        if self._stopped:
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._wake.set()
            return
        if request in self._hearing:
            self._words_over(request)
        self._over(request)

    def _announce(self, request: Request) -> None:
        if request.unannounced:
            self._outbox.put_nowait(started_frame(request))
            request.note_announced()

    async def _write_answer(self, request: Request) -> None:
        able = self._engine.capabilities
        writer = AnswerWriter(
            request,
            self._outbox,
            self._sequencer,
            self._observed,
            transcribes=able.transcripts,
            transcribes_first=able.transcribes_first,
        )
        if request.cut.made:  # nobody wants the answer any more
            await writer.answer(self._engine.generate, ())
            return
        if (remark := request.remark) is not None:
            finished = await writer.answer(partial(say_remark, self._engine, request, remark), ())
        else:
            if request.holds is None and request.onset is None and not request.held_back:
                self._announce(request)
            history, earlier = self._seen_by(request)
            generate = self._engine.generate
            if request.restored:
                generate = partial(go_on, self._engine, calls=request.entry.calls_by_index)
            finished = await writer.answer(generate, history, earlier=earlier)
        if request.answering and request.is_frozen and not request.input_ended.is_set():
            await self._rest_of_input(request)
        if request.holds is not None and request.error is not None and self._held is request.holds:
            self._give_up()
            await request.released()  # the answer that was held has its final first
        self.end(request, finished.reason, finished)

    def _seen_by(self, request: Request) -> tuple[tuple[Message, ...], EarlierTurns | None]:
        """Return the history that a request sees, and the unanswered turns with which its own message begins."""
        if request.context is not None or not request.config.history:
            return request.context or (), None
        if not request.sees_history:  # it is a session by itself
            return self._ledger.messages(now=request.timeline.now()), None
        pending = self._cut.pending_before(request)
        beside = None
        if (under := self._answer_under(request)) is not None:
            if under.leaves_answer:
                beside = under.entry
            else:
                pending = [*pending, under]
        # A telling that nobody heard is told later.
        pending = [one for one in pending if one.entry.input_kept and not one.tells]
        now = request.timeline.now()
        messages = request.see(self._ledger.messages(request.entry.results, now=now, held=beside))
        last = messages[-1] if messages and messages[-1].role == "user" else None
        if (last is None and not pending) or request.config.task is Task.TRANSCRIBE:
            return messages, None  # what was said before is not said again
        return messages if last is None else messages[:-1], EarlierTurns(last, pending)

    async def _rest_of_input(self, request: Request) -> None:
        """Wait until the input has ended, although the engine does not use the rest: the final has the input's size."""
        request.await_rest_of_input()
        self._progressed()
        await request.input_ended.wait()


def waits_to_tell(request: Request) -> bool:
    """Return whether a request has only tool results, and its answer has not begun."""
    return request.session.only_results and request.state in (RequestState.OPEN, RequestState.WAITING)


async def _over(answer: asyncio.Task[None]) -> None:
    """Wait for the end of an answer's task. If this call is cancelled, cancel the task, and still wait for its end."""
    try:
        await asyncio.wait([answer])
    finally:
        if not answer.done():
            if not answer.cancelling():  # a second time would interrupt its engine as it winds up
                answer.cancel()
            await asyncio.wait([answer])


# What the server says unasked: an answer without a question, such as the greeting with which a session begins.


def remark_input() -> RequestInput:
    """Return the input of a remark, which never gets any chunk."""
    return RequestInput(InputSettings(start_policy=ON_END_ONLY, mode=InputMode.SNAPSHOT))


async def text_input(text: str) -> AsyncIterator[InputChunk]:
    """Yield ``text`` as an input of one chunk."""
    yield InputChunk(Modality.TEXT, text.encode(), end_of_input=True)


async def say_remark(
    engine: Engine, request: Request, remark: Remark, generation: GenerationRequest, out: OutputWriter
) -> None:
    """Write a remark: its text, if text is wanted, then its speech, if audio is wanted and ``engine`` reads aloud.

    Sampling settings, such as a limit on tokens, are not passed on: they are for text that a model generates.
    """
    text, language, begun = remark.text, remark.language, generation.begun
    writes = OutputModality.TEXT in generation.modalities
    if writes and (rest := text.removeprefix(begun)):
        out.write(TextOutput(rest))
    if OutputModality.AUDIO not in generation.modalities or Task.SPEECH not in engine.capabilities.tasks:
        out.write(Finished(FinishReason.STOP, Usage(output_tokens=count_words(text))))
        return
    wanted = dataclasses.replace(
        generation,
        input=text_input(text),
        modalities=frozenset({OutputModality.AUDIO}),
        sampling={},
        speech_language=language if language in engine.capabilities.speech_languages else None,
        begun="",
    )
    await engine.generate(wanted, _SpokenRemark(out, request.entry, None if writes or begun else text))


class _SpokenRemark(OutputFilter):
    """An OutputFilter that passes the speech of a remark. With the first audio, ``text`` enters the history.

    ``text`` is None if it is in the history already.
    """

    def __init__(self, out: OutputWriter, entry: LedgerEntry, text: str | None) -> None:
        super().__init__(out)
        self._entry = entry
        self._text = text

    def write(self, output: EngineOutput) -> None:
        if isinstance(output, AudioOutput):
            if self._text is not None:
                self._entry.say(self._text)  # for the history; what was heard is known later
                self._text = None
            self._out.write(output)
        elif isinstance(output, Finished):
            self._out.write(output)


class WakeUp:
    """An event like asyncio.Event, for a single waiter.

    It lacks the deque that would take 760 bytes in each session.
    """

    __slots__ = ("_set", "_waiter")

    def __init__(self, *, is_set: bool = False) -> None:
        self._set = is_set
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self) -> None:
        """Return once the event is set, even if it is cleared before this task runs."""
        if self._set:
            return
        assert self._waiter is None
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
