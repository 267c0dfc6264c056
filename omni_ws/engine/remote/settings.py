"""The settings of the remote engines, and the differences between servers with OpenAI's API (Dialect)."""

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

#: The sampling parameters that most servers support.
DEFAULT_SAMPLING: Final = (
    *("temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """The servers of one part, which serve the same model; timeouts are in seconds."""

    #: Base URLs, such as ``http://127.0.0.1:11434/v1``.
    urls: tuple[str, ...]
    #: The servers' name for the model; None for the first one that the first server lists.
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    #: The section of the configuration that these settings come from, for messages to the operator.
    section: str = "remote"
    #: The environment variable that the key may come from; None for that of the section.
    key_variable: str | None = None
    retries: int = 2
    connect_timeout: float = 5
    #: The limit from the request to the first output, rather than the first byte, which some servers send before any
    #: work.
    first_byte_timeout: float = 120
    #: The limit between two reads of an answer that has begun.
    idle_timeout: float = 60
    health_interval: float = 10
    start_timeout: float = 60
    #: The largest body, including audio and images in base64.
    max_request_bytes: int = 64 * MIB
    ca_file: Path | None = None
    #: Whether upstreams' messages about requests, which may quote them, may be logged.
    log_content: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLlmSettings(UpstreamSettings):
    """The settings of a language model behind ``/v1/chat/completions``, with the abilities that no server reports."""

    #: The modalities of its input and of its answers, by the names of the protocol.
    input_modalities: tuple[str, ...] = ("text",)
    modalities: tuple[str, ...] = ("text",)
    #: Further features: tools, logprobs, response_format, n, priority, the names of limits on images and videos, and
    #: the fields in ``UPSTREAM_FIELDS``.
    options: tuple[str, ...] = ("tools", "response_format")
    #: Sampling parameters that are forwarded; None for those that its kind of server supports.
    sampling: tuple[str, ...] | None = None
    #: Fields that are added to every request, unless the client sets them.
    body: Mapping[str, Any] = field(default_factory=dict)
    stage_params: tuple[str, ...] = ()
    stage_sampling: tuple[str, ...] = ()
    #: Whether the chat template contains the opening tag of thoughts, so that answers contain only the closing tag;
    #: None to learn this from the upstreams.
    opens_thoughts: bool | None = None
    #: The voices of a model that speaks.
    voices: tuple[str, ...] = ()
    audio_format: str = "pcm16"
    #: The sample rate, in Hz, of raw audio whose rate the server does not report.
    audio_sample_rate: int = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTtsSettings(UpstreamSettings):
    """The settings of a voice behind ``/v1/audio/speech``."""

    #: The voices that clients may choose, the default first.
    voices: tuple[str, ...] = ()
    #: The sample rate, in Hz, of raw audio whose rate the server does not report.
    audio_sample_rate: int = 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAsrSettings(UpstreamSettings):
    """The settings of speech recognition behind ``/v1/audio/transcriptions``."""

    #: The languages that requests may set (primary subtags of RFC 5646); most servers run Whisper.
    languages: tuple[str, ...] = WHISPER_LANGUAGES
    #: Whether to request the times of words, which most servers report only in responses that are not streamed.
    word_times: bool = False
    #: Whether to transcribe at each pause that may be the end of an utterance: the transcript is ready sooner, but the
    #: work is wasted if the speaker goes on. None: only if the servers are on this machine.
    speculate: bool | None = None


def patience(config: RemoteConfig) -> dict[str, Any]:
    """Return the fields of UpstreamSettings that are common to all upstreams: timeouts, retries and limits."""
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
    """Return the text of a secret; None without one."""
    return None if value is None else value.get_secret_value()


# Which software a server runs, what it ignores, and where it reports its context.

#: The default context of a model in Ollama (its documentation: OLLAMA_CONTEXT_LENGTH).
OLLAMA_CONTEXT: Final = 4096


class Dialect(Enum):
    """The kind of software that a server runs."""

    #: Unknown software: OpenAI's own API, or any other.
    OPENAI = "openai"
    OMNI_WS = "omni_ws"
    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"
    LM_STUDIO = "LM Studio"
    OLLAMA = "Ollama"


#: The dialect by the ``owned_by`` of a listed model. Ollama has no distinctive one, but is recognised by
#: ``/api/version``.
BY_OWNER: Final[Mapping[str, Dialect]] = {
    "omni_ws": Dialect.OMNI_WS,
    "vllm": Dialect.VLLM,
    "llamacpp": Dialect.LLAMA_CPP,
    "organization_owner": Dialect.LM_STUDIO,
}

#: Servers that close the connection after a streamed response, though its headers do not say so. llama.cpp's last chunk
#: ends as cpp-httplib ends an aborted response; a request that follows at once on the connection is then lost.
CLOSE_AFTER_STREAM: Final = frozenset({Dialect.LLAMA_CPP})

#: Servers that go on with the text of a last message of the assistant, with the fields that ask for it. llama.cpp does
#: so unless it was started with --no-prefill-assistant, which it does not tell; if the model thinks first, it refuses,
#: as omni_ws does with most of its engines. With Ollama and LM Studio it depends on the template of the model, and
#: others answer anew.
CONTINUES: Final[Mapping[Dialect, Mapping[str, Any]]] = {
    Dialect.VLLM: {"add_generation_prompt": False, "continue_final_message": True},
    Dialect.LLAMA_CPP: {},
    Dialect.OMNI_WS: {},
}

#: Sampling parameters that these servers accept but ignore.
IGNORED_SAMPLING: Final[Mapping[Dialect, frozenset[str]]] = {
    Dialect.OLLAMA: frozenset({"top_k", "min_p", "repetition_penalty"}),
    Dialect.LM_STUDIO: frozenset({"min_p"}),
}
#: Sampling parameters that have another name on these servers.
_SAMPLING_NAMES: Final[Mapping[Dialect, Mapping[str, str]]] = {
    Dialect.LLAMA_CPP: {"repetition_penalty": "repeat_penalty"},
    Dialect.LM_STUDIO: {"repetition_penalty": "repeat_penalty"},
}


def sampling_for(dialect: Dialect, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters by the names that the server uses."""
    names = _SAMPLING_NAMES.get(dialect, {})
    return {names.get(name, name): value for name, value in sampling.items()}


def is_for_chat(model: str) -> bool:
    """Whether a listed model may be for chats. LM Studio lists models for embeddings too."""
    return not model.startswith("text-embedding-")


def listed_models(content: object) -> list[Mapping[str, Any]] | None:
    """Return the entries of ``/v1/models`` or of Ollama's ``/api/tags``, with ``id``; None if it is neither.

    Ollama without models returns null in place of the list.
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
    """Return the context, in tokens, in an entry of the list of models (vLLM, llama.cpp); None if it has none."""
    meta = entry.get("meta")
    return _count(entry.get("max_model_len")) or (_count(meta.get("n_ctx")) if isinstance(meta, dict) else None)


def context_in_props(content: object) -> int | None:
    """Return the context of one conversation, in tokens, in llama.cpp's ``/props``; None if it has none."""
    settings = content.get("default_generation_settings") if isinstance(content, dict) else None
    return _count(settings.get("n_ctx")) if isinstance(settings, dict) else None


def opens_thoughts_in_props(content: object) -> bool:
    """Whether the chat template in llama.cpp's ``/props`` always ends the prompt with the opening tag of a thought."""
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        return False
    prompt = template.rpartition("add_generation_prompt")[2]
    return "<think>" in prompt and "</think>" not in prompt


def context_in_lm_studio(content: object) -> int | None:
    """Return the context, in tokens, in LM Studio's ``/api/v0/models/{id}`` of a loaded model; None if it has none."""
    return _count(content.get("loaded_context_length")) if isinstance(content, dict) else None


def context_in_ps(content: object, model: str) -> int | None:
    """Return the context of ``model``, in tokens, in Ollama's ``/api/ps``; None if it is not loaded."""
    running = content.get("models") if isinstance(content, dict) else None
    for entry in running if isinstance(running, list) else ():
        if isinstance(entry, dict) and model in _ollama_names(entry):
            return _count(entry.get("context_length"))
    return None


def context_in_show(content: object) -> int | None:
    """Return the context, in tokens, that a model's file sets (Ollama's ``/api/show``, ``num_ctx``); None if unset."""
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
