"""Talkers: each has a connection of its own and asks one question after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final

from omni_ws.bench.answer_watch import AnswerWatch
from omni_ws.bench.load import PIECE_MS, PIECE_SEC, Load, SpokenQuestion, TypedQuestion
from omni_ws.bench.tally import Tally
from omni_ws.client import ClientSession, ConnectionFailed, ConnectionLost, InputAck, connect
from omni_ws.client.audio import paced, pieces
from omni_ws.errors import OmniError

#: After a turn that failed, unless the server asks for a longer one.
PAUSE_AFTER_FAILURE_SEC: Final = 0.5
LAG_INTERVAL_SEC: Final = 0.1


def code_of(error: Exception) -> str:
    """The code of the server, or a word of this program's for what no server reports."""
    match error:
        case OmniError():
            return error.code
        case ConnectionFailed():
            return "unreachable"
        case TimeoutError():
            return "no_answer_in_time"
    return "connection_lost"


async def bench(load: Load, tally: Tally) -> None:
    """Runs all talkers; ``tally`` has at any time what was measured so far.

    Raises ConnectionFailed if the server cannot be reached at all.
    """
    tally.began_at = tally.last_at = asyncio.get_running_loop().time()
    try:
        async with asyncio.TaskGroup() as tasks:
            lag = tasks.create_task(_measure_lag(tally))
            talkers = [tasks.create_task(LoadTalker(load, tally, number).talk()) for number in range(load.sessions)]
            await asyncio.wait(talkers)
            lag.cancel()
    except ExceptionGroup as failures:
        unreachable, others = failures.split(ConnectionFailed)
        if unreachable is None or others is not None:
            raise
        raise unreachable.exceptions[0] from None


async def _measure_lag(tally: Tally) -> None:
    """Measures how late this program's own event loop is: what it adds to all other times."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_SEC
        await asyncio.sleep(LAG_INTERVAL_SEC)
        tally.client_lag.add(loop.time() - due)


class Ears:
    """What a talker hears: reads the events of its session, and notes when each came."""

    def __init__(self, session: ClientSession, tally: Tally) -> None:
        #: What ended the session; None while it is open.
        self.error: Exception | None = None
        self._session = session
        self._tally = tally
        self._watch: AnswerWatch | None = None
        self._changed = asyncio.Event()
        #: Pieces that were sent and not acknowledged: their numbers, and when.
        self._sent: deque[tuple[int, float]] = deque()

    def follow(self, watch: AnswerWatch) -> None:
        """Gives this watch the events from now on."""
        self._watch = watch

    def sent(self, sequence_id: int, at: float) -> None:
        self._sent.append((sequence_id, at))

    async def listen(self) -> None:
        """Reads until the session ends."""
        loop = asyncio.get_running_loop()
        try:
            async for event in self._session.events():
                now = loop.time()
                if isinstance(event, InputAck):
                    self._acknowledged(event.next_sequence_id, now)
                elif self._watch is not None:
                    self._watch.take(event, now)
                    self._changed.set()
            async for _ in self._session.response():  # none is left, and it raises why
                pass
            self.error = ConnectionLost("the session has ended")
        except (OmniError, ConnectionLost) as error:
            self.error = error
        self._changed.set()

    def _acknowledged(self, next_sequence_id: int, now: float) -> None:
        while self._sent and self._sent[0][0] < next_sequence_id:
            self._tally.acknowledgement.add(now - self._sent.popleft()[1])

    async def answered(self, watch: AnswerWatch) -> None:
        """Waits until the turn is over. Raises the error that ended the session before."""
        while not watch.is_over:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def _listening(session: ClientSession, tally: Tally) -> AsyncIterator[Ears]:
    ears = Ears(session, tally)
    task = asyncio.create_task(ears.listen())
    try:
        yield ears
    finally:
        await _stop(task)


async def _stop(task: asyncio.Task[None]) -> None:
    """Ends a task; raises what went wrong in it."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


class LoadTalker:
    """One of many who talk to the server. ``number`` counts from 0 and staggers their starts."""

    def __init__(self, load: Load, tally: Tally, number: int) -> None:
        self._load = load
        self._tally = tally
        self._number = number
        self._asked = 0

    async def talk(self) -> None:
        """Asks all of its questions, over another connection where one was lost.

        A session that is refused is the end of it. Raises ConnectionFailed if there has been no sign of a server.
        """
        await asyncio.sleep(self._number * self._load.stagger_sec)
        while self._wants_to_ask:
            if not await self._session():
                return

    @property
    def _wants_to_ask(self) -> bool:
        if self._load.run_sec is not None:
            return asyncio.get_running_loop().time() < self._tally.began_at + self._load.run_sec
        return self._load.turns is None or self._asked < self._load.turns

    async def _session(self) -> bool:
        """Opens a session and asks until it breaks or enough was asked; returns whether it was opened."""
        loop, load = asyncio.get_running_loop(), self._load
        began, opened = loop.time(), False
        try:
            config = load.session_config
            async with connect(load.url, api_key=load.api_key, config=config, ssl=load.tls) as session:
                opened = True
                self._tally.opened += 1
                self._tally.last_at = loop.time()
                self._tally.opening.add(loop.time() - began)
                async with _listening(session, self._tally) as ears:
                    while self._wants_to_ask and await self._turn(session, ears):
                        pass
        except (OmniError, ConnectionFailed) as error:
            if opened or (isinstance(error, ConnectionFailed) and not (self._tally.opened or self._tally.refused)):
                raise
            self._tally.refuse(code_of(error), str(error))
        return opened

    async def _turn(self, session: ClientSession, ears: Ears) -> bool:
        """Asks once; returns whether the session can go on. After a failure a late answer must not meet the next."""
        loop, load, question = asyncio.get_running_loop(), self._load, self._load.question
        open_microphone = isinstance(question, SpokenQuestion) and question.turn_detection is not None
        watch = AnswerWatch(open_microphone=open_microphone)
        ears.follow(watch)
        self._asked += 1
        self._tally.asked += 1
        try:
            async with asyncio.timeout(question.seconds + load.patience_sec) as patience:
                match question:
                    case TypedQuestion(text=text):
                        watch.input_ended(loop.time())
                        ears.sent(await session.send_text(text, end=True), watch.asked_at or 0.0)
                        await ears.answered(watch)
                    case SpokenQuestion(turn_detection=None):
                        await self._speak(session, question, ears, watch)
                        await ears.answered(watch)
                    case SpokenQuestion():
                        await self._talk_freely(session, question, ears, watch, patience)
        except (OmniError, ConnectionLost, TimeoutError) as error:
            self._tally.partial_answers += watch.partial_answers
            self._tally.fail(watch.error_code or code_of(error), loop.time())
            await asyncio.sleep(PAUSE_AFTER_FAILURE_SEC)
            return False
        if not open_microphone:
            self._tally.finish(watch, loop.time())
        if watch.error_code is not None:
            await asyncio.sleep(max(PAUSE_AFTER_FAILURE_SEC, (watch.retry_after_ms or 0) / 1000))
        elif not open_microphone:
            await asyncio.sleep(load.pause_sec)
        return ears.error is None

    async def _speak(self, session: ClientSession, question: SpokenQuestion, ears: Ears, watch: AnswerWatch) -> None:
        """Sends the recording; its last piece ends the input."""
        all_pieces = [*pieces(question.audio, piece_ms=PIECE_MS)]
        await self._send(session, all_pieces, ears, watch, last=len(all_pieces), ends=True)

    async def _talk_freely(
        self,
        session: ClientSession,
        question: SpokenQuestion,
        ears: Ears,
        watch: AnswerWatch,
        patience: asyncio.Timeout,
    ) -> None:
        """Speaks into a microphone that stays open until the answer has been played, and the pause is over."""
        loop = asyncio.get_running_loop()
        microphone = asyncio.create_task(self._open_microphone(session, question, ears, watch))
        try:
            await ears.answered(watch)
            self._tally.finish(watch, loop.time())
            patience.reschedule(None)
            plays_until = watch.answer.player.plays_until or 0.0
            await asyncio.sleep(max(0.0, plays_until - loop.time()) + self._load.pause_sec)
        finally:
            await _stop(microphone)

    async def _open_microphone(
        self, session: ClientSession, question: SpokenQuestion, ears: Ears, watch: AnswerWatch
    ) -> None:
        with suppress(OmniError, ConnectionLost):  # the ears know it, too
            await self._send(session, question.opened_microphone, ears, watch, last=question.last_spoken, ends=False)

    async def _send(
        self,
        session: ClientSession,
        all_pieces: Iterable[bytes],
        ears: Ears,
        watch: AnswerWatch,
        *,
        last: int,
        ends: bool,
    ) -> None:
        """Sends pieces in real time. Answers are timed from the ``last``, counted from 1, which may end the input."""
        loop = asyncio.get_running_loop()
        place = 0
        async with aclosing(paced(all_pieces, interval=PIECE_SEC)) as microphone:
            async for piece in microphone:
                place += 1
                now = loop.time()
                if place == last:
                    watch.input_ended(now)
                ears.sent(await session.send_audio(piece, end=ends and place == last), now)
