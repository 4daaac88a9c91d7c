"""What a run may publish and what it may delete: decisions over integers, and in words why a run is held. No I/O.

Chunks are counted, so ``published = 20`` stands for those of the half-open range [0, 20). Each consumer makes two
claims: what it is `done` with is in its durable checkpoints; what it `needs` must be published before it can go on::

    chunk   0        4           9          14            20        24
            | deleted|     on disk: first = 4, published = 20 |
            |        | may go    | kept     |             | may come|
                                 ^ smallest done          ^         ^ smallest mark (14) + max_ahead (10)
                                            ^ smallest mark

Deleting follows the cursors alone, publishing the reading marks: a cursor stands still between two checkpoints, and a
producer that counted from it could wait for a checkpoint that waits for data.

The line goes into the log and, as the note of `head.json`, to the readers that wait.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lazyshard.stream.consumers import Consumer
from lazyshard_producer.configuration.quantities import Amount, show_amount, show_bytes
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding.shelf import Stock
from lazyshard_producer.wording import count, one_line

SILENT_S: Final = 600.0
"""A consumer that was not heard of for so long may be dead; by default no reader waits longer for data. Only what is
said depends on it, no decision: the clocks of two machines differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one consumer has done and needs.

    Attributes:
        name: the consumer's name.
        done: it will never ask for the chunks of [0, done) again; 0 where it has no cursor that counts.
        needs: how many chunks must be published before it can go on; None where it has left no reading mark.
        committed_at: when it wrote that cursor, in seconds since 1970 by its own clock; None without one.
        seen_at: when it last wrote either; None without both.
        problem: why its cursor does not count, None if it does or is not there.
    """

    name: str
    done: int = 0
    needs: int | None = None
    committed_at: float | None = None
    seen_at: float | None = None
    problem: str | None = None

    @property
    def mark(self) -> int:
        """Where it counts as being, in chunks: a reading mark below its own cursor is an old one."""
        return max(self.done, self.needs or 0)

    def waits(self, published: int) -> bool:
        """Whether it needs more than is published."""
        return self.needs is not None and self.needs > published


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptChunks:
    """Why chunks that are on disk may not be deleted.

    Attributes:
        by: all: `retain` keeps all; last: it keeps the last ones, the newest at least, and no consumer needs any other;
            nobody: there is no consumer yet; unregistered: a consumer that was named has no cursor; consumer: it is
            done with no more.
        names: the consumers that were meant, in order.
    """

    by: Literal["all", "last", "nobody", "unregistered", "consumer"]
    names: tuple[str, ...] = ()


def read_claims(consumers: Iterable[Consumer]) -> tuple[Claim, ...]:
    """Returns the claims of consumers. One whose cursor does not count is done with nothing."""
    return tuple(map(_claim, consumers))


def ahead_in_chunks(amount: Amount, samples_per_chunk: int, chunk_bytes: int | None) -> int:
    """Returns how many chunks an amount of data is, rounded down, but of samples and bytes at least one.

    Args:
        amount: what was asked for.
        samples_per_chunk: rows in a chunk.
        chunk_bytes: mean size of a chunk; None or 0 as long as there is none.

    >>> ahead_in_chunks(Amount(number=2500, unit="samples"), 1000, None)
    2
    >>> ahead_in_chunks(Amount(number=100, unit="bytes"), 1000, 4096)
    1
    """
    if amount.unit == "chunks":
        return amount.number
    size = samples_per_chunk if amount.unit == "samples" else chunk_bytes
    return max(1, amount.number // size) if size else 1


def publishable(claims: Sequence[Claim], ahead: int) -> int:
    """Returns N such that the chunks of [0, N) may be published: `ahead` more than the slowest consumer's mark.

    But never fewer than some consumer needs to go on. With no consumer it counts from 0.
    """
    mark = min((claim.mark for claim in claims), default=0)
    return max(mark + ahead, needed(claims))


def needed(claims: Sequence[Claim]) -> int:
    """Returns how many chunks must be published so that every consumer can go on; 0 if none says."""
    return max((claim.needs for claim in claims if claim.needs is not None), default=0)


def slowest(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Returns the claims whose mark is the smallest, in order."""
    smallest = min((claim.mark for claim in claims), default=0)
    return tuple(claim for claim in claims if claim.mark == smallest)


def may_be_dead(claim: Claim, now: float) -> bool:
    """Whether a consumer has been silent for `SILENT_S`, or its files cannot be used."""
    return claim.problem is not None or claim.seen_at is None or now - claim.seen_at >= SILENT_S


def silent_for(claims: Sequence[Claim], now: float) -> float | None:
    """Returns how many seconds ago the one that has been silent for longest was heard of; None if nobody knows.

    0 where its clock is ahead of ours.
    """
    return _longest((claim.seen_at for claim in claims), now)


def uncommitted_for(claims: Sequence[Claim], now: float) -> float | None:
    """Returns the age in seconds of the oldest of their cursors; None where there is none."""
    return _longest((claim.committed_at for claim in claims), now)


def deletable(claims: Sequence[Claim], limits: Limits, published: int) -> int:
    """Returns N such that the chunks of [0, N) may be deleted: never one that a consumer is not done with."""
    kept = why_kept(claims, limits, published)
    if kept.by == "last":
        return max(0, published - _last(limits))
    return min(claim.done for claim in claims) if kept.by == "consumer" else 0


def why_kept(claims: Sequence[Claim], limits: Limits, published: int) -> KeptChunks:
    """Returns why no more than `deletable` may be deleted: what has to change before more may."""
    if limits.retain == "all":
        return KeptChunks(by="all")
    there = {claim.name for claim in claims if claim.committed_at is not None}
    if missing := tuple(sorted(set(limits.consumers) - there)):
        return KeptChunks(by="unregistered", names=missing)
    if not claims:
        return KeptChunks(by="nobody")
    done = min(claim.done for claim in claims)
    if published - _last(limits) <= done:
        return KeptChunks(by="last")
    return KeptChunks(by="consumer", names=tuple(claim.name for claim in claims if claim.done == done))


def is_deadlock(claims: Sequence[Claim], kept: KeptChunks, published: int) -> bool:
    """Whether a consumer waits for chunks that only deleting can make room for, and nobody can bring that about.

    For a producer that is at a hard limit and can delete nothing now. A consumer that waits reaches no checkpoint, so
    if it is one of those that keep the oldest chunk, it keeps it for ever. If others do, which have all that they need,
    they may still reach their next checkpoint: no deadlock, though they may be dead. Not seen: that a consumer which
    waits has a checkpoint under way, for what was trained before. So a deadlock may yet turn out to be none.
    """
    moving = {claim.name for claim in claims if not claim.waits(published)}
    if len(moving) == len(claims):
        return False
    if kept.by in ("consumer", "unregistered"):
        return not moving.issuperset(kept.names)
    return True


def _longest(times: Iterable[float | None], now: float) -> float | None:
    oldest = min((time for time in times if time is not None), default=None)
    return None if oldest is None else max(0.0, now - oldest)


def _last(limits: Limits) -> int:
    """Returns how many of the last chunks stay in any case: the newest one's seal says where a restart goes on."""
    return max(1, limits.retain) if isinstance(limits.retain, int) else 1


def _claim(consumer: Consumer) -> Claim:
    cursor, reading = consumer.cursor, consumer.reading
    return Claim(
        name=consumer.name,
        done=consumer.chunks_before,
        needs=None if reading is None else reading.needs_chunks,
        committed_at=None if cursor is None else cursor.updated_at,
        seen_at=max((file.updated_at for file in (cursor, reading) if file is not None), default=None),
        problem=consumer.problem,
    )


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
class ByteLimit:
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
    situation: Situation, kept: KeptChunks, stock: Stock, room: ByteLimit, *, deadlock: bool, trouble: str | None
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


def _why(situation: Situation, kept: KeptChunks, keepers: Sequence[Claim]) -> str:
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


def _advice(situation: Situation, kept: KeptChunks, stock: Stock, room: ByteLimit, wanted: int) -> str:
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
