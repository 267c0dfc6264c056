"""Bad networks: words lost, and the time from mouth to ear, by WebSocket, by WebRTC and by telephone.

A caller in a network namespace speaks a recording to the server, over a link that loses, delays and reorders IP
packets (``lossy_link``), 20 ms each way. A tone answers; Whisper reads afterwards what arrived. Mouth to ear is
the time from the end of the last word to the arrival of the first sound: it holds the silence by which the end of a
turn is found, and no delay of a player. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.lossy_link import NAMESPACE, SERVER, LossyLink, Network, lossy_link
from benchmarks.network_caller import WAYS
from benchmarks.speech.hearing import hear
from omni_ws.audio.pcm import SampleLayout, Samples, decode_mu_law, resampled, samples_from_bytes
from omni_ws.config.model import ServerConfig, StreamingInputConfig, TelephonyConfig
from omni_ws.core.chunks import AudioEncoding
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.base import AudioOutput, GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.scenarios.speech import word_errors
from omni_ws.server import create_app, listen

NETWORKS: Final = (
    Network(name="clean"),
    Network(name="5 % loss", loss=0.05),
    Network(name="100 ms jitter, reordered", jitter=0.1),
    Network(name="3 s outage", outage=3.0),
)
#: Recordings of the tests without a pause in which a turn could end, and what is said in them.
RECORDINGS: Final = {
    "goforward": "go forward ten meters",
    "cards_001": "ten of clubs",
}
_DATA: Final = Path(__file__).parent.parent / "tests" / "data"
#: So long after the beginning of a recording an outage begins.
OUTAGE_AFTER_SEC: Final = 1.2
#: Targets in seconds, of the means: what a loss costs is rare.
MAX_ABOVE_WEBSOCKET: Final = {"clean": 0.06, "5 % loss": 0.0}
_TONE: Final = (0.25 * np.sin(2 * np.pi * 440 * np.arange(4800) / 24_000)).astype(np.float32)


class Listener(ScriptedEngine):
    """Keeps the audio of each turn, and answers with a tone of 200 ms at its end."""

    def __init__(self) -> None:
        super().__init__((TextOutput("Beep."), AudioOutput(_TONE, 24_000)))
        self.turns: list[Samples] = []

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        sound = b"".join([chunk.payload async for chunk in request.input])
        audio = request.input_audio
        coded = audio.encoding is AudioEncoding.PCMU
        samples = decode_mu_law(sound) if coded else samples_from_bytes(sound, SampleLayout.S16)
        self.turns.append(resampled(samples, audio.sample_rate, 16_000))
        await super().generate(request, out)


async def recognised(turns: Sequence[Samples]) -> str:
    """What Whisper hears, afterwards: it takes a core, which the calls would lack."""
    engine = RecogniserEngine(WhisperRecogniser(max_recognisers=1))
    await engine.start()
    try:
        return " ".join([(await hear(engine, turn)).text for turn in turns])
    finally:
        await engine.stop()


@dataclass(slots=True)
class Cell:
    """The turns over one network by one way."""

    delays: list[float] = field(default_factory=list)
    unanswered: int = 0
    words: int = 0
    wrong: int = 0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.delays) if self.delays else float("nan")

    def shown(self) -> str:
        if not self.delays:
            return "no answer"
        times = (self.mean, statistics.median(self.delays), max(self.delays))
        shown = f"{' / '.join(f'{1000 * time:.0f}' for time in times)} ms, {self.wrong} of {self.words} words wrong"
        return shown + (f", {self.unanswered} turns without an answer" if self.unanswered else "")


async def measure(options: argparse.Namespace) -> bool:
    config = ServerConfig(
        host=SERVER,
        port=0,
        telephony=TelephonyConfig(enabled=True),
        streaming_input=StreamingInputConfig(resume_grace_sec=0),
    )
    listener = Listener()
    chosen = [network for network in NETWORKS if not options.network or network.name in options.network]
    heard: list[tuple[Cell, str, list[Samples]]] = []
    cells: dict[tuple[str, str], Cell] = {}
    with lossy_link() as link:
        await listener.start()
        async with listen(create_app(listener, config)) as server:
            for network in chosen:
                for way in WAYS:
                    cell = cells[network.name, way] = Cell()
                    for name, words in RECORDINGS.items():
                        await talk(link, network, way, f"{SERVER}:{server.port}", name, options.turns, cell)
                        heard.append((cell, " ".join([words] * options.turns), listener.turns))
                        listener.turns = []
                    print(f"{network.name}, {way}: {cell.shown()}", file=sys.stderr, flush=True)
    for cell, words, turns in heard:
        found = word_errors(words, await recognised(turns))
        cell.words, cell.wrong = cell.words + found.words, cell.wrong + found.wrong
    return report(chosen, cells, options.turns)


async def talk(
    link: LossyLink, network: Network, way: str, server: str, recording: str, turns: int, cell: Cell
) -> None:
    """The turns of one call."""
    link.set(network)
    command = ("ip", "netns", "exec", NAMESPACE, sys.executable, "-m", "benchmarks.network_caller")
    file = _DATA / f"{recording}.wav"
    caller = await asyncio.create_subprocess_exec(
        *command, way, server, str(file), str(turns), stdout=asyncio.subprocess.PIPE
    )
    assert caller.stdout is not None
    async for line in caller.stdout:
        if line == b"speaking\n":
            if network.outage:
                asyncio.get_running_loop().call_later(OUTAGE_AFTER_SEC, link.cut, network.outage)
        elif (delay := json.loads(line)) is None:
            cell.unanswered += 1
        else:
            cell.delays.append(delay)
    await caller.wait()


def report(networks: Sequence[Network], cells: dict[tuple[str, str], Cell], turns: int) -> bool:
    print(f"### Mouth to ear: mean / median / worst of {turns * len(RECORDINGS)} turns, and words\n")
    print(f"| network | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for network in networks:
        print(f"| {network.name} | {' | '.join(cells[network.name, way].shown() for way in WAYS)} |")
    print()
    met = True
    for network in networks:
        if (most := MAX_ABOVE_WEBSOCKET.get(network.name)) is not None:
            above = cells[network.name, "webrtc"].mean - cells[network.name, "websocket"].mean
            kept = "met" if above <= most else "MISSED"
            met = met and above <= most
            print(
                f"WebRTC above the WebSocket, {network.name}: {1000 * above:.0f} ms; target ≤ {1000 * most:.0f}: {kept}"
            )
    return met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks network", description=__doc__)
    parser.add_argument("--turns", type=int, default=10, help="of each recording, by each way over each network")
    parser.add_argument("--network", action="append", choices=[one.name for one in NETWORKS], help="one of them")
    parser.add_argument("--quick", action="store_true", help="two turns")
    options = parser.parse_args(arguments)
    if options.quick:
        options.turns = 2
    return asyncio.run(measure(options))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
