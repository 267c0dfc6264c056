"""The catalogue: all intents, those first that are meant where several fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_ws.engine.llm.intents.about_me import ABOUT_ME
from omni_ws.engine.llm.intents.beyond import BEYOND
from omni_ws.engine.llm.intents.clock import CLOCK
from omni_ws.engine.llm.intents.controls import CONTROLS
from omni_ws.engine.llm.intents.feelings import FEELINGS
from omni_ws.engine.llm.intents.fun import FUN
from omni_ws.engine.llm.intents.greetings import GREETINGS
from omni_ws.engine.llm.intents.hearing import HEARING
from omni_ws.engine.llm.intents.matcher import Intent
from omni_ws.engine.llm.intents.names import NAMES
from omni_ws.engine.llm.intents.numbers import CHANCE, LETTERS, NUMBERS, UNITS

#: What a small model gets wrong and rules do exactly, or say as it is; the rest a model does better.
_EXACT: Final = frozenset(
    (
        *(intent.name for topic in (CLOCK, CHANCE, UNITS, NUMBERS) for intent in topic),
        *(
            "alphabet",
            "alphabet backwards",
            "count",
            "count to",
            "count down",
            "backwards",
            "how many letters",
            "spell",
        ),
        *("what is my name", "what did i say first"),
        *("crisis", "assault", "timer", "smart home", "messages and calls"),
    )
)

#: Of intents whose keys tell as much, or that sound as much alike, the first is meant.
INTENTS: Final[tuple[Intent, ...]] = tuple(
    replace(intent, exact=intent.name in _EXACT)
    for intent in (
        *GREETINGS,
        *HEARING,
        *CONTROLS,
        *ABOUT_ME,
        *FEELINGS,
        *NAMES,
        *FUN,
        *CLOCK,
        *LETTERS,
        *CHANCE,
        *UNITS,
        *NUMBERS,
        *BEYOND,
    )
)
