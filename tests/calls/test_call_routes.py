"""The routes of recorded calls: who may use them, what they say, parts of the sound, and what is in the zip."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pytest
from support.call_sound import NoiseEngine, noise
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC
from support.raw_http import RawResponse, raw_client, request
from support.raw_http import call as raw_call
from support.realtime_client import realtime_client
from support.recordings import recordings
from support.scripted_engines import HearingEngine
from support.speech_clips import as_pcm16

from omni_ws.calls.files import write_wav
from omni_ws.calls.reading import CallReading
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import Word
from omni_ws.engine.base import TextOutput, TranscriptOutput
from omni_ws.transport.routes import calls as call_routes

SCRIPT = "<script>alert(1)</script>"
KEYS = (
    ApiKey(name="boss", key_sha256=digest("boss-key"), admin=True),
    ApiKey(name=SCRIPT, key_sha256=digest("user-key")),
)


@asynccontextmanager
async def recorded_call(
    folder: Path, *, keys: tuple[ApiKey, ...] = (), key: str | None = None, **fields: Any
) -> AsyncIterator[tuple[LiveServer, str]]:
    """A server with one call in its folder, in which a script was typed, and its id."""
    headers: dict[str, Any] = {"additional_headers": bearer(key)}
    async with live_server(NoiseEngine(1.0), keys=keys, record=folder, **fields) as server:
        async with native_client(server, **headers) as client:
            created = client.created
            assert created["recorded"] is True
            await client.configure(modalities=["text", "audio"])
            await client.chunk(SCRIPT, modality="text")
            await client.chunk(as_pcm16(noise(1, 0.5, 16_000)), modality="audio", end=True)
            await client.answer()
        await server.check_empty()
        await server.until(lambda: any(b'"event":"end"' in path.read_bytes() for path in recordings(folder)))
        yield server, created["session_id"]


async def call(port: int, method: str, target: str, *, headers: dict[str, str] | None = None) -> RawResponse:
    return await raw_call(port, method, target, None, *(f"{name}: {value}" for name, value in (headers or {}).items()))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def test_a_call_can_be_heard_and_read(tmp_path: Path) -> None:
    async with recorded_call(tmp_path / "calls") as (server, call_id):
        listed = await call(server.port, "GET", "/calls", headers={"Accept": "application/json"})
        assert (listed.status, listed.headers["content-type"]) == (200, "application/json")
        [entry] = listed.json()["calls"]
        assert (entry["id"], entry["kind"], entry["key"]) == (call_id, "websocket", None)
        told = await call(server.port, "GET", f"/calls/{call_id}/call.json")
        assert (told.status, told.headers["content-type"]) == (200, "application/json")
        assert told.headers["x-content-type-options"] == "nosniff"
        assert told.headers["cross-origin-resource-policy"] == "same-origin"
        [turn] = told.json()["turns"]
        assert turn["user"]["text"] == SCRIPT
        assert turn["answer"]["text"] == "This is noise 1."
        assert turn["finish_reason"] == "stop"
        whole = await call(server.port, "GET", f"/calls/{call_id}/sound.wav")
        assert (whole.status, whole.headers["content-type"]) == (200, "audio/wav")
        assert whole.body[:4] == b"RIFF"
        assert np.frombuffer(whole.body[44:], "<i2").reshape(-1, 2).any(axis=0).all()  # both sides sound
        assert len(whole.body) == 44 + 4 * round(24 * told.json()["sound"]["duration_ms"] + 0.5)
        packed = await call(server.port, "GET", f"/calls/{call_id}/call.zip")
        assert packed.headers["content-disposition"] == f'attachment; filename="{call_id}.zip"'
        with zipfile.ZipFile(io.BytesIO(packed.body)) as archive:
            names = {"sound.wav", "transcript.txt", "transcript.json", "call.json", "frames.ndjson"}
            assert set(archive.namelist()) == {f"call/{name}" for name in names}
            assert archive.read("call/sound.wav") == whole.body
            assert archive.read("call/frames.ndjson") == recordings(tmp_path / "calls")[0].read_bytes()
            assert orjson.loads(archive.read("call/call.json")) == told.json()
            assert SCRIPT in archive.read("call/transcript.txt").decode()


@pytest.mark.parametrize(
    ("wanted", "first", "last"),
    [
        ("bytes=0-43", 0, 43),
        ("bytes=100-", 100, None),
        ("bytes=-10", -10, None),
        ("bytes=40-99999999999", 40, None),
        ("bytes=7-7", 7, 7),
    ],
)
async def test_a_part_of_the_sound(tmp_path: Path, wanted: str, first: int, last: int | None) -> None:
    async with recorded_call(tmp_path / "calls") as (server, call_id):
        path = f"/calls/{call_id}/sound.wav"
        whole = await call(server.port, "GET", path)
        assert whole.headers["accept-ranges"] == "bytes"
        part = await call(server.port, "GET", path, headers={"Range": wanted})
        expected = whole.body[first:] if last is None else whole.body[first : last + 1]
        assert (part.status, part.body) == (206, expected)
        begin = first % len(whole.body)
        assert part.headers["content-range"] == f"bytes {begin}-{begin + len(expected) - 1}/{len(whole.body)}"
        same = await call(server.port, "GET", path, headers={"Range": wanted, "If-Range": whole.headers["etag"]})
        assert same.status == 206
        other = await call(server.port, "GET", path, headers={"Range": wanted, "If-Range": '"other"'})
        assert (other.status, other.body) == (200, whole.body)


async def test_parts_that_are_not_there_or_mean_nothing(tmp_path: Path) -> None:
    async with recorded_call(tmp_path / "calls") as (server, call_id):
        path = f"/calls/{call_id}/sound.wav"
        whole = await call(server.port, "GET", path)
        size = len(whole.body)
        for wanted in (f"bytes={size}-", "bytes=-0"):
            beyond = await call(server.port, "GET", path, headers={"Range": wanted})
            assert (beyond.status, beyond.headers["content-range"]) == (416, f"bytes */{size}")
        at_end = await call(server.port, "GET", path, headers={"Range": f"bytes={size - 1}-"})
        assert (at_end.status, at_end.body) == (206, whole.body[-1:])
        for wanted in ("bytes=-", "bytes=0-1,4-5", "seconds=0-1", "bytes=x-", "bytes=" + "9" * 40 + "-"):
            assert (await call(server.port, "GET", path, headers={"Range": wanted})).status == 200
        assert (await call(server.port, "GET", path, headers={"Range": "bytes=9-3"})).status == 400
        async with raw_client(server.port) as client:
            await client.send(request("HEAD", path))
            head = await client.response(to_head=True)
        assert (head.status, head.headers["content-length"], head.body) == (200, str(size), b"")


async def test_only_an_administrator_reads_calls_where_keys_are(tmp_path: Path) -> None:
    async with recorded_call(tmp_path / "calls", keys=KEYS, key="user-key") as (server, call_id):
        for path in ("/calls", *(f"/calls/{call_id}/{name}" for name in ("call.json", "sound.wav", "call.zip"))):
            for key in (None, "wrong", "user-key"):
                refused = await call(server.port, "GET", path, headers=bearer(key))
                assert refused.status == 401, (path, key)
                assert SCRIPT.encode() not in refused.body
            assert (await call(server.port, "GET", path, headers=bearer("boss-key"))).status == 200
        told = await call(server.port, "GET", f"/calls/{call_id}/call.json", headers=bearer("boss-key"))
        assert told.json()["key"] == SCRIPT
        page = await call(server.port, "GET", f"/calls/{call_id}", headers={"Accept": "text/html"})
        assert page.status == 200
        assert call_id.encode() not in page.body  # it holds nothing of the call
        assert "script-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("allowed", [(), ("*",), ("http://evil.example",)])
async def test_pages_of_other_origins_get_nothing(tmp_path: Path, allowed: tuple[str, ...]) -> None:
    async with recorded_call(tmp_path / "calls", allow_origin=allowed) as (server, call_id):
        for path in ("/calls", *(f"/calls/{call_id}/{name}" for name in ("call.json", "sound.wav", "call.zip"))):
            for told in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                refused = await call(server.port, "GET", path, headers=told)
                assert refused.status == 403
                assert not [name for name in refused.headers if name.lower().startswith("access-control")]
            own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
            found = await call(server.port, "GET", path, headers=own)
            assert found.status == 200
            assert not [name for name in found.headers if name.lower().startswith("access-control")]
        async with raw_client(server.port) as client:
            await client.send(request("GET", "/calls").replace(b"Host: localhost", b"Host: evil.example"))
            assert (await client.response()).status == 403
        proxied = await call(server.port, "GET", "/calls", headers={"X-Forwarded-For": "127.0.0.1"})
        assert proxied.status == 401


async def test_ids_that_no_call_has(tmp_path: Path) -> None:
    (tmp_path / "secret.ndjson").write_text("{}")
    async with recorded_call(tmp_path / "calls") as (server, call_id):
        [path] = recordings(tmp_path / "calls")
        (tmp_path / "calls" / "20260101T000000_link.ndjson").symlink_to(path)
        none = ("sess_none", "..%2fsecret", "%2e%2e%2fsecret", call_id[1:], "link", path.name, "a" * 201, "*")
        for name in none:
            for file in ("call.json", "sound.wav", "call.zip"):
                assert (await call(server.port, "GET", f"/calls/{name}/{file}")).status == 404, name
        assert (await call(server.port, "GET", f"/calls/{call_id}/frames.ndjson")).status == 404


async def test_without_recordings_the_routes_say_how_to_have_them() -> None:
    async with live_server() as server:
        for path in ("/calls", "/calls/x", "/calls/x/call.json", "/calls/x/sound.wav", "/calls/x/call.zip"):
            found = await call(server.port, "GET", path)
            assert found.status == 404
            assert "--record" in found.json()["error"]["message"]


async def test_without_payloads_there_is_no_sound(tmp_path: Path) -> None:
    async with recorded_call(tmp_path / "calls", record_payloads=False) as (server, call_id):
        told = (await call(server.port, "GET", f"/calls/{call_id}/call.json")).json()
        assert (told["recorded"]["payloads"], told["sound"]) == (False, None)
        assert SCRIPT not in orjson.dumps(told).decode()
        sound = await call(server.port, "GET", f"/calls/{call_id}/sound.wav")
        assert sound.status == 404
        assert "record_payloads" in sound.json()["error"]["message"]
        packed = await call(server.port, "GET", f"/calls/{call_id}/call.zip")
        with zipfile.ZipFile(io.BytesIO(packed.body)) as archive:
            assert "call/sound.wav" not in archive.namelist()


async def test_sounds_are_made_once_and_leave_no_files(tmp_path: Path) -> None:
    async with recorded_call(tmp_path / "calls") as (server, call_id):
        for _ in range(3):
            await call(server.port, "GET", f"/calls/{call_id}/sound.wav", headers={"Range": "bytes=0-99"})
        assert len([*(tmp_path / "calls").iterdir()]) == 1
        [path] = recordings(tmp_path / "calls")
        path.unlink()  # as the limits of the folder remove it
        assert (await call(server.port, "GET", f"/calls/{call_id}/sound.wav")).status == 404


async def test_secrets_are_in_neither_frames_nor_zip(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    server_tool = {
        "type": "mcp",
        "server_label": "s",
        "server_url": "https://mcp.example/x",
        "authorization": "SECRET-token",
        "headers": {"X-Key": "SECRET-header"},
    }
    async with live_server(
        NoiseEngine(0.2), keys=KEYS, record=folder, streaming_input={"resume_grace_sec": 30}, still_answers=False
    ) as server:
        made = await raw_call(server.port, "POST", "/v1/realtime/client_secrets", {}, "Authorization: Bearer user-key")
        secret = made.json()["value"]
        headers: dict[str, Any] = {"additional_headers": bearer("user-key")}
        async with native_client(server, **headers) as client:
            token = client.created["resume_token"]
            await client.send("session_config", tools=[server_tool])
            await client.receive()
            await client.say("Hello.")
            await client.answer()
        async with realtime_client(server, additional_headers={"Authorization": f"Bearer {secret}"}) as other:
            await other.send("session.update", session={"type": "realtime", "tools": [server_tool]})
            await other.until("error", "session.updated")
        await server.until(lambda: sum(b'"event":"end"' in one.read_bytes() for one in recordings(folder)) == 2)
        for entry in (await call(server.port, "GET", "/calls", headers=bearer("boss-key"))).json()["calls"]:
            found = await call(server.port, "GET", f"/calls/{entry['id']}/call.json", headers=bearer("boss-key"))
            packed = await call(server.port, "GET", f"/calls/{entry['id']}/call.zip", headers=bearer("boss-key"))
            with zipfile.ZipFile(io.BytesIO(packed.body)) as archive:
                texts = [archive.read(name) for name in archive.namelist()] + [found.body]
            assert b"mcp.example" in found.body  # the rest of the entry is there
            for hidden in ("SECRET", secret, token, "user-key"):
                assert not [text for text in texts if hidden.encode() in text], hidden


async def test_one_sound_is_made_at_a_time_also_for_clients_that_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    files: list[BinaryIO] = []
    begun, go_on = threading.Event(), threading.Event()

    def made_slowly(reading: CallReading, target: BinaryIO) -> None:
        files.append(target)
        made.append("begin")
        begun.set()
        assert go_on.wait(PATIENCE_SEC)
        made.append("end")
        write_wav(reading, target)

    monkeypatch.setattr(call_routes, "write_wav", made_slowly)
    async with recorded_call(tmp_path / "calls") as (server, call_id):
        wanted = request("GET", f"/calls/{call_id}/sound.wav")
        async with raw_client(server.port) as client:
            await client.send(wanted)
            await asyncio.to_thread(begun.wait, PATIENCE_SEC)
            client.reset()
        async with raw_client(server.port) as client:
            await client.send(wanted)
            assert (await call(server.port, "GET", "/calls", headers={"Accept": "application/json"})).status == 200
            go_on.set()
            assert (await client.response()).status == 200
    assert made in (["begin", "end"], ["begin", "end"] * 2)
    assert all(file.closed for file in files)


async def test_what_was_typed_over_realtime_is_told(tmp_path: Path) -> None:
    """Of the items that a client begins with only what is to be answered is of a turn."""
    folder = tmp_path / "calls"

    def message(role: str, *texts: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}

    async with live_server(NoiseEngine(0.1), record=folder) as server:
        async with realtime_client(server) as client:
            items = (message("system", "Be kind."), message("user", "Hello."), message("assistant", "Hi."))
            for item in (*items, message("user", "My name is Ada."), message("user", "Who", "are you?")):
                await client.send("conversation.item.create", item=item)
            await client.send("response.create")
            await client.until("response.done")
            await client.send("conversation.item.create", item=message("user", "And now?"))
            await client.send("response.create")
            await client.until("response.done")
        await server.until(lambda: any(b'"event":"end"' in one.read_bytes() for one in recordings(folder)))
        [entry] = (await call(server.port, "GET", "/calls")).json()["calls"]
        found = (await call(server.port, "GET", f"/calls/{entry['id']}/call.json")).json()
    assert [turn["user"]["text"] for turn in found["turns"]] == ["My name is Ada.\nWho\nare you?", "And now?"]
    assert entry["first_words"] == "Hello."


async def test_words_of_a_manual_turn_over_realtime_stand_in_its_own_sound(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    words = (Word("Hi", 0, 200), Word("there.", 300, 500))
    engine = HearingEngine((), heard=(TranscriptOutput("Hi there.", words=words), TextOutput("Yes.")))
    second = base64.b64encode(bytes(2 * 24_000)).decode()
    heard = {"turn_detection": None, "transcription": {"model": "default"}}
    async with live_server(engine, record=folder) as server:
        async with realtime_client(server) as client:
            await client.send("session.update", session={"type": "realtime", "audio": {"input": heard}})
            await client.until("session.updated")
            for _ in range(2):
                await client.send("input_audio_buffer.append", audio=second)
                await client.send("input_audio_buffer.clear")  # it was a mistake
                await client.send("input_audio_buffer.append", audio=second)
                await client.send("input_audio_buffer.commit")
                await client.send("response.create")
                await client.until("response.done")
            content = [{"type": "input_text", "text": "And now?"}]
            item = {"type": "message", "role": "user", "content": content}
            await client.send("conversation.item.create", item=item)
            await client.send("response.create")
            await client.until("response.done")
        await server.until(lambda: any(b'"event":"end"' in one.read_bytes() for one in recordings(folder)))
        [entry] = (await call(server.port, "GET", "/calls")).json()["calls"]
        found = (await call(server.port, "GET", f"/calls/{entry['id']}/call.json")).json()
    *spoken, typed = found["turns"]
    first, last = ([word["start_ms"] for word in turn["user"]["words"]] for turn in spoken)
    # Sound that comes at once counts as spoken from then on, one second after the other.
    assert [last[0] - first[0], first[1] - first[0], last[1] - last[0]] == pytest.approx([2000, 300, 300], abs=1)
    assert first[0] >= 1000
    assert [turn["user"]["start_ms"] for turn in found["turns"]] == [first[0], last[0], None]
    assert [turn["user"]["end_ms"] for turn in spoken] == pytest.approx([first[0] + 1000, last[0] + 1000], abs=1)
    assert typed["user"]["text"] == "And now?"
