"""Displays of a conversation: JSON lines, plain lines, or a live view. The view needs rich, imported on first use."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any, Final

import orjson

from omni_ws.core.chunks import FinishReason
from omni_ws.wire.server_frames import Part, SessionCreatedFrame

#: Control characters but line breaks and tabs.
_CONTROLS: Final = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
LATENCIES = (("first audio", "first_audio_ms"), ("first text", "first_text_ms"))


def printable(text: str) -> str:
    """Return text of a server or of a recording without what would control the terminal."""
    return text.translate(_CONTROLS)


class JsonDisplay:
    """Prints one JSON object per line, for scripts. Only ``show`` does anything; the live view needs the rest."""

    #: Whether it shows levels as they change.
    live = False

    def show(self, kind: str, **fields: Any) -> None:
        print(orjson.dumps({"type": kind, **fields}).decode(), flush=True)

    def state(self, state: str, *, idle: bool = False) -> None:
        """Do nothing; a live view shows ``state``, the activity of the client, with ``idle`` after each turn again."""

    def levels(self, microphone: float, loudspeaker: float, *, playing: bool) -> None:
        """Do nothing; a live view shows the peak levels of microphone and loudspeaker, from 0 to 1."""

    def close(self) -> None:
        """Do nothing; a live view restores the terminal."""


class PlainDisplay(JsonDisplay):
    """Prints lines of text, for pipes and terminals without rich. Without ``times``, latencies are left out."""

    def __init__(self, *, times: bool = True) -> None:
        self.in_reply = False
        self._times = times

    def show(self, kind: str, **fields: Any) -> None:
        fields = _printable(fields)
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


def _printable(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}


def _relative(milliseconds: int) -> str:
    return f"{abs(milliseconds)} ms {'before' if milliseconds < 0 else 'after'}"


def make_display(*, as_json: bool) -> JsonDisplay:
    if as_json:
        return JsonDisplay()
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay()
    try:
        return LiveDisplay()
    except ImportError:
        return PlainDisplay()


# Who listens, answers and speaks on the server, by names that people read

#: Engines whose own name says less than the name of their model.
_NAMELESS: Final = ("remote", "vllm", "talker")


def sentence(created: SessionCreatedFrame) -> str:
    """Return the parts of a server as text, such as ``heard by whisper, answered by rules, spoken by hibari``.

    The text is empty if the server does not name its parts.
    """
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


# The live view of a conversation, by the library rich, which is imported on first use.


#: Shortest time between two frames; what changes meanwhile appears together.
FRAME_SEC: Final = 0.05
#: Rows below the texts: a line, the state, the levels, the parts.
FOOT_ROWS: Final = 4
LONGEST_BAR: Final = 32
#: The quietest level with a bar, in dB below full scale.
QUIETEST_DB: Final = 60
CLIPPED: Final = 0.98
STATE_STYLES: Final = {"hearing you": "green", "thinking": "yellow", "speaking": "magenta"}


class LiveDisplay(PlainDisplay):
    """A view of the conversation: settled text scrolls up; the running turn, state, levels and parts stay below it.

    Each frame is written as a whole, and only if it differs from the frame before. The constructor takes over the
    terminal until ``close``, and raises ImportError without rich.
    """

    live = True

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        super().__init__()
        self._text = Text
        self._console = Console()
        self._view = Live(console=self._console, auto_refresh=False, transient=True)
        self._restore_echo = _without_echo()
        self._view.start()
        self._heard = self._reply = self._latency = self._parts = ""
        self._interim = False
        self._idle = self._state = "ready"
        self._levels: tuple[float, float] | None = None
        self._playing = False
        self._shown: Any = None
        self._next_frame: asyncio.TimerHandle | None = None

    def show(self, kind: str, **fields: Any) -> None:
        fields = _printable(fields)
        match kind:
            case "transcript":
                self._heard, self._interim = fields["text"], fields["interim"]
            case "text":
                self._reply += fields["text"]
            case "final":
                self._settle()
                self._state = self._idle
            case "speech_started":
                self._state = "hearing you"
            case "parts":
                self._parts = fields["message"]
        line = self.line(kind, fields)
        if kind == "latency":
            if (first_ms := fields["first_audio_ms"]) is not None:
                self._latency = f"first sound {first_ms} ms"
        elif kind not in ("transcript", "parts") and line is not None:
            self._console.print(self._text(line, "red" if kind == "error" else "dim"))
        self._changed()

    def state(self, state: str, *, idle: bool = False) -> None:
        self._state = state
        if idle:
            self._idle = state
        self._changed()

    def levels(self, microphone: float, loudspeaker: float, *, playing: bool) -> None:
        self._levels, self._playing = (microphone, loudspeaker), playing
        self._changed()

    def close(self) -> None:
        if self._next_frame is not None:
            self._next_frame.cancel()
        self._settle()
        self._view.stop()
        self._restore_echo()

    def _settle(self) -> None:
        if self._heard:
            self._console.print(self._text(f"you    {self._heard}", "cyan"))
        if self._reply:
            self._console.print(self._text(f"reply  {self._reply}", "bold"))
        self._heard = self._reply = ""

    def _changed(self) -> None:
        if self._next_frame is None:
            self._next_frame = asyncio.get_running_loop().call_later(FRAME_SEC, self._draw)

    def _draw(self) -> None:
        self._next_frame = None
        width, height = self._console.size
        frame = self._text()
        self._add_turn(frame, room=width * max(1, (height - FOOT_ROWS - 2) // 2 - 1))
        frame.append("─" * width + "\n", "dim")
        state = "speaking" if self._playing and self._state != "hearing you" else self._state
        frame.append(f"{state:<14}"[:width], STATE_STYLES.get(state, "dim"))
        frame.append(self._latency[: max(0, width - 15)] + "\n", "dim")
        if self._levels is not None:
            for name, level in zip(("mic ", "  voice "), self._levels, strict=True):
                frame.append(name, "dim")
                frame.append(_bar(level, min(LONGEST_BAR, (width - 13) // 2)), "red" if level > CLIPPED else "green")
            frame.append("\n")
        frame.append(self._parts[: width - 1], "dim")
        if frame != self._shown:
            self._shown = frame
            self._view.update(frame, refresh=True)

    def _add_turn(self, frame: Any, *, room: int) -> None:
        """Add the ends of both texts of the running turn, each cut to ``room`` characters.

        A frame higher than the screen would jump.
        """
        if self._heard:
            frame.append(f"you    {_end(self._heard, room)}\n", "italic dim" if self._interim else "cyan")
        if self._reply:
            frame.append(f"reply  {_end(self._reply, room)}\n", "bold")


def _end(text: str, room: int) -> str:
    return text if len(text) <= room else "…" + text[1 - room :]


def _bar(level: float, length: int) -> str:
    decibels = 20 * math.log10(max(level, 1e-3))
    filled = round(max(0.0, 1 + decibels / QUIETEST_DB) * length)
    return "█" * filled + "·" * (length - filled)


def _without_echo() -> Callable[[], None]:
    """Turn off the echo of keys, which would displace the live view. Return a function that restores the echo."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        return lambda: None
    import termios

    before = termios.tcgetattr(0)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSADRAIN, quiet)
    return lambda: termios.tcsetattr(0, termios.TCSADRAIN, before)
