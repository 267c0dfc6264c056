"""A conversation in three languages, over a socket: real speech, and the real Whisper base."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import answered
from support.engine_answers import text as typed
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.real_models import fetched
from support.scripted_engines import RetortEngine, ToneEngine
from support.speech_clips import SAMPLE_RATE, clip_bytes
from support.voices import need

from omni_ws.audio.pcm import as_samples, pcm16_from_samples, resampled
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import OutputModality, Task
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.rules_engine import RulesEngine, RulesFirst
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess

pytest.importorskip("ctranslate2")
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LANGUAGES = frozenset({"en", "es", "de"})
SAID = {
    "es": "Por favor, quiero una mesa cerca de la ventana.",
    "de": "Guten Morgen, ich hätte gern einen Tisch am Fenster.",
}
NOTES = {"en": "", "es": "\n(The user speaks Spanish.)", "de": "\n(The user speaks German.)"}


async def said_by_espeak(text: str, language: str) -> bytes:
    """pcm16 at 16 kHz, with the silence in which a speaker has ended."""
    voice = SpeechEngine(VoiceProcess(need(VoiceChoice.ESPEAK)))
    await voice.start()
    try:
        speaks = voice.capabilities.voice_aliases[language]
        answer = await answered(
            voice, typed(text), task=Task.SPEECH, modalities=frozenset({OutputModality.AUDIO}), voice=speaks
        )
    finally:
        await voice.stop()
    sound = np.concatenate([as_samples(one.samples) for one in answer.audio])
    heard = resampled(sound, answer.audio[0].sample_rate, SAMPLE_RATE)
    return pcm16_from_samples(np.concatenate([heard, np.zeros(SAMPLE_RATE // 2, np.float32)])).tobytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speech() -> dict[str, bytes]:
    spoken = {language: await said_by_espeak(text, language) for language, text in SAID.items()}
    return spoken | {"en": clip_bytes("librivox_ss_0870")}


@pytest.fixture(scope="module")
def llm() -> RetortEngine:
    return RetortEngine("as you say")


@pytest.fixture(scope="module")
def voice() -> ToneEngine:
    return ToneEngine(speech_languages=LANGUAGES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(llm: RetortEngine, voice: ToneEngine) -> AsyncIterator[LiveServer]:
    fetched("whisper-base")
    asr = RecogniserEngine(WhisperRecogniser("base", languages=LANGUAGES))
    async with live_server(ComposedEngine(RulesFirst(llm), asr=asr, tts=voice)) as running:
        yield running


async def test_a_conversation_changes_its_language_twice(
    server: LiveServer, speech: dict[str, bytes], llm: RetortEngine, voice: ToneEngine
) -> None:
    order = ("en", "es", "es", "de")
    heard: list[str] = []
    async with native_client(server) as client:
        await client.configure(input_audio={"language": "auto"})
        for language in order:
            await client.chunk(speech[language], modality="audio", end=True)
            answer = await client.answer()
            settled = [one for one in answer.chunks if one["modality"] == "transcript" and not one.get("interim")]
            assert [one["language"] for one in settled] == [language], settled
            heard.append("".join(one["text"] for one in settled))
    assert "ventana" in heard[1]
    assert "Tisch am Fenster" in heard[3]
    assert [request.speech_language for request in voice.requests] == list(order)
    # The model is told where the language changes, and in the history the notes stay.
    read = [message.text for message in llm.requests[-1].history if message.role == "user"]
    assert read == [heard[0], heard[1] + NOTES["es"], heard[2]]
    assert llm.read == heard[3] + NOTES["de"]


async def test_detection_may_be_limited_by_a_client(server: LiveServer, speech: dict[str, bytes]) -> None:
    async with native_client(server) as client:
        await client.configure(input_audio={"languages": ["de-AT"]})
        await client.chunk(speech["de"], modality="audio", end=True)
        answer = await client.answer()
        assert [one["language"] for one in answer.chunks if one["modality"] == "transcript"] == ["de"]
        await client.send("session_config", input_audio={"languages": ["fr"]})
        assert (await client.error())["param"] == "input_audio.languages"


async def test_the_rules_answer_in_one_sentence_of_the_language(speech: dict[str, bytes]) -> None:
    asr = RecogniserEngine(WhisperRecogniser("base", languages=["de"]))
    fetched("whisper-base")
    async with live_server(ComposedEngine(RulesEngine(), asr=asr)) as server, native_client(server) as client:
        assert client.created["capabilities"]["languages"] == ["de"]
        await client.chunk(speech["de"], modality="audio", end=True)
        assert (await client.answer()).text == "Entschuldigung, ich kann nur auf Englisch antworten."
