"""Answers that another server has begun: an engine goes on with them, or is asked for all of them again.

The server in which an answer began is gone, and the client has the beginning. ``go_on`` has an engine write the rest.
An engine that cannot go on by itself makes the whole answer again, and SameAnswer drops the part that the client has,
as long as it is the same. If it is not, the answer ends with an EngineFailed that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

import msgspec

from omni_ws.core.chunks import FinishReason, ToolCall, ToolCallFragment, Usage, Word
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputFilter,
    OutputWriter,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
)
from omni_ws.errors import EngineFailed

#: The calls of tools that were told of an answer, by their index in it.
ToldCalls: TypeAlias = Mapping[int, ToolCall]
NO_CALLS: Final[ToldCalls] = {}


def not_continued(why: str = "asked again, the model answers otherwise") -> EngineFailed:
    """Return the error that ends an answer which cannot be continued. The history keeps what was told of it."""
    return EngineFailed(f"the answer that another server had begun cannot be continued: {why}", keeps_answer=True)


def can_continue(engine: Engine, request: GenerationRequest) -> bool:
    """Whether ``engine`` goes on behind ``request.begun`` by itself.

    It cannot where a grammar holds the whole answer to a form, or where there are several answers.
    """
    options = request.options
    free = options.structure is None and request.tool_choice in (None, "auto", "none")
    plain = options.choices == 1 and not options.raw_prompt and options.input_role == "user"
    return free and plain and request.modalities <= engine.capabilities.continues


async def go_on(engine: Engine, request: GenerationRequest, out: OutputWriter, *, calls: ToldCalls = NO_CALLS) -> None:
    """Have ``engine`` answer ``request``; of an answer that was begun elsewhere, only the rest is written to ``out``.

    ``calls`` were told besides ``request.begun``. Raises ``not_continued``, and what ``Engine.generate`` raises.
    """
    if not calls and (not request.begun or can_continue(engine, request)):
        await engine.generate(request, out)
        return
    await rest_of(engine.generate, request, out, calls=calls)


async def rest_of(
    generate: Callable[[GenerationRequest, OutputWriter], Awaitable[None]],
    request: GenerationRequest,
    out: OutputWriter,
    *,
    calls: ToldCalls = NO_CALLS,
) -> None:
    """Have ``generate`` write the whole answer again, compare it, and write the rest. Raises as ``go_on``."""
    same = SameAnswer(out, request, calls)
    anew = replace(request, begun="", begun_end=None, voice_from=0, voice_from_ms=0)
    try:
        async with asyncio.timeout(None) as same.making:
            await generate(anew, same)
    except TimeoutError:
        if not same.differs:
            raise
    same.end()


def counted(finished: Finished, tokens: int) -> Finished:
    """Return ``finished`` with the usage of a whole answer, whose first ``tokens`` tokens were part of the prompt."""
    usage = finished.usage
    return replace(
        finished,
        usage=replace(
            usage, input_tokens=max(0, usage.input_tokens - tokens), output_tokens=usage.output_tokens + tokens
        ),
    )


class SameAnswer(OutputFilter):
    """An OutputWriter for an answer that is made again: drops what was told of it, and compares that.

    If the answer differs, it drops all the rest, and ends the engine's call by ``making``, a time-out around it. Audio
    up to ``voice_from_ms`` is dropped by its position.
    """

    def __init__(self, out: OutputWriter, request: GenerationRequest, calls: ToldCalls) -> None:
        super().__init__(out)
        self.making: asyncio.Timeout | None = None
        #: Whether the answer is another one than was told.
        self.differs = False
        self._told = request.begun
        self._meter = request.meter
        self._calls = calls
        #: The characters that are the same so far: of the text, and of the arguments of each call.
        self._same = 0
        self._same_arguments = dict.fromkeys(calls, 0)
        self._drop_ms = request.voice_from_ms
        self._dropped_ms = 0.0
        self._finished = False

    def write(self, output: EngineOutput) -> None:
        if self.differs:
            return
        match output:
            case TextOutput(text=text) if self._same < len(self._told):
                self._compare(output, text)
            case ThoughtOutput() if self._told or self._calls:
                pass  # it was told, if it was asked for
            case ToolCallOutput() if self._same < len(self._told):
                self._differ()
            case ToolCallOutput(call=call) if call.index in self._calls:
                self._compare_call(output, call, self._calls[call.index])
            case AudioOutput() if self._drop_ms:
                self._behind(output)
            case Finished():
                self._finished = True
                whole = self._same == len(self._told) and all(
                    same == len(self._calls[index].arguments) for index, same in self._same_arguments.items()
                )
                if whole:
                    self._out.write(output)
                else:
                    self._differ()
            case _:
                self._out.write(output)

    async def drain(self) -> None:
        """See OutputWriter."""
        await self._out.drain()
        if self.differs:
            await asyncio.sleep(0)  # the engine's call is about to be cancelled

    def end(self) -> None:
        """Raise ``not_continued`` if the answer differs. If all calls that were told are whole, it ends with them."""
        if not self.differs:
            return
        calls = self._calls.values()
        if not calls or not all(one.is_whole for one in calls):
            raise not_continued()
        usage = self._meter.read() or Usage(output_tokens=count_words(self._told))
        self._out.write(Finished(FinishReason.TOOL_CALLS, usage))

    def _differ(self) -> None:
        self.differs = True
        if self.making is not None and not self._finished:
            self.making.reschedule(asyncio.get_running_loop().time())

    def _compare(self, output: TextOutput, text: str) -> None:
        told = self._told[self._same : self._same + len(text)]
        if not text.startswith(told):
            self._differ()
            return
        self._same += len(told)
        if len(told) < len(text):
            self._out.write(msgspec.structs.replace(output, text=text[len(told) :], logprobs=()))

    def _compare_call(self, output: ToolCallOutput, call: ToolCallFragment, told: ToolCall) -> None:
        if call.name and told.name and call.name != told.name:
            self._differ()
            return
        same = self._same_arguments[call.index]
        expected = told.arguments[same : same + len(call.arguments)]
        if not call.arguments.startswith(expected):
            self._differ()
            return
        self._same_arguments[call.index] = same + len(expected)
        if len(expected) < len(call.arguments):
            rest = ToolCallFragment(call.index, arguments=call.arguments[len(expected) :])
            self._out.write(ToolCallOutput(rest, output.choice))

    def _behind(self, output: AudioOutput) -> None:
        """Pass on the audio behind ``_drop_ms``, with the words whose middle is there; times count from there."""
        begin_ms = self._dropped_ms
        self._dropped_ms += len(output.samples) * 1000 / output.sample_rate
        words = tuple(
            Word(one.text, round(one.start_ms - self._drop_ms), round(one.end_ms - self._drop_ms), one.text_end)
            for one in output.words
            if one.start_ms + one.end_ms > 2 * self._drop_ms  # places vary a little from one time to the next
        )
        skipped = max(0, round((self._drop_ms - begin_ms) * output.sample_rate / 1000))
        samples = output.samples[min(skipped, len(output.samples)) :]
        if len(samples) or words:
            self._out.write(AudioOutput(samples, output.sample_rate, words, output.text_end))
