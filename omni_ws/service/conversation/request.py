"""Request: one request of a conversation, its state machine and what it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from msgspec.structs import replace as replace_struct

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality, ToolCall, ToolCallFragment, Usage, Word
from omni_ws.core.output import OutputChunk, WordsKnown
from omni_ws.core.request_input import GenerationStarted, RequestInput
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import (
    NO_SINK,
    WORDS_UNKNOWN,
    AnswerOptions,
    Cut,
    GenerationRequest,
    Message,
    OutputSink,
    TranscriptOutput,
    UsageMeter,
)
from omni_ws.engine.channel import Channel
from omni_ws.engine.continued_input import ContinuedInput, EarlierParts
from omni_ws.engine.media_room import MediaRoom
from omni_ws.errors import OmniError, PayloadTooLarge
from omni_ws.service.conversation.acknowledgements import asks
from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.kept_speech import KeptSpeech
from omni_ws.service.conversation.kept_text import MAX_KEPT_TEXT, KeptText, SentCalls
from omni_ws.service.conversation.limits import MAX_TOOL_RESULTS, MAX_WAITING_CHUNKS
from omni_ws.service.conversation.playback import Playback, heard_part
from omni_ws.service.conversation.request_state import ANSWERING_STATES, RequestState
from omni_ws.service.conversation.unheard_output import UnheardOutput
from omni_ws.service.observing.timeline import RequestTimeline
from omni_ws.wire.server_frames import ResponseStartedFrame
from omni_ws.wire.session_config import SessionConfig, spoken_language

log = logging.getLogger(__name__)

#: Input that may wait between the socket and the engine, in bytes; beyond it the socket is not read.
INPUT_QUEUE_BYTES: Final = 1 << 20

#: Maps the name of a field of ``session_config`` to the name that the client used for it.
FieldNames: TypeAlias = Callable[[str | None], str | None]


def as_they_are(param: str | None) -> str | None:
    """The names of a client that writes ``session_config`` itself."""
    return param


@dataclass(slots=True, eq=False)
class Request:
    """One request, from the chunk that opened it to its final: its state, its input, and what it leaves behind.

    ``config`` is the configuration in effect when it opened. The state changes through the methods below only; an
    illegal transition raises RuntimeError:

    =========  ==================================================================================
    OPEN       ``start`` → WAITING, ``fail`` → FAILED, ``cancel`` → CANCELLED
    WAITING    ``begin_answer`` → ANSWERING, ``fail`` → FAILED, ``cancel`` → CANCELLED
    ANSWERING  ``hold`` → HELD, ``await_rest_of_input`` → ANSWERED, ``fail`` → FAILED, ``cancel`` → CANCELLED
    HELD       ``go_on`` → ANSWERING, ``cancel`` → CANCELLED
    ANSWERED   ``cancel`` → CANCELLED
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
    playback: Playback
    media_room: MediaRoom
    options: AnswerOptions = field(default_factory=AnswerOptions)
    #: The name of the API key that the session was opened with.
    owner: str | None = None
    #: The session's id; None where it has this request alone.
    conversation: str | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    #: Its place in the order in which requests opened.
    number: int = 0
    #: Made where its answer is cut off, and the engine goes on with what was said.
    cut: Cut = field(default_factory=Cut)
    #: The audio of the input, for the history where its words are not known; None where no later request needs it.
    speech: KeptSpeech | None = None
    field_names: FieldNames = as_they_are
    #: The text of the answer where it is the greeting; empty for every request of the client.
    greeting: str = ""
    #: Whether the history keeps its input, and its answer.
    input_kept: bool = True
    answer_kept: bool = True
    #: What the engine sees in place of the history; None for the history.
    context: tuple[Message, ...] | None = None
    #: What was sent and not heard; None where speech that interrupts always ends the answer.
    unheard_output: UnheardOutput | None = None
    #: Whether its input has been nothing but audio.
    only_speech: bool = True
    #: Whether there is audio in its input, and what is known of the words in it.
    spoke: bool = False
    words: WordsKnown = WordsKnown.NOT_YET
    #: Whether what earlier requests have to say comes first: nothing of this one is written meanwhile.
    held_back: bool = False
    #: Announces its answer, while that is held back.
    announcement: ResponseStartedFrame | None = None
    state: RequestState = RequestState.OPEN
    #: Whether the state is ANSWERING or ANSWERED. Read for each chunk.
    answering: bool = False
    #: Whether it is, and not held back. Read for each output.
    may_write: bool = False
    #: What fired the start policy; None before.
    started: GenerationStarted | None = None
    #: Why there is no whole answer. Set with FAILED, and still known when the request has FINISHED.
    error: OmniError | None = None
    #: Whether the speaker went on before there was anything to hear of the answer.
    unheard: bool = False
    #: Failures of parts of the engine that the answer goes on without.
    warnings: list[OmniError] = field(default_factory=list)
    #: Input that the engine has not taken.
    input: Channel[InputChunk] = field(init=False)
    input_ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set while nothing is held or held back.
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    #: Called when its words are known.
    _on_words: list[Callable[[], None]] = field(default_factory=list)
    #: Text of the input, as much of it as a history can use.
    typed: bytearray = field(default_factory=bytearray)
    #: Transcripts of the input that are settled.
    heard: KeptText = field(default_factory=KeptText)
    #: Those of them that were not sent yet.
    unsent: list[TranscriptOutput] = field(default_factory=list)
    #: The latest transcript, while it is interim.
    interim: TranscriptOutput | None = None
    #: Whether the history has what it leaves, and what that is for the user.
    remembered: bool = False
    asked: Message | None = None
    #: Text of the answer that was sent.
    said: KeptText = field(default_factory=KeptText)
    #: Results of tools in the input, by the id of the call.
    tool_results: dict[str, bytearray] = field(default_factory=dict)
    #: Words of the audio that was sent, where the engine reports them.
    spoken: list[Word] = field(default_factory=list)
    #: Words of audio that was withdrawn as the answer was held.
    _unspoken: tuple[Word, ...] = ()
    #: Bytes of typed text and results of tools that may still be kept.
    _text_room: int = MAX_KEPT_TEXT
    #: Tool calls that were sent.
    _calls: SentCalls = field(default_factory=SentCalls)

    def __post_init__(self) -> None:
        self.input = Channel(INPUT_QUEUE_BYTES, cost=_payload_bytes, on_take=partial(self.on_input_taken, self))

    # state

    @property
    def is_frozen(self) -> bool:
        """Whether the engine has all the input it will get; what follows is only counted (InputMode.SNAPSHOT)."""
        return self.started is not None and self.session.settings.mode is InputMode.SNAPSHOT

    def start(self, event: GenerationStarted) -> None:
        """The start policy has fired: hand the input over to the engine's queue, and wait for the engine."""
        self._set_state(RequestState.WAITING)
        self.started = event
        for chunk in event.chunks:
            self.append(chunk)
        if self.is_frozen:
            self.input.close()

    def begin_answer(self, *, held_back: bool = False) -> None:
        """The engine gets the request."""
        self.held_back = held_back
        self._set_state(RequestState.ANSWERING)

    def hold_back(self) -> None:
        """Something comes before what it has to say."""
        self.held_back = True
        self._note_silence()

    def let_speak(self) -> None:
        """Nothing comes before it any more."""
        self.held_back = False
        self._note_silence()

    def hold(self, withdrawn: Sequence[OutputChunk]) -> None:
        """Speech interrupts the answer, which may go on: nothing of it is sent meanwhile, and it does not end.

        ``withdrawn`` are outputs, the latest of the answer, that were taken back from the outbox.
        """
        assert self.unheard_output is not None
        self._set_state(RequestState.HELD)
        self.playback.hold()
        self.unheard_output.set_aside(withdrawn)
        spoken = tuple(self.spoken)
        self.withdrawn(withdrawn)
        self._unspoken = spoken[len(self.spoken) :]

    def go_on(self) -> list[OutputChunk]:
        """The speech had no words. Returns what has to be sent first, numbered as it was."""
        assert self.unheard_output is not None
        outputs = self.unheard_output.take(self.playback.resume_ms)
        self._set_state(RequestState.ANSWERING)
        self.playback.go_on()
        self.spoken += self._unspoken
        for chunk in outputs:
            if chunk.modality is OutputModality.TEXT:
                self.said.append(chunk.text)
            if chunk.tool_call is not None:
                self.called(chunk.tool_call)
        return outputs

    @property
    def silent(self) -> bool:
        """Whether nothing of the answer may be written now, and it may not end."""
        return (self.held_back or self.state is RequestState.HELD) and not self.cut.made

    async def released(self) -> None:
        """Wait while the answer is held, or held back."""
        while self.silent:
            await self._released.wait()

    def await_rest_of_input(self) -> None:
        """The engine has answered frozen input, and the rest of the input goes on."""
        self._set_state(RequestState.ANSWERED)

    def fail(self, error: OmniError) -> None:
        """Record why there is no whole answer. ``finish`` must follow, at once or in the order of the queue."""
        self._set_state(RequestState.FAILED)
        self.error = error

    def cancel(self, *, by: Request | None = None) -> None:
        """Drop input and error; ``by`` is the request that interrupts this one. ``finish`` must follow, as above."""
        if self.state is RequestState.CANCELLED:
            return
        self.timeline.mark_cancelled(None if by is None else by.timeline)
        if by is not None and by.timeline.by_speech and self._speaks and not self.playback.sent_ms:
            self.unheard = True
        self._set_state(RequestState.CANCELLED)
        self.error = None
        self.session.cancel()

    def hear_on(self) -> None:
        """The answer is cut off; what was said is written down to its end. ``know_words`` must follow."""
        self.cut.make()
        self.input.close()
        self.input_ended.set()
        self._note_silence()

    def finish(self) -> None:
        """Its final is in the outbox. ``release`` must follow, at once or when its words are known."""
        self._set_state(RequestState.FINISHED)

    def release(self) -> None:
        """Release what the request holds. Idempotent."""
        self.input.discard()
        self.meter = UsageMeter()  # through which an engine might hold on to its work
        if self.speech is not None:
            self.speech.release()
        if self.unheard_output is not None:
            self.unheard_output.release()

    def _set_state(self, state: RequestState) -> None:
        self.state.check(state)
        self.state = state
        self.answering = state in ANSWERING_STATES
        self._note_silence()

    def _note_silence(self) -> None:
        self.may_write = self.answering and not self.held_back
        if self.silent:
            self._released.clear()
        else:
            self._released.set()

    # what was said in it

    @property
    def sees_history(self) -> bool:
        """Whether it sees what earlier requests of its session have left."""
        return self.config.history and self.context is None and self.conversation is not None

    @property
    def words_known(self) -> bool:
        """Whether nothing that was said in it is still being written down."""
        return not self.spoke or self.words is not WordsKnown.NOT_YET

    def know_words(self, words: WordsKnown) -> None:
        """Nothing more is being written down. The first call counts."""
        if self.words is WordsKnown.NOT_YET:
            self.words = words
            self._tell_words()

    def note_remembered(self) -> None:
        """The history has what it leaves."""
        self.remembered = True
        self._tell_words()

    @property
    def question_known(self) -> bool:
        """Whether ``question`` stays as it is. Where the answer is cut off, the history decides what that is."""
        return self.words_known and (self.remembered or not self.cut.made)

    def _tell_words(self) -> None:
        if self.question_known:
            called, self._on_words = self._on_words, []
            for call in called:
                call()

    def when_question_known(self, call: Callable[[], None]) -> None:
        """Have a function called, later, when ``question_known``."""
        self._on_words.append(call)

    async def until_question_known(self) -> None:
        """Wait for ``question_known``."""
        if not self.question_known:
            known = asyncio.Event()
            self.when_question_known(known.set)
            await known.wait()

    def hear(self, transcript: TranscriptOutput) -> None:
        """The engine has written something down."""
        if transcript.interim:
            self.interim = transcript
            return
        self.interim = None
        self.heard.append(transcript.text)
        self.unsent.append(transcript)

    def settle(self) -> None:
        """No recognition follows the interim transcript: it has to do."""
        if self.interim is not None:
            self.hear(replace_struct(self.interim, interim=False))

    def interrupts(self, *, by_speech: bool) -> bool:
        """Whether it ends earlier requests as it opens. Detected speech does so unless turn detection is set not to."""
        detection = self.config.turn_detection
        spares = by_speech and detection is not None and not detection.interrupt_response
        return self.config.overlap == "interrupt" and not spares

    # input

    def keep_speech(self, history: History, *, supported: bool) -> None:
        """Keep the audio of the input for the history; ``supported`` says whether the engine takes it from there."""
        unwanted = None if supported else "the engine does not support speech in its history"
        self.speech = history.new_speech(self.session.settings.audio, unwanted=unwanted)

    def append(self, chunk: InputChunk) -> None:
        """Queue a chunk for the engine; after a frozen start, or the end, it is dropped."""
        if self.input.closed:
            return
        self.only_speech = self.only_speech and (chunk.modality is Modality.AUDIO or not chunk.has_content)
        if chunk.modality is Modality.TEXT:
            self._keep_text(chunk)
        elif chunk.modality is Modality.AUDIO:
            self.spoke = self.spoke or bool(chunk.payload)
            if self.speech is not None:
                self.speech.append(chunk)
        self.input.put_nowait(chunk)

    def _keep_text(self, chunk: InputChunk) -> None:
        call = chunk.tool_call_id
        kept = self.typed if call is None else self.tool_results.setdefault(call, bytearray())
        piece = chunk.payload[: self._text_room]
        kept += piece
        self._text_room -= len(piece)

    @property
    def waiting_chunks(self) -> int:
        """Chunks that the engine has not taken."""
        return self.session.received.chunks if self.started is None else self.input.items

    def check_held(self) -> None:
        """Raise PayloadTooLarge for more of what is not counted in bytes than a request may hold."""
        received, most = self.session.received, MAX_WAITING_CHUNKS
        if received.tool_results > MAX_TOOL_RESULTS:
            raise PayloadTooLarge(f"a request may have at most {MAX_TOOL_RESULTS} tool results")
        if received.chunks > most and self.waiting_chunks > most:
            raise PayloadTooLarge(f"more than {most} chunks are waiting for the engine; send more slowly")

    # what was said

    def called(self, fragment: ToolCallFragment) -> None:
        """A fragment of a tool call was sent."""
        self._calls.append(fragment)

    def withdrawn(self, chunks: Sequence[OutputChunk]) -> None:
        """These outputs, the latest of the answer, were taken back from the outbox."""
        for chunk in reversed(chunks):
            if chunk.modality is OutputModality.AUDIO and chunk.start_ms is not None:
                self.playback.withdraw(chunk.start_ms)
                while self.spoken and self.spoken[-1].start_ms >= chunk.start_ms:
                    self.spoken.pop()
            self.said.take_back(len(chunk.text) if chunk.modality is OutputModality.TEXT else 0)
            if chunk.tool_call is not None:
                self._calls.take_back(chunk.tool_call)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that were sent, in the order in which they began."""
        return self._calls.calls()

    @property
    def user_text(self) -> str:
        """The words of the user, typed and spoken."""
        return " ".join(filter(None, [self.typed.decode("utf-8", "replace"), self.heard.joined(" ")]))

    @property
    def answer_text(self) -> str:
        """The text of the answer that was sent."""
        return self.said.joined()

    def take_messages(self, *, audio_ms: float = 0) -> tuple[Message, ...]:
        """The messages that this request adds to the history. Call it once: it hands over the kept speech.

        ``audio_ms`` is the length of the audio as the engine decoded it, 0 where it did not report that.
        """
        user = Message("user", self.user_text)
        if self.spoke and self.words is not WordsKnown.ALL:
            user = self._spoken(audio_ms)
        self.asked = user
        return (*self._results, user, self.answer_message)

    @property
    def _results(self) -> tuple[Message, ...]:
        return tuple(
            Message("tool", text.decode("utf-8", "replace"), tool_call_id=call)
            for call, text in self.tool_results.items()
        )

    @property
    def question(self) -> Message:
        """What the user says in it, as far as that is known."""
        return self.asked or Message("user", self.user_text)

    def messages_if_cut(self) -> tuple[Message, ...]:
        """What the history would get if the answer, which is held, had ended where it was interrupted."""
        return (*self._results, self.question, self._answer(cut=True))

    @property
    def leaves_answer(self) -> bool:
        """Whether the history keeps anything of it but what the user said, now that its answer is cut off or held."""
        cut = self.state is RequestState.HELD or self.playback.stopped
        answer = self._answer(cut=cut)
        return bool(self.tool_results or answer.text.strip() or answer.tool_calls)

    @property
    def asks(self) -> bool:
        """Whether the last sentence that was heard of the answer, which is held, is a question."""
        return asks(self.said.joined(), len(self._answer(cut=True).text))

    def _spoken(self, audio_ms: float) -> Message:
        """The message of a user whose spoken words are not all known: with the audio, wherever that is kept."""
        kept, typed = self.speech, self.typed.decode("utf-8", "replace")
        if kept is not None and kept.began and (speech := kept.hand_over(audio_ms=audio_ms)) is not None:
            return Message("user", typed, speech=speech)
        if self.heard.joined() or kept is None or not kept.began:
            return Message("user", self.user_text)
        log.warning("request %s: speech dropped from the history: %s", self.request_id, kept.lost)
        return Message("user", " ".join(filter(None, [typed, WORDS_UNKNOWN])))

    @property
    def answer_message(self) -> Message:
        """The answer for the history: where its playback was stopped, only the part that was heard."""
        return self._answer(cut=self.playback.stopped)

    def _answer(self, *, cut: bool) -> Message:
        text = self.said.joined()
        if cut:
            nothing_sent = self.state is RequestState.HELD and self._speaks and not self.playback.sent_ms
            text = "" if self.unheard or nothing_sent else heard_part(text, self.spoken, self.playback)
        # A cancelled answer may end within a call: no client can answer that, and no engine takes it.
        cancelled = self.state in (RequestState.CANCELLED, RequestState.HELD)
        calls = tuple(call for call in self.tool_calls if call.is_whole or not cancelled)
        return Message("assistant", text, tool_calls=calls)

    @property
    def _speaks(self) -> bool:
        return "audio" in self.config.modalities

    # the engine

    def generation_request(
        self, history: tuple[Message, ...], sink: OutputSink = NO_SINK, *, earlier: EarlierParts | None = None
    ) -> GenerationRequest:
        """The request as the engine gets it; ``earlier`` is what its message begins with."""
        config, settings = self.config, self.session.settings
        sampling = config.sampling
        return GenerationRequest(
            request_id=self.request_id,
            task=config.task,
            input=self.input if earlier is None else ContinuedInput(earlier, self.input),
            input_mode=settings.mode,
            input_audio=settings.audio,
            modalities=frozenset(OutputModality(name) for name in config.modalities),
            language=spoken_language(config.input_audio),
            voice=config.voice,
            speed=config.speed,
            instructions=config.instructions,
            history=history,
            sampling={
                name: value for name in sampling.__struct_fields__ if (value := getattr(sampling, name)) is not None
            },
            stage_sampling=config.stage_sampling,
            stage_params=config.stage_params,
            tools=tuple(config.tools),
            tool_choice=config.tool_choice,
            options=self.options,
            owner=self.owner,
            conversation=self.conversation,
            meter=self.meter,
            cut=self.cut,
            sink=sink,
            media_room=self.media_room,
        )

    @property
    def input_usage(self) -> Usage:
        """The usage of an answer of which nothing was made."""
        return Usage(input_audio_ms=round(self.session.received.audio_ms))

    @property
    def output_format(self) -> AudioFormat:
        """The format that audio is sent in."""
        audio = self.config.output_audio
        return AudioFormat(audio.format, audio.sample_rate)

    def usage(self, reported: Usage | None) -> Usage:
        """The usage for the final.

        ``reported`` is the engine's own at its end. Where it was cut short, its meter counts; without one, the words of
        the input and the output do.
        """
        audio_ms = reported.input_audio_ms if reported is not None else round(self.session.received.audio_ms)
        reported = (
            reported
            or self.meter.read()
            or Usage(input_tokens=count_words(self.user_text), output_tokens=count_words(self.said.joined()))
        )
        return replace(
            reported,
            input_audio_ms=audio_ms,
            output_audio_ms=round(self.playback.sent_ms),
            input_after_start_bytes=self.session.bytes_after_start,
        )


def _payload_bytes(chunk: InputChunk) -> float:
    return len(chunk.payload)
