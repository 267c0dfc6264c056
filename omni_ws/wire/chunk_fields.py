"""The fields of an input chunk in JSON, and the names that other APIs use for its content.

Those are refused, so that a mistaken client does not silently lose its input.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from omni_ws.core.chunks import MAX_FORMAT_CHARACTERS, MAX_ID_CHARACTERS, Modality

#: The largest integer that all JSON parsers represent exactly (RFC 8259, section 6).
MAX_TIMESTAMP_MS: Final = 2**53 - 1


class AcceptedFields(Struct, frozen=True, kw_only=True):
    """What a chunk may have, beside its number; at most one of ``payload`` and ``text``."""

    modality: Modality | None = None
    payload: bytes | None = None
    text: str | None = None
    format: Annotated[str, Meta(max_length=MAX_FORMAT_CHARACTERS)] | None = None
    timestamp_ms: (
        Annotated[int, Meta(ge=0, le=MAX_TIMESTAMP_MS)] | Annotated[float, Meta(ge=0, le=MAX_TIMESTAMP_MS)] | None
    ) = None
    end_of_input: bool | None = None
    role: str | None = None
    tool_call_id: Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)] | None = None


class ChunkFields(AcceptedFields, frozen=True, kw_only=True):
    """The fields of a chunk, of which those that are declared here have to be absent or null.

    Their type alone enforces that. They come last: the decoder looks for a name in the order of the fields.
    """

    url: None = None
    data: None = None
    content: None = None
    delta: None = None
    file: None = None
    image: None = None
    video: None = None
    image_url: None = None
    audio_url: None = None
    video_url: None = None
    base64: None = None
    b64: None = None
    b64_json: None = None
    bytes: None = None
    binary: None = None
    blob: None = None
    body: None = None
    buffer: None = None
    raw: None = None
    encoded: None = None
    payloads: None = None
    payload_base64: None = None
    chunk: None = None
    chunks: None = None
    contents: None = None
    texts: None = None
    text_delta: None = None
    input_text: None = None
    transcript: None = None
    message: None = None
    output: None = None
    result: None = None
    token_ids: None = None
    input_ids: None = None
    tokens: None = None
    files: None = None
    file_data: None = None
    file_id: None = None
    file_url: None = None
    file_path: None = None
    attachment: None = None
    attachments: None = None
    document: None = None
    parts: None = None
    media: None = None
    media_url: None = None
    uri: None = None
    src: None = None
    href: None = None
    inline_data: None = None
    inlineData: None = None
    imageUrl: None = None
    audio_data: None = None
    speech: None = None
    pcm: None = None
    wav: None = None
    mp3: None = None
    samples: None = None
    sample: None = None
    input_image: None = None
    image_data: None = None
    pixels: None = None
    input_video: None = None
    video_data: None = None
    frame: None = None
    frames: None = None
    # Names that request parameters have, too.
    audio: None = None
    input_audio: None = None
    images: None = None
    audios: None = None
    videos: None = None
    messages: None = None
    input: None = None
    prompt: None = None


REFUSED_CONTENT_FIELDS: Final = frozenset(ChunkFields.__struct_fields__) - frozenset(AcceptedFields.__struct_fields__)
#: The names that no request parameter has: an object that contains one is a chunk, not the parameters.
CHUNK_ONLY_FIELDS: Final = REFUSED_CONTENT_FIELDS - {
    *("audio", "input_audio", "images", "audios", "videos", "messages", "input", "prompt")
}
