"""What kind of image bytes are, by how they begin."""

from __future__ import annotations


def sniff_image(data: bytes) -> str | None:
    """The media type by the first bytes (12 are enough), or None."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    # "BM" alone begins many a thing; the four reserved bytes of the header are zero.
    if data.startswith(b"BM") and data[6:10] == b"\0\0\0\0":
        return "image/bmp"
    return None
