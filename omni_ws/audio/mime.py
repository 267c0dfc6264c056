"""Media types of audio, as in ``Content-Type`` and the ``format`` of a chunk.

Sources: RFC 9110 section 8.3.1 (syntax), RFC 2586 (L16), RFC 4856 (PCMU, PCMA), RFC 7845 (Opus in Ogg), RFC 2046 and
RFC 3551 (``audio/basic``), RFC 2231 (parameters that name their character set).
"""

from __future__ import annotations

from dataclasses import replace
from email.message import Message
from email.utils import collapse_rfc2231_value

from omni_ws.core.chunks import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate
from omni_ws.errors import InvalidValue, UnsupportedFormat

_ENCODINGS = {
    "audio/pcm": AudioEncoding.PCM16,
    "audio/x-pcm": AudioEncoding.PCM16,
    "audio/pcm16": AudioEncoding.PCM16,
    "audio/f32": AudioEncoding.F32,
    "audio/x-f32": AudioEncoding.F32,
    "audio/basic": AudioEncoding.PCMU,
    "audio/pcmu": AudioEncoding.PCMU,
    "audio/pcma": AudioEncoding.PCMA,
    "audio/wav": AudioEncoding.WAV,
    "audio/x-wav": AudioEncoding.WAV,
    "audio/wave": AudioEncoding.WAV,
    "audio/vnd.wave": AudioEncoding.WAV,
    "audio/opus": AudioEncoding.OPUS,
    "audio/ogg": AudioEncoding.OGG,
    "audio/webm": AudioEncoding.WEBM,
    "audio/mpeg": AudioEncoding.MP3,
    "audio/mp3": AudioEncoding.MP3,
    "audio/flac": AudioEncoding.FLAC,
    "audio/x-flac": AudioEncoding.FLAC,
    "audio/aac": AudioEncoding.AAC,
    "audio/x-aac": AudioEncoding.AAC,
    "audio/aacp": AudioEncoding.AAC,
    "audio/x-hx-aac-adts": AudioEncoding.AAC,
    "audio/mp4": AudioEncoding.MP4,
    "audio/x-mp4": AudioEncoding.MP4,
    "audio/m4a": AudioEncoding.M4A,
    "audio/x-m4a": AudioEncoding.M4A,
    "audio/quicktime": AudioEncoding.MOV,
    "audio/mov": AudioEncoding.MOV,
}
_MEDIA_TYPES = {
    AudioEncoding.PCM16: "audio/pcm",
    AudioEncoding.F32: "audio/x-f32",
    AudioEncoding.PCMU: "audio/pcmu",
    AudioEncoding.PCMA: "audio/pcma",
    AudioEncoding.WAV: "audio/wav",
    AudioEncoding.OPUS: "audio/ogg;codecs=opus",
    AudioEncoding.OGG: "audio/ogg",
    AudioEncoding.WEBM: "audio/webm",
    AudioEncoding.MP3: "audio/mpeg",
    AudioEncoding.FLAC: "audio/flac",
    AudioEncoding.AAC: "audio/aac",
    AudioEncoding.M4A: "audio/x-m4a",
    AudioEncoding.MP4: "audio/mp4",
    AudioEncoding.MOV: "audio/quicktime",
}
#: The registrations of the G.711 types default to 8,000 Hz mono.
_TELEPHONE = frozenset({AudioEncoding.PCMU, AudioEncoding.PCMA})
_TELEPHONE_RATE = 8_000
#: Parameters with which some clients give the sample width.
_SAMPLE_BITS_PARAMETERS = ("bits", "bit", "bitdepth", "bit-depth", "bit_depth")
_SAMPLE_BITS = {AudioEncoding.PCM16: 16, AudioEncoding.F32: 32, AudioEncoding.PCMU: 8, AudioEncoding.PCMA: 8}


def parse_audio_mime(content_type: str, *, default: AudioFormat | None = None) -> AudioFormat:
    """Parse a media type such as ``audio/pcm;rate=16000;channels=2``; unknown parameters are ignored.

    Rate and channels that it lacks are those of ``default`` (without it 16,000 Hz mono), or 8,000 Hz mono for G.711.
    Raises InvalidValue or UnsupportedFormat, naming the parameter.
    """
    default = default or AudioFormat()
    media, parameters = _split(content_type)
    encoding = _encoding(media, parameters)
    if encoding in _TELEPHONE:
        default = AudioFormat(encoding, _TELEPHONE_RATE, 1)
    _check_sample_layout(encoding, parameters)
    rate, channels = default.sample_rate, default.channels
    if "rate" in parameters:
        rate = checked_sample_rate(_integer("rate", parameters["rate"]), param="rate")
    if "channels" in parameters:
        channels = checked_channels(_integer("channels", parameters["channels"]), param="channels")
    return AudioFormat(encoding, rate, channels)


def parse_audio_format(text: str, default: AudioFormat) -> AudioFormat:
    """Parse the ``format`` of a chunk: a wire name (``pcm16``) or a media type.

    Rate and channels that it lacks are those of ``default``. Raises as ``parse_audio_mime`` does.
    """
    if "/" in text:
        return parse_audio_mime(text, default=default)
    try:
        return replace(default, encoding=AudioEncoding(text))
    except ValueError:
        known = ", ".join(AudioEncoding)
        raise UnsupportedFormat(f"unknown audio format {text!r}; supported: {known}", param="format") from None


def media_type(format: AudioFormat) -> str:
    """Return the media type for ``Content-Type``; raw formats have their rate and channels as parameters."""
    name = _MEDIA_TYPES[format.encoding]
    if not format.is_raw:
        return name
    return f"{name};rate={format.sample_rate};channels={format.channels}"


def _split(content_type: str) -> tuple[str, dict[str, str]]:
    message = Message()
    message["content-type"] = " ".join(content_type.split())
    media = content_type.partition(";")[0].strip().lower()
    raw_parameters = message.get_params(failobj=[])
    return media, {name.lower(): collapse_rfc2231_value(value) for name, value in raw_parameters[1:]}


def _encoding(media: str, parameters: dict[str, str]) -> AudioEncoding:
    if media == "audio/l16":
        raise UnsupportedFormat(
            "audio/l16 (big-endian) is not supported; send little-endian samples as audio/pcm", param="format"
        )
    encoding = _ENCODINGS.get(media)
    if encoding is None:
        raise UnsupportedFormat(f"unknown audio type {media!r}", param="format")
    if encoding is AudioEncoding.OGG and parameters.get("codecs", "").lower() == "opus":
        return AudioEncoding.OPUS
    return encoding


def _check_sample_layout(encoding: AudioEncoding, parameters: dict[str, str]) -> None:
    """Raise UnsupportedFormat for parameters that contradict the encoding, which would decode to noise."""
    expected = _SAMPLE_BITS.get(encoding)
    for name in _SAMPLE_BITS_PARAMETERS:
        if expected is not None and name in parameters and _integer(name, parameters[name]) != expected:
            raise UnsupportedFormat(f"{name} of {encoding} must be {expected}, got {parameters[name]}", param=name)
    for name in ("endianness", "endian"):
        if expected is not None and parameters.get(name, "little").lower().startswith("big"):
            raise UnsupportedFormat("big-endian samples are not supported", param=name)


def _integer(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise InvalidValue(f"{name} must be a whole number, got {value[:32]!r}", param=name)
    return int(value)
