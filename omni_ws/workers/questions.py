"""What workers ask each other, by way of the supervisor."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterable
from typing import Any, Final

from omni_ws.service.sessions.worker_group import KNOW_SECRET, METRICS
from omni_ws.workers.channel import MessageKind
from omni_ws.workers.member import Member
from omni_ws.workers.metrics_sum import Family, growing, summed

#: A worker that does not answer in time is left out.
ANSWER_TIMEOUT_SEC: Final = 2.0
#: The number of a question whose answer does not matter; others are counted from 1.
_NO_ANSWER: Final = 0
#: What workers that listen only later are told, too. Its argument begins with the Unix time until which it matters.
REMEMBERED: Final = frozenset({KNOW_SECRET})


class Questions:
    """Puts the question of one worker to the others, and keeps what those that have ended counted."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Member, asyncio.Future[Any]]] = {}
        self._asked = 0
        self._remembered: list[tuple[str, Any]] = []
        self._ended: list[Family] = []

    def tell(self, member: Member) -> None:
        """Tell a worker that listens now what the others know."""
        for one in self._still_true():
            member.ask(_NO_ANSWER, pickle.dumps(one))

    def _still_true(self) -> list[tuple[str, Any]]:
        self._remembered = [one for one in self._remembered if one[1][0] > time.time()]
        return self._remembered

    async def ask(self, asker: Member, number: int, payload: bytes, others: Iterable[Member]) -> None:
        """Put a question to ``others``, and send their answers to the asker."""
        question, argument = pickle.loads(payload)
        if question in REMEMBERED:
            self._still_true().append((question, argument))
        if question == METRICS:
            asker.counted = growing(argument)
        asks = (self._ask(other, question, payload) for other in others)
        answers = await asyncio.gather(*asks, return_exceptions=True)
        found: list[Any] = [one for one in answers if not isinstance(one, BaseException)]
        if question == METRICS:
            found.append(self._ended)
        asker.channel.send(MessageKind.ANSWERS, number, pickle.dumps(found))

    async def _ask(self, other: Member, question: str, payload: bytes) -> Any:
        self._asked += 1
        number, waiting = self._asked, asyncio.get_running_loop().create_future()
        self._waiting[number] = (other, waiting)
        if other.row.hung:
            waiting.set_result(None)
        other.channel.send(MessageKind.ASKED, number, payload)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_SEC):
                answer = await waiting
        except TimeoutError:
            answer = None
        finally:
            del self._waiting[number]
        if question != METRICS:
            return answer
        if not other.is_alive:  # and counts among those that have ended
            return []
        if answer is None:
            return other.counted
        other.counted = growing(answer)
        return answer

    def answered(self, number: int, payload: bytes) -> None:
        """A worker has answered."""
        if number in self._waiting:
            _, waiting = self._waiting[number]
            if not waiting.done():
                waiting.set_result(pickle.loads(payload))

    def counted(self, member: Member, payload: bytes) -> None:
        """A worker that ends says what it has counted."""
        member.counted = growing(pickle.loads(payload))

    def ended(self, member: Member) -> None:
        """A worker has ended: what it counted stays counted."""
        self._ended = summed([self._ended, member.counted])
        for other, waiting in self._waiting.values():
            if other is member and not waiting.done():
                waiting.set_result(None)
