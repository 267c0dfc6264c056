"""Reports of scenarios: a table, JSON, JUnit's XML, and what failed as sound, text and frames."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np

from omni_ws import __version__
from omni_ws.audio.pcm import SampleLayout, pcm16_from_samples, resampled, samples_from_bytes
from omni_ws.caller.live_caller import Recorded
from omni_ws.caller.loudspeaker import RATE as PLAYED_RATE
from omni_ws.caller.sounds import MIC_RATE
from omni_ws.client.audio import Pcm16, write_wav
from omni_ws.scenarios.running import RunResult, ScenarioResult
from omni_ws.wire.recording import FORMAT, VERSION, EndedLine, HeaderLine, encode_line

_SHOWN: Final = 140
#: The characters that XML 1.0 cannot have.
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NOT_NAME: Final = re.compile(r"[^\w.-]+")


def row(result: ScenarioResult) -> str:
    """One line of the table."""
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
    """The last line of the table."""
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
    """JUnit's XML: a suite for each file, a case for each run of a scenario, and one for what all runs have to be."""
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
    """Who said what, a line each."""
    lines = (f"{who}: {' '.join(what.split())}" for who, what in run.report.talk)
    judged = (f"judge: {reason}" for reason in run.report.reasons)
    skipped = (f"not checked: {one}" for one in run.report.skipped)
    return "\n".join(chain(lines, judged, skipped, run.reasons))


def save(run: RunResult, folder: Path) -> Path:
    """Write what a run sounded like, what was said, and its frames; return the path of the sound. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"{_NOT_NAME.sub('-', f'{run.file.stem}-{run.name}')}-{run.seed}"
    sound = base.with_name(f"{base.name}.wav")
    _write_stereo(sound, run.recorded)
    base.with_name(f"{base.name}.txt").write_text(f"{talk(run)}\n", encoding="utf-8")
    if run.wire is not None and run.recorded.lines:
        base.with_name(f"{base.name}.ndjson").write_bytes(_recording(run))
    return sound


def _write_stereo(path: Path, recorded: Recorded) -> None:
    """Left is what the caller said, right what was played to it."""
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
