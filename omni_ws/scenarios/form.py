"""The form of scenario files, as structs, and their parser, which is strict: errors name the file and line.

The file is YAML of the core schema of YAML 1.2 (so "no" is a text), or JSON, which is YAML. It has neither aliases nor
tags, at most MAX_BYTES bytes, and at most MAX_DEPTH levels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from omni_ws.installing import install_command

#: The largest file.
MAX_BYTES: Final = 1 << 20
#: The most mappings and lists inside each other.
MAX_DEPTH: Final = 32
#: The most repetitions of a scenario.
MAX_REPEAT: Final = 1000

_Ms: TypeAlias = Annotated[float, Meta(ge=0, le=600_000)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=600)]
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100)]
_Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=10_000)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=10_000)]


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping in which an unknown key is an error."""


# What is expected


class Judged(_Strict, frozen=True, kw_only=True):
    """A question to a language model; the expected answer is yes under ``said``, and no under ``not_said``."""

    judge: _Text


class HeardWords(_Strict, frozen=True, kw_only=True):
    """The words that the server should have understood; ``wrong`` is the highest word error rate that is accepted."""

    text: _Text
    wrong: _Share = 0.0


class ToolCalled(_Strict, frozen=True, kw_only=True):
    """An expected tool call: its arguments have at least these values.

    Texts are compared word by word, without case and punctuation.
    """

    name: _Name
    arguments: dict[str, Any] = {}


class SoundingMeanwhile(_Strict, frozen=True, kw_only=True):
    """Limits while a tool runs: the time until the first sound, and the longest silence from then to the result."""

    within_ms: _Ms
    then_every_ms: _Ms | None = None


Phrase: TypeAlias = _Text | Judged


class Expected(_Strict, frozen=True, kw_only=True):
    """The expectations of the next answer; see docs/testing.md for each key."""

    said: Phrase | list[Phrase] | None = None
    not_said: Phrase | list[Phrase] | None = None
    heard: _Text | HeardWords | None = None
    tool: ToolCalled | None = None
    within_ms: _Ms | None = None
    decided_within_audio_ms: _Ms | None = None
    cut: bool | None = None
    stopped_within_ms: _Ms | None = None
    language: _Name | None = None
    words_spoken_match: _Share | None = None
    kept: _Text | None = None
    kept_at_most_words: _Count | None = None
    error: _Name | None = None
    none: Annotated[float, Meta(gt=0, le=600)] | None = None
    sounding_during_tool: SoundingMeanwhile | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        for name in ("none", "error"):
            if name in given and len(given) > 1:
                raise ValueError(f"`{name}` stands alone: there is no answer that other keys could be about")

    @property
    def is_about_cut(self) -> bool:
        """Whether an answer that the caller cut off may be the one that is checked."""
        asked = (self.cut, self.stopped_within_ms, self.kept, self.kept_at_most_words)
        return any(one is not None for one in asked)


# Steps


class SayText(_Strict, frozen=True, kw_only=True):
    """A step: the caller says a text, with ``voice`` or else with the voice of the scenario."""

    say: _Text
    voice: _Name | None = None


class PlaySound(_Strict, frozen=True, kw_only=True):
    """A step: the caller plays a recording, whose path is relative to the file; ``text`` is what the recording says."""

    sound: _Name
    text: str = ""


class HearAnswer(_Strict, frozen=True, kw_only=True):
    """A step: wait for the end of the next answer, and check it; or wait for an expected error, or for silence."""

    hear: Expected


class Interruption(_Strict, frozen=True, kw_only=True):
    """Speech over an answer, once ``after_words`` words or ``after_ms`` milliseconds of the answer were played.

    It has either ``say`` or ``sound``, and either ``after_words`` or ``after_ms``.
    """

    say: _Text | None = None
    voice: _Name | None = None
    sound: _Name | None = None
    after_words: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    after_ms: _Ms | None = None

    def __post_init__(self) -> None:
        if (self.say is None) == (self.sound is None):
            raise ValueError("an interruption has `say` or `sound`")
        if (self.after_words is None) == (self.after_ms is None):
            raise ValueError("an interruption has `after_words` or `after_ms`")


class Interrupt(_Strict, frozen=True, kw_only=True):
    """A step: the caller talks over the answer that plays, or comes next."""

    interrupt: Interruption


class TypeText(_Strict, frozen=True, kw_only=True):
    """A step: the caller types a request."""

    type: _Text


class StaySilent(_Strict, frozen=True, kw_only=True):
    """A step: the caller is silent for this many seconds; answers go on."""

    pause: _Seconds


class ShowPicture(_Strict, frozen=True, kw_only=True):
    """A step: the caller sends a picture, whose path is relative to the file, as part of the next request."""

    show: _Name


class DialKeys(_Strict, frozen=True, kw_only=True):
    """A step: the caller presses keys of a telephone. No front end takes keys yet: the scenario is skipped."""

    dial: Annotated[str, Meta(pattern=r"^[0-9*#A-D]{1,64}$")]


class LoseNetwork(_Strict, frozen=True, kw_only=True):
    """A step: the connection breaks, and the session is resumed after this many seconds."""

    lose_network: _Seconds


class ResultOfTool(_Strict, frozen=True, kw_only=True):
    """The tool call to wait for, the arguments to check, and the ``result`` to return ``after_ms`` after the call."""

    name: _Name
    result: str
    arguments: dict[str, Any] = {}
    after_ms: _Ms = 0


class GiveResult(_Strict, frozen=True, kw_only=True):
    """A step: the caller's client returns the result of a tool."""

    tool_result: ResultOfTool


class EndCall(_Strict, frozen=True, kw_only=True):
    """A step: the caller hangs up; written as ``hang_up`` alone."""


Step: TypeAlias = (
    SayText
    | PlaySound
    | HearAnswer
    | Interrupt
    | TypeText
    | StaySilent
    | ShowPicture
    | DialKeys
    | LoseNetwork
    | GiveResult
    | EndCall
)
#: Steps by the key that names them.
_STEPS: Final = {kind.__struct_fields__[0]: kind for kind in get_args(Step) if kind is not EndCall}


# Scenarios


class Persona(_Strict, frozen=True, kw_only=True):
    """A caller that a language model plays, for at most ``turns`` turns; ``llm`` is a URL or ``qwen``."""

    who: _Text
    goal: _Text
    llm: _Name
    turns: Annotated[int, Meta(ge=1, le=100)] = 8


class CallersRoom(_Strict, frozen=True, kw_only=True):
    """The acoustics of the caller.

    ``noise_db`` is in dBFS, ``echo_db`` in dB relative to the played audio. ``loss`` is the share of the microphone's
    pieces of 20 ms that arrive as silence.
    """

    noise_db: Annotated[float, Meta(ge=-120, le=0)] | None = None
    band: Annotated[str, Meta(pattern="^(wide|telephone)$")] = "wide"
    echo_db: Annotated[float, Meta(ge=-120, le=0)] | None = None
    echo_delay_ms: Annotated[int, Meta(ge=0, le=1000)] = 120
    loss: _Share = 0.0


class Bounds(_Strict, frozen=True, kw_only=True):
    """Upper limits for the medians of the times of answers, over all repetitions of a scenario."""

    within_ms: _Ms | None = None
    decided_within_audio_ms: _Ms | None = None


class WholeCall(_Strict, frozen=True, kw_only=True):
    """The expectations of a whole call; the medians are over all repetitions of the scenario.

    Without ``errors``, a call fails by each error that no step expects.
    """

    answers: _Count | None = None
    errors: _Count | None = None
    said: Phrase | list[Phrase] | None = None
    not_said: Phrase | list[Phrase] | None = None
    median: Bounds | None = None


class Scenario(_Strict, frozen=True, kw_only=True):
    """One call. ``caller`` has the steps as plain values; PlacedScenario has them parsed."""

    name: _Name
    tags: list[_Name] = []
    protocol: Annotated[str, Meta(pattern="^(native|realtime)$")] | None = None
    voice: _Name | None = None
    room: CallersRoom = CallersRoom()
    session: dict[str, Any] = {}
    repeat: Annotated[int, Meta(ge=1, le=MAX_REPEAT)] = 1
    caller: list[Any] = []
    persona: Persona | None = None
    expect: WholeCall = WholeCall()


class ForEachAnswer(_Strict, frozen=True, kw_only=True):
    """Limits for each answer that a step waits for without limits of its own."""

    within_ms: _Ms | None = None


class _File(_Strict, frozen=True, kw_only=True):
    scenarios: Annotated[list[Any], Meta(min_length=1)]
    server: dict[str, Any] = {}
    voice: _Name | None = None
    protocol: Annotated[str, Meta(pattern="^(native|realtime)$")] | None = None
    session: dict[str, Any] = {}
    defaults: ForEachAnswer = ForEachAnswer()


class PlacedStep(Struct, frozen=True):
    """A step, and its line in the file."""

    line: int
    step: Step


class PlacedScenario(Struct, frozen=True):
    """A scenario with its steps, and its line in the file."""

    line: int
    scenario: Scenario
    steps: tuple[PlacedStep, ...]


class ScenarioFile(Struct, frozen=True, kw_only=True):
    """A scenario file that was parsed."""

    path: Path
    server: dict[str, Any]
    voice: str | None
    protocol: str | None
    session: dict[str, Any]
    defaults: ForEachAnswer
    scenarios: tuple[PlacedScenario, ...]


class ScenarioUnusable(Exception):
    """Raised if a scenario cannot be run, for example without a voice or a language model; the message says why."""


class FormError(Exception):
    """Raised if a file cannot be read or is malformed; ``problems`` are sentences, with file and line if known."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_file(path: Path) -> ScenarioFile:
    """Read and parse a scenario file. Raises FormError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FormError([f"{path}: {error.strerror or 'cannot be read'}"]) from None
    return parse(data, path)


def parse(data: bytes, path: Path) -> ScenarioFile:
    """Parse the content of a scenario file. Raises FormError."""
    reading = _Reading(path)
    if len(data) > MAX_BYTES:
        raise reading.refusal(1, f"more than {MAX_BYTES:,} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise reading.refusal(data.count(b"\n", 0, error.start) + 1, "not UTF-8") from None
    file = reading.convert(reading.value(text), _File, ())
    if file is None:
        raise FormError(reading.problems)
    scenarios = [reading.scenario(one, number) for number, one in enumerate(file.scenarios)]
    reading.check_names(scenarios)
    if reading.problems:
        raise FormError(reading.problems)
    return ScenarioFile(
        path=path,
        server=file.server,
        voice=file.voice,
        protocol=file.protocol,
        session=file.session,
        defaults=file.defaults,
        scenarios=tuple(one for one in scenarios if one is not None),
    )


_Place: TypeAlias = tuple[str | int, ...]
_T = TypeVar("_T")
#: Where msgspec says that an error is, and the key that it names.
_AT: Final = re.compile(r" - at `\$([^`]*)`$")
_PART: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_REGEX: Final = re.compile(r"/(.*)/", re.DOTALL)


class _Reading:
    """One file while it is parsed: the line of each value in it, and the problems so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[_Place, int] = {}
        self.problems: list[str] = []

    def refusal(self, line: int, problem: str) -> FormError:
        return FormError([f"{self._path}:{line}: {problem}"])

    def _add(self, place: _Place, problem: str) -> None:
        self.problems.append(f"{self._path}:{self.line(place)}: {problem}")

    def line(self, place: _Place) -> int:
        while place and place not in self._lines:
            place = place[:-1]
        return self._lines.get(place, 1)

    # YAML

    def value(self, text: str) -> Any:
        """Return the one document of the file as plain values. Raises FormError."""
        try:
            import yaml
        except ImportError:
            raise FormError([f"scenarios need PyYAML: {install_command()}"]) from None

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            events = yaml.parse(text, Loader=loader)
            while not isinstance(event := next(events), yaml.DocumentStartEvent):
                if isinstance(event, yaml.StreamEndEvent):
                    raise self.refusal(1, "the file is empty")
            value = self._node(next(events), events, ())
            next(events)  # the end of the document
            if not isinstance(event := next(events), yaml.StreamEndEvent):
                mark = event.start_mark
                raise self.refusal(1 if mark is None else mark.line + 1, "a second document")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise self.refusal(1 if mark is None else mark.line + 1, f"not YAML: {error.problem}") from None
        except yaml.YAMLError as error:
            raise self.refusal(1, f"not YAML: {error}") from None
        return value

    def _node(self, event: Any, events: Iterator[Any], place: _Place) -> Any:
        line = event.start_mark.line + 1
        self._lines.setdefault(place, line)
        kind = type(event).__name__
        if kind == "AliasEvent" or event.anchor is not None:
            raise self.refusal(line, "aliases and anchors are not allowed")
        if event.tag is not None and event.tag != "!":
            raise self.refusal(line, "tags are not allowed")
        if kind == "ScalarEvent":
            return event.value if event.style or event.tag else _scalar(event.value)
        if len(place) >= MAX_DEPTH:
            raise self.refusal(line, f"more than {MAX_DEPTH} levels")
        if kind == "SequenceStartEvent":
            items: list[Any] = []
            while type(event := next(events)).__name__ != "SequenceEndEvent":
                items.append(self._node(event, events, (*place, len(items))))
            return items
        found: dict[str, Any] = {}
        while type(event := next(events)).__name__ != "MappingEndEvent":
            if type(event).__name__ != "ScalarEvent" or event.anchor is not None:
                raise self.refusal(event.start_mark.line + 1, "a key has to be a text")
            key, at = event.value, event.start_mark.line + 1
            if key in found:
                raise self.refusal(at, f"the key `{key}` is there twice")
            self._lines[(*place, key)] = at
            found[key] = self._node(next(events), events, (*place, key))
        return found

    # Structs

    def convert(self, value: Any, kind: type[_T], place: _Place) -> _T | None:
        """Convert a value at ``place``; None after a problem, which is noted."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            said = str(error)
            if (at := _AT.search(said)) is not None:
                said = said[: at.start()]
                place += tuple(key if key else int(number or 0) for key, number in _PART.findall(at[1]))
            if (unknown := _UNKNOWN.search(said)) is not None:
                said = f"unknown key `{unknown[1]}`"
                place = (*place, unknown[1])
            self._add(
                place, said.replace("Object missing required field", "missing key").replace("`object`", "mapping")
            )
            return None

    def scenario(self, value: Any, number: int) -> PlacedScenario | None:
        """Convert a scenario; None if its own fields are wrong. Steps with a problem are noted and left out."""
        place: _Place = ("scenarios", number)
        found = self.convert(value, Scenario, place)
        if found is None:
            return None
        if bool(found.caller) == (found.persona is not None):
            self._add(place, "a scenario has either `caller`, with steps, or `persona`")
        steps = [self._step(one, (*place, "caller", at)) for at, one in enumerate(found.caller)]
        self._check_phrases([found.expect.said, found.expect.not_said], (*place, "expect"))
        return PlacedScenario(self.line(place), found, tuple(one for one in steps if one is not None))

    def _step(self, value: Any, place: _Place) -> PlacedStep | None:
        if value == "hang_up":
            return PlacedStep(self.line(place), EndCall())
        kinds = [_STEPS[key] for key in value if key in _STEPS] if isinstance(value, dict) else []
        if len(kinds) != 1:
            self._add(place, f"a step has one of the keys {', '.join(_STEPS)}, or is `hang_up`")
            return None
        step: Step | None = self.convert(value, kinds[0], place)
        if step is None:
            return None
        if isinstance(step, HearAnswer):
            self._check_phrases([step.hear.said, step.hear.not_said], (*place, "hear"))
        return PlacedStep(self.line(place), step)

    def _check_phrases(self, phrases: list[Phrase | list[Phrase] | None], place: _Place) -> None:
        for phrase in (one for some in phrases for one in listed(some)):
            if isinstance(phrase, str) and (regex := _REGEX.fullmatch(phrase)) is not None:
                try:
                    re.compile(regex[1])
                except re.error as error:
                    self._add(place, f"not a regular expression: {phrase}: {error}")

    def check_names(self, scenarios: list[PlacedScenario | None]) -> None:
        """Note a problem for each scenario whose name another one has."""
        names: set[str] = set()
        for number, one in enumerate(scenarios):
            if one is not None and one.scenario.name in names:
                self._add(("scenarios", number), f"a second scenario with the name {one.scenario.name}")
            elif one is not None:
                names.add(one.scenario.name)


def listed(phrases: Phrase | list[Phrase] | None) -> list[Phrase]:
    """Return one phrase, several or none as a list."""
    if phrases is None:
        return []
    return phrases if isinstance(phrases, list) else [phrases]


def pattern_of(phrase: str) -> re.Pattern[str] | None:
    """Return the regular expression of a phrase in slashes, which ignores case; None for plain text."""
    found = _REGEX.fullmatch(phrase)
    return None if found is None else re.compile(found[1], re.IGNORECASE)


_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE"})
_FALSE: Final = frozenset({"false", "False", "FALSE"})
_WHOLE: Final = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER: Final = re.compile(r"[-+]?(\.[0-9]{1,18}|[0-9]{1,18}(\.[0-9]{0,18})?)([eE][-+]?[0-9]{1,3})?")


def _scalar(text: str) -> str | int | float | bool | None:
    """Return the value of a plain scalar by the core schema of YAML 1.2, without its octal and hexadecimal numbers."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
