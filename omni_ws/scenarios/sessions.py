"""The session of a scenario on a front end, and what it needs that this front end does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_ws.caller.sounds import MIC_RATE, MicrophoneFormat
from omni_ws.caller.wires import NativeWire, RealtimeWire, Wire
from omni_ws.scenarios.form import CallersRoom, DialKeys, LoseNetwork, PlacedScenario

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
    """The scenario needs something that the target does not have; the message says what, as "needs: …"."""


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others laid over them, mappings key by key."""
    found = dict(below)
    for name, value in above.items():
        was = found.get(name)
        found[name] = merged(was, value) if isinstance(value, Mapping) and isinstance(was, Mapping) else value
    return found


def wire_of(scenario: PlacedScenario, session: Mapping[str, Any], *, protocol: str, path: str | None = None) -> Wire:
    """Return the wire of a call. Raises NotHere."""
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
    """Return the wire of a session whose settings are named as in the native protocol. Raises NotHere."""
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
    """A telephone's, or one of this rate in Hz."""
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
