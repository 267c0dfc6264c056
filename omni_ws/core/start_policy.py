"""When the work on a request starts while its input still arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from omni_ws.core.chunks import Modality, StartTrigger


@dataclass(slots=True)
class InputSummary:
    """What has been received of one request so far; the only thing that a policy sees."""

    chunks: int = 0
    bytes: int = 0
    audio_ms: float = 0
    text_chars: int = 0
    images: int = 0
    video_chunks: int = 0
    #: Modality of the part that is being received, and its length if it is audio.
    open_part: Modality | None = None
    open_part_audio_ms: float = 0
    #: Modalities of which a part was closed, by a part of another modality.
    closed_parts: set[Modality] = field(default_factory=set)


class StartPolicy(Protocol):
    """Asked after each accepted chunk until it says yes. The end of input starts whatever has not started."""

    trigger: ClassVar[StartTrigger]

    def should_start(self, received: InputSummary) -> bool: ...


@dataclass(frozen=True, slots=True)
class OnFirstChunk:
    trigger: ClassVar[StartTrigger] = StartTrigger.FIRST_CHUNK

    def should_start(self, received: InputSummary) -> bool:
        return received.chunks > 0


@dataclass(frozen=True, slots=True)
class OnEndOnly:
    trigger: ClassVar[StartTrigger] = StartTrigger.END_OF_INPUT

    def should_start(self, received: InputSummary) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnMinLength:
    """Fires when any of the minimums that are not None is met.

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


#: What ``on_min_length`` means when no minimum is given.
DEFAULT_MIN_LENGTH = OnMinLength(min_audio_ms=400, min_text_chars=1, min_video_frames=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnModality:
    """Fires at the first complete part of ``modality``: one that a part of another modality, or the end, closed.

    For input of one modality alone nothing would ever close a part, so ``min_audio_ms`` closes an audio segment.
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
