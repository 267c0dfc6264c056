"""A client that comes back to another server, whose store may have its session as it was before the store failed."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC
from support.scripted_engines import PlayingEngine
from websockets.exceptions import ConnectionClosed

from omni_ws.client.connection import Endpoint, OpenedConnection, open_session, resume_session
from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.errors import ShuttingDown

KEY = {"Authorization": "Bearer sesame"}


async def test_what_an_answer_uses_counts_once_where_it_goes_on(tmp_path: Path) -> None:
    keys = (ApiKey(name="one", key_sha256=digest("sesame"), audio_seconds_per_day=600),)
    second = AudioOutput(np.linspace(0, 0.5, 16_000, dtype=np.float32), 16_000)

    def server(name: str) -> AbstractAsyncContextManager[LiveServer]:
        kept: dict[str, Any] = {"sessions": {"store": f"sqlite:{tmp_path / 'store' / 'sessions.db'}"}}
        kept |= {"streaming_input": {"resume_grace_sec": 30}, "auth": {"usage_file": tmp_path / name}}
        engine = PlayingEngine([TextOutput("so it goes on"), *[second] * 8])
        return live_server(engine, keys=keys, still_answers=False, **kept)

    async with server("first") as first, server("other") as other:
        async with native_client(first, additional_headers=KEY) as client:
            await client.configure(modalities=["text", "audio"], max_lead_ms=3000)
            await client.say("go on")
            while (frame := await client.receive())["type"] != "output_chunk" or frame["modality"] != "audio":
                pass
            first.app.drain(PATIENCE_SEC)
            with suppress(ConnectionClosed):
                while True:
                    await client.receive()
        created = client.created
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output=-1"
        async with native_client(other, query=query, additional_headers=KEY, greeted=False) as client:
            answer = await client.answer()
        other.native.end_all(ShuttingDown("the test is over"))
    counts = [json.loads((tmp_path / name).read_bytes())["keys"].get("one", {}) for name in ("first", "other")]
    assert sum(one.get("audio_ms", 0) for one in counts) == answer.final["usage"]["output_audio_ms"] == 8000


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_session_is_taken_from_the_store_unless_its_client_knows_more(resumable: bool, tmp_path: Path) -> None:
    shared = {"sessions": {"store": f"sqlite:{tmp_path / 'store' / 'sessions.db'}"}}
    kept: dict[str, Any] = {**shared, "streaming_input": {"resume_grace_sec": 30}, "still_answers": False}
    async with live_server(**kept) as holder, live_server(**kept) as other:
        opened = await open_session(Endpoint(url=holder.websocket_url), {})
        created = opened.created
        assert created.resume_token is not None
        resumed = await resume_session(
            Endpoint(url=other.websocket_url), created.session_id, created.resume_token, -1, {}, resumable=resumable
        )
        if resumable:
            assert not isinstance(resumed, OpenedConnection)
            assert resumed[1].session_id == created.session_id
            websocket = resumed[0]
        else:
            assert isinstance(resumed, OpenedConnection)
            assert resumed.created.session_id != created.session_id
            websocket = resumed.websocket
            # The server that has the session itself resumes it, whatever its store has.
            again = await resume_session(
                Endpoint(url=holder.websocket_url), created.session_id, created.resume_token, -1, {}, resumable=False
            )
            assert not isinstance(again, OpenedConnection)
            await again[0].close()
        await websocket.close()
        await opened.websocket.close()
        for server in (holder, other):
            server.native.end_all(ShuttingDown("the test is over"))
