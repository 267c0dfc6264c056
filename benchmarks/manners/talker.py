"""A person at a client: a microphone and a loudspeaker on one clock, over a real socket, natively or Realtime.

Every 20 ms the loudspeaker plays what it has, and the microphone sends what the person says, the sounds beside them,
and the loudspeaker's echo. Times are in ticks of this clock.
"""

from __future__ import annotations

import asyncio
import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from benchmarks.manners.loudspeaker import RATE as SPEAKER_RATE
from benchmarks.manners.loudspeaker import TICK as SPEAKER_TICK
from benchmarks.manners.loudspeaker import Loudspeaker
from benchmarks.speech.wordless import quiet_room
from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.caller.answers import NativeReader, RealtimeReader, SessionReader, decoded, parsed
from omni_ws.caller.script import PIECE_MS, PIECE_SEC, Target

MIC_RATE: Final = 16_000
MIC_TICK: Final = MIC_RATE * PIECE_MS // 1000
_REPORT_TICKS: Final = 5
#: A loudspeaker's echo: the direct sound, and two reflections, in milliseconds behind it and as factors.
_PATHS: Final = ((0, 1.0), (7, 0.4), (19, 0.2))
#: How long the server may take to confirm or refuse the settings.
_SETTINGS_SEC: Final = 60.0


@dataclass(frozen=True, slots=True)
class Echo:
    """How much of the loudspeaker the microphone hears, and how late."""

    level_db: float
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A message of the server, and the tick at which it came.

    ``kind`` is started, uncertain, confirmed, dismissed, stopped, response, final, transcript, call, refused or closed.
    ``audio_ms`` is its place in the input.
    """

    tick: int
    kind: str
    name: str = ""
    text: str = ""
    audio_ms: float | None = None


class Wire(ABC):
    """How a front end is spoken to, and what its messages mean. ``read`` yields (kind, fields of Seen)."""

    path: ClassVar[str]
    reader: ClassVar[type[SessionReader]]
    reports: ClassVar[bool]

    @abstractmethod
    def opening(self) -> dict[str, Any]: ...

    @abstractmethod
    def audio(self, number: int, pcm: bytes) -> list[dict[str, Any]]: ...

    @abstractmethod
    def typed(self, number: int, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        """What a client says when speech has stopped its loudspeaker."""

    @abstractmethod
    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what a message tells; kind ``audio`` has ``name``, ``pcm`` and ``start_ms``."""

    cancel: ClassVar[dict[str, Any]]


@dataclass
class NativeWire(Wire):
    """The native WebSocket, with the settings of the page unless ``turns`` or ``config`` say otherwise."""

    turns: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    path = "/v1/streaming_input"
    reader = NativeReader
    reports = True
    cancel: ClassVar[dict[str, Any]] = {"type": "cancel"}

    def opening(self) -> dict[str, Any]:
        turns = {
            "type": "semantic_vad",
            "eagerness": "auto",
            "interrupt_response": True,
            "interrupt_resume": True,
            **self.turns,
        }
        return {"type": "session_config", "turn_detection": turns, **self.config}

    def audio(self, number: int, pcm: bytes) -> list[dict[str, Any]]:
        payload = base64.b64encode(pcm).decode()
        return [{"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}]

    def typed(self, number: int, text: str) -> list[dict[str, Any]]:
        return [{"type": "input_chunk", "sequence_id": number, "text": text, "end_of_input": True}]

    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]:
        chunk = {"type": "input_chunk", "sequence_id": number, "role": "tool", "tool_call_id": call_id, "text": text}
        return [{**chunk, "end_of_input": True}]

    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        return [{"type": "output_ack", "request_id": answer, "played_ms": int(played_ms)}]

    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        frame = parsed(message)
        turn, at = frame.get("turn_id") or "", frame.get("audio_ms")
        match frame.get("type"):
            case "session_updated":
                yield "configured", {}
            case "speech_started":
                yield ("uncertain" if frame.get("certain") is False else "started"), {"name": turn, "audio_ms": at}
            case "speech_confirmed":
                yield "confirmed", {"name": turn, "audio_ms": at}
            case "speech_dismissed":
                yield "dismissed", {"name": turn, "audio_ms": at}
            case "speech_stopped":
                yield "stopped", {"name": turn, "audio_ms": at}
            case "response_started":
                yield "response", {"name": frame["request_id"]}
            case "error":
                error = frame["error"]
                text = f"{error['code']} {error.get('param')}: {error['message']}"
                yield "refused", {"name": error.get("request_id") or "", "text": text}
            case "output_chunk":
                yield from self._output(frame)

    def _output(self, frame: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        name = frame["request_id"]
        if frame.get("final"):
            yield "final", {"name": name, "text": frame["finish_reason"]}
            return
        match frame.get("modality"):
            case "audio":
                start = frame.get("start_ms")
                yield "audio", {"name": name, "pcm": decoded(frame["payload"]), "start_ms": start}
            case "transcript" if not frame.get("interim"):
                yield "transcript", {"name": name, "text": frame["text"]}
            case "text":
                yield "text", {"name": name, "text": frame["text"]}
            case "tool_call" if frame.get("id"):
                yield "call", {"name": frame["id"], "text": frame.get("name") or ""}


@dataclass
class RealtimeWire(Wire):
    """``/v1/realtime``, with transcription, and OpenAI's defaults or ``turns``."""

    turns: dict[str, Any] = field(default_factory=lambda: {"type": "server_vad"})
    config: dict[str, Any] = field(default_factory=dict)
    path = "/v1/realtime?model=gpt-realtime"
    reader = RealtimeReader
    reports = False
    cancel: ClassVar[dict[str, Any]] = {"type": "response.cancel"}
    _items: dict[str, str] = field(default_factory=dict)

    def opening(self) -> dict[str, Any]:
        heard = {
            "format": {"type": "audio/pcm", "rate": MIC_RATE},
            "transcription": {"model": "whisper-1"},
            "turn_detection": self.turns,
        }
        return {"type": "session.update", "session": {"type": "realtime", "audio": {"input": heard}, **self.config}}

    def audio(self, number: int, pcm: bytes) -> list[dict[str, Any]]:
        return [{"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()}]

    def typed(self, number: int, text: str) -> list[dict[str, Any]]:
        content = [{"type": "input_text", "text": text}]
        return [self._item({"type": "message", "role": "user", "content": content}), {"type": "response.create"}]

    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]:
        return [
            self._item({"type": "function_call_output", "call_id": call_id, "output": text}),
            {"type": "response.create"},
        ]

    @staticmethod
    def _item(item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "conversation.item.create", "item": item}

    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        if answer not in self._items:
            return []
        place = {"item_id": self._items[answer], "content_index": 0, "audio_end_ms": int(played_ms)}
        return [{"type": "conversation.item.truncate", **place}]

    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        event = parsed(message)
        match event.get("type"):
            case "session.updated":
                yield "configured", {}
            case "input_audio_buffer.speech_started":
                yield "started", {"name": event["item_id"], "audio_ms": event["audio_start_ms"]}
            case "input_audio_buffer.speech_stopped":
                yield "stopped", {"name": event["item_id"], "audio_ms": event["audio_end_ms"]}
            case "response.created":
                yield "response", {"name": event["response"]["id"]}
            case "response.output_audio.delta":
                self._items[event["response_id"]] = event["item_id"]
                yield "audio", {"name": event["response_id"], "pcm": decoded(event["delta"]), "start_ms": None}
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                yield "text", {"name": event["response_id"], "text": event["delta"]}
            case "response.done":
                yield "final", {"name": event["response"]["id"], "text": event["response"]["status"]}
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                yield "call", {"name": event["item"]["call_id"], "text": event["item"]["name"]}
            case "conversation.item.input_audio_transcription.completed":
                yield "transcript", {"name": event["item_id"], "text": event["transcript"]}
            case "error":
                yield "refused", {"text": str(event["error"].get("message"))}


class _Down:
    """From the loudspeaker's rate to the microphone's, a tick in and a tick out, two thirds of a millisecond late."""

    _TAPS: ClassVar[int] = 63

    def __init__(self) -> None:
        # At twice the loudspeaker's rate, which is three times the microphone's: below 7.2 kHz.
        places = np.arange(self._TAPS) - self._TAPS // 2
        self._filter = np.sinc(places * 0.3) * 0.3 * np.hamming(self._TAPS) * 2
        self._last = np.zeros(self._TAPS // 2, np.float32)

    def resample(self, tick: Samples) -> Samples:
        block = np.concatenate([self._last, tick])
        self._last = block[-len(self._last) :]
        spread = np.zeros(2 * len(block))
        spread[::2] = block
        return np.convolve(spread, self._filter, "valid")[::3].astype(np.float32)


class Refused(Exception):
    """The server does not take a setting."""


class Talker:
    """A conversation, as an asynchronous context: it connects, configures, and sends silence until something is said.

    ``slower``: its clock runs so many times slower than the world's. Raises Refused if the server does not take the
    settings.
    """

    def __init__(self, target: Target, wire: Wire, *, echo: Echo | None = None, slower: float = 1.0) -> None:
        self.wire = wire
        self.speaker = Loudspeaker()
        self.seen: list[Seen] = []
        self.reader = wire.reader()
        #: The texts of answers, by their names.
        self.texts: dict[str, str] = {}
        #: The ticks at which the loudspeaker was made to drop sound of an answer, and that answer.
        self.silenced: list[tuple[int, str]] = []
        self._target = target
        self._echo = echo
        self._tick_sec = PIECE_SEC * slower
        self._connection: ClientConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0
        #: What is said from the next tick on, and sounds beside it.
        self._said = np.zeros(0, np.float32)
        self._beside = np.zeros(0, np.float32)
        self._room = quiet_room(10)
        self._echoed = np.zeros(MIC_RATE, np.float32)
        self._down = _Down()
        self._ticked = asyncio.Event()
        self._configured = asyncio.Event()
        self.closed: str | None = None

    async def __aenter__(self) -> Self:
        self._connection = await self._target.websocket(self.wire.path)
        self._tasks.append(asyncio.create_task(self._listen(), name="talker's ears"))
        await self._send([self.wire.opening()])
        async with asyncio.timeout(_SETTINGS_SEC):
            await self._configured.wait()
        if refused := next((one for one in self.seen if one.kind in ("refused", "closed")), None):
            await self.__aexit__(None, None, None)
            raise Refused(refused.text)
        self._tasks.append(asyncio.create_task(self._live(), name="talker's clock"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connection is not None
        closed = self.closed
        await self._connection.close()
        self.closed = closed
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def now(self) -> int:
        """The tick that comes next."""
        return self.speaker.ticks

    def say(self, samples: Samples) -> int:
        """Say something from the next tick on; return that tick."""
        self._said = _mixed(self._said, samples)
        return self.now

    def sound(self, samples: Samples) -> None:
        """Let something sound beside the speaker from the next tick on."""
        self._beside = _mixed(self._beside, samples)

    def quiet(self) -> None:
        """Neither say anything more nor let anything sound."""
        self._said = self._beside = np.zeros(0, np.float32)

    async def type(self, text: str) -> None:
        await self._send(self.wire.typed(self._number, text), chunks=1)

    async def give(self, call_id: str, text: str) -> None:
        """Send the result of a tool."""
        await self._send(self.wire.result(self._number, call_id, text), chunks=1)

    async def cancel(self) -> None:
        """Press stop."""
        self.speaker.stop()
        self.speaker.ducked = False
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
            await self._send(self.wire.audio(self._number, pcm16_from_samples(piece).tobytes()), chunks=1)
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
        return np.clip(piece, -1, 1)

    def _heard_again(self, played: NDArray[np.int16], echo: Echo) -> Samples:
        """The echo of this tick; the loudspeaker's sound is put where it arrives."""
        sound = self._down.resample(played.astype(np.float32) / np.float32(32768))
        for later_ms, gain in _PATHS:
            begin = (echo.delay_ms + later_ms) * MIC_RATE // 1000
            self._echoed = _mixed(self._echoed, sound * np.float32(gain * 10 ** (echo.level_db / 20)), begin)
        now, self._echoed = self._echoed[:MIC_TICK], self._echoed[MIC_TICK:]
        return now

    async def _report(self) -> None:
        if (place := self.speaker.position) is not None:
            await self._send(self.wire.cut(*place))

    # Messages

    async def _send(self, frames: list[dict[str, Any]], *, chunks: int = 0) -> None:
        assert self._connection is not None
        self._number += chunks
        for frame in frames:
            message = json.dumps(frame)
            self.reader.asked(self.now, message)
            try:
                await self._connection.send(message)
            except ConnectionClosed:
                return  # the ears tell of it

    async def _listen(self) -> None:
        assert self._connection is not None
        try:
            async for message in self._connection:
                self.reader.heard(self.now, message)
                for kind, fields in self.wire.read(message):
                    await self._take(kind, fields)
        except ConnectionClosed:
            pass
        self.closed = f"{self._connection.close_code} {self._connection.close_reason}"
        self.seen.append(Seen(self.now, "closed", text=self.closed))
        self._ticked.set()
        self._configured.set()

    async def _take(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "audio":
                samples = np.frombuffer(fields["pcm"], "<i2").astype(np.int16)
                self.speaker.put(fields["name"], samples, fields["start_ms"])
                return
            case "text":
                self.texts[fields["name"]] = self.texts.get(fields["name"], "") + fields["text"]
                return
            case "uncertain":
                self.speaker.ducked = True
            case "dismissed":
                self.speaker.ducked = False
            case "started" | "confirmed":
                self.speaker.ducked = False
                self._silence()
                if (place := self.speaker.position) is not None:
                    await self._send(self.wire.cut(*place))
            case "final" if fields["text"] == "cancelled":
                place = self.speaker.position
                if place is None or place[0] == fields["name"]:
                    self._silence()
        self.seen.append(Seen(self.now, kind, **fields))
        if kind in ("configured", "refused"):
            self._configured.set()

    def _silence(self) -> None:
        """Drop the sound not yet played, since speech or the server says so."""
        if (dropped := self.speaker.next_answer) is not None:
            self.silenced.append((self.now, dropped))
        self.speaker.stop()


def _mixed(sound: Samples, other: Samples, begin: int = 0) -> Samples:
    """Two sounds at once, the second from sample ``begin`` of the first on."""
    end = begin + len(other)
    sound = np.pad(sound, (0, end - len(sound))) if end > len(sound) else sound.copy()
    sound[begin:end] += other
    return sound


#: Ticks of the loudspeaker and of the microphone are equally long.
assert SPEAKER_TICK * MIC_RATE == MIC_TICK * SPEAKER_RATE
