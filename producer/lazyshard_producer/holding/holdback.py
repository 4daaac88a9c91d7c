"""Holds a run back at its limits, and deletes what its consumers are done with: the decisions of `limits`, carried out.

Looks at the consumers' files at most twice a second while chunks come, and five times a second while one is held. What
is known of them may be that old: since then they have only come further.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding.limits import (
    ByteLimit,
    Claim,
    KeptChunks,
    Situation,
    ahead_in_chunks,
    ahead_reason,
    deletable,
    is_deadlock,
    may_be_dead,
    needed,
    publishable,
    read_claims,
    room_reason,
    slowest,
    why_kept,
)
from lazyshard_producer.holding.shelf import Shelf, Stock

LOOK_S: Final = 0.5
"""How old the consumers' files may get while chunks come: a producer of tiny chunks must not live in that folder."""

HELD_LOOK_S: Final = 0.2
"""The same while a chunk is held: as often as it is asked for again."""

DELETED_AT_ONCE: Final = 100
"""Chunks that are deleted in one go: nothing else happens meanwhile. Among 100,000 of them on a busy disk that was
measured to take 0.3 to 0.8 s; twice a second is far more than is ever published."""

_RETRY_MIN_S: Final = 0.2
_RETRY_MAX_S: Final = 2.0

_log = logging.getLogger("lazyshard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why the next chunk may not be published yet.

    Attributes:
        kind: which limit: ahead, `max_ahead`; disk, `max_disk`; free, `min_free_disk`; spool, `max_spool`.
        reason: all of it in one line.
        retry_s: in how many seconds to ask again.
        deadlock: a consumer waits for more chunks, room for them can be made only once it has had them, and so it
            stays unless somebody does something. Never a matter of time.
        stalled: it may last for ever, whether or not a consumer waits: one that it waits for may be dead, or nothing
            that a consumer can do makes room.
        waits_for: the consumers that it waits for: the slowest ones, those that keep the oldest chunk, or those that
            have not registered.
        waiting: the consumers that wait for chunks which are not published.
        needed: how many chunks must be published for them, None where none waits.
        suggested: the smallest `max_disk` that lets them have what they wait for, where that is the limit.
    """

    kind: Literal["ahead", "disk", "free", "spool"]
    reason: str
    retry_s: float
    deadlock: bool = False
    stalled: bool = False
    waits_for: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    needed: int | None = None
    suggested: int | None = None


class Gate(Protocol):
    """Says whether the next chunk may be published."""

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns None if the chunk after the published ones may be published, or why not."""

    def after_publish(self, published_chunks: int) -> None:
        """Takes notice that so many chunks are published, and deletes what may go."""


class Holdback:
    """Says whether the next chunk may be published, and deletes old ones.

    Args:
        shelf: where the stream's chunks lie; the stream is there, and its writer's lock is held.
        samples_per_chunk: rows in a chunk.
        check: is called before anything is deleted; raises if the stream is another producer's now.
        warn: is told of what goes wrong without stopping the run.
        wall_clock: returns seconds since 1970; only for what is said of ages.

    Raises:
        OSError, FileInvalid: the stream's files cannot be read.
    """

    def __init__(
        self,
        limits: Limits,
        shelf: Shelf,
        samples_per_chunk: int,
        *,
        check: Callable[[], Path | None] = lambda: None,
        warn: Callable[[str], None] = _log.warning,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._shelf = shelf
        self._samples_per_chunk = samples_per_chunk
        self._check = check
        self._warn = warn
        self._clock = clock
        self._wall_clock = wall_clock
        self._limits = limits
        self._claims: tuple[Claim, ...] = ()
        self._looked_at = float("-inf")
        self._held_since: float | None = None
        self._first = shelf.first()
        self._stock: Stock | None = None
        self._trouble: str | None = None
        self._blind: str | None = None

    @property
    def stock(self) -> Stock | None:
        """What is on disk, as far as a limit needs it; None where none does. Estimated without `max_disk`."""
        return self._stock

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns why chunk number `published_chunks` may not be published yet, None if it may.

        To be asked before the chunk is begun. It is counted as large as the largest one so far: one that is larger than
        all before it can go beyond a limit of bytes, by the difference.

        Raises:
            OSError: the filesystem does not answer. That the consumers cannot be looked at, or chunks not be deleted,
                is only told to `warn`.
            ProducerFenced: as `check` raises it.
        """
        self._take_stock(published_chunks)
        hold = self._hold(published_chunks, published_samples)
        every_s = LOOK_S if hold is None else HELD_LOOK_S
        # Without such a limit nobody asks who the consumers are until there is something to say of them.
        heeds = hold is not None or self._limits.max_ahead is not None or self._limits.retain != "all"
        if heeds and self._refresh(published_chunks, every_s):
            hold = self._hold(published_chunks, published_samples)
        if hold is None:
            self._held_since = None
        return hold

    def after_publish(self, published_chunks: int) -> None:
        """Deletes what may be deleted, now that so many chunks are published. O(consumers + deleted chunks).

        Raises:
            OSError, ProducerFenced: as `before_chunk`.
        """
        self._take_stock(published_chunks)
        if self._limits.retain != "all":
            self._refresh(published_chunks, LOOK_S)

    def _hold(self, published: int, samples: int) -> Hold | None:
        limits, stock = self._limits, self._stock
        if limits.max_ahead is not None:
            mean = None if stock is None else stock.mean
            allowed = publishable(self._claims, ahead_in_chunks(limits.max_ahead, self._samples_per_chunk, mean))
            if published >= allowed:
                return _hold_ahead(self._situation(published, samples))
        if stock is None:
            return None
        chunk = stock.largest
        if limits.max_disk is not None and stock.size + chunk > limits.max_disk:
            return self._no_room(published, samples, stock, ByteLimit(limit=limits.max_disk, chunk=chunk))
        if limits.min_free_disk is not None:
            free = self._shelf.free_bytes()
            if free is not None and free - chunk < limits.min_free_disk:
                return self._no_room(
                    published, samples, stock, ByteLimit(limit=limits.min_free_disk, chunk=chunk, free=free)
                )
        return None

    def _no_room(self, published: int, samples: int, stock: Stock, room: ByteLimit) -> Hold:
        kept = why_kept(self._claims, self._limits, published)
        more = deletable(self._claims, self._limits, published) > self._first
        return _hold_for_room(
            self._situation(published, samples),
            kept,
            stock,
            room,
            deadlock=not more and is_deadlock(self._claims, kept, published),
            trouble=self._trouble if more else None,
        )

    def _situation(self, published: int, samples: int) -> Situation:
        now = self._clock()
        if self._held_since is None:
            self._held_since = now
        return Situation(
            out=self._shelf.name,
            claims=self._claims,
            limits=self._limits,
            published=published,
            samples=samples,
            held_s=now - self._held_since,
            now=self._wall_clock(),
        )

    def _take_stock(self, published: int) -> None:
        """Brings what is known of the disk up to date, as far as a limit asks for it."""
        limits, stock = self._limits, self._stock
        by_bytes = limits.max_ahead is not None and limits.max_ahead.unit == "bytes"
        if limits.max_disk is None and limits.min_free_disk is None and not by_bytes:
            return
        if stock is None:
            self._stock = self._shelf.stock(self._first, published, exact=limits.max_disk is not None)
            return
        for chunk in range(stock.stop, published):
            stock = stock.add(self._shelf.chunk_size(chunk))
        self._stock = stock

    def _refresh(self, published: int, every_s: float) -> bool:
        """Looks at the consumers and deletes what may go, unless that was done a moment ago; returns whether it did."""
        now = self._clock()
        if now - self._looked_at < every_s:
            return False
        self._looked_at = now
        try:
            self._claims = read_claims(self._shelf.consumers(published))
        except OSError as error:
            # What was known stays true: consumers only come on, and for those that are not known nothing is deleted.
            if self._blind != str(error):
                self._blind = str(error)
                self._warn(f"{self._shelf.name}: how far its consumers are cannot be read: {error}")
            return False
        self._blind = None
        self._delete(published)
        return True

    def _delete(self, published: int) -> None:
        """Deletes what may go, or a first part of it."""
        published = self._shelf.visible(published)
        target = min(deletable(self._claims, self._limits, published), self._first + DELETED_AT_ONCE)
        if target <= self._first:
            return
        chunks = range(self._first, target)
        size = self._size(chunks)
        try:
            self._shelf.retire(target, published, self._check)
        except OSError as error:
            if self._trouble != str(error):
                self._warn(f"{self._shelf.name}: chunks that nobody needs cannot be deleted: {error}")
            self._trouble = str(error)
            # What is left of them is tried again at the next look.
            target, size = self._first, size - self._size(chunks)
        else:
            self._trouble = None
        self._first = target
        if self._stock is not None:
            self._stock = self._stock.delete(target, size)

    def _size(self, chunks: range) -> int:
        """Returns the bytes of chunks, where anybody wants to know."""
        return 0 if self._stock is None else sum(self._shelf.chunk_size(chunk) for chunk in chunks)


def retry_s(held_s: float) -> float:
    """Returns in how many seconds to ask again after a chunk has been held for so many: a tenth, from 0.2 to 2."""
    return min(_RETRY_MAX_S, max(_RETRY_MIN_S, held_s / 10))


def _hold_ahead(situation: Situation) -> Hold:
    """Returns the hold for a run that is far enough ahead of its consumers."""
    behind = slowest(situation.claims)
    return Hold(
        kind="ahead",
        reason=ahead_reason(situation),
        retry_s=retry_s(situation.held_s),
        stalled=any(may_be_dead(claim, situation.now) for claim in behind),
        waits_for=tuple(claim.name for claim in behind),
        needed=needed(situation.claims) or None,
    )


def _hold_for_room(
    situation: Situation, kept: KeptChunks, stock: Stock, room: ByteLimit, *, deadlock: bool, trouble: str | None
) -> Hold:
    """Returns the hold for a run that has no room for another chunk.

    Args:
        situation: what is known.
        kept: why no more can be deleted.
        stock: what is on disk.
        room: the limit, and what there is.
        deadlock: whether it is one.
        trouble: why what may be deleted is still there; None if nothing is, or it is being deleted.
    """
    waiting = tuple(claim for claim in situation.claims if claim.waits(situation.published))
    keepers = tuple(claim for claim in situation.claims if kept.by == "consumer" and claim.name in kept.names)
    dead = any(may_be_dead(claim, situation.now) for claim in keepers)
    suggested = (needed(waiting) - stock.first + 1) * room.chunk if waiting and room.free is None else None
    return Hold(
        kind="disk" if room.free is None else "free",
        reason=room_reason(situation, kept, stock, room, deadlock=deadlock, trouble=trouble),
        retry_s=retry_s(situation.held_s),
        deadlock=deadlock,
        stalled=dead or trouble is not None or kept.by in ("all", "last"),
        waits_for=kept.names,
        waiting=tuple(claim.name for claim in waiting),
        needed=needed(waiting) or None,
        suggested=suggested,
    )
