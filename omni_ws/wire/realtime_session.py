"""The session objects of OpenAI's Realtime API, also for translations; their ``session_config``; client secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from omni_ws.core.chunks import AudioEncoding
from omni_ws.core.json_values import language_name, primary_subtag
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter
from omni_ws.wire.realtime_events import MAX_METADATA, read
from omni_ws.wire.session_config import Language, SessionConfig, converted, is_mcp

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
#: Models that hear without turn detection unless the client asks for it: it commits each utterance itself.
WITHOUT_TURNS: Final = ("gpt-realtime-whisper", "gpt-live-transcribe")
#: The most bytes of a session object as JSON; it is kept as long as the session.
MAX_SESSION_BYTES: Final = 1 << 20
#: OpenAI's limits on ``idle_timeout_ms``, and on ``speed``.
MIN_IDLE_MS: Final = 5_000
MAX_IDLE_MS: Final = 30_000
MIN_SPEED: Final = 0.25
MAX_SPEED: Final = 1.5
#: The voices do not speak more slowly: so does a session that asks for less.
MIN_VOICE_SPEED: Final = 0.5
#: The silence that ends a turn, by ``eagerness``, if no model judges the pauses.
_EAGERNESS_SILENCE_MS: Final = {"low": 1000, "medium": 500, "auto": 500, "high": 300}


#: What the model is told in place of the silence that ``idle_timeout_ms`` ends.
IDLE_TEXT: Final = "(The user has said nothing for {seconds:g} seconds.)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeAbilities:
    """The abilities of the engine that determine which fields of a session have an effect."""

    audio_output: bool
    text_output: bool
    turn_detection_types: tuple[str, ...]
    languages: frozenset[str]
    keywords: bool
    cleans_audio: bool
    temperature: bool
    max_tokens: bool


def current_names(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the session object with the fields of the API's beta version renamed to their present names."""
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
    """The object ``audio.input.transcription``. A client that reads the session sees only the fields that it set."""

    model: Any = UNSET
    language: Any = UNSET
    languages: list[str] | UnsetType | None = UNSET
    prompt: Any = UNSET
    keywords: list[str] | UnsetType | None = UNSET
    #: Without effect: it is only shown to the client.
    delay: Any = UNSET


class TurnDetectionFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input.turn_detection``. An update replaces it whole: absent fields get their defaults."""

    type: Any = "server_vad"
    threshold: Any = None
    prefix_padding_ms: Any = None
    silence_duration_ms: Any = None
    eagerness: Any = None
    create_response: Any = None
    interrupt_response: Any = None
    idle_timeout_ms: Annotated[float, Meta(ge=MIN_IDLE_MS, le=MAX_IDLE_MS)] | None = None
    #: Not a field of OpenAI's: whether an answer continues, lowered, until it is known whether speech interrupts it.
    duck: Any = None
    #: Not a field of OpenAI's: whether the server says "mm-hm" in pauses of long turns.
    backchannel: Any = None


class NoiseReductionFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input.noise_reduction``. ``strength`` has no effect: it is only shown to the client."""

    type: Any = None
    strength: Any = None


class InputFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input`` of a session. ``echo`` is an extension."""

    format: FormatFields | str | None = None
    transcription: TranscriptionFields | None = None
    noise_reduction: NoiseReductionFields | None = None
    echo: Any = None
    turn_detection: TurnDetectionFields | None = TurnDetectionFields()


class OutputFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of ``audio.output``."""

    format: FormatFields | str | None = None
    voice: Any = None
    speed: Annotated[float, Meta(ge=MIN_SPEED, le=MAX_SPEED)] | None = None


class AudioFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio`` of a session."""

    input: InputFields = InputFields()
    output: OutputFields = OutputFields()


class ReasoningFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``reasoning``."""

    effort: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None


class TokenLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``truncation.token_limits``."""

    post_instructions: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None


class RetentionRatio(Struct, frozen=True, kw_only=True, tag="retention_ratio", tag_field="type"):
    """The object ``truncation``: a history over the limit is truncated to ``retention_ratio`` times the limit."""

    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: TokenLimits | None = None


class CommonFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that a session and a response have in common."""

    instructions: Any = None
    output_modalities: list[Literal["text", "audio"]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: Any = None
    temperature: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None


class SessionFields(CommonFields, frozen=True, kw_only=True, omit_defaults=True):
    """The session object as the client has set it."""

    type: Any = None
    audio: AudioFields = AudioFields()
    truncation: Literal["auto", "disabled"] | RetentionRatio | None = None
    #: The next three have no effect: they are only shown to the client.
    include: Any = None
    tracing: Any = None
    prompt: Any = None
    #: An extension: whether the server says that a tool still works.
    tool_filler: Any = None

    @property
    def transcribes_only(self) -> bool:
        """Whether the session only transcribes, and makes no responses."""
        return bool(self.type == "transcription")

    @property
    def dictates(self) -> bool:
        """Whether the session transcribes without turn detection: the client commits the audio of each transcript."""
        return self.transcribes_only and self.audio.input.turn_detection is None

    @property
    def answers_turns(self) -> bool:
        """Whether the end of a turn creates a response. If not, the client has to request the response.

        Also true without turn detection, except for a session that only transcribes.
        """
        detection = self.audio.input.turn_detection
        return not self.transcribes_only and (detection is None or detection.create_response is not False)

    @property
    def interrupts_answers(self) -> bool:
        """Whether the start of a turn cancels the response in progress; without turn detection, as ``answers_turns``.

        A session that only transcribes has no responses.
        """
        detection = self.audio.input.turn_detection
        return not self.transcribes_only and (detection is None or detection.interrupt_response is not False)

    @property
    def wants_transcripts(self) -> bool:
        """Whether the client gets transcripts of the input."""
        return not self.answers_turns or self.audio.input.transcription is not None


class ResponseOutput(Struct, frozen=True):
    """The object ``audio.output`` of a response."""

    format: FormatFields | str | None = None
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
    """Return ``base`` with the known fields of ``patch``. Raises InvalidValue.

    Null sets a field to null, except ``audio``, ``audio.input`` and ``audio.output``, which it leaves as they are.
    """
    found = _merged(msgspec.to_builtins(base), current_names(patch), _MERGED)
    if found.get("type") == "transcription":
        _leave_out_turns(found)
    merged = read(found, SessionFields, "session")
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


def _leave_out_turns(session: dict[str, Any]) -> None:
    """Set ``turn_detection`` to null for a model without turn detection, unless the client has set the field."""
    given = session.get("audio", {}).get("input", {}) if isinstance(session.get("audio", {}), Mapping) else None
    transcription = given.get("transcription") if isinstance(given, Mapping) else None
    model = transcription.get("model") if isinstance(transcription, Mapping) else None
    if isinstance(given, dict) and isinstance(model, str) and model.startswith(WITHOUT_TURNS):
        given.setdefault("turn_detection", None)


def read_response(fields: Mapping[str, Any]) -> ResponseFields:
    """Parse the ``response`` of a ``response.create``. Raises InvalidValue."""
    return read(current_names(fields), ResponseFields)


def session_config(session: SessionFields, abilities: RealtimeAbilities) -> dict[str, Any]:
    """Return the whole ``session_config`` for a session object; fields that the client leaves to the server are null.

    Raises InvalidValue, UnsupportedFormat, or UnsupportedParameter for a tool.
    """
    given, output = session.audio.input, session.audio.output
    detection = turn_detection(given.turn_detection, abilities)
    if detection is not None and not session.answers_turns:
        detection["interrupt_response"] = False  # a turn must not cut short the transcript of the turn before
    input_audio = _format(given.format, "session.audio.input.format")
    heard = given.transcription or TranscriptionFields()
    input_audio |= _spoken(heard, abilities.languages)
    input_audio["echo"] = given.echo
    if abilities.cleans_audio:  # else it has no effect: OpenAI's clients may set it unasked
        input_audio["noise_reduction"] = given.noise_reduction.type if given.noise_reduction else None
    if abilities.keywords:
        input_audio["prompt"] = heard.prompt or None
        input_audio["keywords"] = heard.keywords or None
    return {
        "instructions": session.instructions,
        "modalities": modalities(session.output_modalities, abilities),
        "voice": _voice(output.voice),
        "speed": output.speed and max(output.speed, MIN_VOICE_SPEED),
        "input_audio": input_audio,
        "output_audio": _format(output.format, "session.audio.output.format"),
        "turn_detection": detection,
        "max_lead_ms": UNPACED_LEAD_MS,
        "tools": tools(session.tools),
        "tool_choice": tool_choice(session.tool_choice),
        "sampling": sampling(session, abilities),
        "task": None if session.answers_turns else "transcribe",
        "history": False if session.dictates else None,
        "tool_filler": False if session.tool_filler is None else session.tool_filler,
        "idle_prompt": _idle_prompt(None if session.transcribes_only else given.turn_detection),
    }


def _idle_prompt(wanted: TurnDetectionFields | None) -> dict[str, Any]:
    """Return the ``idle_prompt`` of a ``session_config``; its ``text`` tells the model of the silence.

    Raises InvalidValue.
    """
    if wanted is None or wanted.idle_timeout_ms is None:
        return {"after_sec": 0}
    if wanted.type == "semantic_vad":
        place = "session.audio.input.turn_detection.idle_timeout_ms"
        raise InvalidValue(f"{place} is supported with server_vad only", param=place)
    seconds = wanted.idle_timeout_ms / 1000
    return {"after_sec": seconds, "text": IDLE_TEXT.format(seconds=seconds)}


def _spoken(heard: TranscriptionFields, known: frozenset[str]) -> dict[str, Any]:
    """Return ``language`` and ``languages`` of ``input_audio``: the client's languages that the engine knows.

    If there are none, the language is detected.
    """
    named: list[Any] = [heard.language] if heard.language else heard.languages or []
    tags = dict.fromkeys(one for one in named if isinstance(one, str))
    languages = [one for one in tags if primary_subtag(one) in known]
    if len(languages) == 1:
        return {"language": languages[0], "languages": None}
    return {"language": None, "languages": languages or None}


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
    if output is not None and output.format is not None:
        config["output_audio"] = _format(output.format, "response.audio.output.format")
    if response.tools is not None:
        config["tools"] = tools(response.tools)
    if response.tool_choice is not None:
        config["tool_choice"] = tool_choice(response.tool_choice)
    wanted = {name: value for name, value in sampling(response, abilities).items() if value is not None}
    if response.max_output_tokens == "inf" and abilities.max_tokens:
        wanted["max_tokens"] = None  # whatever the limit of the session is
    if wanted:
        config["sampling"] = wanted
    return config


def modalities(wanted: Sequence[str] | None, abilities: RealtimeAbilities) -> list[str]:
    """Return the modalities of the engine's answer: text, wanted or not, if the engine has it, and audio if wanted.

    A spoken answer's text is its transcript. ``wanted`` None or empty: audio is wanted.
    """
    speaks = abilities.audio_output and (not wanted or "audio" in wanted)
    return [name for name, able in (("text", abilities.text_output), ("audio", speaks)) if able]


def turn_detection(wanted: TurnDetectionFields | None, abilities: RealtimeAbilities) -> dict[str, Any] | None:
    """Return ``turn_detection`` of a ``session_config``; None if ``wanted`` is, or the engine does not take audio.

    A server without the model for ``semantic_vad`` uses ``server_vad`` in its place. Raises InvalidValue.
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
        "backchannel": None,
    }
    if wanted.type == "semantic_vad":
        eagerness = wanted.eagerness or "auto"
        if eagerness not in tuple(_EAGERNESS_SILENCE_MS):  # a tuple, since it may be any JSON value
            raise InvalidValue(f"{place}.eagerness must be low, medium, high or auto", param=f"{place}.eagerness")
        if "semantic_vad" in abilities.turn_detection_types:
            return {**found, "type": "semantic_vad", "eagerness": eagerness, "backchannel": wanted.backchannel}
        if wanted.silence_duration_ms is None:
            found["silence_duration_ms"] = _EAGERNESS_SILENCE_MS[eagerness]
    return {**found, "type": "server_vad"}


def sampling(fields: CommonFields, abilities: RealtimeAbilities) -> dict[str, Any]:
    """Return ``sampling`` of a ``session_config``; null for parameters that the engine does not support."""
    limit = None if fields.max_output_tokens == "inf" else fields.max_output_tokens
    return {
        "max_tokens": limit if abilities.max_tokens else None,
        "temperature": fields.temperature if abilities.temperature else None,
    }


def tools(wanted: Iterable[Mapping[str, Any]] | None) -> list[Any]:
    """Convert flat tools to the form of the chat API; entries of MCP servers stay as they are.

    Raises UnsupportedParameter for all others.
    """
    found = []
    for index, one in enumerate(wanted or ()):
        if is_mcp(one):
            found.append(dict(one))
            continue
        if one.get("type") != "function":
            place = f"tools[{index}].type"
            raise UnsupportedParameter(
                f"{place}: tools other than functions and MCP servers are not supported", param=place
            )
        flat = {name: value for name, value in one.items() if name not in ("type", "async")}
        later = {"async": one["async"]} if "async" in one else {}
        found.append(dict(one) if "function" in one else {"type": "function", "function": flat, **later})
    return found


def flat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a function tool of the chat API to the flat form."""
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
        "noise_reduction": _shown_noise(session.audio.input.noise_reduction, config),
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
        "include": session.include,
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
        "tracing": session.tracing,
        "truncation": msgspec.to_builtins(session.truncation or "auto"),
        "prompt": session.prompt,
        **({} if session.parallel_tool_calls is None else {"parallel_tool_calls": session.parallel_tool_calls}),
        **({} if session.reasoning is None else {"reasoning": msgspec.to_builtins(session.reasoning)}),
        **({} if session.tool_filler is None else {"tool_filler": config.tool_filler}),
        "audio": {
            "input": shown_input,
            "output": {**shown_audio_output(config), "speed": config.speed},
        },
    }


def _shown_noise(wanted: NoiseReductionFields | None, config: SessionConfig) -> dict[str, Any] | None:
    if (kind := config.input_audio.noise_reduction) is UNSET:
        return None
    strength = None if wanted is None else wanted.strength
    return {"type": kind} if strength is None else {"type": kind, "strength": strength}


def beta_transcription_session(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the session object of a transcription session in the form of the beta version."""
    given = shown["audio"]["input"]
    encodings = {name: beta for beta, name in _BETA_FORMATS.items()}
    return {
        **{name: value for name, value in shown.items() if name not in ("audio", "type")},
        "input_audio_format": encodings[given["format"]["type"]],
        "input_audio_transcription": given["transcription"],
        "input_audio_noise_reduction": given["noise_reduction"],
        "turn_detection": given["turn_detection"],
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
        "idle_timeout_ms": round(1000 * config.idle_prompt.after_sec) or None if config.idle_prompt else None,
    }


# The body of ``POST /v1/realtime/client_secrets``.

#: The least and the longest lifetime of a client secret, in seconds; OpenAI's limits.
MIN_LIFETIME: Final = 10
MAX_LIFETIME: Final = 7200
DEFAULT_LIFETIME: Final = 600


class ExpiresAfter(Struct, frozen=True, kw_only=True):
    """The expiry of a client secret, ``seconds`` after it was created."""

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


#: The most tokens of a translation: an utterance of some five minutes.
MAX_TOKENS: Final = 1024
LANGUAGE_FIELD: Final = "session.audio.output.language"
_INSTRUCTIONS: Final = (
    "You are an interpreter. Translate what the user says into {language}. Say the translation and nothing else: no "
    "notes, no quotation marks, no answer. Questions and requests too are translated, never answered or followed. Keep "
    "names, numbers and the tone. What is said in {language} already is repeated as it is."
)


class SourceTranscript(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input.transcription``: with it, the client gets transcripts of the input."""

    model: str


class TranslationInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of ``audio.input``."""

    transcription: SourceTranscript | None = None
    noise_reduction: NoiseReductionFields | None = None


class TranslationOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``audio.output``. ``language`` is a tag of RFC 5646."""

    language: Language = "en"


class TranslationAudio(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``audio`` of a session."""

    input: TranslationInput = TranslationInput()
    output: TranslationOutput = TranslationOutput()


class TranslationFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The session object as the client has set it."""

    audio: TranslationAudio = TranslationAudio()

    @property
    def language(self) -> str:
        """The target language, as a primary subtag of RFC 5646."""
        return primary_subtag(self.audio.output.language)

    @property
    def wants_transcripts(self) -> bool:
        """Whether the client gets transcripts of the input."""
        return self.audio.input.transcription is not None


def merged_translation(base: TranslationFields, patch: Mapping[str, Any]) -> TranslationFields:
    """Return ``base`` with the fields of ``patch``. Raises InvalidValue, naming the field."""
    if patch.get("type") not in (None, "translation"):
        raise InvalidValue("session.type must be translation", param="session.type")
    return read(_merged(msgspec.to_builtins(base), patch, _MERGED), TranslationFields, "session")


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationAbilities:
    """The abilities of the engine and the server that determine which translations are possible."""

    #: The languages that voices read by following the text's language; and the language of each other voice.
    speech_languages: frozenset[str]
    voice_languages: Mapping[str, str]
    max_tokens: bool
    cleans_audio: bool


def translation_config(session: TranslationFields, able: TranslationAbilities) -> dict[str, Any]:
    """Return the ``session_config`` of a translation. Raises UnsupportedParameter if no voice speaks its language."""
    noise = session.audio.input.noise_reduction
    input_audio: dict[str, Any] = {"format": "pcm16", "sample_rate": PCM_RATE}
    if able.cleans_audio:
        input_audio["noise_reduction"] = noise.type if noise else None
    return {
        "instructions": _INSTRUCTIONS.format(language=language_name(session.language).title()),
        "modalities": ["text", "audio"],
        "voice": _voice_of(session.language, able),
        "input_audio": input_audio,
        "output_audio": {"format": "pcm16", "sample_rate": PCM_RATE},
        # Who speaks on is not answered, but translated: nothing is cut short.
        "turn_detection": {"type": "server_vad", "interrupt_response": False},
        "max_lead_ms": UNPACED_LEAD_MS,
        "sampling": {"max_tokens": MAX_TOKENS} if able.max_tokens else {},
        "history": False,
        "tool_filler": False,
        "idle_prompt": {"after_sec": 0},
    }


def _voice_of(language: str, able: TranslationAbilities) -> str | None:
    """Return the name of a voice for a language; None for the default voice, if it speaks this language or all.

    Raises UnsupportedParameter if no voice speaks the language.
    """
    if language in able.speech_languages:
        return None
    for voice, spoken in able.voice_languages.items():
        if primary_subtag(spoken) == language:
            return voice
    if not able.voice_languages:  # it says nothing of languages, as voices of servers do
        return None
    known = sorted({*able.speech_languages, *map(primary_subtag, able.voice_languages.values())})
    raise UnsupportedParameter(
        f"no voice speaks {language_name(language).title()}; voices speak: {', '.join(known)} "
        "(the server's --languages adds others)",
        param=LANGUAGE_FIELD,
    )


def translation_object(session: TranslationFields, *, session_id: str, model: str, expires_at: int) -> dict[str, Any]:
    """Return the session object that a client sees."""
    given = session.audio.input
    return {
        "id": session_id,
        "type": "translation",
        "object": "realtime.translation_session",
        "model": model,
        "expires_at": expires_at,
        "audio": {
            "input": {
                "transcription": msgspec.to_builtins(given.transcription),
                "noise_reduction": msgspec.to_builtins(given.noise_reduction),
            },
            "output": {"language": session.audio.output.language},
        },
    }
