"""The live sessions of a front end, by their ids, connected or not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import OmniError, SessionNotFound, SessionTimeout
from omni_ws.service.sessions.admission import WHY_EVICTED, Slot
from omni_ws.service.sessions.factory import STREAM_FORMATS, SessionFactory
from omni_ws.service.sessions.live_session import LiveSession


@dataclass(frozen=True, slots=True, eq=False)
class _Living:
    session: LiveSession
    #: Name of the key that opened it.
    key_name: str | None
    life: asyncio.Task[None]
    slot: Slot

    @property
    def has_content(self) -> bool:
        return self.session.conversation.has_content

    def evict(self) -> None:
        """End a session without content; see EmptySession."""
        self.session.end(SessionTimeout(WHY_EVICTED))
        self.slot.release()


class LiveSessions:
    """Opens sessions, owns the task of each, and finds those that clients resume."""

    def __init__(self, factory: SessionFactory, *, origin: str, grace: float, any_model: bool = False) -> None:
        """``origin`` labels the sessions in metrics and logs; ``grace`` is in seconds, see LiveSession.

        ``any_model``: clients may use any name for the model, see SessionFactory.
        """
        self._factory = factory
        self._origin = origin
        self._grace = grace
        self._any_model = any_model
        self._living: dict[str, _Living] = {}

    async def admit(self, key: ApiKey | None, *, client: str = "") -> LiveSession:
        """Wait for a slot as ``Admission.room``, and then ``open`` a session. Raises what that raises."""
        await self._factory.admission.room(key, client=client)
        return self.open(key, client=client)

    def open(self, key: ApiKey | None, *, client: str = "") -> LiveSession:
        """A new session, to be attached to a connection. ``client`` is the address of its client.

        Raises ShuttingDown, EngineOverloaded, RateLimited or EngineFailed.
        """
        slot = self._factory.admission.take(key, client=client, many_requests=True)
        try:
            self._factory.check_ready()
            conversation = self._factory.open(
                output_formats=STREAM_FORMATS,
                any_model=self._any_model,
                origin=self._origin,
                resumable=self._grace > 0,
                owner=key_name(key),
                admit=partial(self._factory.admission.request, key),
            )
            session_id = conversation.observed.identity.session_id
            session = LiveSession(session_id, conversation, conversation.outbox, grace=self._grace)
        except BaseException:
            slot.release()
            raise
        if key is not None and key.max_session_sec is not None:
            session.limit(key.max_session_sec)
        life = asyncio.create_task(self._live(session, slot), name=f"session {session.session_id}")
        living = self._living[session.session_id] = _Living(session, key_name(key), life, slot)
        self._factory.admission.opened_empty(living)
        return session

    async def _live(self, session: LiveSession, slot: Slot) -> None:
        try:
            await session.run()
        finally:
            self._factory.admission.ended(self._living.pop(session.session_id))
            slot.release()
            if session.recording is not None:
                session.recording.finish()

    def claim(self, session_id: str, token: str, key: ApiKey | None) -> LiveSession:
        """The session to resume with this token, which is spent by that.

        Raises SessionNotFound, whatever is wrong: only its own client may learn that a session exists.
        """
        living = self._living.get(session_id)
        if living is not None and living.key_name == key_name(key) and living.session.admits(token):
            living.session.spend(token)
            return living.session
        raise SessionNotFound("no session to resume with this session_id and resume_token", param="session_id")

    async def end(self, session: LiveSession) -> None:
        """End a session that its client cannot resume, and wait until its slot is free."""
        session.release()
        session.end(None)
        living = self._living.get(session.session_id)
        if living is not None:
            await asyncio.wait([living.life])

    @property
    def disconnected(self) -> int:
        """How many sessions have no connection."""
        return sum(living.session.disconnected for living in self._living.values())

    def drain(self, time_left: float) -> None:
        """Let all sessions end when their open requests are answered, within ``time_left`` seconds."""
        for living in tuple(self._living.values()):
            living.session.drain(time_left)

    def end_all(self, error: OmniError) -> None:
        """End all sessions now, with ``error`` as the reason."""
        for living in tuple(self._living.values()):
            living.session.end(error)

    async def wait_closed(self) -> None:
        """Wait until no session is left."""
        lives = [living.life for living in self._living.values()]
        if lives:
            await asyncio.wait(lives)
