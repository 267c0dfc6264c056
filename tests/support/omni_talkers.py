"""Drives a Talker as its process does, and makes checkpoints whose codes end elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from support.omni_reference import SPEAKER, Spoken, spoken
from support.tiny_omni import Family, omni_checkpoint

from omni_ws.engine.omni.slot_talker import SlotTalker, load_talker
from omni_ws.engine.omni.step_process import Codes, CodesEnd, PromptRows, TalkerItem

LONGEST = 768
SLOTS = 8
#: As the reference computes, on a machine with a GPU too: codes are compared exactly.
PRECISE: Final[Mapping[str, Any]] = {"device": "cpu", "dtype": "float32"}
_END_OF_CODES: Final = {Family.QWEN25: "tts_codec_end_token_id", Family.QWEN3: "codec_eos_token_id"}


@cache
def talker(family: Family, codec_end: int | None = None) -> SlotTalker:
    """The Talker of the tiny checkpoint, with ``codec_end`` as the code that ends an answer; loaded once."""
    folder = omni_checkpoint(family).resolve()
    if codec_end is None:
        return load_talker(folder, slots=SLOTS, longest=LONGEST, **PRECISE)
    config = json.loads((folder / "config.json").read_text())
    config["talker_config"][_END_OF_CODES[family]] = codec_end
    with TemporaryDirectory() as other:
        for path in folder.iterdir():
            if path.name != "config.json":
                (Path(other) / path.name).symlink_to(path)
        (Path(other) / "config.json").write_text(json.dumps(config))
        return load_talker(other, slots=SLOTS, longest=LONGEST, **PRECISE)


def new_talker(family: Family, **options: Any) -> SlotTalker:
    """Another Talker of the tiny checkpoint."""
    return load_talker(omni_checkpoint(family), slots=SLOTS, longest=LONGEST, **{**PRECISE, **options})


def greedy(family: Family, **settings: Any) -> dict[str, Any]:
    return {"voice": SPEAKER[family], "temperature": 0, **settings}


class Driven:
    """Sessions of a Talker and what they have made."""

    def __init__(self, model: SlotTalker) -> None:
        self.model = model
        self.codes: dict[int, list[NDArray[np.int64]]] = {}
        self.ends: dict[int, CodesEnd] = {}
        self.items: dict[int, list[Codes]] = {}

    def open(self, session: int, settings: dict[str, Any], *, frames: int = 1000) -> None:
        self.model.open(session, settings)
        self.model.grant(session, frames)
        self.codes[session], self.items[session] = [], []

    def step(self) -> None:
        for session, item in self.model.step():
            assert session not in self.ends
            self.items[session].append(item)
            self.codes[session] += list(item.codes)
            if item.end is not None:
                self.ends[session] = item.end

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until there is nothing to do."""
        while self.model.busy and not until():
            self.step()

    def made(self, session: int) -> NDArray[np.int64]:
        return np.array(self.codes[session]).reshape(-1, self.model.codebooks)


def speak(
    model: SlotTalker, items: Iterable[TalkerItem], settings: dict[str, Any]
) -> tuple[NDArray[np.int64], CodesEnd | None]:
    """Run one session alone, working on each item before the next; returns its codes and its end."""
    driven = Driven(model)
    driven.open(0, settings)
    for item in items:
        model.feed(0, item)
        driven.run()
    model.close(0)
    return driven.made(0), driven.ends.get(0)


def of(answer: Spoken, *, ends: bool) -> SlotTalker:
    """The Talker that an answer of the reference is compared with."""
    return talker(answer.family, answer.codec_end if ends else None)


def long_prompt(family: Family, rows: int) -> PromptRows:
    """A user's turn of ``rows`` rows, and the beginning of the assistant's."""
    prompt = spoken(family, "text").prompt_rows()
    begin = int(np.flatnonzero(prompt.tokens == prompt.tokens[0])[1])
    size = prompt.hidden.shape[1]
    head, tail = prompt.tokens[begin : begin + 3], prompt.tokens[-3:]
    letters = np.full(rows - 3, 97, np.int64)
    tokens = np.concatenate((head, letters, tail if family is Family.QWEN3 else tail[:0]))
    states = np.full(len(tokens), family is Family.QWEN25)
    hidden = np.zeros((int(states.sum()), size), np.float32)
    return PromptRows(tokens, np.tile(np.arange(len(tokens)), (3, 1)), states, hidden)
