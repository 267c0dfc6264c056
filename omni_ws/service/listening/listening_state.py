"""ListeningState: where the speech of a session stands."""

from __future__ import annotations

import enum
from typing import Final


class ListeningState(enum.Enum):
    """``TurnListener`` documents the transitions."""

    OFF = "turn detection is off, or not configured yet"
    SILENCE = "no speech"
    SPEECH = "speech is in progress"
    PAUSE = "speech is in progress, but the last window was silent"
    DEAF = "the audio cannot be judged"

    def check(self, after: ListeningState) -> None:
        """Raise RuntimeError where ``after`` may not follow this state."""
        if after is not self and after not in _TRANSITIONS[self]:
            raise RuntimeError(f"illegal transition from {self.name} to {after.name}")


_TRANSITIONS: Final = {
    ListeningState.OFF: frozenset({ListeningState.SILENCE}),
    ListeningState.SILENCE: frozenset({ListeningState.OFF, ListeningState.SPEECH, ListeningState.DEAF}),
    ListeningState.SPEECH: frozenset({ListeningState.SILENCE, ListeningState.PAUSE}),
    ListeningState.PAUSE: frozenset({ListeningState.SILENCE, ListeningState.SPEECH}),
    ListeningState.DEAF: frozenset({ListeningState.OFF, ListeningState.SILENCE}),
}
