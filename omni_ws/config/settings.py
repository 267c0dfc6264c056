"""The settings as derived from ``model``: key, flag, variable and syntax of each, and formatting of values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from omni_ws.config.model import ServerConfig
from omni_ws.config.values import Section, SizeMark, format_size, mark

VARIABLE_PREFIX: Final = "OMNI_WS_"


class SettingKind(StrEnum):
    """The syntax of a setting's value."""

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
    """A setting, derived from a field of the model."""

    path: tuple[str, ...]
    kind: SettingKind
    choices: tuple[str, ...]
    #: Whether the value may be unset (None).
    nullable: bool
    default: object
    description: str
    #: A shorter flag, if there is one.
    short: str | None
    #: Whether ``serve --help`` shows the setting; ``--help-all`` shows all settings.
    often: bool

    @property
    def key(self) -> str:
        """The name in the configuration file: ``streaming_input.start_policy``."""
        return ".".join(self.path)

    @property
    def section(self) -> str:
        """The name of the section that has the setting; empty for the top level."""
        return ".".join(self.path[:-1])

    @property
    def flag(self) -> str:
        """The name on the command line: ``--streaming-input.start-policy``."""
        return "--" + self.key.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and the shorter flag if there is one."""
        return (self.flag,) if self.short is None else (self.flag, self.short)

    @property
    def variable(self) -> str:
        """The name in the environment: ``OMNI_WS_STREAMING_INPUT__START_POLICY``."""
        return VARIABLE_PREFIX + "__".join(self.path).upper()


def _setting(path: tuple[str, ...], field: FieldInfo) -> Setting:
    annotation, metadata = field.annotation, list(field.metadata)
    nullable = False
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        nullable, annotation = len(members) < len(get_args(annotation)), members[0]
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata += more
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        choices, kind = tuple(member.value for member in annotation), SettingKind.CHOICE
    elif get_origin(annotation) is Literal:
        choices, kind = get_args(annotation), SettingKind.CHOICE
    elif any(isinstance(one, SizeMark) for one in metadata):
        choices, kind = (), SettingKind.SIZE
    else:
        choices, kind = (), _KINDS[get_origin(annotation) or annotation]
    return Setting(
        path=path,
        kind=kind,
        choices=choices,
        nullable=nullable,
        default=field.get_default(),
        description=field.description or "",
        short=mark(field, "short"),
        often=mark(field, "often"),
    )


_KINDS: Final[Mapping[Any, SettingKind]] = {
    str: SettingKind.TEXT,
    int: SettingKind.INTEGER,
    float: SettingKind.NUMBER,
    bool: SettingKind.SWITCH,
    Path: SettingKind.PATH,
    SecretStr: SettingKind.SECRET,
    tuple: SettingKind.LIST,
    dict: SettingKind.FREE_FORM,
}
#: The groups of settings by the name of their section, which is empty for the top level.
_GROUPS: Final[Mapping[str, type[Section]]] = {"": ServerConfig} | {
    name: field.annotation
    for name, field in ServerConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
#: The description of each section.
SECTIONS: Final[Mapping[str, str]] = {name: group.__doc__ or "" for name, group in _GROUPS.items()} | {
    "": (ServerConfig.__doc__ or "").partition(".")[0] + "."
}
#: All settings by their keys.
SETTINGS: Final[Mapping[str, Setting]] = {
    one.key: one
    for section, group in _GROUPS.items()
    for name, field in group.model_fields.items()
    if section or name not in _GROUPS
    for one in [_setting((section, name) if section else (name,), field)]
}


def setting_at(path: tuple[str, ...]) -> Setting | None:
    """Return the setting at a path, or the free-form setting that contains it."""
    for length in range(len(path), 0, -1):
        setting = SETTINGS.get(".".join(path[:length]))
        if setting is not None and (length == len(path) or setting.kind is SettingKind.FREE_FORM):
            return setting
    return None


def hint(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for a similar name; otherwise an empty text.

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


# Values in the form in which ``--help``, ``--print-config`` and the documentation show them

MASK: Final = "********"
#: The names of free-form arguments whose values are secrets.
_SECRET_NAME: Final = re.compile(r"(^|[_.])(token|secret|password|passphrase|key)$")
_USER_IN_URL: Final = re.compile(r"(?<=://)[^/@]+(?=@)")


def default_words(setting: Setting) -> str:
    """Format the default of a setting; empty if it has none."""
    if setting.default in (None, (), {}, ""):
        return ""
    if isinstance(setting.default, tuple):
        return ",".join(setting.default)
    return _as_toml(setting, setting.default).strip('"')


def render_values(config: ServerConfig, origins: Mapping[str, str]) -> str:
    """Format a configuration as a TOML file with the origin of each value. Secrets are masked and commented out."""
    lines = [line for setting in SETTINGS.values() for line in _lines(setting, config, origins)]
    width = min(max(len(line) for line, _ in lines), 60)
    return "".join(f"{line:<{width}}  # {origin}\n" for line, origin in lines)


def _lines(setting: Setting, config: ServerConfig, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a setting with their origins: one line, or one for each key in a free-form setting."""
    waiting: list[tuple[str, Any]] = [(setting.key, attrgetter(setting.key)(config))]
    while waiting:
        key, value = waiting.pop(0)
        inner = setting.kind is SettingKind.FREE_FORM and isinstance(value, dict) and key not in origins
        if inner and value:
            waiting[:0] = [(f"{key}.{name}", item) for name, item in value.items()]
        elif isinstance(value, SecretStr) or (key != setting.key and _SECRET_NAME.search(key)):
            yield f"# {key} = {MASK}", origins.get(key, "default")
        elif value is None:
            yield f"# {key} is {'not set' if key == setting.key else 'null'}", origins.get(key, "default")
        else:
            yield f"{key} = {_as_toml(setting, value)}", origins.get(key, "default")


def _as_toml(setting: Setting, value: object) -> str:
    if setting.kind is SettingKind.SIZE and isinstance(value, int) and value >= 1024:
        value = format_size(value)
    return _toml(value)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        shown = {name: MASK if _SECRET_NAME.search(name) else item for name, item in value.items()}
        return "{" + ", ".join(f"{_quoted(name)} = {_toml(item)}" for name, item in shown.items()) + "}"
    return _quoted(without_password(str(value.value if isinstance(value, Enum) else value)))


def without_password(text: str) -> str:
    """Return text with user and password of URLs masked."""
    return _USER_IN_URL.sub(MASK, text)


def _quoted(text: str) -> str:
    # JSON strings are valid TOML strings, except that TOML requires DEL to be escaped.
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
