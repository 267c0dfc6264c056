"""TurnOwner: what a turn listener asks of its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omni_ws.core.reorder import StreamEvent
from omni_ws.errors import OmniError


class TurnOwner(Protocol):
    """Asked always from the event loop."""

    @property
    def is_playing(self) -> bool:
        """Whether an answer is being played, so that speech would interrupt it."""

    def engine_is_behind(self) -> bool:
        """Whether the engine is behind with the request whose input is open. Then ``TurnListener.go_on`` follows."""

    def take_turn_events(self, events: Sequence[StreamEvent]) -> None:
        """Handle what the input means for requests, in order."""

    def speech_started(self, turn_id: str, audio_ms: int, *, is_input: bool) -> None:
        """Speech has begun, and where it ``is_input``, it joins the request that is open, or opens one, next."""

    def speech_stopped(self, turn_id: str, audio_ms: int) -> None:
        """The speech that began last has ended."""

    def report_turn(self, error: OmniError) -> None:
        """Send an error about the audio itself to the client."""

    def turn_listener_progressed(self) -> None:
        """A piece of audio was processed: a listener that was full may have room."""
