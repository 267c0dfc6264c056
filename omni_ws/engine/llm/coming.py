"""What is told of a language model that is to answer instead of the rules; see ``auto_llm.AutoLlm``."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from omni_ws.engine.base import Engine
from omni_ws.engine.composed.parts import Role, parts_of
from omni_ws.errors import SessionConflict

#: The name of the rules, as that of an engine and of a model.
RULES: Final = "rules"


class ComingState(StrEnum):
    """What becomes of the model that is to answer: it may be had, is fetched, is loaded, or could not be had."""

    OFFERED = "offered"
    FETCHING = "fetching"
    LOADING = "loading"
    FAILED = "failed"


class Coming(Struct, frozen=True, omit_defaults=True):
    """The model that is to answer instead of the rules. ``why`` is a line for people: what happens, or what to do."""

    model: str
    state: ComingState
    why: str
    bytes_done: int | None = None
    bytes_total: int | None = None
    #: Whether ``fetch`` would begin with it.
    can_begin: bool = False


class GrowingLlm:
    """Base of an LLM that may become another one while the server runs."""

    #: The model that is to answer; None if none is.
    coming: Coming | None = None

    @property
    def engine(self) -> Engine:
        """The engine that answers now."""
        raise NotImplementedError

    @property
    def advice(self) -> tuple[str, ...]:
        """Lines for a person who can restart the server."""
        return ()

    async def fetch(self) -> Coming:
        """Begin to fetch the model. Raises SessionConflict if there is none, or this is not allowed."""
        raise SessionConflict("there is no model to fetch")


def growing_llm(engine: object) -> GrowingLlm | None:
    """Return the GrowingLlm that ``engine`` is, or that is its LLM; None if there is none."""
    llm = getattr(engine, "llm_part", engine)
    return llm if isinstance(llm, GrowingLlm) else None


def has_model(engine: Engine) -> bool:
    """Return whether a language model answers now, alone or besides the rules."""
    llm = parts_of(engine)[Role.LLM.value]
    return llm is not None and llm.name != RULES
