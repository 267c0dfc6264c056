"""A Realtime conversation is one value: it goes on in another server as if nothing had happened.

A client does random things. In one run its server stays; in another the session is saved at random moments, also in the
middle of responses, and goes on elsewhere over another attachment. Both runs give the client the same events.
"""

from __future__ import annotations

import asyncio
import base64
import random
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from support.part_engines import RetortEngine, WordEngine
from support.reined_engine import ReinedEngine, Reins

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import OutputChunk
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.errors import InvalidRequest, OmniError, SessionNotFound, ShuttingDown
from omni_ws.service.conversation.output_log import Attachment
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.transport.realtime.items import Event
from omni_ws.transport.realtime.realtime import RealtimeDialect
from omni_ws.transport.realtime.session import restored_dialect
from omni_ws.transport.realtime.vllm_dialect import SavedVllm, VllmDialect
from omni_ws.wire.realtime_session import SessionFields

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

GOING = ShuttingDown("the server is shutting down")
#: Passes of the event loop after which nothing is left to be done.
SETTLED = 80
STEPS = 70
SHORT = {"type": "retention_ratio", "retention_ratio": 0.4, "token_limits": {"post_instructions": 16}}


class Server:
    def __init__(self, reins: Reins, engine: Engine | None = None) -> None:
        self.engine = engine or ReinedEngine(reins)
        self.factory = SessionFactory(self.engine, ServerConfig(engine=EngineName.FAKE))
        self.sessions = Sessions(self.factory, origin="realtime", grace=0, any_model=True, survive=True)

    async def stop(self) -> None:
        self.sessions.end_all(GOING)
        await self.sessions.wait_closed()
        await self.engine.stop()
        assert self.factory.budget.held == 0


class Caller(Attachment):
    """A Realtime client without a socket, which takes events while it reads."""

    def __init__(self, received: list[Event]) -> None:
        self.received = received
        self.reads = True

    def come(self, session: Session, dialect: RealtimeDialect | VllmDialect) -> None:
        self.session, self.dialect = session, dialect
        self.send(dialect.connect(self.send, lambda response_id: None))
        session.attach(self)

    def go(self) -> None:
        self.dialect.close()
        self.session.detach(self)

    def send(self, events: Iterable[Event]) -> None:
        self.received.extend(events)

    def output_ready(self) -> None:
        while self.reads and (message := self.session.outbox.take()) is not None:
            self.send(self.dialect.render(message))

    def write_now(self, output: OutputChunk) -> bool:
        return False

    def saved(self) -> bytes:
        return msgspec.msgpack.encode(self.dialect.saved())

    def session_over(self, error: OmniError | None) -> None:
        self.go()


class Wandering:
    """A client that does the same with the same ``seed``, whether its session ``moves`` or not."""

    def __init__(self, seed: int, *, moves: bool) -> None:
        self._rng = random.Random(seed)
        self._moves = moves
        self.moved = 0
        self._reins = Reins()
        self._received: list[Event] = []
        self._client = Caller(self._received)

    async def play(self) -> list[Event]:
        await self._open()
        steps = {
            self._create: 14,
            self._respond: 14,
            self._allow: 22,
            self._append: 6,
            self._commit: 5,
            self._delete: 5,
            self._retrieve: 4,
            self._truncate: 3,
            self._cancel: 3,
            self._update: 4,
            self._doze: 4,
        }
        for _ in range(STEPS):
            (step,) = self._rng.choices(list(steps), list(steps.values()))
            step()
            passes, moves = self._rng.choice([0, 0, 1, 2, 5, SETTLED]), self._rng.random() < 0.2
            await self._rest(passes)
            if moves and self._moves:
                await self._move()
            await self._rest(SETTLED)
        self._reins.let_go()
        self._client.reads = True
        self._client.output_ready()
        await self._rest(10 * SETTLED)
        assert not self._client.session.conversation.busy
        await self._server.stop()
        return self._received

    async def _open(self) -> None:
        self._server = Server(self._reins)
        await self._server.engine.start()
        session = self._server.sessions.open(None)
        self._client.come(session, RealtimeDialect(session, self._server.factory, SessionFields()))
        self._reins.loose = False
        self._do(
            "session.update", session={"audio": {"input": {"turn_detection": None}}, "output_modalities": ["text"]}
        )

    async def _move(self) -> None:
        self.moved += 1
        data = self._server.sessions.save(self._client.session)
        self._client.dialect.close()
        reads, gone = self._client.reads, self._client
        gone.reads = False
        gone.received = []
        before, self._server = self._server, Server(self._reins)
        await self._server.engine.start()
        session = self._server.sessions.restore(data, None)
        self._client = Caller(self._received)
        self._client.come(session, restored_dialect(session, self._server.factory))
        self._client.reads = reads
        self._client.output_ready()
        await before.stop()

    # steps

    def _create(self) -> None:
        role = self._rng.choice(["user", "user", "user", "system", "assistant"])
        part = "output_text" if role == "assistant" else "input_text"
        content = [{"type": part, "text": f"{role} {len(self._received)} "}]
        previous = self._rng.choice([None, None, None, "root", self._item()])
        item = {"type": "message", "role": role, "content": content}
        self._do("conversation.item.create", item=item, previous_item_id=previous)

    def _respond(self) -> None:
        response: dict[str, Any] = {"metadata": {"number": str(len(self._received))}}
        if self._rng.random() < 0.2:
            response["conversation"] = "none"
        self._do("response.create", response=response)

    def _append(self) -> None:
        samples = bytes(self._rng.randrange(256) for _ in range(960))
        self._do("input_audio_buffer.append", audio=base64.b64encode(samples).decode())

    def _commit(self) -> None:
        self._do(self._rng.choice(["input_audio_buffer.commit"] * 4 + ["input_audio_buffer.clear"]))

    def _delete(self) -> None:
        self._do("conversation.item.delete", item_id=self._item())

    def _retrieve(self) -> None:
        self._do("conversation.item.retrieve", item_id=self._item())

    def _truncate(self) -> None:
        self._do("conversation.item.truncate", item_id=self._item(), content_index=0, audio_end_ms=100)

    def _cancel(self) -> None:
        self._do("response.cancel")

    def _update(self) -> None:
        session = {
            "instructions": f"be {len(self._received)}",
            "max_output_tokens": self._rng.choice([100, "inf"]),
            "output_modalities": [self._rng.choice(["text", "audio"])],
            "truncation": self._rng.choice(["auto", "disabled", SHORT]),
            "parallel_tool_calls": self._rng.choice([True, False, None]),
        }
        self._do("session.update", session=session)

    def _doze(self) -> None:
        self._client.reads = not self._client.reads
        self._client.output_ready()

    def _allow(self) -> None:
        outputs = self._rng.choice([1, 1, 3])
        if (current := self._client.session.conversation.queue.current) is not None:
            self._reins.allow(current.request_id, outputs)

    def _item(self) -> str:
        """The id of an item, which may be gone."""
        added = [event["item"]["id"] for event in self._received if event["type"] == "conversation.item.added"]
        return added[int(self._rng.random() * len(added))] if added else "item_none"

    def _do(self, kind: str, **fields: Any) -> None:
        try:
            self._client.dialect.receive({"type": kind, **fields}, now=asyncio.get_running_loop().time())
        except InvalidRequest as error:
            self._client.send([self._client.dialect.error(error)])

    async def _rest(self, passes: int) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)


def named_by_order(events: list[Event]) -> list[Any]:
    """The events with names for ids by which two runs are the same."""
    names: dict[str, str] = {}

    def named(value: Any) -> Any:
        match value:
            case dict():
                return {key: named(one) for key, one in value.items() if key not in ("created", "expires_at", "times")}
            case list() | tuple():
                return [named(one) for one in value]
            case str() if re.fullmatch(r"(item|resp|conv|sess|call)_\w+", value):
                return names.setdefault(value, f"{value.split('_')[0]} {len(names)}")
        return value

    return [named(event) for event in events]


@pytest.mark.parametrize("seed", range(20))
async def test_a_conversation_goes_on_in_another_server_as_if_it_had_not_moved(seed: int) -> None:
    stays, moves = Wandering(seed, moves=False), Wandering(seed, moves=True)
    expected = named_by_order(await stays.play())
    found = named_by_order(await moves.play())
    assert moves.moved > 2
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        assert one == other, f"event {place} of {len(expected)}, after {found[max(0, place - 2) : place]}"
    assert len(found) == len(expected)
    assert sum(event["type"] == "response.done" for event in found) > 1


async def test_what_is_unknown_here_ends_the_session_and_leaves_nothing() -> None:
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    session, client = first.sessions.open(None), Caller([])
    client.come(session, RealtimeDialect(session, first.factory, SessionFields()))
    content = [{"type": "input_text", "text": "hello"}]
    item = {"type": "message", "role": "user", "content": content}
    client.dialect.receive({"type": "conversation.item.create", "item": item}, now=0)
    saved = client.dialect.saved()
    assert not isinstance(saved, SavedVllm)
    whole = msgspec.msgpack.decode(first.sessions.save(session))
    client.go()
    for strange in (
        b"",
        b"\x80",
        msgspec.msgpack.encode(saved)[:-3],
        msgspec.msgpack.encode(msgspec.structs.replace(saved, items=[])),
        msgspec.msgpack.encode(msgspec.structs.replace(saved, speaking=5)),
        msgspec.msgpack.encode(saved).replace(b"realtime", b"realtide"),
        msgspec.msgpack.encode(saved).replace(b"function_call", b"function_fall").replace(b"message", b"massage"),
    ):
        restored = second.sessions.restore(msgspec.msgpack.encode({**whole, "attachment": strange}), None)
        with pytest.raises(SessionNotFound, match="this session cannot be resumed here"):
            restored_dialect(restored, second.factory)
        await second.sessions.wait_closed()
        assert (second.factory.admission.sessions, second.factory.budget.held) == (0, 0)
    await first.stop()
    await second.stop()


async def test_dictation_goes_on() -> None:
    """What is dictated was heard in part: the words that were told are not told again."""
    place, received = "conversation.item.input_audio_transcription.", list[Event]()
    dictates = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    first, second = (Server(Reins(), ComposedEngine(RetortEngine(), asr=WordEngine())) for _ in range(2))
    await first.engine.start()
    await second.engine.start()

    async def hear(client: Caller, *words: str) -> None:
        for word in words:
            client.dialect.receive({"type": "input_audio_buffer.append", "audio": _as_audio(word)}, now=0)
            for _ in range(SETTLED):
                await asyncio.sleep(0)

    session, client = first.sessions.open(None), Caller(received)
    client.come(session, RealtimeDialect(session, first.factory, msgspec.convert(dictates, SessionFields)))
    await hear(client, "go", "forward", "ten")
    data = first.sessions.save(session)
    client.received = []
    client.go()
    session, client = second.sessions.restore(data, None), Caller(received)
    client.come(session, restored_dialect(session, second.factory))
    await hear(client, "meters")
    client.dialect.receive({"type": "input_audio_buffer.commit"}, now=0)
    for _ in range(SETTLED):
        await asyncio.sleep(0)
    assert received[-1]["transcript"] == "go forward ten meters"
    assert received[-1]["usage"]["seconds"] == 1.2
    deltas = [event["delta"] for event in received if event["type"] == f"{place}delta"]
    assert "".join(deltas) == "go forward ten meters"
    assert len(deltas) > 1
    await first.stop()
    await second.stop()


def _as_audio(word: str) -> str:
    """300 ms at 24 kHz in which a WordEngine hears a word."""
    return base64.b64encode(word.encode().ljust(14_400)).decode()


async def test_an_utterance_of_vllms_dialect_goes_on() -> None:
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    session, client = first.sessions.open(None), Caller([])
    dialect = VllmDialect(session.conversation, SavedVllm(transcribes=True, hears=True, text=["so "]))
    client.come(session, dialect)
    data = first.sessions.save(session)
    await first.stop()
    session, client = second.sessions.restore(data, None), Caller([])
    goes_on = restored_dialect(session, second.factory)
    assert isinstance(goes_on, VllmDialect)
    client.come(session, goes_on)
    assert client.received == []
    assert goes_on.saved() == SavedVllm(transcribes=True, hears=True, text=["so "])
    await second.stop()


async def test_an_event_that_waits_for_its_image_goes_on() -> None:
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    session, client = first.sessions.open(None), Caller([])
    client.come(session, RealtimeDialect(session, first.factory, SessionFields()))
    image = {"type": "input_image", "image_url": "https://images.example/a.png"}
    item = {"type": "message", "role": "user", "content": [image]}
    client.dialect.receive({"type": "conversation.item.create", "item": item, "event_id": "mine"}, now=0)
    data = first.sessions.save(session)
    client.go()
    restored, other = second.sessions.restore(data, None), Caller([])
    other.come(restored, restored_dialect(restored, second.factory))
    for _ in range(SETTLED):
        await asyncio.sleep(0)
    (refused,) = other.received
    assert (refused["error"]["event_id"], refused["error"]["code"]) == ("mine", "unsupported_parameter")
    other.go()
    await first.stop()
    await second.stop()
