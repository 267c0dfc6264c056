"""The settings of remote engines, the differences between servers with OpenAI's API (Dialect), and request bodies."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
from pydantic import SecretStr

from omni_ws.audio.container import wav_header
from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.config.model import RemoteConfig
from omni_ws.config.values import MIB
from omni_ws.core.chunks import InputChunk, Modality, OutputModality
from omni_ws.core.file_heads import sniff_image
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech
from omni_ws.core.json_values import WHISPER_LANGUAGES
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import GenerationRequest
from omni_ws.engine.clauses import earlier_speech
from omni_ws.engine.decoding import AudioPart, Chunks, decode_input, decode_speech
from omni_ws.engine.threads import MediaShare
from omni_ws.errors import EmptyInput, PayloadTooLarge, UnsupportedFormat

#: The sampling parameters that most servers support.
DEFAULT_SAMPLING: Final = (
    *("temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """The settings of the upstreams of one part (LLM, ASR or TTS), which serve the same model. Times are in seconds."""

    #: Base URLs, such as ``http://127.0.0.1:11434/v1``.
    urls: tuple[str, ...]
    #: The servers' name for the model; None for the first one that the first server lists.
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    #: The section of the configuration that these settings come from, for messages to the operator.
    section: str = "remote"
    #: The environment variable that the key may come from; None for that of the section.
    key_variable: str | None = None
    retries: int = 2
    connect_timeout: float = 5
    #: The limit from the request to the first output, rather than the first byte, which some servers send before any
    #: work.
    first_byte_timeout: float = 120
    #: The limit between two reads of an answer that has begun.
    idle_timeout: float = 60
    health_interval: float = 10
    start_timeout: float = 60
    #: The largest body, including audio and images in base64.
    max_request_bytes: int = 64 * MIB
    ca_file: Path | None = None
    #: Whether upstreams' messages about requests, which may quote them, may be logged.
    log_content: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLlmSettings(UpstreamSettings):
    """The settings of a language model behind ``/v1/chat/completions``, with the features that no server reports."""

    #: The modalities of its input and of its answers, by the names of the protocol.
    input_modalities: tuple[str, ...] = ("text",)
    modalities: tuple[str, ...] = ("text",)
    #: Further features: tools, logprobs, response_format, n, priority, the names of limits on images and videos, and
    #: the fields in ``UPSTREAM_FIELDS``.
    options: tuple[str, ...] = ("tools", "response_format")
    #: Sampling parameters that are forwarded; None for those that its kind of server supports.
    sampling: tuple[str, ...] | None = None
    #: Fields that are added to every request, unless the client sets them.
    body: Mapping[str, Any] = field(default_factory=dict)
    stage_params: tuple[str, ...] = ()
    stage_sampling: tuple[str, ...] = ()
    #: Whether the chat template contains the opening tag of thoughts, so that answers contain only the closing tag;
    #: None to learn this from the upstreams.
    opens_thoughts: bool | None = None
    #: The voices of a model that speaks.
    voices: tuple[str, ...] = ()
    audio_format: str = "pcm16"
    #: The sample rate, in Hz, of raw audio whose rate the server does not report.
    audio_sample_rate: int = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTtsSettings(UpstreamSettings):
    """The settings of a voice behind ``/v1/audio/speech``."""

    #: The voices that clients may choose, the default first.
    voices: tuple[str, ...] = ()
    #: The sample rate, in Hz, of raw audio whose rate the server does not report.
    audio_sample_rate: int = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAsrSettings(UpstreamSettings):
    """The settings of speech recognition behind ``/v1/audio/transcriptions``."""

    #: The languages that requests may set (primary subtags of RFC 5646); most servers run Whisper.
    languages: tuple[str, ...] = WHISPER_LANGUAGES
    #: Whether to request the times of words, which most servers report only in responses that are not streamed.
    word_times: bool = False
    #: Whether to transcribe at each pause that may be the end of an utterance: the transcript is ready sooner, but the
    #: work is wasted if the speaker goes on. None: only if the servers are on this machine.
    speculate: bool | None = None


def patience(config: RemoteConfig) -> dict[str, Any]:
    """Return the fields of UpstreamSettings that all upstreams share: timeouts, retries and limits."""
    return {
        "retries": config.retries,
        "connect_timeout": config.connect_timeout_sec,
        "first_byte_timeout": config.first_byte_timeout_sec,
        "idle_timeout": config.idle_timeout_sec,
        "health_interval": config.health_interval_sec,
        "start_timeout": config.start_timeout_sec,
        "max_request_bytes": config.max_request_bytes,
        "ca_file": config.ca_file,
    }


def key_of(value: SecretStr | None) -> str | None:
    """Return the text of a secret; None if ``value`` is None."""
    return None if value is None else value.get_secret_value()


# Which software a server runs, what it ignores, and where it reports its context.

#: The default context of a model in Ollama (its documentation: OLLAMA_CONTEXT_LENGTH).
OLLAMA_CONTEXT: Final = 4096


class Dialect(Enum):
    """The software that a server runs, which determines its deviations from OpenAI's API."""

    #: Unknown software: OpenAI's own API, or any other.
    OPENAI = "openai"
    OMNI_WS = "omni_ws"
    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"
    LM_STUDIO = "LM Studio"
    OLLAMA = "Ollama"


#: The dialect by the ``owned_by`` of a listed model. Ollama has no distinctive one, but is recognised by
#: ``/api/version``.
BY_OWNER: Final[Mapping[str, Dialect]] = {
    "omni_ws": Dialect.OMNI_WS,
    "vllm": Dialect.VLLM,
    "llamacpp": Dialect.LLAMA_CPP,
    "organization_owner": Dialect.LM_STUDIO,
}

#: Servers that close the connection after a streamed response, though its headers do not say so. llama.cpp's last chunk
#: ends as cpp-httplib ends an aborted response; a request that follows immediately on the connection is then lost.
CLOSE_AFTER_STREAM: Final = frozenset({Dialect.LLAMA_CPP})

#: Servers that go on with the text of a last message of the assistant, with the fields that ask for it. llama.cpp does
#: so unless it was started with --no-prefill-assistant, which it does not tell; if the model thinks first, it refuses,
#: as omni_ws does with most of its engines. With Ollama and LM Studio it depends on the template of the model, and
#: others answer anew.
CONTINUES: Final[Mapping[Dialect, Mapping[str, Any]]] = {
    Dialect.VLLM: {"add_generation_prompt": False, "continue_final_message": True},
    Dialect.LLAMA_CPP: {},
    Dialect.OMNI_WS: {},
}

#: Sampling parameters that these servers accept but ignore.
IGNORED_SAMPLING: Final[Mapping[Dialect, frozenset[str]]] = {
    Dialect.OLLAMA: frozenset({"top_k", "min_p", "repetition_penalty"}),
    Dialect.LM_STUDIO: frozenset({"min_p"}),
}
#: Sampling parameters that have another name on these servers.
_SAMPLING_NAMES: Final[Mapping[Dialect, Mapping[str, str]]] = {
    Dialect.LLAMA_CPP: {"repetition_penalty": "repeat_penalty"},
    Dialect.LM_STUDIO: {"repetition_penalty": "repeat_penalty"},
}


def sampling_for(dialect: Dialect, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters under the names that servers of this dialect use."""
    names = _SAMPLING_NAMES.get(dialect, {})
    return {names.get(name, name): value for name, value in sampling.items()}


#: Words in the names of models that turn text into vectors, or rank texts. Servers list them with those that chat.
_OF_VECTORS: Final = ("embed", "rerank", "bge-", "minilm", "colbert")


def first_model(listed: Iterable[str]) -> str | None:
    """Return the first of the models that a server lists; one for embeddings, by its name, only if there is no other.

    None without a model. Those that LM Studio names ``text-embedding-…`` are never returned.
    """
    usable = (model for model in listed if not model.startswith("text-embedding-"))
    return min(usable, key=lambda model: any(word in model.lower() for word in _OF_VECTORS), default=None)


def listed_models(content: object) -> list[Mapping[str, Any]] | None:
    """Return the models in the JSON of ``/v1/models`` or Ollama's ``/api/tags``, each with ``id``; None for other JSON.

    Ollama without models returns null in place of the list.
    """
    if not isinstance(content, Mapping) or not ({"data", "models"} & content.keys()):
        return None
    listed = content["data"] if "data" in content else content["models"]
    if listed is None:
        return []
    if not isinstance(listed, list):
        return None
    entries = [dict(entry) for entry in listed if isinstance(entry, dict)]
    for entry in entries:
        entry.setdefault("id", entry.get("name"))
    return [entry for entry in entries if isinstance(entry["id"], str)]


def context_listed(entry: Mapping[str, Any]) -> int | None:
    """Return the context, in tokens, that an entry of the list of models has (vLLM, llama.cpp); else None."""
    meta = entry.get("meta")
    return _count(entry.get("max_model_len")) or (_count(meta.get("n_ctx")) if isinstance(meta, dict) else None)


def context_in_props(content: object) -> int | None:
    """Return the context of one conversation, in tokens, that the JSON of llama.cpp's ``/props`` has; else None."""
    settings = content.get("default_generation_settings") if isinstance(content, dict) else None
    return _count(settings.get("n_ctx")) if isinstance(settings, dict) else None


def opens_thoughts_in_props(content: object) -> bool:
    """Whether the chat template in llama.cpp's ``/props`` (JSON) always ends prompts with a thought's opening tag."""
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        return False
    prompt = template.rpartition("add_generation_prompt")[2]
    return "<think>" in prompt and "</think>" not in prompt


def context_in_lm_studio(content: object) -> int | None:
    """Return the context, in tokens, that the JSON of LM Studio's ``/api/v0/models/{id}`` has; None if not loaded."""
    return _count(content.get("loaded_context_length")) if isinstance(content, dict) else None


def context_in_ps(content: object, model: str) -> int | None:
    """Return the context of ``model``, in tokens, in the JSON of Ollama's ``/api/ps``; None if it is not loaded."""
    running = content.get("models") if isinstance(content, dict) else None
    for entry in running if isinstance(running, list) else ():
        if isinstance(entry, dict) and model in _ollama_names(entry):
            return _count(entry.get("context_length"))
    return None


def context_in_show(content: object) -> int | None:
    """Return the context, in tokens, that the model's file sets (``num_ctx`` in Ollama's ``/api/show``), or None."""
    parameters = content.get("parameters") if isinstance(content, dict) else None
    for line in parameters.splitlines() if isinstance(parameters, str) else ():
        name, _, value = line.strip().partition(" ")
        if name == "num_ctx" and value.strip().isdecimal():
            return _count(int(value))
    return None


def _ollama_names(entry: Mapping[str, Any]) -> Iterator[str]:
    for name in (entry.get("name"), entry.get("model")):
        if isinstance(name, str):
            yield name
            yield name.removesuffix(":latest")


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


# Converts a generation request to the body of a chat completion: ``read_prompt``, then ``chat_body``.


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
    """The whole input of a request. ``size`` is its estimated size in the body of a chat completion, in bytes."""

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
    """Read the whole input of a request. Audio is decoded; images and video keep their encoding.

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
    """Return decoded speech of earlier messages, the newest first, as far as it fits; and its size in the body.

    ``room`` is the limit on this size, in bytes.
    """
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
    """Yield the images and video files in a run of video chunks.

    A chunk that holds a single frame is an image. Any other chunk begins a video file, and later chunks with the same
    ``format`` continue this file.
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
    """Return the JSON body of the chat completion.

    If ``request.begun`` is set, the last message is this text, which the model is to continue; ``dialect`` must be in
    CONTINUES then.
    """
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
    """Yield names and values of the body's fields for the request's tools and ``options``, as far as they are set."""
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
    """Return ``parts`` in OpenAI's form: as a list of content parts, or as a string if there is only text.

    Servers of text models reject content parts.
    """
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

    Servers reject any other order, and would then reject every later request of the conversation. But users go on
    talking while a tool runs: a call whose result comes later is moved to just before the result, and a call without a
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
