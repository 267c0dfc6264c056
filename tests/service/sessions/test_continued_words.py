"""The words of an answer that goes on in another server: each is told once, wherever its sound was cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.moving_session import Telling, WordyVoice, chunks_of, final_of, told
from support.scripted_engines import RetortEngine

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Word
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.sessions.factory import FILE_FORMATS

REPLY = "It sleeps, as most foxes do. It eats 12 mice. So it is."
WORDS = ["It", "sleeps", "as", "most", "foxes", "do", "It", "eats", "12", "mice", "So", "it", "is"]
QUESTION = InputChunk(Modality.TEXT, b"Tell me of the fox.", 0, end_of_input=True)
VARY_MS = 22


def config_of(form: str = "pcm16") -> dict[str, Any]:
    return {"modalities": ["text", "audio"], "output_audio": {"format": form, "sample_rate": 24_000}}


async def composed(voice: WordyVoice) -> ComposedEngine:
    engine = ComposedEngine(RetortEngine(REPLY), tts=SpeechEngine(voice))
    await engine.start()
    return engine


def words_of(received: list[ServerMessage]) -> list[Word]:
    return [word for one in chunks_of(received, OutputModality.AUDIO) for word in one.words]


def at_piece(pieces: int) -> Callable[[list[ServerMessage]], bool]:
    return lambda received: len(chunks_of(received, OutputModality.AUDIO)) == pieces


def check_words(received: list[ServerMessage]) -> None:
    """Each word is told once, in order, and behind what was read before it."""
    assert final_of(received).finish_reason is FinishReason.STOP
    words = words_of(received)
    assert [word.text for word in words] == WORDS
    ends = [word.text_end or 0 for word in words]
    assert ends == [match.end() for match in re.finditer(r"\S+", REPLY)]
    starts = [word.start_ms for word in words]
    assert starts == sorted(starts)


@pytest.mark.parametrize(
    ("telling", "rate"),
    [*((telling, 22_050) for telling in Telling), (Telling.ENDED, 24_000), (Telling.LAST, 24_000)],
    ids=lambda value: value.name.lower() if isinstance(value, Telling) else str(value),
)
async def test_every_word_is_told_once_wherever_the_sound_is_cut(telling: Telling, rate: int) -> None:
    """At every piece: with a resampler, whose sound comes a little late, and without one."""
    steady = await composed(WordyVoice(telling, vary_ms=0, rate=rate))
    stays = await told(steady, QUESTION, config=config_of())
    check_words(stays)
    usual = words_of(stays)
    for pieces in range(1, len(chunks_of(stays, OutputModality.AUDIO)) + 1):
        varies = await composed(WordyVoice(telling, vary_ms=VARY_MS, rate=rate, seed=pieces))
        moved = await told(steady, QUESTION, config=config_of(), moves=at_piece(pieces), other=varies)
        check_words(moved)
        for word, other in zip(words_of(moved), usual, strict=True):
            assert abs(word.start_ms - other.start_ms) <= 4 * VARY_MS


@pytest.mark.parametrize("form", ["opus", "mp3"])
async def test_every_word_is_told_once_in_compressed_sound(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which most pieces of a voice make no bytes of their own. Sessions over HTTP have it."""
    monkeypatch.setattr("omni_ws.service.sessions.session.STREAM_FORMATS", FILE_FORMATS)
    steady = await composed(WordyVoice(Telling.ENDED, vary_ms=0))
    stays = await told(steady, QUESTION, config=config_of(form))
    check_words(stays)
    for pieces in range(1, len(chunks_of(stays, OutputModality.AUDIO)) + 1):
        varies = await composed(WordyVoice(Telling.ENDED, vary_ms=VARY_MS, seed=pieces))
        check_words(await told(steady, QUESTION, config=config_of(form), moves=at_piece(pieces), other=varies))


async def test_words_behind_all_sound_come_alone() -> None:
    received = await told(await composed(WordyVoice(Telling.LAST, rate=24_000)), QUESTION, config=config_of())
    *earlier, before, last = chunks_of(received, OutputModality.AUDIO)
    assert [word.text for word in last.words] == ["So", "it", "is"]
    assert not last.payload
    assert all(one.payload for one in (*earlier, before))
    assert before.start_ms is not None
    assert last.start_ms == pytest.approx(before.start_ms + len(before.payload) / 48, abs=1)
