"""What clients hear of failures: words of the server's own and an id, never the text of an exception."""

from __future__ import annotations

import logging

import pytest
from support.live_server import live_server
from support.raw_http import post
from support.scripted_upstream import refuses, upstream

from omni_ws.client import connect
from omni_ws.config.model import RemoteConfig
from omni_ws.engine.base import incident
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.service import identified

SECRET = "secret: the password is swordfish"


def failure() -> EngineFailed:
    """One that an engine raises because of an exception from elsewhere."""
    try:
        try:
            raise RuntimeError(SECRET)
        except RuntimeError as error:
            raise EngineFailed("the codec did not load") from error
    except EngineFailed as error:
        return error


def test_the_log_has_what_stands_behind_an_id(caplog: pytest.LogCaptureFixture) -> None:
    error = failure()
    assert identified(error, where="request 1") is error
    assert error.message == f"the codec did not load; error id {error.error_id}"
    (record,) = caplog.records
    assert str(error.error_id) in record.getMessage()
    assert SECRET in caplog.text
    identified(error, where="request 1")
    assert error.message.count("error id") == 1


def test_other_errors_have_no_id() -> None:
    assert identified(InvalidValue("too hot"), where="request 1").message == "too hot"


def test_an_incident_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    error = incident("the model failed", RuntimeError(SECRET), request_id="req_1")
    assert identified(error, where="request 1").message == f"the model failed; error id {error.error_id}"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert SECRET in caplog.text


async def test_a_websocket_hears_words_and_an_id() -> None:
    async with live_server(ScriptedEngine([failure()])) as server, connect(server.websocket_url) as session:
        with pytest.raises(EngineFailed) as heard:
            await session.ask_text("hello")
    assert heard.value.message.startswith("the codec did not load; error id err_")
    assert "swordfish" not in heard.value.message


@pytest.mark.parametrize("stream", [True, False])
async def test_the_text_of_an_upstream_stays_here(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with upstream(refuses(500, {"error": {"message": SECRET}})) as scripted:
        config = RemoteConfig(upstreams=(scripted.url,), start_timeout_sec=0)
        async with live_server(RemoteEngine(config, log_content=True), remote=config) as server:
            body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
            answer = await post(server.port, "/v1/chat/completions", body, "Accept: application/json")
    assert answer.status == 500
    assert answer.error["message"].startswith("LLM (remote): the upstream failed (status 500); error id err_")
    assert b"swordfish" not in answer.body
    assert "swordfish" in caplog.text  # as log_content allows
