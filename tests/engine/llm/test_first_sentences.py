"""What people say first, written and spoken, and what they get for an answer (tests/data/first_sentences.jsonl).

What Whisper hears where a voice says them is stored in tests/data/heard_sentences.jsonl.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_answers import AUDIO, answered, text
from support.real_models import fetched

from omni_ws.audio.pcm import Samples, resampled
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Task
from omni_ws.engine.asr.whisper import WhisperModel
from omni_ws.engine.llm.computed import (
    SAYINGS,
    UNKNOWN,
)
from omni_ws.engine.llm.questions import plain_words
from omni_ws.engine.llm.rules_engine import (
    answer,
    catalogue,
)
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess

NOW = datetime(2031, 3, 4, 15, 7)
ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "first_sentences.jsonl").read_text("utf-8").splitlines()
]
#: Words in a sentence that is still easy to follow by ear.
MOST_WORDS = 20
#: Each sentence, and what Whisper wrote where hibari said it, and another voice, if that is something else.
HEARD: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "heard_sentences.jsonl").read_text("utf-8").splitlines()
]
#: Those of them that are not heard as they were meant.
MISHEARD = {
    "How tall is Mount Everest?": ["How tall is Mount Everest?", "How tall is my turmeric?"],
    "My name is Ann.": ["My name is Anne."],
}
#: Every so manieth of them is really spoken and heard.
HEARD_AGAIN = 30


def reply(said: str) -> str:
    return " ".join(answer(said, (), NOW))


def test_a_first_sentence_is_answered() -> None:
    for row in ROWS:
        said = reply(row["said"])
        if "pattern" in row:
            assert is_answer_to(row, said), (row["said"], said)
        else:
            assert said == row["answer"], row["said"]


def test_as_a_recogniser_writes_it_the_answer_is_the_same() -> None:
    """Without capitals and marks, and with the small words that people begin with."""
    for row in ROWS:
        if "pattern" in row or "12" in row["said"] or row["said"] in CASE_MATTERS:
            continue
        bare = re.sub(r"[^a-z0-9' ]", "", row["said"].lower().replace("%", " percent"))
        for spelled in (bare, f"um {bare}", f"{row['said'].upper()}"):
            assert reply(spelled).lower() == reply(row["said"]).lower(), spelled


#: A name without "my name is", a question by its mark alone, and words that are said back as they were.
CASE_MATTERS = (
    "Hi, I'm Ann.",
    "I'm Sarah, nice to meet you.",
    "This is John speaking.",
    "Sorry?",
    "Just say yes or no: is the earth flat?",
    "Repeat after me: the rain in Spain.",
    "What's 20% of 80?",
)


def test_there_are_enough_and_most_are_understood() -> None:
    assert len(ROWS) >= 60
    assert len({row["said"] for row in ROWS}) == len(ROWS)
    assert sum("unknown" in row for row in ROWS) < len(ROWS) / 6


def test_answers_are_short_plain_and_no_parrots() -> None:
    for row in ROWS:
        said = reply(row["said"])
        assert "you said" not in said.lower()
        assert not re.search(r"[*_#`\[\]<>|{}]", said), said
        assert all(len(sentence.split()) <= MOST_WORDS for sentence in re.split(r"(?<=[.!?]) ", said)), said
        if not re.match(r"repeat|say", row["said"], re.I):
            assert plain_words(said) != plain_words(row["said"]) or row["said"] in ("Hello.", "Goodbye.", "Okay.")


def test_every_wording_is_a_sentence() -> None:
    for intent in catalogue():
        assert intent.says or intent.reply or intent.table
    wordings = [wordings for intent in catalogue() for wordings in (intent.says, intent.otherwise)]
    for says in (*wordings, *map(tuple, SAYINGS.values()), *UNKNOWN.values()):
        for wording in says:
            assert wording[-1] in ".?!}", wording  # what names stand for are sentences, too
            assert not any(wording in other for other in says if other != wording), wording


def is_answer_to(row: dict[str, Any], said: str) -> bool:
    return bool(re.fullmatch(row["pattern"], said)) if "pattern" in row else said == reply(row["said"])


def test_what_whisper_hears_is_answered_as_what_was_said() -> None:
    rows = {row["said"]: row for row in ROWS}
    misheard = {
        row["said"]: row["heard"]
        for row in HEARD
        if not all(is_answer_to(rows[row["said"]], reply(heard)) for heard in row["heard"])
    }
    assert len(HEARD) >= 60
    assert misheard == MISHEARD


@pytest.mark.slow
async def test_whisper_hears_what_is_stored() -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("hibari")
    fetched("hibari")
    model = WhisperModel(fetched("whisper-tiny-en"))
    voice = SpeechEngine(VoiceProcess(VoiceChoice.HIBARI))
    await voice.start()
    try:
        for row in HEARD[::HEARD_AGAIN]:
            heard = model.transcribe(await spoken(voice, row["said"]), words=False).text
            assert plain_words(heard) == plain_words(row["heard"][0])
    finally:
        await voice.stop()


async def spoken(voice: SpeechEngine, sentence: str) -> Samples:
    """The sentence as the voice says it, with some silence around it, at 16 kHz."""
    result = await answered(voice, text(sentence), task=Task.SPEECH, modalities=AUDIO)
    samples = np.concatenate([output.samples for output in result.audio]).astype(np.float32)
    quiet = np.zeros(4000, np.float32)
    return np.concatenate([quiet, resampled(samples, result.audio[0].sample_rate, 16_000), quiet])
