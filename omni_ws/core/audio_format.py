"""What the bytes of an audio stream are: encoding, sample rate, channels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omni_ws.errors import InvalidValue


class AudioEncoding(StrEnum):
    """Wire names of the audio formats (protocol/README.md, "Audio")."""

    PCM16 = "pcm16"
    F32 = "f32"
    PCMU = "pcmu"
    PCMA = "pcma"
    WAV = "wav"
    OPUS = "opus"
    WEBM = "webm"
    MP3 = "mp3"
    FLAC = "flac"
    OGG = "ogg"


#: Bytes of one sample of the encodings that are nothing but samples.
SAMPLE_BYTES = {AudioEncoding.PCM16: 2, AudioEncoding.F32: 4, AudioEncoding.PCMU: 1, AudioEncoding.PCMA: 1}

#: The length of compressed audio is not known before it is decoded. Start policies count it at this rate, which is
#: the usual upper end for speech: a policy may fire a little late, never before there is anything to work on.
NOMINAL_COMPRESSED_BYTES_PER_SECOND = 8_000

MIN_SAMPLE_RATE = 8_000
MAX_SAMPLE_RATE = 192_000
MAX_CHANNELS = 32


def checked_sample_rate(value: int, *, param: str = "sample_rate") -> int:
    """``value`` in Hz, or InvalidValue naming ``param``."""
    if not MIN_SAMPLE_RATE <= value <= MAX_SAMPLE_RATE:
        raise InvalidValue(
            f"a sample rate of {value} Hz is outside {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz", param=param
        )
    return value


def checked_channels(value: int, *, param: str = "channels") -> int:
    """``value``, or InvalidValue naming ``param``."""
    if not 1 <= value <= MAX_CHANNELS:
        raise InvalidValue(f"{value} channels are outside 1 to {MAX_CHANNELS}", param=param)
    return value


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """``sample_rate`` in Hz. For containers, which name their own, rate and channels are only a fallback."""

    encoding: AudioEncoding = AudioEncoding.PCM16
    sample_rate: int = 16_000
    channels: int = 1

    @property
    def is_raw(self) -> bool:
        """Whether the bytes are bare samples, without a header."""
        return self.encoding in SAMPLE_BYTES

    @property
    def bytes_per_second(self) -> int:
        """Exact for raw samples; for ``wav`` as if it held pcm16; nominal for compressed audio."""
        if self.encoding is AudioEncoding.WAV:
            return 2 * self.sample_rate * self.channels
        sample_bytes = SAMPLE_BYTES.get(self.encoding)
        if sample_bytes is None:
            return NOMINAL_COMPRESSED_BYTES_PER_SECOND
        return sample_bytes * self.sample_rate * self.channels

    def duration_ms(self, byte_count: int) -> float:
        return byte_count * 1000 / self.bytes_per_second


DEFAULT_INPUT_AUDIO = AudioFormat()
