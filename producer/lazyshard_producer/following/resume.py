"""Going on in a followed directory: from a position to what is read, and to what was read behind it in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard_producer.following.journal import Spot, is_journal_name, read_journal
from lazyshard_producer.following.ledger import KIND, Totals
from lazyshard_producer.following.state import FollowState
from lazyshard_producer.position import refuse_position

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
    try:
        for line in before:
            state.apply(line)
        if "at" in position:
            state.apply(position["at"])
    except (TypeError, AttributeError, ValueError) as cause:
        raise refuse_position(name, f"lines of a journal in {path}", str(cause)[:120]) from cause
    return Resumed(state, totals, behind, path)


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
