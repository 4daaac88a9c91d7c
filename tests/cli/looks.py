"""Looks at streams, made up, for the tests of what is said of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lazyshard.format.records import Head, Manifest
from lazyshard.format.state import Cursor, ReadingHint, RunState
from lazyshard.inspection.outlook import Looks, Outlook
from lazyshard.inspection.survey import Census, DiskUse, Survey, chunk_files
from lazyshard.part import Part
from lazyshard.stream.cursor import Consumer

NOW: Final = 1_700_000_000.0
ID: Final = "0" * 32
HEAD: Final = Head(1234, 12340, False, "running", 50.0, "node7", 12345, NOW - 2)
SURVEY: Final = Survey(
    directory=Path("/data/stream"),
    looked_at=NOW,
    census=Census(True, Manifest(ID, 10, NOW), HEAD, 1234, 12340, False, 0, chunk_files),
    gone=None,
    consumers=(),
    unread_since={},
    disk=DiskUse(12_340_000, True, 10_000.0, ()),
    free=2_000_000_000,
    quarantine=None,
    problems=(),
)


def consumer(
    name: str = "sft",
    consumed: int | None = None,
    done: int = 0,
    needs: int | None = None,
    at: float = NOW - 4,
    problem: str | None = None,
) -> Consumer:
    cursor = None if consumed is None else Cursor(name, ID, consumed, done, {}, at)
    reading = None if needs is None else ReadingHint(name, ID, 1, 0, needs, at)
    return Consumer(name, cursor, reading, problem)


def told(
    name: str = "sft",
    consumed: int = 0,
    done: int = 0,
    needs: int = 0,
    at: float = NOW - 4,
    ranks: int = 2,
    window: int = 0,
) -> Consumer:
    """A consumer whose cursor tells how the run deals: chunks of 10 samples, `window` of them shuffled together."""
    rules = {"unit": 10, "window": window * 10, "seed": 0}
    state = RunState(ID, 10, 10, window * 10, 0, None, (Part(ranks, 1, consumed // ranks),), consumed)
    cursor = Cursor(name, ID, consumed, done, {"dp_size": ranks, "batch_size": 1, **rules}, at, state)
    span = ranks * (window or 1)
    return Consumer(name, cursor, ReadingHint(name, ID, ranks, -(-needs // span) - 1, needs, at), None)


def survey(head: Head | None = HEAD, census: dict[str, Any] | None = None, **values: Any) -> Survey:
    """Returns a look; `census` and `values` are what is otherwise than in `SURVEY`."""
    ended = head is not None and head.ended
    return replace(SURVEY, census=replace(SURVEY.census, head=head, ended=ended, **(census or {})), **values)


def outlook(*looks: Survey) -> Outlook:
    memory = Looks()
    for look in looks[:-1]:
        memory.add(look)
    return memory.add(looks[-1])
