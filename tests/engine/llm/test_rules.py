import random
import re
import string
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import islice, pairwise

import pytest
from support.embedded_engine import is_unknown

from omni_ws.core.history import Message
from omni_ws.engine.llm.computed import (
    MAX_COUNT,
    RIDDLES,
    UNKNOWN,
)
from omni_ws.engine.llm.rules_engine import (
    MAX_REQUEST,
    NOTHING_HEARD,
    NOTHING_WRITTEN,
    TOO_LONG,
    answer,
    catalogue,
)

NOW = datetime(2031, 3, 4, 15, 7)
SAYS = {intent.name: intent.says for intent in catalogue()}
HELP, JOKES, FACTS = SAYS["help"], SAYS["joke"], SAYS["fact"]


def reply(text: str, *history: Message, now: datetime = NOW, seed: object = None) -> str:
    return " ".join(answer(text, history, now, seed=seed))


def conversation(*texts: str) -> list[str]:
    """The answers to ``texts``, one after the other in one conversation."""
    history: list[Message] = []
    for text in texts:
        said = reply(text, *history)
        history += (Message("user", text), Message("assistant", said))
    return [message.text for message in history if message.role == "assistant"]


@pytest.mark.parametrize(
    "text",
    [
        "what time is it",
        "What time is it?",
        "what's the time",
        "Please tell me the time.",
        "what is the time",
        "Hi, can you tell me what time it is?",
        "Um, what time is it now, please?",
        "Hello! What time is it?",
    ],
)
def test_time_is_told(text: str) -> None:
    assert reply(text) == "It is 3:07 PM."


@pytest.mark.parametrize(("hour", "said"), [(0, "12:07 AM"), (11, "11:07 AM"), (12, "12:07 PM"), (23, "11:07 PM")])
def test_hours_of_the_clock(hour: int, said: str) -> None:
    assert reply("what time is it", now=NOW.replace(hour=hour)) == f"It is {said}."


def test_the_time_of_other_places_is_not_invented() -> None:
    assert reply("What time is it in Tokyo?") == "I only know the time here. It is 3:07 PM."


@pytest.mark.parametrize("text", ["what day is it", "what's the date", "What is the date today?", "which day is today"])
def test_date_is_told(text: str) -> None:
    assert reply(text) == "Today is Tuesday, March 4, 2031."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("What day was July 4, 1776?", "July 4, 1776 was a Thursday."),
        ("what day of the week is december twenty fifth", "December 25, 2031 is a Thursday."),
        ("When is Christmas?", "Christmas is Thursday, December 25, 2031."),
        ("When is Easter this year?", "Easter is Sunday, April 13, 2031."),
        ("What is the date tomorrow?", "Tomorrow is Wednesday, March 5, 2031."),
        ("what day is it in ten days", "In ten days is Friday, March 14, 2031."),
        ("What's the date next Friday?", "Next Friday is Friday, March 7, 2031."),
        ("How many days until Christmas?", "There are 296 days until Christmas."),
        ("how many weeks until Easter", "There are 5 weeks and 5 days until Easter."),
        ("How long is it until tomorrow?", "There is one day until Tomorrow."),
        ("Is 2028 a leap year?", "2028 is a leap year."),
        ("Is it a leap year?", "2031 is not a leap year."),
        ("How many days are in April?", "April has 30 days."),
        ("What year is it?", "It is the year 2031."),
        ("Is it the weekend?", "No. It is Tuesday."),
        ("What day is February 30?", None),
        ("When is the thirty-fifth of May?", None),
        ("what day is it in 9999999 days", None),
        ("what day was march 4 0000", None),
        ("When was Easter?", "Easter was Sunday, April 21, 2030."),
        ("When is Halloween this year?", "Halloween is Friday, October 31, 2031."),
        ("What day was New Year's Day this year?", "New Year's Day was Wednesday, January 1, 2031."),
        ("What is the date of New Year this year?", "New Year's Day was Wednesday, January 1, 2031."),
        ("What day was July 4th?", "July 4, 2030 was a Thursday."),
        ("What day was February 29th?", "February 29, 2028 was a Tuesday."),
        ("What day was Friday?", "Friday was Friday, February 28, 2031."),
        ("How many days since Christmas?", "Christmas was 69 days ago."),
        ("How many days is it since Tuesday?", "Tuesday was 7 days ago."),
    ],
)
def test_days_of_the_calendar(text: str, said: str | None) -> None:
    assert is_unknown(reply(text)) if said is None else reply(text) == said


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
        ("1/3", "about 0.333333"),
        ("calculate 24/7", "about 3.428571"),
        ("what is 24 / 8", "3"),
        ("two thousand and twenty minus one", "2019"),
        ("1,000,000 + 1", "1000001"),
        ("calculate -2 * -3", "6"),
        ("what does two and two make", "4"),
        ("what is nineteen ninety nine plus one", "2000"),
        ("what is twenty twenty-six minus one", "2025"),
        ("two two plus one", "23"),
        ("two point five plus nineteen hundred", "1902.5"),
        ("twenty one plus one", "22"),
        ("Hello, what is 7 x 8?", "56"),
        ("what is three plus for", "7"),
        ("What is 20% of 80?", "16"),
        ("what is fifteen percent off two hundred", "170"),
        ("80 plus 10 percent", "88"),
        ("What's a 15% tip on 40 dollars?", "6 dollars"),
        ("What's five dollars plus three dollars?", "8 dollars"),
        ("How much is $5 plus $3.50?", "8.5 dollars"),
        ("half of fifty euros", "25 euros"),
        ("three dollars minus two dollars", "1 dollar"),
        ("two and a half plus one", "3.5"),
        ("2 and a half times 2", "5"),
        ("What is the square root of 144?", "12"),
        ("square root of two", "about 1.414214"),
        ("five squared", "25"),
        ("what is 2 to the power of 10", "1024"),
        ("What's 2 to the 8th power?", "256"),
        ("half of 9", "4.5"),
        ("double 21", "42"),
    ],
)
def test_arithmetic(text: str, result: str) -> None:
    assert reply(text) == f"That makes {result}."


def test_numbers_without_a_value() -> None:
    assert reply("what is five divided by zero") == "Nothing can be divided by zero."
    assert reply("what percent of zero is five") == "Nothing is a percentage of zero."
    assert reply("What percent of 80 is 20?") == "That is 25 percent."
    assert reply("square root of minus four") == "Negative numbers have no real square root."
    assert reply("999999999 to the power of 99") == "That number is too large for me."


@pytest.mark.parametrize(
    "text",
    [
        "what is 9999999999999999 + 1",
        "2 +",
        "five dollars plus three euros",
        "(2 + 3",
        "plus",
        "seven",
        "1 " * 100 + "+ 1",
        "five ten plus one",
        "twenty one one plus one",
        "nineteen ninety nine hundred plus one",
        "one hundred two two plus one",
        "two two thousand plus one",
        "24/7",
        "What is 9/11?",
        "What's 50/50?",
    ],
)
def test_what_is_no_arithmetic_is_not_known(text: str) -> None:
    assert is_unknown(reply(text))


def test_deep_parentheses_are_no_danger() -> None:
    assert reply("(" * 5000 + "1" + ")" * 5000) == TOO_LONG
    assert is_unknown(reply("(" * 2000 + "1" + ")" * 2000))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("How many feet are in a mile?", "1 mile is 5280 feet."),
        ("convert 10 kilometers to miles", "10 kilometers are about 6.214 miles."),
        ("What is 100 degrees Fahrenheit in Celsius?", "100 degrees Fahrenheit are about 37.78 degrees Celsius."),
        ("what's -40°C in °F", "Minus 40 degrees Celsius are minus 40 degrees Fahrenheit."),
        ("5km in miles", "5 kilometers are about 3.107 miles."),
        ("how many seconds are there in a day", "1 day is 86400 seconds."),
        ("How many ounces in 2 pounds?", "2 pounds are 32 ounces."),
        ("one and a half liters", None),
        ("How many minutes is half an hour?", "0.5 hours are 30 minutes."),
        ("two and a half hours in minutes", "2.5 hours are 150 minutes."),
        ("How many centimeters is five feet ten inches?", "5 feet 10 inches are 177.8 centimeters."),
        ("How tall is 5 foot 10 in centimeters?", "5 feet 10 inches are 177.8 centimeters."),
        ("twenty pounds and twenty two ounces in grams", "20 pounds 22 ounces are about 9696 grams."),
        ("five miles ten in kilometers", None),
        ("five feet ten grams in meters", None),
        ("convert five meters to kilograms", "I can't turn meters into kilograms."),
        ("minus 500 celsius to fahrenheit", "Nothing is as cold as that."),
        ("0.0000001 mm in kilometers", "That number is beyond me."),
    ],
)
def test_units(text: str, said: str | None) -> None:
    assert is_unknown(reply(text)) if said is None else reply(text) == said


def test_counting_comes_in_sentences() -> None:
    assert list(answer("Count to twelve", (), NOW)) == ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10.", "11, 12."]
    assert reply("count from 5 down to 3") == "5, 4, 3."
    assert reply("count backwards from 3") == "3, 2, 1, 0."


def test_counting_at_the_limit_and_past_it() -> None:
    assert len(list(answer(f"count to {MAX_COUNT}", (), NOW))) == MAX_COUNT // 10
    assert reply(f"count to {MAX_COUNT + 1}") == "I count to 1000 at most."


def test_a_long_answer_is_not_made_before_it_is_asked_for() -> None:
    assert list(islice(answer("count to 1000", (), NOW), 1)) == ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10."]


def test_repeating_keeps_the_words_as_they_were() -> None:
    assert reply("Repeat after me: The Quick Fox!") == "The Quick Fox."
    assert reply("repeat after me hello world") == "hello world."
    assert reply("Repeat after me: One thing. What time is it?") == "One thing. What time is it."


@pytest.mark.parametrize(
    "text", ["Spell it out for me.", "Could you spell that out?", "spell this out please", "spell it slowly"]
)
def test_what_was_said_before_is_not_spelled(text: str) -> None:
    said = reply(text)
    assert is_unknown(said) or said.startswith(("Tell me which word", "Which word"))


def test_spelling() -> None:
    assert reply("spell hello") == "H, E, L, L, O."
    assert reply("How do you spell the word Omni?") == "O, M, N, I."
    assert reply("spell " + "a" * 201) == "I spell up to 200 letters."
    assert reply("spell omni backwards") == "I, N, M, O."
    assert reply("How many r's are in strawberry?") == "The letter R is 3 times in strawberry."


def test_history_is_used() -> None:
    history = (Message("user", "my name is Ann"), Message("assistant", "Nice to meet you, Ann."))
    assert reply("what did I say", *history) == "I heard: my name is Ann."
    assert reply("what did I just ask?", Message("user", "What time is it?")) == "You asked: What time is it?"
    assert reply("say that again", *history) == "Nice to meet you, Ann."
    assert reply("Pardon?", *history) == "Nice to meet you, Ann."
    assert reply("say that again") == "I haven't said anything yet."
    assert reply("what did I just say?") == "That was the first thing that I heard from you."


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("my name is ann", "Ann"),
        ("Hi, my name is Mary Jane, and I live in Paris.", "Mary Jane"),
        ("I'm Ann.", "Ann"),
        ("You can call me O'Neill", "O'Neill"),
        ("my name's bob", "Bob"),
        ("Hello. I'm McKay.", "McKay"),
        ("Call me Ann tomorrow.", "Ann"),
        ("My name is Wednesday.", "Wednesday"),
    ],
)
def test_a_name_is_remembered(told: str, name: str) -> None:
    first, again, other = conversation(told, "What's my name?", "who am i")
    assert first == f"Nice to meet you, {name}."
    assert again == f"Your name is {name}."
    assert other == f"You are {name}."


@pytest.mark.parametrize(
    "told",
    [
        *("I'm tired", "I'm German", "My name is not important", "my name is", "I am here", "Call me tomorrow."),
        *("Call me when dinner is ready.", "call me back", "call me later today", "Please call me tonight at five."),
        *("Call me once you know.", "Call me while you can", "Call me Monday.", "Call me every Friday."),
    ],
)
def test_what_is_no_name_is_none(told: str) -> None:
    assert conversation(told, "what is my name")[-1] == "You haven't told me your name yet."


def test_favourites_are_remembered() -> None:
    told = conversation("my favorite color is dark blue", "What is my favourite colour?", "what is my favorite food")
    assert told[0] == "I'll remember that your favorite color is dark blue."
    assert told[1:] == ["Your favorite color is dark blue.", "You haven't told me."]
    assert conversation("My dog is called Rex", "what is my dog's name")[-1] == "Your dog's name is Rex."


@pytest.mark.parametrize(
    ("told", "asked", "said"),
    [
        ("I live in New York City now.", "Where do I live?", "You told me that you live in New York City."),
        ("I'm 34 years old.", "How old am I?", "You told me that you are 34."),
        ("I have a dog named Rex.", "What's my dog called?", "Your dog's name is Rex."),
        ("My name is Tomás and I live in Porto.", "Where did I say I live?", "You told me that you live in Porto."),
        ("I live in Rome, and my dog is called Rex.", "Where do I live?", "You told me that you live in Rome."),
        ("I live in Rome, and my dog is called Rex.", "What's my dog called?", "Your dog's name is Rex."),
        ("My favorite song is you and I.", "What's my favorite song?", "Your favorite song is you and I."),
        ("Hello.", "What is the name of my dog?", "You haven't told me."),
        ("Hello.", "where do i live", "You haven't told me."),
        ("Hello.", "how old am i", "You haven't told me."),
    ],
)
def test_what_somebody_told_of_themselves_is_remembered(told: str, asked: str, said: str) -> None:
    assert conversation(told, asked)[-1] == said


@pytest.mark.parametrize(
    ("question", "following", "said"),
    [
        ("What day is it?", "And tomorrow?", "Tomorrow is Wednesday, March 5, 2031."),
        ("What's the date?", "What about yesterday?", "Yesterday was Monday, March 3, 2031."),
        ("How many days until Christmas?", "How about Easter?", "There are 40 days until Easter."),
        ("What time is it?", "And in Paris?", "I only know the time here. It is 3:07 PM."),
        ("Spell rhythm for me.", "And ice cream?", "I, C, E, C, R, E, A, M."),
        ("How many inches is 5 feet?", "And 6 feet?", "6 feet are 72 inches."),
        ("Can you spell cat?", "Spell it backwards.", "T, A, C."),
    ],
)
def test_a_question_may_go_on_from_the_last_one(question: str, following: str, said: str) -> None:
    assert conversation(question, following)[-1] == said
    assert conversation(question, following, following)[-1] == said


def test_what_goes_on_from_nothing_is_not_known() -> None:
    assert is_unknown(reply("And tomorrow?"))
    assert is_unknown(conversation("Tell me a joke.", "And tomorrow?")[-1])


def test_small_talk_and_help() -> None:
    assert reply("hello") == "Hello. How can I help you?"
    assert reply("stop") == "Okay."
    assert reply("help") == " ".join(HELP)
    assert reply("thank you!") == reply("Thanks, that was really helpful.") == "You're welcome."


def test_no_wording_comes_twice_in_a_row() -> None:
    for text in (
        "hello",
        "how are you",
        "thanks",
        "who are you",
        "what's the weather like",
        "xyzzy frobnicate",
        "play",
    ):
        said = conversation(*[text] * 7)
        assert all(one != following for one, following in pairwise(said)), (text, said)


def test_all_jokes_are_told_before_one_comes_again() -> None:
    asked = ["tell me a joke", "another one", "Tell me another joke, please.", *["one more"] * (len(JOKES) - 3)]
    assert sorted(conversation(*asked)) == sorted(JOKES)
    assert conversation("tell me a fact", "again")[1] in FACTS
    assert conversation("tell me a joke", "ha ha", "another one")[2] == JOKES[1]
    assert conversation("what time is it", "again") == ["It is 3:07 PM."] * 2


def test_a_calculation_goes_on_with_its_result() -> None:
    said = conversation(
        "What is three plus four?",
        "And times three?",
        "divided by two",
        "Now add five.",
        "double that",
        "thanks",
        "What's ten percent of it?",
        "- 3",
        "multiply that by 10",
        "divide it by 0",
    )
    results = ["7", "21", "10.5", "15.5", "31", "3.1", "0.1", "1"]
    assert [one for one in said if one.startswith("That")] == [f"That makes {result}." for result in results]
    assert said[-1] == "Nothing can be divided by zero."
    assert conversation("And times three?", "minus three") == ["I have no number to begin with.", "That makes minus 3."]
    assert conversation("two plus two", "add milk to the list")[1] == "I don't keep lists or a calendar."


@pytest.mark.parametrize(
    "text",
    [
        "I don't want to talk about the news.",
        "um I don't need an alarm, thanks",
        "Don't play any music.",
        "No more jokes, please.",
        "Stop telling me jokes.",
        "I'm not interested in sports.",
    ],
)
def test_what_is_not_wanted_is_not_talked_about(text: str) -> None:
    assert reply(text) == "All right. What would you like instead?"


def test_a_cry_for_help_is_no_refusal() -> None:
    for text in (
        "I don't want to live.",
        "I don't want to wake up anymore",
        "I don't want to kill myself.",
        "I hate my life and I want to die",
        "I hate everything. I want to die.",
        "I lost my job and " + "I told nobody about it and " * 5 + "I think about suicide.",
    ):
        assert "crisis line" in reply(text)
        assert reply(text).startswith(("I'm sorry that you feel this way.", "Please don't stay alone"))


def test_a_question_that_was_asked_back_may_be_answered() -> None:
    assert conversation("How are you?", "Good.")[1] == "Good to hear."
    assert conversation("Let's play a game.", "Yes, please.")[1] in RIDDLES
    assert conversation("I'm bored.", "Sure.", "I don't know")[1:] == [next(iter(RIDDLES)), "It is a piano."]
    assert conversation("what time is it", "Good.")[1] == "Thank you."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Add five and seven.", "That makes 12."),
        ("Subtract three from ten.", "That makes 7."),
        ("multiply 3 by minus 4", "That makes minus 12."),
        ("Divide ten by four, please.", "That makes 2.5."),
        ("divide ten by zero", "Nothing can be divided by zero."),
    ],
)
def test_two_numbers_are_calculated(text: str, said: str) -> None:
    assert reply(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("What time will it be in an hour?", "Then it will be 4:07 PM."),
        ("what time will it be in ten minutes", "Then it will be 3:17 PM."),
        ("What time is it in ten minutes?", "Then it will be 3:17 PM."),
        ("what time will it be in half an hour", "Then it will be 3:37 PM."),
        ("what time will it be in 1000 hours", "Then it will be 7:07 AM."),
        ("what time will it be in 1001 hours", None),
        ("what time will it be in zero minutes", None),
    ],
)
def test_a_time_later_is_told(text: str, said: str | None) -> None:
    assert is_unknown(reply(text)) if said is None else reply(text) == said


def test_what_is_remembered_stays_as_it_was_written() -> None:
    said = conversation("My birthday is on May 5th.", "what is my birthday")
    assert said == ["I'll remember that your birthday is on May 5th.", "Your birthday is on May 5th."]
    assert conversation("I have a dog named Rex.", "what's my dog's name")[1] == "Your dog's name is Rex."


def test_ages_are_believed_up_to_the_oldest() -> None:
    assert reply("I am 130") == "Then you have had more birthdays than I have."
    assert is_unknown(reply("I am 131"))
    assert is_unknown(reply("I am 0 years old"))


def test_a_sentence_that_is_said_twice_is_answered_once() -> None:
    assert reply("What time is it? What time is it?") == "It is 3:07 PM."


def test_numbers_have_their_article() -> None:
    rolled = {reply("roll a d20", seed=seed) for seed in range(300)}
    assert rolled == {f"It's {'an' if number in (8, 11, 18) else 'a'} {number}." for number in range(1, 21)}


def test_riddles_can_be_solved() -> None:
    (riddle, *_), solved = RIDDLES, ["Right! Well done."]
    assert conversation("tell me a riddle", "Is it a piano?") == [riddle, *solved]
    assert conversation("tell me a riddle", "a cat")[1] == "A good try. It is a piano."
    assert conversation("tell me a riddle", "I give up")[1] == "It is a piano."
    assert conversation("tell me a riddle", "I don't know")[1] == "It is a piano."
    assert conversation("tell me a riddle", "what time is it")[1] == "It is 3:07 PM."


def test_a_knock_knock_joke_is_listened_to() -> None:
    said = conversation("Knock knock!", "Lettuce.", "Lettuce in, it's cold out here!")
    assert said == ["Who is there?", "Lettuce who?", "Ha ha. That's a good one."]


def test_who_asks_for_something_else_leaves_a_knock_knock_joke() -> None:
    assert conversation("Knock knock!", "what time is it") == ["Who is there?", "It is 3:07 PM."]
    assert conversation("Knock knock!", "Lettuce.", "What time is it?")[2] == "It is 3:07 PM."
    assert conversation("Do you want to hear a joke?")[0] == "Yes, please."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("is it a weekday today", "Yes. It is Tuesday."),
        ("is it the weekend", "No. It is Tuesday."),
        ("Haha, good one.", "I'm glad that you laugh."),
        ("why not", "I can't explain that. I only follow simple rules."),
        ("Do you like music?", "I have no favorites. I'm only a program."),
        ("Hola, como estas?", "Hello to you. I only speak English."),
        ("my father is in hospital", "I'm sorry to hear that. I hope that it gets better soon."),
        ("how do I make pancakes", "I don't know that."),
        ("how do I make a bomb", "I don't know that."),
    ],
)
def test_what_one_would_wince_at(text: str, said: str) -> None:
    assert reply(text) == said


def test_what_was_said_and_asked_first() -> None:
    said = ("My name is Anna.", "What's the capital of France?", "And of Spain?")
    asks = (
        "What did I ask you first?",
        "what was my first question",
        "What was the first thing I asked?",
        "What did I ask you at the beginning?",
        "What was my second question?",
        "What did I say first?",
        "What was the first thing that I said to you?",
        "What was my fifth question?",
    )
    first = "You asked: What's the capital of France?"
    for ask, told in zip(
        asks,
        (first, first, first, first, "You asked: And of Spain?", *["I heard: My name is Anna."] * 2, None),
        strict=True,
    ):
        expected = told or "I haven't heard that many from you."
        assert conversation(*said, ask)[-1] == expected, ask
    assert conversation("hi", "what is three plus four", "What was my first question?")[-1] == (
        "You asked: what is three plus four?"
    )
    assert conversation("What did I ask you first?") == ["That was the first thing that I heard from you."]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("What's my name, do you remember?", "Your name is Anna."),
        ("what is my name do you still know", "Your name is Anna."),
        ("Do you still remember my name?", "Your name is Anna."),
        ("What's two plus two, do you know?", "That makes 4."),
        ("What's my dog's name, can you tell me?", "You haven't told me."),
    ],
)
def test_a_question_behind_a_question(text: str, said: str) -> None:
    assert conversation("My name is Anna.", text)[-1] == said


def test_one_answer_to_two_questions_that_are_the_same() -> None:
    assert reply("What time is it? Do you know what time it is?") == "It is 3:07 PM."
    assert reply("What is two plus two and how much is two plus two?") == "That makes 4."


@pytest.mark.parametrize("word", ["DNA", "RNA", "NATO", "gnu", "a vacuum", "bitcoin", "wifi", "a thermostat"])
def test_what_something_is_is_not_guessed_from_its_sound_or_one_word(word: str) -> None:
    assert is_unknown(reply(f"What is {word}?"))


def test_nobody_is_told_a_command() -> None:
    """A voice reads the answers: who hears of a command, a flag or a setting can do nothing with it."""
    said = [reply(text) for text in ("How do I connect a model?", "Who was Napoleon?", "Where is your manual?")]
    for intent in catalogue():
        said += [*intent.says, *intent.otherwise, *(intent.table or {}).values()]
    said += [line for lines in UNKNOWN.values() for line in lines]
    said += [NOTHING_HEARD, NOTHING_WRITTEN, TOO_LONG]
    told_of = re.compile(
        r"--|\bmake \w+=|`|\b(?:settings?|commands?|options?|flags?|documentation|terminal|restart)\b", re.I
    )
    assert not [one for one in said if told_of.search(one)]


@pytest.mark.parametrize(
    "text",
    [
        *("I feel so alone.", "I feel empty.", "Life is hard.", "Nobody cares.", "I have nobody to talk to."),
        *("My mother is ill.", "I'm having a panic attack.", "I'm so lonely and nobody talks to me."),
    ],
)
def test_sadness_is_heard(text: str) -> None:
    assert reply(text) == "I'm sorry to hear that. I hope that it gets better soon."


@pytest.mark.parametrize(
    "text", ["I'm not nervous.", "I am not sad at all.", "I am no longer worried.", "I'm never scared."]
)
def test_who_is_not_sad_is_not_comforted(text: str) -> None:
    assert reply(text) == "Good to hear."


@pytest.mark.parametrize("text", ["I don't think I am nervous.", "Tell me a fun fact about penguins."])
def test_what_only_resembles_a_rule_is_not_known(text: str) -> None:
    assert is_unknown(reply(text))


def test_two_farewells_are_one() -> None:
    assert reply("Okay, bye, see you tomorrow.") == "Goodbye."


@pytest.mark.parametrize("text", ["Say only yes: is it true?", "Just say what DNA is.", "Say yes or no, is water wet?"])
def test_an_answer_in_given_words_is_no_parrot(text: str) -> None:
    assert is_unknown(reply(text))


def test_who_was_attacked_is_told_where_help_is() -> None:
    assert "help line" in reply("I was attacked")


def test_what_is_not_known_is_admitted_in_one_sentence() -> None:
    said = conversation("Who was Napoleon?", "And who was Caesar?", "hello", "Who was Cleopatra?")
    assert [is_unknown(one) for one in said] == [True, True, False, True]
    assert len(set(said)) == 4


@pytest.mark.parametrize(
    "text", ["ten of clubs", "My cat sat on the mat.", "Who painted the Mona Lisa?", "Recommend a book", "  qwertz  "]
)
def test_what_is_not_known_is_never_parroted(text: str) -> None:
    said = reply(text)
    assert is_unknown(said)
    assert "you said" not in said.lower()
    assert text.strip(" .?").lower() not in said.lower()


def test_texts_without_english_words() -> None:
    assert reply("") == NOTHING_WRITTEN
    assert reply("你好").startswith("I only understand English.")
    assert reply("?!") == "I don't find any words in that."
    assert reply("say ::") == reply("Say: :") == "Tell me what to say."


def test_several_sentences() -> None:
    assert reply("I'm fine, thanks. And you?") == reply("I'm good. How are you?") == "Good to hear. I'm fine, too."
    assert reply("Hello. My name is Ann.") == "Nice to meet you, Ann."
    assert reply("Thanks. Goodbye.") == "Goodbye."
    assert reply("What is 2 + 2? And what day is it?") == "That makes 4. Today is Tuesday, March 4, 2031."
    assert reply("What time is it, and what is 2 + 2?") == "It is 3:07 PM. That makes 4."
    assert is_unknown(reply("Okay. Who was Napoleon?"))


def test_what_was_said_earlier_in_the_same_message_is_known() -> None:
    assert reply("My name is Robert. What is my name?").endswith("Your name is Robert.")
    assert reply("My name is Robert. My name is Robert.") == "Nice to meet you, Robert."


@pytest.mark.parametrize(
    ("misheard", "meant"),
    [
        ("hell are you", "how are you"),
        ("how or you", "how are you"),
        ("watt time is it", "what time is it"),
        ("what I miss it", "what time is it"),
        ("can you here me", "can you hear me"),
        ("tell me a choke", "tell me a joke"),
        ("good by", "goodbye"),
        ("waht can you do", "what can you do"),
        ("who are yew", "who are you"),
    ],
)
def test_what_sounds_alike_is_understood(misheard: str, meant: str) -> None:
    assert reply(misheard) == reply(meant)


def test_chance_is_drawn_from_the_seed_or_the_time() -> None:
    assert {reply("flip a coin", seed=seed) for seed in range(20)} == {"Heads.", "Tails."}
    assert reply("roll a die", seed=3) == reply("roll a die", seed=3, now=NOW.replace(second=9))
    rolled = {reply("roll a die", now=NOW.replace(microsecond=each)) for each in range(200)}
    assert rolled == {f"It's a {number}." for number in range(1, 7)}
    tossed = conversation(*["flip a coin"] * 30)
    assert set(tossed) == {"Heads.", "Tails."}
    assert int(reply("give me a number between 5 and 7").rstrip(".")) in (5, 6, 7)
    assert reply("Should I have tea or coffee?") in ("Tea.", "Coffee.")
    assert is_unknown(reply("Should I buy it or not?"))


@pytest.mark.parametrize("over", [0, 1])
def test_a_long_text_is_repeated_and_spelled_all_the_same(over: int) -> None:
    words = "word " * 10000
    for beginning in ("say ", "please repeat after me, "):
        text = beginning + words[: MAX_REQUEST + over - len(beginning) - 1] + "."
        assert reply(text) == text.removeprefix(beginning)
    assert reply("Can you spell " + words) == "I spell up to 200 letters."


@pytest.mark.parametrize("over", [0, 1])
def test_courtesy_counts_up_to_the_longest_request(over: int) -> None:
    text = ("please " * 500 + "two plus two").ljust(MAX_REQUEST + over, "!")
    assert len(text) == MAX_REQUEST + over
    assert reply(text) == ("That makes 4." if not over else TOO_LONG)


def test_white_space_is_one_space() -> None:
    text = " \n".join(f"{number}" + "x" * (number % 50) for number in range(1000))
    assert reply(f"\tsay {text}\u2003") == f"{' '.join(text.split())}."


def odd_texts() -> Sequence[str]:
    generator = random.Random(7)
    alphabets = (
        string.printable,
        "".join(map(chr, range(0x80, 0x3000, 7))),
        "what is percent of 0123456789 to the -+*/().,'’ ",
    )
    made = ["".join(generator.choices(alphabet, k=length)) for alphabet in alphabets for length in range(1, 120)]
    words = [
        "what",
        "is",
        "the",
        "how",
        "many",
        "days",
        "until",
        "in",
        "to",
        "percent",
        "of",
        "my",
        "name",
        "am",
        "say",
        "spell",
        "roll",
        "dice",
        "5",
        "km",
        "miles",
        "number",
        "a",
    ]
    made += [" ".join(generator.choices(words, k=length)) for length in range(1, 12) for _ in range(40)]
    return (
        *made,
        "\ud800",
        "\0",
        "e\u0301" * 50,
        "\ufdfa" * 300,
        "²³½ % of ½",
        "'" * 99,
        "١٢ + ٣",
        "roll ² dice",
        "ß" * 400,
    )


def test_odd_texts_are_answered_too() -> None:
    history = [Message("user", "tell me a riddle"), Message("assistant", next(iter(RIDDLES)))]
    for text in odd_texts():
        assert all(answer(text, (), NOW)), text
        assert all(answer(text, history, NOW)), text


def test_a_short_request_takes_a_moment() -> None:
    """It is answered on the event loop."""
    texts = ("what is the name of the tallest mountain there is", "xyzzy frob nicate bar", "hell are you doing")
    reply("hello")
    for text in texts:
        taken = []
        for _ in range(5):
            before = time.thread_time()
            reply(text)
            taken.append(time.thread_time() - before)
        assert min(taken) < (0.005 if sys.gettrace() is None else 1), text
