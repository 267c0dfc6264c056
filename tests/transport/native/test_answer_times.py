"""The times of answers, over real sockets: each part takes as long as its engine does, and nothing is made up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest
from support.inline_workers import MS, InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import Answer, NativeClient, native_client
from support.raw_http import DONE, events_of, post
from support.scripted_engines import ASR, SAMPLE_RATE, ActingEngine, ToolCallingEngine

from omni_ws.client import Final, connect
from omni_ws.core.chunks import (
    MOMENTS,
    PARTS,
    FinishReason,
    Modality,
    OutputModality,
    Task,
    Usage,
)
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.service.observing.observer import Observer
from omni_ws.wire.recording import without_content

pytestmark = pytest.mark.virtual_clock

FRAME_MS = 32
SILENCE_MS = 320
#: How long recognition, the LLM, the voice, and the client's loudspeaker take; and how often a client reports.
HEARS_MS, THINKS_MS, SPEAKS_MS, PLAYS_MS = 120, 300, 200, 60
REPORTS_MS = 100
#: The clock of the tests has no thread, but sockets whose turn comes a pass later, and its times are rounded.
NEAR_MS = 5
TURNS: dict[str, Any] = {"turn_detection": {"type": "server_vad", "silence_duration_ms": SILENCE_MS}}


class SlowEars(ActingEngine):
    """Hears ``words``; at each pause it tells ``guess`` at once, if it has one. At the end it takes HEARS_MS."""

    def __init__(self, *, guess: str = "", words: str = "go forward") -> None:
        super().__init__("ears", **ASR, transcript_guesses=True)
        self.guess = guess
        self.words = words

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        guessed = False
        async for chunk in request.input:
            pauses = bool(chunk.payload) and bool(np.abs(np.frombuffer(chunk.payload, "<i2")[-100:]).max() < 1000)
            if self.guess and pauses is not guessed and request.options.transcript_guesses:
                out.write(TranscriptGuess(self.guess if pauses else ""))
                await out.drain()
                guessed = pauses
        await asyncio.sleep(0 if guessed and self.guess == self.words else HEARS_MS / 1000)
        if self.words:
            out.write(TranscriptOutput(self.words))
        out.write(Finished(FinishReason.STOP, Usage(input_audio_ms=100)))


class SlowMind(ActingEngine):
    """Says a sentence of ``words`` words, the first after THINKS_MS."""

    def __init__(self, words: int = 3) -> None:
        super().__init__(
            "mind",
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.TEXT}),
            tasks=frozenset({Task.CHAT}),
            voices=(),
        )
        self.words = words

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        async for _ in request.input:
            pass
        request.meter.read = lambda: Usage(input_tokens=5, output_tokens=2)
        await asyncio.sleep(THINKS_MS / 1000)
        for _ in range(self.words):
            out.write(TextOutput("forward. "))
            await out.drain()
        out.write(Finished(FinishReason.STOP, Usage(input_tokens=5, output_tokens=self.words, cached_tokens=4)))


class SlowVoice(ActingEngine):
    """Speaks ``seconds`` for each piece of the text, the first SPEAKS_MS after it has that."""

    def __init__(self, seconds: float = 0.5) -> None:
        super().__init__("voice", voices=("someone",), tasks=frozenset({Task.SPEECH}))
        self.seconds = seconds

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        source = aiter(request.input)
        await anext(source)
        await asyncio.sleep(SPEAKS_MS / 1000)
        out.write(AudioOutput(np.full(round(SAMPLE_RATE * self.seconds), 0.1, np.float32), SAMPLE_RATE))
        async for _ in source:
            out.write(AudioOutput(np.full(round(SAMPLE_RATE * self.seconds), 0.1, np.float32), SAMPLE_RATE))
            await out.drain()
        out.write(Finished(FinishReason.STOP, Usage()))


def composed(
    llm: Engine | None = None, *, ears: SlowEars | None = None, voice: SlowVoice | None = None, ahead: bool = False
) -> ComposedEngine:
    return ComposedEngine(llm or SlowMind(), asr=ears or SlowEars(), tts=voice or SlowVoice(), think_ahead=ahead)


class Talker:
    """A client that speaks at the pace of speech, and reports what its loudspeaker plays."""

    def __init__(self, client: NativeClient, server: LiveServer) -> None:
        self.client = client
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._microphone: asyncio.Task[None] | None = None
        self._playing: dict[str, asyncio.Task[None]] = {}
        #: When the last sound of the speaker was sent, and when the loudspeaker began with each answer.
        self.spoke = 0.0
        self.began: dict[str, float] = {}

    async def _send(self, audio: bytes) -> None:
        for start in range(0, len(audio), FRAME_MS * MS):
            await asyncio.sleep(FRAME_MS / 1000)
            await self.client.binary(audio[start : start + FRAME_MS * MS])

    async def speak(self, ms: int = 640) -> None:
        """Say something, and listen on."""
        await self.hush()
        await self._send(loud(ms))
        self.spoke = self._loop.time()
        self._microphone = asyncio.create_task(self._listen_on())

    async def speak_over_a_busy_line(self, held_frames: int) -> None:
        """Say something; its end and the silence behind it come so many frames too late, until all has come."""
        await self._send(loud(640 - FRAME_MS))
        await asyncio.sleep(FRAME_MS / 1000)
        self.spoke = self._loop.time()
        await asyncio.sleep(held_frames * FRAME_MS / 1000)
        await self.client.binary(loud(FRAME_MS))
        await self._send(quiet(2 * FRAME_MS))
        for _ in range(held_frames):
            await self.client.binary(quiet(FRAME_MS))
        self._microphone = asyncio.create_task(self._listen_on())

    async def _listen_on(self) -> None:
        while True:
            await self._send(quiet(FRAME_MS))

    async def hush(self) -> None:
        """Send no sound any more."""
        if self._microphone is not None:
            self._microphone.cancel()
            await asyncio.gather(self._microphone, return_exceptions=True)
            self._microphone = None

    async def answer(self) -> Answer:
        """The next answer; its sound is played from its first frame on, PLAYS_MS late."""
        frames = []
        while True:
            frames.append(frame := await self.client.receive())
            if "audio" in frame and frame["request_id"] not in self._playing:
                self._playing[frame["request_id"]] = asyncio.create_task(self._play(frame["request_id"]))
            if frame.get("final"):
                return Answer(
                    [one for one in frames if one.get("request_id", frame["request_id"]) == frame["request_id"]]
                )

    async def _play(self, request_id: str) -> None:
        await asyncio.sleep(PLAYS_MS / 1000)
        self.began[request_id] = self._loop.time()
        for played_ms in range(REPORTS_MS, 2001, REPORTS_MS):
            await asyncio.sleep(REPORTS_MS / 1000)
            await self.client.send("output_ack", request_id=request_id, played_ms=played_ms)

    def part(self, name: str) -> tuple[float, float]:
        """How often a part was counted, and how many milliseconds in all."""
        return self._value("turn_part_seconds_count", part=name), 1000 * self._value("turn_part_seconds_sum", part=name)

    @property
    def mouth_to_ear(self) -> tuple[float, float]:
        labels = {"origin": "websocket"}
        return (
            self._value("mouth_to_ear_seconds_count", **labels),
            1000 * self._value("mouth_to_ear_seconds_sum", **labels),
        )

    def _value(self, name: str, **labels: str) -> float:
        return self.server.app.sessions.metrics.registry.get_sample_value(f"omni_ws_{name}", labels) or 0.0

    def counted(self, name: str, **labels: str) -> float:
        return self._value(name, **labels)

    async def close(self) -> None:
        await self.hush()
        for playing in self._playing.values():
            playing.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)


@contextlib.asynccontextmanager
async def talking(engine: Engine, *observers: Observer, **config: Any) -> AsyncIterator[Talker]:
    async with live_server(engine) as server:
        for observer in observers:
            server.app.sessions.observers.add(observer, every_output=False)
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(**{**TURNS, **config})
            talker = Talker(client, server)
            try:
                yield talker
            finally:
                await talker.close()


def near(value: float) -> Any:
    return pytest.approx(value, abs=NEAR_MS)


def names(answer: Answer) -> set[str]:
    return set(answer.final.get("times", {}))


async def test_each_part_takes_as_long_as_it_does_and_they_sum_up_to_mouth_to_ear() -> None:
    own = 0.0
    async with talking(composed()) as talker:
        for turn in range(1, 6):
            await talker.speak()
            answer = await talker.answer()
            request_id, times = answer.final["request_id"], answer.final["times"]
            await talker.hush()
            await talker.client.barrier()
            await asyncio.sleep(2)
            await talker.client.barrier()
            heard_ms = times["turn_decided_audio_ms"]
            decided = times["turn_decided"]
            assert times["speech_ended"] == 0
            assert decided == near(heard_ms) == near(times["input_ended"])
            assert times["transcript_settled"] == near(decided + HEARS_MS)
            assert times["llm_asked"] == near(times["transcript_settled"])
            assert times["first_token"] == near(decided + HEARS_MS + THINKS_MS)
            assert times["first_audio_made"] == near(times["first_clause"] + SPEAKS_MS)
            assert times["first_audio_sent"] == near(times["first_audio_made"])
            assert times["last_audio_sent"] >= times["first_audio_sent"]
            assert times["engine_started"] < 0, "the engine listens while the user speaks"
            assert {name for name in times if name not in MOMENTS} == {"turn_decided_audio_ms"}
            # Against what the client knows: when its speaker fell silent, and when its loudspeaker began.
            own_ms = 1000 * (talker.began[request_id] - talker.spoke)
            count, total = talker.mouth_to_ear
            assert count == turn
            summed = sum(talker.part(name)[1] for name, _ in PARTS)
            assert summed == pytest.approx(total, abs=0.001)
            own += own_ms
            assert total == pytest.approx(own, abs=turn * (FRAME_MS + NEAR_MS))
        assert [talker.part(name)[0] for name, _ in PARTS] == [5] * len(PARTS)
        assert talker.part("playing")[1] == near(5 * PLAYS_MS)
        assert talker.part("recognition")[1] == near(5 * HEARS_MS)
        assert talker.counted("request_tokens_sum", type="output") == 15
        assert talker.counted("cached_tokens_total") == 20


async def test_the_time_that_a_busy_line_takes_belongs_to_the_wait() -> None:
    async with talking(composed()) as talker:
        await talker.speak_over_a_busy_line(4)
        answer = await talker.answer()
        await asyncio.sleep(2)
        await talker.client.barrier()
        own_ms = 1000 * (talker.began[answer.final["request_id"]] - talker.spoke)
        count, total = talker.mouth_to_ear
        assert (count, abs(total - own_ms) <= FRAME_MS + NEAR_MS) == (1, True)
        assert answer.final["times"]["turn_decided"] == near(answer.final["times"]["turn_decided_audio_ms"])


async def test_how_much_silence_ended_a_turn_is_counted_in_samples() -> None:
    """So a loaded machine changes the time, and not the count."""
    told = []
    for silence_ms in (320, 640):
        turns = {"turn_detection": {"type": "server_vad", "silence_duration_ms": silence_ms}}
        async with talking(composed(), **turns) as talker:
            await talker.speak()
            told.append((await talker.answer()).final["times"]["turn_decided_audio_ms"])
    assert told[1] - told[0] == 320


async def test_an_answer_begun_at_a_pause_has_the_moments_of_that_answer() -> None:
    async with talking(composed(ears=SlowEars(guess="go forward"), ahead=True)) as talker:
        await talker.speak()
        answer = await talker.answer()
        await asyncio.sleep(2)
        await talker.client.barrier()
        times = answer.final["times"]
        assert times["transcript_guessed"] < times["turn_decided"]
        assert times["transcript_settled"] == near(times["turn_decided"])
        assert times["llm_asked"] == near(times["transcript_guessed"])
        assert times["first_token"] == near(times["llm_asked"] + THINKS_MS)
        assert "discarded_ms" not in times
        count, total = talker.mouth_to_ear
        assert count == 1
        assert sum(talker.part(name)[1] for name, _ in PARTS) == pytest.approx(total, abs=0.001)
        # What was made while the turn could still go on was not waited for.
        assert talker.part("recognition")[1] == near(0)
        assert talker.part("llm_first_token")[1] < THINKS_MS - 100
        assert talker.counted("discarded_seconds_total") == 0


async def test_an_answer_begun_at_a_pause_and_thrown_away_is_told_as_such() -> None:
    async with talking(composed(ears=SlowEars(guess="go for"), ahead=True)) as talker:
        await talker.speak()
        times = (await talker.answer()).final["times"]
        assert "transcript_guessed" not in times, "the words were others"
        assert times["llm_asked"] == near(times["turn_decided"] + HEARS_MS)
        assert times["first_token"] == near(times["llm_asked"] + THINKS_MS)
        assert times["discarded_ms"] > 0
        assert times["discarded_tokens"] == 2
        assert talker.counted("discarded_seconds_total") * 1000 == near(times["discarded_ms"])
        assert talker.counted("discarded_tokens_total") == 2


async def test_an_interrupted_answer_has_no_last_audio() -> None:
    async with talking(composed(SlowMind(60))) as talker:
        await talker.speak()
        await talker.client.until("response_started")
        while "audio" not in await talker.client.receive():
            pass
        await talker.speak()
        while not (frame := await talker.client.receive()).get("final"):
            pass
        times = frame["times"]
        assert frame["finish_reason"] == "cancelled"
        assert times["interrupted"] > times["first_audio_sent"]
        assert "last_audio_sent" not in times
        assert "first_audio_played" not in times, "nothing was reported"


async def test_an_answer_that_is_cut_off_before_it_begins_has_no_moments_of_it() -> None:
    async with talking(composed()) as talker:
        await talker.speak()
        await talker.client.until("response_started")
        await talker.client.until("speech_stopped")
        await talker.client.send("cancel")
        while not (frame := await talker.client.receive()).get("final"):
            pass
        assert frame["finish_reason"] == "cancelled"
        assert {"speech_ended", "turn_decided", "interrupted"} <= set(frame["times"])
        assert not {"first_token", "first_clause", "first_audio_made", "first_audio_sent"} & set(frame["times"])


async def test_playback_that_is_known_before_the_final_is_in_it() -> None:
    """As where the audio is sent at the pace of its playback."""
    async with talking(composed(SlowMind(6)), output_audio={"max_lead_ms": 200}) as talker:
        await talker.speak()
        answer = await talker.answer()
        times = answer.final["times"]
        assert times["first_audio_played"] == near(times["first_audio_sent"] + PLAYS_MS)
        assert talker.mouth_to_ear[1] == near(times["first_audio_played"])


async def test_an_answer_that_plays_late_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="omni_ws.session")
    async with talking(composed(SlowMind(1))) as talker:
        await talker.speak()
        answer = await talker.answer()
        assert "first_audio_played" not in answer.final["times"]
        await asyncio.sleep(2)
        await talker.client.barrier()
        request_id = answer.final["request_id"]
        facts = {record.message: vars(record)["facts"] for record in caplog.records if "facts" in vars(record)}
        assert facts["request"]["first_token_ms"] == answer.final["times"]["first_token"]
        assert "first_audio_played_ms" not in facts["request"]
        assert facts["played"]["request_id"] == request_id
        assert facts["played"]["first_audio_played_ms"] == near(answer.final["times"]["first_audio_sent"] + PLAYS_MS)


async def test_the_parts_are_spans_and_one_that_comes_late_is_added() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed (the extra otel)")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from omni_ws.service.observing.telemetry import RequestSpans, tracer_provider

    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    provider = tracer_provider(processor)
    observer = RequestSpans(provider.get_tracer("omni_ws"), processor, model=lambda: "mind")
    async with talking(composed(SlowMind(1)), observer) as talker:
        await talker.speak()
        answer = await talker.answer()
        request_id, times = answer.final["request_id"], answer.final["times"]
        await talker.hush()
        await talker.client.barrier()
        before = {span.name for span in exporter.get_finished_spans()}
        assert "playing" not in before
        await asyncio.sleep(2)
        await talker.client.barrier()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request, turn = spans["request"], spans["turn"]
    assert request.attributes is not None
    assert request.attributes["gen_ai.response.id"] == request_id
    assert request.attributes["gen_ai.response.model"] == "mind"
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert turn.attributes == {"omni_ws.turn_decided_audio_ms": times["turn_decided_audio_ms"]}
    assert (turn.parent, request.context.trace_id) == (request.context, turn.context.trace_id)
    parts = [spans[name] for name, _ in PARTS]
    assert all(span.parent == turn.context for span in parts)
    assert parts[0].start_time == turn.start_time
    assert [span.end_time for span in parts[:-1]] == [span.start_time for span in parts[1:]]
    played_ms = ((parts[-1].end_time or 0) - (turn.start_time or 0)) / 1e6
    assert played_ms == near(times["first_audio_sent"] + PLAYS_MS)


async def test_typed_text_is_counted_from_its_end() -> None:
    async with talking(composed()) as talker:
        await talker.client.say("go forward")
        times = (await talker.answer()).final["times"]
        assert times["input_ended"] == 0
        assert not {"speech_ended", "turn_decided", "turn_decided_audio_ms", "transcript_settled"} & set(times)
        assert times["first_token"] == near(times["llm_asked"] + THINKS_MS)
        await asyncio.sleep(2)
        await talker.client.barrier()
        assert talker.mouth_to_ear[0] == 0, "nobody spoke"
        assert talker.part("playing")[0] == 1


async def test_an_answer_in_text_has_no_sound() -> None:
    async with talking(composed(), modalities=["text"]) as talker:
        await talker.speak()
        answer = await talker.answer()
        assert {"speech_ended", "turn_decided", "transcript_settled", "llm_asked", "first_token"} <= names(answer)
        assert not {name for name in names(answer) if "audio" in name or "clause" in name} - {"turn_decided_audio_ms"}


async def test_a_tool_is_called_and_its_result_is_told() -> None:
    tools = [{"type": "function", "function": {"name": "local_time"}}]
    async with talking(composed(ToolCallingEngine()), tools=tools) as talker:
        await talker.speak()
        asked = await talker.answer()
        assert asked.reason == "tool_calls"
        assert {"speech_ended", "turn_decided", "first_token"} <= names(asked)
        assert not {"first_clause", "first_audio_made", "first_audio_sent", "last_audio_sent"} & names(asked)
        await talker.hush()
        call = next(chunk["id"] for chunk in asked.chunks if chunk["modality"] == "tool_call")
        await talker.client.chunk("noon", role="tool", tool_call_id=call, end=True)
        told = await talker.answer()
        assert told.final["times"]["input_ended"] == 0
        assert "speech_ended" not in names(told)
        assert "first_audio_sent" in names(told)


async def test_a_greeting_has_neither_speech_nor_a_token_of_an_llm() -> None:
    async with talking(composed(), greeting="Hello there.") as talker:
        answer = await talker.answer()
        assert not {"speech_ended", "turn_decided", "transcript_settled", "llm_asked"} & names(answer)
        assert answer.final["times"]["first_audio_sent"] == near(SPEAKS_MS)


async def test_a_request_that_is_refused_has_no_times() -> None:
    async with talking(composed()) as talker:
        await talker.client.send("cancel")
        await talker.client.chunk(b"\0" * 32, end=False)
        await talker.client.barrier()
        await talker.client.configure(turn_detection=None)
        await talker.client.chunk("go on")
        await talker.client.send("cancel")
        answer = await talker.answer()
        assert answer.reason == "cancelled"
        assert "times" not in answer.final, "its input never ended"


async def test_what_a_tool_found_later_is_told_without_speech() -> None:
    tools = [{"type": "function", "function": {"name": "local_time"}, "async": True}]
    async with talking(composed(ToolCallingEngine("Let me look.")), tools=tools) as talker:
        await talker.client.say("what time is it")
        asked = await talker.answer()
        call = next(chunk["id"] for chunk in asked.chunks if chunk["modality"] == "tool_call")
        await talker.client.chunk("noon", role="tool", tool_call_id=call, end=True)
        told = await talker.answer()
        assert told.started is not None
        assert told.started["trigger"] == "telling"
        assert told.final["times"]["input_ended"] == 0
        assert not {"speech_ended", "turn_decided", "transcript_settled"} & names(told)
        assert {"llm_asked", "first_token"} <= names(told)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_http_has_times_on_request(path: str, stream: bool) -> None:
    body = (
        {"prompt": "go forward"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "go forward"}]}
    )
    async with live_server(composed()) as server:
        for asked in (None, {}, {"include_times": False}, {"include_times": True}):
            answer = await post(server.port, path, {**body, "stream": stream, "stream_options": asked})
            chunks = [one.json() for one in events_of(answer) if one != DONE] if stream else [answer.json()]
            found = [chunk["times"] for chunk in chunks if "times" in chunk]
            if not asked or not asked["include_times"]:
                assert found == []
                continue
            (times,) = found
            assert times["input_ended"] == 0
            assert times["first_token"] == near(times["llm_asked"] + THINKS_MS)
            assert not {"speech_ended", "turn_decided", "first_audio_sent"} & set(times)


async def test_the_clients_of_the_library_have_them() -> None:
    async with live_server(composed()) as server, connect(server.websocket_url) as session:
        await session.send_text("go forward", end=True)
        (final,) = [event async for event in session.response() if isinstance(event, Final)]
        assert final.times["input_ended"] == 0
        assert final.times["first_token"] == near(final.times["llm_asked"] + THINKS_MS)


def test_a_recording_without_content_keeps_them() -> None:
    frame = {"type": "output_chunk", "final": True, "times": {"first_token": 240, "discarded_ms": 3, "a secret": 1}}
    kept = orjson.loads(without_content(orjson.dumps(frame)) or b"")
    assert kept["times"] == {"first_token": 240, "discarded_ms": 3, "a secret": kept["times"]["a secret"]}
    assert set(kept["times"]["a secret"]) == {"size", "sha256"}
