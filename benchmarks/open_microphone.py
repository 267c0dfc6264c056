"""An open microphone for a long time, in a real browser: memory of the page and of the server, and their clocks.

Chromium opens a bare page with the client package and an open microphone that plays recorded speech, every 15 seconds
2.2 seconds of it. The server runs in its own process with an engine that says again what it heard. Each minute the page
collects its garbage and tells

- its heap, what its buffers hold (the package keeps the sound of a conversation, 50 million samples at most), its nodes
  and its listeners;
- how far the microphone's clock is behind the page's: the samples that it gave against performance.now();
- how long after the beginning of speech the server's speech_started comes, at least in that minute. The server counts
  the audio that it gets: where its count differs from the microphone's, or sound gathers on the way, this time changes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.chromium import chromium_path, clip_seconds, page_with_speech
from benchmarks.server_process import child_processes, free_port, memory_mib, serving

_PERIOD_SEC: Final = 15
_MIB: Final = 1 << 20

#: Targets.
MAX_HEAP_GROWTH_MIB: Final = 4
MAX_SERVER_GROWTH_MIB: Final = 16
MAX_DRIFT_MS: Final = 40

_TALK: Final = """async () => {
  const { VoiceClient } = await import("/client.js");
  const client = window.client = new VoiceClient({ url: location.origin });
  const seen = window.seen = { samples: 0, since: null, at: 0, delays: [], lost: 0, answers: 0 };
  client.microphone.addEventListener("chunk", ({ detail: { samples, capturedAt } }) => {
    if (seen.since === null) seen.since = capturedAt;
    else seen.samples += samples.length;
    seen.at = capturedAt;
  });
  client.session.addEventListener("frame", ({ detail: frame }) => {
    if (frame.type !== "speech_started") return;
    const spoken = client.talk.spokenAt(frame.audio_ms);
    if (spoken === null) seen.lost += 1;
    else seen.delays.push(performance.now() - spoken);
  });
  client.addEventListener("answered", () => (seen.answers += 1));
  client.open();
  const button = document.body.appendChild(document.createElement("button"));
  button.textContent = "Talk";
  button.onclick = () => client.listen();
}"""
#: The clock of the microphone is read where a chunk came in time: pieces that waited for the page would be drift.
_READ: Final = """async () => {
  const least = { behind: Infinity };
  for (let count = 0; count < 100; count++) {
    await new Promise((go) => client.microphone.addEventListener("chunk", go, { once: true }));
    const { since, at, samples } = seen;
    least.behind = Math.min(least.behind, at - since - (samples / client.sound.rate) * 1000);
  }
  const { delays, lost, answers } = seen;
  const { unacknowledged, bufferedBytes } = client.session;
  seen.delays = [];
  return { ...least, delays, lost, answers, unacknowledged, bufferedBytes, state: client.session.state };
}"""


def main(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks open_microphone", description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="three minutes")
    options = parser.parse_args(arguments)
    path = chromium_path(parser)
    port = free_port()
    with serving("--engine", "fake", port=port) as server:
        minutes = asyncio.run(_listen(path, port, server.pid, 3 if options.quick else options.minutes))
    return _report(minutes)


async def _listen(path: str, port: int, server: int, minutes: int) -> list[dict[str, Any]]:
    async with page_with_speech(path, pause_sec=_PERIOD_SEC - clip_seconds()) as page:
        await page.goto(f"http://127.0.0.1:{port}/health")  # a document of the server without scripts
        await page.evaluate(_TALK)
        await page.locator("button").click()
        await page.wait_for_function("client.state === 'listening' && seen.since !== null")
        developer = await page.context.new_cdp_session(page)
        began = time.monotonic()
        found = []
        for minute in range(minutes + 1):
            await asyncio.sleep(max(0.0, began + 60 * minute - time.monotonic()))
            found.append(await _look(page, developer, server))
    return found


async def _look(page: Any, developer: Any, server: int) -> dict[str, Any]:
    seen: dict[str, Any] = await page.evaluate(_READ)
    await developer.send("HeapProfiler.collectGarbage")
    heap = await developer.send("Runtime.getHeapUsage")
    nodes = await developer.send("Memory.getDOMCounters")
    memory = sum(memory_mib(pid) for pid in (server, *child_processes(server)))
    return {
        **seen,
        "heap": heap["usedSize"] / _MIB,
        "buffers": heap["backingStorageSize"] / _MIB,
        "nodes": nodes["nodes"],
        "listeners": nodes["jsEventListeners"],
        "server": memory,
    }


def _report(minutes: Sequence[dict[str, Any]]) -> bool:
    # By then what is loaded once is there, and the history of the fake engine, which keeps sound, is full.
    settled = min(20, len(minutes) // 3)
    first, last = minutes[settled], minutes[-1]
    print(f"**An open microphone for {len(minutes) - 1} minutes, {last['answers']} spoken turns answered**\n")
    print(
        "| minute | page: heap, MiB | buffers, MiB | nodes, listeners | server, MiB | microphone behind, ms |", end=""
    )
    print(" beginning of speech → speech_started, ms, least |\n|---|---|---|---|---|---|---|")
    step = max(1, (len(minutes) - 1) // 10)
    for minute, seen in enumerate(minutes):
        if minute % step and minute not in (settled, len(minutes) - 1):
            continue
        delay = f"{min(seen['delays']):.0f}" if seen["delays"] else "–"
        print(
            f"| {minute} | {seen['heap']:.2f} | {seen['buffers']:.1f} | {seen['nodes']}, {seen['listeners']} "
            f"| {seen['server']:.1f} | {seen['behind']:+.1f} | {delay} |"
        )
    # Other work can only make it later: of a quarter, the least is the clocks' own.
    quarter = max(1, len(minutes) // 4)
    early = min(delay for seen in minutes[settled : settled + quarter + 1] for delay in seen["delays"])
    late = min(delay for seen in minutes[-quarter:] for delay in seen["delays"])
    print("\n| | | |\n|---|---|---|")
    met = True
    for name, value, most, unit in (
        (f"heap of the page, growth from minute {settled}", last["heap"] - first["heap"], MAX_HEAP_GROWTH_MIB, "MiB"),
        (f"server, growth from minute {settled}", last["server"] - first["server"], MAX_SERVER_GROWTH_MIB, "MiB"),
        ("microphone's clock against the page's", last["behind"] - first["behind"], MAX_DRIFT_MS, "ms"),
        ("speech_started, last quarter against the first", late - early, MAX_DRIFT_MS, "ms"),
    ):
        met = met and abs(value) <= most
        print(f"| {name} | {value:+.2f} {unit} | ≤ {most}: {'met' if abs(value) <= most else 'MISSED'} |")
    lost = last["lost"] + sum(seen["state"] != "open" for seen in minutes)
    print(f"\nPlaces in the audio that the page did not remember, or minutes without a connection: {lost}.")
    kept = max(seen["unacknowledged"] for seen in minutes)
    print(f"Chunks under way at most: {kept}.")
    return met and lost == 0
