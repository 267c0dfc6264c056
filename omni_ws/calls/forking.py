"""ForkPoint: the data to repeat a turn of a recorded call under another configuration: history, input, configuration.

Only calls over the native WebSocket can be forked: their recordings have the configuration as the client sent it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from omni_ws.calls.files import describe, part_of_side
from omni_ws.calls.lines import parsed
from omni_ws.calls.played_sound import TOLERANCE_MS
from omni_ws.calls.reading import CallReading, CallTurn
from omni_ws.core.chunks import Modality, Word
from omni_ws.core.ledger_entry import audible, end_of_words, usual_pace
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.frames import HEADER, MODALITY_BYTES
from omni_ws.wire.openai_requests import (
    FIELD,
    MAX_HISTORY_BYTES,
    MAX_HISTORY_ITEMS,
)
from omni_ws.wire.recording import HeaderLine, ReceivedLine, SentLine
from omni_ws.wire.session_config import is_mcp, merge

#: The sound of the user's turn: samples a second of pcm16. That of answers.
SPOKEN_RATE: Final = 16_000
ANSWER_RATE: Final = 24_000
#: The longest turn of a user that is played again.
MAX_SPOKEN_SEC: Final = 120
#: What is played after the end of the speech, where the detector has found it: its end is not exact.
_TAIL_MS: Final = 200.0
#: What a fork has of the configuration of the call. The rest is about when turns begin and end, which is known here,
#: and about how the call begins.
_KEPT: Final = (
    *("voice", "speed", "instructions", "modalities", "tts", "sampling", "stage_sampling", "stage_params"),
    *("task", "tools", "tool_choice"),
)
_HEARING: Final = ("language", "languages", "keywords", "prompt")
_PICTURES: Final = (Modality.IMAGE, Modality.VIDEO)
#: The modalities of pictures in the header of a binary frame, and the place of that.
_PICTURE_BYTES: Final = frozenset(MODALITY_BYTES[modality] for modality in _PICTURES)
_MODALITY_AT: Final = 2
#: The types of the server's replies that say what became of the client's messages; and what is in a ``session_updated``
#: that is no reply.
_REPLIES: Final = ("session_updated", "history_truncated", '"error"')
_UNASKED_FIELDS: Final = frozenset({"capabilities", "resumable"})


@dataclass(frozen=True, kw_only=True)
class ForkPoint:
    """A turn of a call, and the conversation before it.

    ``config`` has fields of ``session_config``; ``history`` is the value for ``history_items``. The user's input is
    ``text``, ``sound`` (pcm16 at SPOKEN_RATE), or both. ``turn`` is the turn's object in ``call.json``, ``answer`` the
    sound of its answer (pcm16 at ANSWER_RATE) as it was played.
    """

    config: dict[str, Any]
    history: list[dict[str, Any]]
    text: str
    sound: bytes
    turn: Mapping[str, Any]
    answer: bytes


def can_fork(header: HeaderLine) -> bool:
    """Return whether calls with this header can be forked."""
    return header.kind == "websocket" and header.payloads


def fork_point(reading: CallReading, number: int, changes: Mapping[str, Any] | None = None) -> ForkPoint:
    """Return the ForkPoint of the turn ``number`` (counted from 1), with ``changes`` merged into its configuration.

    The configuration has the fields about the answer, and about what is expected in the speech. All others are left
    out, also of ``changes``: the formats of sound are fixed, and the turn's borders are known.

    Blocks; takes time linear in the size of the recording. Raises UnsupportedParameter for a call or a turn that cannot
    be forked, and InvalidValue if the call has no such turn.
    """
    header = reading.header
    if not header.payloads:
        raise UnsupportedParameter("this call was recorded without its content (record_payloads = false)", param="turn")
    if not can_fork(header):
        raise UnsupportedParameter(
            f"a call of kind {header.kind} cannot be forked, only those of the native WebSocket", param="turn"
        )
    turns = describe(reading)["turns"]
    if not 1 <= number <= len(turns):
        raise InvalidValue(f"this call has {len(turns)} turns", param="turn")
    turn = turns[number - 1]
    stories = [*reading.story.turns.values()]
    told = stories[number - 1]
    sent = _Sent(reading, told, since=stories[number - 2].opened_at if number > 1 else -1.0)
    dropped = _dropped(stories[: number - 1], sent.truncations)
    span = _span(reading, told)
    if span is not None and span[1] - span[0] > MAX_SPOKEN_SEC * 1000:
        raise UnsupportedParameter(f"turn {number} is longer than {MAX_SPOKEN_SEC} s", param="turn")
    pieces = reading.microphone.pieces()
    sound = b"" if span is None else part_of_side(reading, pieces, *span, rate=SPOKEN_RATE)
    if sent.pictures:
        raise UnsupportedParameter(f"turn {number} has pictures, which a fork cannot show again", param="turn")
    if not (told.typed or sound):
        raise UnsupportedParameter(f"turn {number} has no input of the user: it has nothing to answer", param="turn")
    return ForkPoint(
        config=_config(merge(sent.config, changes or {})),
        history=_history([turn for turn in turns[: number - 1] if turn["request_id"] not in dropped], sent),
        text=told.typed,
        sound=sound,
        turn=turn,
        answer=_answer_sound(reading, turn),
    )


class _Sent:
    """The client's messages about a turn: its configuration, results of tools, and whether the turn has pictures.

    And what the client had dropped of the history by then.
    """

    def __init__(self, reading: CallReading, turn: CallTurn, *, since: float) -> None:
        """Read the messages. ``since`` is when the turn before ``turn`` opened, in ms of the call."""
        self._since = since
        self.config: dict[str, Any] = {}
        #: The history that the client gave at the beginning.
        self.given: list[dict[str, Any]] = []
        self.results: dict[str, str] = {}
        self.pictures = False
        #: Times of truncations of the history, and the request from which on each dropped the history.
        self.truncations: list[tuple[float, str]] = []
        #: Each ``session_config`` that has no reply so far, with its time.
        self._waiting: deque[tuple[float, dict[str, Any]]] = deque()
        for line in reading.lines:
            event = line.event
            if isinstance(event, ReceivedLine):
                self._read(event, turn)
            elif isinstance(event, SentLine) and any(name in (event.text or "") for name in _REPLIES):
                self._replied(event.at, parsed(event), turn)
        while self._waiting:
            self._configure(turn)

    def _read(self, event: ReceivedLine, turn: CallTurn) -> None:
        binary = event.binary or b""
        if len(binary) >= HEADER.size and binary[_MODALITY_AT] in _PICTURE_BYTES:
            self._chunk({"modality": _PICTURES[0]}, event.at, turn)
        frame = parsed(event)
        match frame.pop("type", None):
            case "session_config":
                self._waiting.append((event.at, frame))
            case "input_chunk":
                self._chunk(frame, event.at, turn)

    def _replied(self, at: float, frame: Mapping[str, Any], turn: CallTurn) -> None:
        """Read a reply of the server. A ``session_config`` applies as a whole or, if the server refuses it, not."""
        error = frame.get("error")
        match frame.get("type"):
            case "history_truncated" if at <= turn.opened_at and isinstance(name := frame.get("request_id"), str):
                self.truncations.append((at, name))
            case "session_updated" if self._waiting and not frame.keys() & _UNASKED_FIELDS:
                self._configure(turn)
            case "error" if self._waiting and isinstance(error, dict) and error.get("request_id") is None:
                field = re.split(r"[.\[]", str(error.get("param")))[0]
                if error.get("sequence_id") is None and field in self._waiting[0][1]:
                    self._waiting.popleft()

    def _configure(self, turn: CallTurn) -> None:
        """Apply the oldest ``session_config`` without a reply, unless it came after ``turn`` had opened."""
        at, frame = self._waiting.popleft()
        if at <= turn.opened_at:
            given = frame.pop(FIELD, None)
            self.given = self.given or (given if isinstance(given, list) else [])
            self.config = merge(self.config, frame)

    def _chunk(self, frame: Mapping[str, Any], at: float, turn: CallTurn) -> None:
        call_id, text = frame.get("tool_call_id"), frame.get("text")
        if isinstance(call_id, str) and isinstance(text, str):
            self.results[call_id] = self.results.get(call_id, "") + text
        elif frame.get("modality") in _PICTURES and self._since < at <= turn.opened_at:
            self.pictures = True


def _dropped(turns: Sequence[CallTurn], truncations: Sequence[tuple[float, str]]) -> set[str]:
    """Return the requests among ``turns`` that the client has dropped from the history, by ``history_truncate``."""
    dropped: set[str] = set()
    for at, request_id in truncations:
        known = [turn.request_id for turn in turns if turn.opened_at <= at]
        if request_id in known and request_id not in dropped:  # what an earlier one dropped takes no later ones along
            dropped.update(known[known.index(request_id) :])
    return dropped


def _span(reading: CallReading, turn: CallTurn) -> tuple[float, float] | None:
    """Return the start and the end of the user's speech in a turn, in ms of the call; None for a turn without sound."""
    total = reading.microphone.total_ms
    begin, end = turn.speech
    if begin is not None:
        begin, end = max(0.0, begin - reading.story.padding_ms), min(total, (end or total) + _TAIL_MS)
    elif (told := reading.input_of(turn)) is not None:
        begin, end = told
    else:
        return None
    if end <= begin:
        return None
    start_ms, end_ms = reading.microphone.begin_of(begin), reading.microphone.time_of(end)
    return None if start_ms is None or end_ms is None else (max(0.0, start_ms), end_ms)


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: fields[name] for name in _KEPT if fields.get(name) is not None}
    if isinstance(tools := config.get("tools"), list):
        config["tools"] = [tool for tool in tools if not is_mcp(tool)]  # their credentials are not recorded
        if not config["tools"]:
            del config["tools"]
            config.pop("tool_choice", None)
    heard = fields.get("input_audio")
    hearing = {name: heard[name] for name in _HEARING if heard.get(name) is not None} if isinstance(heard, dict) else {}
    config["input_audio"] = {**hearing, "format": "pcm16", "sample_rate": SPOKEN_RATE, "channels": 1}
    config["output_audio"] = {"format": "pcm16", "sample_rate": ANSWER_RATE}
    return config


def _history(turns: list[dict[str, Any]], sent: _Sent) -> list[dict[str, Any]]:
    """Return ``history_items`` for the turns, without the oldest items if there are too many for a session."""
    items = [*sent.given]
    for turn in turns:
        items += _items(turn, sent.results)
    size, first = 0, len(items)
    while first and len(items) - first < MAX_HISTORY_ITEMS:
        size += len(orjson.dumps(items[first - 1])) + 1
        if size >= MAX_HISTORY_BYTES:
            break
        first -= 1
    while first < len(items) and items[first].get("role") == "tool":  # its call is left out
        first += 1
    return items[first:]


def _items(turn: Mapping[str, Any], results: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    user = turn["user"]
    if said := " ".join(filter(None, (user.get("typed"), user["text"]))):
        yield {"role": "user", "content": said}
    calls = [call for call in turn["tools"] if call["id"] in results]
    text = heard_text(turn["answer"])
    if not text and not calls:
        return
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    yield message
    for call in calls:
        yield {"role": "tool", "tool_call_id": call["id"], "content": results[call["id"]]}


def heard_text(answer: Mapping[str, Any]) -> str:
    """Return the text of an ``answer`` in ``call.json``; if the answer was cut, only the part that was heard.

    This part is estimated if the words have no times.
    """
    text: str = answer["text"]
    cut_ms = answer.get("cut_ms")
    if cut_ms is None:
        return text
    if words := answer.get("words"):
        whole = [word for word in words if word["end_ms"] <= answer["end_ms"] + TOLERANCE_MS]
        return text[: end_of_words(text, [Word(word["text"], 0, 0) for word in whole])]
    return audible(text[: int(cut_ms / 1000 * usual_pace(text))]) if cut_ms > 0 else ""


def _answer_sound(reading: CallReading, turn: Mapping[str, Any]) -> bytes:
    start_ms, end_ms = turn["answer"]["start_ms"], turn["answer"]["end_ms"]
    if start_ms is None or end_ms is None:
        return b""
    return part_of_side(reading, reading.loudspeaker.pieces(), start_ms, end_ms, rate=ANSWER_RATE)
