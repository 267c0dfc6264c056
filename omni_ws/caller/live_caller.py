"""A simulated person at a client: a microphone and a loudspeaker on one clock, over a real socket, native or Realtime.

Every 20 ms the loudspeaker plays the audio that it has, and the microphone sends the person's speech, other sounds, and
the loudspeaker's echo. Times are in ticks of this clock.
"""

from __future__ import annotations

import asyncio
import base64
import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Final, Self
from urllib.parse import urlencode

import numpy as np
import orjson
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from omni_ws.audio.pcm import PCM16_SCALE, Pcm16, Samples, encode_mu_law, pcm16_from_samples
from omni_ws.caller.answers import NativeReader, RealtimeReader, SessionReader, decoded, parsed
from omni_ws.caller.script import PIECE_MS, PIECE_SEC, Target, frame_levels
from omni_ws.wire.recording import ClosedLine, OpenedLine, ReceivedLine, RecordedLine, SentLine, without_secrets

#: Of a microphone, in Hz, and its samples in a tick.
MIC_RATE: Final = 16_000
MIC_TICK: Final = MIC_RATE * PIECE_MS // 1000


def pink_noise(length: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return ``length`` samples of noise at 16 kHz with equal power in every octave from 50 Hz on."""
    spectrum = np.fft.rfft(random.normal(0, 1, length))
    frequencies = np.fft.rfftfreq(length, 1 / MIC_RATE)
    noise: NDArray[np.float64] = np.fft.irfft(spectrum / np.sqrt(np.maximum(frequencies, 50.0)), length)
    return noise


def room_noise(seconds: float, level_db: float, *, seed: int) -> Samples:
    """Return pink noise at 16 kHz, at ``level_db`` dBFS; equal arguments give equal noise."""
    noise = pink_noise(int(seconds * MIC_RATE), np.random.default_rng(seed))
    return np.asarray(noise * 10 ** (level_db / 20) / np.sqrt(np.mean(noise**2)), np.float32)


def levelled(samples: Samples, dbfs: float) -> Samples:
    """Return speech scaled so that the mean power of its loud frames is ``dbfs``."""
    levels = frame_levels(samples, MIC_TICK)
    loud = levels[levels > 0.05 * levels.max()]
    return np.asarray(samples * (10 ** (dbfs / 20) / np.sqrt(np.mean(loud**2))), np.float32)


def mixed(sound: Samples, other: Samples, begin: int = 0) -> Samples:
    """Return the sum of two sounds, the second beginning at sample ``begin`` of the first."""
    end = begin + len(other)
    sound = np.pad(sound, (0, end - len(sound))) if end > len(sound) else sound.copy()
    sound[begin:end] += other
    return sound


class TickResampler:
    """Resamples tick by tick to ``up / down`` times the rate, with a delay of about two milliseconds."""

    def __init__(self, up: int, down: int) -> None:
        self._up, self._down = up, down
        kept = 62 // up
        taps = up * kept + 1
        cutoff = 0.9 / max(up, down)
        places = np.arange(taps) - taps // 2
        # At ``up`` times the rate, below nine tenths of the lower of the two bands.
        self._filter = np.sinc(places * cutoff) * cutoff * np.hamming(taps) * up
        self._last = np.zeros(kept, np.float32)

    def resample(self, tick: Samples) -> Samples:
        block = np.concatenate([self._last, tick])
        self._last = block[-len(self._last) :]
        spread = np.zeros(self._up * len(block))
        spread[:: self._up] = block
        return np.convolve(spread, self._filter, "valid")[:: self._down].astype(np.float32)


class MicrophoneFormat:
    """The format in which a microphone's ticks are sent: pcm16 or G.711 µ-law, at 8, 16 or 24 kHz."""

    def __init__(self, rate: int, *, is_mu_law: bool = False) -> None:
        self.rate, self.is_mu_law = rate, is_mu_law
        ratio = {8000: (1, 2), 24_000: (3, 2)}.get(rate)
        self._resampler = None if ratio is None else TickResampler(*ratio)

    def encode(self, tick: Samples) -> bytes:
        if self._resampler is not None:
            tick = np.clip(self._resampler.resample(tick), -1, 1)
        pcm16 = pcm16_from_samples(tick)
        return encode_mu_law(pcm16) if self.is_mu_law else pcm16.tobytes()


SPEAKER_RATE: Final = 24_000
SPEAKER_TICK: Final = SPEAKER_RATE * PIECE_MS // 1000
#: PROTOCOL, "Uncertain onsets": the sound is lowered by 15 dB.
DUCKED: Final = 10 ** (-15 / 20)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples ``begin`` to ``end`` of an answer, played in one tick. ``ducked``: at a lowered level."""

    tick: int
    answer: str
    begin: int
    end: int
    ducked: bool


@dataclass(slots=True)
class _Piece:
    answer: str
    begin: int
    samples: Pcm16

    def take(self, most: int) -> Pcm16:
        """Remove and return the next ``most`` samples, or fewer at the end."""
        taken, self.samples = self.samples[:most], self.samples[most:]
        self.begin += len(taken)
        return taken


@dataclass(slots=True)
class Loudspeaker:
    """Plays audio in ticks of 20 ms, counted from the start, and records what it played."""

    ticks: int = 0
    played: list[Stretch] = field(default_factory=list)
    ducked: bool = False
    _waiting: deque[_Piece] = field(default_factory=deque)
    #: Up to where each answer was played, in samples.
    _places: dict[str, int] = field(default_factory=dict)
    _playing: str | None = None

    def put(self, answer: str, samples: Pcm16, start_ms: float | None) -> None:
        """Queue received audio of an answer.

        ``start_ms`` is its position in the answer; None: directly after the answer's audio received before.
        """
        last = next((piece for piece in reversed(self._waiting) if piece.answer == answer), None)
        follows = self._places.get(answer, 0) if last is None else last.begin + len(last.samples)
        begin = follows if start_ms is None else round(start_ms * SPEAKER_RATE / 1000)
        # The server rounds places to whole milliseconds.
        begin = follows if abs(begin - follows) <= SPEAKER_RATE // 1000 else begin
        self._waiting.append(_Piece(answer, begin, samples))

    def tick(self) -> Pcm16:
        """Play the next 20 ms, and return their samples."""
        sound, place = np.zeros(SPEAKER_TICK, np.int16), 0
        while self._waiting and place < SPEAKER_TICK:
            piece = self._waiting[0]
            begin, taken = piece.begin, piece.take(SPEAKER_TICK - place)
            sound[place : place + len(taken)] = taken
            self.played.append(Stretch(self.ticks, piece.answer, begin, piece.begin, self.ducked))
            self._playing = piece.answer
            place += len(taken)
            self._places[piece.answer] = piece.begin
            if not len(piece.samples):
                self._waiting.popleft()
        self.ticks += 1
        return (sound * DUCKED).astype(np.int16) if self.ducked else sound

    def duck(self, lowered: bool) -> None:
        """Lower the level of playback from now on, or raise it to full level again."""
        self.ducked = lowered

    def stop(self) -> None:
        """Drop the audio that was received but not played yet."""
        self._waiting.clear()

    @property
    def idle(self) -> bool:
        return not self._waiting

    def holds(self, answer: str) -> bool:
        """Return whether audio of an answer is still to be played."""
        return any(piece.answer == answer for piece in self._waiting)

    def place(self, answer: str) -> float:
        """Return the position up to which an answer was played, in milliseconds."""
        return self._places.get(answer, 0) * 1000 / SPEAKER_RATE

    @property
    def next_answer(self) -> str | None:
        """The answer whose audio is played next; None without any audio."""
        return self._waiting[0].answer if self._waiting else None

    @property
    def position(self) -> tuple[str, float] | None:
        """The answer that plays, or was played last, and the position reached in it, in milliseconds.

        None before the first sound.
        """
        return None if self._playing is None else (self._playing, self._places[self._playing] * 1000 / SPEAKER_RATE)

    # What it recorded

    def sounding(self, begin: int, end: int) -> list[bool]:
        """Return, for each tick of [begin, end), whether anything was played in it."""
        heard = {stretch.tick for stretch in self._since(begin) if stretch.tick < end}
        return [tick in heard for tick in range(begin, end)]

    def longest_gap_ms(self, begin: int, end: int) -> int:
        """Return the longest time in the ticks [begin, end) in which nothing was played."""
        longest = run = 0
        for sounds in self.sounding(begin, end):
            run = 0 if sounds else run + 1
            longest = max(longest, run)
        return longest * PIECE_MS

    def heard_ms(self, begin: int, end: int, answers: Iterable[str] | None = None) -> float:
        """Return how many milliseconds of these answers (None: of all) were played in the ticks [begin, end)."""
        wanted = None if answers is None else set(answers)
        return sum(
            (one.end - one.begin) * 1000 / SPEAKER_RATE
            for one in self._since(begin)
            if one.tick < end and (wanted is None or one.answer in wanted)
        )

    def ducked_ms(self, begin: int, end: int) -> int:
        """Return for how long the ticks [begin, end) were played at the lowered level."""
        return PIECE_MS * len({one.tick for one in self._since(begin) if one.tick < end and one.ducked})

    def lost_and_repeated_ms(self, answer: str) -> tuple[float, float]:
        """Return how many milliseconds of an answer were skipped up to its last sound, and how many played twice."""
        place, lost, repeated = 0, 0, 0
        for one in self.played:
            if one.answer == answer:
                lost += max(0, one.begin - place)
                repeated += max(0, min(place, one.end) - one.begin)
                place = max(place, one.end)
        return lost * 1000 / SPEAKER_RATE, repeated * 1000 / SPEAKER_RATE

    def _since(self, tick: int) -> list[Stretch]:
        return self.played[bisect_left(self.played, tick, key=lambda stretch: stretch.tick) :]


# How a front end is spoken to, and what its messages mean: the native WebSocket and the Realtime API.


class Wire(ABC):
    """A front end's protocol as a caller uses it: configures a session, sends speech and text, and reads messages."""

    path: str
    reader: ClassVar[type[SessionReader]]
    #: Whether what plays is reported all the time, and not only where it was stopped.
    reports: ClassVar[bool]
    #: Of a recording (docs/recording.md).
    kind: ClassVar[str]
    sound: MicrophoneFormat
    #: The settings of turn detection; None if the caller ends the turns.
    turns: dict[str, Any] | None

    @abstractmethod
    def opening(self, created: dict[str, Any]) -> dict[str, Any]:
        """Return the message that configures a session. ``created`` is the first message of that session."""

    @abstractmethod
    def audio(self, number: int, sound: bytes) -> list[dict[str, Any]]: ...

    @abstractmethod
    def typed(self, number: int, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def picture(self, number: int, media_type: str, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that send a picture as part of the next request."""

    @abstractmethod
    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        """Return the messages that report that playback stopped, at ``played_ms`` of an answer."""

    @abstractmethod
    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the contents of a server's message, each as a kind and its fields.

        Kind ``audio`` has ``name``, ``pcm`` and ``start_ms``; ``created``, ``acknowledged``, ``words``, ``times`` and
        ``kept`` have ``fields``. All others have fields of Seen. May raise KeyError, TypeError or AttributeError for a
        message that is not of the protocol.
        """

    def resuming(self, reader: SessionReader) -> str | None:
        """Return the URL path at which a lost session is resumed; None if the protocol cannot resume sessions."""
        return None

    def asks_kept(self, answer: str) -> dict[str, Any] | None:
        """Return the message that asks what the history keeps of an answer; None if the protocol cannot ask."""
        return None

    @property
    def is_interruptible(self) -> bool:
        """Whether speech over an answer stops the answer, and the loudspeaker."""
        return self.turns is not None and self.turns.get("interrupt_response", True) is not False

    cancel: ClassVar[dict[str, Any]]


@dataclass
class NativeWire(Wire):
    """The native WebSocket, with the settings of the web page unless ``turns`` or ``config`` override them."""

    turns: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sound: MicrophoneFormat = field(default_factory=lambda: MicrophoneFormat(MIC_RATE))
    path: str = "/v1/streaming_input"
    reader = NativeReader
    reports = True
    kind = "websocket"
    cancel: ClassVar[dict[str, Any]] = {"type": "cancel"}

    def opening(self, created: dict[str, Any]) -> dict[str, Any]:
        known = created.get("capabilities", {}).get("turn_detection_types", ("semantic_vad",))
        turns = {
            "type": "semantic_vad" if "semantic_vad" in known else "server_vad",
            "interrupt_response": True,
            "interrupt_resume": True,
            **self.turns,
        }
        if turns["type"] == "semantic_vad":
            turns.setdefault("eagerness", "auto")
        return {"type": "session_config", "turn_detection": turns, **self.config}

    def audio(self, number: int, sound: bytes) -> list[dict[str, Any]]:
        payload = base64.b64encode(sound).decode()
        return [{"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}]

    def typed(self, number: int, text: str) -> list[dict[str, Any]]:
        return [{"type": "input_chunk", "sequence_id": number, "text": text, "end_of_input": True}]

    def picture(self, number: int, media_type: str, data: bytes) -> list[dict[str, Any]]:
        chunk = {"type": "input_chunk", "sequence_id": number, "modality": "image", "format": media_type}
        return [{**chunk, "payload": base64.b64encode(data).decode()}]

    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]:
        chunk = {"type": "input_chunk", "sequence_id": number, "role": "tool", "tool_call_id": call_id, "text": text}
        return [{**chunk, "end_of_input": True}]

    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        return [{"type": "output_ack", "request_id": answer, "played_ms": int(played_ms)}]

    def resuming(self, reader: SessionReader) -> str | None:
        if reader.session_id is None or reader.resume_token is None:
            return None
        lost = {"session_id": reader.session_id, "resume_token": reader.resume_token, "last_output": reader.highest}
        return f"{self.path}?{urlencode(lost)}"

    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        frame = parsed(message)
        turn, at = frame.get("turn_id") or "", frame.get("audio_ms")
        match frame.get("type"):
            case "session_created":
                yield "created", {"fields": frame}
            case "session_resumed" | "input_ack":
                yield "acknowledged", {"fields": frame}
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
                yield "response", {"name": frame["request_id"], "text": frame.get("trigger") or ""}
            case "error":
                error = frame["error"]
                text = f"{error['code']} {error.get('param')}: {error['message']}"
                yield "refused", {"name": error.get("request_id") or "", "text": text}
            case "output_chunk":
                yield from self._output(frame)

    def _output(self, frame: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        name = frame["request_id"]
        if frame.get("final"):
            if isinstance(times := frame.get("times"), dict):
                yield "times", {"name": name, "fields": times}
            yield "final", {"name": name, "text": frame["finish_reason"]}
            return
        match frame.get("modality"):
            case "audio":
                start = frame.get("start_ms")
                yield "audio", {"name": name, "pcm": decoded(frame["payload"]), "start_ms": start}
                if words := frame.get("words"):
                    yield "words", {"name": name, "fields": words}
            case "transcript" if not frame.get("interim"):
                if language := frame.get("language"):
                    yield "language", {"name": name, "text": language}
                yield "transcript", {"name": name, "text": frame["text"]}
            case "text":
                yield "text", {"name": name, "text": frame["text"]}
            case "tool_call" if frame.get("id"):
                yield "call", {"name": frame["id"], "text": frame.get("name") or ""}


@dataclass
class RealtimeWire(Wire):
    """The client side of the Realtime API, with transcription of the input.

    ``turns`` is the session's ``turn_detection``; ``config`` and ``output`` are further fields of the session and of
    its ``audio.output``.
    """

    turns: dict[str, Any] | None = field(default_factory=lambda: {"type": "server_vad"})
    config: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    sound: MicrophoneFormat = field(default_factory=lambda: MicrophoneFormat(MIC_RATE))
    path: str = "/v1/realtime?model=gpt-realtime"
    reader = RealtimeReader
    reports = False
    kind = "realtime"
    cancel: ClassVar[dict[str, Any]] = {"type": "response.cancel"}
    _items: dict[str, str] = field(default_factory=dict)

    def opening(self, created: dict[str, Any]) -> dict[str, Any]:
        heard = {
            "format": {"type": "audio/pcmu"}
            if self.sound.is_mu_law
            else {"type": "audio/pcm", "rate": self.sound.rate},
            "transcription": {"model": "whisper-1"},
            "turn_detection": self.turns,
        }
        audio = {"input": heard, **({"output": self.output} if self.output else {})}
        return {"type": "session.update", "session": {"type": "realtime", "audio": audio, **self.config}}

    def audio(self, number: int, sound: bytes) -> list[dict[str, Any]]:
        return [{"type": "input_audio_buffer.append", "audio": base64.b64encode(sound).decode()}]

    def typed(self, number: int, text: str) -> list[dict[str, Any]]:
        content = [{"type": "input_text", "text": text}]
        return [self._item({"type": "message", "role": "user", "content": content}), {"type": "response.create"}]

    def picture(self, number: int, media_type: str, data: bytes) -> list[dict[str, Any]]:
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        content = [{"type": "input_image", "image_url": url}]
        return [self._item({"type": "message", "role": "user", "content": content})]

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

    def asks_kept(self, answer: str) -> dict[str, Any] | None:
        item = self._items.get(answer)
        return None if item is None else {"type": "conversation.item.retrieve", "item_id": item}

    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        event = parsed(message)
        match event.get("type"):
            case "session.created":
                yield "created", {"fields": event.get("session") or {}}
            case "session.updated":
                yield "configured", {}
            case "input_audio_buffer.speech_started":
                yield "started", {"name": event["item_id"], "audio_ms": event.get("audio_start_ms")}
            case "input_audio_buffer.speech_stopped":
                yield "stopped", {"name": event["item_id"], "audio_ms": event.get("audio_end_ms")}
            case "conversation.item.retrieved":
                yield "kept", {"name": event["item"]["id"], "fields": event["item"]}
            case "conversation.item.input_audio_transcription.completed":
                yield "transcript", {"name": event["item_id"], "text": event["transcript"]}
            case "error":
                yield "refused", {"text": str(event["error"].get("message"))}
            case _:
                yield from self._response(event)

    def _response(self, event: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        match event.get("type"):
            case "response.created":
                yield "response", {"name": event["response"]["id"]}
            case "response.output_audio.delta":
                self._items[event["response_id"]] = event["item_id"]
                yield "audio", {"name": event["response_id"], "pcm": decoded(event["delta"]), "start_ms": None}
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                yield "text", {"name": event["response_id"], "text": event["delta"]}
            case "response.done":
                if isinstance(times := event["response"].get("times"), dict):
                    yield "times", {"name": event["response"]["id"], "fields": times}
                yield "final", {"name": event["response"]["id"], "text": event["response"]["status"]}
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                yield "call", {"name": event["item"]["call_id"], "text": event["item"]["name"]}


# A person at a client: a microphone and a loudspeaker on one clock, over a real socket, natively or Realtime.
#
# Every 20 ms the loudspeaker plays what it has, and the microphone sends what the person says, the sounds beside them,
# and the loudspeaker's echo. Times are in ticks of this clock.


_REPORT_TICKS: Final = 5
#: A loudspeaker's echo: the direct sound, and two reflections, in milliseconds behind it and as factors.
_PATHS: Final = ((0, 1.0), (7, 0.4), (19, 0.2))
#: How long the server may take to confirm or refuse the settings.
_SETTINGS_SEC: Final = 60.0
#: How many seconds of what was sent a client keeps, until the server has it.
_KEPT_SEC: Final = 60.0


@dataclass(frozen=True, slots=True)
class Echo:
    """The loudspeaker's echo in the microphone: its level relative to the loudspeaker, and its delay."""

    level_db: float
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A message of the server, and the tick at which it arrived.

    ``kind`` is configured, refused, started, uncertain, confirmed, dismissed, stopped, response, call, transcript,
    final or closed. ``name`` is the id of the answer, turn, item or tool call. ``audio_ms`` is a position in the input
    audio. ``text`` is the trigger of a response (if known), the name of a called tool, the transcript, the reason for
    an end, or an error.
    """

    tick: int
    kind: str
    name: str = ""
    text: str = ""
    audio_ms: float | None = None


class SettingsRefused(Exception):
    """Raised if the server refuses the settings, or closes the connection instead of accepting them."""


class Recorded:
    """The audio of both sides of a conversation and its messages, to be examined after it."""

    def __init__(self) -> None:
        #: pcm16: what was said at 16 kHz, and what was played at 24 kHz.
        self.said, self.played = bytearray(), bytearray()
        self.lines: list[RecordedLine] = []

    def hear(self, said: Pcm16, played: Pcm16) -> None:
        """Add the audio of one tick."""
        self.said += said.tobytes()
        self.played += played.tobytes()

    def clear(self) -> None:
        self.said, self.played, self.lines = bytearray(), bytearray(), []


class LiveCaller:
    """A conversation, as an asynchronous context: it connects, configures, and sends silence until ``say`` is called.

    ``echo``: the loudspeaker's echo in the microphone, if any. ``slower``: the factor by which the clock runs slower
    than real time. ``noise`` is the noise of the room. ``loss`` is the share of the microphone's ticks that are sent as
    silence, as if lost on their way; equal ``seed``s lose the same ones. Audio and messages are kept in ``recorded``,
    if given.

    Entering the context raises SettingsRefused if the server refuses the settings or closes the connection,
    TimeoutError if it does not answer, and OSError or WebSocketException if it cannot be reached.
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
        """End the conversation if a task failed: otherwise ``until`` would wait for a clock that has stopped."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._close(f"{type(error).__name__} {error}")

    async def lose_network(self, seconds: float) -> None:
        """Break the connection, go on speaking for ``seconds``, then resume the session.

        Raises OSError or WebSocketException if the session cannot be resumed.
        """
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
        """The next tick."""
        return self.speaker.ticks

    def say(self, samples: Samples) -> int:
        """Say something from the next tick on, together with any speech that still goes on; return that tick."""
        self._said = mixed(self._said, samples)
        return self.now

    def sound(self, samples: Samples) -> None:
        """Add a sound that is not the caller's speech, from the next tick on."""
        self._beside = mixed(self._beside, samples)

    def quiet(self) -> None:
        """Stop all speech and other sounds; noise and echo go on."""
        self._said = self._beside = np.zeros(0, np.float32)

    async def type(self, text: str) -> None:
        await self._send(self.wire.typed(self._number, text), chunks=1)

    async def show(self, media_type: str, data: bytes) -> None:
        """Send a picture as part of the next request."""
        await self._send(self.wire.picture(self._number, media_type, data), chunks=1)

    async def give(self, call_id: str, text: str) -> None:
        """Send the result of the tool call ``call_id``."""
        await self._send(self.wire.result(self._number, call_id, text), chunks=1)

    async def cancel(self) -> None:
        """Stop the answer, as with a stop button: stop playback, and send a cancel.

        Over the Realtime API, the cancel is only sent while a response is in progress.
        """
        self.speaker.stop()
        self.speaker.duck(False)
        if self.wire.reports or self.reader.running is not None:
            await self._send([self.wire.cancel])

    async def until(self, is_so: Callable[[], bool], ms: float) -> bool:
        """Wait until ``is_so()``, which is tested at every tick, is true; return whether it is.

        Waits for ``ms`` at most, and only while the session is open.
        """
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
        """Return the messages of these kinds that arrived at ``tick`` or later."""
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
        """Return the echo of this tick.

        The loudspeaker's audio is added at the later ticks in which its echo arrives.
        """
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
        """Forget messages that the server has; after a resume, send the others again."""
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
        """Return the text that the history keeps of an answer; None if the server does not tell it within ``ms``."""
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
        """Store data that is no event of the conversation, such as word times."""
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
        """Drop the audio not yet played, since the user speaks or the server has cancelled the answer."""
        if (dropped := self.speaker.next_answer) is not None:
            self.silenced.append((self.now, dropped))
        self.speaker.stop()
