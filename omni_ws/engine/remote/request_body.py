"""Converts a generation request to the body of a chat completion: ``read_prompt``, then ``chat_body``."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from omni_ws.audio.container import wav_header
from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.core.chunks import InputChunk, Modality, OutputModality
from omni_ws.core.file_heads import sniff_image
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import GenerationRequest
from omni_ws.engine.continued_input import earlier_speech
from omni_ws.engine.decoding import AudioPart, Chunks, decode_input, decode_speech
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.remote.settings import CONTINUES, Dialect, RemoteLlmSettings, sampling_for
from omni_ws.errors import EmptyInput, PayloadTooLarge, UnsupportedFormat

#: The sample rate, in Hz, that most speech models expect; all audio is converted to it.
AUDIO_SAMPLE_RATE: Final = 16_000

_MATROSKA: Final = b"\x1aE\xdf\xa3"
_TS_SYNC: Final = 0x47


@dataclass(frozen=True, slots=True)
class Picture:
    """An image or a video in its original encoding; ``kind`` is ``image_url`` or ``video_url``."""

    kind: str
    mime: str
    data: bytes


#: Text, audio at AUDIO_SAMPLE_RATE, or a picture.
Part: TypeAlias = str | Samples | Picture


@dataclass(frozen=True, slots=True)
class Prompt:
    """The whole input of a request. ``size`` is its estimated size in a body, in bytes."""

    parts: tuple[Part, ...]
    audio_ms: int
    size: int
    #: The results of tool calls, by the ID of the call.
    tool_results: Mapping[str, str] = field(default_factory=dict)
    #: The decoded speech of messages of the history, as far as there is room for it.
    earlier: Mapping[Speech, Samples] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def is_text(self) -> bool:
        """Whether the input and the history contain only text."""
        return not self.earlier and all(isinstance(part, str) for part in self.parts)

    @property
    def words(self) -> int:
        return sum(count_words(part) for part in self.parts if isinstance(part, str))


async def read_prompt(request: GenerationRequest, *, executor: Executor, max_bytes: int, share: MediaShare) -> Prompt:
    """Wait for the whole input, and return it. Audio is decoded, images and video are not.

    Memory for the audio is reserved in ``share``. Raises PayloadTooLarge if the body would exceed ``max_bytes``,
    EmptyInput, UnsupportedFormat, or InvalidValue.
    """
    chunks: list[InputChunk] = []
    collected = _Collected(max_bytes)
    async for chunk in request.input:
        if chunk.tool_call_id is not None:
            collected.add_result(chunk.tool_call_id, chunk.payload)
        elif chunk.payload:
            chunks.append(chunk)
    for modality, run in groupby(chunks, key=lambda chunk: chunk.modality):
        if modality is Modality.AUDIO:
            decoded = decode_input(
                Chunks(tuple(run)),
                audio=request.input_audio,
                sample_rate=AUDIO_SAMPLE_RATE,
                executor=executor,
                share=share,
                lane=request.lane,
                warn=request.warn,
            )
            async with aclosing(decoded) as parts:
                async for part in parts:
                    assert isinstance(part, AudioPart)
                    share.take(part.samples.nbytes)
                    collected.add_audio(part)
        else:
            collected.add(_parts(modality, tuple(run)))
    prompt = collected.prompt()
    room = max_bytes - prompt.size
    earlier, size = await _earlier_speech(request, executor=executor, room=room, share=share)
    return replace(prompt, earlier=earlier, size=prompt.size + size)


async def _earlier_speech(
    request: GenerationRequest, *, executor: Executor, room: int, share: MediaShare
) -> tuple[dict[Speech, Samples], int]:
    """Return the decoded speech of the newest messages that fits into ``room`` bytes of a body, and its size there."""
    earlier: dict[Speech, Samples] = {}
    size = 0
    for speech in earlier_speech(request.history):
        samples = await decode_speech(
            speech, sample_rate=AUDIO_SAMPLE_RATE, executor=executor, share=share, lane=request.lane
        )
        if samples is None or not len(samples):
            continue
        if size + _base64_length(2 * len(samples)) > room:
            break
        size += _base64_length(2 * len(samples))
        earlier[speech] = samples
    return earlier, size


@dataclass(slots=True)
class _Collected:
    max_bytes: int
    size: int = 0
    samples: int = 0
    parts: list[Part] = field(default_factory=list)
    audio: list[Samples] = field(default_factory=list)
    audio_part: int = -1
    results: dict[str, bytearray] = field(default_factory=dict)

    def add_result(self, call_id: str, payload: bytes) -> None:
        self.results.setdefault(call_id, bytearray()).extend(payload)
        self._count(len(payload))

    def add_audio(self, part: AudioPart) -> None:
        if part.part != self.audio_part:
            self._end_audio()
            self.audio_part = part.part
        self.audio.append(part.samples)
        self.samples += len(part.samples)
        self._count(_base64_length(2 * len(part.samples)))

    def add(self, parts: Iterable[Part]) -> None:
        self._end_audio()
        for part in parts:
            self.parts.append(part)
            self._count(_base64_length(len(part.data)) if isinstance(part, Picture) else len(part))

    def prompt(self) -> Prompt:
        self._end_audio()
        if not self.parts and not self.results:
            raise EmptyInput("the request has no input")
        results = {call_id: result.decode() for call_id, result in self.results.items()}
        return Prompt(tuple(self.parts), round(self.samples * 1000 / AUDIO_SAMPLE_RATE), self.size, results)

    def _end_audio(self) -> None:
        if self.audio:
            self.parts.append(np.concatenate(self.audio) if len(self.audio) > 1 else self.audio[0])
        self.audio, self.audio_part = [], -1

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > self.max_bytes:
            raise PayloadTooLarge(f"the input takes more than {self.max_bytes} bytes on its way to the upstream")


def _base64_length(size: int) -> int:
    return size * 4 // 3 + 4


def _parts(modality: Modality, run: Sequence[InputChunk]) -> Iterator[Part]:
    match modality:
        case Modality.TEXT:
            yield b"".join(chunk.payload for chunk in run).decode()
        case Modality.IMAGE:
            for chunk in run:
                yield Picture("image_url", _image_type(chunk), chunk.payload)
        case _:
            yield from _video(run)


def _video(run: Sequence[InputChunk]) -> Iterator[Picture]:
    """Yield the pictures in chunks of video.

    Chunks that are single frames are images; any other chunk begins a video file, which later chunks of its type
    continue.
    """
    file: list[InputChunk] = []
    for chunk in run:
        if file and chunk.format == file[0].format:
            file.append(chunk)
            continue
        if file:
            yield _video_file(file)
            file = []
        if sniff_image(chunk.payload) is None:
            file = [chunk]
        else:
            yield Picture("image_url", _image_type(chunk), chunk.payload)
    if file:
        yield _video_file(file)


def _video_file(chunks: Sequence[InputChunk]) -> Picture:
    data = b"".join(chunk.payload for chunk in chunks)
    mime = _sniff_video(data) or (chunks[0].format or "").partition(";")[0].strip().lower()
    if not mime.startswith("video/"):
        raise UnsupportedFormat(
            "the type of this video is not known; name it in format", param="format", sequence_id=chunks[0].sequence_id
        )
    return Picture("video_url", mime, data)


def _sniff_video(data: bytes) -> str | None:
    if data[4:8] in (b"ftyp", b"styp", b"moov"):
        return "video/mp4"
    if data.startswith(_MATROSKA):
        return "video/webm" if b"webm" in data[:64] else "video/x-matroska"
    if data[0] == _TS_SYNC and data[188:189] in (b"\x47", b""):
        return "video/mp2t"
    return None


def _image_type(chunk: InputChunk) -> str:
    mime = sniff_image(chunk.payload)
    if mime is None:
        raise UnsupportedFormat("this is no image that is known", param="format", sequence_id=chunk.sequence_id)
    return mime


def chat_body(
    request: GenerationRequest, prompt: Prompt, *, model: str, settings: RemoteLlmSettings, dialect: Dialect
) -> bytes:
    """Return the JSON body of the chat completion, which goes on behind ``request.begun``, if there is such text."""
    begun = [{"role": "assistant", "content": request.begun}] if request.begun else []
    body: dict[str, Any] = {
        "model": model,
        "messages": [*with_results([*_earlier(request, prompt), *_input(prompt)]), *begun],
        "stream": True,
        "stream_options": {"include_usage": True},
        **settings.body,
        **sampling_for(dialect, request.sampling),
        **dict(_options(request)),
        **(CONTINUES[dialect] if begun else {}),
    }
    if OutputModality.AUDIO in request.modalities:
        voice = {} if request.voice is None else {"voice": request.voice}
        body |= {"modalities": ["text", "audio"], "audio": {**voice, "format": settings.audio_format}}
    elif OutputModality.AUDIO.value in settings.modalities:
        # A server that speaks by default would make audio for nothing.
        body["modalities"] = ["text"]
    for name in ("stage_sampling", "stage_params"):
        if stages := getattr(request, name):
            body[name] = _plain(stages)
    return orjson.dumps(body)


def _plain(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {stage: dict(parameters) for stage, parameters in stages.items()}


def _options(request: GenerationRequest) -> Iterator[tuple[str, Any]]:
    """Yield the fields, with values, for options that few requests use; none for options that are not set."""
    options = request.options
    if request.tools:
        yield "tools", [dict(tool) for tool in request.tools]
        if request.tool_choice is not None:
            yield "tool_choice", request.tool_choice
        if not options.parallel_tool_calls:
            yield "parallel_tool_calls", False
    if options.logprobs is not None:
        yield "logprobs", True
        yield "top_logprobs", options.logprobs
    if options.structure is not None:
        schema = options.structure.schema
        named = {"name": "answer", "schema": None if schema is None else dict(schema), "strict": True}
        form = {"type": "json_object"} if schema is None else {"type": "json_schema", "json_schema": named}
        yield "response_format", form
    if options.choices > 1:
        yield "n", options.choices
    yield from options.media_limits.items()
    yield from options.upstream.items()
    if options.priority:
        yield "priority", options.priority


def _input(prompt: Prompt) -> Iterator[dict[str, Any]]:
    for call_id, result in prompt.tool_results.items():
        yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if prompt.parts:
        yield {"role": "user", "content": _content(prompt.parts)}


def _earlier(request: GenerationRequest, prompt: Prompt) -> Iterator[dict[str, Any]]:
    if request.instructions:
        yield {"role": "system", "content": request.instructions}
    for message in request.history:
        fields: dict[str, Any] = {"role": message.role, "content": _earlier_content(message, prompt)}
        if message.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        yield fields


def _earlier_content(message: Message, prompt: Prompt) -> str | list[dict[str, Any]]:
    if message.speech is None and message.picture is None and not message.more:
        return message.text
    return _content([content for part in message.parts for content in _earlier_parts(part, prompt)])


def _earlier_parts(message: Message, prompt: Prompt) -> Iterator[Part]:
    if message.text:
        yield message.text
    if message.picture is not None:
        yield from _parts(message.picture.modality, [message.picture])
    if message.speech is not None:
        samples = prompt.earlier.get(message.speech)
        yield WORDS_UNKNOWN if samples is None else samples


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    """Return ``parts`` as content parts; text alone as a plain string, since servers of text models reject parts."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    return [_content_part(part) for part in parts]


def _content_part(part: Part) -> dict[str, Any]:
    match part:
        case str(text):
            return {"type": "text", "text": text}
        case np.ndarray() as samples:
            pcm = pcm16_from_samples(samples).tobytes()
            header = wav_header(sample_rate=AUDIO_SAMPLE_RATE, channels=1, data_bytes=len(pcm))
            return {"type": "input_audio", "input_audio": {"data": _base64(header + pcm), "format": "wav"}}
        case Picture(kind=kind, mime=mime, data=data):
            return {"type": kind, kind: {"url": f"data:{mime};base64,{_base64(data)}"}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def with_results(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield ``messages``, reordered so that each message with tool calls is directly followed by their results.

    Servers reject any other order, and so would reject every later request of the conversation. But users do not wait
    for tools while they talk: a call whose result comes later is moved to just before the result, and a call without a
    result is dropped.
    """
    runs = [(of_tools, list(run)) for of_tools, run in groupby(messages, lambda message: message["role"] == "tool")]
    waiting: dict[str, dict[str, Any]] = {}
    for index, (of_tools, run) in enumerate(runs):
        if of_tools:
            late = {one["tool_call_id"]: None for one in run if one["tool_call_id"] in waiting}
            if late:
                yield {"role": "assistant", "content": "", "tool_calls": [waiting.pop(call_id) for call_id in late]}
            yield from run
            continue
        results = runs[index + 1][1] if index + 1 < len(runs) else []
        answered = {one["tool_call_id"] for one in results}
        for message in run:
            calls = message.get("tool_calls", [])
            # Only the last of several messages is directly followed by the results.
            results_follow = message is run[-1]
            kept = [call for call in calls if results_follow and call["id"] in answered]
            waiting |= {call["id"]: call for call in calls if not (results_follow and call["id"] in answered)}
            for call in kept:
                waiting.pop(call["id"], None)
            if kept or message["content"] or not calls:
                yield _calling(message, kept)


def _calling(message: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**fields, "tool_calls": calls} if calls else fields
