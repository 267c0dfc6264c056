"""The session object of OpenAI's Realtime API, the ``session_config`` that it stands for, and client secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from omni_ws.core.chunks import AudioEncoding
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter
from omni_ws.wire.openai_fields import convert_body, object_field
from omni_ws.wire.session_config import SessionConfig

PCM_RATE: Final = 24_000
G711_RATE: Final = 8_000
#: OpenAI sends audio as fast as it is made, and its clients play it and say what was heard.
UNPACED_LEAD_MS: Final = 24 * 3600 * 1000

_FORMATS: Final = {
    "audio/pcm": (AudioEncoding.PCM16, PCM_RATE),
    "audio/pcmu": (AudioEncoding.PCMU, G711_RATE),
    "audio/pcma": (AudioEncoding.PCMA, G711_RATE),
}
#: The names of the beta version.
_BETA_FORMATS: Final = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
#: Where a field of the beta version is in the session object now.
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
#: What is merged field by field; every other value replaces the one before.
_MERGED: Final = frozenset({"audio", "audio.input", "audio.output"})
#: The fields that have an effect, or are shown.
_KNOWN: Final = _MERGED | {
    *("type", "instructions", "output_modalities", "tools", "tool_choice", "max_output_tokens", "temperature"),
    *("audio.input.format", "audio.input.transcription", "audio.input.turn_detection"),
    *("audio.output.format", "audio.output.voice", "audio.output.speed"),
}
#: What of ``transcription`` is shown again.
_TRANSCRIPTION: Final = ("model", "language", "prompt")
#: Bytes of JSON of a session object, which is kept as long as the session.
MAX_SESSION_BYTES: Final = 1 << 20
#: The turn detection of a session that says nothing of it.
_DEFAULT_DETECTION: Final = {"type": "server_vad"}
#: The silence that ends a turn by ``eagerness``, where no model judges pauses.
_EAGERNESS_SILENCE_MS: Final = {"low": 1000, "medium": 500, "auto": 500, "high": 300}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeAbilities:
    """What the engine has, as far as it decides what a session asks of it."""

    audio_output: bool
    text_output: bool
    turn_detection_types: tuple[str, ...]
    languages: frozenset[str]
    temperature: bool
    max_tokens: bool


def current_names(session: Mapping[str, Any]) -> dict[str, Any]:
    """The session object with the fields of the beta version under their names of today. Raises InvalidValue."""
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


def merged_session(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the fields of ``patch`` that are known; null is a value. Raises InvalidValue."""
    merged = _merged(base, current_names(patch), "")
    if len(msgspec.json.encode(merged)) > MAX_SESSION_BYTES:
        raise InvalidValue(f"the session must not exceed {MAX_SESSION_BYTES} bytes", param="session")
    return merged


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any], place: str) -> dict[str, Any]:
    merged = dict(base)
    for name, value in patch.items():
        path = f"{place}.{name}".lstrip(".")
        if path not in _KNOWN:
            continue
        if path in _MERGED:
            if value is not None and not isinstance(value, Mapping):
                raise InvalidValue(f"session.{path} must be an object", param=f"session.{path}")
            merged[name] = _merged(object_field(base, name), value or {}, path)
        else:
            merged[name] = value
    return merged


def session_config(session: Mapping[str, Any], abilities: RealtimeAbilities) -> dict[str, Any]:
    """The whole ``session_config`` of a session object: null where it leaves a field to the server.

    Raises InvalidValue or UnsupportedFormat.
    """
    audio = object_field(session, "audio", place="session.")
    given = object_field(audio, "input", place="session.audio.")
    output = object_field(audio, "output", place="session.audio.")
    transcription = object_field(given, "transcription", place="session.audio.input.")
    detection = turn_detection(given.get("turn_detection", _DEFAULT_DETECTION), abilities)
    answers = answers_turns(session)
    if detection is not None and not answers:
        detection["interrupt_response"] = False  # a turn must not cut short what is heard of the one before
    input_audio = _format(given.get("format"), "session.audio.input.format")
    if str(transcription.get("language") or "").lower().partition("-")[0] in abilities.languages:
        input_audio["language"] = transcription["language"]
    return {
        "instructions": session.get("instructions"),
        "modalities": modalities(session.get("output_modalities"), abilities),
        "voice": _voice(output.get("voice")),
        "speed": output.get("speed"),
        "input_audio": input_audio,
        "output_audio": _format(output.get("format"), "session.audio.output.format"),
        "turn_detection": detection,
        "max_lead_ms": UNPACED_LEAD_MS,
        "tools": tools(session.get("tools")),
        "tool_choice": tool_choice(session.get("tool_choice")),
        "sampling": sampling(session, abilities),
        "task": None if answers else "transcribe",
    }


def answers_turns(session: Mapping[str, Any]) -> bool:
    """Whether the end of a turn creates a response. Otherwise the turn is transcribed, and waits for one."""
    return not transcribes_only(session) and _detection_flag(session, "create_response")


def interrupts_answers(session: Mapping[str, Any]) -> bool:
    """Whether the beginning of a turn cancels the response in progress."""
    return not transcribes_only(session) and _detection_flag(session, "interrupt_response")


def transcribes_only(session: Mapping[str, Any]) -> bool:
    """Whether the session makes no responses at all."""
    return session.get("type") == "transcription"


def wants_transcripts(session: Mapping[str, Any]) -> bool:
    """Whether the client is sent what was heard."""
    given = object_field(object_field(session, "audio"), "input")
    return transcribes_only(session) or given.get("transcription") is not None or not answers_turns(session)


def _detection_flag(session: Mapping[str, Any], name: str) -> bool:
    wanted = object_field(object_field(session, "audio"), "input").get("turn_detection")
    return not isinstance(wanted, Mapping) or wanted.get(name) is not False


def response_config(response: Mapping[str, Any], abilities: RealtimeAbilities) -> dict[str, Any]:
    """The ``session_config`` that the fields of a ``response.create`` stand for. Raises as ``session_config`` does."""
    response = current_names(response)
    config: dict[str, Any] = {}
    if response.get("instructions") is not None:
        config["instructions"] = response["instructions"]
    if response.get("output_modalities") is not None:
        config["modalities"] = modalities(response["output_modalities"], abilities)
    output = object_field(object_field(response, "audio"), "output", place="audio.")
    if output.get("voice") is not None:
        config["voice"] = _voice(output["voice"])
    if response.get("tools") is not None:
        config["tools"] = tools(response["tools"])
    if response.get("tool_choice") is not None:
        config["tool_choice"] = tool_choice(response["tool_choice"])
    if wanted := {name: value for name, value in sampling(response, abilities).items() if value is not None}:
        config["sampling"] = wanted
    return config


def modalities(wanted: Any, abilities: RealtimeAbilities) -> list[str]:
    """What is asked of the engine: the text of spoken answers is their transcript."""
    if wanted is not None and (not isinstance(wanted, list) or not set(map(str, wanted)) <= {"text", "audio"}):
        raise InvalidValue("output_modalities must be a list of text or audio", param="output_modalities")
    speaks = abilities.audio_output and (not wanted or "audio" in wanted)
    return [name for name, able in (("text", abilities.text_output), ("audio", speaks)) if able]


def turn_detection(wanted: Any, abilities: RealtimeAbilities) -> dict[str, Any] | None:
    """The server's turn detection: by silence where it has no model of speech, none where the engine hears nothing.

    Raises InvalidValue.
    """
    place = "session.audio.input.turn_detection"
    if wanted is None or not abilities.turn_detection_types:
        return None
    if not isinstance(wanted, Mapping):
        raise InvalidValue(f"{place} must be an object", param=place)
    kind = wanted.get("type", "server_vad")
    if kind not in ("server_vad", "semantic_vad", None):
        raise InvalidValue(f"{place}.type must be server_vad or semantic_vad", param=f"{place}.type")
    names = ("threshold", "prefix_padding_ms", "silence_duration_ms", "interrupt_response")
    # One that is not given goes back to its default: a new object takes the place of the one before.
    found = {name: wanted.get(name) for name in names}
    if kind == "semantic_vad":
        eagerness = wanted.get("eagerness") or "auto"
        if eagerness not in _EAGERNESS_SILENCE_MS:
            raise InvalidValue(f"{place}.eagerness must be low, medium, high or auto", param=f"{place}.eagerness")
        if "semantic_vad" in abilities.turn_detection_types:
            return {**found, "type": "semantic_vad", "eagerness": eagerness}
        if found["silence_duration_ms"] is None:
            found["silence_duration_ms"] = _EAGERNESS_SILENCE_MS[eagerness]
    return {**found, "type": "server_vad"}


def sampling(fields: Mapping[str, Any], abilities: RealtimeAbilities) -> dict[str, Any]:
    """The sampling parameters; what the engine has not is left out."""
    limit = fields.get("max_output_tokens")
    temperature = fields.get("temperature")
    return {
        "max_tokens": None if limit == "inf" or not abilities.max_tokens else limit,
        "temperature": temperature if abilities.temperature else None,
    }


def tools(wanted: Any) -> list[Any]:
    """Tools in the form of the chat API. Raises InvalidValue for what is no list of objects."""
    if wanted is None:
        return []
    if not isinstance(wanted, list) or not all(isinstance(one, Mapping) for one in wanted):
        raise InvalidValue("tools must be a list of objects", param="tools")
    for index, one in enumerate(wanted):
        if one.get("type") != "function":
            place = f"tools[{index}].type"
            raise UnsupportedParameter(f"{place}: tools other than functions are not supported", param=place)
    return [
        {"type": one.get("type"), "function": {name: value for name, value in one.items() if name != "type"}}
        if "function" not in one
        else dict(one)
        for one in wanted
    ]


def tool_choice(wanted: Any) -> Any:
    """A tool choice in the form of the chat API."""
    if isinstance(wanted, Mapping) and wanted.get("type") == "function" and "name" in wanted:
        return {"type": "function", "function": {"name": wanted["name"]}}
    return wanted


def _voice(wanted: Any) -> Any:
    return wanted.get("id") if isinstance(wanted, Mapping) else wanted


def _format(wanted: Any, place: str) -> dict[str, Any]:
    if isinstance(wanted, str):
        wanted = {"type": _BETA_FORMATS.get(wanted, wanted)}
    if wanted is None:
        wanted = {"type": "audio/pcm"}
    if not isinstance(wanted, Mapping):
        raise InvalidValue(f"{place} must be an object", param=place)
    found = _FORMATS.get(str(wanted.get("type", "audio/pcm")))
    if found is None:
        raise UnsupportedFormat(f"{place}.type must be one of {', '.join(_FORMATS)}", param=f"{place}.type")
    encoding, rate = found
    if encoding is AudioEncoding.PCM16 and wanted.get("rate") is not None:
        rate = wanted["rate"]
    return {"format": encoding.value, "sample_rate": rate}


def session_object(session: Mapping[str, Any], config: SessionConfig, *, session_id: str) -> dict[str, Any]:
    """The session object that a client is shown, with the values in effect."""
    given = object_field(object_field(session, "audio"), "input")
    transcription = given.get("transcription")
    limit = config.sampling.max_tokens
    shown_input = {
        "format": _shown_format(config.input_audio.format, config.input_audio.sample_rate),
        "transcription": {name: transcription[name] for name in _TRANSCRIPTION if name in transcription}
        if isinstance(transcription, Mapping)
        else None,
        "noise_reduction": None,
        "turn_detection": _shown_detection(
            config, creates=answers_turns(session), interrupts=interrupts_answers(session)
        ),
    }
    shown: dict[str, Any] = {
        "type": "transcription" if session.get("type") == "transcription" else "realtime",
        "object": "realtime.session",
        "id": session_id,
        "expires_at": None,
        "include": None,
    }
    if shown["type"] == "transcription":
        return {**shown, "object": "realtime.transcription_session", "audio": {"input": shown_input}}
    return {
        **shown,
        "model": config.model,
        "output_modalities": ["audio"] if "audio" in config.modalities else ["text"],
        "instructions": config.instructions,
        "tools": [{"type": "function", **one["function"]} for one in config.tools],
        "tool_choice": _shown_choice(config.tool_choice),
        "max_output_tokens": "inf" if limit is None else limit,
        "tracing": None,
        "truncation": "auto",
        "prompt": None,
        "audio": {
            "input": shown_input,
            "output": {**shown_audio_output(config), "speed": config.speed},
        },
    }


def shown_audio_output(config: SessionConfig) -> dict[str, Any]:
    """Format and voice of what is spoken."""
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


# Bodies of ``POST /v1/realtime/client_secrets``.

#: Seconds; the limits are OpenAI's.
MIN_LIFETIME: Final = 10
MAX_LIFETIME: Final = 7200
DEFAULT_LIFETIME: Final = 600


class ExpiresAfter(Struct, frozen=True, kw_only=True):
    """When a client secret expires: ``seconds`` after it was created."""

    anchor: Literal["created_at"] | None = None
    seconds: Annotated[int, Meta(ge=MIN_LIFETIME, le=MAX_LIFETIME)] | None = None


class ClientSecretBody(Struct, frozen=True, kw_only=True):
    """What to create a client secret with; ``session`` is in the form of ``session.update``."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None

    @property
    def lifetime(self) -> int:
        """In seconds."""
        return (self.expires_after.seconds if self.expires_after else None) or DEFAULT_LIFETIME


def read_client_secret(body: Mapping[str, Any]) -> ClientSecretBody:
    """Raises InvalidValue, naming the field."""
    return convert_body(body, ClientSecretBody)
