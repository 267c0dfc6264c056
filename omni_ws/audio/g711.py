"""G.711: mu-law and A-law, 8-bit logarithmic PCM at 8 kHz.

After ITU-T G.711 (11/1988). Its 14-bit (mu-law) and 13-bit (A-law) values are left-justified in 16 bits, as in the
ITU's software tool library (G.191). Encoding and decoding are table look-ups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MU_BIAS = 33
_MU_CLIP = 0x1FFF
_SIGN_BIT = 0x80
_A_LAW_TOGGLE = 0x55


def _mu_law_decode_table() -> NDArray[np.float32]:
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    exponent, mantissa = (code >> 4) & 7, code & 15
    magnitude = ((((mantissa << 1) + _MU_BIAS) << exponent) - _MU_BIAS) << 2
    return (np.where(code & _SIGN_BIT, -magnitude, magnitude) / 32768).astype(np.float32)


def _a_law_decode_table() -> NDArray[np.float32]:
    code = np.arange(256, dtype=np.int32) ^ _A_LAW_TOGGLE
    exponent, mantissa = (code >> 4) & 7, code & 15
    # Half a step is added: the decoded value is the middle of its interval.
    step = (mantissa << 4) + 8
    magnitude = np.where(exponent == 0, step, (step + 256) << np.maximum(exponent - 1, 0))
    return (np.where(code & _SIGN_BIT, magnitude, -magnitude) / 32768).astype(np.float32)


def _all_pcm16() -> NDArray[np.int32]:
    """Return all 16-bit values, each at the index that its bits form as an unsigned number."""
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
    """Return the samples for bytes of mu-law, as float32 within ±1.0."""
    return _MU_LAW_DECODED[np.frombuffer(data, dtype=np.uint8)]


def decode_a_law(data: bytes) -> NDArray[np.float32]:
    """Return the samples for bytes of A-law, as float32 within ±1.0."""
    return _A_LAW_DECODED[np.frombuffer(data, dtype=np.uint8)]


def encode_mu_law(pcm16: NDArray[np.int16]) -> bytes:
    """Encode 16-bit samples as mu-law."""
    return _MU_LAW_ENCODED[pcm16.view(np.uint16)].tobytes()


def encode_a_law(pcm16: NDArray[np.int16]) -> bytes:
    """Encode 16-bit samples as A-law."""
    return _A_LAW_ENCODED[pcm16.view(np.uint16)].tobytes()
