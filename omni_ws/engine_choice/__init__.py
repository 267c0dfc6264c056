"""Creates the configured engine."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.config.parts import REMOTE_PARTS
from omni_ws.config.startup import is_loopback
from omni_ws.engine.base import Engine

#: The name of the model of the embedded engine, which has none.
EMBEDDED_MODEL: Final = "omni-embedded"


def create_engine(config: ServerConfig) -> Engine:
    """Creates the configured engine. Imports only that one, since engines have heavy dependencies."""
    if config.composed:
        return _composed(config)
    match config.engine:
        case EngineName.FAKE:
            from omni_ws.engine.fake import EchoEngine, EchoSettings

            return EchoEngine(EchoSettings(**config.fake.model_dump()))
        case EngineName.REMOTE:
            from omni_ws.engine.remote.engine import RemoteEngine

            remote = config.remote
            if "first_byte_timeout_sec" in config.llm.changed:
                remote = remote.model_copy(update={"first_byte_timeout_sec": config.llm.first_byte_timeout_sec})
            return RemoteEngine(
                remote, log_content=config.log_content, max_spoken_tokens=config.llm.max_spoken_tokens or None
            )
        case EngineName.VLLM:
            return _whole_vllm(config)
    from omni_ws.engine.composed.engine import ComposedEngine
    from omni_ws.engine.llm.rules_engine import RulesEngine
    from omni_ws.engine_choice.parts import asr_of, tts_of

    return ComposedEngine(
        RulesEngine(),
        asr=asr_of(config),
        tts=tts_of(config),
        asr_optional=True,
        name="embedded",
        model=EMBEDDED_MODEL,
        max_spoken_tokens=config.llm.max_spoken_tokens or None,
        think_ahead=_thinks_ahead(config),
    )


def _composed(config: ServerConfig) -> Engine:
    """The engine that the parts in the settings make."""
    from omni_ws.engine.composed.engine import ComposedEngine
    from omni_ws.engine_choice.parts import asr_of, llm_of, tts_of

    return ComposedEngine(
        llm_of(config),
        asr=asr_of(config),
        tts=tts_of(config),
        asr_optional=config.asr.choice.name == "embedded",
        name=config.engine_name,
        # One on a server watches for the beginning of its answers itself, which it retries.
        first_byte_timeout_sec=None if config.llm.choice.name in REMOTE_PARTS else config.llm.first_byte_timeout_sec,
        tool_filler=config.llm.tool_filler or "",
        max_spoken_tokens=config.llm.max_spoken_tokens or None,
        think_ahead=_thinks_ahead(config),
    )


def _whole_vllm(config: ServerConfig) -> Engine:
    """The model, with the embedded ASR if it does not hear, and the embedded TTS if it has no Talker."""
    from omni_ws.engine.composed.engine import ComposedEngine
    from omni_ws.engine_choice.parts import asr_of, tts_of
    from omni_ws.engine_choice.vllm import vllm_engine

    return ComposedEngine(
        vllm_engine(config, config.vllm),
        asr=asr_of(config),
        tts=tts_of(config),
        where_missing=True,
        asr_optional=config.asr.choice.name == "embedded",
        first_byte_timeout_sec=config.llm.first_byte_timeout_sec,
        max_spoken_tokens=config.llm.max_spoken_tokens or None,
        think_ahead=_thinks_ahead(config),
    )


def _thinks_ahead(config: ServerConfig) -> bool:
    """Whether answers are begun that may be for nothing: not where somebody may have to pay for them."""
    if config.llm.speculate is not None:
        return config.llm.speculate
    urls = [part.choice.url for part in (config.llm, config.tts) if part.choice.url is not None]
    return all(is_loopback(urlsplit(url).hostname or "") for url in urls)
