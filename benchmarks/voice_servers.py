"""Conversations by voice with omni_ws and with other voice servers, on the same task and with the same parts.

Every talker says a recorded sentence every few seconds, in pieces of 20 ms in real time, over the wire of the server,
and is answered by voice. One omni_ws, in a process of its own, hears and speaks for every contestant, over OpenAI's
API; another takes the place of the language model, and answers with the words of the user. ``hears and speaks itself``:
with the same recogniser and voice in the server. A turn ends at half a second of silence; with ``--turns judged`` as
each server recommends. Contestants alternate round by round, each in a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.embedded import SAMPLE_RATE, Clip, percentile
from benchmarks.server_process import (
    child_processes,
    cpu_seconds_of_all,
    free_port,
    memory_mib,
    running_command,
    wait_until_ready,
)
from benchmarks.voice_client import (
    OmniWire,
    Player,
    ProtobufWire,
    RawWire,
    SpokenTurn,
    VoiceWire,
    converse,
    microphone_open,
)
from omni_ws.caller.script import PIECE_SEC

#: Without a pause in them that ends a turn.
CLIPS: Final = ("goforward", "cards_001")
SILENCE_MS: Final = 500
OURS: Final = "omni_ws"
ALONE: Final = 1
#: How many silent open microphones are measured for memory, and how long each stays open.
SILENT_SESSIONS: Final = 20
SILENT_SEC: Final = 2.0
#: The environment that ``make bench-peers`` makes for the others.
PYTHON: Final = Path(".venv-peers/bin/python")
PEERS: Final = Path(__file__).parent / "peers"
_OMNI_WS: Final = (sys.executable, "-m", "omni_ws", "serve", "--log-level", "warning")


@dataclass(frozen=True, slots=True)
class VoiceServer:
    """A contestant: how it is started, and its wire."""

    name: str
    command: tuple[str, ...]
    wire: VoiceWire


@dataclass(frozen=True, slots=True)
class Conversations:
    """What one server did in one round.

    CPU time is that of a second of a conversation: in the server with its processes, and in the parts that it asked.
    Memory is that of a silent open microphone.
    """

    alone: list[SpokenTurn]
    together: list[SpokenTurn]
    cpu: float
    parts_cpu: float
    session_mib: float


def contestants(python: Path, speech: str, model: str, turns: str) -> list[VoiceServer]:
    """``speech``: the base URL of the server that hears and speaks; ``model``: of the one that answers."""
    detection: dict[str, object] = {"type": "semantic_vad"}
    if turns == "silence":
        detection = {"type": "server_vad", "silence_duration_ms": SILENCE_MS}
    wire = OmniWire(detection)
    found = [
        VoiceServer(OURS, (*_OMNI_WS, "--asr", speech, "--llm", model, "--tts", speech), wire),
        VoiceServer(f"{OURS}, hears and speaks itself", (*_OMNI_WS, "--llm", model), wire),
    ]
    if not python.exists():
        print(f"there is no {python}, and nobody to compare with: make bench-peers", file=sys.stderr)
        return found
    asked = ("--speech", speech, "--model", model, "--turns", turns)
    return [
        *found,
        VoiceServer("pipecat", (str(python), str(PEERS / "pipecat_voice.py"), *asked), ProtobufWire()),
        VoiceServer("livekit-agents", (str(python), str(PEERS / "livekit_voice.py"), *asked), RawWire()),
    ]


def measure(server: VoiceServer, parts: Sequence[int], options: argparse.Namespace) -> Conversations:
    """``parts``: processes of the parts."""
    port = free_port()
    with running_command(*server.command, port=port) as process:
        if server.name.startswith(OURS):
            wait_until_ready(port)
        return asyncio.run(talk(server, port, process.pid, parts, options))


async def talk(
    server: VoiceServer, port: int, pid: int, parts: Sequence[int], options: argparse.Namespace
) -> Conversations:
    """One talker; many silent sessions; all talkers, who begin one after the other so that turns are spread evenly."""
    clips = [Clip.load(name) for name in CLIPS]
    said = [clips[turn % len(clips)] for turn in range(options.turns_each)]

    async def one(number: int) -> list[SpokenTurn]:
        await asyncio.sleep(number * options.turn_seconds / options.talkers)
        return await converse(port, server.wire, said, options.turn_seconds)

    await converse(port, server.wire, clips[:1], options.turn_seconds)  # warm-up
    alone = await one(0)
    memory = await session_mib(server, port, pid)
    before = [cpu_seconds_of_all(pid), sum(map(cpu_seconds_of_all, parts))]
    async with asyncio.TaskGroup() as group:
        talkers = [group.create_task(one(number)) for number in range(options.talkers)]
    talked = options.talkers * options.turns_each * options.turn_seconds
    spent = (cpu_seconds_of_all(pid) - before[0], sum(map(cpu_seconds_of_all, parts)) - before[1])
    return Conversations(
        alone, [turn for talker in talkers for turn in talker.result()], spent[0] / talked, spent[1] / talked, memory
    )


async def session_mib(server: VoiceServer, port: int, pid: int) -> float:
    """What the server grows by for each silent open microphone after the first."""
    sizes: list[float] = []
    silence = [bytes(2 * round(SAMPLE_RATE * PIECE_SEC))] * round(SILENT_SEC / PIECE_SEC)
    async with AsyncExitStack() as opened:
        for count in (1, SILENT_SESSIONS):
            microphones = [microphone_open(port, server.wire, silence, Player()) for _ in range(count)]
            await asyncio.gather(*[await opened.enter_async_context(microphone) for microphone in microphones])
            sizes.append(memory_of_all(pid))
    return (sizes[1] - sizes[0]) / SILENT_SESSIONS


def memory_of_all(pid: int) -> float:
    return sum(map(memory_mib, (pid, *child_processes(pid))))


def print_latency(found: dict[str, list[Conversations]], *, talkers: int) -> None:
    what = "one talker" if talkers == ALONE else f"{talkers} talkers"
    print(f"\n### Voice servers, {what}: from the end of speech to the answer\n")
    print("| server | median ms to the first sound | p90 | most | to the first audio | turns | unanswered | early |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rounds in found.items():
        turns = [turn for one in rounds for turn in (one.alone if talkers == ALONE else one.together)]
        heard = [turn.heard * 1000 for turn in turns if turn.heard is not None]
        arrived = [turn.arrived * 1000 for turn in turns if turn.arrived is not None]
        times = ["–"] * 4
        if heard and arrived:
            figures = (statistics.median(heard), percentile(heard, 0.9), max(heard), statistics.median(arrived))
            times = [f"{figure:.0f}" for figure in figures]
        counts = (len(turns), sum(turn.heard is None for turn in turns), sum(turn.early for turn in turns))
        print(f"| {name} | {' | '.join(times)} | {' | '.join(map(str, counts))} |", flush=True)


def print_costs(found: dict[str, list[Conversations]], *, talkers: int) -> None:
    tables: list[tuple[str, str, Callable[[Conversations], float]]] = [
        ("CPU time of the server and its parts", "ms a second", lambda one: (one.cpu + one.parts_cpu) * 1000),
        ("CPU time of the server alone", "ms a second", lambda one: one.cpu * 1000),
        ("talkers a core, the parts included", "talkers", lambda one: 1 / (one.cpu + one.parts_cpu)),
        ("memory of a session", "MiB", lambda one: one.session_mib),
    ]
    for title, unit, value in tables:
        print(f"\n### Voice servers, {talkers} talkers: {title}\n")
        print(f"| server | median {unit} | lowest | highest |\n|---|---|---|---|")
        for name, rounds in found.items():
            values = [value(one) for one in rounds]
            print(f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |", flush=True)


def ranked(found: dict[str, list[Conversations]]) -> None:
    """Says who is first in what."""
    measures: list[tuple[str, Callable[[Conversations], float]]] = [
        ("first sound, one talker", lambda one: _median_heard(one.alone)),
        ("first sound, all talkers", lambda one: _median_heard(one.together)),
        ("CPU time, parts included", lambda one: one.cpu + one.parts_cpu),
        ("CPU time of the server alone", lambda one: one.cpu),
        ("memory of a session", lambda one: one.session_mib),
    ]
    print("\n### Voice servers: who is first\n\n| in | first | then |\n|---|---|---|")
    for what, value in measures:
        medians = {name: statistics.median(map(value, rounds)) for name, rounds in found.items()}
        first, *others = sorted(medians, key=lambda name: medians[name])
        print(f"| {what} | {first} | {', '.join(others)} |")


def _median_heard(turns: Sequence[SpokenTurn]) -> float:
    """A turn that nobody answered counts as endless."""
    return statistics.median(float("inf") if turn.heard is None else turn.heard for turn in turns)


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks voice_servers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of two turns")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of the environment of the other servers")
    parser.add_argument("--servers", nargs="+", help="these alone, by name")
    parser.add_argument("--turns", choices=("silence", "judged"), default="silence", help="what ends a turn")
    parser.add_argument("--talkers", type=int, default=4)
    parser.add_argument("--turns-each", type=int, default=4)
    parser.add_argument("--turn-seconds", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.turns_each = 1, 2
    ports = free_port(), free_port()
    with (
        running_command(*_OMNI_WS, "--engine", "embedded", port=ports[0]) as speech,
        running_command(*_OMNI_WS, "--engine", "fake", port=ports[1]) as model,
    ):
        for port in ports:
            wait_until_ready(port)
        parts = speech.pid, model.pid
        urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
        servers = contestants(options.python, urls[0], urls[1], options.turns)
        if options.servers:
            servers = [server for server in servers if server.name in options.servers]
        found: dict[str, list[Conversations]] = {server.name: [] for server in servers}
        for number in range(options.rounds):
            for server in servers:
                print(f"round {number + 1} of {options.rounds}: {server.name}", file=sys.stderr, flush=True)
                found[server.name].append(measure(server, parts, options))
    for talkers in (ALONE, options.talkers):
        print_latency(found, talkers=talkers)
    print_costs(found, talkers=options.talkers)
    ranked(found)
    return True


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
