"""RulesEngine and RulesFirst: answers by rules, alone or in front of a model.

What the rules understand stands in ``intents/``. What they do not is admitted in one sentence, never guessed and never
parroted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import fields, replace
from datetime import datetime
from functools import cache
from random import Random
from typing import Final, TypeVar

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task, Usage
from omni_ws.core.history import Message
from omni_ws.engine.answer_limit import AnswerText, WordCounter, count_words
from omni_ws.engine.base import (
    Engine,
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    TextOutput,
)
from omni_ws.engine.clauses import PIECE_CHARACTERS, pieces_of
from omni_ws.engine.continued_input import unanswered
from omni_ws.engine.decoding import DECODING_THREADS, Chunks, ImagePart, TextPart, VideoPart, decode_request
from omni_ws.engine.llm.intents import fun
from omni_ws.engine.llm.intents.catalogue import INTENTS
from omni_ws.engine.llm.intents.matcher import Asked, Matcher, Understood
from omni_ws.engine.llm.intents.names import name_told
from omni_ws.engine.llm.intents.numbers import REPEAT, SPELL, repeated, spelled
from omni_ws.engine.llm.intents.unknown import unknown
from omni_ws.engine.llm.plain_words import Talk, plain_words, requests
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed
from omni_ws.media.image import ImageFacts, MediaLimits, describe_image
from omni_ws.media.video import Motion, VideoFacts, VideoObserver
from omni_ws.profiler import events

T = TypeVar("T")

TAKES: Final = frozenset({Modality.TEXT, Modality.IMAGE, Modality.VIDEO})


class RulesEngine:
    """Answers text by rules, and describes pictures plainly, without a model.

    Deterministic: the same conversation at the same time gives the same text.
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
                    modality = Modality.IMAGE if isinstance(part, ImagePart) else Modality.VIDEO
                    with events.span("sights", "encoder_start", "encoder_end", modality=modality.value):
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


class RulesFirst:
    """The engine ``llm``, but for the time, dates, sums, units, spelling and the like, which small models get wrong.

    Rules answer a request that is all text, in a conversation that nobody gave instructions: ``own_instructions`` are
    those of the operator. Where a client wants tools, JSON or anything else of the model, it gets the model.
    """

    def __init__(self, llm: Engine, *, own_instructions: str = "", now: Callable[[], datetime] = datetime.now) -> None:
        self.name = llm.name
        self.model = llm.model
        self.llm = llm
        self._own_instructions = own_instructions
        self._now = now

    @property
    def active_requests(self) -> int:
        return self.llm.active_requests

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.llm.capabilities

    @property
    def state(self) -> EngineState:
        return self.llm.state

    def describe(self) -> tuple[str, ...]:
        return self.llm.describe()

    async def start(self) -> None:
        await asyncio.to_thread(prepare)
        await self.llm.start()
        self.model = self.llm.model

    async def stop(self) -> None:
        await self.llm.stop()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._may_answer(request):
            taken = [chunk async for chunk in request.input]
            request = replace(request, input=Chunks(tuple(taken)))
            if (sentences := self._exact(request, taken)) is not None:
                text = AnswerText(request.sampling)
                async for piece in text.add(" ".join(sentences)):
                    yield TextOutput(piece)
                if rest := text.finish():
                    yield TextOutput(rest)
                words = sum(count_words(message.text) for message in request.history)
                words += sum(count_words(chunk.payload.decode()) for chunk in taken)
                yield Finished(text.reached or FinishReason.STOP, Usage(input_tokens=words, output_tokens=text.words))
                return
        async with aclosing(self.llm.generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    def _may_answer(self, request: GenerationRequest) -> bool:
        wanted = request.options
        plain = wanted.structure is None and wanted.logprobs is None and wanted.choices == 1
        plain = plain and not wanted.raw_prompt and wanted.input_role == "user" and not request.tools
        return plain and request.instructions in ("", self._own_instructions)

    def _exact(self, request: GenerationRequest, taken: list[InputChunk]) -> list[str] | None:
        if not taken or any(chunk.modality is not Modality.TEXT or chunk.tool_call_id is not None for chunk in taken):
            return None
        if any(message.role == "system" for message in request.history):
            return None
        said = b"".join(chunk.payload for chunk in taken).decode()
        before = unanswered(request.history)
        sentences = exact_answer(
            f"{before} {said}".strip(), request.history, self._now(), seed=request.sampling.get("seed")
        )
        return None if sentences is None else list(sentences)


# Answers

#: Longer texts, in characters, are at most something to repeat or to spell.
MAX_REQUEST: Final = 4096
#: Of longer texts, single sentences are not looked at.
_MAX_SENTENCES_LETTERS: Final = 400
_MAX_SENTENCES: Final = 5
_MAX_ANSWERED: Final = 2

NOTHING_HEARD = "I did not hear anything."
NOTHING_WRITTEN = "The message is empty."
TOO_LONG = "That is more than I can follow."

_POLITE: Final = re.compile(
    r"(?:please|hey|hi|hello|okay|ok|so|um|uh|oh|well|now|and|computer|(?:can|could|would|will) "
    r"you(?: please)?|(?:tell|give) me|"
    r"i(?: would|['’]d) like you to|i want you to|do you know|go on and|just)[\s,.!]+",
    re.I,
)
_POLITE_END: Final = re.compile(
    r"(?:[\s,](?:please|thank you|thanks|for me)|"
    r",\s?(?:(?:do|can|if) you (?:still )?(?:know|remember)|(?:can|could) you (?:please )?tell me|any idea))$",
    re.I,
)
_LONGEST_POLITE_END: Final = len(", could you please tell me")
_TRAILING: Final = " \t\r\n.!?,;"
_SENTENCE_END: Final = re.compile(r"(?<=[.!?;])\s+(?=\S)")
_ANOTHER: Final = re.compile(
    r"(?:(?:tell me |give me |do |say )?(?:another(?: one)?|one more|again|once more|once again|one "
    r"more time|do it again|do that again|more|next|"
    r"next one|a different one|more please|the next one|go on|continue|keep going)(?: one| please)?)"
)
#: Between two requests in one sentence.
_JOINED: Final = re.compile(
    r",? and (?:then |also |please )*"
    r"(?=(?:tell|give|what(?:['’]s)?|how|when|who|where|is|spell|say|flip|roll|toss|count) )",
    re.I,
)
#: A follow-up: the last question, asked about something else.
_FOLLOWING: Final = re.compile(r"(?:and what about|and how about|what about|how about|and|or) (?P<rest>.+)")

_PREPOSITIONS: Final = frozenset(("in", "at", "on", "for"))


@cache
def _matcher() -> Matcher:
    return Matcher(INTENTS)


def prepare() -> None:
    """Build what all answers need, which takes a moment."""
    _matcher()


def answer(
    text: str, history: Sequence[Message], now: datetime, *, seed: object = None, pictured: bool = False
) -> Iterator[str]:
    """The sentences of the answer to ``text``, one at a time, so that a long one can be spoken while it is made.

    Chance is drawn from ``seed``, or ``now`` where there is none, and from the text and its place in the conversation.
    ``pictured`` says that pictures came with the text and were described.
    """
    plain = _single_spaced(text)
    if not plain:
        yield NOTHING_WRITTEN
        return
    if len(plain) > MAX_REQUEST:
        yield from _long_answer(plain) or (TOO_LONG,)
        return
    yield from _short_answer(_asked(plain, Talk(history), now, seed=seed, pictured=pictured))


def _asked(plain: str, talk: Talk, now: datetime, *, seed: object, pictured: bool = False) -> Asked:
    drawn_from = f"{now.isoformat() if seed is None else seed} {talk.position} {plain}"
    chance = Random(drawn_from.encode("utf-8", "surrogatepass"))
    return Asked(text=plain, talk=talk, now=now, chance=chance, pictured=pictured)


def exact_answer(text: str, history: Sequence[Message], now: datetime, *, seed: object = None) -> Iterator[str] | None:
    """The sentences of an answer that rules give exactly, each request in ``text`` for itself; None for all else.

    Nothing is guessed here: words that only sound alike, or a word that tells enough among others, do not count.
    """
    plain = _single_spaced(text)
    if not plain or len(plain) > _MAX_SENTENCES_LETTERS:
        return None
    talk = Talk(history)
    asked = _asked(plain, talk, now, seed=seed)
    parts = _parts(plain)
    parts = (parts if len(parts) > 1 else _joined(asked)) or [plain]
    found = [_matcher().exactly(one, without_courtesy(one.text)) for one in (_with_text(asked, part) for part in parts)]
    exact = [match for match in found if match is not None and match.intent.exact]
    known = all(match is not None and (match.intent.exact or match.intent.light) for match in found)
    if not exact or not known or (exact[0].intent.name == "what is my name" and name_told(talk) is None):
        return None
    return _each_once(exact[:_MAX_ANSWERED])


def _short_answer(asked: Asked) -> Iterator[str]:
    if (line := _in_play(asked)) is not None:
        return iter((line,))
    if (renewed := _renewed(asked)) is not None:
        return renewed.sentences
    parts = _parts(asked.text)
    if len(parts) < 2:
        parts = _joined(asked)
    if len(parts) < 2:
        match = _found(asked) or _followed_up(asked)
        return match.sentences if match is not None else _unknown(asked)
    return _answered_in_parts(asked, parts)


def _answered_in_parts(asked: Asked, parts: Sequence[str]) -> Iterator[str]:
    """The answer to several sentences: as to one phrase, or to those that want an answer, or else to the last."""
    if (phrase := _matcher().phrase(asked)) is not None:
        return phrase.sentences
    # People say a sentence twice where nobody answers at once.
    first_said: dict[str, Asked] = {}
    for place, part in enumerate(parts):
        one = _with_text(replace(asked, talk=asked.talk.going_on(parts[:place])), part)
        first_said.setdefault(one.words, one)
    each = list(first_said.values())
    found = [_found(one) for one in each]
    if (first := next((match for match in found if match is not None and match.intent.first), None)) is not None:
        return first.sentences
    heavy = [match for match in found if match is not None and not match.intent.light]
    if heavy:
        return _each_once(heavy[:_MAX_ANSWERED])
    if (whole := _found(asked)) is not None:
        return whole.sentences
    for one, match in zip(each, found, strict=True):
        if match is None:
            return _unknown(one)
    return next(match.sentences for match in reversed(found) if match is not None)


def _each_once(found: Sequence[Understood]) -> Iterator[str]:
    """The sentences of several answers, but for those that an earlier one of them has."""
    said: set[str] = set()
    for match in found:
        here: list[str] = []
        for sentence in match.sentences:
            if sentence not in said:
                here.append(sentence)
                yield sentence
        said.update(here)


def _in_play(asked: Asked) -> str | None:
    """The next line of a riddle or a joke that is under way, or to the answer of a question that was asked back."""
    # Whoever asks for something else has left the game.
    if (line := fun.knocked(asked)) is not None and ((other := _found(asked)) is None or other.intent.light):
        return line
    if (line := fun.replied(asked)) is not None:
        return line
    riddle = fun.riddle_asked(asked.talk)
    return None if riddle is None else fun.solved(asked, riddle)


def _renewed(asked: Asked) -> Understood | None:
    """What "another one" asks for, if the last thing asked for can be had again."""
    if _ANOTHER.fullmatch(asked.words) is None:
        return None
    for heard in reversed(asked.talk.heard):
        one = _with_text(asked, heard)
        if _ANOTHER.fullmatch(one.words) is None:
            match = _found(one)
            if match is None or not match.intent.light:
                return match if match is not None and match.intent.renews else None
    return None


def _joined(asked: Asked) -> list[str]:
    """The two requests that "and" joins, if each fits by itself and the whole does not; else none."""
    parts = _JOINED.split(asked.text)
    if len(parts) != _MAX_ANSWERED or _fitting(asked) is not None:
        return []
    both = [_fitting(_with_text(asked, part)) for part in parts]
    return parts if all(match is not None and not match.intent.light for match in both) else []


def _followed_up(asked: Asked) -> Understood | None:
    """The answer to a follow-up question, such as "And tomorrow?" after "What day is it?"."""
    following = _FOLLOWING.fullmatch(asked.words)
    if following is None:
        return None
    before = (plain_words(heard) for heard in reversed(asked.talk.heard))
    *_, request = requests(next((words for words in before if _FOLLOWING.fullmatch(words) is None), ""))
    question = request.split()
    other = following["rest"].split()
    # As many words at its end are replaced first, then one more, then fewer, and at last none.
    for replaced in (len(other), len(other) + 1, *range(len(other) - 1, -1, -1)):
        if replaced < len(question):
            whole = _with_text(asked, " ".join((*question[: len(question) - replaced], *other)))
            match = _found(whole) if not replaced and other[0] in _PREPOSITIONS else _fitting(whole)
            if match is not None and not match.intent.light:
                return match
    return None


def _found(asked: Asked) -> Understood | None:
    return _matcher().find(asked, without_courtesy(asked.text))


def _fitting(asked: Asked) -> Understood | None:
    return _matcher().fitting(asked, without_courtesy(asked.text))


def _with_text(asked: Asked, text: str) -> Asked:
    return replace(asked, text=_single_spaced(text))


def _unknown(asked: Asked) -> Iterator[str]:
    # The description of pictures is the answer to what is asked about them.
    return iter(()) if asked.pictured else unknown(asked)


def _parts(text: str) -> list[str]:
    """The sentences of a short text; a text to repeat or to spell is one."""
    if len(text) > _MAX_SENTENCES_LETTERS:
        return [text]
    request = text[_courtesy(text) :]
    if REPEAT.match(request) is not None or SPELL.match(request) is not None:
        return [text]
    parts = [part for part in _SENTENCE_END.split(text) if any(map(str.isalnum, part))]
    return parts if len(parts) <= _MAX_SENTENCES else [text]


def _long_answer(plain: str) -> Iterator[str] | None:
    start = _courtesy(plain[:MAX_REQUEST])
    if (repeat := REPEAT.match(plain, start, MAX_REQUEST)) is not None:
        return repeated(plain[repeat.end() :])
    if (spell := SPELL.match(plain, start, MAX_REQUEST)) is not None:
        return spelled(plain[spell.end() :])
    return None


def _single_spaced(text: str) -> str:
    """``text`` with each run of white space made one space, and none at its ends."""
    parts: list[str] = []
    space = False
    for piece in pieces_of(text):
        words = " ".join(piece.split())
        space = space or piece[0].isspace()
        if words:
            parts.append(f" {words}" if space and parts else words)
            space = False
        space = space or piece[-1].isspace()
    return "".join(parts)


def without_courtesy(text: str) -> str:
    """``text`` as it was written, but for courtesies and marks around it."""
    request = text.strip(_TRAILING)
    request = request[_courtesy(request) :]
    while (end := _POLITE_END.search(request, max(0, len(request) - _LONGEST_POLITE_END))) is not None:
        before = request[: end.start()].rstrip(" ,")
        if not before:
            break
        request = before.strip(_TRAILING)
    return request


def _courtesy(text: str) -> int:
    """Length of the courtesies that begin ``text``; something is left behind them."""
    length = 0
    while (match := _POLITE.match(text, length)) is not None and match.end() < len(text):
        length = match.end()
    return length


# Pictures

_DARK = 0.2
_BRIGHT = 0.7

_MOTION = {Motion.STILL: "nothing moves", Motion.SOME: "there is some motion", Motion.MUCH: "there is much motion"}

#: Follows each description.
UNSEEN = "No model looks at pictures here, so I can't tell what they show."

#: More pictures than this are only counted.
MAX_DESCRIBED = 8


class Sights:
    """The pictures of one request: their size, colour and motion. Nothing is recognised, and no pixels are kept."""

    def __init__(self) -> None:
        self._images: list[ImageFacts] = []
        self._image_count = 0
        self._videos: list[VideoFacts] = []
        self._observer: VideoObserver | None = None
        self._video_part = -1

    def look(self, part: ImagePart | VideoPart) -> None:
        """Add an image, or frames of a video. Blocks for some milliseconds a picture."""
        if isinstance(part, ImagePart):
            self._image_count += 1
            if self._image_count <= MAX_DESCRIBED:
                self._images.append(describe_image(part.pixels))
            return
        if self._observer is None or part.part != self._video_part:
            self._end_video()
            self._observer, self._video_part = VideoObserver(), part.part
        for frame in part.frames:
            self._observer.add(frame)

    def sentences(self) -> tuple[str, ...]:
        """Return the description; empty where there are no pictures. Ends the video under way."""
        self._end_video()
        described = (*_describe_images(self._images, self._image_count), *_describe_videos(self._videos))
        return (*described, UNSEEN) if described else ()

    def _end_video(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None and (facts := observer.facts()) is not None:
            self._videos.append(facts)


def _describe_images(images: Sequence[ImageFacts], count: int) -> Iterator[str]:
    """Sentences about ``count`` images, of which ``images`` are the first."""
    for place, facts in enumerate(images, 1):
        name = "The image" if count == 1 else f"Image {place}"
        yield (
            f"{name} is {facts.width} by {facts.height} pixels, mostly {facts.dominant_colour}, "
            f"and {_brightness(facts.brightness)}."
        )
    if count > len(images):
        yield f"There are {count} images in all."


def _describe_videos(videos: Sequence[VideoFacts]) -> Iterator[str]:
    for place, facts in enumerate(videos, 1):
        name = "The video" if len(videos) == 1 else f"Video {place}"
        frames = "one frame" if facts.frame_count == 1 else f"{facts.frame_count} frames"
        duration = f" over {facts.duration_ms / 1000:.1f} seconds" if facts.duration_ms else ""
        motion = f", and {_MOTION[facts.motion]}" if facts.frame_count > 1 else ""
        yield f"{name} has {frames}{duration}, mostly {facts.dominant_colour}{motion}."


def _brightness(brightness: float) -> str:
    if brightness < _DARK:
        return "dark"
    return "bright" if brightness > _BRIGHT else "of medium brightness"
