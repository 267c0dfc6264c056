"""Windows for decoding a clause piece by piece, with the same samples as if it were decoded at once.

A convolutional codec's receptive field is a few frames. A window that contains them on both sides of the wanted frames
decodes to exactly the same samples; the output for the context is discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from omni_ws.engine.vllm.codec_frames import Codes


@dataclass(frozen=True, slots=True)
class WindowContext:
    """The number of context frames on either side of a chunk. Three are exact for SNAC at 24 kHz."""

    left: int = 3
    right: int = 3


@dataclass(frozen=True, slots=True)
class CodecWindow:
    """The input of a decoding: of ``codes``, the ``keep`` frames after the first ``skip`` are wanted.

    ``first_frame`` is the position of ``codes[0]`` in its clause.
    """

    codes: Codes
    first_frame: int
    skip: int
    keep: int


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of decoding one clause, an immutable value: the frames still needed, and positions.

    ``first_frame`` is the position of ``held[0]`` in the clause, ``emitted`` that of the next frame to decode.
    """

    context: WindowContext
    held: Codes
    first_frame: int = 0
    emitted: int = 0
    ended: bool = False

    @classmethod
    def start(cls, context: WindowContext, slots: int) -> StreamState:
        """Return the state at the beginning of a clause; ``slots`` is the number of tokens in a frame."""
        return cls(context, np.empty((0, slots), np.int32))

    @property
    def ready(self) -> int:
        """The number of frames that can be decoded: all but those whose right context has not arrived."""
        coming = self.first_frame + len(self.held) - self.emitted
        return coming if self.ended else max(0, coming - self.context.right)

    @property
    def done(self) -> bool:
        """Whether the whole clause has been decoded."""
        return self.ended and self.ready == 0

    def received(self, codes: Codes, *, last: bool = False) -> StreamState:
        """Return the state with ``codes`` added; ``last`` ends the clause."""
        if self.ended:
            raise ValueError("the clause has already ended")
        return replace(self, held=np.concatenate((self.held, codes)), ended=last)

    def take(self, frames: int) -> tuple[CodecWindow, StreamState]:
        """Return the window of the next ``frames`` frames (1 to ``ready``) and the state after it."""
        if not 1 <= frames <= self.ready:
            raise ValueError(f"frames must be 1 to {self.ready}, got {frames}")
        start = self.emitted - self.first_frame
        left = min(start, self.context.left)
        end = min(len(self.held), start + frames + self.context.right)
        window = CodecWindow(self.held[start - left : end], self.emitted - left, left, frames)
        emitted = self.emitted + frames
        unneeded = max(0, emitted - self.context.left - self.first_frame)
        return window, replace(
            self, held=self.held[unneeded:].copy(), first_frame=self.first_frame + unneeded, emitted=emitted
        )
