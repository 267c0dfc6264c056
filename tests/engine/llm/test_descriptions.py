"""Sentences that are made of short descriptions, where they are grammatical for certain."""

from __future__ import annotations

import pytest

from omni_ws.engine.llm.questions import described

NAMES = frozenset(
    ("French", "Roman", "American", "European", "English", "Ukrainian", "Ugandan", "Urdu", "King", "President", "North")
)


def is_name(word: str) -> bool | None:
    return None if word == "Unheard" else word in NAMES


@pytest.mark.parametrize(
    ("title", "about", "extract", "said"),
    [
        (
            "Volcano",
            "Rupture in a planet's crust",
            "A volcano is a vent.",
            "A volcano is a rupture in a planet's crust.",
        ),
        (
            "Andes",
            "Mountain range in South America",
            "The Andes are high.",
            "The Andes are a mountain range in South America.",
        ),
        ("Samba", "Musical genre", "Samba, also known as x, is a dance.", "Samba is a musical genre."),
        ("Mars", "Fourth planet from the Sun", "Mars is red.", None),  # "the fourth" only before "of"
        (
            "Jurassic",
            "Second period of the Mesozoic",
            "The Jurassic is old.",
            "The Jurassic is the second period of the Mesozoic.",
        ),
        ("Paris", "Capital of France", "Paris is large.", "Paris is the capital of France."),
        ("Crete", "Largest Greek island", "Crete is large.", "Crete is the largest Greek island."),
        ("Trains", "Fastest transport systems", "Trains is it.", None),
        ("Botany", "Study of plants", "Botany is a science.", "Botany is the study of plants."),
        ("Rome", "North American league", "Rome is a league.", "Rome is a North American league."),
        ("Baltic", "Sea in Europe", "The Baltic is cold.", "The Baltic is a sea in Europe."),
        # Articles go by the sound.
        ("X", "Unit of length", "X is long.", "X is a unit of length."),
        ("X", "Uninhabited island", "X is dry.", "X is an uninhabited island."),
        ("X", "European country", "X is far.", "X is a European country."),
        ("X", "Ukrainian city", "X is far.", "X is a Ukrainian city."),
        ("X", "Ugandan city", "X is far.", "X is a Ugandan city."),
        ("X", "Urdu poem", "X is old.", "X is an Urdu poem."),
        ("X", "Herbal medicine process", "X is old.", "X is a herbal medicine process."),
        ("X", "1869 novel by Tolstoy", "X is long.", "X is an 1869 novel by Tolstoy."),
        ("X", "1949 novel", "X is long.", "X is a 1949 novel."),
        ("X", "8-bit unit", "X is short.", "X is an 8-bit unit."),
        ("X", "16th-century war", "X was long.", "X was a 16th-century war."),
        ("X", "18th-century war", "X was long.", "X was an 18th-century war."),
        # Left alone.
        ("Volcano", "Rupture", "The first volcano is old.", None),  # what verb it has is not known
        ("Volcano", "Rupture", "Volcanoes are old.", None),
        ("X", "Public transport", "X is fast.", None),  # it may not be counted
        ("X", "Race or ethnic-based discrimination", "X is bad.", None),
        ("X", "City and municipality in Y", "X is big.", None),
        ("X", "Type of food; kind of dish", "X is good.", None),
        ("X", "NATO country", "X is far.", None),
        ("X", "Unheard type of food", "X is good.", None),
        ("Alum", "Family of salts", "An alum is a salt.", None),  # one is no family
        ("Alums", "Family of salts", "Alums are salts.", "Alums are a family of salts."),
        ("X", "", "X is.", None),
        ("Paris, Texas", "City in Texas", "Paris, Texas is a city.", None),
        ("C (x", "Type of food", "C (x is good.", "C (x is a type of food."),  # no pattern
    ],
)
def test_things(title: str, about: str, extract: str, said: str | None) -> None:
    assert described(title, about, extract, person=False, is_name=is_name) == said


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ("French painter (1839–1906)", "Ada was a French painter."),
        ("American footballer (born 1985)", "Ada is an American footballer."),
        ("Roman poet (43 BC – 17 AD)", "Ada was a Roman poet."),
        ("King of England from 1189 to 1199", "Ada was King of England from 1189 to 1199."),
        ("Roman emperor from 98 to 117", "Ada was a Roman emperor from 98 to 117."),
        ("Poet, historian and statesman (1839–1906)", "Ada was a poet, historian and statesman."),
        ("French painter", None),  # whether alive is not known
        ("President of France since 2012 (born 1950)", None),
        ("Wife of a king (1839–1906)", None),
        ("First woman in space (1937–1999)", None),
        ("Twin brothers (1839–1906)", None),
        ("French painter; poet (1839–1906)", None),
    ],
)
def test_people(about: str, said: str | None) -> None:
    assert described("Ada", about, "", person=True, is_name=is_name) == said
