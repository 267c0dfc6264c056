"""A session that goes on in another server while its answer is being told, and voices that tell it by clauses."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import AnyOutput, FinalChunk, InputChunk, OutputChunk, OutputModality, Task, Word
from omni_ws.engine.base import AudioOutput, Engine, EngineState, GenerationRequest, OutputWriter
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.engine.tts.speech_engine import clause_by_clause
from omni_ws.errors import OmniError, ShuttingDown
from omni_ws.service.conversation.output_log import Attachment, ServerMessage
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session, Sessions


class MovingClient(Attachment):
    """Takes all that it is sent. When ``moves`` says so of what it has, its session is saved, and ``data`` is set.

    What comes after that is lost.
    """

    def __init__(self, moves: Callable[[list[ServerMessage]], bool]) -> None:
        self.received: list[ServerMessage] = []
        self.session: Session
        self.data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self._moves = moves
        self._sessions: Sessions
        self._saves = False

    def come(self, sessions: Sessions, session: Session) -> None:
        self._sessions, self.session = sessions, session

    def write_now(self, output: OutputChunk) -> bool:
        self._take(output)
        return True

    def output_ready(self) -> None:
        while (message := self.session.outbox.take()) is not None:
            self._take(message)

    def session_over(self, error: OmniError | None) -> None:
        self.session.detach(self)

    def _take(self, message: ServerMessage) -> None:
        self.received.append(message)
        if isinstance(message, FinalChunk):
            self.over.set()
        if not self._saves and self._moves(self.received):
            self._saves = True
            # After the output that is being written: a session is saved between the passes of the loop.
            asyncio.get_running_loop().call_soon(self._save)

    def _save(self) -> None:
        self.data.set_result(self._sessions.save(self.session))
        self.session.detach(self)

    @property
    def last_output(self) -> int:
        return max((one.sequence_id for one in self.received if isinstance(one, AnyOutput)), default=-1)


async def told(
    engine: Engine,
    *chunks: InputChunk,
    config: Mapping[str, Any],
    moves: Callable[[list[ServerMessage]], bool] | None = None,
    other: Engine | None = None,
    then: Sequence[InputChunk] = (),
    greets: bool = False,
) -> list[ServerMessage]:
    """What a client gets that sends ``chunks``, up to the final.

    Once ``moves`` is met, its session goes on by ``other``. Both engines are started, and may be the same. ``then`` is
    sent behind the first final, and answered, too. ``greets``: the session begins with its greeting.
    """
    sessions = sessions_of(engine)
    session = sessions.open(None)
    token = session.new_token()
    assert token is not None
    client = MovingClient(moves or (lambda received: False))
    client.come(sessions, session)
    session.attach(client)
    session.conversation.configure(config)
    if greets:
        session.conversation.greet()
    now = asyncio.get_running_loop().time
    for chunk in chunks:
        session.conversation.receive_chunk(chunk, now=now())
    if moves is not None:
        data = await client.data
        sessions.end_all(ShuttingDown("the server is shutting down"))
        await sessions.wait_closed()
        sessions = sessions_of(other or engine)
        sessions.restore(data, None)
        session = sessions.claim(session.session_id, token, None)
        client.come(sessions, session)
        session.resume(client, client.last_output)
        client.output_ready()
    await client.over.wait()
    if then:
        client.over.clear()
        for chunk in then:
            session.conversation.receive_chunk(chunk, now=now())
        await client.over.wait()
    sessions.end_all(ShuttingDown("the server is shutting down"))
    await sessions.wait_closed()
    return client.received


def sessions_of(engine: Engine) -> Sessions:
    """The sessions of a server with this engine."""
    factory = SessionFactory(engine, ServerConfig(engine=EngineName.FAKE))
    return Sessions(factory, origin="websocket", grace=30, survive=True)


def text_told(received: Sequence[ServerMessage]) -> str:
    return "".join(one.text for one in chunks_of(received, OutputModality.TEXT))


def chunks_of(received: Sequence[ServerMessage], modality: OutputModality) -> list[OutputChunk]:
    return [one for one in received if isinstance(one, OutputChunk) and one.modality is modality]


def final_of(received: Sequence[ServerMessage]) -> FinalChunk:
    """The latest final. All outputs are numbered without gaps, and each comes once."""
    outputs = [one for one in received if isinstance(one, AnyOutput)]
    assert [one.sequence_id for one in outputs] == list(range(len(outputs)))
    last = outputs[-1]
    assert isinstance(last, FinalChunk)
    return last


class ClauseVoice:
    """A Voice that says a clause in 20 ms a character, as a ramp, and tells no words."""

    name = model = "ramp"
    hosts: tuple[str, ...] = ()
    measures_memory = False
    state = EngineState.OK
    capabilities = dataclasses.replace(
        CAPABILITIES,
        tasks=frozenset({Task.SPEECH}),
        output_modalities=frozenset({OutputModality.AUDIO}),
        voices=("ramp",),
    )

    def __init__(self) -> None:
        self.said: list[str] = []

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        await clause_by_clause(request, text, out, self.say)

    async def say(self, clause: str) -> AsyncGenerator[AudioOutput, None]:
        self.said.append(clause)
        ramp = np.linspace(0, len(clause) / 400, 480 * len(clause), dtype=np.float32)
        for begin in range(0, len(ramp), 4800):
            yield AudioOutput(ramp[begin : begin + 4800], 24_000)


class Telling(Enum):
    """With which piece of a clause's audio a voice tells a word."""

    ENDED = "in which it ends; the last word with the last"  # as espeak-ng does
    LATE = "behind that in which it ends"
    EARLY = "in which it begins"
    FIRST = "the first"
    LAST = "the last, which is empty"


class WordyVoice(ClauseVoice):
    """A ClauseVoice that tells words, at places that vary by ``vary_ms`` from one clause that it says to the next.

    Each clause ends in silence, about ``tail_ms`` behind the end of a piece of 60 ms, or just before that.
    """

    def __init__(
        self, telling: Telling, *, vary_ms: float = 22, tail_ms: float = 0.4, rate: int = 22_050, seed: int = 0
    ) -> None:
        super().__init__()
        self._telling, self._vary_ms, self._tail_ms, self._rate = telling, vary_ms, tail_ms, rate
        self._random = random.Random(seed)

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        await clause_by_clause(request, text, out, self.say, tells_words=True)

    async def say(self, clause: str) -> AsyncGenerator[AudioOutput, None]:
        self.said.append(clause)
        words, end_ms, whole_ms = list[Word](), 0.0, self._tail_ms + 120
        for found in re.finditer(r"\w+", clause):
            start_ms, usual_ms = end_ms, 60 * (1 + len(found.group()) // 3)
            whole_ms += usual_ms
            end_ms += usual_ms + self._random.uniform(-self._vary_ms, self._vary_ms) / len(clause.split())
            words.append(Word(found.group(), round(start_ms), round(end_ms)))
        whole_ms += self._random.uniform(-min(1, self._vary_ms), min(1, self._vary_ms))
        pieces = int(whole_ms // 60) + 1
        told: list[list[Word]] = [[] for _ in range(pieces + 1)]
        for word in words:
            told[self._piece(word, pieces, last=word is words[-1])].append(word)
        for number in range(pieces + 1):
            begin_ms = min(whole_ms, 60 * number)
            samples = np.zeros(round(min(60, whole_ms - begin_ms) * self._rate / 1000), np.float32)
            if len(samples) or told[number]:
                yield AudioOutput(samples, self._rate, tuple(told[number]))
                await asyncio.sleep(0)  # so that a session can be saved behind every piece

    def _piece(self, word: Word, pieces: int, *, last: bool) -> int:
        match self._telling:
            case Telling.ENDED:
                return pieces - 1 if last else word.end_ms // 60
            case Telling.LATE:
                return min(pieces, word.end_ms // 60 + 1)
            case Telling.EARLY:
                return word.start_ms // 60
            case Telling.FIRST:
                return 0
            case Telling.LAST:
                return pieces
