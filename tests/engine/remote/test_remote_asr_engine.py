"""Speech recognition by another server: what it gets of the audio, and what is made of its answers."""

from __future__ import annotations

import asyncio
import io
import wave
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from support.engine_answers import Answer as EngineAnswer
from support.engine_answers import Input, answered, audio, open_input, request_of, streamed
from support.patience import PATIENCE_SEC, until
from support.scripted_engines import RetortEngine
from support.scripted_upstream import (
    SSE,
    Answer,
    ScriptedUpstream,
    cut,
    hang,
    refuses,
    remote_asr,
    streams,
    upstream,
)
from support.speech_clips import clip_bytes, clip_pcm, silence

from benchmarks.server_process import free_port
from omni_ws.core.chunks import FinishReason, Hearing, InputChunk, Modality, OutputModality, Task, Word
from omni_ws.engine.asr import recogniser_engine
from omni_ws.engine.asr.recogniser import UtteranceLimits
from omni_ws.engine.asr.recogniser_engine import AudioPace, RecogniserEngine, Transcript
from omni_ws.engine.base import (
    AnswerOptions,
    EngineOutput,
    EngineState,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.remote import engine as remote_recogniser
from omni_ws.engine.remote.engine import RemoteRecogniser
from omni_ws.engine.remote.settings import RemoteAsrSettings
from omni_ws.engine.remote.upstream import Upstream
from omni_ws.errors import (
    EmptyInput,
    EngineFailed,
    EngineOverloaded,
    InvalidRequest,
    InvalidValue,
    OmniError,
    UnsupportedFormat,
    UnsupportedModality,
)
from omni_ws.transport.http.exchange import HttpExchange

pytestmark = pytest.mark.usefixtures("no_task_left")

FIRST, SECOND = clip_bytes("goforward"), clip_bytes("cards_001")
BOTH_CLIPS = FIRST + silence(1) + SECOND


def writes(text: str, **fields: Any) -> Answer:
    return refuses(200, {"text": text, **fields})


def openai(*deltas: str, done: str | None = None) -> Answer:
    """OpenAI's events, which have no ``[DONE]``."""
    events = [{"type": "transcript.text.delta", "delta": delta} for delta in deltas]
    end = {"type": "transcript.text.done", "text": "".join(deltas) if done is None else done}
    return streams(*events, end, done=False)


def vllm(*deltas: str) -> Answer:
    chunks = [{"object": "transcription.chunk", "choices": [{"delta": {"content": delta}}]} for delta in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
    return streams(*chunks, {"object": "transcription.chunk", "choices": [], "usage": {"prompt_tokens": 9}})


async def transcribed(engine: RecogniserEngine, data: bytes, **fields: Any) -> EngineAnswer:
    return await answered(engine, *audio(data, frame_ms=100), task=Task.TRANSCRIBE, **fields)


def samples_of(form: dict[str, bytes]) -> NDArray[np.int16]:
    with wave.open(io.BytesIO(form["file"])) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


# what goes there


async def test_each_utterance_is_a_file() -> None:
    async with (
        upstream(written=[writes(" Go forward. "), writes("Ten of clubs.")]) as there,
        remote_asr(there) as engine,
    ):
        answer = await transcribed(engine, BOTH_CLIPS, request_id="req_7")
        assert (engine.model, engine.state) == ("tiny", EngineState.OK)
        assert engine.describe() == (f"transcription upstream 127.0.0.1:{there.port} serves tiny",)
        assert there.headers[-1]["x-request-id"] == "req_7"
    first, second = there.heard
    assert {name: value for name, value in first.items() if name != "file"} == {
        "model": b"tiny",
        "response_format": b"json",
        "stream": b"true",
    }
    spoken = np.frombuffer(BOTH_CLIPS, "<i2")
    # Each is a stretch of the audio with its speech, and little of the silence between them.
    starts = [output.start_ms for output in answer.transcripts]
    for form, start_ms, clip in ((first, starts[0], "goforward"), (second, starts[1], "cards_001")):
        samples = samples_of(form)
        assert start_ms is not None
        place = start_ms * 16
        np.testing.assert_allclose(samples, spoken[place : place + len(samples)], atol=1)
        assert 0.6 * len(clip_pcm(clip)) < len(samples) < len(clip_pcm(clip)) + 8000
    assert answer.outputs[:-1] == [
        TranscriptOutput("Go forward.", start_ms=starts[0], hearing=Hearing()),
        TextOutput("Go forward."),
        TranscriptOutput(" Ten of clubs.", start_ms=starts[1], hearing=Hearing()),
        TextOutput(" Ten of clubs."),
    ]
    usage = answer.finished.usage
    assert (usage.input_audio_ms, usage.input_tokens, usage.output_tokens) == (round(len(spoken) / 16), 5, 5)


async def test_what_a_request_says_of_its_speech_goes_along() -> None:
    async with (
        upstream(written=[writes("x"), writes("x")], models=("other", "whisper")) as there,
        remote_asr(there, model="whisper") as engine,
    ):
        await transcribed(engine, FIRST, language="de", expected="Ng.", sampling={"temperature": 0.25})
        await transcribed(engine, FIRST)
    form, bare = there.heard
    assert (form["model"], form["language"], form["temperature"]) == (b"whisper", b"de", b"0.25")
    assert form["prompt"] == b"Ng."
    assert not bare.keys() & {"prompt", "language", "temperature"}


async def test_silence_is_not_sent() -> None:
    async with upstream(written=[writes("Thanks for watching!")]) as there, remote_asr(there) as engine:
        answer = await transcribed(engine, silence(3))
        assert there.heard == []
    assert len(answer.outputs) == 1
    assert answer.finished.usage.input_audio_ms == 3000


async def test_long_speech_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_recogniser, "_UTTERANCE_LIMITS", UtteranceLimits(cut_after=16_000, longest=24_000))
    async with upstream(written=[writes("x")]) as there, remote_asr(there) as engine:
        answer = await transcribed(engine, clip_bytes("librivox_ss_0870"))
    assert len(there.heard) > 3
    assert all(len(samples_of(form)) < 24_000 + 512 for form in there.heard)
    assert answer.transcript == " ".join("x" * len(there.heard))


async def test_any_format_of_audio() -> None:
    wide = clip_pcm("goforward").repeat(3).tobytes()
    async with upstream(written=[writes("x")]) as there, remote_asr(there) as engine:
        answer = await answered(
            engine, InputChunk(Modality.AUDIO, wide, format="audio/pcm;rate=48000"), task=Task.TRANSCRIBE
        )
        assert answer.transcript == "x"
        assert len(samples_of(there.heard[0])) <= len(clip_pcm("goforward"))


# what comes back


@pytest.mark.parametrize(
    "answer",
    [
        openai("Go", " forward", " ten meters."),
        vllm("Go", " forward", " ten meters."),
        streams({"text": "Go"}, {"text": " forward"}, {"text": " ten meters."}, done=False),
        streams({"text": "Go"}, {"text": " forward"}, {"text": " ten meters."}),
    ],
    ids=["openai", "vllm", "pieces", "pieces with an end"],
)
async def test_streamed_texts_are_interim(answer: Answer) -> None:
    async with upstream(written=[answer]) as there, remote_asr(there) as engine:
        result = await transcribed(engine, FIRST)
    *interim, settled = result.transcripts
    assert (settled.text, settled.interim) == ("Go forward ten meters.", False)
    assert all(one.interim and "Go forward ten meters.".startswith(one.text) for one in interim)
    assert {one.start_ms for one in interim} <= {settled.start_ms}
    assert result.text == "Go forward ten meters."


async def test_an_interim_text_does_not_wait_for_the_next() -> None:
    goes_on = asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        await goes_on.wait()

    deltas = [{"type": "transcript.text.delta", "delta": delta} for delta in ("Go", " back")]
    end = {"type": "transcript.text.done", "text": "Go forward"}
    async with (
        upstream(written=[streams(deltas[0], wait, deltas[1], end, done=False)]) as there,
        remote_asr(there) as engine,
    ):
        source = open_input(*audio(FIRST))
        source.close()
        outputs = streamed(engine, request_of(source, task=Task.TRANSCRIBE))
        first = await anext(outputs)
        assert isinstance(first, TranscriptOutput)
        assert (first.text, first.interim) == ("Go", True)
        goes_on.set()
        assert (
            "".join(one.text for one in [one async for one in outputs] if isinstance(one, TextOutput)) == "Go forward"
        )


async def test_an_interim_text_that_was_nothing_is_taken_back() -> None:
    async with upstream(written=[openai("Thanks for watching!", done="")]) as there, remote_asr(there) as engine:
        answer = await transcribed(engine, FIRST)
    assert answer.transcript == ""
    assert not answer.transcripts or answer.transcripts[-1] == TranscriptOutput(
        "", start_ms=answer.transcripts[0].start_ms
    )


async def test_times_of_words_are_those_of_the_upstream() -> None:
    told = {"words": [{"word": " Go", "start": 0.1, "end": 0.25}, {"word": "forward", "start": 0.25, "end": 0.6}]}
    async with (
        upstream(written=[writes("Go forward", **told), writes("Ten", words=[{"word": "Ten"}])]) as there,
        remote_asr(there, word_times=True) as engine,
    ):
        assert engine.capabilities.word_times
        answer = await transcribed(engine, silence(0.5) + BOTH_CLIPS)
    first, second = answer.transcripts
    assert first.start_ms
    assert first.words == (
        Word("Go", first.start_ms + 100, first.start_ms + 250),
        Word("forward", first.start_ms + 250, first.start_ms + 600),
    )
    assert second.words == ()
    assert (there.heard[0]["response_format"], there.heard[0]["timestamp_granularities[]"]) == (
        b"verbose_json",
        b"word",
    )
    assert "stream" not in there.heard[0]


@pytest.mark.parametrize(
    "words",
    [
        3,
        [3],
        [{"word": 3, "start": 0, "end": 1}],
        [{"word": "a", "start": 2, "end": 1}],
        [{"word": "a", "start": -1, "end": 1}],
    ],
)
async def test_times_that_cannot_be_are_not_told(words: Any) -> None:
    async with upstream(written=[writes("Go", words=words)]) as there, remote_asr(there, word_times=True) as engine:
        (transcript,) = (await transcribed(engine, FIRST)).transcripts
        assert (transcript.text, transcript.words) == ("Go", ())


@pytest.mark.parametrize("missing", [None, "tokens", "no_speech_prob"])
async def test_segments_and_the_language_are_passed_on(missing: str | None) -> None:
    segment: dict[str, Any] = {"id": 0, "seek": 0, "start": 0.5, "end": 1, "text": " Go", "tokens": [7, 8]}
    segment |= {"temperature": 0.2, "avg_logprob": -0.5, "compression_ratio": 0.7, "no_speech_prob": 0.1}
    segment.pop(missing or "", None)
    written = writes("Go", words=[], language="German", segments=[segment])
    async with upstream(written=[written]) as there, remote_asr(there, word_times=True) as engine:
        (transcript,) = (await transcribed(engine, FIRST)).transcripts
    assert transcript.hearing is not None
    assert transcript.hearing.language == "german"
    assert transcript.start_ms is not None
    assert [(one.text, one.start_ms, one.tokens, one.avg_logprob) for one in transcript.hearing.segments] == (
        [] if missing else [("Go", transcript.start_ms + 500, (7, 8), -0.5)]
    )


async def test_a_server_that_does_not_stream_is_asked_without() -> None:
    refusal = refuses(400, {"error": {"message": "This model does not support streaming.", "param": "stream"}})
    async with upstream(written=[refusal, writes("Go")]) as there, remote_asr(there) as engine:
        assert (await transcribed(engine, BOTH_CLIPS)).transcript == "Go Go"
    assert ["stream" in form for form in there.heard] == [True, False, False]


async def test_a_refusal_of_something_else_does_not_turn_streaming_off() -> None:
    refusal = refuses(400, {"error": {"message": "The upstream refused: no such language."}})
    async with upstream(written=[refusal, writes("Go")]) as there, remote_asr(there) as engine:
        with pytest.raises(InvalidRequest):
            await transcribed(engine, BOTH_CLIPS)
        assert (await transcribed(engine, BOTH_CLIPS)).transcript == "Go Go"
    assert all("stream" in form for form in there.heard)


async def test_limits_of_an_answer() -> None:
    async with upstream(written=[writes("Go forward ten meters")]) as there, remote_asr(there) as engine:
        answer = await transcribed(engine, FIRST, sampling={"max_tokens": 2})
        assert (answer.text, answer.finished.reason) == ("Go forward", FinishReason.LENGTH)
        assert answer.transcript == "Go forward ten meters"
        heard_only = await transcribed(engine, FIRST, modalities=frozenset({OutputModality.AUDIO}))
        assert heard_only.text == ""


# what goes wrong


def plain(body: bytes, content_type: str) -> Answer:
    async def answer(exchange: HttpExchange) -> None:
        await exchange.respond(200, [("Content-Type", content_type)], body)

    return answer


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refuses(500, {"error": {"message": "hush"}}), EngineFailed),
        (refuses(401, {"error": {"message": "hush"}}), EngineFailed),
        (refuses(400, {"error": {"message": "no such language"}}), InvalidValue),
        (refuses(415, {"detail": "no wav"}), UnsupportedFormat),
        (refuses(429, retry_after="60"), EngineOverloaded),
        (cut, EngineFailed),
        (plain(b"go forward", "text/plain"), EngineFailed),
        (plain(b"{]", "application/json"), EngineFailed),
        (plain(b'{"text": 7}', "application/json"), EngineFailed),
        (plain(orjson.dumps({"text": "x" * (1 << 20)}), "application/json"), EngineFailed),
        (streams({"type": "transcript.text.delta", "delta": "Go"}, done=False), EngineFailed),
        (streams({"type": "transcript.text.delta", "delta": "Go"}, cut), EngineFailed),
        (streams({"type": "transcript.text.delta", "delta": "x" * (1 << 20)}, {"text": "y"}), EngineFailed),
        (streams({"error": {"message": "hush", "type": "server_error"}}), EngineFailed),
        (streams(b"data: {]\n\n"), EngineFailed),
        (streams(done=False, headers=SSE), EngineFailed),
    ],
)
async def test_what_breaks(answer: Answer, kind: type[OmniError]) -> None:
    async with upstream(written=[answer]) as there, remote_asr(there) as engine:
        with pytest.raises(kind) as caught:
            await transcribed(engine, FIRST)
        assert "hush" not in caught.value.message


async def test_what_was_not_taken_is_sent_again() -> None:
    async with upstream(written=[refuses(503), writes("Go")]) as there, remote_asr(there) as engine:
        assert (await transcribed(engine, FIRST)).transcript == "Go"
    assert len(there.heard) == 2


async def test_a_server_that_does_not_answer() -> None:
    async with upstream(written=[hang]) as there, remote_asr(there, first_byte_timeout=0.2) as engine:
        with pytest.raises(EngineFailed, match="did not answer"):
            await transcribed(engine, FIRST)
        await there.deserted.wait()


async def test_what_is_no_speech() -> None:
    async with upstream(written=[writes("x")]) as there, remote_asr(there) as engine:
        with pytest.raises(EmptyInput):
            await answered(engine, task=Task.TRANSCRIBE)
        with pytest.raises(UnsupportedModality):
            await answered(engine, InputChunk(Modality.TEXT, b"x"), task=Task.TRANSCRIBE)
    engine = RecogniserEngine(RemoteRecogniser(RemoteAsrSettings(urls=(f"http://127.0.0.1:{free_port()}",))))
    assert engine.state is EngineState.STARTING
    with pytest.raises(EngineFailed, match="not running"):
        await answered(engine, InputChunk(Modality.AUDIO, FIRST), task=Task.TRANSCRIBE)


async def test_cancelling_drops_the_upstreams_work() -> None:
    async with upstream(written=[hang]) as there, remote_asr(there) as engine:
        asked = asyncio.create_task(transcribed(engine, FIRST))
        await there.asked.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(PATIENCE_SEC):
            await there.deserted.wait()


# ahead of the end


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    """All audio comes as it is spoken."""
    monkeypatch.setattr(AudioPace, "is_live", lambda self, audio_ms: True)


def bare(data: bytes) -> bytes:
    """Without the silence around the speech."""
    samples = np.frombuffer(data, "<i2")
    loud = np.flatnonzero(np.abs(samples.astype(int)) > 1500)
    return samples[loud[0] : loud[-1]].tobytes()


async def begun(there: ScriptedUpstream, engine: RecogniserEngine, after: bytes) -> list[EngineOutput]:
    """What is transcribed where the upstream is asked in a pause, before ``after`` comes."""
    source = open_input(*audio(silence(0.5) + bare(FIRST) + silence(0.38), frame_ms=20))
    outputs: list[EngineOutput] = []

    async def read() -> None:
        async with aclosing(streamed(engine, request_of(source, task=Task.TRANSCRIBE))) as answer:
            async for output in answer:
                outputs.append(output)

    reading = asyncio.create_task(read())
    async with asyncio.timeout(PATIENCE_SEC):
        await there.asked.wait()
    for chunk in audio(after, frame_ms=20):
        await source.put(chunk)
    source.close()
    await reading
    return outputs


@pytest.mark.usefixtures("live")
async def test_a_pause_begins_the_transcript() -> None:
    async with upstream(written=[writes("Go")]) as there, remote_asr(there) as engine:
        outputs = await begun(there, engine, silence(1))
    assert [one.text for one in outputs if isinstance(one, TranscriptOutput)] == ["Go"]


@pytest.mark.usefixtures("live")
async def test_a_pause_that_is_not_the_end_is_withdrawn() -> None:
    async with upstream(written=[hang, writes("Go")]) as there, remote_asr(there) as engine:
        outputs = await begun(there, engine, bare(SECOND) + silence(1))
        assert there.deserted.is_set()
    assert {one.text for one in outputs if isinstance(one, TranscriptOutput)} <= {"Go", " Go"}
    assert len(samples_of(there.heard[-1])) > len(samples_of(there.heard[0]))


@pytest.fixture
def transcripts_begun(monkeypatch: pytest.MonkeyPatch) -> list[Transcript]:
    begun: list[Transcript] = []

    class Noted(Transcript):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            begun.append(self)

    monkeypatch.setattr(recogniser_engine, "Transcript", Noted)
    return begun


async def say(source: Input, data: bytes) -> None:
    for chunk in audio(data, frame_ms=20):
        await source.put(chunk)


async def pause_after(speech: bytes, source: Input, transcripts_begun: list[Transcript]) -> None:
    """Speaks, and stays silent until the upstream has written that down, and for two frames more."""
    before = len(transcripts_begun)
    await say(source, speech + silence(0.3))
    await until(lambda: len(transcripts_begun) > before and transcripts_begun[-1].done)
    await say(source, silence(0.04))


@pytest.mark.usefixtures("live")
async def test_the_transcript_of_a_pause_is_a_guess(transcripts_begun: list[Transcript]) -> None:
    source, outputs = open_input(), list[EngineOutput]()
    request = request_of(source, task=Task.TRANSCRIBE, options=AnswerOptions(transcript_guesses=True))
    async with upstream(written=[openai("Go", " forward"), writes("Go ten")]) as there, remote_asr(there) as engine:
        reading = asyncio.create_task(engine.generate(request, EngineAnswer(outputs)))
        await pause_after(silence(0.5) + bare(FIRST), source, transcripts_begun)
        await until(lambda: outputs == [TranscriptGuess("Go forward")])
        await pause_after(bare(SECOND), source, transcripts_begun)
        await until(lambda: [one.text for one in outputs[1:] if isinstance(one, TranscriptGuess)] == ["", "Go ten"])
        source.close()
        await reading
    assert [one.text for one in outputs[3:] if isinstance(one, TranscriptOutput)] == ["Go ten"]


@pytest.mark.usefixtures("live")
async def test_an_answer_is_begun_on_what_a_pause_gave(transcripts_begun: list[Transcript]) -> None:
    source, outputs, outcomes = open_input(), list[EngineOutput](), list[str]()
    llm = RetortEngine()
    async with upstream(written=[writes("Go")]) as there, remote_asr(there) as asr:
        engine = ComposedEngine(llm, asr=asr, think_ahead=True)
        engine.on_speculation = lambda outcome: outcomes.append(outcome.value)
        reading = asyncio.create_task(engine.generate(request_of(source), EngineAnswer(outputs)))
        await pause_after(silence(0.5) + bare(FIRST), source, transcripts_begun)
        await until(lambda: llm.read == "Go")
        source.close()
        await reading
    assert "".join(one.text for one in outputs if isinstance(one, TextOutput)) == "You said Go"
    assert (outcomes, len(there.heard)) == (["used"], 1)


async def test_files_are_not_asked_ahead() -> None:
    async with upstream(written=[writes("Go")]) as there, remote_asr(there) as engine:
        await transcribed(engine, BOTH_CLIPS)
    assert len(there.heard) == 2


@pytest.mark.usefixtures("live")
async def test_servers_are_not_asked_ahead_against_their_operators_will() -> None:
    async with upstream(written=[writes("Go")]) as there, remote_asr(there, speculate=False) as engine:
        await transcribed(engine, BOTH_CLIPS)
    assert len(there.heard) == 2


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost/v1", True),
        ("http://[::1]:8000", True),
        ("https://api.example.com/v1", False),
    ],
)
async def test_which_servers_are_near(url: str, local: bool) -> None:
    one = Upstream(url, RemoteAsrSettings(urls=(url,)))
    assert one.is_local is local
    await one.close()


async def test_what_it_can_do() -> None:
    able = RecogniserEngine(RemoteRecogniser(RemoteAsrSettings(urls=()))).capabilities
    assert able.tasks == {Task.TRANSCRIBE}
    assert able.input_modalities == {Modality.AUDIO}
    assert able.output_modalities == {OutputModality.TEXT, OutputModality.TRANSCRIPT}
    assert (able.extend, able.word_times) == (True, False)
    assert {"en", "de", "yue"} < able.languages
