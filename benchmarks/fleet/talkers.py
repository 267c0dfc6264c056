"""The clients of a fleet: conversations that check every word, by its place."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from omni_ws.client import (
    AudioChunk,
    ClientLimits,
    ClientSession,
    ConnectionLost,
    ErrorEvent,
    Event,
    Reconnected,
    Reconnecting,
    ResponseStarted,
    ResumableChanged,
    Resumed,
    TextChunk,
    connect,
)
from omni_ws.client import Final as FinalEvent
from omni_ws.core.chunks import FinishReason

#: How soon a client notices that its server is stopped: so long without a sign, and as long behind a ping.
KEEPALIVE_SEC: Final = 1.5
DEAD_MANS_SEC: Final = 2 * KEEPALIVE_SEC
#: Requests that are under way at a time; the server takes four.
AT_ONCE: Final = 3
MAX_WORDS: Final = 30
AUDIO_BYTES: Final = 640  # 20 ms
#: Shares of the turns.
AUDIO: Final = 0.15
WHOLE: Final = 0.25
CANCELLED: Final = 0.1
CONFIGURED: Final = 0.1


@dataclass
class Tally:
    """What the conversations of a run came to."""

    counts: Counter[str] = field(default_factory=Counter)
    #: Each is a defect.
    wrong: list[str] = field(default_factory=list)
    #: Conversations that began anew after they were told that the store does not keep them.
    lost_as_told: list[str] = field(default_factory=list)
    #: Seconds from a fault to the next word of each conversation that lost its connection, by the kind of fault.
    gaps: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class _Turn:
    ref: str
    #: What has to come back: words, or samples.
    expected: bytes
    is_audio: bool
    request_id: str | None = None
    got: bytes = b""
    cancelled: bool = False


class Talker:
    """A conversation that never pauses: it says words at a pace, and compares what comes back with them.

    The server echoes. So each word has its place, and what is lost, comes twice or in another order is seen at once.
    """

    def __init__(
        self, name: str, urls: Sequence[str], tally: Tally, *, seed: int, word_sec: float, heard: Callable[[], None]
    ) -> None:
        """``heard`` is called with each word that comes back."""
        self.name = name
        #: Words, or pieces of sound, that came back.
        self.heard = 0
        #: When the connection was last resumed; 0 before.
        self.resumed_at = 0.0
        #: When the first word behind that came; 0 before.
        self.next_word_at = 0.0
        #: Whether the server says that another could go on with the session.
        self.resumable = True
        #: The URL of the server of the moment.
        self.server = ""
        self.stop = False
        self._urls = urls
        self._tally = tally
        self._random = random.Random(seed)
        self._word_sec = word_sec
        self._told = heard
        self._under_way: deque[_Turn] = deque()
        self._fewer = asyncio.Condition()
        self._said = 0
        self._last_number = -1
        self.session_id = ""
        #: The beginning of the names of its tasks and its client's.
        self.task_names = [name]
        #: When the connection became what it is, and what was told of attempts to reconnect since.
        self._changed_at = time.monotonic()
        self._attempts: list[Reconnecting] = []

    async def run(self) -> None:
        """Talk until told to stop. What goes wrong is in the tally."""
        limits = ClientLimits(keepalive_sec=KEEPALIVE_SEC)
        config = {"start_policy": "on_first_chunk", "output_audio": {"sample_rate": 16_000}}
        try:
            async with connect(self._urls, reconnect=True, config=config, limits=limits) as session:
                self._note_server(session)
                self.session_id = session.session_id
                self.task_names.append(f"client of {session.session_id}")
                self._connected()
                reading = asyncio.create_task(self._read(session), name=f"{self.name}, reading")
                try:
                    await self._talk(session, reading)
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
        except Exception as error:
            self._wrong(f"the conversation ended: {error!r}")
        self._tally.counts["conversations"] += 1

    @property
    def state(self) -> str:
        """Its connection, for people."""
        since = f"{self.session_id}, {self.heard} words, {len(self._under_way)} turns; "
        since += f"{time.monotonic() - self._changed_at:.1f} s since it was opened or resumed"
        if not self._attempts:
            return since
        return f"{since}, {len(self._attempts)} attempts told since, the last behind {self._attempts[-1].error!r}"

    def _connected(self) -> None:
        self._changed_at = time.monotonic()
        self._attempts.clear()

    def _note_server(self, session: ClientSession) -> None:
        route = session.route
        self.server = route.url if route is not None else ""

    def _wrong(self, line: str) -> None:
        self._tally.wrong.append(f"{self.name}: {line}")

    # saying

    async def _talk(self, session: ClientSession, reading: asyncio.Task[None]) -> None:
        while not self.stop:
            await self._until_fewer_than(AT_ONCE, reading)
            await self._say(session, reading)
        await self._until_fewer_than(1, reading)

    async def _until_fewer_than(self, count: int, reading: asyncio.Task[None]) -> None:
        async with self._fewer:
            await self._fewer.wait_for(lambda: len(self._under_way) < count or reading.done())
        if reading.done():
            reading.result()

    async def _say(self, session: ClientSession, reading: asyncio.Task[None]) -> None:
        luck = self._random.random()
        if self._random.random() < CONFIGURED:
            with contextlib.suppress(ConnectionLost):  # a new session has it from the start
                await session.configure(instructions=f"turn {self._said}")
                self._tally.counts["configurations"] += 1
        ref = f"{self.name}.{self._said}"
        pieces = self._pieces(is_audio=luck < AUDIO)
        turn = _Turn(ref, b"".join(pieces), luck < AUDIO)
        self._under_way.append(turn)
        if AUDIO <= luck < AUDIO + WHOLE:
            await session.send_text(turn.expected.decode(), end=True, ref=ref)
            async with self._fewer:  # as somebody does who listens
                await self._fewer.wait_for(lambda: turn not in self._under_way or reading.done())
        else:
            for number, piece in enumerate(pieces, 1):
                if turn.is_audio:
                    await session.send_audio(piece, end=number == len(pieces), ref=ref)
                else:
                    await session.send_text(piece.decode(), end=number == len(pieces), ref=ref)
                await asyncio.sleep(self._word_sec)
        if luck > 1 - CANCELLED and turn in self._under_way:
            turn.cancelled = True
            await session.cancel(ref=ref)

    def _pieces(self, *, is_audio: bool) -> list[bytes]:
        count = self._random.randint(1, MAX_WORDS)
        self._said += 1
        if is_audio:
            return [self._random.randbytes(AUDIO_BYTES) for _ in range(count)]
        return [f"{self.name}.{self._said}.{number} ".encode() for number in range(count)]

    # hearing

    async def _read(self, session: ClientSession) -> None:
        try:
            await self._hear(session)
        finally:
            async with self._fewer:  # whoever waits for an end of a turn
                self._fewer.notify_all()

    async def _hear(self, session: ClientSession) -> None:
        async for event in session.events():
            match event:
                case TextChunk(text=text):
                    self._word(event.request_id, event.sequence_id, text.encode())
                case AudioChunk(audio=audio):
                    self._word(event.request_id, event.sequence_id, audio)
                case ResponseStarted(request_id=request_id, ref=ref):
                    for turn in self._under_way:
                        if turn.ref == ref:
                            turn.request_id = request_id
                case FinalEvent():
                    await self._final(event)
                case _:
                    self._note_server(session)
                    self._notice(event, session.session_id)
        await session.ping()  # which raises why the session has ended

    def _notice(self, event: Event, session_id: str) -> None:
        """Take what is said of the session."""
        match event:
            case Resumed():
                self._tally.counts["resumed"] += 1
                self.resumed_at, self.next_word_at = time.monotonic(), 0.0
                self._connected()
                if session_id != self.session_id:
                    self._wrong("the session changed its id")
            case Reconnected(error=error):
                line = f"a new session in place of {self.session_id} after {self.heard} words: {error!r}"
                if self.resumable:
                    self._wrong(line)
                else:
                    self._tally.lost_as_told.append(f"{self.name}: {line}")
                self.resumable = True
                self.session_id, self._last_number = session_id, -1
                for turn in self._under_way:
                    turn.got, turn.request_id = b"", None
                self.resumed_at, self.next_word_at = time.monotonic(), 0.0
                self._connected()
            case Reconnecting():
                self._attempts.append(event)
            case ErrorEvent(error=refusal):
                self._wrong(f"error {refusal.code}: {refusal}")
            case ResumableChanged(resumable=resumable):
                self.resumable = resumable
                self._tally.counts["told that it is resumable" if resumable else "told that it is not"] += 1

    def _word(self, request_id: str, number: int, piece: bytes) -> None:
        self.heard += 1
        self._tally.counts["words"] += 1
        if not self.next_word_at:
            self.next_word_at = time.monotonic()
        self._told()
        if number <= self._last_number:
            self._wrong(f"output {number} after {self._last_number}")
        self._last_number = number
        turn = next((one for one in self._under_way if one.request_id == request_id), None)
        if turn is None:
            self._wrong(f"{piece[:40]!r} belongs to no turn")
            return
        turn.got += piece
        if not turn.expected.startswith(turn.got):
            self._wrong(f"turn {turn.ref}: {_difference(turn)}")
            turn.got = turn.expected[: len(turn.got)]  # told once

    async def _final(self, event: FinalEvent) -> None:
        self._last_number = max(self._last_number, -1 if event.sequence_id is None else event.sequence_id)
        async with self._fewer:
            turn = next((one for one in self._under_way if one.ref == event.ref), None)
            if turn is None:
                self._wrong(f"a final of {event.ref!r}, which is not under way")
                return
            if turn is not self._under_way[0]:
                self._wrong(f"{turn.ref} has ended before {self._under_way[0].ref}")
            self._under_way.remove(turn)
            self._fewer.notify_all()
        self._tally.counts["turns"] += 1
        if event.finish_reason is FinishReason.CANCELLED and turn.cancelled:
            self._tally.counts["cancelled turns"] += 1
        elif event.finish_reason is not FinishReason.STOP:
            self._wrong(f"{turn.ref} ended by {event.finish_reason}")
        elif turn.got != turn.expected:
            self._wrong(f"turn {turn.ref} at its end: {_difference(turn)}")


def _difference(turn: _Turn) -> str:
    """Say where an answer departs from what was said."""
    same = next(
        (place for place, (one, other) in enumerate(zip(turn.expected, turn.got, strict=False)) if one != other),
        min(len(turn.expected), len(turn.got)),
    )
    if turn.is_audio:
        return f"sound differs at byte {same} of {len(turn.expected)}, {len(turn.got)} came"
    return f"said {turn.expected[same : same + 40]!r} at {same}, heard {turn.got[same : same + 40]!r}"
