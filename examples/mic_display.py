"""Displays of the microphone client: JSON lines, plain lines, or a live view (mic_live.py)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from omni_ws.core.chunks import FinishReason

LATENCIES = (("first audio", "first_audio_ms"), ("first text", "first_text_ms"))


class JsonDisplay:
    """Prints one JSON object per line, for scripts."""

    #: Whether it shows levels as they change.
    live = False

    def show(self, kind: str, **fields: Any) -> None:
        print(json.dumps({"type": kind, **fields}, ensure_ascii=False), flush=True)

    def state(self, state: str, *, idle: bool = False) -> None:
        """Shows what the client is doing; ``idle``: between turns."""

    def levels(self, microphone: float, loudspeaker: float, *, playing: bool) -> None:
        """Shows the peaks of both sides, from 0 to 1."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class PlainDisplay(JsonDisplay):
    """Prints lines of text, for pipes and terminals without rich."""

    in_reply = False

    def show(self, kind: str, **fields: Any) -> None:
        if kind == "text":
            print(fields["text"] if self.in_reply else f"reply: {fields['text']}", end="", flush=True)
            self.in_reply = True
        elif kind != "audio":
            if self.in_reply:
                print()
            self.in_reply = False
            if (line := self.line(kind, fields)) is not None:
                print(line, flush=True)

    @staticmethod
    def line(kind: str, fields: dict[str, Any]) -> str | None:
        match kind:
            case "transcript":
                return f"{'hearing' if fields['interim'] else 'heard'}: {fields['text']}"
            case "latency":
                told = [f"{name} {_relative(fields[key])}" for name, key in LATENCIES if fields[key] is not None]
                return f"latency: {', '.join(told)} the end of the input" if told else None
            case "final" if fields["finish_reason"] != FinishReason.STOP:
                return f"finished: {fields['finish_reason']}"
            case "tool":
                return f"tool: {fields['name']} {fields['arguments']} → {fields['result']}"
            case "note" | "parts" | "error" | "saved":
                return f"{kind}: {fields['message']}"
        return None


def _relative(milliseconds: int) -> str:
    return f"{abs(milliseconds)} ms {'before' if milliseconds < 0 else 'after'}"


def make_display(*, as_json: bool) -> JsonDisplay:
    if as_json:
        return JsonDisplay()
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay()
    try:
        from mic_live import LiveDisplay

        return LiveDisplay()
    except ImportError:
        return PlainDisplay()
