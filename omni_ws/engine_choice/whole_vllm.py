"""The vllm engine as a whole: what the model does not do by itself, embedded parts do."""

from __future__ import annotations

from importlib.util import find_spec

from omni_ws.config.model import ServerConfig, VllmConfig
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.embedded.config import EmbeddedConfig
from omni_ws.engine.vllm.engine import VllmEngine


def whole_vllm(config: ServerConfig) -> Engine:
    """The model, with the embedded ASR if it does not hear, and the embedded TTS if it has no Talker."""
    vllm = vllm_engine(config, config.vllm)
    if find_spec("pocketsphinx") is None:
        return vllm
    from omni_ws.engine.embedded.engine import EmbeddedEngine

    embedded = config.embedded
    parts = EmbeddedEngine(
        EmbeddedConfig(
            max_recognisers=embedded.max_recognisers, voice=embedded.voice, default_voice=embedded.default_voice
        )
    )
    return ComposedEngine(vllm, asr=parts, tts=parts, where_missing=True)


def vllm_engine(config: ServerConfig, settings: VllmConfig) -> VllmEngine:
    """The model alone, with what the server needs of it for token sessions and traces."""
    readouts = None
    if config.grpc.readout_vectors is not None and config.grpc.readout_manifest is not None:
        from omni_ws.engine.vllm.readout_vectors import load_vectors
        from omni_ws.engine.vllm.readouts import Readouts

        readouts = Readouts(load_vectors(config.grpc.readout_vectors, config.grpc.readout_manifest))
    return VllmEngine(settings, readouts=readouts, trace_root=config.profiler.root)
