"""The Live API beside the native WebSocket: the time from the last word to the first sound, and CPU time of a talker.

The language model is a server in this process, which has the same answer for everything; ears and voice are those of
the engine ``embedded``. In turn over the one front and the other, one talker says a recording in real time, in pieces
of 20 ms, and listens. The CPU time of the server and its processes is counted for each second of the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import websockets
from support.scripted_upstream import says, upstream

from benchmarks.embedded import CLIPS, LEAD_SEC, SAMPLE_RATE, Clip, first_events, microphone
from benchmarks.server_process import cpu_seconds_of_all, free_port, serving
from omni_ws.caller.script import PIECE_SEC, beside, say
from omni_ws.client import ClientSession, connect
from omni_ws.client.audio import paced

NATIVE: Final = "/v1/streaming_input"
LIVE: Final = "/v1/live/sessions"
#: How long a talker stays, from the end of the recording on.
STAYS_SEC: Final = 5.0
PIECE_BYTES: Final = round(SAMPLE_RATE * PIECE_SEC) * 2
#: Targets: seconds, and a ratio of CPU times.
MAX_LATER: Final = 0.060
MAX_RATIO: Final = 1.3


async def talk_natively(url: str, clip: Clip) -> float:
    """Seconds from the last word to the first sound."""
    async with connect(url + NATIVE, config={"turn_detection": {"type": "semantic_vad"}}) as session:
        began = time.perf_counter()
        async with beside(say(session, microphone(clip))):
            first_audio, _ = await first_events(session)
            async with beside(_read_natively(session)):
                await _stay(began, clip)
    return first_audio - began - LEAD_SEC - clip.speech[1]


async def _read_natively(session: ClientSession) -> None:
    async for _ in session.events():
        pass


async def talk_live(url: str, clip: Clip) -> float:
    """Seconds from the last word to the first sound; the talker hears until then what is exactly silent."""
    audio = {"format": {"type": "audio/pcm", "rate": SAMPLE_RATE}}
    async with websockets.connect(url + LIVE, max_size=None) as socket:
        await socket.send(json.dumps({"type": "session.start", "session": {"model": "gpt-live-1", "audio": audio}}))
        if (started := json.loads(await socket.recv()))["type"] != "session.started":
            raise RuntimeError(str(started))
        heard: list[float] = []
        began = time.perf_counter()
        async with beside(_speak_live(socket, clip)), beside(_read_live(socket, heard)):
            await _stay(began, clip)
    if not heard:
        raise RuntimeError("nothing was said")
    return heard[0] - began - LEAD_SEC - clip.speech[1]


async def _speak_live(socket: websockets.ClientConnection, clip: Clip) -> None:
    samples = microphone(clip).samples
    pieces = [bytes(samples[at : at + PIECE_BYTES]) for at in range(0, len(samples), PIECE_BYTES)]
    async for piece in paced(pieces, interval=PIECE_SEC):
        audio = base64.b64encode(piece).decode()
        await socket.send(json.dumps({"type": "session.input_audio.append", "audio": audio}))


async def _read_live(socket: websockets.ClientConnection, heard: list[float]) -> None:
    async for message in socket:
        event = json.loads(message)
        if event["type"] == "error":
            raise RuntimeError(str(event))
        if event["type"] == "session.output_audio.delta" and any(base64.b64decode(event["delta"])):
            heard.append(time.perf_counter())


async def _stay(began: float, clip: Clip) -> None:
    await asyncio.sleep(began + LEAD_SEC + clip.speech[1] + STAYS_SEC - time.perf_counter())


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks live", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    options = parser.parse_args(arguments)
    return asyncio.run(_measured(1 if options.quick else options.runs))


async def _measured(rounds: int) -> bool:
    clips = [Clip.load(name) for name in CLIPS]
    fronts = {"native": talk_natively, "live": talk_live}
    later: dict[str, list[float]] = {front: [] for front in fronts}
    spent: dict[str, list[float]] = {front: [] for front in fronts}
    port = free_port()
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(upstream(says("I am only a voice, and I can't move.")))
        server = serving("--llm", model.url, "--log-level", "warning", port=port)
        process = await asyncio.to_thread(stack.enter_context, server)
        for number in range(-1, rounds):
            for clip in clips[:1] if number < 0 else clips:  # the first is a warm-up
                for front, talk in fronts.items():
                    before, began = cpu_seconds_of_all(process.pid), time.perf_counter()
                    found = await talk(f"ws://127.0.0.1:{port}", clip)
                    cost = (cpu_seconds_of_all(process.pid) - before) / (time.perf_counter() - began)
                    if number >= 0:
                        later[front].append(found * 1000)
                        spent[front].append(cost * 1000)
    return _report(later, spent)


def _report(later: dict[str, list[float]], spent: dict[str, list[float]]) -> bool:
    print("| front | talks | last word → first sound, ms: median | lowest | highest | CPU, ms a second connected |")
    print("|---|---|---|---|---|---|")
    for front, found in later.items():
        cost = statistics.mean(spent[front])
        median, lowest, highest = statistics.median(found), min(found), max(found)
        print(f"| {front} | {len(found)} | {median:.0f} | {lowest:.0f} | {highest:.0f} | {cost:.1f} |")
    more = statistics.median(b - a for a, b in zip(later["native"], later["live"], strict=True))
    ratio = sum(spent["live"]) / sum(spent["native"])
    met = more <= MAX_LATER * 1000 and ratio <= MAX_RATIO
    print(
        f"\nlive − native, median: {more:.0f} ms; target ≤ {MAX_LATER * 1000:.0f}. CPU, live ÷ native: {ratio:.2f}; ",
        end="",
    )
    print(f"target ≤ {MAX_RATIO:g}. {'Met' if met else 'MISSED'}.")
    return met


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
