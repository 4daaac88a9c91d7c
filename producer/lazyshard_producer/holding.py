"""Holds a run back at its limits, and deletes what its consumers are done with.

Chunks are counted, so ``published = 20`` stands for those of the half-open range [0, 20). Each consumer makes two
claims: what it is `done` with is in its durable checkpoints; what it `needs` must be published before it can go on::

    chunk   0        4           9          14            20        24
            | deleted|     on disk: first = 4, published = 20 |
            |        | may go    | kept     |             | may come|
                                 ^ smallest done          ^         ^ smallest hint (14) + max_ahead (10)
                                            ^ smallest hint

Deleting follows the cursors alone, publishing the reading hints: a cursor stands still between two checkpoints, and a
producer that counted from it could wait for a checkpoint that waits for data.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from lazyshard.format.names import parse_arrays_name, parse_chunk_name
from lazyshard.inspection import survey
from lazyshard.stream.cursor import Consumer, list_consumers
from lazyshard.stream.head import format_seconds
from lazyshard.stream.listing import read_manifest
from lazyshard.stream.retention import read_retired, retire
from lazyshard_producer.configuration.quantities import Amount, show_bytes
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.wording import count, one_line

SILENT_S: Final = 600.0  # not heard of for so long it may be dead; only what is said depends on it: clocks differ
LOOK_S: Final = 0.5  # how old the consumers' files may get while chunks come: tiny ones must not cost looks
HELD_LOOK_S: Final = 0.2  # the same while a chunk is held: as often as it is asked for again
DELETED_AT_ONCE: Final = 100  # chunks; of 100,000 on a busy disk that took 0.3 to 0.8 s, in which nothing else happens
_RETRY_MIN_S: Final = 0.2
_NAMED: Final = 3  # so many consumers are named, the others counted


class KeptChunks(NamedTuple):
    """Why chunks that are on disk may not be deleted, and the consumers that are meant, in order.

    last: `retain` keeps the last ones, the newest at least, and no consumer needs any other; unregistered: one that was
    named has no cursor; consumer: it is done with no more.
    """

    by: Literal["all", "last", "nobody", "unregistered", "consumer"]
    names: tuple[str, ...] = ()


class Stock(NamedTuple):
    """The chunks that are on disk, those of [first, stop): their bytes, and those of the largest one so far."""

    first: int
    stop: int
    size: int
    largest: int

    @property
    def chunks(self) -> int:
        """How many they are."""
        return self.stop - self.first


class Hold(NamedTuple):
    """Why the next chunk may not be published yet, in one line, and in how many seconds to ask again."""

    reason: str
    retry_s: float
    deadlock: bool = False  # a consumer waits for chunks for which there is room only once it has had them
    stalled: bool = False  # it may last for ever: a consumer that it waits for may be dead, or none can make room


def needs(consumer: Consumer) -> int:
    """Returns how many chunks must be published before a consumer can go on; 0 where it does not say."""
    return 0 if consumer.reading is None else consumer.reading.needs_chunks


def hint(consumer: Consumer) -> int:
    """Returns where it counts as being, in chunks: a reading hint below its own cursor is an old one."""
    return max(consumer.chunks_before, needs(consumer))


def seen_at(consumer: Consumer) -> float | None:
    """Returns when it last wrote its cursor or hint, in seconds since 1970 by its own clock; None without both."""
    return max((file.updated_at for file in (consumer.cursor, consumer.reading) if file is not None), default=None)


def ahead_in_chunks(amount: Amount, samples_per_chunk: int, chunk_bytes: int | None) -> int:
    """Returns how many chunks an amount of data is, rounded down, but of samples and bytes at least one."""
    if amount.unit == "chunks":
        return amount.number
    size = samples_per_chunk if amount.unit == "samples" else chunk_bytes
    return max(1, amount.number // size) if size else 1


def publishable(consumers: Sequence[Consumer], ahead: int) -> int:
    """Returns N such that [0, N) may be published: `ahead` more than the slowest hint, or what some consumer needs."""
    return max(min(map(hint, consumers), default=0) + ahead, max(map(needs, consumers), default=0))


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
        return KeptChunks("all")
    there = {one.name for one in consumers if one.cursor is not None}
    if missing := tuple(sorted(set(limits.consumers) - there)):
        return KeptChunks("unregistered", missing)
    if not consumers:
        return KeptChunks("nobody")
    done = min(one.chunks_before for one in consumers)
    if published - _last(limits) <= done:
        return KeptChunks("last")
    return KeptChunks("consumer", tuple(one.name for one in consumers if one.chunks_before == done))


def is_deadlock(consumers: Sequence[Consumer], kept: KeptChunks, published: int) -> bool:
    """Whether a consumer waits for chunks that only deleting can make room for, and nobody can bring that about.

    A consumer that waits reaches no checkpoint, so if it is one of those that keep the oldest chunk, it keeps it for
    ever; others may still reach theirs. One that waits may have a checkpoint under way: then it turns out to be none.
    """
    moving = {one.name for one in consumers if needs(one) <= published}
    if len(moving) == len(consumers):
        return False
    return kept.by not in ("consumer", "unregistered") or not moving.issuperset(kept.names)


def _last(limits: Limits) -> int:
    """Returns how many of the last chunks stay in any case: the newest one's seal says where a restart goes on."""
    return max(1, limits.retain) if isinstance(limits.retain, int) else 1


class Shelf:
    """The published chunks of a stream and its consumers' files; its writer's lock is held, `name` is for people."""

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.directory: Final = directory
        self.name: Final = str(directory) if name is None else name
        self._arrays: bool | None = None

    def has_arrays(self) -> bool:
        """Whether the chunks have side files; False as long as there is no manifest."""
        if self._arrays is None:
            manifest = read_manifest(self.directory, None)
            self._arrays = None if manifest is None else manifest.arrays
        return bool(self._arrays)

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return read_retired(self.directory)

    def visible(self, published: int) -> int:
        """Returns how many of so many published chunks the readers can be sure to find by now."""
        return published

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as they were last seen; those whose cursor is ahead of `published` do not count."""
        return list_consumers(self.directory, published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Deletes the chunks of [0, chunks_before), never the newest; `check` is as in `lazyshard.stream.retention`."""
        retire(self.directory, chunks_before, published, check=check)

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Looks at all files of chunks, O(chunks), or estimates from some of [first, stop)."""
        if not exact:
            sizes = {chunk: self.chunk_size(chunk) for chunk in survey.sampled_chunks(first, stop)}
            size = survey.estimate_size(stop - first, sizes, stop - 1)
            return Stock(first, stop, size, largest=max(sizes.values(), default=0))
        # Listed, which on a network filesystem costs far less; of all chunks no sizes are kept.
        size, largest = 0, {"data": 0, "seal": 0, "side": 0}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                parsed = parse_chunk_name(entry.name)
                if parsed is not None or parse_arrays_name(entry.name) is not None:
                    kind = "side" if parsed is None else "seal" if parsed[1] else "data"
                    found = entry.stat(follow_symlinks=False).st_size
                    size, largest[kind] = size + found, max(largest[kind], found)
        return Stock(first, stop, size, largest=sum(largest.values()))

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk with its seal; a file that is not there has none."""
        size = 0
        for name in self._names(chunk):
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(self.directory / name, follow_symlinks=False).st_size
        return size

    def used_bytes(self, published: int) -> int:
        """Returns about how many bytes the stream takes, so many chunks of it being published."""
        return survey.measure_disk(self.directory, self.first(), published, self._names).size

    def free_bytes(self) -> int | None:
        """Returns how many bytes are free beside the chunks, None where nobody can tell."""
        return survey.free_bytes(self.directory)

    def _names(self, chunk: int) -> tuple[str, ...]:
        return survey.chunk_files(chunk, arrays=self.has_arrays())


class Gate(Protocol):
    """Says whether the next chunk may be published."""

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns None if the chunk after the published ones may be published, or why not."""

    def after_publish(self, published_chunks: int) -> None:
        """Takes notice that so many chunks are published, and deletes what may go."""


@dataclass(eq=False)
class Holdback:
    """Says whether the next chunk may be published, and deletes old ones."""

    limits: Limits
    shelf: Shelf
    samples_per_chunk: int
    check: Callable[[], Path | None] = lambda: None  # before deletion; raises if the stream is another producer's now
    warn: Callable[[str], None] = lambda text: None  # is told of what goes wrong without stopping the run
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    stock: Stock | None = None  # what is on disk, as far as a limit needs it; estimated without `max_disk`
    _consumers: tuple[Consumer, ...] = ()
    _looked_at: float = float("-inf")
    _held_since: float | None = None
    _trouble: str | None = None
    _blind: str | None = None

    def __post_init__(self) -> None:
        """Looks where the chunks begin."""
        self._first = self.shelf.first()

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns why chunk number `published_chunks` may not be published yet, None if it may.

        It is counted as large as the largest one so far: one that is larger than all before it can go beyond a limit
        of bytes, by the difference.
        """
        self._take_stock(published_chunks)
        hold = self._hold(published_chunks, published_samples)
        # Without such a limit nobody asks who the consumers are until there is something to say of them.
        heeds = hold is not None or self.limits.max_ahead is not None or self.limits.retain != "all"
        if heeds and self._refresh(published_chunks, LOOK_S if hold is None else HELD_LOOK_S):
            hold = self._hold(published_chunks, published_samples)
        if hold is None:
            self._held_since = None
        return hold

    def after_publish(self, published_chunks: int) -> None:
        """Deletes what may be deleted, now that so many chunks are published. O(consumers + deleted chunks)."""
        self._take_stock(published_chunks)
        if self.limits.retain != "all":
            self._refresh(published_chunks, LOOK_S)

    def _hold(self, published: int, samples: int) -> Hold | None:
        limits, stock = self.limits, self.stock
        if limits.max_ahead is not None:
            mean = stock.size // stock.chunks if stock is not None and stock.chunks else None
            ahead = ahead_in_chunks(limits.max_ahead, self.samples_per_chunk, mean)
            if published >= publishable(self._consumers, ahead):
                return self._hold_ahead(limits.max_ahead, published, samples)
        if stock is None:
            return None
        if limits.max_disk is not None and stock.size + stock.largest > limits.max_disk:
            return self._hold_for_room(stock, published, limits.max_disk, None)
        free = None if limits.min_free_disk is None else self.shelf.free_bytes()
        if limits.min_free_disk is not None and free is not None and free - stock.largest < limits.min_free_disk:
            return self._hold_for_room(stock, published, limits.min_free_disk, free)
        return None

    def _hold_ahead(self, amount: Amount, published: int, samples: int) -> Hold:
        now, smallest = self.wall_clock(), min(map(hint, self._consumers), default=0)
        behind = [one for one in self._consumers if hint(one) == smallest]
        text = f"--max-ahead {amount}: {count(published, 'chunk')} with "
        text += f"{count(samples, 'sample')} published; "
        if behind:
            ago = age_of_oldest(map(seen_at, behind), now)
            text += f"{_quoted([one.name for one in behind])} {_are(len(behind))} at chunk {smallest}"
            text += ("" if ago is None else f", heard of {format_seconds(ago)} ago") + self._dead(behind, now)
        else:
            text += "no consumer has registered yet"
        return self._made(text, stalled=any(may_be_dead(one, now) for one in behind))

    def _hold_for_room(self, stock: Stock, published: int, limit: int, free: int | None) -> Hold:
        """Returns the hold at `max_disk`, or at `min_free_disk` where `free` says what is free."""
        now, consumers, chunk = self.wall_clock(), self._consumers, stock.largest
        kept, more = why_kept(consumers, self.limits, published), deletable(consumers, self.limits, published)
        keepers = [one for one in consumers if kept.by == "consumer" and one.name in kept.names]
        waiting = [one for one in consumers if needs(one) > published]
        wanted = max(map(needs, waiting), default=0)
        if free is None:
            room = (wanted - stock.first + 1) * chunk
            there = f"{count(stock.chunks, 'chunk')} on disk {'takes' if stock.chunks == 1 else 'take'} "
            text = f"--max-disk {show_bytes(limit)}: {there}{show_bytes(stock.size)}"
            way = f"raise --max-disk to {room} bytes ({show_bytes(room)}) or more"
        else:
            room = (wanted - published) * chunk + limit - free
            text = f"--min-free-disk {show_bytes(limit)}: {show_bytes(free)} {_are(free)} free"
            way = f"make {room} bytes ({show_bytes(room)}) of room or more"
        text += f", the next chunk may take {show_bytes(chunk)}"
        if waiting:
            wait = f"{'waits' if len(waiting) == 1 else 'wait'} for {count(wanted, 'chunk')}"
            text += f"; {_quoted([one.name for one in waiting])} {wait}, {published:,} {_are(published)} published"
        stuck = more > self._first and self._trouble is not None
        why, ways = self._why(kept, keepers, now)
        text += f"; chunks that nobody needs cannot be deleted: {self._trouble}" if stuck else f"; {why}"
        deadlock = more <= self._first and is_deadlock(consumers, kept, published)
        if deadlock:
            text = f"deadlock: {text}; {' or '.join([way, *ways])}"
        stalled = stuck or kept.by in ("all", "last") or any(may_be_dead(one, now) for one in keepers)
        return self._made(text + self._dead(keepers, now), deadlock=deadlock, stalled=stalled)

    def _made(self, text: str, *, deadlock: bool = False, stalled: bool = False) -> Hold:
        now = self.clock()
        self._held_since = now if self._held_since is None else self._held_since
        return Hold(one_line(text), retry_s(now - self._held_since), deadlock, stalled)

    def _why(self, kept: KeptChunks, keepers: Sequence[Consumer], now: float) -> tuple[str, list[str]]:
        """Returns why no more can be deleted, and what would end a deadlock, beside more room."""
        names = _quoted(kept.names)
        if kept.by == "all":
            return "--retain all deletes nothing", ["choose --retain consumed"]
        if kept.by == "nobody":
            return "nothing is deleted, as no consumer has registered yet", []
        if kept.by == "unregistered":
            return f"nothing is deleted before {names} of --consumers wrote a cursor", ["take that out of --consumers"]
        if kept.by == "last":
            last = _last(self.limits)
            stay = f"--retain keeps the last {last}" if last > 1 else "the newest always stays"
            ways = [] if self.limits.retain == "consumed" else ["retain fewer chunks"]
            return f"no consumer needs what is on disk any more, but {stay}", ways
        ago = age_of_oldest((keeper.cursor.updated_at for keeper in keepers if keeper.cursor is not None), now)
        when = "without a cursor" if ago is None else f"whose cursor is {format_seconds(ago)} old"
        # Saving alone moves no cursor: ms-swift commits by itself, a loop of one's own has to.
        ways = [f"let {names} save checkpoints, and commit them (dataset.commit), more often"]
        return f"chunk {keepers[0].chunks_before} and those after it are kept for {names}, {when}", ways

    def _dead(self, consumers: Sequence[Consumer], now: float) -> str:
        """Returns how to forget the one of these consumers that is the most likely to be dead; "" if none may be."""
        dead = [one for one in consumers if may_be_dead(one, now)]
        if not dead:
            return ""
        first = min(dead, key=lambda one: seen_at(one) or 0.0)
        problem = f"; {first.problem}" if first.problem else ""
        command = f"lazyshard forget {shlex.quote(self.shelf.name)} {shlex.quote(first.name)}"
        return f"{problem}; if {first.name!r} will not come back, run `{command}`"

    def _take_stock(self, published: int) -> None:
        limits, stock = self.limits, self.stock
        by_bytes = limits.max_ahead is not None and limits.max_ahead.unit == "bytes"
        if limits.max_disk is None and limits.min_free_disk is None and not by_bytes:
            return
        if stock is None:
            stock = self.shelf.stock(self._first, published, exact=limits.max_disk is not None)
        for chunk in range(stock.stop, published):
            size = self.shelf.chunk_size(chunk)
            stock = stock._replace(stop=chunk + 1, size=stock.size + size, largest=max(stock.largest, size))
        self.stock = stock

    def _refresh(self, published: int, every_s: float) -> bool:
        """Looks at the consumers and deletes what may go, unless that was done a moment ago; returns whether it did."""
        now = self.clock()
        if now - self._looked_at < every_s:
            return False
        self._looked_at = now
        try:
            self._consumers = self.shelf.consumers(published)
        except OSError as error:
            # What was known stays true: consumers only come on, and for those that are not known nothing is deleted.
            if self._blind != str(error):
                self._blind = str(error)
                self.warn(f"{self.shelf.name}: how far its consumers are cannot be read: {error}")
            return False
        self._blind = None
        self._delete(published)
        return True

    def _delete(self, published: int) -> None:
        published = self.shelf.visible(published)
        target = min(deletable(self._consumers, self.limits, published), self._first + DELETED_AT_ONCE)
        if target <= self._first:
            return
        chunks = range(self._first, target)
        size = self._size(chunks)
        try:
            self.shelf.retire(target, published, self.check)
        except OSError as error:
            if self._trouble != str(error):
                self.warn(f"{self.shelf.name}: chunks that nobody needs cannot be deleted: {error}")
            self._trouble = str(error)
            # What is left of them is tried again at the next look.
            target, size = self._first, size - self._size(chunks)
        else:
            self._trouble = None
        self._first = target
        if self.stock is not None:
            self.stock = self.stock._replace(first=target, size=max(0, self.stock.size - size))

    def _size(self, chunks: range) -> int:
        return 0 if self.stock is None else sum(map(self.shelf.chunk_size, chunks))


def retry_s(held_s: float) -> float:
    """Returns in how many seconds to ask again after a chunk has been held for so many: a tenth, from 0.2 to 2."""
    return min(2.0, max(_RETRY_MIN_S, held_s / 10))


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _quoted(names: Sequence[str]) -> str:
    shown = f"consumer{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:_NAMED]))}"
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
