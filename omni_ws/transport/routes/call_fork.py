"""CallForks: goes on from a turn of a recorded call with another voice or other instructions, as a call of its own.

The server says the user's turn to itself, in a conversation without a socket, at the pace at which it was spoken. The
new call is recorded as if the sound of both sides had come over tracks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import orjson

from omni_ws.calls.forking import ANSWER_RATE, SPOKEN_RATE, ForkPoint
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    FinalChunk,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
)
from omni_ws.errors import EngineOverloaded, InvalidValue, OmniError, RateLimited, UnsupportedParameter
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.given_history import check_history, give_history
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.recording.recorder import ConnectionRecording, Recorder
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.native.telling import record_message
from omni_ws.transport.routes.generation import GenerationRoutes
from omni_ws.transport.routes.sole_request import SoleRequest, next_message
from omni_ws.wire.history_items import FIELD
from omni_ws.wire.openai_fields import ConfigurationPatch

#: How long an answer may take after the end of the user's turn.
ANSWER_SEC: Final = 120.0
#: The longest instructions, and the longest name of a voice.
MAX_INSTRUCTIONS: Final = 32_000
MAX_VOICE: Final = 256
#: Of the body of a request.
MAX_BODY_BYTES: Final = 256 * 1024
_FIELDS: Final = frozenset({"turn", "instructions", "voice"})
_PIECE_SEC: Final = 0.1
_PIECE_BYTES: Final = int(SPOKEN_RATE * _PIECE_SEC) * 2
_SPOKEN: Final = AudioFormat(AudioEncoding.PCM16, SPOKEN_RATE)
_ANSWERED: Final = AudioFormat(AudioEncoding.PCM16, ANSWER_RATE)
_RETRY_MS: Final = 5000
#: How long the recording may take to be written, and how often it is looked whether it is.
_WRITE_SEC: Final = 10.0
_LOOK_SEC: Final = 0.02


def read_fork(body: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
    """Return the turn of a request to fork, and what is to change. Raises an InvalidRequest that names the field."""
    turn = body.get("turn")
    if not isinstance(turn, int) or isinstance(turn, bool):
        raise InvalidValue("turn must be the number of a turn, from 1", param="turn")
    for name in sorted(body.keys() - _FIELDS):
        hint = "; `omni-ws replay --from-turn` asks another model" if name in ("llm", "model") else ""
        raise UnsupportedParameter(f"a fork here takes turn, instructions and voice{hint}", param=name[:64])
    changes = {}
    for name, most in (("instructions", MAX_INSTRUCTIONS), ("voice", MAX_VOICE)):
        if (value := body.get(name)) is None:
            continue
        if not isinstance(value, str) or len(value) > most:
            raise InvalidValue(f"{name} must be a text of at most {most} characters", param=name)
        changes[name] = value
    return turn, changes


class CallForks(GenerationRoutes):
    """Plays forks of calls, one at a time."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator, recorder: Recorder | None) -> None:
        super().__init__(sessions, authenticator)
        self._recorder = recorder
        self._is_busy = False

    @property
    def voices(self) -> list[str]:
        """The voices that a fork may have."""
        return list(self.sessions.engine.capabilities.voices)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other forks out during the block. Raises RateLimited if there is one."""
        if self._is_busy:
            raise RateLimited("another fork is being played; try again when it is over", retry_after_ms=_RETRY_MS)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    async def play(self, exchange: HttpExchange, point: ForkPoint, *, owner: str | None) -> str:
        """Say the user's turn, and return the id of the recording once the answer is whole.

        Raises what opening a session raises, the error that ended the answer, and EngineOverloaded if it takes too long
        or cannot be recorded.
        """
        session, _ = self.open_session(
            exchange,
            ConfigurationPatch(point.config, sent=frozenset(point.config)),
            owner=owner,
            samples=False,
            streaming_input=True,
            prepare=partial(_remember, point=point),
        )
        call_id = session.conversation.observed.identity.session_id
        recording = self._recorder and self._recorder.begin("websocket", key=owner, name=call_id, asked_for=True)
        if not recording:
            session.conversation.end()
            session.conversation.observed.ended()
            raise EngineOverloaded("the fork cannot be recorded now")
        written = recording.connection()
        written.opened(exchange.request.path, subprotocol=None, last_output=None)
        told = {"type": "session_config", **point.config, FIELD: point.history}
        written.received(orjson.dumps(told), is_text=True)
        spoken_sec = len(point.sound) / (2 * SPOKEN_RATE)
        try:
            async with asyncio.timeout(spoken_sec + ANSWER_SEC), session.running(partial(_say, point, written)):
                while not isinstance(message := await next_message(session), FinalChunk):
                    _record(written, message)
                record_message(recording, message)
        except TimeoutError:
            raise EngineOverloaded(f"there is no whole answer {ANSWER_SEC:g} s after the turn") from None
        except OmniError as error:
            record_message(recording, error)
            raise
        finally:
            recording.end()  # the connection is not closed: that would end what is played
        with suppress(TimeoutError):  # what is not written yet will be
            async with asyncio.timeout(_WRITE_SEC):
                while not recording.file.is_over:  # noqa: ASYNC110  a thread writes it
                    await asyncio.sleep(_LOOK_SEC)
        return call_id


def _remember(conversation: Conversation, point: ForkPoint) -> None:
    give_history(conversation, check_history(conversation, point.history))


async def _say(point: ForkPoint, written: ConnectionRecording, session: SoleRequest) -> None:
    """Feed the user's turn: the text at once, the sound at the pace at which it was spoken."""
    if point.text:
        frame = {"type": "input_chunk", "sequence_id": 0, "modality": "text", "text": point.text}
        written.received(orjson.dumps(frame), is_text=True)
        await session.feed(InputChunk(Modality.TEXT, point.text.encode()))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for start in range(0, len(point.sound), _PIECE_BYTES):
        piece = point.sound[start : start + _PIECE_BYTES]
        await asyncio.sleep(begun + (start + len(piece)) / (2 * SPOKEN_RATE) - loop.time())
        written.recording.sound(piece, _SPOKEN, by_user=True)
        await session.feed(InputChunk(Modality.AUDIO, piece))
    session.end_input()


def _record(written: ConnectionRecording, message: ServerMessage) -> None:
    record_message(written.recording, message)
    if isinstance(message, OutputChunk) and message.modality is OutputModality.AUDIO and message.payload:
        source = message.format or _ANSWERED
        written.recording.sound(message.payload, source, by_user=False, request_id=message.request_id)
