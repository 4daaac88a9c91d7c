"""Going on in a followed directory: from a position to what is read, and to what was read behind it in which order."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.following.journal import Spot, is_journal_name, read_journal
from lazyshard_producer.following.ledger import KIND, Totals
from lazyshard_producer.following.listing import DirectoryListing
from lazyshard_producer.following.names import NameRules, is_packed
from lazyshard_producer.following.plain import BLOCK_BYTES
from lazyshard_producer.following.state import FollowState
from lazyshard_producer.position import plain_name, refuse_position
from lazyshard_producer.sources.lines import LineMark, LineSplitter, is_row
from lazyshard_producer.sources.regular_file import open_regular

_COUNTS: Final = ("bytes", "read", "blank")


class Resumed(NamedTuple):
    """What a position says.

    Attributes:
        state: how far all files are read.
        totals: sums up to there.
        plan: lines of the journal behind it: what was read next, in this order.
        journal: the journal that it names, None if there was none yet.
    """

    state: FollowState
    totals: Totals
    plan: list[dict[str, Any]]
    journal: Path | None


def resume(position: dict[str, Any] | None, directory: Path, name: str) -> Resumed:
    """Returns what a position says, None for the very start.

    Args:
        position: as the last seal has it.
        directory: where journals are kept.
        name: the source's name.

    Raises:
        SourceRefused: it says nothing that can be gone on from, or its journal is missing or damaged.
    """
    state = FollowState()
    if position is None:
        return Resumed(state, Totals(0, 0), [], None)
    _check(position, name)
    totals = Totals(position["read"], position["blank"])
    if not position["journal"]:
        return Resumed(state, totals, [], None)
    path = directory / position["journal"]
    before, behind = read_journal(path, Spot(position["bytes"], position["digest"]), name)
    _apply(state, [*before, *([position["at"]] if "at" in position else [])], name)
    return Resumed(state, totals, behind, path)


def _apply(state: FollowState, lines: Iterable[dict[str, Any]], name: str) -> None:
    try:
        for line in lines:
            state.apply(line)
    except (TypeError, AttributeError, ValueError) as cause:
        raise refuse_position(name, "lines of a journal", str(cause)[:120]) from cause


def list_unread(
    settings: SourceSettings, position: dict[str, Any], directory: Path, max_row_bytes: int
) -> list[tuple[str, int, int]]:
    """Returns what a directory holds behind all that was read of it: (path, bytes read, bytes there) of each file.

    A plain file is looked into: blank lines and, at its end, a piece of a line are nothing to be read.

    Args:
        settings: the directory, and what its names mean.
        position: as in `resume`.
        directory: where journals are kept.
        max_row_bytes: longest row, in bytes without its line end.

    Raises:
        SourceRefused: as `resume`, or the directory or a file cannot be read.
    """
    known = resume(position, directory, plain_name(settings.path))
    _apply(known.state, known.plan, plain_name(settings.path))
    begun, finished = known.state.files, known.state.finished
    rules = NameRules(settings.pattern, settings.marker, settings.end_marker)
    sizes = DirectoryListing(settings.path, rules).look(()).new
    new, grown = finished.compare({name: size for name, size in sizes.items() if name not in begun})
    read = dict.fromkeys(new, 0) | {name: ended.size for name in grown if (ended := finished.get(name)) is not None}
    read |= {name: state.offset for name, state in begun.items() if name in sizes and not is_packed(name)}
    unread = []
    for name, size in sorted(read.items()):
        path = os.path.join(settings.path, name)
        if sizes[name] > size and (is_packed(name) or _holds_row(path, size, max_row_bytes)):
            unread.append((path, size, sizes[name]))
    return unread


def _holds_row(path: str, offset: int, max_row_bytes: int) -> bool:
    """Returns whether there is a row behind a place in a plain file."""
    splitter = LineSplitter(path, max_row_bytes, LineMark(offset, 0, 0))
    with open_regular(path, links_out=False) as file:
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            if splitter.feed(block).lines:
                return True
    return bool(splitter.finish_if(is_row).lines)


def _check(position: dict[str, Any], name: str) -> None:
    if position.get("kind") != KIND:
        raise refuse_position(name, f"a source of kind {KIND!r}", repr(position.get("kind"))[:120])
    for field in _COUNTS:
        if type(value := position.get(field)) is not int or value < 0:
            raise refuse_position(name, f"{field}: a count", repr(value)[:120])
    if not isinstance(value := position.get("digest"), str):
        raise refuse_position(name, "digest: a text", repr(value)[:120])
    journal = position.get("journal")
    if not isinstance(journal, str) or (journal and not is_journal_name(journal)):
        raise refuse_position(name, "journal: the name of one, or none", repr(journal)[:120])
    if not isinstance(at := position.get("at", {}), dict):
        raise refuse_position(name, "at: an object", repr(at)[:120])
