"""What must hold at every instant, whoever was stopped before: the promise, for the model's states. Every sealed chunk
is whole and matches its seal; chunk numbers have no gaps; what is sealed stays, and what readers were told of stays
whatever happens, until it is acknowledged; nothing is retired that a kept checkpoint still needs; a commit that has
returned is not undone; no reader dies; after a clean end nothing is left over; nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass

from tests.harness.model.disk import Content
from tests.harness.model.producer import Kept, is_readable
from tests.harness.model.stream import (
    CURSOR,
    END_PATH,
    HEAD_PATH,
    TMP,
    Broken,
    Listed,
    Seen,
    data_path,
    is_folder,
    list_stream,
    seal_path,
    told,
    value_of,
)


@dataclass(frozen=True)
class Facts:
    wrong: str | None  # what no state may show, in words; None if there is no such thing
    told: int = 0  # of how many chunks a reader is told
    ended: bool = False  # whether it is told that there are no more
    sealed: int = 0  # chunks [mark, sealed) have a seal
    mark: int = 0  # chunks below it are retired
    cursor: Content | None = None  # what the cursor says, None where there is none
    unsealed: tuple[str, ...] = ()  # rows that were never published
    below: tuple[str, ...] = ()  # what is there of retired chunks
    temporary: bool = False  # whether there is anything with a temporary name


@dataclass(frozen=True)
class Course:
    """What has happened so far, as far as the promise has to know it."""

    kept: Kept = (0,)  # the consumer's checkpoints
    cursors: tuple[Content | None, ...] = (None,)  # what the cursor may say now
    told: int = 0  # of how many chunks any reader was ever told
    # how many chunks were sealed, if only for those who look at the directory, since the last power cut.
    sealed: int = 0
    cut_since_end: bool = False  # the power was cut after the producer had ended the stream and was gone
    refused: bool = False  # the filesystem refused to delete, which the producer may not have tried again


def look(seen: Seen) -> Facts:
    try:
        found = told(seen)
        listed = list_stream(seen)
        wrong = _wrong(seen, listed, found or (0, False))
        cursor = value_of(seen, CURSOR, "cursor")
    except Broken as error:
        return Facts(f"a reader dies: {error}")
    unsealed = tuple(data_path(chunk) for chunk in sorted(listed.data - listed.seals))
    return Facts(
        wrong, *(found or (0, False)), listed.sealed, listed.mark, cursor, unsealed, listed.below, is_folder(seen, TMP)
    )


def _wrong(seen: Seen, listed: Listed, found: tuple[int, bool]) -> str | None:
    for chunk in sorted(listed.seals):
        if chunk >= listed.sealed:
            return f"a gap: chunk {chunk} is sealed, chunk {listed.sealed} is not"
        if not is_readable(seen, chunk):
            rows, seal = seen.get(data_path(chunk)), seen[seal_path(chunk)]
            return f"chunk {chunk} is sealed with {seal} and holds {rows}"
    if listed.sealed == listed.mark > 0:
        return f"the newest chunk, {listed.mark - 1}, is retired, and with it the position to go on from"
    if found[0] > listed.sealed:
        return f"readers are told of {found[0]} chunks, sealed are {listed.sealed}"
    if found[0] < listed.sealed and found[1]:
        return f"readers are told that all is {found[0]} chunks, sealed are {listed.sealed}"
    end = value_of(seen, END_PATH, "end")
    if end is not None and end[1] != listed.sealed:
        return f"{END_PATH} says {end[1]} chunks, sealed are {listed.sealed}"
    head = seen.get(HEAD_PATH)
    if end is None and head is not None and head[0] == "head" and head[2]:
        return f"{HEAD_PATH} says that the stream has ended, {END_PATH} is not there"
    return None


def broken(facts: Facts, course: Course, chunks: int, *, producer_done: bool) -> str | None:
    """Returns which promise a state breaks, None if it keeps all."""
    if facts.wrong is not None:
        return facts.wrong
    if facts.sealed < course.told:
        return f"readers were told of {course.told} chunks, of which only {facts.sealed} are there"
    if facts.sealed < course.sealed:
        return f"{course.sealed} chunks were sealed, only {facts.sealed} are"
    if facts.mark > course.kept[0]:
        return f"chunks before {facts.mark} are retired, a run may go on from chunk {course.kept[0]}"
    if facts.cursor not in course.cursors:
        return f"the cursor may say {' or '.join(map(str, course.cursors))}, it says {facts.cursor}"
    if producer_done:
        if facts.sealed != chunks:
            return f"the producer has ended the stream, sealed are {facts.sealed} chunks of {chunks}"
        left = facts.unsealed if course.refused else facts.unsealed + facts.below
        if left and not course.cut_since_end:
            return f"the stream has ended, left over are {', '.join(left)}"
        if facts.temporary and not course.cut_since_end:
            return f"the stream has ended, {TMP} is there"
    return None
