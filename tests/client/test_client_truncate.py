"""The client library: truncating the history, and what becomes of that where connections break."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.live_server import live_server

from omni_ws.client import connect
from omni_ws.client.halves import IncomingFrames, OutgoingInput
from omni_ws.core.history import Message
from omni_ws.engine.base import GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import InvalidValue, SessionConflict
from omni_ws.wire.server_frames import ErrorFields, ErrorFrame, HistoryTruncatedFrame, encode_frame

KEEPS: dict[str, Any] = {"resume_grace_sec": 30}


class Attentive(EchoEngine):
    """Echoes, and remembers the history that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.history: tuple[Message, ...] = ()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.history = request.history
        await super().generate(request, out)


async def test_requests_are_dropped() -> None:
    engine = Attentive()
    async with live_server(engine) as server, connect(server.websocket_url) as session:
        first = await session.ask_text("one")
        second = await session.ask_text("two")
        assert await session.truncate_history(second.request_id) == 1
        await session.ask_text("three")
        assert [message.text for message in engine.history] == ["one", "one"]
        assert await session.truncate_history(first.request_id) == 2
        assert await session.truncate_history(first.request_id) == 0


async def test_refusals_are_raised_and_the_session_goes_on() -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("well"), go_on.wait])
    async with live_server(engine) as server, connect(server.websocket_url) as session:
        with pytest.raises(InvalidValue) as unknown:
            await session.truncate_history("req_unknown")
        assert unknown.value.param == "request_id"
        await session.send_text("one", end=True)
        await anext(session.response())
        with pytest.raises(SessionConflict):
            await session.truncate_history("req_unknown")
        go_on.set()
        assert (await session.answer()).text == "well"
        updated, refused = await asyncio.gather(
            session.configure(instructions="Be brief."), session.truncate_history("req_x"), return_exceptions=True
        )
        assert isinstance(refused, InvalidValue)
        assert not isinstance(updated, BaseException)
        assert updated.instructions == "Be brief."


@pytest.mark.parametrize("arrived", [False, True])
async def test_it_outlives_a_connection(arrived: bool) -> None:
    engine = Attentive()
    async with (
        live_server(engine, streaming_input=KEEPS) as server,
        connect(server.websocket_url, reconnect=True) as session,
    ):
        await session.ask_text("one")
        second = await session.ask_text("two")
        dropping = asyncio.create_task(session.truncate_history(second.request_id))
        if arrived:
            (conversation,) = server.app.sessions.conversations
            session._link.websocket.transport.pause_reading()
            await server.until(lambda: len(conversation.ledger.history.items) == 2, "the truncation")
        else:
            await asyncio.sleep(0)
        session._link.websocket.transport.abort()
        assert await dropping == 1
        await session.ask_text("three")
        assert [message.text for message in engine.history] == ["one", "one"]


class Pending:
    """A session whose server is played by the test; ``truncate`` sends what a resume sends a second time."""

    def __init__(self) -> None:
        self.incoming = IncomingFrames(None, None, OutgoingInput(window_bytes=1, keep_bytes=0))  # type: ignore[arg-type]
        self.reply = self.incoming.expect_truncation("req_1", b"frame")
        self.incoming.resumed()
        assert self.incoming.truncations_resent()
        _, self.pong = self.incoming.expect_pong()
        self.pong.add_done_callback(self.incoming.settle_truncations)

    def refuse(self) -> None:
        fields = ErrorFields(code="session_conflict", message="between requests only", param="request_id")
        assert self.incoming.receive(encode_frame(ErrorFrame(error=fields)).decode()) is None

    def truncated(self) -> None:
        frame = HistoryTruncatedFrame(request_id="req_1", dropped_requests=1)
        assert self.incoming.receive(encode_frame(frame).decode()) is None

    async def answered(self) -> None:
        self.incoming.receive('{"type":"pong","t":0,"server_time_ms":0}')
        await asyncio.sleep(0)


async def test_a_refusal_of_the_first_copy_does_not_hide_that_the_second_was_carried_out() -> None:
    pending = Pending()
    pending.refuse()
    assert not pending.reply.done()
    pending.truncated()
    assert await pending.reply == 1
    await pending.answered()


@pytest.mark.parametrize("copies", [1, 2])
async def test_a_refusal_counts_once_all_is_answered(copies: int) -> None:
    pending = Pending()
    for _ in range(copies):
        pending.refuse()
    await pending.answered()
    with pytest.raises(SessionConflict):
        await pending.reply


async def test_the_second_reply_is_to_nobody() -> None:
    pending = Pending()
    pending.truncated()
    pending.truncated()
    await pending.answered()
    assert await pending.reply == 1


async def test_connection_that_breaks_again_before_all_is_answered() -> None:
    pending = Pending()
    pending.refuse()
    pending.incoming.fail_pings(ConnectionError())
    await asyncio.sleep(0)
    assert not pending.reply.done()
    pending.incoming.fail(ConnectionError("over"))
    with pytest.raises(ConnectionError):
        await pending.reply
