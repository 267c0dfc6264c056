"""What is available on this machine for the parts of an engine, and which improvements can be suggested.

It looks for weights, and for the model that detects the ends of turns. Model servers: ``local_servers``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omni_ws.audio.vad import PACKAGE as DETECTOR_PACKAGE
from omni_ws.audio.vad import WEIGHTS as DETECTOR
from omni_ws.audio.vad import has_runtime
from omni_ws.config.model import EngineName, ServerConfig, VoiceChoice
from omni_ws.config.parts import AUTO, FETCHED_LLMS, PartConfig
from omni_ws.config.startup import is_loopback
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import Modality, OutputModality
from omni_ws.engine.asr.whisper_model import PINNED
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.parts import HasParts, Role
from omni_ws.engine.llm.coming import growing_llm
from omni_ws.engine.tts.voice_table import voice_table
from omni_ws.errors import EngineFailed
from omni_ws.installing import fetch_command
from omni_ws.weights.cache import fetched_file
from omni_ws.weights.sources import PinnedWeights, pinned_weights

if TYPE_CHECKING:
    from omni_ws.audio.smart_turn import SmartTurn

log = logging.getLogger(__name__)


# The model that tells whether a speaker has finished, for ``semantic_vad``

_TURN_WEIGHTS: Final = "smart-turn"


def turn_model(config: ServerConfig) -> SmartTurn | None:
    """Load the configured file, or else the fetched weights; return None without either. Fetches nothing. Blocks.

    Raises ConfigurationError if the configured file cannot be used.
    """
    path = config.embedded.turn_path
    if path is not None:
        try:
            return _loaded_turn_model(path)
        except EngineFailed as error:
            raise ConfigurationError([f"embedded.turn_path: {error}"]) from None
    file = fetched_file(_TURN_WEIGHTS)
    if file is None or not has_runtime():
        return None
    try:
        return _loaded_turn_model(file)
    except EngineFailed as error:
        log.warning("semantic_vad is not available: %s", error)
        return None


def _loaded_turn_model(path: Path) -> SmartTurn:
    from omni_ws.audio.smart_turn import SmartTurn  # loads numpy

    return SmartTurn(path)


# The weights that the parts would use

#: The packages that are required to use each of the weights, beside a runtime for those of ``_NETWORKS``.
_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "whisper-tiny-en": ("ctranslate2",),
    "whisper-base": ("ctranslate2",),
    "hibari": ("hibari",),
    "encyclopedia": (),
    "kokoro": ("hibari", "onnxruntime"),
    "kokoro-languages": ("hibari", "onnxruntime"),
    _TURN_WEIGHTS: (),
    DETECTOR: (),
    **dict.fromkeys(FETCHED_LLMS, ("xllamacpp",)),
}


_NETWORKS: Final = ("hibari", "kokoro", "kokoro-languages", _TURN_WEIGHTS, DETECTOR)


def wanted_weights(config: ServerConfig) -> tuple[PinnedWeights, ...]:
    """Return the weights for the configured and the default parts, as far as the required packages are installed."""
    names = dict.fromkeys(_wanted_names(config))
    return tuple(pinned_weights()[name] for name in names if _is_usable(name))


def _is_usable(name: str) -> bool:
    return all(map(find_spec, _PACKAGES[name])) and (name not in _NETWORKS or has_runtime())


def _wanted_names(config: ServerConfig) -> Iterator[str]:
    """Yield the names of these weights, the most useful first."""
    if config.engine is EngineName.FAKE:
        return
    asr, tts = config.asr.choice, config.tts.choice
    if config.llm.choice.name in FETCHED_LLMS:
        yield config.llm.choice.name
    elif config.engine in (None, EngineName.EMBEDDED) and config.llm.choice.name in (AUTO, "embedded", "rules"):
        yield "encyclopedia"
    if config.engine in (None, EngineName.EMBEDDED, EngineName.VLLM):
        if asr.name in ("embedded", "whisper") and (name := PINNED.get(config.whisper_model)) is not None:
            yield name
        if (tts.name == "hibari" and tts.model is None) or (
            tts.name == "embedded" and config.embedded.voice in (VoiceChoice.AUTO, VoiceChoice.HIBARI)
        ):
            yield "hibari"
        if tts.name == "kokoro" or (tts.name == "embedded" and config.embedded.voice is VoiceChoice.KOKORO):
            yield "kokoro"
        if any(voices[0].startswith("kokoro:") for voices in voice_table(config).values()):
            yield from ("kokoro", "kokoro-languages")
    if find_spec(DETECTOR_PACKAGE) is None:  # which brings them
        yield DETECTOR
    if config.embedded.turn_path is None:
        yield _TURN_WEIGHTS


# The log's lines at the start: the parts in use, and possible improvements


def part_lines(engine: Engine, config: ServerConfig) -> Iterator[str]:
    """Yield a line for each part of a composed engine: its name, and its model unless that begins with the name.

    The engine's own description says how to get a missing part.
    """
    if not isinstance(engine, HasParts):
        return
    for role, part in engine.parts.items():
        if part is not None:
            yield f"{role.upper()}: {part.name}" + (f" ({part.model})" if part.model.split(" ")[0] != part.name else "")
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
    """Yield a line about how ends of turns are detected, for an engine that hears and a server that detects speech."""
    if Modality.AUDIO not in engine.capabilities.input_modalities or not turn_detection_types:
        return
    if "semantic_vad" in turn_detection_types:
        yield "end of turns: Smart Turn (semantic_vad)"
    else:
        yield f"end of turns: silence; to judge by the voice, too: {fetch_command('smart-turn')}"


def advice(engine: Engine, config: ServerConfig) -> str | None:
    """Return a line about possible improvements of the parts, for a person who can restart the server.

    Returns None for parts that were configured by name, and for a server whose users are on other machines: they could
    not follow the advice.
    """
    if not is_loopback(config.host):
        return None
    if shortcomings := getattr(engine, "shortcomings", ()):
        return str(shortcomings[0])
    llm = growing_llm(engine)
    return None if llm is None else next(iter(llm.advice), None)
