"""Loads the configuration from its sources.

Each source is read into a layer: a tree of values with the origin of each. The command line takes precedence over the
environment, the environment over the configuration file, and that over the defaults.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final, NoReturn

from pydantic import ValidationError

from omni_ws.config.model import ServerConfig
from omni_ws.config.settings import (
    MASK,
    SECTIONS,
    SETTINGS,
    VARIABLE_PREFIX,
    Setting,
    SettingKind,
    default_words,
    hint,
    render_values,
    setting_at,
)
from omni_ws.config.values import ConfigurationError, parse_free_form, parse_list


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration with the origin of each value that was set."""

    config: ServerConfig
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Where the value of a key comes from, such as ``command line --port`` or ``default``."""
        return self.origins.get(key, "default")

    def render(self) -> str:
        """Formats the configuration as a commented TOML file, with origins; secrets are masked."""
        return render_values(self.config, self.origins)


def load(
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    toml: str | Path | None = None,
) -> LoadedConfig:
    """Loads the configuration.

    ``argv`` holds settings only. ``toml`` is the path of a file or, as ``str``, its content. Raises
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
    """Merges two trees. Where both have a value, ``above`` wins; tables are merged key by key."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _overlaid(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _explained(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each invalid value: key, value, origin and reason."""
    for detail in error.errors(include_url=False, include_context=False):
        reason = detail["msg"].removeprefix("Value error, ")
        setting = _blamed(detail["loc"])
        if setting is None:
            yield reason
            continue
        shown = MASK if setting.kind is SettingKind.SECRET else repr(detail["input"])
        yield f"{setting.key} = {shown} ({origins.get(setting.key, 'default')}): {reason[:1].lower()}{reason[1:]}"


def _blamed(location: tuple[int | str, ...]) -> Setting | None:
    """Finds the setting in pydantic's location; None if the rule spans several settings."""
    names = tuple(part for part in location if isinstance(part, str))
    return next((s for n in range(len(names), 0, -1) if (s := SETTINGS.get(".".join(names[:n])))), None)


# Layers

FREE_FORM: Final = tuple(setting for setting in SETTINGS.values() if setting.kind is SettingKind.FREE_FORM)


@dataclass(slots=True)
class Layer:
    """Values from one source.

    ``tree`` is nested like the configuration. ``origins`` maps each key that the layer sets to where it was set.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def set(self, path: tuple[str, ...], value: object, *, origin: str) -> None:
        """Stores a value; records a problem if the path leads through another value."""
        branch = self.tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                self.problems.append(f"{'.'.join(path)} ({origin}): {part} already has a value of its own")
                return
        branch[path[-1]] = value
        self.origins[".".join(path)] = origin

    def set_text(self, setting: Setting, text: str, *, origin: str) -> None:
        """Stores a value given as text. Only its syntax is checked here; validation of types follows for all layers."""
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
    # An empty secret is more likely a mistake than the wish to have none, so validation sees and refuses it.
    if text == "" and setting.nullable and setting.kind is not SettingKind.SECRET:
        return None
    if setting.kind is SettingKind.LIST:
        return parse_list(text)
    if setting.kind is SettingKind.FREE_FORM:
        value = json.loads(text) if text.lstrip().startswith("{") else None
        if not isinstance(value, dict):
            raise ValueError(f"takes a JSON object; or set single arguments by {setting.flag}.<name>")
        return value
    return text


def toml_layer(source: str | Path | None) -> Layer:
    """Reads a configuration file (Path) or its content (str)."""
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
    """Reads a TOML document; ``name`` is how messages call it.

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
    """Yields the leaves of a tree with their paths.

    A free-form table is walked too; any other table below a setting is its value.
    """
    for name, value in tree.items():
        path = (*prefix, name)
        key = ".".join(path)
        setting = SETTINGS.get(key)
        has_keys = key in SECTIONS or (setting is not None and setting.kind is SettingKind.FREE_FORM)
        if has_keys and isinstance(value, dict):
            yield from _walk(value, path)
        else:
            yield path, value


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Reads the variables with the prefix ``OMNI_WS_``. An unknown one is a problem."""
    layer = Layer()
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    for name in sorted(environ):
        if not name.startswith(VARIABLE_PREFIX):
            continue
        origin = f"environment variable {name}"
        if name in by_variable:
            layer.set_text(by_variable[name], environ[name], origin=origin)
        elif (
            inside := free_form_path(name.lower(), {s.variable.lower() + "__": s for s in FREE_FORM}, "__")
        ) is not None:
            layer.set(inside, parse_free_form(environ[name]), origin=origin)
        else:
            layer.problems.append(f"unknown environment variable {name}{hint(name, by_variable)}")
    return layer


def free_form_path(name: str, prefixes: Mapping[str, Setting], separator: str) -> tuple[str, ...] | None:
    """Returns the path that ``<prefix>a<separator>b`` names within a free-form setting; None if it names none."""
    for prefix, setting in prefixes.items():
        parts = name.removeprefix(prefix).replace("-", "_").split(separator)
        if name.startswith(prefix) and all(parts):
            return (*setting.path, *parts)
    return None


# The command line

#: Settings that ``serve --help`` shows; ``--help-all`` shows all.
MOST_USED: Final = frozenset(
    (
        *("host", "port", "engine", "api_key", "auth.keys_file", "auth.insecure_no_auth", "allow_origin"),
        *("ssl_certfile", "ssl_keyfile", "served_model_name", "log_format", "log_level", "record", "drain_timeout_sec"),
        *("asr.use", "llm.use", "llm.api_key", "tts.use", "tts.voice"),
        *("limits.max_sessions", "embedded.voice", "vllm.model", "vllm.args", "vllm.talker", "vllm.tool_parser"),
        *("remote.upstreams", "remote.api_key", "remote.input_modalities", "remote.speech_upstream", "grpc.port"),
    )
)

#: Value of a switch that is given without one.
_SWITCHED_ON: Final = "true"


def command_line_layer(argv: Sequence[str]) -> Layer:
    """Parses the flags in ``argv``, which holds settings only.

    Takes ``--flag value`` and ``--flag=value``, with hyphens or underscores. Problems are collected in the layer.
    """
    layer = Layer()
    ordinary = _take_free_form([_hyphenated(argument) for argument in argv], layer)
    parser = FlagParser()
    try:
        given, unknown = parser.parse_known_args(ordinary)
    except ConfigurationError as error:
        layer.problems.extend(error.problems)
        return layer
    for key, value in vars(given).items():
        setting = SETTINGS[key]
        origin = f"command line {setting.flag}"
        if isinstance(value, list):
            layer.set(setting.path, [item for text in value for item in _listed(setting, text, layer)], origin=origin)
        else:
            layer.set_text(setting, value, origin=origin)
    flags = [flag for setting in SETTINGS.values() for flag in setting.flags]
    # The value of an unknown flag is not reported as another problem.
    for argument in [a for a in unknown if a.startswith("-")] or unknown:
        name = argument.partition("=")[0]
        what = "flag" if name.startswith("-") else "argument"
        layer.problems.append(f"unknown {what} {name}{hint(name, flags)}")
    return layer


def _listed(setting: Setting, text: str, layer: Layer) -> list[Any]:
    try:
        return parse_list(text)
    except ValueError as error:
        layer.problems.append(f"{setting.key} (command line {setting.flag}): {error}")
        return []


def _hyphenated(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value


def _take_free_form(argv: Iterable[str], layer: Layer) -> list[str]:
    """Moves ``--vllm.args.<name> value`` into the layer, and returns the other arguments.

    The name alone is a switch.
    """
    prefixes = {setting.flag + ".": setting for setting in FREE_FORM}
    others: list[str] = []
    waiting: tuple[tuple[str, ...], str] | None = None
    for argument in [*argv, "--"]:
        if waiting is not None:
            path, name = waiting
            is_value = not argument.startswith("--")
            layer.set(path, parse_free_form(argument if is_value else _SWITCHED_ON), origin=f"command line {name}")
            waiting = None
            if is_value:
                continue
        name, separator, value = argument.partition("=")
        inside = free_form_path(name, prefixes, ".")
        if inside is None:
            others.append(argument)
        elif separator:
            layer.set(inside, parse_free_form(value), origin=f"command line {name}")
        else:
            waiting = (inside, name)
    return others[:-1]


class FlagParser(argparse.ArgumentParser):
    """argparse with every setting as a flag. It raises ConfigurationError instead of exiting."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        add_flags(self)

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError([message])


def add_flags(parser: argparse.ArgumentParser, *, only: Collection[str] | None = None) -> None:
    """Adds the flags to a parser, one group for each section.

    Values are stored as text under the key of their setting. ``only`` restricts the flags to these keys.
    """
    chosen = [setting for key, setting in SETTINGS.items() if only is None or key in only]
    sections = {setting.path[0] if len(setting.path) > 1 else "" for setting in chosen}
    groups = {
        name: parser.add_argument_group(name or "server", description.partition("\n")[0])
        for name, description in SECTIONS.items()
        if name in sections
    }
    for setting in chosen:
        default = default_words(setting)
        extra: dict[str, Any] = {"metavar": setting.type_words.upper() if not setting.choices else None}
        if setting.choices:
            extra["metavar"] = "{" + ",".join(setting.choices) + "}"
        if setting.kind is SettingKind.SWITCH:
            extra |= {"nargs": "?", "const": _SWITCHED_ON}
        if setting.kind is SettingKind.LIST:
            extra["action"] = "append"
        words = setting.description + (f" [{default}]" if default else "")
        groups[setting.path[0] if len(setting.path) > 1 else ""].add_argument(
            *setting.flags, dest=setting.key, default=argparse.SUPPRESS, help=words.replace("%", "%%"), **extra
        )
