"""Recordings of calls over the native WebSocket, made line by line: who says what, and as many turns as one likes."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

RATE: Final = 8000
#: Of a word and of the pauses around turns, in milliseconds.
WORD_MS: Final = 250
THINKS_MS: Final = 700
PAUSE_MS: Final = 500
#: What the input of a request has before the speech in it.
PADDING_MS: Final = 300
#: How much sound a side of a turn has in a call with little of it.
LITTLE_MS: Final = 40
#: Of each answer, since the end of the question.
TIMES: Final = {
    "speech_ended": 0, "turn_decided": 300, "engine_started": 301, "transcript_settled": 400, "llm_asked": 402,
    "first_token": 520, "first_clause": 560, "first_audio_made": 690, "first_audio_sent": THINKS_MS,
}  # fmt: skip


class Said(NamedTuple):
    """A turn: a question and its answer, of which ``heard`` words were played (None: all)."""

    question: str
    answer: str
    heard: int | None = None
    tool: tuple[str, str] | None = None


def write_call(
    folder: Path,
    turns: Sequence[Said],
    *,
    call_id: str = "sess_made",
    key: str | None = None,
    payloads: bool = True,
    frame: str | None = None,
    sparse: bool = False,
) -> float:
    """Write a recording into the folder of a server, and return its length in milliseconds.

    ``frame`` is the text of a frame of the client that the server does not know. A ``sparse`` call has little sound.
    """
    started = "2026-01-02T03:04:05.000+00:00"
    header = {
        "recording": "omni_ws", "version": 1, "kind": "websocket", "id": call_id, "server": "0.1.0", "engine": "fake",
        "model": "fake", "started": started, "payloads": payloads, **({} if key is None else {"key": key}),
    }  # fmt: skip
    lines = list(_lines(turns, frame, sparse))
    end = max((line["at"] for line in lines), default=0.0)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"20260102T030405_{call_id}.ndjson"
    content = b"".join(
        orjson.dumps(line) + b"\n"
        for line in (header, *sorted(lines, key=lambda line: line["at"]), {"event": "end", "at": end})
    )
    path.write_bytes(content)
    path.chmod(0o600)
    return float(end)


def _lines(turns: Sequence[Said], frame: str | None, sparse: bool) -> Iterator[dict[str, Any]]:
    def line(at: float, event: str, message: dict[str, Any] | str) -> dict[str, Any]:
        text = message if isinstance(message, str) else orjson.dumps(message).decode()
        return {"event": event, "at": round(at, 3), "connection": 0, "text": text}

    yield {"event": "open", "at": 0.0, "connection": 0, "target": "/v1/streaming_input"}
    sound = {"format": "pcm16", "sample_rate": RATE}
    created = {
        "type": "session_created", "input_audio": sound, "output_audio": sound,
        "turn_detection": {"type": "server_vad", "prefix_padding_ms": PADDING_MS},
    }  # fmt: skip
    yield line(1, "out", created)
    if frame is not None:
        yield line(2, "in", frame)
    numbers = count(1)
    at, audio_ms = 5.0, 0.0
    for index, said in enumerate(turns):
        request, turn = {"request_id": f"req_{index:032x}"}, {"turn_id": f"turn_{index:032x}"}
        question, answer = said.question.split(), said.answer.split()
        output = {"type": "output_chunk", **request}
        silence = 0 if sparse else PAUSE_MS
        spoken = LITTLE_MS if sparse else WORD_MS * len(question)
        tail = 0 if sparse else THINKS_MS
        yield line(at + silence, "in", _chunk(3 * index, silence, 0))
        yield line(at + silence + spoken, "in", _chunk(3 * index + 1, spoken, 220))
        yield line(at + silence + spoken + tail, "in", _chunk(3 * index + 2, tail, 0))
        began, ended = audio_ms + silence, audio_ms + silence + spoken
        audio_ms = ended + tail
        at += silence
        yield line(at + 1, "out", {"type": "speech_started", **turn, "audio_ms": began})
        at += spoken
        yield line(at + 300, "out", {"type": "speech_stopped", **turn, **request, "audio_ms": ended})
        yield line(at + 301, "out", {"type": "response_started", **request, **turn})
        heard = {"modality": "transcript", "text": said.question, "words": _words(question, min(PADDING_MS, began))}
        for content in (heard, {"modality": "text", "text": said.answer}):
            yield line(at + 400, "out", {**output, "sequence_id": next(numbers), **content})
        at += THINKS_MS
        last = next(numbers)
        tone = _tone(LITTLE_MS if sparse else WORD_MS * len(answer), 440)
        audio = {"modality": "audio", "start_ms": 0, "payload": tone, "words": _words(answer, 0)}
        yield line(at, "out", {**output, "sequence_id": last, **audio})
        played = WORD_MS * (len(answer) if said.heard is None else said.heard)
        if said.tool is not None:
            last = next(numbers)
            call = {"id": "call_1", "index": 0, "name": said.tool[0], "arguments": said.tool[1]}
            yield line(at + 2, "out", {**output, "sequence_id": last, "modality": "tool_call", **call})
        at += played
        cut = said.heard is not None
        if cut:
            yield line(at, "in", {"type": "cancel", **request})
        yield line(at + 1, "in", {"type": "output_ack", "sequence_id": last, "played_ms": played, **request})
        end = {"final": True, "finish_reason": "cancelled" if cut else "stop", "times": TIMES}
        yield line(at + 2, "out", {**output, "sequence_id": next(numbers), "modality": "text", **end})
        at += PAUSE_MS


def _chunk(number: int, lasts_ms: float, pitch: float) -> dict[str, Any]:
    return {"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": _tone(lasts_ms, pitch)}


def _words(words: Sequence[str], begin: float) -> list[dict[str, Any]]:
    return [
        {"text": word, "start_ms": begin + WORD_MS * place, "end_ms": begin + WORD_MS * (place + 1)}
        for place, word in enumerate(words)
    ]


def _tone(lasts_ms: float, pitch: float) -> str:
    """A tone of 16-bit samples that swells with each word; one without pitch is silence."""
    time = np.arange(int(lasts_ms * RATE / 1000)) / RATE
    swell = np.sin(np.pi * ((time * 1000 / WORD_MS) % 1))
    return base64.b64encode((9000 * swell * np.sin(2 * np.pi * pitch * time)).astype("<i2").tobytes()).decode()
