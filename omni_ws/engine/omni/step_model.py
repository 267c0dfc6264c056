"""StepModel: a model that serves many sessions in steps, on the one thread of a process of its own.

PromptRows, AnswerRows, Codes and VocoderInput are what Thinker, Talker and vocoder pass on; TalkerSettings are the
voice and the sampling parameters of a session.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.errors import InvalidValue


class StepModel(Protocol):
    """A Talker or a vocoder, as its process runs it. No method is thread-safe; none blocks longer than one step."""

    def warm_up(self) -> None:
        """Run, compile or capture every shape that occurs, so that the first session is as fast as the others."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The bytes that weights, slots and buffers take on the device."""
        ...

    @property
    def slots(self) -> int:
        """The number of sessions that can be open at the same time."""
        ...

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        """Open a session. Raises EngineOverloaded without a free slot, or InvalidValue for settings."""
        ...

    def feed(self, session: int, item: Any) -> None:
        """Queue an item, which later steps process. Raises InvalidValue, and then closes the session."""
        ...

    def grant(self, session: int, frames: int) -> None:
        """Allow a Talker to make ``frames`` more codec frames; it makes none beyond its grants."""
        ...

    def close(self, session: int) -> None:
        """Free the slot and all that the session holds, at once; unknown sessions are ignored."""
        ...

    @property
    def busy(self) -> bool:
        """Whether there is work, so that ``step`` would do something."""
        ...

    def step(self) -> Sequence[StepResult]:
        """Do a bounded piece of work for a batch of sessions, and return what became ready."""
        ...


#: What a step made: the session, and an item for it.
StepResult: TypeAlias = tuple[int, Any]
#: What a factory returns: the model, and facts about it for the server, such as its voices or its sample rate.
LoadedModel: TypeAlias = tuple[StepModel, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The next tokens of the prompt.

    ``tokens`` (n,) int64 and ``positions`` (3, n) int64, the Thinker's M-RoPE positions, cover the whole prompt in
    order, including turns that the Talker does not read. ``states`` (n,) bool marks the tokens whose hidden state is
    in ``hidden`` (k, hidden size) float32: all tokens for Qwen2.5, the tokens of audio, images and video for Qwen3.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    states: NDArray[np.bool_]
    hidden: NDArray[np.float32]

    def split(self, count: int) -> tuple[PromptRows, PromptRows]:
        """Return the first ``count`` tokens, and the others."""
        hidden = int(self.states[:count].sum())
        return (
            PromptRows(self.tokens[:count], self.positions[:, :count], self.states[:count], self.hidden[:hidden]),
            PromptRows(self.tokens[count:], self.positions[:, count:], self.states[count:], self.hidden[hidden:]),
        )


@dataclass(frozen=True, slots=True)
class PromptReset:
    """The prompt begins anew: all PromptRows before this item are void."""


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """The next tokens of the answer to speak, in order; the first item of this kind ends the prompt.

    ``tokens`` (n,) int64, without the token that ends the answer. ``hidden`` (n, hidden size) float32 for Qwen2.5,
    (0, hidden size) for Qwen3, whose Talker reads no hidden states of the answer.
    """

    tokens: NDArray[np.int64]
    hidden: NDArray[np.float32]

    def split(self, count: int) -> tuple[AnswerRows, AnswerRows]:
        """Return the first ``count`` tokens, and the others."""
        return (
            AnswerRows(self.tokens[:count], self.hidden[:count]),
            AnswerRows(self.tokens[count:], self.hidden[count:]),
        )


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The item that ends an answer: no more AnswerRows follow."""


#: What a Talker reads.
TalkerItem = PromptRows | PromptReset | AnswerRows | AnswerEnd


class CodesEnd(StrEnum):
    """Why a Talker stopped making frames: it drew an end code, or reached a limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Codes:
    """The next codec frames: ``codes`` (n, codebooks) int64, with one codebook for Qwen2.5 and 16 for Qwen3.

    ``end`` is set on the last item, which may be empty. ``rows_used`` counts the rows of the answer that the Talker has
    read so far.
    """

    codes: NDArray[np.int64]
    end: CodesEnd | None = None
    rows_used: int = 0


@dataclass(frozen=True, slots=True)
class VocoderInput:
    """Codes to decode now: ``codes`` (n, codebooks) int64; ``last`` marks the last codes of the answer."""

    codes: NDArray[np.int64]
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSettings:
    """Checked voice and sampling parameters of one session.

    ``temperature`` 0 takes the most probable code; ``top_k`` 0 and -1 disable the limit. ``max_tokens`` limits the
    codec frames. With ``seed`` None a random seed is drawn.
    """

    voice: str
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.05
    max_tokens: int = 4096
    seed: int | None = None

    def changed(self, settings: Mapping[str, Any], voices: Sequence[str]) -> TalkerSettings:
        """Return a copy with the values of ``settings``; a None there leaves the default, and ``seed`` is then drawn.

        Raises InvalidValue.
        """
        asked = {name: value for name, value in settings.items() if value is not None}
        if unknown := asked.keys() - {field.name for field in fields(self)}:
            raise InvalidValue(f"unknown setting of the Talker: {min(unknown)}")
        for name, reason in wrong_settings(asked).items():
            raise InvalidValue(f"talker.{name} {reason}")
        if "voice" in asked:
            asked["voice"] = known_voice(asked["voice"], voices)
        if asked.get("seed", self.seed) is None:
            asked["seed"] = secrets.randbits(63)
        return replace(self, **asked)


def wrong_settings(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with sampling parameters of a Talker, by their names; names without rules are ignored."""
    return {
        name: f"must be {rule}, got {asked[name]!r}"
        for name, (rule, holds) in _RULES.items()
        if asked.get(name) is not None and not holds(asked[name])
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: The rule for each sampling parameter, in words and as a test.
_RULES: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "temperature": ("a number from 0 to 100", lambda value: _is_number(value) and 0 <= value <= 100),
    "top_p": ("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": ("a whole number from 1, or 0 or -1 for all", lambda value: _is_whole(value) and value >= -1),
    "repetition_penalty": ("a number above 0, at most 100", lambda value: _is_number(value) and 0 < value <= 100),
    "seed": ("a whole number", _is_whole),
    "max_tokens": ("a whole number from 1", lambda value: _is_whole(value) and value >= 1),
}


def known_voice(voice: Any, voices: Sequence[str]) -> str:
    """Return the name of a voice, which may be asked for in upper or lower case. Raises InvalidValue."""
    known = {name.lower(): name for name in voices}
    if not isinstance(voice, str) or voice.lower() not in known:
        raise InvalidValue(f"unknown voice {voice!r}; the model has {', '.join(voices)}")
    return known[voice.lower()]
