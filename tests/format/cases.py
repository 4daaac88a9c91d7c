"""What the tests of the file formats share: how to spoil a file, and how to look at a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from lazyshard.errors import FormatInvalid, VersionUnsupported


def changed(data: bytes, **values: Any) -> bytes:
    """The file with fields replaced or added."""
    return orjson.dumps(orjson.loads(data) | values)


def without(data: bytes, field: str) -> bytes:
    """The file with one field left out."""
    values = orjson.loads(data)
    del values[field]
    return orjson.dumps(values)


def check_refusal(
    decode: Callable[[], object],
    error: type[FormatInvalid],
    *,
    file: str,
    field: str | None,
    expected: str,
    actual: str,
) -> None:
    """Asserts that the decoder refuses with just these fields, and that the message says all of them."""
    with pytest.raises(FormatInvalid) as caught:
        decode()
    refusal = caught.value
    assert type(refusal) is error
    assert (refusal.file, refusal.field, refusal.expected, refusal.actual) == (file, field, expected, actual)
    where = f"{file}: field {field!r}" if field else file
    assert str(refusal) == f"{where}: expected {expected}, found {actual}"


def check_later_format(decode: Callable[[bytes], object], data: bytes, *, file: str, newest: int = 1) -> None:
    """Asserts that the format after the newest one is refused, naming the file and both numbers."""
    later = newest + 1
    with pytest.raises(VersionUnsupported) as caught:
        decode(changed(data, format=later))
    refusal = caught.value
    assert (refusal.file, refusal.field, refusal.expected, refusal.actual) == (file, "format", str(newest), str(later))
    known = "format 1" if newest == 1 else f"formats 1 to {newest}"
    assert str(refusal) == (
        f"{file}: written in stream format {later}, this release of lazyshard reads {known}; install a newer lazyshard"
    )


def not_an_integer(low: int, high: int) -> list[tuple[object, str]]:
    """(value, how a message shows it) of everything that is not an integer of the closed range."""
    return [
        (low - 1, str(low - 1)),
        (high + 1, str(high + 1)),
        (True, "true"),
        (None, "null"),
        (2.0, "2.0"),
        ("2", "'2'"),
        ([2], "[2]"),
        ({"2": 2}, "{'2': 2}"),
    ]
