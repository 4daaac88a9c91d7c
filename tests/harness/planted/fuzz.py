"""Planted bugs: each takes one check out of the reader, and the fuzzing has to find that it is gone."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from lazyshard import part
from lazyshard.data import commits as state_checks
from lazyshard.format import records, row
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor
from lazyshard.store import files
from lazyshard.stream import chunk, cursor
from tests.harness.fuzz.damage import ID


def _any_size(
    self: Any, file: Any, number: int, starts: Any, digests: Any, arrays: Any = None, dealt: Any = None
) -> None:
    self.number, self.path, self.arrays, self.dealt = number, file.path, arrays, dealt
    self._file, self._offsets, self._digests = file, starts, digests


_decode_seal = Seal.decode


def _seal_of_any_chunk(data: bytes, number: int, file: str = "") -> Seal:
    return _decode_seal(records.encode(records.parse_object(data) | {"chunk": number}), number, file)


def _any_integer(self: part.Kind, field: str, value: Any) -> Any:
    if not self.fits(value) and not (type(value) is int and self.expected.startswith("an integer from")):
        raise part.refused(field, self.expected, value)
    return value


def _nothing(*_: object) -> None:
    """Refuses nothing."""


class Mutant(NamedTuple):
    target: str  # what finds it: "corpus", the damaged streams that are kept, or random cases of a target
    words: str  # what is said of it
    patches: tuple[tuple[Any, str, Any], ...]  # object, name of its attribute, and what is put in its place


_CURSOR: Final = Cursor("run0", ID, 0, 3, {}, 0.0)
_READ: Final = (chunk.Chunk, "_read", lambda self, *part: self._file.read(*part))
_LENGTH_OFF: Final = ((chunk.Chunk, "__init__", _any_size), _READ)
_WAITS: Final = (files, "open_inside", lambda path: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
MUTANTS: Final = {
    "digest check off": Mutant("corpus", "sample ", ((chunk.Chunk, "check", _nothing),)),
    "length check off": Mutant("corpus", "holds other bytes", _LENGTH_OFF),  # As if no file were ever cut
    "seal of another chunk accepted": Mutant("corpus", "sample ", ((Seal, "decode", _seal_of_any_chunk),)),
    "negative counts accepted": Mutant("formats", "got -1", ((part.Kind, "check", _any_integer),)),
    "cursor ahead of the data deletes": Mutant("cursors", "are deleted", ((cursor, "_problem", _nothing),)),
    "torn cursor deletes": Mutant("cursors", "are deleted", ((Cursor, "decode", lambda *_: _CURSOR),)),
    "a pipe is waited for": Mutant("corpus", "no end within", (_WAITS,)),
    "a hole is read to its end": Mutant("corpus", "MemoryError", ((files, "MAX_BYTES", 1 << 60),)),
    "huge integers rounded": Mutant("rows", "another reader finds", ((row, "_check_integers", _nothing),)),
    "any number of ranks": Mutant("states", "MemoryError", ((state_checks, "_MOST_RANKS", 1 << 60),)),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for one in MUTANTS[name].patches:
            stack.enter_context(patch.object(*one))
        yield
