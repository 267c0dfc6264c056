"""The table of settings, the configuration from all its sources, and its checks before the start.

The command line takes precedence over the environment, the environment over the configuration file, and the file over
the defaults.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import reduce
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from omni_ws.config.model import EngineName, RemoteConfig, ServerConfig, VllmConfig
from omni_ws.config.parts import (
    AUTO,
    FORMS,
    GGUF_PARTS,
    IMPLIED,
    LOCAL_PORTS,
    OPENAI_KEY,
    REMOTE_PARTS,
    VLLM_PARTS,
    PartConfig,
)
from omni_ws.config.values import (
    ConfigurationError,
    Section,
    SizeMark,
    format_size,
    literal_address,
    mark,
    parse_free_form,
    parse_list,
)
from omni_ws.installing import INSTALL_VLLM, install_command

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
#: The names of free-form arguments whose values are secrets, except in the setting whose names are words to be said.
_SECRET_NAME: Final = re.compile(r"(token|secret|password|passphrase|key)$", re.IGNORECASE)
_WORDS: Final = "tts.lexicon"
#: Up to the last "@": a password that is not percent-encoded may have any character.
_USER_IN_URL: Final = re.compile(r"(?<=://)(?:\S*|[^/@]+)(?=@)")


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
        elif isinstance(value, SecretStr) or (setting.key not in (key, _WORDS) and _SECRET_NAME.search(key)):
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
    utf8 = text.encode(errors="replace").decode()  # a path need not be UTF-8
    return msgspec.json.encode(utf8).decode().replace("\x7f", "\\u007f")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration with the origin of each value that is not a default."""

    config: ServerConfig
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Return where the value of a setting is from, such as ``command line --port`` or ``default``."""
        return self.origins.get(key, "default")

    def render(self) -> str:
        """Format the configuration as a TOML file with the origin of each value as a comment; secrets are masked."""
        return render_values(self.config, self.origins)


def load(
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    toml: str | Path | None = None,
) -> LoadedConfig:
    """Load the configuration from flags, environment variables and a file; without ``environ``, no variables are read.

    ``argv`` has the flags of settings only. ``toml`` is the path of a file or, as ``str``, its content. Raises
    ConfigurationError with every problem in all sources.
    """
    layers = (toml_layer(toml), environment_layer(environ or {}), command_line_layer(argv))
    origins = {key: origin for layer in layers for key, origin in layer.origins.items()}
    problems = [problem for layer in layers for problem in layer.problems]
    try:
        config = ServerConfig.model_validate(reduce(_overlaid, (layer.tree for layer in layers)))
    except ValidationError as error:
        problems += _explained(error, origins)
    if problems:
        raise ConfigurationError(problems)
    return LoadedConfig(config, origins)


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees. If both have a value, ``above`` wins; tables are merged key by key."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _overlaid(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _explained(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each invalid value: setting, value, origin and reason."""
    for detail in error.errors(include_url=False, include_context=False):
        reason = detail["msg"].removeprefix("Value error, ")
        setting = _blamed(detail["loc"])
        if setting is None:
            yield reason
            continue
        shown = MASK if setting.kind is SettingKind.SECRET else without_password(repr(detail["input"]))
        key = ".".join(map(str, detail["loc"])) if setting.kind is SettingKind.FREE_FORM else setting.key
        yield f"{key} = {shown} ({origins.get(key, 'default')}): {reason[:1].lower()}{reason[1:]}"


def _blamed(location: tuple[int | str, ...]) -> Setting | None:
    """Return the setting at the location of a pydantic error; None if the violated rule spans several settings."""
    names = tuple(part for part in location if isinstance(part, str))
    return next((s for n in range(len(names), 0, -1) if (s := SETTINGS.get(".".join(names[:n])))), None)


# Layers. Each source is read into one: a tree of values, with where each was set.


@dataclass(slots=True)
class Layer:
    """Values from one source.

    ``tree`` is nested like the configuration. ``origins`` maps the key of each setting in it to where it was set.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def set(self, path: tuple[str, ...], value: object, *, origin: str) -> None:
        """Store a value; append it if a list was stored at ``path`` before (a repeated flag).

        ``origin`` says where the value was set: ``command line --port``.

        If a part of ``path`` already has a value other than a table, a message is added to ``problems`` instead.
        """
        key = ".".join(path)
        branch = self.tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                self.problems.append(f"{key} ({origin}): {part} already has a value of its own")
                return
        if isinstance(value, list) and key in SETTINGS:
            value = [*(branch.get(path[-1]) or ()), *value]
        branch[path[-1]] = value
        self.origins[key] = origin

    def set_text(self, setting: Setting, text: str, *, origin: str) -> None:
        """Store a value given as text, and check its syntax; types are validated after all layers are merged."""
        try:
            value = _from_text(setting, text)
        except ValueError as error:
            self.problems.append(f"{setting.key} ({origin}): {error}")
            return
        if isinstance(value, dict):
            for name, item in value.items():
                self.set((*setting.path, name), item, origin=origin)
        else:
            self.set(setting.path, value, origin=origin)


def _from_text(setting: Setting, text: str) -> object:
    if setting.kind not in (SettingKind.PATH, SettingKind.SECRET) and not _is_utf8(text):
        raise ValueError("is not UTF-8 text")
    # An empty secret is more likely a mistake than the wish to have none: validation refuses it.
    if text == "" and setting.nullable and setting.kind is not SettingKind.SECRET:
        return None
    if setting.kind is SettingKind.LIST:
        return parse_list(text)
    if setting.kind is SettingKind.FREE_FORM:
        value = msgspec.json.decode(text) if text.lstrip().startswith("{") else None
        if not isinstance(value, dict):
            raise ValueError(f"takes a JSON object; or set single arguments by {setting.flag}.<name>")
        return value
    return text


def _is_utf8(text: str) -> bool:
    """Return whether a text of the environment or the command line was UTF-8 there: a path need not be."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def toml_layer(source: str | Path | None) -> Layer:
    """Read a configuration file (Path) or its content (str); None gives an empty layer.

    Unknown keys are added to ``problems``. Raises ConfigurationError if the file cannot be read or is not TOML.
    """
    layer = Layer()
    if source is None:
        return layer
    name = str(source) if isinstance(source, Path) else "configuration file"
    document = read_toml(source, name=name)
    for path, value in _walk(document):
        setting = setting_at(path)
        key = ".".join(path)
        if setting is not None:
            layer.set(path, value, origin=name)
        elif key in SECTIONS:
            layer.problems.append(f"{key} ({name}): is a section; write [{key}] and its keys below")
        else:
            layer.problems.append(f"unknown key {key} in {name}{hint(key, (*SETTINGS, *SECTIONS))}")
    return layer


def read_toml(source: str | Path, *, name: str) -> dict[str, Any]:
    """Read a TOML document, which error messages call ``name``.

    Raises ConfigurationError if it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(source.read_text(encoding="utf-8") if isinstance(source, Path) else source)
    except OSError as error:
        raise ConfigurationError([f"cannot read {name}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError([f"{name} is not UTF-8 text"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError([f"{name} is not TOML: {error}"]) from error


def _walk(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a tree with their paths.

    Sections, free-form settings and the tables of plug-ins are walked into; any other table is a leaf.
    """
    for name, value in tree.items():
        path = (*prefix, name)
        key = ".".join(path)
        setting = SETTINGS.get(key)
        free_form = setting is not None and setting.kind is SettingKind.FREE_FORM
        has_keys = key in SECTIONS or free_form or path[0] == "plugins"
        if has_keys and isinstance(value, dict):
            yield from _walk(value, path)
        else:
            yield path, value


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Read the environment variables with the prefix ``OMNI_WS_``. Unknown variables are added to ``problems``."""
    layer = Layer()
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    for name in sorted(environ):
        if not name.startswith(VARIABLE_PREFIX):
            continue
        origin = f"environment variable {name}"
        if name in by_variable:
            layer.set_text(by_variable[name], environ[name], origin=origin)
        elif (inside := _inside(name.removeprefix(VARIABLE_PREFIX).lower().split("__"))) is not None:
            layer.set(inside, parse_free_form(environ[name]), origin=origin)
        else:
            layer.problems.append(f"unknown environment variable {name}{hint(name, by_variable)}")
    return layer


def _inside(names: Sequence[str]) -> tuple[str, ...] | None:
    """Convert the parts of a variable's name to the path of a key inside a free-form setting; None for other names."""
    path = tuple(name.replace("-", "_") for name in names)
    return path if all(path) and setting_at(path) is not None and ".".join(path) not in SETTINGS else None


def command_line_layer(argv: Sequence[str]) -> Layer:
    """Read the flags in ``argv``, which has the flags of settings only.

    Takes ``--flag value`` and ``--flag=value``, with hyphens or underscores, and ``--vllm.args.<name>`` for a key in a
    free-form setting. A switch, and a flag for a key in a free-form setting, may have no value. Unknown flags are added
    to ``problems``.
    """
    layer = Layer()
    by_flag = {flag: setting for setting in SETTINGS.values() for flag in setting.flags}
    unknown: list[str] = []
    waiting = deque(argv)
    while waiting:
        name, separator, text = waiting.popleft().partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        setting, inside = by_flag.get(name), _inside(name[2:].split(".")) if name.startswith("--") else None
        if setting is None and inside is None:
            unknown.append(name)
            continue
        if not separator:
            if waiting and (not waiting[0].startswith("--") or " " in waiting[0]):
                text = waiting.popleft()
            elif setting is None or setting.kind is SettingKind.SWITCH:
                text = "true"
            else:
                layer.problems.append(f"argument {'/'.join(setting.flags)}: expected one argument")
                continue
        if setting is not None:
            layer.set_text(setting, text, origin=f"command line {setting.flag}")
        elif inside is not None:
            layer.set(inside, parse_free_form(text), origin=f"command line {name}")
    # The value of an unknown flag is not reported as a second problem.
    for name in [one for one in unknown if one.startswith("-")] or unknown:
        layer.problems.append(f"unknown {'flag' if name[:1] == '-' else 'argument'} {name}{hint(name, by_flag)}")
    return layer


def add_flags(parser: argparse.ArgumentParser, *, only_often: bool) -> None:
    """Add the settings' flags to ``parser``, which prints the help, in one group for each section.

    ``only_often``: only the flags that are used often, for the short help.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS.values():
        if only_often and not setting.often:
            continue
        if setting.section not in groups:
            words = SECTIONS[setting.section].partition("\n")[0]
            groups[setting.section] = parser.add_argument_group(setting.section or "server", words)
        shape = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.kind.value.upper()
        default = default_words(setting)
        groups[setting.section].add_argument(
            *setting.flags,
            dest=setting.key,
            nargs="?" if setting.kind is SettingKind.SWITCH else None,
            metavar=shape,
            default=argparse.SUPPRESS,
            help=(setting.description + (f" [{default}]" if default else "")).replace("%", "%%"),
        )


# Checks of the configuration before the start: exposure to the network, packages, abilities of the engine.


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
    """Return whether ``host`` is reachable from this machine only: a loopback address, or the name ``localhost``."""
    if host.lower() == "localhost":
        return True
    address = literal_address(host)
    return address is not None and address.is_loopback


def page_address(config: ServerConfig, port: int) -> str:
    """Return the URL of the server's web page on ``port``; for a server that listens on all addresses, on loopback."""
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
        yield from _problems_of(part, _name_of(part, config))
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


def _name_of(part: PartConfig, config: ServerConfig) -> str:
    """Return the name of the chosen part; IMPLIED if none is, and empty for an engine that is not made of parts."""
    if part is config.llm and config.chooses_llm:
        return AUTO
    if part.use is not None:
        return part.choice.name
    return IMPLIED if config.composed or config.engine in (None, EngineName.EMBEDDED) else ""


def _problems_of(part: PartConfig, name_of_part: str) -> Iterator[str]:
    """Yield the problems of one part's settings. ``name_of_part`` is what ``_name_of`` returns for it."""
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
