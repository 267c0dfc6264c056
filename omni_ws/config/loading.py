"""Merges the configuration sources. Precedence: command line, environment, configuration file, default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omni_ws.config.command_line import command_line_layer
from omni_ws.config.error import ConfigurationError
from omni_ws.config.layers import environment_layer, toml_layer
from omni_ws.config.model import ServerConfig
from omni_ws.config.rendering import MASK, render_values
from omni_ws.config.settings import SETTINGS, Setting, SettingKind


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
