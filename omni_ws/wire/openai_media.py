"""Media in JSON bodies: base64, ``data:`` URLs, and references to files and URLs that the server fetches."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from omni_ws.core.audio_format import AudioEncoding
from omni_ws.core.chunks import MAX_FORMAT_CHARACTERS, InputChunk, Modality
from omni_ws.core.image_type import sniff_image
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter

#: The fields of a chat body that contain media outside the messages, in the order in which they precede the text.
MEDIA_FIELDS: Final = {"images": Modality.IMAGE, "audios": Modality.AUDIO, "videos": Modality.VIDEO}

#: OpenAI's names of audio formats that differ from the server's.
_AUDIO_FORMATS: Final = {
    "pcm": AudioEncoding.PCM16,
    "g711_ulaw": AudioEncoding.PCMU,
    "g711_alaw": AudioEncoding.PCMA,
}
#: A URL by its scheme, which has at least two letters: one letter is a drive of Windows.
_URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:")


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A reference to a file in the server's media folder. ``place`` is the JSON path of the reference."""

    path: str
    modality: Modality
    place: str

    def chunk(self, data: bytes) -> InputChunk:
        """Return the input chunk for the file's content. Raises UnsupportedFormat."""
        if self.modality is Modality.AUDIO:
            suffix = PurePath(self.path).suffix.removeprefix(".").lower()
            return InputChunk(Modality.AUDIO, data, format=audio_encoding(suffix, self.place).value)
        return _checked_image(InputChunk(self.modality, data), self.place)


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A reference to an ``http:`` or ``https:`` URL. ``place`` is the JSON path of the reference."""

    url: str
    modality: Modality
    place: str

    def chunk(self, data: bytes, media_type: str) -> InputChunk:
        """Return the input chunk for the content of the URL.

        ``media_type`` is that of the response, or "" when unknown; the suffix of the URL's path decides then. Raises
        UnsupportedFormat.
        """
        kind = media_type.strip().lower()
        if kind.startswith(f"{self.modality}/"):
            return _checked_image(InputChunk(self.modality, data, format=kind), self.place)
        return MediaFile(urlsplit(self.url).path, self.modality, self.place).chunk(data)


NamedMedia: TypeAlias = MediaFile | MediaUrl


def read_media(body: Mapping[str, Any]) -> Iterator[InputChunk | NamedMedia]:
    """Yield the media in ``images``, ``audios`` and ``videos``. Raises an InvalidRequest that names the JSON path."""
    for name, modality in MEDIA_FIELDS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, list):
            raise InvalidValue(f"{name} must be a list of data: URLs or paths", param=name)
        for index, item in enumerate(value):
            place = f"{name}[{index}]"
            if isinstance(item, str) and item and not _URL.match(item):
                yield MediaFile(item, modality, place)
            else:
                yield media_by_url(item, modality, place)


def audio_encoding(name: str, param: str) -> AudioEncoding:
    """Return the encoding for OpenAI's name of an audio format, or the server's. Raises UnsupportedFormat."""
    try:
        return _AUDIO_FORMATS.get(name) or AudioEncoding(name)
    except ValueError:
        known = ", ".join(sorted({*AudioEncoding, *_AUDIO_FORMATS}))
        raise UnsupportedFormat(f"unsupported audio format {name[:32]!r}; supported: {known}", param=param) from None


def audio_chunk(audio: Any, where: str) -> InputChunk:
    """Return the chunk for an ``input_audio`` part at the JSON path ``where``.

    Raises InvalidValue or UnsupportedFormat.
    """
    if not isinstance(audio, Mapping):
        raise InvalidValue("input_audio must be an object", param=where)
    kind, data = audio.get("format", "wav"), audio.get("data")
    for name, value in (("format", kind), ("data", data)):
        if not isinstance(value, str):
            raise InvalidValue(f"{name} must be a string", param=f"{where}.{name}")
    encoding = audio_encoding(kind, f"{where}.format")
    return InputChunk(Modality.AUDIO, _base64(str(data), f"{where}.data"), format=encoding.value)


def media_by_url(url: Any, modality: Modality, where: str) -> InputChunk | MediaUrl:
    """Return the content of a ``data:`` URL, or a reference to any other.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming ``where``.
    """
    if not isinstance(url, str):
        raise InvalidValue("url must be a string", param=where)
    scheme = url[:8].partition(":")[0].lower()
    if scheme in ("https", "http"):
        return MediaUrl(url, modality, where)
    if scheme != "data":
        raise UnsupportedParameter("media must be given as data:, https: or http: URLs", param=where)
    head, comma, data = url[5:].partition(",")
    mime, *attributes = head.lower().split(";")
    if not comma or "base64" not in attributes:
        raise InvalidValue("a data: URL must be base64-encoded", param=where)
    if not mime.startswith(f"{modality}/"):
        raise UnsupportedFormat(f"expected media type {modality}/*, got {mime[:64]!r}", param=where)
    if modality is Modality.AUDIO:  # raw formats have their sample rate in the parameters
        mime = ";".join([mime, *(one for one in attributes if one != "base64")])
    if len(mime) > MAX_FORMAT_CHARACTERS:
        raise UnsupportedFormat(f"a media type has at most {MAX_FORMAT_CHARACTERS} characters", param=where)
    return _checked_image(InputChunk(modality, _base64(data, where), format=mime), where)


def _checked_image(chunk: InputChunk, where: str) -> InputChunk:
    if chunk.modality is Modality.IMAGE and sniff_image(chunk.payload) is None:
        raise UnsupportedFormat("unsupported image format; supported: png, jpeg, webp, gif, bmp", param=where)
    return chunk


def _base64(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue("not base64", param=where) from None
