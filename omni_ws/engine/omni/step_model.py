"""StepModel: a model that serves many sessions in steps, on the one thread of a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class NoSlot(Exception):
    """All slots of the model are taken."""


class RefusedInput(Exception):
    """A session's settings or input are invalid, or too long; the message is for the client. The session is closed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made for a session: an item, or the error that ended the session."""

    session: int
    item: Any = None
    refused: str | None = None


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
