"""The server's side of a scenario: a server in a child process, and the session that a front end gets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import urlopen

import orjson

from omni_ws.caller.live_caller import (
    MIC_RATE,
    MicrophoneFormat,
    NativeWire,
    RealtimeWire,
    Wire,
)
from omni_ws.caller.script import Target
from omni_ws.cli import INTERRUPTED
from omni_ws.scenarios.form import CallersRoom, DialKeys, LoseNetwork, PlacedScenario

#: How long a server may take until it is ready: models are loaded meanwhile.
_START_SEC: Final = 300.0
_STOP_SEC: Final = 20.0
_LOOK_SEC: Final = 0.1
#: What is read at most of what a server says of its health.
_HEALTH_BYTES: Final = 1 << 20


class NoServer(Exception):
    """Raised if the server did not start, or not in time."""


def flags(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the flags of ``omni-ws serve`` for settings that are nested as in the configuration file."""
    for name, value in settings.items():
        flag = f"{prefix}.{name}" if prefix else f"--{name}"
        if isinstance(value, Mapping):
            yield from flags(value, flag)
        elif isinstance(value, str):
            yield f"{flag}={value}"
        else:
            yield f"{flag}={orjson.dumps(value).decode()}"


@asynccontextmanager
async def own_server(settings: Mapping[str, Any], more: Sequence[str] = ()) -> AsyncIterator[str]:
    """Run ``omni-ws serve`` with these settings and flags during the block, on a free port of 127.0.0.1.

    Yields the host and port once the server is ready. Raises NoServer.
    """
    port = _free_port()
    # Not the current folder, whose files may have the names of modules, but what this process has on its path.
    path = os.pathsep.join(place or os.curdir for place in sys.path)
    command = [sys.executable, "-P", "-m", "omni_ws", "serve", "--log-level=warning", *flags(settings), *more]
    # Ctrl-C at the terminal is for the command, which ends the server itself.
    process = await asyncio.create_subprocess_exec(
        *(*command, f"--port={port}"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    )
    try:
        await _ready(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        await asyncio.shield(_end(process))


async def until_started(target: Target) -> None:
    """Wait while the ``/health`` of a server reports that it is starting. Raises NoServer after five minutes."""
    url = f"{'https' if target.secure else 'http'}://{target.authority}/health"
    await _until(lambda: _health(url) != "starting", f"the server at {target.authority} still starts")


async def _ready(process: asyncio.subprocess.Process, port: int) -> None:
    def is_ready() -> bool:
        if process.returncode is not None:
            raise NoServer(f"`omni-ws serve` ended with status {process.returncode}")
        return _health(f"http://127.0.0.1:{port}/health") in ("ok", "degraded")

    await _until(is_ready, "`omni-ws serve` is not ready")


async def _until(condition: Callable[[], bool], otherwise: str) -> None:
    """Call ``condition`` in a thread, again and again, until it is true.

    Raises NoServer with ``otherwise`` if that takes too long.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + _START_SEC
    while not await asyncio.to_thread(condition):
        if loop.time() > end:
            raise NoServer(f"{otherwise} after {_START_SEC:g} s")
        await asyncio.sleep(_LOOK_SEC)


def _health(url: str) -> str | None:
    """Return the state that a server reports; None if it reports none."""
    try:
        with urlopen(url, timeout=5) as answer:
            body = answer.read(_HEALTH_BYTES)
    except HTTPError as error:
        body = error.read(_HEALTH_BYTES)
    except (OSError, HTTPException, ValueError):
        return None
    try:
        state = orjson.loads(body)["status"]
    except (ValueError, LookupError, TypeError):
        return None
    return state if isinstance(state, str) else None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(_STOP_SEC):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Run a command to its end, and return its exit status.

    SIGINT, SIGTERM and SIGHUP cancel the command, which ends its own server; the status is then INTERRUPTED.
    """

    async def run() -> int:
        running = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not POSIX
                loop.add_signal_handler(number, running.cancel)
        try:
            return await running
        except asyncio.CancelledError:
            return INTERRUPTED

    return asyncio.run(run())


# The session of a scenario on a front end, and what it needs that this front end does not have.


#: What a caller of the native protocol does where the file says nothing: as the demo page.
_NATIVE_TURNS: Final = {"duck": True}
_PCM16: Final = {"format": "pcm16", "sample_rate": 24_000}
#: Of the sound in both directions, in Hz.
REALTIME_RATE: Final = 24_000
#: The fields of ``turn_detection`` that the Realtime API has, too.
_TURN_FIELDS: Final = frozenset(
    {"type", "threshold", "prefix_padding_ms", "silence_duration_ms", "eagerness", "interrupt_response"}
)
_TYPES: Final = frozenset({"server_vad", "semantic_vad"})
#: Those that it does not have: there they are always false.
_NATIVE_ALONE: Final = frozenset({"duck", "interrupt_resume", "backchannel"})


class NotHere(Exception):
    """Raised if a scenario needs something that the target lacks; the message says what, as "needs: …"."""


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings ``below`` overridden by those of ``above``; nested mappings are merged key by key."""
    found = dict(below)
    for name, value in above.items():
        was = found.get(name)
        found[name] = merged(was, value) if isinstance(value, Mapping) and isinstance(was, Mapping) else value
    return found


def wire_of(scenario: PlacedScenario, session: Mapping[str, Any], *, protocol: str, path: str | None = None) -> Wire:
    """Return the Wire (protocol and settings) of a call.

    ``session`` has settings named as in the native protocol; ``path`` replaces the default path of ``protocol``. Raises
    NotHere.
    """
    if any(isinstance(one.step, DialKeys) for one in scenario.steps):
        raise NotHere("needs: telephony (dial)")
    if "turn_detection" in session and not isinstance(session["turn_detection"], Mapping):
        raise NotHere("needs: a microphone that is not open (session.turn_detection)")
    room = scenario.scenario.room
    if protocol == "native":
        return _native(session, room, path)
    if any(isinstance(one.step, LoseNetwork) for one in scenario.steps):
        raise NotHere("needs: native (lose_network)")
    return realtime_wire(session, _microphone(room, REALTIME_RATE), path)


def _native(session: Mapping[str, Any], room: CallersRoom, path: str | None) -> Wire:
    sound = _microphone(room, MIC_RATE)
    heard = {"format": "pcmu" if sound.is_mu_law else "pcm16", "sample_rate": sound.rate, "channels": 1}
    turns = {**_NATIVE_TURNS, **session.get("turn_detection", {})}
    rest = {name: value for name, value in session.items() if name != "turn_detection"}
    config = merged(rest, {"input_audio": heard, "output_audio": _PCM16})
    return NativeWire(turns, config, sound, path or NativeWire.path)


def realtime_wire(session: Mapping[str, Any], sound: MicrophoneFormat, path: str | None = None) -> RealtimeWire:
    """Return the RealtimeWire for settings that are named as in the native protocol. Raises NotHere."""
    config: dict[str, Any] = {}
    output: dict[str, Any] = {"format": {"type": "audio/pcm", "rate": REALTIME_RATE}}
    turns: dict[str, Any] | None = {"type": "server_vad"}
    for name, value in session.items():
        match name:
            case "instructions" | "model" | "tool_choice":
                config[name] = value
            case "voice" | "speed":
                output[name] = value
            case "modalities" if list(value) in (["audio"], ["text", "audio"]):
                config["output_modalities"] = ["audio"]
            case "modalities" if list(value) == ["text"]:
                config["output_modalities"] = ["text"]
            case "tools":
                config["tools"] = [_tool(one) for one in value]
            case "turn_detection":
                turns = None if value is None else _turns(value)
            case _:
                raise NotHere(f"needs: native (session.{name})")
    return RealtimeWire(turns, config, output, sound, path or RealtimeWire.path)


def _microphone(room: CallersRoom, rate: int) -> MicrophoneFormat:
    """Return the microphone format of a telephone, or pcm16 at ``rate`` Hz."""
    return MicrophoneFormat(8000, is_mu_law=True) if room.band == "telephone" else MicrophoneFormat(rate)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("async"):
        raise NotHere("needs: native (an async tool)")
    if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), Mapping):
        raise NotHere(f"needs: native (a tool of type {tool.get('type')})")
    function = {
        name: value for name, value in tool["function"].items() if name in ("name", "description", "parameters")
    }
    return {"type": "function", **function}


def _turns(turns: Mapping[str, Any]) -> dict[str, Any]:
    turns = {name: value for name, value in turns.items() if value is not False or name not in _NATIVE_ALONE}
    for name in turns:
        if name not in _TURN_FIELDS:
            raise NotHere(f"needs: native (session.turn_detection.{name})")
    if turns.get("type", "server_vad") not in _TYPES:
        raise NotHere(f"needs: native (session.turn_detection.type {turns['type']})")
    return {"type": "server_vad", **turns}
