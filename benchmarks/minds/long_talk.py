"""``python -m benchmarks.minds.long_talk [--llm MIND] [--words N]``: what a mind knows at the end of a long talk.

One session has a typed talk as long as three hours are when it is spoken (27,000 words at 150 a minute). In its first
ten minutes the user tells twenty facts, between small talk; more small talk follows; at the end the user asks for each
fact. The same talk is held with summaries (``history_summary``) and without. The user types at once, but for a pause
in which a person would hear the answer, at the pace of speech: the pause ends when the server has nothing left to do.

``--words`` makes the talk shorter, and ``--history`` (``limits.max_history_tokens``) the part of it that the model is
shown, so that a short talk outgrows that as often. The wait is from the end of the input to the first text, of all
turns: that of a model on this machine depends on how much of the prompt it has not computed yet.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.embedded import percentile
from benchmarks.minds.spoken import serving
from omni_ws.client import connect
from omni_ws.client.events import TextChunk
from omni_ws.client.session import ClientSession

SCRIPT: Final = Path(__file__).with_name("long_talk.toml")
WORDS_PER_SEC: Final = 2.5
THREE_HOURS: Final = 27_000
#: The facts that are to be answered rightly with summaries.
WANTED: Final = 16
INSTRUCTIONS: Final = (
    "You are a friendly assistant in a long talk. Answer in one short sentence. Use what the user has told you earlier."
)
_BUSY: Final = re.compile(r"^omni_ws_engine_active_requests\{.*\} (\S+)$", re.MULTILINE)
_SUMMARIES: Final = re.compile(r'^omni_ws_summaries_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
#: How often the server is asked whether it works, and how often it has not, before the pause ends.
_LOOK_SEC: Final = 0.1
_LOOKS: Final = 3


@dataclass(slots=True)
class Talk:
    """What came of one talk."""

    words: int = 0
    turns: int = 0
    waits: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)


def small_talk(table: dict[str, Any]) -> Iterator[str]:
    """The questions of the small talk, no two of one topic close together."""
    for question, topic in product(table["questions"], table["topics"]):
        yield question.format(topic=topic)


def read_metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


async def pause(port: int, seconds: float) -> None:
    """Wait until the server has nothing left to do, at most so long."""
    end, quiet = time.monotonic() + seconds, 0
    while quiet < _LOOKS and time.monotonic() < end:
        text = await asyncio.to_thread(read_metrics, port)
        quiet = 0 if any(float(one) for one in _BUSY.findall(text)) else quiet + 1
        await asyncio.sleep(_LOOK_SEC)


async def say(session: ClientSession, text: str, talk: Talk) -> str:
    """Say something, and return the answer."""
    began, first, said = time.perf_counter(), None, []
    await session.send_text(text, end=True)
    async for event in session.response():
        if isinstance(event, TextChunk):
            first = first or time.perf_counter()
            said.append(event.text)
    talk.waits.append((first or time.perf_counter()) - began)
    answer = "".join(said)
    talk.words += len(text.split()) + len(answer.split())
    talk.turns += 1
    return answer


async def hold(port: int, *, words: int, summary: bool, tokens: int) -> Talk:
    table, talk = tomllib.loads(SCRIPT.read_text("utf-8")), Talk()
    facts, questions = table["fact"], small_talk(table["small_talk"])
    config = {
        "modalities": ["text"],
        "instructions": INSTRUCTIONS,
        "history_summary": summary,
        "sampling": {"max_tokens": tokens, "temperature": 0},
    }

    async def turn(text: str) -> str:
        answer = await say(session, text, talk)
        await pause(port, len(answer.split()) / WORDS_PER_SEC)
        return answer

    async with connect(f"ws://127.0.0.1:{port}/v1/streaming_input", config=config) as session:
        for number, fact in enumerate(facts):
            await turn(fact["tell"])
            if number % 2:
                await turn(next(questions))
        while talk.words < words:
            await turn(next(questions))
        for fact in facts:
            answer = await turn(fact["ask"])
            talk.right.append(re.search(fact["right"], answer, re.IGNORECASE) is not None)
            print(f"    {'+' if talk.right[-1] else '-'} {fact['ask']} {answer}", flush=True)
    return talk


def main(arguments: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.minds.long_talk", description=__doc__)
    parser.add_argument("--llm", default="qwen", help="the mind [qwen]")
    parser.add_argument("--words", type=int, default=THREE_HOURS, help=f"the length of the talk [{THREE_HOURS}]")
    parser.add_argument("--history", type=int, default=4096, help="limits.max_history_tokens [4096]")
    parser.add_argument("--tokens", type=int, default=48, help="the longest answer [48]")
    parser.add_argument("--only", choices=("with", "without"), help="one of the two talks")
    options = parser.parse_args(arguments)
    met = True
    for summary in (True, False):
        if options.only not in (None, "with" if summary else "without"):
            continue
        parts = ("--llm", options.llm, "--asr", "none", "--tts", "espeak")
        with serving(*parts, "--limits.max-history-tokens", str(options.history)) as (port, _):
            began = time.perf_counter()
            talk = asyncio.run(hold(port, words=options.words, summary=summary, tokens=options.tokens))
            seconds = time.perf_counter() - began
            counts = {name: int(float(count)) for name, count in _SUMMARIES.findall(read_metrics(port))}
        right = sum(talk.right)
        print(
            f"{'with' if summary else 'without'} summaries: {right} of {len(talk.right)} facts; {talk.turns} turns, "
            f"{talk.words} words, {seconds:.0f} s; first text after {percentile(talk.waits, 0.5):.2f} s (p50), "
            f"{percentile(talk.waits, 0.95):.2f} s (p95); summaries {counts}",
            flush=True,
        )
        met = met and (not summary or right >= WANTED)
    return met


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
