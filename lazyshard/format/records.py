"""File names of a stream, its small files as values, and the checks of values that other programs wrote.

A chunk's number has at least five digits and grows past 99999. Only the canonical name is ever written; other programs
may pad differently in their directories, so parsing accepts any number of digits.

Small files are JSON; the state of a run is read from JSON or a pickle. Errors name the path of the invalid field:
`parts[1].skip[0]`. Unknown fields are ignored, since a later release may add some; a later format number is refused.

- `stream.json`, the manifest, is written once when the stream is created.
- `head.json`, which readers poll, is a hint that can be rebuilt from the seals. It is replaced atomically at every
  publish and as a heartbeat, and never names a chunk whose seal is not durable.
- `stream.end`: no chunk follows. Written once, after the last seal is durable.
- `stream.owner`: which producer may publish (a fencing token). Each producer that opens a stream raises the epoch and
  writes its own name here; before each publish it checks that the file still holds what it wrote.
- `retired.json` is written durably before the first file of a chunk is removed: a missing chunk is retired or lost.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import starmap
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import orjson
import pybase64

from lazyshard import part
from lazyshard.errors import FileInvalid, FormatInvalid, StateInvalid, VersionUnsupported
from lazyshard.memory import quick_loads
from lazyshard.part import BOOLEAN, MAX_SAMPLES, NUMBER, TEXT, Array, Checked, Kind, Samples, integer, or_null, refused

MANIFEST: Final = "stream.json"
HEAD: Final = "head.json"
HEAD_RESERVE: Final = "head.json.reserve"  # Only in `.tmp/`: reserves disk space for one head
END: Final = "stream.end"
OWNER: Final = "stream.owner"
RETIRED: Final = "retired.json"
QUARANTINE: Final = "quarantine.jsonl"
CURSORS: Final = "cursors"  # Folder of the cursors in a stream directory
LOCK: Final = ".producer.lock"
TEMPORARY: Final = ".tmp"
DATA_SUFFIX: Final = ".jsonl"
SEAL_SUFFIX: Final = ".completed"
ARRAYS_SUFFIX: Final = ".arrays"
_CHUNK: Final = re.compile(r"chunk_([0-9]{1,255})\.jsonl(\.completed)?")  # 255: the maximum length of a file name
_ARRAYS: Final = re.compile(r"chunk_([0-9]{5,255})\.arrays")
TOKENS: Final = re.compile(r"chunk_([0-9]{1,255})\.jsonl\.tokens")

FORMAT: Final = 1  # Of all files of a stream, except the manifest and seals of a stream with arrays
# Of these: readers that do not know side files must not take the description of an array for a value
FORMAT_WITH_ARRAYS: Final = 2
FORMAT_WITH_BLOBS: Final = 3  # Of seals only, for the same reason: a row of the chunk holds bytes
MAX_CHUNKS: Final = 10**15  # More than any real stream has; keeps all index arithmetic within 64 bits
# A seal holds at least 16 bytes per row, base64; a larger one could not be read in a reasonable time
MAX_SAMPLES_PER_CHUNK: Final = 100_000_000
MAX_WRITERS: Final = 10_000  # Every seal names each of them, in some 30 bytes
_MAX_FACTS: Final = 1000  # Of one encoding: far more than any has
_ABSENT: Final = object()

Fact: TypeAlias = str | int | float | bool | None
Encoding: TypeAlias = Mapping[str, Fact]
Declared: TypeAlias = int | tuple[str, ...]  # the writers of a stream: how many, 0 if a command ends it, or their names
# running: rows arrive; waiting: paused (by its source, rate or a limit); idle: stopped normally, can be resumed;
# finished: the stream has ended; failed: stopped by an error, can be resumed
ProducerState = Literal["running", "waiting", "idle", "finished", "failed"]
STATES: Final[tuple[ProducerState, ...]] = get_args(ProducerState)

_CheckedT = TypeVar("_CheckedT", bound=Checked)
_FileT = TypeVar("_FileT", bound="SmallFile")


def chunk_name(chunk: int) -> str:
    """Returns the canonical name of a chunk's data file. Raises ValueError: the number is negative."""
    if chunk < 0:
        raise ValueError(f"a chunk number must be 0 or more, got {chunk}")
    return f"chunk_{chunk:05d}.jsonl"


def seal_name(chunk: int) -> str:
    """Returns the canonical name of a chunk's seal."""
    return chunk_name(chunk) + SEAL_SUFFIX


def tokens_name(chunk: int) -> str:
    """Returns the name of a chunk's file of lengths, left by an earlier release; it is deleted with the chunk."""
    return f"{chunk_name(chunk)}.tokens"


def parse_chunk_name(name: str) -> tuple[int, bool] | None:
    """Returns (chunk number, whether it is the seal), or None if the name is not of a chunk or seal.

    >>> parse_chunk_name("chunk_00012.jsonl"), parse_chunk_name("chunk_7.jsonl.completed"), parse_chunk_name("x.jsonl")
    ((12, False), (7, True), None)
    """
    found = _CHUNK.fullmatch(name)
    return (int(found[1]), found[2] is not None) if found else None


def arrays_name(chunk: int) -> str:
    """Returns the name of a chunk's side file, which holds the arrays of its rows."""
    return chunk_name(chunk).removesuffix(DATA_SUFFIX) + ARRAYS_SUFFIX


def parse_arrays_name(name: str) -> int | None:
    """Returns the number of the chunk whose side file has this name, None for any other name."""
    found = _ARRAYS.fullmatch(name)
    return int(found[1]) if found and name == arrays_name(int(found[1])) else None


def hexadecimal(digits: int) -> Kind:
    """Returns the kind of a text of so many lowercase hexadecimal digits."""
    form = re.compile(f"[0-9a-f]{{{digits}}}")
    return Kind(f"{digits} hexadecimal digits", lambda value: isinstance(value, str) and bool(form.fullmatch(value)))


@contextmanager
def in_file(where: str, error: type[FormatInvalid] = FileInvalid, remedy: str = "") -> Iterator[None]:
    """Adds the name of the file (or other location) to errors raised inside, and raises them as `error`.

    To all but VersionUnsupported, which names its own, it also adds the remedy.
    """
    try:
        yield
    except (StateInvalid, VersionUnsupported) as found:
        kind, hint = (VersionUnsupported, "") if isinstance(found, VersionUnsupported) else (error, remedy)
        fields = {"field": found.field, "expected": found.expected, "actual": found.actual}
        raise kind(f"{where}: {found}{hint}", file=where, **fields) from found.__cause__


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Prepends the name of the field that holds an object to the fields of errors raised inside."""
    try:
        yield
    except (StateInvalid, VersionUnsupported) as error:
        inner = error.field or ""
        error.field = f"{name}.{inner}" if name and inner and inner[0] != "[" else name + inner
        if isinstance(error, StateInvalid):
            raise refused(error.field, str(error.expected), None, str(error.actual)) from None
        raise


def parse_object(data: bytes, newest: int = FORMAT) -> dict[str, Any]:
    """Returns the object in a file of a stream, whose format must not be later than `newest`."""
    try:
        value = quick_loads(data)
    except orjson.JSONDecodeError as cause:
        raise refused("", "a JSON object", None, f"{part.shown(data)} ({cause})") from cause
    return of_format(value, newest, "written in stream", "a JSON object")


_VERSION: Final = integer(1, 2**31)


def of_format(value: Any, newest: int, what: str, expected: str = "an object") -> dict[str, Any]:
    """Returns an object of a known format. Call it first: all other fields of a later format may differ."""
    if not isinstance(value, dict):
        # `load_state_dict` gets Python values, not JSON.
        raise refused("", expected, value, "None" if value is None and expected == "an object" else None)
    if (version := take(value, "format", _VERSION)) > newest:
        known = f"format {newest}" if newest == FORMAT else f"formats {FORMAT} to {newest}"
        text = f"{what} format {version}, but this release of lazyshard reads {known}; install a newer lazyshard"
        raise VersionUnsupported(text, field="format", expected=str(newest), actual=str(version))
    return value


def take(values: Mapping[str, Any], name: str, kind: Kind) -> Any:
    """Returns a required field."""
    if name not in values:
        raise refused(name, kind.expected, None, "no such field")
    return kind.read(kind.check(name, values[name]))


def read(cls: type[_CheckedT], value: Any, missing: Collection[str] = ()) -> _CheckedT:
    """Returns an instance of a class read from an object; only fields in `missing` may be absent."""
    if not isinstance(value, dict):
        raise refused("", "an object", value)
    found = {}
    for name, kind in part.kinds_of(cls).items():  # type: ignore[arg-type]
        if name in value:
            try:
                found[name] = kind.read(value[name])
            except (StateInvalid, VersionUnsupported):
                with inside(name):
                    raise
        elif name not in missing:
            raise refused(name, kind.expected, None, "no such field")
    return cls(**found)


def list_of(cls: type[_CheckedT], make: Callable[[Any], _CheckedT] | None = None, least: int = 1) -> Kind:
    """Returns the kind of a tuple of instances of a class, each read from an object of a list."""

    def read_one(number: int, value: Any) -> _CheckedT:
        with inside(f"[{number}]"):
            return make(value) if make else read(cls, value)

    return Kind(
        "a list, not empty" if least else "a list",
        lambda value: isinstance(value, tuple) and len(value) >= least and all(isinstance(one, cls) for one in value),
        lambda value: tuple(starmap(read_one, enumerate(value))) if isinstance(value, (list, tuple)) else value,
    )


def pack(numbers: part.Numbers, dtype: str) -> str:
    """Returns the little-endian bytes of numbers in base64."""
    return pybase64.b64encode(np.asarray(numbers, dtype=dtype).tobytes()).decode("ascii")


def unpack(values: Mapping[str, Any], field: str, dtype: str, count: int) -> Array:
    """Returns an array of `count` numbers, "<u8" or "<u4", encoded by `pack`."""
    value = take(values, field, Kind("a base64 string", lambda value: isinstance(value, str)))
    try:
        data = pybase64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as cause:
        raise refused(field, "a base64 string", None, f"{part.shown(value)} ({cause})") from cause
    if len(data) != count * (size := np.dtype(dtype).itemsize):
        raise refused(field, f"{count} numbers of {size} bytes", None, f"{len(data)} bytes")
    return np.frombuffer(data, dtype=dtype)


def encode(values: dict[str, Any]) -> bytes:
    """Returns the JSON of a file of a stream, ended by a newline."""
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)


def printable(text: str) -> str:
    r"""Returns a foreign text with all characters escaped that are not printable, line ends included.

    >>> printable("a\x1b[2J\n"), printable("Zürich 1")
    ('a\\x1b[2J\\n', 'Zürich 1')
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def check_encoding(value: Mapping[str, Any], what: str = "an encoding") -> dict[str, Fact]:
    """Returns a copy of an encoding. Raises ValueError, which names the first invalid fact."""
    if (mistake := _mistake(value)) is not None:
        rule = f"is 1 to {_MAX_FACTS} facts by name, each a string, a number, true, false or None"
        raise ValueError(f"{what} {rule}, got {mistake}")
    return dict(value)


def _mistake(value: Any) -> str | None:
    """Returns what makes a value an invalid encoding, None if it is valid."""
    if not isinstance(value, Mapping):
        return f"{_shown(value)} ({type(value).__name__})"
    for name, fact in value.items():
        if not isinstance(name, str) or not name:
            return f"the name {_shown(name)}"
        # Check integers first: they may be too large for `isfinite`.
        number = -(2**63) <= fact < 2**64 if type(fact) is int else NUMBER.fits(fact)
        if not (number or fact is None or type(fact) in (str, bool)):
            return f"{_shown(fact)} ({type(fact).__name__}) under {_shown(name)}"
    return None if 0 < len(value) <= _MAX_FACTS else f"{len(value):,} of them"


def differences(was: Encoding, now: Encoding, leave_out: Collection[str] = ()) -> list[str]:
    """Returns a text for each fact in which two encodings differ, in the order of the first; empty if they agree.

    >>> differences({"max_length": 512, "template": "qwen"}, {"max_length": 1024, "template": "qwen"})
    ['max_length is 512 there and 1024 here']
    """
    facts = [(name, was.get(name, _ABSENT), now.get(name, _ABSENT)) for name in {**was, **now} if name not in leave_out]
    # Python treats True as equal to 1; 1 and 1.0 are the same fact nevertheless.
    differ = ((name, a, b) for name, a, b in facts if a != b or isinstance(a, bool) != isinstance(b, bool))
    return [f"{name} is {_shown(a)} there and {_shown(b)} here" for name, a, b in differ]


def _shown(value: Any) -> str:
    return "missing" if value is _ABSENT else part.shown(value)


def check_samples_per_chunk(value: int) -> int:
    """Returns a valid number of samples per chunk; raises ValueError otherwise."""
    if not PER_CHUNK.fits(value):
        raise ValueError(f"samples_per_chunk must be {PER_CHUNK.expected}, got {value!r}")
    return value


STREAM_ID: Final = hexadecimal(32)
PER_CHUNK: Final = integer(1, MAX_SAMPLES_PER_CHUNK)
Chunks = Annotated[int, integer(0, MAX_CHUNKS)]
StreamId = Annotated[str | None, or_null(STREAM_ID)]  # None for a foreign directory
Seconds = Annotated[float, NUMBER]  # since 1970, UTC
Process = Annotated[int, integer(0, 2**31)]

# Constants: a lambda in an annotation would not find names of this module.
_NOTE: Final = Kind("a string", lambda value: isinstance(value, str))
_STATE: Final = Kind(f"one of {', '.join(STATES)}", lambda value: value in STATES)
_RATE: Final = NUMBER._replace(read=lambda value: max(0.0, value) if NUMBER.fits(value) else value)
_DECLARED: Final = Kind(
    "a number or a list of names",
    lambda value: all(map(TEXT.fits, value)) if isinstance(value, tuple) else integer(0, MAX_WRITERS).fits(value),
    part.tuples,
)
_ENCODING: Final = or_null(Kind(f"an object of 1 to {_MAX_FACTS} plain values", lambda value: _mistake(value) is None))


def given(value: Checked) -> dict[str, Any]:
    """Returns the fields of a value that differ from their default, as plain JSON values."""
    defaults = defaults_of(type(value))  # type: ignore[arg-type]
    kept = Checked.to_dict(value).items()
    return {name: plain for name, plain in kept if name not in defaults or getattr(value, name) != defaults[name]}


@cache
def defaults_of(cls: type) -> dict[str, Any]:
    """Returns the defaults of fields by name."""
    found = ((one.name, one.default) for one in fields(cls))
    return {name: default for name, default in found if default is not MISSING}


class SmallFile(Checked):
    """A JSON file with the fields of the dataclass, in order; fields that have their default are left out."""

    __slots__ = ()
    NAME: ClassVar[str]

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode({"format": FORMAT} | given(self))

    @classmethod
    def decode(cls: type[_FileT], data: bytes, file: str = "") -> _FileT:
        """Decodes the file's bytes; messages use `file` as its name. Raises FileInvalid, VersionUnsupported."""
        with in_file(file or cls.NAME):
            return read(cls, parse_object(data), defaults_of(cls))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Manifest(SmallFile):
    """What never changes about a stream: its identity, chosen at random, and the rows in every chunk but the last.

    `arrays`, stored as the file's format, is whether rows may hold arrays, stored in side files. `encoding` describes
    how encoded rows were made, None for rows not made by an encoder; only streams with arrays have one.
    """

    stream_id: Annotated[str, STREAM_ID]
    samples_per_chunk: Annotated[int, PER_CHUNK]
    created_at: Seconds
    arrays: Annotated[bool, BOOLEAN] = False
    encoding: Annotated[Encoding | None, _ENCODING] = field(default=None, hash=False)
    # how many writers it has, 0 if a command ends it, or their names; None for one unnamed producer
    writers: Annotated[Declared | None, or_null(_DECLARED)] = None

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        values = {"format": FORMAT + self.arrays} | given(self)
        values.pop("arrays", None)
        return encode(values)

    @classmethod
    def decode(cls, data: bytes, file: str = MANIFEST) -> Manifest:
        """Decodes the file's bytes. Raises FileInvalid, VersionUnsupported."""
        with in_file(file):
            values = parse_object(data, FORMAT_WITH_ARRAYS)
            arrays = values["format"] == FORMAT_WITH_ARRAYS
            encoding = values.get("encoding") if arrays else None
            return read(cls, values | {"arrays": arrays, "encoding": encoding}, defaults_of(cls))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Counted(SmallFile):
    chunks: Chunks
    samples: Samples

    def __post_init__(self) -> None:
        SmallFile.__post_init__(self)
        if self.chunks == 0 and self.samples > 0:
            raise refused("samples", "0, as there is no chunk", self.samples)
        if self.samples < self.chunks:
            raise refused("samples", f"at least one for each of {self.chunks} chunks", self.samples)

    def is_whole(self, size: int, *, ended: bool) -> bool:
        """Whether its chunks of `size` samples hold its samples; the last may hold fewer if the stream has ended."""
        return 0 <= self.chunks * size - self.samples < (size if ended else 1)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class End(_Counted):
    """The final size of an ended stream; `source` is the producer's position after all rows it read, as in seals."""

    source: Annotated[Any, Kind("a position", lambda value: True)] = field(default=None, compare=False)

    NAME: ClassVar[str] = END


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Head(_Counted):
    """The newest published state: the chunks [0, chunks) with their samples, and the state of the producer."""

    ended: Annotated[bool, BOOLEAN]
    state: Annotated[ProducerState, _STATE]
    rate: Annotated[float, _RATE]  # samples per second accepted recently, 0 if unknown
    host: Annotated[str, TEXT]
    pid: Process
    updated_at: Seconds  # by the producer's clock
    note: Annotated[str, _NOTE] = ""  # what the producer waits for, or why it failed, in words
    process: Annotated[str, _NOTE] = ""  # identifies its process on the machine; only for comparison
    open: Samples = 0  # rows that it has accepted since the last published one
    row_at: Seconds = 0.0  # when it first had that many; 0 if it has accepted none since it started

    NAME: ClassVar[str] = HEAD


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Owner(SmallFile):
    """The producer that may publish: `epoch`, from 1, grows with each that opens the stream; `token` is per start."""

    epoch: Annotated[int, integer(1, MAX_SAMPLES)]
    token: Annotated[str, TEXT]
    host: Annotated[str, TEXT]
    pid: Process
    since: Seconds

    NAME: ClassVar[str] = OWNER

    def __str__(self) -> str:
        return f"process {self.pid} on {printable(self.host)}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Retired(SmallFile):
    """The chunks [0, chunks_before) are deleted or being deleted; ignored if it belongs to another stream."""

    stream_id: Annotated[str, STREAM_ID]
    chunks_before: Chunks
    updated_at: Seconds

    NAME: ClassVar[str] = RETIRED
