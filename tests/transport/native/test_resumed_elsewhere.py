"""A client that comes back to another server, whose store may have its session as it was before the store failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live_server import live_server

from omni_ws.client.connection import Endpoint, OpenedConnection, open_session, resume_session
from omni_ws.errors import ShuttingDown


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
