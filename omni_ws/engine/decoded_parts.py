"""What decoding makes of an input: pieces of audio and text, images, frames of video."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.samples import Samples
from omni_ws.core.quota import Room, counted
from omni_ws.engine.text_pieces import pieces_of
from omni_ws.media.video import VideoFrame


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Samples at the wanted rate. ``part`` numbers the parts of the input: a new number is a break in the audio."""

    samples: Samples
    part: int


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of a text, of ``PIECE_CHARACTERS`` at most."""

    text: str
    part: int


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """A piece of the result of a tool: ``call_id`` is the call that it answers. A result may be empty."""

    text: str
    call_id: str
    part: int


@dataclass(frozen=True, slots=True)
class ImagePart:
    """``pixels`` is RGB, shape (height, width, 3), uint8."""

    pixels: NDArray[np.uint8]
    part: int


@dataclass(frozen=True, slots=True)
class VideoPart:
    """Frames of one video, as far as they could be decoded from what has come."""

    frames: tuple[VideoFrame, ...]
    part: int


DecodedPart: TypeAlias = AudioPart | TextPart | ToolResultPart | ImagePart | VideoPart


def counted_size(part: DecodedPart) -> int:
    """A text takes no more than its bytes did."""
    return 0 if isinstance(part, (TextPart, ToolResultPart)) else size_of(part)


def size_of(part: DecodedPart) -> int:
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
    """The parts without the empty ones; neighbours that belong to one part are made one."""
    joined: list[DecodedPart] = []
    for (number, _), group in groupby(parts, key=lambda part: (part.part, type(part))):
        members = list(group)
        match members[0]:
            case AudioPart():
                blocks = [part.samples for part in members if isinstance(part, AudioPart) and len(part.samples)]
                if len(blocks) > 1:
                    with counted(room, sum(block.nbytes for block in blocks)):
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
