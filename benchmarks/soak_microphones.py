"""Open microphones of a soak: what the model is given is compared with what was said, and what a loudspeaker played.

Server and clients share an event loop whose clock jumps over idle time, and talk over sockets on loopback: minutes of
conversation take seconds, and nothing depends on how fast the machine is. Recogniser, model and voice are
``soak_voices``; all between them is the server's own. Each client speaks into a microphone that is always open, and
plays answers on a loudspeaker that tells where it is (``output_ack`` with ``played_ms`` and ``request_id``). By chance
it pauses inside a sentence, talks over an answer, coughs or says "yeah" over it, presses stop, types, and loses its
connection and comes back.

At the end of a conversation the client works out, for each request of the model, what was said up to there and what was
heard, by PROTOCOL's rules and from its own samples alone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import selectors
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from support.inline_workers import InlineWorkers
from support.live_server import LiveServer, live_server
from support.native_client import Guarantees
from support.virtual_clock import JumpingSelector, VirtualClockLoop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.soak_loudspeaker import Loudspeaker, PlayedAnswer
from benchmarks.soak_voices import (
    ACKNOWLEDGED,
    ENOUGH,
    FIRST_ACKNOWLEDGEMENT,
    FIRST_COUGH,
    FIRST_WORD,
    RATE,
    TIMED,
    UNTIMED,
    VOICE_RATE,
    WORD_MS,
    WORDS,
    CodedEars,
    CodedVoice,
    Given,
    Scenes,
    ScenicModel,
    coded_probability,
    spelled,
)
from omni_ws.audio import speech_watch
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.wire.frames import encode_input

#: A conversation, and a life of the server, which is then looked over: nothing may be left in it.
CONVERSATION_SEC: Final = 180.0
LIFE_SEC: Final = 900.0
#: In which whatever is waited for has come, or is a defect.
PATIENCE_SEC: Final = 60.0
_LOOK_SEC: Final = 0.02
#: Of a pass of the event loop.
_PASS_SEC: Final = 1e-7
_MS: Final = RATE // 1000


@dataclass
class Findings:
    """What the clients did, and what was otherwise than it has to be."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Said:
    """A word of the user, or a typed text, and when it was said, in milliseconds of the microphone."""

    at: float
    text: str


class OpenMicrophone:
    """One conversation."""

    #: The number of the next word that anybody says: no two clients have the same.
    _next_word = 0

    def __init__(self, server: LiveServer, scenes: Scenes, findings: Findings, name: str, number: int) -> None:
        self._server = server
        self._scenes = scenes
        self._findings = findings
        self._name = name
        self._number = number
        self._chance = chance = random.Random(f"{name} {number}")
        self.timed = chance.random() < 0.6
        self._frame_ms = chance.choice([20, 60, 100, 100])
        self._report_sec = chance.choice([0.1, 0.3, 1.0])
        self._loses = chance.random() < 0.6
        self._latency_sec = chance.choice([0.0, 0.05, 0.2])
        self._speaker = Loudspeaker(self._latency_sec)
        self._config: dict[str, Any] = {
            "voice": TIMED if self.timed else UNTIMED,
            "modalities": chance.choice([["text", "audio"], ["text", "audio"], ["audio"]]),
            "max_lead_ms": chance.choice([200, 400, 400, 1500]),
            "turn_detection": {
                "type": "server_vad",
                "silence_duration_ms": chance.choice([200, 500, 500, 800]),
                "interrupt_resume": chance.random() < 0.75,
            },
        }
        self._connection: ClientConnection | None = None
        self._session_id = self._token = ""
        self._sending = asyncio.Lock()
        self._guarantees = Guarantees()
        #: Chunks that may not have arrived, by their numbers.
        self._unacknowledged: dict[int, bytes | str] = {}
        self._chunks = 0
        self._over = self._lost = self._has_reported = False
        #: What the microphone is to hear, and how much it has heard, in samples.
        self._sounds: deque[np.ndarray[Any, np.dtype[np.int16]]] = deque()
        self._sounding = 0
        self._streamed = 0
        self._said: list[_Said] = []
        #: When each sound was made, by its number, in milliseconds of the microphone; and each typed text.
        self._times: dict[int, float] = {}
        self._typed: dict[str, float] = {}
        #: Whether the server hears somebody speak.
        self._speaking = False
        self._told: dict[str, str] = {}
        self._answers: dict[str, PlayedAnswer] = {}
        self._running: set[str] = set()
        self._finals: set[str] = set()
        self._to_stop: list[str] = []
        self._resumed_at = -1.0
        #: The request of the latest speech, and those of speech under which the answer that it had stopped went on.
        self._speech_of: str | None = None
        self._spoken_over: set[str | None] = set()
        self._given: dict[str, Given] = {}
        #: Differences that were told: later histories have them, too.
        self._known: set[tuple[int, tuple[tuple[str, str], ...]]] = set()

    # a conversation

    async def talk(self, seconds: float) -> None:
        """Talk for so long, and compare."""
        self._findings.counts["conversations"] += 1
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(seconds + 10 * PATIENCE_SEC):
                await self._open()
                tasks = [asyncio.create_task(work()) for work in (self._receive, self._stream, self._report_often)]
                await self._control({"type": "session_config", **self._config})
                if self._loses:
                    tasks.append(asyncio.create_task(self._lose_connections()))
                await self._behave(seconds, tasks)
                self._over = True
        except (OSError, AssertionError, TimeoutError, ConnectionClosed) as error:
            self._wrong(f"{type(error).__name__} {error}")
        finally:
            self._over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._connection is not None:
                await self._connection.close()
        self._compare()

    def _wrong(self, what: str) -> None:
        now = asyncio.get_running_loop().time()
        self._findings.wrong.append(f"{self._name}, conversation {self._number}, at {now:.2f}: {what}")

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _behave(self, seconds: float, tasks: list[asyncio.Task[None]]) -> None:
        end = self._now + seconds
        acts = (self._listen, self._pause, self._talk_over, self._cough, self._press_stop, self._type)
        while self._now < end:
            for task in tasks:
                if task.done():
                    task.result()
            await self._speak()
            await self._chance.choices(acts, (2, 3, 4, 3, 2, 1))[0]()
        await self._settle()
        await self._speak()
        await self._settle()

    async def _until(self, condition: Callable[[], bool], *, at_most: float = PATIENCE_SEC) -> bool:
        end = self._now + at_most
        while not condition():
            if self._now > end:
                return False
            await self._sleep(_LOOK_SEC)
        return True

    async def _sleep(self, seconds: float) -> None:
        """Wait so long, up to a time at which others wake up, too: each time costs the loop a look at its sockets."""
        wakes = np.ceil((self._now + seconds) / _LOOK_SEC - 1e-6) * _LOOK_SEC
        await asyncio.sleep(float(wakes) - self._now)

    async def _settle(self) -> None:
        """Wait until everything that was said is answered, and played."""
        await self._until(lambda: not self._sounding and not self._lost)
        await self._sleep(1.5)
        if not await self._until(lambda: self._quiet, at_most=3 * PATIENCE_SEC):
            self._wrong(f"not settled: {self._unfinished} have no final, speaking {self._speaking}, lost {self._lost}")

    @property
    def _unfinished(self) -> set[str]:
        return (self._running | self._scenes.sounds[self._session_id].keys()) - self._finals

    @property
    def _quiet(self) -> bool:
        return not (self._unfinished or self._speaking or self._lost) and self._speaker.idle(self._now)

    # what people do

    async def _speak(self) -> None:
        """A sentence, with a pause in it or not."""
        parts = self._chance.choice([1, 1, 2, 3])
        for part in range(parts):
            if part:
                self._findings.counts["pauses inside a sentence"] += 1
                self._sound(0, self._chance.randint(150, 1600))
            for _ in range(self._chance.randint(2, 6)):
                number = OpenMicrophone._next_word = (OpenMicrophone._next_word + 1) % WORDS
                self._said.append(_Said(self._heard_next, spelled(number)))
                self._sound(FIRST_WORD + number, WORD_MS)
                self._findings.counts["words said"] += 1
        await self._until(lambda: not self._sounding)

    @property
    def _heard_next(self) -> float:
        """When a sound is heard that is made now."""
        return (self._streamed + self._sounding) / _MS

    def _sound(self, value: int, ms: int) -> None:
        if value:
            self._times[value] = self._heard_next
        self._sounds.append(np.full(ms * _MS, value, "<i2"))
        self._sounding += ms * _MS

    async def _listen(self) -> None:
        """To the end."""
        self._findings.counts["answers listened to"] += 1
        await self._settle()

    async def _pause(self) -> None:
        """And go on, wherever the answer is."""
        self._findings.counts["pauses between sentences"] += 1
        await self._sleep(self._chance.uniform(0.1, 3.0))

    async def _in_an_answer(self) -> bool:
        """Wait until some of an answer was played."""
        before = set(self._answers)
        if not await self._until(lambda: bool(self._sound_of_new(before)), at_most=12):
            return False
        await self._sleep(self._chance.choice([0.0, self._chance.uniform(0, 1), self._chance.uniform(0, 8)]))
        return not self._speaker.idle(self._now)

    def _sound_of_new(self, before: set[str]) -> list[PlayedAnswer]:
        self._speaker.play(self._now)
        return [answer for request, answer in self._answers.items() if request not in before and answer.played]

    async def _talk_over(self) -> None:
        if await self._in_an_answer():
            self._findings.counts["interruptions in the middle of the sound"] += 1

    async def _cough(self) -> None:
        while await self._in_an_answer():
            says = self._chance.random() < 0.3
            self._findings.counts["acknowledgements over an answer" if says else "coughs over an answer"] += 1
            kind = FIRST_ACKNOWLEDGEMENT if says else FIRST_COUGH
            self._sound(kind + len(self._times) % 1000, self._chance.randint(350, 600))
            await self._until(lambda: not self._sounding)
            if self._chance.random() < 0.5:
                await self._sleep(self._chance.uniform(0, 2))
                return
            await self._sleep(1.5)
            if self._chance.random() < 0.5:
                return

    async def _press_stop(self) -> None:
        """Stop what sounds, or what is to come, by name."""
        if self._chance.random() < 0.7:
            await self._in_an_answer()
        else:
            await self._sleep(self._chance.uniform(0.3, 3))
        self._speaker.stop(self._now, "client")
        meant = [
            name
            for name, one in self._answers.items()
            if name not in self._running and not one.whole and one.stopped_by in (None, "client")
        ]
        if not self._speaking:  # else the input of one is open: a cancel of that is a place in it
            meant += [name for name in self._running if name not in meant]
        self._findings.counts["stops"] += bool(meant)
        for name in meant:
            self._answer(name).stopped_by = self._answer(name).stopped_by or "client"
        first = self._chance.random() < 0.5
        if first:
            await self._report()
        for name in meant:
            self._to_stop.append(name)
            await self._control({"type": "cancel", "request_id": name})
        if not first:
            await self._report()

    async def _type(self) -> None:
        """A request by keyboard, which interrupts as the page does: its sound stops at once."""
        await self._sleep(self._chance.uniform(1.5, 4))
        if self._speaking or self._lost:
            return
        self._findings.counts["typed"] += 1
        self._speaker.stop(self._now, "client")
        await self._report()
        number = OpenMicrophone._next_word = (OpenMicrophone._next_word + 1) % WORDS
        at = self._heard_next - 0.5  # before what is said from now on
        self._said.append(_Said(at, spelled(number)))
        self._typed[spelled(number)] = at
        frame = {"type": "input_chunk", "text": spelled(number), "end_of_input": True}
        async with self._sending:
            await self._send_chunk(json.dumps({**frame, "sequence_id": self._chunks}))

    async def _lose_connections(self) -> None:
        while True:
            await self._sleep(self._chance.expovariate(1 / 15))
            connection = self._connection
            if connection is None or self._lost or self._over:
                continue
            self._findings.counts["connections lost"] += 1
            self._lost = True
            self._note_loss()
            connection.transport.abort()
            await self._until(lambda: not self._lost)

    def _note_loss(self) -> None:
        self._note_clock()

    def _note_clock(self) -> None:
        """Where no report said otherwise, the server has only its clock for what sounds."""
        for answer in self._answers.values():
            answer.lost = answer.lost or (answer.stopped_by is None and not answer.whole)

    # the connection

    async def _connect(self, query: str = "") -> ClientConnection:
        options: dict[str, Any] = {"compression": None, "ping_interval": None, "max_size": None, "proxy": None}
        return await connect(self._server.websocket_url + query, close_timeout=2, **options)

    async def _open(self) -> None:
        self._connection = await self._connect()
        created = json.loads(await self._connection.recv())
        self._session_id, self._token = created["session_id"], created["resume_token"]
        self._scenes.begin(self._session_id, self._number)

    async def _receive(self) -> None:
        while True:
            connection = self._connection
            assert connection is not None
            with contextlib.suppress(ConnectionClosed):
                async for message in connection:
                    await self._take(json.loads(message))
            if self._over:
                return
            if not self._lost:
                raise AssertionError(f"closed with {connection.close_code} {connection.close_reason}")
            await self._sleep(self._chance.choice([0.05, self._chance.uniform(0.1, 2), self._chance.uniform(1, 10)]))
            await self._resume()

    async def _resume(self) -> None:
        last = self._guarantees.next_output - 1
        query = f"?session_id={self._session_id}&resume_token={self._token}&last_output={last}"
        connection = await self._connect(query)
        resumed = json.loads(await connection.recv())
        assert resumed["type"] == "session_resumed", resumed
        self._token = resumed["resume_token"]
        self._resumed_at = self._now
        self._findings.counts["connections resumed"] += 1
        async with self._sending:
            self._connection, self._lost = connection, False
            # What was heard, and what was stopped, was known before what the microphone has heard since.
            await self._report(again=True, locked=True)
            for name in self._to_stop:
                await self._send(json.dumps({"type": "cancel", "request_id": name}))
            for number, chunk in sorted(self._unacknowledged.items()):
                if number >= resumed["next_sequence_id"]:
                    await self._send(chunk)

    async def _send(self, message: bytes | str) -> None:
        if self._connection is not None and not self._lost:
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send(message)

    async def _control(self, frame: dict[str, Any]) -> None:
        async with self._sending:
            await self._send(json.dumps(frame))

    async def _send_chunk(self, message: bytes | str) -> None:
        self._unacknowledged[self._chunks] = message
        self._chunks += 1
        await self._send(message)

    async def _stream(self) -> None:
        """The microphone: a frame at a time, also while there is no connection."""
        size = self._frame_ms * _MS
        began, frames = self._now, 0
        while True:
            frames += 1
            await self._sleep(max(0.0, began + frames * self._frame_ms / 1000 - self._now))
            async with self._sending:
                payload = self._heard(size).tobytes()
                await self._send_chunk(
                    encode_input(InputChunk(Modality.AUDIO, payload, self._chunks, None, None, False))
                )

    def _heard(self, size: int) -> np.ndarray[Any, np.dtype[np.int16]]:
        """What the microphone hears next."""
        frame = np.zeros(size, "<i2")
        filled = 0
        while self._sounds and filled < size:
            sound = self._sounds.popleft()
            count = min(size - filled, len(sound))
            frame[filled : filled + count] = sound[:count]
            filled += count
            if count < len(sound):
                self._sounds.appendleft(sound[count:])
        self._streamed += size
        self._sounding -= filled
        return frame

    async def _report_often(self) -> None:
        while True:
            await self._sleep(self._report_sec)
            await self._report()

    async def _report(self, *, again: bool = False, locked: bool = False) -> None:
        """Tell where the loudspeaker is; ``again``: also where that was told before."""
        self._speaker.play(self._now)
        answer = self._speaker.answer
        if answer is None or (answer.played == answer.reported and not again):
            return
        if not self._lost:
            self._has_reported = True
            answer.reported = answer.played
            if answer.stopped_by is None:
                answer.reported_before = answer.played
        frame = json.dumps({"type": "output_ack", "request_id": answer.request_id, "played_ms": self.told_ms(answer)})
        async with contextlib.nullcontext() if locked else self._sending:
            await self._send(frame)

    def told_ms(self, answer: PlayedAnswer) -> float:
        """Where the client says that it is."""
        return answer.played_ms

    # what comes

    def _answer(self, request_id: str) -> PlayedAnswer:
        return self._answers.setdefault(request_id, PlayedAnswer(request_id))

    async def _take(self, frame: dict[str, Any]) -> None:
        if frame["type"] != "response_started" or frame["request_id"] not in self._running:  # told again
            self._guarantees.check(frame)
        match frame:
            case {"type": "error", "error": error}:
                self._wrong(f"error {error}")
            case {"type": "input_ack", "next_sequence_id": following}:
                for number in [number for number in self._unacknowledged if number < following]:
                    del self._unacknowledged[number]
            case {"type": "speech_started"}:
                self._speaking, self._speech_of = True, frame["request_id"]
                if not self._has_reported:  # all that was sent counts, before any report
                    self._note_clock()
                self._speaker.stop(self._now, "speech")
                for request_id in self._running:
                    self._answer(request_id).stopped_by = self._answer(request_id).stopped_by or "speech"
                await self._report()
            case {"type": "speech_stopped"}:
                self._speaking = False
            case {"type": "response_started", "request_id": request_id}:
                self._running.add(request_id)
            case {"type": "output_chunk"}:
                self._take_output(frame)

    def _take_output(self, frame: dict[str, Any]) -> None:
        request_id = frame["request_id"]
        if frame.get("final"):
            self._finals.add(request_id)
            self._running.discard(request_id)
            if request_id in self._answers or request_id in self._scenes.answers:
                answer = self._answer(request_id)
                answer.reason = frame["finish_reason"]
            return
        match frame["modality"]:
            case "transcript" if not frame.get("interim"):
                self._told[request_id] = self._told.get(request_id, "") + frame["text"]
            case "text":
                self._answer(request_id).text += frame["text"]
            case "audio":
                samples = np.frombuffer(base64.b64decode(frame["payload"]), "<i2")
                answer = self._answer(request_id)
                answer.lost = answer.lost or self._resumed_at == self._now
                if answer.stopped_by == "speech":
                    answer.stopped_by = None  # it goes on
                    self._spoken_over.add(self._speech_of)
                    self._findings.counts["answers that went on"] += 1
                if answer.stopped_by is None:
                    self._speaker.put(answer, frame["start_ms"], samples, self._now)
                else:
                    answer.take(round(frame["start_ms"] * VOICE_RATE / 1000), samples)

    # the comparison

    def _compare(self) -> None:
        self._given = {given.request_id: given for given in self._scenes.given[self._session_id]}
        for given in self._given.values():
            at = self._time_of(given.request_id)
            if at is None:
                self._findings.counts["requests of the model that were not told of"] += 1
                continue
            if not self._has_words(given):
                continue  # the answer that it was held for goes on
            self._findings.counts["histories compared"] += 1
            actual = _without_acknowledgements(given.messages)
            expected, reasons = self._expected(at, {word for _, text in actual for word in text.split()})
            over = given.request_id in self._spoken_over
            if actual != expected and over and actual in _heard_less(expected):
                # The model was asked as the answer was held; it then went on until the words were known.
                self._findings.counts["histories that end where an answer was held"] += 1
            elif actual != expected:
                self._differ(given, actual, expected)
            else:
                self._findings.counts.update(reasons)
        self._compare_transcripts()

    def _time_of(self, request_id: str) -> float | None:
        """When the last of what was said in a request was said, in milliseconds of the microphone."""
        sounds = self._scenes.sounds[self._session_id].get(request_id, {})
        # The end of a turn may have the beginning of a word in it that is said in the next.
        whole = [number for number, count in sounds.items() if number < FIRST_WORD or count >= ENOUGH]
        times = [self._times[number] for number in whole or sounds]
        if (given := self._given.get(request_id)) is not None:
            times += [self._typed[word] for word in given.messages[-1][1].split() if word in self._typed]
        return max(times, default=None)

    def _has_words(self, given: Given) -> bool:
        sounds = self._scenes.sounds[self._session_id].get(given.request_id, ())
        return any(number >= FIRST_WORD for number in sounds) or not sounds

    def _expected(self, upto: float, known: set[str]) -> tuple[list[tuple[str, str]], set[str]]:
        """The messages up to this time, and what is told of answers otherwise than they were played, and is right.

        Where more than one text of an answer is right, that is taken of which all words are ``known``, and no more.
        """
        events = [(said.at, 0, "user", said.text) for said in self._said if said.at <= upto]
        late = round((self._latency_sec + 0.1) * VOICE_RATE)
        reasons = set()
        for request_id, answer in self._answers.items():
            at = self._time_of(request_id)
            if at is None or at >= upto or request_id not in self._scenes.answers:
                continue
            words = self._scenes.answers[request_id]
            texts = answer.heard(words, timed=self.timed, late=late)
            found = " ".join(word for word in words if word in known)
            text = found if found in texts else next(iter(texts))
            events.append((at, 1, "assistant", text))
            if texts[text] != "played":
                reasons.add(f"histories with an answer {texts[text]}")
        events.sort(key=lambda event: event[:2])
        return _joined((role, text) for _, _, role, text in events), reasons

    def _differ(self, given: Given, actual: list[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
        places = [index for index, (one, two) in enumerate(zip(actual, expected, strict=False)) if one != two]
        index = places[0] if places else min(len(actual), len(expected))
        if (index, tuple(actual[index : index + 1])) in self._known:
            return
        self._known.add((index, tuple(actual[index : index + 1])))
        self._findings.differences.append(
            f"{self._name}, conversation {self._number}, {given.request_id}, message {index}:"
            f"\n    the model has  {actual[index : index + 2]}\n    it was         {expected[index : index + 2]}"
        )

    def _compare_transcripts(self) -> None:
        """What was written down, with what was said: each word once, in its order."""
        times = {request_id: self._time_of(request_id) for request_id in self._told}
        in_order = sorted(self._told, key=lambda request_id: times[request_id] or 0.0)
        told = " ".join(self._told[request_id] for request_id in in_order).replace(ACKNOWLEDGED, "").split()
        said = [one.text for one in self._said if one.text not in self._typed]
        self._findings.counts["words written down"] += len(told)
        if told != said:
            missing, more = [word for word in said if word not in told], [word for word in told if word not in said]
            self._findings.differences.append(
                f"{self._name}, conversation {self._number}: not written down {missing}, not said {more}, or disordered"
            )


def _heard_less(messages: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield the messages with ever fewer words of the last answer."""
    place = max((index for index, (role, _) in enumerate(messages) if role == "assistant"), default=None)
    if place is None:
        return
    words = messages[place][1].split()
    for count in reversed(range(len(words))):
        less = [("assistant", " ".join(words[:count]))] if count else []
        yield _joined([*messages[:place], *less, *messages[place + 1 :]])


def _joined(messages: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for role, text in messages:
        if not text:
            continue
        if joined and joined[-1][0] == role:
            joined[-1] = (role, f"{joined[-1][1]} {text}")
        else:
            joined.append((role, text))
    return joined


def _without_acknowledgements(messages: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """The messages without what a listener said who wants the speaker to go on: that is a turn of its own or not."""
    kept = ((role, " ".join(text.replace(ACKNOWLEDGED, "").split(" ")).strip()) for role, text in messages)
    return _joined((role, " ".join(text.split())) for role, text in kept)


# a run


@contextlib.asynccontextmanager
async def scene(seed: str) -> AsyncIterator[tuple[LiveServer, Scenes]]:
    """A server with the soak's engines, and its judge of short sounds."""
    scenes = Scenes(seed)
    engine = ComposedEngine(ScenicModel(scenes), asr=CodedEars(scenes), tts=CodedVoice(scenes))
    limits = {"max_history_tokens": 100_000}
    async with live_server(engine, streaming_input={"resume_grace_sec": 30}, limits=limits) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        with patch.object(speech_watch, "backchannel_probability", coded_probability):
            yield server, scenes


async def _live(name: str, first: int, talkers: int, seconds: float, findings: Findings) -> int:
    """A life of the server. Returns how many conversations it had."""
    end, numbers = asyncio.get_running_loop().time() + seconds, iter(range(first, first + 10_000))
    begun = 0

    async def talk_on() -> None:
        nonlocal begun
        while (left := end - asyncio.get_running_loop().time()) > 1:
            begun += 1
            await OpenMicrophone(server, scenes, findings, name, next(numbers)).talk(min(left, CONVERSATION_SEC))

    async with scene(name) as (server, scenes):
        await asyncio.gather(*(talk_on() for _ in range(talkers)))
    return begun


class _HurriedSelector(JumpingSelector):
    """Gives the kernel no time of the wall clock: sockets of one process have what was sent to them at once.

    Where they do not, it comes a frame of the microphone later, as on a network.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # No clock stands still: a timer that came a hair too early, as sums are rounded, would be set again for ever.
        self.now += _PASS_SEC
        if not timeout:
            return super().select(timeout)
        ready = super().select(0) or super().select(0)
        if not ready:
            self.now += timeout
            self.jumps += 1
        return ready


class _HurriedLoop(VirtualClockLoop):
    def __init__(self) -> None:
        self._jumping = _HurriedSelector()
        asyncio.SelectorEventLoop.__init__(self, self._jumping)


def converse(seed: int, microphones: int, minutes: float) -> Findings:
    """So many minutes of a clock of its own, so many conversations at a time."""
    findings = Findings()
    number, left = 0, minutes * 60
    while left > 0:
        seconds = min(left, LIFE_SEC)
        with asyncio.Runner(loop_factory=_HurriedLoop) as runner:
            number += runner.run(_live(f"seed {seed}", number, microphones, seconds, findings))
        findings.counts["minutes of conversation"] += round(microphones * seconds / 60)
        left -= seconds
    return findings
