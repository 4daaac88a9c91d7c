"""Reads values out of what someone else wrote, and says exactly what is wrong with them.

Of files they come as JSON; of the state of a run from JSON or a pickle, and are refused by their path in it:
`parts[1].skip[0]`. Fields that are not known are ignored, since a later release may add some; a format number above
ours is refused.
"""

from __future__ import annotations

import binascii
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from lazyshard.errors import FileInvalid, FormatInvalid, StateInvalid, VersionUnsupported
from lazyshard.memory import loads
from lazyshard.part import Checked, Kind, integer, kinds_of, or_null, refused, shown

FORMAT: Final = 1  # The format of every file of a stream, but for those of which the next constant tells

# That of the manifest and the seals of a stream whose rows hold arrays: who does not know of the side files must not
# take what stands in an array's place for a value
FORMAT_WITH_ARRAYS: Final = 2
MAX_CHUNKS: Final = 10**15  # No real stream has as many, so that all index arithmetic stays within 64 bits
_STREAM_ID: Final = re.compile(r"[0-9a-f]{32}")

_CheckedT = TypeVar("_CheckedT", bound=Checked)
_FileT = TypeVar("_FileT", bound="SmallFile")


def is_stream_id(value: Any) -> bool:
    """Whether a value is the identity of a stream: 32 hexadecimal digits."""
    return isinstance(value, str) and _STREAM_ID.fullmatch(value) is not None


STREAM_ID: Final = Kind("32 hexadecimal digits", is_stream_id)
Chunks = Annotated[int, integer(0, MAX_CHUNKS)]
StreamId = Annotated[str | None, or_null(STREAM_ID)]  # None for a foreign directory


@contextmanager
def in_file(where: str, error: type[FormatInvalid] = FileInvalid) -> Iterator[None]:
    """Says of which file, or whatever else, it is what is refused in here, and raises it as this error."""
    try:
        yield
    except (StateInvalid, VersionUnsupported) as found:
        kind = VersionUnsupported if isinstance(found, VersionUnsupported) else error
        told = {"field": found.field, "expected": found.expected, "actual": found.actual}
        raise kind(f"{where}: {found}", file=where, **told) from found.__cause__


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Puts the name of the field that holds an object before those of its own fields that are refused in here."""
    try:
        yield
    except (StateInvalid, VersionUnsupported) as error:
        inner = error.field or ""
        field = f"{name}.{inner}" if name and inner and inner[0] != "[" else name + inner
        if isinstance(error, StateInvalid):
            raise refused(field, str(error.expected), None, str(error.actual)) from None
        error.field = field
        raise


def parse_object(data: bytes, newest: int = FORMAT) -> dict[str, Any]:
    """Returns the object that a stream's own file holds, of no format behind the newest."""
    try:
        value = loads(data)
    except orjson.JSONDecodeError as cause:
        raise refused("", "a JSON object", None, f"{shown(data)} ({cause})") from cause
    return of_format(value, newest, "written in stream", "a JSON object")


def of_format(value: Any, newest: int, what: str, expected: str = "an object") -> dict[str, Any]:
    """Returns an object of a known format; to be called first, as nothing else of a later one may be as it is known."""
    if not isinstance(value, dict):
        # What `load_state_dict` is given is Python's, not JSON's.
        raise refused("", expected, value, "None" if value is None and expected == "an object" else None)
    version = take(value, "format", integer(1, 2**31))
    if version > newest:
        known = f"format {newest}" if newest == FORMAT else f"formats {FORMAT} to {newest}"
        raise VersionUnsupported(
            f"{what} format {version}, this release of lazyshard reads {known}; install a newer lazyshard",
            field="format", expected=str(newest), actual=str(version),
        )  # fmt: skip
    return value


def take(values: Mapping[str, Any], name: str, kind: Kind) -> Any:
    """Returns a field, which must be there."""
    if name not in values:
        raise refused(name, kind.expected, None, "no such field")
    return kind.read(kind.check(name, values[name]))


def read(cls: type[_CheckedT], value: Any, missing: Collection[str] = ()) -> _CheckedT:
    """Returns a value of a class read from an object; only fields that may be `missing` are not there."""
    if not isinstance(value, dict):
        raise refused("", "an object", value)
    found = {}
    for name, kind in kinds_of(cls).items():
        if name in value:
            with inside(name):
                found[name] = kind.read(value[name])
        elif name not in missing:
            raise refused(name, kind.expected, None, "no such field")
    return cls(**found)


def list_of(cls: type[_CheckedT], make: Callable[[Any], _CheckedT] | None = None) -> Kind:
    """Returns the kind of a tuple of values of a class, at least one, each made of an object of a list."""
    return Kind(
        "a list, not empty",
        lambda value: isinstance(value, tuple) and bool(value) and all(isinstance(one, cls) for one in value),
        lambda value: read_each(make or partial(read, cls), value) if isinstance(value, (list, tuple)) else value,
    )


def read_each(make: Callable[[Any], _CheckedT], values: Collection[Any]) -> tuple[_CheckedT, ...]:
    """Returns what is made of each; fields that are refused are named with the place in the list."""
    found = []
    for number, value in enumerate(values):
        with inside(f"[{number}]"):
            found.append(make(value))
    return tuple(found)


class SmallFile(Checked):
    """A file of a few fields: a dataclass whose fields are those of the file, in its order; `NAME` is the file's.

    One with a default may be missing, and is left out where it has that.
    """

    __slots__ = ()
    NAME: ClassVar[str]

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        values = self.to_dict()
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            if one.default is not dataclasses.MISSING and getattr(self, one.name) == one.default:
                del values[one.name]
        return encode({"format": FORMAT} | values)

    @classmethod
    def decode(cls: type[_FileT], data: bytes, file: str = "") -> _FileT:
        """Reads the file's bytes; `file` is how messages call it. Raises FileInvalid, VersionUnsupported."""
        with in_file(file or cls.NAME):
            return read(cls, parse_object(data), defaults_of(cls))


def defaults_of(cls: type[Checked]) -> set[str]:
    """Returns the names of the fields that have a default."""
    return {one.name for one in dataclasses.fields(cls) if one.default is not dataclasses.MISSING}  # type: ignore[arg-type]


def pack(numbers: npt.ArrayLike, dtype: str) -> str:
    """Returns base64 of the numbers' little-endian bytes."""
    return pybase64.b64encode(np.asarray(numbers, dtype=dtype).tobytes()).decode("ascii")


def unpack(values: Mapping[str, Any], field: str, dtype: str, count: int) -> npt.NDArray[Any]:
    """Returns an array of `count` numbers, "<u8" or "<u4", kept by `pack`."""
    value = take(values, field, Kind("a base64 string", lambda value: isinstance(value, str)))
    try:
        data = pybase64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as cause:
        raise refused(field, "a base64 string", None, f"{shown(value)} ({cause})") from cause
    size = np.dtype(dtype).itemsize
    if len(data) != count * size:
        raise refused(field, f"{count} numbers of {size} bytes", None, f"{len(data)} bytes")
    return np.frombuffer(data, dtype=dtype)


def encode(values: dict[str, Any]) -> bytes:
    """Returns the JSON of one of a stream's own files, ended by a newline."""
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)


def printable(text: str) -> str:
    r"""Returns a text that somebody else wrote as it can be shown on a terminal or in a log.

    Everything that is no character to be seen is escaped, line ends included, so that nobody moves a cursor by it or
    feigns a line.

    >>> printable("a\x1b[2J\n"), printable("Zürich 1")
    ('a\\x1b[2J\\n', 'Zürich 1')
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


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
