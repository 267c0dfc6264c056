"""What callers say, rendered once; and the recogniser that listens to what they heard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.inline_workers import loud
from support.real_models import fetched
from support.voices import need

from omni_ws.caller.script import frame_levels
from omni_ws.client.audio import Pcm16, write_wav
from omni_ws.config.model import VoiceChoice
from omni_ws.scenarios.form import ScenarioUnusable
from omni_ws.scenarios.speech import LEVEL_DB, CallersSpeech, CallersVoice, Ears, end_of_speech, recording, word_errors

ESPEAK = CallersVoice("espeak-ng")
TEXT = "One two three four five."
#: Whisper goes round in circles where one sentence is said again and again.
SENTENCES = (
    TEXT,
    "The weather is nice today, and the birds are singing.",
    "Please open the window in the kitchen.",
    "My sister lives in a small house near the river.",
    "We will meet again on Monday morning.",
)


async def test_speech_is_rendered_once_and_heard(tmp_path: Path) -> None:
    need(VoiceChoice.ESPEAK)
    fetched("whisper-tiny-en")
    first, again, ears = CallersSpeech(tmp_path), CallersSpeech(tmp_path), Ears()
    try:
        await first.render([(ESPEAK, TEXT), (ESPEAK, TEXT), (CallersVoice("espeak-ng", "en-us"), TEXT)])
        samples = await first.of(ESPEAK, TEXT)
        assert np.array_equal(await again.of(ESPEAK, TEXT), samples)
        assert (first.rendered, again.rendered) == (2, 0)
        levels = frame_levels(samples, 320)
        power = 10 * np.log10(np.mean(levels[levels > 0.05 * levels.max()] ** 2))
        assert power == pytest.approx(LEVEL_DB, abs=1)
        begin, end = end_of_speech(samples)
        assert (begin <= 2, len(levels) - end) == (True, 3)
        silence = np.zeros(4000, np.float32)
        said = [await first.of(ESPEAK, sentence) for sentence in SENTENCES]
        long = np.concatenate([silence, *(part for one in said * 3 for part in (one, silence))])
        assert len(long) > 28 * 16_000
        assert word_errors(" ".join(SENTENCES * 3), await ears.words(long)).rate < 0.2
        with pytest.raises(ScenarioUnusable, match="unknown voice 'nobody'"):
            await first.of(CallersVoice("espeak-ng", "nobody"), TEXT)
        with pytest.raises(ScenarioUnusable, match="makes no sound"):
            await first.of(ESPEAK, "...")
    finally:
        await first.close()
        ears.close()


def test_a_recording_is_read_at_16_khz(tmp_path: Path) -> None:
    write_wav(tmp_path / "said.wav", Pcm16(loud(400, khz=24), 24_000))
    samples = recording(tmp_path / "said.wav")
    assert len(samples) == 6400
    assert end_of_speech(samples) == (0, 20)
    assert end_of_speech(np.zeros(6400, np.float32)) == (0, 0)
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(ScenarioUnusable, match=r"text\.wav: "):
        recording(tmp_path / "text.wav")


@pytest.mark.parametrize(
    ("text", "voice"),
    [
        ("hibari", CallersVoice("hibari")),
        ("kokoro:af_heart", CallersVoice("kokoro", "af_heart")),
        ("espeak-ng:de", CallersVoice("espeak-ng", "de")),
    ],
)
def test_a_voice_is_a_synthesiser_and_a_name(text: str, voice: CallersVoice) -> None:
    assert CallersVoice.parse(text) == voice
    assert voice.text == text
