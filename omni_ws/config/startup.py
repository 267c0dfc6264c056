"""What must hold before the server starts, beyond each value being a good one."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from typing import Final

from omni_ws.config.error import ConfigurationError
from omni_ws.config.keys import ApiKey
from omni_ws.config.model import EngineName, GrpcConfig, RemoteConfig, ServerConfig, VllmConfig

_NOT_AVAILABLE: Final = "not available in this version"


def check_exposure(config: ServerConfig) -> None:
    """Without a key, only this machine may reach the server, unless the operator insists. Raises ConfigurationError."""
    has_key = config.api_key is not None or config.auth.keys_file is not None
    if has_key or config.auth.insecure_no_auth or is_loopback(config.host):
        return
    raise ConfigurationError(
        [
            f"refusing to listen on {config.host}, where other machines could use the server without a key: "
            "set a key (environment variable OMNI_WS_API_KEY, --api-key, or --auth.keys-file for several), "
            "listen on --host 127.0.0.1, or allow everybody with --insecure-no-auth"
        ]
    )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine alone. A name other than ``localhost`` could be anything, so it is not."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def check_available(config: ServerConfig, keys: Iterable[ApiKey] = ()) -> None:
    """Refuse by name what can be configured and is not there yet. Raises ConfigurationError."""
    problems = [*_unavailable_settings(config), *_unavailable_limits(keys)]
    if problems:
        raise ConfigurationError(problems)


def _unavailable_settings(config: ServerConfig) -> Iterator[str]:
    if config.engine in (EngineName.VLLM, EngineName.REMOTE):
        yield f"the {config.engine} engine is {_NOT_AVAILABLE}; there are --engine embedded and --engine fake"
    if config.vllm != VllmConfig():
        yield f"the vllm settings are {_NOT_AVAILABLE}, nor is the engine that they are for"
    if config.remote != RemoteConfig():
        yield f"the remote settings are {_NOT_AVAILABLE}, nor is the engine that they are for"
    if config.grpc != GrpcConfig():
        yield f"the gRPC service is {_NOT_AVAILABLE}; leave the grpc settings out"
    if config.record is not None:
        yield f"recording sessions (record) is {_NOT_AVAILABLE}"


def _unavailable_limits(keys: Iterable[ApiKey]) -> Iterator[str]:
    for key in keys:
        for limit in ("requests_per_sec", "burst", "input_bytes_per_sec"):
            if getattr(key, limit) is not None:
                yield f"key {key.name}: the limit {limit} is {_NOT_AVAILABLE}"
