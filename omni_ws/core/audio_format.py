"""AudioFormat: the encoding, sample rate and channels of an audio stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omni_ws.errors import InvalidValue


class AudioEncoding(StrEnum):
    """The audio formats by their names on the wire (protocol/README.md, "Audio")."""

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
    AAC = "aac"
    M4A = "m4a"
    MP4 = "mp4"
    MOV = "mov"


#: Bytes per sample and channel of the raw encodings.
SAMPLE_BYTES = {AudioEncoding.PCM16: 2, AudioEncoding.F32: 4, AudioEncoding.PCMU: 1, AudioEncoding.PCMA: 1}

#: The duration of compressed audio is unknown until it is decoded. Start policies assume this rate, the upper end of
#: what speech is encoded at (64 kbit/s): they may fire late, but not before there is enough audio.
NOMINAL_COMPRESSED_BYTES_PER_SECOND = 8_000

MIN_SAMPLE_RATE = 8_000
MAX_SAMPLE_RATE = 192_000
MAX_CHANNELS = 32


def checked_sample_rate(value: int, *, param: str = "sample_rate") -> int:
    """Return ``value``, a sample rate in Hz. Raises InvalidValue, naming ``param``, when it is out of range."""
    if not MIN_SAMPLE_RATE <= value <= MAX_SAMPLE_RATE:
        raise InvalidValue(
            f"the sample rate must be {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz, got {value}", param=param
        )
    return value


def checked_channels(value: int, *, param: str = "channels") -> int:
    """Return ``value``, a count of channels. Raises InvalidValue, naming ``param``, when it is out of range."""
    if not 1 <= value <= MAX_CHANNELS:
        raise InvalidValue(f"the number of channels must be 1 to {MAX_CHANNELS}, got {value}", param=param)
    return value


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """How to interpret the bytes of an audio stream.

    ``sample_rate`` is in Hz. Containers and self-describing formats (WAV, Ogg, WebM, MP3, FLAC, AAC, MP4) carry their
    own rate and channels, which win over these.
    """

    encoding: AudioEncoding = AudioEncoding.PCM16
    sample_rate: int = 16_000
    channels: int = 1

    @property
    def is_raw(self) -> bool:
        """Whether the stream is bare samples, without headers: any frame boundary is a valid cut."""
        return self.encoding in SAMPLE_BYTES

    @property
    def bytes_per_second(self) -> int:
        """The byte rate: exact for raw samples, of 16-bit samples for ``wav``, nominal for compressed audio."""
        if self.encoding is AudioEncoding.WAV:
            return 2 * self.sample_rate * self.channels
        sample_bytes = SAMPLE_BYTES.get(self.encoding)
        if sample_bytes is None:
            return NOMINAL_COMPRESSED_BYTES_PER_SECOND
        return sample_bytes * self.sample_rate * self.channels

    def duration_ms(self, byte_count: int) -> float:
        """Return the milliseconds that ``byte_count`` bytes last at ``bytes_per_second``."""
        return byte_count * 1000 / self.bytes_per_second


DEFAULT_INPUT_AUDIO = AudioFormat()
