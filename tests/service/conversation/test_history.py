"""The items of a history, what of them a request sees, and what a truncation leaves."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality, ToolCall
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import WORDS_UNKNOWN, Message
from omni_ws.errors import InvalidValue
from omni_ws.service.conversation.history import MAX_COUNTED_TEXT, History, HistoryItem, estimate_tokens, joined
from omni_ws.service.conversation.kept_speech import CHUNK_OVERHEAD_BYTES, RUN_OVERHEAD_BYTES, KeptSpeech, held_bytes
from omni_ws.service.conversation.kept_text import MAX_KEPT_TEXT, KeptText


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


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        (" one two\n", 2),
        ("wie schön", 2),
        ("안녕 하세요", 2),
        ("你好世界", 4),
        ("私はTokyoへ", 4),
        ("カタカナ ｶﾅ", 6),
        ("สวัสดี", 6),
        ("\U00020000\U00020001", 2),
        ("x" * 31, 1),
        ("x" * 32, 2),
        ("ü" * 48, 3),
        (" " * 64, 4),
        ("一" * MAX_COUNTED_TEXT, MAX_COUNTED_TEXT),
        ("一" * (MAX_COUNTED_TEXT + 4), MAX_COUNTED_TEXT // 4 + 1),
    ],
)
def test_characters_of_scripts_without_blanks_count_as_words(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


@pytest.mark.parametrize(
    "long",
    [
        Message("user", "x" * 10_000),
        Message("tool", "x", tool_call_id="x" * 10_000),
        Message("assistant", "", tool_calls=(ToolCall("x" * 10_000, "x", "{}"),)),
        Message("assistant", "", tool_calls=(ToolCall("x", "x" * 10_000, "{}"),)),
        Message("assistant", "", tool_calls=(ToolCall("x", "x", "x" * 10_000),)),
    ],
)
def test_what_is_kept_is_bounded_in_characters(long: Message) -> None:
    """A word counts one, however long it is; what is kept of a conversation has to end somewhere."""
    history = History(1000, ByteBudget(1 << 20))
    for _ in range(1000):
        history.add([long])
    assert 1 <= len(history.items) <= 2000 * 128 / 10_000


def test_what_a_request_sees_begins_where_that_before_began_for_many_turns() -> None:
    """Engines reuse what they computed for a prompt that begins alike."""
    history = History(100, ByteBudget(1 << 20))
    begun = []
    for number in range(200):
        turn(history, f"req_{number}", f"ask {number}", f"tell {number}")
        assert sum(len(message.text.split()) for message in history.messages) <= 100
        begun.append(history.messages[0].text)
    assert len(set(begun)) <= 200 * 4 / 25 + 1
    assert history.messages[-2].text == "ask 199"


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
    text.take_back(len("more") + 3)  # of the second piece, so much was dropped
    assert len(text.joined()) == MAX_KEPT_TEXT
    text.take_back(2 * (MAX_KEPT_TEXT // 2 + 1) - 3)
    assert len(text.joined()) == MAX_KEPT_TEXT // 2 + 1
    words = KeptText()
    words.append("one")
    words.append("two")
    assert words.joined(" ") == "one two"


def test_what_was_said_can_turn_out_to_be_less() -> None:
    history = History(100, ByteBudget(1 << 20))
    said = Message("assistant", "one two three")
    history.open("req_1")
    history.open("req_2")
    history.add([said], request_id="req_1")
    history.add([Message("user", "again"), said], request_id="req_2")
    history.revise_answer("req_2", Message("assistant", "one"))
    assert [message.text for message in history.messages] == ["one two three", "again", "one"]
    history.revise_answer("req_1", Message("assistant", ""))
    assert [message.text for message in history.messages] == ["again", "one"]
    history.revise_answer("req_1", Message("assistant", "nothing"))
    assert len(history.messages) == 2
    history.open("req_3")
    history.add([Message("user", "x " * 98)], request_id="req_3")
    assert [message.text for message in history.messages][:2] == ["again", "one"]


# items


def test_items_have_ids_and_the_request_that_they_belong_to() -> None:
    history = History(100, ByteBudget(1 << 20))
    history.open("req_1")
    call = ToolCall("call_1", "weather", '{"city": "Bonn"}')
    history.add([Message("user", "one two"), Message("assistant", "", tool_calls=(call,))], request_id="req_1")
    history.open("req_2")
    history.add([Message("tool", "", tool_call_id="call_1"), Message("assistant", "")], request_id="req_2")
    asked, called, result = history.items
    assert [item.request_id for item in history.items] == ["req_1", "req_1", "req_2"]
    assert [item.role for item in history.items] == ["user", "assistant", "tool"]
    assert [item.tokens for item in history.items] == [2, 3, 1]
    assert all(item.item_id.startswith("item_") for item in history.items)
    assert len({item.item_id for item in history.items}) == 3
    assert history.messages == (asked.message, called.message, result.message)


def test_an_item_that_is_revised_keeps_its_id() -> None:
    history = History(100, ByteBudget(1 << 20))
    history.open("req_1")
    history.add([Message("assistant", "one two three")], request_id="req_1")
    (before,) = history.items
    history.revise_answer("req_1", Message("assistant", "one"))
    (after,) = history.items
    assert (after.item_id, after.message.text, after.tokens) == (before.item_id, "one", 1)


def test_items_stand_in_the_order_in_which_their_requests_opened() -> None:
    history = History(100, ByteBudget(1 << 20))
    history.add([Message("user", "given")])
    for name in ("req_1", "req_2", "req_3"):
        history.open(name)
    history.add([Message("user", "waited")], request_id="req_2")
    history.add([Message("user", "asked"), Message("assistant", "answered")], request_id="req_1")
    history.add([Message("user", "last")], request_id="req_3")
    assert [message.text for message in history.messages] == ["given", "asked", "answered", "waited last"]


def test_results_of_tools_are_not_seen_without_their_calls() -> None:
    history = History(4, ByteBudget(1 << 20))
    history.open("req_1")
    call = ToolCall("call_1", "weather", "{}")
    history.add([Message("user", "one"), Message("assistant", "", tool_calls=(call,))], request_id="req_1")
    history.open("req_2")
    history.add([Message("tool", "rain", tool_call_id="call_1"), Message("assistant", "two")], request_id="req_2")
    assert [message.role for message in history.messages] == []
    history.truncate("req_2")
    assert [message.role for message in history.messages] == ["user", "assistant"]


# truncation


def turn(history: History, name: str, asked: str = "", answered: str = "") -> None:
    history.open(name)
    history.add([Message("user", asked), Message("assistant", answered)], request_id=name)


def texts(history: History) -> list[str]:
    return [message.text for message in history.messages]


def test_a_request_and_all_later_ones_are_dropped() -> None:
    history = History(100, ByteBudget(1 << 20))
    history.add([Message("user", "given")])
    for name in "abc":
        turn(history, name, f"ask {name}", f"answer {name}")
    assert history.truncate("b") == 2
    assert texts(history) == ["given", "ask a", "answer a"]
    assert history.truncate("a") == 1
    assert texts(history) == ["given"]


def test_a_request_that_left_nothing_can_be_named() -> None:
    history = History(100, ByteBudget(1 << 20))
    turn(history, "a", "ask a", "answer a")
    turn(history, "failed")
    turn(history, "b", "ask b", "answer b")
    assert history.truncate("failed") == 2
    assert texts(history) == ["ask a", "answer a"]


def test_truncating_again_changes_nothing() -> None:
    history = History(100, ByteBudget(1 << 20))
    for name in "abc":
        turn(history, name, name, "so")
    assert history.truncate("b") == 2
    turn(history, "d", "d")
    assert [history.truncate("b"), history.truncate("c")] == [0, 0]
    assert texts(history) == ["a", "so", "d"]
    assert history.truncate("d") == 1
    assert texts(history) == ["a", "so"]


@pytest.mark.parametrize("named", ["a", "b", "c"])
def test_parts_of_one_message_are_dropped_together(named: str) -> None:
    history = History(100, ByteBudget(1 << 20))
    turn(history, "before", "hello", "hi")
    turn(history, "a", "my name")
    turn(history, "failed")
    turn(history, "b", "is Robert")
    turn(history, "c", "who am I", "Robert")
    assert texts(history) == ["hello", "hi", "my name is Robert who am I", "Robert"]
    assert history.truncate(named) == 4
    assert texts(history) == ["hello", "hi"]


def test_a_part_that_was_answered_without_words_of_the_later_request_is_dropped_with_it() -> None:
    history = History(100, ByteBudget(1 << 20))
    turn(history, "a", "my name")
    turn(history, "cough", "", "Yes?")
    assert history.truncate("cough") == 2
    assert texts(history) == []


def test_what_is_left_of_a_truncated_request_is_not_added() -> None:
    budget = ByteBudget(1 << 20)
    history = History(100, budget)
    history.open("a")
    assert history.truncate("a") == 1
    history.add([message(spoken(budget, TOKEN))], request_id="a")
    assert (history.messages, budget.held) == ((), 0)


def test_neither_an_empty_message_nor_two_of_one_role_in_a_row_are_seen() -> None:
    history = History(100, ByteBudget(1 << 20))
    for name, asked, answered in (("a", "one", " "), ("b", " ", ""), ("c", "two", "three"), ("d", "\n", "four")):
        turn(history, name, asked, answered)
    assert texts(history) == ["one two", "three four"]


def test_calls_of_answers_in_a_row_and_results_of_tools_stay() -> None:
    call = ToolCall("call_1", "tell", "{}")
    told = [Message("assistant", "", tool_calls=(call,)), Message("tool", "", tool_call_id="call_1")]
    assert joined([Message("assistant", "one"), *told, Message("assistant", "two")]) == (
        Message("assistant", "one", tool_calls=(call,)),
        told[1],
        Message("assistant", "two"),
    )


def test_speech_keeps_its_place_in_a_message_that_is_joined() -> None:
    budget = ByteBudget(1 << 20)
    first, second = message(spoken(budget, TOKEN)), message(spoken(budget, TOKEN))
    typed = [Message("user", text) for text in ("one", "two", "three", "four")]
    (whole,) = joined([typed[0], first, typed[1], typed[2], second, typed[3]])
    assert [(part.text, part.speech) for part in whole.parts] == [
        ("one", first.speech),
        ("two three", second.speech),
        ("four", None),
    ]


def test_messages_that_were_sent_as_history_stand_as_they_were_sent() -> None:
    history = History(100, ByteBudget(1 << 20))
    history.add([Message("user", "one"), Message("user", " "), Message("user", "two")])
    turn(history, "a", "three")
    turn(history, "b", "four")
    assert texts(history) == ["one", " ", "two", "three four"]


def test_an_unknown_request_is_refused_by_name() -> None:
    history = History(100, ByteBudget(1 << 20))
    turn(history, "a", "a")
    for unknown in ("b", "", "x" * 1000):
        with pytest.raises(InvalidValue) as refusal:
            history.truncate(unknown)
        assert refusal.value.param == "request_id"
        assert len(refusal.value.message) < 200
    assert texts(history) == ["a"]


@pytest.mark.parametrize("past", [False, True])
def test_twice_as_much_is_kept_as_a_request_sees(past: bool) -> None:
    history = History(4, ByteBudget(1 << 20))
    turn(history, "a", "1", "2")
    turn(history, "b", "3", "4")
    turn(history, "c", "5", "6")
    turn(history, "d", "7", "8 9" if past else "8")
    assert texts(history) == (["7", "8 9"] if past else ["5", "6", "7", "8"])
    assert history.items[0].request_id == ("b" if past else "a")
    if past:
        with pytest.raises(InvalidValue):
            history.truncate("a")
    assert history.truncate("c") == 2
    assert texts(history) == (["3", "4"] if past else ["1", "2", "3", "4"])


class Watched(list[HistoryItem]):
    """Items that count how often one of them is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_a_request_costs_the_same_however_much_is_kept() -> None:
    history = History(2000, ByteBudget(1 << 20))
    items = history._items = Watched()
    for number in range(2000):
        turn(history, f"req_{number}", "a", "b")
    assert (len(items), len(history.messages)) == (4000, 2000)  # 4000 is a multiple of a quarter of 2000
    items.reads = 0
    for number in range(100):
        turn(history, f"req_more_{number}", "a", "b")
        assert 1500 < len(history.messages) <= 2000
    assert items.reads <= 100 * 20


def test_requests_that_can_be_named_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.service.conversation.history.MAX_REQUESTS", 2)
    history = History(100, ByteBudget(1 << 20))
    for name in "abcd":
        turn(history, name, name, "so")
    with pytest.raises(InvalidValue):
        history.truncate("b")
    assert history.truncate("c") == 2
    assert texts(history) == ["a", "so", "b", "so"]
    for name in "efg":
        turn(history, name, name)
        history.truncate(name)
    with pytest.raises(InvalidValue):
        history.truncate("e")
    assert history.truncate("f") == 0


def test_nothing_is_left_of_a_closed_history() -> None:
    history = History(4, ByteBudget(1 << 20))
    turn(history, "a", "1", "2")
    history.close()
    history.close()
    assert history.items == ()
    turn(history, "b", "1", "2")
    assert history.items == ()


@pytest.mark.parametrize("seed", range(40))
def test_a_request_sees_what_it_would_see_had_the_dropped_ones_never_been(seed: int) -> None:
    random = Random(seed)
    max_tokens = random.randrange(2, 60)
    history = History(max_tokens, ByteBudget(1 << 20))
    kept: list[tuple[str, list[Message], int]] = []
    forgotten = 0
    for step in range(80):
        if kept and random.random() < 0.3:
            first = random.randrange(max(0, len(kept) - random.choice([1, 3, 80])), len(kept))
            name = kept[first][0]
            while first and not kept[first - 1][1][1].text:  # the same message
                first -= 1
            assert history.truncate(name) == len(kept) - first
            del kept[first:]
        else:
            name, asked, answered = f"req_{step}", random.randrange(1, 5), random.randrange(4)
            messages = [Message("user", "word " * asked), Message("assistant", "word " * answered)]
            history.open(name)
            history.add(messages, request_id=name)
            kept.append((name, messages, asked + answered))
            unanswered = False
            while kept and (unanswered or sum(tokens for _, _, tokens in kept) > 2 * max_tokens):
                name, messages, tokens = kept.pop(0)
                unanswered = not messages[1].text
                forgotten += tokens
                with pytest.raises(InvalidValue):
                    history.truncate(name)
        fresh = History(max_tokens, ByteBudget(1 << 20))
        fresh._left_behind = forgotten
        for name, messages, _ in kept:
            fresh.open(name)
            fresh.add(messages, request_id=name)
        assert history.messages == fresh.messages


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


@pytest.mark.parametrize("name", ["used", "decoded"])
def test_speech_leaves_half_of_the_budget_to_others(name: str) -> None:
    cost = len(TOKEN) + CHUNK_OVERHEAD_BYTES + RUN_OVERHEAD_BYTES
    for free, kept in ((cost, True), (cost - 1, False)):
        budget = ByteBudget(1 << 20)
        setattr(budget, name, budget.capacity // 2 - free)
        assert (spoken(budget, TOKEN).lost is None) is kept


def test_speech_that_no_longer_fits_beside_decoded_media_is_dropped_in_silence() -> None:
    budget = ByteBudget(1 << 20)
    budget.decoded = budget.capacity - 100
    assert spoken(budget, TOKEN).lost == "the server's memory for speech is full"
    assert budget.used == 0


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
    monkeypatch.setattr("omni_ws.service.conversation.kept_speech.MAX_SPEECH_BYTES", len(TOKEN) + 256 + 64 - past)
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


def test_speech_that_no_request_sees_is_not_kept() -> None:
    budget = ByteBudget(1 << 20)
    history = History(3, budget)
    history.open("a")
    history.add([message(spoken(budget, TOKEN, TOKEN)), Message("assistant", "one")], request_id="a")
    turn(history, "b", "two", "three")
    assert budget.used == 0
    assert [one.text for one in history.messages] == ["two", "three"]
    history.truncate("b")
    assert [one.text for one in history.messages] == [WORDS_UNKNOWN, "one"]
    assert [item.tokens for item in history.items] == [2, 1]


def test_speech_that_is_truncated_is_given_back() -> None:
    budget = ByteBudget(1 << 20)
    history = History(100, budget)
    for name in "ab":
        history.open(name)
        history.add([message(spoken(budget, TOKEN)), Message("assistant", "one")], request_id=name)
    history.truncate("b")
    assert budget.used == history.held_bytes == len(TOKEN) + 256
    history.truncate("a")
    assert budget.used == history.held_bytes == 0


def test_a_removed_request_leaves_the_others_in_their_places() -> None:
    history = History(100, ByteBudget(1 << 20))
    for number in range(3):
        turn(history, f"req_{number}", f"ask {number}", f"tell {number}")
    history.remove("req_1", roles={"user"})
    assert [item.message.text for item in history.items] == ["ask 0", "tell 0", "tell 1", "ask 2", "tell 2"]
    history.remove("req_1")
    history.remove("req_1")
    history.remove("nobody")
    assert [item.message.text for item in history.items] == ["ask 0", "tell 0", "ask 2", "tell 2"]
    assert history.truncate("req_2") == 1
