"""Conversation: the input of one session, made into requests for an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omni_ws.core.chunks import FinishReason, InputChunk
from omni_ws.core.input_stream import InputStream
from omni_ws.core.quota import ByteBudget
from omni_ws.core.session import GenerationStarted, InputAppended, InputEnded, InputSettings, StreamingInputSession
from omni_ws.core.stream_events import Diverted, RequestOpened, StreamEvent, TextRefused
from omni_ws.engine.base import AnswerOptions, Engine
from omni_ws.engine.media_room import MediaRoom
from omni_ws.errors import (
    EmptyInput,
    EngineOverloaded,
    InvalidValue,
    OmniError,
    PayloadTooLarge,
    SessionConflict,
    ShuttingDown,
)
from omni_ws.service.conversation.configuration import Configuration
from omni_ws.service.conversation.greeting import greeting_configuration, greeting_input
from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.input_flow import InputFlow
from omni_ws.service.conversation.kept_speech import KeptSpeech
from omni_ws.service.conversation.limits import MAX_WAITING_CHUNKS, ConversationLimits
from omni_ws.service.conversation.loudspeaker import Loudspeaker
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.conversation.owner import NOBODY, ConversationOwner
from omni_ws.service.conversation.playback import Playback
from omni_ws.service.conversation.request import FieldNames, Request, RequestState, as_they_are
from omni_ws.service.conversation.request_queue import RequestQueue
from omni_ws.service.failure import identified, unexpected
from omni_ws.service.identifiers import new_id
from omni_ws.service.listening.turn_listener import TurnListener
from omni_ws.service.listening.workers import SpeechWorkers
from omni_ws.service.observing.observer import InputReceived, ObservedSession, OutputStalled, SpeechHeard
from omni_ws.wire.server_frames import InputAckFrame, SpeechStartedFrame, SpeechStoppedFrame
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
        media_room: MediaRoom | None = None,
        single_request: bool = False,
        owner: str | None = None,
        admit: Callable[[], None] | None = None,
        counted_priority: Callable[[int], int] = lambda wanted: wanted,
        speech_workers: SpeechWorkers | None = None,
        observed: ObservedSession | None = None,
    ) -> None:
        """``admit`` is asked for each request as it opens, and raises what the request is refused with.

        ``counted_priority`` says what the priority that a request asks for counts as.
        """
        self.observed = observed or ObservedSession.unobserved(now)
        self.engine = engine
        self.configuration = configuration
        self.outbox = outbox
        self.limits = limits
        self.stream = InputStream(
            limits.stream, self._input_settings, budget=budget, now=now(), single_request=single_request
        )
        self.history = History(limits.max_history_tokens, budget)
        self._budget = budget
        self.loudspeaker = Loudspeaker(self.history)
        #: Where turns can be detected: finds out which request the audio belongs to.
        self._listener = None if speech_workers is None else TurnListener(self.stream, speech_workers, self)
        self._room = InputFlow(
            self.stream, self.observed, listener=self._listener, offer=lambda: self._attached.input_may_continue()
        )
        #: For the requests that open from now on; what may be asked is checked by ``configuration.check_options``.
        self.options = AnswerOptions()
        #: From the names that fields have here to those that the client wrote.
        self.field_names: FieldNames = as_they_are
        self._owner = owner
        self._media_room = media_room or MediaRoom(budget)
        #: What requests finish with that end because the session does.
        self.finish_reason_at_end = FinishReason.CANCELLED
        self._attached: ConversationOwner = NOBODY
        self._now = now
        self._admit = admit or (lambda: None)
        self._counted_priority = counted_priority
        outbox.writer = self
        self._queue = self._request_queue()
        #: The request whose input is open.
        self._receiving: Request | None = None
        #: Of text of a single request that is not UTF-8.
        self._refusal: InvalidValue | None = None
        self._draining = False

    def _request_queue(self) -> RequestQueue:
        return RequestQueue(
            self.engine,
            self.outbox,
            self,
            history=self.history,
            loudspeaker=self.loudspeaker,
            observed=self.observed,
        )

    # the owner

    def attach(self, owner: ConversationOwner) -> None:
        """From now on ``owner`` is notified, in place of the one before."""
        self._attached = self.outbox.reader = owner

    def detach(self) -> None:
        """Nobody is notified until the next ``attach``."""
        self._attached = self.outbox.reader = NOBODY

    def output_full(self) -> None:
        """For the outbox: see OutboxWriter."""
        self._attached.timer_changed()

    def output_stalled(self, seconds: float) -> None:
        """For the outbox: see OutboxWriter."""
        current = self._queue.current
        self.observed.notify(OutputStalled(None if current is None else current.request_id, seconds))

    # input

    def configure(self, patch: Mapping[str, Any]) -> SessionConfig:
        """Takes effect with the next request. Raises an InvalidRequest and changes nothing then."""
        config = self.configuration.apply(patch)
        if self.stream.current is None:
            self._take_order()
        if self._listener is not None:
            self._listener.configure(self.configuration.listening)
        return config

    def greet(self) -> None:
        """Begins the session with the configured greeting; nothing happens without one, or once it has begun."""
        config = self.configuration.effective
        if config.greeting.strip() and not self._queue.opened:
            request = self._new_request(greeting_input(), greeting_configuration(config), by_speech=False)
            self._queue.announce_greeting(request)
            self._admit_request(request, interrupts=False)

    def receive_chunk(self, chunk: InputChunk, *, now: float) -> None:
        """The chunk must have passed ``configuration.check_chunk``; ``now`` is the time at which it came.

        Of a single request this raises InvalidValue for text that is not UTF-8, after everything else has been done.
        """
        if self.observed.observers.listening_to_chunks:
            self.observed.notify(InputReceived(chunk))
        events = self.stream.receive_chunk(chunk, now=now)
        if events:
            self._handle(events)
        request = self._receiving
        most = MAX_WAITING_CHUNKS
        if request is not None and request.session.received.chunks > most and request.waiting_chunks > most:
            raise PayloadTooLarge(f"more than {most} chunks are waiting that the engine has not taken over")
        self._raise_refusal()

    def refuse_chunk(self, sequence_id: int) -> None:
        self._handle(self.stream.refuse(sequence_id, now=self._now()))

    def finish(self) -> None:
        self._handle(self.stream.finish(now=self._now()))
        self._raise_refusal()

    def cancel(self, request_id: str | None = None) -> None:
        """Stop a request, if there is any: the named one, else the one that is answered, else the newest."""
        if (request := self._queue.find(request_id)) is None and request_id is not None:
            return  # it has ended already, and what waits behind a gap belongs to others
        if request is self._receiving:
            self.stream.cancel(now=self._now())
            self._stop_receiving()
        else:
            self.stream.drop_waiting(now=self._now())
        if request is None or request.answering:
            self.loudspeaker.silence()
        if request is not None:
            self._queue.cancel(request)
        if self._listener is not None and self._receiving is None:
            self._listener.cancel()

    def truncate_history(self, request_id: str) -> int:
        """As History.truncate. Raises SessionConflict, after which the session goes on, unless between requests."""
        if self.busy or self.stream.buffered_chunks:
            raise SessionConflict("the history is truncated between requests only", param="request_id")
        return self.history.truncate(request_id)

    def drain(self) -> None:
        """Requests that are open get their answers; new ones are refused."""
        self._draining = True

    @contextmanager
    def names_of_client(self) -> Iterator[None]:
        """An error that is raised within names its field as the client wrote it."""
        try:
            yield
        except OmniError as error:
            error.param = self.field_names(error.param)
            raise

    # what a transport looks at

    @property
    def busy(self) -> bool:
        """Whether any request is open, waiting or being answered."""
        return bool(self._queue.requests)

    @property
    def refused(self) -> bool:
        """Whether a request has failed before any work on it began, and its end is about to be told."""
        return any(request.state is RequestState.FAILED for request in self._queue.requests)

    def input_full(self) -> bool:
        """Whether the socket should rest until the owner's ``input_may_continue``: there is more than is worked on."""
        request = self._receiving
        can_be = self.stream.diverting or (request is not None and request.answering)  # asked for each chunk
        return can_be and self._room.is_full(request)

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
            await self._queue.run()
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
        self._room.notify_observers()
        for request in tuple(self._queue.requests):
            self._queue.end(request, self.finish_reason_at_end)
        if self._listener is not None:
            self._listener.close()
        self.stream.close()
        self.history.close()

    def close(self) -> None:
        """No further input comes: ``run`` returns when the last answer is given."""
        self._queue.close()

    @property
    def closing(self) -> bool:
        return self._queue.closing

    # QueueOwner

    def request_progressed(self) -> None:
        self._update_answering()

    def request_ended(self, request: Request) -> None:
        """A request has had its final: nothing of it is held any more."""
        self.stream.forget(request.session)
        if request is self._receiving:
            # What still comes of it is swallowed up to its end.
            self.stream.abandon(request.session)
            self._stop_receiving()
        self._update_answering()
        self._room.offer()

    # TurnOwner: what the turn listener asks

    @property
    def is_playing(self) -> bool:
        return self.loudspeaker.playing

    def take_turn_events(self, events: Sequence[StreamEvent]) -> None:
        self._handle(events)

    def report_turn(self, message: SpeechStartedFrame | SpeechStoppedFrame | OmniError) -> None:
        if isinstance(message, OmniError):
            identified(message, where="listening for turns")
        else:
            self.observed.notify(SpeechHeard(message))
        self.outbox.put_nowait(message)

    def turn_listener_progressed(self) -> None:
        self._room.offer()

    # input events

    def _handle(self, events: Sequence[StreamEvent]) -> None:
        for event in events:
            request = self._receiving
            match event:
                case InputAppended(chunk=chunk) if request is not None:
                    request.append(chunk)
                case Diverted(chunk=chunk) if self._listener is not None:
                    self._listener.put(chunk)
                case TextRefused(error=refusal):
                    self._refuse_text(refusal)
                case RequestOpened(session=session):
                    self._open(session, by_speech=event.by_speech)
                case GenerationStarted() if request is not None:
                    request.timeline.mark_policy_fired(event)
                    request.start(event)
                    self._queue.wake()
                case InputEnded(error=error) if request is not None:
                    self._input_ended(request, error)
                case _:
                    pass  # of a request that was refused as it opened

    def _refuse_text(self, error: InvalidValue) -> None:
        """Told beside the answers; over HTTP raised, for the answer to the chunk itself, once all else is done."""
        if self.stream.single_request:
            self._refusal = self._refusal or error
        else:
            self.outbox.put_nowait(error)

    def _raise_refusal(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _open(self, session: StreamingInputSession, *, by_speech: bool) -> None:
        request = self._new_request(session, self.configuration.effective, by_speech=by_speech)
        request.speech = self._speech_to_keep(session, request.config)
        self._receiving = request
        self._admit_request(request, interrupts=request.interrupts(by_speech=by_speech))

    def _new_request(self, session: StreamingInputSession, config: SessionConfig, *, by_speech: bool) -> Request:
        request_id = new_id("req_")
        timeline = self.observed.open_request(
            request_id, task=config.task, input_mode=session.settings.mode, by_speech=by_speech
        )
        request = Request(
            request_id,
            session,
            config,
            timeline,
            self._room.taken,
            Playback(self._now),
            self._media_room,
            options=dataclasses.replace(self.options, priority=self._counted_priority(self.options.priority)),
            owner=self._owner,
            field_names=self.field_names,
        )
        self._queue.open(request)
        return request

    def _admit_request(self, request: Request, *, interrupts: bool) -> None:
        """Puts a request into the queue, or ends it with what it is refused with."""
        try:
            self.configuration.check_options(self.options)
            self._check_room(waits=not interrupts)
        except OmniError as error:
            request.fail(error)
            self._queue.end(request, FinishReason.ERROR)
            return
        if interrupts:
            self._queue.interrupt(by=request)
        self._queue.append(request)
        self._update_answering()

    def _speech_to_keep(self, session: StreamingInputSession, config: SessionConfig) -> KeptSpeech | None:
        if self.stream.single_request or not config.history or not self.history.max_tokens:
            return None
        takes = self.engine.capabilities.speech_in_history
        return KeptSpeech(
            session.settings.audio,
            self._budget,
            max_tokens=self.history.max_tokens,
            unwanted=None if takes else "the engine takes no speech in its history",
        )

    def _check_room(self, *, waits: bool) -> None:
        """Raises what a request is refused with that opens now: it changes nothing for the others."""
        if self._draining:
            raise ShuttingDown("the server is shutting down", retry_after_ms=1000)
        may_wait = self.limits.max_pending_requests
        if waits and len(self._queue.requests) > may_wait:
            raise EngineOverloaded(f"{may_wait} requests are waiting already", retry_after_ms=1000)
        self._admit()

    def _input_ended(self, request: Request, error: EmptyInput | None) -> None:
        self._room.notify_observers()
        request.timeline.mark_input_ended()
        self._stop_receiving()
        if error is not None:
            request.fail(error)
        request.input.close()
        request.input_ended.set()
        self._update_answering()
        self._queue.wake()

    def _input_settings(self) -> InputSettings:
        self._take_order()
        settings = self.configuration.input_settings()
        audio = None if self._listener is None else self._listener.audio
        return settings if audio is None else dataclasses.replace(settings, audio=audio)

    def _stop_receiving(self) -> None:
        self._receiving = None
        self._take_order()

    def _take_order(self) -> None:
        """What comes ahead of a gap while no input is open is the next request's already."""
        self.stream.reject_out_of_order = self.configuration.effective.out_of_order == "reject"

    def _update_answering(self) -> None:
        """Nothing is idle while an answer is owed for input that is complete, or frozen."""
        answering = any(
            request is not self._receiving or (request.is_frozen and request.state is not RequestState.ANSWERED)
            for request in self._queue.requests
        )
        silence_begins = self.stream.answering and not answering
        self.stream.answering = answering
        if silence_begins:
            self.stream.touch(now=self._now())
            self._attached.timer_changed()
