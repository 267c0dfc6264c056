"""Recognises image formats by their first bytes."""

from __future__ import annotations


def sniff_image(data: bytes) -> str | None:
    """Return the media type of an image by its signature (12 bytes suffice), or None."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    # Two bytes of signature are weak evidence; the reserved field of the header, which is zero, makes it safe.
    if data.startswith(b"BM") and data[6:10] == b"\0\0\0\0":
        return "image/bmp"
    return None
