"""Time from the Thinker's first clause to the first audio, and underruns of a player."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.engine_answers import Input, streamed
from support.tiny_models import ENGINE_ARGS, build_codec, build_talker, build_text_model, write_talker_profile
from support.vllm_engine import request, running_engine

from benchmarks.vllm_parts.report import Report, Size, milliseconds
from omni_ws.core.chunks import OutputModality
from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.clauses import ClauseSplitter
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.talker import FIRST_COMMA_AFTER, FIRST_LONGEST

MOST_UNTIL_SOUND_SEC: Final = 0.150
AT_ONCE: Final = (1, 2)
#: An answer has several clauses, and about ten seconds of audio.
TOKENS: Final = 250
FRAMES: Final = 120
BOTH: Final = frozenset({OutputModality.TEXT, OutputModality.AUDIO})


@dataclass(frozen=True, slots=True)
class Spoken:
    """``until_sound`` counts from the end of the first clause; ``arrivals`` has time and duration of each chunk."""

    until_sound: float
    seconds: float
    arrivals: Sequence[tuple[float, float]]

    @property
    def sound(self) -> float:
        return sum(duration for _, duration in self.arrivals)

    @property
    def real_time_factor(self) -> float:
        """Real-time factor: below 1, audio is synthesised faster than it is played."""
        return self.seconds / self.sound

    @property
    def pause(self) -> float:
        """Total underrun of a player that starts with the first chunk and plays in real time."""
        played_until, paused = self.arrivals[0][0], 0.0
        for arrived, duration in self.arrivals:
            paused += max(0.0, arrived - played_until)
            played_until = max(played_until, arrived) + duration
        return paused


async def measure(report: Report, size: Size, models: Path) -> None:
    profile = write_talker_profile(models / "talker.toml", build_codec(models / "codec"))
    talker: dict[str, Any] = {
        "talker": str(build_talker(models / "talker")),
        "talker_profile": str(profile),
        "talker_args": dict(ENGINE_ARGS),
    }
    report.table(
        f"Spoken answers of {FRAMES} codec frames, while the Thinker writes {TOKENS} tokens",
        *("at once", "answers", "first clause → first sound, ms", "real-time factor, median (most)"),
        *("faster than real time", "of those, players that had to wait"),
    )
    async with running_engine(build_text_model(models / "text"), ENGINE_ARGS, **talker) as engine:
        await _speak(engine, 0)
        for at_once in AT_ONCE:
            answers: list[Spoken] = []
            for round_ in range(4 * size.rounds // at_once):
                seeds = range(1 + round_ * at_once, 1 + (round_ + 1) * at_once)
                answers += await asyncio.gather(*(_speak(engine, seed) for seed in seeds))
            _add(report, at_once, answers)


def _add(report: Report, at_once: int, answers: Sequence[Spoken]) -> None:
    until_sound = sorted(answer.until_sound for answer in answers)
    factors = sorted(answer.real_time_factor for answer in answers)
    quick = [answer for answer in answers if answer.real_time_factor < 1]
    starved = [answer for answer in quick if answer.pause > 0]
    median = until_sound[len(until_sound) // 2]
    target = "" if at_once > 1 else f"; ≤ {MOST_UNTIL_SOUND_SEC * 1000:g}"
    met = at_once > 1 or median <= MOST_UNTIL_SOUND_SEC
    verdict = "" if at_once > 1 else (": met" if met else ": MISSED")
    report.met = report.met and met
    report.row(
        str(at_once),
        str(len(answers)),
        milliseconds(until_sound) + target + verdict,
        f"{factors[len(factors) // 2]:.2f} ({factors[-1]:.2f})",
        str(len(quick)),
        f"{len(starved)}; 0" + "".join(f", {answer.pause * 1000:.0f} ms" for answer in starved),
        met=not starved,
    )


async def _speak(engine: VllmEngine, seed: int) -> Spoken:
    splitter = ClauseSplitter(first_comma_after=FIRST_COMMA_AFTER, first_longest=FIRST_LONGEST)
    wanted = request(
        Input(f"Say number {seed}."),
        modalities=BOTH,
        # Greedy, models of random weights do not end before they must, so that a clause sounds as long as it would be
        # read. A Talker that samples may end one after a frame, and what follows is not written yet.
        sampling={"temperature": 0.0, "max_tokens": TOKENS},
        stage_sampling={"talker": {"temperature": 0.0, "max_tokens": 7 * FRAMES}},
    )
    began = time.perf_counter()
    clause = 0.0
    arrivals: list[tuple[float, float]] = []
    async for output in streamed(engine, wanted):
        now = time.perf_counter()
        if isinstance(output, TextOutput) and splitter.feed(output.text):
            clause = clause or now
        elif isinstance(output, AudioOutput):
            arrivals.append((now, len(output.samples) / output.sample_rate))
    if not arrivals or not clause:
        raise RuntimeError("nothing was said")
    return Spoken(arrivals[0][0] - clause, time.perf_counter() - began, arrivals)
