"""Replay of native sessions to another server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.recordings import events, lines, recordings, replay

from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine

pytestmark = pytest.mark.slow

BINARY = ["omni.v1+binary"]
RESUMABLE = {"resume_grace_sec": 60}


def tone(ms: int) -> bytes:
    samples = 8000 * np.sin(np.arange(ms * 24) * 2 * np.pi * 440 / 24_000)
    return samples.astype("<i2").tobytes()


async def heard(client: NativeClient, number: int) -> None:
    while client.guarantees.next_output <= number:
        await client.receive()


async def come_back(server: LiveServer, client: NativeClient) -> str:
    """The query of a handshake that resumes."""
    client.gone()
    await client.connection.wait_closed()
    token, last = client.created["resume_token"], client.guarantees.next_output - 1
    return f"?session_id={client.created['session_id']}&resume_token={token}&last_output={last}"


async def troubled_session(server: LiveServer) -> None:
    """Disorder, duplicates, a cancel in the middle of an answer, another by a new request, a lost connection."""
    audio = tone(400)
    pieces = [audio[start : start + 1920] for start in range(0, len(audio), 1920)]
    async with native_client(server, subprotocols=BINARY) as client:
        await client.configure(input_audio={"sample_rate": 24_000}, overlap="interrupt")
        numbers = [0, 2, 1, 1, 3, 5, 4, *range(6, len(pieces))]
        for number in numbers:
            await client.binary(pieces[number], number=number, end=number == len(pieces) - 1)
        await client.answer()
        await client.chunk("one two three four five six seven eight", end=True)
        started = await client.until("response_started")
        await heard(client, client.guarantees.next_output + 1)
        await client.send("cancel", request_id=started["request_id"])
        assert (await client.answer()).reason == "cancelled"
        await client.say("this is interrupted by what comes next, in the middle of it")
        await heard(client, client.guarantees.next_output + 1)
        await client.say("and this is whole")
        assert (await client.answer()).reason == "cancelled"
        await heard(client, client.guarantees.next_output)
        query = await come_back(server, client)
    async with native_client(server, query=query, subprotocols=BINARY, greeted=False) as again:
        assert (await again.until("session_resumed"))["replayed"] >= 0
        again.guarantees.next_output = client.guarantees.next_output
        again.guarantees._running = client.guarantees._running
        again.next_sequence_id = client.next_sequence_id
        assert (await again.answer()).reason == "stop"
        await again.say("good bye")
        await again.answer()


def slow_echo() -> EchoEngine:
    return EchoEngine(EchoSettings(chunk_interval_ms=20, chunk_ms=20))


@pytest.mark.slow
@pytest.mark.parametrize("speed", ["1", "max"])
async def test_a_troubled_session_is_answered_alike_byte_by_byte(tmp_path: Path, speed: str) -> None:
    folder = tmp_path / "recordings"
    async with live_server(slow_echo(), record=folder, streaming_input=RESUMABLE) as server:
        await troubled_session(server)
    (path,) = recordings(folder)
    assert [event["by"] for event in events(path, "close")] == ["lost", "client"]
    sent = [line["binary"] for line in events(path, "in") if "binary" in line]
    numbers = [int.from_bytes(base64.b64decode(data)[4:8]) for data in sent]
    assert numbers[:7] == [0, 2, 1, 1, 3, 5, 4]
    async with live_server(slow_echo(), record=tmp_path / "again", streaming_input=RESUMABLE) as server:
        replayed = await replay(
            path, "--url", f"ws://127.0.0.1:{server.port}", "--speed", speed, "--compare", "exact", "--format", "json"
        )
    assert replayed.status == 0, replayed.output + replayed.errors
    (session,) = replayed.report["sessions"]
    reasons = [answer["finish_reason"] for answer in session["answers"]]
    assert reasons == ["stop", "cancelled", "cancelled", "stop", "stop"]
    assert all(answer["same_audio_bytes"] for answer in session["answers"])
    assert all(answer["replayed"]["final_ms"] is not None for answer in session["answers"])
    # What was sent again is, message by message, what was sent.
    (twin,) = recordings(tmp_path / "again")
    then, now = ([line.get("binary") or shape(line["text"]) for line in events(one, "in")] for one in (path, twin))
    assert then == now
    assert [event.get("last_output") is not None for event in events(twin, "open")] == [False, True]


def shape(text: str) -> str:
    """Without the id of a request, which is another each time."""
    return "cancel" if '"cancel"' in text else text


async def record_one(folder: Path, say: str = "hello there", **fields: Any) -> Path:
    async with live_server(record=folder, **fields) as server, native_client(server) as client:
        await client.say(say)
        await client.answer()
    (path,) = recordings(folder)
    return path


async def test_another_text_is_a_difference(tmp_path: Path) -> None:
    path = await record_one(tmp_path / "r")
    async with live_server(EchoEngine(EchoSettings(reply="something else"))) as server:
        url = f"ws://127.0.0.1:{server.port}"
        different = await replay(path, "--url", url)
        tolerated = await replay(path, "--url", url, "--compare", "none")
    assert different.status == 1
    assert "text: 'hello there' recorded, 'something else' replayed" in different.output
    assert tolerated.status == 0


async def test_many_copies_of_several_recordings_are_a_load(tmp_path: Path) -> None:
    paths = [await record_one(tmp_path / name, say=name) for name in ("a", "b")]
    async with live_server() as server:
        url = f"ws://127.0.0.1:{server.port}"
        replayed = await replay(*paths, "--url", url, "--copies", "20", "--speed", "max")
    assert replayed.status == 0, replayed.output
    assert "40 sessions replayed: 40 equal, 0 different" in replayed.output
    assert "first output: p50" in replayed.output


async def test_a_server_that_is_not_there_is_a_difference_and_no_crash(tmp_path: Path) -> None:
    path = await record_one(tmp_path / "r")
    async with live_server() as server:
        port = server.port
    replayed = await replay(path, "--url", f"ws://127.0.0.1:{port}")
    assert replayed.status == 1
    assert "could not be replayed" in replayed.output
    assert not replayed.errors


async def test_errors_and_failing_closes_are_compared(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    async with live_server(record=folder) as server, native_client(server) as client:
        await client.raw("this is no JSON")
        await client.error()
        await client.chunk("far ahead", number=5000)
        assert await client.closed() == 4422
    (path,) = recordings(folder)
    assert events(path, "close")[0]["code"] == 4422
    async with live_server() as server:
        replayed = await replay(path, "--url", f"ws://127.0.0.1:{server.port}", "--patience", "3")
    assert replayed.status == 0, replayed.output
    async with live_server(streaming_input={"reorder_window_chunks": 9000}) as server:
        replayed = await replay(path, "--url", f"ws://127.0.0.1:{server.port}", "--patience", "1")
    assert replayed.status == 1
    assert "reorder_window_exceeded recorded" in replayed.output


async def test_a_recording_of_one_engine_is_sent_to_another(tmp_path: Path) -> None:
    path = await record_one(tmp_path / "r")
    engine = ScriptedEngine([TextOutput("hello"), TextOutput(" there")])
    async with live_server(engine) as server:
        replayed = await replay(path, "--url", f"ws://127.0.0.1:{server.port}", "--compare", "text")
    assert replayed.status == 0, replayed.output


async def test_a_connection_lost_between_answers_is_not_held_for_what_comes_in_fewer_pieces(tmp_path: Path) -> None:
    async with live_server(record=tmp_path / "r", streaming_input=RESUMABLE) as server:
        async with native_client(server) as client:
            await client.say("one two three four five six")
            await client.answer()
            query = await come_back(server, client)
        async with native_client(server, query=query, greeted=False) as again:
            await again.until("session_resumed")
            again.guarantees.next_output = client.guarantees.next_output
            again.next_sequence_id = client.next_sequence_id
            await again.say("one two three four five six")
            await again.answer()
    (path,) = recordings(tmp_path / "r")
    assert [event["by"] for event in events(path, "close")] == ["lost", "client"]
    async with live_server(
        ScriptedEngine([TextOutput("one two three four five six")]), streaming_input=RESUMABLE
    ) as server:
        url = f"ws://127.0.0.1:{server.port}"
        replayed = await replay(path, "--url", url, "--compare", "text", "--patience", "3600")  # nobody waits so long
    assert replayed.status == 0, replayed.output


async def test_neither_keys_nor_tokens_are_in_a_recording(tmp_path: Path) -> None:
    from omni_ws.config.keys import ApiKey, digest

    key = ApiKey(name="phones", key_sha256=digest("a-secret-key"))
    folder = tmp_path / "r"
    async with live_server(keys=(key,), record=folder, streaming_input=RESUMABLE) as server:
        url = server.websocket_url
        from websockets.asyncio.client import connect

        async with connect(url, subprotocols=["omni-api-key.a-secret-key", "omni.v1+json"], proxy=None) as one:  # type: ignore[list-item]
            created = NativeClient(one)
            token = (await created.receive())["resume_token"]
            assert token
    (path,) = recordings(folder)
    text = path.read_text()
    assert "a-secret-key" not in text
    assert token not in text
    assert lines(path)[0]["key"] == "phones"


async def test_a_greeting_and_a_truncation_are_replayed(tmp_path: Path) -> None:
    async with live_server(record=tmp_path / "r") as server, native_client(server) as client:
        await client.configure(greeting="Hello there!")
        await client.answer()
        await client.say("one")
        first = (await client.answer()).final["request_id"]
        await client.send("history_truncate", request_id=first)
        await client.until("history_truncated")
        await client.say("two")
        await client.answer()
    (path,) = recordings(tmp_path / "r")
    async with live_server(record=tmp_path / "again") as server:
        replayed = await replay(
            path, "--url", f"ws://127.0.0.1:{server.port}", "--speed", "max", "--compare", "exact", "--format", "json"
        )
    assert replayed.status == 0, replayed.output + replayed.errors
    (session,) = replayed.report["sessions"]
    assert len(session["answers"]) == 3
    (twin,) = recordings(tmp_path / "again")
    (told,) = [line["text"] for line in events(twin, "out") if "history_truncated" in line.get("text", "")]
    assert '"dropped_requests":1' in told
    assert first not in told


async def test_a_recording_without_payloads_has_no_greeting(tmp_path: Path) -> None:
    async with live_server(record=tmp_path / "r", record_payloads=False) as server, native_client(server) as client:
        await client.configure(greeting="Hello there!")
        await client.answer()
        await client.send("history_truncate", request_id=client.guarantees.finished[0])
        await client.until("history_truncated")
    (path,) = recordings(tmp_path / "r")
    written = path.read_text()
    assert "Hello" not in written
    assert client.guarantees.finished[0] in written
    assert "dropped_requests" in written
