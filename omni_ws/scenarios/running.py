"""Runs of scenarios: each with its seed, several side by side, their results in the order of the files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeAlias

from websockets.exceptions import WebSocketException

from omni_ws.caller.live_caller import Echo, LiveCaller, Recorded, SettingsRefused
from omni_ws.caller.script import Target
from omni_ws.caller.sounds import room_noise
from omni_ws.caller.wires import Wire
from omni_ws.scenarios.call import CallReport, CallTools, ScenarioCall, StepFailed
from omni_ws.scenarios.form import (
    HearAnswer,
    Interrupt,
    Interruption,
    Judged,
    PlacedScenario,
    PlaySound,
    SayText,
    Scenario,
    ScenarioFile,
    ShowPicture,
    listed,
)
from omni_ws.scenarios.judge import ChatModel, NoJudge
from omni_ws.scenarios.sessions import NotHere, merged, wire_of
from omni_ws.scenarios.speech import CallersSpeech, CallersVoice, NoSpeech

Verdict: TypeAlias = Literal["passed", "failed", "skipped"]
#: The noise of a room that has none of its own, in dBFS; and how long it is until it repeats itself.
_QUIET_DB: Final = -70.0
_NOISE_SEC: Final = 30


@dataclass
class RunResult:
    """What became of one run of a scenario."""

    file: Path
    line: int
    name: str
    seed: int
    verdict: Verdict = "passed"
    #: Why it failed, with file and line, or why it was skipped.
    reasons: list[str] = field(default_factory=list)
    report: CallReport = field(default_factory=CallReport)
    seconds: float = 0.0
    recorded: Recorded = field(default_factory=Recorded)
    #: The wire of the call, and the first message of the server.
    wire: Wire | None = None
    created: dict[str, Any] = field(default_factory=dict)

    def fail(self, line: int, *problems: str) -> None:
        self.verdict = "failed"
        self.reasons += [f"{self.file}:{line}: {problem}" for problem in problems]

    def skip(self, reason: str) -> None:
        self.verdict = "skipped"
        self.reasons.append(reason)


@dataclass
class ScenarioResult:
    """What became of all runs of a scenario, and of what is expected of them together."""

    file: Path
    scenario: PlacedScenario
    runs: list[RunResult]
    #: Why they failed together.
    reasons: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.scenario.scenario.name

    @property
    def verdict(self) -> Verdict:
        verdicts = {run.verdict for run in self.runs}
        if self.reasons or "failed" in verdicts:
            return "failed"
        return "passed" if "passed" in verdicts else "skipped"

    @property
    def first_reason(self) -> str:
        of_runs = (reason for run in self.runs if run.verdict == self.verdict for reason in run.reasons)
        return next(of_runs, self.reasons[0] if self.reasons else "")

    @property
    def first_sounds(self) -> list[float]:
        return [value for run in self.runs for value in run.report.first_sounds]

    def judge(self, *, times: bool) -> None:
        """Check what is expected of all runs together. Bounds in audio count without ``times``, too."""
        bound = self.scenario.scenario.expect.median
        if bound is None:
            return
        decided = [value for run in self.runs for value in run.report.decided_audio]
        if times:
            self._compare("first sounds", "ms", self.first_sounds, bound.within_ms)
        self._compare("ends of turns", "ms of audio", decided, bound.decided_within_audio_ms)

    def _compare(self, what: str, unit: str, found: Sequence[float], most: float | None) -> None:
        if most is not None and found and (middle := median(found)) > most:
            place = f"{self.file}:{self.scenario.line}"
            self.reasons.append(f"{place}: the median of the {what} is {middle:.0f} {unit}, not within {most:g}")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How scenarios are run. ``path`` replaces that of the front end; ``seed`` is that of the first run."""

    tools: CallTools
    voice: CallersVoice
    model_of: Callable[[str], ChatModel]
    realtime_only: bool = False
    path: str | None = None
    repeat: int | None = None
    seed: int = 0
    jobs: int = 4


def texts_of(file: ScenarioFile, scenario: PlacedScenario, voice: CallersVoice) -> Iterator[tuple[CallersVoice, str]]:
    """Yield what the caller of a scenario says, and by which voice. Raises NoSpeech."""
    default = voice_of(file, scenario.scenario, voice)
    for placed in scenario.steps:
        match placed.step:
            case SayText(say=text, voice=own):
                yield (default if own is None else CallersVoice.parse(own)), text
            case Interrupt(interrupt=how) if how.say is not None:
                yield (default if how.voice is None else CallersVoice.parse(how.voice)), how.say


def voice_of(file: ScenarioFile, scenario: Scenario, voice: CallersVoice) -> CallersVoice:
    """Return the voice of a scenario. Raises NoSpeech."""
    named = scenario.voice or file.voice
    return voice if named is None else CallersVoice.parse(named)


def check_files(file: ScenarioFile, scenario: PlacedScenario, speech: CallersSpeech) -> Iterator[str]:
    """Yield a problem for each recording and picture that cannot be read. ``speech`` keeps the recordings."""
    for placed in scenario.steps:
        match placed.step:
            case PlaySound(sound=name) | Interrupt(interrupt=Interruption(sound=str(name))):
                read: Callable[[Path], object] = speech.recording
            case ShowPicture(show=name):
                read = Path.read_bytes
            case _:
                continue
        try:
            read(file.path.parent / name)
        except (NoSpeech, OSError) as error:
            yield f"{file.path}:{placed.line}: {error}"


def needs_judge(scenario: PlacedScenario) -> bool:
    """Whether a scenario asks a judge."""
    asked = [scenario.scenario.expect.said, scenario.scenario.expect.not_said]
    for placed in scenario.steps:
        if isinstance(placed.step, HearAnswer):
            asked += [placed.step.hear.said, placed.step.hear.not_said]
    return any(isinstance(phrase, Judged) for some in asked for phrase in listed(some))


async def run_all(
    work: Sequence[tuple[ScenarioFile, PlacedScenario]], target: Target, options: RunOptions
) -> AsyncIterator[ScenarioResult]:
    """Run scenarios, ``options.jobs`` at a time; yield their results in order, each once all of its runs are over."""
    slots = asyncio.Semaphore(options.jobs)

    async def one(file: ScenarioFile, scenario: PlacedScenario, seed: int) -> RunResult:
        async with slots:
            return await _run(file, scenario, seed, target, options)

    tasks = [
        [
            asyncio.create_task(one(file, scenario, options.seed + number), name=f"call {scenario.scenario.name}")
            for number in range(options.repeat or scenario.scenario.repeat)
        ]
        for file, scenario in work
    ]
    try:
        for (file, scenario), runs in zip(work, tasks, strict=True):
            found = ScenarioResult(file.path, scenario, list(await asyncio.gather(*runs)))
            found.judge(times=options.tools.times)
            yield found
    finally:
        for task in (task for runs in tasks for task in runs):
            task.cancel()
        await asyncio.gather(*(task for runs in tasks for task in runs), return_exceptions=True)


async def _run(
    file: ScenarioFile, scenario: PlacedScenario, seed: int, target: Target, options: RunOptions
) -> RunResult:
    result = RunResult(file.path, scenario.line, scenario.scenario.name, seed)
    began = asyncio.get_running_loop().time()
    asked = "realtime" if options.realtime_only else scenario.scenario.protocol or file.protocol or "native"
    try:
        if needs_judge(scenario) and options.tools.judge is None:
            raise NotHere("needs: a judge (--judge)")
        session = merged(file.session, scenario.scenario.session)
        path = options.path if options.realtime_only or asked == "native" else None
        result.wire = wire_of(scenario, session, protocol=asked, path=path)
        language = session.get("input_audio", {}).get("language", "en")
        await _call(file, scenario, result, target, options, str(language).partition("-")[0])
    except NotHere as reason:
        result.skip(str(reason))
    except SettingsRefused as error:
        result.fail(scenario.line, f"the server does not take the session: {error}")
    except (OSError, WebSocketException, TimeoutError) as error:
        result.fail(scenario.line, f"no session: {error or type(error).__name__}")
    except (NoSpeech, NoJudge) as error:
        result.fail(scenario.line, str(error))
    result.seconds = asyncio.get_running_loop().time() - began
    return result


async def _call(
    file: ScenarioFile,
    scenario: PlacedScenario,
    result: RunResult,
    target: Target,
    options: RunOptions,
    language: str,
) -> None:
    room = scenario.scenario.room
    level = _QUIET_DB if room.noise_db is None else room.noise_db
    assert result.wire is not None
    caller = LiveCaller(
        target,
        result.wire,
        echo=None if room.echo_db is None else Echo(room.echo_db, room.echo_delay_ms),
        noise=await asyncio.to_thread(room_noise, _NOISE_SEC, level, seed=result.seed),
        loss=room.loss,
        seed=result.seed,
        recorded=result.recorded,
    )
    async with caller:
        result.created = caller.created
        call = ScenarioCall(
            caller,
            options.tools,
            result.recorded,
            folder=file.path.parent,
            voice=voice_of(file, scenario.scenario, options.voice),
            within_ms=file.defaults.within_ms,
            language=language,
        )
        result.report = call.report
        line = scenario.line
        try:
            if (persona := scenario.scenario.persona) is not None:
                await call.play(persona, options.model_of(persona.llm))
            for placed in scenario.steps:
                line = placed.line
                if not await call.take(placed.step):
                    break
        except StepFailed as failure:
            result.fail(line, *failure.problems)
        call.finish()
        if result.verdict == "passed" and (problems := await _whole_call(scenario.scenario, call)):
            result.fail(scenario.line, *problems)


async def _whole_call(scenario: Scenario, call: ScenarioCall) -> list[str]:
    """What is not as expected in the call as a whole."""
    expect, report = scenario.expect, call.report
    problems: list[str] = []
    if expect.answers is not None and report.answers != expect.answers:
        problems.append(f"{report.answers} answers, not {expect.answers}")
    if expect.errors is not None and len(call.errors) != expect.errors:
        problems.append(f"{len(call.errors)} errors ({', '.join(call.errors) or 'none'}), not {expect.errors}")
    elif expect.errors is None and call.unseen_errors:
        problems.append(f"the error {', '.join(call.unseen_errors)}")
    said = " ".join(what for who, what in report.talk if who == "server")
    return problems + await call.phrase_problems(expect.said, expect.not_said, said)
