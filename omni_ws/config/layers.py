"""Configuration sources, each read into a layer: a tree of values with the origin of each."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omni_ws.config.error import ConfigurationError
from omni_ws.config.settings import SECTIONS, SETTINGS, VARIABLE_PREFIX, Setting, SettingKind, hint, setting_at
from omni_ws.config.values import parse_free_form, parse_list

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
