"""The small files of a stream directory as values: manifest, head, end, owner, retired mark.

- `stream.json`, the manifest, is written once when the stream is created.
- `head.json`, which readers poll, is a hint that is rebuilt from the seals, replaced atomically on every publish and as
  a heartbeat; it never names a chunk whose seal is not durable.
- `stream.end`: no chunk follows. Written once, after the last seal is durable.
- `stream.owner`: which producer may publish. Each that opens a stream raises the epoch and writes its own name here;
  before each publish it looks whether the file still holds what it wrote. One that was stopped and has woken up finds a
  higher epoch and gives up, also where file locks do not meet.
- `retired.json` is written durably before the first file of a chunk is removed: one that is missing is retired or lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from lazyshard.format import fields
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, RETIRED
from lazyshard.part import BOOLEAN, MAX_SAMPLES, NUMBER, TEXT, Kind, Samples, integer, refused

Fact: TypeAlias = str | int | float | bool | None
Encoding: TypeAlias = Mapping[str, Fact]

_MAX_FACTS: Final = 1000  # Of one encoding: far more than any has
_SHOWN: Final = 60  # Characters of a fact that messages show: a system prompt may have pages
_ABSENT: Final = object()
# A seal holds 16 bytes a row and more, base64; past this one is no longer read in a reasonable time
MAX_SAMPLES_PER_CHUNK: Final = 100_000_000
# running: rows are coming; waiting: held back (by its source, rate or a limit); idle: stopped in good order, resumable;
# finished: the stream has ended; failed: stopped by an error, resumable
ProducerState = Literal["running", "waiting", "idle", "finished", "failed"]
STATES: Final[tuple[ProducerState, ...]] = get_args(ProducerState)

Seconds = Annotated[float, NUMBER]  # since 1970, UTC


def check_encoding(value: Mapping[str, Any], what: str = "an encoding") -> dict[str, Fact]:
    """Returns a copy of an encoding. Raises ValueError, which names the first fact that cannot be, where it is none."""
    if (mistake := _mistake(value)) is not None:
        raise ValueError(
            f"{what} is 1 to {_MAX_FACTS} facts by name, each a string, a number, true, false or None, got {mistake}"
        )
    return dict(value)


def _mistake(value: Any) -> str | None:
    """Returns what is no encoding about a value, None where it is one."""
    if not isinstance(value, Mapping):
        return f"{_shown(value)} ({type(value).__name__})"
    for name, fact in value.items():
        if not isinstance(name, str) or not name:
            return f"the name {_shown(name)}"
        if not _is_fact(fact):
            return f"{_shown(fact)} ({type(fact).__name__}) under {_shown(name)}"
    return None if 0 < len(value) <= _MAX_FACTS else f"{len(value):,} of them"


def differences(was: Encoding, now: Encoding, leave_out: Iterable[str] = ()) -> list[str]:
    """Returns in words each fact in which two encodings differ, in the order of the first; nothing where they agree.

    >>> differences({"max_length": 512, "template": "qwen"}, {"max_length": 1024, "template": "qwen"})
    ['max_length is 512 there and 1024 here']
    """
    names = [name for name in {**was, **now} if name not in set(leave_out)]
    return [
        f"{name} is {_shown(was.get(name, _ABSENT))} there and {_shown(now.get(name, _ABSENT))} here"
        for name in names
        if _key(was.get(name, _ABSENT)) != _key(now.get(name, _ABSENT))
    ]


def _is_fact(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return value is None or type(value) in (str, bool) or (type(value) is float and math.isfinite(value))


def _key(value: Any) -> tuple[bool, Any]:
    # To Python True is 1; 1 and 1.0 are the same fact all the same.
    return isinstance(value, bool), value


def _shown(value: Any) -> str:
    text = "not said" if value is _ABSENT else "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check_samples_per_chunk(value: int) -> int:
    """Returns the value if it can be a number of samples per chunk, and raises ValueError if not."""
    if type(value) is not int or not 1 <= value <= MAX_SAMPLES_PER_CHUNK:
        raise ValueError(f"samples_per_chunk is an integer from 1 to {MAX_SAMPLES_PER_CHUNK}, got {value!r}")
    return value


# A lambda in an annotation would not find names of this module.
_NOTE: Final = Kind("a string", lambda value: isinstance(value, str))
_STATE: Final = Kind(f"one of {', '.join(STATES)}", lambda value: value in STATES)
_RATE: Final = NUMBER._replace(read=lambda value: max(0.0, value) if NUMBER.fits(value) else value)
_ENCODING: Final = Kind(
    f"an object of 1 to {_MAX_FACTS} plain values", lambda value: value is None or _mistake(value) is None
)


@dataclass(frozen=True, slots=True)
class Manifest(fields.SmallFile):
    """What never changes about a stream: its identity, chosen at random, and the rows in every chunk but the last.

    `arrays`, which the file's format tells, is whether rows may hold arrays, kept in side files. `encoding` is what
    encoded rows were made with, None for rows that no encoder has made; only streams with arrays have one.
    """

    stream_id: Annotated[str, fields.STREAM_ID]
    samples_per_chunk: Annotated[int, integer(1, MAX_SAMPLES_PER_CHUNK)]
    created_at: Seconds
    arrays: Annotated[bool, BOOLEAN] = False
    encoding: Annotated[Encoding | None, _ENCODING] = field(default=None, hash=False)

    def __post_init__(self) -> None:
        fields.SmallFile.__post_init__(self)
        check_samples_per_chunk(self.samples_per_chunk)

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        values = {"format": fields.FORMAT_WITH_ARRAYS if self.arrays else fields.FORMAT} | self.to_dict()
        for name in ("arrays", "encoding") if self.encoding is None else ("arrays",):
            del values[name]
        return fields.encode(values)

    @classmethod
    def decode(cls, data: bytes, file: str = MANIFEST) -> Manifest:
        """Reads the file's bytes. Raises FileInvalid, VersionUnsupported."""
        with fields.in_file(file):
            values = fields.parse_object(data, fields.FORMAT_WITH_ARRAYS)
            arrays = values["format"] == fields.FORMAT_WITH_ARRAYS
            return fields.read(cls, values | {"arrays": arrays, "encoding": values.get("encoding") if arrays else None})


@dataclass(frozen=True, slots=True)
class End(fields.SmallFile):
    """How much an ended stream holds; `source` is the producer's position behind all that it has read, as in seals."""

    chunks: fields.Chunks
    samples: Samples
    source: Annotated[Any, Kind("a position", lambda value: True)] = field(default=None, compare=False)

    NAME: ClassVar[str] = END

    def __post_init__(self) -> None:
        fields.SmallFile.__post_init__(self)
        _check_counts(self.chunks, self.samples)


@dataclass(frozen=True, slots=True)
class Head(fields.SmallFile):
    """The newest published facts: the chunks [0, chunks) with so many samples, and what their producer does."""

    chunks: fields.Chunks
    samples: Samples
    ended: Annotated[bool, BOOLEAN]
    state: Annotated[ProducerState, _STATE]
    rate: Annotated[float, _RATE]
    """Samples per second lately accepted, 0 where unknown."""
    host: Annotated[str, TEXT]
    pid: Annotated[int, integer(0, 2**31)]
    updated_at: Seconds
    """By the producer's clock."""
    note: Annotated[str, _NOTE] = ""
    """What it waits for, or why it has failed, in words."""
    process: Annotated[str, _NOTE] = ""
    """Tells its process from all others of the machine, to be compared."""
    open: Samples = 0
    """Rows that it has taken since the last published one."""
    row_at: Seconds = 0.0
    """When it was first seen to have as many; 0 where none has come since it started."""

    NAME: ClassVar[str] = HEAD

    def __post_init__(self) -> None:
        fields.SmallFile.__post_init__(self)
        _check_counts(self.chunks, self.samples)


def _check_counts(chunks: int, samples: int) -> None:
    if chunks == 0 and samples > 0:
        raise refused("samples", "0, as there is no chunk", samples)
    if samples < chunks:
        raise refused("samples", f"at least one for each of {chunks} chunks", samples)


@dataclass(frozen=True, slots=True)
class Owner(fields.SmallFile):
    """A producer and its turn.

    `epoch` grows with each producer that opens the stream, from 1; `token` is chosen at random at this start.
    """

    epoch: Annotated[int, integer(1, MAX_SAMPLES)]
    token: Annotated[str, TEXT]
    host: Annotated[str, TEXT]
    pid: Annotated[int, integer(0, 2**31)]
    since: Seconds

    NAME: ClassVar[str] = OWNER

    def __str__(self) -> str:
        return f"process {self.pid} on {fields.printable(self.host)}"


@dataclass(frozen=True, slots=True)
class Retired(fields.SmallFile):
    """The chunks [0, chunks_before) are deleted or being deleted.

    A mark that was left by another stream than `stream_id` says nothing of this one.
    """

    stream_id: Annotated[str, fields.STREAM_ID]
    chunks_before: fields.Chunks
    updated_at: Seconds

    NAME: ClassVar[str] = RETIRED
