"""The sources of configuration, each read into one layer: a tree of values, and where every value came from."""

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
    """``tree`` is nested like the configuration; ``origins`` has one entry for each key that the layer sets."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def set(self, path: tuple[str, ...], value: object, *, origin: str) -> None:
        branch = self.tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                self.problems.append(f"{'.'.join(path)} ({origin}): {part} already has a value of its own")
                return
        branch[path[-1]] = value
        self.origins[".".join(path)] = origin

    def set_text(self, setting: Setting, text: str, *, origin: str) -> None:
        """Take a value as flags and variables have it; types are checked later, for all layers alike."""
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
    # An empty key is far more often a variable that was forgotten than the wish to have no key.
    if text == "" and setting.nullable and setting.kind is not SettingKind.SECRET:
        return None
    if setting.kind is SettingKind.LIST:
        return parse_list(text)
    if setting.kind is SettingKind.FREE_FORM:
        value = json.loads(text) if text.lstrip().startswith("{") else None
        if not isinstance(value, dict):
            raise ValueError(f"takes a JSON object, or single arguments as {setting.flag}.<name>")
        return value
    return text


def toml_layer(source: str | Path | None) -> Layer:
    """A configuration file, or its text."""
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
            layer.problems.append(f"{key} ({name}): is a section, so it is written [{key}] with keys below it")
        else:
            layer.problems.append(f"unknown key {key} in {name}{hint(key, (*SETTINGS, *SECTIONS))}")
    return layer


def read_toml(source: str | Path, *, name: str) -> dict[str, Any]:
    """Raises ConfigurationError for what cannot be read or is no TOML."""
    try:
        return tomllib.loads(source.read_text(encoding="utf-8") if isinstance(source, Path) else source)
    except OSError as error:
        raise ConfigurationError([f"cannot read {name}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError([f"{name} is not UTF-8 text"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError([f"{name} is not TOML: {error}"]) from error


def _walk(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a tree. What lies inside a setting's own table belongs to the setting, entry by entry."""
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
    """The variables that begin with OMNI_WS_; all of them must be known."""
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
    """The path of ``<prefix>a<separator>b`` inside the free-form setting that the prefix belongs to."""
    for prefix, setting in prefixes.items():
        parts = name.removeprefix(prefix).replace("-", "_").split(separator)
        if name.startswith(prefix) and all(parts):
            return (*setting.path, *parts)
    return None
