"""Conversations at random: whatever a client does, the guarantees hold at every frame, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from itertools import cycle
from typing import Any, Final

import numpy as np
import orjson
import pytest
from support.inline_workers import InlineWorkers
from support.live_server import LiveServer, live_server
from support.native_client import Guarantees, NativeClient, connecting
from support.parts_of_sessions import weighed
from support.scripted_engines import HearingEngine
from websockets.exceptions import ConnectionClosed

from omni_ws.core.chunks import InputChunk, Modality, ToolCallFragment, Word
from omni_ws.engine.base import AudioOutput, Engine, EngineOutput, TextOutput, ToolCallOutput, TranscriptOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.service.conversation.conversation import MAX_CONFIGURATIONS
from omni_ws.wire.frames import encode_input

# A client that does anything a client may do, at random, and holds what it hears to the protocol at every frame.

#: Milliseconds of pcm16 at 16 kHz.
MS: Final = 32
VAD: Final = {"type": "server_vad", "silence_duration_ms": 200}
#: The request of speech that is uncertain.
UNCERTAIN: Final = "uncertain"
#: A client that is silent for longer than this leaves no gap behind.
_GAP_PATIENCE_SEC: Final = 5
#: More chunks may follow in the same step, and all of them lie within the window.
_WIDEST_GAP: Final = 100


class SessionGuarantees(Guarantees):
    """What a client can rely on across all connections of its session."""

    def __init__(self) -> None:
        super().__init__()
        self.acknowledged = 0
        self.started: frozenset[str] = frozenset()
        #: The turn that is being spoken, and its request; what requests each turn has named.
        self.speaking: tuple[str, str | None] | None = None
        self.spoken: frozenset[tuple[str, str | None]] = frozenset()
        #: Requests that have ended without an answer.
        self.unanswered: set[str] = set()
        #: The names of chunks that are those of requests.
        self.names: set[str] = set()
        self.audio_ms = 0.0
        self.settle()

    def check(self, frame: dict[str, Any]) -> None:
        super().check(frame)
        request_id = frame.get("request_id")
        match frame["type"]:
            case "response_started":
                self.started |= {frame["request_id"]}
            case "output_chunk":
                if frame.get("final"):
                    self._check_final(frame)
                self.settle()
            case "speech_started":
                assert self.speaking is None
                assert frame["audio_ms"] >= self.audio_ms
                assert frame["turn_id"] not in {turn for turn, _ in self.spoken}
                uncertain = frame.get("certain") is False
                assert not uncertain or request_id is None
                self.speaking = (frame["turn_id"], UNCERTAIN if uncertain else request_id)
                self.audio_ms = frame["audio_ms"]
                self.spoken |= {(frame["turn_id"], request_id)}
            case "speech_confirmed":
                assert self.speaking == (frame["turn_id"], UNCERTAIN)
                self.speaking = (frame["turn_id"], request_id)
                self.spoken |= {self.speaking}
            case "speech_dismissed":
                assert self.speaking == (frame["turn_id"], UNCERTAIN)
                self.speaking = None
            case "speech_stopped":
                assert self.speaking is not None
                assert frame["audio_ms"] >= self.audio_ms
                turn_id, opened = self.speaking
                assert opened is not UNCERTAIN
                assert frame["turn_id"] == turn_id
                assert request_id == (None if opened in self.unanswered else opened) or request_id is None
                self.speaking, self.audio_ms = None, frame["audio_ms"]
            case "input_ack":
                assert frame["next_sequence_id"] >= self.acknowledged
                assert frame["credit_bytes"] > 0
                self.acknowledged = frame["next_sequence_id"]

    def _check_final(self, frame: dict[str, Any]) -> None:
        assert frame["usage"]["output_audio_ms"] >= 0
        assert "turn_id" not in frame or (frame["turn_id"], frame["request_id"]) in self.spoken
        if "ref" in frame:
            assert frame["ref"] not in self.names, "a chunk has named two requests"
            self.names.add(frame["ref"])
        if frame["finish_reason"] in ("cancelled", "error"):
            self.unanswered.add(frame["request_id"])

    def settle(self) -> None:
        """What is known after an output; who comes back forgets what followed it (``come_back``)."""
        self._settled = (self._running, self.started, self.speaking, self.spoken, self.audio_ms)

    def come_back(self) -> None:
        self._running, self.started, self.speaking, self.spoken, self.audio_ms = self._settled


class WanderingClient:
    """``wander`` takes one step at random; ``settle`` ends what is open and asks one last question."""

    def __init__(self, server: LiveServer, rng: random.Random, *, may_lose: bool = False) -> None:
        """``may_lose`` says that the server keeps too little for all that may have to be told again."""
        self.server = server
        self.rng = rng
        self.guarantees = SessionGuarantees()
        #: What was done, for whoever reads a failure.
        self.story: list[str] = []
        self.connections = 0
        self._client: NativeClient
        self._reader: asyncio.Task[None]
        self._session_id = ""
        self._token = ""
        #: All chunks, by their number, as they are sent again after a cut.
        self._chunks: list[str | bytes] = []
        self._held_back: list[int] = []
        self._gap_since = 0.0
        self._arrived = asyncio.Condition()
        self._pongs = 0
        self._pings = 0
        self._rate = 16_000
        #: Who says that outputs have arrived that did not loses what was not told.
        self._honest = rng.random() < 0.8
        self._may_lose = may_lose or not self._honest

    # steps

    async def wander(self) -> None:
        steps: dict[Callable[[], Any], int] = {
            self._audio: 30,
            self._text: 8,
            self._whole_text: 5,
            self._image: 2,
            self._tool_result: 2,
            self._finish: 4,
            self._cancel: 6,
            self._truncate: 2,
            self._configure: 4,
            self._acknowledge: 8,
            self._nonsense: 4,
            self._leave_gap: 3,
            self._repeat: 3,
            self._wait: 12,
            self._listen: 8,
            self._doze: 6,
            self._come_back: 5,
            self._take_over: 3,
        }
        (step,) = self.rng.choices(list(steps), list(steps.values()))
        self.story.append(step.__name__)
        self._complain()
        with contextlib.suppress(ConnectionClosed):
            await step()
            if self._held_back:
                gap = len(self._chunks) - self._held_back[0]
                if self._now - self._gap_since > _GAP_PATIENCE_SEC or gap > _WIDEST_GAP:
                    await self._fill_gap()

    async def _audio(self) -> None:
        """Some speech, some silence, or both, in frames of any length."""
        rng = self.rng
        ramp = np.arange(rng.randrange(20, 900) * self._rate // 1000)
        loud = rng.choice([(8000 + ramp % 9973), ramp % 97]).astype("<i2").tobytes()
        size = rng.choice([20, 20, 7, 300]) * self._rate // 1000 * 2
        frames = [loud[start : start + size] for start in range(0, len(loud), size)]
        for number, payload in enumerate(frames):
            await self._chunk(payload, end=number == len(frames) - 1 and rng.random() < 0.1)

    async def _text(self) -> None:
        await self._chunk("some words ", end=self.rng.random() < 0.3)

    async def _whole_text(self) -> None:
        await self._chunk("a question", end=True)

    async def _image(self) -> None:
        await self._chunk(b"\x89PNG", modality=Modality.IMAGE)

    async def _tool_result(self) -> None:
        frame = {"text": "42", "role": "tool", "tool_call_id": "call_1", "end_of_input": self.rng.random() < 0.5}
        await self._number(frame)

    async def _finish(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2])):
            await self._client.send("finish")

    async def _cancel(self) -> None:
        named = self.rng.choice([None, None, self.guarantees._running, "req_unknown", *self.guarantees.started])
        await self._client.send("cancel", request_id=named)

    async def _truncate(self) -> None:
        named = self.rng.choice(["req_unknown", self.guarantees._running, *sorted(self.guarantees.finished)])
        await self._client.send("history_truncate", request_id=named)

    async def _configure(self) -> None:
        rng = self.rng
        patch: dict[str, Any] = {}
        if rng.random() < 0.7:
            patch["turn_detection"] = rng.choice(
                [
                    *(None, VAD, VAD | {"interrupt_response": False}, VAD | {"prefix_padding_ms": 0}),
                    *(VAD | {"interrupt_resume": True}, VAD | {"duck": True}),
                    *(VAD | {"interrupt_resume": True, "duck": True}, VAD | {"duck": True, "prefix_padding_ms": 0}),
                ]
            )
        if rng.random() < 0.3:
            patch["overlap"] = rng.choice([None, "wait", "interrupt"])
        if rng.random() < 0.3:
            patch["max_lead_ms"] = rng.choice([None, 0, 400, 100_000])
        if rng.random() < 0.2:
            patch["greeting"] = rng.choice(["Hello there!", None])
        if rng.random() < 0.2:
            patch["start_policy"] = rng.choice(["on_first_chunk", "on_end_only", "on_min_length", None])
        if rng.random() < 0.2:
            patch["after_start"] = rng.choice(["extend", "snapshot", None])
        if rng.random() < 0.2:
            self._rate = rng.choice([8000, 16_000, 48_000])
            patch["input_audio"] = {"sample_rate": self._rate}
        if rng.random() < 0.2:
            patch["output_audio"] = {"sample_rate": rng.choice([8000, 24_000])}
        await self._client.send("session_config", **patch)

    async def _acknowledge(self) -> None:
        rng, heard = self.rng, self.guarantees.next_output - 1
        if heard < 0 and self._honest:
            return
        number = rng.choice([heard, heard, 0] if self._honest else [heard, 0, 4_000_000_000, heard + 3])
        fields: dict[str, Any] = {"sequence_id": max(0, number)}
        played = rng.choice([None, 0, 10, 500, 500.25, 3000, 1e300])
        if played is not None:
            fields["played_ms"] = played
        await self._client.send("output_ack", **fields)

    async def _nonsense(self) -> None:
        nonsense: list[Callable[[], Coroutine[Any, Any, None]]] = [
            lambda: self._number({"payload": "no base64"}),
            lambda: self._number({"modality": "smell", "text": "roses"}),
            lambda: self._client.send("output_ack", sequence_id=0, played_ms=-1),
            lambda: self._client.send("session_config", max_lead_ms="far"),
            lambda: self._client.send("what is this"),
            lambda: self._client.raw(b"\x01\x01"),
        ]
        await self.rng.choice(nonsense)()

    async def _leave_gap(self) -> None:
        """The next chunk comes later than those behind it."""
        if not self._held_back:
            self._gap_since = self._now
            frame = {"type": "input_chunk", "sequence_id": len(self._chunks), "text": "late "}
            self._held_back.append(len(self._chunks))
            self._chunks.append(orjson.dumps(frame).decode())

    async def _fill_gap(self) -> None:
        held_back, self._held_back = self._held_back, []
        for number in held_back:
            await self._client.raw(self._chunks[number])

    async def _repeat(self) -> None:
        if self._chunks and not self._held_back:
            await self._client.raw(self._chunks[self.rng.randrange(len(self._chunks))])

    async def _wait(self) -> None:
        await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.05, 0.3, 2]))

    async def _listen(self) -> None:
        """Until everything that was sent has been looked at."""
        self._pings += 1
        wanted = self._pings
        await self._client.send("ping", t=wanted)
        await self._until(lambda: self._pongs >= wanted or self._closed)

    async def _doze(self) -> None:
        """Nothing is read for a while, and what the server has to say waits with it."""
        transport = self._client.connection.transport
        transport.pause_reading()
        await asyncio.sleep(self.rng.choice([0.1, 1, 3]))
        for _ in range(self.rng.randrange(3)):
            await self.rng.choice([self._cancel, self._audio, self._whole_text, self._acknowledge])()
        if self.rng.random() < 0.3:
            await self.rng.choice([self._come_back, self._take_over])()
        transport.resume_reading()

    async def _come_back(self) -> None:
        """The connection breaks, perhaps with frames on their way in both directions; later there is another."""
        if self.rng.random() < 0.5:
            await self._audio()
        await self._stop_listening()
        self._client.gone()
        await asyncio.sleep(self.rng.choice([0, 0, 0.01, 1, 8]))
        await self._return()

    async def _take_over(self) -> None:
        """Another connection, while the first is as good as ever."""
        await self._stop_listening()
        old = self._client
        await self._return()
        old.gone()

    async def settle(self) -> None:
        """Nothing is open any more, and the session still does its work."""
        self.story.append("settle")
        await self._fill_gap()
        await self._client.send(
            "session_config", turn_detection=None, overlap=None, max_lead_ms=None, start_policy=None
        )
        await self._listen()
        # Answers may wait for an input that ends behind audio that is still being listened to.
        for _ in range(8):
            await self._client.send("finish")
            await self._listen()
            await self._client.send("cancel")
            await asyncio.sleep(0.1)
        await self._listen()
        before = len(self.guarantees.finished)
        await self._chunk("a question", end=True)
        await self._until(lambda: len(self.guarantees.finished) > before)
        await self._listen()
        now = self.guarantees
        assert now._running is None
        assert not now.speaking
        assert now.started <= {*now.finished}, "a request without a final"
        (last,) = now.finished[before:]
        assert last in now.started
        assert now.acknowledged == len(self._chunks)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def acknowledge_all(self) -> None:
        await self._client.send("output_ack", sequence_id=self.guarantees.next_output - 1)
        await self._listen()

    async def hear_the_end(self) -> None:
        """The server drains: what is open is answered, and then it goes."""
        self.story.append("drain")
        with contextlib.suppress(ConnectionClosed):
            await self._fill_gap()
            await self._client.send("session_config", turn_detection=None)
            while not self._closed:
                await self._client.send("finish")
                await asyncio.sleep(0.5)
        with contextlib.suppress(ConnectionClosed):
            await self._reader
        assert self._client.connection.close_code == 1012
        assert self.guarantees.started <= {*self.guarantees.finished}, "a request without a final"
        assert [frame["reason"] for frame in self._client.seen("session_closing")] == ["shutting_down"]

    # frames

    async def _chunk(self, content: str | bytes, *, end: bool = False, modality: Modality = Modality.AUDIO) -> None:
        number = len(self._chunks)
        if isinstance(content, bytes):
            self._chunks.append(encode_input(InputChunk(modality, content, number, end_of_input=end)))
            await self._client.raw(self._chunks[number])
        else:
            await self._number({"text": content, "end_of_input": end})

    async def _number(self, fields: dict[str, Any]) -> None:
        number = len(self._chunks)
        if number % 3 == 0:
            fields["ref"] = f"chunk {number}"
        self._chunks.append(orjson.dumps({"type": "input_chunk", "sequence_id": number, **fields}).decode())
        await self._client.raw(self._chunks[number])

    # connections

    async def begin(self) -> None:
        await self._open("")
        await self._begin_anew()

    async def _begin_anew(self) -> None:
        created = await self._client.receive()
        assert created["type"] == "session_created"
        self._session_id, self._token = created["session_id"], created["resume_token"]
        self.guarantees = self._client.guarantees = SessionGuarantees()
        self._chunks, self._held_back, self._rate = [], [], 16_000
        self._start_listening()
        if self.rng.random() < 0.7:
            await self._client.send("session_config", turn_detection=VAD, max_lead_ms=self.rng.choice([400, 100_000]))

    async def _return(self) -> None:
        last_output = self.guarantees.next_output - 1
        await self._open(f"?session_id={self._session_id}&resume_token={self._token}&last_output={last_output}")
        resumed = await self._client.receive()
        if resumed["type"] == "error" and self._may_lose:
            assert resumed["error"]["code"] == "resync_required", resumed
            await self._begin_anew()
            return
        assert resumed["type"] == "session_resumed", resumed
        self._token = resumed["resume_token"]
        self.guarantees.come_back()
        self._client.guarantees = self.guarantees
        self._start_listening()
        assert self.guarantees.acknowledged <= resumed["next_sequence_id"] <= len(self._chunks)
        for number in range(resumed["next_sequence_id"], len(self._chunks)):
            if number not in self._held_back:
                await self._client.raw(self._chunks[number])

    async def _open(self, query: str) -> None:
        binary = self.rng.random() < 0.5
        self.connections += 1
        subprotocols = ["omni.v1+binary"] if binary else None
        self._client = NativeClient(await connecting(self.server, query, subprotocols=subprotocols))

    def _start_listening(self) -> None:
        self._reader = asyncio.create_task(self._listen_on(), name="wandering client")

    async def _stop_listening(self) -> None:
        self._complain()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _listen_on(self) -> None:
        try:
            while True:
                frame = await self._client.receive()
                if frame["type"] == "pong":
                    self._pongs = max(self._pongs, frame["t"])
                async with self._arrived:
                    self._arrived.notify_all()
        finally:
            async with self._arrived:
                self._arrived.notify_all()

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: condition() or self._closed)
        self._complain()

    @property
    def _closed(self) -> bool:
        return self._reader.done()

    def _complain(self) -> None:
        """What the listening task found wrong."""
        if self._reader.done() and not self._reader.cancelled():
            self._reader.result()

    async def aclose(self) -> None:
        """Stop listening, also after a failure, without looking at what came. Idempotent."""
        if hasattr(self, "_reader"):  # it has begun
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            await self._client.connection.close()

    async def end(self) -> None:
        await self._stop_listening()
        await self._client.connection.close()


pytestmark = pytest.mark.slow

STEPS = 120
#: What texts, marks and ids of a history of 200 tokens, and of the answers kept beside it, take at most.
MOST_WEIGHED = 256 << 10
#: Where the types of a history's items are from: how many a history of 200 tokens has depends on their lengths.
OF_HISTORY = ("omni_ws.core.history", "omni_ws.core.history", "omni_ws.core.chunks", "omni_ws.core.chunks")


def _speech() -> list[EngineOutput]:
    script: list[EngineOutput] = [TextOutput("these are some words ")]
    for number in range(12):
        words = (Word("words", number * 100, number * 100 + 90),)
        script.append(AudioOutput(np.zeros(2400, np.float32), 24_000, words))
    script.append(ToolCallOutput(ToolCallFragment(0, "call_1", "look", '{"a":')))
    script.append(ToolCallOutput(ToolCallFragment(0, arguments="1}")))
    return script


def _long_speech() -> list[EngineOutput]:
    """More than a socket takes before it is read."""
    script: list[EngineOutput] = []
    for number in range(100):
        script.append(TextOutput(f"word{number} "))
        words = (Word(f"word{number}", number * 500, number * 500 + 490),)
        script.append(AudioOutput(np.zeros(12_000, np.float32), 24_000, words))
    return script


async def _a_while() -> None:
    await asyncio.sleep(0.2)


def _hearing_engine() -> Engine:
    """It takes a while to hear whether anything was said, which is the case every other time."""
    words = [_a_while, TranscriptOutput("some", interim=True), _a_while, TranscriptOutput("some words"), *_speech()]
    engine = HearingEngine([*_speech()[:5], _a_while, *_speech()[5:]])
    engine.heard_in_turn = cycle([(_a_while,), words, (), words])
    return engine


def _engine(name: str) -> Engine:
    match name:
        case "hears":
            return _hearing_engine()
        case "echo":
            return EchoEngine()
        case "slow echo":
            return EchoEngine(EchoSettings(chunk_ms=40, chunk_interval_ms=30, first_chunk_delay_ms=100))
        case "talks long":
            return ScriptedEngine(_long_speech())
        case "talks":
            return ScriptedEngine(_speech())
        case _:
            return ScriptedEngine([_a_while, *_speech()[:5], _a_while, *_speech()[5:], _a_while])


ENGINES = ["hears", "echo", "slow echo", "talks", "talks long", "talks slowly"]


async def converse(engine: Engine, seed: int, *, kept_bytes: int = 8 << 20, drain: bool = False) -> None:
    fields = {"resume_grace_sec": 30, "ping_interval_sec": 0, "max_output_bytes": kept_bytes}
    async with (
        live_server(engine, streaming_input=fields, still_answers=not drain) as server,
        aclosing(WanderingClient(server, random.Random(seed), may_lose=kept_bytes < 8 << 20)) as client,
    ):
        server.app.sessions.speech_workers = InlineWorkers()
        await client.begin()
        try:
            for _ in range(STEPS):
                await client.wander()
            if drain:
                draining = asyncio.create_task(server.running.drain(60))
                await client.hear_the_end()
                await draining
                return
            await client.settle()
            await server.until(lambda: engine.active_requests == 0, "an engine that is free")
            (living,) = server.native._live._living.values()
            session = living.session
            assert session.conversation.stream.held_bytes == 0
            assert not session.conversation.busy
            ledger = session.conversation.ledger
            assert server.held_bytes == session.outbox.journaled + ledger.history.held_bytes + weighed(ledger)
        except BaseException as failure:
            failure.add_note(f"seed {seed}: {' '.join(client.story)}")
            raise
        await client.end()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", range(2))
async def test_any_conversation(name: str, seed: int) -> None:
    await converse(_engine(name), seed)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ENGINES)
async def test_any_conversation_of_which_little_is_kept(name: str) -> None:
    await converse(_engine(name), 0, kept_bytes=5000)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ENGINES)
async def test_any_conversation_that_is_drained(name: str) -> None:
    await converse(_engine(name), 0, drain=True)


@pytest.mark.slow
@pytest.mark.virtual_clock
async def test_a_long_conversation_of_any_kind_grows_no_memory() -> None:
    """Turns, interruptions, gaps and broken connections, all at once."""
    engine = _engine("talks slowly")
    assert isinstance(engine, ScriptedEngine)
    fields = {"resume_grace_sec": 30, "ping_interval_sec": 0}
    async with (
        live_server(engine, streaming_input=fields, limits={"max_history_tokens": 200}) as server,
        aclosing(WanderingClient(server, random.Random(4))) as client,
    ):
        server.app.sessions.speech_workers = InlineWorkers()
        await client.begin()

        async def talk(*, until: float) -> tuple[int, int, int]:
            """What is held at its end: a history's objects, others of this project, and bytes besides the history."""
            while asyncio.get_running_loop().time() < until:
                await client.wander()
                await asyncio.sleep(2)
                engine.requests.clear()
            await client.settle()
            await client.acknowledge_all()
            engine.requests.clear()
            gc.collect()
            (living,) = server.native._live._living.values()
            # Those of the latest requests are kept, so many at most: few of them are different at first.
            kept = living.session.conversation._configurations
            assert len(kept) <= MAX_CONFIGURATIONS
            kept.clear()
            modules = [str(type(one).__module__) for one in gc.get_objects()]
            of_history = sum(module in OF_HISTORY for module in modules)
            ours = sum(module.startswith("omni_ws") for module in modules)
            ledger = living.session.conversation.ledger
            assert ledger.history.held_bytes <= 2 * (8 * 32_000 + 8 * 256)  # 200 tokens, and the latest turn
            assert weighed(ledger) <= MOST_WEIGHED
            return of_history, ours - of_history, server.held_bytes - ledger.history.held_bytes - weighed(ledger)

        of_history, others, held = await talk(until=300)
        assert held == 0
        later_of_history, later_others, later_held = await talk(until=1500)
        assert later_others <= others + 20
        assert later_of_history <= of_history + 200
        assert later_held == 0
        assert client.connections > 20
        await client.end()
