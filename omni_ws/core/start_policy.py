"""StartPolicy: decides when work on a request starts, from the totals of its input so far (InputSummary)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from omni_ws.core.chunks import InputChunk, Modality, StartTrigger

#: Nearly all chunks are audio; a module global is faster to look up than an enum member.
_AUDIO: Final = Modality.AUDIO
#: The bytes that never begin a UTF-8 character: without them there is one byte for each character.
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0xC0))


@dataclass(slots=True)
class InputSummary:
    """Totals of the input of a request so far: all that a start policy bases its decision on.

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
        """Whether the input has audio, however short."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPolicy:
    """Decides when work on a request starts: as soon as the input reaches any minimum that is set.

    ``min_video_frames`` counts images and video chunks alike. With a ``modality`` the request starts at the first
    complete part of that modality instead. A part is complete when a part of another modality follows it. As input of a
    single modality never completes a part, ``min_audio_ms`` sets the length at which a part of audio is complete.

    ``should_start`` is called after each accepted chunk until it returns True; a request whose policy never fires
    starts at the end of its input. ``trigger`` is the reason that clients are given for a start by the policy.
    """

    trigger: StartTrigger = StartTrigger.MIN_LENGTH
    modality: Modality | None = None
    min_audio_ms: float | None = None
    min_text_chars: int | None = None
    min_bytes: int | None = None
    min_chunks: int | None = None
    min_video_frames: int | None = None

    def should_start(self, received: InputSummary) -> bool:
        if self.modality is None:
            return (
                (self.min_audio_ms is not None and received.audio_ms >= self.min_audio_ms)
                or (self.min_text_chars is not None and received.text_chars >= self.min_text_chars)
                or (self.min_bytes is not None and received.bytes >= self.min_bytes)
                or (self.min_chunks is not None and received.chunks >= self.min_chunks)
                or (
                    self.min_video_frames is not None
                    and received.images + received.video_chunks >= self.min_video_frames
                )
            )
        by_length = self.min_audio_ms is not None and received.open_part_audio_ms >= self.min_audio_ms
        is_open = received.open_part is self.modality is Modality.AUDIO
        return self.modality in received.closed_parts or (is_open and by_length)


#: Fires at the first chunk with content.
ON_FIRST_CHUNK: Final = StartPolicy(trigger=StartTrigger.FIRST_CHUNK, min_chunks=1)
#: Never fires: the request starts at the end of its input.
ON_END_ONLY: Final = StartPolicy(trigger=StartTrigger.END_OF_INPUT)
#: The policy for ``on_min_length`` without minimums: 400 ms of audio, or any text, image or video chunk.
DEFAULT_MIN_LENGTH: Final = StartPolicy(min_audio_ms=400, min_text_chars=1, min_video_frames=1)
