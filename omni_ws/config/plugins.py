"""Plug-ins: the engines and front ends that packages register as entry points, this package included.

The plug-ins of this package are listed here as in pyproject.toml; a test compares the lists. Reading the entry points
of all installed packages takes 15 ms, and the installed entry points may be older than the code. No other package can
register the same names.
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
#: The plug-ins of this package, by group. Front ends drain and end in this order.
OWN: Final[Mapping[str, Mapping[str, str]]] = {
    ENGINES: {
        "embedded": "omni_ws.engine_choice:composed_engine",
        "vllm": "omni_ws.engine_choice:composed_engine",
        "remote": "omni_ws.engine_choice:remote_engine",
        "fake": "omni_ws.engine_choice:echo_engine",
    },
    FRONTS: {
        "mode_b_readers": "omni_ws.app:mode_b_readers",
        "streaming_input": "omni_ws.transport.native.endpoint:StreamingInput",
        "realtime": "omni_ws.transport.realtime.session:Realtime",
        "live": "omni_ws.transport.realtime.live_endpoint:Live",
        "client_secrets": "omni_ws.transport.realtime.session:ClientSecretRoutes",
        "translations": "omni_ws.transport.realtime.translations:Translations",
        "webrtc": "omni_ws.transport.webrtc.endpoint:WebrtcCalls",
        "telephony": "omni_ws.transport.telephony.media_stream:TelephonyStreams",
        "audiosocket": "omni_ws.transport.telephony.audiosocket:AudioSocketCalls",
        "wyoming": "omni_ws.transport.wyoming.front:WyomingServices",
        "mode_b": "omni_ws.app:mode_b",
        "chat": "omni_ws.transport.routes.openai:ChatRoutes",
        "speech": "omni_ws.transport.routes.openai:SpeechRoutes",
        "completions": "omni_ws.transport.routes.openai:CompletionRoutes",
        "transcriptions": "omni_ws.transport.routes.openai:TranscriptionRoutes",
        "operations": "omni_ws.transport.routes.operations:OperationsRoutes",
        "profiling": "omni_ws.transport.routes.operations:ProfilingRoutes",
        "calls": "omni_ws.transport.routes.calls:CallRoutes",
        "demo": "omni_ws.transport.routes.pages:DemoRoutes",
    },
}


def registered(group: str, name: object) -> EntryPoint:
    """Return the entry point of this name, without importing it. Raises ValueError unless there is just one."""
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
    """Import the plug-in of this name, call it with ``of``, and return the object of type ``kind`` that it makes.

    Raises ConfigurationError if that fails. Exceptions of this package's own plug-ins are passed on.
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
    """Return the name of the package that registers the entry point."""
    return entry.dist.name if entry.dist is not None else "omni_ws"
