"""What is shown of a talk to be summed up, what is read of a model's notes, and how they are kept short."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import ToolCall
from omni_ws.core.history import WORDS_UNKNOWN, HistoryItems, Message, estimate_tokens
from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation.summing import Sizes, fitted, merged, next_portion, question, read_notes, sizes


def history(*messages: Message, most: int = 4000) -> HistoryItems:
    new = HistoryItems(most, ByteBudget(1 << 20))
    new.add(messages)
    return new


@pytest.mark.parametrize(
    ("most", "context", "instructions", "longest"),
    [
        (4096, None, "", 2048),
        (4096, 4096, "", 1024),
        (4096, 4096, "word " * 48, 994),
        (4096, 4096, "word " * 4000, 512),
        (4096, 131_072, "", 2048),
        (64, None, "", 32),
        (63, None, "", None),
        (4096, 127, "", None),
    ],
)
def test_a_history_is_summed_up_by_what_the_model_reads(
    most: int, context: int | None, instructions: str, longest: int | None
) -> None:
    found = sizes(history(most=most), context=context, instructions=instructions)
    assert (found and found.longest) == longest
    if found is not None:
        assert found.room == pytest.approx(found.longest * 2, abs=2)
        assert found.kept == found.notes == pytest.approx(found.longest / 2, abs=1)


def test_a_history_that_may_not_be_cut_is_not_summed_up() -> None:
    whole = history()
    whole.keep_within(4000, stride=0)
    assert sizes(whole, context=None, instructions="") is None


def test_the_user_is_shown_at_length_and_the_assistant_is_not() -> None:
    call = ToolCall("c1", "look", '{"at": "it"}')
    shown = question(
        history(
            Message("user", "My name\n is Ada. " + "word " * 300),
            Message("assistant", "So " * 60, tool_calls=(call,)),
            Message("tool", "found", tool_call_id="c1"),
            Message("assistant", ""),
            Message("user", WORDS_UNKNOWN),
            Message("user", "漢" * 300),
        ).items
    )
    user, assistant, tool, chinese = [line for line in shown.splitlines() if ": " in line]
    assert user.startswith("User: My name is Ada. word word")
    assert user.endswith("word …")
    assert estimate_tokens(user) == 242
    assert assistant == f"Assistant: {'So ' * 16}…"
    assert tool == "Tool: found"
    assert chinese == f"User: {'漢' * 240} …"


def test_a_small_model_is_shown_what_the_user_said_alone() -> None:
    items = history(Message("user", "I am Ada."), Message("assistant", "Hello."), Message("user", "Hi.")).items
    assert "Assistant: Hello." in question(items)
    assert "Assistant" not in question(items, of_both=False)
    assert question(items, of_both=False).count("User: ") == 2


def test_a_long_line_without_blanks_is_cut() -> None:
    shown = question(history(Message("user", "x" * 100_000)).items)
    assert len(shown) < 4200


@pytest.mark.parametrize(
    ("answer", "notes"),
    [
        ("- The user is Ada.\n- She has a dog.\nTopics: dogs.", "- The user is Ada.\n- She has a dog.\nTopics: dogs"),
        ("Ada is the user.\n\n* A dog\n2. Rex\n(3) old", "- Ada is the user.\n- A dog\n- Rex\n- old"),
        ("**Topics:** dogs, cats", "Topics: dogs, cats"),
        ("- 12 March is her birthday", "- 12 March is her birthday"),
        ("None.", ""),
        ("- She has a dog.\n- What is tea?\n- Open: What is tea?", "- She has a dog.\n- Open: What is tea?"),
        ("- None\nTopics: none given", "Topics: none given"),
        ("Nothing to note here.", ""),
        ("", ""),
        ("- a\n" * 100, "\n".join(["- a"] * 16)),
        ("- " + "x" * 1000, "- " + "x" * 240),
    ],
)
def test_notes_are_read_as_models_write_them(answer: str, notes: str) -> None:
    assert read_notes(answer) == notes


def test_notes_are_merged_with_each_fact_once_and_the_newest_topics() -> None:
    assert merged(["- A.\nTopics: x", "- B\nTopics: y; x", "", "- a"]) == "- A.\n- B\nTopics: x; y"
    many = merged([f"Topics: {'topic ' * 7}{number}" for number in range(20)])
    assert estimate_tokens(many) == 49
    assert many.endswith("19")


def test_shorter_notes_take_the_place_of_long_ones() -> None:
    size = Sizes(room=2000, longest=100, kept=30, notes=10)
    notes = "- a b c d\n- e f g h\n- i j k l\nTopics: x"
    assert fitted(notes, "- a and e\n- i", size) == "- a and e\n- i\nTopics: x"
    assert fitted(notes, "", size) == "- i j k l\nTopics: x", "without an answer the oldest go"
    assert fitted(notes, "- a b c d e f g h i j k l m n o p q r s t u v", size) == "- i j k l\nTopics: x"


def test_portions_end_with_turns_and_leave_the_newest() -> None:
    turns = [Message(role, f"{number} " + "word " * 149) for number in range(6) for role in ("user", "assistant")]
    found = history(*turns)
    size = Sizes(room=2000, longest=1500, kept=500, notes=500)
    first = next_portion(found, size)
    second = next_portion(found, size, behind=len(first))
    assert [one.message.text[0] for one in (*first, *second)] == list("00112233")[: len(first) + len(second)]
    assert [len(first), len(second)] == [2, 2]
