"""Sessions with the processes of Talker and vocoder, as the stages in the server use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from omni_ws.engine.omni.items import Codes, TalkerItem, VocoderInput, VocoderOutput


class TalkerSession(Protocol):
    """One answer in the Talker's process. Iterating yields its Codes, up to the item whose ``end`` is set.

    ``feed`` and the iteration raise InvalidValue for input that the Talker refuses, and EngineFailed once its process
    has ended.
    """

    async def feed(self, item: TalkerItem) -> None:
        """Hand over ``item``; waits while the process has too much input of this session."""
        ...

    def grant(self, frames: int) -> None:
        """Allow ``frames`` codec frames more; without a grant none are made.

        The Talker stage grants what its link to the vocoder has room for: first the capacity, then as many as it has
        put into the link.
        """
        ...

    def __aiter__(self) -> AsyncIterator[Codes]: ...


class VocoderSession(Protocol):
    """One answer in the vocoder's process."""

    async def decode(self, item: VocoderInput) -> VocoderOutput:
        """Decode the next codes; the process does so in one batch with those of other sessions.

        Calls do not overlap. Raises InvalidValue for codes that the vocoder refuses, EngineFailed once its process has
        ended.
        """
        ...


class TalkerProcess(Protocol):
    """The process of a Talker."""

    @property
    def frame_ms(self) -> float:
        """The duration of a codec frame in milliseconds."""
        ...

    def open(self, settings: Mapping[str, Any]) -> AbstractAsyncContextManager[TalkerSession]:
        """Open a session for one answer; leaving the block frees its slot at once.

        Entering raises InvalidValue for settings, EngineFailed without a process or a free slot.
        """
        ...


class VocoderProcess(Protocol):
    """The process of a vocoder."""

    @property
    def sample_rate(self) -> int:
        """The rate of its samples in Hz."""
        ...

    @property
    def frame_ms(self) -> float:
        """The duration of a codec frame in milliseconds."""
        ...

    @property
    def context_frames(self) -> int:
        """How many frames a chunk's decoding costs besides its own."""
        ...

    @property
    def ms_per_frame(self) -> float:
        """The average time from ``decode`` to its result, in milliseconds per frame with context; 0 if unknown."""
        ...

    def open(self, settings: Mapping[str, Any]) -> AbstractAsyncContextManager[VocoderSession]:
        """Open a session for one answer; leaving the block frees its slot at once.

        Entering raises InvalidValue for settings, EngineFailed without a process or a free slot.
        """
        ...
