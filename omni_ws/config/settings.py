"""The table of all settings, with the key, flag and environment variable of each, and the text form of their values."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from omni_ws.config.model import ServerConfig
from omni_ws.config.values import SizeMark, format_size

VARIABLE_PREFIX: Final = "OMNI_WS_"

#: Short aliases of frequent flags.
FLAG_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "asr.use": "--asr",
        "llm.use": "--llm",
        "tts.use": "--tts",
        "grpc.port": "--grpc-port",
        "auth.insecure_no_auth": "--insecure-no-auth",
        "auth.keys_file": "--keys-file",
        "vllm.model": "--model",
    }
)


class SettingKind(StrEnum):
    """Syntax of a value."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    SIZE = "size"
    SWITCH = "switch"
    CHOICE = "choice"
    LIST = "list"
    PATH = "path"
    SECRET = "secret"
    FREE_FORM = "free-form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting as declared by a field of the model."""

    path: tuple[str, ...]
    kind: SettingKind
    choices: tuple[str, ...]
    #: Whether the value may be unset (None).
    nullable: bool
    default: object
    description: str

    @property
    def key(self) -> str:
        """Its name in the configuration file: ``streaming_input.start_policy``."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """Its name on the command line: ``--streaming-input.start-policy``."""
        return "--" + self.key.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its alias, if it has one."""
        alias = FLAG_ALIASES.get(self.key)
        return (self.flag,) if alias is None else (self.flag, alias)

    @property
    def variable(self) -> str:
        """Its name in the environment: ``OMNI_WS_STREAMING_INPUT__START_POLICY``."""
        return VARIABLE_PREFIX + "__".join(self.path).upper()

    @property
    def type_words(self) -> str:
        """The type, or the choices, as the help shows them."""
        return "|".join(self.choices) if self.choices else self.kind.value


def _collect(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _collect(annotation, path)
        else:
            yield _setting(path, field)


def _setting(path: tuple[str, ...], field: FieldInfo) -> Setting:
    annotation, marks = field.annotation, list(field.metadata)
    nullable = False
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        nullable, annotation = len(members) < len(get_args(annotation)), members[0]
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        marks += more
    choices: tuple[str, ...] = ()
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, StrEnum):
        choices = tuple(member.value for member in annotation)
    return Setting(
        path=path,
        kind=SettingKind.CHOICE if choices else _kind(annotation, marks),
        choices=choices,
        nullable=nullable,
        default=field.get_default(call_default_factory=True, validated_data={}),
        description=field.description or "",
    )


def _kind(annotation: Any, marks: Iterable[object]) -> SettingKind:
    if any(isinstance(mark, SizeMark) for mark in marks):
        return SettingKind.SIZE
    return {
        str: SettingKind.TEXT,
        int: SettingKind.INTEGER,
        float: SettingKind.NUMBER,
        bool: SettingKind.SWITCH,
        Path: SettingKind.PATH,
        SecretStr: SettingKind.SECRET,
        tuple: SettingKind.LIST,
        dict: SettingKind.FREE_FORM,
    }[get_origin(annotation) or annotation]


SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({s.key: s for s in _collect(ServerConfig)})

SECTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"": (ServerConfig.__doc__ or "").partition(".")[0] + "."}
    | {
        name: field.annotation.__doc__ or ""
        for name, field in ServerConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
)


def setting_at(path: tuple[str, ...]) -> Setting | None:
    """Returns the setting at a path, or the free-form setting that contains it."""
    for length in range(len(path), 0, -1):
        setting = SETTINGS.get(".".join(path[:length]))
        if setting is not None and (length == len(path) or setting.kind is SettingKind.FREE_FORM):
            return setting
    return None


def hint(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean X?"`` for a similar name; otherwise an empty text.

    The last part of a name is compared too, since sections are often left out (``--session-timeout-sec``).
    """
    names = list(known)
    last = _last_part(name)
    near = [other for other in names if _last_part(other) == last] if last else []
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if not near:
        by_last = {_last_part(other): other for other in names}
        near = [by_last[part] for part in difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)]
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def _last_part(name: str) -> str:
    plain = name.removeprefix(VARIABLE_PREFIX).replace("__", ".").strip("-").replace("-", "_").lower()
    return plain.rpartition(".")[2]


# Values as ``--help``, ``--print-config`` and the documentation show them

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
