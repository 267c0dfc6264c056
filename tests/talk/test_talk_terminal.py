"""`omni-ws talk` at a terminal: its live view, devices, typed turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.scripted_engines import HearingEngine
from support.sound_card import SOUND_LIBRARY
from support.speech_clips import clip_bytes, silence

from omni_ws.core.chunks import Word
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "omni_ws", "talk")
ANSWER = [TranscriptOutput("ten of clubs"), TextOutput("A fine card.")] + [
    AudioOutput(np.full(2400, 0.3, np.float32), 24_000, (Word("card", n * 100, n * 100 + 90),)) for n in range(100)
]


class Terminal:
    """What a program writes to its terminal, and the keys that it gets."""

    def __init__(self, ours: int, theirs: int, process: asyncio.subprocess.Process) -> None:
        self._ours, self._theirs = ours, theirs
        self.process = process
        self.written = b""
        self._more = asyncio.Event()
        os.set_blocking(ours, False)
        asyncio.get_running_loop().add_reader(ours, self._read)

    def _read(self) -> None:
        self.written += os.read(self._ours, 65536)
        self._more.set()

    @property
    def text(self) -> str:
        """Without control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.written.decode(errors="ignore"))

    async def until(self, *words: str) -> None:
        async with asyncio.timeout(PATIENCE_SEC):
            while missing := [word for word in words if word not in self.text]:
                self._more.clear()
                try:
                    await self._more.wait()
                except asyncio.CancelledError:
                    raise AssertionError(f"{missing} not in {self.text[-3000:]}") from None

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._theirs)[3] & termios.ECHO)


@asynccontextmanager
async def at_terminal(
    tmp_path: Path, *arguments: str, recording: bytes = b"", term: str = "xterm"
) -> AsyncIterator[Terminal]:
    (tmp_path / "sounddevice.py").write_text(SOUND_LIBRARY)
    (tmp_path / "recording.raw").write_bytes(recording)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "RECORDING": str(tmp_path / "recording.raw"),
        "TERM": term,
        "PYTHONIOENCODING": "utf-8",
    }
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    terminal = Terminal(ours, theirs, process)
    try:
        yield terminal
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_conversation_in_the_live_view(tmp_path: Path) -> None:
    thought = asyncio.Event()
    recording = silence(0.3) + clip_bytes("cards_001") + silence(2) + clip_bytes("goforward")
    async with live_server(HearingEngine(heard=[thought.wait, *ANSWER])) as server:
        arguments = ("--url", server.websocket_url, "--no-cancel-echo")
        async with at_terminal(tmp_path, *arguments, recording=recording) as terminal:
            await terminal.until("listening", "hearing you", "thinking")
            thought.set()
            await terminal.until("speaking", "first sound")
            await terminal.until("you    ten of clubs", "reply  A fine card.", "finished: cancelled")
            assert not terminal.echoes()
            for side in (r"mic +█+·+  voice", r"  voice █+·+"):
                assert re.search(side, terminal.text)
            assert "answered" in terminal.text
            assert b"\x1b[2J" not in terminal.written
            terminal.type("q\n")
            assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_SEC) == 0
            assert terminal.echoes()
            assert terminal.written.rpartition(b"\x1b[?25")[2].startswith(b"h")  # the cursor is back


@pytest.mark.slow
@pytest.mark.real_time
async def test_nothing_is_written_while_nothing_changes(tmp_path: Path) -> None:
    async with live_server() as server, at_terminal(tmp_path, "--url", server.websocket_url, "--hold") as terminal:
        await terminal.until("Enter: speak", "voice ·")
        async with asyncio.timeout(PATIENCE_SEC):
            with contextlib.suppress(TimeoutError):
                while True:  # until nothing is written for so long
                    terminal._more.clear()
                    await asyncio.wait_for(terminal._more.wait(), 0.5)
        terminal.type("q\n")
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_SEC) == 0


@pytest.mark.slow
async def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    async with live_server() as server:
        arguments = ("--url", server.websocket_url, "--text", "hello", "--no-play")
        async with at_terminal(tmp_path, *arguments, term="dumb") as terminal:
            await terminal.until("reply: hello", "latency: first text")
            assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_SEC) == 0
            assert b"\x1b" not in terminal.written


async def test_devices_are_listed_and_chosen_by_name(tmp_path: Path) -> None:
    async with live_server() as server:
        async with at_terminal(tmp_path, "--list-devices") as terminal:
            await terminal.until("Headset", "Loudspeakers")
        arguments = ("--url", server.websocket_url, "--hold", "--input-device", "0", "--output-device", "Loud")
        async with at_terminal(tmp_path, *arguments) as terminal:
            await terminal.until("Enter: speak")
            terminal.type("q\n")
            assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_SEC) == 0


async def ended(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in ("OMNI_WS_API_KEY", "COLUMNS")},
    )
    output, complaints = await asyncio.wait_for(process.communicate(), PATIENCE_SEC)
    assert process.returncode is not None
    return process.returncode, output.decode(), complaints.decode()


async def test_the_help_fits_a_screen() -> None:
    status, output, _ = await ended("--help")
    lines = output.splitlines()
    assert (status, len(lines) <= 23, max(map(len, lines)) <= 80) == (0, True, True)
