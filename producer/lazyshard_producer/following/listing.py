"""Listing of a followed directory: the meaning of its names, a scan of all entries, and the time of the next scan.

A name is remembered forever by its XXH3 (64 bits), because a deleted file may reappear and must not be read twice.
Among a million names two share a digest with a probability of 3 in 10^8; the second would be refused if larger.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pybase64
import xxhash

from lazyshard.format.records import pack
from lazyshard.stream.waiting import Waker
from lazyshard_producer.position import FilePosition
from lazyshard_producer.sources.source import file_size, refusing

PACKED: Final = (".gz", ".zst")  # suffixes of compressed files
# Suffixes that programs use for files that they are still writing
_TEMPORARY: Final = (".tmp", ".temp", ".part", ".partial", ".crdownload", ".filepart", ".swp", "~")


class NameRules:
    """The meaning of names in a followed directory. In `marker`, {name} is the file that the marker makes complete.

    Hidden files and unfinished files are ignored, whatever the pattern: for example, `rsync` writes `.NAME.x7Yq2`.
    """

    def __init__(self, pattern: str, marker: str, end_marker: str) -> None:
        self.end_marker: Final = end_marker
        self._marker = marker
        self._data = re.compile(fnmatch.translate(pattern))
        self._marks = re.compile(re.escape(marker).replace(re.escape("{name}"), "(.+)", 1), re.DOTALL)

    def is_data(self, name: str) -> bool:
        """Returns whether a file of this name contains rows."""
        plain = name.removesuffix(PACKED[0]).removesuffix(PACKED[1])
        passed_over = name.startswith(".") or name.endswith(_TEMPORARY) or name == self.end_marker
        return not passed_over and any(map(self._data.match, (name, plain))) and self.data_of(name) is None

    def marker_of(self, name: str) -> str:
        """Returns the name of a file's marker."""
        return self._marker.replace("{name}", name)

    def data_of(self, name: str) -> str | None:
        """Returns the file that a marker of this name makes complete, "" for all files; None if it is no marker."""
        return (found := self._marks.fullmatch(name)) and "".join(found.groups())


def is_packed(name: str) -> bool:
    """Returns whether a file of this name is compressed."""
    return name.endswith(PACKED)


_OPEN_END: Final = 1 << 63  # this bit in the number of lines means that the last line had no newline
_COLUMNS: Final = ("name", "size", "line", "tail")


@dataclass(eq=False)
class FinishedFiles:
    """Files that were read to their end, by name: size then, number of lines, and digest of the last bytes."""

    # One row for each column, sorted by the names' digests; and the files that are not merged yet.
    _table: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty((len(_COLUMNS), 0), np.uint64))
    _recent: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, name: str, at: FilePosition, size: int) -> None:
        """Adds a file that was read to its end at this position, with its size in bytes."""
        lines = at.line | (_OPEN_END if at.open_end else 0)
        self._recent[_key(name)] = size, lines, int(at.tail or "0", 16)  # compressed files have no tail
        if len(self._recent) >= 4096:
            self._merge()

    def get(self, name: str) -> FilePosition | None:
        """Returns how far a file was read, with its size as the offset; None if the file is not finished."""
        key, keys = _key(name), self._table[0]
        # Without merging: a restart looks up each file that it reads again, and adds it right after.
        if (row := self._recent.get(key)) is None:
            at = int(np.searchsorted(keys, np.uint64(key)))
            if at == len(keys) or int(keys[at]) != key:
                return None
            row = self._table[1:, at].tolist()
        size, line, tail = row
        return FilePosition(size, line & ~_OPEN_END, open_end=bool(line & _OPEN_END), seen=size, tail=f"{tail:016x}")

    def compare(self, sizes: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Returns the names of files that are not finished, and of finished files that were smaller then."""
        self._merge()
        known_keys, known_sizes = self._table[:2]
        if not len(known_keys):
            return list(sizes), []
        keys = np.fromiter(map(_key, sizes), np.uint64, len(sizes))
        at = np.minimum(np.searchsorted(known_keys, keys), len(known_keys) - 1)
        known = known_keys[at] == keys
        grown = known & (np.fromiter(sizes.values(), np.uint64, len(sizes)) > known_sizes[at])
        return list(compress(sizes, ~known)), list(compress(sizes, grown))

    def copy(self) -> FinishedFiles:
        """Returns an independent copy, which shares the merged table."""
        return FinishedFiles(self._table, dict(self._recent))

    def encode(self) -> dict[str, Any]:
        """Returns all files as a JSON value: packed columns, as in seals."""
        self._merge()
        return {name: pack(column, "<u8") for name, column in zip(_COLUMNS, self._table, strict=True)}

    @classmethod
    def decode(cls, value: Any) -> FinishedFiles:
        """Reads the value that `encode` returned. Raises ValueError."""
        try:
            columns = [np.frombuffer(pybase64.b64decode(value[name], validate=True), "<u8") for name in _COLUMNS]
        except (TypeError, KeyError) as cause:
            raise ValueError(f"not packed columns: {cause!r}") from cause
        table = np.stack(columns).astype(np.uint64)
        if np.any(table[0, 1:] <= table[0, :-1]):
            raise ValueError("columns that are not sorted")
        return cls(table)

    def _merge(self) -> None:
        if self._recent:
            recent = np.array([(key, *row) for key, row in self._recent.items()], np.uint64).T
            kept = self._table[:, ~np.isin(self._table[0], recent[0])]
            table = np.concatenate([kept, recent], axis=1)
            self._table, self._recent = table.take(np.argsort(table[0]), axis=1), {}  # `take` keeps rows contiguous


def _key(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(name))


_log = logging.getLogger("lazyshard")


class DirectoryScan(NamedTuple):
    """The result of a scan: sizes are in bytes, by file name."""

    new: dict[str, int]  # sizes of data files that are neither settled, watched nor finished
    grown: dict[str, int]  # sizes of files that were read to their end at a smaller size
    sizes: dict[str, int]  # sizes of the watched files that exist
    marked: set[str]  # names of data files whose marker exists; "" means all files
    ended: bool  # the end marker exists


class DirectoryListing:
    """Scans a directory; `finished` are the files that were read to their end."""

    def __init__(self, path: str, rules: NameRules, finished: FinishedFiles) -> None:
        self.finished: Final = finished
        self._path, self._rules = path, rules
        self.settled: set[str] = set()  # names that need no attention while they exist
        # The files finished last are checked every time: some of them may have been considered complete too early.
        self._recent: deque[str] = deque(maxlen=100)
        self._next = 0

    def finish(self, name: str, at: FilePosition, size: int) -> None:
        """Records that a file was read to its end."""
        self.finished.add(name, at, size)
        self._recent.append(name)
        self.settled.add(name)

    def scan(self, watched: Container[str]) -> DirectoryScan:
        """Lists the directory. `watched` files are reported with their sizes, and are not new."""
        before, self.settled = self.settled, set()
        found, sizes, marked, ended = dict[str, int](), dict[str, int](), set[str](), False
        with refusing(self._path), os.scandir(self._path) as entries:
            for entry in entries:
                name = entry.name
                if name in before:
                    self.settled.add(name)
                elif name in watched or (self._rules.is_data(name) and self._is_plain(entry)):
                    with contextlib.suppress(FileNotFoundError):
                        (sizes if name in watched else found)[name] = entry.stat().st_size
                elif name == self._rules.end_marker:
                    ended = True
                elif (data := self._rules.data_of(name)) is None or data in before:
                    self.settled.add(name)
                else:
                    marked.add(data)
        found = dict(sorted(found.items()))
        new, grown = ({name: found[name] for name in names} for names in self.finished.compare(found))
        self.settled |= found.keys() - new.keys()
        return DirectoryScan(new, grown, sizes, marked, ended)

    def check_finished(self, count: int) -> Iterator[tuple[str, int]]:
        """Checks `count` finished files, and those finished last; yields files that have grown, with their sizes."""
        names = list(islice(self.settled, self._next, self._next + count))
        self._next = self._next + count if len(names) == count else 0
        for name in {*names, *self._recent}:
            known = self.finished.get(name)
            if known is not None and (size := file_size(os.path.join(self._path, name))) > known.offset:
                yield name, size

    def _is_plain(self, entry: os.DirEntry[str]) -> bool:
        reason = ""
        if entry.is_symlink():
            directory, target = os.path.realpath(self._path), os.path.realpath(entry.path)
            if os.path.commonpath([directory, target]) != directory:
                reason = f"a link out of the directory, to {target}"
            elif os.path.dirname(target) == directory and self._rules.is_data(os.path.basename(target)):
                reason = f"a link to {target}, which is read itself"
            elif not os.path.isfile(target):
                reason = f"a link to {target}, which is none"
        else:
            # Not `is_file`, which is also False for a file that is gone; such a file may exist the next time.
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    reason = "a directory, pipe, socket or device"
        if reason:
            _log.warning("%s is skipped: expected a plain file, found %s", entry.path, reason)
        return not reason


FIRST_PAUSE_S: Final = 0.2


class DirectoryWatch(Waker):
    """Schedules scans of a directory, with back-off while nothing changes.

    Polling is needed because watchdog (inotify) never reports writes of other machines, and reports a write to an open
    file only when the file is closed.
    """

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Path(directory))
        self._clock, self._pause = clock, FIRST_PAUSE_S
        self._began = self._earliest = self._latest = clock()

    def due(self) -> bool:
        """Whether a scan is due."""
        now = self._clock()
        return now >= self._latest or (self._woken.is_set() and now >= self._earliest)

    def begin_scan(self) -> None:
        """Called when a scan begins: events from now on cause another scan."""
        self._woken.clear()
        self._began = self._clock()

    def end_scan(self, changed: bool) -> None:
        """Called when a scan has ended; `changed` says whether it found anything new."""
        now = self._clock()
        self._pause = FIRST_PAUSE_S if changed else min(2.0, 1.5 * self._pause)
        # A scan of 100,000 files takes 0.1 s or more; scans take at most a tenth of the time.
        rest = 10.0 * (now - self._began)
        self._earliest, self._latest = now + rest, now + max(rest, self._pause)

    def active(self) -> None:
        """Called when lines were read: more are likely, so the back-off is reset."""
        self._pause = FIRST_PAUSE_S
        self._latest = min(self._latest, max(self._earliest, self._clock() + FIRST_PAUSE_S))

    def wait(self, seconds: float) -> None:
        """Waits until a scan is due, at most `seconds`."""
        if not self._tried:
            self._start()
        until = min(self._clock() + seconds, self._latest)
        if self._woken.wait(max(0.0, until - self._clock())):
            # An event arrived, but perhaps too soon after the last scan.
            time.sleep(max(0.0, min(until, self._earliest) - self._clock()))

    def close(self) -> None:
        """Ends the watching thread. May be called twice."""
        self.__exit__()

    def dispatch(self, event: object) -> None:
        """Called by watchdog's thread."""
        self._woken.set()

    def _events(self) -> list[type[Any]]:
        from watchdog.events import FileClosedEvent, FileCreatedEvent, FileMovedEvent

        return [FileCreatedEvent, FileMovedEvent, FileClosedEvent]
