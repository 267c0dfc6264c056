"""Displays of a conversation: JSON lines, plain lines, or a live view (live_display.py)."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import Any, Final

import orjson

from omni_ws.core.chunks import FinishReason
from omni_ws.wire.server_frames import Part, SessionCreatedFrame

LATENCIES = (("first audio", "first_audio_ms"), ("first text", "first_text_ms"))


class JsonDisplay:
    """Prints one JSON object per line, for scripts."""

    #: Whether it shows levels as they change.
    live = False

    def show(self, kind: str, **fields: Any) -> None:
        print(orjson.dumps({"type": kind, **fields}).decode(), flush=True)

    def state(self, state: str, *, idle: bool = False) -> None:
        """Shows what the client is doing; ``idle``: between turns."""

    def levels(self, microphone: float, loudspeaker: float, *, playing: bool) -> None:
        """Shows the peaks of both sides, from 0 to 1."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class PlainDisplay(JsonDisplay):
    """Prints lines of text, for pipes and terminals without rich; without ``times`` none about latency."""

    def __init__(self, *, times: bool = True) -> None:
        self.in_reply = False
        self._times = times

    def show(self, kind: str, **fields: Any) -> None:
        if kind == "text":
            print(fields["text"] if self.in_reply else f"reply: {fields['text']}", end="", flush=True)
            self.in_reply = True
        elif kind != "audio":
            if self.in_reply:
                print()
            self.in_reply = False
            if (line := self.line(kind, fields)) is not None and (self._times or kind != "latency"):
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
        from omni_ws.talk.live_display import LiveDisplay

        return LiveDisplay()
    except ImportError:
        return PlainDisplay()


# Who listens, answers and speaks on the server, by names that people read

#: Engines whose name says less than that of their model.
_NAMELESS: Final = ("remote", "vllm", "talker")


def sentence(created: SessionCreatedFrame) -> str:
    """Return one as ``heard by whisper, answered by rules, spoken by hibari``; empty if the server does not tell."""
    parts, can = created.parts, created.capabilities
    model = parts.llm.model if parts.llm else None
    told = [
        ("heard", _name(parts.asr) or (model if "audio" in can.input_modalities else None)),
        ("answered", model),
        ("spoken", _name(parts.tts) or (model if "audio" in can.output_modalities else None)),
    ]
    by_name = groupby((work for work in told if work[1] is not None), key=lambda work: work[1])
    return ", ".join(f"{' and '.join(verb for verb, _ in works)} by {name}" for name, works in by_name)


def _name(part: Part | None) -> str | None:
    if part is None:
        return None
    return part.model if part.name in _NAMELESS else part.name
