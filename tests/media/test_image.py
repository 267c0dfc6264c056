from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from omni_ws.core.file_heads import sniff_image
from omni_ws.errors import UnsupportedFormat
from omni_ws.media import (
    decode_image,
    describe_image,
)

FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF", "image/bmp": "BMP"}


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def half_red_half_blue() -> Image.Image:
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    return image


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_that_claims(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


@pytest.mark.parametrize(("media_type", "format"), FORMATS.items())
def test_every_format(media_type: str, format: str) -> None:
    data = encoded(half_red_half_blue(), format)
    assert sniff_image(data) == sniff_image(data[:12]) == media_type
    pixels = decode_image(data)
    assert pixels.shape == (20, 40, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels[10, 5].astype(int) - [255, 0, 0]).max() < 30
    assert np.abs(pixels[10, 35].astype(int) - [0, 0, 255]).max() < 30
    assert pixels.flags.writeable


@pytest.mark.parametrize(
    "data", [b"", b"BM", b"BM of any kind at all", b"RIFF1234WAVE", b"\x89PNG", b"\x1a\x45\xdf\xa3"]
)
def test_what_is_no_image(data: bytes) -> None:
    assert sniff_image(data) is None
    with pytest.raises(UnsupportedFormat, match="unsupported or corrupt image"):
        decode_image(data)


def test_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    for format in ("JPEG", "PNG", "WEBP"):
        pixels = decode_image(encoded(half_red_half_blue(), format, exif=exif))
        assert pixels.shape == (40, 20, 3)
        # The left side is now the top.
        assert pixels[5, 10, 0] > 200
        assert pixels[35, 10, 2] > 200


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_png(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
        expected = 128
    else:
        image = Image.new("RGB", (4, 4), "white").convert(mode)
        expected = 255
    pixels = decode_image(encoded(image, "PNG"))
    assert pixels.shape == (4, 4, 3)
    assert (pixels == expected).all()


def test_cmyk_jpeg() -> None:
    pixels = decode_image(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"))
    assert (pixels > 250).all()


def test_transparent_parts_lie_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 255))
    for format in ("PNG", "WEBP"):
        pixels = decode_image(encoded(image, format, **({"lossless": True} if format == "WEBP" else {})))
        assert pixels.tolist() == [[[255, 255, 255], [255, 0, 0]]]


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert describe_image(decode_image(data)).dominant_colour == "red"


def test_the_limit_and_one_past_it() -> None:
    data = encoded(half_red_half_blue(), "PNG")
    assert decode_image(data, max_pixels=800).shape == (20, 40, 3)
    with pytest.raises(UnsupportedFormat, match="40x20"):
        decode_image(data, max_pixels=799)


@pytest.mark.parametrize("side", [6_000, 10_000, 60_000, 2**31 - 1])
def test_bombs_are_refused_before_they_unfold(side: int) -> None:
    with pytest.raises(UnsupportedFormat):
        decode_image(png_that_claims(side, side))


@pytest.mark.parametrize("format", FORMATS.values())
def test_a_truncated_image_is_refused(format: str) -> None:
    data = encoded(Image.effect_noise((64, 64), 50).convert("RGB"), format)
    with pytest.raises(UnsupportedFormat, match="corrupt or oversized"):
        decode_image(data[: len(data) // 2])


@given(
    beginning=st.sampled_from(
        [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBP", b"GIF89a", b"BM0000\0\0\0\0", b""]
    ),
    garbage=st.binary(max_size=200),
)
def test_garbage_is_refused(beginning: bytes, garbage: bytes) -> None:
    try:
        pixels = decode_image(beginning + garbage, max_pixels=10_000)
    except UnsupportedFormat:
        return
    assert pixels.shape[0] * pixels.shape[1] <= 10_000


@given(position=st.integers(8, 10_000), value=st.integers(0, 255), format=st.sampled_from(list(FORMATS.values())))
def test_damage_is_survived_or_refused(position: int, value: int, format: str) -> None:
    data = bytearray(encoded(half_red_half_blue(), format))
    data[position % len(data)] = value
    try:
        pixels = decode_image(bytes(data), max_pixels=100_000)
    except UnsupportedFormat:
        return
    assert pixels.shape[2] == 3


def test_facts() -> None:
    image = Image.new("RGB", (301, 200), "white")
    facts = describe_image(decode_image(encoded(image, "PNG")))
    assert (facts.width, facts.height, facts.dominant_colour, facts.brightness) == (301, 200, "white", 1.0)
    dark = describe_image(np.zeros((1, 1, 3), dtype=np.uint8))
    assert (dark.dominant_colour, dark.brightness) == ("black", 0.0)


@pytest.mark.parametrize(
    ("grey", "light"), [(50, "dark"), (52, "of medium brightness"), (178, "of medium brightness"), (180, "bright")]
)
def test_brightness_has_words_of_its_own(grey: int, light: str) -> None:
    """Not the limits by which a colour is called black or white."""
    facts = describe_image(np.full((1, 1, 3), grey, dtype=np.uint8))
    assert facts.sentence("It") == f"It is 1 by 1 pixels, mostly grey, and {light}."


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
def test_strips_are_put_together_upright(orientation: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(orientation).integers(0, 256, (37, 23, 4), dtype=np.uint8)
    picture = Image.fromarray(values[:, :, 0] * np.uint16(200)) if mode == "I;16" else Image.fromarray(values)
    exif = Image.Exif()
    exif[0x0112] = orientation
    if mode != "I;16":
        picture = picture.convert("RGB").convert("P") if mode == "P" else picture.convert(mode)
    data = encoded(picture, "PNG", exif=exif)
    whole = decode_image(data)
    monkeypatch.setattr("omni_ws.media._STRIP_PIXELS", 100)
    np.testing.assert_array_equal(decode_image(data), whole)
    if mode in ("1", "L", "P", "RGB"):
        with Image.open(io.BytesIO(data)) as image:
            np.testing.assert_array_equal(whole, np.asarray(ImageOps.exif_transpose(image).convert("RGB")))
