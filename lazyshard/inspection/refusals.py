"""The rows that a producer has refused, counted by reason, of a file that other processes append to.

The file is described in docs/format.md. `MOST_TOLD_APART` reasons, and as many sources of each, are told apart, and
unless all is asked for `_MOST_BYTES` of its beginning are read. A last line that is not complete yet is left out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.format.names import QUARANTINE
from lazyshard.memory import loads
from lazyshard.store.files import open_file, read_file
from lazyshard.store.urls import UrlPath

OTHERS: Final = "other reasons"

_MOST_BYTES: Final = 64 << 20
_MOST_LINE: Final = 16 << 20
"""A longer line is none that is looked into."""

MOST_TOLD_APART: Final = 200
_NUMBER: Final = re.compile(r"\d+")
_SHOWN_OF_ROW: Final = 160


class RefusedRow(NamedTuple):
    """A refused row: its source, its line there from 1, why, and its beginning (None where it is no text)."""

    source: str
    line: int
    reason: str
    row: str | None


@dataclass(slots=True)
class RefusedFor:
    """Rows refused for reasons that differ by nothing but their numbers.

    Attributes:
        reason: the reason of the first.
        rows: how many there are.
        sources: in how many sources, as far as they were told apart.
        first: the first of them.
    """

    reason: str
    rows: int
    sources: int
    first: RefusedRow


@dataclass(frozen=True, slots=True)
class Refusals:
    """What is in the file.

    Attributes:
        rows: refused rows that were read.
        reasons: the most frequent first.
        unreadable: lines that are none of ours.
        complete: whether all of the file was read.
    """

    rows: int
    reasons: tuple[RefusedFor, ...]
    unreadable: int
    complete: bool


def read_refusals(directory: Path, *, whole: bool = False) -> Refusals | None:
    """Counts the rows that were refused; None without a file of them.

    Args:
        directory: the stream's.
        whole: whether to read all of the file, however large it is.

    Raises:
        FileRefused: it is no plain file, or an object of more than 64 MiB.
        LazyShardError, OSError: it cannot be read.
    """
    path = directory / QUARANTINE
    try:
        if isinstance(path, UrlPath):
            return count_refusals(iter(read_file(path, _MOST_BYTES).splitlines(keepends=True)), complete=True)
        opened = open_file(path)
    except FileNotFoundError:
        return None
    if whole:
        return count_refusals(_lines(opened.fd, sys.maxsize, sys.maxsize), complete=True)
    return count_refusals(_lines(opened.fd, _MOST_BYTES, _MOST_LINE), complete=opened.size <= _MOST_BYTES)


def count_refusals(lines: Iterator[bytes], *, complete: bool) -> Refusals:
    """Counts the rows of the file's lines.

    Args:
        lines: its lines, ends included.
        complete: whether they are all of it.
    """
    groups: dict[str, RefusedFor] = {}
    sources: dict[str, set[str]] = {}
    rows = unreadable = 0
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        one = _decode(line)
        if one is None:
            unreadable += 1
            continue
        rows += 1
        # A reason may hold a place or a value of the row.
        key = _NUMBER.sub("0", one.reason)
        if key not in groups and len(groups) >= MOST_TOLD_APART:
            key = OTHERS
        group = groups.get(key)
        if group is None:
            group = groups[key] = RefusedFor(OTHERS if key == OTHERS else one.reason, 0, 0, one)
        group.rows += 1
        known = sources.setdefault(key, set())
        if len(known) < MOST_TOLD_APART:
            known.add(one.source)
        group.sources = len(known)
    ordered = sorted(groups.values(), key=lambda group: (group.reason == OTHERS, -group.rows, group.reason))
    return Refusals(rows, tuple(ordered), unreadable, complete)


def _lines(fd: int, most_bytes: int, most_line: int) -> Iterator[bytes]:
    read = 0
    with os.fdopen(os.dup(fd), "rb") as file:
        while read < most_bytes and (line := file.readline(most_line)):
            read += len(line)
            yield line


def _decode(line: bytes) -> RefusedRow | None:
    try:
        entry: Any = loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    source, number, reason, row = (entry.get(name) for name in ("source", "line", "reason", "row"))
    if not isinstance(source, str) or not isinstance(reason, str) or type(number) is not int:
        return None
    return RefusedRow(source, number, reason, row[:_SHOWN_OF_ROW] if isinstance(row, str) else None)
