from datetime import datetime
from itertools import islice

import pytest

from omni_ws.engine.base import Message
from omni_ws.engine.llm.rules import HELP, MAX_COUNT, MAX_REQUEST, NOTHING_WRITTEN, answer

NOW = datetime(2031, 3, 4, 15, 7)


def reply(text: str, *history: Message, now: datetime = NOW) -> str:
    return " ".join(answer(text, history, now))


@pytest.mark.parametrize(
    "text", ["what time is it", "What time is it?", "what's the time", "Please tell me the time.", "what is the time"]
)
def test_time_is_told(text: str) -> None:
    assert reply(text) == "It is 3:07 PM."


@pytest.mark.parametrize(("hour", "said"), [(0, "12:07 AM"), (11, "11:07 AM"), (12, "12:07 PM"), (23, "11:07 PM")])
def test_hours_of_the_clock(hour: int, said: str) -> None:
    assert reply("what time is it", now=NOW.replace(hour=hour)) == f"It is {said}."


@pytest.mark.parametrize("text", ["what day is it", "what's the date", "What is the date today?", "which day is today"])
def test_date_is_told(text: str) -> None:
    assert reply(text) == "Today is Tuesday, March 4, 2031."


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("what is two plus two", "4"),
        ("two plus three times four", "14"),
        ("What's 12 * (3 + 4)?", "84"),
        ("seven minus ten", "minus 3"),
        ("how much is one hundred and five divided by five", "21"),
        ("what is twenty-three times two", "46"),
        ("10 - 3", "7"),
        ("10-3", "7"),
        ("one point five plus one", "2.5"),
        ("1 / 3", "about 0.333333"),
        ("two thousand and twenty minus one", "2019"),
        ("1,000,000 + 1", "1000001"),
        ("calculate -2 * -3", "6"),
        ("what does two and two make", "4"),
    ],
)
def test_arithmetic(text: str, result: str) -> None:
    assert reply(text) == f"That makes {result}."


def test_division_by_zero_has_no_value() -> None:
    assert reply("what is five divided by zero") == "Nothing can be divided by zero."


@pytest.mark.parametrize("text", ["what is 9999999999999999 + 1", "2 +", "(2 + 3", "plus", "seven", "1 " * 100 + "+ 1"])
def test_what_is_no_arithmetic_is_said_back(text: str) -> None:
    assert reply(text).startswith("You said: ")


def test_deep_parentheses_are_no_danger() -> None:
    assert reply("(" * 5000 + "1" + ")" * 5000).startswith("You said: ")


def test_counting_comes_in_sentences() -> None:
    assert list(answer("Count to twelve", (), NOW)) == ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10.", "11, 12."]
    assert reply("count from 5 down to 3") == "5, 4, 3."


def test_counting_at_the_limit_and_past_it() -> None:
    assert len(list(answer(f"count to {MAX_COUNT}", (), NOW))) == MAX_COUNT // 10
    assert reply(f"count to {MAX_COUNT + 1}") == "I count to 1000 at most."


def test_a_long_answer_is_not_made_before_it_is_asked_for() -> None:
    assert list(islice(answer("count to 1000", (), NOW), 1)) == ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10."]


def test_repeating_keeps_the_words_as_they_were() -> None:
    assert reply("Repeat after me: The Quick Fox!") == "The Quick Fox."
    assert reply("repeat after me hello world") == "hello world."


def test_spelling() -> None:
    assert reply("spell hello") == "H, E, L, L, O."
    assert reply("How do you spell the word Omni?") == "O, M, N, I."
    assert reply("spell " + "a" * 201) == "I spell up to 200 letters."


def test_history_is_used() -> None:
    history = (Message("user", "my name is Ann"), Message("assistant", "You said: my name is Ann."))
    assert reply("what did I say", *history) == "You said: my name is Ann."
    assert reply("say that again", *history) == "You said: my name is Ann."
    assert reply("say that again") == "I have not said anything yet."
    assert reply("what did I just say?") == "You have not said anything before."


def test_small_talk_and_help() -> None:
    assert reply("hello") == "Hello. How can I help you?"
    assert reply("stop") == "Okay."
    assert reply("help") == " ".join(HELP)
    assert reply("thank you!") == "You are welcome."


def test_everything_else_is_said_back() -> None:
    assert reply("go forward ten meters") == "You said: go forward ten meters."
    assert reply("  Is   it raining? ") == "You said: Is it raining?"
    assert reply("") == NOTHING_WRITTEN
    assert reply("你好") == "You said: 你好."


@pytest.mark.parametrize("text", ["say ::", "repeat after me : :", "Say: :"])
def test_nothing_to_repeat_is_said_back(text: str) -> None:
    assert reply(text) == f"You said: {text}."


@pytest.mark.parametrize("over", [0, 1])
def test_a_long_text_is_repeated_and_spelled_all_the_same(over: int) -> None:
    words = "word " * 10000
    for beginning in ("say ", "please repeat after me, "):
        text = beginning + words[: MAX_REQUEST + over - len(beginning) - 1] + "."
        assert reply(text) == text.removeprefix(beginning)
    assert reply("Can you spell " + words) == "I spell up to 200 letters."


@pytest.mark.parametrize("over", [0, 1])
def test_courtesy_counts_up_to_the_longest_request(over: int) -> None:
    text = ("please " * 500 + "what time is it").ljust(MAX_REQUEST + over, "!")
    assert len(text) == MAX_REQUEST + over
    assert (reply(text) == "It is 3:07 PM.") is (not over)


def test_white_space_is_one_space() -> None:
    text = " \n".join(f"{number}" + "x" * (number % 50) for number in range(1000))
    assert reply(f"\t{text}\u2003") == f"You said: {' '.join(text.split())}."
