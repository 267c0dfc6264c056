"""Load generator of event streams: concurrent chat completions over plain sockets, in its own process.

Prints a JSON object: tokens received, CPU time of the server meanwhile, and, if the first token of an answer carries
the time of its creation, the delay of its first byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import select
import socket
import sys
import time
from typing import Final

from benchmarks.server_process import cpu_seconds

_CONTENT: Final = b'"content":"'
_STAMP: Final = re.compile(rb'"content":"@(\d+)"')
_END: Final = b"data: [DONE]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Parameters. Each of ``streams`` repeatedly requests ``words`` tokens; times are in seconds."""

    port: int
    pid: int
    streams: int
    words: int
    warm_up: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    tokens: int
    server_cpu_sec: float
    #: Milliseconds from the creation of a first token to its arrival; peers send the head of the response earlier.
    first_byte_ms: list[float]

    @property
    def microseconds_per_token(self) -> float:
        return self.server_cpu_sec / self.tokens * 1e6


class Stream:
    def __init__(self, port: int, words: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "token " * words}]}).encode()
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self._tail = b""
        self._began = False
        self._waiting = True
        self.tokens = 0
        self.first_byte_ms: list[float] = []

    def ask(self) -> None:
        self._waiting = True
        self._began = False
        self.socket.sendall(self._request)

    def receive(self) -> None:
        now = time.monotonic_ns()
        data = self.socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the server closed a connection")
        if not self._began:
            self._began = True
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"not an event stream: {data[:300]!r}")
        data = self._tail + data
        # Keeps only what may be the beginning of a stamp.
        self.tokens += data.count(_CONTENT) - self._tail.count(_CONTENT)
        if self._waiting and (stamp := _STAMP.search(data)):
            self._waiting = False
            self.first_byte_ms.append((now - int(stamp[1])) / 1e6)
        if _END in data and data.endswith(b"0\r\n\r\n"):
            self._tail = b""
            self.ask()
        else:
            self._tail = data[-64:]


def run(load: Load) -> Outcome:
    streams = [Stream(load.port, load.words) for _ in range(load.streams)]
    by_descriptor = {stream.socket.fileno(): stream for stream in streams}
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    begin = time.monotonic()
    #: Staggers the start of the answers.
    asked = 0
    measured_from: tuple[float, int] | None = None
    while (passed := time.monotonic() - begin) < load.warm_up + load.seconds:
        while asked < len(streams) and passed >= asked / len(streams) * load.warm_up:
            streams[asked].ask()
            asked += 1
        if measured_from is None and passed >= load.warm_up:
            measured_from = cpu_seconds(load.pid), sum(stream.tokens for stream in streams)
            for stream in streams:
                stream.first_byte_ms.clear()
        for descriptor, _ in poll.poll(0.005):
            by_descriptor[descriptor].receive()
    assert measured_from is not None
    outcome = Outcome(
        tokens=sum(stream.tokens for stream in streams) - measured_from[1],
        server_cpu_sec=cpu_seconds(load.pid) - measured_from[0],
        first_byte_ms=[late for stream in streams for late in stream.first_byte_ms],
    )
    for stream in streams:
        stream.socket.close()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("load", help="a Load as a JSON object")
    json.dump(dataclasses.asdict(run(Load(**json.loads(parser.parse_args().load)))), sys.stdout)


if __name__ == "__main__":
    main()
