"""SessionRegistry: the sessions that last over several requests, and what is remembered of those that have ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from omni_ws.config.keys import ApiKey
from omni_ws.errors import OmniError, SessionExpired, SessionNotFound
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.identifiers import new_id
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.output_log import OutputLog, OutputLogBudget
from omni_ws.service.sessions.registered import RegisteredSession, ResultForm

#: So many sessions that have ended are remembered; beyond it those are forgotten that ended first.
MAX_REMEMBERED: Final = 16_384
#: What the answers of all these sessions may hold of all that the server may hold.
ANSWERS_SHARE: Final = 1 / 4

#: … and are brought down to where they hold too much.
RELIEVED_SHARE: Final = 3 / 4


class SessionRegistry:
    """Sessions by their ids, each seen by the key alone that opened it.

    What has ended is kept for the session time-out: its answer, its state. Then it is expired, and after as long again
    it is not known any more. Since both times are the same, what is due is due in the order in which it was entered.
    """

    def __init__(self, sessions: SessionFactory) -> None:
        config = sessions.config
        self.timeout: float = config.streaming_input.session_timeout_sec
        self._id_prefix = f"{config.replica_id}_sess_" if config.replica_id else "sess_"
        self._budget = OutputLogBudget(
            sessions.budget, int(sessions.budget.capacity * ANSWERS_SHARE), relieve=self._drop_answers
        )
        self._capacity = min(config.streaming_input.max_payload_per_session, self._budget.capacity)
        self._by_id: dict[str, tuple[str | None, RegisteredSession]] = {}
        #: Live sessions that had no input when they were last looked at, the oldest first.
        self._empty: dict[RegisteredSession, None] = {}
        sessions.admission.oldest_empty = self._oldest_empty
        #: Sessions that ended, with the time at which the next thing happens to them. An entry whose time is not the
        #: session's own any more means nothing.
        self._due: deque[tuple[float, RegisteredSession]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._ending: list[RegisteredSession] = []

    def __len__(self) -> int:
        """Sessions that are known, ended ones included."""
        return len(self._by_id)

    def new_id(self) -> str:
        """For a session that is to be added."""
        return new_id(self._id_prefix)

    def add(
        self, conversation: Conversation, form: ResultForm, *, key: ApiKey | None, place: ExitStack
    ) -> RegisteredSession:
        """A session that runs, under the id that its conversation was opened with.

        ``place`` is its place among all sessions, given back at its end.
        """
        session = RegisteredSession(
            conversation.observed.identity.session_id,
            conversation,
            OutputLog(self._capacity, self._budget),
            form,
            created_at=int(time.time()),
        )
        self._by_id[session.id] = (_owner(key), session)
        self._empty[session] = None
        session.begin(place, self._ended)
        return session

    def get(self, session_id: str, key: ApiKey | None) -> RegisteredSession:
        """Raises SessionNotFound, also for a session of another key, and SessionExpired."""
        owner, session = self._by_id.get(session_id, (None, None))
        if session is None or owner != _owner(key):
            raise SessionNotFound("there is no such session", param="session_id")
        if session.expired:
            raise SessionExpired(session.expired_because, param="session_id")
        return session

    def discard(self, session: RegisteredSession) -> None:
        """A session that nobody heard of: it ends, and is not remembered."""
        session.cancel()
        self._forget(session)

    def drain(self, error: OmniError) -> None:
        """Sessions without any input end; the others get their answers."""
        for _, session in tuple(self._by_id.values()):
            if session.live and not session.has_input:
                session.fail(error)

    def end_all(self, error: OmniError) -> None:
        """Every session ends, and none is known any more."""
        for _, session in tuple(self._by_id.values()):
            session.fail(error)
            self._ending.append(session)
            self._forget(session)
        self._due.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    async def wait_over(self) -> None:
        """Waits until the engine has let go of those that ``end_all`` ended."""
        while self._ending:
            await self._ending.pop().over()

    # what makes room

    def _oldest_empty(self) -> Callable[[], None] | None:
        """What ends the session that has waited for its first input for longest; None where there is none."""
        while self._empty:
            session = next(iter(self._empty))
            if session.live and not session.has_content:
                return session.make_room
            del self._empty[session]
        return None

    # what has ended

    def _ended(self, session: RegisteredSession) -> None:
        self._empty.pop(session, None)
        session.kept_until = self._now() + self.timeout
        self._due.append((session.kept_until, session))
        while len(self._due) > MAX_REMEMBERED:
            when, oldest = self._due.popleft()
            if oldest.kept_until == when:
                self._forget(oldest)
        self._arm()

    def _forget(self, session: RegisteredSession) -> None:
        session.kept_until = None
        session.answer.clear()
        self._by_id.pop(session.id, None)

    def _arm(self) -> None:
        if self._sweep is None and self._due:
            self._sweep = asyncio.get_running_loop().call_at(self._due[0][0], self._on_timer, self._due[0][0])

    def _on_timer(self, when: float) -> None:
        self._sweep = None
        # Loops round: a timer may fire a little early.
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

    def _drop_answers(self, wanted: int) -> None:
        """Make room: the oldest answers of whoever keeps most, and some more, so that this stays rare."""
        kept: dict[str | None, deque[RegisteredSession]] = defaultdict(deque)
        sizes: Counter[str | None] = Counter()
        for when, session in self._due:
            if session.kept_until == when and session.answer.size:
                owner, _ = self._by_id[session.id]
                kept[owner].append(session)
                sizes[owner] += session.answer.size
        while sizes and self._budget.used + wanted > self._budget.capacity * RELIEVED_SHARE:
            ((owner, _),) = sizes.most_common(1)
            session = kept[owner].popleft()
            sizes[owner] -= session.answer.size
            if not kept[owner]:
                del sizes[owner]
            session.expire()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _owner(key: ApiKey | None) -> str | None:
    return None if key is None else key.name
