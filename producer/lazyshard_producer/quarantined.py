"""`lazyshard-producer quarantine`: the rows that a stream's producer has refused, counted or as they came.

The file is described in `lazyshard_producer.rows.refusals`. Reading it while a run goes on is fine: a last line that
is not complete yet is left out.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.format.names import QUARANTINE
from lazyshard.storage.files import open_file
from lazyshard_producer.wording import count, one_line

MAX_GROUPS: Final = 1000
"""Pairs of source and reason that are told apart: a reason may hold a value of the row, so there may be one a row."""

MAX_SHOWN: Final = 20
"""Groups that people get to see, the largest first."""

_OTHER: Final = "(other reasons)"


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused row.

    Attributes:
        source: the source as the user gave it.
        line: number of its line or row there, from 1.
        byte: where its line begins there, from 0; None where lines have no such place.
        reason: why it was refused.
        row: its bytes without a line end; empty where nobody has them, as of a row that was too long.
    """

    source: str
    line: int
    byte: int | None
    reason: str
    row: bytes


@dataclass(slots=True)
class Group:
    """Rows of one source that were refused for one reason.

    Attributes:
        source: the source.
        reason: the reason.
        rows: how many there are.
        first_line: line of the first of them.
        last_line: line of the last of them.
    """

    source: str
    reason: str
    rows: int
    first_line: int
    last_line: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a quarantine.

    Attributes:
        rows: refused rows.
        groups: the largest first.
        unreadable: lines of the file that are none of ours.
    """

    rows: int
    groups: tuple[Group, ...]
    unreadable: int


def read_refused(stream: str) -> Iterator[Refused | None]:
    """Yields the refused rows of a stream in order, None for each line that is none of ours; nothing without a file.

    Raises:
        FileRefused: it is no plain file.
        FileUnreadable, OSError: it cannot be read.
    """
    try:
        opened = open_file(Path(stream, QUARANTINE))
    except FileNotFoundError:
        return
    with os.fdopen(os.dup(opened.fd), "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _decode(line)


def summarize(stream: str) -> Summary:
    """Returns what is in a stream's quarantine. Memory: that of `MAX_GROUPS` groups.

    Raises:
        FileRefused, FileUnreadable, OSError: as `read_refused`.
    """
    groups: dict[tuple[str, str], Group] = {}
    rows = unreadable = 0
    for refused in read_refused(stream):
        if refused is None:
            unreadable += 1
            continue
        rows += 1
        key = (refused.source, refused.reason)
        if key not in groups and len(groups) >= MAX_GROUPS:
            key = (_OTHER, _OTHER)
        group = groups.get(key)
        if group is None:
            groups[key] = Group(*key, rows=1, first_line=refused.line, last_line=refused.line)
        else:
            group.rows += 1
            group.last_line = refused.line
    return Summary(rows, tuple(sorted(groups.values(), key=lambda group: -group.rows)), unreadable)


def summary_lines(stream: str, summary: Summary) -> Iterator[str]:
    """Yields a summary for people."""
    if not summary.rows and not summary.unreadable:
        yield one_line(f"{stream}: no row was refused into quarantine")
        return
    # Nothing tells which of them were mended and given again as another source.
    yield one_line(f"{stream}: {count(summary.rows, 'row')} refused so far, those mended since included")
    for group in summary.groups[:MAX_SHOWN]:
        if group.source == _OTHER:
            where = "several sources"
        elif group.rows == 1:
            where = f"{group.source}:{group.first_line}"
        else:
            where = f"{group.source}, lines {group.first_line} to {group.last_line}"
        yield one_line(f"  {group.rows:>9,}  {where}: {group.reason}")
    more = len(summary.groups) - MAX_SHOWN
    if more > 0:
        rest = sum(group.rows for group in summary.groups[MAX_SHOWN:])
        others = "another pair" if more == 1 else f"{more:,} other pairs"
        yield f"  {rest:>9,}  for {others} of source and reason; --json lists {'it' if more == 1 else 'them'}"
    if summary.unreadable:
        yield f"  {count(summary.unreadable, 'line')} of {QUARANTINE} could not be read"


def summary_json(summary: Summary) -> str:
    """Returns a summary as one line of JSON."""
    return orjson.dumps(asdict(summary)).decode()


def _decode(line: bytes) -> Refused | None:
    try:
        entry: Any = orjson.loads(line)
        if not isinstance(entry, dict):
            return None
        source, number, byte, reason = (entry.get(name) for name in ("source", "line", "byte", "reason"))
        row = entry["row"].encode() if "row" in entry else base64.b64decode(entry["row_base64"], validate=True)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(source, str) or not isinstance(reason, str) or type(number) is not int:
        return None
    return Refused(source, number, byte if type(byte) is int else None, reason, row)
