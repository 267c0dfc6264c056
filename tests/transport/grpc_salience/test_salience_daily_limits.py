"""The tokens that a key may use in a day, in token sessions."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from support.salience_server import refused, salience_server
from support.token_engine import TokenEngine

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import AuthConfig, GrpcConfig, ServerConfig


async def test_calls_of_token_sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("omni_ws.service.sessions.admission._unix_time", lambda: 20_000.5 * 86_400)
    config = ServerConfig(grpc=GrpcConfig(port=0), auth=AuthConfig(usage_file=tmp_path / "usage.json"))
    async with salience_server(
        TokenEngine(), keys=(ApiKey(name="ann", key_sha256=digest("ann"), tokens_per_day=5),), config=config
    ) as server:
        server.metadata = (("authorization", "Bearer ann"),)
        session = await server.open()
        await server.events(session, [1, 2, 3], max_tokens=1)
        await server.events(session, [5], offset=4)
        async with refused(grpc.StatusCode.UNAVAILABLE, "its 5 tokens of the day"):
            await server.events(session, [6], offset=5)
        await server.close(session)
        assert server.app.sessions.daily_use_file is not None
        await server.app.sessions.daily_use_file.close()
    assert json.loads((tmp_path / "usage.json").read_bytes())["keys"]["ann"]["tokens"] == 5
