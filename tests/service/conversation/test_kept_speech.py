"""The audio of a request, kept until its words are known."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import AudioFormat, InputChunk, Modality
from omni_ws.core.history import RUN_OVERHEAD_BYTES, Message
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation.request import (
    SPEECH_OVERHEAD_BYTES,
    KeptSpeech,
)

PCM = AudioFormat()
#: 40 ms: one token.
TOKEN = bytes(1280)


def spoken(budget: ByteBudget, *payloads: bytes, max_tokens: int = 100, form: str | None = None) -> KeptSpeech:
    speech = KeptSpeech(PCM, budget, max_tokens=max_tokens)
    for payload in payloads:
        speech.append(InputChunk(Modality.AUDIO, payload, format=form))
    return speech


def message(kept: KeptSpeech) -> Message:
    speech = kept.hand_over(audio_ms=0)
    assert speech is not None
    return Message("user", "", speech=speech)


@pytest.mark.parametrize("name", ["used", "decoded"])
def test_speech_leaves_half_of_the_budget_to_others(name: str) -> None:
    cost = len(TOKEN) + SPEECH_OVERHEAD_BYTES + RUN_OVERHEAD_BYTES
    for free, kept in ((cost, True), (cost - 1, False)):
        budget = ByteBudget(1 << 20)
        setattr(budget, name, budget.capacity // 2 - free)
        assert (spoken(budget, TOKEN).lost is None) is kept


def test_speech_that_no_longer_fits_beside_decoded_media_is_dropped_in_silence() -> None:
    budget = ByteBudget(1 << 20)
    budget.decoded = budget.capacity - 100
    assert spoken(budget, TOKEN).lost == "the server's memory for speech is full"
    assert budget.used == 0


@pytest.mark.parametrize("past", [False, True])
def test_speech_is_kept_up_to_the_length_of_a_history(past: bool) -> None:
    budget = ByteBudget(1 << 20)
    kept = spoken(budget, TOKEN, TOKEN + bytes(2 * past), max_tokens=2)
    assert kept.lost == ("it exceeds the history's token limit" if past else None)
    assert (kept.hand_over(audio_ms=0) is None) is past
    assert (budget.used == 0) is past


@pytest.mark.parametrize("past", [0, 1])
def test_speech_leaves_half_of_what_the_server_may_hold(past: int) -> None:
    budget = ByteBudget(2 * (len(TOKEN) + 256 + 64))
    budget.take(past)
    kept = spoken(budget, TOKEN)
    assert bool(kept.lost) is bool(past)
    assert budget.used == (past or len(TOKEN) + 256 + 64)
    kept.release()
    kept.release()
    assert budget.used == past


@pytest.mark.parametrize("past", [False, True])
def test_bytes_of_the_speech_of_a_request_are_bounded(past: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.service.conversation.request.MAX_SPEECH_BYTES", len(TOKEN) + 256 + 64 - past)
    assert bool(spoken(ByteBudget(1 << 20), TOKEN).lost) is past


@pytest.mark.parametrize("past", [False, True])
def test_the_length_that_an_engine_decoded_counts_where_it_is_more(past: bool) -> None:
    budget = ByteBudget(1 << 20)
    speech = spoken(budget, bytes(320), max_tokens=100, form="audio/ogg").hand_over(audio_ms=4000 + past)
    assert (speech is None) is past
    assert speech is None or speech.audio_ms == 4000
    assert (budget.used == 0) is past


def test_tiny_chunks_cost_no_more_than_their_bytes() -> None:
    budget = ByteBudget(1 << 20)
    speech = message(spoken(budget, *[b"x"] * 1280)).speech
    assert speech is not None
    assert [chunk.payload for chunk in speech.chunks] == [b"x" * 1280]
    assert budget.used == 1280 + 256


def test_nothing_is_kept_for_a_history_that_is_off() -> None:
    assert KeptSpeech.of(Ledger(0, ByteBudget(1)), PCM, unwanted=None) is None
