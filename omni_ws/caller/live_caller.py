"""A person at a client: a microphone and a loudspeaker on one clock, over a real socket, natively or Realtime.

Every 20 ms the loudspeaker plays what it has, and the microphone sends what the person says, the sounds beside them,
and the loudspeaker's echo. Times are in ticks of this clock.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from omni_ws.audio.pcm import PCM16_SCALE, Pcm16, Samples, pcm16_from_samples
from omni_ws.caller.script import PIECE_MS, PIECE_SEC, Target
from omni_ws.caller.sounds import MIC_RATE, MIC_TICK, Loudspeaker, TickResampler, mixed, room_noise
from omni_ws.caller.wires import Wire
from omni_ws.wire.recording import ClosedLine, OpenedLine, ReceivedLine, RecordedLine, SentLine, without_secrets

_REPORT_TICKS: Final = 5
#: A loudspeaker's echo: the direct sound, and two reflections, in milliseconds behind it and as factors.
_PATHS: Final = ((0, 1.0), (7, 0.4), (19, 0.2))
#: How long the server may take to confirm or refuse the settings.
_SETTINGS_SEC: Final = 60.0
#: How many seconds of what was sent a client keeps, until the server has it.
_KEPT_SEC: Final = 60.0


@dataclass(frozen=True, slots=True)
class Echo:
    """How much of the loudspeaker the microphone hears, and how late."""

    level_db: float
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A message of the server, and the tick at which it came.

    ``kind`` is configured, refused, started, uncertain, confirmed, dismissed, stopped, response, call, transcript,
    final or closed. ``audio_ms`` is its place in the input. ``text`` of a response is what triggered it, if that is
    known.
    """

    tick: int
    kind: str
    name: str = ""
    text: str = ""
    audio_ms: float | None = None


class SettingsRefused(Exception):
    """The server does not take a setting."""


class Recorded:
    """What a conversation sounded like and what went over its wire, to be looked at when it is over."""

    def __init__(self) -> None:
        #: pcm16: what was said at 16 kHz, and what was played at 24 kHz.
        self.said, self.played = bytearray(), bytearray()
        self.lines: list[RecordedLine] = []

    def hear(self, said: Pcm16, played: Pcm16) -> None:
        """Add the sound of a tick."""
        self.said += said.tobytes()
        self.played += played.tobytes()

    def clear(self) -> None:
        self.said, self.played, self.lines = bytearray(), bytearray(), []


class LiveCaller:
    """A conversation, as an asynchronous context: it connects, configures, and sends silence until something is said.

    ``slower``: its clock runs so many times slower than the world's. ``noise`` is what the room sounds like, ``loss``
    the share of the microphone's ticks that are lost on their way; equal ``seed``s lose the same ones. With
    ``recorded`` it keeps everything there. Raises SettingsRefused if the server does not take the settings.
    """

    def __init__(
        self,
        target: Target,
        wire: Wire,
        *,
        echo: Echo | None = None,
        slower: float = 1.0,
        noise: Samples | None = None,
        loss: float = 0.0,
        seed: int = 0,
        recorded: Recorded | None = None,
    ) -> None:
        self.wire = wire
        self.speaker = Loudspeaker()
        self.seen: list[Seen] = []
        #: The beginnings of answers, by their names.
        self.responses: dict[str, Seen] = {}
        self.reader = wire.reader()
        #: The texts of answers, by their names; the languages in which the user was heard, by the same names.
        self.texts: dict[str, str] = {}
        self.languages: dict[str, str] = {}
        #: What the server told of the times of answers; the ends of their words in ms, as far as it tells them.
        self.times: dict[str, dict[str, Any]] = {}
        self.word_ends: dict[str, list[float]] = {}
        #: What the server told that it keeps of an answer.
        self.kept: list[dict[str, Any]] = []
        #: The ticks at which the loudspeaker was made to drop sound of an answer, and that answer.
        self.silenced: list[tuple[int, str]] = []
        #: The first message of the server.
        self.created: dict[str, Any] = {}
        self._target = target
        self._echo = echo
        self._tick_sec = PIECE_SEC * slower
        self._connection: ClientConnection | None = None
        self._connections = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0
        #: The numbered messages that the server does not have for sure.
        self._unacknowledged: deque[tuple[int, str]] = deque(maxlen=int(_KEPT_SEC / PIECE_SEC))
        self._is_offline = False
        #: What is said from the next tick on, and sounds beside it.
        self._said = np.zeros(0, np.float32)
        self._beside = np.zeros(0, np.float32)
        self._room = room_noise(10, -70.0, seed=3) if noise is None else noise
        self._loss, self._chance = loss, random.Random(seed)
        self._echoed = np.zeros(MIC_RATE, np.float32)
        self._down = TickResampler(2, 3)
        self._recorded = recorded
        self._began = 0.0
        self._ticked = asyncio.Event()
        self._greeted = asyncio.Event()
        self._configured = asyncio.Event()
        self.closed: str | None = None

    async def __aenter__(self) -> Self:
        self._began = asyncio.get_running_loop().time()
        try:
            await self._connect(self.wire.path)
            async with asyncio.timeout(_SETTINGS_SEC):
                await self._greeted.wait()
                await self._send([self.wire.opening(self.created)])
                await self._configured.wait()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        if refused := next((one for one in self.seen if one.kind in ("refused", "closed")), None):
            await self.__aexit__(None, None, None)
            raise SettingsRefused(refused.text)
        self._begin(self._live(), "caller's clock")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closed = self.closed
        if self._connection is not None:
            await self._connection.close()
            self._note(ClosedLine(at=self._at, connection=self._connections - 1, by="client", code=1000))
        self.closed = closed
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, path: str) -> None:
        self._connection = connection = await self._target.websocket(path)
        place = self.reader.highest if self._connections else None
        target = path.partition("?")[0] if self._connections else path
        self._note(OpenedLine(at=self._at, connection=self._connections, target=target, last_output=place))
        self._connections += 1
        self._begin(self._listen(connection), "caller's ears")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._note_end)
        self._tasks.append(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """End the conversation where a task broke: nobody waits for what will not come."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._close(f"{type(error).__name__} {error}")

    async def lose_network(self, seconds: float) -> None:
        """Break the connection, talk on meanwhile, and resume the session. Raises OSError if that is not possible."""
        assert self._connection is not None
        self._is_offline = True
        self._connection.transport.abort()
        await self._connection.wait_closed()
        self._note(ClosedLine(at=self._at, connection=self._connections - 1, by="lost"))
        await self.wait(seconds * 1000)
        path = self.wire.resuming(self.reader)
        if path is None:
            raise OSError("there is no session to resume")
        await self._connect(path)

    @property
    def now(self) -> int:
        """The tick that comes next."""
        return self.speaker.ticks

    def say(self, samples: Samples) -> int:
        """Say something from the next tick on; return that tick."""
        self._said = mixed(self._said, samples)
        return self.now

    def sound(self, samples: Samples) -> None:
        """Let something sound beside the speaker from the next tick on."""
        self._beside = mixed(self._beside, samples)

    def quiet(self) -> None:
        """Neither say anything more nor let anything sound."""
        self._said = self._beside = np.zeros(0, np.float32)

    async def type(self, text: str) -> None:
        await self._send(self.wire.typed(self._number, text), chunks=1)

    async def show(self, media_type: str, data: bytes) -> None:
        """Send a picture, which is part of the next request."""
        await self._send(self.wire.picture(self._number, media_type, data), chunks=1)

    async def give(self, call_id: str, text: str) -> None:
        """Send the result of a tool."""
        await self._send(self.wire.result(self._number, call_id, text), chunks=1)

    async def cancel(self) -> None:
        """Press stop."""
        self.speaker.stop()
        self.speaker.duck(False)
        if self.wire.reports or self.reader.running is not None:
            await self._send([self.wire.cancel])

    async def until(self, is_so: Callable[[], bool], ms: float) -> bool:
        """Wait until something is so, this long at most; whether it is. Tested at every tick."""
        last = self.now + int(ms / PIECE_MS)
        while not is_so():
            if self.now >= last or self.closed is not None:
                return is_so()
            self._ticked.clear()
            await self._ticked.wait()
        return True

    async def wait(self, ms: float) -> None:
        await self.until(lambda: False, ms)

    def since(self, tick: int, *kinds: str) -> list[Seen]:
        """What the server told from a tick on, of these kinds."""
        return [one for one in self.seen if one.tick >= tick and one.kind in kinds]

    # The clock

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self.closed is None:
            await asyncio.sleep(max(0.0, begun + self.now * self._tick_sec - loop.time()))
            played = self.speaker.tick()
            piece = self._microphone(played)
            if self._recorded is not None:
                self._recorded.hear(pcm16_from_samples(piece), played)
            await self._send(self.wire.audio(self._number, self.wire.sound.encode(piece)), chunks=1)
            if self.wire.reports and self.now % _REPORT_TICKS == 0:
                await self._report()
            self._ticked.set()
        self._ticked.set()

    def _microphone(self, played: NDArray[np.int16]) -> Samples:
        begin = self.now * MIC_TICK % (len(self._room) - MIC_TICK)
        piece = self._room[begin : begin + MIC_TICK].copy()
        for waiting in (self._said, self._beside):
            now = waiting[:MIC_TICK]
            piece[: len(now)] += now
        self._said, self._beside = self._said[MIC_TICK:], self._beside[MIC_TICK:]
        if self._echo is not None:
            piece += self._heard_again(played, self._echo)
        if self._loss and self._chance.random() < self._loss:
            piece[:] = 0
        return np.clip(piece, -1, 1)

    def _heard_again(self, played: NDArray[np.int16], echo: Echo) -> Samples:
        """The echo of this tick; the loudspeaker's sound is put where it arrives."""
        sound = self._down.resample(played.astype(np.float32) / np.float32(PCM16_SCALE))
        for later_ms, gain in _PATHS:
            begin = (echo.delay_ms + later_ms) * MIC_RATE // 1000
            self._echoed = mixed(self._echoed, sound * np.float32(gain * 10 ** (echo.level_db / 20)), begin)
        now, self._echoed = self._echoed[:MIC_TICK], self._echoed[MIC_TICK:]
        return now

    async def _report(self) -> None:
        if (place := self.speaker.position) is not None:
            await self._send(self.wire.cut(*place))

    # Messages

    @property
    def _at(self) -> float:
        """Milliseconds since the beginning, for a recording."""
        return round((asyncio.get_running_loop().time() - self._began) * 1000, 3)

    def _note(self, line: RecordedLine) -> None:
        if self._recorded is not None:
            self._recorded.lines.append(line)

    async def _send(self, frames: list[dict[str, Any]], *, chunks: int = 0) -> None:
        assert self._connection is not None
        messages = [orjson.dumps(frame).decode() for frame in frames]
        if chunks and self.wire.reports:
            self._unacknowledged.extend((self._number, message) for message in messages)
        self._number += chunks
        if self._is_offline:
            return  # what is numbered is sent once the session goes on
        for message in messages:
            self.reader.asked(self.now, message)
            await self._write(message)

    async def _write(self, message: str) -> None:
        assert self._connection is not None
        self._note(ReceivedLine(at=self._at, connection=self._connections - 1, text=message))
        with suppress(ConnectionClosed):  # the ears tell of it
            await self._connection.send(message)

    async def _acknowledged(self, frame: dict[str, Any]) -> None:
        """Forget what the server has; after a resume, send again what it does not have."""
        while self._unacknowledged and self._unacknowledged[0][0] < frame["next_sequence_id"]:
            self._unacknowledged.popleft()
        if frame["type"] == "session_resumed":
            self._is_offline = False
            for _, message in [*self._unacknowledged]:
                await self._write(message)

    async def _listen(self, connection: ClientConnection) -> None:
        try:
            async for message in connection:
                text = message if isinstance(message, str) else bytes(message)
                if self._recorded is not None and isinstance(text, str):
                    told = without_secrets(text.encode()).decode()
                    self._note(SentLine(at=self._at, connection=self._connections - 1, text=told))
                try:
                    self.reader.heard(self.now, text)
                    told_of = [*self.wire.read(text)]
                except (KeyError, TypeError, AttributeError) as error:
                    self._close(f"a message that cannot be read ({error!r}): {text[:200]!r}")
                    return
                for kind, fields in told_of:
                    await self._take(kind, fields)
        except ConnectionClosed:
            pass
        if self._is_offline:
            return  # it will be resumed
        self._close(f"{connection.close_code} {connection.close_reason}")

    def _close(self, why: str) -> None:
        self.closed = why
        self.seen.append(Seen(self.now, "closed", text=why))
        self._ticked.set()
        self._greeted.set()
        self._configured.set()

    async def keeps(self, answer: str, ms: float) -> str | None:
        """Ask what the history keeps of an answer; None if the server does not tell it in time."""
        if (question := self.wire.asks_kept(answer)) is None:
            return None
        before = len(self.kept)
        await self._send([question])
        if not await self.until(lambda: len(self.kept) > before, ms):
            return None
        content = self.kept[-1].get("content") or ()
        return " ".join(part.get("transcript") or part.get("text") or "" for part in content)

    async def _take(self, kind: str, fields: dict[str, Any]) -> None:
        if "fields" in fields or kind == "language":
            await self._keep(kind, **fields)
            return
        match kind:
            case "audio":
                samples = np.frombuffer(fields["pcm"], "<i2").astype(np.int16)
                self.speaker.put(fields["name"], samples, fields["start_ms"])
                return
            case "text":
                self.texts[fields["name"]] = self.texts.get(fields["name"], "") + fields["text"]
                return
            case "uncertain" | "dismissed":
                self.speaker.duck(kind == "uncertain")
            case "started" | "confirmed" if self.wire.is_interruptible:
                self.speaker.duck(False)
                self._silence()
                if (place := self.speaker.position) is not None:
                    await self._send(self.wire.cut(*place))
            case "final" if fields["text"] == "cancelled":
                place = self.speaker.position
                if place is None or place[0] == fields["name"]:
                    self._silence()
        self.seen.append(seen := Seen(self.now, kind, **fields))
        if kind == "response":
            self.responses.setdefault(seen.name, seen)
        if kind in ("configured", "refused"):
            self._greeted.set()
            self._configured.set()

    async def _keep(self, kind: str, *, fields: Any = None, name: str = "", text: str = "") -> None:
        """Take what is no event of the conversation."""
        match kind:
            case "created":
                self.created = fields
                self._greeted.set()
            case "acknowledged":
                await self._acknowledged(fields)
            case "words":
                self.word_ends.setdefault(name, []).extend(word["end_ms"] for word in fields)
            case "times":
                self.times.setdefault(name, {}).update(fields)
            case "kept":
                self.kept.append(fields)
            case "language":
                self.languages[name] = text

    def _silence(self) -> None:
        """Drop the sound not yet played, since speech or the server says so."""
        if (dropped := self.speaker.next_answer) is not None:
            self.silenced.append((self.now, dropped))
        self.speaker.stop()
