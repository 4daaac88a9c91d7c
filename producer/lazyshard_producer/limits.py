"""Pauses a run at its limits, and deletes chunks that its consumers no longer need.

Positions are numbers of chunks: ``published = 20`` means the half-open range [0, 20). Each consumer reports two
positions: chunks before `done` are covered by its durable checkpoints; `needs` chunks must be published before it can
continue::

    chunk   0        4           9          14            20        24
            | deleted|     on disk: first = 4, published = 20 |
            |        | deletable | kept     |             | allowed |
                                 ^ smallest done          ^         ^ smallest hint (14) + max_ahead (10)
                                            ^ smallest hint

Deletion follows the cursors alone, publishing follows the hints. A cursor does not move between two checkpoints, so a
producer that counted from the cursor could wait for a checkpoint that itself waits for data.
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
from lazyshard.stream.head import format_seconds, retry_s
from lazyshard.stream.listing import names_of, read_manifest, read_retired, retire
from lazyshard_producer.configuration.settings import Amount, Limits
from lazyshard_producer.errors import count, one_line

SILENT_S: Final = 600.0  # a consumer silent for this long may be dead; used only in messages, since clocks differ
LOOK_S: Final = 0.5  # interval between reads of the consumers' files while publishing, so tiny chunks do not cause many
HELD_LOOK_S: Final = 0.2  # the same while a chunk is held: the interval at which the run retries
DELETED_AT_ONCE: Final = 100  # chunks; 0.3 to 0.8 s with 100,000 on a busy disk, during which the run does nothing else
_NAMED: Final = 3  # consumers named in a message; the others are counted


class KeptChunks(NamedTuple):
    """Why chunks on disk are kept, and for which consumers, in order. Chunks of [0, before) may be deleted.

    last: `retain` keeps the last chunks, and no consumer needs others; unregistered: a consumer named in the settings
    has no cursor; consumer: the chunks are after the cursors of these consumers.
    """

    by: Literal["all", "last", "nobody", "unregistered", "consumer"]
    why: str  # in words
    way: str = ""  # what would end a deadlock, other than more disk space
    names: tuple[str, ...] = ()
    before: int = 0


class Stock(NamedTuple):
    """The chunks [first, stop) on disk: their total bytes, and the bytes of the largest chunk so far."""

    first: int
    stop: int
    size: int
    largest: int


class Hold(NamedTuple):
    """Why the next chunk may not be published yet, in one line, and the seconds until the next retry."""

    reason: str
    retry_s: float = 0.0
    deadlock: bool = False  # a consumer waits for chunks that fit on disk only after it has read them
    stalled: bool = False  # the wait may never end: a consumer may be dead, or no consumer can free space


def needs(consumer: Consumer) -> int:
    """Returns how many chunks must be published before a consumer can continue; 0 if unknown."""
    return 0 if consumer.reading is None else consumer.reading.needs_chunks


def hint(consumer: Consumer) -> int:
    """Returns the consumer's read position in chunks: at least its cursor, since a smaller hint is outdated."""
    return max(consumer.chunks_before, needs(consumer))


def seen_at(consumer: Consumer) -> float | None:
    """Returns when a consumer last wrote cursor or hint, in seconds since 1970 by its clock; None if it has neither."""
    return max((file.updated_at for file in (consumer.cursor, consumer.reading) if file is not None), default=None)


def ahead_in_chunks(amount: Amount, samples_per_chunk: int, chunk_bytes: int | None) -> int:
    """Returns an amount of data in chunks, rounded down; at least one for samples and bytes."""
    if amount.unit == "chunks":
        return amount.number
    size = samples_per_chunk if amount.unit == "samples" else chunk_bytes
    return max(1, amount.number // size) if size else 1


def _age(times: Iterable[float | None], now: float, words: str) -> str:
    """Returns `words` with the age of the oldest known time, or "". A time ahead of the own clock has age 0."""
    known = [time for time in times if time is not None]
    return words.format(format_seconds(max(0.0, now - min(known)))) if known else ""


def why_kept(consumers: Sequence[Consumer], limits: Limits, published: int) -> KeptChunks:
    """Returns which chunks may be deleted, never one that a consumer is not done with, and why the others are kept."""
    if limits.retain == "all":
        return KeptChunks("all", "--retain all deletes nothing", "choose --retain consumed")
    there = {one.name for one in consumers if one.cursor is not None}
    if missing := tuple(sorted(set(limits.consumers) - there)):
        why = f"nothing is deleted before {_quoted(missing)} of --consumers has written a cursor"
        return KeptChunks("unregistered", why, "remove this name from --consumers", missing)
    if not consumers:
        return KeptChunks("nobody", "nothing is deleted, because no consumer has registered yet")
    # The newest chunk always stays: its seal holds the position from which a restart continues.
    last, fewer = (limits.retain, "retain fewer chunks") if isinstance(limits.retain, int) else (1, "")
    done, most = min(one.chunks_before for one in consumers), max(0, published - last)
    if most <= done:
        stay = f"--retain keeps the last {last}" if last > 1 else "the newest always stays"
        return KeptChunks("last", f"no consumer needs the chunks on disk, but {stay}", fewer, before=most)
    names = tuple(one.name for one in consumers if one.chunks_before == done)
    # Saving alone moves no cursor: the ms-swift integration commits automatically, a custom loop has to.
    save = f"let {_quoted(names)} save checkpoints, and commit them (dataset.commit), more often"
    return KeptChunks("consumer", f"chunks from {done} on are kept for {_quoted(names)}", save, names, done)


def is_deadlock(consumers: Sequence[Consumer], kept: KeptChunks, published: int) -> bool:
    """Whether a consumer waits for chunks that only deletion can make room for, and no consumer can allow deletion.

    A waiting consumer reaches no checkpoint, so if it keeps the oldest chunk, it keeps it forever. This is only an
    estimate: other consumers may still reach a checkpoint, and a waiting consumer may already be saving one.
    """
    moving = {one.name for one in consumers if needs(one) <= published}
    stuck = kept.by not in ("consumer", "unregistered") or not moving.issuperset(kept.names)
    return stuck and len(moving) < len(consumers)


Tell = Callable[[str | None], None]
"""Called with the reason of a wait, in words, and with None when it is over."""


class Shelf:
    """The directory in which a run publishes: its chunks, and its consumers' files. `name` is for messages.

    The caller holds the writer's lock. If `remote`, chunks are uploaded from here, and `held` is called before each.
    """

    remote = False

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.directory: Final = directory
        self.name: Final = str(directory) if name is None else name
        self._arrays: bool | None = None

    def begin(self, published: int) -> None:
        """Called once the run's writer is open, with the number of published chunks."""

    def check(self) -> None:
        """Called regularly; raises errors of work in the background."""

    def held(self) -> Hold | None:
        """Returns why no chunk can be accepted now, None if one can."""
        return None

    def announce(self, published: int) -> None:
        """Called after each publish with the number of published chunks."""

    def settle(self, published: int, tell: Tell) -> bool:
        """Called once the writer is closed; waits for uploads, and returns whether all chunks are in place."""
        return True

    def has_arrays(self) -> bool:
        """Whether the chunks have side files; False while there is no manifest."""
        if self._arrays is None and (manifest := read_manifest(self.directory, None)) is not None:
            self._arrays = manifest.arrays
        return bool(self._arrays)

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return read_retired(self.directory)

    def visible(self, published: int) -> int:
        """Returns how many of the published chunks are certainly visible to readers."""
        return published

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as last seen, without those whose cursor is ahead of `published`."""
        return list_consumers(self.directory, published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Deletes the chunks of [0, chunks_before), never the newest; `check` is as in `lazyshard.stream.listing`."""
        retire(self.directory, chunks_before, published, check=check)

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Measures all chunk files, O(chunks), or estimates their size from a sample of [first, stop)."""
        if not exact:
            sizes = {chunk: self.chunk_size(chunk) for chunk in survey.sampled_chunks(first, stop)}
            size = survey.estimate_size(stop - first, sizes, stop - 1)
            return Stock(first, stop, size, max(sizes.values(), default=0))
        # One listing is far cheaper on a network filesystem than a call for each file.
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
        """Returns the bytes of a chunk with its seal; a missing file counts as 0."""
        size = 0
        for name in names_of(chunk, arrays=self.has_arrays()):
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(self.directory / name, follow_symlinks=False).st_size
        return size

    def used_bytes(self, published: int) -> int:
        """Returns about how many bytes the stream occupies with this number of published chunks."""
        names = partial(names_of, arrays=self.has_arrays())
        return survey.measure_disk(self.directory, self.first(), published, names).size

    def free_bytes(self) -> int | None:
        """Returns the free bytes on the filesystem of the chunks, None if unknown."""
        return survey.free_bytes(self.directory)


_UNREAD: Final = "the positions of the consumers cannot be read"
_UNDELETED: Final = "unneeded chunks cannot be deleted"


@dataclass(eq=False)
class Holdback:
    """Decides whether the next chunk may be published, and deletes old ones."""

    limits: Limits
    shelf: Shelf
    samples_per_chunk: int
    check: Callable[[], Path | None] = lambda: None  # called before deletion; raises if another producer took over
    warn: Callable[[str], None] = lambda text: None  # called with what does not stop the run
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    stock: Stock | None = None  # chunks on disk, if a limit needs it; estimated unless `max_disk` is set
    _consumers: tuple[Consumer, ...] = ()
    _looked_at: float = float("-inf")
    _held_since: float | None = None
    warned: bool = False  # of the present wait

    def __post_init__(self) -> None:
        """Reads the number of the oldest chunk."""
        self._first = self.shelf.first()
        self._trouble: dict[str, str] = {}  # current problems, each with its error

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns why chunk number `published_chunks` may not be published yet, None if it may.

        Warns once of a wait that may never end without the user.
        The chunk is assumed to be as large as the largest so far; a larger one exceeds a byte limit by the difference.
        """
        if (hold := self.shelf.held()) is None:
            self._take_stock(published_chunks)
            hold = self._hold(published_chunks, published_samples)
            # Without a limit on consumers, their files are read only to explain a hold.
            heeds = hold is not None or self.limits.max_ahead is not None or self.limits.retain != "all"
            if heeds and self._refresh(published_chunks, LOOK_S if hold is None else HELD_LOOK_S):
                hold = self._hold(published_chunks, published_samples)
        if hold is None:
            self._held_since, self.warned = None, False
            return None
        reason, now = one_line(hold.reason), self.clock()
        if (hold.deadlock or hold.stalled) and not self.warned:
            self.warned = True
            self.warn(reason)
        self._held_since = now if self._held_since is None else self._held_since
        return hold._replace(reason=reason, retry_s=hold.retry_s or retry_s(now - self._held_since))

    def after_publish(self, published_chunks: int) -> None:
        """Deletes the chunks that may be deleted after a publish. O(consumers + deleted chunks)."""
        self.shelf.announce(published_chunks)
        self._take_stock(published_chunks)
        if self.limits.retain != "all":
            self._refresh(published_chunks, LOOK_S)

    def fits(self, published_chunks: int, more: int) -> bool:
        """Returns whether so many more chunks may be published with one that `before_chunk` has let pass."""
        return self._hold(published_chunks + more, 0, more) is None

    def _hold(self, published: int, samples: int, more: int = 0) -> Hold | None:
        limits, stock = self.limits, self.stock
        if limits.max_ahead is not None:
            mean = stock.size // (stock.stop - stock.first) if stock is not None and stock.stop > stock.first else None
            ahead = ahead_in_chunks(limits.max_ahead, self.samples_per_chunk, mean)
            # `ahead` beyond the slowest hint, but at least as many chunks as any consumer needs.
            slowest, most = min(map(hint, self._consumers), default=0), max(map(needs, self._consumers), default=0)
            if published >= max(slowest + ahead, most):
                return self._hold_ahead(limits.max_ahead, published, samples, slowest)
        if stock is None:
            return None
        wanted = (1 + more) * stock.largest
        if limits.max_disk is not None and stock.size + wanted > limits.max_disk:
            return self._hold_for_room(stock, published, limits.max_disk, None)
        free = None if limits.min_free_disk is None else self.shelf.free_bytes()
        if limits.min_free_disk is not None and free is not None and free - wanted < limits.min_free_disk:
            return self._hold_for_room(stock, published, limits.min_free_disk, free)
        return None

    def _hold_ahead(self, amount: Amount, published: int, samples: int, slowest: int) -> Hold:
        now, behind = self.wall_clock(), [one for one in self._consumers if hint(one) == slowest]
        text = f"--max-ahead {amount}: {count(published, 'chunk')} with {count(samples, 'sample')} published; "
        if not behind:
            return Hold(f"{text}no consumer has registered yet")
        heard = _age(map(seen_at, behind), now, ", last seen {} ago")
        text += f"{_quoted([one.name for one in behind])} {_are(len(behind))} at chunk {slowest}{heard}"
        dead = self._dead(behind, now)
        return Hold(text + dead, stalled=bool(dead))

    def _hold_for_room(self, stock: Stock, published: int, limit: int, free: int | None) -> Hold:
        """Returns the hold at `max_disk`, or at `min_free_disk` if the `free` bytes are given."""
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
            way = "free {} bytes ({}) or more"
        text += f", the next chunk may take {output.size(chunk)}"
        if waiting:
            names, wait = _quoted([one.name for one in waiting]), "waits" if len(waiting) == 1 else "wait"
            text += f"; {names} {wait} for {count(wanted, 'chunk')}, {published:,} {_are(published)} published"
        deletes, dead = kept.before > self._first, self._dead(keepers, now)
        if stuck := deletes and _UNDELETED in self._trouble:
            text += f"; {_UNDELETED}: {self._trouble[_UNDELETED]}"
        else:
            written = (keeper.cursor.updated_at for keeper in keepers if keeper.cursor is not None)
            age = _age(written, now, " (cursor {} old)") or " (no cursor)"
            text += f"; {kept.why}{age if keepers else ''}"
        if deadlock := not deletes and is_deadlock(consumers, kept, published):
            text = f"deadlock: {text}; {way.format(room, output.size(room))}{kept.way and f' or {kept.way}'}"
        return Hold(text + dead, deadlock=deadlock, stalled=stuck or kept.by in ("all", "last") or bool(dead))

    def _dead(self, consumers: Sequence[Consumer], now: float) -> str:
        """Returns advice to forget the consumer that is most likely dead; "" if all seem to be alive."""
        # Silent for long, or with invalid files.
        dead = [one for one in consumers if one.problem or now - (seen_at(one) or -math.inf) >= SILENT_S]
        if not dead:
            return ""
        first = min(dead, key=lambda one: seen_at(one) or 0.0)
        problem = f"; {first.problem}" if first.problem else ""
        command = f"lazyshard forget {shlex.quote(self.shelf.name)} {shlex.quote(first.name)}"
        return f"{problem}; if {first.name!r} will not return, run `{command}`"

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
        """Reads the consumers' files and deletes old chunks, at most every `every_s`; returns whether it did."""
        now = self.clock()
        if now - self._looked_at < every_s:
            return False
        self._looked_at = now
        # On an error the known positions stay valid: consumers only advance. Nothing is deleted meanwhile.
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
                # The remaining chunks are retried the next time.
                target, size = self._first, size - sum(map(self.shelf.chunk_size, chunks))
            self._first = target
            if self.stock is not None:
                self.stock = self.stock._replace(first=target, size=max(0, self.stock.size - size))
        return True

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Warns of an OSError instead of raising it, once while it stays the same."""
        before = self._trouble.pop(what, None)
        try:
            yield
        except OSError as error:
            self._trouble[what] = str(error)
            if before != str(error):
                self.warn(f"{self.shelf.name}: {what}: {error}")


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _quoted(names: Sequence[str]) -> str:
    shown = f"consumer{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:_NAMED]))}"
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
