"""Holds a run back at its limits, and deletes what its consumers are done with.

Chunks are counted, so ``published = 20`` stands for those of the half-open range [0, 20). Each consumer makes two
claims: what it is `done` with is in its durable checkpoints; what it `needs` must be published before it can continue::

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
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from lazyshard.cli import output
from lazyshard.format.records import parse_arrays_name, parse_chunk_name
from lazyshard.inspection import survey
from lazyshard.stream.cursor import Consumer, list_consumers
from lazyshard.stream.head import format_seconds
from lazyshard.stream.listing import read_manifest, read_retired, retire
from lazyshard_producer.configuration.settings import Amount, Limits
from lazyshard_producer.errors import count, one_line

SILENT_S: Final = 600.0  # not heard of for so long it may be dead; only what is said depends on it: clocks differ
LOOK_S: Final = 0.5  # how old the consumers' files may get while chunks come: tiny ones must not cost looks
HELD_LOOK_S: Final = 0.2  # the same while a chunk is held: as often as it is asked for again
DELETED_AT_ONCE: Final = 100  # chunks; of 100,000 on a busy disk that took 0.3 to 0.8 s, in which nothing else happens
_RETRY_MIN_S: Final = 0.2
_NAMED: Final = 3  # so many consumers are named, the others counted


class KeptChunks(NamedTuple):
    """Why chunks on disk may not be deleted, the consumers that are meant, in order; those of [0, before) may be.

    last: `retain` keeps the last ones, and no consumer needs others; unregistered: one that was named has no cursor;
    consumer: it is done with no more.
    """

    by: Literal["all", "last", "nobody", "unregistered", "consumer"]
    why: str  # in words
    way: str = ""  # what would end a deadlock, beside more room
    names: tuple[str, ...] = ()
    before: int = 0


class Stock(NamedTuple):
    """The chunks that are on disk, those of [first, stop): their bytes, and those of the largest one so far."""

    first: int
    stop: int
    size: int
    largest: int


class Hold(NamedTuple):
    """Why the next chunk may not be published yet, in one line, and in how many seconds to ask again."""

    reason: str
    retry_s: float = 0.0
    deadlock: bool = False  # a consumer waits for chunks for which there is room only once it has had them
    stalled: bool = False  # it may last for ever: a consumer that it waits for may be dead, or none can make room


def needs(consumer: Consumer) -> int:
    """Returns how many chunks must be published before a consumer can continue; 0 where it does not say."""
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


def _age(times: Iterable[float | None], now: float, words: str) -> str:
    """Returns the age of the oldest of the times that are known, in these words, 0 of one ahead of our clock; or ""."""
    known = [time for time in times if time is not None]
    return words.format(format_seconds(max(0.0, now - min(known)))) if known else ""


def why_kept(consumers: Sequence[Consumer], limits: Limits, published: int) -> KeptChunks:
    """Returns which chunks may be deleted, never one that a consumer is not done with, and what has to change first."""
    if limits.retain == "all":
        return KeptChunks("all", "--retain all deletes nothing", "choose --retain consumed")
    there = {one.name for one in consumers if one.cursor is not None}
    if missing := tuple(sorted(set(limits.consumers) - there)):
        why = f"nothing is deleted before {_quoted(missing)} of --consumers wrote a cursor"
        return KeptChunks("unregistered", why, "take that out of --consumers", missing)
    if not consumers:
        return KeptChunks("nobody", "nothing is deleted, as no consumer has registered yet")
    # The newest one stays in any case: its seal says where a restart continues.
    last, fewer = (limits.retain, "retain fewer chunks") if isinstance(limits.retain, int) else (1, "")
    done, most = min(one.chunks_before for one in consumers), max(0, published - last)
    if most <= done:
        stay = f"--retain keeps the last {last}" if last > 1 else "the newest always stays"
        return KeptChunks("last", f"no consumer needs what is on disk any more, but {stay}", fewer, before=most)
    names = tuple(one.name for one in consumers if one.chunks_before == done)
    # Saving alone moves no cursor: ms-swift commits by itself, a loop of one's own has to.
    save = f"let {_quoted(names)} save checkpoints, and commit them (dataset.commit), more often"
    return KeptChunks("consumer", f"chunk {done} and those after it are kept for {_quoted(names)}", save, names, done)


def is_deadlock(consumers: Sequence[Consumer], kept: KeptChunks, published: int) -> bool:
    """Whether a consumer waits for chunks that only deleting can make room for, and nobody can bring that about.

    A consumer that waits reaches no checkpoint: if it keeps the oldest chunk, it keeps it for ever. Others may still
    reach theirs, and one that waits may have one under way: then it turns out to be none.
    """
    moving = {one.name for one in consumers if needs(one) <= published}
    stuck = kept.by not in ("consumer", "unregistered") or not moving.issuperset(kept.names)
    return stuck and len(moving) < len(consumers)


Tell = Callable[[str | None], None]
"""Is told what is waited for, in words; None: for nothing any more."""


class Shelf:
    """The directory in which a run publishes: its chunks, and its consumers' files; `name` is for people.

    The writer's lock is held. `remote`: the chunks continue from there, so that it is to be asked before each of them.
    """

    remote = False

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.directory: Final = directory
        self.name: Final = str(directory) if name is None else name
        self._arrays: bool | None = None

    def begin(self, published: int) -> None:
        """The run's writer is open, with so many chunks."""

    def check(self) -> None:
        """Is called now and then; raises what has gone wrong behind the run's back."""

    def held(self) -> Hold | None:
        """Returns why it takes no chunk for now, None if it does."""
        return None

    def announce(self, published: int) -> None:
        """Takes notice that so many chunks are published."""

    def settle(self, published: int, tell: Tell) -> bool:
        """Returns whether all is where it belongs, the writer being closed."""
        return True

    def has_arrays(self) -> bool:
        """Whether the chunks have side files; False as long as there is no manifest."""
        if self._arrays is None and (manifest := read_manifest(self.directory, None)) is not None:
            self._arrays = manifest.arrays
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
        """Deletes the chunks of [0, chunks_before), never the newest; `check` is as in `lazyshard.stream.listing`."""
        retire(self.directory, chunks_before, published, check=check)

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Looks at all files of chunks, O(chunks), or estimates from some of [first, stop)."""
        if not exact:
            sizes = {chunk: self.chunk_size(chunk) for chunk in survey.sampled_chunks(first, stop)}
            size = survey.estimate_size(stop - first, sizes, stop - 1)
            return Stock(first, stop, size, max(sizes.values(), default=0))
        # Listed, which on a network filesystem costs far less; of all chunks no sizes are kept.
        size, largest = 0, {"data": 0, "seal": 0, "side": 0}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                parsed = parse_chunk_name(entry.name)
                if parsed is not None or parse_arrays_name(entry.name) is not None:
                    kind = "side" if parsed is None else "seal" if parsed[1] else "data"
                    found = entry.stat(follow_symlinks=False).st_size
                    size, largest[kind] = size + found, max(largest[kind], found)
        return Stock(first, stop, size, sum(largest.values()))

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk with its seal; a file that is not there has none."""
        size = 0
        for name in survey.chunk_files(chunk, arrays=self.has_arrays()):
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(self.directory / name, follow_symlinks=False).st_size
        return size

    def used_bytes(self, published: int) -> int:
        """Returns about how many bytes the stream takes, so many chunks of it being published."""
        names = partial(survey.chunk_files, arrays=self.has_arrays())
        return survey.measure_disk(self.directory, self.first(), published, names).size

    def free_bytes(self) -> int | None:
        """Returns how many bytes are free beside the chunks, None where nobody can tell."""
        return survey.free_bytes(self.directory)


_UNREAD: Final = "how far its consumers are cannot be read"
_UNDELETED: Final = "chunks that nobody needs cannot be deleted"


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

    def __post_init__(self) -> None:
        """Looks where the chunks begin."""
        self._first = self.shelf.first()
        self._trouble: dict[str, str] = {}  # what goes wrong now, and why

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns why chunk number `published_chunks` may not be published yet, None if it may.

        It is counted as large as the largest one so far: a larger one goes beyond a limit of bytes by the difference.
        """
        if (hold := self.shelf.held()) is not None:
            return hold
        self._take_stock(published_chunks)
        hold = self._hold(published_chunks, published_samples)
        # Without such a limit nobody asks who the consumers are until there is something to say of them.
        heeds = hold is not None or self.limits.max_ahead is not None or self.limits.retain != "all"
        if heeds and self._refresh(published_chunks, LOOK_S if hold is None else HELD_LOOK_S):
            hold = self._hold(published_chunks, published_samples)
        if hold is None:
            self._held_since = None
            return None
        now = self.clock()
        self._held_since = now if self._held_since is None else self._held_since
        return hold._replace(reason=one_line(hold.reason), retry_s=retry_s(now - self._held_since))

    def after_publish(self, published_chunks: int) -> None:
        """Deletes what may be deleted, now that so many chunks are published. O(consumers + deleted chunks)."""
        self.shelf.announce(published_chunks)
        self._take_stock(published_chunks)
        if self.limits.retain != "all":
            self._refresh(published_chunks, LOOK_S)

    def _hold(self, published: int, samples: int) -> Hold | None:
        limits, stock = self.limits, self.stock
        if limits.max_ahead is not None:
            mean = stock.size // (stock.stop - stock.first) if stock is not None and stock.stop > stock.first else None
            ahead = ahead_in_chunks(limits.max_ahead, self.samples_per_chunk, mean)
            # So much more than the slowest hint, but never less than what some consumer needs.
            slowest, most = min(map(hint, self._consumers), default=0), max(map(needs, self._consumers), default=0)
            if published >= max(slowest + ahead, most):
                return self._hold_ahead(limits.max_ahead, published, samples, slowest)
        if stock is None:
            return None
        if limits.max_disk is not None and stock.size + stock.largest > limits.max_disk:
            return self._hold_for_room(stock, published, limits.max_disk, None)
        free = None if limits.min_free_disk is None else self.shelf.free_bytes()
        if limits.min_free_disk is not None and free is not None and free - stock.largest < limits.min_free_disk:
            return self._hold_for_room(stock, published, limits.min_free_disk, free)
        return None

    def _hold_ahead(self, amount: Amount, published: int, samples: int, slowest: int) -> Hold:
        now, behind = self.wall_clock(), [one for one in self._consumers if hint(one) == slowest]
        text = f"--max-ahead {amount}: {count(published, 'chunk')} with {count(samples, 'sample')} published; "
        if not behind:
            return Hold(f"{text}no consumer has registered yet")
        heard = _age(map(seen_at, behind), now, ", heard of {} ago")
        text += f"{_quoted([one.name for one in behind])} {_are(len(behind))} at chunk {slowest}{heard}"
        dead = self._dead(behind, now)
        return Hold(text + dead, stalled=bool(dead))

    def _hold_for_room(self, stock: Stock, published: int, limit: int, free: int | None) -> Hold:
        """Returns the hold at `max_disk`, or at `min_free_disk` where `free` says what is free."""
        now, consumers, chunk = self.wall_clock(), self._consumers, stock.largest
        kept = why_kept(consumers, self.limits, published)
        keepers = [one for one in consumers if kept.by == "consumer" and one.name in kept.names]
        waiting = [one for one in consumers if needs(one) > published]
        wanted = max(map(needs, waiting), default=0)
        if free is None:
            room, chunks = (wanted - stock.first + 1) * chunk, stock.stop - stock.first
            take = f"{count(chunks, 'chunk')} on disk {'takes' if chunks == 1 else 'take'} {output.size(stock.size)}"
            text, way = f"--max-disk {output.size(limit)}: {take}", "raise --max-disk to {} bytes ({}) or more"
        else:
            room = (wanted - published) * chunk + limit - free
            text = f"--min-free-disk {output.size(limit)}: {output.size(free)} {_are(free)} free"
            way = "make {} bytes ({}) of room or more"
        text += f", the next chunk may take {output.size(chunk)}"
        if waiting:
            names, wait = _quoted([one.name for one in waiting]), "waits" if len(waiting) == 1 else "wait"
            text += f"; {names} {wait} for {count(wanted, 'chunk')}, {published:,} {_are(published)} published"
        deletes, dead = kept.before > self._first, self._dead(keepers, now)
        if stuck := deletes and _UNDELETED in self._trouble:
            text += f"; {_UNDELETED}: {self._trouble[_UNDELETED]}"
        else:
            written = (keeper.cursor.updated_at for keeper in keepers if keeper.cursor is not None)
            age = _age(written, now, ", whose cursor is {} old") or ", without a cursor"
            text += f"; {kept.why}{age if keepers else ''}"
        if deadlock := not deletes and is_deadlock(consumers, kept, published):
            text = f"deadlock: {text}; {way.format(room, output.size(room))}{kept.way and f' or {kept.way}'}"
        return Hold(text + dead, deadlock=deadlock, stalled=stuck or kept.by in ("all", "last") or bool(dead))

    def _dead(self, consumers: Sequence[Consumer], now: float) -> str:
        """Returns how to forget the one of these consumers that is the most likely to be dead; "" if none may be."""
        # Silent for long, or with files that cannot be used.
        dead = [one for one in consumers if one.problem or now - (seen_at(one) or -math.inf) >= SILENT_S]
        if not dead:
            return ""
        first = min(dead, key=lambda one: seen_at(one) or 0.0)
        problem = f"; {first.problem}" if first.problem else ""
        command = f"lazyshard forget {shlex.quote(self.shelf.name)} {shlex.quote(first.name)}"
        return f"{problem}; if {first.name!r} will not come back, run `{command}`"

    def _take_stock(self, published: int) -> None:
        limits, stock = self.limits, self.stock
        if limits.max_disk is limits.min_free_disk is None and getattr(limits.max_ahead, "unit", "") != "bytes":
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
        # Where they cannot be read, what was known stays true: consumers only come on, and for those that are not known
        # nothing is deleted.
        with self._told(_UNREAD):
            self._consumers = self.shelf.consumers(published)
        if _UNREAD in self._trouble:
            return False
        published = self.shelf.visible(published)
        kept = why_kept(self._consumers, self.limits, published)
        target = min(kept.before, self._first + DELETED_AT_ONCE)
        if target > self._first:
            chunks = range(self._first, target) if self.stock is not None else ()
            size = sum(map(self.shelf.chunk_size, chunks))
            with self._told(_UNDELETED):
                self.shelf.retire(target, published, self.check)
            if _UNDELETED in self._trouble:
                # What is left of them is tried again at the next look.
                target, size = self._first, size - sum(map(self.shelf.chunk_size, chunks))
            self._first = target
            if self.stock is not None:
                self.stock = self.stock._replace(first=target, size=max(0, self.stock.size - size))
        return True

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Warns of an OSError instead of raising it, once as long as it stays the same."""
        before = self._trouble.pop(what, None)
        try:
            yield
        except OSError as error:
            self._trouble[what] = str(error)
            if before != str(error):
                self.warn(f"{self.shelf.name}: {what}: {error}")


def retry_s(held_s: float) -> float:
    """Returns in how many seconds to ask again after a chunk has been held for so many: a tenth, from 0.2 to 2."""
    return min(2.0, max(_RETRY_MIN_S, held_s / 10))


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _quoted(names: Sequence[str]) -> str:
    shown = f"consumer{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:_NAMED]))}"
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
