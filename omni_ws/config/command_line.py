"""Command-line flags of the settings: their declaration, their help, and their values as a layer."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NoReturn

from omni_ws.config.error import ConfigurationError
from omni_ws.config.layers import FREE_FORM, Layer, free_form_path
from omni_ws.config.rendering import default_words
from omni_ws.config.settings import SECTIONS, SETTINGS, Setting, SettingKind, hint
from omni_ws.config.values import parse_free_form, parse_list

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
