"""Positions: how far each source has been read, as values. They travel in the seals: a publish moves them.

The `source` of a seal is

    {"version": 1, "sources": [{"kind": "jsonl", "path": ..., "offset": ..., "line": ..., "blank": ...,
                                "duplicate": ..., "head": ..., "tail": ..., "open_end": ...}, ...]}

with an entry for every source that was given, in order, including those not yet begun. Unknown fields are ignored, a
later version is refused. O(sources) a seal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from lazyshard.errors import StreamMismatch
from lazyshard_producer.errors import SourceRefused

VERSION: Final = 1

_KIND: Final = "jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePosition:
    """How far a file of JSON lines has been read: its committed part is the bytes of the half-open range [0, offset).

    Attributes:
        path: as the user gave it; bytes that are no UTF-8 as backslash escapes.
        offset: bytes read.
        line: lines read, blank ones included.
        blank: blank lines among them, which are no rows.
        duplicate: rows among them that name a key twice.
        head: XXH3 (64 bits, hexadecimal) of the committed part's first bytes, 4 KiB at the most.
        tail: the same of its last bytes.
        open_end: the last line had no newline (yet).
    """

    path: str
    offset: int = 0
    line: int = 0
    blank: int = 0
    duplicate: int = 0
    head: str = ""
    tail: str = ""
    open_end: bool = False

    @property
    def rows(self) -> int:
        """Lines that are rows."""
        return self.line - self.blank


def plain_name(path: str) -> str:
    """Returns a path as JSON can hold it: bytes of a file name that are no UTF-8 become backslash escapes."""
    return path.encode("utf-8", "backslashreplace").decode()


def encode_positions(positions: Sequence[FilePosition]) -> dict[str, Any]:
    """Returns the JSON value that a seal keeps."""
    return {"version": VERSION, "sources": [{"kind": _KIND} | asdict(position) for position in positions]}


def decode_positions(value: Any, directory: str) -> tuple[FilePosition, ...]:
    """Reads what `encode_positions` returned.

    Args:
        value: the JSON value.
        directory: the stream's directory, for messages.

    Raises:
        StreamMismatch: the stream was not made by this command, or by a later release of it.
    """
    if not isinstance(value, dict) or not isinstance(value.get("sources"), list):
        raise _mismatch(directory, "source positions of lazyshard-producer", "none: another program wrote the stream")
    version = value.get("version")
    if version != VERSION:
        raise _mismatch(directory, f"source positions of version {VERSION}", f"version {version!r}")
    return tuple(_decode(entry, directory) for entry in value["sources"])


def resume(committed: Sequence[FilePosition], given: Sequence[str]) -> list[FilePosition]:
    """Returns the positions to start from: those committed, and the start of every file that was appended to the list.

    Raises:
        SourceRefused: the files given do not begin with those committed, in their order.
    """
    difference = compare_sources(committed, given)
    if difference is not None:
        number, expected, actual = difference
        raise SourceRefused(
            f"source {number} was {expected}, now it is {actual}; give the sources of the first start in the same "
            f"order (more may follow them), or another --out",
            file=actual,
            expected=expected,
            actual=actual,
        )
    names = [plain_name(path) for path in given]
    return [*committed, *(FilePosition(path=name) for name in names[len(committed) :])]


def compare_sources(committed: Sequence[FilePosition], given: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns (number from 1, path expected, path given or "missing") of the first difference, or None."""
    for number, position in enumerate(committed, 1):
        actual = plain_name(given[number - 1]) if number <= len(given) else "missing"
        if actual != position.path:
            return number, position.path, actual
    return None


def _decode(entry: Any, directory: str) -> FilePosition:
    expected = f"a source of kind {_KIND!r} with its position"
    if not isinstance(entry, dict) or entry.get("kind") != _KIND:
        raise _mismatch(directory, expected, repr(entry)[:120])
    values: dict[str, Any] = {}
    for field in fields(FilePosition):
        kind: type = {"int": int, "bool": bool}.get(str(field.type), str)
        value: Any = entry.get(field.name)
        if type(value) is not kind or (type(value) is int and value < 0):
            raise _mismatch(directory, expected, f"{field.name} = {value!r}"[:120])
        values[field.name] = value
    return FilePosition(**values)


def _mismatch(directory: str, expected: str, actual: str) -> StreamMismatch:
    return StreamMismatch(
        f"{directory}: the stream's last seal holds no position to go on from: expected {expected}, found {actual}; "
        f"choose another --out",
        directory=directory,
        expected=expected,
        actual=actual,
    )
