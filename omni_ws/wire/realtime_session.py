"""The session object of OpenAI's Realtime API, its conversion to a ``session_config``, and client secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct

from omni_ws.core.chunks import AudioEncoding
from omni_ws.core.json_values import primary_subtag
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter
from omni_ws.wire.realtime_events import MAX_METADATA, read
from omni_ws.wire.session_config import SessionConfig, converted

PCM_RATE: Final = 24_000
G711_RATE: Final = 8_000
#: A lead so long that audio is not paced: OpenAI sends audio as fast as it is made; clients report what was heard.
UNPACED_LEAD_MS: Final = 24 * 3600 * 1000

_FORMATS: Final = {
    "audio/pcm": (AudioEncoding.PCM16, PCM_RATE),
    "audio/pcmu": (AudioEncoding.PCMU, G711_RATE),
    "audio/pcma": (AudioEncoding.PCMA, G711_RATE),
}
#: The names of audio formats in the beta version of the API, and their present names.
_BETA_FORMATS: Final = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
#: The path in the present session object of each field of the beta version.
_BETA_FIELDS: Final = {
    "modalities": ("output_modalities",),
    "input_audio_format": ("audio", "input", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "output_audio_format": ("audio", "output", "format"),
    "voice": ("audio", "output", "voice"),
    "speed": ("audio", "output", "speed"),
    "max_response_output_tokens": ("max_output_tokens",),
}
#: The objects that a patch merges field by field; it replaces every other value.
_MERGED: Final[Mapping[str, Any]] = {"audio": {"input": {}, "output": {}}}
#: The most bytes of a session object as JSON; it is kept as long as the session.
MAX_SESSION_BYTES: Final = 1 << 20
#: The silence that ends a turn, by ``eagerness``, if no model judges the pauses.
_EAGERNESS_SILENCE_MS: Final = {"low": 1000, "medium": 500, "auto": 500, "high": 300}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeAbilities:
    """The abilities of the engine that decide what a session may ask for."""

    audio_output: bool
    text_output: bool
    turn_detection_types: tuple[str, ...]
    languages: frozenset[str]
    keywords: bool
    cleans_audio: bool
    temperature: bool
    max_tokens: bool


def current_names(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the session object with fields of the beta version under their present names."""
    current: dict[str, Any] = {name: value for name, value in session.items() if name not in _BETA_FIELDS}
    for name, path in _BETA_FIELDS.items():
        if name not in session:
            continue
        value = session[name]
        if name.endswith("_format") and isinstance(value, str):
            value = {"type": _BETA_FORMATS.get(value, value)}
        place = current
        for step in path[:-1]:
            inner = place.get(step)
            place[step] = place = dict(inner) if isinstance(inner, Mapping) else {}
        place.setdefault(path[-1], value)
    return current


# These structs have only the fields that have an effect. Values that are fields of ``session_config`` are checked
# there.


class FormatFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``audio.input.format`` and ``audio.output.format``."""

    type: Any = "audio/pcm"
    rate: Any = None


class TranscriptionFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input.transcription``. Clients see the fields that they set."""

    model: Any = UNSET
    language: Any = UNSET
    prompt: Any = UNSET


class TurnDetectionFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input.turn_detection``. A new one replaces the old one: absent fields get their defaults."""

    type: Any = "server_vad"
    threshold: Any = None
    prefix_padding_ms: Any = None
    silence_duration_ms: Any = None
    eagerness: Any = None
    create_response: Any = None
    interrupt_response: Any = None
    #: Not a field of OpenAI's: whether an answer goes on while it is not known whether speech interrupts it.
    duck: Any = None


class NoiseReductionFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input.noise_reduction``."""

    type: Any = None


class InputFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``audio.input``. ``echo`` is not OpenAI's."""

    format: FormatFields | str | None = None
    transcription: TranscriptionFields | None = None
    noise_reduction: NoiseReductionFields | None = None
    echo: Any = None
    turn_detection: TurnDetectionFields | None = TurnDetectionFields()


class OutputFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``audio.output``."""

    format: FormatFields | str | None = None
    voice: Any = None
    speed: Any = None


class AudioFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``audio`` of a session."""

    input: InputFields = InputFields()
    output: OutputFields = OutputFields()


class CommonFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that a session and a response have in common."""

    instructions: Any = None
    output_modalities: list[Literal["text", "audio"]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: Any = None
    temperature: Any = None


class SessionFields(CommonFields, frozen=True, kw_only=True, omit_defaults=True):
    """The session object as the client has set it."""

    type: Any = None
    audio: AudioFields = AudioFields()
    #: An extension: whether the server says that a tool still works.
    tool_filler: Any = None

    @property
    def transcribes_only(self) -> bool:
        """Whether the session only transcribes, and makes no responses."""
        return bool(self.type == "transcription")

    @property
    def answers_turns(self) -> bool:
        """Whether the end of a turn creates a response. If not, the client has to request the response."""
        detection = self.audio.input.turn_detection
        return not self.transcribes_only and (detection is None or detection.create_response is not False)

    @property
    def interrupts_answers(self) -> bool:
        """Whether the start of a turn cancels the response in progress."""
        detection = self.audio.input.turn_detection
        return not self.transcribes_only and (detection is None or detection.interrupt_response is not False)

    @property
    def wants_transcripts(self) -> bool:
        """Whether the client gets transcripts of the input."""
        return not self.answers_turns or self.audio.input.transcription is not None


class ResponseOutput(Struct, frozen=True):
    """The object ``audio.output`` of a response."""

    voice: Any = None


class ResponseAudio(Struct, frozen=True):
    """The object ``audio`` of a response."""

    output: ResponseOutput | None = None


_Short: TypeAlias = Annotated[str, Meta(max_length=64)]
_Text: TypeAlias = Annotated[str, Meta(max_length=512)]


class ResponseFields(CommonFields, frozen=True, kw_only=True):
    """The object ``response`` of a ``response.create``."""

    audio: ResponseAudio | None = None
    input: list[dict[str, Any]] | None = None
    metadata: Annotated[dict[_Short, _Text], Meta(max_length=MAX_METADATA)] | None = None


def merged_session(base: SessionFields, patch: Mapping[str, Any]) -> SessionFields:
    """Return ``base`` with the known fields of ``patch``; null is a value, too. Raises InvalidValue."""
    merged = read(_merged(msgspec.to_builtins(base), current_names(patch), _MERGED), SessionFields, "session")
    if len(msgspec.json.encode(merged)) > MAX_SESSION_BYTES:
        raise InvalidValue(f"the session must not exceed {MAX_SESSION_BYTES} bytes", param="session")
    return merged


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **patch}
    for name, inner in groups.items():
        value = patch.get(name)
        if value is None or isinstance(value, Mapping):  # null leaves the group as it is
            merged[name] = _merged(base.get(name, {}), value or {}, inner)
    return merged


def read_response(fields: Mapping[str, Any]) -> ResponseFields:
    """Parse the ``response`` of a ``response.create``. Raises InvalidValue."""
    return read(current_names(fields), ResponseFields)


def session_config(session: SessionFields, abilities: RealtimeAbilities) -> dict[str, Any]:
    """Return the whole ``session_config`` for a session object: null for fields that it leaves to the server.

    Raises InvalidValue or UnsupportedFormat.
    """
    given, output = session.audio.input, session.audio.output
    detection = turn_detection(given.turn_detection, abilities)
    if detection is not None and not session.answers_turns:
        detection["interrupt_response"] = False  # a turn must not cut short the transcript of the turn before
    input_audio = _format(given.format, "session.audio.input.format")
    language = given.transcription.language if given.transcription else None
    known = primary_subtag(str(language or "")) in abilities.languages
    input_audio["language"] = language if known else None  # it is detected
    input_audio["echo"] = given.echo
    if abilities.cleans_audio:  # else it has no effect: OpenAI's clients may set it unasked
        input_audio["noise_reduction"] = given.noise_reduction.type if given.noise_reduction else None
    if abilities.keywords:
        input_audio["prompt"] = (given.transcription.prompt or None) if given.transcription else None
    return {
        "instructions": session.instructions,
        "modalities": modalities(session.output_modalities, abilities),
        "voice": _voice(output.voice),
        "speed": output.speed,
        "input_audio": input_audio,
        "output_audio": _format(output.format, "session.audio.output.format"),
        "turn_detection": detection,
        "max_lead_ms": UNPACED_LEAD_MS,
        "tools": tools(session.tools),
        "tool_choice": tool_choice(session.tool_choice),
        "sampling": sampling(session, abilities),
        "task": None if session.answers_turns else "transcribe",
        "tool_filler": False if session.tool_filler is None else session.tool_filler,
        "idle_prompt": {"after_sec": 0},
    }


def response_config(response: ResponseFields, abilities: RealtimeAbilities) -> dict[str, Any]:
    """Return the ``session_config`` fields for a ``response.create``. Raises as ``session_config`` does."""
    config: dict[str, Any] = {}
    output = response.audio.output if response.audio else None
    if response.instructions is not None:
        config["instructions"] = response.instructions
    if response.output_modalities is not None:
        config["modalities"] = modalities(response.output_modalities, abilities)
    if output is not None and output.voice is not None:
        config["voice"] = _voice(output.voice)
    if response.tools is not None:
        config["tools"] = tools(response.tools)
    if response.tool_choice is not None:
        config["tool_choice"] = tool_choice(response.tool_choice)
    if wanted := {name: value for name, value in sampling(response, abilities).items() if value is not None}:
        config["sampling"] = wanted
    return config


def modalities(wanted: Sequence[str] | None, abilities: RealtimeAbilities) -> list[str]:
    """Return the modalities of the engine's answer. A spoken answer has text, too, as its transcript."""
    speaks = abilities.audio_output and (not wanted or "audio" in wanted)
    return [name for name, able in (("text", abilities.text_output), ("audio", speaks)) if able]


def turn_detection(wanted: TurnDetectionFields | None, abilities: RealtimeAbilities) -> dict[str, Any] | None:
    """Return ``turn_detection`` of a ``session_config``; None for an engine that does not take audio.

    A server without a model of turns uses silence instead. Raises InvalidValue.
    """
    place = "session.audio.input.turn_detection"
    if wanted is None or not abilities.turn_detection_types:
        return None
    if wanted.type not in ("server_vad", "semantic_vad", None):
        raise InvalidValue(f"{place}.type must be server_vad or semantic_vad", param=f"{place}.type")
    found = {
        "threshold": wanted.threshold,
        "prefix_padding_ms": wanted.prefix_padding_ms,
        "silence_duration_ms": wanted.silence_duration_ms,
        "interrupt_response": wanted.interrupt_response,
        "duck": wanted.type == "semantic_vad" if wanted.duck is None else wanted.duck,
    }
    if wanted.type == "semantic_vad":
        eagerness = wanted.eagerness or "auto"
        if eagerness not in tuple(_EAGERNESS_SILENCE_MS):  # a tuple, since it may be any JSON value
            raise InvalidValue(f"{place}.eagerness must be low, medium, high or auto", param=f"{place}.eagerness")
        if "semantic_vad" in abilities.turn_detection_types:
            return {**found, "type": "semantic_vad", "eagerness": eagerness}
        if wanted.silence_duration_ms is None:
            found["silence_duration_ms"] = _EAGERNESS_SILENCE_MS[eagerness]
    return {**found, "type": "server_vad"}


def sampling(fields: CommonFields, abilities: RealtimeAbilities) -> dict[str, Any]:
    """Return the sampling parameters; None for those that the engine does not support."""
    limit = None if fields.max_output_tokens == "inf" else fields.max_output_tokens
    return {
        "max_tokens": limit if abilities.max_tokens else None,
        "temperature": fields.temperature if abilities.temperature else None,
    }


def tools(wanted: Iterable[Mapping[str, Any]] | None) -> list[Any]:
    """Convert flat tools to the form of the chat API. Raises UnsupportedParameter unless all are functions."""
    found = []
    for index, one in enumerate(wanted or ()):
        if one.get("type") != "function":
            place = f"tools[{index}].type"
            raise UnsupportedParameter(f"{place}: tools other than functions are not supported", param=place)
        flat = {name: value for name, value in one.items() if name not in ("type", "async")}
        later = {"async": one["async"]} if "async" in one else {}
        found.append(dict(one) if "function" in one else {"type": "function", "function": flat, **later})
    return found


def flat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool of the chat API to the flat form."""
    return {**{name: value for name, value in tool.items() if name != "function"}, **tool["function"]}


def tool_choice(wanted: Any) -> Any:
    """Convert a tool choice to the form of the chat API."""
    if isinstance(wanted, Mapping) and wanted.get("type") == "function" and "name" in wanted:
        return {"type": "function", "function": {"name": wanted["name"]}}
    return wanted


def _voice(wanted: Any) -> Any:
    return wanted.get("id") if isinstance(wanted, Mapping) else wanted


def _format(wanted: FormatFields | str | None, place: str) -> dict[str, Any]:
    if not isinstance(wanted, FormatFields):
        wanted = FormatFields() if wanted is None else FormatFields(type=_BETA_FORMATS.get(wanted, wanted))
    found = _FORMATS.get(str(wanted.type))
    if found is None:
        raise UnsupportedFormat(f"{place}.type must be one of {', '.join(_FORMATS)}", param=f"{place}.type")
    encoding, rate = found
    if encoding is AudioEncoding.PCM16 and wanted.rate is not None:
        rate = wanted.rate
    return {"format": encoding.value, "sample_rate": rate}


def session_object(session: SessionFields, config: SessionConfig, *, session_id: str) -> dict[str, Any]:
    """Return the session object that a client sees, with the values in effect."""
    shown_input = {
        "format": _shown_format(config.input_audio.format, config.input_audio.sample_rate),
        "transcription": msgspec.to_builtins(session.audio.input.transcription),
        "noise_reduction": None if (kind := config.input_audio.noise_reduction) is UNSET else {"type": kind},
        "turn_detection": _shown_detection(
            config, creates=session.answers_turns, interrupts=session.interrupts_answers
        ),
    }
    if config.input_audio.echo is not UNSET:
        shown_input["echo"] = config.input_audio.echo
    shown: dict[str, Any] = {
        "type": "transcription" if session.transcribes_only else "realtime",
        "object": "realtime.session",
        "id": session_id,
        "expires_at": None,
        "include": None,
    }
    if session.transcribes_only:
        return {**shown, "object": "realtime.transcription_session", "audio": {"input": shown_input}}
    limit = config.sampling.max_tokens
    return {
        **shown,
        "model": config.model,
        "output_modalities": ["audio"] if "audio" in config.modalities else ["text"],
        "instructions": config.instructions,
        "tools": [flat_tool(one) for one in config.tools],
        "tool_choice": _shown_choice(config.tool_choice),
        "max_output_tokens": "inf" if limit is None else limit,
        "tracing": None,
        "truncation": "auto",
        "prompt": None,
        **({} if session.tool_filler is None else {"tool_filler": config.tool_filler}),
        "audio": {
            "input": shown_input,
            "output": {**shown_audio_output(config), "speed": config.speed},
        },
    }


def shown_audio_output(config: SessionConfig) -> dict[str, Any]:
    """Return the object ``audio.output`` that a client sees: format and voice."""
    audio = config.output_audio
    return {"format": _shown_format(audio.format, audio.sample_rate), "voice": config.voice or "default"}


def _shown_format(encoding: AudioEncoding, rate: int) -> dict[str, Any]:
    name = next(name for name, (known, _) in _FORMATS.items() if known is encoding)
    return {"type": name, "rate": rate} if encoding is AudioEncoding.PCM16 else {"type": name}


def _shown_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        return {"type": "function", "name": choice["function"]["name"]}
    return choice or "auto"


def _shown_detection(config: SessionConfig, *, creates: bool, interrupts: bool) -> dict[str, Any] | None:
    detection = config.turn_detection
    if detection is None:
        return None
    common = {
        "type": detection.type,
        "create_response": creates,
        "interrupt_response": interrupts,
    }
    if detection.type == "semantic_vad":
        return {**common, "eagerness": detection.eagerness}
    return {
        **common,
        "threshold": detection.threshold,
        "prefix_padding_ms": round(detection.prefix_padding_ms),
        "silence_duration_ms": round(detection.silence_ms),
        "idle_timeout_ms": None,
    }


# The body of ``POST /v1/realtime/client_secrets``.

#: The least and the longest lifetime of a client secret, in seconds; OpenAI's limits.
MIN_LIFETIME: Final = 10
MAX_LIFETIME: Final = 7200
DEFAULT_LIFETIME: Final = 600


class ExpiresAfter(Struct, frozen=True, kw_only=True):
    """When a client secret expires: ``seconds`` after it was created."""

    anchor: Literal["created_at"] | None = None
    seconds: Annotated[int, Meta(ge=MIN_LIFETIME, le=MAX_LIFETIME)] | None = None


class ClientSecretBody(Struct, frozen=True, kw_only=True):
    """The body of a request for a client secret; ``session`` is in the form of ``session.update``."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None

    @property
    def lifetime(self) -> int:
        """The lifetime of the secret, in seconds."""
        return (self.expires_after.seconds if self.expires_after else None) or DEFAULT_LIFETIME


def read_client_secret(body: Mapping[str, Any]) -> ClientSecretBody:
    """Parse the body of a request for a client secret. Raises InvalidValue, naming the field."""
    return converted(body, ClientSecretBody)
