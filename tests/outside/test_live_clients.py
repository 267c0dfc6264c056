"""Clients that others made for OpenAI's Live API: a call of each, all at once, and what it must have been sent.

``make test-outside`` installs them; without it these tests are skipped. Nothing of a client is changed but its URL.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from support.embedded_engine import ears
from support.live_server import live_server
from support.outside import run_in_node, run_outside, tool
from support.realtime_client import EVENTS
from support.scripted_upstream import Answer, ScriptedUpstream, delta, finish, says, streams, text_of
from support.speech_clips import WORDS, at_24k, clip_bytes

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.scenarios.speech import word_errors
from omni_ws.transport.http.exchange import HttpExchange

# A language model by URL for calls over the Live API: what it says follows from what it is asked, and nothing else.
#
# It knows the recordings of the tests. ``go forward ten meters`` is a question; ``eight of spades …`` a task, which it
# delegates; ``ten of clubs`` asks for a story at first, and is a question from then on. What it is to tell it tells in
# words of its own.

GREETING: Final = "Good morning, Ann."
TO_QUESTION: Final = "I am only a voice."
ACKNOWLEDGEMENT: Final = "One moment."
TO_OTHER: Final = "Clubs it is."
#: What the application finds out, by whichever way, and what is made of it.
RESULT: Final = "The parcel is in Lisbon."
TOLD: Final = "Your parcel has come to Lisbon."
STORY: Final = (
    "Once upon a time there was a king. ",
    "The king had a daughter who loved the sea. ",
    "Every morning she walked along the shore. ",
    "One day she found a bottle with a letter. ",
    "The letter came from an island far away. ",
    "So she built a ship and sailed there. ",
)


@dataclass
class LiveMind(ScriptedUpstream):
    """One for all callers. It remembers nothing but its requests."""

    def __post_init__(self) -> None:
        self.chat = [self._decide]

    async def _decide(self, exchange: HttpExchange) -> None:
        request = self.requests[-1]
        await (await self._answer_to(request))(exchange)

    async def _answer_to(self, request: dict[str, Any]) -> Answer:
        messages = request["messages"]
        tools = [tool["function"]["name"] for tool in request.get("tools", ())]
        system = " ".join(text_of(one) for one in messages if one["role"] in ("system", "developer"))
        if "backend of a voice assistant" in system:
            return says(f">> {RESULT}")
        if "find_parcel" in tools:
            found = any(one["role"] == "tool" and RESULT in text_of(one) for one in messages)
            return says(RESULT) if found else calls("find_parcel")
        last = text_of(messages[-1])
        if RESULT in last:
            return says(TOLD)
        if "the name Ann" in last:
            return says(GREETING)
        if "spades" in last:
            return calls(*tools, text=ACKNOWLEDGEMENT) if tools else says("I cannot look it up.")
        if "ten of clubs" in last:
            earlier = " ".join(text_of(one) for one in messages[:-1] if one["role"] == "user")
            return says(TO_OTHER) if "ten of clubs" in earlier else says(*STORY)
        return says(TO_QUESTION)


def calls(name: str, *, text: str = "") -> Answer:
    """An answer that says a text and calls a tool without arguments."""
    call = {"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
    spoken = [delta(content=text)] if text else []
    return streams(delta(role="assistant"), *spoken, delta(tool_calls=[call]), finish("tool_calls"))


CLIENTS = Path(__file__).parent / "clients"
RATE: Final = 24_000
#: How long the delegated work takes at least: it ends as the caller speaks again.
WORK_SEC: Final = 20
#: The question, the other question and the task of the caller.
SPOKEN: Final = ("goforward", "cards_001", "cards_005")
PYTHON: Final = {
    "openai_python": {},
    "livekit": {"LIVE_DELEGATION": "responses"},
    "livekit_client": {"LIVE_DELEGATION": "client"},
    "pipecat": {},
}
#: Of 32,768: above it a sample of a recording is speech.
SPOKEN_LEVEL: Final = 600
#: Output may be so far ahead of real time.
LEAD_SEC: Final = 0.4
#: Above it livekit takes the stream for speech.
SILENCE_LEVEL: Final = 35
#: What an answer may take longer while work is delegated.
MOST_LATER_SEC: Final = 0.6
#: What the notice of speech, the way to the caller and a busy machine take.
STOPS_WITHIN_SEC: Final = 1.5

pytestmark = [pytest.mark.slow]


class Line(NamedTuple):
    """What a client wrote: an event of the server, or what the caller did."""

    at: float
    event: dict[str, Any]
    did: str


class Story:
    """A call as its client saw it. Times are seconds of the client's clock."""

    def __init__(self, file: Path) -> None:
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        self.lines = [Line(one["at"], one.get("event", {}), one.get("did", "")) for one in lines]
        self.events = [line.event for line in self.lines if line.event]
        self.kinds = [event["type"] for event in self.events]
        deltas = [line for line in self.lines if line.event.get("type") == "session.output_audio.delta"]
        self.audio = [(line.at, np.frombuffer(base64.b64decode(line.event["delta"]), "<i2")) for line in deltas]
        #: When something was heard: each time a piece above the level of silence came.
        self.loud = [at for at, samples in self.audio if level(samples) > SILENCE_LEVEL]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def text(self, direction: str) -> str:
        return "".join(event["delta"] for event in self.of(f"session.{direction}_transcript.delta"))

    def at(self, what: str, *, nth: int = 0) -> float:
        """When the caller did something for the nth time."""
        return [line.at for line in self.lines if line.did == what][nth]

    def came(self, kind: str) -> float:
        """When the first event of a kind came."""
        return next(line.at for line in self.lines if line.event.get("type") == kind)

    def said_at(self, words: str) -> float:
        """When the first delta came with which the words were complete."""
        text = ""
        for line in self.lines:
            if line.event.get("type") == "session.output_transcript.delta":
                text += line.event["delta"]
                if words in text:
                    return line.at
        raise AssertionError(f"{words!r} was not said: {text!r}")

    def first_sound(self, since: float) -> float:
        return next(at for at in self.loud if at > since)


def level(samples: np.ndarray[Any, np.dtype[np.int16]]) -> float:
    return float(np.sqrt(np.mean(samples.astype(np.float64) ** 2))) if len(samples) else 0.0


def trimmed(clip: bytes) -> bytes:
    """A recording from its first word to its last, so that its end is when the caller has spoken."""
    samples = np.frombuffer(clip, "<i2")
    spoken = np.flatnonzero(np.abs(samples) > SPOKEN_LEVEL)
    return samples[spoken[0] : spoken[-1] + 1].tobytes()


async def call(client: str, folder: Path, url: str, backend: str) -> Story:
    """Have a client make its call. Raises what it died of."""
    await asyncio.to_thread(folder.mkdir)
    variables = {"LIVE_WORK_SEC": str(WORK_SEC), "LIVE_BACKEND": backend}
    arguments = [url, *(str(folder.parent / f"{clip}.pcm") for clip in SPOKEN), str(folder)]
    if client == "openai_node":
        await run_in_node(CLIENTS / "live_openai_node.mjs", folder, *arguments, variables=variables)
    else:
        script = str(CLIENTS / f"live_{client.removesuffix('_client')}.py")
        await run_outside(tool("OUTSIDE_PYTHON"), script, *arguments, variables=variables | PYTHON[client])
    return Story(folder / "events.jsonl")


async def test_clients_of_the_live_api(tmp_path: Path) -> None:
    """All at once: each of their calls takes half a minute, most of it the work that is delegated."""
    tool("OUTSIDE_PYTHON")
    clients = [*PYTHON, "openai_node"]
    for clip in SPOKEN:
        (tmp_path / f"{clip}.pcm").write_bytes(at_24k(trimmed(clip_bytes(clip))))
    async with LiveMind().serve() as mind:
        engine = ComposedEngine(
            RemoteLlmEngine(RemoteLlmSettings(urls=(mind.url,), start_timeout=0)),
            asr=ears(),
            tts=SpeechEngine(VoiceProcess(VoiceChoice.ESPEAK)),
        )
        async with live_server(engine) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            calls = (call(client, tmp_path / client, url, mind.url) for client in clients)
            results = await asyncio.gather(*calls, return_exceptions=True)
    failures = [f"{client}: {wrong}" for client, one in zip(clients, results, strict=True) for wrong in wrongs(one)]
    assert not failures, "\n".join(failures)


def wrongs(story: Story | BaseException) -> Iterator[str]:
    """What of a call is not as it must be."""
    if isinstance(story, BaseException):
        yield f"{type(story).__name__}: {story}"
        return
    for check in (
        check_events, check_times, check_sound, check_turn, check_interruption, check_commentary, check_mute,
        check_delegation, check_latency,
    ):  # fmt: skip
        try:
            check(story)
        except AssertionError as wrong:
            yield f"{check.__name__}: {wrong}"
        except Exception as wrong:
            yield f"{check.__name__}: {type(wrong).__name__}: {wrong}"


def check_events(story: Story) -> None:
    """Each is one that the package knows, with all its fields; the session's begin and end are where they belong."""
    for event in story.events:
        EVENTS[event["type"]].model_validate(event)
    assert not story.of("error"), story.of("error")
    assert (story.kinds[0], story.kinds[-1]) == ("session.started", "session.closed")
    assert story.kinds.count("session.started") == story.kinds.count("session.closed") == 1
    assert story.events[-1]["reason"] == "close_requested"
    ids = [event["event_id"] for event in story.events if event["type"] != "session.output_audio.delta"]
    assert len(ids) == len(set(ids))
    for kind in ("commentary.appended", "thinking.appended", "input_audio.muted", "input_audio.unmuted"):
        assert all(event["client_event_id"] for event in story.of(f"session.{kind}")), kind
    used = [event["usage"]["seconds"] for event in story.events if "usage" in event]
    assert used == sorted(used)
    assert used[-1] >= WORK_SEC


def check_times(story: Story) -> None:
    """On one line from the session's start: never of the future, never before what went before.

    The session began after the call did; a busy client may read of it much later.
    """
    called, before = story.at("calls"), {"input": 0, "output": 0}
    for line in story.lines:
        event = line.event
        place = event.get("end_ms", event.get("offset_ms", 0))
        assert place / 1000 <= line.at - called + LEAD_SEC, event
        direction = event["type"].split("_")[0].removeprefix("session.") if event else ""
        if event and event["type"].endswith("_transcript.delta"):
            assert before[direction] <= event["start_ms"] <= event["end_ms"], event
            before[direction] = event["start_ms"]


def check_sound(story: Story) -> None:
    """It flows in real time from the start to the end, with zeros while nothing is said."""
    called, started, sent = story.at("calls"), story.came("session.started"), 0.0
    for at, samples in story.audio:
        sent += len(samples) / RATE
        assert sent <= at - called + LEAD_SEC, f"{sent:.1f} s after {at - called:.1f} s"
    assert sent >= story.at("closes") - started - 1
    loud = np.array(story.loud)
    for at, samples in story.audio:
        if np.abs(loud - at).min() > 1:
            assert not samples.any(), f"a noise of {level(samples):.1f} at {at - started:.1f} s"


def check_turn(story: Story) -> None:
    """What was said is what was heard, in its order; a question has its answer."""
    said = [line.did.removeprefix("ends ") for line in story.lines if line.did.startswith("ends ")]
    if story.of("session.input_audio.muted"):
        del said[5]
    names = dict(zip(("question", "other", "task"), SPOKEN, strict=True))
    wanted = " ".join(WORDS[names[one]] for one in said)
    heard = story.text("input").strip().lower()
    assert word_errors(wanted, heard).wrong <= 1, heard
    assert story.text("output").count(TO_QUESTION) == 3, story.text("output")
    assert story.text("output").count(TO_OTHER) == 1, story.text("output")


def check_interruption(story: Story) -> None:
    """Speech ends the story, in what is heard and in what is written."""
    assert STORY[0].strip() in story.text("output")
    assert STORY[-1].strip() not in story.text("output")
    begun, asked = story.at("interrupts"), story.at("ends question", nth=2)
    late = [at - begun for at in story.loud if begun + STOPS_WITHIN_SEC < at < asked]
    assert not late, f"it still sounds {late[-1]:.1f} s after the caller began"


def check_commentary(story: Story) -> None:
    """It is told once, in the model's own words; the instruction is not read aloud."""
    assert story.text("output").count("Ann") == story.text("output").count(GREETING) == 1, story.text("output")
    assert "Greet" not in story.text("output")


def check_mute(story: Story) -> None:
    """Sound goes on, as silence: what was said meanwhile is not among what was heard (check_turn)."""
    if not story.of("session.input_audio.muted"):
        return
    muted, unmuted = story.came("session.input_audio.muted"), story.came("session.input_audio.unmuted")
    assert not [at for at in story.loud if muted + LEAD_SEC < at < unmuted]
    assert len([at for at, _ in story.audio if muted < at < unmuted]) > 10


def check_delegation(story: Story) -> None:
    """Its result is told once, though the talk has gone elsewhere, and never over the caller."""
    assert len(story.of("session.delegation.created")) == 1
    text = story.text("output")
    assert text.count(TOLD) == text.count("Lisbon") == 1, text
    assert text.count(ACKNOWLEDGEMENT) <= 1, text
    created = story.came("session.delegation.created")
    assert story.said_at(TOLD) > created + WORK_SEC
    last = -1
    begun, asked = story.at("begins other", nth=last), story.at("ends other", nth=last)
    assert begun < story.at("result") < asked
    assert not [at for at in story.loud if begun + LEAD_SEC < at < asked], "it talks over the caller"


def check_latency(story: Story) -> None:
    """A question has its answer as soon while work is delegated."""
    ends = [story.at("ends question", nth=nth) for nth in range(3)]
    before, *meanwhile = (story.first_sound(at) - at for at in ends)
    print(
        f"first sound after a question: {before:.2f} s; while work is delegated:", *(f"{one:.2f}" for one in meanwhile)
    )
    assert max(meanwhile) <= before + MOST_LATER_SEC, (before, meanwhile)
