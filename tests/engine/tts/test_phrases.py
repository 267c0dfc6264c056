"""The first phrase of an answer that a model writes slowly, as ``clause_by_clause`` has it spoken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np
import pytest
from support.engine_answers import open_input, request_of

from omni_ws.core.chunks import Task, Word
from omni_ws.engine.base import AudioOutput, EngineOutput, GenerationRequest, OutputWriter
from omni_ws.engine.clauses import PHRASE_GRACE
from omni_ws.engine.tts.speech_engine import PHRASE_PAUSE_MS, clause_by_clause

pytestmark = [pytest.mark.virtual_clock]

RATE = 1000
WRITTEN = ("The sky looks blue today because air scatters ", "light", ".")


async def slowly(pieces: tuple[str, ...] = WRITTEN) -> AsyncGenerator[str, None]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(1)


def sound(*lengths: int) -> np.ndarray:
    """Silence and sound in turns, sound first; so many samples of each."""
    return np.concatenate([np.full(length, 0.5 * (n % 2 == 0), np.float32) for n, length in enumerate(lengths)])


class Voice:
    """Tells what it has said, and when: 300 ms of sound with a pause in it, and 400 ms of silence, in three pieces."""

    def __init__(self, audio: np.ndarray) -> None:
        self.said: list[tuple[str, float]] = []
        self.audio = audio

    async def speak(self, text: str) -> AsyncGenerator[AudioOutput, None]:
        self.said.append((text, asyncio.get_running_loop().time()))
        for number, samples in enumerate(np.array_split(self.audio, 3)):
            yield AudioOutput(samples, RATE, () if number else (Word(text.split()[0], 10, 20),))


class Written(OutputWriter):
    def __init__(self) -> None:
        self.outputs: list[AudioOutput] = []

    full = False

    def write(self, output: EngineOutput) -> None:
        assert isinstance(output, AudioOutput)
        self.outputs.append(output)

    async def drain(self) -> None:
        pass


def request() -> GenerationRequest:
    """One whose text comes from a model: no client is sending it."""
    source = open_input()
    source.close()
    return request_of(source, task=Task.SPEECH)


@pytest.mark.parametrize("audio", [sound(100, 150, 50, 400), sound(100, 20, 100, 0), sound(0, 200)])
async def test_a_phrase_is_spoken_at_once_as_by_somebody_who_goes_on(audio: np.ndarray) -> None:
    voice, out, began = Voice(audio), Written(), asyncio.get_running_loop().time()
    await clause_by_clause(request(), slowly(), out, voice.speak, language="en")
    (first, first_at), (second, second_at) = voice.said
    assert (first, second) == ("The sky looks blue today,", "because air scatters light.")
    assert first_at - began == pytest.approx(PHRASE_GRACE)
    assert second_at - began >= 2
    heard = np.concatenate([piece.samples for piece in out.outputs])
    sounding = np.flatnonzero(audio)
    end = int(sounding[-1]) + 1 if len(sounding) else 0
    kept = min(len(audio), end + int(PHRASE_PAUSE_MS))
    assert np.array_equal(heard, np.concatenate((audio[:kept], audio)))
    assert [(word.text, word.start_ms) for piece in out.outputs for word in piece.words] == [
        ("The", 10),
        ("because", kept + 10),
    ]


async def test_a_mark_that_is_there_is_the_tone() -> None:
    voice = Voice(sound(9))
    text = slowly(("In a word, the sky is blue; and so ", "on."))
    await clause_by_clause(request(), text, Written(), voice.speak, language="en")
    assert [said for said, _ in voice.said] == ["In a word, the sky is blue;", "and so on."]


@pytest.mark.parametrize(("language", "slow"), [("de", False), ("", False), ("en", True)])
async def test_a_slow_voice_and_other_languages_wait_for_the_sentence(language: str, slow: bool) -> None:
    voice = Voice(sound(9))
    await clause_by_clause(request(), slowly(), Written(), voice.speak, language=language, slow=slow)
    assert [said for said, _ in voice.said] == ["".join(WRITTEN)]
