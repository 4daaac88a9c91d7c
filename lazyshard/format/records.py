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
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from lazyshard.format.fields import (
    FORMAT,
    FORMAT_WITH_ARRAYS,
    MAX_CHUNKS,
    Fields,
    SmallFile,
    encode,
    integer_from,
    printable,
)
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, RETIRED
from lazyshard.part import MAX_SAMPLES

Fact: TypeAlias = str | int | float | bool | None

Encoding: TypeAlias = Mapping[str, Fact]

_MAX_FACTS: Final = 1000  # Of one encoding: far more than any has
_SHOWN: Final = 60  # Characters of a fact that messages show: a system prompt may have pages
_ABSENT: Final = object()


def _is_encoding(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and 0 < len(value) <= _MAX_FACTS
        and all(isinstance(name, str) and name and _is_fact(fact) for name, fact in value.items())
    )


def check_encoding(value: Mapping[str, Any], what: str = "an encoding") -> dict[str, Fact]:
    """Returns a copy of an encoding. Raises ValueError, which names the first fact that cannot be, where it is none."""
    if not _is_encoding(value):
        raise ValueError(
            f"{what} is 1 to {_MAX_FACTS} facts by name, each a string, a number, true, false or None, got "
            f"{_mistake(value)}"
        )
    return dict(value)


def _mistake(value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{_shown(value)} ({type(value).__name__})"
    for name, fact in value.items():
        if not isinstance(name, str) or not name:
            return f"the name {_shown(name)}"
        if not _is_fact(fact):
            return f"{_shown(fact)} ({type(fact).__name__}) under {_shown(name)}"
    return f"{len(value):,} of them"


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


# A seal holds 16 bytes a row and more, base64; past this one is no longer read in a reasonable time
MAX_SAMPLES_PER_CHUNK: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Manifest:
    """What never changes about a stream: its identity, chosen at random, and the rows in every chunk but the last.

    `arrays`, which the file's format tells, is whether rows may hold arrays, kept in side files. `encoding` is what
    encoded rows were made with, None for rows that no encoder has made; only streams with arrays have one.
    """

    stream_id: str
    samples_per_chunk: int
    created_at: float
    arrays: bool = False
    encoding: Encoding | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_samples_per_chunk(self.samples_per_chunk)

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode(
            {
                "format": FORMAT_WITH_ARRAYS if self.arrays else FORMAT,
                "stream_id": self.stream_id,
                "samples_per_chunk": self.samples_per_chunk,
                "created_at": self.created_at,
                **({} if self.encoding is None else {"encoding": dict(self.encoding)}),
            }
        )

    @classmethod
    def decode(cls, data: bytes, file: str = MANIFEST) -> Manifest:
        """Reads the file's bytes. Raises FileInvalid, VersionUnsupported."""
        fields = Fields(data, file, FORMAT_WITH_ARRAYS)
        arrays = fields.format == FORMAT_WITH_ARRAYS
        encoding = fields.values.get("encoding") if arrays else None
        if encoding is not None and not _is_encoding(encoding):
            raise fields.refuse("encoding", f"an object of 1 to {_MAX_FACTS} plain values", type(encoding).__name__)
        return cls(
            fields.stream_id("stream_id"),
            fields.integer("samples_per_chunk", 1, MAX_SAMPLES_PER_CHUNK),
            fields.number("created_at"),
            arrays,
            encoding,
        )


def check_samples_per_chunk(value: int) -> int:
    """Returns the value if it can be a number of samples per chunk, and raises ValueError if not."""
    if type(value) is not int or not 1 <= value <= MAX_SAMPLES_PER_CHUNK:
        raise ValueError(f"samples_per_chunk is an integer from 1 to {MAX_SAMPLES_PER_CHUNK}, got {value!r}")
    return value


# running: rows are coming; waiting: held back (by its source, rate or a limit); idle: stopped in good order, resumable;
# finished: the stream has ended; failed: stopped by an error, resumable
ProducerState = Literal["running", "waiting", "idle", "finished", "failed"]

STATES: Final[tuple[ProducerState, ...]] = get_args(ProducerState)


def _samples(fields: Fields, name: str) -> int:
    """Reads a number of samples beside one of chunks; a chunk has at least one."""
    chunks = fields.integer("chunks", 0, MAX_CHUNKS)
    samples = fields.integer(name, 0, MAX_SAMPLES)
    if chunks == 0 and samples > 0:
        raise fields.refuse(name, "0, as there is no chunk", str(samples))
    if samples < chunks:
        raise fields.refuse(name, f"at least one for each of {chunks} chunks", str(samples))
    return samples


@dataclass(frozen=True, slots=True)
class Head(SmallFile):
    """The newest published facts: the chunks [0, chunks) with so many samples, and what their producer does."""

    chunks: int
    samples: int
    ended: bool
    state: ProducerState
    rate: float
    """Samples per second lately accepted, 0 where unknown."""
    host: str
    pid: int
    updated_at: float
    """Seconds since 1970, UTC, by the producer's clock."""
    note: str = ""
    """What it waits for, or why it has failed, in words."""
    process: str = ""
    """Tells its process from all others of the machine, to be compared."""
    open: int = 0
    """Rows that it has taken since the last published one."""
    row_at: float = 0.0
    """When it was first seen to have as many; 0 where none has come since it started."""

    NAME: ClassVar = HEAD
    READ: ClassVar = {
        "chunks": integer_from(0, MAX_CHUNKS),
        "samples": _samples,
        "ended": Fields.boolean,
        "state": lambda fields, name: fields.text(name, STATES),
        "rate": lambda fields, name: max(0.0, fields.number(name)),
        "host": Fields.text,
        "pid": integer_from(0, 2**31),
        "updated_at": Fields.number,
        "note": Fields.text,
        "process": Fields.text,
        "open": integer_from(0, MAX_SAMPLES),
        "row_at": Fields.number,
    }


@dataclass(frozen=True, slots=True)
class End(SmallFile):
    """How much an ended stream holds; `source` is the producer's position behind all that it has read, as in seals."""

    chunks: int
    samples: int
    source: Any = field(default=None, compare=False)

    NAME: ClassVar = END
    READ: ClassVar = {
        "chunks": integer_from(0, MAX_CHUNKS),
        "samples": _samples,
        "source": lambda fields, name: fields.values[name],
    }


@dataclass(frozen=True, slots=True)
class Owner(SmallFile):
    """A producer and its turn.

    `epoch` grows with each producer that opens the stream, from 1; `token` is chosen at random at this start.
    """

    epoch: int
    token: str
    host: str
    pid: int
    since: float

    NAME: ClassVar = OWNER
    READ: ClassVar = {
        "epoch": integer_from(1, MAX_SAMPLES),
        "token": Fields.text,
        "host": Fields.text,
        "pid": integer_from(0, 2**31),
        "since": Fields.number,
    }

    def __str__(self) -> str:
        return f"process {self.pid} on {printable(self.host)}"


@dataclass(frozen=True, slots=True)
class Retired(SmallFile):
    """The chunks [0, chunks_before) are deleted or being deleted.

    A mark that was left by another stream than `stream_id` says nothing of this one.
    """

    stream_id: str
    chunks_before: int
    updated_at: float

    NAME: ClassVar = RETIRED
    READ: ClassVar = {
        "stream_id": Fields.stream_id,
        "chunks_before": integer_from(0, MAX_CHUNKS),
        "updated_at": Fields.number,
    }
