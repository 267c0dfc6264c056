"""A Live session against a small model of it: random interleavings of what can happen in one, on a virtual clock.

The user speaks and pauses, also into answers; the application appends context of each kind, mutes, and answers what the
model hands over; at any moment it may close. Whatever the order: each thing is told once and in its turn, never over
the user, and not lost when he interrupts it before it was heard; the model knows what was heard and no more; times are
never of the future, and never go back; there is as much sound as time; and nothing comes after the end.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, Final

import numpy as np
import orjson
import pytest
from support import inline_workers, virtual_clock
from support.inline_workers import inline
from support.live_server import LiveServer, live_server
from support.realtime_client import EVENTS
from support.scripted_engines import HEARS, SPOKEN_MS, ActingEngine, delegates, spoken

from omni_ws.audio import speech_watch
from omni_ws.audio.pcm import encode_a_law, encode_mu_law
from omni_ws.core.chunks import FinishReason, Modality, Usage
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TranscriptOutput
from omni_ws.transport.realtime.live import (
    Live,
    LiveConnection,
)

pytestmark = pytest.mark.virtual_clock

#: Interleavings, and how many of them are one test.
INTERLEAVINGS: Final = 300
AT_ONCE: Final = 30
FRAME_MS: Final = 100
#: How far ahead of time sound may be sent.
AHEAD_MS: Final = 400
#: What the detector needs for the beginning of speech; and until an answer is silent, however uncertain it is at first
#: whether the speech interrupts it.
NOTICED_MS: Final = 500
SILENCED_MS: Final = 1200
#: Shorter sounds may be no speech to the server.
CERTAIN_MS: Final = 500
#: The least silence that ends a turn, and the longest that may be within one.
ENDED_MS: Final = 300
PAUSE_MS: Final = 1000
#: Pieces of audio in which one word is heard.
PIECES_PER_WORD: Final = 4
#: What happens in one interleaving, and how much time there is for what is left to be told.
ACTIONS: Final = 7
LEFT_MS: Final = 12_000
#: Without ``pcma`` sound is lowered while it is uncertain whether speech interrupts it.
ENCODERS: Final = {"pcma": encode_a_law, "pcmu": encode_mu_law}
SILENCE: Final = {"pcma": 0xD5, "pcmu": 0xFF}
KINDS: Final = ("instructions", "thinking", "commentary")


def words(name: str, count: int) -> str:
    """So many words that nobody else says."""
    return " ".join(f"{name}w{index}" for index in range(count))


class MemoryLink:
    """A SoleLink without a socket: what is written is handed to ``take`` at once."""

    paused = False

    def __init__(self, take: Any) -> None:
        self._take = take
        self._now = asyncio.get_running_loop().time
        self.is_open = self.is_reading = True

    @property
    def heard_at(self) -> float:
        return self._now()

    def touch(self) -> float:
        return self._now()

    def attach(self, receiver: Any, account: Any = None) -> None: ...

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        self._take(orjson.loads(data))

    def write_ping(self) -> None: ...

    def end_pass(self) -> None: ...

    def pause_reading(self, reason: Any) -> None:
        raise AssertionError("the session has no room")

    def resume_reading(self, reason: Any) -> None: ...

    def fail(self, code: int, reason: str) -> None:
        raise AssertionError(reason)

    async def close_in_time(self, code: int, reason: str) -> None:
        self.is_open = False
        assert code == 1000, (code, reason)


class Told(ActingEngine):
    """An engine whose every answer is that of the story that is being played. It hears a word in whatever is said."""

    story: Story

    def __init__(self) -> None:
        super().__init__("told", **HEARS, transcribes_first=True, tools=True, word_times=True)

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        story, turn, heard, text = self.story, 0, 0, ""
        async for chunk in request.input:
            if chunk.modality is Modality.TEXT:
                text += chunk.payload.decode()
                continue
            turn = turn or story.next_turn()
            heard += 1
            if heard % PIECES_PER_WORD == 1:
                out.write(TranscriptOutput(words(f"u{turn}", heard // PIECES_PER_WORD + 1), interim=True))
                await out.drain()
        for step in story.answer(request, words(f"u{turn}", heard // PIECES_PER_WORD + 1) if turn else "", text):
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                out.write(step)
                await out.drain()
        if not isinstance(step, Finished):
            out.write(Finished(FinishReason.STOP, Usage()))


class Story:
    """One interleaving: what is done, what came of it, and what must be true of that."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.kind = self.chance.choice((*ENCODERS,))
        self.now = asyncio.get_running_loop().time
        self.origin = self.now()
        self.connection: LiveConnection
        #: Where the user speaks and is not muted, in milliseconds of his audio; and until when he speaks, if he does.
        self.speech: list[tuple[int, int]] = []
        self.speaks_until = 0
        self.muted = False
        self.frames = 0
        #: Each event with the time at which it came, audio apart; and when each of the client's was sent.
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.sound = bytearray()
        self.sent: dict[str, float] = {}
        self.news: list[str] = []
        self.notes: list[tuple[float, str]] = []
        self.open: list[str] = []
        self.closed = False
        self.turns = self.answers = 0
        self.faults: list[str] = []
        #: The words that the model has said by what it is told of it: the last one may be cut, and in no transcript.
        self.remembered: set[str] = set()

    # what happens

    def plan(self) -> Iterator[tuple[int, str]]:
        """What is done, and when."""
        at_ms = 200
        for _ in range(ACTIONS):
            at_ms += self.chance.choice((0, 100, 200, 400, 700, 1100, 1600))
            yield at_ms, self.chance.choice(("speak", "speak", "speak", "append", "append", "append", "result", "mute"))
        if self.chance.random() < 0.3:
            yield at_ms + self.chance.choice((0, 100, 300, 900)), "close"

    def do(self, action: str) -> None:
        match action:
            case "speak" if not self.speaking:
                begin = self.frames * FRAME_MS
                self.speaks_until = begin + self.chance.choice((100, 500, 900, 1600))
                if not self.muted:
                    self.speech.append((begin, self.speaks_until))
            case "append":
                self.append(self.chance.choice(KINDS), None)
            case "result" if self.open:
                self.append("commentary", self.open.pop(0))
            case "mute":
                self.muted = not self.muted
                if self.muted and self.speaking:
                    self.speech[-1] = (self.speech[-1][0], self.frames * FRAME_MS)
                elif not self.muted:
                    self.speaks_until = 0
                self.send("session.input_audio.mute" if self.muted else "session.input_audio.unmute")
            case "close":
                self.closed = True
                self.send("session.close")

    def append(self, kind: str, delegation: str | None) -> None:
        tag = f"t{len(self.sent)}"
        self.send(f"session.{kind}.append", content=f"Tell <{tag}>", delegation_id=delegation, event_id=tag)
        if kind == "commentary":
            self.news.append(tag)

    def send(self, kind: str, **fields: Any) -> None:
        if "event_id" in fields or kind != "session.input_audio.append":
            fields.setdefault("event_id", f"e{len(self.sent)}")
            self.sent[fields["event_id"]] = self.now()
        self.connection.receive_message(orjson.dumps({"type": kind, **fields}), is_text=True)

    @property
    def speaking(self) -> bool:
        return self.frames * FRAME_MS < self.speaks_until

    @property
    def begun(self) -> float:
        """When the user began to say what is answered now, by the clock of the events; pauses may be part of it."""
        now_ms = self.frames * FRAME_MS
        said = [(begin, end) for begin, end in self.speech if end <= now_ms - ENDED_MS]
        first_ms = now_ms
        for begin, end in reversed(said):
            if first_ms != now_ms and first_ms - end > PAUSE_MS:
                break
            first_ms = begin
        return self.origin + first_ms / 1000

    def microphone(self) -> None:
        """Send the next 100 ms."""
        sound = inline_workers.loud if self.speaking else inline_workers.quiet
        samples = np.frombuffer(sound(FRAME_MS, khz=8), "<i2")
        self.frames += 1
        self.send("session.input_audio.append", audio=base64.b64encode(ENCODERS[self.kind](samples)).decode())

    def next_turn(self) -> int:
        self.turns += 1
        return self.turns

    def answer(self, request: GenerationRequest, turn: str, text: str) -> Iterator[Any]:
        """The steps of the answer to what was said, or is to be told. No two words of all answers are the same."""
        self.check_context(request, turn, text)
        if turn:
            yield TranscriptOutput(turn)
        yield self.chance.choice((0.0, 0.1, 0.3, 0.8))
        if turn:
            self.answers += 1
            name, way = f"a{self.answers}", self.chance.random()
            if way < 0.3:
                yield from delegates(words(name, 2), number=self.answers)
                return
            count = 2 if way < 0.6 else 12
        else:
            name = re.findall("<(t[0-9]+)>", text)[-1]  # facts may stand before it
            count = self.chance.choice((1, 3, 6))
        yield from spoken(words(name, count))

    # what comes of it

    def take(self, event: dict[str, Any]) -> None:
        EVENTS[event["type"]].model_validate(event)
        kinds = [one["type"] for _, one in self.events]
        assert "session.closed" not in kinds, "an event after the last"
        assert kinds or event["type"] == "session.started", "an event before the first"
        line_ms = (self.now() - self.origin) * 1000 + 1
        if event["type"] == "session.output_audio.delta":
            self.sound += base64.b64decode(event["delta"])
            assert len(self.sound) / 8 <= line_ms + AHEAD_MS, "sound too early"
            return
        for name in ("start_ms", "end_ms", "offset_ms"):
            assert event.get(name, 0) <= line_ms, f"{event} at {line_ms}"
        if event["type"] == "session.delegation.created":
            self.open.append(event["delegation"]["id"])
        if event["type"] in ("session.thinking.appended", "session.instructions.appended"):
            self.notes.append((self.now(), event["client_event_id"]))
        self.events.append((self.now(), event))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for _, event in self.events if event["type"] == kind]

    def text(self, direction: str) -> str:
        return "".join(event["delta"] for event in self.of(f"session.{direction}_transcript.delta"))

    @property
    def quiet(self) -> bool:
        """Whether everything was told."""
        heard = self.remembered | {*self.text("output").split()}
        return all(f"{tag}w0" in heard for tag in self.news)

    # what must be true

    def check_context(self, request: GenerationRequest, turn: str, text: str) -> None:
        """The model knows what was noted, and of its own answers what was heard: one word may be under way.

        The context of an answer is settled as the user begins to speak; that of what is to be told, as it is told.
        What is wrong is kept for ``check``: raised here it would be a failure of the engine.
        """
        known = " ".join([request.instructions, text, *(message.text for message in request.history)])
        until = self.begun if turn else self.now()
        for at, tag in self.notes:
            if at < until and f"<{tag}>" not in known:
                self.faults.append(f"{tag} is not in the context: {known}")
        heard = self.text("output").split()
        for message in request.history:
            if message.role == "assistant":
                self.remembered |= {*message.text.split()}
                unheard = [word for word in message.text.split() if word not in heard]
                if len(unheard) > 1:
                    self.faults.append(f"{unheard} was not heard, and is in the context")
        if turn:  # what waits to be told is told by itself
            began = {word.removesuffix("w0") for word in (*heard, *self.remembered)}
            self.faults += [
                f"{tag} waits, and the user says it" for tag in self.news if f"<{tag}>" in known and tag not in began
            ]

    def check(self) -> None:
        assert not self.faults, self.faults
        self.check_answers()
        self.check_told()
        self.check_sound()
        for direction in ("input", "output"):
            deltas = self.of(f"session.{direction}_transcript.delta")
            assert all(one["start_ms"] <= one["end_ms"] for one in deltas)
            starts = [one["start_ms"] for one in deltas]
            assert starts == sorted(starts), "time goes back"

    def check_answers(self) -> None:
        """Each event of the client has its one answer, if it is one that has; nothing else has that id."""
        answered = Counter(
            event.get("client_event_id") or event.get("error", {}).get("client_event_id") for _, event in self.events
        )
        del answered[None]
        assert answered == Counter(self.sent.keys()), set(self.sent) ^ answered.keys()
        refused = [event["error"]["client_event_id"] for event in self.of("error")]
        assert not refused or self.closed, refused
        assert self.events[-1][1]["type"] == "session.closed"

    def check_told(self) -> None:
        said, heard = self.text("output").split(), self.text("input").split()
        assert bool(heard) <= bool(self.speech), "what was muted is heard"
        assert len(said) == len(set(said)), f"said twice: {Counter(said).most_common(3)}"
        assert len(heard) == len(set(heard)), f"told twice of what was heard: {Counter(heard).most_common(3)}"
        told = [word.removesuffix("w0") for word in said if word.endswith("w0") and word.startswith("t")]
        begun = [tag for tag in self.news if f"{tag}w0" in self.remembered or tag in told]
        assert begun == self.news[: len(begun)], f"told in another order: {begun}"
        assert begun == self.news or self.closed, f"lost: {set(self.news) - set(begun)}"
        for name in {word.partition("w")[0] for word in said}:
            numbers = [int(word.partition("w")[2]) for word in said if word.startswith(f"{name}w")]
            assert numbers == [*range(len(numbers))], f"{name} is told in pieces: {numbers}"

    def check_sound(self) -> None:
        """As much as time, none while the user speaks, and as much of it as was said."""
        lasted_ms = (self.events[-1][0] - self.origin) * 1000
        assert lasted_ms - 2 * FRAME_MS <= len(self.sound) / 8 <= lasted_ms + AHEAD_MS + 1
        whole = self.sound[: len(self.sound) // 8 * 8]
        loud = (np.frombuffer(whole, np.uint8) != SILENCE[self.kind]).reshape(-1, 8).any(axis=1)
        begins = np.flatnonzero(loud & ~np.concatenate(([False], loud[:-1])))
        for begin, end in self.speech:
            if end - begin < CERTAIN_MS:
                continue
            late = [one for one in begins if begin + NOTICED_MS < one < end]
            assert not late, f"it begins at {late} while the user speaks from {begin} to {end}"
            assert not loud[begin + SILENCED_MS : end].any(), f"it talks on over the user, from {begin} to {end}"
        assert loud.sum() >= (len(self.text("output").split()) - 1) * SPOKEN_MS * 0.9


async def play(server: LiveServer, engine: Told, seed: int) -> None:
    (live,) = [one for one in server.app.front_ends if isinstance(one, Live)]
    engine.story = story = Story(seed)
    link: Any = MemoryLink(story.take)
    story.connection = await live._begin(None, "127.0.0.1", None, link)
    running = asyncio.create_task(story.connection.run())
    await asyncio.sleep(0)
    story.origin = story.now()
    story.send(
        "session.start",
        session={"model": "gpt-live-1", "audio": {"format": {"type": f"audio/{story.kind}", "rate": 8000}}},
    )
    plan = [*story.plan()]
    ends_ms = plan[-1][0] + LEFT_MS
    while not story.closed and (plan or story.speaking or not story.quiet) and story.frames * FRAME_MS < ends_ms:
        while plan and plan[0][0] <= story.frames * FRAME_MS and not story.closed:
            story.do(plan.pop(0)[1])
        if not story.closed:
            story.microphone()
            await asyncio.sleep(FRAME_MS / 1000)
    if not story.closed:
        for _ in range(12):  # nothing is said again
            story.microphone()
            await asyncio.sleep(FRAME_MS / 1000)
        story.send("session.close")
    await running
    await asyncio.sleep(1)
    story.check()


@pytest.fixture(autouse=True)
def _only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket and no thread is waited for, and no sound is taken for an acknowledgement."""
    for name in ("_SETTLE_SEC", "_SETTLE_FAR_SEC", "_WORK_SEC"):
        monkeypatch.setattr(virtual_clock, name, 0)
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.0)


@pytest.mark.parametrize("first", range(0, INTERLEAVINGS, AT_ONCE))
async def test_whatever_the_order_everything_is_told_once_and_over_nobody(first: int) -> None:
    engine = Told()
    async with live_server(engine, still_answers=False) as server:
        inline(server)
        for seed in range(first, first + AT_ONCE):
            try:
                await play(server, engine, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error
