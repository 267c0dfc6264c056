"""RequestQueue: the requests of a conversation in the order of their opening, answered one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from omni_ws.core.chunks import FinishReason
from omni_ws.core.output import OutputSequencer
from omni_ws.core.session import GenerationStarted
from omni_ws.engine.base import Engine, Finished, UsageMeter
from omni_ws.errors import websocket_close_code
from omni_ws.service.conversation.answer_writer import AnswerWriter, final_chunk, over, transcript_chunk
from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.loudspeaker import Loudspeaker
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.conversation.request import Request
from omni_ws.service.failure import of_request
from omni_ws.service.observing import observer


class RequestQueue:
    """``ended`` hears of each request that has had its final; ``progressed`` of what else becomes of the first one.

    An error of a request goes into the outbox, followed by that request's final; if it is one that ends the session,
    ``run`` raises it then.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        *,
        history: History,
        loudspeaker: Loudspeaker,
        observed: observer.ObservedSession,
        progressed: Callable[[], None],
        ended: Callable[[Request], None],
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._history = history
        self._loudspeaker = loudspeaker
        self._observed = observed
        self._progressed = progressed
        self._ended = ended
        self._sequencer = OutputSequencer()
        self._wake = asyncio.Event()
        #: The first is the one that runs.
        self.turns: deque[Request] = deque()
        #: Whether no further requests come; see ``close``.
        self.closing = False

    @property
    def current(self) -> Request | None:
        """The request whose answer is under way."""
        return self.turns[0] if self.turns and self.turns[0].answer is not None else None

    def find(self, request_id: str | None) -> Request | None:
        """The request of this id; without one that which is answered, else the newest."""
        if request_id is not None:
            return next((turn for turn in self.turns if turn.request_id == request_id), None)
        return self.current or (self.turns[-1] if self.turns else None)

    # requests come and go

    def count_outputs(self, turn: Request) -> None:
        """From here on. A request has a final also where it does not come into the queue."""
        self._sequencer.open(turn.request_id)

    def append(self, turn: Request) -> None:
        self.turns.append(turn)

    def interrupt(self, *, by: Request) -> None:
        """What is here gives way to a request that comes."""
        self._loudspeaker.silence()
        for earlier in tuple(self.turns):
            self.cancel(earlier, by=by)

    def wake(self) -> None:
        """A request has become ready."""
        self._wake.set()

    def cancel(self, turn: Request, *, by: Request | None = None) -> None:
        """``by`` is the request that interrupts it, if one does."""
        self._observed.tell(observer.RequestCancelled(turn, by))
        turn.cancelled = True
        turn.session.cancel()
        if turn.answer is not None:
            turn.answer.cancel()
            withdrawn = self._outbox.withdraw(turn.request_id)
            self._sequencer.take_back(len(withdrawn))
            turn.withdrawn(withdrawn)
            turn.playback.stop()
            # The client need not wait until the engine has wound up; the next answer does.
            self.end(turn, FinishReason.CANCELLED)
        self._wake.set()

    def end(self, turn: Request, reason: FinishReason, finished: Finished | None = None) -> None:
        """The one final of a request, and the end of everything that it held. Idempotent."""
        if turn.finished:
            return
        if turn.cancelled:
            turn.error, reason = None, FinishReason.CANCELLED
        if turn.error is not None:
            turn.error.param = turn.field_names(turn.error.param)
            self._outbox.put_nowait(of_request(turn.error, turn.request_id, engine=self._engine))
            reason = FinishReason.ERROR
        if reason is FinishReason.CANCELLED:
            self._settle(turn)
        if reason is not FinishReason.ERROR:
            self._remember(turn, finished if reason is not FinishReason.CANCELLED else None)
        final = final_chunk(turn, reason, finished, sequencer=self._sequencer)
        self._observed.tell(observer.RequestEnded(turn, final, turn.error))
        self._outbox.put_nowait(final)
        turn.finished = True
        turn.input.discard()
        turn.meter = UsageMeter()  # through which an engine might hold on to its work
        if turn.speech is not None:
            turn.speech.release()
        if turn in self.turns:
            self.turns.remove(turn)
        self._ended(turn)
        self._wake.set()

    def _settle(self, turn: Request) -> None:
        """The last interim of a request that is cut short is settled as it is: no recognition goes on."""
        if turn.interim is None:
            return
        settled = replace(turn.interim, interim=False)
        turn.interim = None
        turn.heard.append(settled.text)
        chunk = transcript_chunk(turn, settled, sequencer=self._sequencer)
        if self._observed.listening_to_outputs:
            self._observed.tell(observer.OutputMade(turn, chunk))
        self._outbox.put_nowait(chunk)

    def _remember(self, turn: Request, finished: Finished | None) -> None:
        """Only an engine that came to its end has told all that it heard."""
        all_heard = finished is not None and self._engine.capabilities.transcripts
        audio_ms = 0 if finished is None else finished.usage.input_audio_ms
        self._history.add(turn.take_messages(all_heard=all_heard, audio_ms=audio_ms))

    def close(self) -> None:
        """No further requests come: ``run`` returns when the last answer is given."""
        self.closing = True
        self._wake.set()

    # answers

    async def run(self) -> None:
        """Answers requests until it is cancelled or, after ``close``, until none is left."""
        while self.turns or not self.closing:
            await self._wake.wait()
            self._wake.clear()
            while self.turns and self.turns[0].ready:
                await self._serve(self.turns[0])

    async def _serve(self, turn: Request) -> None:
        if turn.started is not None and turn.error is None and not turn.cancelled:
            turn.answer = asyncio.create_task(self._answer(turn, turn.started), name=f"answer {turn.request_id}")
            self._progressed()
            await over(turn.answer)
            if not turn.answer.cancelled():
                turn.answer.result()
        self.end(turn, FinishReason.CANCELLED)
        # What goes wrong while a cancelled answer winds up is nobody's business any more.
        if turn.error is not None and not turn.cancelled and websocket_close_code(turn.error) is not None:
            raise turn.error

    async def _answer(self, turn: Request, started: GenerationStarted) -> None:
        writer = AnswerWriter(turn, self._outbox, self._sequencer, self._observed)
        self._loudspeaker.answering(turn)
        writer.start(started)
        finished = await writer.answer(self._engine, self._history.messages if turn.config.history else ())
        if turn.error is None and turn.is_frozen and not turn.input_ended.is_set():
            await self._rest_of_input(turn)
        self.end(turn, finished.reason, finished)

    async def _rest_of_input(self, turn: Request) -> None:
        """What comes after the freezing is not used, but the usage in the final says how much it was."""
        turn.answered = True
        self._progressed()
        await turn.input_ended.wait()
