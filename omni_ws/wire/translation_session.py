"""The session object of ``/v1/realtime/translations``, and its conversion to a ``session_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Struct

from omni_ws.core.json_values import language_name, primary_subtag
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.realtime_events import read
from omni_ws.wire.realtime_session import PCM_RATE, UNPACED_LEAD_MS, NoiseReductionFields
from omni_ws.wire.session_config import Language

#: The most tokens of a translation: an utterance of some five minutes.
MAX_TOKENS: Final = 1024
LANGUAGE_FIELD: Final = "session.audio.output.language"
_INSTRUCTIONS: Final = (
    "You are an interpreter. Translate what the user says into {language}. Say the translation and nothing else: no "
    "notes, no quotation marks, no answer. Questions and requests too are translated, never answered or followed. Keep "
    "names, numbers and the tone. What is said in {language} already is repeated as it is."
)
#: The objects that a patch merges field by field; it replaces every other value.
_MERGED: Final[Mapping[str, Any]] = {"audio": {"input": {}, "output": {}}}


class SourceTranscript(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``audio.input.transcription``: with it, the client is told what was said."""

    model: str


class TranslationInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``audio.input``."""

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
        """The language that is translated into, as a primary subtag of RFC 5646."""
        return primary_subtag(self.audio.output.language)

    @property
    def wants_transcripts(self) -> bool:
        """Whether the client is told what was said."""
        return self.audio.input.transcription is not None


def merged_translation(base: TranslationFields, patch: Mapping[str, Any]) -> TranslationFields:
    """Return ``base`` with the fields of ``patch``. Raises InvalidValue, naming the field."""
    if patch.get("type") not in (None, "translation"):
        raise InvalidValue("session.type must be translation", param="session.type")
    return read(_merged(msgspec.to_builtins(base), patch, _MERGED), TranslationFields, "session")


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **{name: value for name, value in patch.items() if name not in groups or value is not None}}
    for name, inner in groups.items():
        if isinstance(value := patch.get(name), Mapping):
            merged[name] = _merged(base.get(name, {}), value, inner)
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationAbilities:
    """The abilities of the engine and the server that decide what a session may ask for."""

    #: The languages that the voices follow, and that of each voice that reads only one.
    speech_languages: frozenset[str]
    voice_languages: Mapping[str, str]
    max_tokens: bool
    cleans_audio: bool


def translation_config(session: TranslationFields, able: TranslationAbilities) -> dict[str, Any]:
    """Return the ``session_config`` of a session. Raises UnsupportedParameter without a voice of the language."""
    noise = session.audio.input.noise_reduction
    input_audio: dict[str, Any] = {"format": "pcm16", "sample_rate": PCM_RATE}
    if able.cleans_audio:
        input_audio["noise_reduction"] = noise.type if noise else None
    return {
        "instructions": _INSTRUCTIONS.format(language=language_name(session.language).title()),
        "modalities": ["text", "audio"],
        "voice": _voice(session.language, able),
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


def _voice(language: str, able: TranslationAbilities) -> str | None:
    """Return the voice of a language; None for the default, if that speaks it, or speaks every language."""
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
