"""The middle stage of a composition: it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Usage
from omni_ws.engine.answer_limit import SpokenLimit, count_words
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.channel import Channel, Outputs, StageLink
from omni_ws.engine.composed.parts import Role, failures_of, mode_of
from omni_ws.engine.composed.patience import Patience
from omni_ws.errors import EngineFailed

#: Text that is written and not yet spoken, in characters: beyond it the LLM waits for the TTS.
SPEECH_LINK: Final = StageLink(2000, cost=len)


class LlmStage:
    """A Stage of one request: chunks in; the answer to the client, and its text to the TTS.

    The LLM reads the input as it arrives, so it may work ahead. With ``words_only`` speech has become text before it:
    where the input then ends without anything, because speech had no words, the LLM's request is withdrawn, and the
    answer is ``EngineCapabilities.nothing_heard``.

    ``transcribed`` and ``spoken`` say that other parts make the transcript and the audio. An answer that is spoken and
    calls a tool without a word says ``tool_filler`` behind the call, unless it answers the result of one: what is said
    is part of its text. Where the client named no limit, a spoken answer ends with a whole sentence within
    ``max_spoken_tokens``, and the finish reason is LENGTH. Raises EngineFailed where nothing comes for
    ``first_byte_timeout_sec`` after the end of the input.
    """

    name = Role.LLM.value

    def __init__(
        self,
        engine: Engine,
        request: GenerationRequest,
        *,
        words_only: bool,
        transcribed: bool,
        spoken: bool,
        first_byte_timeout_sec: float | None,
        tool_filler: str = "",
        max_spoken_tokens: int | None = None,
    ) -> None:
        #: How the answer ended; None until then.
        self.finished: Finished | None = None
        self._engine = engine
        self._request = request
        self._words_only = words_only
        self._spoken = spoken
        self._writes = request.tells_text
        dropped = {TranscriptOutput: transcribed, AudioOutput: spoken, TextOutput: not self._writes}
        self._dropped = tuple(kind for kind, drop in dropped.items() if drop)
        self._first_byte_timeout_sec = first_byte_timeout_sec
        #: Until the first output.
        self._patience: Patience | None = None
        #: What is said with the first tool call, unless something was written before; empty for nothing.
        self._filler = tool_filler if spoken else ""
        self._limit = None
        if spoken and max_spoken_tokens is not None and "max_tokens" not in request.sampling:
            self._limit = SpokenLimit(max_spoken_tokens)
        self._given: _GivenInput | None = None
        self._outputs: Outputs | None = None
        self._sink: Channel[Any] | None = None

    async def run(self, source: AsyncIterator[InputChunk], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Answer the input."""
        self._outputs, self._sink = outputs, sink
        self._patience = patience = Patience(self._first_byte_timeout_sec)
        given = self._given = _GivenInput(patience.watched(source), must_have_content=self._words_only)
        request = replace(self._request, input=given, input_mode=mode_of(self._engine), sink=self)
        if self._spoken:
            request = replace(request, modalities=frozenset({OutputModality.TEXT}), voice=None, speed=1.0)
        try:
            async with asyncio.timeout(None) as given.withdrawal, patience.limiting(Role.LLM, self._engine):
                await self._answer(request)
        except TimeoutError:
            await self._answer_silence()
        if self.finished is None:
            raise EngineFailed(f"LLM ({self._engine.name}): the answer has no end", param=self.name)

    async def _answer(self, request: GenerationRequest) -> None:
        with failures_of(Role.LLM, self._engine, request_id=request.request_id):
            async with aclosing(self._engine.generate(request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    self._hear_from_llm()
                    if isinstance(output, Finished):
                        await self._finish(output)
                        return
                    await self._put(output)
                    if self._limit is not None and self._limit.reached:
                        self.finished = Finished(FinishReason.LENGTH, self._usage(self._limit.tokens))
                        return

    async def _finish(self, finished: Finished) -> None:
        rest = "" if self._limit is None else self._limit.finish(cut=finished.reason is FinishReason.LENGTH)
        if rest:
            await self._send(TextOutput(rest))
        await self._fill(finished)
        self.finished = finished

    def _usage(self, output_tokens: int) -> Usage:
        """That of an answer that was cut off here: as the LLM counts it, or estimated."""
        assert self._given is not None
        history = sum(count_words(message.text) for message in self._request.history)
        estimated = Usage(input_tokens=self._given.words + history, output_tokens=output_tokens)
        return self._request.meter.read() or estimated

    @property
    def _answers_tool(self) -> bool:
        return self._given is not None and self._given.has_tool_result

    async def _fill(self, finished: Finished) -> None:
        """Say something while the client runs the tools that this answer calls."""
        if self._filler and finished.reason is FinishReason.TOOL_CALLS and not self._answers_tool:
            await self._send(TextOutput(self._filler))

    def _hear_from_llm(self) -> None:
        if self._patience is not None:
            self._patience.stop()
            self._patience = None

    async def _answer_silence(self) -> None:
        text = self._engine.capabilities.nothing_heard
        if text:
            await self._send(TextOutput(text))
        self.finished = Finished(FinishReason.STOP, Usage(output_tokens=count_words(text)))

    def offer(self, output: EngineOutput) -> bool:
        """See OutputSink; for the LLM."""
        self._hear_from_llm()
        outputs, sink = self._outputs, self._sink
        if outputs is None or type(output) is Finished or (sink is not None and sink.full):
            return False
        said = output.text if type(output) is TextOutput else ""
        if said and self._limit is not None and not self._limit.passes(said):
            return False
        if not isinstance(output, self._dropped) and not outputs.offer(output):
            return False
        if said and self._limit is not None:
            self._limit.count(said)
        if said and sink is not None and not sink.closed:
            self._filler = ""
            sink.put_nowait(said)
        return True

    async def _put(self, output: EngineOutput) -> None:
        """Pass on an output of the LLM, as far as it may be said."""
        if self._limit is not None and type(output) is TextOutput:
            said = self._limit.feed(output.text)
            if said != output.text:
                output = TextOutput(said, () if said else output.logprobs)
            if not said:
                return
        await self._send(output)

    async def _send(self, output: EngineOutput) -> None:
        """Pass an output on, once there is room for it."""
        outputs, sink = self._outputs, self._sink
        assert outputs is not None
        if not isinstance(output, self._dropped):
            await outputs.put(output)
        if sink is not None and type(output) is TextOutput and output.text and not sink.closed:
            self._filler = ""
            await sink.put(output.text)


class _GivenInput:
    """The InputSource of the LLM, which withdraws the request where it ends without the content that it must have."""

    def __init__(self, source: AsyncIterator[InputChunk], *, must_have_content: bool) -> None:
        #: Ends the LLM's request when it expires.
        self.withdrawal: asyncio.Timeout | None = None
        self.has_tool_result = False
        #: Of the text in it.
        self.words = 0
        self._source = source
        self._empty = must_have_content

    def __aiter__(self) -> AsyncIterator[InputChunk]:
        return self

    async def __anext__(self) -> InputChunk:
        try:
            chunk = await anext(self._source)
        except StopAsyncIteration:
            if self._empty and self.withdrawal is not None:
                loop = asyncio.get_running_loop()
                self.withdrawal.reschedule(loop.time())
                await loop.create_future()  # for ever: the end would be answered
            raise
        self._empty = False
        if chunk.modality is Modality.TEXT:
            self.words += count_words(chunk.payload.decode())
        self.has_tool_result = self.has_tool_result or chunk.tool_call_id is not None
        return chunk
