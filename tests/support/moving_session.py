"""A session that goes on in another server while its answer is being told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import AnyOutput, FinalChunk, InputChunk, OutputChunk, OutputModality
from omni_ws.engine.base import Engine
from omni_ws.errors import OmniError, ShuttingDown
from omni_ws.service.conversation.output_log import Attachment, ServerMessage
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session, Sessions


class MovingClient(Attachment):
    """Takes all that it is sent. When ``moves`` says so of what it has, its session is saved, and ``data`` is set.

    What comes after that is lost.
    """

    def __init__(self, moves: Callable[[list[ServerMessage]], bool]) -> None:
        self.received: list[ServerMessage] = []
        self.session: Session
        self.data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self._moves = moves
        self._sessions: Sessions
        self._saves = False

    def come(self, sessions: Sessions, session: Session) -> None:
        self._sessions, self.session = sessions, session

    def write_now(self, output: OutputChunk) -> bool:
        self._take(output)
        return True

    def output_ready(self) -> None:
        while (message := self.session.outbox.take()) is not None:
            self._take(message)

    def session_over(self, error: OmniError | None) -> None:
        self.session.detach(self)

    def _take(self, message: ServerMessage) -> None:
        self.received.append(message)
        if isinstance(message, FinalChunk):
            self.over.set()
        if not self._saves and self._moves(self.received):
            self._saves = True
            # After the output that is being written: a session is saved between the passes of the loop.
            asyncio.get_running_loop().call_soon(self._save)

    def _save(self) -> None:
        self.data.set_result(self._sessions.save(self.session))
        self.session.detach(self)

    @property
    def last_output(self) -> int:
        return max((one.sequence_id for one in self.received if isinstance(one, AnyOutput)), default=-1)


async def told(
    engine: Engine,
    *chunks: InputChunk,
    config: Mapping[str, Any],
    moves: Callable[[list[ServerMessage]], bool] | None = None,
    other: Engine | None = None,
    then: Sequence[InputChunk] = (),
    greets: bool = False,
) -> list[ServerMessage]:
    """What a client gets that sends ``chunks``, up to the final.

    Once ``moves`` is met, its session goes on by ``other``. Both engines are started, and may be the same. ``then`` is
    sent behind the first final, and answered, too. ``greets``: the session begins with its greeting.
    """
    sessions = sessions_of(engine)
    session = sessions.open(None)
    token = session.new_token()
    assert token is not None
    client = MovingClient(moves or (lambda received: False))
    client.come(sessions, session)
    session.attach(client)
    session.conversation.configure(config)
    if greets:
        session.conversation.greet()
    now = asyncio.get_running_loop().time
    for chunk in chunks:
        session.conversation.receive_chunk(chunk, now=now())
    if moves is not None:
        data = await client.data
        sessions.end_all(ShuttingDown("the server is shutting down"))
        await sessions.wait_closed()
        sessions = sessions_of(other or engine)
        sessions.restore(data, None)
        session = sessions.claim(session.session_id, token, None)
        client.come(sessions, session)
        session.resume(client, client.last_output)
        client.output_ready()
    await client.over.wait()
    if then:
        client.over.clear()
        for chunk in then:
            session.conversation.receive_chunk(chunk, now=now())
        await client.over.wait()
    sessions.end_all(ShuttingDown("the server is shutting down"))
    await sessions.wait_closed()
    return client.received


def sessions_of(engine: Engine) -> Sessions:
    """The sessions of a server with this engine."""
    factory = SessionFactory(engine, ServerConfig(engine=EngineName.FAKE))
    return Sessions(factory, origin="websocket", grace=30, survive=True)


def text_told(received: Sequence[ServerMessage]) -> str:
    return "".join(one.text for one in chunks_of(received, OutputModality.TEXT))


def chunks_of(received: Sequence[ServerMessage], modality: OutputModality) -> list[OutputChunk]:
    return [one for one in received if isinstance(one, OutputChunk) and one.modality is modality]


def final_of(received: Sequence[ServerMessage]) -> FinalChunk:
    """The latest final. All outputs are numbered without gaps, and each comes once."""
    outputs = [one for one in received if isinstance(one, AnyOutput)]
    assert [one.sequence_id for one in outputs] == list(range(len(outputs)))
    last = outputs[-1]
    assert isinstance(last, FinalChunk)
    return last
