"""FrameList: the frames of a call as a list that a page can show: without sound, and bounded."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson

from omni_ws.wire.recording import ReceivedLine, RecordedLine, SentLine, SoundLine, ToldLine

#: Frames of a list, and the bytes of one and of all together.
MAX_FRAMES: Final = 20_000
MAX_FRAME_BYTES: Final = 4096
MAX_BYTES: Final = 8 * 1024 * 1024
#: The fields that hold sound or pictures in base64, by the types of their frames; a "delta" is text in most.
_PAYLOADS: Final = ("payload", "audio", "delta")
#: What is longer is no sound that belongs into one frame of a list, but may be text.
_SHORT: Final = 64


class FrameList:
    """The frames of a call in order; sound that follows sound of the same side is one entry with a count."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        #: Frames beyond the limits.
        self.left_out = 0
        self._bytes = 0

    def add(self, event: RecordedLine, fields: dict[str, Any]) -> None:
        """Add a line; ``fields`` is its message, if that is a JSON object."""
        side, sound = _side(event), _sound_bytes(event, fields)
        last = self.entries[-1] if self.entries else None
        if sound is not None:
            if last is not None and last["side"] == side and "count" in last:
                last["count"] += 1
                last["bytes"] += sound
                last["until_ms"] = event.at
                return
            self._keep(
                {"at_ms": event.at, "until_ms": event.at, "side": side, "event": "sound", "count": 1, "bytes": sound}
            )
            return
        entry: dict[str, Any] = {"at_ms": event.at, "side": side, "event": _tag(event)}
        if fields:
            entry["frame"] = _shown(fields)
        elif isinstance(event, ReceivedLine | SentLine):
            entry["bytes"] = len(event.binary or event.bad_text or (event.text or "").encode())
        else:
            entry |= {
                name: value
                for name, value in msgspec.to_builtins(event, builtin_types=(bytes,)).items()
                if name not in ("at", "event", "text")
            }
        self._keep(entry)

    def _keep(self, entry: dict[str, Any]) -> None:
        size = len(orjson.dumps(entry))
        if size > MAX_FRAME_BYTES:
            frame = entry.get("frame", {})
            kind = frame.get("type") or frame.get("event")
            entry = {name: entry[name] for name in ("at_ms", "side", "event")} | {"bytes": size}
            entry["frame"] = {"type": kind[:_SHORT] if isinstance(kind, str) else None}
            size = len(orjson.dumps(entry))
        if len(self.entries) >= MAX_FRAMES or self._bytes + size > MAX_BYTES:
            self.left_out += 1
            return
        self._bytes += size
        self.entries.append(entry)


def _side(event: RecordedLine) -> str:
    if isinstance(event, ReceivedLine) or (isinstance(event, SoundLine) and event.by == "user"):
        return "client"
    return "server" if isinstance(event, SentLine | SoundLine | ToldLine) else "recorder"


def _tag(event: RecordedLine) -> str:
    return str(type(event).__struct_config__.tag)


def _sound_bytes(event: RecordedLine, fields: dict[str, Any]) -> int | None:
    """Return the bytes of sound in a line that holds nothing else; None for other lines."""
    if isinstance(event, SoundLine):
        return len(event.audio)
    if not isinstance(event, ReceivedLine | SentLine):
        return None
    if event.binary is not None:
        return len(event.binary)
    kind = fields.get("type") or fields.get("event")
    if kind == "media" and isinstance(fields.get("media"), dict):
        return len(str(fields["media"].get("payload", ""))) * 3 // 4
    is_chunk = kind in ("input_chunk", "output_chunk") and fields.get("modality") == "audio" and not fields.get("words")
    if is_chunk or (
        isinstance(kind, str)
        and ("audio.append" in kind or "audio_buffer.append" in kind or kind.endswith("audio.delta"))
    ):
        return sum(len(value) * 3 // 4 for name in _PAYLOADS if isinstance(value := fields.get(name), str))
    return None


def _shown(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a frame without the bytes of sound and pictures in it."""
    shown = dict(fields)
    for name in ("payload", "audio"):
        if isinstance(value := shown.get(name), str) and len(value) > _SHORT:
            shown[name] = {"bytes": len(value) * 3 // 4}
    kind = shown.get("type")
    if kind == "input_audio_buffer.backchannel" and isinstance(shown.get("delta"), str):
        shown["delta"] = {"bytes": len(shown["delta"]) * 3 // 4}
    return shown
