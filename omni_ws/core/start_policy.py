"""Start policies: when the work on a request starts while its input is still arriving."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from omni_ws.core.chunks import Modality, StartTrigger


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


class StartPolicy(Protocol):
    """Decides when a request starts.

    It is asked after each accepted chunk until it fires. A request whose policy never fires starts at the end of its
    input. ``trigger`` is the reason that clients see for a start by this policy.
    """

    trigger: ClassVar[StartTrigger]

    def should_start(self, received: InputSummary) -> bool:
        """Whether to start now."""
        ...


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
