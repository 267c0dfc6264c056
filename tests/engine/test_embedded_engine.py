import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from support.speech_clips import WORDS, as_pcm16, clip_bytes, clip_pcm, noises, silence, word_errors
from support.until import until

from omni_ws.config.model import VoiceChoice
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.chunks import FinishReason, InputChunk, InputMode, Modality, OutputModality, Task, Word
from omni_ws.engine.asr.pocketsphinx_decoder import PocketSphinxDecoder
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    Message,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.channel import Channel
from omni_ws.engine.embedded.config import EmbeddedConfig
from omni_ws.engine.embedded.engine import EmbeddedEngine
from omni_ws.engine.llm.rules import NOTHING_HEARD
from omni_ws.errors import (
    EmptyInput,
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    UnsupportedFormat,
    UnsupportedModality,
    UnsupportedParameter,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_time]

NOW = datetime(2031, 3, 4, 15, 7)
TEXT = frozenset({OutputModality.TEXT})
BOTH = frozenset({OutputModality.TEXT, OutputModality.AUDIO})


@contextlib.asynccontextmanager
async def running(**config: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(EmbeddedConfig(max_recognisers=4, warm_recognisers=1, **config), now=lambda: NOW)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started() -> AsyncIterator[EmbeddedEngine]:
    async with running() as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started_with_voice(voice_choice: VoiceChoice) -> AsyncIterator[EmbeddedEngine]:
    async with running(voice=voice_choice) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    """The running engine; afterwards nothing of it may be held any more."""
    yield started
    nothing_is_held(started)


@pytest_asyncio.fixture(loop_scope="module")
async def voiced(started_with_voice: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    """The same with each voice in turn."""
    yield started_with_voice
    nothing_is_held(started_with_voice)


def nothing_is_held(engine: EmbeddedEngine) -> None:
    assert engine.active_requests == 0
    assert engine.asr.listening is not None
    assert engine.asr.listening.seats.taken == 0
    assert engine.asr.listening.recogniser.live_decoders.borrowed == 0  # type: ignore[attr-defined]
    assert engine._voice.jobs == 0


Input = Channel[InputChunk]


def open_input(*chunks: InputChunk) -> Input:
    channel: Input = Channel(1 << 20, cost=lambda chunk: len(chunk.payload))
    for chunk in chunks:
        channel.put_nowait(chunk)
    return channel


def text(words: str) -> InputChunk:
    return InputChunk(Modality.TEXT, words.encode())


def audio(payload: bytes, frame_ms: int | None = None, byte_rate: int = 32_000) -> list[InputChunk]:
    length = len(payload) if frame_ms is None else byte_rate * frame_ms // 1000
    return [InputChunk(Modality.AUDIO, payload[at : at + length]) for at in range(0, len(payload), max(1, length))]


def image(colour: str, size: tuple[int, int] = (64, 48)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "png")
    return buffer.getvalue()


def request_of(source: Input, **fields: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {
        "request_id": "req_1",
        "task": Task.CHAT,
        "input_mode": InputMode.EXTEND,
        "input_audio": AudioFormat(),
        "modalities": TEXT,
    }
    return GenerationRequest(input=source, **{**defaults, **fields})


@dataclass
class Result:
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs if isinstance(output, TextOutput))

    @property
    def transcript(self) -> str:
        return "".join(output.text for output in self.transcripts if not output.interim)

    @property
    def transcripts(self) -> list[TranscriptOutput]:
        return [output for output in self.outputs if isinstance(output, TranscriptOutput)]

    @property
    def audio(self) -> list[AudioOutput]:
        return [output for output in self.outputs if isinstance(output, AudioOutput)]

    @property
    def audio_ms(self) -> float:
        return sum(len(output.samples) * 1000 / output.sample_rate for output in self.audio)

    @property
    def words(self) -> list[Word]:
        return [word for output in self.audio for word in output.words]

    @property
    def finished(self) -> Finished:
        last = self.outputs[-1]
        assert isinstance(last, Finished)
        assert not any(isinstance(output, Finished) for output in self.outputs[:-1])
        return last


async def answered(engine: EmbeddedEngine, *chunks: InputChunk, **fields: Any) -> Result:
    source = open_input(*chunks)
    source.close()
    async with aclosing(engine.generate(request_of(source, **fields))) as outputs:
        return Result([output async for output in outputs])


# text


async def test_a_long_text_is_said_back_as_it_is_whatever_pieces_it_comes_in(engine: EmbeddedEngine) -> None:
    words = " ".join(f"word{number}" for number in range(2000)) + "."
    chunks = [text(words[start : start + 1500]) for start in range(0, len(words), 1500)]
    result = await answered(engine, text("repeat after me "), *chunks)
    assert result.text == words
    assert result.finished.usage.input_tokens == 2003
    assert result.finished.usage.output_tokens == 2000


async def test_text_is_answered(engine: EmbeddedEngine) -> None:
    result = await answered(engine, text("What time"), text(" is it?"))
    assert result.text == "It is 3:07 PM."
    assert result.finished.reason is FinishReason.STOP
    assert (result.finished.usage.input_tokens, result.finished.usage.output_tokens) == (4, 4)
    assert result.audio == []


async def test_history_is_known_and_counted(engine: EmbeddedEngine) -> None:
    history = (Message("user", "my name is Ann"), Message("assistant", "You said: my name is Ann."))
    result = await answered(engine, text("what did I say"), history=history)
    assert result.text == "You said: my name is Ann."
    assert result.finished.usage.input_tokens == 4 + 4 + 6


async def test_the_answer_is_spoken_sentence_by_sentence(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("count to thirty"), modalities=BOTH)
    assert result.text == ", ".join(map(str, range(1, 11))) + ". " + ", ".join(map(str, range(11, 21))) + ". " + (
        ", ".join(map(str, range(21, 31))) + "."
    )
    kinds = [type(output) for output in result.outputs]
    texts = [place for place, kind in enumerate(kinds) if kind is TextOutput]
    assert len(texts) == 3
    assert all(AudioOutput in kinds[start:end] for start, end in zip(texts, [*texts[1:], len(kinds)], strict=True))
    assert result.finished.usage.output_audio_ms == pytest.approx(result.audio_ms, abs=1)
    assert result.audio_ms > 5000


async def test_word_times_run_along_the_whole_answer(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("count to thirty"), modalities=BOTH)
    assert [word.text for word in result.words] == [str(number) for number in range(1, 31)]
    starts = [word.start_ms for word in result.words]
    assert starts == sorted(starts)
    assert result.words[-1].end_ms <= result.audio_ms + 1


async def test_the_first_sentence_is_heard_before_the_last_is_made(voiced: EmbeddedEngine) -> None:
    source = open_input(text("count to one thousand"))
    source.close()
    async with aclosing(voiced.generate(request_of(source, modalities=BOTH))) as outputs:
        assert isinstance(await anext(outputs), TextOutput)
        assert isinstance(await anext(outputs), AudioOutput)


async def test_audio_without_text(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("hello"), modalities=frozenset({OutputModality.AUDIO}))
    assert result.text == ""
    assert result.audio_ms > 500
    assert result.finished.usage.output_tokens == 6


async def test_every_voice_can_be_asked_for(voiced: EmbeddedEngine) -> None:
    other = voiced.capabilities.voices[1]
    assert (await answered(voiced, text("hello"), modalities=BOTH, voice=other)).audio_ms > 300
    with pytest.raises(InvalidValue, match=other):
        await answered(voiced, text("hello"), modalities=BOTH, voice="nobody")


@pytest.mark.parametrize(
    ("sampling", "answer", "reason"),
    [
        ({"max_tokens": 4}, "1, 2, 3, 4,", FinishReason.LENGTH),
        ({"max_tokens": 12}, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 11, 12.", FinishReason.STOP),
        ({"max_tokens": 11}, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 11,", FinishReason.LENGTH),
        ({"stop": ["5"]}, "1, 2, 3, 4, ", FinishReason.STOP),
        ({"stop": "10. 11"}, "1, 2, 3, 4, 5, 6, 7, 8, 9, ", FinishReason.STOP),
        ({"stop": ["never"], "temperature": 0, "top_p": 1, "seed": 3}, None, FinishReason.STOP),
    ],
)
async def test_limits_of_the_answer(
    engine: EmbeddedEngine, sampling: dict[str, Any], answer: str | None, reason: FinishReason
) -> None:
    result = await answered(engine, text("count to twelve"), sampling=sampling)
    assert result.text == (answer or "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 11, 12.")
    assert result.finished.reason is reason
    assert result.finished.usage.output_tokens == len(result.text.split())


async def test_what_is_cut_off_is_not_spoken(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("count to twelve"), modalities=BOTH, sampling={"stop": "10. 11"})
    assert [word.text for word in result.words] == [str(number) for number in range(1, 10)]


async def test_nothing_at_all_is_empty_input(engine: EmbeddedEngine) -> None:
    for task in (Task.CHAT, Task.TRANSCRIBE):
        with pytest.raises(EmptyInput):
            await answered(engine, task=task)
    assert (await answered(engine, text("  "))).text == "The message is empty."


# speech in


@pytest.mark.parametrize(("name", "errors"), [("goforward", 0), ("cards_005", 0), ("librivox_ss_0870", 4)])
async def test_speech_is_understood_and_said_back(engine: EmbeddedEngine, name: str, errors: int) -> None:
    result = await answered(engine, *audio(clip_bytes(name)))
    assert word_errors(WORDS[name], result.transcript) <= errors
    assert result.text == f"You said: {result.transcript}."
    assert result.finished.usage.input_tokens == len(result.transcript.split())
    assert result.finished.usage.input_audio_ms == len(clip_bytes(name)) // 32


async def test_final_words_have_their_places_in_the_input(engine: EmbeddedEngine) -> None:
    lead = silence(2)
    result = await answered(engine, *audio(lead + clip_bytes("goforward") + silence(0.6), 20))
    (final,) = [transcript for transcript in result.transcripts if not transcript.interim]
    assert [word.text for word in final.words] == WORDS["goforward"].split()
    assert final.start_ms is not None
    assert 1500 < final.start_ms <= final.words[0].start_ms
    assert 2300 < final.words[0].start_ms < 2700
    assert final.words[-1].end_ms < 2000 + len(clip_bytes("goforward")) / 32


@pytest.mark.slow
async def test_equal_bytes_give_equal_text_however_they_are_cut(engine: EmbeddedEngine) -> None:
    speech = clip_bytes("cards_005") + silence(0.8) + clip_bytes("goforward")
    results = [await answered(engine, *audio(speech, frame_ms)) for frame_ms in (20, 100, None)]
    finals = [[each for each in result.transcripts if not each.interim] for result in results]
    assert len(finals[0]) == 2
    assert finals[1] == finals[0]
    assert finals[2] == finals[0]
    assert results[0].transcript == f"{WORDS['cards_005']} {WORDS['goforward']}"


@pytest.mark.parametrize("rate", [8_000, 24_000, 48_000])
async def test_other_rates_are_understood_too(engine: EmbeddedEngine, rate: int) -> None:
    from omni_ws.audio.resample import StreamResampler

    resampler = StreamResampler(16_000, rate, "HQ")
    samples = np.frombuffer(clip_bytes("goforward"), "<i2").astype(np.float32) / np.float32(32768)
    other = as_pcm16(np.concatenate((resampler.process(samples), resampler.flush())))
    result = await answered(engine, *audio(other, 20, 2 * rate), input_audio=AudioFormat(AudioEncoding.PCM16, rate, 1))
    assert word_errors(WORDS["goforward"], result.transcript) <= (2 if rate == 8_000 else 1)


@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum"])
async def test_noise_is_not_speech(engine: EmbeddedEngine, name: str) -> None:
    noise = audio(as_pcm16(noises()[name]), 100)
    result = await answered(engine, *noise)
    assert result.transcripts == []
    assert result.text == NOTHING_HEARD
    result = await answered(engine, *noise, task=Task.TRANSCRIBE)
    assert (result.transcripts, result.text) == ([], "")
    assert result.finished.reason is FinishReason.STOP


async def test_speech_and_text_are_one_message_in_their_order(engine: EmbeddedEngine) -> None:
    result = await answered(engine, text("repeat after me:"), *audio(clip_bytes("goforward"), 20), text("and back"))
    assert result.text == f"{WORDS['goforward']} and back."


@pytest.mark.slow
async def test_live_partials_come_while_the_input_is_open(engine: EmbeddedEngine) -> None:
    source = open_input()
    async with aclosing(engine.generate(request_of(source))) as outputs:
        following = asyncio.ensure_future(anext(outputs))
        for chunk in audio(clip_bytes("goforward"), 100):
            source.put_nowait(chunk)
            # Paced by the clock of the audio: this is what live means.
            await asyncio.wait([following], timeout=0.1)
            if following.done():
                break
        first = await following
        assert isinstance(first, TranscriptOutput)
        assert first.interim
        assert first.text.split()[0] == "go"
        assert engine.active_requests == 1


async def test_a_fast_upload_has_no_partials(engine: EmbeddedEngine) -> None:
    result = await answered(engine, *audio(clip_bytes("librivox_ss_0870")))
    assert [transcript.interim for transcript in result.transcripts] == [False]


@pytest.mark.slow
async def test_transcribing_gives_the_text_as_the_answer_too(engine: EmbeddedEngine) -> None:
    speech = clip_bytes("cards_001") + silence(0.8) + clip_bytes("goforward")
    result = await answered(engine, *audio(speech), task=Task.TRANSCRIBE, modalities=BOTH)
    assert result.text == result.transcript == "ten of clubs go forward ten meters"
    assert result.audio == []
    assert result.finished.usage.output_tokens == 7
    result = await answered(engine, *audio(speech), task=Task.TRANSCRIBE, modalities=frozenset())
    assert result.text == ""
    assert result.transcript == "ten of clubs go forward ten meters"


async def test_limits_hold_for_transcripts_as_answers(engine: EmbeddedEngine) -> None:
    speech = audio(clip_bytes("goforward"))
    result = await answered(engine, *speech, task=Task.TRANSCRIBE, sampling={"max_tokens": 2})
    assert result.text == "go forward"
    assert result.transcript == "go forward ten meters"
    assert result.finished.reason is FinishReason.LENGTH


async def test_broken_audio_is_refused(engine: EmbeddedEngine) -> None:
    with pytest.raises(UnsupportedFormat):
        await answered(engine, InputChunk(Modality.AUDIO, b"no flac at all" * 100, format="flac"))


# pictures


async def test_an_image_is_described_plainly(engine: EmbeddedEngine) -> None:
    result = await answered(engine, InputChunk(Modality.IMAGE, image("red")))
    assert result.text == "The image is 64 by 48 pixels, mostly red, and of medium brightness."
    result = await answered(engine, InputChunk(Modality.IMAGE, image("black")), text("hello"))
    assert result.text.endswith("mostly black, and dark. Hello. How can I help you?")


async def test_many_images_are_counted(engine: EmbeddedEngine) -> None:
    result = await answered(engine, *(InputChunk(Modality.IMAGE, image("blue")) for _ in range(9)))
    assert "Image 8 is" in result.text
    assert "Image 9" not in result.text
    assert result.text.endswith("There are 9 images in all.")


async def test_a_video_of_images_is_described(engine: EmbeddedEngine) -> None:
    colours = ["red", "blue"] * 3
    frames = [InputChunk(Modality.VIDEO, image(each), timestamp_ms=500 * at) for at, each in enumerate(colours)]
    result = await answered(engine, *frames)
    assert result.text.startswith("The video has 6 frames over 2.5 seconds, mostly ")
    assert result.text.endswith("and there is much motion.")


# reading aloud


async def test_text_is_read_while_more_arrives(voiced: EmbeddedEngine) -> None:
    source = open_input(text("This is the first sentence. And this"))
    async with aclosing(voiced.generate(request_of(source, task=Task.SPEECH, modalities=BOTH))) as outputs:
        words: list[Word] = []
        async for output in outputs:
            assert isinstance(output, AudioOutput)
            words += output.words
            if len(words) == 5:
                break
        assert [word.text for word in words] == ["This", "is", "the", "first", "sentence"]
        source.put_nowait(text(" is the second."))
        # Not closed: a sentence that seems complete is spoken when nothing follows.
        async for output in outputs:
            assert isinstance(output, AudioOutput)
            words += output.words
            if len(words) == 10:
                break
        assert [word.text for word in words[5:]] == ["And", "this", "is", "the", "second"]
        source.close()
        last = [output async for output in outputs][-1]
    assert isinstance(last, Finished)
    assert last.usage.input_tokens == 10
    assert last.usage.output_tokens == 10


async def test_reading_aloud_has_no_text(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("Go. Forward, ten meters"), task=Task.SPEECH, modalities=BOTH)
    assert {type(output) for output in result.outputs} == {AudioOutput, Finished}
    assert [word.text for word in result.words] == ["Go", "Forward", "ten", "meters"]


async def test_reading_nothing_aloud(voiced: EmbeddedEngine) -> None:
    for chunks in ((), (text(" \n"),)):
        with pytest.raises(EmptyInput):
            await answered(voiced, *chunks, task=Task.SPEECH, modalities=BOTH)


async def test_tasks_take_what_they_can_work_on(voiced: EmbeddedEngine) -> None:
    speech, words = audio(clip_bytes("cards_001")), [text("hello")]
    wrong: Sequence[tuple[Task, list[InputChunk]]] = ((Task.SPEECH, speech), (Task.TRANSCRIBE, words))
    for task, chunks in wrong:
        with pytest.raises(UnsupportedModality, match=f"task {task} takes"):
            await answered(voiced, *chunks, task=task, modalities=BOTH)
    with pytest.raises(UnsupportedParameter) as refusal:
        await answered(voiced, *words, task=Task.SPEECH, modalities=TEXT)
    assert refusal.value.param == "modalities"


# life and limits


async def test_what_it_says_about_itself(engine: EmbeddedEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.input_modalities == frozenset(Modality)
    assert capabilities.extend
    assert capabilities.sampling == {"max_tokens", "stop"}
    assert capabilities.sampling_no_ops == {"temperature", "top_p", "seed"}
    assert (capabilities.tools, capabilities.logprobs, capabilities.structured_output) == (False, False, False)
    assert capabilities.raw_prompts
    assert (OutputModality.AUDIO in capabilities.output_modalities) is bool(capabilities.voices)
    assert engine.state is EngineState.OK
    assert engine.describe_voice().startswith("voice: ")


@pytest.mark.slow
async def test_requests_past_the_seats_are_refused_and_the_others_go_on(engine: EmbeddedEngine) -> None:
    speech = audio(clip_bytes("goforward"))
    sources = [open_input(*speech) for _ in range(4)]
    running = [asyncio.create_task(_collect(engine, source)) for source in sources]
    assert engine.asr.listening is not None
    seats = engine.asr.listening.seats
    await until(lambda: seats.taken == 4)
    with pytest.raises(EngineOverloaded) as refusal:
        await answered(engine, *speech)
    assert refusal.value.retry_after_ms
    assert (await answered(engine, text("hello"))).text.startswith("Hello.")
    for source in sources:
        source.close()
    results = await asyncio.gather(*running)
    assert {result.transcript for result in results} == {WORDS["goforward"]}
    assert (await answered(engine, *speech)).transcript == WORDS["goforward"]


async def _collect(engine: EmbeddedEngine, source: Input, **fields: Any) -> Result:
    async with aclosing(engine.generate(request_of(source, **fields))) as outputs:
        return Result([output async for output in outputs])


@pytest.mark.parametrize("sent_ms", [0, 300, 1300, 2500])
async def test_cancelling_while_listening_frees_everything(engine: EmbeddedEngine, sent_ms: int) -> None:
    """The checks are in the fixture."""
    source = open_input(*audio(clip_bytes("goforward")[: sent_ms * 32], 20))
    task = asyncio.create_task(_collect(engine, source))
    await until(lambda: not source.queued and engine.active_requests == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("outputs_taken", range(1, 8))
async def test_closing_after_any_output_frees_everything(voiced: EmbeddedEngine, outputs_taken: int) -> None:
    source = open_input(*audio(clip_bytes("goforward"), 100))
    source.close()
    outputs = voiced.generate(request_of(source, modalities=BOTH))
    for _ in range(outputs_taken):
        await anext(outputs)
    await outputs.aclose()
    assert voiced.active_requests == 0


@pytest.mark.slow
async def test_cancelling_at_every_step_frees_everything(voiced: EmbeddedEngine) -> None:
    """Cancels the same short request later and later, until it gets through."""
    steps = 1.0
    while True:
        source = open_input(*audio(clip_bytes("cards_001")), text("x"))
        source.close()
        task = asyncio.create_task(_collect(voiced, source, modalities=BOTH))
        for _ in range(int(steps)):
            if task.done():
                break
            await asyncio.sleep(0)
        if task.done():
            assert (await task).transcript == "ten of clubs"
            return
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert voiced.active_requests == 0
        assert voiced.asr.listening is not None
        assert voiced.asr.listening.seats.taken == 0
        steps *= 1.4


async def test_what_breaks_inside_is_not_shown(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> datetime:
        raise RuntimeError("secret")

    monkeypatch.setattr(engine, "_now", broken)
    with pytest.raises(EngineFailed) as failure:
        await answered(engine, text("what time is it"))
    assert "secret" not in failure.value.message


@pytest.mark.slow
async def test_an_engine_without_a_voice() -> None:
    engine = EmbeddedEngine(EmbeddedConfig(voice=VoiceChoice.NONE, max_recognisers=1, warm_recognisers=1))
    assert engine.state is EngineState.STARTING
    with pytest.raises(EngineFailed, match="not running"):
        await answered(engine, text("hello"))
    await engine.start()
    try:
        assert engine.capabilities.voices == ()
        assert engine.capabilities.output_modalities == {OutputModality.TEXT, OutputModality.TRANSCRIPT}
        assert (await answered(engine, text("thanks"))).text == "You are welcome."
        with pytest.raises(UnsupportedParameter, match="no voice") as refusal:
            await answered(engine, text("hello"), modalities=BOTH)
        assert refusal.value.param == "modalities"
    finally:
        await engine.stop()
        await engine.stop()
    assert engine.state is EngineState.STARTING


@pytest.mark.slow
async def test_an_engine_that_cannot_start_says_why(voice_choice: VoiceChoice) -> None:
    config = EmbeddedConfig(voice=voice_choice, default_voice="hal", max_recognisers=1, warm_recognisers=1)
    engine = EmbeddedEngine(config)
    with pytest.raises(EngineFailed, match="no voice 'hal'"):
        await engine.start()
    assert engine.state is EngineState.STARTING


@pytest.mark.slow
async def test_stopping_with_open_requests_frees_them_too() -> None:
    engine = EmbeddedEngine(EmbeddedConfig(voice=VoiceChoice.NONE, max_recognisers=1, warm_recognisers=1))
    await engine.start()
    source = open_input(*audio(clip_bytes("goforward"), 100))
    running = asyncio.create_task(_collect(engine, source))
    await until(lambda: not source.queued)
    await engine.stop()
    source.close()
    with pytest.raises(EngineFailed):
        await running
    assert engine.active_requests == 0


# in real time


async def _paced(source: Input, payload: bytes) -> float:
    """Sends 20 ms frames on their beat; returns when the last one was sent."""
    beat = time.perf_counter()
    for chunk in audio(payload, 20):
        source.put_nowait(chunk)
        beat += 0.02
        await asyncio.sleep(max(0.0, beat - time.perf_counter()))
    source.close()
    return time.perf_counter()


async def _first_audio(engine: EmbeddedEngine, source: Input) -> tuple[float, float | None, str]:
    """When the first audio and the first partial came, and what was understood."""
    first_partial = first_audio = None
    transcript = ""
    async with aclosing(engine.generate(request_of(source, modalities=BOTH))) as outputs:
        async for output in outputs:
            match output:
                case TranscriptOutput(interim=True) if first_partial is None:
                    first_partial = time.perf_counter()
                case TranscriptOutput(interim=False, text=heard):
                    transcript += heard
                case AudioOutput() if first_audio is None:
                    first_audio = time.perf_counter()
                case _:
                    pass
    assert first_audio is not None
    return first_audio, first_partial, transcript


async def _seconds_of_a_pass(name: str) -> float:
    """What the second pass over a clip takes on a machine that may be busy, at this moment."""
    recogniser = PocketSphinxDecoder()
    begun = time.perf_counter()
    await asyncio.to_thread(recogniser.transcribe, clip_pcm(name))
    return time.perf_counter() - begun


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goforward", "cards_005"])
@pytest.mark.parametrize("tail", [0.0, 0.5])
async def test_the_answer_begins_soon_after_the_end(voiced: EmbeddedEngine, name: str, tail: float) -> None:
    source = open_input()
    started = time.perf_counter()
    speech = clip_bytes(name)
    (heard_at, partial_at, transcript), ended = await asyncio.gather(
        _first_audio(voiced, source), _paced(source, speech + silence(tail))
    )
    assert transcript == WORDS[name]
    goal = 0.15 if tail else 0.1 + 0.12 * len(speech) / 32_000
    # Not the goal itself: a shared machine is no measuring instrument, but an order of magnitude is a defect.
    assert heard_at - ended < max(2 * goal, 3 * await _seconds_of_a_pass(name))
    assert partial_at is not None
    assert partial_at - started < 2.0


@pytest.mark.slow
async def test_four_talkers_at_once_do_not_stop_the_loop(voiced: EmbeddedEngine) -> None:
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - before - 0.005)

    watcher = asyncio.create_task(watch())
    sources = [open_input() for _ in range(4)]
    speech = clip_bytes("cards_005") + silence(0.6)
    results = await asyncio.gather(
        *(_first_audio(voiced, source) for source in sources), *(_paced(source, speech) for source in sources)
    )
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    assert {result[2] for result in results[:4] if isinstance(result, tuple)} == {WORDS["cards_005"]}
    lags.sort()
    # The goal is 10 ms; holding the GIL while decoding makes it 270.
    assert lags[int(len(lags) * 0.99)] < 0.05
