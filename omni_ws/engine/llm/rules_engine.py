"""RulesEngine: answers text by rules, and describes pictures plainly; no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import fields
from datetime import datetime
from typing import Final, TypeVar

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.core.history import Message
from omni_ws.engine.answer_limit import AnswerText, WordCounter, count_words
from omni_ws.engine.base import EngineCapabilities, EngineOutput, EngineState, Finished, GenerationRequest, TextOutput
from omni_ws.engine.clauses import PIECE_CHARACTERS
from omni_ws.engine.continued_input import unanswered
from omni_ws.engine.decoding import DECODING_THREADS, MODALITIES, ImagePart, TextPart, VideoPart, decode_request
from omni_ws.engine.llm.rules import NOTHING_HEARD, answer, prepare
from omni_ws.engine.llm.sights import Sights
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed
from omni_ws.media.image import MediaLimits
from omni_ws.profiler import events

T = TypeVar("T")

TAKES: Final = frozenset({Modality.TEXT, Modality.IMAGE, Modality.VIDEO})


class RulesEngine:
    """Deterministic: the same conversation at the same time gives the same text.

    ``now`` tells the time. Coins and dice are drawn from it, unless the request has a ``seed``.
    """

    name = "rules"

    def __init__(self, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.model = "rules"
        self.active_requests = 0
        self._now = now
        self._threads: ThreadPoolExecutor | None = None

    @property
    def state(self) -> EngineState:
        return EngineState.STARTING if self._threads is None else EngineState.OK

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            input_modalities=TAKES,
            pictures_in_history=TAKES & {Modality.IMAGE, Modality.VIDEO},
            output_modalities=frozenset({OutputModality.TEXT}),
            tasks=frozenset({Task.CHAT}),
            extend=True,
            sampling=frozenset({"max_tokens", "seed", "stop"}),
            sampling_no_ops=frozenset({"temperature", "top_p"}),
            raw_prompts=True,  # there is no template that could stand around them
            media_limits=frozenset(field.name for field in fields(MediaLimits)),
            nothing_heard=NOTHING_HEARD,
        )

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="rules")
            await run_in_thread(self._threads, prepare)

    async def stop(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                question = _Question(request, self._threads, share)
                await question.read()
                async with aclosing(self._answer(request, question)) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            self.active_requests -= 1

    async def _answer(self, request: GenerationRequest, question: _Question) -> AsyncGenerator[EngineOutput, None]:
        text = AnswerText(request.sampling)
        writes = request.tells_text
        separator = ""
        sentences = question.answer(self._now(), request.sampling.get("seed"))
        while text.reached is None and (sentence := await question.worked_on(next, sentences, None)) is not None:
            async for piece in text.add(separator + sentence):
                if writes:
                    yield TextOutput(piece)
            separator = " "
        if (rest := text.finish()) and writes:
            yield TextOutput(rest)
        usage = Usage(input_tokens=question.words, output_tokens=text.words)
        yield Finished(text.reached or FinishReason.STOP, usage)


class _Question:
    """The input of one request: its text, and facts about its pictures."""

    def __init__(self, request: GenerationRequest, threads: ThreadPoolExecutor, share: MediaShare) -> None:
        self.words = 0
        self._request = request
        self._threads = threads
        self._share = share
        self._sights = Sights()
        #: The texts in the order in which they came, each in pieces.
        self._texts: list[list[str]] = []
        self._characters = sum(len(message.text) for message in request.history)

    async def read(self) -> None:
        """Read the input to its end. Raises EmptyInput if there is none."""
        self.words = await self.worked_on(_words_of, self._request.history)
        decoded = decode_request(self._request, TAKES, executor=self._threads, share=self._share)
        number: int | None = None
        counter = WordCounter()
        async with aclosing(decoded) as parts:
            async for part in parts:
                if isinstance(part, TextPart):
                    if part.part != number:
                        self._texts.append([])
                        counter = WordCounter()
                    self._texts[-1].append(part.text)
                    self._characters += len(part.text)
                    counted = counter.words
                    counter.feed(part.text)
                    self.words += counter.words - counted
                elif isinstance(part, (ImagePart, VideoPart)):
                    with events.span("sights", "encoder_start", "encoder_end", modality=MODALITIES[type(part)].value):
                        await run_in_thread(self._threads, self._sights.look, part)
                number = part.part
        if number is None:
            raise EmptyInput("the request has no input")

    def answer(self, now: datetime, seed: object) -> Iterator[str]:
        """Yield the sentences of the answer."""
        described = self._sights.sentences()
        yield from described
        text = " ".join(text for pieces in self._texts if (text := "".join(pieces).strip()))
        if text and (before := unanswered(self._request.history)):
            text = f"{before} {text}"
        if text or not described:
            yield from answer(text, self._request.history, now, seed=seed, pictured=bool(described))

    async def worked_on(self, call: Callable[..., T], *arguments: object) -> T:
        """Return ``call(*arguments)``, which works on the whole text and history: in a thread where they are long."""
        with events.span("rules"):
            if self._characters <= PIECE_CHARACTERS:
                return call(*arguments)
            return await run_in_thread(self._threads, call, *arguments)


def _words_of(history: Sequence[Message]) -> int:
    return sum(count_words(message.text) for message in history)
