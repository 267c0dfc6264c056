"""The files of a call: ``call.json``, its transcript as text and as JSON, and the zip with all of it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import orjson

from omni_ws.calls.lines import CallLines
from omni_ws.calls.played_sound import Streak
from omni_ws.calls.reading import CallReading
from omni_ws.calls.sound import duration_ms
from omni_ws.calls.story import CallTurn
from omni_ws.core.answer_times import BESIDE_MOMENTS, MOMENTS, PARTS

#: Names in the zip. None is taken from a recording.
_SOUND: Final = "sound.wav"
_ROOT: Final = "call"
_COPY_BYTES: Final = 1 << 20
#: The dates that a zip file can have.
_FIRST_DATE: Final = (1980, 1, 1, 0, 0, 0)
_LAST_DATE: Final = (2107, 12, 31, 23, 59, 59)


def summary(lines: CallLines) -> dict[str, Any]:
    """Return the entry of a call in a list of calls: what its first line and the size of its file tell."""
    header = lines.header
    return {
        "id": header.id,
        "kind": header.kind,
        "started": header.started,
        "model": header.model,
        "engine": header.engine,
        "key": header.key,
        "payloads": header.payloads,
        "bytes": lines.size,
        "last_written": lines.last_written.isoformat(timespec="milliseconds"),
    }


def describe(reading: CallReading) -> dict[str, Any]:
    """Return the content of ``call.json``; times are milliseconds since the begin of the call."""
    header = reading.header
    played = reading.loudspeaker.pieces()
    streaks: dict[str, list[Streak]] = {}
    for streak in reading.loudspeaker.streaks:
        streaks.setdefault(streak.answer_id, []).append(streak)
    has_sound = bool(played or reading.microphone.pieces())
    return {
        "id": header.id,
        "kind": header.kind,
        "started": header.started,
        "duration_ms": reading.duration_ms,
        "model": header.model,
        "engine": header.engine,
        "server": header.server,
        "key": header.key,
        "recorded": {
            "payloads": header.payloads,
            "complete": reading.ended,
            "cut": reading.cut_reason,
            "stored": reading.stored,
        },
        "turns": [_turn(turn, reading, streaks.get(turn.request_id, [])) for turn in reading.story.turns.values()],
        "turns_left_out": reading.story.left_out,
        "errors": reading.story.errors,
        "events": reading.frames.entries,
        "events_left_out": reading.frames.left_out,
        "sound": {"duration_ms": duration_ms(reading, played)} if has_sound else None,
    }


def _turn(turn: CallTurn, reading: CallReading, streaks: list[Streak]) -> dict[str, Any]:
    speech = [None if place is None else reading.microphone.time_of(place) for place in turn.speech]
    answer = _answer(turn, streaks)
    times = _times(turn, speech, answer)
    return {
        "request_id": turn.request_id,
        "turn_id": turn.turn_id,
        "user": _user(turn, speech, reading),
        "answer": answer,
        "tools": [*turn.tools.values()],
        "finish_reason": turn.finish_reason,
        **({} if turn.error is None else {"error": turn.error}),
        **({} if turn.usage is None else {"usage": turn.usage}),
        **{name: turn.times[name] for name in BESIDE_MOMENTS if name in turn.times},
        "times": times,
        "spans": _spans(times),
    }


def _user(turn: CallTurn, speech: list[float | None], reading: CallReading) -> dict[str, Any]:
    user: dict[str, Any] = {"text": turn.heard or turn.typed, "start_ms": speech[0], "end_ms": speech[1]}
    if turn.heard and turn.typed:
        user["typed"] = turn.typed
    if turn.heard_words:
        begins_ms = turn.input_begins_ms(reading.story.padding_ms)
        user["words"] = [
            _placed(word, lambda at: reading.microphone.time_of(begins_ms + at)) for word in turn.heard_words
        ]
    return user


def _answer(turn: CallTurn, streaks: list[Streak]) -> dict[str, Any]:
    """Return the answer with when it was played: by the sound, or by what the session knew of it."""

    def time_of(position_ms: float) -> float | None:
        # What was said again after an answer was held counts where it was heard last.
        times = (streak.time_of(position_ms) for streak in reversed(streaks))
        return next((at for at in times if at is not None), None if streaks else turn.time_of(position_ms))

    heard = [piece for streak in streaks for piece in streak.heard]
    answer: dict[str, Any] = {"text": turn.said, "start_ms": None, "end_ms": None}
    if heard:
        answer |= {"start_ms": heard[0].start_ms, "end_ms": heard[-1].end_ms}
    elif turn.played:
        at, played_ms = turn.played[0]
        answer |= {"start_ms": at - played_ms, "end_ms": turn.played[-1][0]}
    if streaks and (cut_ms := streaks[-1].cut_ms) is not None and _is_cut(turn, streaks[-1], cut_ms):
        answer["cut_ms"] = cut_ms
    elif not streaks and turn.played and turn.finish_reason == "cancelled":
        answer["cut_ms"] = turn.played[-1][1]
    if turn.said_words:
        placed = [_placed(word, time_of) for word in turn.said_words]
        answer["words"] = [word for word in placed if word["start_ms"] is not None]
    return answer


def _is_cut(turn: CallTurn, last: Streak, cut_ms: float) -> bool:
    return turn.finish_reason == "cancelled" or cut_ms < last.ends_ms - 1


def _placed(word: Mapping[str, Any], time_of: Any) -> dict[str, Any]:
    start_ms = time_of(word["start_ms"])
    length = word["end_ms"] - word["start_ms"]
    return {"text": word["text"], "start_ms": start_ms, "end_ms": None if start_ms is None else start_ms + length}


def _times(turn: CallTurn, speech: list[float | None], answer: Mapping[str, Any]) -> dict[str, float]:
    """Return the times of an answer that are known, in milliseconds of the call.

    Those that the session measured itself count; the others are taken from when the frames were sent.
    """
    times: dict[str, float | None] = {
        "speech_started": speech[0],
        "speech_ended": speech[1],
        "turn_decided": turn.stopped_at,
        "request_started": turn.started_at,
        "first_token": turn.first_text_at,
        "first_audio_sent": turn.first_sound_at,
        "first_audio_played": answer["start_ms"],
        "last_audio_sent": turn.last_sound_at,
        "last_audio_played": answer["end_ms"],
        "ended": turn.ended_at,
    }
    begin = _origin(turn, speech)
    for name in MOMENTS:
        if isinstance(value := turn.times.get(name), int | float):
            times[name] = begin + value
    # When it was played is taken from the sound, which is what is heard here.
    times["first_audio_played"] = answer["start_ms"] if answer["start_ms"] is not None else times["first_audio_played"]
    return {name: round(value, 3) for name, value in times.items() if value is not None}


def _origin(turn: CallTurn, speech: list[float | None]) -> float:
    """Return the time from which the session has measured: by its first sound, which the recording has too."""
    measured = turn.times.get("first_audio_sent")
    if isinstance(measured, int | float) and turn.first_sound_at is not None:
        return turn.first_sound_at - measured
    return speech[1] if speech[1] is not None else turn.opened_at


def _spans(times: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the parts of the time before the first sound, and the speech and the sound themselves.

    Each part begins at the latest of the moments before it: what was ready before takes no time of its own.
    """
    spans = []
    if "speech_started" in times and "speech_ended" in times:
        spans.append(_span("speech", times["speech_started"], times["speech_ended"]))
    last = times.get("speech_ended", times.get("input_ended", times.get("request_started")))
    for name, moment in PARTS:
        end = times.get(moment)
        # A model that hears by itself does not wait for the transcript.
        if end is None or (moment == "transcript_settled" and end > times.get("first_token", end)):
            continue
        if last is not None and end > last:
            spans.append(_span(name, last, end))
        last = end if last is None else max(last, end)
    if "first_audio_played" in times and "last_audio_played" in times:
        spans.append(_span("answer", times["first_audio_played"], times["last_audio_played"]))
    return spans


def _span(name: str, start_ms: float, end_ms: float) -> dict[str, Any]:
    return {"name": name, "start_ms": start_ms, "end_ms": end_ms}


def transcript(call: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return who said what, and when, in the order of time."""
    said = []
    for turn in call["turns"]:
        for who in ("user", "answer"):
            if turn[who]["text"]:
                role = "user" if who == "user" else "assistant"
                start_ms = turn[who]["start_ms"]
                at_ms = start_ms if start_ms is not None else turn["times"].get("request_started")
                said.append({"role": role, "at_ms": at_ms, "text": turn[who]["text"]})
    return said


def transcript_text(call: Mapping[str, Any]) -> str:
    """Return the transcript as lines of text: the time, who spoke, and what was said."""
    return "".join(
        f"{_clock(line['at_ms'])} {line['role']}: {' '.join(line['text'].split())}\n" for line in transcript(call)
    )


def _clock(at_ms: float | None) -> str:
    if at_ms is None:
        return "--:--:--"
    minutes, seconds = divmod(max(0, int(at_ms / 1000)), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def write_zip(reading: CallReading, call: Mapping[str, Any], sound: BinaryIO | None, target: BinaryIO) -> None:
    """Write the zip of a call to ``target``: sound, transcript, ``call.json`` and the recording itself. Blocks."""
    began = min(max(reading.lines.started.timetuple()[:6], _FIRST_DATE), _LAST_DATE)
    with zipfile.ZipFile(target, "w", compresslevel=1) as archive:

        def add(name: str, parts: Iterator[bytes], *, packed: bool = True) -> None:
            entry = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=began)
            entry.compress_type = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
            entry.external_attr = 0o600 << 16
            with archive.open(entry, "w", force_zip64=True) as file:
                for part in parts:
                    file.write(part)

        add("transcript.txt", iter([transcript_text(call).encode()]))
        add("transcript.json", iter([orjson.dumps(transcript(call))]))
        add("call.json", iter([orjson.dumps(call)]))
        with reading.lines.path.open("rb") as frames:
            add("frames.ndjson", _read(frames, reading.lines.size))
        if sound is not None:
            add(_SOUND, _read(sound, None), packed=False)


def _read(file: BinaryIO, size: int | None) -> Iterator[bytes]:
    """Yield a file piece by piece, from its begin; at most ``size`` bytes."""
    file.seek(0)
    left = size
    while data := file.read(_COPY_BYTES if left is None else min(left, _COPY_BYTES)):
        yield data
        left = None if left is None else left - len(data)
