"""Another answer to one turn of a recorded call: the call goes on from there, on a server of any version."""

from __future__ import annotations

import asyncio
import base64
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import orjson
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from omni_ws.caller.answers import NativeReader, TimedAnswer, parsed
from omni_ws.caller.script import Target
from omni_ws.calls.forking import ANSWER_RATE, SPOKEN_RATE, ForkPoint, fork_point, heard_text
from omni_ws.calls.lines import CallLines
from omni_ws.calls.reading import CallReading
from omni_ws.client.audio import Pcm16, paced, pieces, write_wav
from omni_ws.scenarios.servers import own_server
from omni_ws.wire.history_items import FIELD

_PATH: Final = "/v1/streaming_input"
_PIECE_MS: Final = 100
_LEAST_COLUMN: Final = 20


class ForkFailed(Exception):
    """The server refused the turn, or did not answer it."""


def read_point(path: Path, number: int, changes: Mapping[str, Any]) -> ForkPoint:
    """Return the turn of a recording. Raises OSError, ValueError for no recording of a call, and an InvalidRequest."""
    return fork_point(CallReading(CallLines(path)), number, changes)


async def answered(
    point: ForkPoint, target: Target, serve: Sequence[str] | None, *, speed: float, patience: float
) -> TimedAnswer:
    """Return the answer of the server at ``target`` or, with ``serve``, of one that is started with these arguments.

    ``patience`` is the longest silence of the server in seconds. Raises ForkFailed, NoServer and OSError.
    """
    if serve is None:
        return await _ask(point, target, speed=speed, patience=patience)
    async with own_server({}, serve) as authority:
        started = Target.parse(f"ws://{authority}", api_key=target.api_key)
        return await _ask(point, started, speed=speed, patience=patience)


async def _ask(point: ForkPoint, target: Target, *, speed: float, patience: float) -> TimedAnswer:
    try:
        async with target.websocket(_PATH) as connection:
            return await _Asking(point, connection, speed=speed, patience=patience).run()
    except ConnectionClosed as error:
        raise ForkFailed(f"the server closed the session: {error}") from None
    except InvalidHandshake as error:
        raise ForkFailed(f"the server refuses the session: {error}") from None


class _Asking:
    """The turn at a server that is connected."""

    def __init__(self, point: ForkPoint, connection: ClientConnection, *, speed: float, patience: float) -> None:
        self._point = point
        self._connection = connection
        self._speed = speed
        self._patience = patience
        self._reader = NativeReader()
        self._acknowledged = -1

    async def run(self) -> TimedAnswer:
        await self._send({"type": "session_config", **self._point.config, FIELD: self._point.history})
        while not self._reader.configured:
            await self._hear()
        speaking = asyncio.create_task(self._speak(), name="a turn that is said again")
        try:
            while not (answers := self._reader.found.answers) or answers[0].finish_reason is None:
                # While the turn is being said the server has nothing to say.
                await self._hear(patience=None if not speaking.done() else self._patience)
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
        answer = answers[0]
        if answer.finish_reason == "error":
            raise ForkFailed(f"the answer failed: {', '.join(answer.error_codes)}")
        return answer

    async def _send(self, frame: dict[str, Any]) -> None:
        message = orjson.dumps(frame).decode()
        self._reader.asked(self._now, message)
        await self._connection.send(message)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() * 1000

    async def _hear(self, patience: float | None = 0.0) -> None:
        """Take one message. Raises ForkFailed for an error, and for silence."""
        limit = self._patience if patience == 0.0 else patience
        try:
            async with asyncio.timeout(limit):
                message = await self._connection.recv()
        except TimeoutError:
            raise ForkFailed(f"the server said nothing for {limit:g} s") from None
        self._reader.heard(self._now, message)
        frame = {} if isinstance(message, bytes) else parsed(message)
        if frame.get("type") == "error" and isinstance(error := frame.get("error"), dict):
            place = f" ({error['param']})" if error.get("param") else ""
            raise ForkFailed(f"the server refuses it: {error.get('code')}{place}: {error.get('message')}")
        if self._reader.highest > self._acknowledged:
            self._acknowledged = self._reader.highest
            await self._send({"type": "output_ack", "sequence_id": self._acknowledged})

    async def _speak(self) -> None:
        """Send the turn: the text at once, the sound at the pace at which it was spoken, or ``speed`` times as fast."""
        point, number = self._point, 0
        if point.text:
            await self._send({"type": "input_chunk", "sequence_id": number, "text": point.text})
            number += 1
        spoken = pieces(Pcm16(point.sound, SPOKEN_RATE), piece_ms=_PIECE_MS)
        async with aclosing(paced(spoken, interval=_PIECE_MS / 1000 / self._speed)) as microphone:
            async for piece in microphone:
                payload = base64.b64encode(piece).decode()
                chunk = {"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}
                await self._send(chunk)
                number += 1
        await self._send({"type": "finish"})


def fork_as_json(point: ForkPoint, answer: TimedAnswer) -> str:
    """Return both answers as one line of JSON."""
    return orjson.dumps(
        {
            "user": {"text": point.turn["user"]["text"], "typed": point.text, "heard": answer.heard},
            "history_items": len(point.history),
            "recorded": {
                "text": heard_text(point.turn["answer"]),
                "tool_calls": _calls_recorded(point),
                "audio_ms": _ms(point.answer),
            },
            "now": {"text": answer.text, "tool_calls": answer.tool_calls, "audio_ms": _ms(answer.sound)},
        }
    ).decode()


def fork_as_text(point: ForkPoint, answer: TimedAnswer) -> str:
    """Return both answers beside each other, as wide as the terminal."""
    width = max(_LEAST_COLUMN, (shutil.get_terminal_size().columns - 3) // 2)
    user = point.turn["user"]
    columns = [
        [
            title,
            "-" * len(title),
            *textwrap.wrap(f"{text} {calls}".strip() or "(no words)", width),
            f"{ms / 1000:.1f} s",
        ]
        for title, text, calls, ms in (
            ("Recorded", heard_text(point.turn["answer"]), _calls_recorded(point), _ms(point.answer)),
            ("Now", answer.text, answer.tool_calls, _ms(answer.sound)),
        )
    ]
    lines = [f"{left:<{width}} | {right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]
    asked = " ".join(filter(None, (user.get("typed"), user["text"]))) or "(no words)"
    return "\n".join([*textwrap.wrap(f"User: {asked}", 2 * width + 3), "", *lines])


def _calls_recorded(point: ForkPoint) -> str:
    return "".join(f"{call['name']}{call['arguments']}" for call in point.turn["tools"])


def _ms(sound: bytes) -> float:
    return round(len(sound) * 1000 / (2 * ANSWER_RATE), 1)


def save(point: ForkPoint, answer: TimedAnswer, folder: Path, *, number: int) -> None:
    """Write the sound of both answers to ``folder`` as ``turn-N-recorded.wav`` and ``turn-N-now.wav``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, sound in (("recorded", point.answer), ("now", answer.sound)):
        write_wav(folder / f"turn-{number}-{name}.wav", Pcm16(sound, ANSWER_RATE))
