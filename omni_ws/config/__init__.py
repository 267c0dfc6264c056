"""Configuration of the server: one immutable value, from defaults, a file, the environment and the command line.

``load`` merges and validates these sources; its errors name where each bad value was set.
"""

from omni_ws.config.keys import ApiKey, configured_keys, load_keys
from omni_ws.config.loading import (
    LoadedConfig,
    check_available,
    check_exposure,
    load,
)
from omni_ws.config.model import (
    AuthConfig,
    EmbeddedSettings,
    EngineName,
    FakeConfig,
    GrpcConfig,
    HttpConfig,
    LimitsConfig,
    RemoteConfig,
    ServerConfig,
    StreamingInputConfig,
    VllmConfig,
    VoiceChoice,
)
from omni_ws.config.values import ConfigurationError

__all__ = [
    "ApiKey",
    "AuthConfig",
    "ConfigurationError",
    "EmbeddedSettings",
    "EngineName",
    "FakeConfig",
    "GrpcConfig",
    "HttpConfig",
    "LimitsConfig",
    "LoadedConfig",
    "RemoteConfig",
    "ServerConfig",
    "StreamingInputConfig",
    "VllmConfig",
    "VoiceChoice",
    "check_available",
    "check_exposure",
    "configured_keys",
    "load",
    "load_keys",
]
