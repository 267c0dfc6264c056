"""The table of voices: which may speak which language. Loads no voice."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TypeAlias

from omni_ws.config.model import ServerConfig, VoiceChoice

#: For each language (a primary subtag) the voices that may speak it, as "kokoro:ef_dora", the best first.
VoiceTable: TypeAlias = Mapping[str, Sequence[str]]


def voice_table(config: ServerConfig) -> VoiceTable:
    """Return the table of the configured ``languages``; empty where one voice speaks all of them.

    English is spoken by the TTS itself, unless ``tts.voices`` has it. A TTS that was named and speaks a language is the
    first choice for it.
    """
    own: Mapping[str, str] = config.tts.voices
    choice = config.tts.choice
    if choice.name not in ("embedded", "hibari", "kokoro", "espeak") or config.embedded.voice is VoiceChoice.NONE:
        return {}
    table: dict[str, Sequence[str]] = {}
    for language in dict.fromkeys((*config.languages, *own)):
        if language in own:
            table[language] = (own[language],)
        elif language != "en":
            usual = _usual_voices().get(language, [f"espeak:{language}"])
            named = [voice for voice in usual if voice.partition(":")[0] == choice.name]
            table[language] = (*named, *(voice for voice in usual if voice not in named))
    return table


@lru_cache
def _usual_voices() -> Mapping[str, list[str]]:
    text = (resources.files("omni_ws.engine.tts") / "voice_table.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
