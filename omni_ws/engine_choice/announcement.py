"""What the server says about the parts of its engine when it has started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.config.part_settings import PartConfig
from omni_ws.core.chunks import Modality, OutputModality
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.parts import HasParts, Role
from omni_ws.installing import fetch_command, install_command


def part_lines(engine: Engine, config: ServerConfig) -> Iterator[str]:
    """Yield a line for each part of an engine that is composed: its name and its model, or how to get one.

    How to get a voice is what the embedded TTS says of itself.
    """
    if not isinstance(engine, HasParts):
        return
    for role, part in engine.parts.items():
        if part is not None:
            yield f"{role.upper()}: {part.name}" + (f" ({part.model})" if part.model != part.name else "")
        elif role == Role.ASR:
            yield f"ASR: {_instead_of_asr(engine, config)}"
        elif OutputModality.AUDIO in engine.capabilities.output_modalities:
            yield "TTS: the LLM speaks by itself"
        else:
            yield "TTS: none" + _how_to_have_it(config.tts)


def _instead_of_asr(engine: Engine, config: ServerConfig) -> str:
    if Modality.AUDIO in engine.capabilities.input_modalities:
        return "the LLM hears by itself"
    if config.engine is not EngineName.REMOTE and config.asr.choice.name == "embedded":
        return f"none; it needs pocketsphinx: {install_command('embedded')}"
    return "none" + _how_to_have_it(config.asr)


def _how_to_have_it(part: PartConfig) -> str:
    return f", as --{part.part} says" if part.choice.name == "none" else ""


def turn_lines(engine: Engine, turn_detection_types: Sequence[str]) -> Iterator[str]:
    """Yield a line about the end of turns, where an engine hears and speech can be detected."""
    if Modality.AUDIO not in engine.capabilities.input_modalities or not turn_detection_types:
        return
    if "semantic_vad" in turn_detection_types:
        yield "end of turns: Smart Turn (semantic_vad)"
    else:
        yield f"end of turns: silence; to judge by the voice, too: {fetch_command('smart-turn')}"
