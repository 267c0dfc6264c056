"""Compares a replayed answer with the recorded one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import numpy as np

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import AudioFormat
from omni_ws.errors import OmniError
from omni_ws.replay.answers import Answers, ReplayedAnswer

#: Close codes of drain and time-outs, which depend on timing and are not compared.
ORDERLY_CLOSE_CODES: Final = frozenset({1001, 1012, 4408})

#: Tolerances for synthesised audio of the same text.
LENGTH_TOLERANCE_MS: Final = 100.0
LENGTH_TOLERANCE: Final = 0.05
LEVEL_TOLERANCE_DB: Final = 1.5
#: Level of digital silence.
_SILENCE_DB: Final = -100.0
#: Characters of a text that are shown.
_SHOWN: Final = 60


class Comparison(StrEnum):
    """How strictly answers are compared."""

    #: Audio byte by byte.
    EXACT = "exact"
    #: Audio by its length and level.
    FULL = "full"
    #: No audio: for another voice or engine.
    TEXT = "text"
    NONE = "none"


def differences(then: Answers, now: Answers, comparison: Comparison) -> list[str]:
    """Describes the differences between the answers of two sessions; empty if they are the same."""
    if comparison is Comparison.NONE:
        return []
    found: list[str] = []
    if len(then.answers) != len(now.answers):
        found.append(f"answers: {len(then.answers)} recorded, {len(now.answers)} replayed")
    for place, (old, new) in enumerate(zip(then.answers, now.answers, strict=False)):
        found += [f"answer {place}: {difference}" for difference in _differences(old, new, comparison)]
    if then.errors != now.errors:
        found.append(f"errors: {_names(then.errors)} recorded, {_names(now.errors)} replayed")
    for number, (was, is_) in enumerate(zip(then.ends, now.ends, strict=False)):
        ended = {end for end in (was, is_) if end.startswith("server")}
        if was != is_ and ended and not any(int(end.split()[1]) in ORDERLY_CLOSE_CODES for end in ended):
            found.append(f"end of connection {number}: {was} recorded, {is_} replayed")
    return found


def _differences(old: ReplayedAnswer, new: ReplayedAnswer, comparison: Comparison) -> Iterator[str]:
    # The length of an answer that was cut short depends on timing.
    partial = old.is_partial and (new.is_partial or old.finish_reason is None)
    if old.finish_reason is not None and old.finish_reason != new.finish_reason:
        yield f"finish_reason: {old.finish_reason} recorded, {new.finish_reason} replayed"
    if old.errors != new.errors:
        yield f"errors: {_names(old.errors)} recorded, {_names(new.errors)} replayed"
    for name in ("text", "transcript", "tool_calls"):
        was, is_ = getattr(old, name), getattr(new, name)
        if not (_agree(was, is_) if partial else was == is_):
            yield f"{name}: {_shown(was)} recorded, {_shown(is_)} replayed"
    if comparison is not Comparison.TEXT and not (same_audio(old, new, partial=partial)):
        yield from _audio_differences(old, new, exact=comparison is Comparison.EXACT, partial=partial)


def same_audio(old: ReplayedAnswer, new: ReplayedAnswer, *, partial: bool = False) -> bool:
    """Compares audio byte by byte; if ``partial``, up to the end of the shorter one."""
    size = min(len(old.audio), len(new.audio)) if partial else None
    return old.format == new.format and old.audio[:size] == new.audio[:size]


def _audio_differences(old: ReplayedAnswer, new: ReplayedAnswer, *, exact: bool, partial: bool) -> Iterator[str]:
    if exact:
        yield f"audio: {len(old.audio)} bytes recorded, {len(new.audio)} different bytes replayed"
        return
    if partial:
        return  # different lengths have different levels
    try:
        was, is_ = _samples(old), _samples(new)
    except OmniError as error:
        yield f"audio: cannot be decoded: {error.message}"
        return
    then_ms, now_ms = _length_ms(old, was), _length_ms(new, is_)
    if abs(then_ms - now_ms) > max(LENGTH_TOLERANCE_MS, LENGTH_TOLERANCE * then_ms):
        yield f"audio: {then_ms:.0f} ms recorded, {now_ms:.0f} ms replayed"
    elif abs(level_db(was) - level_db(is_)) > LEVEL_TOLERANCE_DB:
        yield f"audio level: {level_db(was):.1f} dB recorded, {level_db(is_):.1f} dB replayed"


def _samples(answer: ReplayedAnswer) -> Samples:
    """Decodes the audio at its own rate. Raises OmniError."""
    source = answer.format or AudioFormat()
    with AudioDecoder(source, sample_rate=source.sample_rate) as decoder:
        return np.concatenate([*decoder.pieces(bytes(answer.audio)), decoder.flush()])


def _length_ms(answer: ReplayedAnswer, samples: Samples) -> float:
    return len(samples) * 1000 / (answer.format or AudioFormat()).sample_rate


def level_db(samples: Samples) -> float:
    """RMS level in dB relative to full scale."""
    power = float(np.mean(np.square(samples, dtype=np.float64))) if len(samples) else 0.0
    return max(_SILENCE_DB, 10 * math.log10(power)) if power > 0 else _SILENCE_DB


def _agree(was: str, is_: str) -> bool:
    return was.startswith(is_) or is_.startswith(was)


def _names(errors: list[str]) -> str:
    return ", ".join(errors) or "none"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
