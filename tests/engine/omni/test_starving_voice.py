"""Both voices behind a Thinker in simulated time: real Talkers and vocoders, through their stages, to a player.

While text lasts, a Talker makes a frame for each token that the Thinker writes: speech without a pause needs 12.5
tokens a second for Qwen3, 50 for Qwen2.5.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_ws.engine.omni.step_process import Codes, LoadedModel, TalkerItem, VocoderInput

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from support.engine_answers import reading  # noqa: E402
from support.omni_reference import (  # noqa: E402
    CASE,
    Spoken,
    greedy,
    reference,
)
from support.tiny_models import Family, omni_checkpoint  # noqa: E402

from omni_ws.engine.base import AudioOutput  # noqa: E402
from omni_ws.engine.channel import (  # noqa: E402
    Stage,
    frames_link,
    pipeline,
)
from omni_ws.engine.omni import slot_talker  # noqa: E402
from omni_ws.engine.omni.step_process import (  # noqa: E402  # noqa: E402
    AnswerEnd,
    OmniTalker,
    VocoderStage,
)


class TimedModel:
    """In place of a StepProcess; ``step_ms`` is how long a step takes. Entering it starts its work."""

    def __init__(self, loaded: LoadedModel, *, step_ms: float) -> None:
        self.model, self.facts = loaded
        #: What the model has made, by session.
        self._made: dict[int, asyncio.Queue[Any]] = {}
        self._step_ms = step_ms
        self._changed = asyncio.Event()
        self._numbers = itertools.count()

    @property
    def ms_per_frame(self) -> float:
        return 0.0

    async def __aenter__(self) -> Any:
        self._working = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[_TimedSession]:
        number = next(self._numbers)
        self.model.open(number, settings)
        self._made[number] = asyncio.Queue()
        try:
            yield _TimedSession(self, number)
        finally:
            self.model.close(number)
            del self._made[number]

    async def _work(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self.model.busy:
                results = self.model.step()
                await asyncio.sleep(self._step_ms / 1000)
                for session, item in results:
                    if session in self._made:
                        self._made[session].put_nowait(item)


class _TimedSession:
    """In place of a StepSession."""

    def __init__(self, owner: TimedModel, number: int) -> None:
        self._owner = owner
        self._number = number

    async def feed(self, item: TalkerItem | VocoderInput) -> None:
        self._owner.model.feed(self._number, item)
        self._owner._changed.set()

    def grant(self, frames: int) -> None:
        self._owner.model.grant(self._number, frames)
        self._owner._changed.set()

    async def decode(self, item: VocoderInput) -> NDArray[np.float32]:
        await self.feed(item)
        made: NDArray[np.float32] = await self._owner._made[self._number].get()
        return made

    async def __aiter__(self) -> AsyncIterator[Codes]:
        while True:
            codes: Codes = await self._owner._made[self._number].get()
            yield codes
            if codes.end is not None:
                return


pytestmark = [pytest.mark.vllm, pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

#: How long a step takes, in milliseconds.
TALKER_MS, VOCODER_MS = {Family.QWEN25: 1.0, Family.QWEN3: 5.0}, 2.0
#: The duration of a codec frame, and so of a token while text lasts.
FRAME_MS = {Family.QWEN25: 20.0, Family.QWEN3: 80.0}
#: Rows of the answer; the codes go on for some time after them.
ROWS, FRAMES = {Family.QWEN25: 110, Family.QWEN3: 30}, {Family.QWEN25: 140, Family.QWEN3: 36}
#: Of the answer, the rows that the first sound needs.
FIRST = {Family.QWEN25: 24, Family.QWEN3: 1}

FAMILIES = pytest.mark.parametrize("family", Family)


@cache
def answer(family: Family) -> Spoken:
    return reference(family).speak(CASE["text"], text_tokens=ROWS[family] + 1, codec_frames=1)


@cache
def talker(family: Family) -> LoadedModel:
    model, facts = slot_talker.talker(str(omni_checkpoint(family)), 2, 768)
    return model, facts


@cache
def vocoder(family: Family) -> LoadedModel:
    """As it is loaded, but for the solver's steps, of which there is one and not nine."""
    with patch("omni_ws.engine.omni.vocoder.ODE_STEPS", 2):
        return slot_talker.vocoder(str(omni_checkpoint(family)), 2)


@dataclass
class Heard:
    """When the Thinker's rows came, and the sound: milliseconds, and (milliseconds, duration)."""

    rows: list[float] = field(default_factory=list)
    chunks: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        return self.chunks[0][0]

    def silence_ms(self, buffer_ms: float = 0.0) -> float:
        """How long a player pauses that begins ``buffer_ms`` after the first sound has come."""
        silent, played_to = 0.0, self.first_ms + buffer_ms
        for arrived, duration in self.chunks:
            silent += max(0.0, arrived - played_to)
            played_to = max(arrived, played_to) + duration
        return silent


#: What was heard at the pace of speech, which several tests ask for: on the virtual clock it is always the same.
_heard_at_pace: dict[Family, Heard] = {}


async def hear_at_pace(family: Family) -> Heard:
    """The answer of a Thinker that writes just as fast as is spoken."""
    if family not in _heard_at_pace:
        _heard_at_pace[family] = await hear(family, FRAME_MS[family])
    return _heard_at_pace[family]


async def hear(family: Family, intervals_ms: float | list[float]) -> Heard:
    """Speak an answer whose Thinker takes so long for each row."""
    loop, heard = asyncio.get_running_loop(), Heard()
    began = loop.time()
    intervals = intervals_ms if isinstance(intervals_ms, list) else [intervals_ms] * ROWS[family]

    async def thinker() -> AsyncIterator[TalkerItem]:
        yield answer(family).prompt_rows()
        for row, interval in enumerate(intervals):
            await asyncio.sleep(interval / 1000)
            heard.rows.append((loop.time() - began) * 1000)
            yield answer(family).answer_rows(row, row + 1)
        yield AnswerEnd()

    async with (
        TimedModel(talker(family), step_ms=TALKER_MS[family]) as speaking,
        TimedModel(vocoder(family), step_ms=VOCODER_MS) as decoding,
    ):
        hosts: tuple[Any, Any] = (speaking, decoding)
        stages: list[Stage[Any]] = [
            OmniTalker(hosts[0], greedy(family, max_tokens=FRAMES[family]), frame_ms=FRAME_MS[family]),
            VocoderStage(hosts[1], block=decoding.facts["block"], clock=loop.time),
        ]
        async with reading(partial(pipeline, thinker(), stages, [frames_link(FRAME_MS[family])])) as outputs:
            async for output in outputs:
                assert isinstance(output, AudioOutput)
                duration = len(output.samples) * 1000 / output.sample_rate
                heard.chunks.append(((loop.time() - began) * 1000, duration))
    lost = 555 / 24 if family is Family.QWEN3 else 0
    assert sum(duration for _, duration in heard.chunks) == pytest.approx(FRAMES[family] * FRAME_MS[family] - lost)
    return heard


@FAMILIES
async def test_the_first_sound_comes_after_so_many_rows_and_before_the_next(family: Family) -> None:
    """Also where the Thinker writes just as fast as is spoken."""
    heard = await hear_at_pace(family)
    before, after = heard.rows[FIRST[family] - 1 : FIRST[family] + 1]
    assert before < heard.first_ms < after
    if family is Family.QWEN25:
        # Its first window makes twelve codes sound.
        assert heard.chunks[0][1] == 240


@FAMILIES
async def test_a_faster_thinker_leaves_no_pause(family: Family) -> None:
    heard = await hear(family, FRAME_MS[family] / 4)
    assert heard.silence_ms() == 0


@FAMILIES
async def test_a_thinker_as_fast_as_speech_needs_a_buffer(family: Family) -> None:
    """A window of Qwen2.5 comes 34 codes later, in terms of the sound before it, than the first sound did."""
    heard = await hear_at_pace(family)
    lead = {Family.QWEN25: 700.0, Family.QWEN3: 60.0}[family]
    assert 0 < heard.silence_ms() < lead
    assert heard.silence_ms(lead) == 0


@FAMILIES
async def test_a_slower_thinker_costs_what_it_lacks(family: Family) -> None:
    """No sound is lost or made up, and once the text has ended the Talker waits for nobody."""
    needed = FRAME_MS[family]
    heard = await hear(family, needed * 1.25)
    lacking = ROWS[family] * needed * 0.25
    assert lacking - FRAMES[family] * needed * 0.1 < heard.silence_ms() < lacking + 500
    behind = FRAMES[family] - ROWS[family]
    assert heard.chunks[-1][0] < heard.rows[-1] + behind * TALKER_MS[family] + 20 * VOCODER_MS


@FAMILIES
async def test_a_pause_of_the_thinker_is_ridden_over(family: Family) -> None:
    """It was twice as fast as speech before, so that what was sent is ahead of the player."""
    rows, fast = ROWS[family], FRAME_MS[family] / 2
    half = rows // 2
    lead = half * fast
    heard = await hear(family, [fast] * half + [lead / 2] + [fast] * (rows - half - 1))
    assert heard.silence_ms(500 if family is Family.QWEN25 else 0) == 0
