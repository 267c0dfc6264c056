"""Checks of the configuration before the start: exposure to the network, packages, abilities of the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from omni_ws.config.model import EngineName, RemoteConfig, ServerConfig, VllmConfig
from omni_ws.config.parts import (
    AUTO,
    FORMS,
    GGUF_PARTS,
    LOCAL_PORTS,
    OPENAI_KEY,
    REMOTE_PARTS,
    VLLM_PARTS,
    PartConfig,
)
from omni_ws.config.values import ConfigurationError, literal_address, mark
from omni_ws.installing import INSTALL_VLLM, install_command

GRPC_PACKAGES: Final = ("grpc", "grpc_health", "grpc_reflection")
TRACING_PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
IS_POSIX: Final = os.name == "posix"
#: Takes echo and noise out.
ECHO_PACKAGE: Final = "pywebrtc_audio"


def check_exposure(config: ServerConfig) -> None:
    """Raise ConfigurationError if the server would listen beyond this machine without an API key.

    ``insecure_no_auth`` permits that.
    """
    if config.auth.insecure_no_auth:
        return
    has_key = config.api_key is not None or config.auth.keys_file is not None
    telephony, wyoming = config.telephony, config.wyoming
    addresses = {} if has_key else {"host": config.host}
    if telephony.audiosocket_port is not None and not has_key:
        addresses["telephony.audiosocket-host"] = telephony.audiosocket_host
    problems = [
        f"refusing to listen on {host} without a key, where other machines could use the server: "
        "set a key (environment variable OMNI_WS_API_KEY, --api-key, or --auth.keys-file for several), "
        f"listen on --{flag} 127.0.0.1, or allow unauthenticated access with --insecure-no-auth"
        for flag, host in addresses.items()
        if not is_loopback(host)
    ]
    if wyoming.port is not None and not is_loopback(wyoming.host):
        problems.append(
            f"refusing to listen on {wyoming.host} for Wyoming, which has no keys: other machines could use the "
            "server. Listen on --wyoming.host 127.0.0.1, or, in a network that you trust, allow unauthenticated access "
            f"with --wyoming-port {wyoming.port} --wyoming.host {wyoming.host} --insecure-no-auth"
        )
    if problems:
        raise ConfigurationError(problems)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is reachable from this machine only. Of names, only ``localhost`` is taken to be."""
    if host.lower() == "localhost":
        return True
    address = literal_address(host)
    return address is not None and address.is_loopback


def page_address(config: ServerConfig, port: int) -> str:
    """Return the address of the page of a server on ``port``, which is on loopback for a server on all addresses."""
    scheme = "https" if config.ssl_certfile is not None else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def check_available(config: ServerConfig) -> None:
    """Raise ConfigurationError for settings that the engine or the installed packages cannot honour."""
    if problems := [*_unavailable_settings(config)]:
        raise ConfigurationError(problems)


def _unavailable_settings(config: ServerConfig) -> Iterator[str]:
    if not IS_POSIX:
        yield "the server runs on Linux and macOS; on Windows start it in WSL (wsl --install), or in a container"
    for part in (config.asr, config.llm, config.tts):
        chooses = part is config.llm and config.chooses_llm
        yield from _problems_of(part, AUTO if chooses else "" if part.use is None else part.choice.name)
    yield from _part_problems(config) if config.composed else _whole_problems(config)
    if config.workers > 1:
        yield from _worker_problems(config)
    llm = config.llm.choice.name if config.composed else config.engine_name
    what = f"LLM {llm}" if config.composed else f"{llm} engine"
    if config.grpc.port is not None and not has_grpc():
        yield f"the gRPC service needs its packages: {install_command('grpc')}"
    # For an engine of another package this is known only after it has started.
    of_others = config.engine is not None and not isinstance(config.engine, EngineName)
    if config.grpc.port is not None and llm != "vllm" and not of_others:
        yield f"the {what} has no token sessions; remove grpc.port"
    if (config.grpc.readout_vectors is None) != (config.grpc.readout_manifest is None):
        yield "grpc.readout_vectors and grpc.readout_manifest need each other"
    if config.grpc.readout_vectors is not None and llm != "vllm":
        yield f"the {what} has no readouts; remove grpc.readout_vectors"
    if config.telephony.cancel_echo and not _is_installed(ECHO_PACKAGE):
        yield f"telephony.cancel_echo needs its library: {install_command()}"
    if (config.tracing or config.otlp_metrics) and not all(map(_is_installed, TRACING_PACKAGES)):
        name = "tracing" if config.tracing else "otlp_metrics"
        yield f"{name} needs OpenTelemetry: {install_command('otel')}"
    yield from _store_problems(config)
    if config.record is not None and os.name != "posix":
        yield "recording sessions (record) needs a POSIX system, where the files can be made private"


def _store_problems(config: ServerConfig) -> Iterator[str]:
    sessions = config.sessions
    if sessions.address.kind == "redis" and not _is_installed("redis"):
        yield f"sessions.store needs the client library of Redis: {install_command('redis')}"
    if sessions.store_key is not None and not _is_installed("cryptography"):
        yield f"sessions.store_key needs cryptography: {install_command()}"
    if sessions.store_key is not None and sessions.address.kind == "memory":
        yield "sessions.store_key has nothing to encrypt: name a store (sessions.store)"


def has_grpc() -> bool:
    """Whether the packages of the gRPC service are installed."""
    return all(map(_is_installed, GRPC_PACKAGES))


def _worker_problems(config: ServerConfig) -> Iterator[str]:
    """Yield the settings that several workers cannot honour."""
    if os.name != "posix":
        yield "workers above 1 need a system on which processes can pass connections to each other (Linux, macOS)"
    if config.ssl_certfile is not None:
        yield (
            "workers above 1 cannot share TLS connections (ssl_certfile, --lan): terminate TLS in a proxy in front, or "
            "serve with one worker"
        )
    if config.telephony.audiosocket_port is not None:
        yield (
            "workers above 1 cannot share the port of AudioSocket (telephony.audiosocket_port): serve Asterisk's calls "
            "with one worker, on ports of its own"
        )
    if config.wyoming.port is not None or config.wyoming.satellites:
        yield (
            "workers above 1 cannot share the port and the satellites of Wyoming (wyoming.port, wyoming.satellites): "
            "serve them with one worker, on ports of its own"
        )
    if config.on_vllm:
        yield (
            "vLLM's models belong to one process: serve them with one worker on a port of their own "
            "(omni-ws serve --engine vllm --model … --port 8001), and put workers in front of it "
            f"(omni-ws serve --workers {config.workers} --engine remote --remote.upstreams http://127.0.0.1:8001/v1)"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


# Engines and their parts

#: The module that a part needs, and the extra that installs it; empty for what the package itself asks for.
_PACKAGES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("asr", "whisper"): ("ctranslate2", ""),
    ("tts", "hibari"): ("hibari", ""),
    ("tts", "kokoro"): ("onnxruntime", "kokoro"),
    **{(part, name): ("httpx", "") for part in FORMS for name in REMOTE_PARTS},
    **{("llm", name): ("xllamacpp", "") for name in GGUF_PARTS},
}


def _part_problems(config: ServerConfig) -> Iterator[str]:
    voice = config.tts.choice.model if config.tts.choice.name == "kokoro" else None
    if voice is not None and config.tts.voice not in (None, voice):
        yield f"--tts names the voice {voice}, and tts.voice {config.tts.voice}"
    if config.vllm.model is not None:
        yield f"--model is for --engine vllm: say --llm vllm:{config.vllm.model}"
    if config.vllm.talker is not None:
        yield f"--vllm.talker is for --engine vllm: say --tts talker:{config.vllm.talker}"
    for name in config.remote.meaningless("composed"):
        yield f"remote.{name} is for --engine remote: a part has settings of its own (--llm, llm.model, --tts …)"
    if config.llm.choice.name in REMOTE_PARTS:
        yield from _forwarding_problems(config.remote)
    if config.llm.choice.name == "llamacpp" and config.port == LOCAL_PORTS["llamacpp"]:
        yield (
            f"llama.cpp's server listens on port {config.port} unless told otherwise, and so does this one: give this "
            "one --port 8081, or that one --port 8090 and this one --llm http://127.0.0.1:8090/v1"
        )


def _problems_of(part: PartConfig, name_of_part: str) -> Iterator[str]:
    """Yield the problems of a part of this name, which is empty for one of an engine that was chosen as a whole."""
    choice, flag = part.choice, f"--{part.part}"
    if choice.url is not None and not _is_base_url(choice.url):
        # The value is not shown, since it may contain a password.
        yield f"{flag} holds an invalid base URL; a valid one is http://127.0.0.1:8000/v1"
    form = FORMS[part.part].get(choice.name, "")
    if ":" in form and "[" not in form and choice.model is None:
        model = "FILE" if choice.name in GGUF_PARTS else "NAME-OR-FOLDER"
        yield f"{flag} {choice.name} needs a model: {flag} {choice.name}:{model}"
    if choice.model is not None and part.model not in (None, choice.model):
        yield f"{flag} names the model {choice.model}, and {part.part}.model {part.model}"
    for name in part.meaningless(name_of_part):
        yield f"{part.part}.{name} means nothing {f'beside {flag} {choice.name}' if part.use else f'without {flag}'}"
    if part.use is None:
        return
    if choice.name == "openai" and part.api_key is None and not os.environ.get(OPENAI_KEY):
        yield f"{flag} openai needs a key: set {OPENAI_KEY} in the environment, or {part.part}.api_key"
    if choice.name in VLLM_PARTS and find_spec("vllm") is None:
        yield f"{flag} {choice.name} needs vLLM: {INSTALL_VLLM}"
    package, extra = _PACKAGES.get((part.part, choice.name), (None, ""))
    if package is not None and find_spec(package) is None:
        yield f"{flag} {choice.name} needs {package}: {install_command(extra)}"


def _whole_problems(config: ServerConfig) -> Iterator[str]:
    this = f"and this is the {config.engine_name} engine"
    if config.engine is EngineName.VLLM:
        yield from _vllm_problems(config.vllm)
    elif config.vllm.model is not None or config.vllm.talker is not None:
        flag = "--model" if config.vllm.model is not None else "--vllm.talker"
        yield f"{flag} is for the vllm engine, {this}: add --engine vllm"
    if config.engine is EngineName.REMOTE:
        yield from _remote_problems(config.remote)
    elif config.remote.upstreams:
        yield f"remote.upstreams is for the remote engine, {this}: add --engine remote"


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
        yield f"the remote engine needs httpx: {install_command()}"
    if not remote.upstreams:
        yield "the remote engine needs upstream servers: --remote.upstreams http://127.0.0.1:8000/v1"
    yield from _url_problems(remote)
    yield from _forwarding_problems(remote)


def _forwarding_problems(remote: RemoteConfig) -> Iterator[str]:
    """Yield the problems of the settings that the remote engine and an LLM on a server share."""
    for key, about in RemoteConfig.model_fields.items():
        known = mark(about, "words")
        for word in getattr(remote, key) if known else ():
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
