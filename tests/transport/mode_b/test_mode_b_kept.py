"""Mode B sessions in a store: any server goes on with them, also when the one before died in the middle of an answer.

A client sends pieces of its input to one server or another, and a reader takes the answer message by message. In one
run nothing dies; in another servers die at any commit, and are left for others while they have nothing to do. Both runs
give the reader the same messages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from support.fake_store import FakeBackend, FakeStore, kept_by
from support.parts_of_sessions import FORM, GOING, chunk
from support.scripted_engines import ReinedEngine, Reins, ToneEngine

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, Usage
from omni_ws.core.request_input import InputState
from omni_ws.engine.base import Engine, Finished, GenerationRequest, OutputWriter, TextComplete
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    OmniError,
    SequenceGap,
    SessionConflict,
    SessionExpired,
    SessionNotFound,
)
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.keeper import find_record, take_record
from omni_ws.service.store.records import HOLDER_EXPIRY_SEC
from omni_ws.transport.mode_b import keeper as keeper_module
from omni_ws.transport.mode_b.keeper import LINGER_SEC, MODE_B_KIND, SMALL_BYTES, ModeBKeeper
from omni_ws.transport.mode_b.session import ModeBRegistry, ModeBSession
from omni_ws.wire.frames import loads_object

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

OWN, OTHER = (ApiKey(name=name, key_sha256=digest(name)) for name in ("own", "other"))
WORDS = ["wörds", "of", "äll", "kinds,", "which", "do", "not", "end", "at", "once:", ""]


class Server:
    def __init__(
        self, shared: FakeStore, reins: Reins | None = None, *, engine: Engine | None = None, **fields: Any
    ) -> None:
        self.engine = engine or ReinedEngine(reins or Reins())
        self.factory = SessionFactory(self.engine, ServerConfig(engine=EngineName.FAKE, **fields))
        self.store = self.factory.store = kept_by(FakeBackend(shared))
        self.backend: FakeBackend = self.store._backend  # type: ignore[assignment]
        self.keeper = ModeBKeeper(ModeBRegistry(self.factory), self.store)
        self.died = asyncio.Event()
        self.backend.on_cut = self.died.set

    async def start(self) -> Server:
        await self.engine.start()
        await self.store.start()
        return self

    async def create(self, *texts: str, key: ApiKey | None = None, start: str = "on_end_only", **fields: Any) -> str:
        slot = ExitStack()
        slot.enter_context(self.factory.admission.session(key))
        conversation = self.keeper.registry.open(key)
        conversation.configure({"modalities": ["text"], "start_policy": start, **fields})
        session = self.keeper.registry.add(conversation, FORM, key=key, slot=slot)
        async with self.keeper.opened(session, None if key is None else key.name), self.keeper.feeding(session, {}, 0):
            await session.feed([chunk(text, number) for number, text in enumerate(texts)])
        return session.id

    @asynccontextmanager
    async def using(self, session_id: str, key: ApiKey | None = None) -> AsyncIterator[ModeBSession]:
        async with self.keeper.using(session_id, key, client="") as session:
            yield session

    async def append(self, session_id: str, text: str, number: int) -> None:
        body = {"chunks": [{"text": text, "sequence_id": number}]}
        async with self.using(session_id) as session, self.keeper.feeding(session, body, len(text)):
            await session.feed([chunk(text, number)])

    async def finish(self, session_id: str) -> None:
        async with self.using(session_id) as session, self.keeper.feeding(session, None, 0):
            session.finish()

    async def result(self, session_id: str) -> list[Any]:
        async with self.using(session_id) as session:
            await session.ended.wait()
            await self.keeper.settled(session)
            return [told(message) for message in session.output.messages]

    @property
    def sessions(self) -> tuple[int, int]:
        """How many sessions are here, and how many slots they have."""
        return len(self.keeper.registry), self.factory.admission.sessions

    def die(self) -> None:
        """Do nothing any more that anybody sees."""
        self.backend.is_cut = True
        self.died.set()

    async def stop(self) -> None:
        self.keeper.end_all(GOING)
        await self.keeper.registry.wait_released()
        await rest()
        await self.engine.stop()
        if not self.died.is_set():
            await self.store.stop()
        else:
            for task in self.store._tasks:
                task.cancel()
            await asyncio.gather(*self.store._tasks, return_exceptions=True)
        assert (self.factory.budget.held, self.factory.admission.sessions) == (0, 0)


def told(message: Any) -> Any:
    match message:
        case OmniError():
            return message.code, message.message
        case FinalChunk():
            return message.finish_reason, message.usage
        case OutputChunk():
            return message.sequence_id, message.modality, message.text
    return type(message).__name__


@asynccontextmanager
async def servers(count: int = 2, reins: Reins | None = None, **fields: Any) -> AsyncIterator[list[Server]]:
    shared = FakeStore()
    found = [await Server(shared, reins, **fields).start() for _ in range(count)]
    try:
        yield found
    finally:
        for server in found:
            await server.stop()


async def rest(passes: int = 60) -> None:
    for _ in range(passes):
        await asyncio.sleep(0)


class Wandering:
    """A client that does the same with the same ``seed``, whether servers ``die`` or not."""

    def __init__(self, seed: int, *, dies: bool) -> None:
        self._rng, self._chance = random.Random(seed), random.Random(seed)
        self._dies = dies
        self._shared, self._reins = FakeStore(), Reins()
        self._servers: list[Server] = []
        self.deaths = 0
        self.seen: list[Any] = []
        self._position = 0

    async def play(self) -> list[Any]:
        self._reins.loose = False
        self._servers = [await Server(self._shared, self._reins).start() for _ in range(2)]
        texts = [self._rng.choice(WORDS) for _ in range(12)]
        start = self._rng.choice(["on_end_only", "on_min_length"])
        session_id: str = await self._do(lambda server: server.create("begin ", start=start))
        for number, text in enumerate(texts, 1):
            await self._do(partial(self._append, session_id, f"{text} ", number))
        await self._do(lambda server: server.finish(session_id))
        request_id = await self._do(lambda server: self._request(server, session_id))
        while await self._do(lambda server: self._read(server, session_id)):
            if self._rng.random() < 0.4:
                self._reins.allow(request_id, self._rng.choice([1, 1, 2, 5]))
        found = await self._do(lambda server: server.result(session_id))
        assert self.seen == found
        for server in self._servers:
            await server.stop()
        return self.seen

    async def _append(self, session_id: str, text: str, number: int, server: Server) -> None:
        await server.append(session_id, text, number)

    async def _request(self, server: Server, session_id: str) -> str:
        async with server.using(session_id) as session:
            assert session.conversation is not None
            return session.conversation.queue.requests[0].request_id

    async def _read(self, server: Server, session_id: str) -> bool:
        """Read what there is of the answer. Returns whether more may come."""
        async with server.using(session_id) as session:
            await rest(20)
            while (found := session.output.find(self._position)) is not None:
                self._position, message = found
                self.seen.append(told(message))
            return session.live

    async def _do(self, call: Callable[[Server], Awaitable[Any]]) -> Any:
        """Ask one of the servers; if it dies meanwhile, or another has the session, ask again until it is done."""
        which = self._rng.randrange(2)
        if self._dies and self._chance.random() < 0.25:
            self._servers[which].backend.cut = self._chance.choice([0, 1, 2])
            self._servers[which].backend.last_arrives = self._chance.random() < 0.5
        while True:
            server = self._servers[which]
            asked, died = asyncio.ensure_future(call(server)), asyncio.create_task(server.died.wait())
            await asyncio.wait([asked, died], return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if asked.done():
                try:
                    return asked.result()
                except (SessionConflict, EngineOverloaded) as error:
                    await asyncio.sleep((error.retry_after_ms or 0) / 1000)
                    which = 1 - which
                    continue
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            self.deaths += 1
            await server.stop()
            self._servers[which] = await Server(self._shared, self._reins).start()
            await asyncio.sleep(HOLDER_EXPIRY_SEC)


@pytest.mark.parametrize("seed", range(12))
async def test_a_session_goes_on_behind_what_was_read_wherever_it_is_and_whoever_dies(seed: int) -> None:
    expected = await Wandering(seed, dies=False).play()
    client = Wandering(seed, dies=True)
    assert await client.play() == expected
    assert sum(len(one) == 3 for one in expected) > 5
    assert client.deaths > 0


class WholeTextEngine(ToneEngine):
    """Says that the answer has all its text, as engines with a voice do."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        out.write(TextComplete(Finished(FinishReason.STOP, Usage())))
        await super().generate(request, out)


async def spoken(
    shared: FakeStore, encoding: str, *, dies: bool, kind: type[ToneEngine] = ToneEngine
) -> tuple[bytes, str]:
    """The sound of an answer, and how it ended. The server of its first half dies, or does not."""
    first, second = [await Server(shared, engine=kind()).start() for _ in range(2)]
    sound: dict[str, Any] = {
        "modalities": ["text", "audio"],
        "output_audio": {"format": encoding, "sample_rate": 24_000},
    }
    try:
        session_id = await first.create("do " * 40, start="on_first_chunk", after_start="extend", **sound)
        async with first.using(session_id) as session:
            position, payload = 0, b""
            while not payload:
                found = await session.output.get(position)
                assert found is not None
                position, message = found
                payload = message.payload if isinstance(message, OutputChunk) else b""
        if dies:
            first.die()
            await asyncio.sleep(HOLDER_EXPIRY_SEC)
        server = second if dies else first
        await server.append(session_id, "re ", 1)
        await server.finish(session_id)
        async with server.using(session_id) as session:
            await session.ended.wait()
            outputs = [one for one in session.output.messages if isinstance(one, OutputChunk)]
            assert [one.sequence_id for one in outputs] == [*range(len(outputs))]
            error = "" if session.error is None else session.error.code
            return b"".join(one.payload for one in outputs), error
    finally:
        await first.stop()
        await second.stop()


@pytest.mark.parametrize("encoding", ["pcm16", "wav"])
async def test_sound_goes_on_where_it_was(encoding: str) -> None:
    whole, error = await spoken(FakeStore(), encoding, dies=False)
    assert len(whole) > 1000
    assert not error
    assert await spoken(FakeStore(), encoding, dies=True) == (whole, "")


async def test_an_answer_that_has_all_its_text_is_kept() -> None:
    whole, error = await spoken(FakeStore(), "pcm16", dies=False, kind=WholeTextEngine)
    assert len(whole) > 1000
    assert not error


async def test_compressed_sound_is_not_continued() -> None:
    with pytest.raises(EngineFailed, match="cannot go on"):
        await spoken(FakeStore(), "mp3", dies=True)


async def test_a_session_at_rest_is_in_no_server_and_any_may_have_it_at_once() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a")
        await rest()
        assert first.sessions == (0, 0)
        await second.append(session_id, "b", 1)
        await first.finish(session_id)
        answer = await second.result(session_id)
        assert await first.result(session_id) == answer == await second.result(session_id)
        assert answer[1][2] + answer[2][2] + answer[3][2] == "<>ab"
        await rest()
        assert (first.sessions, second.sessions) == ((0, 0), (0, 0))
        async with first.using(session_id) as one, second.using(session_id) as other:  # an answer is read by many
            assert one.state is other.state is InputState.FINISHED


async def test_a_session_whose_answer_is_made_is_in_one_server_and_others_say_so() -> None:
    reins = Reins()
    reins.loose = False
    async with servers(reins=reins) as (first, second):
        session_id = await first.create("a")
        await first.finish(session_id)
        with pytest.raises(SessionConflict) as refusal:
            await second.result(session_id)
        assert refusal.value.retry_after_ms == 1000
        async with first.using(session_id) as session:  # here it can be read
            assert session.live
        reins.let_go()
        await rest()
        assert (await second.result(session_id))[-1] == (await first.result(session_id))[-1]


async def test_one_with_much_input_is_given_back_a_moment_later() -> None:
    async with servers() as (first, second):
        small = await first.create("a" * SMALL_BYTES)
        large = await first.create("a" * (SMALL_BYTES + 1))
        await rest()
        assert first.sessions == (1, 1)
        async with second.using(small):
            pass
        with pytest.raises(SessionConflict):
            async with second.using(large):
                pass
        await first.append(large, "b", 1)
        await asyncio.sleep(LINGER_SEC)
        await rest()
        async with second.using(large) as session:
            assert session.progress.received_bytes == SMALL_BYTES + 2


async def test_a_body_is_written_once_however_much_came_before() -> None:
    shared = FakeStore()
    server = await Server(shared).start()
    session_id = await server.create("a" * (SMALL_BYTES + 1))
    begun = len(shared.changes)
    for number in range(1, 40):
        await server.append(session_id, "word", number)
    written = sum(len(one.snapshot or b"") + len(one.element or b"") for one in shared.changes[begun:])
    assert written < 40 * 200
    await server.stop()


async def test_of_a_body_that_was_not_fed_to_its_end_the_rest_is_not_kept() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a" * (SMALL_BYTES + 1))

        async def feed(chunks: int) -> None:
            body = {"chunks": [{"text": "b"}, {"text": "c"}]}
            async with first.using(session_id) as session, first.keeper.feeding(session, body, 0):
                await session.feed([chunk("b", 1)][:chunks])
                raise EngineOverloaded("no room")

        for accepted in (1, 0):
            before = len(first.backend.shared.changes)
            with pytest.raises(EngineOverloaded):
                await feed(accepted)
            assert len(first.backend.shared.changes) == before + accepted
        first.die()
        await asyncio.sleep(HOLDER_EXPIRY_SEC)
        async with second.using(session_id) as session:
            assert session.progress.received_bytes == SMALL_BYTES + 2


async def test_a_server_without_room_for_all_input_leaves_the_session_to_others() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a" * (SMALL_BYTES + 1))
        await first.append(session_id, "b" * 1000, 1)
        first.die()
        await asyncio.sleep(HOLDER_EXPIRY_SEC)
        budget = second.factory.budget
        taken = budget.capacity - budget.held - SMALL_BYTES - 1 - 500
        budget.charge(taken)
        with pytest.raises(EngineOverloaded):
            async with second.using(session_id):
                pass
        budget.give(taken)
        async with second.using(session_id) as session:
            assert session.progress.received_bytes == SMALL_BYTES + 1 + 1000


async def test_a_body_of_any_depth_is_kept() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a" * (SMALL_BYTES + 1))
        deep = loads_object(b'{"deep": %s%s}' % (b"[" * 1000, b"]" * 1000))
        async with first.using(session_id) as session, first.keeper.feeding(session, deep, 0):
            await session.feed([chunk("b", 1)])
        first.die()
        await asyncio.sleep(HOLDER_EXPIRY_SEC)
        async with second.using(session_id) as session:
            assert session.progress.received_bytes == SMALL_BYTES + 2


async def test_only_the_key_that_opened_it_may_have_it_anywhere() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a", key=OWN)
        for key in (None, OTHER):
            with pytest.raises(SessionNotFound):
                async with second.using(session_id, key):
                    pass
        assert second.sessions == (0, 0)
        async with second.using(session_id, OWN) as session:
            assert session.progress.next_sequence_id == 1
        with pytest.raises(SessionNotFound):
            async with second.using("sess_none", OWN):
                pass


async def test_a_deleted_session_is_cancelled_in_every_server() -> None:
    async with servers() as (first, second):
        live, ended = await first.create("a"), await first.create("a")
        await first.finish(ended)
        await first.result(ended)
        await rest()
        for session_id in (live, ended):
            async with second.using(session_id) as session:
                await second.keeper.cancel(session)
            async with first.using(session_id) as session:
                assert session.state is InputState.CANCELLED
                assert not any(isinstance(one, OutputChunk) for one in session.output.messages)


async def test_a_session_that_expires_while_it_is_deleted_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers() as (first, second):
        session_id = await first.create("a")
        await first.finish(session_id)
        await first.result(session_id)
        async with second.using(session_id) as session:

            async def slow(*arguments: Any) -> Any:
                taken = await take_record(*arguments)
                session.expire()
                return taken

            monkeypatch.setattr(keeper_module, "take_record", slow)
            with pytest.raises(SessionExpired):
                await second.keeper.cancel(session)
        await rest()
        assert await first.store.peek(session_id) is None


async def test_a_session_that_is_deleted_before_it_is_taken_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers() as (first, second):
        session_id = await first.create("a")

        async def found(*arguments: Any, **named: Any) -> Any:
            record = await find_record(*arguments, **named)
            assert await first.store.delete(session_id, owner=None)
            return record

        monkeypatch.setattr(keeper_module, "find_record", found)
        with pytest.raises(SessionNotFound):
            async with second.using(session_id):
                pass


async def test_a_session_that_its_owner_deletes_from_the_store_ends_where_it_is() -> None:
    reins = Reins()
    reins.loose = False
    async with servers(reins=reins) as (first, second):
        session_id = await first.create("a", key=OWN)
        async with first.using(session_id, OWN) as session:
            session.finish()
            await rest()
            assert await second.store.delete(session_id, owner="own")
            reins.let_go()
            await session.ended.wait()  # as it has something to write
            assert (session.state, session.output.messages) == (InputState.FAILED, ())
        await rest()
        assert first.sessions == (0, 0)
        with pytest.raises(SessionNotFound):
            async with second.using(session_id, OWN):
                pass


async def test_a_body_that_waits_for_another_is_refused_if_the_session_is_deleted_meanwhile() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a")
        async with first.using(session_id) as session:
            async with first.keeper.feeding(session, {}, 0):
                waits = asyncio.create_task(first.append(session_id, "b", 1))
                await rest()
                assert await second.store.delete(session_id, owner=None)
                await session.ended.wait()  # as the first server gives its next sign of life
            with pytest.raises(SessionNotFound, match="the session was deleted"):
                await waits


class Clock:
    """The wall clock, which shows what the loop's does."""

    def time(self) -> float:
        return asyncio.get_running_loop().time()


async def test_a_session_that_is_deleted_while_it_is_taken_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    go_through = keeper_module._go_through
    async with servers() as (first, second):
        session_id = await first.create("a")

        async def slow(*arguments: Any) -> None:
            assert await first.store.delete(session_id, owner=None)
            await second.store.read(session_id)
            holder = second.store._leases[session_id]
            second.store.snapshot(holder, b"", tokens=(), away=False)
            await second.store.settle(holder)
            await go_through(*arguments)

        monkeypatch.setattr(keeper_module, "_go_through", slow)
        with pytest.raises(SessionConflict):
            async with second.using(session_id):
                pass
        assert second.sessions[0] == 0


async def test_a_session_that_another_server_takes_before_it_is_here_is_a_conflict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled, reins = keeper_module._Held.settled, Reins()
    reins.loose = False
    async with servers(reins=reins) as (first, second):
        session_id = await first.create("a", start="on_first_chunk")
        await asyncio.sleep(2 * LINGER_SEC)
        assert first.sessions == (0, 0)  # although its last message waited for the store when nobody used it any more

        async def overtaken(held: Any) -> None:
            assert await first.store.take(session_id, force=True) is not None
            await settled(held)

        with monkeypatch.context() as patch:
            patch.setattr(keeper_module._Held, "settled", overtaken)
            with pytest.raises(SessionConflict):
                async with second.using(session_id):
                    pass
        reins.let_go()
        await rest()
        assert second.sessions == (0, 0)


async def test_who_comes_just_after_a_session_was_given_back_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find, begins, goes_on = find_record, asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any, **options: Any) -> Any:
        begins.set()
        await goes_on.wait()
        return await find(*arguments, **options)

    async with servers() as (first, second):
        session_id = await first.create("a")
        await rest()
        given_back, drop = asyncio.Event(), second.keeper.drop

        def dropped(*arguments: Any) -> None:
            given_back.set()
            drop(*arguments)

        monkeypatch.setattr(second.keeper, "drop", dropped)
        monkeypatch.setattr(keeper_module, "find_record", slowly)
        leaves = asyncio.create_task(second.result(session_id))
        await begins.wait()
        leaves.cancel()
        await asyncio.wait([leaves])
        goes_on.set()
        await given_back.wait()
        async with second.using(session_id) as session:
            assert session.live


async def test_sessions_at_rest_expire_as_if_they_had_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "time", Clock())
    async with servers() as (first, second):
        live, ended = await first.create("a"), await first.create("b")
        await first.finish(ended)
        await first.result(ended)
        await asyncio.sleep(200)
        await second.append(live, "c", 1)  # it is not silent
        await asyncio.sleep(99)
        for session_id, left in ((live, 201), (ended, 1)):
            async with second.using(session_id) as session:
                assert session.expires_at == pytest.approx(asyncio.get_running_loop().time() + left, abs=0.1)
        await asyncio.sleep(1)
        with pytest.raises(SessionExpired):
            await second.result(ended)
        async with first.using(live):
            pass
        await asyncio.sleep(200)
        with pytest.raises(SessionExpired):
            async with first.using(live):
                pass
        await asyncio.sleep(300)
        for session_id in (live, ended):
            with pytest.raises(SessionNotFound):
                await first.result(session_id)
        assert (first.sessions, second.sessions) == ((0, 0), (0, 0))


async def test_a_gap_that_stays_open_at_rest_fails_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "time", Clock())
    async with servers() as (first, second):
        session_id = await first.create("a")
        await first.append(session_id, "c", 2)
        await first.finish(session_id)
        for server in (first, second, first):
            async with server.using(session_id) as session:
                assert session.live
                await rest()
            await asyncio.sleep(4)
        async with second.using(session_id) as session:  # after more than 10 s
            await rest()
            assert isinstance(session.error, SequenceGap)


async def test_while_the_store_is_gone_sessions_stay_and_are_given_back_when_it_is_there_again() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a")
        async with first.using(session_id):
            first.backend.shared.gone = True
            await asyncio.sleep(2)
            assert first.store.degraded
        await first.append(session_id, "b", 1)
        await first.finish(session_id)
        answer = await first.result(session_id)
        with pytest.raises(EngineOverloaded, match="store of sessions"):
            await second.result(session_id)
        first.backend.shared.gone = False
        await asyncio.sleep(5)
        assert await second.result(session_id) == answer
        assert first.sessions == (0, 0)


async def test_a_server_that_leaves_gives_back_what_nobody_uses_and_the_rest_when_nobody_does() -> None:
    reins = Reins()
    reins.loose = False
    async with servers(reins=reins) as (first, second):
        unused, used = await first.create("a"), await first.create("b")
        await first.finish(unused)
        async with first.using(used) as session:
            session.finish()
            await rest()
            first.keeper.drain(GOING)
            assert first.sessions == (1, 2)  # the slot is free when the engine has stopped
            reins.let_go()
            await session.ended.wait()
        await rest()
        assert first.sessions == (0, 0)
        assert (await second.result(used))[-1] == (await second.result(unused))[-1]


async def test_a_session_that_is_used_again_is_not_given_back_under_its_user() -> None:
    async with servers() as (first, second):
        session_id = await first.create("a" * (SMALL_BYTES + 1))
        async with first.using(session_id) as session:  # a body that comes slowly, or a reader
            await asyncio.sleep(2 * LINGER_SEC)
            assert session.live
            async with first.keeper.feeding(session, {"chunks": [{"text": "b", "sequence_id": 1}]}, 0):
                await session.feed([chunk("b", 1)])
        await asyncio.sleep(LINGER_SEC)
        await rest()
        assert first.sessions == (0, 0)
        async with second.using(session_id) as session:
            assert session.progress.received_bytes == SMALL_BYTES + 1 + 1


async def test_sessions_that_are_forgotten_while_the_store_is_gone_leave_nothing() -> None:
    async with servers(count=1) as (first,):
        first.backend.shared.gone = True
        await asyncio.sleep(2)
        assert first.store.degraded
        for _ in range(3):
            await first.finish(await first.create("a"))
        await asyncio.sleep(3 * first.keeper.registry.timeout)
        assert first.sessions == (0, 0)
        assert not first.keeper._held
        assert not first.store._leases
        first.backend.shared.gone = False


async def test_what_cannot_be_read_is_not_found_and_is_left_to_those_who_can() -> None:
    async with servers() as (first, second):
        lease = first.store.begin("sess_strange", kind=MODE_B_KIND, owner=None)
        first.store.snapshot(lease, b"\x81\xa2at\x01", tokens=(), away=False)
        first.store.release(lease, delete=False)
        await first.store.settle(lease)
        for server in (second, first):
            with pytest.raises(SessionNotFound, match="cannot be resumed here"):
                async with server.using("sess_strange"):
                    pass
            assert server.sessions == (0, 0)
