"""The command ``omni-ws test``."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit
from xml.etree import ElementTree

import numpy as np
import orjson
from websockets.exceptions import WebSocketException

from omni_ws import __version__
from omni_ws.audio.pcm import SampleLayout, pcm16_from_samples, resampled, samples_from_bytes
from omni_ws.caller.live_caller import (
    MIC_RATE,
    Echo,
    LiveCaller,
    Recorded,
    SettingsRefused,
    Wire,
    room_noise,
)
from omni_ws.caller.live_caller import SPEAKER_RATE as PLAYED_RATE
from omni_ws.caller.script import Target, above_zero, count
from omni_ws.cli import INTERRUPTED, USAGE_ERROR
from omni_ws.client.audio import Pcm16, write_wav
from omni_ws.scenarios.call import CallReport, CallTools, ChatModel, ScenarioCall, StepFailed
from omni_ws.scenarios.form import (
    MAX_REPEAT,
    FormError,
    HearAnswer,
    Interrupt,
    Interruption,
    Judged,
    PlacedScenario,
    PlaySound,
    SayText,
    Scenario,
    ScenarioFile,
    ScenarioUnusable,
    ShowPicture,
    listed,
    read_file,
)
from omni_ws.scenarios.servers import (
    NoServer,
    NotHere,
    merged,
    own_server,
    run_interruptible,
    until_started,
    wire_of,
)
from omni_ws.scenarios.speech import CallersSpeech, CallersVoice, Ears, best_voice
from omni_ws.weights import fetched_file
from omni_ws.wire.recording import FORMAT, VERSION, EndedLine, HeaderLine, encode_line

Verdict: TypeAlias = Literal["passed", "failed", "skipped"]
#: The noise of a room that has none of its own, in dBFS; and how long it is until it repeats itself.
_QUIET_DB: Final = -70.0
_NOISE_SEC: Final = 30


@dataclass
class RunResult:
    """The result of one run of a scenario."""

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


@dataclass
class ScenarioResult:
    """The results of all runs of a scenario, and of the checks on all runs together."""

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
        """Check the expectations on all runs together, and add the failed ones to ``reasons``.

        A limit of something that no run has measured is a skipped check. Without ``times``, only limits in audio time
        are checked.
        """
        bound = self.scenario.scenario.expect.median
        if bound is None:
            return
        decided = [value for run in self.runs for value in run.report.decided_audio]
        if times:
            self._compare("first sounds", "ms", self.first_sounds, bound.within_ms)
        self._compare("ends of turns", "ms of audio", decided, bound.decided_within_audio_ms)

    def _compare(self, what: str, unit: str, found: Sequence[float], most: float | None) -> None:
        if most is None:
            return
        if not found:
            ran = [run for run in self.runs if run.verdict != "skipped"]
            for run in ran[:1]:
                run.report.skipped.append(f"median of the {what}: nothing was measured")
        elif (middle := median(found)) > most:
            place = f"{self.file}:{self.scenario.line}"
            self.reasons.append(f"{place}: the median of the {what} is {middle:.0f} {unit}, not within {most:g}")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all runs.

    ``voice`` speaks where a scenario names no voice; ``model_of`` returns the model for a persona's ``llm``. With
    ``realtime_only``, all calls use the Realtime API. ``path`` replaces the path of the front end, and ``repeat`` the
    number of runs of each scenario. ``seed`` is the seed of the first run; ``jobs`` is the number of calls at a time.
    """

    tools: CallTools
    voice: CallersVoice
    model_of: Callable[[str], ChatModel]
    realtime_only: bool = False
    path: str | None = None
    repeat: int | None = None
    seed: int = 0
    jobs: int = 4


def texts_of(file: ScenarioFile, scenario: PlacedScenario, voice: CallersVoice) -> Iterator[tuple[CallersVoice, str]]:
    """Yield each text that the caller of a scenario says, with its voice. Raises ScenarioUnusable."""
    default = voice_of(file, scenario.scenario, voice)
    for placed in scenario.steps:
        match placed.step:
            case SayText(say=text, voice=own):
                yield (default if own is None else CallersVoice.parse(own)), text
            case Interrupt(interrupt=how) if how.say is not None:
                yield (default if how.voice is None else CallersVoice.parse(how.voice)), how.say


def voice_of(file: ScenarioFile, scenario: Scenario, voice: CallersVoice) -> CallersVoice:
    """Return the voice that a scenario or its file names, otherwise ``voice``. Raises ScenarioUnusable."""
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
        except (ScenarioUnusable, OSError) as error:
            yield f"{file.path}:{placed.line}: {error}"


def needs_judge(scenario: PlacedScenario) -> bool:
    """Return whether a language model must judge something in a scenario."""
    asked = [scenario.scenario.expect.said, scenario.scenario.expect.not_said]
    for placed in scenario.steps:
        if isinstance(placed.step, HearAnswer):
            asked += [placed.step.hear.said, placed.step.hear.not_said]
    return any(isinstance(phrase, Judged) for some in asked for phrase in listed(some))


async def run_all(
    work: Sequence[tuple[ScenarioFile, PlacedScenario]], target: Target, options: RunOptions
) -> AsyncIterator[ScenarioResult]:
    """Run scenarios, ``options.jobs`` calls at a time.

    Yields their results in order, each once all runs of the scenario have ended.
    """
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
    session = merged(file.session, scenario.scenario.session)
    path = options.path if options.realtime_only or asked == "native" else None
    try:
        if needs_judge(scenario) and options.tools.judge is None:
            raise NotHere("needs: a judge (--judge)")
        result = replace(result, wire=wire_of(scenario, session, protocol=asked, path=path))
    except NotHere as reason:
        return replace(result, verdict="skipped", reasons=[str(reason)])
    try:
        await _call(file, scenario, result, target, options, session)
    except SettingsRefused as error:
        result.fail(scenario.line, f"the server does not take the session: {error}")
    except (OSError, WebSocketException, TimeoutError) as error:
        result.fail(scenario.line, f"no session: {error or type(error).__name__}")
    except ScenarioUnusable as error:
        result.fail(scenario.line, str(error))
    return replace(result, seconds=asyncio.get_running_loop().time() - began)


async def _call(
    file: ScenarioFile,
    scenario: PlacedScenario,
    result: RunResult,
    target: Target,
    options: RunOptions,
    session: Mapping[str, Any],
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
        result.created.update(caller.created)
        call = ScenarioCall(
            caller,
            options.tools,
            result.recorded,
            folder=file.path.parent,
            voice=voice_of(file, scenario.scenario, options.voice),
            within_ms=file.defaults.within_ms,
            language=str(session.get("input_audio", {}).get("language", "en")).partition("-")[0],
            report=result.report,
        )
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
    """Check what a scenario expects of the whole call: numbers of answers and errors, phrases. Return the problems."""
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


_SHOWN: Final = 140
#: The characters that XML 1.0 cannot have.
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NOT_NAME: Final = re.compile(r"[^\w.-]+")
#: Files have names of up to 255 bytes on most systems, with seed, number and ending.
_MAX_NAME_BYTES: Final = 200


def row(result: ScenarioResult) -> str:
    """Return the line of the table for a scenario."""
    passed = sum(run.verdict == "passed" for run in result.runs)
    middle = f"{median(result.first_sounds):6.0f} ms" if result.first_sounds else "        -"
    reason = " ".join(result.first_reason.split())
    reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}…"
    skipped = sorted({one.partition(":")[0] for run in result.runs for one in run.report.skipped})
    notes = f"not checked: {', '.join(skipped)}" if skipped and not reason else ""
    counted = f"{passed}/{len(result.runs)}"
    return f"{result.verdict:<8} {counted:>7} {middle}  {result.name:<32} {reason or notes}".rstrip()


HEAD: Final = f"{'':<8} {'runs':>7} {'p50':>9}  scenario"


def summary(results: Sequence[ScenarioResult], seconds: float) -> str:
    """Return the last line of the table."""
    counts = {name: sum(one.verdict == name for one in results) for name in ("passed", "failed", "skipped")}
    unchecked = sum(len(run.report.skipped) for one in results for run in one.runs)
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    return (
        f"{len(results)} scenarios: {told}"
        + (f"; {unchecked} checks skipped" if unchecked else "")
        + f"; {seconds:.0f} s"
    )


def as_json(results: Sequence[ScenarioResult]) -> dict[str, Any]:
    return {
        "scenarios": [
            {
                "file": str(one.file),
                "line": one.scenario.line,
                "name": one.name,
                "verdict": one.verdict,
                "reasons": one.reasons,
                "first_sound_p50_ms": median(one.first_sounds) if one.first_sounds else None,
                "runs": [
                    {
                        "seed": run.seed,
                        "verdict": run.verdict,
                        "reasons": run.reasons,
                        "seconds": round(run.seconds, 3),
                        "answers": run.report.answers,
                        "first_sounds_ms": run.report.first_sounds,
                        "skipped_checks": run.report.skipped,
                        "judge": run.report.reasons,
                        "talk": [{"who": who, "text": text} for who, text in run.report.talk],
                    }
                    for run in one.runs
                ],
            }
            for one in results
        ]
    }


def junit(results: Sequence[ScenarioResult]) -> bytes:
    """Return a report as JUnit XML: a suite for each file, with a case for each run.

    A scenario that failed by all runs together, for example by their median, has one more case.
    """
    root = ElementTree.Element("testsuites")
    for path in dict.fromkeys(one.file for one in results):
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(str(path)))
        cases = [_case(suite, run) for one in results if one.file == path for run in one.runs]
        for one in results:
            if one.file == path and one.reasons:
                cases.append(_add_case(suite, path, f"{one.name} [all runs]", 0.0, "failed", one.reasons))
        suite.set("tests", str(len(cases)))
        for kind, attribute in (("failure", "failures"), ("skipped", "skipped")):
            suite.set(attribute, str(sum(case.find(kind) is not None for case in cases)))
        suite.set("errors", "0")
        suite.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _case(suite: ElementTree.Element, run: RunResult) -> ElementTree.Element:
    case = _add_case(suite, run.file, f"{run.name} [{run.seed}]", run.seconds, run.verdict, run.reasons)
    ElementTree.SubElement(case, "system-out").text = _xml(talk(run))
    return case


def _add_case(
    suite: ElementTree.Element, path: Path, name: str, seconds: float, verdict: str, reasons: Sequence[str]
) -> ElementTree.Element:
    case = ElementTree.SubElement(suite, "testcase", name=_xml(name), classname=_xml(path.stem), time=f"{seconds:.3f}")
    if verdict != "passed":
        message = _xml(reasons[0] if reasons else "")
        kind = "failure" if verdict == "failed" else "skipped"
        told = ElementTree.SubElement(case, kind, message=message)
        if verdict == "failed":
            told.set("type", "AssertionError")
            told.text = _xml("\n".join(reasons))
    return case


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def talk(run: RunResult) -> str:
    """Return the talk of a run as text: who said what, verdicts of the judge, checks left out, and failures."""
    lines = (f"{who}: {' '.join(what.split())}" for who, what in run.report.talk)
    judged = (f"judge: {reason}" for reason in run.report.reasons)
    skipped = (f"not checked: {one}" for one in run.report.skipped)
    return "\n".join(chain(lines, judged, skipped, run.reasons))


def save(run: RunResult, folder: Path, taken: set[str]) -> Path:
    """Write a run's audio (WAV), its talk (text), and its frames (NDJSON, if there are any) to ``folder``.

    Creates the folder if needed; returns the path of the audio. ``taken`` are the names of other runs, to which that of
    this one is added. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = _NOT_NAME.sub("-", f"{run.file.stem}-{run.name}").encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    base, number = folder / f"{name}-{run.seed}", 1
    while base.name.casefold() in taken:
        number += 1
        base = folder / f"{name}-{run.seed}-{number}"
    taken.add(base.name.casefold())
    sound = base.with_name(f"{base.name}.wav")
    _write_stereo(sound, run.recorded)
    base.with_name(f"{base.name}.txt").write_text(f"{talk(run)}\n", encoding="utf-8")
    if run.wire is not None and run.recorded.lines:
        base.with_name(f"{base.name}.ndjson").write_bytes(_recording(run))
    return sound


def _write_stereo(path: Path, recorded: Recorded) -> None:
    """Write a recording as a stereo WAV file: the caller's audio on the left, the played audio on the right."""
    said = resampled(samples_from_bytes(bytes(recorded.said), SampleLayout.S16), MIC_RATE, PLAYED_RATE)
    played = np.frombuffer(bytes(recorded.played), "<i2")
    both = np.zeros((max(len(said), len(played)), 2), "<i2")
    both[: len(said), 0] = pcm16_from_samples(said)
    both[: len(played), 1] = played
    write_wav(path, Pcm16(both.tobytes(), PLAYED_RATE, channels=2))


def _recording(run: RunResult) -> bytes:
    assert run.wire is not None
    lines = run.recorded.lines
    header = HeaderLine(
        recording=FORMAT,
        version=VERSION,
        kind="websocket" if run.wire.kind == "websocket" else "realtime",
        id=str(run.created.get("session_id") or run.created.get("id") or run.name),
        server=__version__,
        engine="unknown",
        model=str(run.created.get("model") or "unknown"),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        payloads=True,
    )
    end = EndedLine(at=lines[-1].at)
    return b"".join(encode_line(line) for line in (header, *lines, end))


PASSED: Final = 0
FAILED: Final = 1
_QWEN: Final = "qwen"

_Work: TypeAlias = list[tuple[ScenarioFile, PlacedScenario]]


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command, and return its exit status.

    0: no scenario failed; 1: one did; 2: a file or the command line is wrong, or something that the calls need, such as
    a server or a voice, is missing, or a report cannot be written; 130 after ^C.
    """
    options = _parser().parse_args(arguments)
    try:
        files = read_files(options.files)
        work = _chosen(files, options.only)
        if options.check:
            print(f"{len(work)} scenarios in {len(files)} files are well-formed")
            return PASSED
        return run_interruptible(_Command(options, environ, work).run())
    except FormError as error:
        problems = error.problems
    except (ScenarioUnusable, NoServer, OSError) as error:  # an OSError of --save or --junit, too
        problems = [f"omni-ws test: error: {error}"]
    except KeyboardInterrupt:
        return INTERRUPTED
    for problem in problems:
        print(problem, file=sys.stderr)
    return USAGE_ERROR


def read_files(paths: Sequence[Path]) -> list[ScenarioFile]:
    """Read all files. Raises FormError with the problems of all of them."""
    files: list[ScenarioFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            files.append(read_file(path))
        except FormError as error:
            problems += error.problems
    if problems:
        raise FormError(problems)
    return files


def _chosen(files: Sequence[ScenarioFile], only: Sequence[str]) -> _Work:
    """Return the scenarios with one of the names or tags ``only``, or all without any. Raises ScenarioUnusable."""
    every = [(file, one) for file in files for one in file.scenarios]
    if not only:
        return every
    known = {name for _, one in every for name in (one.scenario.name, *one.scenario.tags)}
    if unknown := [name for name in only if name not in known]:
        raise ScenarioUnusable(f"--only {unknown[0]}: no scenario has this name or tag")
    return [(file, one) for file, one in every if {one.scenario.name, *one.scenario.tags} & {*only}]


def _speaks(file: ScenarioFile, one: PlacedScenario) -> bool:
    return any(True for _ in texts_of(file, one, CallersVoice("hibari")))


class _Command:
    """One execution of ``omni-ws test``."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str], work: _Work) -> None:
        self._options = options
        self._key = options.api_key or environ.get("OMNI_WS_API_KEY")
        self._model_key = environ.get("OPENAI_API_KEY")
        self._work = work
        self._models: dict[str, ChatModel] = {}
        self._results: list[ScenarioResult] = []
        #: The names of saved runs, see ``save``.
        self._saved: set[str] = set()

    async def run(self) -> int:
        options, began = self._options, time.monotonic()
        target, path = self._target()
        speech, ears = CallersSpeech(), Ears()
        async with AsyncExitStack() as stack:
            stack.callback(ears.close)
            stack.push_async_callback(speech.close)
            voice = await self._prepare(speech)
            await self._start_models(stack)
            tools = CallTools(
                speech=speech,
                ears=ears,
                judge=None if options.judge is None else self._models[options.judge],
                times=not options.no_times,
                patience_ms=options.patience * 1000,
            )
            how = RunOptions(
                tools=tools,
                voice=voice,
                model_of=self._models.__getitem__,
                realtime_only=options.realtime is not None,
                path=path,
                repeat=options.repeat,
                seed=options.seed,
                jobs=options.jobs,
            )
            if options.format == "table":
                print(HEAD, flush=True)
            async for server, work in self._servers(target):
                async for result in run_all(work, server, how):
                    self._take(result)
        return self._end(time.monotonic() - began)

    def _target(self) -> tuple[Target | None, str | None]:
        """Return the server and the path of its front end that the options give, or None. Raises ScenarioUnusable."""
        options = self._options
        url = options.url if options.realtime is None else options.realtime
        if url is None:
            return None, None
        if options.url is not None and options.realtime is not None:
            raise ScenarioUnusable("--url is not allowed with --realtime")
        parts = urlsplit(url)
        try:
            target = Target.parse(f"{parts.scheme}://{parts.netloc}", api_key=self._key)
        except ValueError as error:
            raise ScenarioUnusable(str(error)) from None
        if options.realtime is None:
            return target, parts.path if parts.path not in ("", "/") else None
        path = parts.path if parts.path not in ("", "/") else "/v1/realtime"
        return target, f"{path}?{parts.query or 'model=gpt-realtime'}"

    async def _prepare(self, speech: CallersSpeech) -> CallersVoice:
        """Render all speech and check all files before any call; return the voice for scenarios that name none."""
        problems = [problem for file, one in self._work for problem in check_files(file, one, speech)]
        if problems:
            raise FormError(problems)
        # Nobody needs a voice who only types.
        spoken = [one for one in self._work if one[1].scenario.persona is not None or _speaks(*one)]
        named = all(file.voice or one.scenario.voice for file, one in spoken)
        voice = CallersVoice("hibari") if named else best_voice()
        if not named:
            print(f"callers speak with {voice.text}", file=sys.stderr, flush=True)
        for file, one in self._work:
            await speech.render(texts_of(file, one, voice))
        if speech.rendered:
            print(f"{speech.rendered} texts rendered", file=sys.stderr, flush=True)
        return voice

    async def _start_models(self, stack: AsyncExitStack) -> None:
        """Connect to the language models that judge and play callers; for ``qwen``, start a server process."""
        wanted = [one.scenario.persona.llm for _, one in self._work if one.scenario.persona is not None]
        if self._options.judge is not None:
            wanted.append(self._options.judge)
        for name in dict.fromkeys(wanted):
            url = name
            if name == _QWEN:
                file = fetched_file(_QWEN)
                if file is None:
                    raise ScenarioUnusable("qwen is not here: `omni-ws weights fetch qwen` fetches it")
                settings = {"llm": f"gguf:{file}", "asr": "none", "tts": "none"}
                url = f"http://{await stack.enter_async_context(own_server(settings))}/v1"
            self._models[name] = ChatModel(url, self._model_key)

    async def _servers(self, target: Target | None) -> AsyncIterator[tuple[Target, _Work]]:
        """Yield each server with the scenarios to run on it.

        Servers that the command starts run one after the other.
        """
        if target is not None:
            await until_started(target)
            yield target, self._work
            return
        groups: dict[bytes, _Work] = {}
        for file, one in self._work:
            groups.setdefault(orjson.dumps(file.server, option=orjson.OPT_SORT_KEYS), []).append((file, one))
        for work in groups.values():
            async with own_server(work[0][0].server, shlex.split(self._options.serve_args)) as authority:
                yield Target.parse(f"ws://{authority}", api_key=self._key), work

    def _take(self, result: ScenarioResult) -> None:
        """Report a scenario whose runs have ended; save the runs as the options say, and discard their audio."""
        self._results.append(result)
        if self._options.format == "table":
            print(row(result), flush=True)
        for run in result.runs:
            if self._options.save is not None and (run.verdict == "failed" or self._options.save_all):
                save(run, self._options.save, self._saved)
            run.recorded.clear()

    def _end(self, seconds: float) -> int:
        if self._options.format == "json":
            print(orjson.dumps(as_json(self._results)).decode())
        else:
            print(summary(self._results, seconds))
        if self._options.junit is not None:
            self._options.junit.write_bytes(junit(self._results))
        return FAILED if any(one.verdict == "failed" for one in self._results) else PASSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws test",
        description="Let callers talk to a server as files of scenarios tell, and check what they hear. "
        "The exit status is 0 if none failed, 1 if one did, 2 if a file or an option is wrong.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE.yaml", help="scenarios (docs/testing.md)")
    add("--check", action="store_true", help="only check the form of the files")
    add("--url", help="address of a server of the native protocol [a server is started]")
    add("--realtime", metavar="URL", help="address of a server of the Realtime API")
    add("--api-key", help="API key of the server [environment variable OMNI_WS_API_KEY]")
    add("--serve-args", default="", metavar="ARGS", help="more arguments of the server that is started")
    add("--only", action="append", default=[], metavar="NAME|TAG", help="only these scenarios; may be repeated")
    add("--jobs", type=count, default=4, metavar="N", help="calls at the same time [%(default)s]")
    add("--repeat", type=_repeat, metavar="N", help="runs of each scenario [as the file says, or 1]")
    add("--seed", type=int, default=0, metavar="N", help="seed of the first run; the next has the next [%(default)s]")
    add("--no-times", action="store_true", help="leave out bounds of time; those in ms of audio stay")
    add(
        "--patience", type=above_zero, default=30.0, metavar="SEC", help="longest wait for a sign of life [%(default)g]"
    )
    add("--judge", metavar="URL|qwen", help="language model that judges (chat completions; URL#MODEL names one)")
    add("--format", choices=["table", "json"], default="table", help="form of the report [%(default)s]")
    add("--junit", type=Path, metavar="FILE", help="write a report as JUnit's XML")
    add("--save", type=Path, metavar="DIR", help="write sound, talk and frames of what failed")
    add("--save-all", action="store_true", help="with --save: of everything")
    return parser


def _repeat(text: str) -> int:
    number = count(text)
    if number > MAX_REPEAT:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_REPEAT}")
    return number
