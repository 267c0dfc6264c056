"""StepModel: a model that serves many sessions in steps, on the one thread of a process of its own.

PromptRows and what follows it are what Thinker, Talker and vocoder hand on; TalkerSettings are those of a session.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class StepModel(Protocol):
    """A Talker or a vocoder, as its process runs it. Nothing here is thread-safe or blocks longer than one step."""

    def warm_up(self) -> None:
        """Run, compile or capture every shape that occurs, so that the first session is as fast as the others."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What weights, slots and buffers take on the device."""
        ...

    @property
    def slots(self) -> int:
        """How many sessions can be open."""
        ...

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        """Open a session. Raises NoSlot, or RefusedInput for settings."""
        ...

    def feed(self, session: int, item: Any) -> None:
        """Take an item; it is worked on in steps. Raises RefusedInput."""
        ...

    def grant(self, session: int, frames: int) -> None:
        """Allow a Talker to make ``frames`` codec frames more: nothing is made ahead of what was granted."""
        ...

    def close(self, session: int) -> None:
        """Free the slot and all that the session holds, at once; unknown sessions are ignored."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        ...

    def step(self) -> Sequence[StepResult]:
        """Do a bounded piece of work for a batch of sessions; returns what became ready."""
        ...


class LoadedModel(NamedTuple):
    """What a factory returns: the model, and what the server has to know of it."""

    model: StepModel
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made for a session: an item, or the error that ended the session."""

    session: int
    item: Any = None
    refused: str | None = None


class NoSlot(Exception):
    """All slots of the model are taken."""


class RefusedInput(Exception):
    """A session's settings or input are invalid, or too long; the message is for the client. The session is closed."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The next tokens of the prompt.

    ``tokens`` (n,) int64 and ``positions`` (3, n) int64, the Thinker's M-RoPE positions, are those of the whole prompt
    in order, including turns that the Talker does not read. ``hidden`` (k, hidden size) float32 holds the Thinker's
    states of the tokens that ``states`` (n,) bool marks: all of them for Qwen2.5, for Qwen3 those of audio, images
    and video.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    states: NDArray[np.bool_]
    hidden: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptReset:
    """The prompt begins anew: what came of it so far does not count."""


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """The next tokens of the answer that are to be spoken, in order; the first item of this kind ends the prompt.

    ``tokens`` (n,) int64; ``hidden`` (n, hidden size) float32 for Qwen2.5, (0, hidden size) for Qwen3, whose Talker
    needs no states of the answer. The token that ends the answer is not among them.
    """

    tokens: NDArray[np.int64]
    hidden: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """No more rows follow."""


#: What a Talker reads.
TalkerItem = PromptRows | PromptReset | AnswerRows | AnswerEnd


class CodesEnd(StrEnum):
    """Why a Talker ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Codes:
    """The next codec frames: ``codes`` (n, codebooks) int64, one codebook for Qwen2.5 and 16 for Qwen3.

    ``end`` is set on the last item, which may be empty. ``rows_used`` is the number of answer rows that the Talker has
    read so far.
    """

    codes: NDArray[np.int64]
    end: CodesEnd | None = None
    rows_used: int = 0


@dataclass(frozen=True, slots=True)
class VocoderInput:
    """Codes to be decoded now: ``codes`` (n, codebooks) int64; ``last`` with the last of the answer."""

    codes: NDArray[np.int64]
    last: bool = False


@dataclass(frozen=True, slots=True)
class VocoderOutput:
    """Samples (n,) float32 that no later code changes, of ``frames`` codec frames; may be empty.

    There is one for each VocoderInput, in order.
    """

    samples: NDArray[np.float32]
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSettings:
    """Voice and sampling of one session, checked.

    ``temperature`` 0 takes the likeliest code; ``top_k`` 0 and -1 mean all. ``max_tokens`` limits the codec frames.
    ``seed`` None draws one. Defaults are those of the model's family.
    """

    voice: str
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.05
    max_tokens: int = 4096
    seed: int | None = None

    def changed(self, settings: Mapping[str, Any], voices: Sequence[str]) -> TalkerSettings:
        """Return these with ``settings`` put over them; None there leaves a value as it is, but for ``seed``.

        A voice is known by its name in any case. Raises RefusedInput.
        """
        asked = {name: value for name, value in settings.items() if value is not None}
        if unknown := asked.keys() - {field.name for field in fields(self)}:
            raise RefusedInput(f"unknown setting of the Talker: {min(unknown)}")
        for name, reason in wrong_settings(asked).items():
            raise RefusedInput(f"talker.{name} {reason}")
        if "voice" in asked:
            asked["voice"] = _known_voice(asked["voice"], voices)
        if asked.get("seed", self.seed) is None:
            asked["seed"] = secrets.randbits(63)
        return replace(self, **asked)


def wrong_settings(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return, by their names, why values are no sampling parameters of a Talker."""
    return {
        name: f"must be {rule}, got {asked[name]!r}"
        for name, (rule, holds) in _RULES.items()
        if asked.get(name) is not None and not holds(asked[name])
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: What a value must be, in words and as a test.
_RULES: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "temperature": ("a number from 0 to 100", lambda value: _is_number(value) and 0 <= value <= 100),
    "top_p": ("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": ("a whole number from 1, or 0 or -1 for all", lambda value: _is_whole(value) and value >= -1),
    "repetition_penalty": ("a number above 0, at most 100", lambda value: _is_number(value) and 0 < value <= 100),
    "seed": ("a whole number", _is_whole),
    "max_tokens": ("a whole number from 1", lambda value: _is_whole(value) and value >= 1),
}


def _known_voice(voice: Any, voices: Sequence[str]) -> str:
    known = {name.lower(): name for name in voices}
    if not isinstance(voice, str) or voice.lower() not in known:
        raise RefusedInput(f"unknown voice {voice!r}; the model has {', '.join(voices)}")
    return known[voice.lower()]
