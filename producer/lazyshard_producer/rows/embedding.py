"""Puts media files into the rows that name them: `--embed`. Missing, empty and truncated media refuse the row.

A value under an embedded key is a path, a `data:` URL, an object `{"bytes": base64 text, "path": name}` as Hugging Face
stores media in tables, the base64 text of a binary column, null, or a list of these. It becomes bytes.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pybase64

from lazyshard.errors import FileRefused
from lazyshard.format.arrays import media_type
from lazyshard.store.files import read_file
from lazyshard_producer.sources.source import bad_row


def embed(row: dict[str, Any], keys: Sequence[str], most: int) -> dict[str, Any]:
    """Returns a row with the media of some keys, if it has them, of at most `most` bytes each. Raises RowInvalid."""
    return {key: _media(value, key, most) if key in keys else value for key, value in row.items()}


def _media(value: Any, where: str, most: int) -> Any:
    if isinstance(value, list):
        return [_media(one, f"{where}[{number}]", most) for number, one in enumerate(value)]
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"} and any(value.values()):
        data, path = value.get("bytes"), value.get("path")
        value = _decode(data, where) if isinstance(data, str) else path if data is None else data
    if value is None:
        return None
    name = f"{value}: " if isinstance(value, str) and len(value) < 200 else ""
    if isinstance(value, str):
        value = _read(value, where, most)
    if not isinstance(value, bytes):
        raise bad_row(f"--embed {where}: expected the path of a file, found {type(value).__name__}")
    if (fault := "is empty" if not value else _fault(value)) is not None:
        raise bad_row(f"--embed {where}: {name}the {media_type(value) or 'file'} {fault}")
    return value


def _read(text: str, where: str, most: int) -> bytes:
    if text.startswith("data:"):
        return _decode(text.partition(",")[2], where)
    if "://" in text or not text:
        raise bad_row(f"--embed {where}: {text[:200]!r} is no path of a file of this machine: give one")
    try:
        return read_file(Path(text), most)
    except FileRefused as cause:
        raise bad_row(f"--embed {where}: {cause}") from cause
    except (OSError, ValueError) as cause:
        # The text of a binary column is the media, and no path.
        if (data := _decoded(text)) is not None and media_type(data) is not None:
            return data
        raise bad_row(f"--embed {where}: {text:.200}: {getattr(cause, 'strerror', None) or cause}") from cause


def _decode(text: str, where: str) -> bytes:
    if (data := _decoded(text)) is None:
        raise bad_row(f"--embed {where}: expected base64 text, found {text[:40]!r}")
    return data


def _decoded(text: str) -> bytes | None:
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _fault(data: bytes) -> str | None:
    """Returns what is wrong with media whose format says where they end; None if nothing is, or it does not say."""
    kind = media_type(data)
    if kind == "image/jpeg" and b"\xff\xd9" not in data[-4096:]:
        return "is truncated: it has no end marker"
    if kind == "image/png" and b"IEND" not in data[-4096:]:
        return "is truncated: it has no IEND chunk"
    if data[:4] == b"RIFF" and (size := 8 + int.from_bytes(data[4:8], "little")) > len(data) + 1:
        return f"is truncated: it has {len(data)} of {size} bytes"
    if data[4:8] == b"ftyp":
        at = 0
        while at + 8 <= len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            size = int.from_bytes(data[at + 8 : at + 16], "big") if size == 1 else size or len(data) - at
            if size < 8 or at + size > len(data):
                return f"is truncated: a box at byte {at} has {size} bytes, {len(data) - at} follow"
            at += size
    return None
