"""Server under measurement, in its own process, with its CPU time read from the kernel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

START_TIMEOUT_SEC: Final = 180.0
_TICKS_PER_SEC: Final = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(module: str, *arguments: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs ``python -m module arguments`` during the block, which starts once the port accepts connections."""
    with running_command(sys.executable, "-m", module, *arguments, port=port) as process:
        yield process


@contextmanager
def serving(*flags: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs ``omni-ws serve`` with these flags during the block, which starts once the server is ready."""
    with running("omni_ws", "serve", *flags, port=port) as process:
        wait_until_ready(port)
        yield process


@contextmanager
def running_command(*command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The same of any command that takes ``--port``."""
    process = subprocess.Popen([*command, "--port", str(port)])
    try:
        _wait_for_port(process, port)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SEC
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.args!r} does not listen") from None
            time.sleep(0.05)


def wait_until_ready(port: int) -> None:
    """Wait until ``/health`` of a server of this package is 200. Raises RuntimeError if it is not in time."""
    deadline = time.monotonic() + START_TIMEOUT_SEC
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the engine does not start")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    # The program name, in parentheses, may contain anything; the fields after it are fixed (proc_pid_stat(5)).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SEC


def cpu_seconds_of_all(pid: int) -> float:
    """The same of a server and its processes."""
    return sum(map(cpu_seconds, (pid, *child_processes(pid))))


def scheduled_seconds(pid: int) -> float:
    """CPU time of one process in nanosecond resolution, by the scheduler (Linux); excludes threads that have ended."""
    return sum(int(told.split()[0]) for told in _of_each_thread(pid, "schedstat")) / 1e9


def peak_memory_mib(pid: int) -> float:
    return _status_mib(pid, "VmHWM")


def memory_mib(pid: int) -> float:
    return _status_mib(pid, "VmRSS")


def proportional_mib(pid: int) -> float:
    """Memory of a process; what several share counts in part for each."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no memory for process {pid}")


def proportional_gb(pid: int) -> float:
    """The same of a server and its processes, in 10⁹ bytes."""
    return sum(map(proportional_mib, (pid, *child_processes(pid)))) * 1024**2 / 1e9


def _status_mib(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} for process {pid}")


def child_processes(pid: int) -> Sequence[int]:
    """Descendants of a process: an engine may use processes of its own."""
    children: list[int] = []
    for told in _of_each_thread(pid, "children"):
        for child in told.split():
            children += [int(child), *child_processes(int(child))]
    return children


def _of_each_thread(pid: int, name: str) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            yield (task / name).read_text()
