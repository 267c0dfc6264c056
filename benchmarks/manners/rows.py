"""The rows of the table: what is run, by how many talkers at once, and what of it is a figure with a target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from benchmarks.manners.over_answers import Over, Through, answer_through, say_over
from benchmarks.manners.stimuli import (
    Plan,
    Planned,
    Stimulus,
    babble,
    noises_of_the_body,
    surroundings,
    television,
)
from benchmarks.manners.turns import Said, hear_alone, say_sentence
from omni_ws.caller.live_caller import (
    Echo,
    LiveCaller,
    NativeWire,
    RealtimeWire,
    SettingsRefused,
    Wire,
)
from omni_ws.caller.script import Target

T = TypeVar("T")
R = TypeVar("R")
#: Stimuli over an answer that share a session.
_A_SESSION: Final = 8
ECHOES: Final = tuple(Echo(level, delay) for level in (-20.0, -12.0, -6.0) for delay in (40, 120, 250))


@dataclass(frozen=True, slots=True)
class Figure:
    """A cell of the table. ``target`` is what it may be at most or at least; None: it is told only.

    ``timed`` figures depend on the load of the machine.
    """

    name: str
    value: str
    target: str = ""
    met: bool | None = None
    timed: bool = False


def share(count: int, of: int, *, target: float, least: bool = False) -> tuple[str, str, bool | None]:
    """Value, target and verdict of a share in percent."""
    if not of:
        return "–", f"{'≥' if least else '≤'} {target:g} %", None
    found = 100 * count / of
    met = found >= target if least else found <= target
    return f"{count} of {of} ({found:.0f} %)", f"{'≥' if least else '≤'} {target:g} %", met


def quantiles(
    values: Iterable[float | None], *, p50: float | None = None, p90: float | None = None
) -> tuple[str, str, bool | None]:
    """Value, target and verdict of times in milliseconds."""
    known = [value for value in values if value is not None]
    wanted = [f"p{which} ≤ {most:g}" for which, most in ((50, p50), (90, p90)) if most is not None]
    target = ", ".join(wanted) + (" ms" if wanted else "")
    if not known:
        return "–", target, None
    middle, high = (float(one) for one in np.quantile(known, (0.5, 0.9)))
    met = (p50 is None or middle <= p50) and (p90 is None or high <= p90)
    return f"p50 {middle:.0f}, p90 {high:.0f} ms (n {len(known)})", target, met if wanted else None


@dataclass
class Bench:
    """A server and how it is spoken to: ``kind`` is native, semantic (/v1/realtime with semantic_vad) or default."""

    target: Target
    plan: Plan
    share: float
    kind: str = "native"
    parallel: int = 2
    #: How many times slower than the world's the clock of the talkers runs.
    slower: float = 1.0
    #: Settings that the server did not take.
    refused: set[str] = field(default_factory=set)
    conversations: int = 0
    closed: list[str] = field(default_factory=list)
    #: What did not go as it should, for a person to read.
    notes: list[str] = field(default_factory=list)

    def wire(self, *, echo: bool = False, config: dict[str, Any] | None = None) -> Wire:
        """A wire with the settings of the row, less those that the server does not know."""
        if self.kind == "native":
            turns: dict[str, Any] = {} if "duck" in self.refused else {"duck": True}
            audio = {"input_audio": {"echo": "server"}} if echo and "echo" not in self.refused else {}
            return NativeWire(turns, {**audio, **(config or {})})
        turns = {"type": "semantic_vad" if self.kind == "semantic" else "server_vad"}
        return RealtimeWire(turns, config or {})

    @asynccontextmanager
    async def talker(
        self, *, echo: Echo | None = None, config: dict[str, Any] | None = None
    ) -> AsyncIterator[LiveCaller]:
        """A conversation; it counts as closed if the server ends it."""
        while True:
            wire = self.wire(echo=echo is not None, config=config)
            try:
                async with LiveCaller(self.target, wire, echo=echo, slower=self.slower) as talker:
                    self.conversations += 1
                    yield talker
                if talker.closed is not None:
                    self.closed.append(talker.closed)
                return
            except SettingsRefused as error:
                unknown = next((name for name in ("duck", "echo") if name in str(error)), None)
                if unknown is None or unknown in self.refused:
                    raise
                self.refused.add(unknown)

    async def each(self, items: Sequence[T], run: Callable[[T], Awaitable[R]]) -> list[R]:
        """Run all, so many at a time."""
        turnstile = asyncio.Semaphore(self.parallel)

        async def one(item: T) -> R:
            async with turnstile:
                return await run(item)

        return list(await asyncio.gather(*map(one, items)))

    def note(self, row: str, item: str, what: str) -> None:
        self.notes.append(f"{row}: {item}: {what}")

    def some(self, items: Sequence[T], least: int = 2) -> list[T]:
        """A share of a list."""
        return list(items[: max(min(least, len(items)), round(self.share * len(items)))])


def _made(planned: Sequence[Planned]) -> list[Stimulus]:
    return [one.make() for one in planned]


async def _said_over(
    bench: Bench, stimuli: Sequence[Stimulus], *, is_meant: bool, echo: Echo | None = None
) -> list[Over]:
    count = max(1, min(_A_SESSION, -(-len(stimuli) // bench.parallel)))
    sessions = [stimuli[n : n + count] for n in range(0, len(stimuli), count)]

    async def one(some: Sequence[Stimulus]) -> list[Over]:
        async with bench.talker(echo=echo) as talker:
            return await say_over(talker, some, is_meant=is_meant)

    return [over for found in await bench.each(sessions, one) for over in found]


async def acknowledgements(bench: Bench) -> list[Figure]:
    """What a listener says who wants it to go on."""
    stimuli = _made(bench.plan.acknowledgements)
    found = await _said_over(bench, stimuli, is_meant=False)
    for one in found:
        if one.stopped:
            bench.note("acknowledgement", one.stimulus.name, f"stopped the answer; heard as {one.transcript!r}")
        elif one.gap_ms > 400:
            bench.note("acknowledgement", one.stimulus.name, f"a gap of {one.gap_ms:.0f} ms")
    went_on = [one for one in found if not one.stopped]
    noises = await _said_over(bench, bench.some(noises_of_the_body(), 3), is_meant=False)
    for one in noises:
        if one.stopped:
            bench.note("noise of the body", one.stimulus.name, f"stopped the answer; heard as {one.transcript!r}")
    lost = [one for one in found + noises if one.lost_ms > 40 or one.repeated_ms > 40]
    for one in lost:
        bench.note("words", one.stimulus.name, f"{one.lost_ms:.0f} ms lost, {one.repeated_ms:.0f} ms twice")
    return [
        Figure(
            "acknowledgements that stop the answer for good",
            *share(sum(one.stopped for one in found), len(found), target=5),
        ),
        Figure("… and are answered", *share(sum(one.answered for one in found), len(found), target=5)),
        Figure("audible gap of those that do not", *quantiles([one.gap_ms for one in went_on], p90=400)),
        Figure("… how long the answer is lowered", *quantiles([one.ducked_ms for one in went_on if one.ducked_ms])),
        Figure(
            "coughs, clicks and breaths that stop it", *share(sum(one.stopped for one in noises), len(noises), target=0)
        ),
        Figure("answers with sound lost or twice (> 40 ms)", *share(len(lost), len(found) + len(noises), target=0)),
    ]


async def interruptions(bench: Bench) -> list[Figure]:
    """What is meant to stop it."""
    found = await _said_over(bench, _made(bench.plan.interruptions), is_meant=True)
    for one in found:
        if not one.stopped:
            bench.note("interruption", one.stimulus.name, f"did not stop the answer; heard as {one.transcript!r}")
        elif one.stimulus.stops and one.answered:
            bench.note("stop word", one.stimulus.name, f"was answered; heard as {one.transcript!r}")
    words = [one for one in found if one.stimulus.stops]
    loud = [one for one in words if not one.stimulus.quiet]
    others = [one for one in found if not one.stimulus.stops]
    return [
        Figure(
            "real interruptions that stop", *share(sum(one.stopped for one in found), len(found), target=97, least=True)
        ),
        Figure("onset → lowered or silent", *quantiles([one.ducked_at for one in found], p90=250), timed=True),
        Figure("onset → silent", *quantiles([one.silent_at for one in found], p90=900), timed=True),
        Figure(
            "stop words (≥ -26 dBFS) that stop",
            *share(sum(one.stopped for one in loud), len(loud), target=100, least=True),
        ),
        Figure("stop words that are answered", *share(sum(one.answered for one in words), len(words), target=10)),
        Figure(
            "other interruptions that are answered",
            *share(sum(one.answered for one in others), len(others), target=90, least=True),
        ),
    ]


async def _said(bench: Bench, planned: Sequence[Planned], *, words: bool = False) -> list[Said]:
    async def one(stimulus: Stimulus) -> Said:
        async with bench.talker() as talker:
            return await say_sentence(talker, stimulus, words=words)

    return await bench.each(_made(planned), one)


async def sentences(bench: Bench) -> list[Figure]:
    """Pauses within a sentence, and whole ones."""
    paused = await _said(bench, bench.plan.pauses)
    whole = await _said(bench, bench.plan.wholes)
    for one in paused + whole:
        if one.cuts:
            bench.note(
                "sentence", one.stimulus.name, f"cut; {one.cut_in_ms:.0f} ms of an answer; heard {one.transcripts}"
            )
        if one.ended_at is None:
            bench.note("sentence", one.stimulus.name, "its turn never ended")
    return [
        Figure(
            "pauses in a sentence that end the turn",
            *share(sum(one.cuts > 0 for one in paused), len(paused), target=15),
        ),
        Figure(
            "… with an answer heard before the end",
            *share(sum(one.cut_in_ms > 0 for one in paused), len(paused), target=3),
        ),
        Figure(
            "sentences with a pause: true end → end of the turn",
            *quantiles([one.ended_at for one in paused]),
            timed=True,
        ),
        Figure("whole sentences: cut", *share(sum(one.cuts > 0 for one in whole), len(whole), target=0)),
        Figure(
            "whole sentences: true end → end of the turn",
            *quantiles([one.ended_at for one in whole], p50=450, p90=1200),
            timed=True,
        ),
        Figure(
            "whole sentences: true end → first audio",
            *quantiles([one.answered_at for one in whole], p50=350),
            timed=True,
        ),
        Figure(
            "sentences whose turn never ends",
            *share(sum(one.ended_at is None for one in paused + whole), len(paused + whole), target=0),
        ),
    ]


async def dictations(bench: Bench) -> list[Figure]:
    """Numbers, spellings and lists in groups."""
    found = await _said(bench, bench.plan.dictations, words=True)
    gaps = sum(len(one.stimulus.gaps) for one in found)
    groups = sum(len(one.stimulus.groups) for one in found)
    lost = [(one, group) for one in found for group in one.lost]
    for one in found:
        if one.cuts or one.lost:
            bench.note("dictation", one.stimulus.name, f"{one.cuts} cuts; lost {one.lost}; heard {one.transcripts}")
    return [
        Figure("dictated items cut", *share(sum(one.cuts > 0 for one in found), len(found), target=10)),
        Figure("… gaps that end the turn", *share(sum(one.cuts for one in found), gaps, target=10)),
        Figure("… audibly", *share(sum(one.cut_in_ms > 0 for one in found), len(found), target=3)),
        Figure("groups of which no transcript has a word", *share(len(lost), groups, target=0)),
        Figure("dictations: true end → end of the turn", *quantiles([one.ended_at for one in found]), timed=True),
    ]


async def television_on(bench: Bench) -> list[Figure]:
    """News at -35 dBFS or babble at -38 dBFS: over an answer, and behind a question.

    Before the answer the talker says a sentence, from which the server learns the level of the caller's voice.
    """
    numbers = bench.some(range(8), 2)
    greeting = bench.plan.wholes[0].make()

    async def over(number: int) -> Through:
        sound = television(24, number) if number % 2 == 0 else babble(24, number)
        name = f"{'television' if number % 2 == 0 else 'babble'} {number}"
        async with bench.talker() as talker:
            await say_sentence(talker, greeting)
            return await answer_through(talker, name, sound, seconds=20)

    async def behind(stimulus: Stimulus) -> Said:
        number = int(stimulus.onset_ms)  # any, and always the same
        async with bench.talker() as talker:
            return await say_sentence(talker, stimulus, beside=television(20, number))

    through = await bench.each(numbers, over)
    asked = await bench.each(_made(bench.plan.wholes[: len(numbers)]), behind)
    for one in through:
        if not one.went_on or one.longest_gap_ms > 400:
            bench.note(
                "television",
                one.name,
                f"{one.stops} stops, {one.false_turns} turns, silent {one.silent_ms:.0f} ms, "
                f"at once {one.longest_gap_ms:.0f}",
            )
    for said in asked:
        if said.answered_at is None or said.answered_at > 2000:
            bench.note(
                "television",
                said.stimulus.name,
                f"answered after {said.answered_at} ms, turn ended after {said.ended_at}",
            )
    soon = sum(said.answered_at is not None and said.answered_at <= 2000 for said in asked)
    return [
        Figure(
            "television over an answer: it goes on",
            *share(sum(one.went_on for one in through), len(through), target=100, least=True),
        ),
        Figure("… longest silence in it", *quantiles([one.longest_gap_ms for one in through])),
        Figure("question in front of it: answered within 2 s", *share(soon, len(asked), target=87, least=True)),
        Figure(
            "… answered within 9 s",
            *share(sum(said.answered_at is not None for said in asked), len(asked), target=100, least=True),
        ),
    ]


async def echo(bench: Bench) -> list[Figure]:
    """Its own sound in the microphone of a client without a canceller, and a person who interrupts it there."""

    async def through(one: Echo) -> Through:
        async with bench.talker(echo=one) as talker:
            return await answer_through(talker, f"{one.level_db:g} dB, {one.delay_ms} ms", None, seconds=20)

    echoes = bench.some(ECHOES[4:] + ECHOES[:4], 3)
    found = await bench.each(echoes, through)
    for one in found:
        if one.stops or one.false_turns:
            bench.note(
                "echo", one.name, f"{one.stops} stops, {one.false_turns} false turns, silent {one.silent_ms:.0f} ms"
            )
    minutes = sum(one.minutes for one in found)
    stops = sum(max(one.stops, one.false_turns) for one in found)
    loud = [one.make() for one in bench.plan.interruptions]
    loud = [one for one in loud if not one.quiet][: max(4, round(20 * bench.share))]
    barged = await _said_over(bench, loud, is_meant=True, echo=Echo(-12.0, 120))
    for over in barged:
        if not over.stopped:
            bench.note("echo", over.stimulus.name, "did not stop the answer over its echo")
    tenth = 10 * stops / minutes if minutes else 0.0
    return [
        Figure(
            f"echo -20 to -6 dB, 40 to 250 ms: stops in {minutes:.1f} minutes",
            f"{stops} ({tenth:.1f} in 10)",
            "≤ 1 in 10 minutes",
            tenth <= 1,
        ),
        Figure(
            "… interruptions over it that stop",
            *share(sum(one.stopped for one in barged), len(barged), target=95, least=True),
        ),
    ]


async def surrounded(bench: Bench) -> list[Figure]:
    """Silence, noise, typing, music and doors: alone and over an answer."""

    async def one(named: tuple[str, Callable[[float], Any]]) -> tuple[str, int, int, Through]:
        name, sound = named
        seconds = 10 if bench.share < 0.5 else 30
        async with bench.talker() as talker:
            turns, answers = await hear_alone(talker, name, sound(seconds), seconds=seconds)
            through = await answer_through(talker, name, sound(15), seconds=14)
            return name, turns, answers, through

    found = await bench.each(list(surroundings().items()), one)
    for name, turns, answers, through in found:
        if turns or answers or through.false_turns:
            bench.note(
                "surroundings", name, f"{turns} turns and {answers} answers alone, {through.false_turns} over an answer"
            )
    return [
        Figure(
            "silence, noise, typing, music, doors: false turns alone",
            *share(sum(turns for _, turns, _, _ in found), len(found), target=0),
        ),
        Figure("… answers", *share(sum(answers for _, _, answers, _ in found), len(found), target=0)),
        Figure(
            "… turns over an answer", *share(sum(through.false_turns for *_, through in found), len(found), target=0)
        ),
    ]


ROWS: Final[dict[str, Callable[[Bench], Coroutine[Any, Any, list[Figure]]]]] = {
    "acknowledgements": acknowledgements,
    "interruptions": interruptions,
    "sentences": sentences,
    "dictations": dictations,
    "television": television_on,
    "echo": echo,
    "surroundings": surrounded,
}
#: The speech that each row needs.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "acknowledgements": ("acknowledgements",),
    "interruptions": ("interruptions",),
    "sentences": ("pauses", "wholes"),
    "dictations": ("dictations",),
    "television": ("news", "wholes"),
    "echo": ("interruptions",),
    "words": ("acknowledgements", "interruptions"),
}


def calls(bench: Bench) -> Figure:
    """How many of all conversations the server ended."""
    return Figure("calls closed", *share(len(bench.closed), bench.conversations, target=0))
