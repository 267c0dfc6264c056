"""What is kept of earlier turns."""

from __future__ import annotations

import pytest

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import Message
from omni_ws.service.conversation.history import History
from omni_ws.service.conversation.kept_speech import KeptSpeech, held_bytes
from omni_ws.service.conversation.request import MAX_KEPT_TEXT, KeptText


def test_oldest_turns_make_room() -> None:
    history = History(4, ByteBudget(1 << 20))
    history.add([Message("user", "one two"), Message("assistant", "three four")])
    assert [message.text for message in history.messages] == ["one two", "three four"]
    history.add([Message("user", "five")])
    assert [message.text for message in history.messages] == ["five"]
    history.add([Message("user", "a b c d e")])
    assert history.messages == ()
    history.add([Message("user", "a b c d")])
    assert len(history.messages) == 1


def test_messages_without_text_say_nothing() -> None:
    history = History(4, ByteBudget(1 << 20))
    history.add([Message("user", ""), Message("assistant", "hello")])
    assert [message.role for message in history.messages] == ["assistant"]


def test_history_may_be_turned_off() -> None:
    history = History(0, ByteBudget(1 << 20))
    history.add([Message("user", "hello")])
    assert history.messages == ()


def test_kept_text_is_bounded() -> None:
    text = KeptText()
    for _ in range(3):
        text.append("x" * (MAX_KEPT_TEXT // 2 + 1))
    text.append("")
    assert len(text.joined()) == MAX_KEPT_TEXT
    text.append("more")
    assert text.joined().endswith("x")
    words = KeptText()
    words.append("one")
    words.append("two")
    assert words.joined(" ") == "one two"


def test_what_was_said_can_turn_out_to_be_less() -> None:
    history = History(100, ByteBudget(1 << 20))
    said = Message("assistant", "one two three")
    history.add([said, Message("user", "again"), said])
    history.replace(said, Message("assistant", "one"))
    assert [message.text for message in history.messages] == ["one two three", "again", "one"]
    history.replace(said, Message("assistant", ""))
    assert [message.text for message in history.messages] == ["again", "one"]
    history.replace(said, Message("assistant", "nothing"))
    assert len(history.messages) == 2
    history.add([Message("user", "x " * 98)])
    assert [message.text for message in history.messages][:2] == ["again", "one"]


# speech

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


def test_speech_counts_25_tokens_a_second_and_is_given_back_as_it_goes() -> None:
    budget = ByteBudget(1 << 20)
    history = History(4, budget)
    history.add([message(spoken(budget, TOKEN, TOKEN, TOKEN)), Message("assistant", "one")])
    assert len(history.messages) == 2
    assert budget.used == held_bytes(history.messages[0].speech or pytest.fail("no speech"))
    history.add([Message("user", "two")])
    assert [one.text for one in history.messages] == ["two"]
    assert budget.used == 0
    history.add([message(spoken(budget, TOKEN))])
    history.close()
    assert [budget.used, len(history.messages)] == [0, 0]
    history.add([message(spoken(budget, TOKEN))])
    assert [budget.used, len(history.messages)] == [0, 0]


def test_bytes_of_speech_in_a_history_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget(1 << 20)
    monkeypatch.setattr("omni_ws.service.conversation.history.MAX_SPEECH_BYTES", 2 * (len(TOKEN) + 256))
    history = History(1000, budget)
    for count in (1, 2, 2):
        history.add([message(spoken(budget, TOKEN))])
        assert len(history.messages) == count
    assert budget.used == 2 * (len(TOKEN) + 256)


@pytest.mark.parametrize("past", [False, True])
def test_speech_is_kept_up_to_the_length_of_a_history(past: bool) -> None:
    budget = ByteBudget(1 << 20)
    kept = spoken(budget, TOKEN, TOKEN + bytes(2 * past), max_tokens=2)
    assert kept.lost == ("it is longer than the history may be" if past else None)
    assert (kept.hand_over(audio_ms=0) is None) is past
    assert (budget.used == 0) is past


@pytest.mark.parametrize("past", [0, 1])
def test_speech_leaves_half_of_what_the_server_may_hold(past: int) -> None:
    budget = ByteBudget(2 * (len(TOKEN) + 256))
    budget.take(past)
    kept = spoken(budget, TOKEN)
    assert bool(kept.lost) is bool(past)
    assert budget.used == (past or len(TOKEN) + 256)
    kept.release()
    kept.release()
    assert budget.used == past


@pytest.mark.parametrize("past", [False, True])
def test_bytes_of_the_speech_of_a_request_are_bounded(past: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.service.conversation.kept_speech.MAX_SPEECH_BYTES", len(TOKEN) + 256 - past)
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
