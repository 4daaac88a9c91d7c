"""A hold: why the next chunk may not be published yet, as numbers and as one line for people. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lazyshard_producer.holding.disk import Stock
from lazyshard_producer.holding.hold_reasons import Room, Situation, ahead_reason, room_reason
from lazyshard_producer.holding.limits import Kept, may_be_dead, needed, silent_for, slowest, uncommitted_for

_RETRY_MIN_S: Final = 0.2
_RETRY_MAX_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why the next chunk may not be published yet.

    What has no meaning for its kind, or is not known, is None.

    Attributes:
        kind: which limit holds it: ahead, `max_ahead`; disk, `max_disk`; free, `min_free_disk`.
        reason: all of it in one line.
        retry_s: in how many seconds to ask again.
        deadlock: a consumer waits for more chunks, room for them can be made only once it has had them, and so it
            stays unless somebody does something. Never a matter of time.
        stalled: it may last for ever, whether or not a consumer waits: one that it waits for may be dead, or nothing
            that a consumer can do makes room.
        held_s: for how long this chunk has been held.
        published: published chunks.
        waits_for: the consumers that it waits for: the slowest ones, those that keep the oldest chunk, or those that
            have not registered.
        silent_s: how long ago the one of them that has been silent for longest was heard of.
        committed_s: how long ago the one of them whose cursor is the oldest wrote it.
        waiting: the consumers that wait for chunks which are not published.
        needed: how many chunks must be published for them.
        allowed: how many may be published.
        limit: bytes that may be used, or must stay free.
        used: bytes of the chunks on disk.
        free: bytes that are free.
        chunk: bytes that the next chunk is counted with.
        first: the oldest chunk on disk.
        on_disk: chunks on disk.
        suggested: the smallest `max_disk` that lets the waiting consumers have what they wait for.
    """

    kind: Literal["ahead", "disk", "free"]
    reason: str
    retry_s: float
    deadlock: bool = False
    stalled: bool = False
    held_s: float
    published: int
    waits_for: tuple[str, ...] = ()
    silent_s: float | None = None
    committed_s: float | None = None
    waiting: tuple[str, ...] = ()
    needed: int | None = None
    allowed: int | None = None
    limit: int | None = None
    used: int | None = None
    free: int | None = None
    chunk: int | None = None
    first: int | None = None
    on_disk: int | None = None
    suggested: int | None = None


def retry_s(held_s: float) -> float:
    """Returns in how many seconds to ask again after a chunk has been held for so many: a tenth, from 0.2 to 2."""
    return min(_RETRY_MAX_S, max(_RETRY_MIN_S, held_s / 10))


def hold_ahead(situation: Situation, allowed: int) -> Hold:
    """Returns the hold for a run that is far enough ahead of its consumers, with how many chunks may be published."""
    behind = slowest(situation.claims)
    return Hold(
        kind="ahead",
        reason=ahead_reason(situation),
        retry_s=retry_s(situation.held_s),
        stalled=any(may_be_dead(claim, situation.now) for claim in behind),
        held_s=situation.held_s,
        published=situation.published,
        waits_for=tuple(claim.name for claim in behind),
        silent_s=silent_for(behind, situation.now),
        committed_s=uncommitted_for(behind, situation.now),
        needed=needed(situation.claims) or None,
        allowed=allowed,
    )


def hold_for_room(
    situation: Situation, kept: Kept, stock: Stock, room: Room, *, deadlock: bool, trouble: str | None
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
        held_s=situation.held_s,
        published=situation.published,
        waits_for=kept.names,
        silent_s=silent_for(keepers, situation.now),
        committed_s=uncommitted_for(keepers, situation.now),
        waiting=tuple(claim.name for claim in waiting),
        needed=needed(waiting) or None,
        limit=room.limit,
        used=stock.size,
        free=room.free,
        chunk=room.chunk,
        first=stock.first,
        on_disk=stock.chunks,
        suggested=suggested,
    )
