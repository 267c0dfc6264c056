"""Conversation: the requests of one session, taken in order and answered one after the other."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_ws.core.chunks import FinishReason, InputChunk
from omni_ws.core.input_stream import InputStream
from omni_ws.core.output import OutputSequencer
from omni_ws.core.quota import ByteBudget
from omni_ws.core.session import GenerationStarted, InputAppended, InputEnded, InputSettings, StreamingInputSession
from omni_ws.core.stream_events import Diverted, RequestOpened, StreamEvent
from omni_ws.engine.base import AnswerOptions, Engine, Finished
from omni_ws.errors import (
    EmptyInput,
    EngineOverloaded,
    OmniError,
    PayloadTooLarge,
    ShuttingDown,
    websocket_close_code,
)
from omni_ws.service import observer
from omni_ws.service.answer import AnswerWriter, final_chunk, over
from omni_ws.service.configuration import Configuration
from omni_ws.service.conversation_limits import MAX_WAITING_CHUNKS, ConversationLimits
from omni_ws.service.failure import of_request, unexpected
from omni_ws.service.history import History
from omni_ws.service.identifiers import new_id
from omni_ws.service.input_room import InputRoom
from omni_ws.service.loudspeaker import Loudspeaker
from omni_ws.service.outbox import Outbox
from omni_ws.service.playback import Playback
from omni_ws.service.speech_workers import SpeechWorkers
from omni_ws.service.turn import Turn
from omni_ws.service.turn_listener import TurnListener
from omni_ws.wire.server_frames import InputAckFrame, SpeechStarted, SpeechStopped
from omni_ws.wire.session_config import SessionConfig


class Conversation:
    """Input comes in by synchronous calls, straight from the socket; ``run`` gives the answers into the outbox.

    The methods that take input raise the fatal errors of InputStream, upon which the caller closes the session. An
    error of a request goes into the outbox, followed by that request's final; if it is one that ends the session,
    ``run`` raises it then. Whatever ``run`` raises has been told.
    """

    def __init__(
        self,
        engine: Engine,
        configuration: Configuration,
        outbox: Outbox,
        *,
        limits: ConversationLimits,
        budget: ByteBudget,
        now: Callable[[], float],
        single_request: bool = False,
        owner: str | None = None,
        admit: Callable[[], None] | None = None,
        speech_workers: SpeechWorkers | None = None,
        observed: observer.ObservedSession | None = None,
    ) -> None:
        """``admit`` is asked for each request as it opens, and raises what the request is refused with."""
        self.observed = observed or observer.ObservedSession.unobserved()
        self.engine = engine
        self.configuration = configuration
        self.outbox = outbox
        self.limits = limits
        self.stream = InputStream(
            limits.stream, self._input_settings, budget=budget, now=now(), single_request=single_request
        )
        self.history = History(limits.max_history_tokens)
        self.loudspeaker = Loudspeaker(self.history)
        #: Where turns can be detected: finds out which request the audio belongs to.
        self._listener: TurnListener | None = None
        if speech_workers is not None:
            self._listener = TurnListener(
                self.stream,
                speech_workers,
                take_events=self._handle,
                tell=self._tell_heard,
                listened=lambda: self._room.offer(),
                server_speaks=lambda: self.loudspeaker.playing,
            )
        self._room = InputRoom(self.stream, self.observed, listener=self._listener, offer=lambda: self.on_input_room())
        #: For the requests that open from now on; what may be asked is checked by ``configuration.check_options``.
        self.options = AnswerOptions()
        self._owner = owner
        #: Called when input that had to wait may come again (see ``input_full``).
        self.on_input_room: Callable[[], None] = lambda: None
        #: Called when ``get_timer`` has become sooner, except from within a method that takes input.
        self.on_timer: Callable[[], None] = lambda: None
        #: What requests finish with that end because the session does.
        self.finish_reason_at_end = FinishReason.CANCELLED
        self._now = now
        self._admit = admit or (lambda: None)
        outbox.on_full = lambda: self.on_timer()
        outbox.on_stalled = lambda seconds: self.observed.tell(observer.OutputStalled(self._answered, seconds))
        self._sequencer = OutputSequencer()
        self._wake = asyncio.Event()
        #: Requests in the order of their opening; the first is the one that runs.
        self._turns: deque[Turn] = deque()
        #: The request whose input is open.
        self._receiving: Turn | None = None
        self._draining = False
        #: Whether no further input comes; see ``close``.
        self.closing = False

    # input

    def configure(self, patch: Mapping[str, Any]) -> SessionConfig:
        """Takes effect with the next request. Raises an InvalidRequest and changes nothing then."""
        config = self.configuration.apply(patch)
        if self.stream.current is None:
            self._take_order()
        if self._listener is not None:
            self._listener.configure(self.configuration.listening)
        return config

    def receive_chunk(self, chunk: InputChunk, *, now: float) -> None:
        """The chunk must have passed ``configuration.check_chunk``; ``now`` is the time at which it came."""
        if self.observed.observers.listening_to_chunks:
            self.observed.tell(observer.InputReceived(chunk))
        events = self.stream.receive_chunk(chunk, now=now)
        if events:
            self._handle(events)
        turn = self._receiving
        most = MAX_WAITING_CHUNKS
        if turn is not None and turn.session.received.chunks > most and turn.waiting_chunks > most:
            raise PayloadTooLarge(f"more than {most} chunks are waiting that the engine has not taken over")

    def refuse_chunk(self, sequence_id: int) -> None:
        self._handle(self.stream.refuse(sequence_id, now=self._now()))

    def finish(self) -> None:
        self._handle(self.stream.finish(now=self._now()))

    def cancel(self, request_id: str | None = None) -> None:
        """Stop a request, if there is any: the named one, else the one that is answered, else the newest."""
        if (turn := self._turn_to_cancel(request_id)) is None and request_id is not None:
            return  # it has ended already, and what waits behind a gap belongs to others
        if turn is self._receiving:
            self.stream.cancel(now=self._now())
            self._stop_receiving()
        else:
            self.stream.drop_waiting(now=self._now())
        if turn is None or turn.answer is not None:
            self.loudspeaker.silence()
        if turn is not None:
            self._cancel(turn)
        if self._listener is not None and self._receiving is None:
            self._listener.cancel()

    def drain(self) -> None:
        """Requests that are open get their answers; new ones are refused."""
        self._draining = True

    # what a transport looks at

    @property
    def busy(self) -> bool:
        """Whether any request is open, waiting or being answered."""
        return bool(self._turns)

    @property
    def refused(self) -> bool:
        """Whether a request has failed before any work on it began, and its end is about to be told."""
        return any(turn.error is not None and turn.answer is None for turn in self._turns)

    def input_full(self) -> bool:
        """Whether the socket should rest until ``on_input_room``: there is more than is worked on."""
        turn = self._receiving
        can_be = self.stream.diverting or (turn is not None and turn.answer is not None)  # asked for each chunk
        return can_be and self._room.is_full(turn)

    def take_ack(self) -> InputAckFrame:
        return self._room.take_ack(self._receiving)

    def get_timer(self) -> float | None:
        times = (self.stream.get_timer(), self.outbox.get_timer())
        return min((when for when in times if when is not None), default=None)

    def handle_timer(self, now: float | None = None) -> None:
        """Raises SequenceGap, SessionTimeout or SlowConsumer when their time has come."""
        now = self._now() if now is None else now
        self.outbox.handle_timer(now)
        self.stream.handle_timer(now=now)

    # answers

    async def run(self) -> None:
        """Answers requests until it is cancelled or, after ``close``, until none is left.

        Raises the error of a request that ends the session, after that request's final.
        """
        try:
            while self._turns or not self.closing:
                await self._wake.wait()
                self._wake.clear()
                while self._turns and self._turns[0].ready:
                    await self._serve(self._turns[0])
        except OmniError:
            raise
        except Exception as error:
            failure = unexpected(error, where="a conversation")
            self.finish_reason_at_end = FinishReason.ERROR
            self.outbox.put_nowait(failure)
            raise failure from None
        finally:
            self.end()

    def end(self) -> None:
        """What is open is finished, and nothing is held any more. ``run`` does so too, if it ever ran. Idempotent."""
        self._room.tell_observers(self._receiving)
        for turn in tuple(self._turns):
            self._end(turn, self.finish_reason_at_end)
        if self._listener is not None:
            self._listener.close()
        self.stream.close()

    def close(self) -> None:
        """No further input comes: ``run`` returns when the last answer is given."""
        self.closing = True
        self._wake.set()

    async def _serve(self, turn: Turn) -> None:
        if turn.started is not None and turn.error is None and not turn.cancelled:
            turn.answer = asyncio.create_task(self._answer(turn, turn.started), name=f"answer {turn.request_id}")
            self._update_answering()
            await over(turn.answer)
            if not turn.answer.cancelled():
                turn.answer.result()
        self._end(turn, FinishReason.CANCELLED)
        # What goes wrong while a cancelled answer winds up is nobody's business any more.
        if turn.error is not None and not turn.cancelled and websocket_close_code(turn.error) is not None:
            raise turn.error

    async def _answer(self, turn: Turn, started: GenerationStarted) -> None:
        writer = AnswerWriter(turn, self.outbox, self._sequencer, self.observed)
        self.loudspeaker.answering(turn)
        writer.start(started)
        finished = await writer.answer(self.engine, self.history.messages if turn.config.history else ())
        if turn.error is None and turn.is_frozen and not turn.input_ended.is_set():
            await self._rest_of_input(turn)
        self._end(turn, finished.reason, finished)

    async def _rest_of_input(self, turn: Turn) -> None:
        """What comes after the freezing is not used, but the usage in the final says how much it was."""
        turn.answered = True
        self._update_answering()
        await turn.input_ended.wait()

    def _end(self, turn: Turn, reason: FinishReason, finished: Finished | None = None) -> None:
        """The one final of a request, and the end of everything that it held."""
        if turn.finished:
            return
        if turn.cancelled:
            turn.error, reason = None, FinishReason.CANCELLED
        if turn.error is not None:
            self.outbox.put_nowait(of_request(turn.error, turn.request_id, engine=self.engine))
            reason = FinishReason.ERROR
        if reason is not FinishReason.ERROR:
            self.history.add(turn.messages)
        final = final_chunk(turn, reason, finished, sequencer=self._sequencer)
        self.observed.tell(observer.RequestEnded(turn, final, turn.error))
        self.outbox.put_nowait(final)
        turn.finished = True
        turn.input.discard()
        self.stream.forget(turn.session)
        if turn is self._receiving:
            # What still comes of it is swallowed up to its end.
            self.stream.abandon(turn.session)
            self._stop_receiving()
        if turn in self._turns:
            self._turns.remove(turn)
        self._update_answering()
        self._room.offer()
        self._wake.set()

    # input events

    def _handle(self, events: Sequence[StreamEvent]) -> None:
        for event in events:
            turn = self._receiving
            match event:
                case InputAppended(chunk=chunk) if turn is not None:
                    turn.append(chunk)
                case Diverted(chunk=chunk) if self._listener is not None:
                    self._listener.put(chunk)
                case RequestOpened(session=session):
                    self._open(session, by_speech=event.by_speech)
                case GenerationStarted() if turn is not None:
                    self.observed.tell(observer.PolicyFired(turn, event))
                    turn.start(event)
                    self._wake.set()
                case InputEnded(error=error) if turn is not None:
                    self._input_ended(turn, error)
                case _:
                    pass  # of a request that was refused as it opened

    def _open(self, session: StreamingInputSession, *, by_speech: bool) -> None:
        config = self.configuration.effective
        playback = Playback(self._now)
        turn = Turn(
            new_id("req_"), session, config, self._room.taken, playback, options=self.options, owner=self._owner
        )
        self._sequencer.open(turn.request_id)
        self._receiving = turn
        self.observed.tell(observer.RequestOpened(turn, by_speech))
        interrupts = turn.interrupts(by_speech=by_speech)
        try:
            self._check_room(waits=not interrupts)
        except OmniError as error:
            turn.error = error
            self._end(turn, FinishReason.ERROR)
            return
        if interrupts:
            self.loudspeaker.silence()
            for earlier in tuple(self._turns):
                self._cancel(earlier, by=turn)
        self._turns.append(turn)
        self._update_answering()

    def _check_room(self, *, waits: bool) -> None:
        """Raises what a request is refused with that opens now: it changes nothing for the others."""
        if self._draining:
            raise ShuttingDown("the server is shutting down", retry_after_ms=1000)
        may_wait = self.limits.max_pending_requests
        if waits and len(self._turns) > may_wait:
            raise EngineOverloaded(f"{may_wait} requests are waiting already", retry_after_ms=1000)
        self._admit()

    def _input_ended(self, turn: Turn, error: EmptyInput | None) -> None:
        self._room.tell_observers(turn)
        self.observed.tell(observer.InputEnded(turn))
        self._stop_receiving()
        turn.error = turn.error or error
        turn.input.close()
        turn.input_ended.set()
        self._update_answering()
        self._wake.set()

    def _input_settings(self) -> InputSettings:
        self._take_order()
        settings = self.configuration.input_settings()
        audio = None if self._listener is None else self._listener.audio
        return settings if audio is None else dataclasses.replace(settings, audio=audio)

    def _tell_heard(self, message: SpeechStarted | SpeechStopped | OmniError) -> None:
        if not isinstance(message, OmniError):
            self.observed.tell(observer.SpeechHeard(self._receiving, message))
        self.outbox.put_nowait(message)

    @property
    def _answered(self) -> Turn | None:
        """The request whose answer is under way."""
        return self._turns[0] if self._turns and self._turns[0].answer is not None else None

    def _stop_receiving(self) -> None:
        self._receiving = None
        self._take_order()

    def _take_order(self) -> None:
        """What comes ahead of a gap while no input is open is the next request's already."""
        self.stream.reject_out_of_order = self.configuration.effective.out_of_order == "reject"

    def _turn_to_cancel(self, request_id: str | None) -> Turn | None:
        if request_id is not None:
            return next((turn for turn in self._turns if turn.request_id == request_id), None)
        return self._answered or (self._turns[-1] if self._turns else None)

    def _cancel(self, turn: Turn, *, by: Turn | None = None) -> None:
        self.observed.tell(observer.RequestCancelled(turn, by))
        turn.cancelled = True
        turn.session.cancel()
        if turn.answer is not None:
            turn.answer.cancel()
            withdrawn = self.outbox.withdraw(turn.request_id)
            self._sequencer.take_back(len(withdrawn))
            turn.withdrawn(withdrawn)
            turn.playback.stop()
            # The client need not wait until the engine has wound up; the next answer does.
            self._end(turn, FinishReason.CANCELLED)
        self._wake.set()

    def _update_answering(self) -> None:
        """Nothing is idle while an answer is owed for input that is complete, or frozen."""
        answering = any(turn is not self._receiving or (turn.is_frozen and not turn.answered) for turn in self._turns)
        silence_begins = self.stream.answering and not answering
        self.stream.answering = answering
        if silence_begins:
            self.stream.touch(now=self._now())
            self.on_timer()
