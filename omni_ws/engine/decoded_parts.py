"""The decoded forms of input: parts of audio, text, tool results, images and video.

A *part* is a run of chunks of one modality and format; the decoded pieces of a part have the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.samples import Samples
from omni_ws.core.chunks import Modality
from omni_ws.core.quota import Room, reserved
from omni_ws.engine.text_pieces import pieces_of
from omni_ws.media.video import VideoFrame


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Mono samples at the rate that the engine asked for. A new part number marks a discontinuity."""

    samples: Samples
    part: int


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text of at most ``PIECE_CHARACTERS``."""

    text: str
    part: int


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """The result of the tool call ``call_id``, or a piece of it. A result may be empty."""

    text: str
    call_id: str
    part: int


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as uint8 RGB of shape (height, width, 3)."""

    pixels: NDArray[np.uint8]
    part: int


@dataclass(frozen=True, slots=True)
class VideoPart:
    """Consecutive frames of a video."""

    frames: tuple[VideoFrame, ...]
    part: int


DecodedPart: TypeAlias = AudioPart | TextPart | ToolResultPart | ImagePart | VideoPart

MODALITIES: Final[Mapping[type[DecodedPart], Modality]] = {
    AudioPart: Modality.AUDIO,
    TextPart: Modality.TEXT,
    ToolResultPart: Modality.TEXT,
    ImagePart: Modality.IMAGE,
    VideoPart: Modality.VIDEO,
}


def reserved_size(part: DecodedPart) -> int:
    """Return the bytes by which a part counts in the media room.

    Text counts as 0: it is no larger than its bytes, which are accounted for as input.
    """
    return 0 if isinstance(part, (TextPart, ToolResultPart)) else size_of(part)


def size_of(part: DecodedPart) -> int:
    """Return the memory of a part's content, in bytes."""
    match part:
        case AudioPart(samples=samples):
            return samples.nbytes
        case TextPart(text=text) | ToolResultPart(text=text):
            return len(text)
        case ImagePart(pixels=pixels):
            return pixels.nbytes
        case VideoPart(frames=frames):
            return sum(frame.pixels.nbytes for frame in frames)


def joined(parts: list[DecodedPart], room: Room) -> list[DecodedPart]:
    """Merge adjacent pieces of the same part, and drop empty ones, except for tool results."""
    joined: list[DecodedPart] = []
    for (number, _), group in groupby(parts, key=lambda part: (part.part, type(part))):
        members = list(group)
        match members[0]:
            case AudioPart():
                blocks = [part.samples for part in members if isinstance(part, AudioPart) and len(part.samples)]
                if len(blocks) > 1:
                    with reserved(room, sum(block.nbytes for block in blocks)):
                        joined.append(AudioPart(np.concatenate(blocks), number))
                elif blocks:
                    joined.append(AudioPart(blocks[0], number))
            case TextPart():
                text = "".join(part.text for part in members if isinstance(part, TextPart))
                joined += (TextPart(piece, number) for piece in pieces_of(text))
            case ToolResultPart(call_id=call_id):
                text = "".join(part.text for part in members if isinstance(part, ToolResultPart))
                joined.append(ToolResultPart(text, call_id, number))
            case VideoPart():
                frames = tuple(frame for part in members if isinstance(part, VideoPart) for frame in part.frames)
                if frames:
                    joined.append(VideoPart(frames, number))
            case ImagePart():
                joined.extend(members)
    return joined
