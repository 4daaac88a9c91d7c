"""How far every file of a followed directory has been read, as values, and the journal's lines that tell it.

A line of the journal is a JSON object, of one of three kinds:

    {"file": NAME, "from": 0, "offset": 1048500, "line": 512, "head": ..., "tail": ...}
        The lines of the bytes [from, offset) of a file were read, next after those of the line before.
    {"file": NAME, "finished": 1048500}
        This file was read to its end, at this size.
    {"finished_files": {...}}
        Files that were read to their end before; only at the start of a journal.

Fields that are not there are 0, empty or false; unknown ones are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final

from lazyshard_producer.following.finished import Finished, FinishedFiles
from lazyshard_producer.sources.digested_text import EMPTY, TextPosition
from lazyshard_producer.sources.lines import LineMark

_BYTES: Final = "\0"
"""Begins a name that is no UTF-8, its bytes in hexadecimal behind it: no name of a file holds a NUL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """How far a file has been read: its committed part is the bytes (of a compressed one: of its text) [0, offset).

    Attributes:
        offset: bytes read.
        line: lines read, blank ones included.
        blank: blank lines among them.
        open_end: the last line had no newline.
        seen: bytes that were there; 0 for a compressed file.
        head: of a plain file: XXH3 (64 bits, hexadecimal) of the committed part's first bytes, 4 KiB at the most.
        tail: the same of its last bytes.
        digest: of a compressed file: XXH3 of the whole committed part.
    """

    offset: int = 0
    line: int = 0
    blank: int = 0
    open_end: bool = False
    seen: int = 0
    head: str = ""
    tail: str = ""
    digest: str = ""

    @property
    def mark(self) -> LineMark:
        """Where its text stands."""
        return LineMark(self.offset, self.line, self.blank, self.open_end)

    @property
    def text(self) -> TextPosition:
        """The position in a compressed file."""
        digest = self.digest or EMPTY
        return TextPosition(offset=self.offset, line=self.line, blank=self.blank, open_end=self.open_end, digest=digest)

    def encode(self) -> dict[str, Any]:
        """Returns the fields as JSON, without those that say nothing."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}

    @classmethod
    def decode(cls, value: dict[str, Any]) -> FileState:
        """Reads what `encode` returned.

        Raises:
            ValueError: a field is of another type, or below 0.
        """
        values: dict[str, Any] = {}
        for known in fields(cls):
            assert known.default is not MISSING
            found = value.get(known.name, known.default)
            if type(found) is not type(known.default) or (type(found) is int and found < 0):
                raise ValueError(f"{known.name} = {found!r}")
            values[known.name] = found
        return cls(**values)


class FollowState:
    """How far all files are read.

    Attributes:
        files: those begun and not read to their end, by name.
        finished: those that were.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileState] = {}
        self.finished = FinishedFiles()

    def apply(self, line: dict[str, Any]) -> None:
        """Takes over what a line of the journal says.

        Raises:
            ValueError: it is none, or does not follow from the lines before.
        """
        if "finished_files" in line:
            self.finished = FinishedFiles.decode(line["finished_files"])
            return
        name = decode_name(line.get("file"))
        size = finished_size(line)
        if size is not None:
            self.finish(name, size)
            return
        self.files[name] = FileState.decode(line)

    def finish(self, name: str, size: int) -> None:
        """Takes notice that a file was read to its end, being of this size in bytes."""
        state = self.files.pop(name, FileState())
        self.finished.add(name, Finished(size, state.line, int(state.tail or "0", 16), state.open_end))

    def lines(self) -> Iterable[dict[str, Any]]:
        """Returns lines that say all this."""
        yield {"finished_files": self.finished.encode()}
        for name, state in self.files.items():
            yield segment_line(name, state.offset, state)


def finished_size(line: dict[str, Any]) -> int | None:
    """Returns the size in bytes of the file that a line says was read to its end; None where it says something else.

    Raises:
        ValueError: it is no size.
    """
    size = line.get("finished")
    if "finished" in line and (type(size) is not int or size < 0):
        raise ValueError(f"finished = {size!r}")
    return size


def segment_line(name: str, begin: int, state: FileState) -> dict[str, Any]:
    """Returns the line that says that a file was read from byte `begin` up to a state."""
    return {"file": encode_name(name), "from": begin} | state.encode()


def finished_line(name: str, size: int) -> dict[str, Any]:
    """Returns the line that says that a file was read to its end, being of this size in bytes."""
    return {"file": encode_name(name), "finished": size}


def encode_name(name: str) -> str:
    """Returns a file's name as JSON can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return _BYTES + os.fsencode(name).hex()
    return name


def decode_name(value: Any) -> str:
    """Reads what `encode_name` returned.

    Raises:
        ValueError: it is something else, or no name of a file in a directory.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"file = {value!r}")
    name = os.fsdecode(bytes.fromhex(value[1:])) if value.startswith(_BYTES) else value
    # It becomes part of a path: of no other directory's.
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"file = {value!r}")
    return name
