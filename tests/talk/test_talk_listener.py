"""Whose sound and whose words a conversation has, and what its Stop means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.inline_workers import InlineWorkers, loud, quiet
from support.live_server import live_server
from support.scripted_engines import HearingEngine

from omni_ws.audio.pcm import Ducker
from omni_ws.client import (
    AudioChunk,
    Final,
    Reconnected,
    ResponseStarted,
    SpeechConfirmed,
    SpeechDismissed,
    SpeechStarted,
    TranscriptChunk,
    connect,
)
from omni_ws.client.audio import AnswerBuffer
from omni_ws.core.chunks import AudioFormat, FinishReason, Word
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.talk.conversation import AnswerListener, interrupt
from omni_ws.talk.display import JsonDisplay

pytestmark = pytest.mark.usefixtures("no_task_left")

SECOND = 24_000 * 2


class Told(JsonDisplay):
    """Keeps what it is told, in its order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def show(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def state(self, state: str, *, idle: bool = False) -> None:
        pass


def listening(*, interruptible: bool = False) -> tuple[AnswerListener, AnswerBuffer, Told]:
    display, buffer = Told(), AnswerBuffer(24_000, prefill_ms=0)
    loudspeaker: Any = SimpleNamespace(buffer=buffer, sample_rate=24_000, ducker=Ducker(AudioFormat()))
    return AnswerListener(display, loudspeaker, interruptible=interruptible), buffer, display


def words(text: str) -> list[Any]:
    """An answer with a word every ten seconds."""
    said = text.split()
    timed = tuple(Word(word, place * 10_000, place * 10_000 + 9000) for place, word in enumerate(said))
    return [TextOutput(text), AudioOutput(np.full(240_000 * len(said), 0.1, np.float32), 24_000, timed)]


async def test_stop_while_somebody_begins_to_speak_stops_what_sounds() -> None:
    """All of the answer has come and is played: it is cut where it was heard, and what is being said is answered."""
    engine = HearingEngine(words("one two three"), heard=[TranscriptOutput("hello"), TextOutput("spoken answer")])
    config = {"turn_detection": {"type": "server_vad"}, "max_lead_ms": 60_000, "overlap": "interrupt"}
    async with live_server(engine) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with connect(server.websocket_url, config=config) as session:
            listener, buffer, _ = listening()
            await session.send_text("hello", end=True)
            async for event in session.response():
                listener.take(event)
            buffer.read(14 * SECOND)
            await session.send_audio(quiet(320) + loud(320))
            await interrupt(session, listener)
            await session.send_audio(loud(320) + quiet(800))
            answer = await session.answer()
            assert (answer.text, answer.transcript, answer.finish_reason) == (
                "spoken answer",
                "hello",
                FinishReason.STOP,
            )
            assert answer.turn_id is not None
    (said,) = (message.text for message in engine.requests[1].history if message.role == "assistant")
    assert said == "one two"
    assert buffer.idle


async def test_a_request_without_an_id_is_stopped_by_its_name() -> None:
    """With the button: what was asked is not answered once something else is said."""
    listener, buffer, _ = listening()
    cancelled: list[Any] = []

    class Session:
        async def cancel(self, request_id: str | None = None, *, ref: str | None = None) -> None:
            cancelled.append((request_id, ref))

    session: Any = Session()
    listener.asked.add("speech-1")
    await interrupt(session, listener)
    listener.asked.add("speech-2")
    listener.take(ResponseStarted("req_a", "end_of_input", 0, "extend", ref="speech-1"))
    silenced = [listener.silenced]
    listener.take(Final("req_a", 0, FinishReason.CANCELLED, None, ref="speech-1"))
    listener.take(ResponseStarted("req_b", "end_of_input", 0, "extend", ref="speech-2"))
    assert [*silenced, listener.silenced] == ["req_a", None]
    await interrupt(session, listener)
    assert cancelled == [(None, "speech-1"), ("req_b", None)]
    assert buffer.idle


@pytest.mark.parametrize("end", ["confirmed", "dismissed", "new session"])
def test_the_voice_is_lowered_until_it_is_known_whether_somebody_interrupts(end: str) -> None:
    listener, buffer, display = listening(interruptible=True)
    sound = np.full(24_000, 16_384, "<i2").tobytes()

    def level() -> int:
        """The last sample of the next 20 ms, as the sound device gets them."""
        assert listener.loudspeaker is not None
        audio = listener.loudspeaker.ducker.apply(buffer.read(960))
        return int(np.frombuffer(audio, "<i2")[-1])

    listener.take(ResponseStarted("req_a", "end_of_input", 0, "extend"))
    listener.take(AudioChunk("req_a", 0, sound, "pcm16", 24_000, 0))
    assert level() == 16_384
    listener.take(SpeechStarted(900, "turn_a", certain=False))
    assert level() == pytest.approx(16_384 * 10 ** (-15 / 20), abs=1)
    assert buffer.played_bytes == 2 * 960
    if end == "dismissed":
        listener.take(SpeechDismissed(900, "turn_a"))
        assert level() == 16_384
    elif end == "confirmed":
        listener.take(SpeechConfirmed(900, "turn_a", "req_b"))
        assert buffer.idle
        assert listener.played == ("req_a", 40.0)
    else:
        listener.take(Reconnected("sess_b", 0))
        assert buffer.idle
    level()
    listener.take(AudioChunk("req_c", 1, sound, "pcm16", 24_000, 0))
    assert level() == 16_384
    kinds = [kind for kind, _ in display.told if kind.startswith("speech")]
    told = {"confirmed": ["speech_started"], "dismissed": ["speech_dismissed"], "new session": []}
    assert kinds == ["speech_uncertain", *told[end]]


def test_words_and_ends_are_of_their_own_requests() -> None:
    listener, _, display = listening()
    listener.take(TranscriptChunk("req_a", 0, "my name", interim=True))
    listener.take(TranscriptChunk("req_b", 1, "what is"))
    listener.take(ResponseStarted("req_b", "vad", 0, "extend"))
    listener.take(Final("req_a", 2, FinishReason.CANCELLED, None))
    listener.take(TranscriptChunk("req_a", 3, "My name is Robert.", late=True))
    listener.take(TranscriptChunk("req_b", 4, " my name?"))
    assert [tuple(fields.values()) for _, fields in display.told] == [
        ("my name", True),
        ("what is", False),
        ("before that you said: My name is Robert.",),
        ("what is my name?", False),
    ]
    assert listener.answering == "req_b"
