"""The engines of this package and their parts, created from the configuration by entry points (``config.plugins``).

Each engine is imported only when it is created, since engines have heavy dependencies. The module begins with what this
machine has for the parts: weights, voices, the model that detects the ends of turns, and servers of language models.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import orjson

from omni_ws.audio.vad import PACKAGE as DETECTOR_PACKAGE
from omni_ws.audio.vad import WEIGHTS as DETECTOR
from omni_ws.audio.vad import has_runtime
from omni_ws.config.loading import is_loopback
from omni_ws.config.model import EngineName, ServerConfig, VllmConfig, VoiceChoice
from omni_ws.config.parts import (
    AUTO,
    ENGINES,
    FETCHED_LLMS,
    LOCAL_PORTS,
    OPENAI_KEY,
    REMOTE_PARTS,
    SERVER,
    PartConfig,
    made,
)
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import Modality, OutputModality
from omni_ws.core.json_values import check_values
from omni_ws.engine.asr.whisper import PINNED
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.parts import HasParts, Role, growing_llm
from omni_ws.errors import EngineFailed, InvalidFrame
from omni_ws.installing import fetch_command
from omni_ws.weights import (
    PinnedWeights,
    fetched_file,
    pinned_weights,
)

if TYPE_CHECKING:
    from omni_ws.audio.smart_turn import SmartTurn
    from omni_ws.engine.llm.rules_engine import RulesEngine
    from omni_ws.engine.tts.voice_process import VoiceProcess


log = logging.getLogger(__name__)


# The model that tells whether a speaker has finished, for ``semantic_vad``

_TURN_WEIGHTS: Final = "smart-turn"


def turn_model(config: ServerConfig) -> SmartTurn | None:
    """Load the model for ends of turns from the configured file, or else from the fetched weights. Blocks.

    Returns None if there is neither (nothing is fetched), or if the fetched weights cannot be used here. Raises
    ConfigurationError if the configured file cannot be used.
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
    """Return the weights that the configured and the default parts can use, fetched or not.

    Weights whose required packages are not installed are left out.
    """
    names = dict.fromkeys(_wanted_names(config))
    return tuple(pinned_weights()[name] for name in names if _is_usable(name))


def _is_usable(name: str) -> bool:
    return all(map(find_spec, _PACKAGES[name])) and (name not in _NETWORKS or has_runtime())


def _wanted_names(config: ServerConfig) -> Iterator[str]:
    """Yield the names of the weights for the configured and the default parts, the most useful first."""
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
    """Yield a log line for each part of a composed engine: its name, and its model unless that begins with the name.

    How to get a missing part is in the engine's own description.
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
    """Yield a log line about how ends of turns are detected, if the engine takes audio and turns are detected."""
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


# Servers of language models that run on this machine: which there are, which may be used, and with which model.
#
# Only loopback is looked at, at the usual ports, without keys and with one request or two a server. What another user
# of this machine runs is named and not used: it would read every conversation.

T = TypeVar("T")

#: The time-out for all servers together.
LOOK_SEC: Final = 0.3
_MOST_BYTES: Final = 1 << 20
#: The longest name of a model.
_MOST_NAME_CHARACTERS: Final = 200
#: How many of a server's models are looked at.
_MOST_MODELS: Final = 1000
#: The owner that the servers of this package name for their models.
_OWN_KIND: Final = "omni_ws"
#: Words in the names of models that do not chat.
_NO_CHAT: Final = ("embed", "rerank", "whisper", "bge-", "-tts", "tts-", "minilm", "colbert")


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A port on which a model server may listen, and the name for it in ``--llm``."""

    kind: str
    port: int
    use: str


#: In the order in which they are used.
LOCAL_SERVERS: Final = (
    LocalServer("Ollama", LOCAL_PORTS["ollama"], "ollama"),
    LocalServer("LM Studio", LOCAL_PORTS["lmstudio"], "lmstudio"),
    LocalServer("a server like vLLM", 8000, "http://127.0.0.1:8000/v1"),
    LocalServer("llama.cpp", LOCAL_PORTS["llamacpp"], "llamacpp"),
)


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server of language models that serves ``model``.

    ``why_not`` is the reason why only a person may choose this server; empty if it may be used automatically.
    """

    server: LocalServer
    model: str
    why_not: str = ""

    @property
    def suggestion(self) -> str:
        """A log line that tells how to use this server."""
        because = f" ({self.why_not})" if self.why_not else ""
        return (
            f"{self.server.kind} on this machine serves {self.model}{because}: to talk with it, start with "
            f"--llm {self.server.use}"
        )


async def local_servers(own_port: int, *, timeout: float | None = None) -> tuple[FoundServer, ...]:
    """Return the servers on loopback that serve a chat model, as found within ``timeout`` seconds (LOOK_SEC).

    The port of this server, ``own_port``, is left out.
    """
    end = asyncio.get_running_loop().time() + (LOOK_SEC if timeout is None else timeout)
    looks = (_until(end, _look_at(server)) for server in LOCAL_SERVERS if server.port != own_port)
    # Whose they are is looked up meanwhile: a server that does not answer uses up the time-out.
    uids, looked = await asyncio.gather(_until(end, asyncio.to_thread(listener_owners)), asyncio.gather(*looks))
    return tuple(_judged(one, uids) for one in looked if one is not None)


async def _until(end: float, look: Awaitable[T]) -> T | None:
    """Return the result of ``look``; None if it fails, or is not done by ``end``, a time of the event loop."""
    with suppress(OSError, TimeoutError, ValueError, InvalidFrame):
        async with asyncio.timeout_at(end):
            return await look
    return None


def _judged(found: FoundServer, uids: dict[int, set[int]] | None) -> FoundServer:
    """Set ``why_not`` unless this user or root runs the server, and return the result."""
    if found.why_not:
        return found
    if uids is None or not (owners := uids.get(found.server.port)):
        return FoundServer(found.server, found.model, "it cannot be told whose it is")
    if owners <= {os.getuid(), 0}:
        return found
    return FoundServer(found.server, found.model, "another user of this machine runs it")


# Whose a listening port is

#: The state LISTEN in /proc/net/tcp.
_LISTEN: Final = "0A"
#: The addresses to which a connection to 127.0.0.1 may lead, as /proc/net writes them on a little-endian machine.
_ANSWERING: Final = frozenset(
    {
        "0100007F",
        "00000000",
        "0" * 32,
        "0000000000000000FFFF00000100007F",
        "0000000000000000FFFF000000000000",
    }
)


def listener_owners(
    tables: Sequence[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6")),
) -> dict[int, set[int]] | None:
    """Return, by port, the ids of the users whose processes listen on 127.0.0.1; None if they are unknown. Blocks."""
    if sys.platform != "linux" or sys.byteorder != "little":
        return None
    owners: dict[int, set[int]] = {}
    told = False
    for table in tables:
        with suppress(OSError), table.open(encoding="ascii") as lines:
            told = True
            next(lines, "")
            for line in lines:
                for port, uid in _listener(line.split()):
                    owners.setdefault(port, set()).add(uid)
    return owners if told else None


def _listener(fields: list[str]) -> Iterator[tuple[int, int]]:
    if len(fields) > 7 and fields[3] == _LISTEN:
        address, _, port = fields[1].partition(":")
        if address in _ANSWERING:
            yield int(port, 16), int(fields[7])


# Which model it serves


async def _look_at(server: LocalServer) -> FoundServer | None:
    """Return the server with a chat model, preferably a loaded one; None without one.

    Raises OSError, ValueError and InvalidFrame.
    """
    if server.use == "ollama":
        return await _ollama(server)
    if server.use == "lmstudio":
        return await _lm_studio(server)
    if not (models := await _chatting(server)):
        return None
    owner = models[0].get("owned_by")
    expected = ("llamacpp",) if server.use == "llamacpp" else ("vllm", "sglang")
    return FoundServer(server, _name(models[0], "id"), "" if owner in expected else "it is not told what it is")


async def _ollama(server: LocalServer) -> FoundServer | None:
    """Return Ollama with its first chat model that runs on this machine, a loaded one if possible."""
    loaded, there = await asyncio.gather(
        *(_get_json(server.port, path) for path in ("/api/ps", "/api/tags")), return_exceptions=True
    )
    if isinstance(there, BaseException):
        if not isinstance(there, (OSError, ValueError, InvalidFrame)):
            raise there
        return await _any_model(server)
    listed = [*([] if isinstance(loaded, BaseException) else _listed(loaded, "models")), *_listed(there, "models")]
    by_name = {name: one for one in _listed(there, "models") if (name := _name(one, "name"))}
    for one in listed:
        name = _name(one, "name")
        # What is loaded is described in full only in the list of all.
        if _chats(name) and not any(map(_is_elsewhere, (one, by_name.get(name, {})))) and not _embeds(one):
            return FoundServer(server, name)
    return None


def _is_elsewhere(model: dict[str, Any]) -> bool:
    """Whether Ollama forwards a model to its cloud."""
    name = str(model.get("name"))
    return bool(model.get("remote_host") or model.get("remote_model")) or name.endswith(("-cloud", ":cloud"))


def _embeds(model: dict[str, Any]) -> bool:
    """Whether a model of Ollama is of a family that turns text into vectors."""
    details = model.get("details")
    return isinstance(details, dict) and "bert" in str(details.get("family"))


async def _lm_studio(server: LocalServer) -> FoundServer | None:
    """Return LM Studio with its first loaded chat model, or else its first chat model, which it loads on request."""
    try:
        described = _listed(await _get_json(server.port, "/api/v0/models"), "data")
    except (ValueError, InvalidFrame):
        return await _any_model(server)
    able = [one for one in described if one.get("type") in ("llm", "vlm") and _chats(_name(one, "id"))]
    able.sort(key=lambda one: one.get("state") != "loaded")
    return FoundServer(server, _name(able[0], "id")) if able else None


async def _any_model(server: LocalServer) -> FoundServer | None:
    """Return an unknown or old server at this port with its first chat model, not to be used automatically."""
    models = await _chatting(server)
    return FoundServer(server, _name(models[0], "id"), f"it is not known to be {server.kind}") if models else None


async def _chatting(server: LocalServer) -> list[dict[str, Any]]:
    """Return the chat models of ``/v1/models``; none if the server is one of this package."""
    models = [one for one in _listed(await _get_json(server.port, "/v1/models"), "data") if _chats(_name(one, "id"))]
    return [] if any(one.get("owned_by") == _OWN_KIND for one in models) else models


def _listed(content: Any, key: str) -> list[dict[str, Any]]:
    listed = content.get(key) if isinstance(content, dict) else None
    return [one for one in listed[:_MOST_MODELS] if isinstance(one, dict)] if isinstance(listed, list) else []


def _name(model: dict[str, Any], key: str) -> str:
    """Return the name of a model, in its field ``key``; "" if it is missing, too long or not printable."""
    name = model.get(key)
    if isinstance(name, str) and name.isprintable() and len(name) <= _MOST_NAME_CHARACTERS:
        return name
    return ""


def _chats(name: str) -> bool:
    return bool(name) and not any(word in name.lower() for word in _NO_CHAT)


async def _get_json(port: int, path: str) -> Any:
    """Return the JSON at ``path``, using only the standard library. Raises OSError, ValueError and InvalidFrame."""
    async with _answer(port, path) as reader:
        received = bytearray()
        while piece := await reader.read(1 << 16):
            received += piece
            if len(received) > _MOST_BYTES:
                raise ValueError("no list of models is as long")
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    if head[:5] != b"HTTP/" or head.split(None, 2)[1:2] != [b"200"]:
        raise ValueError("no list of models")
    check_values(body)
    return orjson.loads(body)


@asynccontextmanager
async def _answer(port: int, path: str) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        # With HTTP/1.0 the body ends with the connection.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json\r\n\r\n".encode())
        yield reader
    finally:
        writer.transport.abort()


# The table of voices: which may speak which language.


def voice_table(config: ServerConfig) -> Mapping[str, Sequence[str]]:
    """Return, for each language in ``languages`` and ``tts.voices``, the voices that may speak it, the best first.

    Empty without a voice, and for a TTS that speaks all languages itself. English is listed only if ``tts.voices``
    names a voice for it, since the TTS speaks it itself. If a TTS was chosen by name, its voices come first.
    """
    own: Mapping[str, str] = config.tts.voices
    choice = config.tts.choice
    if choice.name not in ("embedded", "hibari", "kokoro", "espeak") or config.embedded.voice is VoiceChoice.NONE:
        return {}
    table: dict[str, Sequence[str]] = {}
    for language in dict.fromkeys((*config.languages, *own)):
        if language in own:
            table[language] = (own[language],)
        elif language != "en":
            usual = _usual_voices().get(language, [f"espeak:{language}"])
            named = [voice for voice in usual if voice.partition(":")[0] == choice.name]
            table[language] = (*named, *(voice for voice in usual if voice not in named))
    return table


@lru_cache
def _usual_voices() -> Mapping[str, list[str]]:
    text = (resources.files("omni_ws.engine.tts") / "voice_table.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


#: The name under which the embedded engine is served: it has no model of its own.
EMBEDDED_MODEL: Final = "omni-embedded"


def create_engine(config: ServerConfig) -> Engine:
    """Create the configured engine, of this or another package. Raises ConfigurationError or EngineFailed."""
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
    """Create an engine from an LLM, an ASR and a TTS: the configured or embedded ones, or vLLM's model as the LLM.

    Beside vLLM's model, ASR and TTS are used only where the model itself does not hear or speak.
    """
    from omni_ws.engine.composed.engine import ComposedEngine

    llm, whole_vllm = config.llm, config.engine is EngineName.VLLM
    return ComposedEngine(
        vllm_engine(config, config.vllm) if whole_vllm else llm_of(config),
        asr=asr_of(config),
        tts=tts_of(config),
        name=None if whole_vllm else config.engine_name,
        # A model that changes while the server runs keeps its name for clients.
        model=None if whole_vllm or (config.composed and not config.chooses_llm) else EMBEDDED_MODEL,
        where_missing=whole_vllm,
        asr_optional=config.asr.choice.name == "embedded",
        # An LLM on a server has a time-out of its own for the first byte, after which it retries.
        first_byte_timeout_sec=None if llm.choice.name in REMOTE_PARTS else llm.first_byte_timeout_sec,
        max_spoken_tokens=llm.max_spoken_tokens or None,
        think_ahead=_thinks_ahead(config),
    )


def _thinks_ahead(config: ServerConfig) -> bool:
    """Whether to begin answers that may not be needed: by default not with parts on other machines.

    A remote LLM or voice may charge for these answers.
    """
    if config.llm.speculate is not None:
        return config.llm.speculate
    urls = [part.choice.url for part in (config.llm, config.tts) if part.choice.url is not None]
    return all(is_loopback(urlsplit(url).hostname or "") for url in urls)


# The engine of each part, as chosen by ``--asr``, ``--llm`` and ``--tts``

#: The properties of an LLM on a server that are only known if ``remote`` has them.
_FORWARDING: Final = (
    *("input_modalities", "options", "sampling", "stage_params", "stage_sampling"),
    *("voices", "audio_format", "audio_sample_rate"),
)

_RULES_KNOW: Final = "rules answer what they know exactly: time, dates, sums, units, spelling"
#: The models that can be fetched, by their names for ``--llm``: the name of the model, and a remark about it.
_FETCHED_LLMS: Final[Mapping[str, tuple[str, str]]] = {
    "qwen": (
        "Qwen2.5-Coder-1.5B-Instruct",
        f"Qwen answers everyday questions, on two cores hardly faster than one listens; {_RULES_KNOW}",
    ),
    "qwen3-1.7b": ("Qwen3-1.7B", _RULES_KNOW),
    "qwen3-0.6b": ("Qwen3-0.6B", f"Qwen3-0.6B is very small, and often wrong; {_RULES_KNOW}"),
    "qwen2.5-1.5b": ("Qwen2.5-1.5B-Instruct", _RULES_KNOW),
    "smollm2": (
        "SmolLM2-135M-Instruct",
        "SmolLM2 is a very small model for trying things out: its sentences are fluent, and often wrong; --llm qwen, "
        "or --llm gguf:FILE, is better",
    ),
}


#: Sampling of these models, which are more often wrong the more chance they have. They do not repeat themselves, and a
#: penalty for the words of the question, which llama.cpp counts too, would keep them from answering with these.
_SURE: Final[Mapping[str, Any]] = {"temperature": 0.0, "repetition_penalty": 1.0}
#: The examples with which conversations with small models begin, unless somebody gives other instructions: a fact in a
#: short sentence, a refusal of what a voice cannot do, a completed saying, and a comparison that names the difference.
#: With more examples, models answered worse (benchmarks/minds), and each costs time and memory.
_EXAMPLES: Final = (
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("Can you open the window?", "I'm sorry, I can't control things in your home."),
    ("Finish this: a bird in the hand", "A bird in the hand is worth two in the bush."),
    (
        "What's the difference between a violin and a cello?",
        "A cello is larger and sounds lower than a violin, and you play it sitting down.",
    ),
)


def asr_of(config: ServerConfig) -> Engine | None:
    """Create the part that recognises speech; None if the configuration says ``none``."""
    choice = config.asr.choice
    if choice.name == "none":
        return None
    from omni_ws.engine.asr.recogniser_engine import RecogniserEngine

    if choice.name == SERVER:
        from omni_ws.engine.remote.engine import RemoteRecogniser
        from omni_ws.engine.remote.settings import RemoteAsrSettings

        asr, fields = config.asr, _upstream(config, config.asr)
        if (languages := asr.languages or config.languages) or asr.languages is not None:
            fields["languages"] = languages
        settings = RemoteAsrSettings(**fields, word_times=asr.word_times, speculate=asr.speculate)
        return RecogniserEngine(RemoteRecogniser(settings))
    if choice.name == "vllm":
        from omni_ws.engine.vllm.recogniser import VllmRecogniser

        assert choice.model is not None  # the configuration is refused without a model
        return RecogniserEngine(VllmRecogniser(choice.model, config.asr.args))
    from omni_ws.engine.asr.whisper import WhisperRecogniser

    most = config.embedded.max_recognisers
    return RecogniserEngine(WhisperRecogniser(config.whisper_model, max_recognisers=most, languages=config.languages))


def llm_of(config: ServerConfig) -> Engine:
    """Create the part that answers. Raises EngineFailed if it needs weights that were not fetched."""
    if config.chooses_llm:
        return _auto_llm(config)
    choice = config.llm.choice
    match choice.name:
        case "embedded" | "rules":
            return _rules()
        case "vllm":
            return vllm_engine(config, _alone(config.vllm, choice.model, speaks=config.tts.choice.name == "none"))
        case "gguf":
            assert choice.model is not None  # the configuration is refused without a model
            return _gguf(config, Path(choice.model).expanduser())
        case "smollm2":
            return _fetched_llm(config, "smollm2")
        case name if name in FETCHED_LLMS:
            return _with_rules(_fetched_llm(config, name), config)
    return _remote_llm(config)


def _rules() -> RulesEngine:
    from omni_ws.engine.llm.rules_engine import RulesEngine
    from omni_ws.weights import fetched_file

    return RulesEngine(summaries=fetched_file("encyclopedia"))


def _with_rules(llm: Engine, config: ServerConfig, rules: RulesEngine | None = None) -> Engine:
    """Return ``llm`` behind the rules, which answer themselves what they know exactly.

    ``rules`` is an engine whose encyclopedia is shared; None loads one.
    """
    from omni_ws.engine.llm.questions import load_encyclopedia
    from omni_ws.engine.llm.rules_engine import RulesFirst
    from omni_ws.weights import fetched_file

    return RulesFirst(
        llm,
        own_instructions=config.llm.spoken_instructions,
        of_itself=config.llm.instructions is None,
        encyclopedia=lambda: load_encyclopedia(fetched_file("encyclopedia")) if rules is None else rules.encyclopedia,
    )


def _auto_llm(config: ServerConfig) -> Engine:
    """Create the LLM that answers by rules until a language model is found on this machine, or fetched."""
    from omni_ws.engine.llm.auto_llm import RULES_ALONE, AutoLlm, FetchedMind, Found, why_none

    rules = _rules()

    async def find() -> Found:
        if why_none(config, os.environ) or find_spec("httpx") is None:
            return Found()
        servers = await local_servers(config.port)
        usable = next((one for one in servers if not one.why_not), None)
        if usable is None:
            return Found(lines=tuple(one.suggestion for one in servers))
        chosen = config.llm.model_copy(update={"use": usable.server.use, "model": usable.model, "api_key": None})
        llm = _remote_llm(config.model_copy(update={"llm": chosen}))
        line = f"{usable.server.kind} on this machine answers, with {usable.model}; {RULES_ALONE}"
        return Found(_with_rules(llm, config, rules), (line,))

    titles = {name: title for name, (title, _) in _FETCHED_LLMS.items()}
    mind = FetchedMind(config, lambda name: _with_rules(_fetched_llm(config, name), config, rules), titles=titles)
    return AutoLlm(rules, find=find, mind=mind)


def _remote_llm(config: ServerConfig) -> Engine:
    """Create the LLM for a server with the chat API."""
    from omni_ws.engine.remote.engine import LocalServerLlm, RemoteLlmEngine
    from omni_ws.engine.remote.settings import RemoteLlmSettings

    fields = {name: getattr(config.remote, name) for name in _FORWARDING if name in config.remote.changed}
    llm, choice = config.llm, config.llm.choice
    wanted = {"reasoning_effort": llm.reasoning_effort, "chat_template_kwargs": llm.chat_template_kwargs}
    body = {name: value for name, value in wanted.items() if value}
    thoughts = llm.opens_thoughts
    settings = RemoteLlmSettings(**_upstream(config, llm), opens_thoughts=thoughts, **fields, body=body)
    return LocalServerLlm(choice.name, settings) if choice.name in LOCAL_PORTS else RemoteLlmEngine(settings)


def vllm_engine(config: ServerConfig, settings: VllmConfig) -> Engine:
    """Create an engine of vLLM's model alone; if configured, with readouts for token sessions and with traces."""
    from omni_ws.engine.vllm.engine import VllmEngine

    readouts = None
    if config.grpc.readout_vectors is not None and config.grpc.readout_manifest is not None:
        from omni_ws.engine.vllm.readouts import Readouts, load_vectors

        readouts = Readouts(load_vectors(config.grpc.readout_vectors, config.grpc.readout_manifest))
    return VllmEngine(settings, readouts=readouts, trace_root=config.profiler.root)


def _fetched_llm(config: ServerConfig, name: str) -> Engine:
    from omni_ws.engine.llm.gguf_engine import QWEN_CODER_TEMPLATE

    model, about = _FETCHED_LLMS[name]
    fields: dict[str, Any] = {"name": model, "about": about}
    if name.startswith("qwen"):
        examples = _EXAMPLES if config.llm.instructions is None else ()
        fields |= {"sampling": _SURE, "examples": examples, "eight_bits": True}
    if name == "qwen" and config.llm.chat_template is None:
        fields["chat_template"] = QWEN_CODER_TEMPLATE
    return _gguf(config, _fetched(name), **fields)


def _gguf(config: ServerConfig, file: Path, **fields: Any) -> Engine:
    from omni_ws.engine.llm.gguf_engine import GgufEngine, GgufSettings

    llm = config.llm
    of_config: dict[str, Any] = {
        "name": file.stem,
        "context": llm.context,
        "threads": llm.threads,
        "parallel": llm.parallel,
        "think": llm.think,
        "chat_template": llm.chat_template,
        "instructions": "" if config.tts.choice.name == "none" else llm.spoken_instructions,
        "first_byte_timeout": llm.first_byte_timeout_sec,
    }
    return GgufEngine(GgufSettings(file=file, **{**of_config, **fields}))


def _fetched(name: str) -> Path:
    """Return the file of weights that were fetched. Raises EngineFailed if it is missing."""
    from omni_ws.weights import fetched_file

    if (file := fetched_file(name)) is None:
        raise EngineFailed(f"the weights of {name} are not here; fetch them with: {fetch_command(name)}", fatal=True)
    return file


def _alone(vllm: VllmConfig, model: str | None, *, speaks: bool) -> VllmConfig:
    """Return vLLM's settings for ``model`` as the LLM, without a Talker. ``speaks``: the model may speak itself."""
    own = {"model": model, "omni_speech": vllm.omni_speech and speaks}
    return vllm.model_copy(update={**own, "talker": None, "talker_profile": None, "talker_args": {}})


def tts_of(config: ServerConfig) -> Engine | None:
    """Create the part that speaks; None if the configuration says ``none``."""
    choice = config.tts.choice
    if choice.name == "none":
        return None
    from omni_ws.engine.tts.speech_engine import SpeechEngine

    match choice.name:
        case "talker":
            from omni_ws.engine.vllm.talker import Speaker

            assert choice.model is not None  # the configuration is refused without a model
            talker = Speaker(choice.model, profile=config.vllm.talker_profile, args=config.vllm.talker_args)
            return SpeechEngine(talker)
        case "embedded":
            return _best_voice(config)
        case "hibari" | "kokoro" | "espeak":
            from omni_ws.engine.tts.voice_process import VoiceProcess

            default_voice = config.tts.voice or config.embedded.default_voice
            file = None
            if choice.name == "kokoro":
                default_voice = choice.model or default_voice
            elif choice.model is not None:
                file = Path(choice.model).expanduser()
            return _speaking(config, VoiceProcess(VoiceChoice(choice.name), default_voice=default_voice, file=file))
    from omni_ws.engine.remote.engine import RemoteVoice
    from omni_ws.engine.remote.settings import RemoteTtsSettings

    remote, voice = config.remote, config.tts.voice
    voices = remote.voices if voice is None else (voice, *(one for one in remote.voices if one != voice))
    settings = RemoteTtsSettings(
        **_upstream(config, config.tts), voices=voices, audio_sample_rate=remote.audio_sample_rate
    )
    return SpeechEngine(RemoteVoice(settings))


def _best_voice(config: ServerConfig) -> Engine:
    """Create the voice that ``embedded.voice`` names; by default Hibari, or else espeak-ng."""
    from omni_ws.engine.composed.engine import FirstToStart
    from omni_ws.engine.tts.voice_process import VoiceProcess

    choice, voice = config.embedded.voice, config.tts.voice or config.embedded.default_voice
    chosen = _speaking(config, VoiceProcess(choice, default_voice=voice))
    if choice is not VoiceChoice.AUTO:
        return chosen
    hibari = _speaking(config, VoiceProcess(VoiceChoice.HIBARI, default_voice=voice))
    return FirstToStart({"hibari": hibari, "espeak-ng": chosen})


def _speaking(config: ServerConfig, voice: VoiceProcess) -> Engine:
    """Create the engine that speaks with ``voice``, and with other voices in languages that have others."""
    from omni_ws.engine.tts.speech_engine import SpeechEngine
    from omni_ws.engine.tts.voice_process import LanguageVoices

    table = voice_table(config)
    if not table:
        return SpeechEngine(voice)
    without_english = config.languages and "en" not in config.languages and not voice.default_named
    first = config.languages[0] if without_english else ""
    return SpeechEngine(LanguageVoices(voice, table, required=config.tts.voices, first=first))


def live_backend(config: ServerConfig) -> Engine | None:
    """Return the engine for the second model of Live sessions, at the URL ``live.backend``; None if that is not set.

    Without it, the server's own model does the work. The engine connects to the URL on its first request.
    """
    live = config.live
    if live.backend is None:
        return None
    from omni_ws.engine.remote.engine import Backend
    from omni_ws.engine.remote.settings import RemoteLlmSettings, key_of, patience

    common = {**patience(config.remote), "start_timeout": 0, "log_content": config.log_content}
    return Backend(
        RemoteLlmSettings(
            urls=(live.backend,),
            model=live.backend_model,
            api_key=key_of(live.backend_api_key),
            section="live",
            key_variable="OMNI_WS_LIVE__BACKEND_API_KEY",
            options=("tools", "reasoning_effort", "verbosity", "service_tier"),
            **common,
        )
    )


def _upstream(config: ServerConfig, part: PartConfig) -> dict[str, Any]:
    """Return the fields of UpstreamSettings for a part on a server."""
    from omni_ws.engine.remote.settings import key_of, patience

    choice, fields = part.choice, patience(config.remote)
    fields["log_content"] = config.log_content
    model, url = choice.model, choice.url
    if url is None:
        url = f"http://127.0.0.1:{LOCAL_PORTS[choice.name]}/v1"
        if "start_timeout_sec" not in config.remote.changed:
            fields["start_timeout"] = 0  # do not wait: the user can start the other server first
        if choice.name == "ollama" and model is not None and ":" not in model.rpartition("/")[2]:
            model += ":latest"  # Ollama completes and lists names in this form
    if part is config.llm and "first_byte_timeout_sec" in part.changed:
        fields["first_byte_timeout"] = config.llm.first_byte_timeout_sec
    key = key_of(part.api_key)
    if choice.name == "openai" and key is None:
        key, fields["key_variable"] = os.environ.get(OPENAI_KEY), OPENAI_KEY
    return {"urls": (url,), "model": model, "api_key": key, "section": part.part, **fields}
