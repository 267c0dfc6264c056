"""Raw audio: samples in memory, sample layouts, mixing, G.711, resampling, and ducking."""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from omni_ws.core.chunks import AudioEncoding, AudioFormat

#: Mono audio as decoders, engines and encoders exchange it: float32 of shape (samples,), from -1.0 to 1.0. The sample
#: rate is known from the context.
Samples: TypeAlias = NDArray[np.float32]
#: Mono audio as 16-bit integers, of which PCM16_SCALE stands for 1.0: many voices make it, and most clients want it.
Pcm16: TypeAlias = NDArray[np.int16]

SampleType = TypeVar("SampleType", np.float32, np.int16)

#: An empty array, read-only because it is shared.
NO_SAMPLES: Samples = np.zeros(0, dtype=np.float32)
NO_SAMPLES.setflags(write=False)

#: Samples that are no louder than this are silence: -46 dB.
AUDIBLE: Final = 0.005

#: The 16-bit value that stands for 1.0, everywhere; it is one more than the largest.
PCM16_SCALE: Final = 32768.0
# Created once: for a piece of 20 ms, conversions of numbers and names to numpy's types take as long as the arithmetic.
PCM16: Final = np.dtype("<i2")
_TO_PCM16: Final = np.float32(PCM16_SCALE)
_FROM_PCM16: Final = np.float32(1 / PCM16_SCALE)
_LEAST_PCM16: Final = np.float32(-PCM16_SCALE)
_MOST_PCM16: Final = np.float32(PCM16_SCALE - 1)


class SourceBlock(NamedTuple):
    """Decoded mono audio with its sample rate in Hz."""

    samples: Samples
    sample_rate: int


class SampleLayout(Enum):
    """The binary layouts of a sample, all little-endian."""

    U8 = "unsigned 8-bit, 128 is silence"
    S16 = "signed 16-bit"
    S24 = "signed 24-bit, packed"
    S32 = "signed 32-bit"
    F32 = "32-bit float"
    F64 = "64-bit float"
    MU_LAW = "G.711 mu-law"
    A_LAW = "G.711 A-law"

    @property
    def sample_bytes(self) -> int:
        """The size of one sample of one channel, in bytes."""
        return _SAMPLE_BYTES[self]


_SAMPLE_BYTES: Final = {
    SampleLayout.U8: 1,
    SampleLayout.S16: 2,
    SampleLayout.S24: 3,
    SampleLayout.S32: 4,
    SampleLayout.F32: 4,
    SampleLayout.F64: 8,
    SampleLayout.MU_LAW: 1,
    SampleLayout.A_LAW: 1,
}


def samples_from_bytes(data: bytes, layout: SampleLayout) -> Samples:
    """Convert bytes to samples within ±1.0, channels interleaved. ``data`` must hold whole samples."""
    match layout:
        case SampleLayout.S16:
            return samples_from_pcm16(np.frombuffer(data, PCM16))
        case SampleLayout.F32:
            return bounded(np.frombuffer(data, dtype="<f4"))
        case SampleLayout.F64:
            return bounded(np.frombuffer(data, dtype="<f8"))
        case SampleLayout.MU_LAW:
            return decode_mu_law(data)
        case SampleLayout.A_LAW:
            return decode_a_law(data)
        case SampleLayout.U8:
            return (np.frombuffer(data, dtype=np.uint8).astype(np.float32) - 128.0) * np.float32(1 / 128)
        case SampleLayout.S24:
            # Widen to 32 bits, with the three bytes as the upper ones.
            wide = np.zeros((len(data) // 3, 4), dtype=np.uint8)
            wide[:, 1:] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
            return _from_int32(wide.reshape(-1).view("<i4"))
        case SampleLayout.S32:
            return _from_int32(np.frombuffer(data, dtype="<i4"))


def samples_from_pcm16(values: Pcm16) -> Samples:
    """Return 16-bit values as samples."""
    samples: Samples = values * _FROM_PCM16
    return samples


def _from_int32(values: NDArray[Any]) -> Samples:
    return values.astype(np.float32) * np.float32(1 / 2**31)


def bounded(values: NDArray[Any]) -> Samples:
    """Return a float32 copy clipped to ±1.0, with NaN and infinities replaced by silence."""
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    within: Samples = np.clip(values, -1.0, 1.0).astype(np.float32)
    return within


def mixed_down(interleaved: Samples, channels: int) -> Samples:
    """Return the mean of the channels; for mono, ``interleaved`` itself."""
    if channels == 1:
        return interleaved
    # Adding up the channels takes a third of the time of numpy's mean over a short axis of two to six channels.
    mono: Samples = interleaved[::channels].copy()
    for channel in range(1, channels):
        mono += interleaved[channel::channels]
    mono *= np.float32(1 / channels)
    return mono


def pcm16_from_samples(samples: Samples) -> Pcm16:
    """Return the nearest 16-bit values (ties to even), clipped. The inverse of ``samples_from_pcm16``."""
    # A sum takes less time than a check of each sample, and is not finite if any sample is not. If the sum overflows,
    # ``bounded`` does no harm.
    if not math.isfinite(np.add.reduce(samples)):
        samples = bounded(samples)
    scaled = samples * _TO_PCM16
    np.rint(scaled, out=scaled)
    scaled.clip(_LEAST_PCM16, _MOST_PCM16, out=scaled)
    return scaled.astype(PCM16)


def as_pcm16(audio: Samples | Pcm16) -> Pcm16:
    """Return audio as 16-bit values, by ``pcm16_from_samples`` if it is float32."""
    return cast("Pcm16", audio) if audio.dtype == PCM16 else pcm16_from_samples(cast("Samples", audio))


def audible_part(samples: Samples) -> tuple[int, int] | None:
    """Return the indices [start, end) of the audible part of ``samples``; None if all are silent."""
    heard = np.flatnonzero(np.abs(samples) > AUDIBLE)
    return (int(heard[0]), int(heard[-1]) + 1) if len(heard) else None


def as_samples(audio: Samples | Pcm16) -> Samples:
    """Return audio as float32 samples, by ``samples_from_pcm16`` if it is 16-bit."""
    return samples_from_pcm16(cast("Pcm16", audio)) if audio.dtype == PCM16 else cast("Samples", audio)


# G.711: mu-law and A-law, 8-bit logarithmic PCM at 8 kHz
#
# After ITU-T G.711 (11/1988). Its 14-bit (mu-law) and 13-bit (A-law) values are left-justified in 16 bits, as in the
# ITU's software tool library (G.191). Encoding and decoding are table look-ups.

_MU_BIAS = 33
_MU_CLIP = 0x1FFF
_SIGN_BIT = 0x80
_A_LAW_TOGGLE = 0x55


def _mu_law_decode_table() -> NDArray[np.float32]:
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    exponent, mantissa = (code >> 4) & 7, code & 15
    magnitude = ((((mantissa << 1) + _MU_BIAS) << exponent) - _MU_BIAS) << 2
    return (np.where(code & _SIGN_BIT, -magnitude, magnitude) / PCM16_SCALE).astype(np.float32)


def _a_law_decode_table() -> NDArray[np.float32]:
    code = np.arange(256, dtype=np.int32) ^ _A_LAW_TOGGLE
    exponent, mantissa = (code >> 4) & 7, code & 15
    # Half a step is added: the decoded value is the middle of its interval.
    step = (mantissa << 4) + 8
    magnitude = np.where(exponent == 0, step, (step + 256) << np.maximum(exponent - 1, 0))
    return (np.where(code & _SIGN_BIT, magnitude, -magnitude) / PCM16_SCALE).astype(np.float32)


def _all_pcm16() -> NDArray[np.int32]:
    """Return all 16-bit values, each at the index that is its bits read as an unsigned number."""
    return np.arange(65536, dtype=np.uint16).view(np.int16).astype(np.int32)


def _highest_bit(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the index of the highest bit set in each positive value."""
    exponents: NDArray[np.int32] = np.frexp(values.astype(np.float64))[1]
    return exponents - 1


def _mu_law_encode_table() -> NDArray[np.uint8]:
    linear = _all_pcm16()
    # The magnitude of negative values is the one's complement, as in the reference implementation.
    magnitude = np.minimum((np.where(linear < 0, ~linear, linear) >> 2) + _MU_BIAS, _MU_CLIP).astype(np.int32)
    exponent = _highest_bit(magnitude) - 5
    mantissa = (magnitude >> (exponent + 1)) & 15
    code = ~((exponent << 4) | mantissa) & 0x7F
    table: NDArray[np.uint8] = np.where(linear < 0, code, code | _SIGN_BIT).astype(np.uint8)
    return table


def _a_law_encode_table() -> NDArray[np.uint8]:
    linear = _all_pcm16()
    magnitude = (np.where(linear < 0, ~linear, linear) >> 4).astype(np.int32)
    exponent = np.maximum(_highest_bit(np.maximum(magnitude, 1)) - 3, 0)
    mantissa = (magnitude >> np.maximum(exponent - 1, 0)) & 15
    code = (exponent << 4) | mantissa
    table: NDArray[np.uint8] = (np.where(linear < 0, code, code | _SIGN_BIT) ^ _A_LAW_TOGGLE).astype(np.uint8)
    return table


_MU_LAW_DECODED = _mu_law_decode_table()
_A_LAW_DECODED = _a_law_decode_table()
_MU_LAW_ENCODED = _mu_law_encode_table()
_A_LAW_ENCODED = _a_law_encode_table()


def decode_mu_law(data: bytes) -> NDArray[np.float32]:
    """Return the samples for mu-law bytes, as float32 within ±1.0."""
    return _MU_LAW_DECODED[np.frombuffer(data, dtype=np.uint8)]


def decode_a_law(data: bytes) -> NDArray[np.float32]:
    """Return the samples for A-law bytes, as float32 within ±1.0."""
    return _A_LAW_DECODED[np.frombuffer(data, dtype=np.uint8)]


def encode_mu_law(pcm16: NDArray[np.int16]) -> bytes:
    """Encode 16-bit samples as mu-law."""
    return _MU_LAW_ENCODED[pcm16.view(np.uint16)].tobytes()


def encode_a_law(pcm16: NDArray[np.int16]) -> bytes:
    """Encode 16-bit samples as A-law."""
    return _A_LAW_ENCODED[pcm16.view(np.uint16)].tobytes()


# Streams in pieces

#: Presets of soxr. LQ delays speech by less than 7 ms and suffices for it; HQ, for files, delays by 20 to 30 ms.
ResampleQuality: TypeAlias = Literal["QQ", "LQ", "MQ", "HQ", "VHQ"]


class StreamResampler:
    """A stateful resampler: the output does not depend on how the stream is cut into pieces.

    After ``flush`` it has returned exactly ``floor(n * target_rate / source_rate + 0.5)`` samples for ``n`` input
    samples. As with any band-limited resampling, values may slightly overshoot ±1.0. With equal rates it passes samples
    through.
    """

    def __init__(self, source_rate: int, target_rate: int, quality: ResampleQuality = "LQ") -> None:
        self.source_rate = source_rate
        self.target_rate = target_rate
        self._flushed = False
        #: None if the rates are equal; soxr is not imported then.
        self._stream: Any = None
        if source_rate != target_rate:
            import soxr

            self._stream = soxr.ResampleStream(source_rate, target_rate, 1, dtype="float32", quality=quality)

    def process(self, samples: Samples) -> Samples:
        """Return the resampled audio that is complete, which may be empty. Raises ValueError after ``flush``."""
        if self._flushed:
            raise ValueError("the resampler is already flushed")
        if self._stream is None:
            return samples
        resampled: Samples = self._stream.resample_chunk(np.ascontiguousarray(samples, dtype=np.float32))
        return resampled

    def flush(self) -> Samples:
        """End the stream; return the samples still held. A second call returns none."""
        if self._flushed or self._stream is None:
            self._flushed = True
            return NO_SAMPLES
        self._flushed = True
        rest: Samples = self._stream.resample_chunk(NO_SAMPLES, last=True)
        return rest


def resampled(samples: Samples, source_rate: int, target_rate: int, quality: ResampleQuality = "LQ") -> Samples:
    """Return ``samples``, a whole signal, resampled from ``source_rate`` to ``target_rate`` by a StreamResampler."""
    resampler = StreamResampler(source_rate, target_rate, quality)
    return np.concatenate([resampler.process(samples), resampler.flush()])


class RecentSamples(Generic[SampleType]):
    """The latest samples of a stream, in blocks of one type, addressed by their index in the stream."""

    def __init__(self, kind: type[SampleType], *, first: int = 0) -> None:
        """Begin without samples; the first sample that is added has the index ``first``."""
        self._none: NDArray[SampleType] = np.empty(0, kind)
        self._blocks: deque[NDArray[SampleType]] = deque()
        self._first = first

    def add(self, samples: NDArray[SampleType]) -> None:
        """Add the next samples of the stream."""
        if len(samples):
            self._blocks.append(samples)

    def forget(self, before: int) -> None:
        """Drop the blocks that end at the index ``before`` or earlier."""
        while self._blocks and self._first + len(self._blocks[0]) <= before:
            self._first += len(self._blocks.popleft())

    def between(self, start: int, end: int) -> NDArray[SampleType]:
        """Return the samples from the index ``start`` up to ``end``, exclusive, as far as they are kept."""
        held = np.concatenate([self._none, *self._blocks])
        return held[max(0, start - self._first) : max(0, end - self._first)]


class WholeFrames:
    """Cuts a stream of bytes into whole frames (one sample of each channel), and keeps an incomplete frame."""

    def __init__(self, frame_bytes: int) -> None:
        self._frame_bytes = frame_bytes
        self._carry = b""

    def take(self, data: bytes) -> bytes:
        """Return the whole frames that ``data`` completes."""
        if self._carry:
            data = self._carry + data
            self._carry = b""
        if rest := len(data) % self._frame_bytes:
            whole = len(data) - rest
            self._carry = bytes(data[whole:])
            data = data[:whole]
        return data

    def drop(self) -> None:
        """Drop the incomplete frame."""
        self._carry = b""


# Ducking: an answer is lowered and plays on while it is not known whether what is heard interrupts it.


#: The factor of lowered audio: 15 dB.
DUCKED: Final = 10 ** (-15 / 20)
#: How long it takes to lower or to raise the audio: a step would click.
RAMP_SEC: Final = 0.01


class Ducker:
    """Lowers a stream of mono pcm16 or mu-law by 15 dB, and raises it again.

    Audio that is not lowered passes unchanged. ``duck`` may be called while another thread calls ``apply``.
    """

    __slots__ = ("_gain", "_is_mu_law", "_slope", "_wanted")

    def __init__(self, audio: AudioFormat) -> None:
        self._is_mu_law = audio.encoding is AudioEncoding.PCMU
        self._slope = (1 - DUCKED) / (RAMP_SEC * audio.sample_rate)
        self._gain = self._wanted = 1.0

    def duck(self, lowered: bool) -> None:
        """Lower the audio from here on, or raise it to its full level."""
        self._wanted = DUCKED if lowered else 1.0

    def settle(self) -> None:
        """Skip the rest of a ramp, as nothing is playing."""
        self._gain = self._wanted

    def apply(self, audio: bytes) -> bytes:
        """Return the next bytes of the stream (whole samples), lowered by the present gain."""
        gain, wanted = self._gain, self._wanted
        if gain == wanted == 1.0 or not audio:
            return audio
        samples = decode_mu_law(audio) if self._is_mu_law else samples_from_pcm16(np.frombuffer(audio, PCM16))
        if gain == wanted:
            samples *= np.float32(gain)
        else:
            steps = np.arange(1, len(samples) + 1) * self._slope
            gains = np.minimum(gain + steps, wanted) if gain < wanted else np.maximum(gain - steps, wanted)
            self._gain = float(gains[-1])
            samples *= gains.astype(np.float32)
        pcm16 = pcm16_from_samples(samples)
        return encode_mu_law(pcm16) if self._is_mu_law else pcm16.tobytes()
