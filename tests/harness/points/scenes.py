"""Small streams of every kind of source, of which each run does all that a longer one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.points.reader import CONSUMER
from tests.harness.scenes import sources as killed_sources
from tests.harness.scenes.rows import BAD, MANY, lines
from tests.harness.scenes.sources import KINDS, FedSource, FollowedSource

__all__ = ["SCENES", "Scene"]

_KEEPS: Final = ("--on-bad-row", "quarantine")
_MAKES: Final = (
    *_KEEPS,
    *("--transform", "tests.harness.scenes.rows:thirds"),
    *("--where", "tests.harness.scenes.rows:four_of_five"),
    *("--shuffle", "4", "--seed", "3"),
)
_CUTS: Final = (
    *_KEEPS,
    *("--transform", "tests.harness.scenes.rows:tokenized"),
    *("--where", "tests.harness.scenes.rows:four_of_five"),
    *("--split", "5"),
)
_RETENTION: Final = ("--retain", "consumed", "--consumers", CONSUMER)
_RETAINS: Final = (*_KEEPS, *_RETENTION)
_ENCODES: Final = (*_KEEPS, "--encode", "tests.harness.scenes.arrays:encoded")

QUICK_LOOKS: Final = "tests.harness.points.scenes:look_quickly"


@dataclass(frozen=True, slots=True)
class Scene:
    """A stream that is made in a few dozen calls.

    Attributes:
        make: makes its sources in a folder.
        options: of the command.
        per_chunk: rows in a chunk.
        ordered: whether its rows come in one order whatever happens.
        live: whether its sources change while they are read, so that each run needs its own.
        behind: chunks that the consumer has read and does not acknowledge yet; None if there is none.
        prepare: functions that the command calls first.
        encoded: whether its rows hold the arrays that `scenes.arrays` makes.
        tokens: whether its rows are sequences of the tokens that `scenes.rows.tokenized` makes.
    """

    make: Callable[[Path], list[FedSource]]
    options: Sequence[object] = _KEEPS
    per_chunk: int = 3
    ordered: bool = True
    live: bool = False
    behind: int | None = None
    prepare: tuple[str, ...] = ()
    encoded: bool = False
    tokens: bool = False


def look_quickly() -> None:
    """Has a run look at its consumers before and after every chunk, not twice a second."""
    from lazyshard_producer.holding import holdback

    holdback.LOOK_S = 0.0  # type: ignore[misc]
    holdback.HELD_LOOK_S = 0.002  # type: ignore[misc]


def _rows(count: int) -> list[bytes]:
    """Numbered rows, and two that are none: one in the first chunk, so that later seals count it, and the last one."""
    rows = lines(0, count, bad=False)
    return [*rows[:2], BAD + b"2", *rows[2:], BAD]


def _one(kind: str, count: int = 8) -> Callable[[Path], list[FedSource]]:
    return lambda folder: [KINDS[kind](folder, 0, _rows(count))]


def _parquet(folder: Path) -> list[FedSource]:
    return [killed_sources.parquet(folder, 0, lines(0, 8, bad=False))]


def _followed(finished_by: str) -> Callable[[Path], list[FedSource]]:
    return lambda folder: [FollowedSource(folder / "0", 0, finished_by, _rows(8), per_file=4)]


def _mixed(folder: Path) -> list[FedSource]:
    sources = [*_followed("marker")(folder), killed_sources.plain(folder, MANY, lines(MANY, 7))]
    for source in sources:
        source.arguments += ["--weight", "1"]
    return sources


SCENES: Final[dict[str, Scene]] = {
    "plain": Scene(_one("plain")),
    "gzip": Scene(_one("gzip")),
    "zstd": Scene(_one("zstd")),
    "parquet": Scene(_parquet),
    "pipe": Scene(_one("pipe"), live=True),
    "stdin": Scene(_one("stdin"), live=True),
    "made": Scene(_one("plain", count=16), _MAKES),
    "followed": Scene(_followed("rename"), ordered=False, live=True),
    "grown": Scene(_followed("marker"), ordered=False, live=True),
    "mixed": Scene(_mixed, ordered=False, live=True),
    "retained": Scene(
        _one("plain", count=13),
        (*_RETAINS, "--max-ahead", "4 chunks"),
        per_chunk=2,
        behind=2,
        prepare=(QUICK_LOOKS,),
    ),
    # A chunk with its seal takes some 400 bytes.
    "small disk": Scene(
        _one("plain", count=13),
        (*_RETAINS, "--max-disk", "2500"),
        per_chunk=2,
        behind=2,
        prepare=(QUICK_LOOKS,),
    ),
    "retained while followed": Scene(
        _followed("rename"),
        (*_RETAINS, "--max-ahead", "4 chunks"),
        per_chunk=2,
        ordered=False,
        live=True,
        behind=1,
        prepare=(QUICK_LOOKS,),
    ),
    "encoded": Scene(_one("plain"), _ENCODES, encoded=True),
    "encoded retained": Scene(
        _one("plain", count=13),
        (*_ENCODES, *_RETENTION, "--max-ahead", "4 chunks"),
        per_chunk=2,
        behind=2,
        prepare=(QUICK_LOOKS,),
        encoded=True,
    ),
    "split": Scene(_one("plain", count=11), _CUTS, tokens=True),
}
"""By name. `behind` is less than what the limits let the producer be ahead, so no run waits for ever."""
