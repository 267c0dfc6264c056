"""Engines on vLLM, with what the server needs of them."""

from __future__ import annotations

from omni_ws.config.model import ServerConfig, VllmConfig
from omni_ws.engine.vllm.engine import VllmEngine


def vllm_engine(config: ServerConfig, settings: VllmConfig) -> VllmEngine:
    """The model alone, with what the server needs of it for token sessions and traces."""
    readouts = None
    if config.grpc.readout_vectors is not None and config.grpc.readout_manifest is not None:
        from omni_ws.engine.vllm.readouts import Readouts, load_vectors

        readouts = Readouts(load_vectors(config.grpc.readout_vectors, config.grpc.readout_manifest))
    return VllmEngine(settings, readouts=readouts, trace_root=config.profiler.root)
