"""Latency of other connections while long and awkward texts are sent to be spoken or answered.

Pings on a separate connection, from a separate process, run every 20 ms. Each text is sent repeatedly for a while,
and its requests are abandoned then: only the pings are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from benchmarks.embedded import Report, percentile, pings_while
from benchmarks.server_process import free_port, serving
from omni_ws.client import connect
from omni_ws.errors import OmniError

#: Target for the 99th percentile of the pings, in seconds.
MAX_LAG: Final = 0.010
TEXTS: Final = {
    "550 KB of words": "word " * 110_000,
    "6,000 dots": "Wait" + "." * 6_000,
    "20 KB of commas": "," * 20_000,
}


def post(port: int, target: str, body: dict[str, Any], seconds: float) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{target}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with (
        contextlib.suppress(TimeoutError, urllib.error.URLError),
        urllib.request.urlopen(request, timeout=seconds) as it,
    ):
        it.read(1 << 16)


async def speech(port: int, text: str, seconds: float) -> None:
    body = {"model": "omni-embedded", "input": text, "voice": "default", "response_format": "pcm"}
    await asyncio.to_thread(post, port, "/v1/audio/speech", body, seconds)


async def native(port: int, text: str, seconds: float, task: str) -> None:
    """Reads the answer for a while."""
    async with connect(f"ws://127.0.0.1:{port}", config={"task": task}) as session:
        with contextlib.suppress(TimeoutError, OmniError):
            async with asyncio.timeout(seconds):
                await session.send_text(text, end=True)
                async for _ in session.response():
                    pass


async def again_and_again(seconds: float, send: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        await send(left)


def activities(port: int, text: str) -> dict[str, Callable[[float], Coroutine[Any, Any, None]]]:
    return {
        "/v1/audio/speech": lambda seconds: speech(port, text, seconds),
        "native, task speech": lambda seconds: native(port, text, seconds, "speech"),
        "native, task chat": lambda seconds: native(port, text, seconds, "chat"),
    }


async def measure(port: int, *, seconds: float) -> bool:
    report = Report()
    url = f"ws://127.0.0.1:{port}/v1/streaming_input"
    report.row("ping → pong, idle", (await pings_while(url, asyncio.sleep(2))).server)
    for name, text in TEXTS.items():
        for what, send in activities(port, text).items():
            trips = await pings_while(url, again_and_again(seconds, send))
            report.row(f"{name} to {what}", trips.server, target=MAX_LAG, at=0.99)
            report.row(f"meanwhile, elsewhere (p99 {percentile(trips.idle, 0.99) * 1000:.1f} ms)", trips.idle)
    return report.met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks long_text", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 s for each text")
    parser.add_argument("--seconds", type=float, default=8)
    options = parser.parse_args(arguments)
    seconds = 2.0 if options.quick else options.seconds
    port = free_port()
    print("### Long texts\n")
    with serving("--engine", "embedded", "--log-level", "error", port=port):
        return asyncio.run(measure(port, seconds=seconds))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
