"""One look at a stream, for people who ask how it is: everything that its files tell, and what is wrong with them.

Nothing is written, no lock is taken, and no row is read. With a readable `head.json` the cost does not grow with the
stream, but for a listing of its names, about 1 us a file.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from lazyshard.format.mixed import MixedSource
from lazyshard.format.names import QUARANTINE
from lazyshard.inspection.census import Census, retired_chunks, take_census, tolerate
from lazyshard.inspection.disk_use import DiskUse, Lines, LostChunks, count_lines, free_bytes, measure_disk
from lazyshard.inspection.mixture import read_mixture
from lazyshard.store.files import modified_at
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.reader import GRACE_S


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at a stream has found.

    Attributes:
        directory: the stream's directory.
        looked_at: seconds since 1970, by this machine's clock.
        census: what is published, and what the producer tells of itself.
        gone: whether the producer's process is not to be seen on this machine; None where it runs on another one.
        consumers: by name.
        unread_since: by consumer, when the first chunk that it is not done with was published, in seconds since 1970;
            none for those that are done with all, and where that chunk is not there.
        disk: what the stream takes.
        free: bytes that its filesystem has left, None where unknown.
        quarantine: rows that the producer has refused, None where there is no such file.
        problems: what is wrong with the files, a sentence each.
        mixture: the sources that the producer mixes by weights, up to the newest chunk; none where it does not.
        ended: whether the producer's process is known to have ended, not merely not to be seen.
    """

    directory: Path
    looked_at: float
    census: Census
    gone: bool | None
    consumers: tuple[Consumer, ...]
    unread_since: dict[str, float]
    disk: DiskUse
    free: int | None
    quarantine: Lines | None
    problems: tuple[str, ...]
    mixture: tuple[MixedSource, ...] = ()
    ended: bool = False


def take_survey(directory: Path, now: float, lost: LostChunks | None = None) -> Survey:
    """Looks at a stream once.

    Args:
        directory: the stream's directory.
        now: seconds since 1970.
        lost: that of the looks before, where there are any.

    Raises:
        StreamMissing, StreamUnsealed, StreamInvalid, VersionUnsupported, OSError: as `take_census`.
    """
    problems: list[str] = []
    census = take_census(directory, problems)
    disk = measure_disk(directory, census.retired, census.chunks, census.names, lost or LostChunks())
    problems += _lost(disk, directory, census, now)
    consumers = tolerate(lambda: list_consumers(directory, census.chunks), problems) or ()
    head = census.head
    return Survey(
        directory=directory,
        looked_at=now,
        census=census,
        gone=None if head is None else process_gone(head),
        ended=head is not None and process_ended(head),
        consumers=consumers,
        unread_since=_unread_since(directory, consumers, census),
        disk=disk,
        free=free_bytes(directory),
        quarantine=count_lines(directory / QUARANTINE),
        # A manifest that is damaged is met twice.
        problems=tuple(dict.fromkeys(problems)),
        mixture=read_mixture(directory, census),
    )


def _lost(disk: DiskUse, directory: Path, census: Census, now: float) -> list[str]:
    """Tells of chunks that are not there, unless they were retired meanwhile or are too new to be seen everywhere."""
    if not disk.missing:
        return []
    retired = tolerate(lambda: retired_chunks(directory, census.manifest), []) or 0
    missing = [chunk for chunk in disk.missing if chunk >= retired]
    newest = census.chunks - 1
    if census.head is not None and now - census.head.updated_at < GRACE_S:
        while missing and missing[-1] == newest:
            missing.pop()
            newest -= 1
    if not missing:
        return []
    others = (
        f", nor are those of {len(missing) - 1} {'other' if len(missing) == 2 else 'others'}" if missing[1:] else ""
    )
    command = f"lazyshard verify {shlex.quote(str(directory))}"
    return [f"chunk {missing[0]} is published, but its files are not all there{others}: run `{command}`"]


def _unread_since(directory: Path, consumers: tuple[Consumer, ...], census: Census) -> dict[str, float]:
    since = {}
    for consumer in consumers:
        if consumer.chunks_before < census.chunks:
            # One that is retired or lost tells nothing.
            with contextlib.suppress(OSError):
                since[consumer.name] = modified_at(directory / census.names(consumer.chunks_before)[1])
    return since
