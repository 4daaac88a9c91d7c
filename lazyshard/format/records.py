"""The small files of a stream directory as values: manifest, head, end, owner, retired mark.

- `stream.json`, the manifest: what never changes about a stream, written once when it is created. Of an encoded stream
  it keeps the `Encoding`: plain facts by name of what rows were encoded with, compared fact by fact.
- `head.json`: the newest published facts, which readers poll. A hint that is rebuilt from the seals, replaced
  atomically on every publish and as a heartbeat; it never names a chunk whose seal is not durable.
- `stream.end`: no chunk follows. Written once, after the last seal is durable.
- `stream.owner`: which producer may publish. Each that opens a stream raises the epoch and writes its own name here;
  before each publish it looks whether the file still holds what it wrote. One that was stopped and has woken up finds a
  higher epoch and gives up, also where file locks do not meet.
- `retired.json`: which chunks the producer has deleted, or is deleting. Written durably before the first file of a
  chunk is removed, so that a missing chunk is either retired or lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from lazyshard.format.fields import FORMAT, FORMAT_WITH_ARRAYS, MAX_CHUNKS, Fields, encode, printable
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, RETIRED
from lazyshard.part import MAX_SAMPLES

Fact: TypeAlias = str | int | float | bool | None

Encoding: TypeAlias = Mapping[str, Fact]

MAX_FACTS: Final = 1000
"""Of one encoding: far more than any has."""

_SHOWN: Final = 60
"""Characters of a fact that messages show: a system prompt may have pages."""

_ABSENT: Final = object()


def is_encoding(value: Any) -> bool:
    """Whether this is an object of plain facts: strings, numbers, true, false and null by non-empty names."""
    return (
        isinstance(value, Mapping)
        and 0 < len(value) <= MAX_FACTS
        and all(isinstance(name, str) and name and _is_fact(fact) for name, fact in value.items())
    )


def check_encoding(value: Mapping[str, Any], what: str = "an encoding") -> dict[str, Fact]:
    """Returns a copy of an encoding.

    Args:
        value: it.
        what: how the message calls it.

    Raises:
        ValueError: it is none; the message names what it is, and the first fact that cannot be.
    """
    if not is_encoding(value):
        raise ValueError(
            f"{what} is 1 to {MAX_FACTS} facts by name, each a string, a number, true, false or None, got "
            f"{_mistake(value)}"
        )
    return dict(value)


def _mistake(value: Any) -> str:
    """Returns what is wrong about a value that is no encoding."""
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


MAX_SAMPLES_PER_CHUNK: Final = 100_000_000
"""A seal holds 16 bytes a row and more, base64; past this one is no longer read in a reasonable time."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What never changes about a stream.

    Attributes:
        stream_id: 32 hexadecimal digits chosen at random when the stream was created.
        samples_per_chunk: rows in every chunk but possibly the last of an ended stream.
        created_at: seconds since 1970, UTC.
        arrays: whether rows may hold arrays, kept in side files; the file's format tells.
        encoding: what encoded rows were made with; None for rows that no encoder has made. Only streams with arrays
            have one.
    """

    stream_id: str
    samples_per_chunk: int
    created_at: float
    arrays: bool = False
    encoding: Encoding | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Checks the number of samples per chunk."""
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
        """Reads the file's bytes.

        Raises:
            FileInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file, FORMAT_WITH_ARRAYS)
        return cls(
            stream_id=fields.stream_id("stream_id"),
            samples_per_chunk=fields.integer("samples_per_chunk", 1, MAX_SAMPLES_PER_CHUNK),
            created_at=fields.number("created_at"),
            arrays=fields.format == FORMAT_WITH_ARRAYS,
            encoding=_encoding(fields) if fields.format == FORMAT_WITH_ARRAYS else None,
        )


def _encoding(fields: Fields) -> Encoding | None:
    value = fields.values.get("encoding")
    if value is not None and not is_encoding(value):
        raise fields.refuse("encoding", f"an object of 1 to {MAX_FACTS} plain values", str(type(value).__name__))
    return value


def check_samples_per_chunk(value: int) -> int:
    """Returns the value if it can be a number of samples per chunk.

    Raises:
        ValueError: it cannot.
    """
    if type(value) is not int or not 1 <= value <= MAX_SAMPLES_PER_CHUNK:
        raise ValueError(f"samples_per_chunk is an integer from 1 to {MAX_SAMPLES_PER_CHUNK}, got {value!r}")
    return value


ProducerState = Literal["running", "waiting", "idle", "finished", "failed"]
"""running: rows are coming; waiting: held back (by its source, rate or a limit); idle: stopped in good order,
resumable; finished: the stream has ended; failed: stopped by an error, resumable."""

STATES: Final[tuple[ProducerState, ...]] = get_args(ProducerState)

_OPTIONAL: Final = ("note", "process", "open", "row_at")
"""Left out where they say nothing."""


def _counts(fields: Fields) -> tuple[int, int]:
    """Returns chunks and samples; a chunk has at least one."""
    chunks = fields.integer("chunks", 0, MAX_CHUNKS)
    samples = fields.integer("samples", 0, MAX_SAMPLES)
    if chunks == 0 and samples > 0:
        raise fields.refuse("samples", "0, as there is no chunk", str(samples))
    if samples < chunks:
        raise fields.refuse("samples", f"at least one for each of {chunks} chunks", str(samples))
    return chunks, samples


@dataclass(frozen=True, slots=True)
class Head:
    """The newest published facts.

    Attributes:
        chunks: published chunks: those of the half-open range [0, chunks).
        samples: rows in them.
        ended: nothing will follow.
        state: what the producer is doing.
        rate: samples per second lately accepted, 0 where unknown.
        host: the producer's machine.
        pid: the producer's process there.
        updated_at: seconds since 1970, UTC, by the producer's clock.
        note: what it waits for, or why it has failed, in words; empty where it does not say.
        process: what tells its process from all others of the machine, to be compared; empty where it does not say.
        open: rows that it has taken since the last published one.
        row_at: when it was first seen to have as many, like `updated_at`; 0 where none has come since it started.
    """

    chunks: int
    samples: int
    ended: bool
    state: ProducerState
    rate: float
    host: str
    pid: int
    updated_at: float
    note: str = ""
    process: str = ""
    open: int = 0
    row_at: float = 0.0

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in _OPTIONAL or getattr(self, name)}
        return encode({"format": FORMAT} | values)

    @classmethod
    def decode(cls, data: bytes, file: str = HEAD) -> Head:
        """Reads the file's bytes.

        Raises:
            FileInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file)
        chunks, samples = _counts(fields)
        state = fields.text("state", STATES)
        return cls(
            chunks=chunks,
            samples=samples,
            ended=fields.boolean("ended"),
            state=next(known for known in STATES if known == state),
            rate=max(0.0, fields.number("rate")),
            host=fields.text("host"),
            pid=fields.integer("pid", 0, 2**31),
            updated_at=fields.number("updated_at"),
            note=fields.text("note") if "note" in fields.values else "",
            process=fields.text("process") if "process" in fields.values else "",
            open=fields.integer("open", 0, MAX_SAMPLES) if "open" in fields.values else 0,
            row_at=fields.number("row_at") if "row_at" in fields.values else 0.0,
        )


@dataclass(frozen=True, slots=True)
class End:
    """How much an ended stream holds.

    Attributes:
        chunks: all chunks: those of the half-open range [0, chunks).
        samples: rows in them.
        source: the producer's position behind all that it has read, as in seals; None if it gave none.
    """

    chunks: int
    samples: int
    source: Any = field(default=None, compare=False)

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        source = {} if self.source is None else {"source": self.source}
        return encode({"format": FORMAT, "chunks": self.chunks, "samples": self.samples} | source)

    @classmethod
    def decode(cls, data: bytes, file: str = END) -> End:
        """Reads the file's bytes.

        Raises:
            FileInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file)
        chunks, samples = _counts(fields)
        return cls(chunks=chunks, samples=samples, source=fields.values.get("source"))


@dataclass(frozen=True, slots=True)
class Owner:
    """A producer and its turn.

    Attributes:
        epoch: grows with each producer that opens the stream, from 1.
        token: hexadecimal digits chosen at random at this start, so that no two are ever equal.
        host: its machine.
        pid: its process there.
        since: seconds since 1970, UTC, by its clock.
    """

    epoch: int
    token: str
    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        """Names the holder for a message."""
        return f"process {self.pid} on {printable(self.host)}"

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode({"format": FORMAT} | {name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def decode(cls, data: bytes, file: str = OWNER) -> Owner:
        """Reads the file's bytes.

        Raises:
            FileInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file)
        return cls(
            epoch=fields.integer("epoch", 1, 2**62),
            token=fields.text("token"),
            host=fields.text("host"),
            pid=fields.integer("pid", 0, 2**31),
            since=fields.number("since"),
        )


@dataclass(frozen=True, slots=True)
class Retired:
    """Which chunks are not there any more.

    Attributes:
        stream_id: the stream's identity. A mark that was left by another stream says nothing of this one.
        chunks_before: the chunks of the half-open range [0, chunks_before) are deleted or being deleted.
        updated_at: seconds since 1970, UTC, by the producer's clock.
    """

    stream_id: str
    chunks_before: int
    updated_at: float

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return encode({"format": FORMAT} | {name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def decode(cls, data: bytes, file: str = RETIRED) -> Retired:
        """Reads the file's bytes.

        Raises:
            FileInvalid: a field is missing or wrong.
            VersionUnsupported: a later format.
        """
        fields = Fields(data, file)
        return cls(
            stream_id=fields.stream_id("stream_id"),
            chunks_before=fields.integer("chunks_before", 0, MAX_CHUNKS),
            updated_at=fields.number("updated_at"),
        )
