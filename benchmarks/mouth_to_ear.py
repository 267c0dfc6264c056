"""From the end of what is said to the first sound of the answer, in a real browser, by WebSocket and by WebRTC.

A sound server stands between the page and its room, so nothing is measured by the page itself: a clip is played into
Chromium's microphone, and the microphone and the loudspeaker are recorded as channels of one recording. The figures
contain what the sound server buffers, the same for both ways. The server runs in its own process with its default
engine. In each round there is a fresh page for each way, and its first turn is a warm-up. Beside each turn of the
recording stands what the server makes of it: the sum of the parts in its metrics, of which it knows the last by the
page's report or its own clock. The parts begin where turn detection takes the speech to end, so they are compared with
the recording from that place on: it is known from the end of speech that the server reports to the page. What lies
before the server's first part and behind its last, in the browser and the sound server, is measured by a page that
plays its microphone, and taken off the recording, less the latency that the page's report contains. By WebRTC the
browser reports nothing of what it plays: what it held in its jitter buffer, by its own statistics, is taken off, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
import wave
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import soxr
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chromium import CLIP, chromium_path, clip_seconds
from benchmarks.server_process import free_port, serving
from omni_ws.audio import vad
from omni_ws.audio.speech_watch import SpeechOffset, TurnDetector
from omni_ws.caller.script import frame_levels

_WAYS: Final = ("websocket", "webrtc")
_RATE: Final = 48_000
_TIMEOUT_MS: Final = 60_000
#: The server's own end of a turn, the answer and a pause.
_PAUSE_SEC: Final = 1.5
#: Of 32,768: above it a sample is heard.
_LOUD: Final = 656
#: What a recording is late by; it is stopped so much after the last answer.
_TAIL_SEC: Final = 0.5
#: How many places of a window the detector's windows begin at, to find the server's.
_PHASES: Final = 16
#: Of the page that plays its microphone: how often it hears the clip, and the longest lag that is looked at.
_CLIPS: Final = 4
_LONGEST_LAG_MS: Final = 800
#: Longer than a microphone takes to open.
_RUSTLE_SEC: Final = 60

#: Target for the medians: so much later by WebRTC, in milliseconds.
MAX_MORE_BY_WEBRTC: Final = 60
#: Target for the server's sum beside the recording, in milliseconds, or as a share of the latter.
MAX_APART_MS, MAX_APART_SHARE = 25, 0.05

#: Channels of the room: what the page plays, and what is said to it.
_CHANNELS: Final = "front-left,front-right,rear-center"
_SOUND_SERVER: Final = (
    f"load-module module-null-sink sink_name=room rate={_RATE} channels=3 channel_map={_CHANNELS}",
    "load-module module-remap-source master=room.monitor source_name=microphone remix=no channels=2"
    " channel_map=front-left,front-right master_channel_map=rear-center,rear-center",
    "set-default-sink room",
    "set-default-source microphone",
)
_RAW: Final = ("--raw", "--format=s16le", "--latency-msec=20")
_PLAY: Final = ("pacat", *_RAW, "--device=room", "--channels=1", "--channel-map=rear-center")
_RECORD: Final = (
    *("parec", *_RAW, "--device=room.monitor"),
    *(f"--rate={_RATE}", "--channels=3", f"--channel-map={_CHANNELS}"),
)


def main(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks mouth_to_ear", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8, help="turns of a round, for each way")
    parser.add_argument("--quick", action="store_true", help="one round of three turns")
    options = parser.parse_args(arguments)
    path = chromium_path(parser)
    if shutil.which("pulseaudio") is None or shutil.which("parec") is None:
        parser.error("PulseAudio and its programs are not installed (Debian: pulseaudio, pulseaudio-utils)")
    rounds, turns = (1, 3) if options.quick else (options.rounds, options.turns)
    port = free_port()
    with serving("--fetch", "--engine", "embedded", port=port), _sound_server() as environment:
        url = f"http://127.0.0.1:{port}/"
        found = asyncio.run(_measure(path, url, environment, rounds, turns))
        outside = asyncio.run(_outside(path, url, environment))
    return _report(found, outside)


#: Notes what the server says of the ends of speech, and keeps the connections of calls, in the page's ``heard``.
_LISTEN: Final = """() => {
  const heard = (window.heard = { stops: [], peers: [] });
  const note = ({ data }) => {
    const event = typeof data === "string" && data.includes("speech_stopped") ? JSON.parse(data) : {};
    const at = event.audio_ms ?? event.audio_end_ms;
    if (at !== undefined) heard.stops.push(at);
  };
  window.WebSocket = class extends WebSocket {
    constructor(...options) {
      super(...options);
      this.addEventListener("message", note);
    }
  };
  window.RTCPeerConnection = class extends RTCPeerConnection {
    constructor(...options) {
      super(...options);
      heard.peers.push(this);
    }
    createDataChannel(...options) {
      const channel = super.createDataChannel(...options);
      channel.addEventListener("message", note);
      return channel;
    }
  };
}"""
#: Returns the ends of speech so far, and what the jitter buffer has delayed: seconds times samples, and samples.
_HEARD: Final = """async () => {
  const { stops, peers } = window.heard;
  const reports = peers.length ? [...(await peers.at(-1).getStats()).values()] : [];
  const { jitterBufferDelay = 0, jitterBufferEmittedCount = 0 } =
    reports.find(({ type, kind }) => type === "inbound-rtp" && kind === "audio") ?? {};
  return { stops, delay: jitterBufferDelay, emitted: jitterBufferEmittedCount };
}"""
#: Plays the microphone, as it is opened by the demo, and returns the latency that a page knows of, in seconds.
_PLAY_MICROPHONE: Final = """async () => {
  const audio = { echoCancellation: true, noiseSuppression: true, autoGainControl: true };
  const stream = await navigator.mediaDevices.getUserMedia({ audio });
  const context = new AudioContext({ latencyHint: "interactive" });
  context.createMediaStreamSource(stream).connect(context.destination);
  await context.resume();
  await new Promise((resolve) => setTimeout(resolve, 1000));
  return context.outputLatency || context.baseLatency;
}"""


@contextmanager
def _sound_server() -> Iterator[dict[str, str]]:
    """Yield the environment of programs that shall use it."""
    with tempfile.TemporaryDirectory() as folder:
        socket, script = Path(folder, "socket"), Path(folder, "script")
        listen = f"load-module module-native-protocol-unix auth-anonymous=1 socket={socket}"
        script.write_text("\n".join([*_SOUND_SERVER, listen]))
        config = Path(folder, "daemon.conf")
        config.write_text("enable-remixing = no\n")
        environment = {
            **os.environ,
            "PULSE_CONFIG": str(config),
            "PULSE_SERVER": f"unix:{socket}",
            "PULSE_RUNTIME_PATH": folder,
        }
        switches = ("--daemonize=no", "--use-pid-file=no", "--exit-idle-time=-1", "--log-level=error")
        with subprocess.Popen(["pulseaudio", "-n", "-F", str(script), *switches], env=environment) as server:
            try:
                while not socket.exists():
                    if server.poll() is not None:
                        raise RuntimeError("pulseaudio does not start")
                    time.sleep(0.05)
                yield environment
            finally:
                server.terminate()


class Turn(NamedTuple):
    """The milliseconds from mouth to ear in the recording, and as the server sums them up; None if it cannot.

    ``label_ms``: how much later than in the recording turn detection took the speech to end; ``buffered``: how long the
    sound was in the browser's jitter buffer.
    """

    recorded: float
    label_ms: float
    buffered: float
    summed: float | None

    def apart(self, outside: float) -> float | None:
        """The recording less the server's sum, where the sound was ``outside`` for so long."""
        if self.summed is None:
            return None
        return self.recorded - self.label_ms - self.buffered - outside - self.summed


async def _measure(
    path: str, url: str, environment: Mapping[str, str], rounds: int, turns: int
) -> dict[str, list[list[Turn]]]:
    """The turns of each way, by round."""
    found: dict[str, list[list[Turn]]] = {way: [] for way in _WAYS}
    for number in range(rounds):
        for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
            async with _page(path, environment, way) as page:
                found[way].append(await _talk(page, url, environment, turns))
    return found


@asynccontextmanager
async def _process(
    *command: str, environment: Mapping[str, str], **options: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that ends with the block, at the latest."""
    process = await asyncio.create_subprocess_exec(*command, env=environment, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def _page(path: str, environment: Mapping[str, str], way: str) -> AsyncIterator[Any]:
    """A fresh page of the demo, not yet opened, that connects by ``way``."""
    from playwright.async_api import async_playwright

    settings = json.dumps({"connection": way, "greeting": False, "log": True})
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--use-fake-ui-for-media-stream"],
            ignore_default_args=["--mute-audio"],
            env={**environment},
        )
        page = await (await browser.new_context(permissions=["microphone"])).new_page()
        page.set_default_timeout(_TIMEOUT_MS)
        await page.add_init_script(f"({_LISTEN})()")
        await page.add_init_script(f"localStorage.setItem('omni_ws.settings', {json.dumps(settings)})")
        yield page
        await browser.close()


async def _talk(page: Any, url: str, environment: Mapping[str, str], turns: int) -> list[Turn]:
    """All turns but the first."""
    await page.goto(url)
    await page.locator("body[data-state=ready]").wait_for()
    # A microphone that gives nothing but zeros counts as switched off, and this room is silent.
    async with _process(*_PLAY, f"--rate={_RATE}", environment=environment, stdin=asyncio.subprocess.PIPE) as rustle:
        feeding = asyncio.create_task(rustle.communicate(_rustle()))
        await page.locator("#talk").click()
        await page.locator("body[data-state=listening]").wait_for()
        rustle.terminate()
        await feeding
    with wave.open(str(CLIP), "rb") as clip:
        speech, rate = clip.readframes(clip.getnframes()), clip.getframerate()
    voice = (*_PLAY, f"--rate={rate}")
    sums, held = [await asyncio.to_thread(_summed, url)], [await page.evaluate(_HEARD)]
    with tempfile.TemporaryFile() as file:
        async with _process(*_RECORD, environment=environment, stdout=file):
            for turn in range(turns + 1):
                await asyncio.sleep(_PAUSE_SEC)
                async with _process(*voice, environment=environment, stdin=asyncio.subprocess.PIPE) as playing:
                    await playing.communicate(speech)
                await page.locator(".server[data-state=done]").nth(turn).wait_for()
                await page.locator("body[data-state=listening]").wait_for()
                sums.append(await asyncio.to_thread(_summed, url))
                held.append(await page.evaluate(_HEARD))
            await asyncio.sleep(_TAIL_SEC)
        file.seek(0)
        sound = np.frombuffer(file.read(), np.int16).reshape(-1, 3)
    await page.locator("#talk").click()
    await page.goto(f"{url}health")  # ends the session, or the call
    ends, latencies = _latencies(sound)
    if not len(latencies) == len(held[-1]["stops"]) == turns + 1:
        raise RuntimeError(f"{turns + 1} turns were spoken, {len(latencies)} are in the recording: {held[-1]['stops']}")
    labels = _labelled_ends(sound.T[2], held[-1]["stops"])
    buffered = [_buffered_ms(before, after) for before, after in itertools.pairwise(held)]
    late = [label - end for label, end in zip(labels, ends, strict=True)]
    told = [
        (after - before) * 1000 if played == known + 1 else None
        for (known, before), (played, after) in itertools.pairwise(sums)
    ]
    return [Turn(*one) for one in zip(latencies, late, buffered, told, strict=True)][1:]


def _buffered_ms(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """How long sound was in the browser's jitter buffer between two looks at it, in the mean; 0 without one."""
    emitted = after["emitted"] - before["emitted"]
    return (after["delay"] - before["delay"]) / emitted * 1000 if emitted else 0.0


def _labelled_ends(said: NDArray[np.int16], stops: Sequence[float]) -> list[float]:
    """Where in the recording turn detection took each clip to end, in milliseconds.

    The server counts its milliseconds from its first sample (``stops``), and windows from there. Where this is in the
    recording is found by the detector in the whole of it, with windows that begin at several places.
    """
    speech = soxr.resample(said.astype(np.float32) / 32_768, _RATE, vad.SAMPLE_RATE)
    found = []
    for first in range(0, vad.WINDOW_SAMPLES, vad.WINDOW_SAMPLES // _PHASES):
        turns = TurnDetector()
        events = [turns.feed(likely) for likely in vad.SpeechDetector().process(speech[first:])]
        places = [event.audio_ms for event in events if isinstance(event, SpeechOffset)]
        if len(places) != len(stops):
            raise RuntimeError(f"the detector ends {len(places)} turns in the recording, the server {len(stops)}")
        found.append([place + first * 1000 / vad.SAMPLE_RATE for place in places])
    ahead = statistics.median(stop - place for stop, place in zip(stops, np.mean(found, axis=0), strict=True))
    return [stop - ahead for stop in stops]


async def _outside(path: str, url: str, environment: Mapping[str, str]) -> float:
    """The milliseconds that sound is in the browser and the sound server, beyond the latency that a page knows of."""
    with wave.open(str(CLIP), "rb") as clip:
        speech, rate = clip.readframes(clip.getnframes()), clip.getframerate()
    async with _page(path, environment, "websocket") as page:
        await page.goto(f"{url}health")
        known = await page.evaluate(_PLAY_MICROPHONE)
        with tempfile.TemporaryFile() as file:
            async with _process(*_RECORD, environment=environment, stdout=file):
                for _ in range(_CLIPS):
                    await asyncio.sleep(_PAUSE_SEC)
                    voice = _process(*_PLAY, f"--rate={rate}", environment=environment, stdin=asyncio.subprocess.PIPE)
                    async with voice as playing:
                        await playing.communicate(speech)
                await asyncio.sleep(_PAUSE_SEC)
            file.seek(0)
            sound = np.frombuffer(file.read(), np.int16).reshape(-1, 3)
    said, heard = (frame_levels(channel.astype(np.float32), _RATE // 1000) for channel in (sound.T[2], sound.T[0]))
    lags = range(_LONGEST_LAG_MS)
    likeness = [float(said[: len(said) - _LONGEST_LAG_MS] @ heard[lag:][: len(said) - _LONGEST_LAG_MS]) for lag in lags]
    lag_ms: float = np.argmax(likeness) - known * 1000
    return lag_ms


def _rustle() -> bytes:
    """Noise that is too faint to be heard as speech."""
    return np.random.default_rng(1).normal(0, _LOUD / 8, _RATE * _RUSTLE_SEC).astype("<i2").tobytes()


def _summed(url: str) -> tuple[int, float]:
    """How many answers the server knows to have begun to play, and the sum of the parts of all, in seconds."""
    with urllib.request.urlopen(f"{url}metrics") as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    samples = [one for family in families if family.name == "omni_ws_turn_part_seconds" for one in family.samples]
    played = sum(one.value for one in samples if one.name.endswith("_count") and one.labels["part"] == "playing")
    return round(played), sum(one.value for one in samples if one.name.endswith("_sum"))


def _latencies(sound: NDArray[np.int16]) -> tuple[list[float], list[float]]:
    """Where each clip ends at the microphone (channel 2), and from there to the next sound (channel 0), in ms."""
    said, heard = (np.flatnonzero(abs(channel.astype(int)) > _LOUD) for channel in (sound.T[2], sound.T[0]))
    # A clip has no pause as long as the one that follows it.
    ends = said[np.append(np.diff(said) > _PAUSE_SEC * _RATE, True)]
    answers = heard[np.searchsorted(heard, ends, "right").clip(max=len(heard) - 1)]
    return (ends / _RATE * 1000).tolist(), ((answers - ends) / _RATE * 1000).tolist()


def _report(found: dict[str, list[list[Turn]]], outside: float) -> bool:
    rounds = len(found[_WAYS[0]])
    turns = len(found[_WAYS[0]][0])
    print(f"**Mouth to ear in Chromium, {rounds} × {turns} turns of {clip_seconds():.1f} s for each way**\n")
    print("| by | ms, median | lowest | highest | medians of the rounds |\n|---|---|---|---|---|")
    medians = {}
    for way in _WAYS:
        every = [turn.recorded for turns_of_round in found[way] for turn in turns_of_round]
        medians[way] = statistics.median(every)
        each = ", ".join(
            f"{statistics.median(turn.recorded for turn in turns_of_round):.0f}" for turns_of_round in found[way]
        )
        print(f"| {way} | {medians[way]:.0f} | {min(every):.0f} | {max(every):.0f} | {each} |")
    more = medians["webrtc"] - medians["websocket"]
    met = more <= MAX_MORE_BY_WEBRTC
    print(f"\nBy WebRTC {more:+.0f} ms. Target ≤ {MAX_MORE_BY_WEBRTC}: {'met' if met else 'MISSED'}.\n")
    return _report_sums(found, outside) and met


def _report_sums(found: dict[str, list[list[Turn]]], outside: float) -> bool:
    print(f"In the browser and the sound server, beyond what the page knows of: {outside:.0f} ms, taken off.\n")
    print("| by | detected end later by, ms | jitter buffer | recording less the sum | lowest | highest | near |")
    print("|---|---|---|---|---|---|---|")
    met = True
    for way in _WAYS:
        turns = [turn for turns_of_round in found[way] for turn in turns_of_round]
        apart = [(ms, one.recorded) for one in turns if (ms := one.apart(outside)) is not None]
        near = sum(abs(ms) <= max(MAX_APART_MS, MAX_APART_SHARE * recorded) for ms, recorded in apart)
        met = met and near == len(turns)
        differences = [ms for ms, _ in apart]
        shown = [f"{f(differences):+.0f}" if differences else "" for f in (statistics.median, min, max)]
        off = [f"{statistics.median(each):.0f}" for each in zip(*(one[1:3] for one in turns), strict=True)]
        print(f"| {way} | {' | '.join([*off, *shown])} | {near} of {len(turns)} |")
    share = f"{MAX_APART_SHARE:.0%}"
    print(f"\nTarget: all within {MAX_APART_MS} ms or {share}: {'met' if met else 'MISSED'}.")
    return met
