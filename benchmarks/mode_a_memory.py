"""Mode A: a long upload to an engine that consumes input as it arrives must run in constant memory."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.server_process import cpu_seconds, free_port, memory_mib, peak_memory_mib, serving

#: Target: growth of the peak over the memory before the upload.
MAX_GROWTH_MIB: Final = 64
_PIECE_BYTES: Final = 64 * 1024
_HEAD: Final = (
    "POST /v1/chat/completions?modalities={modalities}&stream_options.include_usage=true HTTP/1.1\r\n"
    "Host: 127.0.0.1:{port}\r\nX-Streaming-Input: true\r\nContent-Type: audio/pcm;rate=16000\r\n"
    "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


class Reader(threading.Thread):
    """Reads the response during the upload; keeps its beginning and its end."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        self.size = 0
        self.head = b""
        self.tail = b""

    def run(self) -> None:
        while data := self._connection.recv(1 << 18):
            self.size += len(data)
            if len(self.head) < 4096:
                self.head += data
            self.tail = (self.tail + data)[-8192:]

    @property
    def input_audio_ms(self) -> int:
        """Received audio, by the usage that the server reports. Raises if there is none."""
        for line in reversed(self.tail.decode("utf-8", "replace").splitlines()):
            if line.startswith("data: {") and '"usage"' in line:
                usage = json.loads(line.removeprefix("data: "))["usage"]
                if usage is not None:
                    return int(usage["input_audio_ms"])
        raise RuntimeError(f"the answer has no usage: {self.head[:300]!r} … {self.tail[-300:]!r}")


def upload(port: int, pid: int, size: int, modalities: str) -> tuple[Reader, float]:
    """Sends ``size`` bytes of audio; returns the answer and the duration."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(_HEAD.format(port=port, modalities=modalities).encode())
        reader = Reader(connection)
        reader.start()
        piece = b"%x\r\n" % _PIECE_BYTES + bytes(range(256)) * (_PIECE_BYTES // 256) + b"\r\n"
        for _ in range(size // _PIECE_BYTES):
            connection.sendall(piece)
        connection.sendall(b"0\r\n\r\n")
        reader.join(600)
    if b" 200 " not in reader.head.partition(b"\r\n")[0]:
        raise RuntimeError(f"the server refused: {reader.head[:300]!r}")
    return reader, time.monotonic() - began


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks mode_a_memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 MiB")
    parser.add_argument("--mib", type=int, default=1024)
    options = parser.parse_args(arguments)
    size = (64 if options.quick else options.mib) << 20
    met = True
    print(f"### Mode A: one request of {size >> 20} MiB of pcm16\n")
    print("| answer | bytes of it | seconds | CPU seconds | MiB before | peak | target |")
    print("|---|---|---|---|---|---|---|")
    for what, modalities in (("text (none, for audio)", "text"), ("the audio, echoed", "audio")):
        port = free_port()
        with serving("--engine", "fake", "--log-level", "warning", port=port) as process:
            upload(port, process.pid, 1 << 20, modalities)  # warm-up
            before, cpu = memory_mib(process.pid), cpu_seconds(process.pid)
            reader, seconds = upload(port, process.pid, size, modalities)
            peak, cpu = peak_memory_mib(process.pid), cpu_seconds(process.pid) - cpu
        received = reader.input_audio_ms
        if received != size // 32:
            raise RuntimeError(f"of {size // 32} ms the server counted {received}")
        flat = peak <= before + MAX_GROWTH_MIB
        met = met and flat
        print(
            f"| {what} | {reader.size} | {seconds:.1f} | {cpu:.1f} | {before:.0f} | {peak:.0f}"
            f" | ≤ {MAX_GROWTH_MIB} MiB more: {'met' if flat else 'MISSED'} |",
            flush=True,
        )
    return met


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
