"""A model whose fetch a test holds, and an LLM that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.scripted_engines import RetortEngine

from omni_ws.core.chunks import Modality
from omni_ws.engine.base import Engine
from omni_ws.engine.llm.auto_llm import AutoLlm, FetchedMind, Found, Plan
from omni_ws.engine.llm.rules_engine import RulesEngine, RulesFirst
from omni_ws.errors import EngineFailed
from omni_ws.weights import (
    Fetching,
    Progress,
)

BEGINS = Plan(True, True, "rules answer at once, and a model soon")
OFFERED = Plan(False, True, "to talk with a model, start with --llm model")
REFUSED = Plan(False, False, "to talk with a model, start with --llm model, on a larger machine")


class TextModel(RetortEngine):
    """A model that takes text alone, once the input is whole, and tells what it was given."""

    def __init__(self, **changes: Any) -> None:
        text_alone = {"input_modalities": frozenset({Modality.TEXT}), "pictures_in_history": frozenset[Modality]()}
        able = {**text_alone, "extend": False, "raw_prompts": False, **changes}
        super().__init__("As the model says.", **able)
        self.name, self.model = "gguf", "a model"
        self.broken: EngineFailed | None = None
        self.stopped = False

    async def start(self) -> None:
        if self.broken is not None:
            raise self.broken
        await super().start()

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()


@dataclass
class Mind(FetchedMind):
    """A model whose fetch a test holds, and lets go on."""

    made: TextModel = field(default_factory=TextModel)
    planned: Plan = BEGINS
    model: str = "a model"
    go_on: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    fetches: int = 0
    told: tuple[Progress, ...] = ()
    given_up: threading.Event = field(default_factory=threading.Event)

    def plan(self) -> Plan:
        return self.planned

    def fetch(self, fetching: Fetching, *, weights: bool) -> None:
        self.fetches += 1
        for progress in self.told:
            fetching.progress(progress)
        while not self.go_on.wait(0.01):
            if fetching.stop.is_set():
                self.given_up.set()
            fetching.go_on()
        if self.failure is not None:
            raise self.failure

    def engine(self) -> Engine:
        return RulesFirst(self.made)


async def nothing() -> Found:
    return Found()


def auto(mind: Mind | None, find: Callable[[], Any] = nothing) -> AutoLlm:
    return AutoLlm(RulesEngine(), find=find, mind=mind)
