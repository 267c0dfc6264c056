"""Talkers for any voice server: recordings in real time over the wire of each, and when their answers are heard."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Data

from benchmarks.embedded import LEAD_SEC, SAMPLE_RATE, Clip
from omni_ws.caller.script import PIECE_SEC, beside
from omni_ws.client.audio import Pcm16, paced, pieces

#: Of the answers, at every server.
ANSWER_RATE: Final = 24_000
#: What an ear takes for sound: a voice may begin with silence.
AUDIBLE: Final = 300
#: A pause in the audio that parts two answers. No server leaves as much within one.
BETWEEN_ANSWERS_SEC: Final = 1.0
_WIRE_TYPE_BYTES: Final = 2


class VoiceWire(ABC):
    """How a server takes a microphone and gives audio: pcm16, one channel, 16 kHz in and 24 kHz out."""

    path: str = "/"

    def opening(self) -> Sequence[str]:
        """What a client sends first."""
        return ()

    @abstractmethod
    def encode(self, piece: bytes, number: int) -> Data: ...

    @abstractmethod
    def audio(self, message: Data) -> bytes:
        """The audio in a message; nothing if it is about something else."""


class OmniWire(VoiceWire):
    """The native WebSocket of omni_ws, in JSON."""

    path = "/v1/streaming_input"

    def __init__(self, turn_detection: Mapping[str, object]) -> None:
        self._turn_detection = turn_detection

    def opening(self) -> Sequence[str]:
        audio = {"format": "pcm16", "sample_rate": ANSWER_RATE}
        config = {"type": "session_config", "turn_detection": self._turn_detection, "output_audio": audio}
        return (json.dumps(config),)

    def encode(self, piece: bytes, number: int) -> Data:
        payload = base64.b64encode(piece).decode()
        chunk = {"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}
        return json.dumps(chunk)

    def audio(self, message: Data) -> bytes:
        frame = json.loads(message)
        if frame["type"] == "error":
            raise RuntimeError(f"the server refused a frame: {frame}")
        if frame["type"] != "output_chunk" or frame.get("modality") != "audio":
            return b""
        return base64.b64decode(frame.get("payload") or "")


class RawWire(VoiceWire):
    """Binary messages of bare samples, both ways."""

    def encode(self, piece: bytes, number: int) -> Data:
        return piece

    def audio(self, message: Data) -> bytes:
        return message if isinstance(message, bytes) else b""


class ProtobufWire(VoiceWire):
    """Pipecat's frames: a message whose second field, the audio, has its samples in the third field."""

    def encode(self, piece: bytes, number: int) -> Data:
        rate_and_channels = b"\x20" + _varint(SAMPLE_RATE) + b"\x28\x01"
        audio = b"\x1a" + _varint(len(piece)) + piece + rate_and_channels
        return b"\x12" + _varint(len(audio)) + audio

    def audio(self, message: Data) -> bytes:
        if isinstance(message, str):
            return b""
        frame = dict(_fields(message)).get(2)
        return dict(_fields(frame)).get(3, b"") if frame is not None else b""


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(0x80 | number & 0x7F)
        number >>= 7
    return bytes((*encoded, number))


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of the fields of a protobuf message that have a length."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        size = number()
        if key & 7 == _WIRE_TYPE_BYTES:
            yield key >> 3, message[at : at + size]
            at += size


@dataclass(slots=True)
class Player:
    """Plays what arrives as a loudspeaker does, and notes when each answer came and when it was first heard."""

    #: When the first audio of each answer arrived.
    arrived: list[float] = field(default_factory=list)
    #: When its first audible sample was played.
    heard: list[float] = field(default_factory=list)
    _played_until: float = 0.0
    _silent: bool = False

    def add(self, samples: bytes, now: float) -> None:
        if now > self._played_until + BETWEEN_ANSWERS_SEC:
            self.arrived.append(now)
            self._silent = True
        begins = max(now, self._played_until)
        values = array("h", samples)
        if self._silent and (place := _first_audible(values)) is not None:
            self.heard.append(begins + place / ANSWER_RATE)
            self._silent = False
        self._played_until = begins + len(values) / ANSWER_RATE


def _first_audible(values: array[int]) -> int | None:
    return next((place for place, value in enumerate(values) if abs(value) > AUDIBLE), None)


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """A spoken turn. Times are seconds from the end of its speech; None without an answer.

    ``early``: an answer began before the speech had ended.
    """

    arrived: float | None
    heard: float | None
    early: bool


def turns_of(spoken: Sequence[tuple[float, float, float]], player: Player) -> list[SpokenTurn]:
    """Pairs what was said with what was answered. ``spoken``: when each turn, its speech, and its time ended."""

    def first(times: Sequence[float], after: float, before: float) -> float | None:
        return next((time - after for time in times if after <= time < before), None)

    return [
        SpokenTurn(
            first(player.arrived, ended, over),
            first(player.heard, ended, over),
            any(began <= time < ended for time in player.arrived),
        )
        for began, ended, over in spoken
    ]


async def converse(port: int, wire: VoiceWire, clips: Sequence[Clip], turn_sec: float) -> list[SpokenTurn]:
    """Says one clip every ``turn_sec`` in a session of its own."""
    player = Player()
    async with microphone_open(port, wire, _pieces(clips, turn_sec), player) as sending:
        began = time.perf_counter()
        await sending
    spoken = []
    for turn, clip in enumerate(clips):
        starts = began + turn * turn_sec
        speech = [starts + LEAD_SEC + place for place in clip.speech]
        spoken.append((speech[0], speech[1], starts + turn_sec))
    return turns_of(spoken, player)


@asynccontextmanager
async def microphone_open(
    port: int, wire: VoiceWire, audio: Iterable[bytes], player: Player
) -> AsyncGenerator[asyncio.Task[None], None]:
    """Yields the task that sends the audio in a session, which ends with the block."""
    async with connect(f"ws://127.0.0.1:{port}{wire.path}", compression=None, max_size=None) as connection:
        for message in wire.opening():
            await connection.send(message)

        async def send() -> None:
            number = 0
            try:
                async for piece in paced(audio, interval=PIECE_SEC):
                    await connection.send(wire.encode(piece, number))
                    number += 1
            except ConnectionClosed as closed:
                raise RuntimeError("the server ended a session") from closed

        async with beside(send(), _listen(connection, wire, player)) as (sending, _):
            yield sending


def _pieces(clips: Sequence[Clip], turn_sec: float) -> Iterator[bytes]:
    """Each clip after ``LEAD_SEC`` of silence, and silence until its turn is over."""
    for clip in clips:
        lead = bytes(2 * round(LEAD_SEC * SAMPLE_RATE))
        size = 2 * round(turn_sec * SAMPLE_RATE)
        if len(lead) + len(clip.samples) > size:
            raise ValueError(f"{clip.name} does not fit into a turn of {turn_sec} s")
        yield from pieces(Pcm16((lead + clip.samples).ljust(size, b"\0"), SAMPLE_RATE, 1))


async def _listen(connection: ClientConnection, wire: VoiceWire, player: Player) -> None:
    with suppress(ConnectionClosed):
        async for message in connection:
            if samples := wire.audio(message):
                player.add(samples, time.perf_counter())
    raise RuntimeError("the server ended a session")
