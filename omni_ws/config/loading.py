"""Loads the configuration from the command line, the environment, a file and the defaults.

Each source is read into a layer: a tree of values, with where each was set. The command line takes precedence over the
environment, the environment over the configuration file, and the file over the defaults.
"""

from __future__ import annotations

import argparse
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
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
    without_password,
)
from omni_ws.config.values import ConfigurationError, parse_free_form, parse_list


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
    """Load the configuration.

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


# Layers


@dataclass(slots=True)
class Layer:
    """Values from one source.

    ``tree`` is nested like the configuration. ``origins`` maps the key of each setting in it to where it was set.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def set(self, path: tuple[str, ...], value: object, *, origin: str) -> None:
        """Store a value, or append it for a repeated list flag. A path through another value is a problem."""
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


def toml_layer(source: str | Path | None) -> Layer:
    """Read a configuration file (Path) or its content (str)."""
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

    Free-form tables, those of plug-ins included, are descended into; any other table at a setting is a leaf.
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
    """Read the environment variables with the prefix ``OMNI_WS_``. An unknown variable is a problem."""
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
    """Return the path for the parts of a variable's name if it leads into a free-form setting; otherwise None."""
    path = tuple(name.replace("-", "_") for name in names)
    return path if all(path) and setting_at(path) is not None and ".".join(path) not in SETTINGS else None


def command_line_layer(argv: Sequence[str]) -> Layer:
    """Read the flags in ``argv``, which has the flags of settings only.

    Takes ``--flag value`` and ``--flag=value``, with hyphens or underscores, and ``--vllm.args.<name>`` for a key in a
    free-form setting. A switch, and a flag for a key in a free-form setting, may have no value.
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
    """Add the flags to the parser for the help, one group for each section: either frequent flags, or all."""
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
