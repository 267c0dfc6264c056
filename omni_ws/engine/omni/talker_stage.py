"""OmniTalker: the stage that speaks an answer with the Talker of an omni model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import numpy as np

from omni_ws.engine.base import EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.omni.items import AnswerEnd, AnswerRows, Codes, CodesEnd, PromptReset, PromptRows, TalkerItem
from omni_ws.engine.omni.sessions import TalkerProcess, TalkerSession
from omni_ws.engine.pipeline import StageLink
from omni_ws.profiler import events

#: The names in ``stage_sampling.talker``. ``max_tokens`` limits the codec frames of the answer.
OMNI_TALKER_SAMPLING: Final = frozenset({"temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens"})

#: How much sound may be on its way to the vocoder, in milliseconds.
AHEAD_MS: Final = 5_000.0

#: The link from the Thinker, in rows. Beyond it, the Thinker waits for the Talker to take what there is.
ROWS_LINK: Final = StageLink(1_024, lambda item: len(item.tokens) if isinstance(item, PromptRows | AnswerRows) else 1)

#: Sent to the vocoder first, so that its slot is taken with the Talker's. An answer whose Talker has ended still holds
#: a slot of the vocoder; without this, the next one would be refused when it is half written.
_NO_CODES: Final = Codes(np.zeros((0, 0), np.int64))


class OmniTalker:
    """A Stage of one request: TalkerItems in, Codes out.

    ``settings`` are those of a session in the Talker's process: ``voice``, and the names in OMNI_TALKER_SAMPLING. The
    session is opened with the first row of the answer: until then somebody may still be speaking, for minutes. The
    prompt waits here, as it would in the process. A source that ends without an answer, such as one of tool calls
    alone, takes no slot and makes no sound.
    """

    name = "talker"

    def __init__(self, process: TalkerProcess, settings: Mapping[str, Any]) -> None:
        #: Rows of prompt and answer that the Talker was given, and frames that it made, for the usage of the request.
        self.prompt_tokens = 0
        self.tokens = 0
        #: Whether speech was cut off by ``max_tokens`` or by the longest speech of the model.
        self.cut = False
        self._process = process
        self._settings = settings
        self._speaks = False

    async def run(
        self, source: AsyncIterator[TalkerItem], sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None:
        """Hand rows to the process as they come, and its frames on, as far as the vocoder keeps up."""
        assert sink is not None, "the Talker requires a stage after it"
        begun = await self._begun_answer(source)
        if not self._speaks:
            return
        async with self._process.open(self._settings) as session:
            await sink.put(_NO_CODES)
            session.grant(max(1, round(AHEAD_MS / self._process.frame_ms)))
            feeding = asyncio.create_task(self._feed(session, begun, source), name="talker rows")
            speaking = asyncio.create_task(self._speak(session, sink), name="talker codes")
            try:
                await asyncio.wait((feeding, speaking), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    await feeding
                await speaking
            finally:
                for task in (feeding, speaking):
                    task.cancel()
                await asyncio.gather(feeding, speaking, return_exceptions=True)
        # Speech may end before the text does, which is written to its end.
        async for _ in source:
            pass

    async def _begun_answer(self, source: AsyncIterator[TalkerItem]) -> list[TalkerItem]:
        """Everything up to the first row of the answer; ``_speaks`` says whether there is one."""
        begun: list[TalkerItem] = []
        async for item in source:
            if isinstance(item, AnswerEnd):
                break
            if isinstance(item, PromptReset):
                begun.clear()
            begun.append(item)
            self._count(item)
            if self._speaks:
                break
        return begun

    async def _feed(self, session: TalkerSession, begun: list[TalkerItem], source: AsyncIterator[TalkerItem]) -> None:
        """Hand on all rows; an answer whose end does not come ends with the source."""
        for item in begun:
            await session.feed(item)
        begun.clear()  # not kept for as long as the answer lasts
        async for item in source:
            if isinstance(item, AnswerEnd):
                break
            self._count(item)
            await session.feed(item)
        await session.feed(AnswerEnd())

    async def _speak(self, session: TalkerSession, sink: Channel[Codes]) -> None:
        async for codes in events.generated(self.name, aiter(session)):
            frames = len(codes.codes)
            self.tokens += frames
            self.cut = codes.end is CodesEnd.LENGTH
            await sink.put(codes)
            if frames:
                session.grant(frames)

    def _count(self, item: TalkerItem) -> None:
        match item:
            case PromptRows(tokens=tokens):
                self.prompt_tokens += len(tokens)
            case AnswerRows(tokens=tokens):
                self.prompt_tokens += len(tokens)
                self._speaks = self._speaks or len(tokens) > 0
            case PromptReset():
                self.prompt_tokens = 0
