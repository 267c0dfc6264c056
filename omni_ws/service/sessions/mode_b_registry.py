"""ModeBRegistry: the Mode B sessions of a server, and the stored results of those that have ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from contextlib import ExitStack
from typing import Final

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import OmniError, SessionExpired, SessionNotFound
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.mode_b_session import ModeBSession, ResultForm
from omni_ws.service.sessions.output_log import OutputLog, OutputLogBudget

#: How many ended sessions are known; beyond that, those that ended first are forgotten.
MAX_REMEMBERED: Final = 16_384
#: The share of the server's byte budget that output logs may hold.
OUTPUT_SHARE: Final = 1 / 4
#: Eviction ends when logs hold this share of their budget, so that it is rare.
LOW_WATER_SHARE: Final = 3 / 4


class ModeBRegistry:
    """Finds sessions by id, each only for the key that opened it.

    A session passes through these stages::

        live       it takes input and produces output                       until it ends
        stored     its state and its result, if any, can be read            for the session time-out, or until evicted
        expired    its id is known, and answered with ``session_expired``   for another session time-out
        forgotten  its id is unknown

    A live session that times out or is evicted from its slot is expired at once.

    Stored and expired sessions are due in the order in which they entered their stage, because both stages last
    equally long: one queue and one timer serve them all.
    """

    def __init__(self, sessions: SessionFactory) -> None:
        config = sessions.config
        self.timeout: float = config.streaming_input.session_timeout_sec
        #: That of the server.
        self.budget = sessions.budget
        self._budget = OutputLogBudget(
            sessions.budget, int(sessions.budget.capacity * OUTPUT_SHARE), evict=self._evict_results
        )
        self._capacity = min(config.streaming_input.max_payload_per_session, self._budget.capacity)
        self._by_id: dict[str, tuple[str | None, ModeBSession]] = {}
        self._admission = sessions.admission
        #: Ended sessions with the times at which their stage ends. An entry is stale if it is not ``kept_until``.
        self._due: deque[tuple[float, ModeBSession]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._ending: list[ModeBSession] = []

    def __len__(self) -> int:
        """The number of sessions known, including ended ones."""
        return len(self._by_id)

    def add(self, conversation: Conversation, form: ResultForm, *, key: ApiKey | None, slot: ExitStack) -> ModeBSession:
        """Register and start a session, under the id with which its conversation was opened.

        ``slot`` holds its slot in admission, and is closed when the session has ended.
        """
        session = ModeBSession(
            conversation.observed.identity.session_id,
            conversation,
            OutputLog(self._capacity, self._budget),
            form,
            created_at=int(time.time()),
            slot=slot,
            on_end=self._ended,
        )
        self._by_id[session.id] = (key_name(key), session)
        self._admission.opened_empty(session, patience=0)  # no connection waits for anything
        session.begin()
        if key is not None and key.max_session_sec is not None:
            session.limit(key.max_session_sec)
        return session

    def get(self, session_id: str, key: ApiKey | None) -> ModeBSession:
        """Return a live or stored session of ``key``. Raises SessionExpired, or SessionNotFound for any other id."""
        owner, session = self._by_id.get(session_id, (None, None))
        if session is None or owner != key_name(key):
            raise SessionNotFound("session not found", param="session_id")
        if session.expired:
            raise SessionExpired(session.expired_because, param="session_id")
        return session

    def discard(self, session: ModeBSession) -> None:
        """End and forget a session whose client does not know its id."""
        session.cancel()
        self._forget(session)

    def drain(self, error: OmniError) -> None:
        """End the sessions without any input; the others continue to their end."""
        for _, session in tuple(self._by_id.values()):
            if session.live and not session.has_input:
                session.fail(error)

    def end_all(self, error: OmniError) -> None:
        """End and forget every session."""
        for _, session in tuple(self._by_id.values()):
            session.fail(error)
            self._ending.append(session)
            self._forget(session)
        self._due.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    async def wait_released(self) -> None:
        """Wait until the engine has released all sessions that ``end_all`` ended."""
        while self._ending:
            await self._ending.pop().wait_released()

    # ended sessions

    def _ended(self, session: ModeBSession) -> None:
        self._admission.ended(session)
        session.kept_until = self._now() + self.timeout
        self._due.append((session.kept_until, session))
        while len(self._due) > MAX_REMEMBERED:
            when, oldest = self._due.popleft()
            if oldest.kept_until == when:
                self._forget(oldest)
        self._arm()

    def _forget(self, session: ModeBSession) -> None:
        session.kept_until = None
        session.output.clear()
        self._by_id.pop(session.id, None)

    def _arm(self) -> None:
        if self._sweep is None and self._due:
            self._sweep = asyncio.get_running_loop().call_at(self._due[0][0], self._on_timer, self._due[0][0])

    def _on_timer(self, when: float) -> None:
        self._sweep = None
        # A loop may call a timer slightly early.
        now = max(self._now(), when)
        while self._due and self._due[0][0] <= now:
            when, session = self._due.popleft()
            if session.kept_until != when:
                continue
            if session.expired:
                self._forget(session)
            else:
                session.expire()
        self._arm()

    def _evict_results(self, wanted: int) -> None:
        """Expire results to make room for ``wanted`` bytes: each time the oldest of the key that holds most."""
        kept: dict[str | None, deque[ModeBSession]] = defaultdict(deque)
        sizes: Counter[str | None] = Counter()
        for when, session in self._due:
            if session.kept_until == when and session.output.size:
                owner, _ = self._by_id[session.id]
                kept[owner].append(session)
                sizes[owner] += session.output.size
        while sizes and self._budget.used + wanted > self._budget.capacity * LOW_WATER_SHARE:
            ((owner, _),) = sizes.most_common(1)
            session = kept[owner].popleft()
            sizes[owner] -= session.output.size
            if not kept[owner]:
                del sizes[owner]
            session.expire()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
