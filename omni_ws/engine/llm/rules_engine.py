"""RulesEngine and RulesFirst: answers by rules, alone or in front of a model.

What the rules understand stands in ``intents/``. What they do not is admitted in one sentence, never guessed and
never parroted. Pictures are described by size, colour and motion (Sights).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from msgspec import structs

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task, UrlCitation, Usage
from omni_ws.core.history import Message, in_order
from omni_ws.engine.answer_limit import AnswerText, count_history, count_words
from omni_ws.engine.base import (
    NOTHING_SAID,
    Cut,
    Engine,
    EngineCapabilities,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    Unread,
    UsageMeter,
)
from omni_ws.engine.clauses import PIECE_CHARACTERS
from omni_ws.engine.continued_answer import go_on, rest_of
from omni_ws.engine.continued_input import told_language, unanswered
from omni_ws.engine.decoding import DECODING_THREADS, Chunks, ImagePart, TextPart, VideoPart, decode_request
from omni_ws.engine.llm.coming import RULES
from omni_ws.engine.llm.encyclopedia import CREDIT, LICENSE, Cited, Encyclopedia, load_encyclopedia
from omni_ws.engine.llm.rules import (
    NOTHING_HEARD,
    NOTHING_HEARD_IN,
    answer,
    answer_in_english_alone,
    exact_answer,
    prepare,
)
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import end_tasks, run_in_thread
from omni_ws.engine.turn_times import TurnTimes
from omni_ws.errors import EmptyInput, EngineFailed, OmniError
from omni_ws.media.image import ImageFacts, MediaLimits, Pixels, describe_image
from omni_ws.media.video import VideoFacts, VideoFrame, VideoObserver
from omni_ws.profiler import events

F = TypeVar("F", ImageFacts, VideoFacts)

#: The end of each description.
UNSEEN: Final = "No model looks at pictures here, so I can't tell what they show."
#: Further pictures are only counted.
MAX_DESCRIBED: Final = 8


class Sights:
    """Describes successive pictures by size, colour and motion. Nothing is recognised, and no pixels are kept."""

    def __init__(self) -> None:
        self._images: list[ImageFacts] = []
        self._image_count = 0
        self._videos: list[VideoFacts] = []
        self._observer: VideoObserver | None = None
        self._video_number = -1

    def look_at_image(self, pixels: Pixels) -> None:
        """Add an image. Blocks for some milliseconds."""
        self._image_count += 1
        if self._image_count <= MAX_DESCRIBED:
            self._images.append(describe_image(pixels))

    def look_at_frames(self, frames: Sequence[VideoFrame], number: int) -> None:
        """Add frames of the video with this ``number``. Blocks for some milliseconds a frame."""
        if self._observer is None or number != self._video_number:
            self._end_video()
            self._observer, self._video_number = VideoObserver(), number
        for frame in frames:
            self._observer.add(frame)

    def sentences(self) -> tuple[str, ...]:
        """Return the description; empty if there are no pictures. Ends the current video."""
        self._end_video()
        described = [facts.sentence(name) for name, facts in _named("image", self._image_count, self._images)]
        if self._image_count > len(self._images):
            described.append(f"There are {self._image_count} images in all.")
        described += [facts.sentence(name) for name, facts in _named("video", len(self._videos), self._videos)]
        return (*described, UNSEEN) if described else ()

    def _end_video(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None and (facts := observer.facts()) is not None:
            self._videos.append(facts)


def _named(kind: str, count: int, all_facts: Sequence[F]) -> Iterator[tuple[str, F]]:
    """Yield each of the facts with the name of its picture, such as "The image" or, among several, "Image 2"."""
    for place, facts in enumerate(all_facts, 1):
        yield (f"The {kind}" if count == 1 else f"{kind.capitalize()} {place}"), facts


# Requests, and the rules that answer them.

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: How long after an answer by rules the model begins to compute it: the voice begins to speak first.
SPOKEN_SEC: Final = 1.0
#: So many words are computed at a time: what is heard first comes first, and an answer does not wait long for the rest.
COMPUTED_WORDS: Final = 12

TAKES: Final = frozenset({Modality.TEXT, Modality.IMAGE, Modality.VIDEO})


class RulesEngine:
    """Answers text by rules, and describes pictures plainly, without a model.

    Deterministic: the same conversation at the same time gives the same text.
    ``now`` tells the time. Coins and dice are drawn from it, unless the request has a ``seed``. ``summaries`` is the
    fetched file of the encyclopedia.
    """

    name = RULES

    def __init__(self, *, summaries: Path | None = None, now: Callable[[], datetime] = datetime.now) -> None:
        self.model = RULES
        self.active_requests = 0
        self._now = now
        self._summaries = summaries
        #: What was read of ``summaries`` at the start.
        self.encyclopedia: Encyclopedia | None = None
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
            nothing_heard_in=NOTHING_HEARD_IN,
            reads_language=True,
        )

    @property
    def credited(self) -> str:
        """The model as parts are described: with whose text is spoken."""
        return _credited(self.model, self.encyclopedia)

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="rules")
            await run_in_thread(self._threads, prepare)
            self.encyclopedia = await run_in_thread(self._threads, load_encyclopedia, self._summaries)

    async def stop(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if self._threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                question = _Question(request, self._threads, share)
                await question.read()
                await self._answer(request, out, question)
        finally:
            self.active_requests -= 1

    async def _answer(self, request: GenerationRequest, out: OutputWriter, question: _Question) -> None:
        sentences = question.answer(self._now(), request.sampling.get("seed"), self.encyclopedia)
        await _write(lambda: question.worked_on(next, sentences, None), request, out, input_words=question.words)


async def _write(
    next_sentence: Callable[[], Awaitable[str | None]],
    request: GenerationRequest,
    out: OutputWriter,
    *,
    input_words: int,
) -> None:
    """Write an answer of sentences, each as soon as it is there, with the articles that they are taken from."""
    text = AnswerText(request.sampling)
    writes = request.tells_text
    separator, length, written = "", 0, 0
    citations: list[UrlCitation] = []
    while text.reached is None and (sentence := await next_sentence()) is not None:
        start, length = length + len(separator), length + len(separator) + len(sentence)
        if isinstance(sentence, Cited):
            page = sentence.article
            citations.append(UrlCitation(page.title, page.url, start, length, LICENSE))
        async for piece in text.add(separator + sentence):
            written += len(piece)
            if writes:
                out.write(TextOutput(piece))
                await out.drain()
        separator = " "
    rest = text.finish()
    if rest and writes:
        out.write(TextOutput(rest))
    written += len(rest)
    usage = Usage(input_tokens=input_words, output_tokens=text.words)
    cited = tuple(structs.replace(one, end=min(one.end, written)) for one in citations if one.start < written)
    out.write(Finished(text.reached or FinishReason.STOP, usage, citations=cited))


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
        self.words = await self.worked_on(count_history, self._request.history)
        decoded = decode_request(self._request, TAKES, executor=self._threads, share=self._share)
        number: int | None = None
        async with aclosing(decoded) as parts:
            async for part in parts:
                if isinstance(part, TextPart):
                    if part.part != number:
                        self._texts.append([])
                    self._texts[-1].append(part.text)
                    self._characters += len(part.text)
                elif isinstance(part, (ImagePart, VideoPart)):
                    modality = Modality.IMAGE if isinstance(part, ImagePart) else Modality.VIDEO
                    with events.span("sights", "encoder_start", "encoder_end", modality=modality.value):
                        if isinstance(part, ImagePart):
                            await run_in_thread(self._threads, self._sights.look_at_image, part.pixels)
                        else:
                            await run_in_thread(self._threads, self._sights.look_at_frames, part.frames, part.part)
                number = part.part
        if number is None:
            raise EmptyInput("the request has no input")
        for pieces in self._texts:
            self.words += await self.worked_on(count_words, "".join(pieces))

    def answer(self, now: datetime, seed: object, encyclopedia: Encyclopedia | None) -> Iterator[str]:
        """Yield the sentences of the answer."""
        described = self._sights.sentences()
        yield from described
        text = " ".join(text for pieces in self._texts if (text := "".join(pieces).strip()))
        if text and (before := unanswered(self._request.history)):
            text = f"{before} {text}"
        if text and (language := self._request.heard_language.code) not in (None, "en"):
            yield answer_in_english_alone(language)
        elif text or not described:
            history, pictured = self._request.history, bool(described)
            yield from answer(text, history, now, seed=seed, pictured=pictured, encyclopedia=encyclopedia)

    async def worked_on(self, call: Callable[..., T], *arguments: object) -> T:
        """Return ``call(*arguments)``, which works on the whole text and history: in a thread where they are long."""
        with events.span("rules"):
            if self._characters <= PIECE_CHARACTERS:
                return call(*arguments)
            return await run_in_thread(self._threads, call, *arguments)


class RulesFirst:
    """The engine ``llm``, but for time, dates, sums, units, spelling and plain facts, which small models get wrong.

    Rules answer a request that is all text, not spoken in another language than English, and in a conversation that
    nobody gave instructions: ``own_instructions`` are those of the operator, and ``of_itself`` is whether these leave
    it to the rules to say who answers. Where a client wants tools, JSON or anything else of the model, it gets the
    model. So it does where rules had begun an answer, and now have another. ``encyclopedia`` returns what the rules may
    look up, in a thread at the start.

    A model that shares the machine's cores computes what rules have answered while that is spoken: it would have to do
    so when it is asked next, or when somebody interrupts.
    """

    def __init__(
        self,
        llm: Engine,
        *,
        own_instructions: str = "",
        of_itself: bool = True,
        encyclopedia: Callable[[], Encyclopedia | None] = lambda: None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.name = llm.name
        self.model = llm.model
        self.llm = llm
        self._own_instructions = own_instructions
        self.of_itself = of_itself
        self._now = now
        self._read_encyclopedia = encyclopedia
        self._encyclopedia: Encyclopedia | None = None
        #: What the model computes, by conversation; and the conversations in which it begins no further piece.
        self._ahead: dict[str, asyncio.Task[None]] = {}
        self._enough: set[str] = set()

    @property
    def active_requests(self) -> int:
        return self.llm.active_requests

    @property
    def credited(self) -> str:
        """The model as parts are described: with whose text is spoken."""
        return _credited(str(getattr(self.llm, "credited", self.llm.model)), self._encyclopedia)

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(self.llm.capabilities, reads_language=True, continues=frozenset({OutputModality.TEXT}))

    @property
    def state(self) -> EngineState:
        return self.llm.state

    def describe(self) -> tuple[str, ...]:
        return self.llm.describe()

    async def start(self) -> None:
        await asyncio.to_thread(prepare)
        self._encyclopedia = await asyncio.to_thread(self._read_encyclopedia)
        await self.llm.start()
        self.model = self.llm.model

    async def stop(self) -> None:
        await end_tasks(*self._ahead.values())
        await self.llm.stop()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if self._may_answer(request):
            if (conversation := request.conversation) is not None and conversation in self._ahead:
                self._enough.add(conversation)  # the answer may be interrupted: no more of it was heard
            taken = [chunk async for chunk in request.input]
            request = replace(request, input=Chunks(tuple(taken)))
            if (before := self._ahead.get(request.conversation or "")) is not None:
                before.cancel()
            if (sentences := self._exact(request, taken)) is not None:
                words = count_history(request.history) + sum(count_words(chunk.payload.decode()) for chunk in taken)
                if not request.begun or " ".join(sentences).startswith(request.begun):
                    exact = partial(_write, partial(_next, iter(sentences)), input_words=words)
                    await rest_of(exact, request, out)
                    self._compute_ahead(request, taken, sentences)
                    return
        await go_on(self.llm, told_language(request, self.llm), out)

    def _compute_ahead(self, request: GenerationRequest, taken: list[InputChunk], answered: list[str]) -> None:
        conversation = request.conversation
        if conversation is None or not self.llm.capabilities.shares_cores:
            return
        later = replace(
            told_language(request, self.llm),
            sampling={"max_tokens": 1},
            computes_only=True,
            begun="",
            meter=UsageMeter(),
            cut=Cut(),
            times=TurnTimes(),
            warn=lambda error: None,
        )
        said = b"".join(chunk.payload for chunk in taken).decode()
        computing = self._compute(later, conversation, Message("user", said), " ".join(answered).split(" "))
        task = asyncio.create_task(computing, name="what rules have answered, ahead")
        self._ahead[conversation] = task
        self._enough.discard(conversation)
        task.add_done_callback(partial(self._computed, conversation))

    def _computed(self, conversation: str, task: asyncio.Task[None]) -> None:
        if self._ahead.get(conversation) is task:
            del self._ahead[conversation]
            self._enough.discard(conversation)

    async def _compute(self, later: GenerationRequest, conversation: str, asked: Message, words: list[str]) -> None:
        await asyncio.sleep(SPOKEN_SEC)
        try:
            for end in range(COMPUTED_WORDS, len(words) + COMPUTED_WORDS, COMPUTED_WORDS):
                turn = (asked, Message("assistant", " ".join(words[:end])))
                nothing = Chunks((InputChunk(Modality.TEXT, NOTHING_SAID.encode()),))
                history = in_order((*later.history, *turn))
                await self.llm.generate(replace(later, input=nothing, history=history), Unread())
                if conversation in self._enough:
                    break
        except OmniError as error:
            logger.debug("the model did not compute ahead: %s", error.message)

    def _may_answer(self, request: GenerationRequest) -> bool:
        if request.computes_only:
            return False
        return is_plain(request) and request.instructions in ("", self._own_instructions)

    def _exact(self, request: GenerationRequest, taken: list[InputChunk]) -> list[str] | None:
        if not taken or any(chunk.modality is not Modality.TEXT or chunk.tool_call_id is not None for chunk in taken):
            return None
        if any(message.role == "system" for message in request.history):
            return None
        if request.heard_language.code not in (None, "en"):
            return None  # the rules are English
        said = b"".join(chunk.payload for chunk in taken).decode()
        before = unanswered(request.history)
        sentences = exact_answer(
            f"{before} {said}".strip(),
            request.history,
            self._now(),
            seed=request.sampling.get("seed"),
            of_itself=self.of_itself,
            encyclopedia=self._encyclopedia,
        )
        return None if sentences is None else list(sentences)


async def _next(sentences: Iterator[str]) -> str | None:
    return next(sentences, None)


def _credited(model: str, encyclopedia: Encyclopedia | None) -> str:
    return model if encyclopedia is None else f"{model} and {CREDIT}"


def is_plain(request: GenerationRequest) -> bool:
    """Return whether a request wants an answer in words, and nothing that takes a language model."""
    wanted = request.options
    plain = wanted.structure is None and wanted.logprobs is None and wanted.choices == 1 and not wanted.interprets_into
    return plain and not wanted.raw_prompt and wanted.input_role == "user" and not request.tools
