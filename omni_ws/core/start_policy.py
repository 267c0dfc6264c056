"""When the work on a request starts while its input is still arriving: policies, and what they decide by.

InputSummary has the totals that policies test. ``by_timestamp`` orders what arrived before the start, TimestampOrder
what arrives after it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final, TypeAlias

from omni_ws.core.chunks import InputChunk, Modality, StartTrigger

#: Nearly all chunks are audio; a module global is faster to look up than an enum member.
_AUDIO: Final = Modality.AUDIO
#: The bytes that never begin a UTF-8 character: deleting them leaves one byte a character.
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0xC0))


@dataclass(slots=True)
class InputSummary:
    """Totals of the input of a request so far, and all that a start policy can base its decision on.

    ``audio_ms`` is nominal for compressed audio. A *part* is a run of consecutive chunks of one modality.
    """

    chunks: int = 0
    bytes: int = 0
    audio_ms: float = 0
    text_chars: int = 0
    images: int = 0
    video_chunks: int = 0
    tool_results: int = 0
    #: The modality of the current part, and its length in milliseconds if it is audio.
    open_part: Modality | None = None
    open_part_audio_ms: float = 0
    #: The modalities that have a complete part: one followed by a part of another modality.
    closed_parts: set[Modality] = field(default_factory=set)

    @property
    def has_audio(self) -> bool:
        """Whether audio is in it, however short."""
        return self.open_part is Modality.AUDIO or Modality.AUDIO in self.closed_parts

    def add(self, chunk: InputChunk, bytes_per_ms: float) -> None:
        """Count a chunk with content."""
        size = len(chunk.payload)
        self.chunks += 1
        self.bytes += size
        modality = chunk.modality
        if modality is not self.open_part:
            if self.open_part is not None:
                self.closed_parts.add(self.open_part)
            self.open_part = modality
            self.open_part_audio_ms = 0
        if modality is _AUDIO:
            duration = size / bytes_per_ms
            self.audio_ms += duration
            self.open_part_audio_ms += duration
            return
        match modality:
            case Modality.TEXT:
                self.text_chars += len(chunk.payload.translate(None, _CONTINUATION_BYTES))
                self.tool_results += chunk.tool_call_id is not None
            case Modality.IMAGE:
                self.images += 1
            case Modality.VIDEO:  # pragma: no branch
                self.video_chunks += 1


# The policies. ``should_start`` is asked after each accepted chunk until it returns True; a request whose policy never
# fires starts at the end of its input. ``trigger`` is the reason that clients see for a start by the policy.


@dataclass(frozen=True, slots=True)
class OnFirstChunk:
    """Starts at the first chunk with content."""

    trigger: ClassVar[StartTrigger] = StartTrigger.FIRST_CHUNK

    def should_start(self, received: InputSummary) -> bool:
        return received.chunks > 0


@dataclass(frozen=True, slots=True)
class OnEndOnly:
    """Never fires: the request starts at the end of its input."""

    trigger: ClassVar[StartTrigger] = StartTrigger.END_OF_INPUT

    def should_start(self, received: InputSummary) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnMinLength:
    """Starts as soon as any of the minimums that are set is reached.

    ``min_video_frames`` counts images and video chunks alike.
    """

    trigger: ClassVar[StartTrigger] = StartTrigger.MIN_LENGTH

    min_audio_ms: float | None = None
    min_text_chars: int | None = None
    min_bytes: int | None = None
    min_chunks: int | None = None
    min_video_frames: int | None = None

    def should_start(self, received: InputSummary) -> bool:
        return (
            (self.min_audio_ms is not None and received.audio_ms >= self.min_audio_ms)
            or (self.min_text_chars is not None and received.text_chars >= self.min_text_chars)
            or (self.min_bytes is not None and received.bytes >= self.min_bytes)
            or (self.min_chunks is not None and received.chunks >= self.min_chunks)
            or (self.min_video_frames is not None and received.images + received.video_chunks >= self.min_video_frames)
        )


#: The policy for ``on_min_length`` without minimums: 400 ms of audio, or any text, image or video chunk.
DEFAULT_MIN_LENGTH = OnMinLength(min_audio_ms=400, min_text_chars=1, min_video_frames=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnModality:
    """Starts at the first complete part of ``modality``: one followed by a part of another modality.

    Input of a single modality never completes a part, so ``min_audio_ms`` completes a part of audio by its length.
    """

    trigger: ClassVar[StartTrigger] = StartTrigger.MODALITY

    modality: Modality
    min_audio_ms: float | None = None

    def should_start(self, received: InputSummary) -> bool:
        if self.modality in received.closed_parts:
            return True
        return (
            self.min_audio_ms is not None
            and self.modality is Modality.AUDIO
            and received.open_part is Modality.AUDIO
            and received.open_part_audio_ms >= self.min_audio_ms
        )


StartPolicy: TypeAlias = OnFirstChunk | OnEndOnly | OnMinLength | OnModality


# The order of the input, before the start and after it.

#: Milliseconds by which input of other modalities may be behind a chunk after the start, by default and at most.
ALIGNMENT_WINDOW_MS: Final = 200
MAX_ALIGNMENT_WINDOW_MS: Final = 2000


class Alignment(StrEnum):
    """How chunks of different modalities are ordered: by sequence number or by ``timestamp_ms``."""

    ARRIVAL = "arrival"
    TIMESTAMP = "timestamp"


def by_timestamp(chunks: list[InputChunk]) -> tuple[InputChunk, ...]:
    """Return ``chunks`` sorted by ``timestamp_ms``.

    The sort is stable. A chunk without a timestamp sorts as if it had that of the chunk before it, or 0.
    """
    latest = 0
    keyed: list[tuple[int, InputChunk]] = []
    for chunk in chunks:
        if chunk.timestamp_ms is not None:
            latest = chunk.timestamp_ms
        keyed.append((latest, chunk))
    return tuple(chunk for _, chunk in sorted(keyed, key=lambda pair: pair[0]))


@dataclass(order=True, slots=True)
class _Waiting:
    """A chunk that waits, ordered by its time and then by its arrival; ``chunk`` is None once it has passed."""

    timestamp_ms: int
    arrival: int
    due: float = field(compare=False)
    chunk: InputChunk | None = field(compare=False)

    def take(self) -> InputChunk:
        """The chunk, which has passed now."""
        chunk, self.chunk = self.chunk, None
        assert chunk is not None
        return chunk


class TimestampOrder:
    """Orders what arrives after the start of a request by ``timestamp_ms``.

    A chunk waits until each other modality that the request has had is at its time less ``window_ms``, and as long in
    real time at most. What waits passes in the order of its times. A chunk without a time passes at once.

    ``before`` are the chunks before the start. ``now`` is the time of any monotonic clock, in seconds.
    """

    def __init__(self, window_ms: float, before: Iterable[InputChunk] = ()) -> None:
        #: Bytes that wait.
        self.held_bytes = 0
        self._window_ms = window_ms
        #: How far each modality is.
        self._reached: dict[Modality, float] = {}
        self._arrivals = 0
        #: What waits: the earliest time on top, and in the order of arrival, among what has passed.
        self._by_time: list[_Waiting] = []
        self._by_arrival: deque[_Waiting] = deque()
        for chunk in before:
            self._note(chunk)

    def __len__(self) -> int:
        """The number of chunks that wait."""
        return len(self._by_time)

    def put(self, chunk: InputChunk, *, now: float) -> list[InputChunk]:
        """Take the next chunk. Returns what passes now, in order."""
        self._note(chunk)
        if chunk.timestamp_ms is None:
            return [chunk, *self._take_ready()]
        self._arrivals += 1
        waiting = _Waiting(chunk.timestamp_ms, self._arrivals, now + self._window_ms / 1000, chunk)
        heapq.heappush(self._by_time, waiting)
        self._by_arrival.append(waiting)
        self.held_bytes += len(chunk.payload)
        return self._take_ready()

    def get_timer(self) -> float | None:
        """When a chunk has waited for long enough; None while none waits."""
        while self._by_arrival and self._by_arrival[0].chunk is None:
            self._by_arrival.popleft()
        return self._by_arrival[0].due if self._by_arrival else None

    def handle_timer(self, *, now: float) -> list[InputChunk]:
        """Take what has waited for long enough, and what comes before it."""
        passed: list[InputChunk] = []
        while (due := self.get_timer()) is not None and now >= due:
            late = self._by_arrival[0]
            while late.chunk is not None:
                passed.append(self._take())
        return passed

    def take_all(self) -> list[InputChunk]:
        """Take everything that waits: the input has ended."""
        return [self._take() for _ in range(len(self))]

    def _note(self, chunk: InputChunk) -> None:
        if not chunk.has_content:
            return
        time = -math.inf if chunk.timestamp_ms is None else chunk.timestamp_ms
        self._reached[chunk.modality] = max(time, self._reached.get(chunk.modality, -math.inf))

    def _take_ready(self) -> list[InputChunk]:
        passed: list[InputChunk] = []
        while self._by_time and self._is_ready(self._by_time[0]):
            passed.append(self._take())
        return passed

    def _is_ready(self, waiting: _Waiting) -> bool:
        assert waiting.chunk is not None
        own, least = waiting.chunk.modality, waiting.timestamp_ms - self._window_ms
        return all(reached >= least for modality, reached in self._reached.items() if modality is not own)

    def _take(self) -> InputChunk:
        chunk = heapq.heappop(self._by_time).take()
        self.held_bytes -= len(chunk.payload)
        return chunk
