"""Requests of ``/v1/audio/transcriptions``: forms, and the parameters of a streamed body."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from omni_ws.core.chunks import AudioEncoding, InputChunk, Modality
from omni_ws.core.file_heads import encoding_by_head
from omni_ws.core.json_values import language_code
from omni_ws.errors import InvalidValue, UnsupportedFormat, UnsupportedParameter
from omni_ws.wire.openai_fields import ConfigurationPatch, refuse_unavailable
from omni_ws.wire.session_config import invalid_value

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
Granularity = Literal["word", "segment"]

#: OpenAI fields that the server does not support, with the values that are accepted because they change nothing.
_NOT_AVAILABLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "prompt": ("",),
    "include": ([],),
    "chunking_strategy": ("auto",),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
}
#: Fields that are lists under their bare names, too.
_LISTS: Final = frozenset({"timestamp_granularities", "include", "known_speaker_names", "known_speaker_references"})
_INDEX: Final = re.compile(r"[0-9]{1,9}")
#: Several words, as in the name of a language, which no tag has.
_SEVERAL_WORDS: Final = re.compile(r"\s*\w+(?:[ ,()']+\w+)+\)?\s*")
#: Formats that need the times of words.
TIMED_FORMATS: Final = frozenset({"verbose_json", "srt", "vtt"})


class TranscriptionBody(Struct, frozen=True, kw_only=True):
    """The fields of a transcription request."""

    model: str | None = None
    language: str | None = None
    response_format: ResponseFormat = "json"
    temperature: float | None = None
    timestamp_granularities: list[Granularity] | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """A parsed request.

    ``language`` is the primary subtag (RFC 5646) of the requested language; ``stream`` is None where it is not set.
    """

    patch: ConfigurationPatch
    language: str | None
    response_format: ResponseFormat
    granularities: frozenset[Granularity]
    stream: bool | None


def form_fields(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Convert form fields to a body.

    An empty field is an absent one. Names that end with ``[]`` or ``[0]`` are lists, in the order of their indexes, and
    take precedence over the same name without it; those with another key are objects. Of other repeated fields the
    last one counts.
    """
    fields: dict[str, Any] = {}
    lists: dict[str, list[tuple[int, str]]] = {}
    objects: dict[str, dict[str, str]] = {}
    for name, value in pairs:
        if not value:
            continue
        root, bracket, key = name.removesuffix("]").partition("[") if name.endswith("]") else (name, "", "")
        if bracket and key and not _INDEX.fullmatch(key):
            objects.setdefault(root, {})[key] = value
        elif bracket or name in _LISTS:
            lists.setdefault(root, []).append((int(key or 0), value))
        else:
            fields[name] = value
    ordered = {name: [value for _, value in sorted(items, key=itemgetter(0))] for name, items in lists.items()}
    return fields | objects | ordered


def read_transcription(body: Mapping[str, Any], *, input_field: str | None = None) -> TranscriptionRequest:
    """Parse a request. ``input_field`` is the field that contains the audio; None where chunks do.

    Raises InvalidValue or UnsupportedParameter, naming the field.
    """
    refuse_unavailable(body, _NOT_AVAILABLE)
    try:
        # Not strict, because every value of a form is a string.
        fields = msgspec.convert(body, TranscriptionBody, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None
    granularities = frozenset(fields.timestamp_granularities or ())
    if granularities and fields.response_format != "verbose_json":
        raise InvalidValue(
            "timestamp_granularities requires response_format verbose_json", param="timestamp_granularities"
        )
    if fields.stream and fields.response_format not in ("json", "text"):
        raise UnsupportedParameter("response_format must be json or text for a stream", param="response_format")
    language = _language(fields.language)
    patch: dict[str, Any] = {"task": "transcribe", "modalities": ["text"], "model": fields.model}
    if fields.temperature is not None:
        patch["sampling"] = {"temperature": fields.temperature}
    if "input_audio" in body:
        patch["input_audio"] = body["input_audio"]
    names = {"sampling.temperature": "temperature"}
    audio = patch.get("input_audio", {})
    if language is not None and isinstance(audio, Mapping):
        patch["input_audio"] = {**audio, "language": language}
        names["input_audio.language"] = "language"
    return TranscriptionRequest(
        patch=ConfigurationPatch(patch, names, frozenset(body), input_field),
        language=None if language is None else language.lower().partition("-")[0],
        response_format=fields.response_format,
        granularities=granularities or frozenset({"segment"}),
        stream=fields.stream,
    )


def _language(wanted: str | None) -> str | None:
    """The tag of the language that is asked for, None where it is to be found. Raises UnsupportedParameter."""
    if wanted is None or not wanted.strip() or wanted.strip().lower() == "auto":
        return None
    tag = language_code(wanted)
    if _SEVERAL_WORDS.fullmatch(tag[:64]):
        raise UnsupportedParameter(f"language {wanted[:64]!r} is not known", param="language")
    return tag


def audio_file(data: bytes, *, filename: str, content_type: str) -> InputChunk:
    """Return the chunk for an uploaded file. Its head decides the format, then its type, then its name.

    Raises InvalidValue for an empty file, UnsupportedFormat for an unknown format.
    """
    if not data:
        raise InvalidValue("the file is empty", param="file")
    if (found := encoding_by_head(data)) is not None:
        return InputChunk(Modality.AUDIO, data, format=found.value)
    if content_type.lower().startswith("audio/"):
        return InputChunk(Modality.AUDIO, data, format=content_type)
    suffix = PurePath(filename).suffix.removeprefix(".").lower()
    try:
        encoding = {"pcm": AudioEncoding.PCM16, "raw": AudioEncoding.PCM16}.get(suffix) or AudioEncoding(suffix)
    except ValueError:
        raise UnsupportedFormat(
            "unsupported audio file; supported: wav, mp3, m4a, mp4, mov, aac, flac, ogg, opus, webm", param="file"
        ) from None
    return InputChunk(Modality.AUDIO, data, format=encoding.value)
