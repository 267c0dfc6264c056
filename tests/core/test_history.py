"""The items of a history, what of them a request sees, and what a truncation leaves."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from omni_ws.core.chunks import AudioFormat, InputChunk, Modality, ToolCall
from omni_ws.core.history import (
    MAX_COUNTED_TEXT,
    WORDS_UNKNOWN,
    HistoryItem,
    HistoryItems,
    Message,
    Speech,
    estimate_tokens,
    in_order,
)
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import InvalidValue


def test_oldest_turns_make_room() -> None:
    history = HistoryItems(4, ByteBudget(1 << 20))
    history.add([Message("user", "one two"), Message("assistant", "three four")])
    assert [message.text for message in history.messages()] == ["one two", "three four"]
    history.add([Message("user", "five")])
    assert [message.text for message in history.messages()] == ["five"]
    history.add([Message("user", "a b c d e")])
    assert history.messages() == ()
    history.add([Message("user", "a b c d")])
    assert len(history.messages()) == 1


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
    history = HistoryItems(1000, ByteBudget(1 << 20))
    for _ in range(1000):
        history.add([long])
    assert 1 <= len(history.items) <= 2000 * 128 / 10_000


def test_all_parts_of_a_message_count() -> None:
    picture = InputChunk(Modality.IMAGE, b"")
    speech = Speech((), AudioFormat(), 1000)
    history = HistoryItems(1000, ByteBudget(1 << 20))
    more = (Message("user", "x " * 300, picture=picture), Message("user", "", speech=speech))
    history.add([Message("user", "one two", picture=picture, more=more)])
    (item,) = history.items
    assert item.tokens == 2 + 256 + 300 + 256 + 25


def test_what_a_request_sees_begins_where_that_before_began_for_many_turns() -> None:
    """Engines reuse what they computed for a prompt that begins alike."""
    history = HistoryItems(100, ByteBudget(1 << 20))
    begun = []
    for number in range(200):
        turn(history, f"req_{number}", f"ask {number}", f"tell {number}")
        assert sum(len(message.text.split()) for message in history.messages()) <= 100
        begun.append(history.messages()[0].text)
    assert len(set(begun)) <= 200 * 4 / 25 + 1
    assert history.messages()[-2].text == "ask 199"


def test_messages_without_text_say_nothing() -> None:
    history = HistoryItems(4, ByteBudget(1 << 20))
    history.add([Message("user", ""), Message("assistant", "hello")])
    assert [message.role for message in history.messages()] == ["assistant"]


def test_history_may_be_turned_off() -> None:
    history = HistoryItems(0, ByteBudget(1 << 20))
    history.add([Message("user", "hello")])
    assert history.messages() == ()


def test_what_was_said_can_turn_out_to_be_less() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    said = Message("assistant", "one two three")
    history.open("req_1")
    history.open("req_2")
    history.add([said], request_id="req_1")
    history.add([Message("user", "again"), said], request_id="req_2")
    history.revise("req_2", Message("assistant", "one"))
    assert [message.text for message in history.messages()] == ["one two three", "again", "one"]
    history.revise("req_1", Message("assistant", ""))
    assert [message.text for message in history.messages()] == ["again", "one"]
    assert not history.revise("unknown", Message("assistant", "nothing"))
    history.open("req_3")
    history.add([Message("user", "x " * 98)], request_id="req_3")
    assert [message.text for message in history.messages()][:2] == ["again", "one"]


def test_less_may_be_seen_and_in_other_steps() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    seen: dict[float, list[int]] = {}
    for stride in (0.75, 0.0):
        history.keep_within(40, stride=stride)
        seen[stride] = []
        for number in range(40):
            turn(history, f"req_{stride}_{number}", "a b", "c d")
            seen[stride].append(sum(len(message.text.split()) for message in history.messages()))
    assert (min(seen[0.75][10:]), max(seen[0.75])) == (12, 40)
    assert set(seen[0.0]) == {40}
    assert HistoryItems.restored(history.state(), ByteBudget(1 << 20)).messages() == history.messages()
    assert history.is_cut
    history.keep_within(100)
    assert sum(len(message.text.split()) for message in history.messages()) > 40


def test_whether_a_request_sees_the_whole_conversation() -> None:
    history = HistoryItems(8, ByteBudget(1 << 20))
    history.keep_within(8, stride=0)
    turn(history, "req_1", "a b", "c d")
    turn(history, "req_2", "a b", "c d")
    cut = [history.is_cut]
    turn(history, "req_3", "a", "c")
    cut.append(history.is_cut)
    history.remove("req_2")
    assert [*cut, history.is_cut] == [False, True, False]


def test_an_item_is_put_before_a_question_or_its_answer() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    turn(history, "req_1", "one", "two")
    history.open("req_2")

    def insert(text: str, before: str, *, answer: bool = False, role: str = "user") -> None:
        history.insert([Message(role, text)], item_id=text, before=before, answer=answer)

    insert("system", "req_1", role="system")
    insert("also", "req_1", answer=True)
    insert("later", "req_2")
    insert("more", "req_2")
    insert("lost", "unknown")
    insert("", "req_1")
    history.add([Message("user", "three"), Message("assistant", "four")], request_id="req_2")
    assert [item.message.text for item in history.items] == [
        "system", "one", "also", "two", "later", "more", "three", "four"
    ]  # fmt: skip
    history.revise("req_1", Message("user", "One"))
    history.revise("req_2", Message("assistant", "Four"))
    history.remove("req_1", roles={"user"})
    history.remove("later", "nothing")
    assert [item.message.text for item in history.items] == ["system", "also", "two", "more", "three", "Four"]
    insert("first", "system")
    assert [item.message.text for item in history.items][:2] == ["first", "system"]
    assert HistoryItems.restored(history.state(), ByteBudget(1 << 20)).items == history.items
    assert history.truncate("req_2") == 3
    assert [item.message.text for item in history.items] == ["first", "system", "also", "two"]


# items


def test_items_have_ids_and_the_request_that_they_belong_to() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
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
    assert history.messages() == (asked.message, called.message, result.message)


def test_an_item_that_is_revised_keeps_its_id() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    history.open("req_1")
    history.add([Message("assistant", "one two three")], request_id="req_1")
    (before,) = history.items
    history.revise("req_1", Message("assistant", "one"))
    (after,) = history.items
    assert (after.item_id, after.message.text, after.tokens) == (before.item_id, "one", 1)


def test_items_stand_in_the_order_in_which_their_requests_opened() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    history.add([Message("user", "given")])
    for name in ("req_1", "req_2", "req_3"):
        history.open(name)
    history.add([Message("user", "waited")], request_id="req_2")
    history.add([Message("user", "asked"), Message("assistant", "answered")], request_id="req_1")
    history.add([Message("user", "last")], request_id="req_3")
    assert [message.text for message in history.messages()] == ["given", "asked", "answered", "waited last"]


def test_results_of_tools_are_not_seen_without_their_calls() -> None:
    history = HistoryItems(4, ByteBudget(1 << 20))
    history.open("req_1")
    call = ToolCall("call_1", "weather", "{}")
    history.add([Message("user", "one"), Message("assistant", "", tool_calls=(call,))], request_id="req_1")
    history.open("req_2")
    history.add([Message("tool", "rain", tool_call_id="call_1"), Message("assistant", "two")], request_id="req_2")
    assert [message.role for message in history.messages()] == []
    history.truncate("req_2")
    assert [message.role for message in history.messages()] == ["user", "assistant"]


# truncation


def turn(history: HistoryItems, name: str, asked: str = "", answered: str = "") -> None:
    history.open(name)
    history.add([Message("user", asked), Message("assistant", answered)], request_id=name)


def texts(history: HistoryItems) -> list[str]:
    return [message.text for message in history.messages()]


def test_a_request_and_all_later_ones_are_dropped() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    history.add([Message("user", "given")])
    for name in "abc":
        turn(history, name, f"ask {name}", f"answer {name}")
    assert history.truncate("b") == 2
    assert texts(history) == ["given", "ask a", "answer a"]
    assert history.truncate("a") == 1
    assert texts(history) == ["given"]


def test_a_request_that_left_nothing_can_be_named() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    turn(history, "a", "ask a", "answer a")
    turn(history, "failed")
    turn(history, "b", "ask b", "answer b")
    assert history.truncate("failed") == 2
    assert texts(history) == ["ask a", "answer a"]


def test_truncating_again_changes_nothing() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    for name in "abc":
        turn(history, name, name, "ok")
    assert history.truncate("b") == 2
    turn(history, "d", "d", "ok")
    assert [history.truncate("b"), history.truncate("c")] == [0, 0]
    assert texts(history) == ["a", "ok", "d", "ok"]
    assert history.truncate("d") == 1
    assert texts(history) == ["a", "ok"]


def test_an_unknown_request_is_refused_by_name() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    turn(history, "a", "a")
    for unknown in ("b", "", "x" * 1000):
        with pytest.raises(InvalidValue) as refusal:
            history.truncate(unknown)
        assert refusal.value.param == "request_id"
        assert len(refusal.value.message) < 200
    assert texts(history) == ["a"]


@pytest.mark.parametrize("past", [False, True])
def test_twice_as_much_is_kept_as_a_request_sees(past: bool) -> None:
    history = HistoryItems(4, ByteBudget(1 << 20))
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
    history = HistoryItems(2000, ByteBudget(1 << 20))
    items = history._items = Watched()
    for number in range(2000):
        turn(history, f"req_{number}", "a", "b")
    assert (len(items), len(history.messages())) == (4000, 2000)  # 4000 is a multiple of a quarter of 2000
    items.reads = 0
    for number in range(100):
        turn(history, f"req_more_{number}", "a", "b")
        assert 1500 < len(history.messages()) <= 2000
    assert items.reads <= 100 * 20


def test_requests_that_can_be_named_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.core.history.MAX_REQUESTS", 2)
    history = HistoryItems(100, ByteBudget(1 << 20))
    for name in "abcd":
        turn(history, name, name, "ok")
    with pytest.raises(InvalidValue):
        history.truncate("b")
    assert history.truncate("c") == 2
    assert texts(history) == ["a", "ok", "b", "ok"]
    for name in "efg":
        turn(history, name, name, "ok")
        history.truncate(name)
    with pytest.raises(InvalidValue):
        history.truncate("e")
    assert history.truncate("f") == 0


def test_nothing_is_left_of_a_closed_history() -> None:
    history = HistoryItems(4, ByteBudget(1 << 20))
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
    history = HistoryItems(max_tokens, ByteBudget(1 << 20))
    kept: list[tuple[str, list[Message], int]] = []
    forgotten = 0
    for step in range(80):
        if kept and random.random() < 0.3:
            first = random.randrange(max(0, len(kept) - random.choice([1, 3, 80])), len(kept))
            assert history.truncate(kept[first][0]) == len(kept) - first
            del kept[first:]
        else:
            name, asked, answered = f"req_{step}", random.randrange(1, 5), random.randrange(1, 4)
            messages = [Message("user", "word " * asked), Message("assistant", "word " * answered)]
            history.open(name)
            history.add(messages, request_id=name)
            kept.append((name, messages, asked + answered))
            while sum(tokens for _, _, tokens in kept) > 2 * max_tokens:
                name, _, tokens = kept.pop(0)
                forgotten += tokens
                with pytest.raises(InvalidValue):
                    history.truncate(name)
        fresh = HistoryItems(max_tokens, ByteBudget(1 << 20))
        fresh._left_behind = forgotten
        for name, messages, _ in kept:
            fresh.open(name)
            fresh.add(messages, request_id=name)
        assert history.messages() == fresh.messages()


# speech

PCM = AudioFormat()
#: 40 ms: one token.
TOKEN = bytes(1280)


def spoken(budget: ByteBudget, *, tokens: int = 1, audio: AudioFormat = PCM) -> Message:
    """The message of a user whose words are not known, charged as whoever kept its speech has done."""
    speech = Speech((InputChunk(Modality.AUDIO, TOKEN * tokens),), audio, 40 * tokens)
    budget.take(speech.held_bytes)
    return Message("user", "", speech=speech)


def test_speech_counts_25_tokens_a_second_and_is_given_back_as_it_goes() -> None:
    budget = ByteBudget(1 << 20)
    history = HistoryItems(4, budget)
    history.add([spoken(budget, tokens=3), Message("assistant", "one")])
    assert len(history.messages()) == 2
    assert budget.used == 3 * len(TOKEN) + 256
    history.add([Message("user", "two")])
    assert texts(history) == ["two"]
    assert budget.used == 0
    history.add([spoken(budget)])
    history.close()
    assert [budget.used, len(history.messages())] == [0, 0]
    history.add([spoken(budget)])
    assert [budget.used, len(history.messages())] == [0, 0]


def test_bytes_of_speech_in_a_history_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget(1 << 20)
    monkeypatch.setattr("omni_ws.core.history.MAX_SPEECH_BYTES", 2 * (len(TOKEN) + 256))
    history = HistoryItems(1000, budget)
    for count in (1, 2, 2):
        history.add([spoken(budget)])
        assert len(history.messages()) == count
    assert budget.used == 2 * (len(TOKEN) + 256)


def test_speech_that_no_request_sees_is_not_kept() -> None:
    budget = ByteBudget(1 << 20)
    history = HistoryItems(3, budget)
    history.open("a")
    history.add([spoken(budget, tokens=2), Message("assistant", "one")], request_id="a")
    turn(history, "b", "two", "three")
    assert budget.used == 0
    assert texts(history) == ["two", "three"]
    history.truncate("b")
    assert texts(history) == [WORDS_UNKNOWN, "one"]
    assert [item.tokens for item in history.items] == [2, 1]


def test_speech_that_is_truncated_is_given_back() -> None:
    budget = ByteBudget(1 << 20)
    history = HistoryItems(100, budget)
    for name in "ab":
        history.open(name)
        history.add([spoken(budget), Message("assistant", "one")], request_id=name)
    history.truncate("b")
    assert budget.used == history.held_bytes == len(TOKEN) + 256
    history.truncate("a")
    assert budget.used == history.held_bytes == 0


@pytest.mark.parametrize("known", [True, False])
def test_speech_is_given_back_when_its_words_are_known(known: bool) -> None:
    budget = ByteBudget(1 << 20)
    history = HistoryItems(100, budget)
    history.open("a")
    message = spoken(budget)
    history.add([message], request_id="a")
    history.revise("a", Message("user", "words", speech=None if known else message.speech))
    assert budget.used == history.held_bytes == (0 if known else len(TOKEN) + 256)
    history.close()
    assert budget.used == 0


def test_a_removed_request_leaves_the_others_in_their_places() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    for number in range(3):
        turn(history, f"req_{number}", f"ask {number}", f"tell {number}")
    history.remove("req_1", roles={"user"})
    assert [item.message.text for item in history.items] == ["ask 0", "tell 0", "tell 1", "ask 2", "tell 2"]
    history.remove("req_1")
    history.remove("req_1")
    history.remove("nobody")
    assert [item.message.text for item in history.items] == ["ask 0", "tell 0", "ask 2", "tell 2"]
    assert history.truncate("req_2") == 1


@pytest.mark.parametrize("named", ["a", "b", "c"])
def test_parts_of_one_message_are_dropped_together(named: str) -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    turn(history, "before", "hello", "hi")
    turn(history, "a", "my name")
    turn(history, "failed")
    turn(history, "b", "is Robert")
    turn(history, "c", "who am I", "Robert")
    assert texts(history) == ["hello", "hi", "my name is Robert who am I", "Robert"]
    assert history.truncate(named) == 4
    assert texts(history) == ["hello", "hi"]


def test_a_part_that_was_answered_without_words_of_the_later_request_is_dropped_with_it() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    turn(history, "a", "my name")
    turn(history, "cough", "", "Yes?")
    assert history.truncate("cough") == 2
    assert texts(history) == []


def test_what_is_left_of_a_truncated_request_is_not_added() -> None:
    budget = ByteBudget(1 << 20)
    history = HistoryItems(100, budget)
    history.open("a")
    assert history.truncate("a") == 1
    history.add([spoken(budget)], request_id="a")
    assert (history.messages(), budget.held) == ((), 0)


def test_neither_an_empty_message_nor_two_of_one_role_in_a_row_are_seen() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    for name, asked, answered in (("a", "one", " "), ("b", " ", ""), ("c", "two", "three"), ("d", "\n", "four")):
        turn(history, name, asked, answered)
    assert texts(history) == ["one two", "three four"]


def test_messages_that_were_sent_as_history_stand_as_they_were_sent() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    history.add([Message("user", "one"), Message("user", " "), Message("user", "two")])
    turn(history, "a", "three")
    turn(history, "b", "four")
    assert texts(history) == ["one", " ", "two", "three four"]


# the order in which models take them


def called(text: str, *calls: str) -> Message:
    return Message("assistant", text, tool_calls=tuple(ToolCall(one, "f", "{}") for one in calls))


def result(call: str, text: str = "done") -> Message:
    return Message("tool", text, tool_call_id=call)


def shown(messages: tuple[Message, ...]) -> list[str]:
    """Each message in short: its role's letter, its text, and its calls."""
    return [
        f"{one.role[0]}:{one.text}"
        + "".join(f" +{call.id}" for call in one.tool_calls)
        + (f" ={one.tool_call_id}" if one.tool_call_id else "")
        for one in messages
    ]


USER = Message("user", "ask")


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([USER, USER, called("x"), called("y")], ["u:ask ask", "a:x y"]),
        ([USER, called(""), USER], ["u:ask ask"]),
        ([USER, called(" \n"), called("x", "1"), called("y", "2")], ["u:ask", "a:x y +1 +2"]),
        ([Message("system", "s"), Message("system", "t"), USER], ["s:s", "s:t", "u:ask"]),
        ([USER, called("x", "1"), result("1"), called("y")], ["u:ask", "a:x +1", "t:done =1", "a:y"]),
        # the result comes behind another answer
        (
            [USER, called("x", "1"), USER, called("y"), result("1"), called("z")],
            ["u:ask", "a:x", "u:ask", "a:y +1", "t:done =1", "a:z"],
        ),
        # with nothing but the call, its message goes
        ([USER, called("", "1"), USER, called("y"), result("1")], ["u:ask ask", "a:y +1", "t:done =1"]),
        # behind a question that was not answered
        ([called("x", "1"), USER, result("1")], ["a:x", "u:ask", "a: +1", "t:done =1"]),
        # two late results of two answers, and one in time
        (
            [called("x", "1", "2"), result("1"), called("y", "3"), USER, result("3"), result("2")],
            ["a:x +1", "t:done =1", "a:y", "u:ask", "a: +3 +2", "t:done =3", "t:done =2"],
        ),
        # without its call, and a second one
        ([USER, called("y"), result("1"), called("z")], ["u:ask", "a:y z"]),
        ([called("x", "1"), result("1"), result("1", "again")], ["a:x +1", "t:done =1"]),
        # the same id again is another call
        (
            [called("x", "1"), result("1"), USER, called("y", "1"), result("1", "again")],
            ["a:x +1", "t:done =1", "u:ask", "a:y +1", "t:again =1"],
        ),
        ([called("x", "1"), result("1", "")], ["a:x +1", "t: =1"]),
    ],
)
def test_messages_are_in_the_order_that_models_take(messages: list[Message], wanted: list[str]) -> None:
    assert shown(in_order(messages)) == wanted


def test_calls_that_a_request_answers_stand_last() -> None:
    messages = [USER, called("x", "1", "2"), USER, called("y")]
    assert shown(in_order(messages, answering=["1"])) == ["u:ask", "a:x +2", "u:ask", "a:y +1"]
    assert shown(in_order(messages[:3], answering=["2", "9"])) == ["u:ask", "a:x +1", "u:ask", "a: +2"]
    assert shown(in_order(messages[:2], answering=["1", "2"])) == ["u:ask", "a:x +1 +2"]


def test_speech_of_both_parts_is_one_message() -> None:
    budget = ByteBudget(1 << 20)
    first, second = spoken(budget), spoken(budget, audio=AudioFormat(sample_rate=8000))
    typed = Message("user", "typed")
    (message,) = in_order([first, typed, second, typed])
    assert [(one.text, one.speech) for one in message.parts] == [
        ("", first.speech),
        ("typed", second.speech),
        ("typed", None),
    ]
    (message,) = in_order([typed, first, typed, typed])
    assert [(one.text, one.speech) for one in message.parts] == [("typed", first.speech), ("typed typed", None)]


def test_speech_in_further_parts_is_held_and_given_back() -> None:
    budget = ByteBudget(1 << 20)
    history = HistoryItems(10, budget)
    two = replace(spoken(budget, tokens=2), more=(Message("user", "typed"), spoken(budget, tokens=3)))
    history.add([two, Message("assistant", "one")])
    assert budget.used == history.held_bytes == 5 * len(TOKEN) + 2 * 256
    history.add([Message("user", "a b c d e f g h")])
    assert budget.used == history.held_bytes == 0
    said = [part.text for part in history.items[0].message.parts]
    assert said == [WORDS_UNKNOWN, "typed", WORDS_UNKNOWN]
    history.keep_within(2)  # now the message goes altogether
    assert [one.role for one in history.items] == []
    assert budget.used == history.held_bytes == 0


def test_each_picture_stays_behind_its_text() -> None:
    pictures = [InputChunk(Modality.IMAGE, bytes([number])) for number in range(2)]
    seen = [Message("user", f"picture {number}", picture=one) for number, one in enumerate(pictures)]
    (message,) = in_order([*seen, Message("user", "which"), Message("user", "is it?")])
    assert [(one.text, one.picture) for one in message.parts] == [
        ("picture 0", pictures[0]),
        ("picture 1", pictures[1]),
        ("which is it?", None),
    ]


def test_a_result_leaves_with_its_call() -> None:
    history = HistoryItems(70, ByteBudget(1 << 20))
    turns = [
        [Message("user", "Search " + "a " * 30), called("I will tell you.", "1")],
        [Message("user", "How are you? " + "b " * 30), Message("assistant", "Fine. " + "c " * 10)],
        [result("1", "It is in Bonn."), Message("assistant", "Your parcel is in Bonn.")],
    ]
    for number, messages in enumerate(turns):
        history.open(f"r{number}")
        history.add(messages, request_id=f"r{number}")
    assert [one.role for one in history.messages()] == ["user", "assistant"]
    assert history.messages()[1].text.endswith("Your parcel is in Bonn.")
    assert not history.sees_call("1")
    history.truncate("r2")
    assert not history.sees_result("1")


def test_what_was_interrupted_is_truncated_with_what_continued_it() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    turn(history, "a", "one", "answer")
    for name in "bcd":
        turn(history, name, name, "answer" if name == "d" else "")
    assert texts(history) == ["one", "answer", "b c d", "answer"]
    assert history.truncate("c") == 3
    assert texts(history) == ["one", "answer"]


def test_a_history_that_came_with_the_session_is_not_truncated() -> None:
    history = HistoryItems(100, ByteBudget(1 << 20))
    history.add([Message("user", "given")])
    turn(history, "a", "one", "answer")
    assert history.truncate("a") == 1
    assert texts(history) == ["given"]
