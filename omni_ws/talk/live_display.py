"""The live view of a conversation, by the library rich, which is imported on first use."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any, Final

from omni_ws.talk.display import PlainDisplay

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
    """Settled text scrolls up; the running turn, the state, both levels and the parts stay at the bottom.

    A frame is written as a whole, and only if it differs from the one before. Raises ImportError without rich.
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
        """Adds the ends of both texts, each as long as there is ``room``: a frame higher than the screen would jump."""
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
    """Turns off the echo of keys, which would displace the live view. Returns a function that restores it."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        return lambda: None
    import termios

    before = termios.tcgetattr(0)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSADRAIN, quiet)
    return lambda: termios.tcsetattr(0, termios.TCSADRAIN, before)
