"""Several writers of one stream: their names, and the position of the sequencer that gives their chunks numbers.

Each writer publishes into a stream of its own, `.writers/NAME/`, whose chunks are called *pieces* while they have no
number in the shared stream. The sequencer's sources are these streams, so its position is how many rows of each writer
are in the shared stream; as with any producer it is in the field `source` of each seal.

- `.writers/committed.json` repeats the position of the newest durable seal for the writers, and shows that the
  sequencer is alive. It is a hint that the next sequencer writes anew.
- `.writers/end.json` asks the sequencer to end the stream without the writers that have not ended.
- `.writers/.producer.lock` is held while the stream is created; it stays, empty.
- `.writers/intent.json`, only in an object store: what the sequencer publishes next.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from lazyshard.format.records import MAX_WRITERS, Chunks, Declared, Process, Seconds, SmallFile
from lazyshard.part import BOOLEAN, MAX_SAMPLES, TEXT, Kind, Samples, integer, tuples

WRITERS: Final = ".writers"  # folder of the writers in a stream's directory
_NAME: Final = re.compile(r"(?!.*\.json$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # beside the folders are files, *.json
NAME_RULE: Final = "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit, not ending in '.json'"
_COUNT: Final = integer(0, MAX_SAMPLES)


def check_writer_name(name: Any) -> str:
    """Returns a writer's name: 1 to 64 letters, digits, `.`, `_` and `-`, the first no sign. Raises ValueError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a writer's name is {NAME_RULE}, got {name!r}")
    return name


def is_writer_name(name: str) -> bool:
    """Whether a folder's name can be that of a writer."""
    return _NAME.fullmatch(name) is not None


def check_declared(writers: int | Iterable[str]) -> Declared:
    """Returns how many writers, or which, are declared. Raises ValueError: they cannot be."""
    if isinstance(writers, int) and not isinstance(writers, bool):
        if not 0 <= writers <= MAX_WRITERS:
            raise ValueError(f"writers is a number from 0 to {MAX_WRITERS} or a list of names, got {writers}")
        return writers
    names = () if isinstance(writers, str | bool) else tuple(sorted(set(map(check_writer_name, writers))))
    if not 1 <= len(names) <= MAX_WRITERS:
        raise ValueError(f"writers is a number from 0 to {MAX_WRITERS} or a list of names, got {writers!r}")
    return names


_TAKEN: Final = Kind(
    "an object of two numbers for each writer",
    lambda value: (
        isinstance(value, Mapping) and all(_NAME.fullmatch(name) and _fit(one) for name, one in value.items())
    ),
)


def _is_part(value: Any) -> bool:
    named = isinstance(value, tuple) and len(value) == 3 and is_writer_name(str(value[0]))
    return named and all(map(_COUNT.fits, value[1:]))


_CHOSEN: Final = Kind(
    "lists of writers, each with two numbers",
    lambda value: isinstance(value, tuple) and all(_is_part(part) for parts in value for part in parts),
    tuples,
)
_REFUSED: Final = Kind(
    "an object of texts", lambda value: isinstance(value, Mapping) and all(map(TEXT.fits, value.values()))
)


def piece_stream_id(stream_id: str, name: str) -> str:
    """Returns the identity of a writer's own stream, which follows from that of the shared one."""
    return hashlib.blake2s(f"{stream_id} {name}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class WriterRows:
    """Rows of one writer in a chunk: those of the half-open range [first, first + count) of all that it has written."""

    writer: str
    first: int
    count: int
    source: Any = None  # the writer's position after the piece that they come from


class Sequenced(NamedTuple):
    """The position of a sequencer after a chunk."""

    taken: Mapping[str, tuple[int, int]]  # by writer: rows in the shared stream, and the last chunk that has some
    rows: tuple[WriterRows, ...] = ()  # of this chunk, in order

    def to_source(self) -> dict[str, Any]:
        """Returns the field `source` of the chunk's seal."""
        taken = {name: list(one) for name, one in self.taken.items()}
        return {"writers": taken, "rows": [[one.writer, one.first, one.count, one.source] for one in self.rows]}

    @classmethod
    def read_source(cls, source: Any) -> Sequenced | None:
        """Returns what the field `source` of a seal says; None where no sequencer has written it."""
        if not isinstance(source, dict) or not isinstance(source.get("writers"), dict):
            return None
        taken, rows = source["writers"], source.get("rows")
        if not isinstance(rows, list) or not all(_NAME.fullmatch(name) and _fit(one) for name, one in taken.items()):
            return None
        if not all(isinstance(one, list) and len(one) == 4 and one[0] in taken and _fit(one[1:3]) for one in rows):
            return None
        return cls({name: (one[0], one[1]) for name, one in taken.items()}, tuple(WriterRows(*one) for one in rows))


def _fit(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_COUNT.fits, value))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Committed(SmallFile):
    """What the sequencer of a stream with several writers has committed durably, and that it is alive; a hint."""

    chunks: Chunks
    taken: Annotated[Mapping[str, Any], _TAKEN] = field(hash=False)  # as in `lazyshard.format.writers.Sequenced`
    refused: Annotated[Mapping[str, str], _REFUSED] = field(hash=False)  # by writer: why its pieces are not taken
    stopped: Annotated[bool, BOOLEAN]  # the sequencer has stopped in order, so another one need not wait
    beat: Samples  # grows while the sequencer is alive: clocks of two machines are not compared
    host: Annotated[str, TEXT]
    pid: Process
    updated_at: Seconds
    process: Annotated[str, Kind("a string", lambda value: isinstance(value, str))] = ""

    NAME: ClassVar[str] = "committed.json"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Intent(SmallFile):
    """The next chunks of a stream in an object store. Each sequencer publishes them before it chooses others.

    Stores cannot copy an object on a condition, so a sequencer that was stopped may copy after another one has taken
    over. It copies what both have read here.
    """

    chunks: Chunks  # number of the first one
    # by chunk: writer, first row and number of rows of each part
    rows: Annotated[tuple[tuple[tuple[str, int, int], ...], ...], _CHOSEN]
    end: Annotated[bool, BOOLEAN] = False  # then the stream ends

    NAME: ClassVar[str] = "intent.json"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EndRequest(SmallFile):
    """Asks the sequencer to end the stream without the writers that have not ended."""

    requested_at: Seconds

    NAME: ClassVar[str] = "end.json"
