"""The life of a session, over connections that are none: every state, and what leads from one to the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.patience import until

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import FinalChunk, FinishReason, InputChunk, Modality, OutputChunk
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import (
    EngineFailed,
    InvalidValue,
    OmniError,
    RateLimited,
    SessionNotFound,
    SessionTimeout,
    ShuttingDown,
)
from omni_ws.service.conversation.output_log import Attachment, ServerMessage
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.wire.server_frames import SessionClosingFrame

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

GRACE = 30.0
GOING = ShuttingDown("the server is shutting down")


class Connection(Attachment):
    """An attachment without a socket, which takes all output at once and leaves when the session is over."""

    def __init__(self, session: Session, *, leaves: bool = True) -> None:
        self.session = session
        self.received: list[ServerMessage] = []
        self.is_replaced = False
        self.over = False
        self.error: OmniError | None = None
        self._leaves = leaves

    def output_ready(self) -> None:
        while (message := self.session.outbox.take()) is not None:
            self.received.append(message)

    def replaced(self) -> None:
        self.is_replaced = True

    def session_over(self, error: OmniError | None) -> None:
        self.over, self.error = True, error
        self.output_ready()
        if self._leaves:
            self.session.detach(self)

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.received if isinstance(message, OutputChunk)]

    @property
    def finals(self) -> list[FinishReason]:
        return [message.finish_reason for message in self.received if isinstance(message, FinalChunk)]

    @property
    def announcements(self) -> list[str]:
        return [message.reason for message in self.received if isinstance(message, SessionClosingFrame)]


class Opened:
    """Sessions of one server."""

    def __init__(self, live: Sessions) -> None:
        self.live = live

    def attached(self, **options: Any) -> tuple[Session, Connection]:
        session = self.live.open(None)
        connection = Connection(session, **options)
        session.attach(connection)
        return session, connection


@asynccontextmanager
async def sessions(*, grace: float = GRACE) -> AsyncIterator[Opened]:
    engine = EchoEngine()
    await engine.start()
    factory = SessionFactory(engine, ServerConfig(engine=EngineName.FAKE))
    live = Sessions(factory, origin="websocket", grace=grace)
    try:
        yield Opened(live)
    finally:
        live.end_all(GOING)
        await live.wait_closed()
        factory.speech_workers.close()
        await engine.stop()


def state(session: Session) -> str:
    """Where the session is in its life."""
    if session.has_ended:
        return "ended"
    if not session.is_open:
        return "ending"
    return "disconnected" if session.disconnected else "attached"


def say(session: Session, number: int, text: str, *, end: bool = True) -> None:
    chunk = InputChunk(Modality.TEXT, text.encode(), number, end_of_input=end)
    session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())


async def ended(some: Opened, session: Session) -> None:
    """Waits for the end of the only session."""
    await some.live.wait_closed()
    assert session.has_ended


# one connection


async def test_a_new_session_is_attached_and_answers() -> None:
    async with sessions() as some:
        session = some.live.open(None)
        assert (state(session), session.disconnected) == ("disconnected", True)
        connection = Connection(session)
        session.attach(connection)
        assert (state(session), session.disconnected) == ("attached", False)
        say(session, 0, "hello")
        await until(lambda: bool(connection.finals))
        assert "".join(connection.texts) == "hello"


async def test_a_session_may_end_before_it_is_attached() -> None:
    async with sessions() as some:
        session = some.live.open(None)
        session.end(None)
        assert state(session) == "ending"
        await ended(some, session)
        with pytest.raises(RuntimeError, match="only while it is open"):
            session.attach(Connection(session))


@pytest.mark.parametrize("error", [None, SessionTimeout("silence"), EngineFailed("broken")], ids=repr)
async def test_the_connection_learns_why_the_session_ends(error: OmniError | None) -> None:
    async with sessions() as some:
        session, connection = some.attached()
        say(session, 0, "unfinished", end=False)
        session.end(error)
        session.end(InvalidValue("too late"))
        assert not session.is_open
        await ended(some, session)
        assert connection.over
        assert connection.error is error
        told = [message for message in connection.received if isinstance(message, OmniError)]
    assert list(map(repr, told)) == ([repr(error)] if isinstance(error, EngineFailed) else [])


async def test_the_session_waits_for_its_last_connection() -> None:
    async with sessions() as some:
        session, connection = some.attached(leaves=False)
        session.end(None)
        await until(lambda: connection.over)
        assert state(session) == "ending"
        session.detach(connection)
        await ended(some, session)


async def test_without_grace_the_session_ends_with_its_connection() -> None:
    async with sessions(grace=0) as some:
        session, connection = some.attached()
        assert (session.resumable, session.new_token()) == (False, None)
        session.detach(connection)
        assert state(session) == "ending"
        await ended(some, session)
        assert not connection.over  # it was gone by then


# disconnected


async def test_a_client_that_stays_away_for_the_whole_grace_period() -> None:
    async with sessions() as some:
        session, connection = some.attached()
        began = asyncio.get_running_loop().time()
        session.detach(connection)
        assert (state(session), some.live.disconnected) == ("disconnected", 1)
        await ended(some, session)
        assert asyncio.get_running_loop().time() - began == pytest.approx(GRACE, abs=0.1)
        assert some.live.disconnected == 0


async def test_a_connection_that_is_not_the_sessions_cannot_detach_it() -> None:
    async with sessions() as some:
        session, _ = some.attached()
        session.detach(Connection(session))
        assert state(session) == "attached"


async def test_what_was_missed_is_sent_to_the_next_connection() -> None:
    async with sessions() as some:
        session, first = some.attached()
        session.detach(first)
        say(session, 0, "hello")
        await until(lambda: any(isinstance(message, FinalChunk) for message, *_ in session.outbox._messages))
        second = Connection(session)
        assert session.can_resume(-1)
        resumed, ack = session.resume(second, -1)
        second.output_ready()
        assert "".join(second.texts) == "hello"
        assert resumed.replayed == len(second.texts) + len(second.finals)
        assert (resumed.session_id, resumed.next_sequence_id, ack.next_sequence_id) == (session.session_id, 1, 1)
        assert state(session) == "attached"
        await asyncio.sleep(2 * GRACE)  # the grace period is over for good: the clock is virtual
        assert state(session) == "attached"


async def test_a_connection_that_is_still_there_is_replaced() -> None:
    async with sessions() as some:
        session, first = some.attached()
        second = Connection(session)
        session.resume(second, -1)
        assert (first.is_replaced, second.is_replaced) == (True, False)
        session.detach(first)  # as it does when it has closed
        assert (state(session), session.disconnected) == ("attached", False)


async def test_a_session_that_cannot_be_resumed_is_ended() -> None:
    async with sessions() as some:
        session, connection = some.attached()
        await some.live.end(session)
        assert connection.is_replaced
        assert state(session) == "ended"


@pytest.mark.parametrize("away", [True, False])
async def test_who_comes_back_hears_that_the_session_is_about_to_end(away: bool) -> None:
    async with sessions(grace=60) as some:
        session, first = some.attached()
        session.limit(60)
        await asyncio.sleep(45 if away else 55)  # it is announced 10 seconds before
        session.detach(first)
        await asyncio.sleep(10 if away else 0)
        second = Connection(session)
        session.resume(second, -1)
        second.output_ready()
        assert first.announcements == ([] if away else ["rate_limited"])
        assert second.announcements == ["rate_limited"]
        await ended(some, session)
        assert isinstance(second.error, RateLimited)


# tokens


async def test_a_token_is_good_until_the_client_is_heard_over_the_next_connection() -> None:
    async with sessions() as some:
        session, _ = some.attached()
        first = session.new_token()
        assert first is not None
        assert some.live.claim(session.session_id, first, None) is session
        resumed, _ = session.resume(Connection(session), -1)
        second = resumed.resume_token
        assert (session.admits(first), session.admits(second), session.admits("")) == (True, True, False)
        session.confirm_token()
        assert (session.admits(first), session.admits(second)) == (False, True)
        with pytest.raises(SessionNotFound):
            some.live.claim(session.session_id, first, None)
        session.end(None)
        assert not session.admits(second)


# draining


async def test_a_drained_session_answers_first() -> None:
    async with sessions() as some:
        session, connection = some.attached()
        say(session, 0, "last words")
        some.live.drain(10)
        assert (state(session), connection.announcements) == ("attached", ["shutting_down"])
        await ended(some, session)
        assert "".join(connection.texts) == "last words"
        assert isinstance(connection.error, ShuttingDown)


async def test_a_drained_session_without_requests_ends_at_once() -> None:
    async with sessions() as some:
        session, connection = some.attached()
        session.drain(10)
        await ended(some, session)
        assert isinstance(connection.error, ShuttingDown)
        session.drain(10)  # which changes nothing any more
        assert len(connection.announcements) == 1


async def test_a_drained_session_is_kept_while_a_client_may_come_back_for_its_answer() -> None:
    async with sessions() as some:
        session, first = some.attached()
        say(session, 0, "hello")
        session.detach(first)
        session.drain(10)
        await until(lambda: not session.conversation.busy)
        assert state(session) == "disconnected"
        second = Connection(session)
        session.resume(second, -1)
        second.output_ready()
        assert (second.announcements, "".join(second.texts)) == (["shutting_down"], "hello")
        await ended(some, session)
        assert isinstance(second.error, ShuttingDown)


async def test_a_drained_session_ends_when_nothing_is_left_for_a_client_to_come_back_for() -> None:
    async with sessions() as some:
        session, connection = some.attached()
        session.detach(connection)
        session.drain(10)
        await ended(some, session)
        assert asyncio.get_running_loop().time() < GRACE


async def test_the_end_of_all() -> None:
    async with sessions() as some:
        (one, first), (two, second) = some.attached(), some.attached()
        two.detach(second)
        some.live.end_all(GOING)
        await some.live.wait_closed()
        assert [state(session) for session in (one, two)] == ["ended"] * 2
        assert (first.error, second.over) == (GOING, False)
