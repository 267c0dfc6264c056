"""Request: one request of a conversation, from the chunk that opened it to its final."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality, ToolCall, ToolCallFragment, Usage, Word
from omni_ws.core.output import OutputChunk
from omni_ws.core.session import GenerationStarted, StreamingInputSession
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import WORDS_UNKNOWN, AnswerOptions, GenerationRequest, Message, TranscriptOutput, UsageMeter
from omni_ws.engine.channel import Channel
from omni_ws.engine.media_room import MediaRoom
from omni_ws.errors import OmniError
from omni_ws.service.conversation.kept_speech import KeptSpeech
from omni_ws.service.conversation.playback import Playback, heard_part
from omni_ws.service.observing.timeline import RequestTimeline
from omni_ws.wire.session_config import SessionConfig

log = logging.getLogger(__name__)

#: Input that may wait between the socket and the engine; beyond it the socket is not read.
INPUT_QUEUE_BYTES: Final = 1 << 20
#: Text of a request that is kept for the history, which could not hold more anyway.
MAX_KEPT_TEXT: Final = 1 << 18


#: From the names that fields have here to those that the client wrote.
FieldNames: TypeAlias = Callable[[str | None], str | None]


def as_they_are(param: str | None) -> str | None:
    """The names of ``session_config`` are its client's own."""
    return param


class KeptText:
    """A text that comes in pieces, up to a length; what is longer is cut."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._room = MAX_KEPT_TEXT

    def append(self, piece: str) -> None:
        piece = piece[: self._room]
        if piece:
            self._pieces.append(piece)
            self._room -= len(piece)

    def take_back(self, length: int) -> None:
        """The last pieces, of this length together, were not said after all."""
        while self._pieces and length >= len(self._pieces[-1]):
            length -= len(self._pieces[-1])
            self._room += len(self._pieces.pop())

    def joined(self, separator: str = "") -> str:
        return separator.join(self._pieces)


@dataclass(slots=True, eq=False)
class Request:
    """``config`` is what was in effect when the request opened."""

    request_id: str
    session: StreamingInputSession
    config: SessionConfig
    timeline: RequestTimeline
    on_input_taken: Callable[[Request, int], None]
    playback: Playback
    media_room: MediaRoom
    options: AnswerOptions = field(default_factory=AnswerOptions)
    owner: str | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    #: The audio of the input, for the history where its words are not known; None where no later request needs it.
    speech: KeptSpeech | None = None
    field_names: FieldNames = as_they_are
    started: GenerationStarted | None = None
    #: Why the request cannot be worked on, found out before or beside the work.
    error: OmniError | None = None
    cancelled: bool = False
    finished: bool = False
    #: The task that produces the answer, while it runs.
    answer: asyncio.Task[None] | None = None
    input: Channel[InputChunk] = field(init=False)
    #: Text of the input, as far as a history can use it.
    typed: bytearray = field(default_factory=bytearray)
    heard: KeptText = field(default_factory=KeptText)
    #: The transcript that went out last, if it may still change.
    interim: TranscriptOutput | None = None
    said: KeptText = field(default_factory=KeptText)
    #: Results of tools, by the id of the call.
    tool_results: dict[str, bytearray] = field(default_factory=dict)
    #: Words of the audio that went out, where the engine tells them.
    spoken: list[Word] = field(default_factory=list)
    #: Whether its answer was cut short while it was being played.
    interrupted: bool = False
    input_ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: Whether the engine is done, and only the final is missing.
    answered: bool = False
    _queued_chunks: int = 0
    #: Bytes of typed text and results of tools that may still be kept.
    _text_room: int = MAX_KEPT_TEXT
    #: Id and name of each tool call that went out, by its index; and its arguments, as they come.
    _calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    _arguments: dict[int, KeptText] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.input = Channel(INPUT_QUEUE_BYTES, cost=lambda chunk: len(chunk.payload), on_take=self._taken)

    @property
    def is_frozen(self) -> bool:
        """Whether the engine has all that it will get, though more may come."""
        return self.started is not None and self.session.settings.mode is InputMode.SNAPSHOT

    @property
    def ready(self) -> bool:
        """Whether there is something to do for it: an answer to start, or an end to tell."""
        return self.started is not None or self.error is not None or self.cancelled

    def interrupts(self, *, by_speech: bool) -> bool:
        """Whether it ends the requests before it as it opens. Speech does so where turn detection says so, too."""
        turns = self.config.turn_detection
        spares = by_speech and turns is not None and not turns.interrupt_response
        return self.config.overlap == "interrupt" and not spares

    def start(self, event: GenerationStarted) -> None:
        self.started = event
        for chunk in event.chunks:
            self.append(chunk)
        if self.is_frozen:
            self.input.close()

    def append(self, chunk: InputChunk) -> None:
        if self.input.closed:
            return  # a request that ended early leaves its rest to nobody
        if chunk.modality is Modality.TEXT:
            self._keep_text(chunk)
        elif chunk.modality is Modality.AUDIO and self.speech is not None:
            self.speech.append(chunk)
        self.input.put_nowait(chunk)
        self._queued_chunks += 1

    def _keep_text(self, chunk: InputChunk) -> None:
        call = chunk.tool_call_id
        kept = self.typed if call is None else self.tool_results.setdefault(call, bytearray())
        piece = chunk.payload[: self._text_room]
        kept += piece
        self._text_room -= len(piece)

    def called(self, fragment: ToolCallFragment) -> None:
        """A piece of a tool call went out."""
        call_id, name = self._calls.get(fragment.index, ("", ""))
        self._calls[fragment.index] = (fragment.id or call_id, fragment.name or name)
        self._arguments.setdefault(fragment.index, KeptText()).append(fragment.arguments)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Those that went out, in the order in which they began."""
        return tuple(ToolCall(*names, self._arguments[index].joined()) for index, names in self._calls.items())

    def take_messages(self, *, all_heard: bool, audio_ms: float) -> tuple[Message, ...]:
        """What this request leaves to those after it, once.

        ``all_heard`` says that there were no words but those of the transcripts, ``audio_ms`` how much audio the engine
        decoded, 0 where it did not tell.
        """
        results = (
            Message("tool", text.decode("utf-8", "replace"), tool_call_id=call)
            for call, text in self.tool_results.items()
        )
        user = Message("user", self.user_text)
        if not all_heard and not self.heard.joined():
            user = self._spoken(audio_ms)
        return (*results, user, self.answer_message)

    def _spoken(self, audio_ms: float) -> Message:
        """The message of a user whose words, if there were any, are not known."""
        kept = self.speech
        if kept is None or not kept.began:
            return Message("user", self.user_text)
        if (speech := kept.hand_over(audio_ms=audio_ms)) is not None:
            return Message("user", self.user_text, speech=speech)
        log.warning("request %s: later turns do not know what was said: %s", self.request_id, kept.lost)
        return Message("user", " ".join(filter(None, [self.user_text, WORDS_UNKNOWN])))

    @property
    def answer_message(self) -> Message:
        """The answer as later requests see it: what of it was heard, where it was cut short."""
        text = self.said.joined()
        if self.cancelled or self.interrupted:
            text = heard_part(text, self.spoken, self.playback)
        calls = tuple(call for call in self.tool_calls if call.is_whole or not self.cancelled)
        return Message("assistant", text, tool_calls=calls)

    def withdrawn(self, chunks: Sequence[OutputChunk]) -> None:
        """These did not go out."""
        for chunk in reversed(chunks):
            if chunk.modality is OutputModality.AUDIO and chunk.start_ms is not None:
                self.playback.withdraw(chunk.start_ms)
                while self.spoken and self.spoken[-1].start_ms >= chunk.start_ms:
                    self.spoken.pop()
            self.said.take_back(len(chunk.text) if chunk.modality is OutputModality.TEXT else 0)
            if chunk.tool_call is not None:
                self._calls.pop(chunk.tool_call.index, None)
                self._arguments.pop(chunk.tool_call.index, None)

    @property
    def waiting_chunks(self) -> int:
        """Chunks that the engine has not taken over."""
        return self.session.received.chunks if self.started is None else self._queued_chunks

    def _taken(self, size: float) -> None:
        self._queued_chunks -= 1
        self.on_input_taken(self, int(size))

    @property
    def user_text(self) -> str:
        """What the user typed and said."""
        return " ".join(filter(None, [self.typed.decode("utf-8", "replace"), self.heard.joined(" ")]))

    @property
    def answer_text(self) -> str:
        """The text of the answer that went out so far."""
        return self.said.joined()

    def generation_request(self, history: tuple[Message, ...]) -> GenerationRequest:
        config, settings = self.config, self.session.settings
        sampling = config.sampling
        return GenerationRequest(
            request_id=self.request_id,
            task=config.task,
            input=self.input,
            input_mode=settings.mode,
            input_audio=settings.audio,
            modalities=frozenset(OutputModality(name) for name in config.modalities),
            voice=config.voice,
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
            meter=self.meter,
            media_room=self.media_room,
        )

    @property
    def output_format(self) -> AudioFormat:
        audio = self.config.output_audio
        return AudioFormat(audio.format, audio.sample_rate)

    def usage(self, reported: Usage | None) -> Usage:
        """What the engine reports, or, where it was cut short, what it has counted or what was seen from outside."""
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
