"""Outputs on their way from an engine to a client: sent at once, queued, withdrawn, and sent again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.parts_of_sessions import give_input, make_request

from omni_ws.core.chunks import AudioEncoding, FinalChunk, FinishReason, OutputChunk, Usage
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import (
    AudioOutput,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.channel import OUTPUT_BYTES
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import EngineFailed
from omni_ws.profiler import events
from omni_ws.service.conversation.answer_writer import AnswerWriter
from omni_ws.service.conversation.output_log import COALESCE_SEC, Attachment, OutputLog, OutputSequencer, ServerMessage
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.request_queue import RequestQueue
from omni_ws.service.observing.observer import ObservedSession
from omni_ws.wire.session_config import OutputAudioConfig, SessionConfig

DONE = Finished(FinishReason.STOP, Usage())
#: Passes of the event loop in which all of an example comes to its end.
PASSES = 2000


class UnevenEngine(ScriptedEngine):
    """Writes numbered texts and noises: from its own task, from others and from callbacks, as ``chance`` has it.

    It waits while the client does not read, or does not.
    """

    def __init__(self, chance: random.Random, texts: int) -> None:
        super().__init__(())
        self.state = EngineState.OK
        self._chance = chance
        self._texts = texts
        #: What the engine wrote, by the id of the request.
        self.emitted: dict[str, list[str]] = {}

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        chance, emitted = self._chance, self.emitted.setdefault(request.request_id, [])

        def write_one() -> None:
            output = TextOutput(f"{request.request_id}.{len(emitted)} ")
            emitted.append(output.text)
            if chance.random() < 0.2:
                out.write(tone(20))
            out.write(output)

        async def write_some(count: int) -> None:
            for _ in range(count):
                write_one()
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
                if chance.random() < 0.3:
                    await out.drain()

        while len(emitted) < self._texts:
            way = chance.random()
            if way < 0.4:
                await asyncio.create_task(write_some(chance.randint(1, 5)))
            elif way < 0.6 and not out.full:
                asyncio.get_running_loop().call_soon(write_one)
                await asyncio.sleep(0)
            else:
                write_one()
            if chance.random() < 0.2:
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                await out.drain()
                assert not out.full
        out.write(DONE)


@dataclass
class UnevenClient(Attachment):
    """Reads now and then; loses its connection, and has what it missed sent again."""

    outbox: OutputLog
    chance: random.Random
    received: list[ServerMessage] = field(default_factory=list)
    connected: bool = True

    def write_now(self, output: OutputChunk) -> bool:
        if not self.connected or self.chance.random() < 0.5:
            return False
        self._receive(output)
        return True

    def read(self, most: int) -> None:
        while most > 0 and self.connected and (message := self.outbox.take()) is not None:
            self._receive(message)
            most -= 1

    def _receive(self, message: ServerMessage) -> None:
        # What the socket had taken when the connection broke is lost.
        if self.chance.random() < 0.03:
            self.connected = False
        else:
            self.received.append(message)

    @property
    def outputs(self) -> list[OutputChunk | FinalChunk]:
        return [message for message in self.received if isinstance(message, OutputChunk | FinalChunk)]

    @property
    def last(self) -> int:
        return self.outputs[-1].sequence_id if self.outputs else -1

    def acknowledge(self) -> None:
        self.outbox.acknowledge(self.last)

    def come_back(self) -> None:
        assert self.outbox.can_rewind(self.last)
        self.outbox.rewind(self.last)
        self.connected = True


def ticking(chance: random.Random) -> Callable[[], float]:
    """A clock that stands still between some of its readings; many outputs follow others within COALESCE_SEC."""
    time = 0.0

    def now() -> float:
        nonlocal time
        time += chance.choice((0, 0.4 * COALESCE_SEC, 2 * COALESCE_SEC))
        return time

    return now


@pytest.mark.parametrize("seed", range(40))
async def test_a_client_gets_every_output_once_and_in_order(seed: int) -> None:
    """From wherever each is written, and however the client reads, loses its connection, and interrupts."""
    chance = random.Random(seed)
    now = ticking(chance)
    budget = ByteBudget(1 << 20)
    outbox = OutputLog(
        chance.choice((300, 1500, 1 << 20)), write_timeout=30, now=now, budget=budget, kept_capacity=1 << 20
    )
    client = UnevenClient(outbox, chance)
    outbox.reader = client
    engine = UnevenEngine(chance, texts=30)
    ledger = Ledger(10_000, budget)
    queue = RequestQueue(
        engine,
        outbox,
        ledger=ledger,
        observed=ObservedSession.unobserved(now),
    )
    requests = {name: make_request(name, ledger=ledger) for name in ("a", "b", "c")}
    for request in requests.values():
        queue.open(request)
        queue.append(request)
        give_input(request, request.request_id)
    queue.wake()
    queue.close()
    answering = asyncio.create_task(queue.run())
    interrupted = {name for name in requests if chance.random() < 0.4}
    left = set(interrupted)
    for _ in range(PASSES):
        if answering.done() and not outbox and client.connected:
            break
        await asyncio.sleep(0)
        if not client.connected and chance.random() < 0.3:
            client.come_back()
        elif chance.random() < 0.3:
            client.read(chance.randint(1, 8))
        if chance.random() < 0.1:
            client.acknowledge()
        current = queue.current
        if current is not None and current.request_id in left and chance.random() < 0.05:
            left.discard(current.request_id)
            queue.cancel(current)
    await answering

    assert [output.sequence_id for output in client.outputs] == list(range(len(client.outputs)))
    finals = [output for output in client.outputs if isinstance(output, FinalChunk)]
    assert [final.request_id for final in finals] == ["a", "b", "c"]
    for final in finals:
        texts = [
            output.text
            for output in client.outputs
            if isinstance(output, OutputChunk) and output.request_id == final.request_id and output.text
        ]
        emitted = engine.emitted.get(final.request_id, [])  # none, if it was cancelled before
        assert texts == emitted[: len(texts)]
        # The history has what the client got, and nothing that was withdrawn.
        assert requests[final.request_id].entry.answer_text == "".join(texts)
        was_cancelled = final.finish_reason is FinishReason.CANCELLED
        assert was_cancelled or texts == emitted
        assert not was_cancelled or final.request_id in interrupted - left
        behind = client.outputs[client.outputs.index(final) + 1 :]
        assert all(output.request_id != final.request_id for output in behind)
    client.acknowledge()
    assert (outbox.queued, outbox.journaled) == (0, 0)
    outbox.close()
    ledger.close()
    assert budget.held == 0


# what is sent at once


@dataclass
class Bench:
    """A writer for the answer to one request, with its outbox."""

    request: Request
    outbox: OutputLog
    writer: AnswerWriter

    @property
    def messages(self) -> list[OutputChunk]:
        """What has been sent since the last look."""
        taken = iter(self.outbox.take, None)
        return [message for message in taken if isinstance(message, OutputChunk)]

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.messages]


def make(config: SessionConfig | None = None, *, capacity: int = 1 << 20) -> Bench:
    now = asyncio.get_running_loop().time
    config = config or SessionConfig(modalities=["text", "audio"])
    request = make_request("r", config=config, now=now)
    give_input(request, "hello")
    request.begin_answer()
    outbox, sequencer = OutputLog(capacity, write_timeout=30, now=now), OutputSequencer()
    sequencer.open("r")
    return Bench(request, outbox, AnswerWriter(request, outbox, sequencer, ObservedSession.unobserved(now)))


def tone(ms: int, rate: int = 24_000) -> AudioOutput:
    return AudioOutput(np.full(rate * ms // 1000, 0.25, np.float32), rate)


async def passes(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.virtual_clock
async def test_what_needs_no_wait_is_sent_at_once() -> None:
    bench = make()
    for output in (TranscriptOutput("hello"), TextOutput("hi"), DONE):
        bench.writer.write(output)
    assert bench.texts == ["hello", "hi"]
    assert (bench.request.entry.heard.joined(), bench.request.entry.answer_text) == ("hello", "hi")


@pytest.mark.virtual_clock
async def test_a_full_outbox_gets_nothing_until_it_is_read() -> None:
    bench = make(capacity=1)
    for word in ("a", "b", "c"):
        bench.writer.write(TextOutput(word))
    full = [bench.writer.full]
    await passes()
    for word in ("a", "b", "c"):
        assert bench.texts == [word]
        await passes()
    full.append(bench.writer.full)
    assert full == [True, False]


@pytest.mark.virtual_clock
async def test_an_engine_that_drains_waits_while_the_client_does_not_read() -> None:
    bench = make(capacity=1)
    written: list[str] = []

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        for word in "abcd":
            out.write(TextOutput(word))
            written.append(word)
            await out.drain()
        out.write(DONE)

    answering = asyncio.create_task(bench.writer.answer(generate, ()))
    for number in range(1, 5):
        await passes()
        assert len(written) == number
        assert bench.texts == ["abcd"[number - 1]]
    assert await answering is DONE


@pytest.mark.virtual_clock
@pytest.mark.parametrize("waiters", [1, 3])
async def test_an_engine_works_ahead_of_audio_that_is_not_due_within_a_bound(waiters: int) -> None:
    bench = make(SessionConfig(modalities=["audio"], max_lead_ms=0), capacity=1 << 24)
    second = tone(1000)
    most = OUTPUT_BYTES // second.samples.nbytes
    written = 0

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        async def write_some() -> None:
            nonlocal written
            for _ in range(10):
                await out.drain()
                out.write(second)
                written += 1

        await asyncio.gather(*(write_some() for _ in range(waiters)))
        out.write(DONE)

    answering = asyncio.create_task(bench.writer.answer(generate, ()))
    await asyncio.sleep(5.5)
    assert len(bench.messages) == 6
    assert 6 + most <= written <= 6 + most + 1 + waiters
    await answering
    assert len(bench.messages) == 10 * waiters - 6


@pytest.mark.virtual_clock
@pytest.mark.parametrize("end", ["cancel", "fail", "finish"])
@pytest.mark.parametrize("waits", [False, True])
async def test_nothing_is_sent_of_a_request_that_is_over(end: str, waits: bool) -> None:
    bench = make(capacity=1 if waits else 1 << 20)
    if waits:
        bench.writer.write(TextOutput("a"))
        bench.writer.write(TextOutput("waits"))
    match end:
        case "cancel":
            bench.request.cancel()
        case "fail":
            bench.request.fail(EngineFailed("broken"))
        case _:
            bench.request.finish()
    bench.writer.write(TextOutput("late"))
    assert bench.texts == (["a"] if waits else [])
    await passes()
    assert bench.texts == []


@pytest.mark.virtual_clock
async def test_nothing_is_taken_behind_the_end_of_an_answer() -> None:
    """Nor while what the encoder still holds is flushed."""
    bench = make()

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        out.write(TextOutput("all"))
        out.write(DONE)
        out.write(TextOutput("too much"))

    assert await bench.writer.answer(generate, ()) is DONE
    bench.writer.write(TextOutput("late"))
    assert bench.texts == ["all"]


@pytest.mark.virtual_clock
async def test_audio_is_sent_once_it_is_due() -> None:
    bench = make(SessionConfig(modalities=["audio"], max_lead_ms=100))
    at_once: list[int] = []

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        for _ in range(3):
            out.write(tone(80))
            at_once.append(len(bench.outbox))
        out.write(TextOutput("not wanted"))
        out.write(DONE)

    await bench.writer.answer(generate, ())
    assert at_once == [1, 2, 2]
    assert asyncio.get_running_loop().time() == pytest.approx(0.06, abs=0.001)
    sent = bench.messages
    assert [message.start_ms for message in sent] == [0, 80, 160]
    assert len(b"".join(message.payload for message in sent)) == 2 * 240 * 24


@pytest.mark.virtual_clock
async def test_text_does_not_overtake_audio_that_waits_to_be_due() -> None:
    bench = make(SessionConfig(modalities=["text", "audio"], max_lead_ms=0))

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        out.write(tone(100))
        out.write(tone(100))  # due at 0.1 s
        asyncio.get_running_loop().call_later(0.05, out.write, TextOutput("behind"))
        await asyncio.sleep(0.06)
        assert len(bench.outbox) == 1
        out.write(DONE)

    await bench.writer.answer(generate, ())
    assert [message.modality.value for message in bench.messages] == ["audio", "audio", "text"]


@pytest.mark.virtual_clock
async def test_compressed_audio_and_text_keep_their_order() -> None:
    """Compressed audio is encoded in a thread."""
    config = SessionConfig(
        modalities=["text", "audio"], output_audio=OutputAudioConfig(format=AudioEncoding.WAV, sample_rate=24_000)
    )
    bench = make(config)

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        for word in "ab":
            out.write(tone(100))
            out.write(TextOutput(word))
        out.write(DONE)

    await bench.writer.answer(generate, ())
    assert [message.modality.value for message in bench.messages] == ["audio", "text", "audio", "text"]


# failures and cancellation


@pytest.mark.virtual_clock
async def test_an_error_comes_behind_what_was_written_before_it() -> None:
    bench = make(SessionConfig(modalities=["audio"], max_lead_ms=0))

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        out.write(tone(100))
        out.write(tone(100))
        raise EngineFailed("broken")

    await bench.writer.answer(generate, ())
    assert bench.request.error is not None
    assert asyncio.get_running_loop().time() == pytest.approx(0.1, abs=0.001)
    assert len(bench.messages) == 2


@pytest.mark.virtual_clock
@pytest.mark.parametrize("waits", [False, True])
async def test_audio_that_cannot_be_encoded_ends_the_engine_and_fails_the_answer(waits: bool) -> None:
    """Inside the engine's call, or later."""
    bench = make(SessionConfig(modalities=["audio"], max_lead_ms=0))
    ended = asyncio.Event()

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        try:
            out.write(tone(0 if not waits else 100))
            out.write(tone(100, rate=16_000))
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    await bench.writer.answer(generate, ())
    assert ended.is_set()
    assert isinstance(bench.request.error, EngineFailed)


@pytest.mark.virtual_clock
async def test_a_cancelled_answer_leaves_no_task_and_sends_nothing_more() -> None:
    bench = make(SessionConfig(modalities=["audio"], max_lead_ms=0))
    wound_up = asyncio.Event()

    async def generate(request: GenerationRequest, out: OutputWriter) -> None:
        try:
            for _ in range(3):
                out.write(tone(100))
            await out.drain()
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0.01)
            out.write(tone(100))
            wound_up.set()

    answering = asyncio.create_task(bench.writer.answer(generate, ()))
    await asyncio.sleep(0.05)
    bench.request.cancel()
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    assert answering.cancelled()
    assert wound_up.is_set()
    assert len(bench.messages) == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.virtual_clock
@pytest.mark.parametrize("form", [AudioEncoding.PCM16, AudioEncoding.F32, AudioEncoding.PCMU, AudioEncoding.WAV])
@pytest.mark.parametrize("rate", [16_000, 24_000])
async def test_integers_and_floats_sound_the_same(form: AudioEncoding, rate: int) -> None:
    """An engine's 16-bit samples give the same bytes as the floats that they stand for."""
    values = np.random.default_rng(1).integers(-(2**15), 2**15, 4_800).astype(np.int16)
    heard = []
    for samples in (values, values / np.float32(2**15)):
        config = SessionConfig(modalities=["audio"], output_audio=OutputAudioConfig(format=form, sample_rate=rate))
        bench = make(config)

        async def generate(request: GenerationRequest, out: OutputWriter, samples: NDArray[Any] = samples) -> None:
            for start in range(0, len(samples), 480):
                out.write(AudioOutput(samples[start : start + 480], 24_000))
            out.write(DONE)

        await bench.writer.answer(generate, ())
        heard.append(b"".join(message.payload for message in bench.messages))
    assert heard[0] == heard[1] != b""


@pytest.mark.virtual_clock
async def test_while_a_profile_is_taken_every_output_has_its_span(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorder = events.EventRecorder("run", tmp_path)
    monkeypatch.setattr(events, "recorder", recorder)
    bench = make()
    bench.writer.write(TextOutput("hi"))
    assert bench.messages == []
    await passes()
    assert bench.texts == ["hi"]
    recorder.close()
