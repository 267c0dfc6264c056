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
    from omni_ws.engine_choice.whole_vllm import whole_vllm

    return whole_vllm(config)
