"""KeepAlive: when to ping a peer that is silent, and when to give it up. No clock and no socket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveSettings:
    """Seconds; None turns it off. Any byte of the client counts as a sign of life, not only pongs."""

    ping_interval: float | None = 20
    ping_timeout: float | None = 20


class PeerState(Enum):
    ALIVE = "has been heard of, or still has time to answer"
    SILENT = "is to be pinged"
    GONE = "did not answer"


class KeepAlive:
    """``listening`` says whether the socket is read. While it is not, silence says nothing, but pings still go out:
    a connection that is broken shows it when something is sent."""

    def __init__(self, settings: KeepAliveSettings, *, now: float) -> None:
        self._settings = settings
        self.last_sign_of_life = now
        self._pinged_at = now
        #: The last sign of life before the last ping.
        self._silent_since: float | None = None

    def get_timer(self, *, listening: bool) -> float | None:
        interval, timeout = self._settings.ping_interval, self._settings.ping_timeout
        if interval is None:
            return None
        if not self._unanswered:
            return self.last_sign_of_life + interval
        return self._pinged_at + (interval if timeout is None or not listening else timeout)

    def handle_timer(self, now: float, *, listening: bool) -> PeerState:
        deadline = self.get_timer(listening=listening)
        if deadline is None or now < deadline:
            return PeerState.ALIVE
        if self._unanswered and listening and self._settings.ping_timeout is not None:
            return PeerState.GONE
        self._pinged_at, self._silent_since = now, self.last_sign_of_life
        return PeerState.SILENT

    @property
    def _unanswered(self) -> bool:
        return self._silent_since == self.last_sign_of_life
