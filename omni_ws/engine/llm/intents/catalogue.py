"""The catalogue: all intents, those first that are meant where several fit."""

from __future__ import annotations

from typing import Final

from omni_ws.engine.llm.intents.about_me import ABOUT_ME
from omni_ws.engine.llm.intents.beyond import BEYOND
from omni_ws.engine.llm.intents.chance import CHANCE
from omni_ws.engine.llm.intents.clock import CLOCK
from omni_ws.engine.llm.intents.controls import CONTROLS
from omni_ws.engine.llm.intents.feelings import FEELINGS
from omni_ws.engine.llm.intents.fun import FUN
from omni_ws.engine.llm.intents.greetings import GREETINGS
from omni_ws.engine.llm.intents.hearing import HEARING
from omni_ws.engine.llm.intents.intent import Intent
from omni_ws.engine.llm.intents.letters import LETTERS
from omni_ws.engine.llm.intents.names import NAMES
from omni_ws.engine.llm.intents.numbers import NUMBERS
from omni_ws.engine.llm.intents.units import UNITS

#: Of intents whose keys tell as much, or that sound as much alike, the first is meant.
INTENTS: Final[tuple[Intent, ...]] = (
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
