"""One request of a conversation: its states, what it holds, and what it leaves to the history."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace as replace_struct

from omni_ws.audio.container import parse_audio_format
from omni_ws.core.chunks import (
    CHUNK_OVERHEAD_BYTES,
    AudioFormat,
    InputChunk,
    InputMode,
    Modality,
    OutputChunk,
    OutputModality,
    StartTrigger,
    ToolCall,
    Usage,
    WordsKnown,
    heard_language,
)
from omni_ws.core.history import MAX_SPEECH_BYTES, RUN_OVERHEAD_BYTES, TOKENS_PER_SEC, Message, Speech
from omni_ws.core.ledger import Ledger
from omni_ws.core.ledger_entry import LedgerEntry
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.core.request_input import Alignment, GenerationStarted, RequestInput, SavedRequestInput, TimestampOrder
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import (
    AnswerOptions,
    Cut,
    Finished,
    GenerationRequest,
    HeardLanguage,
    TranscriptGuess,
    TranscriptOutput,
    UsageMeter,
)
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import (
    ContinuedInput,
    EarlierParts,
)
from omni_ws.engine.threads import Lane, MediaRoom
from omni_ws.errors import OmniError, PayloadTooLarge
from omni_ws.service.conversation.onsets import (
    has_asked,
    is_stop_word,
)
from omni_ws.service.conversation.output_log import (
    MAX_TOOL_RESULTS,
    MAX_WAITING_CHUNKS,
    SavedError,
    message_cost,
)
from omni_ws.service.conversation.turn_words import TurnWords
from omni_ws.service.observing.observer import PlayerStatistics, RequestTimeline
from omni_ws.wire.session_config import SessionConfig, expected_text, outline, spoken_language, spoken_languages

if TYPE_CHECKING:
    from omni_ws.audio.sound_levels import SpeechLull
    from omni_ws.service.conversation.interrupted import HeldAnswer
    from omni_ws.service.conversation.onsets import Onset


log = logging.getLogger(__name__)


class RequestState(Enum):
    """The state of a request; see ``Request`` for the transitions."""

    #: Collects input; its start policy has not fired.
    OPEN = "open"
    #: Its policy has fired; earlier requests are answered first.
    WAITING = "waiting"
    #: The engine works on it.
    ANSWERING = "answering"
    #: Speech has interrupted the answer, and it is not known yet whether it had words.
    HELD = "held"
    #: The engine is done with frozen input, and the rest of the input has not ended.
    ANSWERED = "answered"
    #: ``error`` is known, and its final is not written yet.
    FAILED = "failed"
    #: Cancelled or interrupted, and its final is not written yet.
    CANCELLED = "cancelled"
    #: Its final is in the outbox.
    FINISHED = "finished"


#: States in which the answer is being made and sent.
ANSWERING_STATES: Final = frozenset({RequestState.ANSWERING, RequestState.ANSWERED})
_TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    RequestState.OPEN: frozenset(
        {RequestState.WAITING, RequestState.FAILED, RequestState.CANCELLED, RequestState.FINISHED}
    ),
    RequestState.WAITING: frozenset(
        {RequestState.ANSWERING, RequestState.FAILED, RequestState.CANCELLED, RequestState.FINISHED}
    ),
    RequestState.ANSWERING: frozenset(
        {RequestState.HELD, RequestState.ANSWERED, RequestState.FAILED, RequestState.CANCELLED, RequestState.FINISHED}
    ),
    RequestState.HELD: frozenset({RequestState.ANSWERING, RequestState.CANCELLED, RequestState.FINISHED}),
    RequestState.ANSWERED: frozenset({RequestState.FAILED, RequestState.CANCELLED, RequestState.FINISHED}),
    RequestState.FAILED: frozenset({RequestState.CANCELLED, RequestState.FINISHED}),
    RequestState.CANCELLED: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}

#: Input that may wait between the socket and the engine, in bytes; beyond it the socket is not read.
INPUT_QUEUE_BYTES: Final = 1 << 20

#: The overhead of waiting chunks is charged this many bytes in advance, so that not every chunk charges the budget.
_CHARGED_AT_ONCE: Final = 1024 * CHUNK_OVERHEAD_BYTES

#: Maps the name of a field of ``session_config`` to the name that the client used for it.
FieldNames: TypeAlias = Callable[[str | None], str | None]


def as_they_are(param: str | None) -> str | None:
    """Return ``param`` unchanged: the FieldNames of a client that writes ``session_config`` itself."""
    return param


class Remark(msgspec.Struct, frozen=True):
    """A sentence that is said unasked.

    ``language`` is a primary subtag of RFC 5646; None means the language of the voice. ``field`` is the field of
    ``session_config`` that has the text; None if the client did not write it.
    """

    text: str
    why: StartTrigger
    language: str | None = None
    field: str | None = None

    def name_of(self, param: str | None) -> str | None:
        """Return ``field`` in place of ``text``, an engine's name for its input: the remark is that input."""
        return self.field if param == "text" else param

    @property
    def kept(self) -> bool:
        """Whether the history keeps the remark. It keeps no filler, which would come between a call and its result."""
        return self.why is not StartTrigger.FILLER


class SavedRequest(msgspec.Struct, kw_only=True):
    """A request without a final, in a form that can be written to bytes. Its words are in the saved ledger."""

    request_id: str
    number: int
    config: SessionConfig
    options: AnswerOptions
    voice_named: bool = False
    by_speech: bool
    turn_id: str | None
    remark: Remark | None
    context: tuple[Message, ...] | None
    seen: tuple[Message, ...] | None
    #: The format of its audio; whether input after its start extends it; whether it starts only at its end if it has
    #: only tool results; and its input.
    audio: AudioFormat
    mode: InputMode
    results_wait: bool
    input: SavedRequestInput
    #: What triggered its start, and the number of that chunk; None before the start. The input that the engine was
    #: given since then, and whether that is all.
    trigger: StartTrigger | None
    started_by: int | None
    given: list[InputChunk]
    input_ended: bool
    announced: bool
    only_speech: bool
    spoke: bool
    words: WordsKnown
    unsent: list[TranscriptOutput]
    interim: TranscriptOutput | None
    #: Whether its answer was cut off; why it failed; its warnings.
    cancelled: bool
    error: SavedError | None
    warnings: list[SavedError]
    #: See Request.
    unknown_audio: tuple[int, ...] = ()
    #: See ``Request.text_end``.
    text_end: Finished | None = None
    barges_in: bool = False
    #: The input after ``given`` that still waits for its time.
    waiting: list[InputChunk] = []


@dataclass(slots=True, eq=False)
class Request:
    """One request, from the chunk that opened it to its final: its state, its input, and what it leaves to the history.

    ``config`` is the configuration in effect when it opened. The state changes through the methods below only; an
    illegal transition raises RuntimeError:

    =========  ==================================================================================
    OPEN       ``start`` → WAITING, ``fail`` → FAILED, ``cancel`` → CANCELLED
    WAITING    ``begin_answer`` → ANSWERING, ``fail`` → FAILED, ``cancel`` → CANCELLED
    ANSWERING  ``hold`` → HELD, ``await_rest_of_input`` → ANSWERED, ``fail`` → FAILED, ``cancel`` → CANCELLED
    HELD       ``go_on`` → ANSWERING, ``cancel`` → CANCELLED
    ANSWERED   ``fail`` → FAILED, ``cancel`` → CANCELLED
    FAILED     ``cancel`` → CANCELLED, which drops the error
    CANCELLED  ``cancel`` again changes nothing
    any        ``finish`` → FINISHED, which is final; the end of a session finishes requests in any state
    =========  ==================================================================================
    """

    request_id: str
    session: RequestInput
    config: SessionConfig
    timeline: RequestTimeline
    on_input_taken: Callable[[Request, float], None]
    ledger: Ledger
    media_room: MediaRoom
    lane: Lane = field(default_factory=Lane)
    options: AnswerOptions = field(default_factory=AnswerOptions)
    voice_named: bool = False  #: Whether the client chose the voice of ``config``.
    #: The name of the API key that the session was opened with.
    owner: str | None = None
    #: Whether its client is on this machine.
    near: bool = False
    #: The session's id; None if the session has this request alone.
    conversation: str | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    #: Its place in the order in which requests opened.
    number: int = 0
    #: Tells the engine that the answer is cut off, and only the transcription goes on.
    cut: Cut = field(default_factory=Cut)
    #: The audio of the input, for the history in case its words are not known; None if no later request needs it.
    speech: KeptSpeech | None = None
    field_names: FieldNames = as_they_are
    #: Told the words of its speech while that is being spoken; None without turn detection.
    turn_words: TurnWords | None = None
    #: The id of the speech turn that opened it, or joined it first.
    turn_id: str | None = None
    #: Whether it was neither cancelled nor has failed, so that an answer may come, or has come.
    answerable: bool = True
    #: What the server says unasked in the request, such as the greeting; None for every request of the client.
    remark: Remark | None = None
    #: What the engine sees in place of the history; None for the history.
    context: tuple[Message, ...] | None = None
    #: The history that it saw as its answer began; None before, and if the session is not to be saved.
    seen: tuple[Message, ...] | None = None
    #: Whether its input has been nothing but audio.
    only_speech: bool = True
    #: Whether there is audio in its input, and what is known of the words in it.
    spoke: bool = False
    words: WordsKnown = WordsKnown.NOT_YET
    #: Whether the answer waits for earlier requests to send theirs: nothing of it is written meanwhile.
    held_back: bool = False
    #: Whether the answer is still to be announced to the client, as the engine has the request; and whether it was.
    unannounced: bool = False
    announced: bool = False
    #: The input that the engine was given, to be given again after a restore; None if the session is not to be saved.
    given: list[InputChunk] | None = None
    #: Whether another server has begun the answer, so that the engine goes on with it.
    restored: bool = False
    #: The numbers of audio outputs that the client has received from another server, and that are not in the log; see
    #: ``await_unknown``.
    unknown_audio: tuple[int, ...] = ()
    #: How the text of a spoken answer ended, if the engine has told all of it, and goes on to speak.
    text_end: Finished | None = None
    state: RequestState = RequestState.OPEN
    #: Whether the state is ANSWERING or ANSWERED. Read for each chunk.
    answering: bool = False
    #: Whether ``answering``, not ``held_back``, and sure to be a request. Read for each output.
    may_write: bool = False
    #: The uncertain onset that opened it, until that is confirmed: nobody is told of the request before.
    onset: Onset | None = None
    #: The answer that it has interrupted, if that was held; and what is measured of its speech over an answer.
    holds: HeldAnswer | None = None
    lull: SpeechLull | None = None
    #: Whether its speech has interrupted an answer by ``duck`` or ``interrupt_resume``: a mere "stop" has no answer.
    barges_in: bool = False
    #: What fired the start policy; None before.
    started: GenerationStarted | None = None
    #: Why there is no whole answer. Set with FAILED, and still known when the request has FINISHED.
    error: OmniError | None = None
    #: Failures of parts of the engine that the answer goes on without.
    warnings: list[OmniError] = field(default_factory=list)
    #: Input that the engine has not taken.
    input: Channel[InputChunk] = field(init=False)
    input_ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set while nothing is held or held back.
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    #: Called when its words are known.
    _on_words: list[Callable[[], None]] = field(default_factory=list)
    #: Its entry in the ledger: what the user said, and what was sent and heard of the answer.
    entry: LedgerEntry = field(init=False)
    #: Settled transcripts that were not sent yet.
    unsent: list[TranscriptOutput] = field(default_factory=list)
    #: The latest transcript, while it is interim.
    interim: TranscriptOutput | None = None
    #: Whether the request has entered the history.
    remembered: bool = False
    #: The charge for what it holds besides the bytes that the stream counts; None while that is little.
    share: Share | None = None
    #: Orders the input after the start by timestamps; None if it stays in the order of arrival.
    _order: TimestampOrder | None = None
    _order_timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        detection = self.config.turn_detection
        resumable = detection is not None and detection.interrupt_resume
        speaks, writes = ("audio" in self.config.modalities), ("text" in self.config.modalities)
        self.entry = self.ledger.open(self.request_id, speaks=speaks, writes=writes, resumable=resumable)
        self.input = Channel(INPUT_QUEUE_BYTES, cost=_payload_bytes, on_take=partial(self.on_input_taken, self))

    @property
    def ref(self) -> str | None:
        """The client's name for the request; None as long as no chunk has brought one."""
        return self.session.ref

    @property
    def speaks(self) -> bool:
        """Whether the user may still be speaking: speech has opened or joined the request, and its input is open."""
        return self.turn_id is not None and self.session.input_open

    # state

    @property
    def is_frozen(self) -> bool:
        """Whether the engine has all the input that it will get; later input is only counted (InputMode.SNAPSHOT)."""
        return self.started is not None and self.session.settings.mode is InputMode.SNAPSHOT

    @property
    def tells(self) -> bool:
        """Whether the request is a telling: its prompt is no message of the user."""
        return self.started is not None and self.started.trigger is StartTrigger.TELLING

    def start(self, event: GenerationStarted) -> None:
        """Give the input to the engine's queue, as the start policy has fired. The request is WAITING then."""
        self._set_state(RequestState.WAITING)
        self.started = event
        for chunk in event.chunks:
            self.append(chunk)
        if self.is_frozen:
            self.input.close()
        else:
            self._begin_order(event.chunks)

    def _begin_order(self, before: Iterable[InputChunk]) -> None:
        """Order the input after the chunks ``before`` by timestamps, if that is configured."""
        settings = self.session.settings
        if settings.alignment is Alignment.TIMESTAMP and settings.alignment_window_ms:
            self._order = TimestampOrder(settings.alignment_window_ms, before)

    def begin_answer(self, *, held_back: bool = False) -> None:
        """Note that the engine now gets the request. ``held_back``: see ``hold_back``."""
        self.held_back = held_back
        self._set_state(RequestState.ANSWERING)

    def hold_back(self) -> None:
        """Send nothing of the answer until ``let_speak``: finals or words of earlier requests must come first."""
        self.held_back = True
        self._note_silence()

    def let_speak(self) -> None:
        """Let the answer be sent: nothing of earlier requests must come first any more."""
        self.held_back = False
        self._note_silence()

    def hold(self, withdrawn: Sequence[OutputChunk]) -> None:
        """Hold the answer, which speech interrupts: until ``go_on`` nothing of the answer is sent, and it does not end.

        ``withdrawn`` are the latest outputs of the answer, which were taken back from the outbox.
        """
        self._set_state(RequestState.HELD)
        self.ledger.hold(self.entry, withdrawn, cost=sum(map(message_cost, withdrawn)), now=self.timeline.now())

    def go_on(self) -> list[OutputChunk]:
        """Let a held answer go on, as the speech had no words.

        Returns the withdrawn outputs to send first, not renumbered.
        """
        self._set_state(RequestState.ANSWERING)
        return self.ledger.go_on(self.entry, self.timeline.now())

    def is_aside(self, onset: Onset) -> None:
        """Note that an uncertain onset has opened the request: nothing of it is sent until ``is_sure``."""
        self.onset = onset
        self._note_silence()

    def is_sure(self) -> None:
        """Note that the onset is confirmed: from now on this is a request like any other."""
        self.onset, self.barges_in = None, True
        self._note_silence()

    def interrupt_held(self, held: HeldAnswer) -> None:
        """Note that the speech of this request has interrupted another answer, which is held."""
        self.holds, self.barges_in = held, True

    def note_lull(self, lull: SpeechLull | None) -> None:
        """Note the measurements of this request's speech over an answer. None: the voice goes on after a lull."""
        self.lull = lull

    def withdraw(self) -> None:
        """Withdraw the request, as its onset was no turn: it leaves nothing behind. ``release`` must follow."""
        self.onset, self.answerable = None, False
        self._set_state(RequestState.FINISHED)
        self.session.cancel()
        self.ledger.withdraw(self.request_id)
        self.timeline.mark_withdrawn()

    @property
    def silent(self) -> bool:
        """Whether the answer must neither be sent nor end for now: it is held, held back, or its onset is uncertain."""
        held = self.held_back or self.onset is not None or self.state is RequestState.HELD
        return held and not self.cut.made

    async def released(self) -> None:
        """Wait until the answer is not ``silent``."""
        while self.silent:
            await self._released.wait()

    def await_rest_of_input(self) -> None:
        """Note that the engine has answered frozen input, while the rest of the input still arrives."""
        self._set_state(RequestState.ANSWERED)

    def fail(self, error: OmniError) -> None:
        """Note the error that ends the answer early. ``finish`` must follow, immediately or in the queue's order."""
        self._set_state(RequestState.FAILED)
        self.error, self.answerable = error, False

    def cancel(self, *, by: Request | None = None) -> None:
        """Cancel the request, and drop its input and error. ``by`` is the request that interrupts it; None without one.

        ``finish`` must follow, immediately or in the order of the queue.
        """
        if self.state is RequestState.CANCELLED:
            return
        self.timeline.mark_cancelled(None if by is None else by.timeline)
        self._set_state(RequestState.CANCELLED)
        self.ledger.cut(self.entry, self.timeline.now(), unheard=by is not None and by.timeline.by_speech)
        self.error, self.answerable = None, False
        self.session.cancel()

    def hear_on(self) -> None:
        """Cut the answer off, and let the engine transcribe the rest of the speech. ``know_words`` must follow."""
        self.cut.make()
        self.end_input()
        self._note_silence()

    def finish(self) -> None:
        """Note that the final is in the outbox. ``release`` must follow: now, or once the turn is transcribed."""
        self._set_state(RequestState.FINISHED)

    def release(self) -> None:
        """Release the memory and timers of the request. Idempotent."""
        self.input.discard()
        if self.share is not None:
            self.share.resize(0)
        self._order = None
        self._align()
        self.meter = UsageMeter()  # as the old one may refer to the engine's work
        if self.speech is not None:
            self.speech.release()

    def _set_state(self, state: RequestState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"illegal transition from {self.state.name} to {state.name}")
        self.state = state
        self.answering = state in ANSWERING_STATES
        self._note_silence()

    def _note_silence(self) -> None:
        self.may_write = self.answering and not self.held_back and self.onset is None
        if self.silent:
            self._released.clear()
        else:
            self._released.set()

    # saved

    def saved(self) -> SavedRequest:
        """Return what another server needs to answer the request. A held answer is saved as an interrupted one."""
        started = self.started
        return SavedRequest(
            request_id=self.request_id,
            number=self.number,
            config=self.config,
            options=self.options,
            voice_named=self.voice_named,
            by_speech=self.timeline.by_speech,
            turn_id=self.turn_id,
            remark=self.remark,
            context=self.context,
            seen=self.seen,
            audio=self.session.settings.audio,
            mode=self.session.settings.mode,
            results_wait=self.session.settings.results_wait,
            input=self.session.saved(),
            trigger=None if started is None else started.trigger,
            started_by=None if started is None else started.sequence_id,
            given=self.given or [],
            input_ended=self.input_ended.is_set(),
            announced=self.announced,
            only_speech=self.only_speech,
            spoke=self.spoke,
            words=self.words,
            unsent=self.unsent,
            interim=self.interim,
            cancelled=self.state in (RequestState.CANCELLED, RequestState.HELD),
            error=None if self.error is None else SavedError.of(self.error),
            warnings=list(map(SavedError.of, self.warnings)),
            unknown_audio=self.unknown_audio,
            text_end=self.text_end,
            barges_in=self.barges_in,
            waiting=[] if self._order is None else self._order.waiting,
        )

    def restore(self, saved: SavedRequest) -> int:
        """Take over the state of a saved request, whose answer goes on here.

        Returns the bytes of input that wait for the engine. Raises LookupError for an error that this server does not
        know.
        """
        self.number, self.turn_id, self.remark = saved.number, saved.turn_id, saved.remark
        self.context, self.seen, self.words = saved.context, saved.seen, saved.words
        self.only_speech, self.spoke, self.voice_named = saved.only_speech, saved.spoke, saved.voice_named
        self.unsent, self.interim, self.announced = saved.unsent, saved.interim, saved.announced
        self.unknown_audio, self.barges_in = saved.unknown_audio, saved.barges_in
        self.warnings, self.text_end = [one.restored() for one in saved.warnings], saved.text_end
        self.given, self.restored, self.timeline.times.moved = [*saved.given], True, True
        if saved.trigger is not None:
            self._set_state(RequestState.WAITING)
            self.started = GenerationStarted(saved.trigger, saved.started_by, ())
            for chunk in saved.given:
                self.input.put_nowait(chunk)
                if self.speech is not None and chunk.modality is Modality.AUDIO:
                    self.speech.append(chunk)
            if saved.input_ended or self.is_frozen:
                self.input.close()
            else:
                self._begin_order(saved.given)
            for chunk in saved.waiting:
                self.extend(chunk)
        if saved.input_ended:
            self.input_ended.set()
        if saved.error is not None:
            self.fail(saved.error.restored())
        elif saved.cancelled:
            self._set_state(RequestState.CANCELLED)
            self.answerable = False
            self.ledger.cut(self.entry, self.timeline.now())  # it may have been held
            self.know_words(WordsKnown.NEVER)
        return sum(len(chunk.payload) for chunk in (*saved.given, *saved.waiting, *saved.input.buffered))

    # notes of what happens to it

    def numbered(self, number: int) -> None:
        """Note the request's place in the order in which requests opened."""
        self.number = number

    def is_whole(self, *, input_kept: bool, answer_kept: bool, context: tuple[Message, ...] | None) -> None:
        """Note that the input is complete from the start.

        ``input_kept``, ``answer_kept``: whether the history keeps the input, and the answer. ``context`` is what the
        engine sees in place of the history.
        """
        kept = {"user": input_kept, "assistant": answer_kept}
        self.entry.leave_out([role for role in kept if not kept[role]])
        self.context = context

    def see(self, history: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the history for the answer: ``history``, or the history with which another server began the answer.

        If sessions are saved, the request keeps the history that it sees, as that of the conversation may change while
        the answer is made.
        """
        if self.given is None:
            return history
        self.seen = self.seen if self.seen is not None else history
        return self.seen

    def say_unasked(self, remark: Remark) -> GenerationStarted:
        """Turn a newly opened request into a remark of the server, start it, and return the start event."""
        self.remark, self.field_names = remark, remark.name_of
        started = GenerationStarted(remark.why, None, ())
        self.start(started)
        self.input_ended.set()
        return started

    def note_text_end(self, finished: Finished) -> None:
        """Note that the engine has written all of the text of a spoken answer."""
        self.text_end = finished

    def await_unknown(self, numbers: Iterable[int]) -> None:
        """Note the numbers of audio outputs that another server sent, and that the saved output log does not have.

        The next audio outputs that this server makes get these numbers.
        """
        self.unknown_audio += tuple(numbers)

    def take_unknown(self) -> int:
        """Remove and return the first of the output numbers that ``await_unknown`` has noted."""
        number, *rest = self.unknown_audio
        self.unknown_audio = tuple(rest)
        return number

    def to_announce(self) -> None:
        """Note that the answer is to be announced now, unless it has been: the engine has the request."""
        self.unannounced = not self.announced

    def note_announced(self) -> None:
        """Note that the answer was announced to the client."""
        self.unannounced, self.announced = False, True

    def joined_by(self, turn_id: str) -> None:
        """Note that a speech turn has opened or joined the request; only the first turn counts."""
        self.turn_id = self.turn_id or turn_id

    def outline(self) -> None:
        """Shorten the configuration, which may be long: the ended request stays in memory for a while."""
        self.config = outline(self.config)

    def take_unsent(self) -> list[TranscriptOutput]:
        """Return the settled transcripts that were not sent to the client, and forget them."""
        unsent, self.unsent = self.unsent, []
        return unsent

    # what was said in it

    @property
    def sees_history(self) -> bool:
        """Whether the engine sees the history that earlier requests of the session have left."""
        return self.config.history and self.context is None and self.conversation is not None

    @property
    def words_known(self) -> bool:
        """Whether the transcription of its speech has ended."""
        return not self.spoke or self.words is not WordsKnown.NOT_YET

    def know_words(self, words: WordsKnown) -> None:
        """Note that transcription has ended, and which words are known. Only the first call has an effect."""
        if self.words is WordsKnown.NOT_YET:
            self.words = words
            self._tell_words()

    def note_remembered(self) -> None:
        """Note that the request has entered the history."""
        self.remembered = True
        self._tell_words()

    @property
    def question_known(self) -> bool:
        """Whether ``question`` no longer changes.

        If the answer is cut off, that is so once the request is in the history.
        """
        return self.words_known and (self.remembered or not self.cut.made)

    def _tell_words(self) -> None:
        if self.question_known:
            called, self._on_words = self._on_words, []
            for call in called:
                call()

    def when_question_known(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when ``question_known`` becomes true."""
        self._on_words.append(call)

    async def until_question_known(self) -> None:
        """Wait until ``question_known``."""
        if not self.question_known:
            known = asyncio.Event()
            self.when_question_known(known.set)
            await known.wait()

    def hear(self, transcript: TranscriptOutput) -> None:
        """Note a transcript of the input from the engine."""
        if transcript.interim:
            self.interim = transcript
            return
        self.interim = None
        self.ledger.hear(self.entry, transcript.text, language=self.language_of(transcript))
        self.unsent.append(transcript)

    def language_of(self, words: TranscriptOutput | TranscriptGuess) -> str | None:
        """Return the language of recognised words: the one that was heard, or the one that the client named."""
        return heard_language(words.hearing) or spoken_language(self.config.input_audio)

    @property
    def wants_silence(self) -> bool:
        """Whether the request is speech that interrupted an answer, and all its words only mean "stop"."""
        if not self.barges_in or not self.only_speech:
            return False
        language = self.entry.language or spoken_language(self.config.input_audio)
        return is_stop_word(self.entry.heard.joined(), language or "en")

    def settle(self) -> None:
        """Settle the interim transcript, if there is one: no better transcript follows."""
        if self.interim is not None:
            self.hear(replace_struct(self.interim, interim=False))

    def interrupts(self, *, by_speech: bool) -> bool:
        """Return whether the request interrupts earlier ones as it opens. ``by_speech``: detected speech opens it."""
        detection = self.config.turn_detection
        spares = by_speech and detection is not None and not detection.interrupt_response
        return self.config.overlap == "interrupt" and not spares

    # input

    def keep_speech(self, *, supported: bool) -> None:
        """Keep the audio of the input for the history. ``supported``: the engine accepts speech in its history."""
        unwanted = None if supported else "the engine does not support speech in its history"
        self.speech = KeptSpeech.of(self.ledger, self.session.settings.audio, unwanted=unwanted)

    def append(self, chunk: InputChunk) -> None:
        """Queue a chunk for the engine. It is dropped if the input was frozen at the start, or has ended."""
        if self.input.closed:
            return
        if self.given is not None:
            self.given.append(chunk)
        self.only_speech = self.only_speech and (chunk.modality is Modality.AUDIO or not chunk.has_content)
        if chunk.modality is Modality.TEXT:
            self.entry.take_text(chunk.payload, chunk.tool_call_id)
        elif chunk.modality is Modality.AUDIO:
            self.spoke = self.spoke or bool(chunk.payload)
            if self.speech is not None:
                self.speech.append(chunk)
        self.input.put_nowait(chunk)

    def extend(self, chunk: InputChunk) -> None:
        """Queue a chunk that arrived after the start.

        If chunks have timestamps, it is queued when its time has come.
        """
        if self._order is None:
            self.append(chunk)
        else:
            self._align(self._order.put(chunk, now=asyncio.get_running_loop().time()))

    def end_input(self) -> None:
        """End the input, and queue the chunks that still wait for their time."""
        if self._order is not None:
            self._align(self._order.take_all())
        self.input.close()
        self.input_ended.set()

    def _align(self, passed: Sequence[InputChunk] = ()) -> None:
        """Queue the chunks ``passed``, and set the timer for the next chunk that waits for its time."""
        for chunk in passed:
            self.append(chunk)
        if self._order_timer is not None:
            self._order_timer.cancel()
        due = None if self._order is None else self._order.get_timer()
        self._order_timer = None if due is None else asyncio.get_running_loop().call_at(due, self._on_order_timer, due)

    def _on_order_timer(self, due: float) -> None:
        if self._order is not None:
            # Loops round: a timer may fire a little early.
            self._align(self._order.handle_timer(now=max(due, asyncio.get_running_loop().time())))
            self.on_input_taken(self, 0)  # the input may have been full only with what waited here

    @property
    def queued_bytes(self) -> float:
        """Bytes of input between the socket and the engine."""
        return self.input.queued if self._order is None else self.input.queued + self._order.held_bytes

    @property
    def input_full(self) -> bool:
        """Whether no more input should be read from the socket."""
        return self.input.full or (self._order is not None and self.queued_bytes >= INPUT_QUEUE_BYTES)

    @property
    def waiting_chunks(self) -> int:
        """The number of chunks that the engine has not read."""
        if self.started is None:
            return self.session.received.chunks
        return self.input.items + (0 if self._order is None else len(self._order))

    def check_held(self) -> None:
        """Charge the overhead of waiting chunks.

        Raises PayloadTooLarge if there are too many chunks or tool results, and what ``charge`` raises.
        """
        received, most = self.session.received, MAX_WAITING_CHUNKS
        if received.tool_results > MAX_TOOL_RESULTS:
            raise PayloadTooLarge(f"a request may have at most {MAX_TOOL_RESULTS} tool results")
        if received.chunks > most and self.waiting_chunks > most:
            raise PayloadTooLarge(f"more than {most} chunks are waiting for the engine; send more slowly")
        # Chunks may be tiny. Counted by the thousand, since this runs for each chunk of a long stream.
        held = 0 if self.share is None else self.share.size
        waiting = self.waiting_chunks * CHUNK_OVERHEAD_BYTES
        if waiting > held or held > 2 * waiting + _CHARGED_AT_ONCE:
            self.charge(waiting + _CHARGED_AT_ONCE)

    def charge(self, size: int) -> None:
        """Set to ``size`` the bytes charged for what the request holds besides its input in the stream.

        Raises PayloadTooLarge and EngineOverloaded.
        """
        self.share = self.share or Share(self.ledger.history.budget)
        self.share.resize(size)

    # what was said

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that were sent to the client, in the order in which they began."""
        return self.entry.tool_calls

    @property
    def question(self) -> Message:
        """The user's message of this request, as far as its words are known."""
        return self.ledger.question(self.entry)

    @property
    def leaves_answer(self) -> bool:
        """Whether the history would keep anything besides the user's words if the answer was cut off now."""
        return self.ledger.leaves_answer(self.entry, self.timeline.now())

    @property
    def asks(self) -> bool:
        """Whether the last sentence that the user has heard of the answer is a question."""
        return has_asked(self.ledger, self.entry, self.timeline.now())

    @property
    def player(self) -> PlayerStatistics:
        """Statistics of how well the client's playback of the answer kept up."""
        return PlayerStatistics(self.entry.underruns, self.entry.underrun_sec, self.entry.least_lead_ms)

    def enter_history(self, *, whole: bool, audio_ms: float = 0) -> None:
        """Enter the history. Call this once, as it hands over the kept speech.

        ``whole``: the engine ended the answer itself. ``audio_ms`` is the length of the input audio as the engine
        decoded it; 0 if the engine did not report it.
        """
        entry, kept, speech, unknown = self.entry, self.speech, None, False
        if entry.input_kept and self.spoke and self.words is not WordsKnown.ALL and kept is not None and kept.began:
            speech = kept.hand_over(audio_ms=audio_ms)
            if speech is None and not entry.heard.length:
                unknown = True
                log.warning("request %s: speech dropped from the history: %s", self.request_id, kept.lost)
        cancelled = self.state is RequestState.CANCELLED or entry.cut_ms is not None or self.error is not None
        self.ledger.finish(entry, whole=whole, cancelled=cancelled, speech=speech, words_unknown=unknown)

    def due_ms(self, start_ms: float) -> float:
        """Return the milliseconds until the client plays the audio at ``start_ms`` of the answer."""
        return self.ledger.due_ms(self.entry, start_ms, self.timeline.now())

    # the engine

    def generation_request(
        self,
        history: tuple[Message, ...],
        *,
        earlier: EarlierParts | None = None,
        warn: Callable[[OmniError], None] = lambda error: None,
    ) -> GenerationRequest:
        """Return the GenerationRequest for the engine.

        The engine sees ``history``, and the user's message begins with ``earlier``. The engine calls ``warn`` with the
        error of a part of the input that it goes on without.
        """
        config, settings = self.config, self.session.settings
        sampling = config.sampling
        language = spoken_language(config.input_audio)
        return GenerationRequest(
            request_id=self.request_id,
            task=config.task,
            input=self.input if earlier is None else ContinuedInput(earlier, self.input),
            input_mode=settings.mode,
            input_audio=settings.audio,
            modalities=frozenset(OutputModality(name) for name in config.modalities),
            # A session that survives goes on with the text, even if that is never sent or kept.
            remembered=(self.conversation is not None and self.entry.answer_kept) or self.given is not None,
            language=language,
            languages=spoken_languages(config.input_audio),
            heard_language=HeardLanguage(language or self.ledger.language),
            expected=expected_text(config.input_audio),
            voice=config.voice,
            voice_named=self.voice_named,
            speed=config.speed,
            lexicon=config.tts.lexicon,
            instructions=config.instructions,
            history=history,
            sampling={
                name: value for name in sampling.__struct_fields__ if (value := getattr(sampling, name)) is not None
            },
            stage_sampling=config.stage_sampling,
            stage_params=config.stage_params,
            tools=tuple(map(as_engines_know_it, config.tools)),
            tool_choice=config.tool_choice,
            options=self.options if self.turn_words is None else replace(self.options, transcript_guesses=True),
            owner=self.owner,
            without_audio=self.without_audio,
            near=self.near,
            conversation=self.conversation,
            meter=self.meter,
            cut=self.cut,
            times=self.timeline.times,
            media_room=self.media_room,
            lane=self.lane,
            warn=warn,
        )

    @property
    def without_audio(self) -> bool:
        """Whether the request is the only one of its session (HTTP), and its whole input has come, without audio."""
        if self.conversation is not None or self.spoke or self.session.input_open:
            return False
        return not self.session.received.has_audio

    @property
    def input_usage(self) -> Usage:
        """The usage of an answer for which nothing was generated."""
        return Usage(input_audio_ms=round(self.session.received.audio_ms))

    def usage(self, reported: Usage | None) -> Usage:
        """Return the usage for the final.

        ``reported`` is the usage that the engine gave with its own end; None if the answer was cut short. Then the
        engine's meter is read; if it has nothing, the words of the input and of the output are counted.
        """
        audio_ms = reported.input_audio_ms if reported is not None else round(self.session.received.audio_ms)
        reported = (
            reported
            or self.meter.read()
            or Usage(input_tokens=count_words(self.entry.user_text), output_tokens=count_words(self.entry.answer_text))
        )
        return replace(
            reported,
            input_audio_ms=audio_ms,
            output_audio_ms=round(self.entry.sent_ms),
            input_after_start_bytes=self.session.bytes_after_start,
        )


def as_engines_know_it(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool without its field ``async``: only sessions know that field, and a model's server may refuse it."""
    return {name: value for name, value in tool.items() if name != "async"} if "async" in tool else tool


def _payload_bytes(chunk: InputChunk) -> float:
    return len(chunk.payload)


# KeptSpeech: the audio of one request, kept for the history until its words are known.


#: Charged for each chunk of a run besides its bytes, until the run is joined.
SPEECH_OVERHEAD_BYTES: Final = 64


class KeptSpeech:
    """The audio of one request's input, kept for the history until its words are known.

    ``audio`` is the format of chunks that name none. The kept bytes are charged to ``budget``, of which they may fill
    half: the rest is for input that the engine has not read.
    """

    def __init__(self, audio: AudioFormat, budget: ByteBudget, *, max_tokens: int, unwanted: str | None = None) -> None:
        """``unwanted`` is the reason why no audio can be kept, if that is known before any has arrived."""
        #: Whether there was any audio.
        self.began = False
        #: Why it is not kept; None while it is.
        self.lost = unwanted
        self._audio = audio
        self._bytes_per_ms = audio.bytes_per_second / 1000
        self._budget = budget
        self._max_tokens = max_tokens
        self._audio_ms = 0.0
        self._charged = 0
        #: Neighbouring chunks of one format are one run. They are joined once: a buffer that grows would be copied
        #: again and again while somebody speaks.
        self._runs: list[tuple[str | None, list[bytes]]] = []

    @classmethod
    def of(cls, ledger: Ledger, audio: AudioFormat, *, unwanted: str | None) -> KeptSpeech | None:
        """Return an object that keeps the speech of one request; None if the ledger keeps no history.

        ``unwanted`` is the reason why no audio can be kept, if that is known already.
        """
        history = ledger.history
        if not history.max_tokens:
            return None
        return cls(audio, history.budget, max_tokens=history.max_tokens, unwanted=unwanted)

    def append(self, chunk: InputChunk) -> None:
        payload = chunk.payload
        self.began = self.began or bool(payload)
        if self.lost is not None or not payload:
            return
        continues = bool(self._runs) and self._runs[-1][0] == chunk.format
        cost = len(payload) + SPEECH_OVERHEAD_BYTES + (0 if continues else RUN_OVERHEAD_BYTES)
        if chunk.format is None:
            self._audio_ms += len(payload) / self._bytes_per_ms
        else:
            self._audio_ms += parse_audio_format(chunk.format, self._audio).duration_ms(len(payload))
        if self._audio_ms * TOKENS_PER_SEC > self._max_tokens * 1000 or self._charged + cost > MAX_SPEECH_BYTES:
            self._lose("it exceeds the history's token limit")
        elif self._budget.over_half(cost):
            self._lose("the server's memory for speech is full")
        else:
            self._budget.take(cost)
            self._charged += cost
            if not continues:
                self._runs.append((chunk.format, []))
            self._runs[-1][1].append(payload)

    def hand_over(self, *, audio_ms: float) -> Speech | None:
        """Return the kept audio, and keep it no longer; None if it was lost.

        The caller then owes ``Speech.held_bytes`` to the budget. ``audio_ms`` is the length as the engine decoded it; 0
        if that is not known.
        """
        if audio_ms * TOKENS_PER_SEC > self._max_tokens * 1000:
            self._lose("it exceeds the history's token limit")
        if self.lost is not None:
            return None
        chunks = tuple(InputChunk(Modality.AUDIO, b"".join(run), format=name) for name, run in self._runs)
        speech = Speech(chunks, self._audio, max(self._audio_ms, audio_ms))
        self._charged -= speech.held_bytes
        self._lose("it was passed on")
        return speech

    def release(self) -> None:
        """Drop the kept audio, and refund its bytes. Idempotent."""
        self._lose("it was released")

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._runs.clear()
        self._budget.give(self._charged)
        self._charged = 0
