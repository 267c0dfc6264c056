"""``python -m benchmarks.minds.long_talk [--llm MIND] [--words N]``: what a mind knows at the end of a long talk.

One session has a typed talk as long as three hours are when it is spoken (27,000 words at 150 a minute). In its first
ten minutes the user tells twenty facts, between small talk; more small talk follows; at the end the user asks for each
fact. Then a session without summaries (``history_summary``) is given the same talk as its ``history_items``, and asked
the same. The user types at once, but for a pause in which a person would hear the answer, at the pace of speech: the
pause ends when the server has nothing left to do.

``--given``: the answers of the talk are not made but taken from the script, and the whole talk is given to the first
session, too, before it is summed up: minutes in place of hours. ``--words`` makes the talk shorter, and ``--history``
(``limits.max_history_tokens``) the part of it that the model is shown, so that a short talk outgrows that as often. The
wait is from the end of the input to the first text.
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
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final

from benchmarks.embedded import percentile
from benchmarks.minds.spoken import serving
from omni_ws.client import connect
from omni_ws.client.events import TextChunk
from omni_ws.client.session import ClientSession
from omni_ws.wire.openai_requests import MAX_HISTORY_ITEMS

SCRIPT: Final = Path(__file__).with_name("long_talk.toml")
WORDS_PER_SEC: Final = 2.5
THREE_HOURS: Final = 27_000
#: The facts that are to be answered rightly with summaries.
WANTED: Final = 16
#: The longest break in which a talk that was given is summed up.
BREAK_SEC: Final = 1200.0
INSTRUCTIONS: Final = (
    "You are a friendly assistant in a long talk. Answer in one short sentence. Use what the user has told you earlier."
)
_BUSY: Final = re.compile(r"^omni_ws_engine_active_requests\{.*\} (\S+)$", re.MULTILINE)
_SUMMARIES: Final = re.compile(r'^omni_ws_summaries_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
#: How often the server is asked whether it works, and how often it has not, before the pause ends.
_LOOK_SEC: Final = 0.1
_LOOKS: Final = 3
#: Turns from one line of progress to the next.
_TOLD_TURNS: Final = 50


@dataclass(slots=True)
class Talk:
    """A talk: what was said, by item of the history, and how long the user waited."""

    items: list[dict[str, str]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def words(self) -> int:
        return sum(len(item["content"].split()) for item in self.items)


def small_talk(table: dict[str, Any]) -> Iterator[str]:
    """The questions of the small talk, no two of one topic close together; at their end they begin again."""
    for question, topic in cycle(product(table["questions"], table["topics"])):
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
    talk.items += ({"role": "user", "content": text}, {"role": "assistant", "content": answer})
    return answer


async def hold(session: ClientSession, port: int, talk: Talk, script: dict[str, Any], *, words: int) -> None:
    """Tell the facts, and talk on until so many words were said."""
    questions = small_talk(script["small_talk"])

    async def turn(text: str) -> None:
        answer = await say(session, text, talk)
        await pause(port, len(answer.split()) / WORDS_PER_SEC)

    for number, fact in enumerate(script["fact"]):
        await turn(fact["tell"])
        if number % 2:
            await turn(next(questions))
    while talk.words < words:
        await turn(next(questions))
        if len(talk.waits) % _TOLD_TURNS == 0:
            print(f"{len(talk.waits)} turns, {talk.words} words; first text after {waits_of(talk)}", flush=True)


def given(talk: Talk, script: dict[str, Any], *, words: int) -> None:
    """Make the talk by the script alone."""
    questions, answers = small_talk(script["small_talk"]), script["small_talk"]["answers"]

    def turn(text: str, answer: str) -> None:
        talk.items.extend(({"role": "user", "content": text}, {"role": "assistant", "content": answer}))

    for number, fact in enumerate(script["fact"]):
        turn(fact["tell"], script["small_talk"]["replies"][number % 4])
        if number % 2:
            turn(next(questions), answers[number % len(answers)])
    while talk.words < words:
        turn(next(questions), answers[len(talk.items) // 2 % len(answers)])


async def ask(session: ClientSession, script: dict[str, Any], *, how: str) -> int:
    """Ask for all facts; return how many answers are right."""
    found, talk = 0, Talk()
    for fact in script["fact"]:
        answer = await say(session, fact["ask"], talk)
        right = re.search(fact["right"], answer, re.IGNORECASE) is not None
        found += right
        print(f"    {'+' if right else '-'} {fact['ask']} {answer}", flush=True)
    print(f"{how}: {found} of {len(script['fact'])} facts; first text after {waits_of(talk)}", flush=True)
    return found


def waits_of(talk: Talk) -> str:
    return f"{percentile(talk.waits, 0.5):.2f} s (p50), {percentile(talk.waits, 0.95):.2f} s (p95)"


async def measure(port: int, *, words: int, tokens: int, is_given: bool) -> bool:
    script, talk, url = tomllib.loads(SCRIPT.read_text("utf-8")), Talk(), f"ws://127.0.0.1:{port}/v1/streaming_input"
    config = {
        "modalities": ["text"],
        "instructions": INSTRUCTIONS,
        "sampling": {"max_tokens": tokens, "temperature": 0},
    }
    began, first = time.perf_counter(), {**config, "history_summary": True}
    if is_given:
        given(talk, script, words=words)
        if len(talk.items) > MAX_HISTORY_ITEMS:
            raise SystemExit(
                f"a talk of {len(talk.items)} messages cannot be given, only {MAX_HISTORY_ITEMS}: take fewer --words"
            )
        first["history_items"] = talk.items
    async with connect(url, config=first) as session:
        if is_given:
            await pause(port, BREAK_SEC)
        else:
            await hold(session, port, talk, script, words=words)
        counts = {name: int(float(count)) for name, count in _SUMMARIES.findall(read_metrics(port))}
        history = await session.history()
        waited = f"; first text after {waits_of(talk)}" if talk.waits else ""
        notes = history[0]["content"] if history[0]["role"] == "summary" else "-"
        print(
            f"{len(talk.items) // 2} turns with {talk.words} words in {time.perf_counter() - began:.0f} s{waited}; "
            f"summaries {counts}; the notes:\n{notes}",
            flush=True,
        )
        right = await ask(session, script, how="with summaries")
    second = {**config, "history_summary": False, "history_items": talk.items[-MAX_HISTORY_ITEMS:]}
    async with connect(url, config=second) as session:
        await ask(session, script, how="without")
    return right >= WANTED


def main(arguments: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.minds.long_talk", description=__doc__)
    parser.add_argument("--llm", default="qwen", help="the mind [qwen]")
    parser.add_argument("--words", type=int, default=THREE_HOURS, help=f"the length of the talk [{THREE_HOURS}]")
    parser.add_argument("--history", type=int, default=4096, help="limits.max_history_tokens [4096]")
    parser.add_argument("--tokens", type=int, default=48, help="the longest answer [48]")
    parser.add_argument("--given", action="store_true", help="take the answers of the talk from the script")
    options = parser.parse_args(arguments)
    parts = ("--llm", options.llm, "--asr", "none", "--tts", "espeak", "--llm.first-byte-timeout-sec", "600")
    with serving(*parts, "--limits.max-history-tokens", str(options.history)) as (port, _):
        return asyncio.run(measure(port, words=options.words, tokens=options.tokens, is_given=options.given))


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
