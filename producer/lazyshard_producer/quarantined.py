"""`lazyshard-producer quarantine`: the rows that a stream's producer has refused, counted or as they came.

The file is described in `lazyshard_producer.rows.refusals`. Reading it while a run goes on is fine: a last line that
is not complete yet is left out.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.format.names import QUARANTINE
from lazyshard.inspection.refusals import MOST_TOLD_APART, Refusals, read_refusals
from lazyshard.memory import loads
from lazyshard.store.files import open_file
from lazyshard_producer.wording import count, one_line

MAX_SHOWN: Final = 20
"""Reasons that people get to see, the most frequent first."""


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


def summarize(stream: str) -> Refusals:
    """Returns what is in a stream's quarantine, by reason. Memory: that of 200 reasons.

    Raises:
        FileRefused, FileUnreadable, OSError: as `read_refused`.
    """
    return read_refusals(Path(stream), whole=True) or Refusals(0, (), 0, complete=True)


def summary_lines(stream: str, summary: Refusals) -> Iterator[str]:
    """Yields a summary for people."""
    if not summary.rows and not summary.unreadable:
        yield one_line(f"{stream}: no row was refused into quarantine")
        return
    # Nothing tells which of them were mended and given again as another source.
    yield one_line(f"{stream}: {count(summary.rows, 'row')} refused so far, those mended since included")
    for group in summary.reasons[:MAX_SHOWN]:
        where = f"at {group.first.source}:{group.first.line}"
        if group.rows > 1:
            more = " or more" if group.sources == MOST_TOLD_APART else ""
            sources = "source" if group.sources == 1 else "sources"
            where = f"first {where}, in {group.sources:,}{more} {sources}"
        yield one_line(f"  {group.rows:>9,}  {group.reason}; {where}")
    others = summary.reasons[MAX_SHOWN:]
    if others:
        them = "it" if len(others) == 1 else "them"
        rest = sum(group.rows for group in others)
        yield f"  {rest:>9,}  for {count(len(others), 'other reason')}; --json lists {them}"
    if summary.unreadable:
        yield f"  {count(summary.unreadable, 'line')} of {QUARANTINE} could not be read"


def summary_json(summary: Refusals) -> str:
    """Returns a summary as one line of JSON."""
    reasons = [
        {
            "reason": one.reason,
            "rows": one.rows,
            "sources": one.sources,
            "source": one.first.source,
            "line": one.first.line,
        }
        for one in summary.reasons
    ]
    return orjson.dumps({"rows": summary.rows, "reasons": reasons, "unreadable_lines": summary.unreadable}).decode()


def _decode(line: bytes) -> Refused | None:
    try:
        entry: Any = loads(line)
        if not isinstance(entry, dict):
            return None
        source, number, byte, reason = (entry.get(name) for name in ("source", "line", "byte", "reason"))
        row = entry["row"].encode() if "row" in entry else base64.b64decode(entry["row_base64"], validate=True)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(source, str) or not isinstance(reason, str) or type(number) is not int:
        return None
    return Refused(source, number, byte if type(byte) is int else None, reason, row)
