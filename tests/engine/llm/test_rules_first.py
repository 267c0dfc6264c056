"""Rules in front of a model: they answer what they know exactly, and leave the rest to it."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from support.engine_answers import answered, text
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import RetortEngine

from omni_ws.core.history import Message
from omni_ws.engine.base import AnswerOptions, StructuredOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.questions import (
    Article,
    Encyclopedia,
)
from omni_ws.engine.llm.rules_engine import MAX_REQUEST, SPOKEN_SEC, RulesFirst

OWN = "Answer briefly."
TOOLS = ({"type": "function", "function": {"name": "clock"}},)


WEATHER = (
    *("Will it snow tonight?", "Will it rain?", "Is it raining?", "Is it snowing?"),
    *("Is it cold outside?", "Is it windy today?", "Will it be hot tomorrow?", "Is it going to be sunny this weekend?"),
)
TIMERS = (
    *("Create a timer.", "Make a timer for ten minutes.", "Set an alarm for 7 am tomorrow.", "Cancel my alarm."),
    *("Remind me to call Bob.", "Remind me in half an hour.", "Remind me about the meeting.", "Remind me at six."),
    *("Set a reminder to water the plants.", "Set an alarm for tomorrow morning.", "Wake me up at seven."),
)
CALLS = ("Email my landlord.", "Call my mom.", "Call him back, please.", "Text my wife that I'm late.")
MOVES = ("Go forward ten meters.", "Turn left.", "Step back two feet", "Turn around and come here.")
DEVICES = ("Put on the light.", "Turn off the kitchen light.", "Switch the heating on.")


def engine() -> RulesFirst:
    return RulesFirst(RetortEngine("the model"), own_instructions=OWN, now=lambda: datetime(2031, 3, 4, 15, 7))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("What time is it?", "It is 3:07 PM."),
        ("Hi! What's nineteen times four?", "That makes 76."),
        ("How many feet are in a mile?", "1 mile is 5280 feet."),
        ("Spell banana.", "B, A, N, A, N, A."),
        ("What day is tomorrow and what is two plus two?", "Tomorrow is Wednesday, March 5, 2031. That makes 4."),
        ("Set a timer for five minutes.", "I can't set timers or reminders. I only speak when I'm spoken to."),
        ("Who am I talking to?", "I'm a voice assistant, a computer program."),
        ("Are you a human being?", "I'm a program, not a person."),
        ("Do I need a jacket this evening?", "I can't tell you the weather. I have no forecast."),
        *((asked, "I can't set timers or reminders. I only speak when I'm spoken to.") for asked in TIMERS),
        *((asked, "I can't send messages or call anyone.") for asked in CALLS),
        *((asked, "I can't move. I'm only a voice.") for asked in MOVES),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("How many legs does a spider have?", "A spider has eight legs."),
        ("Tell me a joke.", "Why did the scarecrow win a prize? He was outstanding in his field."),
        *((asked, "I can't control any devices. I'm only a voice.") for asked in DEVICES),
        *((asked, "I can't tell you the weather. I have no forecast.") for asked in WEATHER),
        (
            "I want to die",
            "I'm sorry that you feel this way. I'm only a program. Please talk to someone you trust, or "
            "call a crisis line now.",
        ),
    ],
)
async def test_rules_answer_what_they_know_exactly(asked: str, said: str) -> None:
    assert (await answered(engine(), text(asked))).text == said
    assert (await answered(engine(), text(asked), instructions=OWN)).text == said


@pytest.mark.parametrize(
    "asked",
    [
        "What is DNA?",
        "How are you?",
        "Who was Anna?",
        "Tell me a joke about cats.",
        "Go forward with the plan.",
        "How do I make pancakes?",
        "Say something nice about dogs.",
        "My alarm did not ring this morning.",
        "Who invented the umbrella?",
        "Is it cold on Mars?",
        # these a model can do, or talk of
        *("Create a timer in Python", "Make a timer app in JavaScript", "Remind me who wrote Faust"),
        *("remind me what we talked about", "Remind me in one sentence who wrote Faust"),
        *("Email my landlord: draft it politely", "Call my bluff.", "Put on your thinking cap"),
        # perhaps Mars, too
        *("Is it cold?", "Is it hot?", "Will it be hot?", "Is it windy?"),
        "My name is Anna and I would like to know about Rome.",
        "What is my name?",  # nobody has told it in a form that rules know
        "What time is it, and who wrote Faust?",
    ],
)
async def test_the_model_answers_the_rest(asked: str) -> None:
    assert (await answered(engine(), text(asked))).text == "the model"


async def test_a_long_text_is_left_to_the_model_unread() -> None:
    blanks = " " * MAX_REQUEST  # to look through megabytes of them would block the event loop for a second
    assert (await answered(engine(), text(f"What time is it?{blanks}"))).text == "the model"


async def test_plain_facts_of_an_encyclopedia_are_answered_with_their_article_and_it_is_credited() -> None:
    people = (Article("Ada Lovelace", "Ada Lovelace", "Ada Lovelace was a writer.", "English (1815–1852)", True),)
    works = (Article("Emma", "Emma", "Emma is a novel.", "1815 novel by Jane Austen", False),)
    book = Encyclopedia((*people, *works), {"ada lovelace": 0, "emma": 1}, {"lovelace": 0})
    rules = RulesFirst(RetortEngine("the model"), encyclopedia=lambda: book)
    await rules.start()
    assert rules.credited == f"{rules.model} and Wikipedia (CC BY-SA 4.0)"
    for asked, said, title in (
        ("Who was Ada Lovelace?", "Ada Lovelace was a writer.", "Ada Lovelace"),
        ("When was Lovelace born?", "Ada Lovelace was born in 1815.", "Ada Lovelace"),
        ("Who wrote Emma?", "Jane Austen wrote Emma.", "Emma"),
    ):
        answer = await answered(rules, text(asked))
        assert answer.text == said
        (cited,) = answer.finished.citations
        assert (cited.title, cited.start, cited.end) == (title, 0, len(said))
    for asked in ("Who was Lovelace?", "What is Emma?", "Tell me about Ada Lovelace.", "Who is Emma Stone?"):
        assert (await answered(rules, text(asked))).text == "the model"


async def test_who_was_told_to_be_somebody_says_so() -> None:
    rules = RulesFirst(RetortEngine("I'm Bob."), own_instructions="You are Bob.", of_itself=False)
    assert (await answered(rules, text("Who are you?"))).text == "I'm Bob."
    assert (await answered(rules, text("What is two plus two?"))).text == "That makes 4."


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "Answer in French."},
        {"history": (Message("system", "Answer in French."),)},
        *({"tools": TOOLS, "instructions": given} for given in ("", OWN)),
        {"options": AnswerOptions(structure=StructuredOutput())},
    ],
)
async def test_a_client_that_wants_something_of_the_model_gets_it(fields: dict[str, Any]) -> None:
    assert (await answered(engine(), text("What time is it?"), **fields)).text == "the model"


async def test_both_in_one_conversation() -> None:
    both = engine()
    async with live_server(ComposedEngine(both)) as server, native_client(server) as client:
        said = []
        for words in ("My name is Anna.", "What's my name, do you remember?", "Who was Anna?", "What is 2 + 2?"):
            await client.say(words)
            said.append((await client.answer()).text)
        assert said == ["the model", "Your name is Anna.", "the model", "That makes 4."]


@pytest.mark.virtual_clock
async def test_what_rules_answered_is_computed_unless_more_is_said_before() -> None:
    """What would be computed is not what the conversation goes on with."""
    llm = RetortEngine("the model", shares_cores=True)
    rules = RulesFirst(llm)
    for asked in ("What is two plus two?", "What is two plus three?"):
        await answered(rules, text(asked), conversation="C")
    await asyncio.sleep(2 * SPOKEN_SEC)
    (ahead,) = llm.requests
    assert (ahead.computes_only, ahead.conversation) == (True, "C")
    assert [one.text for one in ahead.history] == ["What is two plus three?", "That makes 5."]
    assert not rules._ahead
