"""A session of Mode B is one value, live or ended: it goes on in another server as if nothing had happened.

A client sends pieces of its input in any order, by numbers or by offsets. In one run its server stays; in another the
session is saved at random moments, behind gaps, in the middle of its answer and behind its end, and goes on elsewhere.
Both runs store the same answer, and count the same input.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.parts_of_sessions import FORM, GOING, answered, chunk
from support.scripted_engines import ReinedEngine, Reins

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import FinalChunk, InputChunk, Modality, Offset, OutputChunk
from omni_ws.core.request_input import InputState
from omni_ws.errors import InvalidRequest, InvalidValue, OmniError, SequenceGap, SessionExpired, SessionNotFound
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.mode_b.session import InputProgress, ModeBRegistry, ModeBSession
from omni_ws.wire.frames import RefusedChunk
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.streaming_body import BodyChunk

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

#: Passes of the event loop after which nothing is left to be done.
SETTLED = 80
WORDS = ["wörds", "of", "äll", "kinds,", "which", "do", "not", "end", "at", "once:", ""]


class Server:
    def __init__(self, reins: Reins | None = None) -> None:
        self.engine = ReinedEngine(reins or Reins())
        self.factory = SessionFactory(self.engine, ServerConfig(engine=EngineName.FAKE))
        self.registry = ModeBRegistry(self.factory, survive=True)

    async def start(self) -> Server:
        await self.engine.start()
        return self

    def open(self, key: ApiKey | None = None) -> ModeBSession:
        slot = ExitStack()
        slot.enter_context(self.factory.admission.session(key))
        conversation = self.registry.open(key)
        conversation.configure({"modalities": ["text"]})
        names = ConfigurationPatch({}, names={"sampling.temperature": "temperature"}, sent=frozenset({"stop"}))
        return self.registry.add(conversation, replace(FORM, names=names), key=key, slot=slot)

    async def stop(self) -> None:
        self.registry.end_all(GOING)
        await self.registry.wait_released()
        await self.engine.stop()
        assert (self.factory.budget.held, self.factory.admission.sessions) == (0, 0)


class Wandering:
    """A client that does the same with the same ``seed``, whether its session ``moves`` or not."""

    def __init__(self, seed: int, *, moves: bool) -> None:
        self._rng = random.Random(seed)
        self._moves = moves
        self.moved = 0
        self._reins = Reins()
        self.refusals: list[str] = []
        self.ways: list[tuple[InputProgress, InputState, bool]] = []

    async def play(self) -> list[Any]:
        self._server = await Server(self._reins).start()
        self._session = self._server.open()
        self._reins.loose = self._rng.random() < 0.3
        pieces = self._pieces()
        while pieces:
            at = min(len(pieces) - 1, self._rng.choice([0, 0, 0, 1, 2, 3]))
            await self._feed(pieces[at] if self._rng.random() < 0.1 else pieces.pop(at))
            await self._between()
        self._session.finish()
        for _ in range(8):
            await self._between()
        self._reins.let_go()
        await self._session.ended.wait()
        await self._between()
        await self._between()
        found = [told(message) for message in self._session.output.messages]
        await self._server.stop()
        return found

    def _pieces(self) -> list[BodyChunk]:
        texts = [self._rng.choice(WORDS) for _ in range(20)]
        by_offset, in_characters = self._rng.random() < 0.5, self._rng.random() < 0.5
        pieces, start = [], 0
        for number, text in enumerate(texts):
            size = len(text) if in_characters else len(text.encode())
            place: dict[str, Any] = {"offset": Offset(start, in_characters)} if by_offset else {"sequence_id": number}
            pieces.append(BodyChunk("", InputChunk(Modality.TEXT, text.encode(), **place)))
            start += size
        if not by_offset:
            pieces[7] = BodyChunk("", RefusedChunk(7, InvalidValue("no", param="payload")))
        return pieces

    async def _feed(self, piece: BodyChunk) -> None:
        try:
            await self._session.feed([piece])
        except InvalidRequest as error:
            self.refusals.append(error.message)

    async def _between(self) -> None:
        if (session := self._session)._session is not None:
            current = session._session.conversation.queue.current
            if current is not None:
                self._reins.allow(current.request_id, self._rng.choice([0, 1, 2]))
        moves = self._rng.random() < 0.3
        for _ in range(self._rng.choice([0, 1, 2, SETTLED])):
            await asyncio.sleep(0)
        if moves and self._moves:
            await self._move()
        for _ in range(SETTLED):
            await asyncio.sleep(0)
        self.ways.append((self._session.progress, self._session.state, self._session.started))

    async def _move(self) -> None:
        self.moved += 1
        data = self._server.registry.save(self._session)
        before, self._server = self._server, await Server(self._reins).start()
        self._session = self._server.registry.restore(data, None)
        await before.stop()


def told(message: Any) -> Any:
    """A message without the ids by which two runs differ."""
    match message:
        case OmniError():
            return message.code, message.message
        case FinalChunk():
            return replace(message, request_id="", times={})  # none after a move
        case OutputChunk():
            return msgspec.structs.replace(message, request_id="")
    return type(message).__name__


@pytest.mark.counts_passes
@pytest.mark.parametrize("seed", range(20))
async def test_a_session_goes_on_in_another_server_as_if_it_had_not_moved(seed: int) -> None:
    stays, moves = Wandering(seed, moves=False), Wandering(seed, moves=True)
    expected = await stays.play()
    found = await moves.play()
    assert moves.moved > 2
    assert found == expected
    assert (moves.refusals, moves.ways) == (stays.refusals, stays.ways)
    assert sum(isinstance(one, OutputChunk) for one in found) > 2


async def test_the_answer_of_an_ended_session_is_read_where_it_goes_on_and_kept_as_long() -> None:
    first, second = await Server().start(), await Server().start()
    session = first.open()
    await answered(session)
    data, stored = first.registry.save(session), session.output
    restored = second.registry.restore(data, None)
    assert second.registry.get(session.id, None) is restored
    assert (restored.state, restored.progress, restored.form) == (session.state, session.progress, session.form)
    position, seen = 0, []
    while (found := await restored.output.get(position)) is not None:
        position, message = found
        seen.append(message)
    assert [*map(told, seen)] == [*map(told, stored.messages)]
    assert second.factory.budget.used == restored.output.held > 0
    await asyncio.sleep(301)
    assert second.factory.budget.used == 0
    with pytest.raises(SessionExpired):
        second.registry.get(session.id, None)
    again = await Server().start()
    with pytest.raises(SessionExpired):
        again.registry.get(again.registry.restore(second.registry.save(restored), None).id, None)
    for server in (first, second, again):
        await server.stop()


async def test_a_gap_before_a_known_end_times_out_where_the_session_goes_on() -> None:
    first, second = await Server().start(), await Server().start()
    session = first.open()
    await session.feed([chunk("a", 0), chunk("c", 2, end=True)])
    await asyncio.sleep(5)
    restored = second.registry.restore(first.registry.save(session), None)
    begun = asyncio.get_running_loop().time()
    await restored.ended.wait()
    assert asyncio.get_running_loop().time() - begun == pytest.approx(10, abs=0.1)
    assert isinstance(restored.failure(), SequenceGap)
    await first.stop()
    await second.stop()


async def test_errors_name_the_fields_of_the_body_where_the_session_goes_on() -> None:
    first, second = await Server().start(), await Server().start()
    restored = second.registry.restore(first.registry.save(first.open()), None)
    assert restored._session is not None
    names = restored._session.conversation.field_names
    assert [names(one) for one in ("sampling.temperature", "stop[1]", "voice")] == ["temperature", "stop[1]", None]
    await first.stop()
    await second.stop()


async def test_bytes_that_are_no_saved_session_leave_nothing_behind() -> None:
    own, other = (ApiKey(name=name, key_sha256=digest(name)) for name in ("own", "other"))
    first, second = await Server().start(), await Server().start()
    live, ended = first.open(own), first.open(own)
    await live.feed([chunk("a", 0), chunk("c", 2)])
    await answered(ended)
    for session in (live, ended):
        data = first.registry.save(session)
        fields = msgspec.msgpack.decode(data)
        strange = [data[:-3], b"", b"\x80", *(data[:end] for end in range(0, len(data), 97))]
        wrong = "failed" if session is live else "open"
        strange += [msgspec.msgpack.encode({**fields, "state": state}) for state in ("no", wrong)]
        strange += [msgspec.msgpack.encode({**fields, "session": None, "output": None, "state": "open"})]
        if session is ended:
            strange += [data.replace(b"ResponseStartedFrame", b"ResponseDartingFrame")]
        for one in strange:
            with pytest.raises(SessionNotFound, match="this session cannot be resumed here"):
                second.registry.restore(one, own)
            assert (second.factory.admission.sessions, second.factory.budget.held) == (0, 0)
        for key in (None, other):
            with pytest.raises(SessionNotFound):
                second.registry.restore(data, key)
        with pytest.raises(SessionNotFound):
            first.registry.restore(data, own)  # it is there already
    await first.stop()
    await second.stop()
