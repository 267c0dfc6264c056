"""The engines for tests of clients."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from support.engine_answers import Answer, streamed

from omni_ws.audio.codec import encode_file
from omni_ws.audio.pcm import samples_from_pcm16
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    Task,
    Usage,
)
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.channel import Channel
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.errors import EngineFailed, InvalidValue, UnsupportedFormat


def decode_pcm16(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


TONE = (np.sin(np.arange(16_000) / 8) * 9000).astype("<i2").tobytes()


def channel() -> Channel[InputChunk]:
    return Channel(1 << 30, cost=lambda chunk: len(chunk.payload))


def request_for(source: Channel[InputChunk], **fields: Any) -> GenerationRequest:
    fields = {
        "request_id": "req_1",
        "task": Task.CHAT,
        "input_mode": InputMode.EXTEND,
        "input_audio": AudioFormat(),
        "modalities": frozenset({OutputModality.TEXT, OutputModality.AUDIO}),
        **fields,
    }
    return GenerationRequest(input=source, **fields)


def chunk(content: str | bytes, modality: Modality | None = None, form: str | None = None) -> InputChunk:
    if isinstance(content, str):
        return InputChunk(modality or Modality.TEXT, content.encode())
    return InputChunk(modality or Modality.AUDIO, content, format=form)


def compressed() -> InputChunk:
    pcm = decode_pcm16(TONE)
    return chunk(
        encode_file(pcm, source_rate=16_000, target=AudioFormat(AudioEncoding.FLAC, 16_000)), form="audio/flac"
    )


async def echo(
    *chunks: InputChunk, settings: EchoSettings | None = None, **fields: Any
) -> tuple[list[EngineOutput], Finished]:
    """Return the outputs, and the last of them."""
    source = channel()
    for one in chunks:
        source.put_nowait(one)
    source.close()
    engine = EchoEngine(settings)
    outputs = [output async for output in streamed(engine, request_for(source, **fields))]
    assert engine.active_requests == 0
    finished = outputs.pop()
    assert isinstance(finished, Finished)
    assert not any(isinstance(output, Finished) for output in outputs)
    return outputs, finished


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, TextOutput))


def as_floats(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return samples_from_pcm16(samples) if samples.dtype == np.int16 else samples


def samples_of(outputs: list[EngineOutput]) -> np.ndarray[Any, Any]:
    found = [as_floats(output.samples) for output in outputs if isinstance(output, AudioOutput)]
    return np.concatenate(found) if found else np.zeros(0, np.float32)


async def test_life() -> None:
    engine = EchoEngine()
    states = [engine.state]
    await engine.start()
    states.append(engine.state)
    assert states == [EngineState.STARTING, EngineState.OK]
    assert engine.capabilities.extend
    assert not engine.capabilities.tools
    assert not engine.capabilities.logprobs
    assert engine.describe()
    await engine.stop()
    await engine.stop()


@pytest.mark.parametrize("text", ["one two three", "  spaces \n kept\t ", "x", "   ", "é – 東京", ""])
async def test_text_comes_back_as_it_was(text: str) -> None:
    outputs, finished = await echo(chunk(text))
    assert text_of(outputs) == text
    assert finished.reason is FinishReason.STOP
    assert finished.usage.input_tokens == finished.usage.output_tokens == len(text.split())
    if len(text.split()) > 1:
        assert len(outputs) > 1


async def test_long_text_comes_back_and_lets_others_in_between() -> None:
    text = "ein Wort für sich " * 40_000
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    task = asyncio.create_task(other())
    outputs, finished = await echo(chunk(text))
    task.cancel()
    assert text_of(outputs) == text
    assert finished.usage.input_tokens == 160_000
    assert others > 1000


async def test_audio_comes_back_in_pieces() -> None:
    outputs, finished = await echo(chunk(TONE[:7001]), chunk(TONE[7001:]), settings=EchoSettings(chunk_ms=50))
    assert all(isinstance(output, AudioOutput) and len(output.samples) <= 800 for output in outputs)
    np.testing.assert_array_equal(samples_of(outputs), decode_pcm16(TONE))
    assert finished.usage == Usage(input_audio_ms=1000, output_audio_ms=1000)


@pytest.mark.parametrize(
    ("form", "payload"),
    [
        ("f32", decode_pcm16(TONE).astype("<f4").tobytes()),
        ("audio/pcm;rate=16000", TONE),
        ("audio/pcm;rate=8000", TONE[: len(TONE) // 2]),
    ],
)
async def test_format_of_a_chunk(form: str, payload: bytes) -> None:
    outputs, finished = await echo(chunk(payload, form=form))
    assert finished.usage.input_audio_ms == 1000
    assert {output.sample_rate for output in outputs if isinstance(output, AudioOutput)} == {
        8000 if "8000" in form else 16_000
    }


async def test_parts_keep_their_order() -> None:
    outputs, _ = await echo(chunk("before"), chunk(TONE[:3200]), chunk("after"))
    assert [type(output).__name__ for output in outputs] == ["TextOutput", "AudioOutput", "TextOutput"]


async def test_half_a_sample_between_parts_is_dropped() -> None:
    outputs, _ = await echo(chunk(TONE[:33]), chunk("x"), chunk(TONE[:32]))
    assert len(samples_of(outputs)) == 32


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([chunk(b"a", Modality.IMAGE)], "Received 1 image."),
        ([chunk(b"a", Modality.IMAGE), chunk(b"b" * 200_000, Modality.IMAGE)], "Received 2 images."),
        ([chunk(b"a", Modality.VIDEO)], "Received 1 video chunk."),
        ([chunk(b"a", Modality.VIDEO)] * 3 + [chunk(b"a", Modality.IMAGE)], "Received 1 image and 3 video chunks."),
    ],
)
async def test_images_and_video_are_counted(chunks: list[InputChunk], text: str) -> None:
    outputs, _ = await echo(*chunks)
    assert [output.text for output in outputs if isinstance(output, TextOutput)] == [text]


async def test_only_what_is_wanted() -> None:
    outputs, finished = await echo(chunk("text"), chunk(TONE), modalities=frozenset({OutputModality.TEXT}))
    assert [type(output) for output in outputs] == [TextOutput]
    assert finished.usage.input_audio_ms == 1000
    outputs, _ = await echo(chunk("text"), chunk(TONE), modalities=frozenset({OutputModality.AUDIO}))
    assert {type(output) for output in outputs} == {AudioOutput}


async def test_reply() -> None:
    outputs, finished = await echo(chunk("hello"), chunk(TONE), settings=EchoSettings(reply="good day to you"))
    assert text_of(outputs) == "good day to you"
    assert len(samples_of(outputs)) == 0
    assert (finished.usage.input_tokens, finished.usage.output_tokens) == (1, 4)


async def test_limits() -> None:
    outputs, finished = await echo(chunk("one two"), chunk(" three"), sampling={"max_tokens": 2})
    assert (text_of(outputs), finished.reason) == ("one two", FinishReason.LENGTH)
    outputs, finished = await echo(chunk("one tw"), chunk("o three"), sampling={"stop": "two"})
    assert (text_of(outputs), finished.reason) == ("one ", FinishReason.STOP)
    outputs, finished = await echo(sampling={"max_tokens": 2}, settings=EchoSettings(reply="a b c"))
    assert (text_of(outputs), finished.reason) == ("a b", FinishReason.LENGTH)
    outputs, _ = await echo(chunk("one two"), compressed(), sampling={"max_tokens": 1})
    assert [type(output) for output in outputs] == [TextOutput]


async def test_input_that_cannot_be_read() -> None:
    with pytest.raises(UnsupportedFormat):
        await echo(chunk(b"RIFFxxxxWAVE garbage", form="wav"))


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_failing_as_told(after: int) -> None:
    source = channel()
    source.put_nowait(chunk("one two three"))
    source.close()
    engine = EchoEngine(EchoSettings(fail_after_chunks=7))
    outputs = streamed(engine, request_for(source, stage_params={"fake": {"fail_after_chunks": after}}))
    for _ in range(after):
        await anext(outputs)
    with pytest.raises(EngineFailed):
        await anext(outputs)
    assert engine.active_requests == 0


async def test_failing_after_more_than_there_is_does_not_fail() -> None:
    outputs, finished = await echo(chunk("one two three"), settings=EchoSettings(fail_after_chunks=4))
    assert (len(outputs), finished.reason) == (3, FinishReason.STOP)


@pytest.mark.parametrize("bad", [-1, 1.5, "2", True, [1]])
async def test_bad_number_of_chunks_to_fail_after(bad: Any) -> None:
    with pytest.raises(InvalidValue) as raised:
        await echo(chunk("x"), stage_params={"fake": {"fail_after_chunks": bad}})
    assert raised.value.param == "stage_params.fake.fail_after_chunks"


async def test_answers_while_the_input_arrives() -> None:
    source = channel()
    engine = EchoEngine()
    async with aclosing(streamed(engine, request_for(source))) as outputs:
        for word in ("one ", "two ", "three"):
            source.put_nowait(chunk(word))
            assert await anext(outputs) == TextOutput(word)
        source.close()
        assert isinstance(await anext(outputs), Finished)


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.parametrize("content", ["a b c d e f", TONE])
async def test_given_up_at_any_output(how: str, content: str | bytes) -> None:
    before = asyncio.all_tasks()
    for step in range(6):
        source = channel()
        source.put_nowait(chunk(content))
        engine = EchoEngine()

        async def read(engine: EchoEngine = engine, source: Channel[InputChunk] = source, step: int = step) -> None:
            async with aclosing(streamed(engine, request_for(source))) as outputs:
                for _ in range(step):
                    await anext(outputs)
                assert engine.active_requests == (1 if step else 0)
                if how == "cancel":
                    await asyncio.Event().wait()

        task = asyncio.create_task(read())
        for _ in range(20):
            await asyncio.sleep(0)
        if how == "cancel":
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await task
        assert engine.active_requests == 0
        assert asyncio.all_tasks() == before


async def test_compressed_audio() -> None:
    flac = compressed().payload
    outputs, _ = await echo(chunk(flac[:500], form="audio/flac"), chunk(flac[500:], form="audio/flac"))
    np.testing.assert_allclose(samples_of(outputs), decode_pcm16(TONE), atol=1e-4)


# the scripted engine


async def play(script: list[Any]) -> list[EngineOutput]:
    source = channel()
    source.put_nowait(chunk("ignored"))
    source.close()
    engine = ScriptedEngine(script)
    try:
        return [output async for output in streamed(engine, request_for(source))]
    finally:
        assert engine.active_requests == 0
        assert len(engine.requests) == 1


async def test_script_is_played_as_written() -> None:
    events: list[str] = []

    async def later() -> None:
        await asyncio.sleep(0)
        events.append("later")

    future = asyncio.get_running_loop().create_future()
    future.set_result(None)
    done = Finished(FinishReason.LENGTH, Usage(output_tokens=3))
    script = [
        TranscriptOutput("heard"),
        lambda: events.append("now"),
        later,
        lambda: future,
        TextOutput("x"),
        done,
        1 / 2,
    ]
    assert await play(script) == [TranscriptOutput("heard"), TextOutput("x"), done]
    assert events == ["now", "later"]
    assert (await play([]))[-1] == Finished(FinishReason.STOP, Usage())


async def test_script_raises_in_its_turn() -> None:
    with pytest.raises(KeyError):
        await play([TextOutput("x"), KeyError("x")])


async def test_script_waits_for_the_end_of_the_input() -> None:
    source = channel()
    engine = ScriptedEngine([TextOutput("x")])
    outputs = streamed(engine, request_for(source))
    reading = asyncio.ensure_future(anext(outputs))
    source.put_nowait(chunk("more"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reading.done()
    source.close()
    assert await reading == TextOutput("x")
    await outputs.aclose()
    assert engine.active_requests == 0


async def test_an_answer_has_the_rate_of_its_first_audio() -> None:
    slow, fast = (chunk(TONE[:3200], form=f"audio/pcm;rate={rate}") for rate in (8000, 16_000))
    outputs, finished = await echo(slow, fast)
    assert finished.usage.input_audio_ms == 200 + 100
    assert {output.sample_rate for output in outputs if isinstance(output, AudioOutput)} == {8000}
    assert len(samples_of(outputs)) == 8 * (200 + 100)


# pace


class Client(Answer):
    """Takes outputs, with the times at which they came. It is slow to read those whose turn is in ``slow``."""

    def __init__(self, slow: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.slow = slow
        self.times: list[float] = []
        self.waits = 0

    @property
    def full(self) -> bool:
        return len(self.outputs) - 1 in self.slow

    def write(self, output: EngineOutput) -> None:
        super().write(output)
        self.times.append(asyncio.get_running_loop().time())

    async def drain(self) -> None:
        self.waits += self.full


async def pace(client: Client, *words: str, **settings: Any) -> None:
    source = channel()
    for word in words:
        source.put_nowait(chunk(word))
    source.close()
    await EchoEngine(EchoSettings(**settings)).generate(request_for(source), client)


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("first_ms", "interval_ms", "times"),
    [
        (0, 0, [0, 0, 0, 0, 0]),
        (50, 0, [0.05, 0.05, 0.05, 0.05, 0.05]),
        (0, 20, [0, 0.02, 0.04, 0.06, 0.08]),
        (50, 20, [0.05, 0.07, 0.09, 0.11, 0.13]),
    ],
)
@pytest.mark.parametrize("slow", [(), (0,), (1, 3), (0, 1, 2, 3, 4)])
async def test_each_output_has_its_time(
    first_ms: int, interval_ms: int, times: list[float], slow: tuple[int, ...]
) -> None:
    """Whether the client reads it at once or not; and across the chunks of the input."""
    client = Client(slow)
    await pace(client, "one two three", " four five", first_chunk_delay_ms=first_ms, chunk_interval_ms=interval_ms)
    assert client.outputs[:-1] == [TextOutput(text) for text in ("one", " two", " three", " four", " five")]
    assert client.times[:-1] == pytest.approx(times, abs=1e-6)
    assert client.waits == len(slow)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_paced_answer_fails_as_told(after: int) -> None:
    client = Client()
    with pytest.raises(EngineFailed):
        await pace(client, "one two three", first_chunk_delay_ms=50, chunk_interval_ms=20, fail_after_chunks=after)
    assert len(client.outputs) == after


@pytest.mark.virtual_clock
async def test_what_a_writer_raises_ends_a_paced_answer() -> None:
    class Broken(Client):
        def write(self, output: EngineOutput) -> None:
            raise KeyError(output)

    with pytest.raises(KeyError):
        await pace(Broken(), "one", chunk_interval_ms=20, first_chunk_delay_ms=20)


@pytest.mark.virtual_clock
async def test_nothing_is_written_of_a_paced_answer_that_was_given_up() -> None:
    client = Client()
    answering = asyncio.create_task(pace(client, "one two three", chunk_interval_ms=20))
    await asyncio.sleep(0.03)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    await asyncio.sleep(1)
    assert client.outputs == [TextOutput("one"), TextOutput(" two")]
