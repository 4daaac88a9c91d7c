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
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lazyshard.stream.consumers import Consumer
from lazyshard_producer.configuration.quantities import Amount, show_amount, show_bytes
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.wording import count, one_line

SILENT_S: Final = 600.0  # not heard of for so long it may be dead; only what is said depends on it: clocks differ


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptChunks:
    """Why chunks that are on disk may not be deleted, and the consumers that are meant, in order.

    last: `retain` keeps the last ones, the newest at least, and no consumer needs any other; unregistered: one that was
    named has no cursor; consumer: it is done with no more.
    """

    by: Literal["all", "last", "nobody", "unregistered", "consumer"]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The chunks that are on disk, those of [first, stop): their bytes, and those of the largest one so far."""

    first: int
    stop: int
    size: int
    largest: int

    @property
    def chunks(self) -> int:
        """How many they are."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why the next chunk may not be published yet, in one line, and in how many seconds to ask again."""

    reason: str
    retry_s: float
    # A consumer waits for chunks for which there is room only once it has had them: it stays so unless somebody acts.
    deadlock: bool = False
    # It may last for ever: a consumer that it waits for may be dead, or none can make room.
    stalled: bool = False


def needs(consumer: Consumer) -> int:
    """Returns how many chunks must be published before a consumer can go on; 0 where it does not say."""
    return 0 if consumer.reading is None else consumer.reading.needs_chunks


def mark(consumer: Consumer) -> int:
    """Returns where it counts as being, in chunks: a reading mark below its own cursor is an old one."""
    return max(consumer.chunks_before, needs(consumer))


def seen_at(consumer: Consumer) -> float | None:
    """Returns when it last wrote its cursor or mark, in seconds since 1970 by its own clock; None without both."""
    return max((file.updated_at for file in (consumer.cursor, consumer.reading) if file is not None), default=None)


def ahead_in_chunks(amount: Amount, samples_per_chunk: int, chunk_bytes: int | None) -> int:
    """Returns how many chunks an amount of data is, rounded down, but of samples and bytes at least one."""
    if amount.unit == "chunks":
        return amount.number
    size = samples_per_chunk if amount.unit == "samples" else chunk_bytes
    return max(1, amount.number // size) if size else 1


def publishable(consumers: Sequence[Consumer], ahead: int) -> int:
    """Returns N such that [0, N) may be published: `ahead` more than the slowest mark, or what some consumer needs."""
    return max(min(map(mark, consumers), default=0) + ahead, needed(consumers))


def needed(consumers: Sequence[Consumer]) -> int:
    """Returns how many chunks must be published so that every consumer can go on; 0 if none says."""
    return max(map(needs, consumers), default=0)


def slowest(consumers: Sequence[Consumer]) -> tuple[Consumer, ...]:
    """Returns the consumers whose mark is the smallest, in order."""
    smallest = min(map(mark, consumers), default=0)
    return tuple(one for one in consumers if mark(one) == smallest)


def may_be_dead(consumer: Consumer, now: float) -> bool:
    """Whether a consumer has been silent for `SILENT_S`, or its files cannot be used."""
    return consumer.problem is not None or (seen := seen_at(consumer)) is None or now - seen >= SILENT_S


def age_of_oldest(times: Iterable[float | None], now: float) -> float | None:
    """Returns the age in seconds of the oldest of the times that are known, 0 of one ahead of our clock, or None."""
    oldest = min((time for time in times if time is not None), default=None)
    return None if oldest is None else max(0.0, now - oldest)


def deletable(consumers: Sequence[Consumer], limits: Limits, published: int) -> int:
    """Returns N such that the chunks of [0, N) may be deleted: never one that a consumer is not done with."""
    kept = why_kept(consumers, limits, published)
    if kept.by == "last":
        return max(0, published - _last(limits))
    return min(one.chunks_before for one in consumers) if kept.by == "consumer" else 0


def why_kept(consumers: Sequence[Consumer], limits: Limits, published: int) -> KeptChunks:
    """Returns why no more than `deletable` may be deleted: what has to change before more may."""
    if limits.retain == "all":
        return KeptChunks(by="all")
    there = {one.name for one in consumers if one.cursor is not None}
    if missing := tuple(sorted(set(limits.consumers) - there)):
        return KeptChunks(by="unregistered", names=missing)
    if not consumers:
        return KeptChunks(by="nobody")
    done = min(one.chunks_before for one in consumers)
    if published - _last(limits) <= done:
        return KeptChunks(by="last")
    return KeptChunks(by="consumer", names=tuple(one.name for one in consumers if one.chunks_before == done))


def is_deadlock(consumers: Sequence[Consumer], kept: KeptChunks, published: int) -> bool:
    """Whether a consumer waits for chunks that only deleting can make room for, and nobody can bring that about.

    For a producer at a hard limit that can delete nothing now. A consumer that waits reaches no checkpoint, so if it is
    one of those that keep the oldest chunk, it keeps it for ever; others may still reach theirs. Not seen: that one
    which waits has a checkpoint under way, so a deadlock may yet turn out to be none.
    """
    moving = {one.name for one in consumers if needs(one) <= published}
    if len(moving) == len(consumers):
        return False
    return kept.by not in ("consumer", "unregistered") or not moving.issuperset(kept.names)


def _last(limits: Limits) -> int:
    """Returns how many of the last chunks stay in any case: the newest one's seal says where a restart goes on."""
    return max(1, limits.retain) if isinstance(limits.retain, int) else 1


_NAMED: Final = 3  # so many consumers are named, the others counted


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a chunk is held: `published` chunks with so many samples, `now`, in seconds since 1970."""

    out: str
    consumers: tuple[Consumer, ...]
    limits: Limits
    published: int
    samples: int
    retry_s: float
    now: float

    def hold_ahead(self) -> Hold:
        """Returns the hold for a run that is far enough ahead of its consumers."""
        amount = self.limits.max_ahead
        assert amount is not None
        text = f"--max-ahead {show_amount(amount)}: {count(self.published, 'chunk')} with "
        text += f"{count(self.samples, 'sample')} published; "
        behind = slowest(self.consumers)
        if behind:
            ago = age_of_oldest(map(seen_at, behind), self.now)
            text += f"{_quoted([one.name for one in behind])} {_are(len(behind))} at chunk {mark(behind[0])}"
            text += ("" if ago is None else f", heard of {_age(ago)} ago") + self._dead(behind)
        else:
            text += "no consumer has registered yet"
        stalled = any(may_be_dead(one, self.now) for one in behind)
        return Hold(reason=one_line(text), retry_s=self.retry_s, stalled=stalled)

    def hold_for_room(self, stock: Stock, limit: int, free: int | None, more: bool, trouble: str | None) -> Hold:
        """Returns the hold for a run that has no room for another chunk.

        `limit` is `max_disk`, or `min_free_disk` where `free` says what is free; `more`: whether more may be deleted,
        and `trouble` why it is still there.
        """
        kept = why_kept(self.consumers, self.limits, self.published)
        deadlock = not more and is_deadlock(self.consumers, kept, self.published)
        waiting = tuple(one for one in self.consumers if needs(one) > self.published)
        keepers = tuple(one for one in self.consumers if kept.by == "consumer" and one.name in kept.names)
        wanted, chunk = needed(waiting), stock.largest
        if free is None:
            room = (wanted - stock.first + 1) * chunk
            there = f"{count(stock.chunks, 'chunk')} on disk {'takes' if stock.chunks == 1 else 'take'} "
            parts = [f"--max-disk {show_bytes(limit)}: {there}{show_bytes(stock.size)}"]
            way = f"raise --max-disk to {room} bytes ({show_bytes(room)}) or more"
        else:
            room = (wanted - self.published) * chunk + limit - free
            parts = [f"--min-free-disk {show_bytes(limit)}: {show_bytes(free)} {_are(free)} free"]
            way = f"make {room} bytes ({show_bytes(room)}) of room or more"
        parts[0] += f", the next chunk may take {show_bytes(chunk)}"
        if waiting:
            wait = f"{'waits' if len(waiting) == 1 else 'wait'} for {count(wanted, 'chunk')}"
            parts.append(
                f"{_quoted([one.name for one in waiting])} {wait}, {self.published:,} {_are(self.published)} published"
            )
        stuck = more and trouble is not None
        why, ways = self._why(kept, keepers)
        parts.append(f"chunks that nobody needs cannot be deleted: {trouble}" if stuck else why)
        if deadlock:
            parts[0] = f"deadlock: {parts[0]}"
            parts.append(" or ".join([way, *ways]))
        dead = any(may_be_dead(one, self.now) for one in keepers)
        stalled = dead or stuck or kept.by in ("all", "last")
        reason = one_line("; ".join(parts) + self._dead(keepers))
        return Hold(reason=reason, retry_s=self.retry_s, deadlock=deadlock, stalled=stalled)

    def _why(self, kept: KeptChunks, keepers: Sequence[Consumer]) -> tuple[str, list[str]]:
        """Returns why no more can be deleted, and what would end a deadlock, beside more room."""
        names, one = _quoted(kept.names), len(kept.names) == 1
        if kept.by == "all":
            return "--retain all deletes nothing", ["choose --retain consumed"]
        if kept.by == "nobody":
            return "nothing is deleted, as no consumer has registered yet", []
        if kept.by == "unregistered":
            why = f"nothing is deleted before {names} of --consumers {'has' if one else 'have'} written a cursor"
            return why, [f"take {'it' if one else 'them'} out of --consumers"]
        if kept.by == "last":
            last = self.limits.retain
            several = isinstance(last, int) and last > 1
            stay = f"--retain keeps the last {last}" if several else "the newest always stays"
            ways = [] if last == "consumed" else ["retain fewer chunks"]
            return f"no consumer needs what is on disk any more, but {stay}", ways
        ago = age_of_oldest((keeper.cursor.updated_at for keeper in keepers if keeper.cursor is not None), self.now)
        when = f"which {'has' if one else 'have'} written no cursor"
        if ago is not None:
            when = f"whose {'' if one else 'oldest '}cursor is {_age(ago)} old"
        # Saving alone moves no cursor: ms-swift commits by itself, a loop of one's own has to.
        way = f"let {'that consumer' if one else 'those consumers'} save checkpoints, and commit them (dataset.commit)"
        why = f"chunk {keepers[0].chunks_before} and those after it are kept for {names}, {when}"
        return why, [f"{way}, more often"]

    def _dead(self, consumers: Sequence[Consumer]) -> str:
        """Returns how to forget the one of these consumers that is the most likely to be dead; "" if none may be."""
        dead = [one for one in consumers if may_be_dead(one, self.now)]
        if not dead:
            return ""
        first = min(dead, key=lambda one: seen_at(one) or 0.0)
        problem = f"; {first.problem}" if first.problem else ""
        command = f"lazyshard forget {shlex.quote(self.out)} {shlex.quote(first.name)}"
        return f"{problem}; if {first.name!r} will not come back, run `{command}`"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _quoted(names: Sequence[str]) -> str:
    shown = f"consumer{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:_NAMED]))}"
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _age(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{int(seconds)} s"
