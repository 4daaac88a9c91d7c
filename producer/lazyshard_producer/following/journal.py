"""The journal in which a run records how far each file of a followed directory was read, and in which order.

Path: `STREAM/.producer.sources/SOURCE-NUMBER.jsonl`, where SOURCE is the XXH3 of the source's name. Each run begins a
new journal with everything known so far, and another one when it has become long. So a fenced producer that resumes
never writes to a file that is read. A line is a JSON object of one of three kinds:

    {"file": NAME, "from": 0, "offset": 1048500, "line": 512, "head": ..., "tail": ...}
        The bytes [from, offset) of a file were read, right after those of the preceding line.
    {"file": NAME, "finished": 1048500}
        This file was read to its end, at this size.
    {"finished_files": {...}}
        Files that were read to their end earlier; only at the start of a journal.

Missing fields are 0, empty or false; unknown fields are ignored. All rows that were read are in the journal before any
position is returned: a seal names a place in the journal, and a restart reads the rows after it in the same order.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
import xxhash

from lazyshard.errors import LazyShardError
from lazyshard.format.records import END, End
from lazyshard.memory import loads
from lazyshard.store.durable import NEW_FILE_MODE, remove, sync, sync_directory, write_all
from lazyshard.store.files import check_folder, read_file, read_record
from lazyshard_producer.following.listing import FinishedFiles
from lazyshard_producer.following.reading import FollowedLines
from lazyshard_producer.position import FilePosition, read_entry, refuse_position
from lazyshard_producer.sources.source import Context, Rows

KIND: Final = "follow"
DIRECTORY: Final = ".producer.sources"

# Prefix of a name that is not UTF-8, followed by its bytes in hexadecimal: no file name contains a NUL
_BYTES: Final = "\0"

# A new journal is begun at twice the size of the state at the journal's start, but not below this size
_LONG_BYTES: Final = 1 << 19

# A replaced journal is deleted after this many further entries: then a seal names the new one
_KEPT_ENTRIES: Final = 16


@dataclass(slots=True)
class FollowState:
    """How far all files are read: unfinished files by name, and files that were read to their end.

    `totals` are the bytes and blank lines read so far. `plan` holds the lines of `journal` that follow.
    """

    files: dict[str, FilePosition] = field(default_factory=dict)
    finished: FinishedFiles = field(default_factory=FinishedFiles)
    totals: tuple[int, int] = (0, 0)
    plan: Sequence[dict[str, Any]] = ()
    journal: Path | None = None

    def apply(self, line: dict[str, Any]) -> None:
        """Applies a line of the journal."""
        if "finished_files" in line:
            self.finished = FinishedFiles.decode(line["finished_files"])
            return
        name, position, size = decode_line(line)
        if size is None:
            self.files[name] = position
        else:
            self.finished.add(name, self.files.pop(name, FilePosition()), size)

    def apply_all(self, lines: Iterable[dict[str, Any]], source: str) -> None:
        """Applies lines of the journal of the source of this name. Raises SourceRefused."""
        try:
            for line in lines:
                self.apply(line)
        except (TypeError, AttributeError, ValueError) as cause:
            raise refuse_position(source, "lines of a journal", str(cause)[:120]) from cause


def segment_line(name: str, begin: int, end: FilePosition) -> dict[str, Any]:
    """Returns the line for a file that was read from byte `begin` up to a position."""
    return {"file": encode_name(name), "from": begin} | {key: value for key, value in end._asdict().items() if value}


def decode_line(line: dict[str, Any]) -> tuple[str, FilePosition, int | None]:
    """Returns the name of the file in a line, how far it was read, and its size if it was read to its end, else None.

    Raises ValueError.
    """
    size = line.get("finished")
    if "finished" in line and (type(size) is not int or size < 0):
        raise ValueError(f"finished = {size!r}")
    return decode_name(line.get("file")), FilePosition.of(line), size


def encode_name(name: str) -> str:
    """Returns a file's name in a form that JSON can represent."""
    return _BYTES + os.fsencode(name).hex() if re.search("[\ud800-\udfff]", name) else name


def decode_name(value: Any) -> str:
    """Returns the file name that `encode_name` encoded. Raises ValueError if it is none."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"file = {value!r}")
    name = os.fsdecode(bytes.fromhex(value[1:])) if value.startswith(_BYTES) else value
    # The name becomes part of a path, which must not leave the directory.
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"file = {value!r}")
    return name


# A place between two lines of a journal: bytes before it, and their XXH3 (64 bits, hexadecimal)
_Place: TypeAlias = tuple[int, str]


class Journal:
    """A journal that is being written. After an error it is not written to again."""

    def __init__(self, directory: Path, source: str) -> None:
        check_folder(directory).mkdir(exist_ok=True)
        # Also if the directory existed: the process that made it may have been killed before this step.
        sync_directory(directory.parent)
        self.path: Final = directory / f"{_prefix(source)}{secrets.token_hex(8)}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, NEW_FILE_MODE)
        sync_directory(directory)
        self.size, self._digest = 0, xxhash.xxh3_64()
        self._new: list[bytes] = []
        self._failure: OSError | None = None

    def add(self, line: dict[str, Any]) -> _Place:
        """Adds a line, which the next `write` makes durable; returns the place after it."""
        data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        self._digest.update(data)
        self.size += len(data)
        self._new.append(data)
        return self.size, self._digest.hexdigest()

    def write(self) -> None:
        """Makes all lines durable."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._new:
                write_all(self._fd, b"".join(self._new))
                sync(self._fd)
                self._new.clear()
        except OSError as cause:
            cause.filename = str(self.path)
            self._failure = cause
            raise

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def list_journals(directory: Path, source: str | None = None) -> list[Path]:
    """Returns the journals of a source, or of all sources. Raises FileRefused if the directory is a link."""
    prefix = "" if source is None else _prefix(source)
    # These files get deleted, so no other files may match.
    with contextlib.suppress(FileNotFoundError):
        found = list(check_folder(directory).iterdir())
        return [path for path in found if is_journal_name(path.name) and path.name.startswith(prefix)]
    return []


def clear_journals(out: Path) -> None:
    """Deletes the journals of a stream that has ended, except those that its end names; raises nothing."""
    with contextlib.suppress(OSError, LazyShardError):
        kept = named_journals(read_record(out / END, End.decode).source)
        for path in list_journals(out / DIRECTORY):
            if path.name not in kept:
                # A power failure may undo the deletion, which does no harm.
                remove(path)
        if not kept:
            (out / DIRECTORY).rmdir()


def named_journals(source: Any) -> set[str]:
    """Returns the names of the journals that a run's encoded position refers to."""
    entries = source.get("sources") if isinstance(source, dict) else None
    named = (entry.get("journal") for entry in entries or () if isinstance(entry, dict))
    return {name for name in named if isinstance(name, str) and is_journal_name(name)}


def is_journal_name(name: str) -> bool:
    """Returns whether a name has the form of a journal's. Other names must not become paths that are deleted."""
    return re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}\.jsonl", name) is not None


def _prefix(source: str) -> str:
    return f"{xxhash.xxh3_64_hexdigest(source.encode())}-"


def read_journal(path: Path, place: _Place, source: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the lines before a place, and the complete lines after it. Raises SourceRefused."""
    try:
        data = read_file(path, 4 << 30)
    except (OSError, LazyShardError) as cause:
        found = cause.strerror.lower() if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise refuse_position(source, f"the journal {path}", found) from cause
    before = data[: place[0]]
    actual = xxhash.xxh3_64_hexdigest(before)
    if (len(before), actual) != place:
        expected = f"XXH3 {place[1]} of the first {place[0]} bytes of the journal {path}"
        raise refuse_position(source, expected, f"{actual} of {len(before)} bytes")
    lines = _whole(before)
    if len(lines) != before.count(b"\n"):
        raise refuse_position(source, f"lines of JSON in the journal {path}", f"an invalid line {len(lines) + 1}")
    return lines, _whole(data[place[0] :])


def _whole(data: bytes) -> list[dict[str, Any]]:
    # Lines written after the last seal may be torn.
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(orjson.JSONDecodeError):
        for line in data.splitlines(keepends=True):
            value = loads(line)
            if not line.endswith(b"\n") or not isinstance(value, dict):
                break
            lines.append(value)
    return lines


def resume(entry: dict[str, Any] | None, directory: Path, name: str) -> FollowState:
    """Returns the state that an entry describes, the initial state for None. Raises SourceRefused."""
    state = FollowState()
    if entry is None:
        return state
    size, digest, journal = read_entry(entry, name, KIND, bytes=int, digest=str, journal=str)
    read, blank = read_entry(entry, name, KIND, read=int, blank=int)
    state.totals = read, blank
    if journal and not is_journal_name(journal):
        raise refuse_position(name, "journal: the name of a journal, or an empty one", repr(journal)[:120])
    if not isinstance(at := entry.get("at", {}), dict):
        raise refuse_position(name, "at: an object", repr(at)[:120])
    if journal:
        state.journal = directory / journal
        before, state.plan = read_journal(state.journal, (size, digest), name)
        state.apply_all([*before, *([at] if "at" in entry else [])], name)
    return state


class FollowPosition(NamedTuple):
    """A place between two rows: in the piece of this number, after this row of it, or after the piece (None)."""

    serial: int
    piece: FollowedLines | None = None
    row: int = -1


@dataclass(slots=True)
class _Read:
    """A piece that was read, or the end of a file: its line in the journal, and the totals and place after it."""

    serial: int
    name: str
    line: dict[str, Any]
    totals: tuple[int, int]
    rows: bool
    place: _Place = (0, "")


class Ledger:
    """Turns pieces into positions. `serial` is the number of the last piece, `totals` are the sums after it.

    `state` is the last position, at the start that of the entry. Raises SourceRefused.
    """

    def __init__(self, name: str, context: Context, entry: dict[str, Any] | None) -> None:
        self._name, self._folder, self._check_owner = name, context.out / DIRECTORY, context.check_owner
        self.state = known = resume(entry, self._folder, name)
        self.serial, self.totals = 0, known.totals
        self._pieces: deque[_Read] = deque()  # after the last position
        self._at: _Place = (0, "")  # the last position, as a place in the journal
        self._journal: Journal | None = None
        self._begun_bytes = self._entries = 0
        # The entry until something is read.
        self._unread: dict[str, Any] | None = entry or self._encode(None, known.totals)
        # Journals, and the number of the entry at which each was replaced.
        stale = [path for path in list_journals(self._folder, name) if path != known.journal]
        self._replaced = deque([(path, -_KEPT_ENTRIES) for path in stale])
        if known.journal is not None:
            self._replaced.append((known.journal, 0))

    def add_piece(self, name: str, piece: FollowedLines) -> Rows:
        """Records a piece that was read from a file; returns its rows with their positions."""
        self.serial += 1
        serial, last = self.serial, len(piece.rows.lines) - 1
        self.totals = _add(self.totals, piece.begin, piece.end)
        self._put(_Read(serial, name, segment_line(name, piece.begin.offset, piece.end), self.totals, rows=last >= 0))

        def position(index: int) -> FollowPosition:
            return FollowPosition(serial) if index == last else FollowPosition(serial, piece, index)

        return piece.rows._replace(position=position)

    def add_finished(self, name: str, size: int) -> None:
        """Records that a file was read to its end, at this size."""
        self._put(_Read(self.serial, name, {"file": encode_name(name), "finished": size}, self.totals, rows=False))

    def _put(self, piece: _Read) -> None:
        self._unread = None
        self._pieces.append(piece)
        if self._journal is not None:
            piece.place = self._journal.add(piece.line)

    def entry(self, position: FollowPosition) -> dict[str, Any]:
        """Returns the entry of a position, after making everything read so far durable in the journal."""
        if self._unread is not None:
            return self._unread
        self._entries += 1
        after = position.serial + (position.piece is None)
        while self._pieces and (not self._pieces[0].rows or self._pieces[0].serial < after):
            piece = self._pieces.popleft()
            self.state.apply(piece.line)
            self.state.totals, self._at = piece.totals, piece.place
        if self._journal is None or self._journal.size > max(_LONG_BYTES, 2 * self._begun_bytes):
            self._begin()
        assert self._journal is not None
        self._journal.write()
        while self._replaced and self._entries - self._replaced[0][1] > _KEPT_ENTRIES:
            # No seal can name these any longer. They were listed or made earlier, so none of them belongs to a producer
            # that takes over from here on.
            self._check_owner()
            remove(self._replaced.popleft()[0])
        at, totals = None, self.state.totals
        if position.piece is not None and self._pieces and self._pieces[0].serial == position.serial:
            end = position.piece.rows.position(position.row)
            at, totals = segment_line(self._pieces[0].name, end.offset, end), _add(totals, position.piece.begin, end)
        return self._encode(at, totals)

    def close(self) -> None:
        """Closes the journal. May be called twice."""
        if self._journal is not None:
            self._journal.close()

    def _begin(self) -> None:
        """Begins a new journal with the state at the last position, and the pieces after it."""
        journal = Journal(self._folder, self._name)
        if self._journal is not None:
            self._journal.close()
            self._replaced.append((self._journal.path, self._entries))
        self._journal, state = journal, self.state
        self._at = journal.add({"finished_files": state.finished.encode()})
        for name, at in state.files.items():
            self._at = journal.add(segment_line(name, at.offset, at))
        self._begun_bytes = journal.size
        for piece in self._pieces:
            piece.place = journal.add(piece.line)

    def _encode(self, at: dict[str, Any] | None, totals: tuple[int, int]) -> dict[str, Any]:
        journal, (size, digest), (read, blank) = self._journal, self._at, totals
        value: dict[str, Any] = {"kind": KIND, "path": self._name, "journal": journal.path.name if journal else ""}
        value |= {"bytes": size, "digest": digest, "read": read, "blank": blank}
        return value if at is None else value | {"at": at}


def _add(totals: tuple[int, int], begin: FilePosition, end: FilePosition) -> tuple[int, int]:
    return totals[0] + end.offset - begin.offset, totals[1] + end.blank - begin.blank
