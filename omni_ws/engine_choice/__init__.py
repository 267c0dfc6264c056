"""Our own engines, each as its entry point makes it of the configuration (``config.plugins``).

Each is imported only when it is made, since engines have heavy dependencies.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.config.parts import REMOTE_PARTS
from omni_ws.config.plugins import ENGINES, made
from omni_ws.config.startup import is_loopback
from omni_ws.engine.base import Engine

#: The name of the model of the embedded engine, which has none.
EMBEDDED_MODEL: Final = "omni-embedded"


def create_engine(config: ServerConfig) -> Engine:
    """Creates the configured engine, ours or another's. Raises ConfigurationError for one that is not to be had."""
    engine: Engine = made(ENGINES, config.engine or EngineName.EMBEDDED, of=config, kind=Engine)
    return engine


def echo_engine(config: ServerConfig) -> Engine:
    from omni_ws.engine.fake import EchoEngine, EchoSettings

    return EchoEngine(EchoSettings(**config.fake.model_dump()))


def remote_engine(config: ServerConfig) -> Engine:
    from omni_ws.engine.remote.engine import RemoteEngine

    remote = config.remote
    if "first_byte_timeout_sec" in config.llm.changed:
        remote = remote.model_copy(update={"first_byte_timeout_sec": config.llm.first_byte_timeout_sec})
    return RemoteEngine(remote, log_content=config.log_content, max_spoken_tokens=config.llm.max_spoken_tokens or None)


def composed_engine(config: ServerConfig) -> Engine:
    """An LLM with an ASR and a TTS: the parts that are named, the embedded ones, or vLLM's model with what it lacks."""
    from omni_ws.engine.composed.engine import ComposedEngine
    from omni_ws.engine_choice.parts import asr_of, llm_of, tts_of, vllm_engine

    llm, whole_vllm = config.llm, config.engine is EngineName.VLLM
    return ComposedEngine(
        vllm_engine(config, config.vllm) if whole_vllm else llm_of(config),
        asr=asr_of(config),
        tts=tts_of(config),
        name=None if whole_vllm else config.engine_name,
        model=None if whole_vllm or config.composed else EMBEDDED_MODEL,
        where_missing=whole_vllm,
        asr_optional=config.asr.choice.name == "embedded",
        # One on a server watches for the beginning of its answers itself, which it retries.
        first_byte_timeout_sec=None if llm.choice.name in REMOTE_PARTS else llm.first_byte_timeout_sec,
        tool_filler=(llm.tool_filler or "") if config.composed else "",
        max_spoken_tokens=llm.max_spoken_tokens or None,
        think_ahead=_thinks_ahead(config),
    )


def _thinks_ahead(config: ServerConfig) -> bool:
    """Whether answers are begun that may be for nothing: not where somebody may have to pay for them."""
    if config.llm.speculate is not None:
        return config.llm.speculate
    urls = [part.choice.url for part in (config.llm, config.tts) if part.choice.url is not None]
    return all(is_loopback(urlsplit(url).hostname or "") for url in urls)
