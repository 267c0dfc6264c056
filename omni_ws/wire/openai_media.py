"""Media in JSON bodies: base64, ``data:`` URLs, and references to files and URLs that the server fetches."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, TypeAlias
from urllib.parse import unquote_to_bytes, urlsplit

from omni_ws.core.chunks import MAX_FORMAT_CHARACTERS, AudioEncoding, InputChunk, Modality
from omni_ws.core.file_heads import encoding_by_head, sniff_image
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
_URL: Final = re.compile(r"[\0-\x20]*[a-zA-Z][a-zA-Z0-9+.-]+:")
#: What the URL standard strips off a URL, and drops anywhere in it; and white space in base64.
_STRIPPED: Final = "".join(map(chr, range(0x21)))
_DROPPED: Final = dict.fromkeys(map(ord, "\t\r\n"))
_BLANKS: Final = re.compile(rb"[\t\n\f\r ]+")


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
            encoding = encoding_by_head(data) or audio_encoding(suffix, self.place)
            return InputChunk(Modality.AUDIO, data, format=encoding.value)
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
        if self.modality is Modality.AUDIO and (encoding := encoding_by_head(data)):
            return InputChunk(Modality.AUDIO, data, format=encoding.value)
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
    content = _base64(str(data), f"{where}.data")
    encoding = encoding_by_head(content) or audio_encoding(kind, f"{where}.format")
    return InputChunk(Modality.AUDIO, content, format=encoding.value)


def media_by_url(url: Any, modality: Modality, where: str) -> InputChunk | MediaUrl:
    """Return the content of a ``data:`` URL, or a reference to any other.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming ``where``.
    """
    if not isinstance(url, str):
        raise InvalidValue("url must be a string", param=where)
    url = url.strip(_STRIPPED)
    scheme = url[:8].partition(":")[0].lower()
    if scheme in ("https", "http"):
        return MediaUrl(url, modality, where)
    if scheme != "data":
        raise UnsupportedParameter("media must be given as data:, https: or http: URLs", param=where)
    return _data_url(url[5:], modality, where)


def _data_url(rest: str, modality: Modality, where: str) -> InputChunk:
    """Return the content of a ``data:`` URL, of which ``rest`` is what stands behind the scheme."""
    head, comma, data = rest.partition("#")[0].partition(",")
    if not comma:
        raise InvalidValue("a data: URL must have a comma before its data", param=where)
    mime, *attributes = (one.strip() for one in _without_line_ends(head).lower().split(";"))
    content = _base64_of_url(data, where) if "base64" in attributes else _unquoted(_without_line_ends(data))
    if modality is Modality.AUDIO and (encoding := encoding_by_head(content)):
        return InputChunk(Modality.AUDIO, content, format=encoding.value)
    if not mime.startswith(f"{modality}/"):
        raise UnsupportedFormat(f"expected media type {modality}/*, got {mime[:64]!r}", param=where)
    if modality is Modality.AUDIO:  # raw formats have their sample rate in the parameters
        mime = ";".join([mime, *(one for one in attributes if one and one != "base64")])
    if len(mime) > MAX_FORMAT_CHARACTERS:
        raise UnsupportedFormat(f"a media type has at most {MAX_FORMAT_CHARACTERS} characters", param=where)
    return _checked_image(InputChunk(modality, content, format=mime), where)


def _unquoted(text: str) -> bytes:
    return unquote_to_bytes(text.encode("utf-8", "replace"))


def _without_line_ends(text: str) -> str:
    """What a URL is without the characters that its standard drops anywhere."""
    return text.translate(_DROPPED) if any(one in text for one in "\t\r\n") else text


def _base64_of_url(data: str, where: str) -> bytes:
    """Decode base64 as the URL standard does: percent-encoding, white space and missing padding are no errors."""
    if len(data) % 4 == 0:
        with suppress(ValueError):
            return base64.b64decode(data, validate=True)
    encoded = _BLANKS.sub(b"", _unquoted(data))
    if len(encoded) % 4 == 0:
        encoded = encoded[:-4] + encoded[-4:].removesuffix(b"=").removesuffix(b"=")
    if b"=" in encoded:
        raise InvalidValue("not base64", param=where)
    return _base64(encoded + b"=" * (-len(encoded) % 4), where)


def _checked_image(chunk: InputChunk, where: str) -> InputChunk:
    if chunk.modality is Modality.IMAGE and sniff_image(chunk.payload) is None:
        raise UnsupportedFormat("unsupported image format; supported: png, jpeg, webp, gif, bmp", param=where)
    return chunk


def _base64(data: str | bytes, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue("not base64", param=where) from None
