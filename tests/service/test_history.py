"""What is kept of earlier turns."""

from __future__ import annotations

from omni_ws.engine.base import Message
from omni_ws.service.history import History
from omni_ws.service.turn import MAX_KEPT_TEXT, KeptText


def test_oldest_messages_make_room() -> None:
    history = History(4)
    history.add([Message("user", "one two"), Message("assistant", "three four")])
    assert [message.text for message in history.messages] == ["one two", "three four"]
    history.add([Message("user", "five")])
    assert [message.text for message in history.messages] == ["three four", "five"]
    history.add([Message("user", "a b c d e")])
    assert history.messages == ()
    history.add([Message("user", "a b c d")])
    assert len(history.messages) == 1


def test_messages_without_text_say_nothing() -> None:
    history = History(4)
    history.add([Message("user", ""), Message("assistant", "hello")])
    assert [message.role for message in history.messages] == ["assistant"]


def test_history_may_be_turned_off() -> None:
    history = History(0)
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
    history = History(100)
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
