"""Speech recognition as a request sees it, with PocketSphinx."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import BOTH, Answer, answered, audio, collect, open_input, request_of, text
from support.speech_clips import WORDS, as_pcm16, clip_bytes, clip_samples, noises, silence, word_errors
from support.until import until

from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task
from omni_ws.engine.asr.pocketsphinx_engine import PocketSphinxEngine
from omni_ws.engine.base import EngineState, Message, TranscriptOutput
from omni_ws.errors import EmptyInput, EngineFailed, EngineOverloaded, UnsupportedFormat, UnsupportedModality

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_time]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started() -> AsyncIterator[PocketSphinxEngine]:
    engine = PocketSphinxEngine(max_recognisers=4, warm_recognisers=1)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: PocketSphinxEngine) -> AsyncIterator[PocketSphinxEngine]:
    """The running engine; afterwards nothing of it may be held any more."""
    yield started
    nothing_is_held(started)


def nothing_is_held(engine: PocketSphinxEngine) -> None:
    assert engine.active_requests == 0
    assert engine.listening is not None
    assert engine.listening.seats.taken == 0
    assert engine.listening.recogniser.live_decoders.borrowed == 0  # type: ignore[attr-defined]


async def transcribed(engine: PocketSphinxEngine, *chunks: InputChunk, **fields: object) -> Answer:
    return await answered(engine, *chunks, task=Task.TRANSCRIBE, **fields)


@pytest.mark.parametrize(("name", "errors"), [("goforward", 0), ("cards_005", 0), ("librivox_ss_0870", 4)])
async def test_speech_is_written_down(engine: PocketSphinxEngine, name: str, errors: int) -> None:
    history = (Message("user", "not heard now"),)
    result = await transcribed(engine, *audio(clip_bytes(name)), history=history)
    assert word_errors(WORDS[name], result.transcript) <= errors
    assert result.text == result.transcript
    words = len(result.transcript.split())
    assert (result.finished.usage.input_tokens, result.finished.usage.output_tokens) == (words + 3, words)
    assert result.finished.usage.input_audio_ms == len(clip_bytes(name)) // 32


async def test_settled_words_have_their_places_in_the_input(engine: PocketSphinxEngine) -> None:
    lead = silence(2)
    result = await transcribed(engine, *audio(lead + clip_bytes("goforward") + silence(0.6), 20))
    (settled,) = [transcript for transcript in result.transcripts if not transcript.interim]
    assert [word.text for word in settled.words] == WORDS["goforward"].split()
    assert settled.start_ms is not None
    assert 1500 < settled.start_ms <= settled.words[0].start_ms
    assert 2300 < settled.words[0].start_ms < 2700
    assert settled.words[-1].end_ms < 2000 + len(clip_bytes("goforward")) / 32


@pytest.mark.slow
async def test_equal_bytes_give_equal_text_however_they_are_cut(engine: PocketSphinxEngine) -> None:
    speech = clip_bytes("cards_005") + silence(0.8) + clip_bytes("goforward")
    results = [await transcribed(engine, *audio(speech, frame_ms)) for frame_ms in (20, 100, None)]
    settled = [[each for each in result.transcripts if not each.interim] for result in results]
    assert len(settled[0]) == 2
    assert settled[1] == settled[0]
    assert settled[2] == settled[0]
    assert results[0].transcript == f"{WORDS['cards_005']} {WORDS['goforward']}"


@pytest.mark.parametrize("rate", [8_000, 24_000, 48_000])
async def test_other_rates_are_understood_too(engine: PocketSphinxEngine, rate: int) -> None:
    from omni_ws.audio.resample import StreamResampler

    resampler = StreamResampler(16_000, rate, "HQ")
    samples = np.frombuffer(clip_bytes("goforward"), "<i2").astype(np.float32) / np.float32(32768)
    other = as_pcm16(np.concatenate((resampler.process(samples), resampler.flush())))
    format = AudioFormat(AudioEncoding.PCM16, rate, 1)
    result = await transcribed(engine, *audio(other, 20, 2 * rate), input_audio=format)
    assert word_errors(WORDS["goforward"], result.transcript) <= (2 if rate == 8_000 else 1)


async def test_a_change_of_format_ends_an_utterance(engine: PocketSphinxEngine) -> None:
    other = InputChunk(Modality.AUDIO, clip_samples("cards_001").tobytes(), format="f32")
    result = await transcribed(engine, *audio(clip_bytes("goforward")), other)
    assert result.transcript == f"{WORDS['goforward']} {WORDS['cards_001']}"


@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum"])
async def test_noise_is_not_speech(engine: PocketSphinxEngine, name: str) -> None:
    result = await transcribed(engine, *audio(as_pcm16(noises()[name]), 100))
    assert (result.transcripts, result.text) == ([], "")
    assert result.finished.reason is FinishReason.STOP


@pytest.mark.slow
async def test_interim_texts_come_while_the_input_is_open(engine: PocketSphinxEngine) -> None:
    source = open_input()
    async with aclosing(engine.generate(request_of(source, task=Task.TRANSCRIBE))) as outputs:
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


async def test_a_fast_upload_has_no_interim_texts(engine: PocketSphinxEngine) -> None:
    result = await transcribed(engine, *audio(clip_bytes("librivox_ss_0870")))
    assert [transcript.interim for transcript in result.transcripts] == [False]


@pytest.mark.slow
async def test_the_text_is_there_if_it_was_asked_for(engine: PocketSphinxEngine) -> None:
    speech = clip_bytes("cards_001") + silence(0.8) + clip_bytes("goforward")
    result = await transcribed(engine, *audio(speech), modalities=BOTH)
    assert result.text == result.transcript == "ten of clubs go forward ten meters"
    result = await transcribed(engine, *audio(speech), modalities=frozenset())
    assert result.text == ""
    assert result.transcript == "ten of clubs go forward ten meters"


async def test_limits_hold_for_the_text(engine: PocketSphinxEngine) -> None:
    result = await transcribed(engine, *audio(clip_bytes("goforward")), sampling={"max_tokens": 2})
    assert result.text == "go forward"
    assert result.transcript == "go forward ten meters"
    assert result.finished.reason is FinishReason.LENGTH


async def test_what_is_refused(engine: PocketSphinxEngine) -> None:
    with pytest.raises(UnsupportedFormat):
        await transcribed(engine, InputChunk(Modality.AUDIO, b"no flac at all" * 100, format="flac"))
    with pytest.raises(UnsupportedModality, match="task transcribe takes audio, not text"):
        await transcribed(engine, *audio(clip_bytes("cards_001")), text("hello"))
    with pytest.raises(EmptyInput):
        await transcribed(engine)


async def test_what_it_says_about_itself(engine: PocketSphinxEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.tasks == {Task.TRANSCRIBE}
    assert capabilities.input_modalities == {Modality.AUDIO}
    assert capabilities.output_modalities == {OutputModality.TEXT, OutputModality.TRANSCRIPT}
    assert (capabilities.extend, capabilities.word_times) == (True, True)
    assert capabilities.languages == {"en"}
    assert (engine.name, engine.model, engine.state) == ("pocketsphinx", "en-us", EngineState.OK)


@pytest.mark.slow
async def test_requests_past_the_seats_are_refused_and_the_others_go_on(engine: PocketSphinxEngine) -> None:
    speech = audio(clip_bytes("goforward"))
    sources = [open_input(*speech) for _ in range(4)]
    running = [asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE)) for source in sources]
    assert engine.listening is not None
    seats = engine.listening.seats
    await until(lambda: seats.taken == 4)
    with pytest.raises(EngineOverloaded) as refusal:
        await transcribed(engine, *speech)
    assert refusal.value.retry_after_ms
    for source in sources:
        source.close()
    results = await asyncio.gather(*running)
    assert {result.transcript for result in results} == {WORDS["goforward"]}
    assert (await transcribed(engine, *speech)).transcript == WORDS["goforward"]


@pytest.mark.parametrize("sent_ms", [0, 300, 1300, 2500])
async def test_cancelling_while_listening_frees_everything(engine: PocketSphinxEngine, sent_ms: int) -> None:
    """The checks are in the fixture."""
    source = open_input(*audio(clip_bytes("goforward")[: sent_ms * 32], 20))
    task = asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE))
    await until(lambda: not source.queued and engine.active_requests == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.slow
async def test_stopping_with_open_requests_frees_them_too() -> None:
    engine = PocketSphinxEngine(max_recognisers=1, warm_recognisers=1)
    assert engine.state is EngineState.STARTING
    with pytest.raises(EngineFailed, match="not running"):
        await transcribed(engine, *audio(clip_bytes("goforward")))
    await engine.start()
    await engine.start()
    source = open_input(*audio(clip_bytes("goforward"), 100))
    running = asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE))
    await until(lambda: not source.queued)
    await engine.stop()
    source.close()
    with pytest.raises(EngineFailed):
        await running
    assert engine.active_requests == 0
    await engine.stop()
    assert engine.state is EngineState.STARTING
