"""A session survives its server: cut off at any commit, it goes on elsewhere as if nothing had happened.

A client does random things. In one run its server lives; in another, servers die at random moments: what they have not
committed is lost, and of what they have sent a part has not arrived. The client comes back to a server that knows
nothing but the store, and sends again what was not acknowledged. Both runs give it the same answers.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from support.fake_store import FakeBackend, FakeStore
from support.scripted_engines import ReinedEngine, Reins
from websockets.protocol import State

from omni_ws.config.model import EngineName, ServerConfig, StreamingInputConfig
from omni_ws.errors import ShuttingDown
from omni_ws.service.conversation import conversation as conversation_module
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session
from omni_ws.service.store import session_store as session_store_module
from omni_ws.service.store.records import Change, ChangeOutcome, Sealer
from omni_ws.service.store.session_store import SessionStore
from omni_ws.transport.http.access import Authenticator, ClientSecrets
from omni_ws.transport.native.endpoint import Return, StreamingInput

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

#: Passes of the event loop after which nothing is left to be done.
SETTLED = 120
STEPS = 60


class Wire:
    """A StreamConnection to a client in this process. What a server writes arrives at once, unless the client dozes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self.request = None
        self.is_reading = True
        self.is_open = True
        self.receiver: Any = None
        self._early: list[bytes] = []
        self.closed: tuple[int, str] | None = None
        self.protocol = SimpleNamespace(state=State.OPEN, close_rcvd=None, close_sent=None)

    @property
    def heard_at(self) -> float:
        return self._loop.time()

    def touch(self) -> float:
        return self.heard_at

    @property
    def paused(self) -> bool:
        return not self._client.reads

    def attach(self, receiver: Any, account: Any = None) -> None:
        self.receiver = receiver
        early, self._early = self._early, []
        for data in early:
            receiver.receive_message(data, is_text=True)

    def send(self, data: bytes) -> None:
        """What the client sends."""
        if self.receiver is None:
            self._early.append(data)
        else:
            self.receiver.receive_message(data, is_text=True)

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        if self.is_open:
            self._client.arrived(orjson.loads(data))

    def write_ping(self) -> None:
        pass

    async def answers(self) -> bool:
        return self.is_open

    def pause_reading(self, reason: Any) -> None:
        pass

    def resume_reading(self, reason: Any) -> None:
        pass

    def end_pass(self) -> None:
        pass

    def ignore_messages(self) -> None:
        pass

    async def close_in_time(self, code: int, reason: str) -> None:
        self.is_open = False
        self.closed = (code, reason)

    def cut(self) -> None:
        """Nothing comes over it any more; the server has not noticed."""
        self.is_open = False

    def lose(self) -> None:
        self.is_open = False
        if self.receiver is not None:
            self.receiver.connection_closing()


class Client:
    """Takes frames while it reads."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.reads = True
        self.token = ""
        self.session_id = ""
        self.next_sequence_id = 0
        self.resumed = asyncio.Event()
        #: The requests that it has ever been told of.
        self.started: set[str] = set()

    def arrived(self, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "session_created":
                self.session_id, self.token = frame["session_id"], frame["resume_token"]
                self.resumed.set()
            case "session_resumed":
                self.token, self.next_sequence_id = frame["resume_token"], frame["next_sequence_id"]
                self.resumed.set()
            case "input_ack" | "pong" | "session_closing":
                pass
            case _:
                if frame["type"] == "output_chunk":
                    assert frame["sequence_id"] == self.last_output + 1, "output numbers are contiguous"
                elif frame["type"] == "response_started":
                    self.started.add(frame["request_id"])
                self.received.append(frame)

    @property
    def last_output(self) -> int:
        return max((one["sequence_id"] for one in self.received if one["type"] == "output_chunk"), default=-1)

    def lose(self, last_output: int) -> None:
        """What came behind this output did not arrive."""
        while self.received and not (self.received[-1]["type"] == "output_chunk" and self.last_output <= last_output):
            self.received.pop()


class Laggard(FakeBackend):
    """Takes a few passes of the loop until a commit is done, and a few more until that is known."""

    def __init__(self, shared: FakeStore, fate: random.Random) -> None:
        super().__init__(shared)
        self._fate = fate

    async def commit(self, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        await self._lag()
        outcomes = await super().commit(changes)
        await self._lag()
        return outcomes

    async def _lag(self) -> None:
        for _ in range(self._fate.choice([0, 0, 1, 2, 5])):
            await asyncio.sleep(0)
        await self._work()


class Server:
    """A server without a port, over a store that others share."""

    def __init__(self, reins: Reins, shared: FakeStore, fate: random.Random) -> None:
        self.engine = ReinedEngine(reins)
        streaming = StreamingInputConfig(ping_interval_sec=0)
        config = ServerConfig(engine=EngineName.FAKE, streaming_input=streaming)
        self.factory = SessionFactory(self.engine, config)
        self.backend = Laggard(shared, fate)
        self.factory.store = self.store = SessionStore(
            self.backend,
            sealer=Sealer(),
            budget=self.factory.budget,
            metrics=self.factory.metrics,
            max_age_sec=86_400,
            max_bytes=1 << 30,
        )
        app: Any = SimpleNamespace(
            sessions=self.factory, authenticator=Authenticator(()), secrets=ClientSecrets(), recorder=None
        )
        self.front = StreamingInput(app)
        self._served: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.engine.start()
        await self.store.start()

    def serve(self, wire: Any, returning: Return | None = None) -> None:
        serving = self.front._serve(
            wire, key=None, bound={}, client="", binary_audio=False, refusal=None, returning=returning
        )
        self._served.append(asyncio.create_task(serving))

    @property
    def session(self) -> Session:
        (living,) = self.front._live._living.values()
        return living.session

    async def stop(self) -> None:
        self.front.end_all(ShuttingDown("the server is shutting down"))
        await self.front.wait_closed()
        await asyncio.gather(*self._served)
        await self.store.stop()
        self.factory.speech_workers.close()
        await self.engine.stop()
        assert self.backend.is_cut or self.factory.budget.held == 0


class Wandering:
    """A client that does the same with the same ``seed``, whether its servers die or not."""

    def __init__(self, seed: int, *, dies: bool) -> None:
        self._rng = random.Random(seed)
        #: For what must not change what the client does.
        self._fate = random.Random(seed)
        self._dies = dies
        self.deaths = 0
        self.story: list[str] = []
        self._reins = Reins()
        self._shared = FakeStore()
        self._client = Client()
        #: The frames of chunks, by number.
        self._chunks: list[bytes] = []
        self._held_back: list[int] = []
        self._acknowledged = -1

    async def play(self) -> list[dict[str, Any]]:
        await self._open()
        steps: dict[Callable[[], None], int] = {
            self._text: 20,
            self._audio: 12,
            self._end: 6,
            self._finish: 4,
            self._cancel: 5,
            self._configure: 5,
            self._refused: 3,
            self._leave_gap: 4,
            self._fill_gap: 5,
            self._name: 2,
            self._acknowledge: 6,
            self._doze: 4,
            self._allow: 12,
        }
        for _ in range(STEPS):
            (step,) = self._rng.choices(list(steps), list(steps.values()))
            self.story.append(step.__name__)
            step()
            if step in (self._finish, self._cancel, self._configure):
                # Nothing acknowledges these: a client cannot know whether they arrived.
                keeper = self._server.session.keeper
                assert keeper is not None
                await keeper.settled()
            passes, dies = self._rng.choice([0, 0, 1, 2, 3, 5, 8, 13, SETTLED]), self._rng.random() < 0.2
            await self._rest(passes)
            if dies and self._dies:
                await self._die()
            await self._rest(SETTLED)
            await asyncio.sleep(self._rng.choice([0, 0.3]))
        self._reins.let_go()
        self._fill_gap()
        self._finish()
        self._wake()
        await self._rest(10 * SETTLED)
        assert not self._server.session.conversation.busy
        await self._server.stop()
        return self._client.received

    async def _open(self) -> None:
        self._server = Server(self._reins, self._shared, self._fate)
        await self._server.start()
        self._wire = Wire(self._client)
        self._server.serve(self._wire)
        await self._client.resumed.wait()
        self._reins.loose = self._rng.random() < 0.3

    async def _die(self) -> None:
        """The server dies, and the client comes back to another one."""
        self.deaths += 1
        before, client = self._server, self._client
        before.backend.is_cut = True
        self._wire.cut()
        client.lose(max(self._fate.randint(self._acknowledged, client.last_output), self._kept()))
        self._server = Server(self._reins, self._shared, self._fate)
        await self._server.start()
        client.resumed.clear()
        self._wire = Wire(client)
        self._server.serve(self._wire, Return(client.session_id, client.token, client.last_output))
        last_output = client.last_output
        await client.resumed.wait()
        self._acknowledged = max(self._acknowledged, last_output)
        for number in range(client.next_sequence_id, len(self._chunks)):
            if number not in self._held_back:
                self._wire.send(self._chunks[number])
        self._wake(client.reads)
        await before.stop()

    def _kept(self) -> int:
        """The output that the client must not lose: see ``Wandering._kept`` of test_saved_sessions.py."""
        if self._client.reads:
            return -1
        finals = [one["sequence_id"] for one in self._client.received if one.get("final")]
        return self._client.last_output if self._client.last_output > max(finals, default=-1) else -1

    # steps

    def _text(self) -> None:
        self._chunk(text=f"word {len(self._chunks)} ", end=self._rng.random() < 0.4)

    def _audio(self) -> None:
        samples = bytes(self._rng.randrange(256) for _ in range(320))
        self._chunk(payload=base64.b64encode(samples).decode(), modality="audio", end=self._rng.random() < 0.2)

    def _end(self) -> None:
        self._chunk(text="", end=True)

    def _name(self) -> None:
        self._chunk(text="", ref=f"name {len(self._chunks)}")

    def _finish(self) -> None:
        self._send("finish")

    def _cancel(self) -> None:
        named = self._rng.random() < 0.5
        if named and self._client.started:
            self._send("cancel", request_id=max(self._client.started))
        else:
            self._send("cancel")

    def _configure(self) -> None:
        self._send(
            "session_config",
            overlap=self._rng.choice(["wait", "interrupt"]),
            start_policy=self._rng.choice(["on_first_chunk", "on_end_only", None]),
            after_start=self._rng.choice(["extend", "snapshot"]),
            modalities=self._rng.choice([["text"], ["text", "audio"], None]),
            output_audio={"sample_rate": 16_000},
            history=self._rng.random() < 0.8,
        )

    def _refused(self) -> None:
        self._chunk(payload="AAAA", modality="video")

    def _leave_gap(self) -> None:
        if not self._held_back:
            self._held_back.append(len(self._chunks))
            number = len(self._chunks)
            self._chunks.append(orjson.dumps({"type": "input_chunk", "sequence_id": number, "text": "late "}))

    def _fill_gap(self) -> None:
        held_back, self._held_back = self._held_back, []
        for number in held_back:
            self._wire.send(self._chunks[number])

    def _acknowledge(self) -> None:
        if self._client.reads and self._client.last_output >= 0:
            self._acknowledged = self._client.last_output
            self._send("output_ack", sequence_id=self._acknowledged)

    def _doze(self) -> None:
        self._wake(not self._client.reads)

    def _wake(self, reads: bool = True) -> None:
        self._client.reads = reads
        if reads and self._wire.receiver is not None:
            self._wire.receiver.resume_output()

    def _allow(self) -> None:
        outputs = self._rng.choice([1, 1, 3])
        if (current := self._server.session.conversation.queue.current) is not None:
            self._reins.allow(current.request_id, outputs)

    # frames

    def _send(self, kind: str, **fields: Any) -> None:
        self._wire.send(orjson.dumps({"type": kind, **fields}))

    def _chunk(self, *, end: bool = False, **fields: Any) -> None:
        number = len(self._chunks)
        if end:
            fields["end_of_input"] = True
        self._chunks.append(orjson.dumps({"type": "input_chunk", "sequence_id": number, **fields}))
        self._wire.send(self._chunks[number])

    async def _rest(self, passes: int) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)


def by_request(frames: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each request was answered with: audio that is made again may stand behind text that is not."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"text": "", "audio": "", "other": []})
    for frame in frames:
        request = found[str(frame.get("request_id"))]
        if frame["type"] == "output_chunk" and not frame.get("final") and frame["modality"] in ("text", "audio"):
            request[frame["modality"]] += frame.get("text", "") + frame.get("payload", "")
        else:
            dropped = ("times", "sequence_id")
            request["other"].append({name: value for name, value in frame.items() if name not in dropped})
    return dict(found)


@pytest.fixture(autouse=True)
def numbered_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose ids tell how many were opened before: the same in every run, and in every server."""
    original = Conversation._new_request

    def new_request(self: Conversation, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(conversation_module, "new_id", lambda prefix: f"{prefix}{self.queue.opened:04}")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Conversation, "_new_request", new_request)


@pytest.fixture(autouse=True)
def threads_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's threads take one pass of the loop: the client rests for passes, and threads run when they can."""

    async def run_work(work: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    monkeypatch.setattr(session_store_module, "run_work", run_work)


@pytest.mark.parametrize("seed", range(24))
async def test_a_session_goes_on_as_if_its_servers_had_not_died(seed: int) -> None:
    lives, dies = Wandering(seed, dies=False), Wandering(seed, dies=True)
    expected = by_request(await lives.play())
    found = by_request(await dies.play())
    assert dies.story == lives.story
    assert dies.deaths > 2
    for request_id, answer in expected.items():
        assert found.get(request_id) == answer, request_id
    assert found.keys() == expected.keys()
    assert sum(bool(one["text"]) for one in expected.values()) > 1
