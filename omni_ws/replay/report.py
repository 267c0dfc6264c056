"""Reports the result of a replay, as text or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from omni_ws.replay.answers import Answers, ReplayedAnswer
from omni_ws.replay.compare import same_audio

_Moment: TypeAlias = Callable[[ReplayedAnswer], float | None]
_MOMENTS: Final[tuple[tuple[str, str, _Moment], ...]] = (
    ("first output", "first_output_ms", lambda answer: answer.first_output_at),
    ("first audio", "first_audio_ms", lambda answer: answer.first_audio_at),
    ("final", "final_ms", lambda answer: answer.final_at),
)
#: Up to this many sessions are all listed; of more, only those that differ.
_MAX_LISTED: Final = 10


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one replayed session. ``now`` is None if it could not be replayed."""

    path: Path
    copy: int
    then: Answers
    now: Answers | None
    differences: Sequence[str]

    @property
    def is_equal(self) -> bool:
        return self.now is not None and not self.differences

    def pairs(self) -> Iterator[tuple[ReplayedAnswer, ReplayedAnswer]]:
        """Yields recorded and replayed answers by place, as far as both exist."""
        yield from zip(self.then.answers, self.now.answers if self.now else (), strict=False)


def as_text(results: Sequence[Result]) -> str:
    """Formats the report for a terminal."""
    lines: list[str] = []
    for result in results:
        if len(results) <= _MAX_LISTED or not result.is_equal:
            lines += _session(result, in_detail=len(results) <= _MAX_LISTED)
    equal = sum(result.is_equal for result in results)
    lines.append(f"{len(results)} sessions replayed: {equal} equal, {len(results) - equal} different")
    lines += _summary(results)
    return "\n".join(lines)


def _session(result: Result, *, in_detail: bool) -> Iterator[str]:
    yield f"{result.path} (copy {result.copy}): {'equal' if result.is_equal else 'DIFFERENT'}"
    for difference in result.differences:
        yield f"  {difference}"
    if in_detail:
        for place, (then, now) in enumerate(result.pairs()):
            times = [
                f"{name} {_ms(then.latency(moment(then)))} → {_ms(now.latency(moment(now)))}"
                for name, _, moment in _MOMENTS
                if moment(then) is not None or moment(now) is not None
            ]
            same = ", the same audio bytes" if now.audio and same_audio(then, now) else ""
            yield f"  answer {place} ({now.finish_reason}{same}): {'; '.join(times)}"


def _summary(results: Sequence[Result]) -> Iterator[str]:
    pairs = [pair for result in results for pair in result.pairs()]
    for name, _, moment in _MOMENTS:
        then = _latencies([pair[0] for pair in pairs], moment)
        now = _latencies([pair[1] for pair in pairs], moment)
        if then and now:
            yield (
                f"{name:>12}: p50 {_ms(_at(then, 0.5))} → {_ms(_at(now, 0.5))}, "
                f"p95 {_ms(_at(then, 0.95))} → {_ms(_at(now, 0.95))} (recorded → replayed, {len(now)} answers)"
            )


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Builds the report for programs."""
    return {
        "equal": all(result.is_equal for result in results),
        "sessions": [
            {
                "recording": str(result.path),
                "copy": result.copy,
                "equal": result.is_equal,
                "differences": list(result.differences),
                "answers": [
                    {
                        "finish_reason": now.finish_reason,
                        "same_audio_bytes": same_audio(then, now),
                        "recorded": _times(then),
                        "replayed": _times(now),
                    }
                    for then, now in result.pairs()
                ],
            }
            for result in results
        ],
    }


def _times(answer: ReplayedAnswer) -> dict[str, float | None]:
    return {key: _rounded(answer.latency(moment(answer))) for _, key, moment in _MOMENTS}


def _latencies(answers: Sequence[ReplayedAnswer], moment: _Moment) -> list[float]:
    found = (answer.latency(moment(answer)) for answer in answers)
    return sorted(latency for latency in found if latency is not None)


def _at(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} ms"
