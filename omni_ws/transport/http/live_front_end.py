"""LiveFrontEnd: a front end whose connections carry live sessions."""

from __future__ import annotations

from omni_ws.errors import OmniError
from omni_ws.service.sessions.live_sessions import LiveSessions
from omni_ws.transport.http.front_end import FrontEnd


class LiveFrontEnd(FrontEnd):
    """Base class: drains and ends the sessions in ``live`` with the server."""

    def __init__(self, live: LiveSessions) -> None:
        self._live = live

    def drain(self, time_left: float) -> None:
        self._live.drain(time_left)

    def end_all(self, error: OmniError) -> None:
        self._live.end_all(error)

    async def wait_closed(self) -> None:
        await self._live.wait_closed()
