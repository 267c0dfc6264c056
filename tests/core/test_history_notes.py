"""Notes in place of the oldest messages: what a request sees of them, and what becomes of them when messages change."""

from __future__ import annotations

import contextlib
from random import Random

import msgspec
import pytest

from omni_ws.core.chunks import AudioFormat, InputChunk, Modality, ToolCall
from omni_ws.core.history import (
    NOTES_END,
    NOTES_HEAD,
    HistoryItems,
    HistoryState,
    Message,
    Speech,
)
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import InvalidValue

ROOMY = 1000


def talk(turns: int, *, most: int = ROOMY) -> HistoryItems:
    """Turns of four words each: ``user 3 b`` is what the user said in the request ``r3``."""
    history = HistoryItems(most, ByteBudget(1 << 20))
    for number in range(turns):
        add(history, number)
    return history


def add(history: HistoryItems, number: int) -> None:
    history.open(f"r{number}")
    history.add([Message("user", f"u{number} b"), Message("assistant", f"a{number} d")], request_id=f"r{number}")


def seen(history: HistoryItems) -> list[str]:
    """What a request sees, with the notes in brackets."""
    return [one.text.replace(NOTES_HEAD, "[").replace(NOTES_END, "]") for one in history.messages()]


def sum_up(history: HistoryItems, text: str, *, keep: int = 4, most: int = 8) -> int:
    """Sum up the next portion, and return how many items it has."""
    items = history.older(behind=0, keep=keep, most=most)
    assert history.sum_up(items, text) is bool(items)
    return len(items)


def test_notes_stand_in_place_of_the_messages() -> None:
    history = talk(4)
    assert sum_up(history, "- one") == 4
    assert seen(history) == ["[- one] u2 b", "a2 d", "u3 b", "a3 d"]
    assert [item.message.text for item in history.items][:2] == ["u0 b", "a0 d"]
    assert (history.notes, history.notes_tokens, history.summed) == ("- one", 2, 4)
    assert sum_up(history, "- two") == 2
    assert seen(history) == ["[- one\n- two] u3 b", "a3 d"]
    assert sum_up(history, "- three") == 0, "the newest turn stays"


def test_what_was_asked_again_stays_in_one_message() -> None:
    history = talk(1)
    history.open("again")
    history.add([Message("user", "once")], request_id="again")
    history.open("more")
    history.add([Message("user", "more"), Message("assistant", "yes")], request_id="more")
    add(history, 1)
    [first, *others] = history.older(behind=0, keep=4, most=4), history.older(behind=2, keep=4, most=1)
    assert [one.message.text for one in first] == ["u0 b", "a0 d"]
    assert [[one.message.text for one in items] for items in others] == [["once", "more", "yes"]]


def test_notes_count_as_what_a_request_sees() -> None:
    history = talk(4, most=20)
    sum_up(history, "- " + "word " * 9, most=4)
    assert seen(history)[1:] == ["a3 d"], "8 words and 10 of notes fit, but what is seen goes by a quarter of the limit"


def test_notes_precede_turns_that_the_client_gave() -> None:
    history = HistoryItems(ROOMY, ByteBudget(1 << 20))
    history.condense("- given")
    history.add([Message("user", "hello"), Message("assistant", "hi")])
    assert seen(history) == ["[- given] hello", "hi"]
    history.close()
    assert seen(history) == []
    greeted = HistoryItems(ROOMY, ByteBudget(1 << 20))
    greeted.condense("- given")
    greeted.add([Message("assistant", "hi")])
    assert seen(greeted) == ["[- given]", "hi"]


def test_results_and_speech_that_are_missing_are_waited_for() -> None:
    history = talk(1)
    call = ToolCall("c1", "look", "{}")
    history.open("asks")
    history.add([Message("user", "look"), Message("assistant", "", tool_calls=(call,))], request_id="asks")
    add(history, 1)
    add(history, 2)
    assert sum_up(history, "- one", most=100) == 2
    assert sum_up(history, "- two", most=100) == 0, "the call has no result"
    history.open("result")
    history.add([Message("tool", "found", tool_call_id="c1")], request_id="result")
    add(history, 3)
    assert sum_up(history, "- two", most=100) == 7

    budget = ByteBudget(1 << 20)
    heard = HistoryItems(ROOMY, budget)
    speech = Speech((InputChunk(Modality.AUDIO, bytes(320)),), AudioFormat(), audio_ms=10)
    budget.take(speech.held_bytes)
    heard.open("spoken")
    heard.add([Message("user", "", speech=speech), Message("assistant", "yes")], request_id="spoken")
    add(heard, 1)
    add(heard, 2)
    assert heard.older(behind=0, keep=4, most=100) == ()


@pytest.mark.parametrize(
    ("request_id", "left"),
    [("r7", 3), ("r6", 3), ("r5", 2), ("r4", 2), ("r3", 1), ("r2", 1), ("r1", 0), ("r0", 0)],
)
def test_a_truncation_drops_the_notes_on_what_it_drops(request_id: str, left: int) -> None:
    history = talk(8)
    notes = ["- one", "- two", "- three"]
    for text in notes:
        assert sum_up(history, text) == 4
    number = int(request_id[1:])
    assert history.truncate(request_id) == 8 - number
    add(history, 9)
    rest = [text for turn in range(2 * left, number) for text in (f"u{turn} b", f"a{turn} d")]
    noted = "\n".join(notes[:left])
    first, *others = [*rest, "u9 b", "a9 d"]
    assert seen(history) == [f"[{noted}] {first}" if noted else first, *others]


def test_what_is_removed_or_changed_is_in_no_notes() -> None:
    def noted() -> HistoryItems:
        history = talk(6)
        assert [sum_up(history, text) for text in ("- one", "- two")] == [4, 4]
        return history

    history = noted()
    history.remove("r2", roles={"user"})
    assert seen(history)[:2] == ["[- one]", "a2 d"]
    history = noted()
    history.remove("r5")
    assert history.notes == "- one\n- two"
    history = noted()
    assert history.revise("r3", Message("assistant", "less"))
    assert seen(history)[:4] == ["[- one] u2 b", "a2 d", "u3 b", "less"]
    history = noted()
    history.insert([Message("user", "between")], item_id="new", before="r1", answer=False)
    assert seen(history)[:3] == ["u0 b", "a0 d", "between u1 b"]
    history = noted()
    history.insert([Message("user", "between")], item_id="new", before="r4", answer=False)
    assert seen(history)[:2] == ["[- one\n- two] between u4 b", "a4 d"]


def test_a_request_that_was_overtaken_is_seen_although_later_ones_are_summed_up() -> None:
    history = HistoryItems(ROOMY, ByteBudget(1 << 20))
    history.open("late")
    for number in range(4):
        add(history, number)
    sum_up(history, "- one")
    history.add([Message("user", "late"), Message("assistant", "yes")], request_id="late")
    assert seen(history)[:3] == ["late", "yes", "u0 b"]


def test_notes_are_on_the_items_for_which_they_were_made() -> None:
    history = talk(6)
    items = history.older(behind=0, keep=4, most=8)
    history.remove("r0")
    assert not history.sum_up(items, "- one")
    assert not history.sum_up((), "- none")
    assert (history.notes, seen(history)[0]) == ("", "u1 b")


def test_notes_outlive_the_items_that_make_room() -> None:
    history = talk(4, most=16)
    sum_up(history, "- one")
    for number in range(4, 12):
        add(history, number)
    assert history.summed == 0
    assert seen(history)[0].startswith("[- one] u")
    sum_up(history, "- two")
    assert history.notes == "- one\n- two"


def test_condensed_notes_stand_for_all_that_the_notes_did() -> None:
    history = talk(6)
    for text in ("- one", "- two"):
        sum_up(history, text)
    history.condense("- both")
    assert (history.notes, history.summed, seen(history)[0]) == ("- both", 8, "[- both] u4 b")
    history.truncate("r3")
    assert seen(history) == [text for turn in range(3) for text in (f"u{turn} b", f"a{turn} d")]


def test_a_history_is_long_without_what_is_summed_up() -> None:
    history = talk(4)
    assert history.is_longer_than(15)
    assert not history.is_longer_than(16)
    sum_up(history, "- one")
    assert history.is_longer_than(7)
    assert not history.is_longer_than(8)


def test_what_a_request_sees_is_shortened_and_never_lengthened() -> None:
    history = talk(4)
    history.shorten(8)
    assert seen(history) == ["u2 b", "a2 d", "u3 b", "a3 d"]
    history.shorten(100)
    assert history.max_tokens == 8


def test_where_nobody_asks_behind_the_notes_the_oldest_messages_still_leave_in_order() -> None:
    """As an application deletes the user's message behind the notes, and the assistant goes on alone."""
    history = talk(2, most=10)
    assert sum_up(history, "- one") == 2
    history.remove("r1", roles={"user"})
    for number in range(2, 8):
        history.open(f"r{number}")
        history.add([Message("assistant", f"a{number} b c d")], request_id=f"r{number}")
        assert 0 <= history.first_seen <= len(history.items)
    add(history, 8)
    add(history, 9)
    assert seen(history)[-3:] == ["a8 d", "u9 b", "a9 d"]


def test_notes_are_a_part_of_the_saved_ledger() -> None:
    budget = ByteBudget(1 << 20)
    ledger = Ledger(ROOMY, budget)
    for number in range(4):
        add(ledger.history, number)
    before = ledger.history.memory
    sum_up(ledger.history, "- one")
    assert ledger.history.memory > before
    other = Ledger(0, budget)
    other.restore(ledger.to_bytes())
    assert seen(other.history) == seen(ledger.history)
    assert other.history.summed == 4


def test_a_history_of_an_earlier_version_has_no_notes() -> None:
    state = msgspec.to_builtins(talk(2).state())
    del state["notes"]
    history = HistoryItems.restored(msgspec.convert(state, HistoryState), ByteBudget(1 << 20))
    assert (history.notes, len(seen(history))) == ("", 4)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_request_sees_notes_and_what_follows_them(seed: int) -> None:
    """Notes say which turns they are on, so that what a request sees has each turn at most once, in order."""
    rng, made = Random(seed), 0
    history = HistoryItems(rng.choice([24, 60, ROOMY]), ByteBudget(1 << 20))
    for _ in range(200):
        match rng.randrange(6):
            case 0 | 1 | 2:
                add(history, made)
                made += 1
            case 3:
                items = history.older(behind=0, keep=rng.choice([4, 8]), most=rng.choice([4, 12]))
                if items:
                    history.sum_up(items, " ".join(one.message.text[1:-2] for one in items if one.role == "user"))
            case 4 if made and rng.random() < 0.2:
                history.remove(f"r{rng.randrange(made)}")
            case 5 if made and rng.random() < 0.1:
                with contextlib.suppress(InvalidValue):  # it was truncated before
                    history.truncate(f"r{rng.randrange(max(0, made - 6), made)}")
        turns = [int(one) for one in history.notes.split()]
        turns += [int(one.message.text[1:-2]) for one in history.items[history.first_seen :] if one.role == "user"]
        assert turns == sorted(set(turns))
        assert history.summed <= history.first_seen <= len(history.items)
        roles = [one.role for one in history.messages()]
        assert roles in (["user", "assistant"] * (len(roles) // 2), ["user"] if history.notes else [])
