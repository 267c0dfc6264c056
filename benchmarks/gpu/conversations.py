"""Conversations that answer at the same time: what a Talker and a vocoder take for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.models import Vocoder
from benchmarks.gpu.shapes import Family, OmniShape
from omni_ws.engine.omni.slot_talker import SlotTalker
from omni_ws.engine.omni.step_process import AnswerEnd, AnswerRows, PromptRows, VocoderInput

#: Tokens of the user's turn.
_PROMPT_TOKENS = 200
#: Tokens of the benchmark's texts are below this.
_TOKENS = 4_000
#: The largest chunk for a vocoder that takes any, and the growth from chunk to chunk.
_LARGEST, _GROWTH = 24, 2


@dataclass
class Spoken:
    """What conversations took: seconds from the first token of the answer to the first sound, and in all."""

    first_sounds: list[float] = field(default_factory=list)
    wall: float = 0.0
    #: Seconds of sound of the shortest answer.
    sound: float = 0.0

    @property
    def real_time_factor(self) -> float:
        return self.wall / self.sound


@dataclass
class _Answer:
    """The codec frames of an answer that are queued for the vocoder, and the size of its next chunk."""

    waiting: list[NDArray[np.int64]] = field(default_factory=list)
    frames: int = 0
    chunk: int = 1
    in_work: bool = False
    ended: bool = False
    sent_last: bool = False
    first_sound: float | None = None

    def take(self, *, adaptive: bool) -> VocoderInput | None:
        """Return the next codes for the vocoder; None if it works, or is to wait for a whole chunk."""
        held = sum(len(codes) for codes in self.waiting)
        if self.in_work or self.sent_last or not (self.ended or held >= (self.chunk if adaptive else 1)):
            return None
        codes = np.concatenate(self.waiting) if self.waiting else None
        if codes is None:
            return None
        count = min(held, self.chunk) if adaptive else held
        self.waiting = [codes[count:]] if count < held else []
        self.chunk = min(_LARGEST, self.chunk * _GROWTH)
        self.in_work = True
        self.sent_last = self.ended and not self.waiting
        return VocoderInput(codes[:count], last=self.sent_last)


def ask(talker: SlotTalker, shape: OmniShape, count: int, **settings: Any) -> None:
    """Open sessions 0, 1, … and compute their prompts."""
    begin, end = shape.prompt
    for session in range(count):
        talker.open(session, {"seed": session, **settings})
        rng = np.random.default_rng(session)
        tokens = np.concatenate((begin, rng.integers(0, _TOKENS, _PROMPT_TOKENS), end)).astype(np.int64)
        talker.feed(
            session,
            PromptRows(
                tokens,
                np.tile(np.arange(len(tokens)), (3, 1)),
                np.full(len(tokens), shape.family is Family.QWEN25),
                _states(shape, len(tokens), rng),
            ),
        )
    while talker.busy:
        talker.step()


def answer(talker: SlotTalker, shape: OmniShape, count: int, *, frames: int) -> None:
    """Give all sessions their answers' rows at once, and leave to make ``frames`` frames."""
    for session in range(count):
        rng = np.random.default_rng(1_000 + session)
        tokens = rng.integers(0, _TOKENS, frames)
        talker.feed(session, AnswerRows(tokens, _states(shape, frames, rng)))
        talker.feed(session, AnswerEnd())
        talker.grant(session, frames)


def frame_seconds(
    talker: SlotTalker, shape: OmniShape, count: int, *, frames: int, wait: Callable[[], None]
) -> list[float]:
    """Return what each step takes in which ``count`` sessions get a frame each; ``wait`` waits for the device."""
    ask(talker, shape, count)
    answer(talker, shape, count, frames=frames)
    taken = []
    while talker.busy:
        began = time.perf_counter()
        talker.step()
        wait()
        taken.append(time.perf_counter() - began)
    for session in range(count):
        talker.close(session)
    return taken


def converse(talker: SlotTalker, vocoder: Vocoder, shape: OmniShape, count: int, *, frames: int) -> Spoken:
    """Let ``count`` sessions speak ``frames`` frames each, Talker and vocoder taking turns on one thread."""
    ask(talker, shape, count)
    answers = {session: _Answer() for session in range(count)}
    for session in answers:
        vocoder.open(session, {})
    adaptive = shape.family is Family.QWEN3
    began = time.perf_counter()
    answer(talker, shape, count, frames=frames)
    while talker.busy or vocoder.busy:
        for session, made in talker.step() if talker.busy else ():
            state = answers[session]
            if len(made.codes):
                state.waiting.append(_decodable(made.codes, shape))
                state.frames += len(made.codes)
            state.ended = made.end is not None or state.frames >= frames
        for session, state in answers.items():
            if (item := state.take(adaptive=adaptive)) is not None:
                vocoder.feed(session, item)
        for session, samples in vocoder.step() if vocoder.busy else ():
            state = answers[session]
            state.in_work = False
            if len(samples) and state.first_sound is None:
                state.first_sound = time.perf_counter() - began
    spoken = Spoken(wall=time.perf_counter() - began)
    spoken.first_sounds = [state.first_sound for state in answers.values() if state.first_sound is not None]
    spoken.sound = min(state.frames for state in answers.values()) * shape.frame_ms / 1000
    for session in answers:
        talker.close(session)
        vocoder.close(session)
    return spoken


def _decodable(codes: NDArray[np.int64], shape: OmniShape) -> NDArray[np.int64]:
    """Return codes that the vocoder has: made weights speak codes that trained ones never would."""
    return codes % 2_048 if shape.family is Family.QWEN3 else codes % 8_192


def _states(shape: OmniShape, count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    rows = count if shape.family is Family.QWEN25 else 0
    return rng.standard_normal((rows, shape.thinker_size), np.float32)
