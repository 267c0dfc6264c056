"""The sessions of a Talker and of a vocoder in their processes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from omni_ws.engine.omni.items import AnswerRows, Codes, PromptRows, TalkerItem, VocoderInput, VocoderOutput
from omni_ws.engine.omni.sessions import TalkerSession, VocoderSession
from omni_ws.engine.omni.step_process import StepProcess, StepSession

#: The most rows in a message: 64 states of 3584 values are 0.9 MB.
ROWS_PER_MESSAGE: Final = 64
#: What a message costs besides its rows, in bytes.
_OVERHEAD_BYTES: Final = 128
#: The weight of the latest measurement in the moving average.
_SMOOTHING: Final = 0.3


class _TalkerSession:
    """See TalkerSession."""

    def __init__(self, session: StepSession) -> None:
        self._session = session

    async def feed(self, item: TalkerItem) -> None:
        for piece in _pieces(item):
            await self._session.feed(piece, _cost(piece))

    def grant(self, frames: int) -> None:
        self._session.grant(frames)

    async def __aiter__(self) -> AsyncIterator[Codes]:
        async for codes in self._session.made:
            yield codes
            if codes.end is not None:
                return


class TalkerHost:
    """A TalkerProcess. ``frame_ms`` is the duration of its codec frames in milliseconds."""

    def __init__(self, process: StepProcess, *, frame_ms: float) -> None:
        self.process = process
        self.frame_ms = frame_ms

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[TalkerSession]:
        """See TalkerProcess; raises EngineOverloaded without a free slot."""
        async with self.process.open(settings) as session:
            yield _TalkerSession(session)


class _VocoderSession:
    """See VocoderSession."""

    def __init__(self, host: VocoderHost, session: StepSession) -> None:
        self._host = host
        self._session = session

    async def decode(self, item: VocoderInput) -> VocoderOutput:
        began = time.monotonic()
        await self._session.feed(item, item.codes.nbytes + _OVERHEAD_BYTES)
        made: VocoderOutput = await anext(self._session.made)
        self._host.note(len(item.codes), time.monotonic() - began)
        return made


class VocoderHost:
    """A VocoderProcess; the figures are those of its model."""

    def __init__(self, process: StepProcess, *, sample_rate: int, frame_ms: float, context_frames: int) -> None:
        self.process = process
        self.sample_rate = sample_rate
        self.frame_ms = frame_ms
        self.context_frames = context_frames
        #: The average time from ``decode`` to its result, in milliseconds per frame with context; 0 if unknown.
        self.ms_per_frame = 0.0

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[VocoderSession]:
        """See VocoderProcess; raises EngineOverloaded without a free slot."""
        async with self.process.open(settings) as session:
            yield _VocoderSession(self, session)

    def note(self, frames: int, seconds: float) -> None:
        """Take a measurement into the average."""
        if frames:
            per_frame = seconds * 1000 / (frames + self.context_frames)
            weight = _SMOOTHING if self.ms_per_frame else 1.0
            self.ms_per_frame += weight * (per_frame - self.ms_per_frame)


def _pieces(item: TalkerItem) -> Iterator[TalkerItem]:
    """Cut an item with many rows, so that each message is short and a close never waits behind a long one."""
    if not isinstance(item, PromptRows | AnswerRows) or len(item.tokens) <= ROWS_PER_MESSAGE:
        yield item
        return
    done = 0  # of the states, which are fewer than the tokens
    for start in range(0, len(item.tokens), ROWS_PER_MESSAGE):
        part = slice(start, start + ROWS_PER_MESSAGE)
        if isinstance(item, AnswerRows):
            yield replace(item, tokens=item.tokens[part], hidden=item.hidden[part])
        else:
            count = int(item.states[part].sum())
            yield PromptRows(
                item.tokens[part], item.positions[:, part], item.states[part], item.hidden[done : done + count]
            )
            done += count


def _cost(item: TalkerItem) -> int:
    if isinstance(item, PromptRows | AnswerRows):
        return item.tokens.nbytes + item.hidden.nbytes + _OVERHEAD_BYTES
    return _OVERHEAD_BYTES
