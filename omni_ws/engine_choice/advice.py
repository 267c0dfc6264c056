"""What the log says at the start: the parts that were chosen, and what would make them better."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from omni_ws.config.model import ServerConfig
from omni_ws.config.parts import PartConfig
from omni_ws.config.startup import is_loopback
from omni_ws.core.chunks import Modality, OutputModality
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.parts import HasParts, Role, parts_of
from omni_ws.installing import fetch_command


def part_lines(engine: Engine, config: ServerConfig) -> Iterator[str]:
    """Yield a line for each part of an engine that is composed: its name and its model.

    How to get one that is missing is what the engine says of itself.
    """
    if not isinstance(engine, HasParts):
        return
    for role, part in engine.parts.items():
        if part is not None:
            yield f"{role.upper()}: {part.name}" + (f" ({part.model})" if part.model != part.name else "")
        elif role == Role.ASR:
            hears = Modality.AUDIO in engine.capabilities.input_modalities
            yield "ASR: the LLM hears by itself" if hears else "ASR: none" + _as_chosen(config.asr)
        elif OutputModality.AUDIO in engine.capabilities.output_modalities:
            yield "TTS: the LLM speaks by itself"
        else:
            yield "TTS: none" + _as_chosen(config.tts)


def _as_chosen(part: PartConfig) -> str:
    return f", as --{part.part} says" if part.choice.name == "none" else ""


def turn_lines(engine: Engine, turn_detection_types: Sequence[str]) -> Iterator[str]:
    """Yield a line about the end of turns, where an engine hears and speech can be detected."""
    if Modality.AUDIO not in engine.capabilities.input_modalities or not turn_detection_types:
        return
    if "semantic_vad" in turn_detection_types:
        yield "end of turns: Smart Turn (semantic_vad)"
    else:
        yield f"end of turns: silence; to judge by the voice, too: {fetch_command('smart-turn')}"


_BETTER_THAN_RULES: Final = (
    "To talk with a language model instead of rules, start the server with --llm ollama, --llm qwen (1.1 GB), "
    "or --llm and a URL"
)


def advice(engine: Engine, config: ServerConfig, suggested: Iterable[str] = ()) -> str | None:
    """Return a line on what would make the parts better, for a person who can start the server in another way.

    ``suggested`` are servers of models that were found. None for parts that somebody chose by name, and where users are
    on other machines: they cannot follow it.
    """
    if not is_loopback(config.host):
        return None
    if shortcomings := getattr(engine, "shortcomings", ()):
        return str(shortcomings[0])
    llm = parts_of(engine)[Role.LLM]
    if config.engine is None and config.llm.use is None and llm is not None and llm.name == "rules":
        return next(iter(suggested), _BETTER_THAN_RULES)
    return None
