"""A profile on a full disk is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exhausted import full_disk
from support.live_server import live_server
from support.raw_http import post


async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(tmp_path / "full", monkeypatch) as full:
        async with live_server(profiler={"root": full}) as server:
            response = await post(server.port, "/start_request_profile", {"event_dir": "x"})
            assert (response.status, response.error["code"], response.error["param"]) == (
                400,
                "invalid_value",
                "event_dir",
            )
            assert "No space left on device" in response.error["message"]
            assert (await post(server.port, "/stop_request_profile", b"")).json()["stopped"] is False
        assert list(full.rglob("*.jsonl")) == []
