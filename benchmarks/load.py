"""Load generator: paced streams of 20 ms frames over plain sockets, in its own process.

All streams send the same frames, built and masked in advance, so that the generator costs little. Prints a JSON
object: what was sent, what was received, and the CPU time of the server in between.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import itertools
import json
import os
import re
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.server_process import child_processes, scheduled_seconds
from omni_ws.transport.native.endpoint import ACK_DELAY_SEC

FRAME_SEC: Final = 0.02
#: 20 ms of pcm16 at 16 kHz.
FRAME_BYTES: Final = 640
#: Rounds of all streams in a slice (200 ms).
SLICE_ROUNDS: Final = 10
#: A slice counts if no round started later than this and the server kept pace: frames that arrive or wait in
#: batches cost less.
MAX_LATE_MS: Final = 5.0
MAX_BEHIND: Final = 0.2
#: On a busy machine a run continues until enough slices count, at most this many times as long.
PATIENCE: Final = 4
#: Frames that may remain unacknowledged at the end: peers have no timer for them.
MAX_UNACKNOWLEDGED: Final = 16
_HANDSHAKE: Final = (
    "GET /v1/streaming_input HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n{protocol}\r\n"
)
_ACKNOWLEDGED: Final = re.compile(rb'"next_sequence_id": ?(\d+)')
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x81, 0x82, 0x88, 0x89, 0x8A


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Parameters. ``servers``: the port and the process of each, whose child processes count as well.

    The servers take the streams in turn. ``prelude`` is the text of a frame to send first; ``echo`` expects every
    chunk back. With ``turn_frames`` so many binary frames are a turn, which ends at another moment in each stream.
    """

    servers: Sequence[tuple[int, int]]
    streams: int
    seconds: float
    warm_up: float
    binary: bool
    echo: bool
    prelude: str | None = None
    turn_frames: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Sum of the slices that count.

    The server confirmed ``frames`` in ``answers`` acknowledgements or echoes. ``counted`` is the share of all slices
    that count. ``late_ms``: median, 99th percentile and maximum of how long after their time acknowledgements came,
    in all slices; empty without acknowledgements.
    """

    frames: int
    answers: int
    server_cpu_sec: float
    counted: float
    late_ms: Sequence[float]

    @property
    def microseconds_per_frame(self) -> float:
        return self.server_cpu_sec / self.frames * 1e6

    @property
    def stream_sec(self) -> float:
        """Duration of the counted streams together."""
        return self.frames * FRAME_SEC


class Meter:
    """Sums up the slices in which the streams were paced."""

    def __init__(self, load: Load, streams: Sequence[Stream]) -> None:
        self._load = load
        self._streams = streams
        self._slices = 0
        self._counted = 0
        self._cpu = 0.0
        self._frames = 0
        self._answers = 0
        self._begin: tuple[float, int, int] | None = None
        self._latest = 0.0

    @property
    def enough(self) -> bool:
        return self._counted * SLICE_ROUNDS * FRAME_SEC >= self._load.seconds

    def round_began(self, late_sec: float) -> None:
        self._latest = max(self._latest, late_sec)

    def cut(self) -> None:
        """Ends the current slice and starts the next."""
        answers = sum(stream.answers for stream in self._streams)
        received = answers if self._load.echo else sum(stream.acknowledged for stream in self._streams)
        pids = [each for _, pid in self._load.servers for each in (pid, *child_processes(pid))]
        now = sum(map(scheduled_seconds, pids)), received, answers
        if self._begin is not None:
            self._slices += 1
            frames = received - self._begin[1]
            sent = SLICE_ROUNDS * len(self._streams)
            if self._latest * 1000 <= MAX_LATE_MS and abs(frames - sent) <= MAX_BEHIND * sent:
                self._counted += 1
                self._cpu += now[0] - self._begin[0]
                self._frames += frames
                self._answers += answers - self._begin[2]
        self._begin, self._latest = now, 0.0

    def outcome(self) -> Outcome:
        late = [1000 * each for stream in self._streams for each in stream.late]
        parts = statistics.quantiles(late, n=100) if len(late) > 1 else ()
        return Outcome(
            frames=self._frames,
            answers=self._answers,
            server_cpu_sec=self._cpu,
            counted=self._counted / max(1, self._slices),
            late_ms=(parts[49], parts[98], max(late)) if parts else (),
        )


class Stream:
    """A connection that counts received frames without keeping them."""

    def __init__(self, load: Load, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol = "Sec-WebSocket-Protocol: omni.v1+binary\r\n" if load.binary and load.prelude else ""
        self.socket.sendall(_HANDSHAKE.format(protocol=protocol).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self._read()
        if b" 101 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(f"the handshake failed: {head[:200]!r}")
        self._buffer = head.partition(b"\r\n\r\n")[2]
        self.answers = 0
        self.acknowledged = 0
        #: When its first frame is due.
        self.begin = 0.0
        #: The first frame after the warm-up.
        self.measured_from = 0
        #: Seconds by which each acknowledgement came later than the protocol has it: ACK_DELAY_SEC after the oldest
        #: frame that it acknowledges. Those of the warm-up are left out.
        self.late: list[float] = []
        if load.prelude is not None:
            self.socket.sendall(masked(load.prelude.encode(), _TEXT))
            while self.answers < 2:  # session_created, session_updated
                self.receive()
            self.answers = 0
        self.socket.setblocking(False)

    def close(self) -> None:
        """Performs the closing handshake."""
        self.socket.setblocking(True)
        self.socket.sendall(masked((1000).to_bytes(2, "big"), _CLOSE))
        while self.socket.recv(1 << 18):
            pass
        self.socket.close()

    def _read(self) -> bytes:
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError("the server closed a connection")
        return data

    def receive(self) -> None:
        data = self._buffer + self._read()
        at = 0
        while len(data) >= at + 2:
            length, header = data[at + 1], 2
            if length == 126:
                if len(data) < at + 4:
                    break
                length, header = int.from_bytes(data[at + 2 : at + 4], "big"), 4
            elif length == 127:
                raise RuntimeError("the server sent a frame of 64 KiB or more")
            end = at + header + length
            if end > len(data):
                break
            self._count(data[at], data, at + header, end)
            at = end
        self._buffer = data[at:]

    def _count(self, kind: int, data: bytes, start: int, end: int) -> None:
        if kind == _PING:
            self.socket.send(masked(data[start:end], _PONG))
            return
        if kind not in (_TEXT, _BINARY):
            raise RuntimeError(f"unexpected frame: {data[start:end]!r}")
        self.answers += 1
        if end - start < 200 and (match := _ACKNOWLEDGED.search(data, start, end)):
            if self.acknowledged >= self.measured_from:
                due = self.begin + self.acknowledged * FRAME_SEC + ACK_DELAY_SEC
                self.late.append(max(0.0, time.monotonic() - due))
            self.acknowledged = int(match[1])
        elif data[start : start + 15] == b'{"type":"error"':
            raise RuntimeError(f"the server refused a frame: {data[start:end]!r}")


def masked(payload: bytes, kind: int) -> bytes:
    key = os.urandom(4)
    length = len(payload)
    head = struct.pack("!BB", kind, 0x80 | length) if length < 126 else struct.pack("!BBH", kind, 0xFE, length)
    repeated = (key * (length // 4 + 1))[:length]
    body = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
    return head + key + body


def chunk_frame(sequence_id: int, *, binary: bool, ends: bool = False) -> bytes:
    payload = os.urandom(FRAME_BYTES)
    if binary:
        header = struct.pack(">BBBBII", 1, 1, 2, 0b10 | ends, sequence_id, sequence_id * 20)
        return masked(header + payload, _BINARY)
    fields = {
        "type": "input_chunk",
        "sequence_id": sequence_id,
        "modality": "audio",
        "payload": base64.b64encode(payload).decode(),
        "timestamp_ms": sequence_id * 20,
    }
    return masked(json.dumps(fields).encode(), _TEXT)


def run(load: Load) -> Outcome:
    measured_from = round(load.warm_up / FRAME_SEC)
    rounds = measured_from + round(PATIENCE * load.seconds / FRAME_SEC)
    frames = [chunk_frame(number, binary=load.binary) for number in range(rounds)]
    ends = [chunk_frame(number, binary=True, ends=True) for number in range(rounds if load.turn_frames else 0)]
    streams = [Stream(load, port) for port, _ in itertools.islice(itertools.cycle(load.servers), load.streams)]
    by_descriptor = {stream.socket.fileno(): stream for stream in streams}
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)

    meter = Meter(load, streams)
    begin = time.monotonic() + 0.1
    for index, stream in enumerate(streams):
        # Spreads the streams evenly over the 20 ms.
        stream.begin = begin + index / load.streams * FRAME_SEC
        stream.measured_from = measured_from
    sent = 0
    for number, frame in enumerate(frames):
        if number >= measured_from and (number - measured_from) % SLICE_ROUNDS == 0:
            meter.cut()
            if meter.enough:
                break
        for index, stream in enumerate(streams):
            due = stream.begin + number * FRAME_SEC
            while (early := due - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(early if early > 0.001 else 0):
                    by_descriptor[descriptor].receive()
                if 0.00005 < early <= 0.001:
                    time.sleep(0.00005)
            if index == 0:
                meter.round_began(-early)
            is_end = load.turn_frames and (number + index) % load.turn_frames == 0
            stream.socket.send(ends[number] if is_end else frame)
        sent += 1
    settle(load, streams, poll, sent)
    return meter.outcome()


def run_load(load: Load, *prefix: str) -> Outcome:
    """The outcome of a load in a process of its own, by a command behind ``prefix``."""
    command = [*prefix, sys.executable, "-m", "benchmarks.load", json.dumps(dataclasses.asdict(load))]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=PATIENCE * load.seconds + 120).stdout
    return Outcome(**json.loads(printed))


def settle(load: Load, streams: list[Stream], poll: select.epoll, sent: int) -> None:
    """Waits for outstanding replies. Raises if any is lost."""
    by_descriptor = {stream.socket.fileno(): stream for stream in streams}
    deadline = time.monotonic() + 5

    def behind(stream: Stream) -> int:
        return sent - (stream.answers if load.echo else stream.acknowledged)

    while (worst := max(behind(stream) for stream in streams)) >= MAX_UNACKNOWLEDGED:
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {sent} frames of a stream {worst} were not answered")
        for descriptor, _ in poll.poll(0.1):
            by_descriptor[descriptor].receive()
    if any(stream.answers < sent // MAX_UNACKNOWLEDGED for stream in streams):
        raise RuntimeError("there were too few acknowledgements")
    for stream in streams:
        stream.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("load", help="a Load as a JSON object")
    fields: dict[str, Any] = json.loads(parser.parse_args().load)
    json.dump(dataclasses.asdict(run(Load(**fields))), sys.stdout)


if __name__ == "__main__":
    main()
