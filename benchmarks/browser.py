"""Mouth-to-ear latency in a real browser: from the end of speech to the first sound of the answer.

The server runs the embedded engine in its own process. Chromium opens the demo with an open microphone that plays
recorded speech. All times are taken in the page, on one clock:

- speech ends with the last captured 20 ms piece that is loud, independent of the server's turn detection;
- the server's share lies between ``speech_stopped`` and the first frame of audio;
- the first sound is the first report of loud output by the audio thread, plus the output latency that the browser
  reports.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.chromium import chromium_path, page_with_speech
from benchmarks.server_process import free_port, serving

#: Silence after the words: for turn detection, the answer and a pause.
_PAUSE_SEC: Final = 5
_TIMEOUT_MS: Final = 60_000

#: Targets for medians, in milliseconds.
MAX_MOUTH_TO_EAR: Final = 900
MAX_SERVER: Final = 50
MAX_BROWSER: Final = 120

_OBSERVE: Final = """
localStorage.setItem("omni_ws.settings", JSON.stringify({ log: true, greeting: false }));
const events = window.observed = [];
let context = null;
const LOUD = 0.02;
const note = (what, more = {}) => events.push({ what, at: performance.now(), ...more });
window.AudioWorkletNode = class extends AudioWorkletNode {
  constructor(owner, name, options) {
    super(owner, name, options);
    context = owner;
    this.port.addEventListener("message", ({ data }) => {
      if (name === "capture" && data.peak > LOUD) note("mouth");
      if (name === "playback" && data.peak > LOUD) note("ear", { latency: (context.outputLatency || 0) * 1000 });
    });
  }
};
window.WebSocket = class extends WebSocket {
  constructor(...where) {
    super(...where);
    this.addEventListener("message", ({ data }) => {
      const { type, final, modality } = JSON.parse(data);
      if (modality === "audio") return note("sound");
      if (type.startsWith("speech_") || final) note(final ? "final" : type);
    });
  }
};
"""


def main(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks browser", description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="three turns")
    options = parser.parse_args(arguments)
    path = chromium_path(parser)
    port = free_port()
    with serving("--engine", "embedded", port=port):
        turns = asyncio.run(_talk(path, port, 3 if options.quick else options.turns))
    return _report(turns)


async def _talk(path: str, port: int, turns: int) -> list[dict[str, float]]:
    async with page_with_speech(path, pause_sec=_PAUSE_SEC) as page:
        page.set_default_timeout(_TIMEOUT_MS)
        await page.add_init_script(_OBSERVE)
        await page.goto(f"http://127.0.0.1:{port}/")
        await page.locator("body[data-state=ready]").wait_for()
        await page.locator("#talk").click()
        for turn in range(turns + 1):
            await page.locator(".server[data-state=done]").nth(turn).wait_for()
        await page.locator("body[data-state=listening]").wait_for()
        events = await page.evaluate("observed")
    # The first turn is a warm-up.
    return _turns(events)[1 : turns + 1]


def _turns(events: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Latencies of each answered turn, in ms from the end of its speech."""
    turns: list[dict[str, float]] = []
    mouth = 0.0
    turn: dict[str, float] = {}
    for event in events:
        what, at = event["what"], event["at"]
        if what == "mouth":
            mouth = at
        elif what == "speech_stopped":
            turn = {"stopped": at - mouth}
        elif what == "sound" and turn and "sound" not in turn:
            turn["sound"] = at - mouth
        elif what == "ear" and "sound" in turn and "ear" not in turn:
            turn["ear"] = at - mouth + event["latency"]
            turns.append(turn)
    return turns


def _report(turns: Sequence[dict[str, float]]) -> bool:
    steps = {
        "end of speech → speech_stopped": ([one["stopped"] for one in turns], None),
        "→ first frame of audio (server)": ([one["sound"] - one["stopped"] for one in turns], MAX_SERVER),
        "→ first sound (browser)": ([one["ear"] - one["sound"] for one in turns], MAX_BROWSER),
        "mouth to ear": ([one["ear"] for one in turns], MAX_MOUTH_TO_EAR),
    }
    print(f"**Mouth to ear, in Chromium, {len(turns)} spoken turns**\n")
    print("| | ms, median (least … most) | |\n|---|---|---|")
    met = True
    for name, (times, most) in steps.items():
        median = statistics.median(times)
        verdict = "" if most is None else f"≤ {most}: {'met' if median <= most else 'MISSED'}"
        met = met and (most is None or median <= most)
        print(f"| {name} | {median:.0f} ({min(times):.0f} … {max(times):.0f}) | {verdict} |")
    return met
