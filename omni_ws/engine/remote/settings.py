"""What the remote engines are made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """The servers of one part, which serve the same model, and how patient to be with them; times are in seconds."""

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
