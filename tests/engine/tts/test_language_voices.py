"""Which voice speaks which language, with the synthesisers themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import streamed
from support.real_models import fetched

from benchmarks.speech.hearing import whole_request
from omni_ws.audio.pcm import as_samples
from omni_ws.config import ConfigurationError, load
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import InputChunk, Modality, Task
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.base import AudioOutput, GenerationRequest
from omni_ws.engine.tts import voice_process
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import LanguageVoices, VoiceProcess
from omni_ws.engine_choice import tts_of, voice_table
from omni_ws.errors import EngineFailed, InvalidValue

pytest.importorskip("espeakng_loader")
pytest.importorskip("unicode_rbnf")

pytestmark = pytest.mark.asyncio(loop_scope="module")


def asked(text: str, **fields: Any) -> GenerationRequest:
    return replace(whole_request(Task.SPEECH, [InputChunk(Modality.TEXT, text.encode())]), **fields)


async def spoken(engine: SpeechEngine, request: GenerationRequest) -> list[AudioOutput]:
    return [output async for output in streamed(engine, request) if isinstance(output, AudioOutput)]


class NotingVoice(VoiceProcess):
    """A real voice that notes what it says with which of its voices."""

    def __init__(self, choice: VoiceChoice) -> None:
        super().__init__(choice)
        self.said: list[tuple[str | None, str]] = []

    def say(self, text: str, *, voice: str | None = None, speed: float = 1.0) -> AsyncGenerator[AudioOutput, None]:
        self.said.append((voice, text))
        return super().say(text, voice=voice, speed=speed)


@pytest.mark.parametrize(
    ("argv", "table"),
    [
        ((), {}),
        (("--languages", "en"), {}),
        (("--languages", "en,es,de"), {"es": ("kokoro:ef_dora", "espeak:es"), "de": ("espeak:de",)}),
        (("--languages", "fr", "--tts", "espeak"), {"fr": ("espeak:fr-fr", "kokoro:ff_siwis")}),
        (("--languages", "es", "--tts.voices", '{"es": "espeak:es-419"}'), {"es": ("espeak:es-419",)}),
        (("--languages", "es", "--tts", "none"), {}),
        (("--languages", "es", "--embedded.voice", "none"), {}),
        (("--languages", "es", "--tts", "http://127.0.0.1:9/v1"), {}),
    ],
)
async def test_the_table(argv: tuple[str, ...], table: dict[str, tuple[str, ...]]) -> None:
    config = load(argv).config
    assert voice_table(config) == table


async def test_without_languages_the_voice_is_as_it_was() -> None:
    engine = tts_of(load(("--tts", "espeak")).config)
    assert isinstance(engine, SpeechEngine)
    assert isinstance(engine.voice, VoiceProcess)


@pytest.mark.parametrize(
    "voices", ['{"es": "dora"}', '{"es": "hibari:x"}', '{"es": "espeak:"}', '{"es-MX": "espeak:es"}']
)
async def test_a_voice_that_is_none_is_refused(voices: str) -> None:
    with pytest.raises(ConfigurationError, match=r"tts\.voices"):
        load(("--tts.voices", voices))


@pytest.fixture(scope="module")
def voice() -> NotingVoice:
    return NotingVoice(VoiceChoice.ESPEAK)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(voice: NotingVoice) -> AsyncIterator[SpeechEngine]:
    """English by espeak-ng's usual voice, German and French by others of it, all in one process."""
    engine = SpeechEngine(LanguageVoices(voice, {"de": ("espeak:de",), "fr": ("espeak:fr-fr",)}))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({}, "English (America)"),
        ({"speech_language": "de"}, "German"),
        # The first voice, which a client has that names none.
        ({"speech_language": "de", "voice": "English (America)"}, "German"),
        ({"speech_language": "fr"}, "French (France)"),
        ({"speech_language": "fr", "voice": "French (Belgium)"}, "French (Belgium)"),
        ({"speech_language": "de", "voice": "French (Belgium)"}, "German"),
        ({"voice": "French (Belgium)"}, "French (Belgium)"),
        ({"speech_language": "en"}, "English (America)"),
        ({"speech_language": "en", "voice": "English (Scotland)"}, "English (Scotland)"),
        # Not in the table, but the base speaks it.
        ({"speech_language": "nl"}, "Dutch"),
    ],
)
async def test_who_speaks(engine: SpeechEngine, voice: NotingVoice, fields: dict[str, str], chosen: str) -> None:
    assert await spoken(engine, asked("Ja.", **fields))
    assert voice.said[-1] == (chosen, "Ja.")


@pytest.mark.parametrize(("argv", "default"), [("es,fr", "es"), ("fr,en", "en"), ("nl,es", "nl")])
async def test_without_english_the_first_language_has_the_default_voice(argv: str, default: str) -> None:
    engine = tts_of(load(("--languages", argv, "--tts", "espeak")).config)
    assert isinstance(engine, SpeechEngine)
    assert isinstance(engine.voice, LanguageVoices)
    await engine.start()
    try:
        able, base = engine.capabilities, engine.voice._base
        assert primary_subtag(able.voice_languages[able.voices[0]]) == default
        said: list[str | None] = []

        def say(text: str, *, voice: str | None = None, speed: float = 1.0) -> AsyncGenerator[AudioOutput, None]:
            said.append(voice)
            return VoiceProcess.say(base, text, voice=voice, speed=speed)

        base.say = say  # type: ignore[method-assign]
        for fields in ({}, {"speech_language": "es"}, {"voice": "English (Scotland)"}):
            await spoken(engine, asked("Nada.", **fields))
        assert [primary_subtag(base.languages[name or base.voices[0]]) for name in said] == [default, "es", "en"]
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    "argv", [("--tts", "espeak", "--tts.voice", "German"), ("--tts", "espeak", "--embedded.default-voice", "German")]
)
async def test_a_voice_that_the_operator_named_stays_the_default(argv: tuple[str, ...]) -> None:
    engine = tts_of(load(("--languages", "es", *argv)).config)
    assert isinstance(engine, SpeechEngine)
    await engine.start()
    await engine.stop()
    assert engine.capabilities.voices[0] == "German"


async def test_a_reader_stops_after_those_for_which_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    voices = LanguageVoices(VoiceProcess(VoiceChoice.HIBARI), {"es": ("kokoro:ef_dora",)})
    voices._process(VoiceChoice.KOKORO)
    stopped: list[VoiceChoice] = []

    async def stop(process: VoiceProcess) -> None:
        stopped.append(process.kind)

    monkeypatch.setattr(VoiceProcess, "stop", stop)
    await voices.stop()
    assert stopped == [VoiceChoice.KOKORO, VoiceChoice.ESPEAK, VoiceChoice.HIBARI]


async def test_numbers_are_read_in_the_language_and_keep_their_place(engine: SpeechEngine, voice: NotingVoice) -> None:
    outputs = await spoken(engine, asked("Es kostet 3,50 € am 15.03.2024.", speech_language="de"))
    said = "Es kostet drei Euro fünfzig am fünfzehnten März zweitausendvierundzwanzig."
    assert voice.said[-1] == ("German", said)
    timed = [word for output in outputs for word in output.words]
    assert [word.text for word in timed] == ["Es", "kostet", "3,50 €", "am", "15.03.2024"]
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(timed))


async def test_capabilities_and_description_tell_the_languages(engine: SpeechEngine) -> None:
    assert {"en", "de", "fr"} <= engine.capabilities.speech_languages
    assert engine.capabilities.voice_aliases["fr"] == "French (France)"
    assert "voice for de: German (espeak-ng)" in engine.describe()


async def test_an_unknown_voice_is_refused(engine: SpeechEngine) -> None:
    with pytest.raises(InvalidValue, match="unknown voice 'ef_dora'"):
        await spoken(engine, asked("Hola.", voice="ef_dora"))


async def test_without_kokoro_espeak_speaks_and_the_start_says_why(no_weights: None) -> None:
    voices = LanguageVoices(VoiceProcess(VoiceChoice.ESPEAK), {"es": ("kokoro:ef_dora", "espeak:es")})
    await voices.start()
    try:
        (line,) = (line for line in voices.describe() if line.startswith("voice for es"))
        assert line.startswith("voice for es: Spanish (Spain) (espeak-ng); not kokoro:ef_dora: no voice kokoro: ")
        assert list(voices._processes) == [VoiceChoice.ESPEAK, VoiceChoice.KOKORO]
        assert voices._processes[VoiceChoice.KOKORO].worker_pid is None
    finally:
        await voices.stop()


async def test_a_voice_that_the_operator_named_has_to_start(no_weights: None) -> None:
    table = {"es": ("kokoro:ef_dora",)}
    voices = LanguageVoices(VoiceProcess(VoiceChoice.ESPEAK), table, required=table)
    with pytest.raises(EngineFailed, match="no voice for es: kokoro:ef_dora: no voice kokoro: its weights"):
        await voices.start()
    await voices.stop()


async def test_a_language_that_espeak_does_not_speak() -> None:
    table = {"xx": ("espeak:xx",)}
    voices = LanguageVoices(VoiceProcess(VoiceChoice.ESPEAK), table)
    await voices.start()
    assert "xx" not in voices.capabilities.speech_languages
    assert "no voice for xx: espeak:xx: espeak-ng has no voice 'xx'" in voices.describe()
    await voices.stop()
    required = LanguageVoices(VoiceProcess(VoiceChoice.ESPEAK), table, required=table)
    with pytest.raises(EngineFailed, match="no voice for xx: espeak:xx: espeak-ng has no voice 'xx'"):
        await required.start()
    await required.stop()


async def test_a_lexicon_is_read_where_only_the_table_has_voices() -> None:
    voices = LanguageVoices(VoiceProcess(VoiceChoice.NONE), {"es": ("espeak:es",)})
    assert not voices.capabilities.lexicon
    await voices.start()
    try:
        assert voices.capabilities.lexicon
    finally:
        await voices.stop()


@pytest.mark.slow
async def test_kokoro_speaks_spanish_with_the_phonemes_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("hibari", "onnxruntime"):
        pytest.importorskip(package)
    fetched("kokoro")
    fetched("kokoro-languages")
    monkeypatch.setattr(voice_process, "SLOWEST_PACE", 100.0)  # other tests run at the same time
    table = {"es": ("kokoro:ef_dora", "espeak:es"), "de": ("espeak:de",)}
    engine = SpeechEngine(LanguageVoices(VoiceProcess(VoiceChoice.ESPEAK), table))
    await engine.start()
    try:
        voices = engine.voice
        assert isinstance(voices, LanguageVoices)
        assert set(voices._processes) == {VoiceChoice.ESPEAK, VoiceChoice.KOKORO}
        outputs = await spoken(engine, asked("¿Son 21 €? Sí, señor.", speech_language="es"))
        words = [word for output in outputs for word in output.words]
        assert [word.text for word in words] == ["Son", "21 €", "Sí", "señor"]
        samples = np.concatenate([as_samples(output.samples) for output in outputs])
        assert {output.sample_rate for output in outputs} == {24_000}
        assert words[-1].end_ms <= len(samples) / 24
        loudness = [float(np.abs(samples[word.start_ms * 24 : word.end_ms * 24]).max()) for word in words]
        assert min(loudness) > 0.02
        # An English voice of Kokoro's reads English itself, and a client may name any Spanish one.
        assert {"em_alex", "ef_dora"} <= set(engine.capabilities.voices)
        assert "af_heart" not in engine.capabilities.voices
    finally:
        await engine.stop()
