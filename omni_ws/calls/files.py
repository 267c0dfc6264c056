"""The files of a call: its stereo WAV, ``call.json``, its transcript as text and as JSON, and the zip with all of them.

The left channel of the WAV has the user's speech at the times at which it was spoken; the right channel has the
server's audio at the times at which the client played it. The WAV is written block by block, so that it takes the
memory of a few seconds, whatever the length of the call.
"""

from __future__ import annotations

import math
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import wav_header
from omni_ws.audio.pcm import (
    DUCKED,
    NO_SAMPLES,
    RAMP_SEC,
    Samples,
    pcm16_from_samples,
)
from omni_ws.calls.lines import CallLines, read_sound
from omni_ws.calls.played_sound import SoundPiece, Streak
from omni_ws.calls.reading import CallReading, CallTurn, CompressedStreams
from omni_ws.core.chunks import (
    BESIDE_MOMENTS,
    MOMENTS,
    PARTS,
    AudioFormat,
)

#: The longest sound of a call: what is behind it is left out.
MAX_SOUND_SEC: Final = 4 * 3600
#: Two pieces with less between them are one stretch of sound.
_JOINED_MS: Final = 1.0
_BLOCK_SEC: Final = 1
_CHANNELS: Final = 2
_SAMPLE_BYTES: Final = 2


def sample_rate(reading: CallReading) -> int:
    """Return the sample rate of a call's WAV: the highest of its sounds, rounded up to 8, 16 or (at most) 24 kHz."""
    highest = max((one.sample_rate if one.is_raw else 24_000 for one in reading.formats), default=8000)
    return next((rate for rate in (8000, 16_000) if highest <= rate), 24_000)


def duration_ms(reading: CallReading, played: Sequence[SoundPiece]) -> float:
    """Return the length of a call's WAV in ms: until the end of the recording, or of the last sound if it is later.

    At most MAX_SOUND_SEC.
    """
    ends = [reading.duration_ms]
    ends += [pieces[-1].end_ms for pieces in (reading.microphone.pieces(), played) if pieces]
    return min(max(ends), MAX_SOUND_SEC * 1000.0)


def write_wav(reading: CallReading, target: BinaryIO) -> None:
    """Write the WAV of a call to ``target``, cut at MAX_SOUND_SEC. Blocks. Raises OSError."""
    rate = sample_rate(reading)
    played = reading.loudspeaker.pieces()
    total = math.ceil(duration_ms(reading, played) * rate / 1000)
    target.write(wav_header(sample_rate=rate, channels=_CHANNELS, data_bytes=total * _CHANNELS * _SAMPLE_BYTES))
    with reading.lines.path.open("rb") as file:
        left = _Track(_stretches(reading.microphone.pieces()), reading, file, rate)
        right = _Track(_stretches(played), reading, file, rate)
        beside = _Track(([one] for one in reading.loudspeaker.beside), reading, file, rate)
        ducking = _Ducking(reading.ducked, rate)
        for start in range(0, total, rate * _BLOCK_SEC):
            count = min(rate * _BLOCK_SEC, total - start)
            block = np.zeros((count, _CHANNELS), dtype=np.float32)
            block[:, 0] = left.read(start, count)
            block[:, 1] = ducking.apply(right.read(start, count), start) + beside.read(start, count)
            target.write(pcm16_from_samples(block.reshape(-1)).tobytes())


def part_of_side(
    reading: CallReading, pieces: Sequence[SoundPiece], start_ms: float, end_ms: float, *, rate: int
) -> bytes:
    """Return the audio of one side of a call from ``start_ms`` to ``end_ms``, as pcm16 at ``rate``, not ducked. Blocks.

    ``pieces`` are those of the side, from the microphone or the loudspeaker of ``reading``.
    """
    if all(audio.is_raw for audio in reading.formats):  # else a decoder goes on from piece to piece
        pieces = [piece for piece in pieces if piece.end_ms > start_ms and piece.start_ms < end_ms]
    first, last = (round(at * rate / 1000) for at in (start_ms, end_ms))
    with reading.lines.path.open("rb") as file:
        samples = _Track(_stretches(pieces), reading, file, rate).read(first, max(0, last - first))
    return pcm16_from_samples(samples).tobytes()


def _stretches(pieces: Iterable[SoundPiece]) -> Iterator[list[SoundPiece]]:
    """Group ``pieces``: yield each run of pieces without a pause between them as one list."""
    stretch: list[SoundPiece] = []
    for piece in pieces:
        if stretch and piece.start_ms - stretch[-1].end_ms > _JOINED_MS:
            yield stretch
            stretch = []
        stretch.append(piece)
    if stretch:
        yield stretch


class _Track:
    """The audio of one side of a call, as samples that are read in order."""

    def __init__(self, stretches: Iterable[list[SoundPiece]], reading: CallReading, file: BinaryIO, rate: int) -> None:
        self._reading = reading
        self._file = file
        self._rate = rate
        self._compressed = CompressedStreams(rate)
        self._blocks = chain.from_iterable(map(self._decoded, stretches))
        #: Samples that were decoded and not read, and where they begin.
        self._held: Samples = NO_SAMPLES
        self._at = 0

    def read(self, start: int, count: int) -> Samples:
        """Return ``count`` samples from the index ``start`` on, with silence where the side has no sound."""
        found = np.zeros(count, dtype=np.float32)
        end = start + count
        while True:
            if not len(self._held):
                following = next(self._blocks, None)
                if following is None:
                    return found
                self._at, self._held = following
                continue
            if self._at >= end:
                return found
            skipped = max(0, start - self._at)  # it begins before what was read already
            self._at += skipped
            self._held = self._held[skipped:]
            taken = self._held[: max(0, end - self._at)]
            found[self._at - start : self._at - start + len(taken)] = taken
            self._at += len(taken)
            self._held = self._held[len(taken) :]

    def _decoded(self, stretch: list[SoundPiece]) -> Iterator[tuple[int, Samples]]:
        """Yield the samples of a stretch in blocks, each with the index in the call of its first sample."""
        at = round(stretch[0].start_ms * self._rate / 1000)
        decoder, audio = None, None
        for piece in stretch:
            source = self._reading.source(piece.ref)
            if not source.audio.is_raw:
                yield from self._unpacked(piece)
                continue
            if audio != source.audio:
                if decoder is not None:
                    rest = decoder.flush()
                    yield at, rest
                    at += len(rest)
                decoder, audio = AudioDecoder(source.audio, sample_rate=self._rate), source.audio
            assert decoder is not None
            samples = decoder.decode(_part(read_sound(self._file, source.offset, source.size), piece, source.audio))
            yield at, samples
            at += len(samples)
        if decoder is not None:
            yield at, decoder.flush()

    def _unpacked(self, piece: SoundPiece) -> Iterator[tuple[int, Samples]]:
        """Decode a piece of compressed sound. Yield the index of its first sample in the call, and its samples.

        Samples that the codec holds back come with the next piece of the same stream.
        """
        source = self._reading.source(piece.ref)
        data = read_sound(self._file, source.offset, source.size)
        samples = self._compressed.decode(source.stream, source.audio, data)
        first = round(piece.skip_ms * self._rate / 1000)
        count = round((piece.end_ms - piece.start_ms) * self._rate / 1000)
        yield round(piece.start_ms * self._rate / 1000), samples[first : first + count]


def _part(data: bytes, piece: SoundPiece, audio: AudioFormat) -> bytes:
    """Return the part of the raw audio ``data`` that ``piece`` takes of it, in whole frames."""
    frame = audio.bytes_per_second // audio.sample_rate
    first = round(piece.skip_ms * audio.sample_rate / 1000) * frame
    count = round((piece.end_ms - piece.start_ms) * audio.sample_rate / 1000) * frame
    return data[first : first + count]


class _Ducking:
    """Lowers the played audio in the intervals in which the client lowered it, with the client's ramps."""

    def __init__(self, intervals: Sequence[tuple[float, float]], rate: int) -> None:
        self._rate = rate
        self._edges = [
            (round(at * rate / 1000), level)
            for begin, end in intervals
            for at, level in ((begin, DUCKED), (end, 1.0))
            if at < math.inf
        ]
        self._places = [place for place, _ in self._edges]

    def apply(self, samples: Samples, start: int) -> Samples:
        if not self._edges:
            return samples
        ramp = int(RAMP_SEC * self._rate)
        index = bisect_left(self._places, start - ramp)
        level = self._edges[index - 1][1] if index else 1.0
        if level == 1.0 and (index == len(self._edges) or self._places[index] >= start + len(samples)):
            return samples
        points, levels = [start - ramp - 1], [level]
        for place, wanted in self._edges[index : bisect_left(self._places, start + len(samples))]:
            points += [place, place + ramp]
            levels += [level, wanted]
            level = wanted
        places = np.arange(start, start + len(samples))
        return samples * np.interp(places, points, levels).astype(np.float32)


# The files of a call: ``call.json``, its transcript as text and as JSON, and the zip with all of it.


#: Names in the zip. None is taken from a recording.
_SOUND: Final = "sound.wav"
_ROOT: Final = "call"
_COPY_BYTES: Final = 1 << 20
#: The dates that a zip file can have.
_FIRST_DATE: Final = (1980, 1, 1, 0, 0, 0)
_LAST_DATE: Final = (2107, 12, 31, 23, 59, 59)


def summary(lines: CallLines) -> dict[str, Any]:
    """Return the entry of a call in a list of calls, from the header of its recording and the size of the file."""
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
    """Return the content of ``call.json``; times are milliseconds since the beginning of the call."""
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
        "user": _user(turn, reading),
        "answer": answer,
        "tools": [*turn.tools.values()],
        "finish_reason": turn.finish_reason,
        **({} if turn.error is None else {"error": turn.error}),
        **({} if turn.usage is None else {"usage": turn.usage}),
        **{name: turn.times[name] for name in BESIDE_MOMENTS if name in turn.times},
        "times": times,
        "spans": _spans(times),
    }


def _user(turn: CallTurn, reading: CallReading) -> dict[str, Any]:
    start_ms, end_ms = reading.spoken_at(turn)
    user: dict[str, Any] = {"text": turn.heard or turn.typed, "start_ms": start_ms, "end_ms": end_ms}
    if turn.heard and turn.typed:
        user["typed"] = turn.typed
    if turn.heard_words:
        begins_ms = reading.input_begins_ms(turn)
        user["words"] = [
            _placed(word, lambda at: reading.microphone.begin_of(begins_ms + at)) for word in turn.heard_words
        ]
    return user


def _answer(turn: CallTurn, streaks: list[Streak]) -> dict[str, Any]:
    """Return the ``answer`` of a turn in ``call.json``.

    The times of its playback are those of its sound in the recording or, without sound, of the session's reports.
    """

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

    Times that the session measured itself take precedence; the others are those at which frames were sent.
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
    """Return the time of the call, in ms, from which the session's own times are counted.

    It is derived from the answer's first sound, of which both the session and the recording have the time. Without
    sound, it is the end of the speech, or else the time at which the request was opened.
    """
    measured = turn.times.get("first_audio_sent")
    if isinstance(measured, int | float) and turn.first_sound_at is not None:
        return turn.first_sound_at - measured
    return speech[1] if speech[1] is not None else turn.opened_at


def _spans(times: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the spans of an answer: the user's speech, each step from there to the first sound, and the playback.

    A step begins at the latest moment before it: a step that was ready by then has no span.
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
    """Return the transcript: for each text its role, its time in ms (``at_ms``) and the text, in the order of turns."""
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
    """Return the transcript as lines such as ``00:01:05 user: Hello.``"""
    return "".join(
        f"{_clock(line['at_ms'])} {line['role']}: {' '.join(line['text'].split())}\n" for line in transcript(call)
    )


def _clock(at_ms: float | None) -> str:
    if at_ms is None:
        return "--:--:--"
    minutes, seconds = divmod(max(0, int(at_ms / 1000)), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def write_zip(reading: CallReading, call: Mapping[str, Any], sound: BinaryIO | None, target: BinaryIO) -> None:
    """Write the zip of a call to ``target``: WAV, transcripts, ``call.json`` and the recording. Blocks.

    ``sound`` is the WAV; None leaves it out.
    """
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
    """Yield a file piece by piece, from its beginning; at most ``size`` bytes."""
    file.seek(0)
    left = size
    while data := file.read(_COPY_BYTES if left is None else min(left, _COPY_BYTES)):
        yield data
        left = None if left is None else left - len(data)
