"""Checks before the start that go beyond single values: exposure, packages, and what the engine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from omni_ws.config.engine_checks import engine_problems
from omni_ws.config.error import ConfigurationError
from omni_ws.config.literal_address import literal_address
from omni_ws.config.model import ServerConfig
from omni_ws.installing import install_command

GRPC_PACKAGES: Final = ("grpc", "grpc_health", "grpc_reflection")
TRACING_PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def check_exposure(config: ServerConfig) -> None:
    """Refuses to listen beyond this machine without a key, unless ``insecure_no_auth`` is set.

    Raises ConfigurationError.
    """
    has_key = config.api_key is not None or config.auth.keys_file is not None
    if has_key or config.auth.insecure_no_auth:
        return
    telephony = config.telephony
    addresses = {"host": config.host}
    if telephony.audiosocket_port is not None:
        addresses["telephony.audiosocket-host"] = telephony.audiosocket_host
    problems = [
        f"refusing to listen on {host} without a key, where other machines could use the server: "
        "set a key (environment variable OMNI_WS_API_KEY, --api-key, or --auth.keys-file for several), "
        f"listen on --{flag} 127.0.0.1, or allow unauthenticated access with --insecure-no-auth"
        for flag, host in addresses.items()
        if not is_loopback(host)
    ]
    if problems:
        raise ConfigurationError(problems)


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
    yield from engine_problems(config)
    if config.workers > 1:
        yield from _worker_problems(config)
    llm = config.llm.choice.name if config.composed else config.engine_name
    what = f"LLM {llm}" if config.composed else f"{llm} engine"
    if config.grpc.port is not None and any(find_spec(name) is None for name in GRPC_PACKAGES):
        yield f"the gRPC service needs its packages: {install_command('grpc')}"
    if config.grpc.port is not None and llm != "vllm":
        yield f"the {what} has no token sessions; remove grpc.port"
    if (config.grpc.readout_vectors is None) != (config.grpc.readout_manifest is None):
        yield "grpc.readout_vectors and grpc.readout_manifest need each other"
    if config.grpc.readout_vectors is not None and llm != "vllm":
        yield f"the {what} has no readouts; remove grpc.readout_vectors"
    if config.tracing and not all(map(_is_installed, TRACING_PACKAGES)):
        yield f"tracing needs OpenTelemetry: {install_command('otel')}"
    if config.record is not None and os.name != "posix":
        yield "recording sessions (record) needs a POSIX system, where the files can be made private"


def _worker_problems(config: ServerConfig) -> Iterator[str]:
    """What several workers cannot do together."""
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
