"""Plug-ins: the engines and front ends that entry points register, our own and those of other packages.

Our own stand here as in pyproject.toml, which a test compares: the entry points of all that is installed take 15 ms to
read, and an installation may be older than the code. Nobody else can have their names.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from omni_ws.config.values import ConfigurationError
from omni_ws.errors import OmniError

logger = logging.getLogger(__name__)

#: The groups of entry points. An engine's function is called with the ServerConfig, a front end's with the App.
ENGINES: Final = "omni_ws.engines"
FRONTS: Final = "omni_ws.fronts"
#: Our own of each group. The front ends stand in the order in which they drain and end.
OWN: Final[Mapping[str, Mapping[str, str]]] = {
    ENGINES: {
        "embedded": "omni_ws.engine_choice:composed_engine",
        "vllm": "omni_ws.engine_choice:composed_engine",
        "remote": "omni_ws.engine_choice:remote_engine",
        "fake": "omni_ws.engine_choice:echo_engine",
    },
    FRONTS: {
        name: f"omni_ws.fronts:{name}"
        for name in (
            *("mode_b_readers", "streaming_input", "realtime", "client_secrets", "webrtc", "telephony", "audiosocket"),
            *("mode_b", "chat", "speech", "completions", "transcriptions", "operations", "profiling", "demo"),
        )
    },
}


def registered(group: str, name: object) -> EntryPoint:
    """Find the plug-in of this name, and import nothing. Raises ValueError where there is none, or more than one."""
    own = OWN[group]
    if isinstance(name, str) and name in own:
        return EntryPoint(name, own[name], group)
    others = [one for one in entry_points(group=group) if one.name not in own]
    found = [one for one in others if one.name == name]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(sorted(map(_package, found)))} both have this name: uninstall one of them")
    if not found:
        known = (*own, *sorted({one.name for one in others}))
        near = difflib.get_close_matches(str(name).lower(), known, n=1)
        raise ValueError(f"unknown; known are {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else ""))
    return found[0]


def made(group: str, name: str, *, of: object, kind: type[Any]) -> Any:
    """Import the plug-in of this name, which was checked, and return the ``kind`` that it makes ``of`` the argument.

    Raises ConfigurationError where that fails, and what our own raise.
    """
    entry = registered(group, name)
    what = f"{'engine' if group == ENGINES else 'front end'} {name} of {_package(entry)} ({entry.value})"
    try:
        result = entry.load()(of)
    except Exception as error:
        if name in OWN[group] or isinstance(error, OmniError | ConfigurationError):
            raise
        logger.debug("%s cannot be made", what, exc_info=True)
        raise ConfigurationError([f"{what} cannot be made: {type(error).__name__}: {error}"]) from error
    if not isinstance(result, kind):
        raise ConfigurationError([f"{what} returned {type(result).__name__}, which is no {kind.__name__}"])
    return result


def _package(entry: EntryPoint) -> str:
    """The name of the package that registers it."""
    return entry.dist.name if entry.dist is not None else "omni_ws"
