"""What a reader says while it waits for a stream, and the errors that it raises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lazyshard.errors import ChunkMissing, ChunkRetired, StreamInvalid, StreamMissing, WaitTimeout
from lazyshard.format.cursor import CURSORS
from lazyshard.format.names import END
from lazyshard.store.files import list_names
from lazyshard.store.urls import UrlPath
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.listing import other_files
from lazyshard.stream.pacing import STALE_HEARTBEAT_S, describe_producer, format_seconds, heartbeat_age
from lazyshard.stream.published import Published


@dataclass(frozen=True, slots=True)
class ReaderWait:
    """A wait for something that a producer has still to publish.

    Attributes:
        directory: the stream's directory, or its URL.
        label: how to call the reader; may be empty.
        seen: what was published at the last look.
        samples: how many samples must be there; 0 where there is no stream yet.
        chunk: the chunk of the last of them; None where there is no stream yet.
        waited: seconds waited so far.
        max_wait: seconds to wait at the most.
        foreign: another program fills the directory.
    """

    directory: Path
    label: str
    seen: Published
    samples: int
    chunk: int | None
    waited: float
    max_wait: float
    foreign: bool = False

    def describe(self, now: float) -> str:
        """Says what is waited for, and what the producer is doing; `now` in seconds since 1970."""
        who = f"{self.label}: " if self.label else ""
        so_far = f"({format_seconds(self.waited)} of at most {format_seconds(self.max_wait)})"
        if self.chunk is None:
            return (
                f"{who}{self.directory}: no stream there yet, waiting for a producer to create it {so_far}"
                f"{_path_hint(self.directory)}"
            )
        producer = describe_producer(self.seen, self.samples, now, _producer_gone(self.seen, now))
        whole = self.seen.gap is None and self.seen.short is None
        end = (
            f"; if no more are to come, an empty file {self.directory / END} says so" if self.foreign and whole else ""
        )
        return f"{who}waiting for chunk {self.chunk} of {self.directory} {so_far}: {producer}{end}"

    def timeout(self, now: float) -> WaitTimeout:
        """Returns the error for a wait that is given up."""
        head = self.seen.head
        hint = "start its producer" if self.chunk is None or head is None else "see to its producer"
        return WaitTimeout(
            f"{self.describe(now)}. Gave up: {hint}, or wait longer with max_wait",
            directory=str(self.directory),
            chunk=self.chunk,
            waited=self.waited,
            state=head.state if head else None,
            heartbeat_age=heartbeat_age(self.seen, now),
        )


def stream_gone(directory: Path) -> StreamMissing:
    """Returns the error for a stream that is not there any more."""
    return StreamMissing(
        f"{directory}: the stream has gone while it was being read: was its directory removed, or its "
        f"filesystem unmounted? When it is there again, go on from the last checkpoint",
        directory=str(directory),
    )


def ended_short(directory: Path, samples: int, before: int) -> StreamInvalid:
    """Returns the error for a stream that has ended with fewer samples than were published before."""
    return StreamInvalid(
        f"{directory}: the stream has ended with {samples:,} samples, but {before:,} were "
        f"published before; restore what is missing from a copy",
        directory=str(directory),
    )


def chunk_retired(number: int, retired: int, file: str) -> ChunkRetired:
    """Returns the error for a chunk that was deleted, as were all below `retired`."""
    return ChunkRetired(
        f"{file}: chunk {number} was deleted by the stream's producer, as were all chunks below {retired}: every "
        f"consumer that had a cursor in {CURSORS}/ by then was done with them. Go on from a later checkpoint, or "
        f"produce the stream anew, with --retain all, or with --consumers NAME, which deletes nothing before the "
        f"consumer NAME has registered",
        file=file,
        chunk=number,
        chunks_before=retired,
    )


def chunk_missing(number: int, file: str, waited: float) -> ChunkMissing:
    """Returns the error for a published chunk of which a file has not appeared, after so many seconds."""
    return ChunkMissing(
        f"{file}: chunk {number} is published, but this file of it has not appeared within "
        f"{format_seconds(waited)}: restore it from a copy; `lazyshard verify` tells what else is missing",
        file=file,
        chunk=number,
        waited=waited,
    )


def _producer_gone(published: Published, now: float) -> bool:
    """Whether a producer of this machine, by its own word at work, has ended, or is silent and has no process."""
    head = published.head
    if head is None or head.state not in ("running", "waiting"):
        return False
    return process_ended(head) or (now - head.updated_at >= STALE_HEARTBEAT_S and process_gone(head) is True)


def _path_hint(directory: Path) -> str:
    """Returns a hint where not even the directory is there, which a producer makes, or it holds something else."""
    if isinstance(directory, UrlPath):
        return ""
    try:
        found = other_files(list_names(directory))
    except FileNotFoundError:
        return "; there is no such directory yet, so see whether the path is right"
    except OSError:
        return ""
    return f"; the directory holds other files ({found}), so see whether the path is right" if found else ""
