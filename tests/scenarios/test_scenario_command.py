"""``omni-ws test`` as a command: what it prints and writes, its statuses, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import wave
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest
from support.commands import run_here
from support.patience import PATIENCE_SEC, until

from benchmarks.server_process import child_processes
from omni_ws.caller.script import Target
from omni_ws.cli import INTERRUPTED
from omni_ws.replay import read_recording
from omni_ws.scenarios.command import main
from omni_ws.scenarios.servers import until_started

FILE = """\
server: {engine: fake}
scenarios:
  - name: echoes
    tags: [gate]
    repeat: 2
    caller:
      - type: Hello there.
      - hear: {said: Hello there}
  - name: differs
    caller:
      - type: <b>One & "two"</b> \\u0001
      - hear: {said: three}
  - name: dials
    caller:
      - dial: "1"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calls.yaml"
    path.write_text(FILE.replace("<b>One", '"<b>One').replace('"two"', "two").replace("\\u0001", '\\u0001"'))
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nobody"], "--only nobody: no scenario has this name or tag"),
        (["--url", "ws://127.0.0.1:1", "--realtime", "ws://127.0.0.1:1"], "--url is not allowed with --realtime"),
        (["--url", "somewhere"], "is not an address"),
        (["--url", "ws://127.0.0.1:1", "--judge", "nowhere"], "is not the URL of a language model"),
        (["--jobs", "0"], "must be a whole number above 0"),
        (["--repeat", "1001"], "must be at most 1000"),
        (["--patience", "0"], "must be a number above 0"),
    ],
)
def test_wrong_usage_is_refused(file: Path, arguments: list[str], said: str) -> None:
    ended = run_here(main, str(file), *arguments)
    assert ended.status == 2
    assert said in ended.errors


def test_files_are_checked_alone(file: Path, tmp_path: Path) -> None:
    assert run_here(main, str(file), "--check").output == "3 scenarios in 1 files are well-formed\n"
    bad = tmp_path / "bad.yaml"
    bad.write_text("scenarios:\n- name: a\n  caller: [{sound: none.wav}]\n")
    worse = tmp_path / "worse.yaml"
    worse.write_text("scenarios:\n- name: a\n  caller: [{play: none.wav}]\n")
    ended = run_here(main, str(bad), str(worse), "--check")
    assert (ended.status, ended.errors.splitlines()[0].partition(" ")[0]) == (2, f"{worse}:3:")
    ended = run_here(main, str(bad), "--url", "ws://127.0.0.1:1")
    assert (ended.status, ended.errors) == (2, f"{bad}:3: {tmp_path / 'none.wav'}: No such file or directory\n")


def test_a_report_that_cannot_be_written_is_told(file: Path, tmp_path: Path) -> None:
    report = tmp_path / "none" / "junit.xml"
    ended = run_here(main, str(file), "--only", "dials", "--url", "ws://127.0.0.1:1", "--junit", str(report))
    assert (ended.status, "0 passed, 0 failed, 1 skipped" in ended.output) == (2, True)
    assert ended.errors == f"omni-ws test: error: [Errno 2] No such file or directory: '{report}'\n"


def test_a_model_that_was_not_fetched_is_refused_by_name(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = run_here(main, str(file), "--url", "ws://127.0.0.1:1", "--judge", "qwen")
    assert (ended.status, "omni-ws weights fetch qwen" in ended.errors) == (2, True)


def test_what_is_saved_of_scenarios_has_names_of_its_own(tmp_path: Path) -> None:
    """Also where files of two folders have one name, and where a name is longer than that of a file may be."""
    saved, files = tmp_path / "saved", []
    for folder, name in (("one", "greets"), ("two", "greets"), ("three", "\u8a9e" * 100)):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "calls.yaml")
        caller = f"[{{type: {folder}}}, {{hear: {{said: x}}}}]"
        files[-1].write_text(f"server: {{engine: fake}}\nscenarios:\n- name: {name}\n  caller: {caller}\n")
    ended = run_here(main, *map(str, files), "--save", str(saved), "--save-all")
    assert "3 scenarios: 0 passed, 3 failed" in ended.output, ended
    texts = [path.read_text() for path in saved.glob("*.txt")]
    assert sorted(text.splitlines()[0] for text in texts) == ["caller: one", "caller: three", "caller: two"]


def test_a_server_is_started_and_its_answers_reported(file: Path, tmp_path: Path) -> None:
    saved, report = tmp_path / "saved", tmp_path / "junit.xml"
    ended = run_here(main, str(file), "--junit", str(report), "--save", str(saved))
    assert ended.status == 1
    head, *rows, last = ended.output.splitlines()
    assert head.split() == ["runs", "p50", "scenario"]
    assert [row.split()[:2] for row in rows] == [["passed", "2/2"], ["failed", "0/1"], ["skipped", "0/1"]]
    assert f"{file}:12: said '<b>One & two</b>" in rows[1]
    assert rows[2].endswith("needs: telephony (dial)")
    assert last.startswith("3 scenarios: 1 passed, 1 failed, 1 skipped; ")
    suites = ElementTree.parse(report).getroot()
    (suite,) = suites
    assert (suites.tag, suite.tag, {case.tag for case in suite}) == ("testsuites", "testsuite", {"testcase"})
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "errors": "0",
        "skipped": "1",
    }
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases == {
        "echoes [0]": ["system-out"],
        "echoes [1]": ["system-out"],
        "differs [0]": ["failure", "system-out"],
        "dials [0]": ["skipped", "system-out"],
    }
    names = {path.name for path in saved.iterdir()}
    assert names == {f"calls-differs-0.{kind}" for kind in ("wav", "txt", "ndjson")}
    with wave.open(str(saved / "calls-differs-0.wav")) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes() > 0) == (2, 24_000, True)
    assert "caller: <b>One" in (saved / "calls-differs-0.txt").read_text()
    recorded = read_recording(saved / "calls-differs-0.ndjson")
    assert (recorded.header.kind, recorded.header.model) == ("websocket", "fake")


def test_a_report_is_one_json_object(file: Path) -> None:
    ended = run_here(main, str(file), "--only", "gate", "--format", "json", "--repeat", "1", "--seed", "5")
    assert ended.status == 0
    (found,) = orjson.loads(ended.output)["scenarios"]
    assert (found["name"], found["line"], found["verdict"]) == ("echoes", 3, "passed")
    (run,) = found["runs"]
    assert (run["seed"], run["answers"]) == (5, 1)
    assert run["talk"] == [{"who": "caller", "text": "Hello there."}, {"who": "server", "text": "Hello there."}]


def test_a_server_that_does_not_start_is_told(file: Path) -> None:
    ended = run_here(main, str(file), "--serve-args=--engine=nothing")
    assert (ended.status, "`omni-ws serve` ended with status 2" in ended.errors) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_command_and_its_server(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "calls.yaml"
    path.write_text("server: {engine: fake}\nscenarios:\n- name: a\n  caller: [{pause: 600}]\n")
    command = (sys.executable, "-m", "omni_ws", "test", str(path))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SEC):
        await process.stdout.readline()  # the head of the table
        await until(lambda: bool(child_processes(process.pid)))
        servers = child_processes(process.pid)
        process.send_signal(number)
        assert await process.wait() == INTERRUPTED
    for server in servers:
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)


@pytest.mark.parametrize(
    "answers",
    [
        [b'503 Unavailable\r\n\r\n{"status":"starting"}'] * 2 + [b'200 OK\r\n\r\n{"status":"ok"}'],
        [
            b'503 Service Unavailable\r\n\r\n{"status":"starting"}',
            b'503 Service Unavailable\r\n\r\n{"status":"draining"}',
        ],
        [b"404 Not Found\r\n\r\n"],
        [b"200 OK\r\n\r\n[]"],
        [b"200 OK\r\n\r\n{"],
        [b"200 OK\r\n\r\n" + b"[" * 100_000],
        [b""],
    ],
)
async def test_a_server_that_says_that_it_starts_is_waited_for(answers: list[bytes]) -> None:
    left = [*answers]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + left.pop(0))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await until_started(Target.parse(f"ws://127.0.0.1:{port}"))
    assert left == []
