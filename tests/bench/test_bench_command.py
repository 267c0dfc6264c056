"""The command ``omni-ws bench`` against real servers."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.commands import Ended, run_here
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.speech_clips import clip_bytes
from support.tcp_relay import Cut, Direction, tcp_relay
from support.voices import need

from omni_ws.bench import (
    DEFAULT_TEXT,
    main,
)
from omni_ws.client.audio import Pcm16, write_wav
from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import VoiceChoice
from omni_ws.engine.base import OutputWriter
from omni_ws.engine.fake import EchoEngine, EchoSettings

KEYS = (ApiKey(name="one", key_sha256=digest("secret")),)
TIMES = {"n", "median", "p90", "p99", "max"}


async def bench(url: str, *arguments: str, environ: Mapping[str, str] | None = None) -> Ended:
    """The command beside a server of this loop, on a loop of its own."""
    return await asyncio.to_thread(run_here, main, "--url", url, "--stagger", "0.01", *arguments, environ=environ)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A fifth of a second of speech."""
    path = tmp_path / "speech.wav"
    write_wav(path, Pcm16(clip_bytes("cards_001")[16_000:22_400], 16_000))
    return path


def embedded() -> EmbeddedEngine:
    voice = need(VoiceChoice.ESPEAK)
    return EmbeddedEngine(voice=voice, max_recognisers=2)


# what is asked, with the fake engine


async def test_a_typed_question_is_answered_in_every_turn_of_every_session() -> None:
    async with live_server() as server:
        ended = await bench(server.websocket_url, "--text", "one two three", "--json", "--modalities", "text")
    report = ended.report
    assert (ended.status, ended.errors) == (0, "")
    assert report["sessions"] == {"wanted": 4, "opened": 4, "refused": {}}
    assert report["turns"] == {
        "asked": 20,
        "answered": 20,
        "failed": {},
        "unfinished": 0,
        "empty_answers": 0,
        "partial_answers": 0,
    }
    for name, count in (("session_opened", 4), ("first_text", 20), ("final", 20), ("acknowledgement", 20)):
        times = report["ms"][name]
        assert set(times) == TIMES
        assert times["n"] == count
        assert 0 < times["median"] <= times["p90"] <= times["p99"] <= times["max"]
    assert (report["ms"]["first_audio"], report["ms"]["gap_in_playback"]) == (None, None)
    assert report["output"]["tokens"] == 20 * 3
    assert report["output"]["characters"] == 20 * len("one two three")
    assert report["question"] == {"text": "one two three"}


async def test_a_recording_takes_its_time_and_its_end_is_the_end_of_the_input(recording: Path) -> None:
    """The fake engine gives all of it back."""
    options = ("--file", str(recording), "--sessions", "2", "--turns", "1", "--json")
    async with live_server() as server:
        ended = await bench(server.websocket_url, *options)
    report = ended.report
    assert (ended.status, report["turns"]["answered"]) == (0, 2)
    assert report["seconds"] >= 0.2
    assert report["ms"]["acknowledgement"]["n"] == 2 * 10
    assert report["ms"]["first_audio"]["n"] == 2
    assert report["ms"]["first_audio"]["max"] <= report["ms"]["final"]["max"]
    assert report["output"]["audio_seconds"] == pytest.approx(0.4, abs=0.01)
    assert report["measured_from"] == "end_of_input"
    assert report["question"] == {"file": str(recording), "seconds": 0.2, "turn_detection": None}


async def test_the_table_says_what_was_measured() -> None:
    async with live_server() as server:
        ended = await bench(server.websocket_url, "--turns", "1", "--sessions", "2")
    assert ended.status == 0
    assert f"typed: {DEFAULT_TEXT}" in ended.output
    assert "sessions: 2 opened by 2 talkers\n" in ended.output
    assert re.search(r"turns: 2 asked in \d\.\d s, 2 answered\n", ended.output)
    assert re.search(r"end of input → first text +2( +\d+\.\d){4}\n", ended.output)
    assert "first audio" not in ended.output


async def test_it_begins_turns_for_as_long_as_it_is_told() -> None:
    async with live_server(EchoEngine(EchoSettings(first_chunk_delay_ms=50))) as server:
        ended = await bench(server.websocket_url, "--seconds", "0.5", "--sessions", "1", "--json")
    turns = ended.report["turns"]
    assert ended.status == 0
    assert 2 <= turns["asked"] == turns["answered"] <= 10
    assert ended.report["seconds"] + 0.05 >= 0.5


# what fails


async def test_failures_are_counted_by_their_code() -> None:
    engine = EchoEngine(EchoSettings(fail_after_chunks=1))
    async with live_server(engine, expect_errors=True) as server:
        ended = await bench(server.websocket_url, "--turns", "1", "--sessions", "2", "--text", "a b", "--json")
        table = await bench(server.websocket_url, "--turns", "1", "--sessions", "2", "--text", "a b")
    report = ended.report
    assert (ended.status, table.status) == (1, 1)
    assert report["turns"]["failed"] == {"engine_failed": 2}
    assert report["turns"]["answered"] == 0
    assert report["ms"]["first_text"] is None
    assert ", 0 answered, 2 failed: engine_failed\n" in table.output


async def test_an_answer_that_does_not_come_is_waited_for_with_patience() -> None:
    """What comes later meets no other question: that has a session of its own."""
    async with live_server(EchoEngine(EchoSettings(first_chunk_delay_ms=60_000))) as server:
        ended = await bench(server.websocket_url, "--patience", "0.1", "--sessions", "1", "--turns", "2", "--json")
    assert ended.status == 1
    assert ended.report["turns"]["failed"] == {"no_answer_in_time": 2}
    assert ended.report["sessions"]["opened"] == 2


async def test_a_connection_that_is_lost_is_opened_again() -> None:
    async with live_server() as server, tcp_relay(server.port) as proxy:
        proxy.cuts.append(Cut(Direction.TO_CLIENT, after=5000, reset=True))
        url = f"ws://127.0.0.1:{proxy.port}"
        ended = await bench(url, "--sessions", "1", "--turns", "60", "--text", "again and again", "--json")
    report = ended.report
    assert ended.status == 1
    assert report["turns"]["failed"] == {"connection_lost": 1}
    assert (report["turns"]["asked"], report["turns"]["answered"]) == (60, 59)
    assert report["sessions"] == {"wanted": 1, "opened": 2, "refused": {}}


async def test_beyond_the_rate_of_a_key_turns_fail_and_wait() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("secret"), requests_per_sec=2, burst=1),)
    async with live_server(keys=keys) as server:
        ended = await bench(
            server.websocket_url, "--sessions", "1", "--turns", "3", "--json", environ={"OMNI_WS_API_KEY": "secret"}
        )
    assert ended.status == 1
    assert ended.report["turns"]["failed"] == {"rate_limited": 1}
    assert ended.report["turns"]["answered"] == 2


async def test_a_session_too_many_is_refused_and_the_others_go_on() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=300))
    keys = (ApiKey(name="one", key_sha256=digest("secret"), max_sessions=1),)
    environ = {"OMNI_WS_API_KEY": "secret"}
    async with live_server(engine, keys=keys) as server:
        ended = await bench(server.websocket_url, "--sessions", "3", "--turns", "1", "--json", environ=environ)
        table = await bench(server.websocket_url, "--sessions", "3", "--turns", "1", environ=environ)
    assert (ended.status, table.status) == (1, 1)
    assert ended.report["sessions"] == {"wanted": 3, "opened": 1, "refused": {"rate_limited": 2}}
    assert ended.report["turns"]["answered"] == 1
    assert "sessions: 1 opened by 3 talkers, 2 refused: rate_limited\n  rate_limited: " in table.output


async def test_a_wrong_key_is_refused_and_a_right_one_is_taken() -> None:
    async with live_server(keys=KEYS) as server:
        none = await bench(server.websocket_url, "--json")
        wrong = await bench(server.websocket_url, "--api-key", "guess", environ={"OMNI_WS_API_KEY": "secret"})
        right = await bench(server.websocket_url, "--json", environ={"OMNI_WS_API_KEY": "secret"})
    assert (none.status, wrong.status, right.status) == (1, 1, 0)
    assert none.report["sessions"] == {"wanted": 4, "opened": 0, "refused": {"unauthenticated": 4}}
    assert none.report["turns"]["asked"] == 0
    for ended in (none, wrong):
        assert ended.errors == "omni-ws bench: give a key with --api-key or OMNI_WS_API_KEY\n"
    assert "refused: unauthenticated" in wrong.output
    assert "milliseconds" not in wrong.output
    assert "secret" not in right.output + wrong.output


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid"])
def test_a_server_that_is_not_there_is_one_line(host: str) -> None:
    ended = run_here(main, "--url", f"ws://{host}")
    assert (ended.status, ended.output) == (2, "")
    assert ended.errors.startswith(f"omni-ws bench: error: cannot reach ws://{host}/v1/streaming_input: ")
    assert ended.errors.count("\n") == 1


async def test_what_is_no_server_of_this_protocol_is_one_line() -> None:
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        ended = await bench(f"ws://127.0.0.1:{other.sockets[0].getsockname()[1]}", "--sessions", "1")
        await closed.wait()
    assert (ended.status, ended.output) == (2, "")
    assert "does not speak WebSocket" in ended.errors
    assert ended.errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sessions", "0"), "must be a whole number above 0"),
        (("--turns", "x"), "must be a whole number above 0"),
        (("--seconds", "0"), "must be above 0"),
        (("--pause", "-1"), "must be a number, 0 or above"),
        (("--turns", "1", "--seconds", "1"), "not allowed with"),
        (("--text", "a", "--file", "b.wav"), "not allowed with"),
        (("--text", " "), "must not be empty"),
        (("--modalities", "video"), "must be text, audio, or both"),
        (("--open-mic",), "--open-mic goes with --file"),
        (("--file", "/nonexistent/a.wav"), "cannot read /nonexistent/a.wav: No such file or directory"),
        (("--file", __file__), f"cannot use {__file__}: not a WAV file"),
        (("--ca-file", __file__), f"cannot read {__file__}: "),
        (("--url", "ftp://host"), "not a WebSocket URL: ftp://host"),
        (("--url", "ws://host:99999"), "not a WebSocket URL: ws://host:99999"),
        (("--nonsense",), "unrecognized arguments"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    ended = run_here(main, *arguments)
    assert (ended.status, ended.output) == (2, "")
    assert message in ended.errors.splitlines()[-1]
    assert ended.errors.splitlines()[-1].startswith("omni-ws bench: error: ")


@pytest.mark.slow
async def test_what_was_measured_is_printed_when_it_is_interrupted() -> None:
    answered = 0

    class CountingEngine(EchoEngine):
        async def generate(self, request: Any, out: OutputWriter) -> None:
            nonlocal answered
            answered += 1
            if answered == 5:
                process.send_signal(signal.SIGINT)
            await super().generate(request, out)

    engine = CountingEngine(EchoSettings(first_chunk_delay_ms=200))
    async with live_server(engine) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "omni_ws", "bench", "--url", server.websocket_url, "--sessions", "2", "--json"),
            *("--seconds", "600"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE_SEC):
            output, errors = await process.communicate()
    report = orjson.loads(output)
    assert (process.returncode, errors) == (130, b"")
    assert report["interrupted"] is True
    turns = report["turns"]
    assert 1 <= turns["answered"] < turns["asked"]
    assert turns["unfinished"] == turns["asked"] - turns["answered"] <= 2
    assert report["ms"]["first_text"]["n"] == turns["answered"]


# with speech, and voices


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    ("options", "measured_from"), [((), "end_of_input"), (("--open-mic",), "end_of_speech")], ids=["ends", "open"]
)
async def test_a_recording_is_heard_and_answered(options: tuple[str, ...], measured_from: str) -> None:
    clip = str(Path(__file__).parents[1] / "data" / "goforward.wav")
    async with live_server(embedded()) as server:
        ended = await bench(server.websocket_url, "--file", clip, "--sessions", "1", "--turns", "2", "--json", *options)
    report = ended.report
    assert (ended.status, ended.errors) == (0, "")
    assert report["turns"]["answered"] == 2
    assert report["turns"]["empty_answers"] == 0
    assert report["measured_from"] == measured_from
    for name in ("first_text", "first_audio", "final"):
        assert report["ms"][name]["n"] == 2
    assert report["playback"]["answers_with_audio"] == 2
    assert report["output"]["audio_seconds"] > 1
    seconds_of_clip = 2.786
    assert report["seconds"] > 2 * seconds_of_clip
    if options:
        # Turn detection waits for half a second of silence; the end of a voice is known to a tenth.
        assert report["ms"]["first_text"]["median"] > 200


@pytest.mark.slow
async def test_the_default_question_is_answered_in_speech() -> None:
    async with live_server(embedded()) as server:
        ended = await bench(server.websocket_url, "--sessions", "2", "--turns", "2")
        text_only = await bench(server.websocket_url, "--turns", "1", "--modalities", "text", "--json")
    assert (ended.status, text_only.status) == (0, 0)
    assert re.search(r"end of input → first audio +4( +\d+\.\d){4}\n", ended.output)
    assert re.search(r"playback: \d of 4 answers had gaps\n", ended.output)
    assert "s of audio" in ended.output
    assert text_only.report["ms"]["first_audio"] is None


async def test_an_open_microphone_on_an_engine_that_cannot_answer_words_waits_with_patience(recording: Path) -> None:
    """Silence is not taken for an answer: this recording is too short for turn detection."""
    async with live_server() as server:
        ended = await bench(
            server.websocket_url, "--file", str(recording), "--open-mic", "--patience", "0.2",
            "--sessions", "1", "--turns", "1", "--json",
        )  # fmt: skip
    report = ended.report
    assert ended.status == 1
    assert report["turns"]["failed"] == {"no_answer_in_time": 1}
    assert (report["ms"]["first_audio"], report["output"]["tokens"]) == (None, None)
