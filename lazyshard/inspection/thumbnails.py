"""Thumbnails of the images in rows, decoded by Pillow within limits. Nothing of an image is in them but its pixels.

Only the raster formats below are decoded, each by Pillow's class for it. So the size is known before any pixel is
decoded, and no format that runs programs or opens other files is tried.
"""

from __future__ import annotations

import io
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lazyshard.format.row import values_in

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_IMAGES: Final = 4  # of a row
MOST_BYTES: Final = 32 << 20
MOST_PIXELS: Final = 1 << 25  # up to 0.5 GB while they are decoded; few cameras make more

# The first bytes of a file, by the prefix of the names of Pillow's module and class
_FORMATS: Final = re.compile(
    rb"(?s)(?P<Jpeg>\xff\xd8\xff)|(?P<Png>\x89PNG)|(?P<Gif>GIF8)|(?P<WebP>RIFF....WEBP)|(?P<Bmp>BM.{4}\0{4})|(?P<Tiff>II\*|MM\0)"
)


def images_in(row: dict[str, Any]) -> list[bytes]:
    """Returns the first blobs of a row that begin as an image does, in the order of the row."""
    found = [value for value in values_in(row) if isinstance(value, bytes) and _FORMATS.match(value)]
    return found[::-1][:MOST_IMAGES]  # `values_in` begins with the last value


def thumbnail(data: bytes, side: int) -> Image | str:
    """Returns an image, or its first frame, at most `side` pixels wide and high, as RGB on white; or why there is none.

    It is turned as its EXIF orientation says, and never enlarged.
    """
    if (found := _FORMATS.match(data)) is None or len(data) > MOST_BYTES:
        return f"no thumbnail: not JPEG, PNG, GIF, WebP, BMP or TIFF of at most {MOST_BYTES:,} bytes"
    try:
        from PIL import Image, ImageOps

        decoder = getattr(import_module(f"PIL.{found.lastgroup}ImagePlugin"), f"{found.lastgroup}ImageFile")
        image: Image.Image = decoder(io.BytesIO(data))
        if image.width * image.height > MOST_PIXELS:
            return f"no thumbnail: {image.width:,} x {image.height:,} pixels, more than {MOST_PIXELS:,}"
        if image.mode.startswith("I;16"):
            image = image.point(lambda level: level / 256).convert("L")
        # Pixels of other modes, such as a palette, cannot be averaged.
        image = image if image.mode in ("L", "LA", "RGB", "RGBA", "CMYK") else image.convert("RGBA")
        image.thumbnail((side, side))  # Of a JPEG it decodes a smaller version.
        image = ImageOps.exif_transpose(image).convert("RGBA")
        # A new image has no metadata and no colour profile.
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    except ImportError:
        return "no thumbnail without Pillow: pip install 'lazyshard[plots]'"
    except Exception as error:
        # Pillow raises errors of many types for damaged images.
        return f"no thumbnail, the image is damaged: {str(error) or type(error).__name__:.100}"
