"""A conversation: makes requests of the input of one session, and has an engine answer them.

**Data flow.** The transport calls ``receive_chunk``, straight from its socket. The InputStream puts chunks in order and
returns events: a request opens, a chunk joins it, its start policy fires, its input ends. ``take_events`` applies them
to the Request, whose ``input`` is the channel that the engine reads. With turn detection the stream diverts audio to
the TurnListener, which finds speech in it in worker threads and hands back events of the same kind. The RequestQueue
gives requests to the engine, one AnswerWriter each, and everything for the client goes into the OutputLog. The
session's Attachment takes it from there. A Request's timeline records each step for metrics, logs, profiles and traces.

**Tasks.** All methods that take input are synchronous; they run in callbacks of the transport and never wait. The owner
of the session runs ``run``, which is the queue's loop. Each answer is a task of the queue; there is one at a time,
except around interruptions (RequestQueue).

**Order.** Requests are answered in the order in which they opened. Input for the next one is accepted, and its policy
may fire, while earlier ones are answered. Each request has exactly one final, its last message. Outputs are numbered
over the whole session without gaps: if outputs are withdrawn before they are sent, later ones get their numbers.

**Interruption.** A client cancels a request, or one that opens with ``overlap: interrupt`` cancels all earlier ones. A
request that speech opened does so only with ``interrupt_response``, and with ``interrupt_resume`` only once the speech
has words. A request that a client cancels while it is being answered has its final immediately; one that is
interrupted may wait for the words of its speech. Outputs in the outbox are withdrawn, its last interim transcript is
settled, and the history keeps what was heard of the answer. The next answer waits until the engine's call for the
cancelled one has ended, unless that goes on as a transcription.

**Backpressure.** Input: while the engine or the turn listener is behind, ``input_full`` is true and the transport stops
reading; acknowledgements carry the credit that is left. The attachment's ``input_may_continue`` ends the pause. Output:
while the outbox is full, ``OutputWriter.drain`` lets the engine wait. All sessions charge one budget of bytes.

**Ends.** A request ends with its engine's Finished, an error, a cancellation, or its session. An error of a request
ends the session only if it has a WebSocket close code; ``run`` raises it then. Fatal errors of the input are raised to
the transport, which ends the session; it also does so when the client's time is up (``Attachment.time_is_up``).
``close`` lets answers finish, ``end`` ends all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_ws.core.chunks import CHUNK_OVERHEAD_BYTES, FinishReason, InputChunk, InputMode, StartTrigger, Task
from omni_ws.core.history import Message, message_bytes
from omni_ws.core.input_stream import InputStream, SavedInput
from omni_ws.core.ledger import Ledger, Playing
from omni_ws.core.quota import ByteBudget, keep_newest
from omni_ws.core.reorder import Diverted, InputRefused, RequestOpened, StreamEvent, TextRefused
from omni_ws.core.request_input import (
    GenerationStarted,
    InputAppended,
    InputEnded,
    InputSettings,
    RequestInput,
    SavedRequestInput,
)
from omni_ws.core.start_policy import ON_END_ONLY
from omni_ws.engine.base import AnswerOptions, Engine
from omni_ws.engine.threads import Lane, MediaRoom
from omni_ws.errors import EngineOverloaded, InvalidValue, OmniError, SessionConflict, ShuttingDown
from omni_ws.service import (
    identified,
    new_id,
    unexpected,
)
from omni_ws.service.conversation.answer_writer import read_aloud
from omni_ws.service.conversation.configuration import Configuration, ConfigurationRules, input_settings
from omni_ws.service.conversation.onsets import SpokenTurns
from omni_ws.service.conversation.output_log import (
    MAX_TOOL_RESULTS,
    NOBODY,
    Attachment,
    ConversationLimits,
    OutputLog,
    SavedOutput,
)
from omni_ws.service.conversation.request import (
    INPUT_QUEUE_BYTES,
    FieldNames,
    Remark,
    Request,
    RequestState,
    SavedRequest,
    as_they_are,
)
from omni_ws.service.conversation.request_queue import RequestQueue, SavedQueue, remark_input
from omni_ws.service.conversation.tool_results import ToolResults
from omni_ws.service.conversation.turn_listener import SavedListening, TurnListener
from omni_ws.service.conversation.unasked import (
    FACT,
    SavedFillers,
    SavedTellings,
    Telling,
    Unasked,
)
from omni_ws.service.listening import SpeechWorkers
from omni_ws.service.observing.observer import InputReceived, ObservedSession, OutputStalled
from omni_ws.wire.server_frames import InputAckFrame
from omni_ws.wire.session_config import SessionConfig

logger = logging.getLogger(__name__)

#: Requests whose configuration is known after their end.
MAX_CONFIGURATIONS: Final = 64
#: The options of all conversations that were given none; one object, as there may be thousands.
_NO_OPTIONS: Final = AnswerOptions()


class SavedConversation(msgspec.Struct, kw_only=True):
    """A conversation in a form that can be written to bytes: all that another server needs to continue it.

    All times are on the clock of the server that saved it, which showed ``now``.
    """

    now: float
    configuration: Mapping[str, Any]
    options: AnswerOptions
    given: bool
    #: The configurations of the latest requests, by id, if they are kept.
    configurations: dict[str, SessionConfig]
    input: SavedInput
    #: The request whose input is open, and the input whose rest is discarded.
    receiving: str | None
    discarding: SavedRequestInput | None
    #: None without turn detection.
    listening: SavedListening | None
    ledger: bytes
    #: The id of the request of an uncertain onset, of which the ledger has an entry.
    withdrawn: str | None = None
    queue: SavedQueue
    output: SavedOutput
    tellings: SavedTellings = msgspec.field(default_factory=SavedTellings)
    fillers: SavedFillers = msgspec.field(default_factory=SavedFillers)


class Conversation:
    """One session's input, requests and answers. An error that ``run`` raises was sent to the client before.

    ``admit`` is called for each request that opens, and raises an OmniError to refuse it. ``counted_priority`` maps the
    priority that a request asks for to the one that it gets. Turn detection needs ``speech_workers``.
    """

    # Here, since an idle session has none of them: an object with more than 30 attributes takes 1.3 KB more.
    #: Whether the configurations of the latest requests are kept, also after their ends: see ``configuration_of``.
    keeps_configurations = False
    #: The request whose input is open.
    receiving: Request | None = None
    #: The error of refused text of a single request; raised once the call that brought it is done.
    _refusal: InvalidValue | None = None
    draining = False
    #: Whether the client has given content that is not in the stream.
    given = False
    #: Whether the user is pressing keys of a telephone, which will be a turn.
    enters_keys = False
    _rules_to_follow: ConfigurationRules | None = None

    def __init__(
        self,
        engine: Engine,
        configuration: Configuration,
        outbox: OutputLog,
        *,
        limits: ConversationLimits,
        budget: ByteBudget,
        now: Callable[[], float],
        media_room: MediaRoom | None = None,
        admit: Callable[[], None] | None = None,
        counted_priority: Callable[[int], int] = lambda wanted: wanted,
        speech_workers: SpeechWorkers | None = None,
        observed: ObservedSession | None = None,
    ) -> None:
        self.observed = observed or ObservedSession.unobserved(now)
        self.engine, self.configuration = engine, configuration
        self.outbox, self.limits = outbox, limits
        #: The budget of the session: everything that holds input or output for it charges this.
        self.account = budget
        self.ledger = Ledger(limits.max_history_tokens, budget, read=read_aloud)
        self._results = ToolResults(self.ledger, reserved=configuration.makes_call)
        self.unasked = Unasked(self, self._results)
        self.stream = self._new_stream(now())
        self.observed.timeline.receives(self.stream)
        self._speech_workers = speech_workers
        #: Assigns audio to requests by the speech in it; None until turn detection is first configured.
        self.listener: TurnListener | None = None
        #: The spoken turns that the listener detects.
        self.spoken = SpokenTurns(self, now)
        self._flow = InputFlow(self.stream, self.observed, self)
        #: The options of requests that open from now on, see ``answer_with``.
        self.options = _NO_OPTIONS
        #: Maps the names of fields to those that the client uses.
        self.field_names: FieldNames = as_they_are
        self._media_room = media_room or MediaRoom(budget)
        #: See ``end_in_error``.
        self._error_at_end: OmniError | None = None
        self._attached: Attachment = NOBODY
        self._now = now
        #: The timer of the client's time-outs, see ``watch_time``, and when it fires.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self.admit = admit or (lambda: None)
        self.counted_priority = counted_priority
        self.queue = self._new_queue()
        self._configurations: dict[str, SessionConfig] = {}
        #: Called with the configuration in effect when it follows another engine, see ``follow``.
        self.followed: Callable[[SessionConfig], None] = lambda config: None

    def _new_stream(self, now: float) -> InputStream:
        return InputStream(
            self.limits.stream,
            self._input_settings,
            budget=self.account,
            now=now,
            single_request=self.limits.single_request,
            completes=self._results.complete,
        )

    def _new_queue(self) -> RequestQueue:
        self.outbox.watch_room(self.watch_time, self._output_stalled)
        return RequestQueue(
            self.engine,
            self.outbox,
            ledger=self.ledger,
            observed=self.observed,
            patience=self.limits.asr_timeout_sec,
            progressed=self._update_answering,
            ended=self._request_ended,
            released=self._request_released,
        )

    # what carries it

    def attach(self, attachment: Attachment) -> None:
        """Notify ``attachment`` of output, room and time-outs from now on, instead of the previous attachment."""
        self._attached = attachment
        self.outbox.attach(attachment)
        if attachment is not NOBODY:  # a client has come
            self.unasked.connected()
        self.unasked.note_quiet(self._now())
        self.watch_time()

    def detach(self) -> None:
        """Notify nobody until the next ``attach``. Until then the client's time-outs do not run."""
        self.attach(NOBODY)
        self._stop_watching()

    def _output_stalled(self, seconds: float) -> None:
        current = self.queue.current
        self.observed.notify(OutputStalled(None if current is None else current.request_id, seconds))

    # input

    def configure(self, patch: Mapping[str, Any], *, field_names: FieldNames | None = None) -> SessionConfig:
        """Configure the requests that open from now on. Raises what ``Configuration.apply`` raises.

        ``field_names`` maps the names of fields to those that the client uses, for later errors. It is kept even if the
        configuration is refused; the error raised here names fields of ``session_config``.
        """
        self.field_names = field_names or self.field_names
        config = self.configuration.apply(patch)
        self._configured()
        return config

    def _configured(self) -> None:
        if self.stream.current is None:
            self._update_order()
        listening = self.configuration.listening
        if listening.turns is not None and self.listener is None and self._speech_workers is not None:
            self.listener = TurnListener(self.stream, self._speech_workers, self, self._flow.lane)
        if self.listener is not None:
            self.listener.configure(listening)
        self.watch_time()

    def follow(self, rules: ConfigurationRules) -> None:
        """Apply the rules of a new engine, as soon as no request runs and there is memory for the configuration."""
        self._rules_to_follow = rules
        self._follow_if_idle()

    def _follow_if_idle(self) -> None:
        rules = self._rules_to_follow
        if rules is None or self.receiving is not None or self.queue.requests:
            return
        try:
            config = self.configuration.follow(rules)
        except OmniError as error:  # there is no memory for it: the end of the next request tries again
            logger.warning("a session does not follow the engine yet: %s", error.message)
            return
        self._rules_to_follow = None
        self._configured()
        self.followed(config)

    def answer_with(self, options: AnswerOptions) -> None:
        """Use ``options`` for the answers to requests that open from now on; each request checks them as it opens."""
        self.options = options

    def greet(self) -> None:
        """Say the configured greeting, if there is one and no request has opened yet."""
        config = self.configuration.effective
        if config.greeting.strip() and not self.queue.opened:
            self.say(Remark(config.greeting, StartTrigger.GREETING, field="greeting"))

    def say(self, remark: Remark) -> str:
        """Say ``remark`` unasked. Returns the id of its request. Only a greeting may be refused."""
        config = msgspec.structs.replace(self.configuration.effective, task=Task.SPEECH)
        request = self._new_request(remark_input(), config, by_speech=False)
        self.queue.announce_remark(request, remark)
        if remark.why is StartTrigger.GREETING:
            self.admit_request(request, interrupts=False)
            return request.request_id
        request.is_whole(input_kept=False, answer_kept=remark.kept, context=None)
        self.queue.append(request, before_results=True)
        self._update_answering()
        return request.request_id

    def tell(self, telling: Telling) -> None:
        """Queue a telling, which the assistant says at the next pause; see Tellings. Raises EngineOverloaded."""
        self.unasked.tellings.put(telling)
        self.unasked.note_news()
        self.unasked.note_quiet(self._now())

    def note(self, text: str, role: str) -> None:
        """Add a fact, or with role ``system`` a standing rule, to what later requests see; no answer follows.

        A rule is appended to the instructions. Raises what ``configure`` raises.
        """
        if role == "system":
            rules = filter(None, (self.configuration.effective.instructions, text))
            self.configure({"instructions": "\n\n".join(rules)})
        else:
            self.unasked.tellings.know(FACT + text if role == "user" else text, role)
            self.unasked.note_news()

    def receive_chunk(self, chunk: InputChunk, *, now: float) -> None:
        """Take a chunk that has passed ``configuration.check_chunk`` and arrived at the time ``now``.

        Raises PayloadTooLarge and the fatal errors of the stream. If the conversation is a single request (HTTP), text
        that is not UTF-8 raises InvalidValue, but only after the rest of the chunk has taken effect.
        """
        if self.observed.observers.listening_to_chunks:
            self.observed.notify(InputReceived(chunk))
        if chunk.tool_call_id is not None and not self.stream.single_request:
            self.take_events(self._results.receive(chunk, self.stream, now=now, refuse=self.outbox.put_nowait))
        elif events := self.stream.receive_chunk(chunk, now=now):
            self.take_events(events)
        if self.stream.gap_since is not None:
            self.watch_time()
        request = self.receiving
        if request is not None and request.session.received.chunks > MAX_TOOL_RESULTS:
            request.check_held()
        if self._refusal is not None:
            self._raise_refused_text()

    def refuse_chunk(self, sequence_id: int) -> None:
        """Skip the sequence number of a refused chunk, so that later chunks do not wait for it."""
        self.take_events(self.stream.refuse(sequence_id, now=self._now()))
        self.watch_time()

    def finish(self) -> None:
        """End the input of the open request, if there is one. Raises InvalidValue as ``receive_chunk`` does."""
        self.take_events(self.stream.finish(now=self._now()))
        self.watch_time()
        self._raise_refused_text()

    def cancel(self, request_id: str | None = None) -> None:
        """Cancel the request ``request_id``; with None, the one being answered and the one whose input is open.

        If the request whose input is open is cancelled, all input that has arrived before the cancel is dropped, even
        if it still waits to be put in order.
        """
        sounded = self.is_playing
        self._cancel(request_id)
        if sounded:  # the silence begins now, and not where the playback would have ended
            self.unasked.note_quiet(self._now())

    def _cancel(self, request_id: str | None) -> None:
        if request_id is None:
            self.spoken.dismiss(rest_untold=True)
        receiving = self.receiving
        named = self.queue.stopped_by_cancel if request_id is None else self.queue.find(request_id)
        self.unasked.cancelled(request_id, named, self._now())
        if named is None and request_id is not None:
            self.ledger.stop(request_id, self._now())  # it has ended, and may still sound
            return
        holding = self.queue.holding if request_id is None else None
        cuts_input = request_id is None or named is receiving
        if cuts_input:
            self.stream.cancel(now=self._now())
            self._results.cancelled()
            if receiving is not None:
                self.stop_receiving()
        else:
            self.stream.touch(now=self._now())
        if request_id is None or (named is not None and named.answering):
            self.ledger.silence(self._now())
        if named is not None:
            self.queue.cancel(named)
        if holding is not None and holding is not receiving and self.queue.find(holding.request_id) is not None:
            self.queue.cancel(holding)
        if cuts_input and receiving is not None:
            if receiving is not named:
                self.queue.cancel(receiving)
            # What waits before it does not hold its final up.
            self.queue.end(receiving, FinishReason.CANCELLED)
        if cuts_input and self.listener is not None:
            self.listener.cancel()
        self._flow.renew_credit()

    def report_playback(
        self, played_ms: float, *, request_id: str | None = None, sequence_id: int | None = None
    ) -> None:
        """Note how much of the audio the client has played; see Ledger.report."""
        now = self._now()
        begun = self.ledger.report(played_ms, now=now, request_id=request_id, sequence_id=sequence_id)
        if begun is not None:
            self.observed.timeline.played(begun, now - played_ms / 1000)

    def silence(self) -> None:
        """Note that the client plays nothing more of the answers that were sent."""
        if self.is_playing:
            self.ledger.silence(self._now())
            self.unasked.note_quiet(self._now())

    def cut_answer(self, request_id: str, heard_ms: float) -> str | None:
        """Note that the client has stopped playing an answer after ``heard_ms``.

        Returns the text that the user heard; None if the answer has not ended, or is no longer known.
        """
        entry, sounded = self.ledger.find(request_id), self.is_playing
        if entry is None:
            return None
        self.ledger.cut(entry, self._now(), at_ms=heard_ms)
        if sounded:
            self.unasked.note_quiet(self._now())
        return self.ledger.heard_text(entry) if entry.finished else None

    def truncate_history(self, request_id: str) -> int:
        """Drop a request and all later ones from the history. Returns how many; see History.truncate.

        Raises SessionConflict while any request is open.
        """
        if self.busy or self.stream.buffered_chunks:
            raise SessionConflict("the history is truncated between requests only", param="request_id")
        return self.ledger.history.truncate(request_id)

    def ref_of(self, request_id: str) -> str | None:
        """Return the client's name (``ref``) for a request that has had its final; None if the client gave none."""
        return self.ledger.history.name_of(request_id)

    def drain(self) -> None:
        """Refuse new requests; those that are open get their answers."""
        self.draining = True

    @property
    def detached(self) -> bool:
        """Whether no client is connected."""
        return self._attached is NOBODY

    # saved

    def saved(self) -> SavedConversation:
        """Return the conversation in its saved form. If requests are open, ``limits.keeps_input`` must be true."""
        # An uncertain onset is saved as audio that belongs to no request.
        aside = self.spoken.aside
        receiving = None if self.receiving is aside else self.receiving
        current = None if aside is not None and self.stream.current is aside.session else self.stream.current
        discarding = None if current is None or (receiving and receiving.session is current) else current.saved()
        return SavedConversation(
            now=self._now(),
            configuration=self.configuration.wanted,
            options=self.options,
            given=self.given,
            configurations=self._configurations,
            input=self.stream.saved(),
            receiving=None if receiving is None else receiving.request_id,
            discarding=discarding,
            listening=None if self.listener is None else self.listener.saved(),
            ledger=self.ledger.to_bytes(),
            withdrawn=None if aside is None else aside.request_id,
            queue=self.queue.saved(),
            output=self.outbox.saved(),
            tellings=self.unasked.tellings.saved(),
            fillers=self.unasked.saved_fillers(),
        )

    def restore(self, saved: SavedConversation) -> None:
        """Continue a saved conversation. Call it before ``run``, and before any input.

        Raises what ``configure`` raises; LookupError, ValueError or msgspec.DecodeError if ``saved`` does not come from
        ``Conversation.saved``.
        """
        now = self._now()
        if saved.configuration:
            self.configure(saved.configuration)
        self.options, self.given, self._configurations = saved.options, saved.given, saved.configurations
        self.ledger.restore(saved.ledger, later=now - saved.now)
        if saved.withdrawn is not None:
            self.ledger.withdraw(saved.withdrawn)
        self.outbox.restore(saved.output)
        self.stream.restore(saved.input, now=now)
        self.observed.timeline.goes_on()
        requests = [self._restored(one) for one in saved.queue.requests]
        self.queue.restore(saved.queue, requests)
        self.receiving = next((one for one in requests if one.request_id == saved.receiving), None)
        if self.receiving is not None:
            self.stream.go_on_with(self.receiving.session)
        elif saved.discarding is not None:
            self.stream.go_on_with(RequestInput.restored(self.configuration.input_settings(), saved.discarding))
        self._results.restore(requests, saved.input)
        self.unasked.tellings.restore(saved.tellings, later=now - saved.now)
        self.unasked.restore_fillers(saved.fillers)
        if saved.listening is not None:
            self._listen_on(saved.listening)
        self._update_order()
        self._update_answering()

    def _listen_on(self, saved: SavedListening) -> None:
        if self.listener is not None:
            if saved.turn_id is not None and not saved.uncertain:
                self.spoken.restore(saved.turn_id)
            self.listener.restore(saved)
        for number, chunk in enumerate(saved.unassigned, 1):
            self.stream.hold_again(None, 0 if chunk is None else len(chunk.payload))
            self.take_events([Diverted(chunk)])
            if number == saved.cancelled and self.listener is not None:
                self.listener.cancel()

    def _restored(self, saved: SavedRequest) -> Request:
        settings = input_settings(saved.config)
        settings = dataclasses.replace(settings, audio=saved.audio, mode=saved.mode, results_wait=saved.results_wait)
        if saved.remark is not None:
            settings = remark_input().settings
        session = RequestInput.restored(settings, saved.input)
        request = self._make_request(
            saved.request_id, session, saved.config, by_speech=saved.by_speech, options=saved.options
        )
        if request.config.history and not self.stream.single_request:
            request.keep_speech(supported=self.engine.capabilities.speech_in_history)
        self.stream.hold_again(session, request.restore(saved))
        if request.started is not None:
            request.timeline.mark_policy_fired(request.started)
        if saved.input_ended:
            request.timeline.mark_input_ended()
        return request

    # state

    @property
    def busy(self) -> bool:
        """Whether any request is open or has no final yet."""
        return bool(self.queue.requests)

    @property
    def has_content(self) -> bool:
        """Whether any input has arrived, even if it waits behind a gap, or came outside the stream (``note_given``)."""
        return self.given or bool(self.stream.received_bytes or self.stream.held_bytes)

    @property
    def refused(self) -> bool:
        """Whether a request failed before its engine got it, and its error waits until earlier answers are sent."""
        return any(request.state is RequestState.FAILED for request in self.queue.requests)

    def input_full(self) -> bool:
        """Return whether the transport must stop reading until the attachment's ``input_may_continue``."""
        request = self.receiving
        can_be = self.stream.diverting or (request is not None and request.answering)  # the hot path
        return can_be and self._flow.is_full()

    def take_ack(self) -> InputAckFrame:
        """Return an acknowledgement of all input so far, with the credit for more."""
        return self._flow.take_ack()

    # the time of the client: of its silence, of a gap in its input, and of output that it does not read

    def get_timer(self) -> float | None:
        """Return when the client's next time-out is due, by the clock of the loop; None if none runs."""
        times = (self.stream.get_timer(), self.outbox.get_timer(), self.unasked.get_timer())
        return min((when for when in times if when is not None), default=None)

    def watch_time(self) -> None:
        """Set the timer to the client's next time-out, if that may now be earlier and anything is attached.

        Call it only where a time-out may become earlier. A time-out that becomes later, as with every frame, needs no
        call: the timer checks it when it fires.
        """
        if self._attached is NOBODY or (when := self.get_timer()) is None:
            return
        if self._timer is not None and self._timer_due <= when:
            return
        self._stop_watching()
        # Its handle may not know when it is due: uvloop makes no timer for less than half a millisecond.
        self._timer_due = when
        self._timer = asyncio.get_running_loop().call_at(when, self._look_at_time)

    def _look_at_time(self) -> None:
        # Loops round: a timer that fires a little early would be armed again and again until its time has come.
        now = max(self._now(), self._timer_due)
        self._timer = None
        try:
            self.outbox.handle_timer(now)
            self.stream.handle_timer(now=now)
            self.unasked.speak(now)
        except OmniError as error:
            self._attached.time_is_up(error)
        else:
            self.watch_time()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hold_time(self, held: bool, *, now: float) -> None:
        """Stop the time-outs for silence and gaps while the client's input is not read (``held``), or restart them."""
        if held:
            self.stream.hold_clocks(now=now)
        else:
            self.stream.release_clocks(now=now)
            self.watch_time()

    def suspend_time(self, suspended: bool) -> None:
        """Suspend the time-out for the client's silence, or resume it.

        A time-out that has passed meanwhile then fires.
        """
        self.stream.suspend(suspended)
        self.watch_time()

    def time_gaps(self) -> None:
        """Let gaps in the input time out from now on, as the end of the input is known; see InputStream.time_gaps."""
        self.stream.time_gaps(now=self._now())
        self.watch_time()

    # answers

    async def run(self) -> None:
        """Answer requests until cancelled or, after ``close``, until none is left. Calls ``end`` in any case.

        Raises the error of a request that ends the session, after the final of that request.
        """
        try:
            await self.queue.run()
        except OmniError:
            raise
        except Exception as error:
            failure = unexpected(error, where="a conversation")
            self.end_in_error(failure)
            self.outbox.put_nowait(failure)
            raise failure from None
        finally:
            self.end()

    def end_in_error(self, error: OmniError) -> None:
        """Have ``end`` write finals that say that the requests failed, instead of cancelled: with ``error``."""
        self._error_at_end = error

    def end(self) -> None:
        """Write the finals of all requests, and release everything.

        ``run`` does so; call this only if ``run`` never ran. Idempotent.
        """
        self._flow.notify_observers()
        self.spoken.dismiss()
        self.queue.end_all(self._error_at_end)
        if self.listener is not None:
            self.listener.close()
        self.stream.close()
        self.unasked.close()
        self.ledger.close()
        self._configurations.clear()
        self.configuration.close()
        self._stop_watching()  # last, since a request that ends may set the timer

    def close(self) -> None:
        """Let ``run`` return after the last answer."""
        self.queue.close()

    @property
    def closing(self) -> bool:
        """Whether ``close`` was called."""
        return self.queue.closing

    # what the queue tells

    def _request_released(self, request: Request) -> None:
        self.stream.forget(request.session)
        if request.config is not self.configuration.effective:  # which may be long, and a request lives on for a while
            request.outline()
        self.ledger.weigh()

    def _request_ended(self, request: Request) -> None:
        if request is self.receiving:
            # The rest of its input is dropped up to its end.
            self.stream.abandon(request.session)
            self.stop_receiving()
        if request.error is not None:
            self._results.failed(request.session)
        self.unasked.note_end(request)
        self._update_answering()
        self._flow.offer()
        if self._rules_to_follow is not None:
            self._follow_if_idle()

    def offer_input(self) -> None:
        """Tell the attachment that input may continue: there is room again, or credit for a whole chunk."""
        self._attached.input_may_continue()

    # what the turn listener asks and tells, always from the event loop; see also SpokenTurns

    @property
    def is_playing(self) -> bool:
        """Whether an answer is being played, so that speech would interrupt it."""
        return self.ledger.playing(self._now())

    @property
    def is_answering(self) -> bool:
        """Whether any request waits for its answer or is being answered, apart from the one whose input is open."""
        return any(request is not self.receiving for request in self.queue.requests)

    def what_plays(self, *, ago_ms: float) -> Playing:
        """Return what the client played ``ago_ms`` ago, with the audio that was sent since the last call."""
        return self.ledger.what_plays(self._now(), ago_ms=ago_ms)

    def engine_is_behind(self) -> bool:
        """Return whether the engine is behind with the request whose input is open.

        If so, ``TurnListener.go_on`` is called once the engine has caught up.
        """
        return self._flow.engine_is_behind()

    @property
    def may_be_interrupted(self) -> bool:
        """Whether a request that speech opens now would interrupt the answer."""
        no_input = self.receiving is None and self.stream.current is None
        return no_input and self.configuration.effective.overlap == "interrupt"

    def report_turn(self, error: OmniError) -> None:
        """Send the client an error of turn detection."""
        self.outbox.put_nowait(identified(error, where="listening for turns"))

    def turn_listener_progressed(self) -> None:
        """Let input continue, as the listener has processed audio and may have room again."""
        self._flow.offer()

    # requests whose input is whole, beside the stream of the input

    def note_given(self) -> None:
        """Note that the client has given content outside the input stream: Realtime items, or telephone keys."""
        self.given = True

    def note_keys(self, entered: bool) -> None:
        """Note that the user presses keys, or that the entry is complete. Nobody is silent meanwhile."""
        self.enters_keys = entered
        self.unasked.note_quiet(self._now())

    def respond(
        self,
        chunks: Sequence[InputChunk],
        config: SessionConfig,
        *,
        input_kept: bool = True,
        answer_kept: bool = True,
        context: tuple[Message, ...] | None = None,
        results_wait: bool = False,
        trigger: StartTrigger = StartTrigger.END_OF_INPUT,
    ) -> str:
        """Open a request whose input is complete, with a configuration of its own. It interrupts no open request.

        ``input_kept`` and ``answer_kept``: whether the input, and the answer, enter the history. ``context``, if not
        None, is what the engine sees in place of the history. ``results_wait``: a request of only tool results
        waits while the user speaks, and for requests that interrupt. ``trigger`` is the reason for the start that the
        client is told. Returns the id of the request, whose final follows in any case, even if it is refused or has no
        input.
        """
        settings = dataclasses.replace(self.configuration.input_settings(), results_wait=results_wait)
        session = RequestInput(dataclasses.replace(settings, start_policy=ON_END_ONLY, mode=InputMode.SNAPSHOT))
        self.given = self.given or bool(chunks)
        for chunk in chunks:
            if chunk.ref is not None:
                session.name(chunk)
            session.receive_chunk(chunk)
        events = session.finish(trigger=trigger)
        request = self._new_request(session, config, by_speech=False)
        request.is_whole(input_kept=input_kept, answer_kept=answer_kept, context=context)
        held = sum(CHUNK_OVERHEAD_BYTES + len(chunk.payload) for chunk in chunks)
        held += sum(map(message_bytes, context or ()))
        if input_kept:
            request.keep_speech(supported=self.engine.capabilities.speech_in_history)
        self.admit_request(request, interrupts=False, held=held)
        if request.state is RequestState.FINISHED:  # refused
            return request.request_id
        for event in events:
            match event:
                case GenerationStarted():
                    request.timeline.mark_policy_fired(event)
                    request.start(event)
                case InputEnded(error=error):
                    self._input_ended(request, error)
        return request.request_id

    # input events

    def take_events(self, events: Sequence[StreamEvent]) -> None:
        """Apply the events of input that the stream has put in order, or that the turn listener has passed on."""
        for event in events:
            request = self.receiving
            match event:
                case InputAppended(chunk=chunk) if request is not None:
                    request.extend(chunk)
                case Diverted(chunk=chunk) if self.listener is not None:
                    self.listener.put(chunk)
                case TextRefused(error=refusal):
                    self._refuse_text(refusal)
                case InputRefused(error=excess) if request is not None:
                    self.spoken.is_input()
                    if request.state is not RequestState.FINISHED:  # it may have been refused as it was confirmed
                        self.queue.refuse(request, excess)
                case RequestOpened(session=session):
                    self._open(session, by_speech=event.by_speech)
                case GenerationStarted() if request is not None:
                    request.timeline.mark_policy_fired(event)
                    request.start(event)
                    self.queue.wake()
                case InputEnded(error=error) if request is not None:
                    self._input_ended(request, error)
                case _:
                    pass  # for a request that was refused as it opened

    def _refuse_text(self, error: InvalidValue) -> None:
        """Send the error of refused text; over HTTP (a single request), keep it for ``_raise_refused_text``."""
        if self.stream.single_request:
            self._refusal = self._refusal or error
        else:
            self.outbox.put_nowait(error)

    def _raise_refused_text(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _open(self, session: RequestInput, *, by_speech: bool) -> None:
        request = self._new_request(session, self.configuration.effective, by_speech=by_speech)
        if request.config.history and not self.stream.single_request:
            request.keep_speech(supported=self.engine.capabilities.speech_in_history)
        self.receiving = request
        if by_speech and self.spoken.sets_aside(request):
            return
        interrupts = request.interrupts(by_speech=by_speech) and not session.only_results
        self.admit_request(request, interrupts=interrupts)

    def _new_request(self, session: RequestInput, config: SessionConfig, *, by_speech: bool) -> Request:
        """Return a request that opens now, with its input ``session``. ``admit_request`` must follow."""
        speech = self.spoken.current if by_speech else None
        request_id = (speech and speech.request_id) or new_id("req_")
        request = self._make_request(request_id, session, config, by_speech=by_speech, options=self.options)
        if speech is not None:
            speech.joins(request)
        self.queue.open(request)
        if self.keeps_configurations:
            self._configurations[request_id] = config
        keep_newest(self._configurations, MAX_CONFIGURATIONS)
        return request

    def _make_request(
        self, request_id: str, session: RequestInput, config: SessionConfig, *, by_speech: bool, options: AnswerOptions
    ) -> Request:
        timeline = self.observed.open_request(
            request_id, task=config.task, input_mode=session.settings.mode, by_speech=by_speech
        )
        return Request(
            request_id,
            session,
            config,
            timeline,
            self._flow.taken,
            self.ledger,
            self._media_room,
            voice_named=self.configuration.names_voice(config),
            lane=self._flow.lane,
            options=options,
            owner=self.observed.identity.owner,
            near=self.observed.identity.near,
            conversation=None if self.stream.single_request else self.observed.identity.session_id,
            field_names=self.field_names,
            given=[] if self.limits.keeps_input else None,
            turn_words=None if config.turn_detection is None else self.spoken.words,
        )

    def configuration_of(self, request_id: str) -> SessionConfig:
        """Return the configuration of a request, open or ended; if it is not known, the one in effect now.

        Those of the latest requests are known with ``keeps_configurations``.
        """
        return self._configurations.get(request_id, self.configuration.effective)

    def admit_request(self, request: Request, *, interrupts: bool, held: int = 0, has_words: bool = False) -> None:
        """Queue a request, or end it with the error that refuses it.

        ``interrupts``: it cancels earlier requests, or holds the answer; see ``RequestQueue.interrupt`` also for
        ``has_words``. ``held`` is the size in bytes of input that is complete already, to be charged now: input of the
        stream is charged as it arrives.
        """
        try:
            if held:
                request.charge(held)
            self.configuration.check_options(self.options)
            if excess := self.stream.excess(request.session.received.bytes):
                raise excess  # of input that came whole
            self._check_room(waits=not interrupts)
            request.timeline.mark_admitted()
        except OmniError as error:
            self.queue.refuse(request, error)
            return
        if interrupts:
            self.queue.interrupt(by=request, has_words=has_words)
        self.queue.append(request, before_results=interrupts)
        self._update_answering()

    def withdraw_request(self, request: Request) -> None:
        """Withdraw the request of an uncertain onset, as if it had never opened."""
        self.stream.withdraw(request.session)
        if request is self.receiving:
            self.stop_receiving()
        self.queue.withdraw(request)
        self._configurations.pop(request.request_id, None)
        self._follow_if_idle()

    def _check_room(self, *, waits: bool) -> None:
        """Admit a request, or raise an error if none may open now. ``waits``: it would have to wait for earlier ones.

        Call it last: ``admit`` reserves a part of a daily limit, which the end of an admitted request releases.
        """
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after_ms=1000)
        if waits and len(self.queue.waiting) > (may_wait := self.limits.max_pending_requests):
            raise EngineOverloaded(f"at most {may_wait} requests may wait per session", retry_after_ms=1000)
        self.admit()

    def _input_ended(self, request: Request, error: OmniError | None) -> None:
        """Note that the input of a request has ended; ``error`` is set if it was empty."""
        self._flow.notify_observers()
        request.timeline.mark_input_ended()
        if request is self.receiving:
            self.stop_receiving()
        if error is not None:
            request.fail(error)
        request.end_input()
        self.ledger.weigh()
        self._update_answering()
        self.queue.wake()

    def _input_settings(self) -> InputSettings:
        self._update_order()
        settings = dataclasses.replace(self.configuration.input_settings(), results_wait=not self.stream.single_request)
        audio = None if self.listener is None else self.listener.audio
        return settings if audio is None else dataclasses.replace(settings, audio=audio)

    def stop_receiving(self) -> None:
        self.receiving = None
        self._update_order()

    def _update_order(self) -> None:
        """Apply the configured ``out_of_order`` to the stream. It changes only while no input is open."""
        self.stream.reject_out_of_order = self.configuration.effective.out_of_order == "reject"

    def _update_answering(self) -> None:
        """Suspend the idle time-out while a request whose input is complete, or frozen, has not been answered."""
        self.unasked.note_quiet(self._now())
        answering = any(
            request is not self.receiving or (request.is_frozen and request.state is not RequestState.ANSWERED)
            for request in self.queue.requests
        )
        if self.stream.note_answering(answering, now=self._now()):
            self.watch_time()


# Flow control of the input of a conversation: pauses in reading, and credit in acknowledgements.


class InputFlow:
    """The flow control of one conversation's input: decides when a transport pauses, and what it acknowledges."""

    def __init__(self, stream: InputStream, observed: ObservedSession, conversation: Conversation) -> None:
        #: The place of the session in the threads that decode its audio and detect the speech in it.
        self.lane = Lane()
        self._stream = stream
        self._observed = observed
        self._conversation = conversation
        #: Whether the transport waits for ``offer_input``; and whether the credit that the client knows of is less than
        #: a whole chunk.
        self._wanted = False
        self._credit_was_low = False

    def is_full(self) -> bool:
        """Return whether the engine is behind with the request that receives input, or the listener with audio.

        If so, ``Conversation.offer_input`` is called once there is room.
        """
        if self.engine_is_behind():
            return True
        listener = self._conversation.listener
        if listener is None or not listener.full:
            return False
        self._wanted = True
        return True

    def engine_is_behind(self) -> bool:
        """Return whether the engine is behind with the request that receives input.

        If so, ``offer`` is called once the engine has caught up.
        """
        receiving = self._conversation.receiving
        if receiving is None or not receiving.answering or not receiving.input_full:
            return False
        self._wanted = True
        return True

    def take_ack(self) -> InputAckFrame:
        """Return an acknowledgement of the input so far, with the credit in bytes, and report it to observers."""
        stream, receiving = self._stream, self._conversation.receiving
        self.notify_observers()
        credit = self._credit
        self._credit_was_low = credit < self._whole_chunk
        if receiving is not None and receiving.answering:
            # A client that respects its credit may wait for more now.
            self._wanted = self._wanted or receiving.queued_bytes > INPUT_QUEUE_BYTES / 2
        return InputAckFrame(
            next_sequence_id=stream.reorder.next_sequence_id,
            buffered_chunks=stream.buffered_chunks,
            received_bytes=stream.received_bytes,
            credit_bytes=max(0, credit),
        )

    @property
    def _credit(self) -> int:
        receiving, limits = self._conversation.receiving, self._stream.limits
        credit = limits.max_held_bytes - self._stream.held_bytes
        if receiving is not None and receiving.answering:
            # The chunk that makes the queue full still fits, whatever its size.
            credit = min(credit, INPUT_QUEUE_BYTES + limits.max_chunk_bytes - int(receiving.queued_bytes))
        return credit

    @property
    def _whole_chunk(self) -> int:
        """The largest size of a chunk in bytes: a client with less credit may have to wait before it sends a chunk."""
        return min(self._stream.limits.max_chunk_bytes, self._stream.limits.max_held_bytes)

    def notify_observers(self) -> None:
        """Report how much input was accepted. Also called as a request or session ends, when no ack may follow."""
        if self._observed.observers.listening_to_outputs:
            self._observed.notify(self._observed.timeline.received)

    def taken(self, request: Request, size: float) -> None:
        """Note that the engine has read ``size`` bytes of a request's input."""
        if request.given is None:  # else it is held to the end of the request
            self._stream.taken(request.session, int(size))
        if self._wanted and request.queued_bytes <= INPUT_QUEUE_BYTES / 2:
            self.offer()
        elif self._credit_was_low:
            self.renew_credit()

    def offer(self) -> None:
        """Let the transport read the socket again, if it has paused."""
        if self._wanted:
            self._wanted = False
            if (listener := self._conversation.listener) is not None:
                listener.go_on()
            self._conversation.offer_input()
        elif self._credit_was_low:
            self.renew_credit()

    def renew_credit(self) -> None:
        """Have the input acknowledged if there is credit for a whole chunk again, and less was told to the client."""
        if self._credit_was_low and self._credit >= self._whole_chunk:
            self._credit_was_low = False
            self._conversation.offer_input()
