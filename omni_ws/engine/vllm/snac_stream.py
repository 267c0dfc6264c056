"""Decoding a clause piece by piece so that it sounds as if it had been decoded at once.

A codec of convolutions hears a few frames to the left and to the right. A window that holds those beside the frames
that are wanted gives exactly the samples of the whole; what it gives for the neighbours themselves is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from omni_ws.engine.vllm.codec_frames import Codes


@dataclass(frozen=True, slots=True)
class WindowContext:
    """Frames that are decoded along on either side. Three are exact for SNAC at 24 kHz."""

    left: int = 3
    right: int = 3


@dataclass(frozen=True, slots=True)
class CodecWindow:
    """What is decoded at once: of ``codes``, ``keep`` frames after the first ``skip`` ones are wanted.

    ``first_frame`` is the place of ``codes[0]`` in its clause.
    """

    codes: Codes
    first_frame: int
    skip: int
    keep: int


@dataclass(frozen=True, slots=True)
class StreamState:
    """All that the decoding of one clause has to remember, as a value: frames that are still needed, and places.

    ``first_frame`` is the place of ``held[0]`` in the clause, ``emitted`` that of the next frame to come out.
    """

    context: WindowContext
    held: Codes
    first_frame: int = 0
    emitted: int = 0
    ended: bool = False

    @classmethod
    def start(cls, context: WindowContext, slots: int) -> StreamState:
        return cls(context, np.empty((0, slots), np.int32))

    @property
    def ready(self) -> int:
        """Frames that may come out now: all but those that wait for their right neighbours."""
        coming = self.first_frame + len(self.held) - self.emitted
        return coming if self.ended else max(0, coming - self.context.right)

    @property
    def done(self) -> bool:
        return self.ended and self.ready == 0

    def received(self, codes: Codes, *, last: bool = False) -> StreamState:
        if self.ended:
            raise ValueError("frames after the last ones of a clause")
        return replace(self, held=np.concatenate((self.held, codes)), ended=last)

    def take(self, frames: int) -> tuple[CodecWindow, StreamState]:
        """The window for the next ``frames`` frames, 1 … ``ready``, and the state after it."""
        if not 1 <= frames <= self.ready:
            raise ValueError(f"{frames} of {self.ready} frames")
        start = self.emitted - self.first_frame
        left = min(start, self.context.left)
        end = min(len(self.held), start + frames + self.context.right)
        window = CodecWindow(self.held[start - left : end], self.emitted - left, left, frames)
        emitted = self.emitted + frames
        unneeded = max(0, emitted - self.context.left - self.first_frame)
        return window, replace(
            self, held=self.held[unneeded:].copy(), first_frame=self.first_frame + unneeded, emitted=emitted
        )
