"""Creates the configured engine."""

from __future__ import annotations

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.engine.base import Engine


def create_engine(config: ServerConfig) -> Engine:
    """Creates the configured engine. Imports only that one, since engines have heavy dependencies."""
    if config.engine is EngineName.FAKE:
        from omni_ws.engine.fake import EchoEngine, EchoSettings

        return EchoEngine(EchoSettings(**config.fake.model_dump()))
    if config.engine is EngineName.EMBEDDED:
        from omni_ws.engine.embedded.config import EmbeddedConfig
        from omni_ws.engine.embedded.engine import EmbeddedEngine

        embedded = config.embedded
        return EmbeddedEngine(
            EmbeddedConfig(
                max_recognisers=embedded.max_recognisers,
                voice=embedded.voice,
                default_voice=embedded.default_voice,
            )
        )
    if config.engine is EngineName.REMOTE:
        from omni_ws.engine.remote.engine import RemoteEngine

        return RemoteEngine(config.remote)
    assert config.engine is EngineName.VLLM
    from omni_ws.engine.vllm.engine import VllmEngine

    readouts = None
    if config.grpc.readout_vectors is not None and config.grpc.readout_manifest is not None:
        from omni_ws.engine.vllm.readout_vectors import load_vectors
        from omni_ws.engine.vllm.readouts import Readouts

        readouts = Readouts(load_vectors(config.grpc.readout_vectors, config.grpc.readout_manifest))
    return VllmEngine(config.vllm, readouts=readouts, trace_root=config.profiler.root)
