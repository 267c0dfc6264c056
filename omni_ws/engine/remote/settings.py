"""What the remote engines are made with, and what servers with OpenAI's API do in their own way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from omni_ws.config.model import RemoteConfig
from omni_ws.config.values import MIB
from omni_ws.core.json_values import WHISPER_LANGUAGES

#: The sampling parameters that most servers honour.
DEFAULT_SAMPLING: Final = (
    *("temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """The servers of one part, which serve the same model, and how long to wait for them, in seconds."""

    #: Base URLs, such as ``http://127.0.0.1:11434/v1``.
    urls: tuple[str, ...]
    #: The model's name at the servers; None: the first that the first server lists.
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    #: The section of the configuration that made these, for messages to the operator.
    section: str = "remote"
    #: The variable of the environment that the key may come from; None: that of the section.
    key_variable: str | None = None
    retries: int = 2
    connect_timeout: float = 5
    #: From the request to the first output; not just to the first byte, which some servers send before any work.
    first_byte_timeout: float = 120
    #: Between two reads of an answer that has begun.
    idle_timeout: float = 60
    health_interval: float = 10
    start_timeout: float = 60
    #: The largest body, including audio and images in base64.
    max_request_bytes: int = 64 * MIB
    ca_file: Path | None = None
    #: Whether the log may have what upstreams say of requests.
    log_content: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLlmSettings(UpstreamSettings):
    """A language model behind ``/v1/chat/completions``, and what no server reports about it."""

    #: What it takes, and what it answers with, by the names of the protocol.
    input_modalities: tuple[str, ...] = ("text",)
    modalities: tuple[str, ...] = ("text",)
    #: Further features: tools, logprobs, response_format, n, priority, and by their names limits of images and videos,
    #: and the fields in ``UPSTREAM_FIELDS``.
    options: tuple[str, ...] = ("tools", "response_format")
    #: Sampling parameters that are forwarded; None: those that servers of its kind honour.
    sampling: tuple[str, ...] | None = None
    #: Fields that every request has, unless the client sets them.
    body: Mapping[str, Any] = field(default_factory=dict)
    stage_params: tuple[str, ...] = ()
    stage_sampling: tuple[str, ...] = ()
    #: Whether the model's template opens thoughts that its answers close; None: as the upstreams show.
    opens_thoughts: bool | None = None
    #: Of a model that speaks by itself.
    voices: tuple[str, ...] = ()
    audio_format: str = "pcm16"
    #: Of raw audio that arrives without its rate, in Hz.
    audio_sample_rate: int = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTtsSettings(UpstreamSettings):
    """A voice behind ``/v1/audio/speech``."""

    #: Those that clients may choose, the default first.
    voices: tuple[str, ...] = ()
    #: Of raw audio that arrives without its rate, in Hz.
    audio_sample_rate: int = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAsrSettings(UpstreamSettings):
    """Speech recognition behind ``/v1/audio/transcriptions``."""

    #: The languages that it can be told to expect (primary subtags of RFC 5646); most servers run Whisper.
    languages: tuple[str, ...] = WHISPER_LANGUAGES
    #: Ask for the times of words, which most servers give only in answers that they do not stream.
    word_times: bool = False
    #: Begin a transcript at each pause that may be the end of an utterance: it is there sooner, or made in vain. None:
    #: where the servers are on this machine.
    speculate: bool | None = None


def patience(config: RemoteConfig) -> dict[str, Any]:
    """The fields of UpstreamSettings that hold for all upstreams."""
    return {
        "retries": config.retries,
        "connect_timeout": config.connect_timeout_sec,
        "first_byte_timeout": config.first_byte_timeout_sec,
        "idle_timeout": config.idle_timeout_sec,
        "health_interval": config.health_interval_sec,
        "start_timeout": config.start_timeout_sec,
        "max_request_bytes": config.max_request_bytes,
        "ca_file": config.ca_file,
    }


def key_of(value: SecretStr | None) -> str | None:
    """The key itself."""
    return None if value is None else value.get_secret_value()


# Which server it is, what it ignores, and where it tells its context.

#: The context of a model in Ollama where nothing else is said (its documentation: OLLAMA_CONTEXT_LENGTH).
OLLAMA_CONTEXT: Final = 4096


class Dialect(Enum):
    """A kind of server."""

    #: One that is not known: OpenAI's own API, or any other.
    OPENAI = "openai"
    OMNI_WS = "omni_ws"
    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"
    LM_STUDIO = "LM Studio"
    OLLAMA = "Ollama"


#: Ollama names no owner of its own; it is known by ``/api/version``.
BY_OWNER: Final[Mapping[str, Dialect]] = {
    "omni_ws": Dialect.OMNI_WS,
    "vllm": Dialect.VLLM,
    "llamacpp": Dialect.LLAMA_CPP,
    "organization_owner": Dialect.LM_STUDIO,
}

#: Servers that close the connection after an answer that they stream, though its head says otherwise. In llama.cpp the
#: last piece ends as cpp-httplib ends an answer that was given up; a request that follows at once is then lost.
CLOSE_AFTER_STREAM: Final = frozenset({Dialect.LLAMA_CPP})

#: Sampling parameters that are accepted without effect there.
IGNORED_SAMPLING: Final[Mapping[Dialect, frozenset[str]]] = {
    Dialect.OLLAMA: frozenset({"top_k", "min_p", "repetition_penalty"}),
    Dialect.LM_STUDIO: frozenset({"min_p"}),
}
#: Sampling parameters that have another name there.
_SAMPLING_NAMES: Final[Mapping[Dialect, Mapping[str, str]]] = {
    Dialect.LLAMA_CPP: {"repetition_penalty": "repeat_penalty"},
    Dialect.LM_STUDIO: {"repetition_penalty": "repeat_penalty"},
}


def sampling_for(dialect: Dialect, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by the names of the server."""
    names = _SAMPLING_NAMES.get(dialect, {})
    return {names.get(name, name): value for name, value in sampling.items()}


def is_for_chat(model: str) -> bool:
    """Whether a listed model may be one that answers: LM Studio lists those for embeddings beside the others."""
    return not model.startswith("text-embedding-")


def listed_models(content: object) -> list[Mapping[str, Any]] | None:
    """The entries of ``/v1/models`` or of Ollama's ``/api/tags``, with ``id``; None for what is neither.

    Ollama without models says null.
    """
    if not isinstance(content, Mapping) or not ({"data", "models"} & content.keys()):
        return None
    listed = content["data"] if "data" in content else content["models"]
    if listed is None:
        return []
    if not isinstance(listed, list):
        return None
    entries = [dict(entry) for entry in listed if isinstance(entry, dict)]
    for entry in entries:
        entry.setdefault("id", entry.get("name"))
    return [entry for entry in entries if isinstance(entry["id"], str)]


def context_listed(entry: Mapping[str, Any]) -> int | None:
    """The context that an entry of the list of models tells (vLLM; llama.cpp), in tokens."""
    meta = entry.get("meta")
    return _count(entry.get("max_model_len")) or (_count(meta.get("n_ctx")) if isinstance(meta, dict) else None)


def context_in_props(content: object) -> int | None:
    """The context of one conversation in llama.cpp (``/props``)."""
    settings = content.get("default_generation_settings") if isinstance(content, dict) else None
    return _count(settings.get("n_ctx")) if isinstance(settings, dict) else None


def opens_thoughts_in_props(content: object) -> bool:
    """Whether the chat template of llama.cpp (``/props``) opens a thought where the answer begins, in every case."""
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        return False
    prompt = template.rpartition("add_generation_prompt")[2]
    return "<think>" in prompt and "</think>" not in prompt


def context_in_lm_studio(content: object) -> int | None:
    """The context with which a model is loaded (``/api/v0/models/{id}``)."""
    return _count(content.get("loaded_context_length")) if isinstance(content, dict) else None


def context_in_ps(content: object, model: str) -> int | None:
    """The context of ``model`` if Ollama has it loaded (``/api/ps``)."""
    running = content.get("models") if isinstance(content, dict) else None
    for entry in running if isinstance(running, list) else ():
        if isinstance(entry, dict) and model in _ollama_names(entry):
            return _count(entry.get("context_length"))
    return None


def context_in_show(content: object) -> int | None:
    """The context that a model's file asks Ollama for (``num_ctx`` in ``/api/show``)."""
    parameters = content.get("parameters") if isinstance(content, dict) else None
    for line in parameters.splitlines() if isinstance(parameters, str) else ():
        name, _, value = line.strip().partition(" ")
        if name == "num_ctx" and value.strip().isdecimal():
            return _count(int(value))
    return None


def _ollama_names(entry: Mapping[str, Any]) -> Iterator[str]:
    for name in (entry.get("name"), entry.get("model")):
        if isinstance(name, str):
            yield name
            yield name.removesuffix(":latest")


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
