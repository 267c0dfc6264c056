"""What ``info`` says: the services of this server, with their models, voices and languages."""

from __future__ import annotations

from typing import Any, Final

from omni_ws import __version__
from omni_ws.core.chunks import Task
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.base import Engine, EngineCapabilities
from omni_ws.engine.composed.parts import PartDescription, Role, parts_of
from omni_ws.engine.llm.coming import has_model
from omni_ws.errors import InvalidValue, ModelNotFound

#: The name of all programs in ``info``: they are one server.
PROGRAM: Final = "omni_ws"
_DESCRIPTION: Final = "a real-time speech server"
#: The language of engines that do not say which they know: the rules and the smallest Whisper know no other.
_ENGLISH: Final = "en"
#: Who made what our engines run, and where it is from.
_MAKERS: Final = {
    "whisper": ("OpenAI", "https://github.com/openai/whisper"),
    "hibari": ("Maureese Williams", "https://github.com/MMWilliams/hibari"),
    "kokoro": ("hexgrad", "https://huggingface.co/hexgrad/Kokoro-82M"),
    "espeak-ng": ("espeak-ng", "https://github.com/espeak-ng/espeak-ng"),
}


def describe_services(engine: Engine) -> dict[str, Any]:
    """Return the data of ``info``."""
    able, parts = engine.capabilities, parts_of(engine)
    llm = parts[Role.LLM.value]

    def part_of(role: Role) -> PartDescription:
        found = parts[role.value] or llm  # which does that work itself
        return found or PartDescription(engine.name, engine.model)

    services: dict[str, Any] = {name: [] for name in ("asr", "tts", "handle", "intent", "wake", "mic", "snd")}
    if Task.TRANSCRIBE in able.tasks:
        ears = part_of(Role.ASR)
        model = _artifact(ears.model, ears, languages=_heard(able))
        services["asr"] = [
            _program(
                models=[model],
                supports_transcript_streaming=True,
                requires_external_vad=True,
                prefers_auto_gain_enabled=False,
                prefers_noise_reduction_enabled=False,
            )
        ]
    if Task.SPEECH in able.tasks:
        mouth = part_of(Role.TTS)
        voices = [_artifact(voice, mouth, languages=_read_by(voice, able)) for voice in able.voices]
        services["tts"] = [_program(voices=voices, supports_synthesize_streaming=able.extend)]
    if Task.CHAT in able.tasks and not able.chat_refusal:
        mind = part_of(Role.LLM)
        languages = sorted({_ENGLISH, *_heard(able), *able.speech_languages}) if has_model(engine) else [_ENGLISH]
        model = _artifact(mind.model, mind, languages=languages)
        services["handle"] = [_program(models=[model], supports_handled_streaming=True, supports_home_control=False)]
    return services


def _program(**more: Any) -> dict[str, Any]:
    return {
        "name": PROGRAM,
        "description": _DESCRIPTION,
        "attribution": {"name": PROGRAM, "url": ""},
        "installed": True,
        "version": __version__,
        **more,
    }


def _artifact(name: str, part: PartDescription, *, languages: list[str]) -> dict[str, Any]:
    maker, url = _MAKERS.get(part.name, (part.name, ""))
    where = f" at {', '.join(part.hosts)}" if part.hosts else ""
    return {
        "name": name,
        "description": f"{part.name}: {name}{where}",
        "attribution": {"name": maker, "url": url},
        "installed": True,
        "version": None,
        "languages": languages,
    }


def _heard(able: EngineCapabilities) -> list[str]:
    return sorted(able.languages) or [_ENGLISH]


def _read_by(voice: str, able: EngineCapabilities) -> list[str]:
    """Return the languages of a voice; of one that does not say, all that are spoken."""
    found = able.voice_languages.get(voice)
    if found is not None:
        language, _, region = found.partition("-")
        return [f"{language}-{region.upper()}" if len(region) == 2 else found]
    return sorted(able.speech_languages) or [_ENGLISH]


# What of it clients may name.


def check_program(name: str) -> None:
    """Raise InvalidValue for a program that is not in ``info``."""
    if name != PROGRAM:
        raise InvalidValue(f"there is no program {name[:64]!r}; info has {PROGRAM!r}", param="name")


def check_recogniser(name: str | None, engine: Engine) -> None:
    """Raise ModelNotFound for a model of speech recognition that is not in ``info``."""
    known = [model["name"] for program in describe_services(engine)["asr"] for model in program["models"]]
    if name is not None and name not in known:
        raise ModelNotFound(f"the model {name[:64]!r} is not served here; info has {', '.join(known)}", param="name")


def voice_of(language: str, able: EngineCapabilities) -> str | None:
    """Return the first voice of a language, of its region if there is one; None if no voice is known to have it."""
    wanted = language.replace("_", "-").lower()
    found = {voice: tag.lower() for voice, tag in able.voice_languages.items()}
    exact = (voice for voice, tag in found.items() if tag == wanted)
    near = (voice for voice, tag in found.items() if primary_subtag(tag) == primary_subtag(wanted))
    return next(exact, None) or next(near, None)
