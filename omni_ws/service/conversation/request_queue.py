"""RequestQueue: answers the requests of a conversation one after the other, in the order of their opening."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from omni_ws.core.chunks import FinishReason, InputMode
from omni_ws.core.output import OutputChunk, OutputSequencer
from omni_ws.core.request_input import GenerationStarted
from omni_ws.engine.base import Engine, Finished
from omni_ws.errors import EngineFailed, websocket_close_code
from omni_ws.service.conversation.answer_writer import AnswerWriter, final_chunk, over, started_frame, transcript_chunk
from omni_ws.service.conversation.greeting import begin_greeting, say_greeting
from omni_ws.service.conversation.held_answer import HeldAnswer
from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.loudspeaker import Loudspeaker
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.request_state import RequestState
from omni_ws.service.conversation.unheard_output import UnheardOutput
from omni_ws.service.failure import of_request
from omni_ws.service.observing.observer import ObservedSession, OutputMade
from omni_ws.service.wake_up import WakeUp
from omni_ws.wire.server_frames import ResponseStartedFrame


class QueueOwner(Protocol):
    """The conversation that a queue belongs to. No method may raise."""

    def request_progressed(self) -> None:
        """The engine has begun with the first request, or is done with it before its input has ended."""

    def request_ended(self, request: Request) -> None:
        """The final of this request is in the outbox, and the request has left the queue."""


class RequestQueue:
    """Gives the first request to the engine, and every request exactly one final.

    Finals are written in the order of the queue, except that of a request that is refused as it opens: it is written at
    once. So are, in their order, that of a request that is cancelled while it is answered, and those of all requests
    that another interrupts; the next answer waits until the engine has released the one before.

    With ``interrupt_resume`` speech holds the answer that it interrupts, and the engine works on its request meanwhile.
    Where that has words, or anything else happens, the held answer is cancelled before anything of the new one is
    written. Where it has none, it has its final, and the held answer goes on.

    An error precedes the final of its request. If it ends the session, ``run`` raises it after that final.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        owner: QueueOwner,
        *,
        history: History,
        loudspeaker: Loudspeaker,
        observed: ObservedSession,
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._history = history
        self._loudspeaker = loudspeaker
        self._observed = observed
        self._owner = owner
        self._sequencer = OutputSequencer()
        self._wake = WakeUp()
        #: The tasks that answer requests: the first, or the one behind an answer that is held or winds up.
        self._answers: dict[Request, asyncio.Task[None]] = {}
        #: The answer to the first request, while it is held.
        self._held: HeldAnswer | None = None
        #: The first is being answered, or will be next.
        self.requests: list[Request] = []
        #: Whether any request has opened, or the greeting.
        self.opened = False
        #: Set by ``close``.
        self.closing = False

    @property
    def current(self) -> Request | None:
        """The request that is being answered."""
        return self.requests[0] if self.requests and self.requests[0].answering else None

    @property
    def running(self) -> Request | None:
        """The request whose answer runs, or begins as soon as the loop gets to it: it waits for no other."""
        first = self.requests[0] if self.requests else None
        if first is None or first in self._answers:
            return first
        return first if first.state is RequestState.WAITING and not self._answers else None

    def find(self, request_id: str) -> Request | None:
        """The request of this id; None where it has ended."""
        return next((request for request in self.requests if request.request_id == request_id), None)

    # requests

    def open(self, request: Request) -> None:
        """Let the request have outputs, a final and a place in the history, even if it is never appended."""
        self.opened = True
        detection, budget = request.config.turn_detection, self._outbox.budget
        if detection is not None and detection.interrupt_resume and budget is not None:
            request.unheard_output = UnheardOutput(budget)
        self._history.open(request.request_id)
        self._sequencer.open(request.request_id)

    def append(self, request: Request) -> None:
        """Queue a request. Call ``wake`` when it has started or failed."""
        if self._held is not None and self._held.by is not request:
            self._give_up()
        self.requests.append(request)

    def announce_greeting(self, request: Request) -> None:
        """Start the greeting that has just opened, and announce it, even if it is refused afterwards.

        By its ``response_started`` a client knows that the answer belongs to none of its requests.
        """
        started = begin_greeting(request)
        self._outbox.put_nowait(started_frame(request, started))
        request.timeline.mark_policy_fired(started)
        request.timeline.mark_input_ended()
        self._wake.set()

    def interrupt(self, *, by: Request) -> None:
        """Cancel all requests and the playback, or hold the answer, for a new request, which is appended afterwards."""
        if self._may_hold(by):
            self._hold(self.requests[0], by)
            return
        self._loudspeaker.silence()
        for earlier in tuple(self.requests):
            self.cancel(earlier, by=by)
            # In its order: those before it have their finals. It would wait for the engine to wind up.
            self.end(earlier, FinishReason.CANCELLED)

    def wake(self) -> None:
        """Look at the requests again: the state of one has changed."""
        self._begin_beside()
        self._wake.set()

    def cancel(self, request: Request, *, by: Request | None = None) -> None:
        """Cancel a queued request; ``by`` is the request that interrupts it, if one does.

        One that is being answered has its final at once, without the outputs that were not sent; one that waits has it
        in its order.
        """
        if self._held is not None and self._held.by is request:
            self._give_up()
        held = self._let_go(request)
        answering = request.answering or held is not None
        request.cancel(by=by)
        if answering and (answer := self._answers.get(request)) is not None:
            answer.cancel()
            if held is None:
                request.withdrawn(self._withdraw(request))
            request.playback.stop()
            # The client does not wait until the engine has wound up; the next answer does.
            self.end(request, FinishReason.CANCELLED)
        if held is not None and held.announcement is not None:
            self._announce(held.by, held.announcement)
        self._wake.set()

    def _withdraw(self, request: Request) -> list[OutputChunk]:
        withdrawn = self._outbox.withdraw(request.request_id)
        self._sequencer.take_back(len(withdrawn))
        return withdrawn

    def end(self, request: Request, reason: FinishReason, finished: Finished | None = None) -> None:
        """Write the final of a request, preceded by its error, and release it. Idempotent.

        ``reason`` is overridden by the cancellation or the error of the request. ``finished`` is the engine's own end.
        """
        if request.state is RequestState.FINISHED:
            return
        self._let_go(request)  # where the session ends
        held = self._held
        if held is not None and held.by is request and not (request.answering and request.only_speech):
            self._give_up()
        if request.state is RequestState.CANCELLED:
            reason = FinishReason.CANCELLED
        if request.error is not None:
            if not isinstance(request.error, EngineFailed):  # whose param is no field, but a part of the engine
                request.error.param = request.field_names(request.error.param)
            self._outbox.put_nowait(of_request(request.error, request.request_id, engine=self._engine))
            reason = FinishReason.ERROR
        if reason is FinishReason.CANCELLED:
            self._settle(request)
        if reason is not FinishReason.ERROR:
            self._remember(request, finished if reason is not FinishReason.CANCELLED else None)
        final = final_chunk(request, reason, finished, sequencer=self._sequencer)
        request.timeline.mark_ended(
            final,
            request.error,
            received_chunks=request.session.received.chunks,
            received_bytes=request.session.received.bytes,
            player=request.playback.statistics,
            content=request,
        )
        self._outbox.put_nowait(final)
        request.finish()
        if request in self.requests:
            self.requests.remove(request)
        self._owner.request_ended(request)
        if self._held is not None and self._held.by is request:
            self._go_on(self._held)
        self._wake.set()

    # an answer that is held

    def _may_hold(self, by: Request) -> bool:
        """Whether the answer in progress may go on if it turns out that ``by``, which interrupts it, has no words."""
        detection = by.config.turn_detection
        if detection is None or not detection.interrupt_resume or not by.timeline.by_speech:
            return False
        if not self._engine.capabilities.transcripts or by.session.settings.mode is InputMode.SNAPSHOT:
            return False
        if len(self.requests) != 1 or self.requests[0].state is not RequestState.ANSWERING:
            return False
        first = self.requests[0]
        return first.unheard_output is not None and first.unheard_output.reaches(first.playback.resume_ms)

    def _hold(self, request: Request, by: Request) -> None:
        self._loudspeaker.silence(spared=request)
        request.hold(self._withdraw(request))
        self._held = HeldAnswer(request, by, give_up=self._give_up)

    def _let_go(self, request: Request) -> HeldAnswer | None:
        """Hold the answer to this request no more. Returns what was held, None where it was not."""
        held = self._held
        if held is None or held.request is not request:
            return None
        self._held = None
        held.decide()
        return held

    def _give_up(self) -> None:
        """Cancel the answer that is held: the turn that interrupted it has words, or it has been held for too long."""
        if self._held is not None:
            self.cancel(self._held.request, by=self._held.by)

    def _go_on(self, held: HeldAnswer) -> None:
        """The turn had no words: send what was not heard again, and let the answer go on."""
        request = held.request
        self._let_go(request)
        for chunk in request.go_on():
            number = self._sequencer.take_number(request.request_id)
            self._outbox.put_nowait(replace(chunk, sequence_id=number))

    def _begin_beside(self) -> None:
        """Let the engine begin with the turn that interrupted an answer, to learn whether it has words."""
        if self._held is not None and self._held.by.state is RequestState.WAITING:
            self._begin(self._held.by).add_done_callback(partial(self._ended_beside, self._held.by))

    def _ended_beside(self, request: Request, _: asyncio.Task[None]) -> None:
        if request.state is RequestState.FINISHED and request.error is None:
            self._answers.pop(request, None)  # else ``run`` raises what it has to

    def _settle(self, request: Request) -> None:
        """Settle the interim transcript of a request that is cut short as it is: no recognition follows it."""
        if request.interim is None:
            return
        settled = replace(request.interim, interim=False)
        request.interim = None
        request.heard.append(settled.text)
        chunk = transcript_chunk(request, settled, sequencer=self._sequencer)
        if self._observed.listening_to_outputs:
            self._observed.notify(OutputMade(chunk))
        self._outbox.put_nowait(chunk)

    def _remember(self, request: Request, finished: Finished | None) -> None:
        """Add the request to the history. Only an engine that came to its own end has reported every transcript."""
        unheard = any(warning.param == "asr" for warning in request.warnings)
        all_heard = finished is not None and self._engine.capabilities.transcripts and not unheard
        audio_ms = 0 if finished is None else finished.usage.input_audio_ms
        *asked, answer = request.take_messages(all_heard=all_heard, audio_ms=audio_ms)
        kept = [*(asked if request.input_kept else ()), *([answer] if request.answer_kept else ())]
        self._history.add(kept, request_id=request.request_id)

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
            while self.requests or not self.closing:
                await self._wake.wait()
                self._wake.clear()
                while (request := self._next) is not None:
                    await self._serve(request)
        finally:
            for answer in tuple(self._answers.values()):  # of a turn that interrupted
                answer.cancel()
                await over(answer)

    @property
    def _next(self) -> Request | None:
        """The request to serve next: one whose answer began while another was held, else the first."""
        if self._answers:
            return next(iter(self._answers))
        return self.requests[0] if self.requests and self.requests[0].state is not RequestState.OPEN else None

    async def _serve(self, request: Request) -> None:
        if request.state is RequestState.WAITING and request.started is not None:
            self._begin(request)
        if (answer := self._answers.get(request)) is not None:
            try:
                await over(answer)
            finally:
                self._answers.pop(request, None)
            if not answer.cancelled():
                answer.result()
        self.end(request, FinishReason.CANCELLED)
        if request.error is not None and websocket_close_code(request.error) is not None:
            raise request.error

    def _begin(self, request: Request) -> asyncio.Task[None]:
        """Give a request that has started to the engine."""
        assert request.started is not None
        request.begin_answer()
        answer = self._answers[request] = asyncio.create_task(
            self._write_answer(request, request.started), name=f"answer {request.request_id}"
        )
        self._owner.request_progressed()
        return answer

    def _announce(self, request: Request, frame: ResponseStartedFrame | None) -> None:
        """The audio of this answer is what plays next."""
        self._loudspeaker.answering(request)
        if frame is not None:
            self._outbox.put_nowait(frame)

    async def _write_answer(self, request: Request, started: GenerationStarted) -> None:
        held = self._held if self._held is not None and self._held.by is request else None
        transcribes_first = self._engine.capabilities.transcribes_first
        writer = AnswerWriter(
            request, self._outbox, self._sequencer, self._observed, held=held, transcribes_first=transcribes_first
        )
        if request.greeting:  # announced as it opened
            self._announce(request, None)
            finished = await writer.answer(partial(say_greeting, self._engine, request), ())
        else:
            frame = started_frame(request, started)
            history = self._history.messages if request.config.history else ()
            if held is None:
                self._announce(request, frame)
            else:
                held.announcement = frame
                history = (*history, *held.request.messages_if_cut()) if request.config.history else ()
            if request.context is not None:
                history = request.context
            finished = await writer.answer(self._engine.generate, history)
        if request.answering and request.is_frozen and not request.input_ended.is_set():
            await self._rest_of_input(request)
        self.end(request, finished.reason, finished)

    async def _rest_of_input(self, request: Request) -> None:
        """Wait for the end of input that the engine does not use: the usage in the final says how much it was."""
        request.await_rest_of_input()
        self._owner.request_progressed()
        await request.input_ended.wait()
