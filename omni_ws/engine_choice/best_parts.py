"""The best ears and the best voice that start on this machine: neural ones, else those that need no weights."""

from __future__ import annotations

from importlib.util import find_spec

from omni_ws.config.model import ServerConfig, VoiceChoice
from omni_ws.engine.base import Engine
from omni_ws.engine.first_to_start import FirstToStart


def best_asr(config: ServerConfig) -> Engine | None:
    """Return Whisper, else PocketSphinx; None where the packages of neither are installed."""
    from omni_ws.engine.asr.pocketsphinx_engine import PocketSphinxEngine
    from omni_ws.engine.asr.whisper_engine import WhisperEngine

    most = config.embedded.max_recognisers
    engines: dict[str, Engine] = {"Whisper": WhisperEngine(max_recognisers=most)}
    if find_spec("pocketsphinx") is not None:
        engines["PocketSphinx"] = PocketSphinxEngine(max_recognisers=most)
    elif find_spec("ctranslate2") is None:
        return None
    return FirstToStart(engines)


def best_tts(config: ServerConfig) -> Engine:
    """Return hibari, else the first of the older voices, unless ``embedded.voice`` names one."""
    from omni_ws.engine.tts.synthesis_engine import SynthesisEngine

    choice, voice = config.embedded.voice, config.tts.voice or config.embedded.default_voice
    chosen = SynthesisEngine(choice, default_voice=voice)
    if choice is not VoiceChoice.AUTO:
        return chosen
    hibari = SynthesisEngine(VoiceChoice.HIBARI, default_voice=voice)
    return FirstToStart({"hibari": hibari, "an older voice": chosen})
