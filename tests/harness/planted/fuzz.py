"""Planted bugs: each takes one check out of the reader, and the fuzzing has to find that it is gone."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from lazyshard.data import commits as state_checks
from lazyshard.format import fields, row
from lazyshard.format.cursor import Cursor
from lazyshard.format.seal import Seal
from lazyshard.store import files
from lazyshard.stream import chunk, consumers
from lazyshard.stream.chunk_files import CompleteFile
from tests.harness.fuzz.streams import ID


def _without_digests(self: chunk.Chunk, line: bytes, row: int) -> None:
    """Takes every row as it is."""


def _any_size(
    self: chunk.Chunk,
    file: Any,
    number: int,
    offsets: Any,
    digests: bytes | None,
    arrays: Any = None,
    dealt: Any = None,
) -> None:
    self.number = number
    self.arrays = arrays
    self.dealt = dealt
    self._file = CompleteFile(file)
    self._offsets = offsets
    self._digests = digests


def _short_read(self: chunk.Chunk, start: int, size: int) -> bytes:
    """Returns what there is of the bytes, as one who forgets that a file can be cut."""
    return self._file.read(start, size)


_decode_seal = Seal.decode


def _seal_of_any_chunk(data: bytes, number: int, file: str = "") -> Seal:
    """Passes over the number in the seal."""
    found = fields.Fields(data, file)
    return _decode_seal(fields.encode(found.values | {"chunk": number}), number, file)


def _any_integer(self: fields.Fields, field: str, low: int, high: int) -> int:
    """Takes negative counts and such beyond all bounds."""
    value = self.values.get(field)
    if type(value) is not int:
        raise self.refuse(field, "an integer", repr(value))
    return value


def _no_problem(*_: object) -> None:
    """Counts a cursor that is ahead of the data, or of another stream."""


def _torn_counts_as_done(*_: object) -> Cursor:
    return Cursor("run0", ID, 0, 3, {}, 0.0)


def _follows(path: Any) -> int:
    """Opens whatever is there, and waits for whoever writes to it."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _no_check(*_: object) -> None:
    """Refuses nothing."""


@dataclass(frozen=True)
class Mutant:
    """A planted bug."""

    target: str  # what finds it: "corpus", the damaged streams that are kept, or random cases of a target
    words: str  # what is said of it
    patches: tuple[tuple[Any, str, Any], ...]  # object, name of its attribute, and what is put in its place


MUTANTS: Final = {
    "digest check off": Mutant("corpus", "sample ", ((chunk.Chunk, "check", _without_digests),)),
    "length check off": Mutant(
        "corpus", "holds other bytes", ((chunk.Chunk, "__init__", _any_size), (chunk.Chunk, "_read", _short_read))
    ),
    "seal of another chunk accepted": Mutant("corpus", "sample ", ((Seal, "decode", _seal_of_any_chunk),)),
    "negative counts accepted": Mutant("formats", "got -1", ((fields.Fields, "integer", _any_integer),)),
    "cursor ahead of the data deletes": Mutant("cursors", "are deleted", ((consumers, "_problem", _no_problem),)),
    "torn cursor deletes": Mutant("cursors", "are deleted", ((Cursor, "decode", _torn_counts_as_done),)),
    "a pipe is waited for": Mutant("corpus", "no end within", ((files, "open_inside", _follows),)),
    "a hole is read to its end": Mutant("corpus", "MemoryError", ((files, "MAX_BYTES", 1 << 60),)),
    "huge integers rounded": Mutant("rows", "another reader finds", ((row, "_check_integers", _no_check),)),
    "any number of ranks": Mutant("states", "MemoryError", ((state_checks, "_check_ranks", _no_check),)),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for one in MUTANTS[name].patches:
            stack.enter_context(patch.object(*one))
        yield
