"""CallReading: reads a recording once, and finds when each sound was heard, the turns, and the list of frames.

Of the sound, only the places in the file are kept, so that an hour of a call takes a few megabytes. The messages of
each protocol have reading methods of their own; the recorder's own lines are the same for all protocols. A Story
collects the turns, with their texts and times, from the session's frames.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import parse_audio_format
from omni_ws.audio.pcm import NO_SAMPLES, Samples
from omni_ws.calls.lines import CallLines, Line, parsed, parsed_text, raw_lines, sound_in
from omni_ws.calls.played_sound import Microphone, PlayedSound
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    Modality,
    StartTrigger,
    checked_channels,
    checked_sample_rate,
)
from omni_ws.core.reorder import MAX_SEQUENCE_ID
from omni_ws.errors import InvalidValue, OmniError
from omni_ws.wire.frames import FLAG_END, FLAG_TIMESTAMP, HEADER, KIND_INPUT, KIND_OUTPUT, MODALITY_BYTES
from omni_ws.wire.recording import (
    ClosedLine,
    CutLine,
    EndedLine,
    OpenedLine,
    PlayedLine,
    ReceivedLine,
    RecordedLine,
    SentLine,
    SoundLine,
    StoredLine,
    ToldLine,
    decode_event,
)

#: Characters of the text of one answer, or of one turn of the user, that a story keeps, and turns that it keeps.
MAX_TEXT: Final = 1 << 18
MAX_TURNS: Final = 10_000
#: Words of one turn that it keeps.
MAX_WORDS: Final = 1 << 14


class CallTurn:
    """One request with its answer. Times are milliseconds of the call; None if they are not known."""

    def __init__(self, request_id: str, at: float) -> None:
        self.request_id = request_id
        self.turn_id: str | None = None
        #: When a frame first named the request, and when the work on the request started.
        self.opened_at = at
        self.started_at: float | None = None
        #: The StartTrigger of the request, and the number of the chunk that started it, if one did.
        self.trigger: str | None = None
        self.asked_by: int | None = None
        #: Where the speech began and stopped, in ms of the user's sound (all that was received, in a row); and when the
        #: session reported the stop.
        self.speech: list[float | None] = [None, None]
        self.stopped_at: float | None = None
        self.typed = ""
        self.heard = ""
        self.heard_words: list[dict[str, Any]] = []
        self.said = ""
        self.said_words: list[dict[str, Any]] = []
        self.tools: dict[int, dict[str, Any]] = {}
        self.first_text_at: float | None = None
        self.first_sound_at: float | None = None
        self.last_sound_at: float | None = None
        self.ended_at: float | None = None
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self.times: dict[str, Any] = {}
        #: Times, and how much of the answer was played at each, in ms, as far as the session knew.
        self.played: list[tuple[float, float]] = []

    def name(self, turn_id: str, speech: Sequence[float | None], stopped_at: float | None) -> None:
        """Set the turn's id in the session, and the times of its speech that arrived before its request was known.

        ``speech``: see ``self.speech``.
        """
        self.turn_id = turn_id
        self.speech = [was if told is None else told for was, told in zip(self.speech, speech, strict=True)]
        self.stopped_at = self.stopped_at if stopped_at is None else stopped_at

    def start(self, at: float, frame: Mapping[str, Any], *, typed: str) -> None:
        self.started_at = at
        self.typed = typed
        number, trigger = frame.get("sequence_id"), frame.get("trigger")
        self.trigger = trigger if isinstance(trigger, str) else None
        self.asked_by = number if isinstance(number, int) else None

    def hear(self, at: float, index: int, audio_ms: float) -> None:
        """Set where speech began (``index`` 0; only the first call counts) or stopped (``index`` 1).

        ``audio_ms`` is in ms of the user's sound.
        """
        if index and self.speech[1] == audio_ms:
            return  # a resume sends frames again
        if index or self.speech[0] is None:
            self.speech[index] = audio_ms
        self.stopped_at = at if index else self.stopped_at

    def fail(self, error: dict[str, Any]) -> None:
        self.error = error

    def tell(self, at: float, frame: Mapping[str, Any]) -> None:
        """Add an ``output_chunk`` frame of the answer."""
        words = frame.get("words") if isinstance(frame.get("words"), list) else []
        match frame.get("modality"):
            case "text":
                self.said = _joined(self.said, frame.get("text"))
                self.first_text_at = at if self.first_text_at is None else self.first_text_at
            case "audio":
                self.first_sound_at = at if self.first_sound_at is None else self.first_sound_at
                self.last_sound_at = at
                known = self.said_words[-1]["start_ms"] if self.said_words else -1
                # After an answer was held, words are told again.
                told = [one for one in _timed_words(words) if one["start_ms"] > known]
                self.said_words += told[: _room(self.said_words)]
            case "transcript" if not frame.get("interim"):
                self.heard = _joined(self.heard, frame.get("text"))
                self.heard_words += _timed_words(words)[: _room(self.heard_words)]
            case "tool_call":
                self._called(frame)
        if frame.get("final"):
            self.ended_at = at
            self.finish_reason = frame.get("finish_reason")
            self.usage = frame.get("usage")
            if isinstance(times := frame.get("times"), dict):
                self.times = times

    def _called(self, frame: Mapping[str, Any]) -> None:
        index = frame.get("index")
        if not isinstance(index, int) or (index not in self.tools and len(self.tools) >= MAX_TURNS):
            return
        call = self.tools.setdefault(index, {"id": None, "name": "", "arguments": ""})
        call["id"] = frame.get("id") or call["id"]
        call["name"] = frame.get("name") or call["name"]
        call["arguments"] = _joined(call["arguments"], frame.get("arguments"))

    def time_of(self, position_ms: float) -> float | None:
        """Return when the sound at this position of the answer was played, as far as the session knew, or None."""
        index = bisect_right(self.played, position_ms, key=lambda one: one[1])
        if index == len(self.played):
            return None
        at, played_ms = self.played[index]
        return at - (played_ms - position_ms)


class Story:
    """Collects the turns of a call (``turns``) from frames of the native WebSocket, which it is given in order."""

    def __init__(self) -> None:
        self.turns: dict[str, CallTurn] = {}
        #: The request whose sound was sent last.
        self.sounding: str | None = None
        self.errors: list[dict[str, Any]] = []
        #: The number of the last output, and of that before each of ``errors``; and errors that a resume sends again.
        self.last_output = -1
        self._outputs_before: list[int] = []
        self._repeated: list[dict[str, Any]] = []
        #: Turns that were left out, beyond MAX_TURNS.
        self.left_out = 0
        #: The length of the sound before speech that is part of its turn (``prefix_padding_ms``).
        self.padding_ms = 300.0
        #: The delay with which sound is heard after the session counts it as played.
        self.later_ms = 0.0
        self._typed = ""
        #: By turn, before its request is known: where speech began and stopped, and when the stop was reported.
        self._speech: dict[str, list[float | None]] = {}
        self._stopped: dict[str, float] = {}
        self._kinds: Mapping[str, Callable[[float, Mapping[str, Any]], None]] = {
            "response_started": self._started,
            "output_chunk": self._output,
            "speech_started": partial(self._spoken, 0),
            "speech_confirmed": partial(self._spoken, 0),
            "speech_stopped": partial(self._spoken, 1),
            "error": self._failed,
        }

    def type(self, text: str) -> None:
        """Add text that the user typed; it belongs to the next request."""
        self._typed = _joined(self._typed, text)

    def type_item(self, item: Mapping[str, Any]) -> None:
        """Add the text of an item of the Realtime API. Messages before one of the assistant are history."""
        if item.get("role") == "assistant":
            self._typed = ""
        elif text := typed_in(item):
            self.type(f"\n{text}" if self._typed else text)

    def tell(self, at: float, frame: Mapping[str, Any]) -> None:
        """Read a frame of the session, sent at ``at``. Frames not about turns, and invalid ones, are ignored."""
        take = self._kinds.get(str(frame.get("type")))
        if take is not None:
            take(at, frame)

    def resume(self, last_output: int) -> None:
        """Record that a client has resumed, which is sent all frames after the output ``last_output`` again."""
        before = zip(self.errors, self._outputs_before, strict=True)
        self._repeated = [error for error, number in before if number >= last_output]

    def play(self, request_id: str, at: float, played_ms: float) -> None:
        """Record that ``played_ms`` of an answer were played at ``at``, if that is more than before."""
        if (turn := self.turns.get(request_id)) is not None and (not turn.played or played_ms > turn.played[-1][1]):
            turn.played.append((at + self.later_ms, played_ms))

    def _turn(self, at: float, request_id: object) -> CallTurn | None:
        if not isinstance(request_id, str):
            return None
        if request_id not in self.turns:
            if len(self.turns) >= MAX_TURNS:
                self.left_out += 1
                return None
            self.turns[request_id] = CallTurn(request_id, at)
        return self.turns[request_id]

    def _named(self, turn: CallTurn, frame: Mapping[str, Any]) -> None:
        """Give ``turn`` the turn id that a frame has, and the times of speech that are known for this id."""
        turn_id = frame.get("turn_id")
        if isinstance(turn_id, str) and turn.turn_id is None:
            turn.name(turn_id, self._speech.pop(turn_id, (None, None)), self._stopped.pop(turn_id, None))

    def _started(self, at: float, frame: Mapping[str, Any]) -> None:
        turn = self._turn(at, frame.get("request_id"))
        if turn is not None and turn.started_at is None:  # a resume sends frames again
            turn.start(at, frame, typed=self._typed)
            self._typed = ""
            self._named(turn, frame)

    def _spoken(self, index: int, at: float, frame: Mapping[str, Any]) -> None:
        """Read a frame that reports where speech began (``index`` 0) or stopped (``index`` 1)."""
        audio_ms, turn_id = frame.get("audio_ms"), frame.get("turn_id")
        if not isinstance(audio_ms, int | float):
            return
        turn = self._turn(at, frame.get("request_id"))
        if turn is not None:
            self._named(turn, frame)
            turn.hear(at, index, float(audio_ms))
        elif isinstance(turn_id, str) and len(self._speech) < MAX_TURNS:
            self._speech.setdefault(turn_id, [None, None])[index] = float(audio_ms)
            if index:
                self._stopped[turn_id] = at

    def _failed(self, at: float, frame: Mapping[str, Any]) -> None:
        error = frame.get("error")
        if not isinstance(error, dict):
            return
        if (turn := self.turns.get(str(error.get("request_id")))) is not None:
            turn.fail(error)
        elif self._repeated and {**self._repeated[0], "at_ms": at} == {"at_ms": at, **error}:
            del self._repeated[0]
        elif len(self.errors) < MAX_TURNS:
            self.errors.append({"at_ms": at, **error})
            self._outputs_before.append(self.last_output)

    def _output(self, at: float, frame: Mapping[str, Any]) -> None:
        turn = self._turn(at, frame.get("request_id"))
        if turn is None:
            return
        self._named(turn, frame)
        if frame.get("modality") == "audio":
            self.sounding = turn.request_id
        turn.tell(at, frame)


def _joined(text: str, more: object) -> str:
    return text + more[: MAX_TEXT - len(text)] if isinstance(more, str) else text


def typed_in(item: Mapping[str, Any]) -> str:
    """Return the text that an item of the Realtime API has from the user; "" if it has none."""
    content = item.get("content")
    if item.get("role") != "user" or not isinstance(content, list):
        return ""
    parts = (part for part in content if isinstance(part, dict) and part.get("type") == "input_text")
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _room(words: list[dict[str, Any]]) -> int:
    return max(0, MAX_WORDS - len(words))


def _timed_words(words: Any) -> list[dict[str, Any]]:
    """Return the words that have times, with only their text and times."""
    return [
        {"text": str(one.get("text", "")), "start_ms": one["start_ms"], "end_ms": one["end_ms"]}
        for one in words
        if isinstance(one, dict)
        and isinstance(one.get("start_ms"), int | float)
        and isinstance(one.get("end_ms"), int | float)
    ]


# CallReading, with its decoders and its list of frames


#: Each open decoder occupies a thread. Answers come one after the other, so that few streams go on simultaneously.
MOST_OPEN: Final = 8


class CompressedStreams:
    """Decodes several named streams of compressed audio piece by piece, to mono samples at ``sample_rate`` (Hz).

    At most MOST_OPEN streams are open; beyond that, the one that was decoded longest ago is given up.
    """

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        #: Decoders by the name of the stream; the one used last is at the end.
        self._open: OrderedDict[str, AudioDecoder] = OrderedDict()
        self._ended: set[str] = set()

    def decode(self, stream: str, audio: AudioFormat, data: bytes) -> Samples:
        """Return the samples that ``data`` completes: none for a damaged stream, or for one that was given up."""
        if stream in self._ended:
            return NO_SAMPLES
        if stream not in self._open:
            self._open[stream] = AudioDecoder(audio, sample_rate=self._sample_rate)
            if len(self._open) > MOST_OPEN:
                self._end(next(iter(self._open)))
        self._open.move_to_end(stream)
        try:
            return self._open[stream].decode(data)
        except OmniError:
            self._end(stream)
            return NO_SAMPLES

    def close(self) -> None:
        """Release the threads of all decoders."""
        for stream in [*self._open]:
            self._end(stream)

    def _end(self, stream: str) -> None:
        self._ended.add(stream)
        self._open.pop(stream).close()


#: Frames of a list, and the bytes of one and of all together.
MAX_FRAMES: Final = 20_000
MAX_FRAME_BYTES: Final = 4096
MAX_BYTES: Final = 8 * 1024 * 1024
#: The fields that hold sound or pictures in base64, by the types of their frames; a "delta" is text in most.
_PAYLOADS: Final = ("payload", "audio", "delta")
#: What is longer is no sound that belongs into one frame of a list, but may be text.
_SHORT: Final = 64


class FrameList:
    """The frames of a call in order; consecutive frames with sound of the same side are one entry with a count."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        #: Frames beyond the limits.
        self.left_out = 0
        self._bytes = 0

    def add(self, event: RecordedLine, fields: dict[str, Any]) -> None:
        """Add a line of the recording; ``fields`` is its message if that is a JSON object, otherwise empty."""
        side, sound = _side(event, fields), _sound_bytes(event, fields)
        last = self.entries[-1] if self.entries else None
        if sound is not None:
            if last is not None and last["side"] == side and "count" in last:
                last["count"] += 1
                last["bytes"] += sound
                last["until_ms"] = event.at
                return
            self._keep(
                {"at_ms": event.at, "until_ms": event.at, "side": side, "event": "sound", "count": 1, "bytes": sound}
            )
            return
        entry: dict[str, Any] = {"at_ms": event.at, "side": side, "event": _tag(event)}
        if fields:
            entry["frame"] = _shown(fields)
        elif isinstance(event, ReceivedLine | SentLine):
            entry["bytes"] = len(event.binary or event.bad_text or (event.text or "").encode())
        else:
            entry |= {
                name: value
                for name, value in msgspec.to_builtins(event, builtin_types=(bytes,)).items()
                if name not in ("at", "event", "text")
            }
        self._keep(entry)

    def _keep(self, entry: dict[str, Any]) -> None:
        size = len(orjson.dumps(entry))
        if size > MAX_FRAME_BYTES:
            frame = entry.get("frame", {})
            kind = frame.get("type") or frame.get("event")
            entry = {name: entry[name] for name in ("at_ms", "side", "event")} | {"bytes": size}
            entry["frame"] = {"type": kind[:_SHORT] if isinstance(kind, str) else None}
            size = len(orjson.dumps(entry))
        if len(self.entries) >= MAX_FRAMES or self._bytes + size > MAX_BYTES:
            self.left_out += 1
            return
        self._bytes += size
        self.entries.append(entry)


def _side(event: RecordedLine, fields: Mapping[str, Any]) -> str:
    if isinstance(event, ReceivedLine) or (isinstance(event, SoundLine) and event.by == "user"):
        return "client"
    if isinstance(event, ToldLine) and fields.get("type") == "input_chunk":
        return "client"
    return "server" if isinstance(event, SentLine | SoundLine | ToldLine) else "recorder"


def _tag(event: RecordedLine) -> str:
    return str(type(event).__struct_config__.tag)


def _sound_bytes(event: RecordedLine, fields: dict[str, Any]) -> int | None:
    """Return the number of bytes of sound in a line that holds only sound; None for other lines."""
    if isinstance(event, SoundLine):
        return len(event.audio)
    if not isinstance(event, ReceivedLine | SentLine):
        return None
    if event.binary is not None:
        return len(event.binary)
    kind = fields.get("type") or fields.get("event")
    if kind == "media" and isinstance(fields.get("media"), dict):
        return len(str(fields["media"].get("payload", ""))) * 3 // 4
    is_chunk = kind in ("input_chunk", "output_chunk") and fields.get("modality") == "audio" and not fields.get("words")
    if is_chunk or (
        isinstance(kind, str)
        and ("audio.append" in kind or "audio_buffer.append" in kind or kind.endswith("audio.delta"))
    ):
        return sum(len(value) * 3 // 4 for name in _PAYLOADS if isinstance(value := fields.get(name), str))
    return None


def _shown(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a frame with the base64 of sound and pictures replaced by their size: ``{"bytes": 960}``."""
    shown = dict(fields)
    for name in ("payload", "audio"):
        if isinstance(value := shown.get(name), str) and len(value) > _SHORT:
            shown[name] = {"bytes": len(value) * 3 // 4}
    kind = shown.get("type")
    if kind == "input_audio_buffer.backchannel" and isinstance(shown.get("delta"), str):
        shown["delta"] = {"bytes": len(shown["delta"]) * 3 // 4}
    return shown


#: What starts an answer to nothing that the user has said.
_UNASKED: Final = (StartTrigger.GREETING, StartTrigger.FILLER, StartTrigger.IDLE, StartTrigger.TELLING)
#: The bytes of a binary header that say that it is audio, and text.
_AUDIO: Final = MODALITY_BYTES[Modality.AUDIO]
_TEXT: Final = MODALITY_BYTES[Modality.TEXT]
_TELEPHONE: Final = AudioFormat(AudioEncoding.PCMU, 8000)
_REALTIME: Final = {
    "audio/pcm": (AudioEncoding.PCM16, 24_000),
    "audio/pcmu": (AudioEncoding.PCMU, 8000),
    "audio/pcma": (AudioEncoding.PCMA, 8000),
}
#: The answer that the endless output of a Live session is.
_VOICE: Final = "voice"
#: More than a frame of the line of a Live session.
_LIVE_FRAME_MS: Final = 150.0
#: The rate at which the length of compressed sound is measured.
_MEASURED_RATE: Final = 24_000


class Source(NamedTuple):
    """A piece of sound in the file: the place of its line in bytes, its format, and its stream.

    ``stream`` is the name of the stream of compressed sound to which the piece belongs; empty for raw sound.
    """

    offset: int
    size: int
    audio: AudioFormat
    stream: str


class InputEnd(NamedTuple):
    """The end of a request's input: its time, the last chunk's number, and the length of all sound so far in ms."""

    at: float
    number: int
    audio_ms: float


class CallReading:
    """The content of a recorded call.

    The constructor reads the file in one pass, which blocks and takes time linear in its size. Raises OSError.
    """

    def __init__(self, lines: CallLines) -> None:
        self.lines = lines
        self.header = lines.header
        self.microphone = Microphone()
        self.loudspeaker = PlayedSound()
        self.story = Story()
        self.frames = FrameList()
        #: The intervals in which the client lowered its playback.
        self.ducked: list[tuple[float, float]] = []
        #: Whether the recording is complete; and why it was cut, if it was.
        self.ended = False
        self.cut_reason: str | None = None
        #: Whether the client may read the recording (``store`` of the Live API).
        self.stored = False
        self.duration_ms = 0.0
        #: Of each piece of sound: the place of its line, and the numbers of its format and of its stream.
        self._offsets, self._sizes, self._formats, self._streams = array("q"), array("l"), array("l"), array("l")
        self._known_formats: dict[AudioFormat, int] = {}
        self._known_streams: dict[str, int] = {"": 0}
        self._compressed = CompressedStreams(_MEASURED_RATE)
        self._input = self._output = _TELEPHONE if self.header.kind == "telephony" else AudioFormat(sample_rate=24_000)
        self._interrupts = True
        self._ducks_from: float | None = None
        #: When a Live session started: position 0 of its continuous audio.
        self._began_at = 0.0
        self._answering: str | None = None
        #: The number of the last output of a native session; a resume sends some again.
        self._highest = -1
        #: The answer of each item of the Realtime API; and, for each mark by its name, its answer and position in ms.
        self._items: dict[str, str] = {}
        self._marks: dict[str, tuple[str, float]] = {}
        #: The ends of inputs, where the client says them.
        self.input_ends: list[InputEnd] = []
        #: When turn detection was turned on or off.
        self._detections: list[tuple[float, bool]] = []
        #: Of typed text in binary frames, one of which may end within a character.
        self._typed = getincrementaldecoder("utf-8")("replace")
        #: The numbers of chunks with typed text: a client may send one again.
        self._typed_numbers: set[int] = set()
        self._last_chunk = -1
        hear, say = self._by_kind()
        for line in lines:
            self._take(line, hear, say)
        self._duck(math.inf, False)
        self._compressed.close()
        #: The formats of all sound, and the streams of compressed sound, by their numbers.
        self.formats, self._stream_names = tuple(self._known_formats), tuple(self._known_streams)

    def source(self, ref: int) -> Source:
        """Return the piece of sound with the number ``ref``, as counted from 0 in the recording."""
        audio, stream = self.formats[self._formats[ref]], self._stream_names[self._streams[ref]]
        return Source(self._offsets[ref], self._sizes[ref], audio, stream)

    def input_of(self, turn: CallTurn) -> tuple[float, float] | None:
        """Return where the input of a turn begins and ends, in ms of the user's sound, if no speech was reported.

        None for a turn that the user has not asked, and while turns were detected: sound without speech was dropped.
        """
        if (index := self._end_of(turn)) is None:
            return None
        begin = self.input_ends[index - 1].audio_ms if index else 0.0
        is_known = index < len(self.input_ends)
        return begin, self.input_ends[index].audio_ms if is_known else self.microphone.total_ms

    def _end_of(self, turn: CallTurn) -> int | None:
        """Return the place among ``input_ends`` of that of a turn, or of the next one; see ``input_of``."""
        ends = self.input_ends
        if self.detects_turns(turn.opened_at):
            return None
        if turn.asked_by is not None and self.header.kind == "websocket":  # the numbers are the client's own
            return bisect_left(ends, turn.asked_by, key=lambda one: one.number)
        if turn.trigger in _UNASKED:
            return None
        return max(0, bisect_right(ends, turn.opened_at, key=lambda one: one.at) - 1)

    def spoken_at(self, turn: CallTurn) -> tuple[float | None, float | None]:
        """Return when the user began and stopped to say a turn, in ms of the call; None as far as it is not known."""
        begin, end = turn.speech
        time_of = self.microphone.time_of
        if begin is not None or end is not None:
            return None if begin is None else time_of(begin), None if end is None else time_of(end)
        index, found = self._end_of(turn), self.input_of(turn)
        if self.header.kind != "websocket" and not turn.heard:
            return None, None  # it may have been typed
        if index is None or index >= len(self.input_ends) or found is None or found[1] <= found[0]:
            return None, None
        return self.microphone.begin_of(found[0]), time_of(found[1])

    def input_begins_ms(self, turn: CallTurn) -> float:
        """Return where the time line of a turn's input begins, in ms of the user's sound."""
        if turn.speech[0] is not None:
            return max(0.0, turn.speech[0] - self.story.padding_ms)
        found = self.input_of(turn)
        return 0.0 if found is None else found[0]

    # lines

    def _by_kind(self) -> tuple[Callable[[Line, dict[str, Any]], None], Callable[[Line, dict[str, Any]], None]]:
        """Return the two methods that read the client's messages, and the server's, for this kind of recording."""
        match self.header.kind:
            case "websocket":
                return self._native_in, self._native_out
            case "telephony":
                return self._gateway_in, self._gateway_out
            case "webrtc":
                return self._input_in, _nothing
            case "wyoming":
                return _nothing, _nothing
        return self._realtime_in, self._realtime_out

    def _take(
        self, line: Line, hear: Callable[[Line, dict[str, Any]], None], say: Callable[[Line, dict[str, Any]], None]
    ) -> None:
        event = line.event
        self.duration_ms = max(self.duration_ms, event.at)
        fields: dict[str, Any] = {}
        match event:
            case ReceivedLine():
                fields = parsed(event)
                hear(line, fields)
            case SentLine():
                fields = parsed(event)
                say(line, fields)
            case SoundLine():
                self._sound(line, event)
            case ToldLine():
                fields = parsed_text(event.text)
                if fields.get("type") == "input_chunk" and isinstance(text := fields.get("text"), str):
                    self.story.type(text)
                self.story.tell(event.at, fields)
            case PlayedLine():
                self.story.play(event.request_id, event.at, event.played_ms)
            case OpenedLine(last_output=int(number)):
                self.story.resume(number)
            case StoredLine():
                self.stored = True
            case ClosedLine():
                self.loudspeaker.silence(event.at)
            case CutLine(reason=reason):
                self.cut_reason = reason
            case EndedLine():
                self.ended = True
        self.frames.add(event, fields)

    def _ref(self, line: Line, audio: AudioFormat, stream: str = "") -> int:
        self._offsets.append(line.offset)
        self._sizes.append(line.size)
        self._formats.append(self._known_formats.setdefault(audio, len(self._known_formats)))
        self._streams.append(self._known_streams.setdefault(stream, len(self._known_streams)))
        return len(self._offsets) - 1

    def _lasts_ms(self, audio: AudioFormat, data: bytes, stream: str) -> float:
        """Return the duration of a piece of sound, in ms. Compressed sound is decoded to measure it."""
        if audio.is_raw:
            return audio.duration_ms(len(data))
        return len(self._compressed.decode(stream, audio, data)) * 1000 / _MEASURED_RATE

    def _hear(self, line: Line, audio: AudioFormat, data: bytes, number: int | None = None) -> None:
        stream = "" if audio.is_raw else "user"
        lasts_ms = self._lasts_ms(audio, data, stream)
        if lasts_ms:
            self.microphone.add(line.event.at, lasts_ms, self._ref(line, audio, stream), number)

    def _say(self, line: Line, answer_id: str, audio: AudioFormat, data: bytes, start_ms: float | None = None) -> None:
        stream = "" if audio.is_raw else answer_id
        lasts_ms = self._lasts_ms(audio, data, stream)
        if lasts_ms:
            self.loudspeaker.send(answer_id, line.event.at, lasts_ms, self._ref(line, audio, stream), start_ms)

    def _duck(self, at: float, lowered: bool) -> None:
        if lowered and self._ducks_from is None:
            self._ducks_from = at
        elif not lowered and self._ducks_from is not None:
            self.ducked.append((self._ducks_from, at))
            self._ducks_from = None

    def _sound(self, line: Line, event: SoundLine) -> None:
        audio = _audio_format(event.format, event.sample_rate)
        if audio is None:
            return
        if event.by == "user":
            self._hear(line, audio, event.audio)
        else:
            self._say(line, event.request_id or _VOICE, audio, event.audio)

    # the native WebSocket

    def _native_in(self, line: Line, fields: dict[str, Any]) -> None:
        event = line.event
        assert isinstance(event, ReceivedLine)
        if event.binary is not None and len(event.binary) >= HEADER.size:
            _, kind, modality, flags, number, _ = HEADER.unpack_from(event.binary)
            self._last_chunk = max(self._last_chunk, number)
            if kind == KIND_INPUT and modality == _AUDIO:
                self._hear(line, self._input, event.binary[HEADER.size :], number)
            elif kind == KIND_INPUT and modality == _TEXT and self._is_typed(number):
                self.story.type(self._typed.decode(event.binary[HEADER.size :]))
            if flags & FLAG_END:
                self._input_over(event.at)
            return
        match fields.get("type"):
            case "input_chunk":
                self._native_chunk(line, fields)
                if fields.get("end_of_input") is True:
                    self._input_over(event.at)
            case "finish":
                self._input_over(event.at)
            case "cancel":
                request_id = fields.get("request_id")
                if isinstance(request_id, str):
                    self.loudspeaker.cut(request_id, event.at)
                else:
                    self.loudspeaker.silence(event.at)
            case "output_ack" if isinstance(played := fields.get("played_ms"), int | float):
                request_id = fields.get("request_id")
                self.loudspeaker.report(request_id if isinstance(request_id, str) else None, event.at, float(played))

    def _input_over(self, at: float) -> None:
        if len(self.input_ends) < MAX_TURNS:
            self.input_ends.append(InputEnd(at, self._last_chunk, self.microphone.total_ms))

    def _native_chunk(self, line: Line, fields: dict[str, Any]) -> None:
        event, number = line.event, fields.get("sequence_id")
        assert isinstance(event, ReceivedLine)
        if isinstance(number, int):
            self._last_chunk = max(self._last_chunk, number)
        if fields.get("tool_call_id") is not None:
            return  # the result of a tool, which the user has not typed
        if isinstance(text := fields.get("text"), str) and fields.get("modality", "text") == "text":
            if self._is_typed(number):
                self.story.type(text)
        elif fields.get("modality") == "audio" and isinstance(number, int) and 0 <= number <= MAX_SEQUENCE_ID:
            audio = self._input
            if isinstance(name := fields.get("format"), str):
                try:
                    audio = parse_audio_format(name, self._input)
                except OmniError:
                    return
            self._hear(line, audio, sound_in(event, fields), number)

    def _is_typed(self, number: object) -> bool:
        """Return whether the chunk of this number, which has text, is new; True for what is no number."""
        if not isinstance(number, int):
            return True
        is_new = number not in self._typed_numbers
        self._typed_numbers.add(number)
        return is_new

    def _native_out(self, line: Line, fields: dict[str, Any]) -> None:
        event, at = line.event, line.event.at
        assert isinstance(event, SentLine)
        if event.binary is not None and len(event.binary) >= HEADER.size:
            _, kind, _, flags, number, start_ms = HEADER.unpack_from(event.binary)
            if kind == KIND_OUTPUT and number > self._highest and self._answering is not None:
                self._highest = self.story.last_output = number
                start = float(start_ms) if flags & FLAG_TIMESTAMP else None
                self._say(line, self._answering, self._output, event.binary[HEADER.size :], start)
                self.story.tell(at, {"type": "output_chunk", "modality": "audio", "request_id": self._answering})
            return
        match fields.get("type"):
            case "session_created" | "session_updated":
                self._configured(at, fields)
            case "response_started":
                self._answering = str(fields.get("request_id"))
            case "output_chunk":
                number = fields.get("sequence_id")
                if not isinstance(number, int) or number <= self._highest:
                    return
                self._highest = self.story.last_output = number
                self._native_output(line, fields)
            case "backchannel":
                audio = _native_format(fields, self._output)
                data = sound_in(event, fields)
                if audio.is_raw and data:
                    self.loudspeaker.send_beside(at, audio.duration_ms(len(data)), self._ref(line, audio))
            case "speech_started" | "speech_confirmed" | "speech_dismissed" as kind:
                self._native_speech(at, kind, certain=fields.get("certain") is not False)
        self.story.tell(at, fields)

    def _detect(self, at: float, is_on: bool) -> None:
        if self.detects_turns(at) == is_on:
            return
        if not is_on:
            self._input_over(at)  # what an open microphone has sent is of no later request
        self._detections.append((at, is_on))

    def detects_turns(self, at: float) -> bool:
        """Return whether the session detected turns at this time, so that sound without speech was dropped."""
        return next((is_on for since, is_on in reversed(self._detections) if since <= at), False)

    def _native_speech(self, at: float, kind: str, *, certain: bool) -> None:
        self._detect(at, True)
        self._duck(at, not certain)
        if certain and kind != "speech_dismissed" and self._interrupts:
            self.loudspeaker.silence(at)

    def _native_output(self, line: Line, fields: dict[str, Any]) -> None:
        event, request_id = line.event, str(fields.get("request_id"))
        assert isinstance(event, SentLine)
        if fields.get("modality") == "audio" and (data := sound_in(event, fields)):
            start_ms = fields.get("start_ms")
            audio = _native_format(fields, self._output)
            self._say(line, request_id, audio, data, float(start_ms) if isinstance(start_ms, int | float) else None)
        if fields.get("final") and fields.get("finish_reason") == "cancelled":
            self.loudspeaker.cut(request_id, event.at)

    def _configured(self, at: float, fields: Mapping[str, Any]) -> None:
        self._input = _native_format(fields.get("input_audio"), self._input)
        self._output = _native_format(fields.get("output_audio"), self._output)
        if "turn_detection" in fields:
            self._detect(at, isinstance(fields["turn_detection"], dict))
        if isinstance(turns := fields.get("turn_detection"), dict):
            self._interrupts = turns.get("interrupt_response") is not False
            if isinstance(padding := turns.get("prefix_padding_ms"), int | float):
                self.story.padding_ms = float(padding)

    # the Realtime and the Live API over WebSocket

    def _realtime_in(self, line: Line, fields: dict[str, Any]) -> None:
        event = line.event
        assert isinstance(event, ReceivedLine)
        self._input_in(line, fields)
        match fields.get("type"):
            case "input_audio_buffer.append" | "session.input_audio.append" | "session.input_audio_buffer.append":
                self._hear(line, self._input, sound_in(event, fields))
            case "conversation.item.truncate" if isinstance(end_ms := fields.get("audio_end_ms"), int | float):
                answer_id = self._items.get(str(fields.get("item_id")))
                if answer_id is not None:
                    self.loudspeaker.cut(answer_id, event.at, played_ms=float(end_ms))
            case "output_audio_buffer.clear":
                self.loudspeaker.silence(event.at)

    def _input_in(self, line: Line, fields: dict[str, Any]) -> None:
        match fields.get("type"):
            case "conversation.item.create":
                self.story.type_item(_object(fields, "item"))
            case "input_audio_buffer.commit" | "input_audio_buffer.clear":
                self._input_over(line.event.at)

    def _realtime_out(self, line: Line, fields: dict[str, Any]) -> None:
        event, at = line.event, line.event.at
        assert isinstance(event, SentLine)
        match fields.get("type"):
            case "session.created" | "session.updated" | "session.started" as kind:
                self._began_at = at if kind == "session.started" else self._began_at
                self._configured_realtime(at, fields.get("session"))
            case "response.output_audio.delta":
                answer_id = _request_of(fields.get("response_id"))
                self._items.setdefault(str(fields.get("item_id")), answer_id)
                self._say(line, answer_id, self._output, sound_in(event, fields))
            case "session.output_audio.delta":
                if not self.loudspeaker.streaks and at - self._began_at <= _LIVE_FRAME_MS:
                    self.story.later_ms = at - self._began_at  # silence is sent once it is over
                self._say(line, _VOICE, self._output, sound_in(event, fields))
            case "input_audio_buffer.backchannel":
                data = sound_in(event, fields)
                self.loudspeaker.send_beside(at, self._output.duration_ms(len(data)), self._ref(line, self._output))
            case "input_audio_buffer.speech_started" if self._interrupts:
                self.loudspeaker.silence(at)
            case "response.done":
                response = fields.get("response")
                if isinstance(response, dict) and response.get("status") == "cancelled":
                    self.loudspeaker.cut(_request_of(response.get("id")), at)

    def _configured_realtime(self, at: float, session: Any) -> None:
        audio = session.get("audio") if isinstance(session, dict) else None
        if not isinstance(audio, dict):
            return
        both = audio.get("format")  # of the Live API
        given = _object(audio, "input")
        self._input = _realtime_format(both or given.get("format"), self._input)
        self._output = _realtime_format(both or _object(audio, "output").get("format"), self._output)
        if "turn_detection" in given:
            self._detect(at, isinstance(given["turn_detection"], dict))
        if isinstance(turns := given.get("turn_detection"), dict):
            self._interrupts = turns.get("interrupt_response") is not False

    # gateways of the telephone

    def _gateway_in(self, line: Line, fields: dict[str, Any]) -> None:
        event = line.event
        assert isinstance(event, ReceivedLine)
        match fields.get("event"):
            case "media" if _object(fields, "media").get("track", "inbound") == "inbound":
                self._hear(line, _TELEPHONE, sound_in(event, fields))
            case "mark":
                found = self._marks.pop(str(_object(fields, "mark").get("name")), None)
                if found is not None:
                    self.loudspeaker.report(found[0], event.at, found[1])

    def _gateway_out(self, line: Line, fields: dict[str, Any]) -> None:
        event = line.event
        assert isinstance(event, SentLine)
        match fields.get("event"):
            case "media":
                self._say(line, self.story.sounding or _VOICE, _TELEPHONE, sound_in(event, fields))
            case "mark":
                last = self.loudspeaker.streaks[-1] if self.loudspeaker.streaks else None
                if last is not None and last.cut_at == math.inf:  # else it is where the next answer begins
                    self._marks[str(_object(fields, "mark").get("name"))] = (last.answer_id, last.ends_ms)
            case "clear":
                self._marks.clear()
                self.loudspeaker.silence(event.at)


def _nothing(line: Line, fields: dict[str, Any]) -> None:
    """Ignore a message: in this kind of recording, sound and turns are in lines of the recorder."""


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the field ``name`` if it is an object; {} otherwise."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _native_format(fields: Any, default: AudioFormat) -> AudioFormat:
    if not isinstance(fields, dict):
        return default
    encoding, rate = fields.get("format", default.encoding), fields.get("sample_rate", default.sample_rate)
    return _audio_format(encoding, rate, fields.get("channels", 1)) or default


def _audio_format(encoding: Any, rate: Any, channels: Any = 1) -> AudioFormat | None:
    """Return the audio format with these values, or None if they are not valid."""
    try:
        return AudioFormat(AudioEncoding(encoding), checked_sample_rate(int(rate)), checked_channels(int(channels)))
    except (TypeError, ValueError, InvalidValue):
        return None


def _request_of(response_id: object) -> str:
    """Return the id of the request that a response of the Realtime API answers: ``req_1`` for ``resp_1``."""
    return "req_" + str(response_id).removeprefix("resp_")


def _realtime_format(fields: Any, default: AudioFormat) -> AudioFormat:
    if not isinstance(fields, dict) or fields.get("type") not in _REALTIME:
        return default
    encoding, rate = _REALTIME[fields["type"]]
    return _audio_format(encoding, fields.get("rate")) or AudioFormat(encoding, rate)


#: Characters of the first words that are kept, and calls that are remembered.
MAX_LETTERS: Final = 160
_REMEMBERED: Final = 2048
#: The bytes that mark a line with a turn, its request, a line with a transcript, and one with typed text, natively and
#: over the Realtime API: frames are JSON within JSON.
_TURN: Final = b'\\"response_started\\"'
_REQUEST: Final = re.compile(rb'\\"request_id\\":\\"([^"\\]+)\\"')
_SAID: Final = b'\\"transcript\\"'
_TYPED: Final = (b'\\"input_chunk\\"', b'\\"text\\"')
_ITEM: Final = b'\\"input_text\\"'


class Glance(NamedTuple):
    """A preview of a call: the user's first words (None if there are none), and the number of turns."""

    first_words: str | None
    turns: int


@lru_cache(maxsize=_REMEMBERED)
def glance(path: Path, size: int) -> Glance:
    """Return a preview of a recording from its first ``size`` bytes. Blocks. An unreadable file has no words and turns.

    Only lines with words are decoded; most of the file is sound.
    """
    words, read = None, 0
    turns: set[bytes] = set()  # a resume sends frames again
    try:
        with path.open("rb", buffering=1 << 20) as file:
            for line in raw_lines(file):
                read += len(line)
                if read > size:
                    break
                if _TURN in line and (found := _REQUEST.search(line)):
                    turns.add(found[1])
                if words is None and (_SAID in line or _ITEM in line or all(part in line for part in _TYPED)):
                    words = _words(line)
    except OSError:
        return Glance(None, 0)
    return Glance(words, len(turns))


def _words(line: bytes) -> str | None:
    try:
        event = decode_event(line)
    except ValueError:
        return None
    if not isinstance(event, ReceivedLine | SentLine | ToldLine) or event.text is None:
        return None
    frame = parsed_text(event.text)
    said, typed = frame.get("modality") == "transcript", frame.get("type") == "input_chunk"
    text = frame.get("text")
    if frame.get("type") == "conversation.item.create":
        typed, text = True, typed_in(_object(frame, "item"))
    if not (said or typed) or frame.get("interim") or not isinstance(text, str) or not text.strip():
        return None
    return text.strip()[:MAX_LETTERS]
