"""One call: a caller does the steps of a scenario, or plays a persona, and each answer is checked.

Language models, reached by URL, judge what was said, and play callers.
"""

from __future__ import annotations

import asyncio
import mimetypes
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

import numpy as np
import orjson

from omni_ws.audio.pcm import SampleLayout, Samples, resampled, samples_from_bytes
from omni_ws.caller.answers import TimedAnswer
from omni_ws.caller.live_caller import MIC_RATE, LiveCaller, Recorded
from omni_ws.caller.live_caller import SPEAKER_RATE as PLAYED_RATE
from omni_ws.caller.live_caller import SPEAKER_TICK as PLAYED_TICK
from omni_ws.caller.script import PIECE_MS
from omni_ws.core.chunks import StartTrigger
from omni_ws.scenarios.form import (
    EndCall,
    Expected,
    GiveResult,
    HearAnswer,
    HeardWords,
    Interrupt,
    Interruption,
    Judged,
    LoseNetwork,
    Persona,
    Phrase,
    PlaySound,
    SayText,
    ScenarioUnusable,
    ShowPicture,
    StaySilent,
    Step,
    ToolCalled,
    TypeText,
    listed,
    pattern_of,
)
from omni_ws.scenarios.speech import (
    CallersSpeech,
    CallersVoice,
    Ears,
    end_of_speech,
    spoken_words,
    word_errors,
)

#: How long a model may think.
_ANSWER_SEC: Final = 120.0
_JUDGE: Final = (
    "You judge a telephone conversation between a caller and an assistant. Answer the question about it. Begin with "
    "the one word yes or no. Then give the reason in one short sentence."
)
_PLAY: Final = (
    "You write what a caller says in a telephone call with an assistant. The caller asks, and never helps or answers "
    "for the assistant. Write only the caller's next words, one or two short sentences, without stage directions. "
    "When the caller has what it wants, or it is hopeless, write only: GOODBYE"
)
_SO_FAR: Final = "The caller: {who}\nWhat the caller wants: {goal}\n\nThe call so far:\n{talk}\n\nThe caller says next:"
_GOODBYE: Final = "goodbye"
#: What models write before the words of the caller.
_SPEAKER: Final = re.compile(r"\A(?:the )?caller:\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a judge, and its whole reply."""

    is_yes: bool
    reason: str


@dataclass
class ChatModel:
    """A language model behind ``/v1/chat/completions``, at a URL such as ``http://host/v1``.

    ``http://host/v1#NAME`` names one of several models; otherwise the first that the server lists is used. Raises
    ScenarioUnusable for any other URL.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    _model: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ScenarioUnusable(f"{self.url!r} is not the URL of a language model, such as http://127.0.0.1:8000/v1")
        path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        self._model = parts.fragment or None
        self._base = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))

    async def judge(self, question: str, talk: Sequence[tuple[str, str]]) -> Judgement:
        """Ask a yes-or-no question about a conversation, given as pairs of speaker and text.

        Raises ScenarioUnusable if the answer is neither, or the model cannot be used.
        """
        told = "\n".join(f"{who}: {what}" for who, what in talk)
        said = await self._ask([_message("system", _JUDGE), _message("user", f"{told}\n\nQuestion: {question}")], 100)
        word = said.strip().strip("*\"'").lower()
        first = next(iter("".join(one if one.isalpha() else " " for one in word).split()), "")
        if first not in ("yes", "no"):
            raise ScenarioUnusable(f"the judge said neither yes nor no: {said.strip()[:200]!r}")
        return Judgement(first == "yes", said.strip())

    async def play(self, persona: Persona, talk: Sequence[tuple[str, str]]) -> str | None:
        """Return the caller's next words; None if the caller says goodbye or nothing. Raises ScenarioUnusable."""
        lines = "\n".join(f"{who}: {what}" for who, what in [("server", "Hello, how can I help you?"), *talk])
        told = _SO_FAR.format(who=persona.who, goal=persona.goal, talk=lines)
        messages = [_message("system", _PLAY), _message("user", told)]
        said = _SPEAKER.sub("", (await self._ask(messages, 120)).strip()).strip('"')
        return None if _GOODBYE in said.lower() or not said else said

    async def _ask(self, messages: list[dict[str, str]], tokens: int) -> str:
        if self._model is None:
            listed = await self._call("models", None)
            self._model = str(next((one.get("id") for one in listed.get("data") or ()), "default"))
        body = {"model": self._model, "messages": messages, "temperature": 0, "max_tokens": tokens}
        answer = await self._call("chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise ScenarioUnusable(f"{self._base} sent no answer") from None

    async def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else orjson.dumps(body)
        request = Request(f"{self._base}/{path}", data, headers)
        return await asyncio.to_thread(self._fetch, request)

    def _fetch(self, request: Request) -> dict[str, Any]:
        try:
            with urlopen(request, timeout=_ANSWER_SEC) as answer:
                found = orjson.loads(answer.read())
        except HTTPError as error:
            raise ScenarioUnusable(
                f"{self._base} refuses: {error.code} {error.read()[:200].decode(errors='replace')}"
            ) from None
        except (OSError, ValueError) as error:
            raise ScenarioUnusable(f"{self._base} cannot be reached: {error}") from None
        if not isinstance(found, dict):
            raise ScenarioUnusable(f"{self._base} sent no JSON object")
        return found


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# One call: a caller does the steps of a scenario, or plays a persona, and each answer is checked.


#: The characters of a text that a failure shows.
_SHOWN: Final = 160
_NOT_WORD: Final = re.compile(r"[^\w']+|_")


def plain(text: str) -> str:
    """Return the words of a text in lower case, with a space before, between and after them."""
    return f" {' '.join(_NOT_WORD.sub(' ', text.casefold().replace('’', chr(39))).split())} "


def says(text: str, phrase: str) -> bool:
    """Return whether a text contains a phrase in whole words, or matches a regular expression in slashes.

    A phrase is found whatever its case and punctuation, and whether its numbers are digits or English words. A regular
    expression ignores only case.
    """
    if (pattern := pattern_of(phrase)) is not None:
        return pattern.search(text) is not None
    if plain(phrase) in plain(text):
        return True
    wanted = spoken_words(phrase) if phrase.isascii() else []
    return bool(wanted) and f" {' '.join(wanted)} " in f" {' '.join(spoken_words(text))} "


def shown(text: str) -> str:
    """Return a text in quotes for a failure message, on one line and shortened."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]}…")


def heard_problem(wanted: str | HeardWords, heard: str, language: str) -> str | None:
    """Return how the transcript of the caller's speech differs from the expected one; None if it is close enough."""
    bound = wanted if isinstance(wanted, HeardWords) else HeardWords(text=wanted)
    errors = word_errors(bound.text, heard, language=language)
    if errors.rate <= bound.wrong:
        return None
    differences = ", ".join(errors.differences[:5])
    return f"heard {shown(heard)}, which has {errors.rate:.0%} of the words wrong ({differences})"


def tool_problem(wanted: ToolCalled, name: str | None, arguments: str) -> str | None:
    """Return how a tool call differs from the expected one; None if it does not."""
    if name != wanted.name:
        return f"called {name}"
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return f"called {name} with arguments that are not JSON: {shown(arguments)}"
    if not isinstance(found, Mapping):
        return f"called {name} with {shown(arguments)}"
    for key, value in wanted.arguments.items():
        if key not in found:
            return f"called {name} without the argument {key}: {shown(arguments)}"
        if not _same(found[key], value):
            return f"called {name} with {key} = {shown(str(found[key]))} instead of {shown(str(value))}"
    return None


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, str) and isinstance(wanted, str):
        return plain(found) == plain(wanted)
    return bool(found == wanted)


#: How long the transcript of an answer, or what the history keeps of it, may come after the answer.
_LATE_MS: Final = 10_000
#: What is put around the sound of an answer for a recogniser, in seconds, one after the other until it hears all.
_SILENCES: Final = (0.3, 1.0)
#: Of a word, where the server does not tell when words are spoken.
_WORD_MS: Final = 400


class StepFailed(Exception):
    """Raised if an expectation of a step is not met; ``problems`` are sentences."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass
class CallReport:
    """The findings of a call."""

    #: From the end of what was said to the first sound of the answer, in ms.
    first_sounds: list[float] = field(default_factory=list)
    #: How much audio the server had heard after the end of each turn until it took it for over, in ms, where it tells.
    decided_audio: list[float] = field(default_factory=list)
    #: The checks that this server gives nothing for.
    skipped: list[str] = field(default_factory=list)
    #: What judges said.
    reasons: list[str] = field(default_factory=list)
    #: Who said what, in the order in which they began; beside it, when that was.
    talk: list[tuple[str, str]] = field(default_factory=list)
    answers: int = 0
    _ticks: list[float] = field(default_factory=list)

    def add(self, tick: float, who: str, what: str) -> None:
        """Insert into the talk, in order of time, the words ``what`` that ``who`` began to say at ``tick``."""
        place = bisect_right(self._ticks, tick)
        self._ticks.insert(place, tick)
        self.talk.insert(place, (who, what))


@dataclass(frozen=True, kw_only=True)
class CallTools:
    """Resources of all calls.

    ``times``: whether limits in real time are checked; those in audio time always are. ``patience_ms`` is the longest
    wait without a sign of activity from the server.
    """

    speech: CallersSpeech
    ears: Ears
    judge: ChatModel | None = None
    times: bool = True
    patience_ms: float = 30_000


class ScenarioCall:
    """Runs the steps of one call with ``caller``.

    ``recorded`` has the audio of both sides; ``report`` gets the findings. ``folder`` has the recordings and pictures.
    ``voice`` and ``within_ms`` (the limit for an answer) are for steps without their own. ``language`` is the caller's.
    """

    def __init__(
        self,
        caller: LiveCaller,
        tools: CallTools,
        recorded: Recorded,
        *,
        folder: Path,
        voice: CallersVoice,
        within_ms: float | None,
        language: str,
        report: CallReport,
    ) -> None:
        self._caller = caller
        self._tools = tools
        self._recorded = recorded
        self._folder = folder
        self._voice = voice
        self._within_ms = within_ms
        self._language = language
        self.report = report
        #: The place of the next answer to be heard, and of the first that can be to what was said last.
        self._next = self._of_speech = 0
        #: When the last speech began and was over, in ticks; None before it.
        self._began: int | None = None
        self._ended: int | None = None
        #: How many errors were looked at.
        self._errors = 0
        #: The calls of tools that have their result, and when the last was called and had its result.
        self._given: set[str] = set()
        self._tool_ran: tuple[int, int] | None = None
        #: The answers that the caller talked over, by their ids: all of these were heard.
        self._interrupted: set[str] = set()

    @property
    def _answers(self) -> Sequence[TimedAnswer]:
        return self._caller.reader.found.answers

    # Steps

    async def take(self, step: Step) -> bool:
        """Take a step; return False if the caller hangs up.

        Raises StepFailed, ScenarioUnusable, and OSError or WebSocketException if a lost connection cannot be resumed.
        """
        caller = self._caller
        match step:
            case SayText(say=text, voice=voice):
                await self._speak(await self._said(text, voice), text)
            case PlaySound(sound=file, text=text):
                await self._speak(self._tools.speech.recording(self._folder / file), text or f"({file})")
            case Interrupt(interrupt=how):
                await self._interrupt(how)
            case TypeText(type=text):
                self._leave()
                self._of_speech = len(self._answers)
                self._began = self._ended = caller.now
                self.report.add(caller.now, "caller", text)
                await caller.type(text)
            case StaySilent(pause=seconds):
                await caller.wait(seconds * 1000)
            case ShowPicture(show=file):
                kind = mimetypes.guess_type(file)[0] or "image/png"
                await caller.show(kind, (self._folder / file).read_bytes())
            case LoseNetwork(lose_network=seconds):
                await caller.lose_network(seconds)
            case GiveResult():
                await self._give(step)
            case HearAnswer(hear=expected):
                await self._hear(expected)
            case EndCall():
                return False
        if caller.closed is not None:
            raise StepFailed(f"the server ended the call: {caller.closed}")
        return True

    async def _said(self, text: str, voice: str | None) -> Samples:
        return await self._tools.speech.of(self._voice if voice is None else CallersVoice.parse(voice), text)

    async def _speak(self, samples: Samples, text: str) -> None:
        self._leave()
        self._of_speech = len(self._answers)
        await self._utter(samples, text)

    async def _utter(self, samples: Samples, text: str) -> None:
        begin, end = end_of_speech(samples)
        said = self._caller.say(samples)
        self._began, self._ended = said + begin, said + end
        self.report.add(said, "caller", text)
        await self._caller.until(lambda: self._caller.now >= said + end, (end + 1) * PIECE_MS)

    def _leave(self) -> None:
        """Skip the answers that have ended, so that later steps do not wait for them; add them to the talk."""
        while self._next < len(self._answers) and self._is_over(self._answers[self._next]):
            self._note(self._answers[self._next])
            self._next += 1

    async def _interrupt(self, how: Interruption) -> None:
        if how.say is not None:
            samples = await self._said(how.say, how.voice)
        else:
            samples = self._tools.speech.recording(self._folder / (how.sound or ""))
        caller = self._caller

        def target() -> TimedAnswer | None:
            running = (one for one in self._answers[self._next :] if not self._is_skipped(one, Expected()))
            return next(running, None)

        def is_time() -> bool:
            answer = target()
            return answer is not None and (self._heard_enough(answer, how) or self._is_over(answer))

        await self._until(is_time)
        answer = target()
        assert answer is not None
        if not self._heard_enough(answer, how):
            played = caller.speaker.place(answer.request_id)
            raise StepFailed(f"the answer was over after {played:.0f} ms, before it could be interrupted")
        self._next = self._answers.index(answer)
        self._interrupted.add(answer.request_id)
        self._of_speech = len(self._answers)
        await self._utter(samples, how.say or f"({how.sound})")

    def _heard_enough(self, answer: TimedAnswer, how: Interruption) -> bool:
        played = self._caller.speaker.place(answer.request_id)
        if how.after_ms is not None:
            return played > 0 and played >= how.after_ms
        assert how.after_words is not None
        return played > 0 and self._words_played(answer) > how.after_words

    async def _give(self, step: GiveResult) -> None:
        wanted, caller = step.tool_result, self._caller

        def call() -> tuple[int, str, str] | None:
            """Return tick, id and arguments of a call without a result; None until the arguments are whole."""
            for seen in caller.seen:
                if seen.kind != "call" or seen.name in self._given or seen.text != wanted.name:
                    continue
                arguments = self._arguments(seen.name)
                return None if arguments is None else (seen.tick, seen.name, arguments)
            return None

        await self._until(lambda: call() is not None, f"the tool {wanted.name} was not called")
        found = call()
        assert found is not None
        tick, call_id, arguments = found
        self._given.add(call_id)
        problem = tool_problem(ToolCalled(name=wanted.name, arguments=wanted.arguments), wanted.name, arguments)
        if problem is not None:
            raise StepFailed(problem)
        await caller.until(lambda: caller.now >= tick + wanted.after_ms / PIECE_MS, wanted.after_ms + PIECE_MS)
        self._tool_ran = (tick, caller.now)
        self._ended = caller.now
        self.report.add(caller.now, "tool result", wanted.result)
        await caller.give(call_id, wanted.result)

    def _arguments(self, call_id: str) -> str | None:
        for answer in self._answers:
            for one in answer.calls.values():
                if one.id == call_id:
                    return one.arguments if answer.finish_reason is not None or _is_whole(one.arguments) else None
        return None

    # Answers

    def _is_filler(self, answer: TimedAnswer) -> bool:
        begun = self._caller.responses.get(answer.request_id)
        return begun is not None and begun.text == StartTrigger.FILLER

    def _is_over(self, answer: TimedAnswer) -> bool:
        has_ended = answer.finish_reason is not None or bool(answer.errors)
        return has_ended and not self._caller.speaker.holds(answer.request_id)

    def _was_cut(self, answer: TimedAnswer) -> bool:
        if answer.finish_reason == "cancelled":
            return True
        dropped = [tick for tick, name in self._caller.silenced if name == answer.request_id]
        # An answer that was held goes on after its sound was dropped.
        return bool(dropped) and all(tick <= dropped[-1] for tick in self._played(answer))

    def _played(self, answer: TimedAnswer) -> list[int]:
        """Return the ticks in which an answer was played."""
        return [one.tick for one in self._caller.speaker.played if one.answer == answer.request_id]

    def _is_skipped(self, answer: TimedAnswer, expected: Expected) -> bool:
        """Return whether a step passes over an answer.

        Passed over are fillers, empty answers, bare tool calls (unless one is expected), and answers cut before they
        were heard.
        """
        if self._is_filler(answer):
            return True
        if answer.request_id in self._interrupted:
            return False
        if not self._is_over(answer) or answer.errors:
            return False
        if not answer.outputs:
            return True
        if answer.calls and not answer.texts and not answer.audio and expected.tool is None:
            return True  # what is said comes with the result
        if not self._was_cut(answer) or expected.is_about_cut:
            return False
        begun = self._caller.responses.get(answer.request_id)
        unheard = not self._caller.speaker.place(answer.request_id) and bool(answer.audio or not answer.texts)
        return unheard or (self._ended is not None and (begun is None or begun.tick < self._ended))

    def _found(self, expected: Expected) -> int | None:
        """Return the index of the next answer to check, if it has ended; None if there is none, or it goes on."""
        for place in range(self._next, len(self._answers)):
            answer = self._answers[place]
            if self._is_skipped(answer, expected):
                continue
            return place if self._is_over(answer) else None
        return None

    async def _until(self, is_so: Callable[[], bool], missing: str = "no answer") -> None:
        """Wait until ``is_so()`` is true.

        Raises StepFailed if the server ends the call, or once it has sent nothing and nothing has been played for
        ``patience_ms``.
        """
        caller = self._caller
        before, quiet_since = self._signs(), caller.now

        def waited() -> bool:
            nonlocal before, quiet_since
            if (signs := self._signs()) != before:
                before, quiet_since = signs, caller.now
            return is_so() or (caller.now - quiet_since) * PIECE_MS > self._tools.patience_ms

        while not await caller.until(waited, self._tools.patience_ms):
            if caller.closed is not None:
                raise StepFailed(f"the server ended the call: {caller.closed}")
        if not is_so():
            raise StepFailed(f"{missing} for {self._tools.patience_ms / 1000:g} s")

    def _signs(self) -> tuple[int, int, float]:
        """Return values that change while the server works: counts of messages and outputs, and the played position."""
        place = self._caller.speaker.position
        outputs = self._answers[-1].outputs if self._answers else 0
        return len(self._caller.seen), outputs, 0.0 if place is None else place[1]

    @property
    def errors(self) -> list[str]:
        """The codes of all errors of the call."""
        codes = [code for answer in self._answers for code in answer.error_codes]
        return [*codes, *self._caller.reader.found.errors]

    @property
    def unseen_errors(self) -> list[str]:
        """The codes of the errors that no step has checked."""
        return self.errors[self._errors :]

    def _take_errors(self) -> list[str]:
        """Return the codes of the errors that no step has checked, and count them as checked."""
        codes = self.unseen_errors
        self._errors += len(codes)
        return codes

    async def _hear(self, expected: Expected) -> None:
        if expected.none is not None:
            await self._hear_nothing(expected.none)
            return
        if expected.error is not None:
            await self._until(lambda: bool(self.unseen_errors), f"no error {expected.error}")
            if expected.error not in (codes := self._take_errors()):
                raise StepFailed(f"the error {', '.join(codes)} instead of {expected.error}")
            return
        await self._until(lambda: self._found(expected) is not None or bool(self.unseen_errors), self._missing())
        if codes := self._take_errors():
            raise StepFailed(f"the error {', '.join(codes)}")
        place = self._found(expected)
        assert place is not None
        for answer in self._answers[self._next : place + 1]:
            self._note(answer)
        self._next = place + 1
        problems = await self._problems(self._answers[place], place, expected)
        if problems:
            raise StepFailed(*problems)

    def _missing(self) -> str:
        running = [answer.text for answer in self._answers[self._next :] if answer.text]
        return f"no end of the answer {shown(running[0])}" if running else "no answer"

    def _note(self, answer: TimedAnswer) -> None:
        """Add an answer to the talk."""
        if self._is_filler(answer) or not answer.outputs:
            return
        first = self._first_sound(answer)
        at = self._caller.now if first is None else first
        for call in answer.calls.values():
            self.report.add(at, "tool call", f"{call.name}({call.arguments})")
        if answer.text and not self._was_cut(answer):
            self.report.add(at, "server", answer.text)
        elif answer.text:
            words = answer.text.split()
            self.report.add(at, "server", " ".join([*words[: self._words_played(answer)], "… (cut off)"]))

    def _words_played(self, answer: TimedAnswer) -> int:
        """Return how many words of an answer have begun to play; an estimate if the server sends no word times."""
        played = self._caller.speaker.place(answer.request_id)
        ends = self._caller.word_ends.get(answer.request_id)
        return round(played / _WORD_MS) if ends is None else bisect_right(ends, played) + 1

    async def _hear_nothing(self, seconds: float) -> None:
        caller = self._caller
        began, outputs = caller.now, sum(one.outputs for one in self._answers)
        await caller.wait(seconds * 1000)
        if any(caller.speaker.sounding(began, caller.now)) or sum(one.outputs for one in self._answers) > outputs:
            said = self._answers[-1].text if self._answers else ""
            raise StepFailed(f"something was said within {seconds:g} s: {shown(said)}")

    # Checks

    async def _problems(self, answer: TimedAnswer, place: int, expected: Expected) -> list[str]:
        """Return every difference between an answer and what is expected of it."""
        problems = [*self._time_problems(answer, expected), *self._cut_problems(answer, expected)]
        of_words = await self.phrase_problems(expected.said, expected.not_said, answer.text)
        # The reason is often what the server took the caller's words for.
        heard = self._transcript(place)
        problems += [f"{one}; heard {shown(heard)}" if heard else one for one in of_words]
        if expected.tool is not None and (problem := _tool_problem(expected.tool, answer)) is not None:
            problems.append(problem)
        if expected.heard is not None:
            await self._caller.until(lambda: bool(self._transcript(place)), _LATE_MS)
            if (problem := heard_problem(expected.heard, self._transcript(place), self._language)) is not None:
                problems.append(problem)
        if expected.language is not None:
            problems += self._language_problems(answer, expected.language)
        if expected.words_spoken_match is not None:
            problems += await self._spoken_problems(answer, expected.words_spoken_match)
        if expected.kept is not None or expected.kept_at_most_words is not None:
            problems += await self._kept_problems(answer, expected)
        return problems

    def _transcript(self, place: int) -> str:
        first = min(self._of_speech, place)
        return " ".join(one.heard.strip() for one in self._answers[first : place + 1] if one.heard.strip())

    def _time_problems(self, answer: TimedAnswer, expected: Expected) -> list[str]:
        problems: list[str] = []
        first = self._first_sound(answer)
        waited = None if first is None or self._ended is None else max(0, (first - self._ended) * PIECE_MS)
        if waited is not None and not self._was_cut(answer):
            self.report.first_sounds.append(waited)
            bound = expected.within_ms if expected.within_ms is not None else self._within_ms
            if self._tools.times and bound is not None and waited > bound:
                problems.append(f"the answer came after {waited} ms, not within {bound:g}")
        decided = self._caller.times.get(answer.request_id, {}).get("turn_decided_audio_ms")
        if decided is not None:
            self.report.decided_audio.append(decided)
        if (most := expected.decided_within_audio_ms) is not None:
            if decided is None:
                self.report.skipped.append("decided_within_audio_ms: the server does not tell it")
            elif decided > most:
                problems.append(f"the turn was decided {decided} ms of audio after the speech, not within {most:g}")
        if expected.sounding_during_tool is not None and self._tools.times:
            bounds = expected.sounding_during_tool
            problems += self._silence_problems(bounds.within_ms, bounds.then_every_ms)
        return problems

    def _first_sound(self, answer: TimedAnswer) -> int | None:
        if played := self._played(answer):
            return played[0]
        return None if answer.first_text_at is None else int(answer.first_text_at)

    def _silence_problems(self, within_ms: float, every_ms: float | None) -> list[str]:
        if self._tool_ran is None:
            return ["no tool has run"]
        begin, end = self._tool_ran
        sounding = self._caller.speaker.sounding(begin, end)
        first = sounding.index(True) if True in sounding else len(sounding)
        if first * PIECE_MS > within_ms:
            return [f"nothing was said for {first * PIECE_MS} ms after the tool was called, not within {within_ms:g}"]
        gap = self._caller.speaker.longest_gap_ms(begin + first, end)
        if every_ms is not None and gap > every_ms:
            return [f"nothing was said for {gap} ms while the tool ran, more than {every_ms:g}"]
        return []

    def _cut_problems(self, answer: TimedAnswer, expected: Expected) -> list[str]:
        problems: list[str] = []
        was_cut = self._was_cut(answer)
        if expected.cut is not None and was_cut != expected.cut:
            problems.append(f"the answer was {'cut' if was_cut else 'not cut'}: {shown(answer.text)}")
        if expected.stopped_within_ms is not None and self._tools.times:
            last = max(self._played(answer), default=0)
            if self._began is None or not was_cut:
                problems.append("the answer was not stopped by the caller")
            elif (ms := max(0, (last + 1 - self._began) * PIECE_MS)) > expected.stopped_within_ms:
                problems.append(
                    f"the answer stopped {ms} ms after the caller began, not within {expected.stopped_within_ms:g}"
                )
        return problems

    async def phrase_problems(
        self, said: Phrase | list[Phrase] | None, not_said: Phrase | list[Phrase] | None, text: str
    ) -> list[str]:
        """Return a problem for each phrase of ``said`` that ``text`` lacks, and of ``not_said`` that it contains.

        Questions to the judge are about the whole talk so far. Raises ScenarioUnusable if the judge cannot be used.
        """
        problems: list[str] = []
        for phrases, wanted in ((listed(said), True), (listed(not_said), False)):
            for phrase in phrases:
                if isinstance(phrase, Judged):
                    is_so, reason = await self._judged(phrase.judge)
                    if is_so != wanted:
                        problems.append(f"the judge says {'yes' if is_so else 'no'} to {phrase.judge!r}: {reason}")
                elif says(text, phrase) != wanted:
                    problems.append(f"said {shown(text)}, {'without' if wanted else 'with'} {phrase!r}")
        return problems

    async def _judged(self, question: str) -> tuple[bool, str]:
        assert self._tools.judge is not None, "a scenario with a judge is not run without one"
        verdict = await self._tools.judge.judge(question, self.report.talk)
        self.report.reasons.append(f"{question} — {verdict.reason}")
        return verdict.is_yes, verdict.reason

    def _language_problems(self, answer: TimedAnswer, wanted: str) -> list[str]:
        found = self._caller.languages.get(answer.request_id)
        if found is None:
            self.report.skipped.append("language: the server does not tell it")
            return []
        same = found == wanted or found.partition("-")[0] == wanted
        return [] if same else [f"the speech was taken for {found}, not {wanted}"]

    def heard_sound(self, answer: TimedAnswer) -> Samples:
        """Return all sound that the loudspeaker played from the beginning of an answer to its end, at 16 kHz."""
        ticks = self._played(answer)
        if not ticks:
            return np.zeros(0, np.float32)
        size = 2 * PLAYED_TICK
        sound = bytes(self._recorded.played[ticks[0] * size : (ticks[-1] + 1) * size])
        return resampled(samples_from_bytes(sound, SampleLayout.S16), PLAYED_RATE, MIC_RATE)

    async def _spoken_problems(self, answer: TimedAnswer, most: float) -> list[str]:
        sound = self.heard_sound(answer)
        # Small recognisers sometimes write a sentence twice, which silence around the sound changes.
        for silence in _SILENCES:
            heard = await self._tools.ears.words(np.pad(sound, int(silence * MIC_RATE)))
            errors = word_errors(answer.text, heard)
            if errors.rate <= most:
                return []
        differences = ", ".join(errors.differences[:5])
        return [f"the sound of {shown(answer.text)} has {errors.rate:.0%} of the words wrong ({differences})"]

    async def _kept_problems(self, answer: TimedAnswer, expected: Expected) -> list[str]:
        kept = await self._caller.keeps(answer.request_id, _LATE_MS)
        if kept is None:
            self.report.skipped.append("kept: the server does not tell it (protocol: realtime does)")
            return []
        problems: list[str] = []
        if expected.kept is not None and plain(kept) != plain(expected.kept):
            problems.append(f"the history keeps {shown(kept)} instead of {expected.kept!r}")
        words = len(kept.split())
        if expected.kept_at_most_words is not None and words > expected.kept_at_most_words:
            problems.append(
                f"the history keeps {words} words: {shown(kept)}, not at most {expected.kept_at_most_words}"
            )
        return problems

    # The whole call

    async def play(self, persona: Persona, model: ChatModel) -> None:
        """Let ``model`` play the caller, until it hangs up or its turns are over. Raises as ``take`` does."""
        for _ in range(persona.turns):
            said = await model.play(persona, self.report.talk)
            if said is None:
                return
            await self.take(SayText(say=said))
            await self.take(HearAnswer(hear=Expected()))

    def finish(self) -> None:
        """Add the answers that no step waited for to the talk, and count all answers, in the report."""
        for answer in self._answers[self._next :]:
            self._note(answer)
        self._next = len(self._answers)
        self.report.answers = sum(not self._is_skipped(one, Expected()) for one in self._answers)


def _is_whole(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), Mapping)
    except orjson.JSONDecodeError:
        return False


def _tool_problem(wanted: ToolCalled, answer: TimedAnswer) -> str | None:
    """Return why none of an answer's tool calls is the expected one; None if one is."""
    found: list[Any] = [tool_problem(wanted, call.name, call.arguments) for call in answer.calls.values()]
    if None in found:
        return None
    return found[0] if found else f"no tool was called; said {shown(answer.text)}"
