"""``store`` of Live sessions and their ``content``; and calls of the other protocols, read from their recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.call_sound import only_call, told, tracks
from support.inline_workers import inline, loud_24k, quiet_24k
from support.live_server import live_server
from support.raw_http import call
from support.realtime_client import live_client
from support.recordings import recordings
from support.scripted_engines import Talker

from omni_ws.config.keys import ApiKey, digest

pytestmark = pytest.mark.virtual_clock

KEYS = (
    ApiKey(name="a", key_sha256=digest("one")),
    ApiKey(name="b", key_sha256=digest("two"), admin=True),
)
ONE, TWO = "Authorization: Bearer one", "Authorization: Bearer two"


async def test_a_stored_session_is_heard_by_its_key_alone(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    options: dict[str, Any] = {"additional_headers": {"Authorization": "Bearer one"}}
    async with live_server(Talker("go forward"), keys=KEYS, record=folder) as server:
        async with live_client(inline(server), **options) as client:
            session = await client.start(store=True)
            assert session["store"] is True
            await client.append(quiet_24k(96) + loud_24k(320) + quiet_24k(640))
            await client.until_said("forward")
            await client.take_for(1.0)
            await client.end()
        await server.until(lambda: any(b'"event":"end"' in one.read_bytes() for one in recordings(folder)))
        path = f"/v1/live/sessions/{session['id']}/content"
        found = await call(server.port, "GET", path, None, ONE, "Accept: application/binary")
        assert (found.status, found.headers["content-type"], found.body[:4]) == (200, "audio/wav", b"RIFF")
        sides = np.frombuffer(found.body[44:], "<i2").reshape(-1, 2)
        assert sides.any(axis=0).all()
        said = await call(server.port, "GET", path, None, ONE, "Accept: application/json")
        texts = [(line["role"], line["text"]) for line in said.json()["transcript"]]
        assert texts == [("user", "go forward"), ("assistant", "You said go forward")]
        assert (await call(server.port, "GET", path)).status == 401
        assert (await call(server.port, "GET", path, None, TWO)).status == 404
        other = "/v1/live/sessions/live_none/content"
        assert (await call(server.port, "GET", other, None, ONE)).status == 404


async def test_a_session_that_was_not_to_be_stored_has_no_content(tmp_path: Path) -> None:
    async with live_server(Talker("yes"), record=tmp_path / "calls") as server:
        async with live_client(inline(server)) as client:
            session = await client.start()
            assert session["store"] is False
            await client.end()
        folder = tmp_path / "calls"
        await server.until(lambda: any(b'"event":"end"' in one.read_bytes() for one in recordings(folder)))
        found = await call(server.port, "GET", f"/v1/live/sessions/{session['id']}/content")
        assert found.status == 404
        assert "store" in found.json()["error"]["message"]


@pytest.mark.parametrize("recorded", [{}, {"record_payloads": False}, {"record_fraction": 0}])
async def test_store_is_refused_where_nothing_is_kept(tmp_path: Path, recorded: dict[str, Any]) -> None:
    fields = {"record": tmp_path / "calls", **recorded} if recorded else {}
    async with live_server(Talker("yes"), **fields) as server, live_client(inline(server)) as client:
        await client.send("session.start", session={"model": "gpt-live-1", "store": True})
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "session.store")
        if not recorded:
            assert "--record" in error["message"]
            found = await call(server.port, "GET", "/v1/live/sessions/live_x/content")
            assert found.status == 400
            assert "--record" in found.json()["error"]["message"]


async def test_the_sound_of_a_live_session_is_what_its_client_played(tmp_path: Path) -> None:
    """A client that plays all that it gets from its first sound on: that is the sound of the recording."""
    folder = tmp_path / "calls"
    async with live_server(Talker("one", "two", "three"), record=folder) as server:
        async with live_client(inline(server)) as client:
            await client.start()
            for _ in range(3):
                await client.speak()
                await client.take_for(3.0)
            await client.end()
        samples = np.frombuffer(bytes(client.sound), "<i2").astype(np.float32) / 32768
    left, right, rate = tracks(only_call(folder))
    assert rate == 24_000
    sounds = np.flatnonzero(np.abs(samples) > 0.1)
    heard = np.flatnonzero(np.abs(right) > 0.1)
    assert len(heard) == len(sounds) > rate  # three answers
    # By the line of the session, on which silence is sent too.
    assert np.abs((heard - sounds) - (heard - sounds)[0]).max() <= 1
    user = np.flatnonzero(np.abs(left) > 0.2)
    assert len(user) == pytest.approx(3 * 0.32 * rate, rel=0.02)
    turns = told(folder)["turns"]
    assert [turn["user"]["text"] for turn in turns] == ["one", "two", "three"]
    for turn in turns:
        start, end = turn["answer"]["start_ms"], turn["answer"]["end_ms"]
        sounding = np.abs(right[int(start * rate / 1000) : int(end * rate / 1000)]) > 0.1
        assert sounding.mean() > 0.9
