"""Speech recognition by Whisper on vLLM: its words are those of transformers, also over HTTP, and languages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio
from support.engine_answers import answered, audio, collect, open_input
from support.live_server import live_server
from support.patience import until
from support.speech_clips import WORDS, clip_bytes, clip_pcm, clip_samples, silence

from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import Task
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.base import AnswerOptions, EngineState
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine.vllm.recogniser import VllmRecogniser

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]

ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 128 << 20,
    "max_num_seqs": 4,
    "use_tqdm_on_load": False,
    "skip_mm_profiling": True,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    from support.real_models import whisper_tiny_en

    return whisper_tiny_en()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(folder: Path) -> AsyncIterator[RecogniserEngine]:
    engine = RecogniserEngine(VllmRecogniser(str(folder), ARGS))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[str], str]:
    """Whisper in transformers: the words of samples."""
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    processor = WhisperProcessor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)

    def transcribe(name: str) -> str:
        features = processor(clip_samples(name), sampling_rate=16_000, return_tensors="pt").input_features
        with torch.no_grad():
            tokens = model.generate(features, max_new_tokens=200)
        return str(processor.batch_decode(tokens, skip_special_tokens=True)[0]).strip()

    return transcribe


def words(text: str) -> str:
    """Without punctuation, and with the digits that Whisper prefers spelled out."""
    spelled = text.lower().replace("mr.", "mister")
    for digit, word in {"10": "ten", "8": "eight", "4": "four", "7": "seven"}.items():
        spelled = re.sub(rf"\b{digit}\b", word, spelled)
    return " ".join(re.findall(r"[a-z]+", spelled))


async def test_what_it_can_do(engine: RecogniserEngine) -> None:
    able = engine.capabilities
    assert able.tasks == {Task.TRANSCRIBE}
    assert able.languages == {"en"}
    assert not able.word_times
    assert not able.translates
    assert engine.state is EngineState.OK


@pytest.mark.parametrize("name", ["goforward", "cards_001", "librivox_ss_0870"])
async def test_words_are_those_of_transformers(
    engine: RecogniserEngine, reference: Callable[[str], str], name: str
) -> None:
    assert isinstance(engine.recogniser, VllmRecogniser)
    text = await engine.recogniser.transcribe(clip_pcm(name), language=None)
    assert text == await asyncio.to_thread(reference, name)
    assert words(text) == WORDS[name]


async def test_audio_is_not_prepared_on_the_event_loop(engine: RecogniserEngine) -> None:
    assert isinstance(engine.recogniser, VllmRecogniser)
    with patch.object(engine.recogniser.llm.renderer, "render_cmpl", side_effect=AssertionError):
        text = await engine.recogniser.transcribe(clip_pcm("goforward"), language=None)
    assert words(text) == WORDS["goforward"]


async def test_what_is_expected_is_heard(engine: RecogniserEngine) -> None:
    assert isinstance(engine.recogniser, VllmRecogniser)
    assert engine.capabilities.keywords
    pieces = clip_bytes("librivox_ss_0870") + silence(1)
    heard = await answered(engine, *audio(pieces), task=Task.TRANSCRIBE, expected="Jon Dashwoode.")
    assert "Dashwoode had" in heard.text
    # Of much, the end counts; none of it is a token that means something, and the text has room behind it.
    much = "Zyntrix Kwillfoss <|endoftext|> " * 200 + "Jon Dashwoode."
    before = engine.recogniser._before(much)
    tokenizer = engine.recogniser.llm.get_tokenizer()
    tokens = tokenizer.encode(before, add_special_tokens=False)
    assert [token for token in tokens if token >= tokenizer.eos_token_id] == tokens[:1]
    assert (tokenizer.decode(tokens[:1]), before.endswith(" Jon Dashwoode.")) == ("<|startofprev|>", True)
    assert 200 < len(tokens) < 224
    await engine.recogniser.transcribe(clip_pcm("librivox_ss_0870"), language=None, expected=much)


async def test_utterances_are_settled_one_by_one(engine: RecogniserEngine) -> None:
    pieces = clip_bytes("goforward") + silence(1.5) + clip_bytes("goforward") + silence(1)
    answer = await answered(engine, *audio(pieces), task=Task.TRANSCRIBE)
    settled = [transcript for transcript in answer.transcripts if not transcript.interim]
    assert [words(transcript.text) for transcript in settled] == [WORDS["goforward"]] * 2
    begins = [transcript.start_ms or 0 for transcript in settled]
    assert begins[0] < 1000 < begins[1]
    assert words(answer.text) == f"{WORDS['goforward']} {WORDS['goforward']}"
    assert answer.finished.usage.input_audio_ms == round(len(pieces) / 32)


async def test_silence_has_no_words(engine: RecogniserEngine) -> None:
    answer = await answered(engine, *audio(silence(2)), task=Task.TRANSCRIBE)
    assert answer.transcripts == []
    assert answer.text == ""


async def test_a_request_that_is_cancelled_frees_its_seat(engine: RecogniserEngine) -> None:
    source = open_input(*audio(clip_bytes("goforward")))
    task = asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE))
    slots = engine.recogniser.slots
    await until(lambda: slots.taken == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (engine.active_requests, slots.taken) == (0, 0)


async def test_a_file_over_http(engine: RecogniserEngine) -> None:
    """The last test of this engine: a server stops what it serves."""
    import openai

    recording = Path(__file__).parents[2] / "data" / "goforward.wav"
    whole = ComposedEngine(RulesEngine(), asr=engine)
    async with live_server(whole, still_answers=False) as server:
        base_url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            said = await client.audio.transcriptions.create(model="whisper-1", file=recording, language="en")
            assert words(said.text) == WORDS["goforward"]
            with pytest.raises(openai.BadRequestError) as refused:
                await client.audio.transcriptions.create(model="whisper-1", file=recording, response_format="srt")
            assert refused.value.param == "response_format"


async def test_a_multilingual_model_is_told_the_language_that_it_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for a request. Its words are noise, as its weights are."""
    from support.tiny_models import build_whisper

    prompts: list[str] = []
    detected: list[str] = []
    prompt, language_of = VllmRecogniser._prompt, VllmRecogniser.language_of

    def noted(self: VllmRecogniser, *arguments: Any) -> Any:
        made = prompt(self, *arguments)
        prompts.append(made["decoder_prompt"]["prompt"])
        return made

    async def detecting(self: VllmRecogniser, *arguments: Any, **given: Any) -> str:
        detected.append(await language_of(self, *arguments, **given))
        return detected[-1]

    engine = RecogniserEngine(VllmRecogniser(str(build_whisper(tmp_path / "whisper")), {**ARGS, "max_num_seqs": 2}))
    await engine.start()
    try:
        assert {"en", "de", "zh"} <= engine.capabilities.languages
        monkeypatch.setattr(VllmRecogniser, "_prompt", noted)
        monkeypatch.setattr(VllmRecogniser, "language_of", detecting)
        pieces = clip_bytes("goforward") + silence(1.5)
        await answered(engine, *audio(pieces + pieces), task=Task.TRANSCRIBE)
        await answered(engine, *audio(pieces), task=Task.TRANSCRIBE, language="de")
        options = AnswerOptions(translate=True)
        await answered(engine, *audio(pieces), task=Task.TRANSCRIBE, language="de", options=options)
        assert engine.capabilities.translates
    finally:
        await engine.stop()
    assert len(detected) == 1
    assert detected[0] in engine.capabilities.languages
    asked = [(detected[0], "transcribe")] * 2 + [("de", "transcribe"), ("de", "translate")]
    assert prompts == [f"<|startoftranscript|><|{one}|><|{task}|><|notimestamps|>" for one, task in asked]


async def test_a_model_that_does_not_transcribe_is_refused(tmp_path: Path) -> None:
    from support.tiny_models import ENGINE_ARGS, build_text_model

    engine = RecogniserEngine(VllmRecogniser(str(build_text_model(tmp_path)), ENGINE_ARGS))
    with pytest.raises(ConfigurationError, match="does not write speech down"):
        await engine.start()
    assert engine.state is EngineState.STARTING
