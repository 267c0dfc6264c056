"""What a key may use in a day, and how long its sessions may be: at the limit, past it, over restarts, everywhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.exhausted import full_disk
from support.live_server import LiveServer, live_server
from support.mode_b_client import SESSIONS
from support.native_client import native_client
from support.raw_http import RawResponse, chunked, post, raw_client, request
from support.realtime_client import realtime_client
from websockets.exceptions import ConnectionClosed

from omni_ws.config import ConfigurationError
from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import AuthConfig, ServerConfig
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.quota import RESERVED_TOKENS, DailyLimits, DailyUse
from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import ShuttingDown
from omni_ws.server import create_app
from omni_ws.service.sessions.admission import DailyUseFile
from omni_ws.service.sessions.session import Sessions
from omni_ws.transport.http.media_fetch import MediaReader

pytestmark = pytest.mark.virtual_clock

CHAT = "/v1/chat/completions"
#: An echo of a word takes two tokens: that of the input and that of the output.
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
ANN = {"Authorization": "Bearer ann"}
DAY = 86400
NOON = 20_000 * DAY + DAY // 2


class Clock:
    """The time of day, which a test sets."""

    def __init__(self) -> None:
        self.now = float(NOON)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("omni_ws.service.sessions.admission._unix_time", lambda: clock.now)
    return clock


def ann(**limits: Any) -> ApiKey:
    return ApiKey(name="ann", key_sha256=digest("ann"), **limits)


@pytest.fixture
def serve(tmp_path: Path, clock: Clock) -> Callable[..., Any]:
    """A server whose counts are in a file, with the key ann, of these limits, and the key bob."""

    def serve(engine: Any = None, **limits: Any) -> Any:
        keys = (ann(**limits), ApiKey(name="bob", key_sha256=digest("bob")))
        return live_server(engine, keys=keys, auth={"usage_file": tmp_path / "usage.json"})

    return serve


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread brings about, which the virtual clock does not see."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.5)
    raise AssertionError("it did not come about")


async def chat(server: LiveServer, name: str = "ann", **fields: Any) -> RawResponse:
    return await post(server.port, CHAT, {**BODY, **fields}, f"Authorization: Bearer {name}")


# amounts of a day


@pytest.mark.parametrize(("limit", "answers"), [(4, [200, 200, 429]), (5, [200, 200, 200, 429])])
async def test_tokens_at_the_limit_and_past_it(serve: Callable[..., Any], limit: int, answers: list[int]) -> None:
    async with serve(tokens_per_day=limit) as server:
        assert [(await chat(server)).status for _ in answers] == answers
        over = await chat(server, stream=True)
        assert (over.error["code"], over.headers["retry-after"]) == ("rate_limited", str(DAY // 2))
        assert f"its {limit} tokens of the day" in over.error["message"]
        assert (await chat(server, "bob")).status == 200


async def test_a_new_day_begins_at_midnight_utc(serve: Callable[..., Any], clock: Clock) -> None:
    async with serve(tokens_per_day=2) as server:
        assert [(await chat(server)).status for _ in range(2)] == [200, 429]
        clock.now = NOON + DAY // 2 - 0.5
        late = await chat(server)
        assert (late.status, late.headers["retry-after"]) == (429, "1")
        clock.now = NOON + DAY // 2
        assert [(await chat(server)).status for _ in range(2)] == [200, 429]
        clock.now = NOON  # set back: no day begins anew
        assert (await chat(server)).status == 429


async def test_a_clock_that_was_far_ahead_holds_no_day_back(serve: Callable[..., Any], clock: Clock) -> None:
    async with serve(tokens_per_day=2) as server:
        clock.now = NOON + 400 * DAY
        assert [(await chat(server)).status for _ in range(2)] == [200, 429]
        clock.now = NOON  # set right: nothing more today
        late = await chat(server)
        assert (late.status, late.headers["retry-after"]) == (429, str(DAY // 2))
        clock.now = NOON + DAY // 2
        assert [(await chat(server)).status for _ in range(2)] == [200, 429]


async def test_counts_are_kept_over_restarts(serve: Callable[..., Any], clock: Clock, tmp_path: Path) -> None:
    async with serve(tokens_per_day=4) as server:
        assert (await chat(server)).status == 200
    content = json.loads((tmp_path / "usage.json").read_bytes())
    assert content == {"day": 20_000, "keys": {"ann": {"tokens": 2, "audio_ms": 0}}}
    assert (tmp_path / "usage.json").stat().st_mode & 0o777 == 0o600
    async with serve(tokens_per_day=4) as server:
        assert [(await chat(server)).status for _ in range(2)] == [200, 429]
    async with serve(tokens_per_day=4) as server:
        assert (await chat(server)).status == 429
        clock.now += DAY
        assert (await chat(server)).status == 200


async def test_counts_are_written_while_the_server_runs(serve: Callable[..., Any], tmp_path: Path) -> None:
    async with serve(tokens_per_day=100) as server:
        await chat(server)
        await asyncio.sleep(1.5)  # on a clock that jumps
        path = tmp_path / "usage.json"
        await server.until(path.exists, "the file")
        with path.open() as first:
            await asyncio.sleep(100)
            assert os.path.samestat(path.stat(), os.stat(first.fileno()))  # unchanged, it is not written again
        await chat(server)
    assert json.loads((tmp_path / "usage.json").read_bytes())["keys"]["ann"]["tokens"] == 4


@pytest.mark.parametrize(("limit", "answers"), [(1, [200, 429]), (1.001, [200, 200, 429])])
async def test_audio_heard_and_spoken(serve: Callable[..., Any], limit: float, answers: list[int]) -> None:
    import numpy as np

    engine = ScriptedEngine([TextOutput("la"), AudioOutput(np.zeros(24_000, np.float32), 24_000)])
    async with serve(engine, audio_seconds_per_day=limit) as server:
        found = []
        for _ in answers:
            body = {"input": "sing", "response_format": "pcm"}
            found.append((await post(server.port, "/v1/audio/speech", body, "Authorization: Bearer ann")).status)
        assert found == answers


async def test_requests_at_once_share_what_is_left(serve: Callable[..., Any]) -> None:
    """Each reserves when it begins, over HTTP and over a WebSocket, and gives back when it ends or is cancelled."""
    limit = 2 * RESERVED_TOKENS
    async with serve(tokens_per_day=limit) as server, native_client(server, additional_headers=ANN) as one:
        async with native_client(server, additional_headers=ANN) as two:
            for client in (one, two):
                await client.chunk("an answer that begins early", number=0)
                await client.until("response_started")
            late = await chat(server)
            assert (late.status, late.error["code"], late.headers["retry-after"]) == (429, "rate_limited", "1")
            async with native_client(server, additional_headers=ANN) as three:
                await three.say("hello")
                assert [error["code"] for error in (await three.answer()).errors] == ["rate_limited"]
            await one.send("cancel")
            assert (await one.answer()).reason == "cancelled"
            assert (await chat(server)).status == 200
        await server.until(lambda: server.sessions == 1)  # the other has left in the middle of its answer
        assert (await chat(server)).status == 200
        daily = server.app.sessions.daily_use_file
        assert daily is not None
        assert not daily.use.running["ann"]


async def test_what_the_server_says_unasked_gives_nothing_back(serve: Callable[..., Any]) -> None:
    """A question after a silence reserves nothing, so that other requests keep what they have reserved."""
    async with serve(tokens_per_day=RESERVED_TOKENS) as server, native_client(server, additional_headers=ANN) as client:
        await client.configure(idle_prompt={"after_sec": 20})
        assert (await client.answer()).reason == "stop"
        assert server.app.sessions.daily_use_file.use.running["ann"] == 0
        await client.chunk("an answer that begins early", number=0)
        await client.until("response_started")
        assert (await chat(server)).status == 429


async def test_a_session_that_moves_gives_nothing_back_where_it_comes(serve: Callable[..., Any]) -> None:
    """Its request has reserved at the server that it left."""
    async with serve(tokens_per_day=10 * RESERVED_TOKENS) as server:
        factory = server.app.sessions
        running, key = factory.daily_use_file.use.running, ann()
        before, after = (Sessions(factory, origin="websocket", grace=30, survive=True) for _ in range(2))
        session = before.open(key)
        chunk = InputChunk(Modality.TEXT, b"an answer that begins early", 0)
        session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
        assert running["ann"] == 1
        after.restore(before.save(session), key)
        for sessions in (before, after):
            sessions.end_all(ShuttingDown("the server is shutting down"))
            await sessions.wait_closed()
            assert running["ann"] == 0


async def test_input_that_is_too_long_reserves_nothing(clock: Clock, tmp_path: Path) -> None:
    auth, streaming = {"usage_file": tmp_path / "usage.json"}, {"max_total_payload_per_session": 10}
    keys = (ann(tokens_per_day=RESERVED_TOKENS),)
    async with (
        live_server(keys=keys, auth=auth, streaming_input=streaming) as server,
        realtime_client(server, additional_headers=ANN) as client,
    ):
        await client.update(output_modalities=["text"])
        await client.say("more than ten bytes")
        assert (await client.respond())["status"] == "failed"
        assert (await chat(server)).status == 200


async def test_every_request_of_a_websocket(serve: Callable[..., Any]) -> None:
    async with serve(tokens_per_day=4) as server:
        async with native_client(server, additional_headers=ANN) as client:
            for _ in range(2):
                await client.say("hello")
                assert (await client.answer()).reason == "stop"
            await client.say("hello")
            over = await client.answer()
            assert over.reason == "error"
            (error,) = over.errors
            assert (error["code"], error["retry_after_ms"]) == ("rate_limited", DAY // 2 * 1000)
        async with native_client(server, additional_headers=ANN) as client:  # whose session may begin
            await client.say("hello")
            assert (await client.answer()).reason == "error"


async def test_every_response_of_a_realtime_session(serve: Callable[..., Any]) -> None:
    async with serve(tokens_per_day=2) as server, realtime_client(server, additional_headers=ANN) as client:
        await client.update(output_modalities=["text"])
        await client.say("hello")
        assert (await client.respond())["status"] == "completed"
        await client.say("hello")
        error = (await client.respond())["status_details"]["error"]
        assert (error["code"], "tokens of the day" in error["message"]) == ("rate_limit_exceeded", True)


async def test_sessions_over_http(serve: Callable[..., Any]) -> None:
    async with serve(tokens_per_day=2) as server:
        body = {"chunks": [{"text": "hello", "end_of_input": True}]}
        made = await post(server.port, SESSIONS, body, "Authorization: Bearer ann")
        assert made.status == 201
        await server.until(lambda: not server.sessions)
        over = await post(server.port, SESSIONS, body, "Authorization: Bearer ann")
        assert (over.status, over.headers["retry-after"]) == (429, str(DAY // 2))
        async with raw_client(server.port) as client:
            path = f"{SESSIONS}/{made.json()['session_id']}"
            await client.send(request("DELETE", path, "Authorization: Bearer ann"))
            assert (await client.response()).status == 204


# the file


async def test_a_file_of_a_running_server_is_refused(serve: Callable[..., Any]) -> None:
    async with serve(tokens_per_day=4):
        with pytest.raises(ConfigurationError, match="belongs to another server that is running"):
            async with serve(tokens_per_day=4):
                pass
    async with serve(tokens_per_day=4) as server:
        assert (await chat(server)).status == 200


@pytest.mark.parametrize("content", [b"", b"[]", b'{"day": 1, "keys": {"ann": 5}}'])
def test_a_file_without_counts_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "usage.json"
    path.write_bytes(content)
    config = ServerConfig(auth=AuthConfig(usage_file=path))
    with pytest.raises(ConfigurationError, match="holds no counts of keys"):
        create_app(EchoEngine(), config, (ann(tokens_per_day=1),))
    path.unlink()  # its lock is free
    create_app(EchoEngine(), config, (ann(tokens_per_day=1),))


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in_the_way").write_text("")
    config = ServerConfig(auth=AuthConfig(usage_file=tmp_path / "in_the_way" / "usage.json"))
    with pytest.raises(ConfigurationError, match=r"auth\.usage_file: cannot use"):
        create_app(EchoEngine(), config, (ann(tokens_per_day=1),))


def test_no_file_without_daily_limits(tmp_path: Path) -> None:
    config = ServerConfig(auth=AuthConfig(usage_file=tmp_path / "usage.json"))
    create_app(EchoEngine(), config, (ann(max_sessions=1, max_session_sec=5),))
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_stops_nothing(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk(tmp_path / "full", monkeypatch) as folder:
        settings: dict[str, Any] = {"keys": (ann(tokens_per_day=4),), "auth": {"usage_file": folder / "usage.json"}}
        async with live_server(**settings) as server:
            assert [(await chat(server)).status for _ in range(3)] == [200, 200, 429]
        assert caplog.text.count("cannot write the daily use of keys") == 1


@pytest.mark.parametrize("closed", [True, False])
async def test_what_could_not_be_written_is_written_later(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture, closed: bool
) -> None:
    path = tmp_path / "gone" / "usage.json"
    file = DailyUseFile(path, DailyUse({"ann": DailyLimits(tokens=10)}))
    shutil.rmtree(path.parent)

    async def written(tokens: int) -> None:
        await until(lambda: path.exists() and json.loads(path.read_text())["keys"]["ann"]["tokens"] == tokens)

    file.use.add("ann", tokens=7, audio_ms=0, now=clock.now)
    await until(lambda: bool(caplog.text))
    path.parent.mkdir()
    if closed:
        await file.close()
        assert json.loads(path.read_text())["keys"]["ann"]["tokens"] == 7
        return
    await written(7)
    file.use.add("ann", tokens=1, audio_ms=0, now=clock.now)
    await written(8)
    await file.close()
    assert caplog.text.count("cannot write the daily use of keys") == 1


async def test_a_file_that_cannot_be_written_is_tried_less_and_less_often(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = DailyUseFile(tmp_path / "gone" / "usage.json", DailyUse({"ann": DailyLimits(tokens=10)}))
    shutil.rmtree(tmp_path / "gone")
    times: list[float] = []
    begin, loop = file._begin_to_write, asyncio.get_running_loop()

    def begin_to_write() -> None:
        times.append(loop.time())
        begin()

    file._begin_to_write = begin_to_write  # type: ignore[method-assign]
    file.use.add("ann", tokens=7, audio_ms=0, now=clock.now)
    await until(lambda: len(times) == 9)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    # The virtual clock may go on while the file is written.
    assert all(
        pause > least for pause, least in zip(pauses, [1.9, 3.9, 7.9, 15.9, 31.9, 59.9, 59.9, 59.9], strict=True)
    )
    assert max(pauses) < 70
    assert sum(pauses[:5]) < 100  # 62 by the clock of the timers
    await file.close()
    assert caplog.text.count("cannot write the daily use of keys") == 1


# length of a session


async def test_a_session_is_announced_to_end_and_ends() -> None:
    async with live_server(keys=(ann(max_session_sec=60),)) as server:
        async with native_client(server, additional_headers=ANN) as client:
            begun = asyncio.get_running_loop().time()
            await client.say("hello")
            await client.answer()
            closing = await client.until("session_closing")
            assert (closing["reason"], closing["time_left_ms"]) == ("rate_limited", 10_000)
            assert asyncio.get_running_loop().time() - begun == pytest.approx(50, abs=0.5)
            await client.say("still here")
            assert (await client.answer()).text == "still here"
            error = await client.error()
            assert (error["code"], error["retry_after_ms"]) == ("rate_limited", 1000)
            assert "may last 60 seconds" in error["message"]
            assert await client.closed() == 4429
            assert asyncio.get_running_loop().time() - begun == pytest.approx(60, abs=0.5)
        async with native_client(server, additional_headers=ANN) as client:  # the next one may begin at once
            await client.say("hello")
            assert (await client.answer()).reason == "stop"


async def test_an_answer_that_takes_longer_ends_with_its_session() -> None:
    engine = ScriptedEngine([TextOutput("begins"), asyncio.Event().wait])
    async with live_server(engine, keys=(ann(max_session_sec=2),)) as server:
        async with native_client(server, additional_headers=ANN) as client:
            await client.say("hello")
            answer = await client.answer()
            assert (answer.text, answer.reason) == ("begins", "error")
            assert await client.closed() == 4429
        begun = asyncio.get_running_loop().time()
        over = await chat(server)
        assert (over.status, over.error["code"], over.headers["retry-after"]) == (429, "rate_limited", "1")
        assert asyncio.get_running_loop().time() - begun == pytest.approx(2, abs=0.1)
        streamed = await chat(server, stream=True)
        assert streamed.status == 200
        assert b"event: error" in streamed.body
        assert b"rate_limited" in streamed.body


@pytest.mark.parametrize(
    ("headers", "begin", "rest"),
    [
        (("Content-Type: application/json",), b"{", json.dumps(BODY).encode()[1:]),
        (("X-Streaming-Input: true",), b" \n", b'{"text": "hello"}\n'),
    ],
)
async def test_a_request_whose_body_takes_longer_ends(headers: tuple[str, ...], begin: bytes, rest: bytes) -> None:
    head = request("POST", CHAT, "Authorization: Bearer ann", "Transfer-Encoding: chunked", *headers)
    async with live_server(keys=(ann(max_session_sec=2),)) as server, raw_client(server.port) as client:
        await client.send(head, chunked(begin, end=False))
        await asyncio.sleep(3)
        await client.send(chunked(rest))
        over = await client.response()
        assert (over.status, over.error["code"]) == (429, "rate_limited")


async def test_a_session_that_opens_too_late_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The media of a body are read before its session opens."""
    read = MediaReader.read

    async def read_slowly(reader: MediaReader, *given: Any) -> Any:
        await asyncio.sleep(3)
        return await read(reader, *given)

    monkeypatch.setattr(MediaReader, "read", read_slowly)
    async with live_server(keys=(ann(max_session_sec=2),)) as server:
        over = await chat(server)
        assert (over.status, over.error["code"]) == (429, "rate_limited")


async def test_an_answer_that_takes_less_is_whole() -> None:
    engine = ScriptedEngine([TextOutput("begins "), lambda: asyncio.sleep(1.9), TextOutput("and ends")])
    async with live_server(engine, keys=(ann(max_session_sec=2),)) as server:
        answer = await chat(server)
        assert answer.json()["choices"][0]["message"]["content"] == "begins and ends"


async def test_a_realtime_session_ends() -> None:
    keys = (ann(max_session_sec=60),)
    async with live_server(keys=keys) as server, realtime_client(server, additional_headers=ANN) as client:
        assert (await client.until("error"))["error"]["code"] == "rate_limit_exceeded"
        with pytest.raises(ConnectionClosed):  # it is told once
            await client.until("error")
        assert (await client.closed())[0] == 1013


async def test_a_session_over_http_ends() -> None:
    async with live_server(keys=(ann(max_session_sec=5),)) as server:
        made = await post(server.port, SESSIONS, {"chunks": [{"text": "hello"}]}, "Authorization: Bearer ann")
        await asyncio.sleep(5.1)  # on a clock that jumps
        async with raw_client(server.port) as client:
            path = f"{SESSIONS}/{made.json()['session_id']}/result"
            await client.send(request("GET", path, "Authorization: Bearer ann", "Accept: application/json"))
            result = await client.response()
        assert (result.status, result.error["code"]) == (429, "rate_limited")
