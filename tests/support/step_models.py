"""Small StepModels whose output a test can work out: what a process of a Talker or vocoder runs in the tests."""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.step_process import (
    AnswerEnd,
    AnswerRows,
    Codes,
    CodesEnd,
    LoadedModel,
    PromptReset,
    PromptRows,
    StepResult,
    VocoderInput,
)
from omni_ws.errors import EngineOverloaded, InvalidValue

#: A token that the Talker refuses, and one at which its reader fails.
REFUSED_TOKEN = 999
FATAL_TOKEN = 998
SAMPLES_PER_FRAME = 240


@dataclass(slots=True)
class _Speech:
    settings: Mapping[str, Any]
    prompt: int = 0
    rows: list[int] = field(default_factory=list)
    ended: bool = False
    granted: int = 0
    made: int = 0

    @property
    def ready(self) -> bool:
        if self.made < len(self.rows):
            return self.granted > 0
        return self.ended


class RowTalker:
    """Makes a frame for each row of the answer: its token, and the sum of all tokens of the prompt."""

    def __init__(self, slots: int = 4, fails: str | None = None) -> None:
        if fails == "unusable":
            raise ConfigurationError(["this model is not for you"])
        if fails == "defect":
            raise ZeroDivisionError("a defect")
        self.slots = slots
        self.memory_bytes = 1_000_000
        self._open: dict[int, _Speech] = {}

    def warm_up(self) -> None:
        """Nothing to do."""

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        if len(self._open) >= self.slots:
            raise EngineOverloaded("all slots are taken")
        if "refuse" in settings:
            raise InvalidValue(settings["refuse"])
        self._open[session] = _Speech(settings)

    def feed(self, session: int, item: Any) -> None:
        speech = self._open[session]
        match item:
            case PromptReset():
                speech.prompt = 0
            case PromptRows():
                if REFUSED_TOKEN in item.tokens:
                    raise InvalidValue("the prompt has a token that nobody can say")
                if FATAL_TOKEN in item.tokens:
                    raise IndexError("a fault of the reader")
                speech.prompt += int(item.tokens.sum())
            case AnswerRows():
                speech.rows += item.tokens.tolist()
            case AnswerEnd():
                speech.ended = True

    def grant(self, session: int, frames: int) -> None:
        self._open[session].granted += frames

    def close(self, session: int) -> None:
        self._open.pop(session, None)

    @property
    def busy(self) -> bool:
        return any(speech.ready for speech in self._open.values())

    def step(self) -> Sequence[StepResult]:
        results = []
        for session, speech in self._open.items():
            if not speech.ready:
                continue
            if speech.made < min(len(speech.rows), speech.settings.get("max_tokens", math.inf)):
                codes = np.array([[speech.rows[speech.made], speech.prompt]], np.int64)
                speech.made += 1
                speech.granted -= 1
                results.append((session, Codes(codes, rows_used=speech.made)))
            else:
                end = CodesEnd.STOP if speech.made == len(speech.rows) else CodesEnd.LENGTH
                speech.rows.clear()
                speech.ended = False
                results.append((session, Codes(np.zeros((0, 2), np.int64), end, rows_used=speech.made)))
        return results


class LevelVocoder:
    """Makes ``SAMPLES_PER_FRAME`` samples of a frame, each a thousandth of its first code."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.memory_bytes = 500_000
        self._open: dict[int, list[VocoderInput]] = {}

    def warm_up(self) -> None:
        """Nothing to do."""

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        if len(self._open) >= self.slots:
            raise EngineOverloaded("all slots are taken")
        self._open[session] = []

    def feed(self, session: int, item: Any) -> None:
        if (item.codes < 0).any():
            raise InvalidValue("codes are not negative")
        self._open[session].append(item)

    def grant(self, session: int, frames: int) -> None:
        """Vocoders need none."""

    def close(self, session: int) -> None:
        self._open.pop(session, None)

    @property
    def busy(self) -> bool:
        return any(self._open.values())

    def step(self) -> Sequence[StepResult]:
        results = []
        for session, items in self._open.items():
            if items:
                codes = items.pop(0).codes
                samples = np.repeat(codes[:, 0] / 1000, SAMPLES_PER_FRAME).astype(np.float32)
                results.append((session, samples))
        return results


def connect_and_wait(port: int) -> LoadedModel:
    """Never returns, as if weights took for ever to load. The connection ends with the process."""
    with socket.create_connection(("127.0.0.1", port)):
        while True:
            signal.pause()


def row_talker(**arguments: Any) -> LoadedModel:
    return RowTalker(**arguments), {"voices": ("Row", "Column")}


def level_vocoder(**arguments: Any) -> LoadedModel:
    facts = {"sample_rate": 24_000, "frame_ms": 10, "context_frames": 10, "block": None}
    return LevelVocoder(**arguments), facts
