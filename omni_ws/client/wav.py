"""WAV files as 16-bit PCM, which every engine takes."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from os import PathLike


class UnreadableAudio(ValueError):
    """The file is not a WAV file of integer samples."""


@dataclass(frozen=True, slots=True)
class Pcm16:
    """Signed 16-bit little-endian samples, channels interleaved."""

    samples: bytes
    sample_rate: int
    channels: int = 1

    @property
    def duration_ms(self) -> float:
        return len(self.samples) / (2 * self.channels) * 1000 / self.sample_rate


def read_wav(path: str | PathLike[str]) -> Pcm16:
    """Reads a WAV file with integer samples of 8, 16, 24 or 32 bits.

    Raises UnreadableAudio for any other, and OSError if the file cannot be opened.
    """
    try:
        with open(path, "rb") as file, wave.open(file) as reader:
            data, width = reader.readframes(reader.getnframes()), reader.getsampwidth()
            sample_rate, channels = reader.getframerate(), reader.getnchannels()
    except (wave.Error, EOFError) as error:
        raise UnreadableAudio(f"not a WAV file with plain samples: {error or 'it ends in its header'}") from None
    if not 1 <= width <= 4 or sample_rate <= 0:
        raise UnreadableAudio(f"samples of {width} bytes at {sample_rate} Hz")
    return Pcm16(_to_16_bit(data, width), sample_rate, channels)


def write_wav(path: str | PathLike[str], audio: Pcm16) -> None:
    """Writes a WAV file with 16-bit samples."""
    with open(path, "wb") as file, wave.open(file, "wb") as writer:
        writer.setnchannels(audio.channels)
        writer.setsampwidth(2)
        writer.setframerate(audio.sample_rate)
        writer.writeframes(audio.samples)


def _to_16_bit(data: bytes, width: int) -> bytes:
    """Keeps the two most significant bytes of each sample."""
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
