"""What is in a followed directory: what its names mean, a look at all of it, and when to look again.

A look at 100,000 files takes some 0.1 s. A file that was read to its end takes 32 bytes, and its name is remembered for
ever by its XXH3 (64 bits): a file that was deleted may come back, and must not be read twice. Two names of a million
share a digest with a probability of 3 in 10^8; the second would be refused unless it had the same size.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import compress, islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pybase64
import xxhash

from lazyshard_producer.position import FilePosition
from lazyshard_producer.sources.files import file_size, refusing

PACKED: Final = (".gz", ".zst")  # endings of compressed files
_TEMPORARY: Final = (".tmp", ".temp", ".part", ".partial", ".crdownload", ".filepart", ".swp", "~")
"""Endings that programs give to files that they are still writing."""


class NameRules:
    """What a name in a followed directory means.

    Hidden names (those that begin with a dot) and names that programs give to unfinished files are nothing, whatever
    the pattern says; `rsync` and others write `.NAME.x7Yq2` and rename it. Names with .gz or .zst behind what the
    pattern says belong too; in `marker` {name} stands for the file that it says to be complete.
    """

    def __init__(self, pattern: str, marker: str, end_marker: str) -> None:
        self.end_marker: Final = end_marker
        self._marker = marker
        self._data = re.compile(fnmatch.translate(pattern))
        self._before, self._named, self._behind = marker.partition("{name}")

    def is_data(self, name: str) -> bool:
        """Returns whether a file of this name holds rows."""
        plain = name
        for ending in PACKED:
            plain = plain.removesuffix(ending)
        return (
            (self._data.match(name) is not None or self._data.match(plain) is not None)
            and not name.startswith(".")
            and not name.endswith(_TEMPORARY)
            and name != self.end_marker
            and self.data_of(name) is None
        )

    def marker_of(self, name: str) -> str:
        """Returns the name of the file that says that this one is complete."""
        return self._marker.replace("{name}", name)

    def data_of(self, name: str) -> str | None:
        """Returns which file a marker of this name says to be complete, "" if all; None if it is no marker."""
        if not self._named:
            return "" if name == self._marker else None
        if not (name.startswith(self._before) and name.endswith(self._behind)):
            return None
        return name[len(self._before) : len(name) - len(self._behind)] or None


def is_packed(name: str) -> bool:
    """Returns whether a file of this name is compressed."""
    return name.endswith(PACKED)


_OPEN_END: Final = 1 << 63  # the bit of the number of lines that says that the last line had no newline
_COLUMNS: Final = ("size", "line", "tail")


class FinishedFiles:
    """How far files were read that were read to their end, by name: their size then, lines, and the last bytes.

    Adding one again replaces what was known of it.
    """

    def __init__(self) -> None:
        self._keys: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._values: npt.NDArray[np.uint64] = np.empty((0, len(_COLUMNS)), np.uint64)
        self._recent: dict[int, tuple[int, int, int]] = {}  # not sorted in yet

    def add(self, name: str, at: FilePosition, size: int) -> None:
        """Adds a file that was read to its end at this position, being of this size in bytes."""
        lines = at.line | (_OPEN_END if at.open_end else 0)
        self._recent[_key(name)] = size, lines, int(at.tail or "0", 16)  # compressed ones have no tail
        if len(self._recent) >= 4096:
            self._merge()

    def get(self, name: str) -> FilePosition | None:
        """Returns how far a file was read, its size as the offset; None if it is not among them."""
        key = _key(name)
        row = self._recent.get(key)
        if row is None:
            at = int(np.searchsorted(self._keys, np.uint64(key)))
            if at == len(self._keys) or int(self._keys[at]) != key:
                return None
            row = tuple(self._values[at].tolist())
        size, line, tail = row
        lines, open_end = line & ~_OPEN_END, bool(line & _OPEN_END)
        return FilePosition(size, lines, open_end=open_end, seen=size, tail=f"{tail:016x}")

    def compare(self, sizes: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Returns which of some files are not among them, and which are and were smaller then."""
        self._merge()
        if not len(self._keys):
            return list(sizes), []
        keys = np.fromiter(map(_key, sizes), np.uint64, len(sizes))
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = self._keys[at] == keys
        grown = known & (np.fromiter(sizes.values(), np.uint64, len(sizes)) > self._values[at, 0])
        return list(compress(sizes, ~known)), list(compress(sizes, grown))

    def copy(self) -> FinishedFiles:
        """Returns an independent copy, which shares what was sorted in."""
        copy = FinishedFiles()
        copy._keys, copy._values, copy._recent = self._keys, self._values, dict(self._recent)
        return copy

    def encode(self) -> dict[str, Any]:
        """Returns all of them as JSON: packed columns, as in seals."""
        self._merge()
        columns = zip(("name", *_COLUMNS), (self._keys, *self._values.T), strict=True)
        return {name: pybase64.b64encode(column.astype("<u8").tobytes()).decode() for name, column in columns}

    @classmethod
    def decode(cls, value: Any) -> FinishedFiles:
        """Reads what `encode` returned. Raises ValueError where it is something else."""
        files = cls()
        try:
            keys, *columns = (
                np.frombuffer(pybase64.b64decode(value[name], validate=True), "<u8") for name in ("name", *_COLUMNS)
            )
        except (TypeError, KeyError) as cause:
            raise ValueError(f"not packed columns: {cause!r}") from cause
        if any(len(column) != len(keys) for column in columns) or np.any(keys[1:] <= keys[:-1]):
            raise ValueError("columns of unequal length, or not sorted")
        files._keys, files._values = keys.astype(np.uint64), np.stack(columns, axis=1).astype(np.uint64)
        return files

    def _merge(self) -> None:
        if not self._recent:
            return
        keys = np.fromiter(self._recent, np.uint64, len(self._recent))
        values = np.array(list(self._recent.values()), np.uint64)
        kept = ~np.isin(self._keys, keys)
        keys, values = np.concatenate([self._keys[kept], keys]), np.concatenate([self._values[kept], values])
        order = np.argsort(keys)
        self._keys, self._values, self._recent = keys[order], values[order], {}


def _key(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(name))


_log = logging.getLogger("lazyshard")


class Look(NamedTuple):
    """What a look has found.

    Attributes:
        new: data files that were not there at the last look and are not known, with their sizes in bytes, by name.
        grown: the same of those that were read to their end, at a smaller size.
        sizes: of the files that are being watched, those that are there.
        marked: names of data files whose marker is there; "" stands for all.
        ended: the end marker is there.
    """

    new: dict[str, int]
    grown: dict[str, int]
    sizes: dict[str, int]
    marked: set[str]
    ended: bool


class DirectoryListing:
    """Looks at a directory, and knows its files that were read to their end, `finished`."""

    def __init__(self, path: str, rules: NameRules, finished: FinishedFiles) -> None:
        self.finished: Final = finished
        self._path, self._rules = path, rules
        self.settled: set[str] = set()  # names that need no attention, as long as they are there
        # The files finished last are looked at every time: those taken for complete too early are among them.
        self._recent: deque[str] = deque(maxlen=100)
        self._next = 0

    def finish(self, name: str, at: FilePosition, size: int) -> None:
        """Takes notice that a file was read to its end."""
        self.finished.add(name, at, size)
        self._recent.append(name)
        self.settled.add(name)

    def look(self, watched: Container[str]) -> Look:
        """Looks at the directory. The size of `watched` files is wanted; they are known, and not new."""
        before, settled = self.settled, set[str]()
        found, sizes, marked, ended = dict[str, int](), dict[str, int](), set[str](), False
        with refusing(self._path), os.scandir(self._path) as entries:
            for entry in entries:
                name = entry.name
                if name in before:
                    settled.add(name)
                elif name in watched:
                    with contextlib.suppress(FileNotFoundError):
                        sizes[name] = entry.stat().st_size
                elif self._rules.is_data(name):
                    if not self._is_plain(entry):
                        settled.add(name)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        found[name] = entry.stat().st_size
                elif name == self._rules.end_marker:
                    ended = True
                elif (data := self._rules.data_of(name)) is None or data in before:
                    settled.add(name)
                else:
                    marked.add(data)
        found = dict(sorted(found.items()))
        new, grown = ({name: found[name] for name in names} for names in self.finished.compare(found))
        self.settled = settled | (found.keys() - new.keys())
        return Look(new, grown, sizes, marked, ended)

    def look_again(self, count: int) -> Iterator[tuple[str, int]]:
        """Looks at so many finished files, and those finished last; yields those that have grown, with their sizes."""
        names = list(islice(self.settled, self._next, self._next + count))
        self._next = self._next + count if len(names) == count else 0
        for name in {*names, *self._recent}:
            known = self.finished.get(name)
            if known is not None and (size := file_size(os.path.join(self._path, name))) > known.offset:
                yield name, size

    def _is_plain(self, entry: os.DirEntry[str]) -> bool:
        reason = ""
        try:
            if not entry.is_symlink():
                if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    reason = "a directory, pipe, socket or device"
            else:
                directory, target = os.path.realpath(self._path), os.path.realpath(entry.path)
                if os.path.commonpath([directory, target]) != directory:
                    reason = f"a link out of the directory, to {target}"
                elif os.path.dirname(target) == directory and self._rules.is_data(os.path.basename(target)):
                    reason = f"a link to {target}, which is taken itself"
                elif not os.path.isfile(target):
                    reason = f"a link to {target}, which is none"
        except FileNotFoundError:
            return True  # opening it will tell
        if reason:
            _log.warning("%s is passed over: expected a plain file, found %s", entry.path, reason)
        return not reason


FIRST_PAUSE_S: Final = 0.2


class DirectoryWatch:
    """Says when to look at a directory.

    On local filesystems watchdog (inotify) tells of files that appear, are renamed or closed. It never tells of another
    machine's writes, and of those of a program that keeps its file open only the last; so the directory is looked at
    all the same, ever more seldom while nothing changes.
    """

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._woken = threading.Event()
        self._pause = FIRST_PAUSE_S
        self._began = self._earliest = self._latest = clock()
        self._observer: Any = None
        self._tried = False

    def due(self) -> bool:
        """Returns whether it is time to look."""
        now = self._clock()
        return now >= self._latest or (self._woken.is_set() and now >= self._earliest)

    def look(self) -> None:
        """Takes notice that a look begins: what happens from now on is reason for another one."""
        self._woken.clear()
        self._began = self._clock()

    def looked(self, changed: bool) -> None:
        """Takes notice that a look is over, and whether it found anything new."""
        now = self._clock()
        self._pause = FIRST_PAUSE_S if changed else min(2.0, 1.5 * self._pause)
        # One at a directory of 100,000 files takes 0.1 s and more: that is a tenth of the time at the most.
        rest = 10.0 * (now - self._began)
        self._earliest, self._latest = now + rest, now + max(rest, self._pause)

    def active(self) -> None:
        """Takes notice that lines came: more of them are likely."""
        self._pause = FIRST_PAUSE_S
        self._latest = min(self._latest, max(self._earliest, self._clock() + FIRST_PAUSE_S))

    def wait(self, seconds: float) -> None:
        """Waits until it is time to look, or so many seconds have passed."""
        self._start()
        until = min(self._clock() + seconds, self._latest)
        if self._woken.wait(max(0.0, until - self._clock())):
            # Something happened, but perhaps too soon after the last look.
            time.sleep(max(0.0, min(until, self._earliest) - self._clock()))

    def close(self) -> None:
        """Ends the watching thread. May be called twice."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            if observer.is_alive():
                observer.join()

    def _start(self) -> None:
        if self._tried:
            return
        self._tried = True
        # It takes long to import, and whoever follows no directory has no need of it.
        from watchdog.events import FileClosedEvent, FileCreatedEvent, FileMovedEvent, FileSystemEventHandler
        from watchdog.observers import Observer

        handler = FileSystemEventHandler()
        handler.on_any_event = lambda event: self._woken.set()  # type: ignore[method-assign]
        # No inotify instance left, for example: looking now and then will do.
        with contextlib.suppress(OSError, RuntimeError):
            self._observer = Observer()
            self._observer.daemon = True
            events = [FileCreatedEvent, FileMovedEvent, FileClosedEvent]
            self._observer.schedule(handler, self._directory, event_filter=events)
            self._observer.start()
