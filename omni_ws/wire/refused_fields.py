"""Names that other APIs use for the content of a chunk.

They are refused, so that a mistaken client does not silently lose its input.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class RefusedContentFields(Struct, frozen=True, kw_only=True):
    """Fields that have to be absent or null.

    Their type alone enforces that, at no cost to chunks that do not have them.
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
    # Names that request parameters have, too.
    audio: None = None
    input_audio: None = None
    images: None = None
    audios: None = None
    videos: None = None
    messages: None = None
    input: None = None
    prompt: None = None


REFUSED_CONTENT_FIELDS: Final = frozenset(RefusedContentFields.__struct_fields__)
#: The names that no request parameter has: an object that contains one is a chunk, not the parameters.
CHUNK_ONLY_FIELDS: Final = REFUSED_CONTENT_FIELDS - {
    *("audio", "input_audio", "images", "audios", "videos", "messages", "input", "prompt")
}
