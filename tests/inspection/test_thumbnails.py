"""Thumbnails of images in rows, and which are not decoded; shown: tests/cli/test_inspect and test_watch_page."""

import io
import struct
import sys
import zlib
from typing import Any

import pytest
from PIL import Image, ImageCms, ImageFile, PngImagePlugin

from lazyshard.inspection import thumbnails
from lazyshard.inspection.thumbnails import images_in, thumbnail

SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'


def encoded(kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """An image of 300 x 200 pixels, the left half of which is white, the right half black."""
    image, file = Image.new("L", (300, 200), "white"), io.BytesIO()
    image.paste("black", (150, 0, 300, 200))
    image.convert(mode).save(file, kind, **options)
    return file.getvalue()


def corners(data: bytes) -> tuple[tuple[int, int], str]:
    """The size of a thumbnail, and whether its upper left, upper right and lower left pixel are white or black."""
    made = thumbnail(data, 48)
    assert isinstance(made, Image.Image) and (made.mode, made.info) == ("RGB", {}), made
    places = (0, 0), (made.width - 1, 0), (0, made.height - 1)
    return made.size, "".join("w" if made.getpixel(place) > (240,) * 3 else "b" for place in places)  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_each_format_is_scaled_and_only_its_pixels_are_kept(kind: str) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("note", "private")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    more: dict[str, Any] = {"icc_profile": profile, "comment": b"private", "pnginfo": text}
    assert corners(encoded(kind, **more if kind != "BMP" else {})) == ((48, 32), "wbw")


def test_modes_of_pixels_transparency_and_orientation() -> None:
    for mode, kind in (("1", "PNG"), ("P", "GIF"), ("LA", "PNG"), ("CMYK", "JPEG"), ("I", "TIFF"), ("I;16", "PNG")):
        assert corners(encoded(kind, mode))[0] == (48, 32), mode
    Image.new("RGBA", (3, 2), (0, 0, 0, 0)).save(file := io.BytesIO(), "PNG")
    assert corners(file.getvalue()) == ((3, 2), "www")
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned clockwise
    for kind in ("JPEG", "PNG", "WEBP"):
        assert corners(encoded(kind, exif=exif.tobytes())) == ((32, 48), "wwb")


def test_what_is_too_large_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    begins = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\r" + begins + struct.pack(">I", zlib.crc32(begins)) + b"\0\0\0\0IDAT\0\0\0\0"
    assert thumbnail(bomb, 48) == "no thumbnail: 50,000 x 50,000 pixels, more than 33,554,432"
    monkeypatch.setattr(thumbnails, "MOST_BYTES", 999)
    told = thumbnail(encoded() + bytes(1000), 48)
    assert told == "no thumbnail: not JPEG, PNG, GIF, WebP, BMP or TIFF of at most 999 bytes"


def test_damaged_images_other_formats_and_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(thumbnail(encoded("JPEG")[:700], 48)).startswith("no thumbnail, the image is damaged: image file is tr")
    for data in (encoded("PNG")[:60], b"\x89PNG\r\n\x1a\n" + SVG):
        assert str(thumbnail(data, 48)).startswith("no thumbnail, the image is damaged: ")
    for data in (SVG, b"<!doctype html><script>alert(1)</script>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b""):
        assert str(thumbnail(data, 48)).startswith("no thumbnail: not JPEG, ")
    gif = encoded("GIF")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert thumbnail(gif, 48) == "no thumbnail without Pillow: pip install 'lazyshard[plots]'"


def test_grey_of_16_bits_is_scaled() -> None:
    file = io.BytesIO()
    Image.new("I;16", (8, 8), 0x8000).save(file, "PNG")
    made = thumbnail(file.getvalue(), 8)
    assert not isinstance(made, str) and made.getpixel((4, 4)) == (128, 128, 128)


def test_images_of_a_row() -> None:
    gifs = [b"GIF89a%d" % number for number in range(6)]
    row = {
        "a": [{"b": gifs[0]}, SVG, b""],
        "c": {"d": [gifs[1], b"RIFF\x0a\0\0\0WAVE"]},
        "e": gifs[2:],
        "f": "GIF89a",
        "g": b"BMW is no bitmap",
    }
    assert images_in(row) == gifs[:4]
