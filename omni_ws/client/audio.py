"""Audio for clients: WAV files, real-time pacing, a playback buffer, and standard input."""

from __future__ import annotations

import asyncio
import os
import threading
import wave
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from typing import Final

from omni_ws.client.events import AudioChunk

# Files


class UnreadableAudio(ValueError):
    """Raised for a file that is not a WAV file of integer samples."""


@dataclass(frozen=True, slots=True)
class Pcm16:
    """Signed 16-bit little-endian samples, the format that every engine takes. Channels are interleaved."""

    samples: bytes
    sample_rate: int
    channels: int = 1

    @property
    def duration_ms(self) -> float:
        return len(self.samples) / (2 * self.channels) * 1000 / self.sample_rate


def read_wav(path: str | PathLike[str]) -> Pcm16:
    """Read a WAV file with integer samples of 8, 16, 24 or 32 bits.

    Raises UnreadableAudio for any other file, and OSError if the file cannot be opened.
    """
    try:
        with open(path, "rb") as file, wave.open(file) as reader:
            data, width = reader.readframes(reader.getnframes()), reader.getsampwidth()
            sample_rate, channels = reader.getframerate(), reader.getnchannels()
    except (wave.Error, EOFError, RuntimeError) as error:  # the last for a chunk that ends outside the file
        raise UnreadableAudio(f"not a WAV file with plain samples: {error or 'it ends in its header'}") from None
    if not 1 <= width <= 4 or sample_rate <= 0:
        raise UnreadableAudio(f"samples of {width} bytes at {sample_rate} Hz")
    return Pcm16(_to_16_bit(data, width), sample_rate, channels)


def write_wav(path: str | PathLike[str], audio: Pcm16) -> None:
    """Write a WAV file with 16-bit samples."""
    with open(path, "wb") as file, wave.open(file, "wb") as writer:
        writer.setnchannels(audio.channels)
        writer.setsampwidth(2)
        writer.setframerate(audio.sample_rate)
        writer.writeframes(audio.samples)


def _to_16_bit(data: bytes, width: int) -> bytes:
    """Keep the two most significant bytes of each sample."""
    data = data[: len(data) // width * width]
    if width == 2:
        return data
    out = bytearray(len(data) // width * 2)
    if width == 1:
        # 8-bit samples are unsigned: silence is 128.
        out[1::2] = data.translate(bytes(value ^ 0x80 for value in range(256)))
    else:
        out[0::2], out[1::2] = data[width - 2 :: width], data[width - 1 :: width]
    return bytes(out)


# Pacing, in real time as by a microphone


def pieces(audio: Pcm16, *, piece_ms: int = 20) -> Iterator[bytes]:
    """Split audio into pieces of ``piece_ms`` milliseconds, on frame boundaries. The last piece may be shorter."""
    size = max(1, audio.sample_rate * piece_ms // 1000) * 2 * audio.channels
    for start in range(0, len(audio.samples), size):
        yield audio.samples[start : start + size]


async def paced(items: Iterable[bytes], *, interval: float) -> AsyncGenerator[bytes, None]:
    """Yield one item every ``interval`` seconds, the first after one interval, as a microphone does.

    Due times count from the start, so delays do not accumulate: after a hold-up, the late items are yielded without
    waiting.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    for number, item in enumerate(items, 1):
        await asyncio.sleep(max(0.0, start + number * interval - loop.time()))
        yield item


# Playback


class PlaybackBuffer:
    """Buffers raw samples between the event loop, where they arrive in bursts, and an evenly reading sound device.

    Call ``read`` from the thread of the sound device, everything else on the loop.

    Playback starts once ``prefill_bytes`` are buffered or the answer has ended, which hides gaps between the first
    chunks. If a read finds less than it wants before the end of the answer, that is an underrun, and the buffer fills
    up again before playback continues.
    """

    def __init__(self, *, prefill_bytes: int, silence: bytes = b"\0") -> None:
        self.prefill_bytes = prefill_bytes
        #: The bytes of audio that were read since ``clear``.
        self.played_bytes = 0
        #: The number of underruns.
        self.underruns = 0
        self._silence = silence
        self._chunks: deque[memoryview] = deque()
        self._buffered = 0
        self._filling = True
        self._ended = True
        self._lock = threading.Lock()

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    @property
    def idle(self) -> bool:
        """Whether all audio has been read, and the answer has ended."""
        return self._buffered == 0 and self._ended

    def write(self, audio: bytes) -> None:
        """Append audio to the buffer."""
        with self._lock:
            if audio:
                self._chunks.append(memoryview(audio))
                self._buffered += len(audio)
                self._ended = False

    def end(self) -> None:
        """Mark the end of an answer: the rest of the buffer is played without waiting for more."""
        with self._lock:
            self._ended = True

    def clear(self) -> None:
        """Drop all buffered audio, when the user has interrupted the answer (barge-in).

        ``played_bytes`` counts from 0 again.
        """
        with self._lock:
            self._chunks.clear()
            self._buffered = self.played_bytes = 0
            self._filling = self._ended = True

    def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes, padded with silence. Never waits for audio."""
        with self._lock:
            if self._filling and self._buffered and (self._ended or self._buffered >= self.prefill_bytes):
                self._filling = False
            audio = b"" if self._filling else self._take(size)
            if len(audio) < size and not self._filling:
                self._filling = True
                self.underruns += not self._ended
        return audio + self._silence * (size - len(audio))

    def _take(self, size: int) -> bytes:
        taken: list[memoryview] = []
        wanted = size
        while wanted and self._chunks:
            chunk = self._chunks.popleft()
            if len(chunk) > wanted:
                self._chunks.appendleft(chunk[wanted:])
                chunk = chunk[:wanted]
            taken.append(chunk)
            wanted -= len(chunk)
        self._buffered -= size - wanted
        self.played_bytes += size - wanted
        return b"".join(taken)


class AnswerBuffer(PlaybackBuffer):
    """A PlaybackBuffer of mono pcm16 that knows which answers play, and how much of each was heard."""

    def __init__(self, sample_rate: int, *, prefill_ms: int = 80) -> None:
        self._bytes_per_ms = 2 * sample_rate / 1000
        super().__init__(prefill_bytes=2 * sample_rate * prefill_ms // 1000)
        #: The answers, one after the other: each with the bytes that are played before it, and where in it they begin.
        self._answers: deque[tuple[str, int, float]] = deque()

    def play(self, chunk: AudioChunk) -> None:
        """Append the audio of a chunk.

        An answer that goes on after an interruption begins at the chunk's ``start_ms``.
        """
        if not self._answers or chunk.request_id != self._answers[-1][0]:
            before = self.played_bytes + self.buffered_bytes
            self._answers.append((chunk.request_id, before, chunk.start_ms or 0.0))
        self.write(chunk.audio)

    def clear(self) -> None:
        self._answers.clear()
        super().clear()

    @property
    def answers(self) -> list[str]:
        """The ids of the requests whose answers play, or wait to be played."""
        return [] if self.idle else [request_id for request_id, *_ in self._answers]

    @property
    def heard(self) -> tuple[str, float] | None:
        """The request id of the answer that plays, and the milliseconds of it that were heard; None if none plays."""
        if self.idle or not self._answers:
            return None
        while len(self._answers) > 1 and self._answers[1][1] <= self.played_bytes:
            self._answers.popleft()
        request_id, before, start_ms = self._answers[0]
        return request_id, start_ms + max(0, self.played_bytes - before) / self._bytes_per_ms


# Standard input: a pipe, a file or a terminal

#: The most pieces that are read ahead of the consumer.
_QUEUED: Final = 8


def read_standard_input() -> bytes:
    """Read up to 64 KiB from standard input, without Python's buffer, whose lock a pending read would hold forever."""
    return os.read(0, 1 << 16)


async def read_ahead(read: Callable[[], bytes] = read_standard_input) -> AsyncGenerator[bytes, None]:
    """Yield the results of ``read`` until one is empty. Raises the OSError of ``read``.

    ``read`` is called in a daemon thread, so that it does not block the event loop, and the process can exit while
    ``read`` still waits.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_QUEUED)
    gone = threading.Event()

    def hand_over(item: bytes | OSError) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def pump() -> None:
        while room.acquire() and not gone.is_set():
            try:
                data = read()
            except OSError as error:
                hand_over(error)
                return
            hand_over(data)
            if not data:
                return

    threading.Thread(target=pump, name="standard input", daemon=True).start()
    try:
        while True:
            item = await queue.get()
            room.release()
            if isinstance(item, OSError):
                raise item
            if not item:
                return
            yield item
    finally:
        gone.set()
        room.release()
