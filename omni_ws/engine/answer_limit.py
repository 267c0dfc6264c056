"""Limits on answers (``max_tokens``, ``stop``, spoken length), and the rest of answers that another server began."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import msgspec

from omni_ws.core.chunks import FinishReason, ToolCall, ToolCallFragment, Usage, Word
from omni_ws.core.history import Message
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
from omni_ws.engine.clauses import pieces_of
from omni_ws.errors import EngineFailed

_WORDS: Final = re.compile(r"\S+")
#: The limit on white space held back after the last word, in characters; further white space is dropped.
MAX_HELD_SPACE: Final = 4096
#: The end of a sentence: marks, closing quotes and white space; or line breaks; or East Asian marks.
_SENTENCE_END: Final = re.compile(r"[.!?…]+[\"'”’)\]]*\s+|\n+|[。！？]+[」』”’）]*")
_CLAUSE_END: Final = re.compile(r"[,;:—–]\s+|[，、；：]")
#: Characters of scripts without spaces, each of which is about a token. In English a token has about 4 characters.
_WIDE: Final = "\u1100-\u11ff\u2e80-\ud7ff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
_CHARACTERS_PER_TOKEN: Final = 4
#: A word, or a character of these scripts, with the white space before it.
_UNIT: Final = re.compile(rf"\s*(?:[{_WIDE}]|[^\s{_WIDE}]+)|\s+")


def count_words(text: str) -> int:
    """Return the number of whitespace-separated words, the usage that engines without tokens report."""
    return len(text.split())


def count_history(history: Sequence[Message]) -> int:
    """Return the number of words in the messages of a conversation; see ``count_words``."""
    return sum(count_words(message.text) for message in history)


class WordCounter:
    """A counter of the words in a text that arrives in pieces, which may be cut within words."""

    def __init__(self) -> None:
        self.words = 0
        self._inside_word = False

    def feed(self, text: str) -> None:
        """Count the words in the next piece of the text."""
        if text:
            continues = self._inside_word and not text[0].isspace()
            self.words += count_words(text) - continues
            self._inside_word = not text[-1].isspace()


class AnswerText:
    """A filter that cuts the text of an answer at ``max_tokens`` words or at a stop string, and counts its words.

    The text arrives in pieces.

    ``max_tokens`` counts whitespace-separated words. Stop strings are removed, even across pieces: text that may be the
    beginning of a stop string is held back until the next piece. White space after the last word allowed is held back
    too, because it belongs to the answer only if no further word follows.

    ``sampling`` are the sampling parameters of the request; only ``max_tokens`` and ``stop`` have an effect.
    """

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        stop = sampling.get("stop") or []
        self._stops: list[str] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self._words_left: int | None = sampling.get("max_tokens")
        self._held = ""
        self._space = ""
        self._inside_word = False
        self._passed = WordCounter()
        #: Why the answer was cut off; None while it is within its limits.
        self.reached: FinishReason | None = None

    @property
    def words(self) -> int:
        """The number of words passed on so far."""
        return self._passed.words

    async def add(self, text: str) -> AsyncGenerator[str, None]:
        """Add ``text``, and yield the text that may be sent now; other tasks run between the pieces of a long text."""
        for number, piece in enumerate(pieces_of(text)):
            if number:
                await asyncio.sleep(0)
            if passed := self.feed(piece):
                yield passed
            if self.reached is not None:
                return

    def feed(self, text: str) -> str:
        """Add ``text``; return the text that may be sent now, which is "" once the answer was cut off."""
        passed = self._fed(text)
        self._passed.feed(passed)
        return passed

    def finish(self) -> str:
        """End the answer, and return the text that was held back; "" if the answer was cut off."""
        if self.reached is not None:
            return ""
        held, self._held = self._held, ""
        passed = self._within_length(held)
        passed = passed if self.reached is not None else passed + self._space
        self._passed.feed(passed)
        return passed

    def _fed(self, text: str) -> str:
        if self.reached is not None:
            return ""
        text = self._held + text
        self._held = ""
        # The stop string that ends first wins, so that the result does not depend on the pieces.
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            passed = self._within_length(text[: min(found)[1]])
            if self.reached is None:
                passed += self._space
                self.reached = FinishReason.STOP
            return passed
        if self._stops:
            keep = max(_overlap(text, stop) for stop in self._stops)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return self._within_length(text)

    def _within_length(self, text: str) -> str:
        """Return the beginning of ``text`` that the limit on words allows."""
        if self._words_left is None or not text:
            return text
        position = 0
        for word in _WORDS.finditer(text):
            if word.start() > 0 or not self._inside_word:
                if self._words_left == 0:
                    self.reached = FinishReason.LENGTH
                    return text[:position]
                self._words_left -= 1
            position = word.end()
        self._inside_word = not text[-1].isspace()
        if self._words_left == 0:
            self._space = (self._space + text[position:])[:MAX_HELD_SPACE]
            text = text[:position]
        return text


class SpokenLimit:
    """A limit of about ``tokens`` on a spoken answer that arrives in pieces: it ends the answer after a whole sentence.

    Tokens are estimated, at least one for each word. A sentence that is longer than half of the limit is cut at the end
    of a clause, or else at the last word. After half of the limit, text is passed on in whole sentences, because only
    the end of a sentence shows whether the sentence fits. The listener does not notice this delay: by then the text is
    far ahead of the voice.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = 0
        #: Whether the answer was cut off.
        self.reached = False
        self._most = tokens
        self._held = ""

    def passes(self, text: str) -> bool:
        """Whether a piece may be passed on unchanged. The caller then calls ``count``, faster than ``feed``."""
        return self.tokens + len(text) < self._most // 2 and not self._held

    def count(self, text: str) -> None:
        """Count a piece that is passed on unchanged."""
        for unit in _UNIT.finditer(text):
            self.tokens += _tokens(unit[0])

    def feed(self, text: str) -> str:
        """Count a piece, and return the text that may be spoken now; "" once the limit is reached."""
        passed: list[str] = []
        for unit in _UNIT.finditer(text):
            if self.reached:
                break
            free = self.tokens < self._most // 2 and not self._held
            self.tokens += _tokens(unit[0])
            if self.tokens > self._most:
                self.reached = True
                passed.append(self.finish(cut=True))
            elif free:
                passed.append(unit[0])
            else:
                self._held += unit[0]
        end = _last_end(_SENTENCE_END, self._held)
        passed.append(self._held[:end])
        self._held = self._held[end:]
        return "".join(passed)

    def finish(self, *, cut: bool) -> str:
        """End the answer, and return the text held back; with ``cut``, only up to the end of its last sentence."""
        held, self._held = self._held, ""
        if not cut:
            return held
        # A sentence that is longer than half of the limit is cut at the end of a clause, or at the last word.
        ends = (_last_end(kind, f"{held} ") for kind in (_SENTENCE_END, _CLAUSE_END))
        return held[: next(filter(None, ends), len(held))].rstrip()


def _tokens(unit: str) -> int:
    length = len(unit.lstrip())
    return max(1, length // _CHARACTERS_PER_TOKEN) if length else 0


def _last_end(kind: re.Pattern[str], text: str) -> int:
    """Return the end of the last match of ``kind``; 0 if there is none."""
    return max((found.end() for found in kind.finditer(text)), default=0)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


# Answers that another server has begun: an engine goes on with them, or is asked for all of them again.
#
# The server in which an answer began is gone, and the client has the beginning. ``go_on`` has an engine write the rest.
# An engine that cannot go on by itself makes the whole answer again, and SameAnswer drops the part that the client has,
# as long as it is the same. If it is not, the answer ends with an EngineFailed that says so.


#: The calls of tools that were told of an answer, by their index in it.
ToldCalls: TypeAlias = Mapping[int, ToolCall]
NO_CALLS: Final[ToldCalls] = {}


def not_continued(why: str = "asked again, the model answers otherwise") -> EngineFailed:
    """Return the error that ends an answer which cannot be continued. The history keeps the part that was sent."""
    return EngineFailed(f"the answer that another server had begun cannot be continued: {why}", keeps_answer=True)


def can_continue(engine: Engine, request: GenerationRequest) -> bool:
    """Whether ``engine`` can write only the text that follows ``request.begun``.

    No engine can do so if a grammar constrains the whole answer, if a tool call is required, if several answers are
    requested, or for a raw prompt or an input role other than ``user``.
    """
    options = request.options
    free = options.structure is None and request.tool_choice in (None, "auto", "none")
    plain = options.choices == 1 and not options.raw_prompt and options.input_role == "user"
    return free and plain and request.modalities <= engine.capabilities.continues


async def go_on(engine: Engine, request: GenerationRequest, out: OutputWriter, *, calls: ToldCalls = NO_CALLS) -> None:
    """Have ``engine`` answer ``request``; if another server began the answer, write only the rest of it to ``out``.

    The client already has the text ``request.begun`` and the tool calls ``calls``. Raises the error ``not_continued``
    if the rest cannot be made, and the errors of ``Engine.generate``.
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
    """Have ``generate`` make the whole answer again, and write to ``out`` only the part that the client lacks.

    Raises the same errors as ``go_on``. If the new beginning differs from the one that the client has, the error is
    ``not_continued``; but if the client has whole tool calls, the answer ends with them.
    """
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
    """Return ``finished`` with its usage corrected: the first ``tokens`` of the answer were counted as prompt."""
    usage = finished.usage
    return replace(
        finished,
        usage=replace(
            usage, input_tokens=max(0, usage.input_tokens - tokens), output_tokens=usage.output_tokens + tokens
        ),
    )


class SameAnswer(OutputFilter):
    """An OutputWriter for an answer that is made again: it drops the part that the client has, and passes on the rest.

    Text and tool calls of the dropped part are compared with those that the client has. If they differ, all further
    outputs are dropped, and ``making``, the time-out around the engine's call, ends that call. Thoughts, and audio
    before ``voice_from_ms``, are dropped without a comparison.
    """

    def __init__(self, out: OutputWriter, request: GenerationRequest, calls: ToldCalls) -> None:
        super().__init__(out)
        self.making: asyncio.Timeout | None = None
        #: Whether the new answer differs from the part that the client has.
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
        """End an answer that differs from the one that the client has.

        If the client has whole tool calls, these end the answer; otherwise the error ``not_continued`` is raised.
        """
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
        """Pass on the audio after ``_drop_ms``, and the words whose middle is later, with times counted from there."""
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
