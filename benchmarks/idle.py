"""What an idle session costs: native WebSocket sessions that are open and silent.

Memory is what the resident memory of the server process grows by, divided by the sessions, once some sessions have been
opened before. The CPU time is that of the pings that every connection gets, and of their answers; what the server takes
without any session is subtracted. The peer ``bare_websockets``, alternating with omni_ws, is the lower bound of the
library that holds the connections.
"""

from __future__ import annotations

import argparse
import resource
import select
import statistics
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.load import Load, Stream
from benchmarks.server_process import free_port, memory_mib, running, scheduled_seconds

#: Targets: memory of a session, and share of a core of all of them.
MAX_SESSION_KIB: Final = 30.0
MAX_CPU_SHARE: Final = 0.002
#: Sessions opened before, so that what all share is there.
EARLIER_SESSIONS: Final = 100
SETTLE_SEC: Final = 2.0
CONTESTANTS: Final = {
    "omni_ws": ("omni_ws", "serve", "--engine", "fake", "--log-level", "warning", "--limits.max-sessions", "20000"),
    "bare websockets": ("benchmarks.peers.bare_websockets",),
}


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks idle", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sessions, one run with one ping each")
    parser.add_argument("--sessions", type=int, default=900)
    parser.add_argument("--seconds", type=float, default=40, help="idle time of one run; pings come every 20 s")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.quick:
        options.sessions, options.seconds, options.runs = 200, 21.0, 1
    allow_files(2 * (options.sessions + EARLIER_SESSIONS) + 200)
    print(f"### {options.sessions} idle sessions\n")
    print("| run | server | KiB of memory per session | CPU time of all sessions |\n|---|---|---|---|")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    for number in range(options.runs):
        for name, command in CONTESTANTS.items():
            memory, share = measure(command, options.sessions, options.seconds)
            found[name].append((memory, share))
            print(f"| {number + 1} | {name} | {memory:.1f} | {share:.2%} of a core |", flush=True)
    memory, share = (statistics.median(column) for column in zip(*found["omni_ws"], strict=True))
    met: bool = memory <= MAX_SESSION_KIB and share <= MAX_CPU_SHARE
    target = f"≤ {MAX_SESSION_KIB:g} KiB, ≤ {MAX_CPU_SHARE:.1%}"
    print(f"| median | omni_ws | {memory:.1f} | {share:.2%} of a core; {target}: {'met' if met else 'MISSED'} |")
    return met


def measure(command: Sequence[str], sessions: int, seconds: float) -> tuple[float, float]:
    """KiB of memory per session, and share of a core of all sessions."""
    port = free_port()
    with running(*command, port=port) as process:
        servers = [(port, process.pid)]
        load = Load(servers=servers, streams=sessions, seconds=seconds, warm_up=0, binary=False, echo=False)
        keep_open([], SETTLE_SEC)
        empty = cpu_share(process.pid, [], seconds / 4)
        earlier = [Stream(load, port) for _ in range(EARLIER_SESSIONS)]
        keep_open(earlier, SETTLE_SEC)
        before = memory_mib(process.pid)
        streams = earlier + [Stream(load, port) for _ in range(sessions)]
        keep_open(streams, SETTLE_SEC)
        memory = (memory_mib(process.pid) - before) * 1024 / sessions
        share = cpu_share(process.pid, streams, seconds) - empty
        for stream in streams:
            stream.socket.close()
    return memory, share


def cpu_share(pid: int, streams: Sequence[Stream], seconds: float) -> float:
    """Share of a core that a process takes while these sessions are open."""
    begun, cpu = time.monotonic(), scheduled_seconds(pid)
    keep_open(streams, seconds)
    return (scheduled_seconds(pid) - cpu) / (time.monotonic() - begun)


def keep_open(streams: Sequence[Stream], seconds: float) -> None:
    """Answers pings for some time."""
    by_descriptor = {stream.socket.fileno(): stream for stream in streams}
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left):
            by_descriptor[descriptor].receive()
    poll.close()


def allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
