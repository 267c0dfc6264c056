"""Checks before the start that go beyond single values: exposure, engines, packages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from omni_ws.config.error import ConfigurationError
from omni_ws.config.literal_address import literal_address
from omni_ws.config.model import EngineName, RemoteConfig, ServerConfig, VllmConfig
from omni_ws.installing import INSTALL_VLLM, install_command

GRPC_PACKAGES: Final = ("grpc", "grpc_health", "grpc_reflection")
TRACING_PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_REMOTE_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "modalities": ("text", "audio"),
    "input_modalities": ("text", "audio", "image", "video"),
    "options": (
        *("tools", "logprobs", "response_format", "n", "priority"),
        *("image_min_pixels", "image_max_pixels", "video_min_pixels", "video_max_pixels", "video_fps"),
        *("video_min_frames", "video_max_frames", "video_total_pixels"),
    ),
    "sampling": (
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ),
}


def check_exposure(config: ServerConfig) -> None:
    """Refuses to listen beyond this machine without a key, unless ``insecure_no_auth`` is set.

    Raises ConfigurationError.
    """
    has_key = config.api_key is not None or config.auth.keys_file is not None
    if has_key or config.auth.insecure_no_auth or is_loopback(config.host):
        return
    raise ConfigurationError(
        [
            f"refusing to listen on {config.host} without a key, where other machines could use the server: "
            "set a key (environment variable OMNI_WS_API_KEY, --api-key, or --auth.keys-file for several), "
            "listen on --host 127.0.0.1, or allow unauthenticated access with --insecure-no-auth"
        ]
    )


def is_loopback(host: str) -> bool:
    """Returns whether ``host`` is this machine only. A name other than ``localhost`` is not assumed to be."""
    if host.lower() == "localhost":
        return True
    address = literal_address(host)
    return address is not None and address.is_loopback


def check_available(config: ServerConfig) -> None:
    """Refuses settings that the engine or the installed packages cannot honour. Raises ConfigurationError."""
    if problems := [*_unavailable_settings(config)]:
        raise ConfigurationError(problems)


def _unavailable_settings(config: ServerConfig) -> Iterator[str]:
    if config.engine is EngineName.VLLM:
        yield from _vllm_problems(config.vllm)
    elif config.vllm.model is not None or config.vllm.talker is not None:
        flag = "--model" if config.vllm.model is not None else "--vllm.talker"
        yield f"{flag} is for the vllm engine, and this is the {config.engine} engine: add --engine vllm"
    if config.engine is EngineName.REMOTE:
        yield from _remote_problems(config.remote)
    elif config.remote.upstreams:
        yield f"remote.upstreams is for the remote engine, and this is the {config.engine} engine: add --engine remote"
    if config.grpc.port is not None and any(find_spec(name) is None for name in GRPC_PACKAGES):
        yield f"the gRPC service needs its packages: {install_command('grpc')}"
    if config.grpc.port is not None and config.engine is not EngineName.VLLM:
        yield f"the {config.engine} engine has no token sessions; remove grpc.port"
    if (config.grpc.readout_vectors is None) != (config.grpc.readout_manifest is None):
        yield "grpc.readout_vectors and grpc.readout_manifest need each other"
    if config.grpc.readout_vectors is not None and config.engine is not EngineName.VLLM:
        yield f"the {config.engine} engine has no readouts; remove grpc.readout_vectors"
    if config.tracing and not all(map(_is_installed, TRACING_PACKAGES)):
        yield f"tracing needs OpenTelemetry: {install_command('otel')}"
    if config.record is not None and os.name != "posix":
        yield "recording sessions (record) needs a POSIX system, where the files can be made private"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _vllm_problems(vllm: VllmConfig) -> Iterator[str]:
    if find_spec("vllm") is None:
        yield f"the vllm engine needs vLLM: {INSTALL_VLLM}"
        return
    if vllm.model is None:
        yield "the vllm engine needs a model: --model NAME-OR-FOLDER"
    if vllm.talker is None and (vllm.talker_profile is not None or vllm.talker_args):
        yield "vllm.talker_profile and vllm.talker_args need a Talker: --vllm.talker NAME-OR-FOLDER"


def _remote_problems(remote: RemoteConfig) -> Iterator[str]:
    if find_spec("httpx") is None:
        yield f"the remote engine needs httpx: {install_command('remote')}"
    if not remote.upstreams:
        yield "the remote engine needs upstream servers: --remote.upstreams http://127.0.0.1:8000/v1"
    yield from _url_problems(remote)
    for key, known in _REMOTE_WORDS.items():
        for word in getattr(remote, key):
            if word not in known:
                yield f"remote.{key} holds {word!r}; known are {', '.join(known)}"
    if not 8_000 <= remote.audio_sample_rate <= 192_000:
        yield "remote.audio_sample_rate must be between 8000 and 192000 Hz"
    if "text" not in remote.modalities:
        yield "remote.modalities must contain text"
    for key in ("stage_params", "stage_sampling"):
        for name in getattr(remote, key):
            if not all(name.partition(".")):
                yield f"remote.{key} holds {name!r}, which does not have the form stage.parameter"


def _url_problems(remote: RemoteConfig) -> Iterator[str]:
    for key, urls in (("upstreams", remote.upstreams), ("speech_upstream", (remote.speech_upstream,))):
        for url in filter(None, urls):
            if not _is_base_url(url):
                # The value is not shown, since it may contain a password.
                yield f"remote.{key} holds an invalid base URL; a valid one is http://127.0.0.1:8000/v1"


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not (parts.query or parts.fragment)
    )
