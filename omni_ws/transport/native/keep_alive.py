"""Keep-alive of a WebSocket: when to ping a silent peer, and when to consider it gone. Without clock or socket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omni_ws.config.model import StreamingInputConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveSettings:
    """Times in seconds; None turns pings, or their time-out, off."""

    ping_interval: float | None = 20
    ping_timeout: float | None = 20

    @classmethod
    def configured(cls, settings: StreamingInputConfig) -> KeepAliveSettings:
        """The times that a server is configured with, where 0 turns them off."""
        return cls(ping_interval=settings.ping_interval_sec or None, ping_timeout=settings.ping_timeout_sec or None)


class PeerState(Enum):
    """What the silence of a peer means."""

    ALIVE = "was heard, or has time left to answer"
    SILENT = "is to be pinged"
    GONE = "has not answered a ping"


class KeepAlive:
    """Judges the silence of one peer. Any byte that it sends is a sign of life, not only a pong.

    ``listening`` says whether the socket is read. While it is not, silence means nothing, but pings are still sent:
    sending over a broken connection reveals that it is broken.
    """

    def __init__(self, settings: KeepAliveSettings, *, now: float) -> None:
        self._settings = settings
        self.last_sign_of_life = now
        self._pinged_at = now
        #: The value of ``last_sign_of_life`` at the last ping.
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
