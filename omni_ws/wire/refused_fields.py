"""What other interfaces call the content of a chunk: refused by name, since it would be lost without a word."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class ContentElsewhere(Struct, frozen=True, kw_only=True):
    """Each may be absent or null. The type says that: it costs chunks without them nothing."""

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
    # Those that are also the names of parameters.
    audio: None = None
    input_audio: None = None
    images: None = None
    audios: None = None
    videos: None = None
    messages: None = None
    input: None = None
    prompt: None = None


CONTENT_ELSEWHERE: Final = frozenset(ContentElsewhere.__struct_fields__)
#: The names that mean nothing in the parameters of a request: an object that has one is meant as a chunk.
MARKS_OF_CHUNKS: Final = CONTENT_ELSEWHERE - {
    *("audio", "input_audio", "images", "audios", "videos", "messages", "input", "prompt")
}
