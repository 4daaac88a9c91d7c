"""Reads typed fields out of values that someone else wrote, and says exactly what is wrong with them.

Of files they come as JSON; of the state of a run from JSON or a pickle, and are refused by their path in it:
`parts[1].skip[0]`. Fields that are not known are ignored, since a later release may add some; a format number above
ours is refused.
"""

from __future__ import annotations

import binascii
import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from lazyshard.errors import FileInvalid, FormatInvalid, StateInvalid, VersionUnsupported
from lazyshard.memory import loads
from lazyshard.part import check_integer, refused

FORMAT: Final = 1  # The format of every file of a stream, but for those of which the next constant tells

# That of the manifest and the seals of a stream whose rows hold arrays: who does not know of the side files must not
# take what stands in an array's place for a value
FORMAT_WITH_ARRAYS: Final = 2
MAX_CHUNKS: Final = 10**15  # No real stream has as many, so that all index arithmetic stays within 64 bits
_STREAM_ID: Final = re.compile(r"[0-9a-f]{32}")
_SHOWN_MAX: Final = 80  # Characters of a wrong value that a message shows

# Neither a value of many megabytes nor one nested as deep as orjson reads (past Python's own limit) is shown whole
_SHORTENED: Final = reprlib.Repr()
_SHORTENED.maxstring = _SHOWN_MAX


def is_stream_id(value: Any) -> bool:
    """Whether a value is the identity of a stream: 32 hexadecimal digits."""
    return isinstance(value, str) and _STREAM_ID.fullmatch(value) is not None


class Fields:
    """The fields of one JSON object, read one by one with checks; `file` is how messages call it.

    Raises FormatInvalid: (of the class given) not UTF-8, not JSON, not an object; VersionUnsupported: a format behind
    `newest`.
    """

    def __init__(self, data: bytes, file: str, newest: int = FORMAT, error: type[FormatInvalid] = FileInvalid) -> None:
        self.file = file
        self.error = error
        try:
            values = loads(data)
        except orjson.JSONDecodeError as cause:
            raise self.refuse(None, "a JSON object", f"{_shown(data)} ({cause})") from cause
        if not isinstance(values, dict):
            raise self.refuse(None, "a JSON object", _shown(values))
        self.values: dict[str, Any] = values
        self.format = self.integer("format", 1, 2**31)
        if self.format > newest:
            known = f"format {newest}" if newest == FORMAT else f"formats {FORMAT} to {newest}"
            raise _too_new(f"{file}: written in stream format", self.format, known, newest, file)

    def refuse(self, field: str | None, expected: str, actual: str) -> FormatInvalid:
        """Returns the error for a field that is not as expected."""
        where = f"{self.file}: field {field!r}" if field else self.file
        message = f"{where}: expected {expected}, found {actual}"
        return self.error(message, file=self.file, field=field, expected=expected, actual=actual)

    def refuse_found(self, field: str, expected: str) -> FormatInvalid:
        """Returns the same where what is found is the field's value, or that it is missing."""
        return self.refuse(field, expected, _shown(self.values[field]) if field in self.values else "no such field")

    def integer(self, field: str, low: int, high: int) -> int:
        """Returns an integer of the closed range [low, high]."""
        value = self.values.get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse_found(field, f"an integer from {low} to {high}")
        return value

    def number(self, field: str) -> float:
        """Returns a finite number."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refuse_found(field, "a number")
        return float(value)

    def text(self, field: str, choices: tuple[str, ...] = ()) -> str:
        """Returns a non-empty string, one of `choices` if there are any."""
        value = self.values.get(field)
        if not isinstance(value, str) or not value or (choices and value not in choices):
            raise self.refuse_found(field, f"one of {', '.join(choices)}" if choices else "a string")
        return value

    def stream_id(self, field: str) -> str:
        """Returns the identity of a stream."""
        value = self.text(field)
        if not is_stream_id(value):
            raise self.refuse_found(field, "32 hexadecimal digits")
        return value

    def boolean(self, field: str) -> bool:
        """Returns true or false."""
        value = self.values.get(field)
        if not isinstance(value, bool):
            raise self.refuse_found(field, "true or false")
        return value

    def packed(self, field: str, dtype: str, count: int) -> npt.NDArray[Any]:
        """Returns an array of `count` numbers, "<u8" or "<u4", kept as base64 of its bytes."""
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.refuse_found(field, "a base64 string")
        try:
            data = pybase64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as cause:
            raise self.refuse(field, "a base64 string", f"{_shown(value)} ({cause})") from cause
        size = np.dtype(dtype).itemsize
        if len(data) != count * size:
            raise self.refuse(field, f"{count} numbers of {size} bytes", f"{len(data)} bytes")
        return np.frombuffer(data, dtype=dtype)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Says of which file it is what a value refuses about itself."""
        try:
            yield
        except StateInvalid as cause:
            field, expected = cause.field, str(cause.expected)
            if field is not None and field.isidentifier():
                # What a value checks by itself it does not know to be missing.
                raise self.refuse_found(field, expected) from cause
            raise self.refuse(field, expected, str(cause.actual)) from cause


_FileT = TypeVar("_FileT", bound="SmallFile")


class SmallFile:
    """A file of a few fields as a value: a dataclass whose fields are those of the file, in the order of the file.

    `NAME` is the file's; `READ` reads each field. One with a default may be missing, and is left out where it has that.
    """

    __slots__ = ()
    NAME: ClassVar[str]
    READ: ClassVar[Mapping[str, Callable[[Fields, str], Any]]]

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        values: dict[str, Any] = {"format": FORMAT}
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if one.default is dataclasses.MISSING or value != one.default:
                values[one.name] = value
        return encode(values)

    @classmethod
    def decode(cls: type[_FileT], data: bytes, file: str = "") -> _FileT:
        """Reads the file's bytes; `file` is how messages call it. Raises FileInvalid, VersionUnsupported."""
        fields = Fields(data, file or cls.NAME)
        return cls(
            **{
                one.name: cls.READ[one.name](fields, one.name)
                for one in dataclasses.fields(cls)  # type: ignore[arg-type]
                if one.default is dataclasses.MISSING or one.name in fields.values
            }
        )


def integer_from(low: int, high: int) -> Callable[[Fields, str], int]:
    """Returns what reads an integer of a closed range, for `SmallFile.READ`."""
    return lambda fields, name: fields.integer(name, low, high)


def printable(text: str) -> str:
    r"""Returns a text that somebody else wrote as it can be shown on a terminal or in a log.

    Everything that is no character to be seen is escaped, line ends included, so that nobody moves a cursor by it or
    feigns a line.

    >>> printable("a\x1b[2J\n"), printable("Zürich 1")
    ('a\\x1b[2J\\n', 'Zürich 1')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def pack(numbers: npt.ArrayLike, dtype: str) -> str:
    """Returns base64 of the numbers' little-endian bytes, the inverse of `Fields.packed`."""
    return pybase64.b64encode(np.asarray(numbers, dtype=dtype).tobytes()).decode("ascii")


def encode(values: dict[str, Any]) -> bytes:
    """Returns the JSON of one of a stream's own files, ended by a newline."""
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return orjson.dumps(value).decode()
    text = repr(value[: _SHOWN_MAX + 1]) if isinstance(value, bytes) else _SHORTENED.repr(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."


def _too_new(what: str, found: int, known: str, newest: int, file: str | None = None) -> VersionUnsupported:
    return VersionUnsupported(
        f"{what} {found}, this release of lazyshard reads {known}; install a newer lazyshard",
        file=file, field="format", expected=str(newest), actual=str(found),
    )  # fmt: skip


def check_stream_id(value: Any) -> None:
    """Refuses what is neither the identity of a stream nor None, which stands for a foreign directory."""
    if value is not None and not is_stream_id(value):
        raise refused("stream_id", "32 hexadecimal digits or null", value)


@contextmanager
def read_from(where: str) -> Iterator[None]:
    """Says of which file, or whatever else, it is what is refused in here, unless that is said already."""
    try:
        yield
    except (StateInvalid, VersionUnsupported) as error:
        if error.file is None:
            error.file = where
            error.args = (f"{where}: {error}",)
        raise


def check_version(value: Any, known: int, what: str) -> None:
    """Refuses what is of a later format; to be called first, as nothing else of that may be as it is known here."""
    version = members(value, ("format",))["format"]
    check_integer("format", version, 1, 2**31)
    if version > known:
        raise _too_new(f"{what} in format", version, f"format {known}", known)


def members(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of an object, all of which must be there: one that is lost must not become its default."""
    if not isinstance(value, dict):
        raise refused("", "an object", value)
    for name in names:
        if name not in value:
            raise refused(name, "a value", None, "no such field")
    return {name: value[name] for name in names}


def tuples(value: Any) -> Any:
    """Returns a list of lists as a tuple of tuples, and anything else as it is, for the check to refuse."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(tuple(one) if isinstance(one, list) else one for one in value)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Puts the name of the field that holds an object before those of its own fields that are refused in here."""
    try:
        yield
    except StateInvalid as error:
        field = ".".join(part for part in (name, error.field) if part)
        raise refused(field, str(error.expected), None, str(error.actual)) from None
    except VersionUnsupported as error:
        error.field = ".".join(part for part in (name, error.field) if part)
        raise


_SIZE: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,6}))? *(?:([kmgt])(i?))?b?", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Returns a number of bytes, with units of the SI (kB = 1,000) or of the IEC (KiB = 1,024).

    Raises ValueError where it is none, or 0.

    >>> parse_size("20GB"), parse_size("1.5 MiB"), parse_size("512")
    (20000000000, 1572864, 512)
    """
    found = _SIZE.fullmatch(str(text).strip())
    size = 0
    if found is not None:
        whole, part, prefix, binary = found.groups("")
        unit = (1024 if binary else 1000) ** ("kmgt".index(prefix.lower()) + 1) if prefix else 1
        size = int(whole + part) * unit // 10 ** len(part)
    if size < 1:
        raise ValueError(f"expected a number of bytes such as 20GB or 512MiB, got {text!r}")
    return size
