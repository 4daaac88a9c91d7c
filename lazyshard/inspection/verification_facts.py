"""What a verification finds in the files of the stream itself, and what they say of its chunks.

The order of looks is what keeps a running producer from being taken for a fault: the cursors come before the head, the
head before the end, the end before the names, so that each later look shows at least what an earlier one speaks of.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from lazyshard.errors import LazyShardError, VersionUnsupported
from lazyshard.format import Cursor, End, Head, Manifest, Owner, ReadingMark, Retired, check_consumer
from lazyshard.format.cursor import CURSOR_SUFFIX, CURSORS
from lazyshard.format.names import END, HEAD, MANIFEST, OWNER, RETIRED, TEMPORARY
from lazyshard.format.reading import READING_SUFFIX
from lazyshard.inspection.verification_chunks import file_finding
from lazyshard.inspection.verification_findings import Finding
from lazyshard.store.files import check_folder, is_there, list_names, read_file
from lazyshard.store.urls import UrlPath
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.pacing import STALE_HEARTBEAT_S

SILENT_S: Final = 60.0
"""A producer that gives no sign for so long counts as stopped. It decides no more than whether what it leaves is told
of: clocks of machines differ, and a writer that waits for one slow row is silent too."""

_REWRITTEN: Final = "nothing to do: the producer's next start writes it anew"
_REMARKED: Final = "nothing to do: its run writes it anew as it reads on"

_T = TypeVar("_T")


@dataclass(slots=True)
class Facts:
    """What the files of a stream say, apart from its chunks.

    Attributes:
        directory: the stream's directory.
        native: whether a producer of ours fills it.
        manifest, head, end, retired: what these files say; None where they are missing or cannot be used.
        has_end: whether there is a `stream.end`, whatever it says.
        running: whether the producer is at work.
        cursors, readings: those that can be used, with their names in the directory.
        temporary: names of what is in `.tmp`.
        names: all names in the directory.
        findings: what is wrong with these files.
    """

    directory: Path
    native: bool
    manifest: Manifest | None = None
    head: Head | None = None
    end: End | None = None
    retired: Retired | None = None
    has_end: bool = False
    running: bool = False
    cursors: list[tuple[str, Cursor]] = field(default_factory=list)
    readings: list[tuple[str, ReadingMark]] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def gather_facts(directory: Path, now: float) -> Facts:
    """Reads them.

    Args:
        directory: the stream's directory.
        now: seconds since 1970, by this machine's clock.

    Raises:
        VersionUnsupported: the stream is of a later format.
        FileNotFoundError, OSError: the directory cannot be listed.
    """
    facts = Facts(directory, native=any(is_there(directory / name) for name in (MANIFEST, HEAD)))
    _read_consumers(facts)
    if facts.native:
        facts.manifest = _read(facts, MANIFEST, Manifest.decode)
        facts.head = _read(facts, HEAD, Head.decode)
        facts.running = (
            facts.head is not None
            and not process_ended(facts.head)
            and is_running(facts.head, process_gone(facts.head), now)
        )
        facts.end = _read(facts, END, End.decode)
        facts.retired = _read(facts, RETIRED, Retired.decode)
        _read(facts, OWNER, Owner.decode)
    try:
        facts.names = list_names(directory)
    except FileNotFoundError:
        # A store has no empty folders: there is nothing under this URL.
        if not isinstance(directory, UrlPath):
            raise
    facts.has_end = END in facts.names or facts.end is not None
    if TEMPORARY in facts.names:
        facts.temporary = _listed(facts, TEMPORARY)
    return facts


def is_running(head: Head, gone: bool | None, now: float) -> bool:
    """Returns whether the producer is at work, as far as its head tells.

    Args:
        head: what it says of itself.
        gone: whether its process is not to be seen on this machine, None where it runs on another one.
        now: seconds since 1970, by this machine's clock.
    """
    silent_s = now - head.updated_at
    # Containers may share the name of a machine, but not its processes: a fresh sign counts for more than that.
    return head.state in ("running", "waiting") and silent_s <= (STALE_HEARTBEAT_S if gone else SILENT_S)


def _read_consumers(facts: Facts) -> None:
    for name in _listed(facts, CURSORS):
        file = f"{CURSORS}/{name}"
        # Of a reading mark the name would be that of a cursor as well.
        if (consumer := _consumer_of(name, READING_SUFFIX)) is not None:
            mark = _read(facts, file, partial(_decode_reading, consumer))
            facts.readings += [] if mark is None else [(file, mark)]
        elif (consumer := _consumer_of(name, CURSOR_SUFFIX)) is not None:
            cursor = _read(facts, file, partial(_decode_cursor, consumer))
            facts.cursors += [] if cursor is None else [(file, cursor)]


def _decode_reading(consumer: str, data: bytes, shown: str) -> ReadingMark:
    return ReadingMark.decode(data, consumer, shown)


def _decode_cursor(consumer: str, data: bytes, shown: str) -> Cursor:
    return Cursor.decode(data, consumer, shown)


def _consumer_of(name: str, suffix: str) -> str | None:
    try:
        return check_consumer(name.removesuffix(suffix)) if name.endswith(suffix) else None
    except ValueError:
        return None


def _read(facts: Facts, name: str, decode: Callable[[bytes, str], _T]) -> _T | None:
    """Returns what a file says, None where it is missing or cannot be used, which is a finding."""
    try:
        return decode(read_file(facts.directory / name), name)
    except FileNotFoundError:
        return None
    except (LazyShardError, OSError) as error:
        if name == MANIFEST and isinstance(error, VersionUnsupported):
            # Nothing in the directory may mean what it seems to mean.
            error.file = str(facts.directory / name)
            error.args = (f"{facts.directory}{os.sep}{error}",)
            raise
        found = file_finding(name, error)
        # Of what is no file at all readers refuse the head too, and the producer may be unable to replace it.
        if found.kind == "invalid" and _is_hint(name):
            found = replace(
                found, severity="leftover", remedy=_REMARKED if name.endswith(READING_SUFFIX) else _REWRITTEN
            )
        facts.findings.append(found)
        return None


def _is_hint(name: str) -> bool:
    """Whether a file that cannot be used harms nobody: a power cut may leave it empty."""
    return name in (HEAD, OWNER) or name.endswith(READING_SUFFIX)


def _listed(facts: Facts, folder: str) -> list[str]:
    try:
        return sorted(list_names(check_folder(facts.directory / folder)))
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        found = file_finding(folder, error)
        facts.findings.append(replace(found, severity="damage", expected="a directory", found="something else"))
    except OSError as error:
        facts.findings.append(file_finding(folder, error))
    return []
