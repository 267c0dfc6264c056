"""Formats settings for ``--help``, ``--print-config`` and the documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

from pydantic import SecretStr

from omni_ws.config.model import ServerConfig
from omni_ws.config.settings import SETTINGS, Setting, SettingKind
from omni_ws.config.values import format_size

MASK: Final = "********"
#: Names of free-form arguments that hold secrets.
_SECRET_NAME: Final = re.compile(r"(^|_)(token|secret|password|passphrase|key)$")
_USER_IN_URL: Final = re.compile(r"(?<=://)[^/@]+(?=@)")


def default_words(setting: Setting) -> str:
    """Formats the default of a setting; empty if it has none."""
    if setting.default in (None, (), {}, ""):
        return ""
    if isinstance(setting.default, tuple):
        return ",".join(setting.default)
    return _as_toml(setting, setting.default).strip('"')


def render_values(config: ServerConfig, origins: Mapping[str, str]) -> str:
    """Formats a configuration as a TOML file with the origin of each value. Secrets are masked and commented out."""
    lines = list(_lines(config, origins))
    width = min(max(len(line) for line, _ in lines), 60)
    return "".join(f"{line:<{width}}  # {origin}\n" for line, origin in lines)


def _lines(config: ServerConfig, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for setting in SETTINGS.values():
        value: Any = config
        for part in setting.path:
            value = getattr(value, part)
        if setting.kind is SettingKind.FREE_FORM and value:
            yield from _free_form_lines(setting.key, value, origins)
        else:
            yield _line(setting, value), origins.get(setting.key, "default")


def _line(setting: Setting, value: object) -> str:
    if isinstance(value, SecretStr):
        return f"# {setting.key} = {MASK}"
    if value is None:
        return f"# {setting.key} is not set"
    return f"{setting.key} = {_as_toml(setting, value)}"


def _free_form_lines(key: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        inner = f"{key}.{name}"
        if isinstance(value, dict) and value and inner not in origins:
            yield from _free_form_lines(inner, value, origins)
        elif _SECRET_NAME.search(name):
            yield f"# {inner} = {MASK}", origins.get(inner, "default")
        elif value is None:
            yield f"# {inner} is null", origins.get(inner, "default")
        else:
            yield f"{inner} = {_toml(value)}", origins.get(inner, "default")


def _as_toml(setting: Setting, value: object) -> str:
    if setting.kind is SettingKind.SIZE and isinstance(value, int):
        return _toml(format_size(value)) if value >= 1024 else str(value)
    return _toml(value)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (int, float)):
        return str(value)
    text = value.value if isinstance(value, Enum) else str(value)
    # JSON strings are valid TOML strings, except that TOML requires DEL to be escaped.
    return json.dumps(_USER_IN_URL.sub(MASK, str(text)), ensure_ascii=False).replace("\x7f", "\\u007f")
