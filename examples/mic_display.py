"""Displays of the microphone client: JSON lines, plain lines, or a live view by rich."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

from omni_ws.core.chunks import FinishReason

LATENCIES = (("first audio", "first_audio_ms"), ("first text", "first_text_ms"))


class JsonDisplay:
    """Prints one JSON object per line, for scripts."""

    def show(self, kind: str, **fields: Any) -> None:
        print(json.dumps({"type": kind, **fields}, ensure_ascii=False), flush=True)

    def level(self, level: float) -> None:
        pass

    def close(self) -> None:
        pass


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
            case "note" | "error" | "saved":
                return f"{kind}: {fields['message']}"
        return None


class RichDisplay(PlainDisplay):
    """Shows the current turn at the bottom of the terminal; settled text scrolls up above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self.text = Text
        self.console = Console()
        self.live = Live(console=self.console, refresh_per_second=20, transient=True)
        self._restore_echo = _without_echo()
        self.live.start()
        self.heard = self.reply = ""
        self.interim = False
        self.meter = 0.0

    def show(self, kind: str, **fields: Any) -> None:
        if kind == "transcript":
            self.heard, self.interim = fields["text"], fields["interim"]
        elif kind == "text":
            self.reply += fields["text"]
        elif kind == "final":
            self.settle()
        if kind != "transcript" and (line := self.line(kind, fields)) is not None:
            self.console.print(self.text(line, "red" if kind == "error" else "dim"))
        self.draw()

    def settle(self) -> None:
        if self.heard:
            self.console.print(self.text(f"you    {self.heard}", "cyan"))
        if self.reply:
            self.console.print(self.text(f"reply  {self.reply}", "bold"))
        self.heard = self.reply = ""

    def level(self, level: float) -> None:
        self.meter = level
        self.draw()

    def draw(self) -> None:
        shown = self.text()
        if self.heard:
            shown.append(f"you    {self.heard}\n", "italic dim" if self.interim else "cyan")
        if self.reply:
            shown.append(f"reply  {self.reply}\n", "bold")
        if self.meter > 0:
            bars = round(max(0.0, 1 + _decibels(self.meter) / 60) * 40)
            shown.append("mic    " + "█" * bars + "·" * (40 - bars), "red" if self.meter > 0.98 else "green")
        self.live.update(shown)

    def close(self) -> None:
        self.settle()
        self.live.stop()
        self._restore_echo()


def _relative(milliseconds: int) -> str:
    return f"{abs(milliseconds)} ms {'before' if milliseconds < 0 else 'after'}"


def _without_echo() -> Callable[[], None]:
    """Turns off the echo of keys, which would displace the live view. Returns a function that restores it."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        return lambda: None
    import termios

    before = termios.tcgetattr(0)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSADRAIN, quiet)
    return lambda: termios.tcsetattr(0, termios.TCSADRAIN, before)


def _decibels(level: float) -> float:
    return 20 * math.log10(max(level, 1e-3))


def make_display(*, as_json: bool) -> JsonDisplay:
    if as_json:
        return JsonDisplay()
    if not sys.stdout.isatty():
        return PlainDisplay()
    try:
        return RichDisplay()
    except ImportError:
        return PlainDisplay()
