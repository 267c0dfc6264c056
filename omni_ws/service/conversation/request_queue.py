"""RequestQueue: answers the requests of a conversation one after the other, in the order of their opening."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from omni_ws.core.chunks import FinishReason
from omni_ws.core.output import OutputSequencer
from omni_ws.core.request_input import GenerationStarted
from omni_ws.engine.base import Engine, Finished
from omni_ws.errors import EngineFailed, websocket_close_code
from omni_ws.service.conversation.answer_writer import AnswerWriter, final_chunk, over, started_frame, transcript_chunk
from omni_ws.service.conversation.greeting import begin_greeting, say_greeting
from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.loudspeaker import Loudspeaker
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.conversation.request import Request, RequestState
from omni_ws.service.failure import of_request
from omni_ws.service.observing.observer import ObservedSession, OutputMade
from omni_ws.service.wake_up import WakeUp


class QueueOwner(Protocol):
    """The conversation that a queue belongs to. No method may raise."""

    def request_progressed(self) -> None:
        """The engine has begun with the first request, or is done with it before its input has ended."""

    def request_ended(self, request: Request) -> None:
        """The final of this request is in the outbox, and the request has left the queue."""


class RequestQueue:
    """Gives the first request to the engine, and every request exactly one final.

    Finals are written in the order of the queue, with two exceptions. A request that is refused as it opens has its
    final at once. So has one that is cancelled while it is answered; the next answer waits until the engine has
    released it.

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
        #: The task that answers the first request, or wound up the one before it.
        self._answer: asyncio.Task[None] | None = None
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

    def find(self, request_id: str | None) -> Request | None:
        """The request of this id, or with None the one that is being answered, else the newest; None without any."""
        if request_id is not None:
            return next((request for request in self.requests if request.request_id == request_id), None)
        return self.current or (self.requests[-1] if self.requests else None)

    # requests

    def open(self, request: Request) -> None:
        """Let the request have outputs, a final and a place in the history, even if it is never appended."""
        self.opened = True
        self._history.open(request.request_id)
        self._sequencer.open(request.request_id)

    def append(self, request: Request) -> None:
        """Queue a request. Call ``wake`` when it has started or failed."""
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
        """Cancel all requests and the playback for a new request, which is appended afterwards."""
        self._loudspeaker.silence()
        for earlier in tuple(self.requests):
            self.cancel(earlier, by=by)

    def wake(self) -> None:
        """Look at the first request again: its state has changed."""
        self._wake.set()

    def cancel(self, request: Request, *, by: Request | None = None) -> None:
        """Cancel a queued request; ``by`` is the request that interrupts it, if one does.

        One that is being answered has its final at once, without the outputs that were not sent; one that waits has it
        in its order.
        """
        answering = request.answering
        request.cancel(by=by)
        if answering and self._answer is not None:
            self._answer.cancel()
            withdrawn = self._outbox.withdraw(request.request_id)
            self._sequencer.take_back(len(withdrawn))
            request.withdrawn(withdrawn)
            request.playback.stop()
            # The client does not wait until the engine has wound up; the next answer does.
            self.end(request, FinishReason.CANCELLED)
        self._wake.set()

    def end(self, request: Request, reason: FinishReason, finished: Finished | None = None) -> None:
        """Write the final of a request, preceded by its error, and release it. Idempotent.

        ``reason`` is overridden by the cancellation or the error of the request. ``finished`` is the engine's own end.
        """
        if request.state is RequestState.FINISHED:
            return
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
        self._wake.set()

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
        while self.requests or not self.closing:
            await self._wake.wait()
            self._wake.clear()
            while self.requests and self.requests[0].state is not RequestState.OPEN:
                await self._serve(self.requests[0])

    async def _serve(self, request: Request) -> None:
        if request.state is RequestState.WAITING and request.started is not None:
            request.begin_answer()
            answer = self._answer = asyncio.create_task(
                self._write_answer(request, request.started), name=f"answer {request.request_id}"
            )
            self._owner.request_progressed()
            await over(answer)
            if not answer.cancelled():
                answer.result()
        self.end(request, FinishReason.CANCELLED)
        if request.error is not None and websocket_close_code(request.error) is not None:
            raise request.error

    async def _write_answer(self, request: Request, started: GenerationStarted) -> None:
        writer = AnswerWriter(request, self._outbox, self._sequencer, self._observed)
        self._loudspeaker.answering(request)
        if request.greeting:  # announced as it opened
            finished = await writer.answer(partial(say_greeting, self._engine, request), ())
        else:
            writer.start(started)
            history = self._history.messages if request.config.history else ()
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
