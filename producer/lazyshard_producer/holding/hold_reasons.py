"""What a run that is held says: what it has reached, whom it waits for, and what would end it. Text only.

It goes into the log and, as the note of `head.json`, to the readers that wait.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lazyshard_producer.configuration.quantities import show_amount, show_bytes
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding.disk import Stock
from lazyshard_producer.holding.limits import Claim, Kept, may_be_dead, needed, silent_for, slowest, uncommitted_for
from lazyshard_producer.wording import count, one_line

_NAMED: Final = 3
"""So many consumers are named, the others counted."""

_AGES: Final = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a chunk is held.

    Attributes:
        out: the stream's directory, as people call it.
        claims: those of all consumers.
        limits: what the run may do.
        published: published chunks.
        samples: rows in them.
        held_s: for how long the next chunk has been held.
        now: seconds since 1970.
    """

    out: str
    claims: tuple[Claim, ...]
    limits: Limits
    published: int
    samples: int
    held_s: float
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A limit of bytes that is reached.

    Attributes:
        limit: `max_disk` or `min_free_disk`.
        chunk: bytes that the next chunk is counted with.
        free: bytes that are free, of `min_free_disk`; None of `max_disk`.
    """

    limit: int
    chunk: int
    free: int | None = None


def ahead_reason(situation: Situation) -> str:
    """Returns why a run is held that is far enough ahead of its consumers."""
    amount = situation.limits.max_ahead
    assert amount is not None
    text = f"--max-ahead {show_amount(amount)}: {count(situation.published, 'chunk')} with "
    text += f"{count(situation.samples, 'sample')} published; "
    behind = slowest(situation.claims)
    if not behind:
        return f"{text}no consumer has registered yet"
    text += f"{_named(behind)} {_are(len(behind))} at chunk {behind[0].mark}"
    ago = silent_for(behind, situation.now)
    if ago is not None:
        text += f", heard of {_age(ago)} ago"
    return one_line(text + _dead(situation, behind))


def room_reason(
    situation: Situation, kept: Kept, stock: Stock, room: Room, *, deadlock: bool, trouble: str | None
) -> str:
    """Returns why a run is held that has no room for another chunk. For the arguments see `hold_for_room`."""
    keepers = tuple(claim for claim in situation.claims if kept.by == "consumer" and claim.name in kept.names)
    waiting = tuple(claim for claim in situation.claims if claim.waits(situation.published))
    option = "--max-disk" if room.free is None else "--min-free-disk"
    there = (
        f"{count(stock.chunks, 'chunk')} on disk {'takes' if stock.chunks == 1 else 'take'} {show_bytes(stock.size)}"
    )
    if room.free is not None:
        there = f"{show_bytes(room.free)} {_are(room.free)} free"
    parts = [f"{option} {show_bytes(room.limit)}: {there}, the next chunk may take {show_bytes(room.chunk)}"]
    if waiting:
        wanted = count(needed(waiting), "chunk")
        wait = "waits" if len(waiting) == 1 else "wait"
        parts.append(
            f"{_named(waiting)} {wait} for {wanted}, {situation.published:,} {_are(situation.published)} published"
        )
    if trouble is None:
        parts.append(_why(situation, kept, keepers))
    else:
        parts.append(f"chunks that nobody needs cannot be deleted: {trouble}")
    if deadlock:
        parts[0] = f"deadlock: {parts[0]}"
        parts.append(_advice(situation, kept, stock, room, needed(waiting)))
    return one_line("; ".join(parts) + _dead(situation, keepers))


def _why(situation: Situation, kept: Kept, keepers: Sequence[Claim]) -> str:
    """Returns why no more can be deleted."""
    if kept.by == "all":
        return "--retain all deletes nothing"
    if kept.by == "nobody":
        return "nothing is deleted, as no consumer has registered yet"
    if kept.by == "unregistered":
        return f"nothing is deleted before {_quoted(kept.names)} of --consumers {_have(kept.names)} written a cursor"
    if kept.by == "last":
        last = situation.limits.retain
        stay = f"--retain keeps the last {last}" if isinstance(last, int) and last > 1 else "the newest always stays"
        return f"no consumer needs what is on disk any more, but {stay}"
    ago = uncommitted_for(keepers, situation.now)
    whose = "whose cursor" if len(keepers) == 1 else "whose oldest cursor"
    when = f"which {_have(keepers)} written no cursor" if ago is None else f"{whose} is {_age(ago)} old"
    return f"chunk {keepers[0].done} and those after it are kept for {_named(keepers)}, {when}"


def _advice(situation: Situation, kept: Kept, stock: Stock, room: Room, wanted: int) -> str:
    """Returns what would end a deadlock."""
    if room.free is None:
        size = (wanted - stock.first + 1) * room.chunk
        ways = [f"raise --max-disk to {size} bytes ({show_bytes(size)}) or more"]
    else:
        size = (wanted - situation.published) * room.chunk + room.limit - room.free
        ways = [f"make {size} bytes ({show_bytes(size)}) of room or more"]
    if kept.by == "consumer":
        who = "that consumer" if len(kept.names) == 1 else "those consumers"
        # Saving alone moves no cursor: ms-swift commits by itself, a loop of one's own has to.
        ways.append(f"let {who} save checkpoints, and commit them (dataset.commit), more often")
    elif kept.by == "all":
        ways.append("choose --retain consumed")
    elif kept.by == "last" and situation.limits.retain != "consumed":
        ways.append("retain fewer chunks")
    elif kept.by == "unregistered":
        ways.append(f"take {'it' if len(kept.names) == 1 else 'them'} out of --consumers")
    return " or ".join(ways)


def _dead(situation: Situation, claims: Sequence[Claim]) -> str:
    """Returns how to forget the one among these consumers that is the most likely to be dead; empty if none may be."""
    dead = [claim for claim in claims if may_be_dead(claim, situation.now)]
    if not dead:
        return ""
    first = min(dead, key=lambda claim: claim.seen_at or 0.0)
    problem = f"; {first.problem}" if first.problem else ""
    command = f"lazyshard forget {shlex.quote(situation.out)} {shlex.quote(first.name)}"
    return f"{problem}; if {first.name!r} will not come back, run `{command}`"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _have(those: Sequence[object]) -> str:
    return "has" if len(those) == 1 else "have"


def _named(claims: Sequence[Claim]) -> str:
    return _quoted([claim.name for claim in claims])


def _quoted(names: Sequence[str]) -> str:
    shown = f"consumer{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:_NAMED]))}"
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _age(seconds: float) -> str:
    """Returns a length of time for people.

    >>> _age(59.9), _age(90), _age(7200), _age(200_000)
    ('59 s', '1.5 min', '2.0 h', '2.3 days')
    """
    for unit, size in _AGES:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{int(seconds)} s"
