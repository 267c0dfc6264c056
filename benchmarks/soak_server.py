"""The server of a soak: a process that is killed and started again, with few descriptors and a small disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

from benchmarks.server_process import child_processes, free_port, memory_mib

KEY: Final = "soak"
#: Descriptors that the server may have; the attacks open more connections than that.
DESCRIPTORS: Final = 250
#: Room for recordings and for the file with the use of keys.
DISK: Final = "8m"
START_SEC: Final = 120.0
#: libfaketime (Debian's package of that name), which shifts the wall clock of a process and leaves the monotonic one.
_FAKE_CLOCK: Final = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
CLOCK_CAN_BE_SET: Final = _FAKE_CLOCK is not None
#: In which a server goes by a clock that was set.
CLOCK_SEC: Final = 30.0
#: Of the date of an answer; less than the smallest jump.
CLOCK_TOLERANCE_SEC: Final = 30.0
#: Of a failure in the log: most of a traceback.
_LINES_SHOWN: Final = 30
#: What the log must not have: failures that the code does not handle.
_UNFORESEEN: Final = re.compile(
    r"Traceback|never retrieved|was destroyed|was never awaited|slow callback", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Measures:
    """What the server holds, by its own metrics and by the kernel."""

    sessions: int
    connections: int
    held_bytes: int
    descriptors: int
    threads: int
    memory_mib: float

    @property
    def empty(self) -> bool:
        """Whether nothing is left of any client; the connection of the measurement counts."""
        return self.sessions == 0 and self.connections <= 1 and self.held_bytes == 0


@contextmanager
def small_disk() -> Iterator[tuple[Path, bool]]:
    """A folder, and whether it is on a disk of its own that can be filled (root alone may mount one)."""
    with tempfile.TemporaryDirectory() as name:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "none", name]
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            yield Path(name), mounted
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", name], check=True)


class SoakedServer:
    """A server in a process of its own."""

    def __init__(self, disk: Path, log: Path, *, host: str = "127.0.0.1") -> None:
        self.port = free_port()
        self.host = host
        self._disk = disk
        self._log = log
        self._clock = log.with_name("clock")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"ws://{self.host}:{self.port}/v1/streaming_input"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Starts it, and waits until it serves."""
        keys = self._log.with_name("keys.toml")
        keys.write_text(f'[[keys]]\nname = "soak"\nkey = "{KEY}"\ntokens_per_day = 1_000_000_000\n', encoding="utf-8")
        keys.chmod(0o600)
        flags = {
            "host": self.host,
            "port": self.port,
            "asr": "whisper",
            "llm": "rules",
            "tts": "espeak",
            "auth.keys-file": keys,
            "auth.usage-file": self._disk / "usage.json",
            "limits.max-connections": 2000,
            "streaming-input.resume-grace-sec": 2,
            "record": self._disk / "recordings",
        }
        self.make_room()  # a server that is to record does not start on a full disk
        (self._disk / "recordings").mkdir(mode=0o700, exist_ok=True)
        serve = [sys.executable, "-m", "omni_ws", "serve", *(f"--{name}={value}" for name, value in flags.items())]
        limited = ["bash", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "bash", *serve]
        self._process = await asyncio.to_thread(self._run, limited)
        async with asyncio.timeout(START_SEC):
            while True:
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(self._get, "/health")
                    return
                if self._process.poll() is not None:
                    raise RuntimeError(f"the server ended with status {self._process.returncode}: {self.last_lines()}")
                await asyncio.sleep(0.1)

    def make_room(self) -> None:
        """Removes recordings; those that are being written go with their end."""
        for recording in (self._disk / "recordings").glob("*.ndjson"):
            recording.unlink()

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if _FAKE_CLOCK is not None:
            self._shift_clock(0)
            environment |= {
                "LD_PRELOAD": str(_FAKE_CLOCK),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                # Its repair for old versions of glibc lets each wait of a thread for the GIL end at once.
                "FAKETIME_FORCE_MONOTONIC_FIX": "0",
                "NO_FAKE_STAT": "1",
            }
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _shift_clock(self, seconds: int) -> None:
        complete = self._clock.with_suffix(".new")
        complete.write_text(f"{seconds:+d}\n", encoding="ascii")
        complete.replace(self._clock)

    async def set_clock(self, ahead: int) -> bool:
        """Sets its wall clock so many seconds ahead, or back. Returns whether its answers are dated so."""
        self._shift_clock(ahead)
        end = time.monotonic() + CLOCK_SEC
        while time.monotonic() < end:
            await asyncio.sleep(0.5)  # it reads the file each second
            with contextlib.suppress(OSError):
                date = await asyncio.to_thread(self._get, "/health", header="Date")
                if abs(parsedate_to_datetime(date).timestamp() - time.time() - ahead) < CLOCK_TOLERANCE_SEC:
                    return True
        return False

    def _get(self, path: str, *, header: str = "") -> str:
        """What is there, or a header of the answer."""
        request = Request(f"http://{self.host}:{self.port}{path}", headers={"Authorization": f"Bearer {KEY}"})
        with urlopen(request, timeout=20) as answer:
            return str(answer.headers[header] if header else answer.read().decode())

    async def measure(self) -> Measures:
        metrics = await asyncio.to_thread(self._get, "/metrics")
        values = {name: float(value) for name, value in re.findall(r"(?m)^(omni_ws_\w+) (\S+)$", metrics)}
        return Measures(
            sessions=int(values["omni_ws_sessions_active"]),
            connections=int(values["omni_ws_http_connections"] + values["omni_ws_websocket_connections"]),
            held_bytes=int(values["omni_ws_held_bytes"]),
            descriptors=len(os.listdir(f"/proc/{self.pid}/fd")),
            threads=len(os.listdir(f"/proc/{self.pid}/task")),
            memory_mib=memory_mib(self.pid),
        )

    def workers(self) -> list[int]:
        """Processes that the server started: its voices."""
        with contextlib.suppress(OSError):  # one ended meanwhile
            return [*child_processes(self.pid)]
        return []

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def stop(self) -> int:
        """Its exit status after SIGTERM."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self._process.wait, 60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def last_lines(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:] if self._log.exists() else ""

    def unforeseen(self) -> list[str]:
        """What a server without defects does not write to the log, each with the lines that follow it."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        found = [number for number, line in enumerate(lines) if _UNFORESEEN.search(line)]
        return ["\n    ".join(lines[max(number - 1, 0) : number + _LINES_SHOWN]) for number in found]
