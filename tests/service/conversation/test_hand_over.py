"""Outputs on their way from an engine to a client: handed over at once, yielded, queued, withdrawn, and sent again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.made_requests import give_input, make_request

from omni_ws.core.chunks import AudioEncoding, FinalChunk, FinishReason, OutputChunk, OutputSequencer, Usage
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import EngineFailed
from omni_ws.profiler import events
from omni_ws.service.conversation.answer_writer import AnswerWriter
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.conversation.output_log import COALESCE_SEC, Attachment, OutputLog
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.request_queue import RequestQueue
from omni_ws.service.observing.observer import ObservedSession
from omni_ws.wire.session_config import OutputAudioConfig, SessionConfig

DONE = Finished(FinishReason.STOP, Usage())
#: Passes of the event loop in which all of an example comes to its end.
PASSES = 2000


class UnevenEngine(ScriptedEngine):
    """Emits numbered texts, each offered or yielded as ``chance`` has it, some of them from a task of its own."""

    def __init__(self, chance: random.Random, texts: int) -> None:
        super().__init__(())
        self.state = EngineState.OK
        self._chance = chance
        self._texts = texts
        #: What the engine got rid of, by the id of the request.
        self.emitted: dict[str, list[str]] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        chance, emitted = self._chance, self.emitted.setdefault(request.request_id, [])
        waiting: asyncio.Queue[TextOutput] = asyncio.Queue()

        async def offer_some(count: int) -> None:
            """Offer from another task while nothing is yielded, as a stage of a pipeline does."""
            for _ in range(count):
                output = TextOutput(f"{request.request_id}.{len(emitted)} ")
                emitted.append(output.text)
                if not waiting.empty() or not request.sink.offer(output):
                    waiting.put_nowait(output)
                if chance.random() < 0.3:
                    await asyncio.sleep(0)

        while len(emitted) < self._texts:
            way = chance.random()
            if way < 0.4:
                await asyncio.create_task(offer_some(chance.randint(1, 5)))
                while not waiting.empty():
                    yield waiting.get_nowait()
                continue
            output = TextOutput(f"{request.request_id}.{len(emitted)} ")
            emitted.append(output.text)
            if way > 0.7 or not request.sink.offer(output):
                yield output
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        yield DONE


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
    """Whichever way each output takes, and however the client reads, loses its connection, and interrupts."""
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
            if isinstance(output, OutputChunk) and output.request_id == final.request_id
        ]
        emitted = engine.emitted.get(final.request_id, [])  # none, if it was cancelled before
        assert texts == emitted[: len(texts)]
        # The history has what the client got, and nothing that was withdrawn.
        assert requests[final.request_id].answer_text == "".join(texts)
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


# what a sink takes


@dataclass
class Bench:
    """A writer for the answer to one request, with its outbox."""

    request: Request
    outbox: OutputLog
    writer: AnswerWriter

    @property
    def messages(self) -> list[OutputChunk]:
        taken = iter(self.outbox.take, None)
        return [message for message in taken if isinstance(message, OutputChunk)]


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


@pytest.mark.virtual_clock
async def test_a_sink_takes_what_needs_no_wait() -> None:
    bench = make()
    first = TranscriptOutput("hello")
    assert [bench.writer.offer(output) for output in (first, TextOutput("hi"), DONE)] == [True, True, False]
    assert [message.text for message in bench.messages] == ["hello", "hi"]
    assert (bench.request.entry.heard.joined(), bench.request.answer_text) == ("hello", "hi")


@pytest.mark.virtual_clock
async def test_a_full_outbox_takes_nothing_until_it_is_read() -> None:
    bench = make(capacity=1)
    assert bench.writer.offer(TextOutput("a"))
    assert not bench.writer.offer(TextOutput("b"))
    assert [message.text for message in bench.messages] == ["a"]
    assert bench.writer.offer(TextOutput("b"))
    assert [message.sequence_id for message in bench.messages] == [1]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("end", ["cancel", "fail", "finish"])
async def test_a_request_that_is_over_takes_nothing(end: str) -> None:
    bench = make()
    match end:
        case "cancel":
            bench.request.cancel()
        case "fail":
            bench.request.fail(EngineFailed("broken"))
        case _:
            bench.request.finish()
    assert not bench.writer.offer(TextOutput("late"))
    assert bench.messages == []


@pytest.mark.virtual_clock
async def test_nothing_is_taken_behind_the_end_of_an_answer() -> None:
    """Nor while what the encoder still holds is flushed."""
    bench = make()

    async def generate(request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        yield TextOutput("all")
        yield DONE

    assert await bench.writer.answer(generate, ()) is DONE
    assert not bench.writer.offer(TextOutput("late"))
    assert [message.text for message in bench.messages] == ["all"]


@pytest.mark.virtual_clock
async def test_audio_is_taken_once_it_is_due() -> None:
    """The first opens the encoder, which may take a thread, and so is yielded."""
    bench = make(SessionConfig(modalities=["audio"], max_lead_ms=100))
    offered: list[bool] = []

    async def generate(request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        assert not request.sink.offer(tone(80))
        yield tone(80)
        offered.append(request.sink.offer(tone(80)))
        offered.append(request.sink.offer(tone(80)))
        yield tone(80)
        offered.append(request.sink.offer(TextOutput("not wanted")))
        yield DONE

    await bench.writer.answer(generate, ())
    assert offered == [True, False, True]
    assert asyncio.get_running_loop().time() == pytest.approx(0.06, abs=0.001)
    sent = bench.messages
    assert [message.start_ms for message in sent] == [0, 80, 160]
    assert len(b"".join(message.payload for message in sent)) == 2 * 240 * 24


@pytest.mark.virtual_clock
async def test_text_does_not_overtake_audio_that_waits_to_be_due() -> None:
    bench = make(SessionConfig(modalities=["text", "audio"], max_lead_ms=0))
    offered: list[bool] = []

    async def generate(request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        async def offer_later() -> None:
            await asyncio.sleep(0.05)
            offered.append(request.sink.offer(TextOutput("behind")))

        yield tone(100)
        other = asyncio.create_task(offer_later())
        yield tone(100)  # due at 0.1 s
        await other
        yield TextOutput("behind")
        yield DONE

    await bench.writer.answer(generate, ())
    assert offered == [False]
    assert [message.modality.value for message in bench.messages] == ["audio", "audio", "text"]


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

        async def generate(request: GenerationRequest, samples: NDArray[Any] = samples) -> AsyncIterator[EngineOutput]:
            for start in range(0, len(samples), 480):
                output = AudioOutput(samples[start : start + 480], 24_000)
                if not request.sink.offer(output):
                    yield output
            yield DONE

        await bench.writer.answer(generate, ())
        heard.append(b"".join(message.payload for message in bench.messages))
    assert heard[0] == heard[1] != b""


@pytest.mark.virtual_clock
async def test_while_a_profile_is_taken_every_output_is_yielded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that each has its span."""
    recorder = events.EventRecorder("run", tmp_path)
    monkeypatch.setattr(events, "recorder", recorder)
    assert not make().writer.offer(TextOutput("hi"))
    recorder.close()
