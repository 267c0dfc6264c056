"""TurnOwner: what a turn listener asks of its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omni_ws.core.stream_events import StreamEvent
from omni_ws.errors import OmniError
from omni_ws.wire.server_frames import SpeechStartedFrame, SpeechStoppedFrame


class TurnOwner(Protocol):
    """Asked always from the event loop."""

    @property
    def is_playing(self) -> bool:
        """Whether an answer is being played, so that speech would interrupt it."""

    def take_turn_events(self, events: Sequence[StreamEvent]) -> None:
        """Handle what the input means for requests, in order."""

    def report_turn(self, message: SpeechStartedFrame | SpeechStoppedFrame | OmniError) -> None:
        """Send a message about the speech itself to the client."""

    def turn_listener_progressed(self) -> None:
        """A piece of audio was processed: a listener that was full may have room."""
