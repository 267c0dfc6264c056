"""Code2Wav: decodes codec frames to audio, in chunks that are small at first and grow as time allows.

The DecodeQueue decodes the chunks of all requests in batches. Each chunk is decoded within a CodecWindow, which adds
frames on both sides, so that its samples are the same as if the whole clause were decoded at once. A FrameLayout says
how the tokens of a speech language model encode codec frames.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples
from omni_ws.engine.base import OutputWriter
from omni_ws.engine.channel import Channel
from omni_ws.engine.frame_chunks import ChunkPace, ChunkPolicy, FrameChunks
from omni_ws.errors import EngineFailed


class Code2Wav:
    """A Stage of one request: CodecFrames in, AudioOutput to the client.

    ``queue`` decodes the chunks of all requests. ``sample_rate`` (Hz) and ``frame_ms`` are those of its decoder,
    ``slots`` is the number of tokens in a frame. ``policy`` controls the size of chunks.
    """

    name = "code2wav"

    def __init__(
        self,
        queue: DecodeQueue,
        *,
        sample_rate: int,
        frame_ms: float,
        slots: int,
        policy: ChunkPolicy | None = None,
    ) -> None:
        self._queue = queue
        self._slots = slots
        policy = policy or ChunkPolicy()
        around = 2 * CONTEXT_FRAMES
        pace = ChunkPace(policy, frame_ms=frame_ms, context_frames=around, decode_ms_per_frame=queue.ms_per_frame)
        self._chunks: FrameChunks[CodecFrames] = FrameChunks(
            self.name,
            pace,
            sample_rate=sample_rate,
            # Enough for two chunks.
            most_held=2 * policy.largest + CONTEXT_FRAMES,
            clock=time.monotonic,
        )

    @property
    def audio_ms(self) -> float:
        """The duration of the audio sent, in milliseconds, for the usage of the request."""
        return self._chunks.audio_ms

    async def run(self, source: AsyncIterator[CodecFrames], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Decode each clause, and write its audio to ``outputs``, up to the end of ``source``."""
        async with self._chunks.reading(source):
            while await self._chunks.has_more():
                await self._decode_clause(outputs)

    async def _decode_clause(self, outputs: OutputWriter) -> None:
        """Decode one clause. Clauses are independent: their first frames have no left context."""
        chunks = self._chunks
        state = StreamState.start(self._slots)
        clause, text_end = chunks.inbox[0].clause, chunks.inbox[0].text_end
        while not state.done:
            state = self._take_over(state, clause)
            plan = chunks.plan(state.ready, complete=state.ended)
            if plan.frames:
                window, state = state.take(plan.frames)
                await chunks.send(plan.frames, self._queue.decode(window), outputs, text_end=text_end)
            elif chunks.ended and not chunks.inbox and not state.ended:
                # The source ended within the clause.
                state = state.received(state.held[:0], last=True)
            elif not state.done:
                await chunks.wait(plan.wait_ms)

    def _take_over(self, state: StreamState, clause: int) -> StreamState:
        """Add the frames in the inbox that belong to ``clause`` to its state."""
        inbox = self._chunks.inbox
        while inbox and inbox[0].clause == clause and not state.ended:
            item = inbox.popleft()
            state = state.received(item.codes, last=item.last)
        return state


#: The weight of the latest measurement in the moving average.
_SMOOTHING = 0.1


class DecodeQueue:
    """A queue of windows to be decoded in batches, for use on one event loop. The queue's thread does the decoding.

    The function ``decode`` gets up to ``batch`` windows. The queue needs no limit, as a request submits one window at a
    time.

    ``ms_per_frame`` is the average time from submission to result per frame of a window, in milliseconds; 0 before the
    first measurement.
    """

    def __init__(self, decode: Callable[[Sequence[CodecWindow]], list[Samples]], *, batch: int = 16) -> None:
        self._decode_windows = decode
        self._batch = batch
        self._waiting: deque[tuple[CodecWindow, asyncio.Future[Samples]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="code2wav")
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self.ms_per_frame = 0.0

    def measure_anew(self) -> None:
        """Forget the decoding times measured so far, such as those of a warm-up."""
        self.ms_per_frame = 0.0

    async def decode(self, window: CodecWindow) -> Samples:
        """Return the wanted samples of ``window``.

        Raises EngineFailed on a closed queue, and the decoder's exceptions. Cancelling drops a window that is not being
        decoded yet.
        """
        if self._closed:
            raise EngineFailed("the decoder is closed")
        done: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._waiting.append((window, done))
        if self._work is None:
            self._work = asyncio.create_task(self._drain(), name="code2wav decoding")
        began = time.perf_counter()
        samples = await done
        took = (time.perf_counter() - began) * 1000 / len(window.codes)
        self.ms_per_frame += _SMOOTHING * (took - self.ms_per_frame) if self.ms_per_frame else took
        return samples

    async def close(self) -> None:
        """Wait for the current batch; the waiting windows fail. Idempotent."""
        self._closed = True
        while self._waiting:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_exception(EngineFailed("the decoder is closed"))
        if self._work is not None:
            await asyncio.wait([self._work])
        self._executor.shutdown()

    async def _drain(self) -> None:
        """Decode batch after batch until no window waits."""
        loop = asyncio.get_running_loop()
        try:
            while batch := self._next_batch():
                windows = [window for window, _ in batch]
                try:
                    decoded = await loop.run_in_executor(self._executor, self._decode_windows, windows)
                except Exception as error:
                    for _, done in batch:
                        if not done.done():
                            done.set_exception(error)
                else:
                    for (_, done), samples in zip(batch, decoded, strict=True):
                        if not done.done():
                            done.set_result(samples)
        finally:
            self._work = None

    def _next_batch(self) -> list[tuple[CodecWindow, asyncio.Future[Samples]]]:
        """Return the next windows whose requests still wait for them."""
        batch: list[tuple[CodecWindow, asyncio.Future[Samples]]] = []
        while self._waiting and len(batch) < self._batch:
            window, done = self._waiting.popleft()
            if not done.done():
                batch.append((window, done))
        return batch


#: The number of context frames on either side of a chunk, which is exact for SNAC at 24 kHz: the receptive field of a
#: convolutional codec is a few frames. With so many frames on both sides, the wanted frames decode to exactly the same
#: samples as in the whole clause; the samples of the context are discarded.
CONTEXT_FRAMES: Final = 3


@dataclass(frozen=True, slots=True)
class CodecWindow:
    """The input of a decoding. Only the samples of ``keep`` frames of ``codes``, after the first ``skip``, are wanted.

    ``first_frame`` is the position of ``codes[0]`` in its clause.
    """

    codes: Codes
    first_frame: int
    skip: int
    keep: int


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of decoding one clause, an immutable value: the frames that are still needed, and positions.

    ``first_frame`` is the position of ``held[0]`` in the clause, ``emitted`` the position of the next frame to decode.
    ``left`` and ``right`` are the context frames on either side of a window.
    """

    held: Codes
    left: int = CONTEXT_FRAMES
    right: int = CONTEXT_FRAMES
    first_frame: int = 0
    emitted: int = 0
    ended: bool = False

    @classmethod
    def start(cls, slots: int, *, left: int = CONTEXT_FRAMES, right: int = CONTEXT_FRAMES) -> StreamState:
        """Return the state at the beginning of a clause; ``slots`` is the number of tokens in a frame."""
        return cls(np.empty((0, slots), np.int32), left, right)

    @property
    def ready(self) -> int:
        """The number of frames that can be decoded: the others wait for their right context."""
        coming = self.first_frame + len(self.held) - self.emitted
        return coming if self.ended else max(0, coming - self.right)

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
        left = min(start, self.left)
        end = min(len(self.held), start + frames + self.right)
        window = CodecWindow(self.held[start - left : end], self.emitted - left, left, frames)
        emitted = self.emitted + frames
        unneeded = max(0, emitted - self.left - self.first_frame)
        return window, replace(
            self, held=self.held[unneeded:].copy(), first_frame=self.first_frame + unneeded, emitted=emitted
        )


#: The codes of whole frames: int32 of shape (frames, slots), each an index into its slot's codebook.
Codes: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLayout:
    """How the tokens of a frame encode codes.

    A frame has a fixed number of slots, one token each. The token in slot ``i`` is ``first_token + i * codebook_size +
    code``, where the code is an index into codebook ``slots[i]``. Codes of the same codebook follow each other in time
    in the order of their slots: SNAC at 24 kHz has codebooks at 1, 2 and 4 codes per frame.
    """

    first_token: int
    codebook_size: int = 4096
    slots: tuple[int, ...] = (0, 1, 2, 2, 1, 2, 2)

    def __post_init__(self) -> None:
        books = sorted(set(self.slots))
        if not self.slots or books != list(range(len(books))):
            raise ValueError("slots must contain each codebook number 0, 1, … at least once")
        if self.first_token < 0 or self.codebook_size < 1:
            raise ValueError("first_token must not be negative, and codebook_size must be at least 1")

    @property
    def end_token(self) -> int:
        """The token ID after the last codec token."""
        return self.first_token + len(self.slots) * self.codebook_size

    @property
    def codes_per_frame(self) -> tuple[int, ...]:
        """The number of codes in a frame, for each codebook."""
        return tuple(self.slots.count(book) for book in range(max(self.slots) + 1))

    def tokens(self, codes: Codes) -> list[int]:
        """Return the tokens that encode ``codes``."""
        offsets = self.first_token + np.arange(len(self.slots)) * self.codebook_size
        return [int(token) for token in (codes + offsets).reshape(-1)]

    def codes(self, tokens: Sequence[int]) -> Codes:
        """Return the codes that the tokens of whole frames encode. Raises ValueError for a token in a wrong slot."""
        places = np.asarray(tokens, dtype=np.int64).reshape(-1, len(self.slots)) - self.first_token
        codes = places - np.arange(len(self.slots)) * self.codebook_size
        wrong = np.argwhere((codes < 0) | (codes >= self.codebook_size))
        if len(wrong):
            frame, slot = wrong[0]
            token = int(places[frame, slot]) + self.first_token
            raise ValueError(f"token {token} is not valid in slot {slot} of frame {frame}")
        return codes.astype(np.int32)

    def take_frames(self, tokens: list[int]) -> Codes:
        """Remove the whole frames at the beginning of ``tokens``, often none, and return their codes.

        Raises ValueError for a token in a wrong slot.
        """
        whole = len(tokens) - len(tokens) % len(self.slots)
        codes = self.codes(tokens[:whole])
        del tokens[:whole]
        return codes

    def books(self, codes: NDArray[np.int32]) -> list[NDArray[np.int64]]:
        """Return the codes of each codebook in order of time.

        ``codes`` has the shape (…, frames, slots), the arrays returned (…, frames × codes per frame).
        """
        slots = np.array(self.slots)
        return [
            codes[..., slots == book].reshape(*codes.shape[:-2], -1).astype(np.int64) for book in range(max(slots) + 1)
        ]


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """The next frames of a clause; ``last`` ends the clause, and may come without frames.

    Clauses are numbered from 0 within an answer. Each is decoded independently. ``text_end`` is where the clause ends,
    as a position in the text of the answer.
    """

    clause: int
    codes: Codes
    last: bool
    text_end: int
