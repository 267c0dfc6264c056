"""While a tool runs, and what the model is told afterwards: a scripted LLM by URL behind the real parts."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from support.scripted_upstream import ScriptedUpstream, delta, finish, streams, text_of

from benchmarks.manners.over_answers import final_of, is_over
from benchmarks.manners.rows import Bench, Figure, share
from benchmarks.manners.stimuli import RATE, Plan, Stimulus, render, spoken
from benchmarks.server_process import free_port, serving
from omni_ws.caller.live_caller import LiveCaller, NativeWire
from omni_ws.caller.script import PIECE_MS
from omni_ws.transport.http.exchange import HttpExchange

_ASKED: Final = "What is the weather in Rome?"
_RESULT: Final = "It is sunny in Rome, and as warm as twenty four degrees."
_MEANWHILE: Final = "How far away is the moon?"
_MOON: Final = (
    "The moon is about three hundred and eighty thousand kilometers away. Light takes little more than a second for "
    "that. A car that never stops would need half a year."
)
_STORY: Final = " ".join(
    f"In chapter {number} the keeper of the lighthouse climbs the stairs and looks for ships in the fog."
    for number in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
)
_TOOL: Final = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
#: The longest wait for the first word, and the longest silence behind it.
_FIRST_MS, _SILENT_MS = 3000, 9000
#: Words by which the history may differ from what was heard by the pace.
_WORDS_OFF: Final = 3
Making = Callable[[argparse.Namespace, Plan, int], Bench]
Row = Callable[[argparse.Namespace, Making], Coroutine[Any, Any, tuple[list[Figure], list[str]]]]


def _model(upstream: ScriptedUpstream) -> Callable[[HttpExchange], Awaitable[None]]:
    """The LLM: it calls the tool for the weather, tells results, and tells of the moon or a story."""

    async def answer(exchange: HttpExchange) -> None:
        messages = upstream.requests[-1]["messages"]
        said = text_of(messages[-1])
        if messages[-1]["role"] == "tool":
            words = _RESULT
        elif "weather" in said:
            function = {"name": "weather", "arguments": '{"city": "Rome"}'}
            call = {"index": 0, "id": f"call_{len(upstream.requests)}", "type": "function", "function": function}
            await streams(delta(role="assistant"), delta(tool_calls=[call]), finish("tool_calls"))(exchange)
            return
        else:
            words = _MOON if "moon" in said else _STORY
        await streams(delta(role="assistant"), *(delta(content=f"{word} ") for word in words.split()), finish())(
            exchange
        )

    return answer


@asynccontextmanager
async def _served(options: argparse.Namespace, making: Making) -> AsyncIterator[tuple[ScriptedUpstream, Bench]]:
    async with AsyncExitStack() as stack:
        upstream = ScriptedUpstream()
        upstream.chat = [_model(upstream)]
        await stack.enter_async_context(upstream.serve())
        port = free_port()
        server = serving("--llm", upstream.url, "--log-level", "warning", port=port)
        await asyncio.to_thread(stack.enter_context, server)
        yield upstream, making(options, Plan.of(options.share), port)


@dataclass(frozen=True, slots=True)
class Waited:
    """What was heard while a tool ran. Times are in milliseconds."""

    name: str
    first_ms: float | None
    longest_ms: float
    #: How often the result was told, and whether the question in between was answered to its end.
    told: int
    answered: bool | None


async def _wait_for_tool(bench: Bench, seconds: float, *, asks_after: float | None) -> Waited:
    """Ask for the weather, whose tool takes so long; ``asks_after`` that many seconds something else is asked."""
    name = f"a tool of {seconds:g} s" + ("" if asks_after is None else f", a question after {asks_after:g} s")
    tools = [{"type": "function", "function": _TOOL}] if bench.kind == "native" else [{"type": "function", **_TOOL}]
    async with bench.talker(config={"tools": tools}) as talker:
        asked = talker.now
        await talker.type(_ASKED)
        if not await talker.until(lambda: bool(talker.since(asked, "call")), 20_000):
            return Waited(name, None, 0, 0, None)
        call, called = talker.since(asked, "call")[0], talker.now
        question = None
        if asks_after is not None:
            await talker.wait(asks_after * 1000)
            question = talker.now
            await talker.type(_MEANWHILE)
        await talker.wait(seconds * 1000 - (talker.now - called) * PIECE_MS)
        given = talker.now
        await talker.give(call.name, "sunny, 24 degrees")

        def result() -> str | None:
            return next((one for one, text in talker.texts.items() if "sunny" in text), None)

        await talker.until(lambda: result() is not None and is_over(talker, result() or ""), 30_000)
        await talker.until(lambda: talker.speaker.idle, 10_000)
        played = talker.speaker.played
        first = next((one.tick for one in played if one.tick >= asked), None)
        begun = next((one.tick for one in played if one.answer == result()), None)
        last = talker.now if begun is None else begun
        return Waited(
            name,
            None if first is None else (first - asked) * PIECE_MS,
            0 if first is None else talker.speaker.longest_gap_ms(first, max(last, given)),
            sum(text.count("sunny") for text in talker.texts.values()),
            None if question is None else _heard_whole(talker, "kilometers"),
        )


def _heard_whole(talker: LiveCaller, word: str) -> bool:
    """Whether the answer with a word was played to its end."""
    return any(final_of(talker, name) in ("stop", "completed") for name, text in talker.texts.items() if word in text)


async def tools(options: argparse.Namespace, making: Making) -> tuple[list[Figure], list[str]]:
    """Tools of 10 and 30 s, with and without a question meanwhile."""
    cases: list[tuple[float, float | None]] = [(10, None), (30, None), (10, 3.0), (8, 6.5)]
    async with _served(options, making) as (_, bench):

        async def wait(case: tuple[float, float | None]) -> Waited:
            return await _wait_for_tool(bench, case[0], asks_after=case[1])

        found = await bench.each(cases, wait)
    notes = [
        f"tool: {one.name}: first word after {one.first_ms} ms, longest silence {one.longest_ms} ms, "
        f"told {one.told} times, the question was answered: {one.answered}"
        for one in found
    ]
    figures = []
    for one in found[:2]:
        soon = one.first_ms is not None and one.first_ms <= _FIRST_MS
        first = "never" if one.first_ms is None else f"{one.first_ms / 1000:.1f} s"
        figures += [
            Figure(f"{one.name}: first word", first, "≤ 3 s", soon),
            Figure(
                "… longest silence behind it", f"{one.longest_ms / 1000:.1f} s", "≤ 9 s", one.longest_ms <= _SILENT_MS
            ),
        ]
    asked = [one for one in found if one.answered is not None]
    once = sum(one.told == 1 for one in found)
    figures += [
        Figure(
            "questions meanwhile that are answered whole",
            *share(sum(map(bool, (one.answered for one in asked))), len(asked), target=100, least=True),
        ),
        Figure("results told exactly once", *share(once, len(found), target=100, least=True)),
    ]
    return figures, notes


# What the model is told


async def words(options: argparse.Namespace, making: Making) -> tuple[list[Figure], list[str]]:
    """Whether the history has what was heard, by the messages that the model is given.

    Over an answer an acknowledgement is said, and later a question that stops it. The voice has no word times: what was
    heard is counted by its pace.
    """
    notes: list[str] = []
    right = total = left = 0
    opening = ". ".join(_STORY.split(". ")[:3]) + "."
    await asyncio.to_thread(render, [("hibari", opening)])
    pace = 1000 * len(spoken("hibari", opening)) / RATE / len(opening.split())
    async with _served(options, making) as (upstream, bench):
        said = [one.make() for one in bench.plan.acknowledgements[:6]]
        questions = [one for one in (each.make() for each in bench.plan.interruptions) if not one.quiet]
        bench.parallel = 1  # whose messages these are is told by their order
        for stimulus, question in zip(said, questions, strict=False):
            found = await _told(bench, upstream, stimulus, question)
            if found is None:
                notes.append(f"words: {stimulus.name}, {question.name}: nothing to compare, the answer ended otherwise")
                continue
            heard, kept, messages = found[0] / pace, *found[1:]
            total += 1
            fits = abs(heard - kept) <= max(_WORDS_OFF, 0.15 * heard)
            right += fits
            left += messages > 0
            if not fits or messages:
                notes.append(
                    f"words: {stimulus.name}, {question.name}: about {heard:.0f} words heard, {kept} in the history, "
                    f"{messages} messages of the acknowledgement"
                )
    return [
        Figure(
            f"history of an interrupted answer: the words that were heard (± {_WORDS_OFF}, by the voice's pace)",
            *share(right, total, target=100, least=True),
        ),
        Figure("… acknowledgements in the history", *share(left, total, target=0)),
    ], notes


async def _told(
    bench: Bench, upstream: ScriptedUpstream, stimulus: Stimulus, question: Stimulus
) -> tuple[float, int, int] | None:
    """Milliseconds heard, words in the history, and messages of the user between; None without any to compare."""
    if bench.kind != "native":
        return None
    async with bench.talker() as talker:
        assert isinstance(talker.wire, NativeWire)
        begun = talker.now
        await talker.type("Tell me the story of the lighthouse.")
        await talker.until(lambda: talker.speaker.heard_ms(begun, talker.now) > 2500, 20_000)
        if (place := talker.speaker.position) is None:
            return None
        answer = place[0]
        talker.say(stimulus.samples)
        await talker.wait(4000)
        if is_over(talker, answer):
            return None
        talker.say(question.samples)
        if not await talker.until(lambda: is_over(talker, answer), 6000):
            return None
        await talker.wait(500)
        asked = len(upstream.requests)
        await talker.type(_MEANWHILE)
        if not await talker.until(lambda: len(upstream.requests) > asked, 10_000):
            return None
        messages = upstream.requests[-1]["messages"]
        told = [n for n, one in enumerate(messages) if one["role"] == "assistant" and "chapter" in text_of(one)]
        heard = talker.speaker.heard_ms(begun, talker.now, [answer])
        kept = len(text_of(messages[told[0]]).split()) if told else 0
        # Before the answer there is one message of the user, the request for the story.
        before = [one for one in messages[: told[0]] if one["role"] == "user"] if told else []
        return heard, kept, max(0, len(before) - 1)


ROWS_OF_TOOLS: Final[Mapping[str, Row]] = {"tools": tools, "words": words}
