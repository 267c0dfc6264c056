"""A caller of the Live API, for every client alike: what the caller says and when, and all events that come.

Arguments: the base URL, files of speech (pcm16, 24 kHz) for a question, another question and a task that is delegated,
and a folder. Events are written there as they come (``events.jsonl``), between lines of what the caller did.
"""

from __future__ import annotations

import array
import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BASE_URL, *FILES = sys.argv[1:]
CLIPS = {name: Path(file).read_bytes() for name, file in zip(("question", "other", "task"), FILES, strict=False)}
FOLDER = Path(FILES[3])
RATE = 24_000
PIECE_MS = 100
PIECE_BYTES = RATE * PIECE_MS // 1000 * 2
#: The length of the work that is delegated. It ends as the caller speaks again, with so little left to say that the
#: server has heard him.
WORK_SEC = float(os.environ["LIVE_WORK_SEC"])
LEFT_BYTES = 3 * PIECE_BYTES
#: The task's answer as the application tells it.
RESULT = "The parcel is in Lisbon."
GREET = "Greet the caller by the name Ann."
INSTRUCTIONS = "Be brief. Delegate whatever has to be looked up."
#: The level above which livekit's gate takes the stream for speech, of 32768.
LOUD = 59
#: Silence after which an answer has ended, and the longest that anything may take.
QUIET_SEC = 0.6
PATIENCE_SEC = 60.0


def level(audio: bytes) -> float:
    """The root mean square of pcm16."""
    samples = array.array("h", audio)
    return float((sum(one * one for one in samples) / max(1, len(samples))) ** 0.5)


class Call:
    """One call. A client's own class sends what this one asks for, and passes each event of the server on."""

    can_mute = True

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.closed = asyncio.Event()
        self.delegated = asyncio.Event()
        self.transcript = ""
        #: When the caller was last sent a sound, by the clock of ``time.monotonic``.
        self.sounded = 0.0
        self._clip = b""
        self._spoken = asyncio.Event()
        #: Whether what the caller says ends the work, and whether it has.
        self._ends_work = False
        self._worked = asyncio.Event()
        self._changed = asyncio.Event()
        self._log = (FOLDER / "events.jsonl").open("w", encoding="utf-8")
        self.did("calls")

    # what a client does in its own way

    async def append(self, audio: bytes) -> None:
        raise NotImplementedError

    async def greet(self) -> None:
        raise NotImplementedError

    async def mute(self, muted: bool) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    # what it sees

    def received(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        self._write(now, event=event)
        match event["type"]:
            case "session.started":
                self.started.set()
            case "session.closed":
                self.closed.set()
            case "session.delegation.created":
                self.delegated.set()
            case "session.output_transcript.delta":
                self.transcript += event["delta"]
            case "session.output_audio.delta":
                if level(base64.b64decode(event["delta"])) > LOUD:
                    self.sounded = now
        self._changed.set()

    def did(self, what: str) -> None:
        self._write(time.monotonic(), did=what)

    def _write(self, now: float, **line: Any) -> None:
        self._log.write(json.dumps({"at": now, **line}) + "\n")

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for what an event brings about, or the passing of time between two."""
        try:
            async with asyncio.timeout(PATIENCE_SEC):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what} did not come about; said so far: {self.transcript!r}") from None

    async def do_work(self) -> None:
        """What is delegated."""
        await self._worked.wait()
        self.did("result")

    # what he does

    async def microphone(self) -> None:
        """Send 100 ms every 100 ms, silence between the words."""
        due = time.monotonic()
        while not self.closed.is_set():
            piece, self._clip = self._clip[:PIECE_BYTES], self._clip[PIECE_BYTES:]
            await self.append(piece.ljust(PIECE_BYTES, b"\0"))
            if self._ends_work and len(self._clip) <= LEFT_BYTES:
                self._worked.set()
            if not self._clip:
                self._spoken.set()
            due += PIECE_MS / 1000
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def say(self, clip: str, *, ends_work: bool = False) -> float:
        """Return when its last word was sent. ``ends_work``: the result comes meanwhile."""
        self.did(f"begins {clip}")
        self._spoken.clear()
        self._clip, self._ends_work = CLIPS[clip], ends_work
        await self._spoken.wait()
        self.did(f"ends {clip}")
        return time.monotonic()

    async def answer(self, since: float) -> None:
        """Wait for a sound after a moment, and the silence after it."""
        await self.until(lambda: self.sounded > since, "an answer")
        await self.silence()

    async def silence(self) -> None:
        await self.until(lambda: time.monotonic() - self.sounded > QUIET_SEC, "the end of an answer")

    async def talk(self) -> None:
        """The whole call."""
        await self.until(self.started.is_set, "the session")
        microphone = asyncio.create_task(self.microphone())
        begun = time.monotonic()
        await self.greet()
        await self.answer(begun)
        await self.answer(await self.say("question"))
        await self.say("task")
        await self.until(self.delegated.is_set, "the delegation")
        begun = time.monotonic()
        await self.answer(0)
        await self.answer(await self.say("question"))
        self.did("asks for a story")
        asked = await self.say("other")
        await self.until(lambda: self.sounded > asked, "the story")
        heard = self.sounded
        await self.until(lambda: self.sounded > heard + 1, "a second of the story")
        self.did("interrupts")
        await self.answer(await self.say("question"))
        self.did("tells no more of the story")
        if self.can_mute:
            await self.mute(True)
            muted = await self.say("other")
            await self.until(lambda: time.monotonic() > muted + 1, "a second")
            await self.mute(False)
        # The result comes while he asks about something else.
        await self.until(lambda: time.monotonic() > begun + WORK_SEC, "the time of the result")
        await self.say("other", ends_work=True)
        await self.until(lambda: "Lisbon" in self.transcript, "the result")
        await self.silence()
        told = time.monotonic()
        await self.until(lambda: time.monotonic() > told + 2, "two seconds")
        self.did("closes")
        await self.close()
        await self.until(self.closed.is_set, "the end of the session")
        await microphone
        self._log.close()
