"""Small streams of every kind of source. `POINTS` are killed at every call, `POWER`, smaller, on a disk that is cut."""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.scenes.rows import BAD, MANY, lines
from tests.harness.scenes.sources import KINDS, FedSource, FollowedSource

CONSUMER: Final = "trainer"  # Name of the one that acknowledges
_ROWS: Final = "tests.harness.scenes.rows"
_KEEPS: Final = ("--on-bad-row", "quarantine")
_WHERE: Final = (*_KEEPS, "--where", f"{_ROWS}:four_of_five")
_MAKES: Final = (*_WHERE, "--transform", f"{_ROWS}:thirds", "--shuffle", "4", "--seed", "3")
_RETENTION: Final = ("--retain", "consumed", "--consumers", CONSUMER)
_RETAINS: Final = (*_KEEPS, *_RETENTION)
_AHEAD: Final = ("--max-ahead", "4 chunks")
_ENCODES: Final = (*_KEEPS, "--encode", f"{_ROWS}:with_arrays")
QUICK_LOOKS: Final = "tests.harness.scenes.table:look_quickly"


@dataclass(frozen=True, slots=True)
class Scene:
    make: Callable[[Path], list[FedSource]]  # makes its sources in a folder
    options: Sequence[object] = _KEEPS  # of the command
    per_chunk: int = 3  # rows in a chunk
    ordered: bool = True  # whether its rows come in one order whatever happens
    live: bool = False  # whether its sources change while they are read, so that each run needs its own
    behind: int | None = None  # chunks that the consumer has read and does not acknowledge yet; None if there is none
    encoded: bool = False  # whether its rows hold the arrays that `scenes.rows` makes
    journal: bool = False  # whether seals name a journal, which has another name in each run


def look_quickly() -> None:
    from lazyshard_producer import limits as holdback

    holdback.LOOK_S = 0.0  # type: ignore[misc]
    holdback.HELD_LOOK_S = 0.002  # type: ignore[misc]


def _rows(count: int) -> list[bytes]:
    rows = lines(0, count, bad=False)
    return [*rows[:2], BAD + b"2", *rows[2:], BAD]


def _one(kind: str, count: int = 8) -> Callable[[Path], list[FedSource]]:
    return lambda folder: [KINDS[kind](folder, 0, _rows(count))]


def _whole(kind: str) -> Callable[[Path], list[FedSource]]:
    return lambda folder: [KINDS[kind](folder, 0, lines(0, 8, bad=False))]


def _followed(finished_by: str) -> Callable[[Path], list[FedSource]]:
    return lambda folder: [FollowedSource(folder / "0", 0, finished_by, _rows(8), per_file=4)]


def _mixed(folder: Path) -> list[FedSource]:
    sources = [*_followed("marker")(folder), KINDS["plain"](folder, MANY, lines(MANY, 7))]
    for source in sources:
        source.arguments += ["--weight", "1"]
    return sources


POINTS: Final[dict[str, Scene]] = {  # A new one goes to the end: its place decides which calls a short run takes
    "plain": Scene(_one("plain")),
    "gzip": Scene(_one("gzip")),
    "zstd": Scene(_one("zstd")),
    "parquet": Scene(_whole("parquet")),
    "pipe": Scene(_one("pipe"), live=True),
    "stdin": Scene(_one("stdin"), live=True),
    "made": Scene(_one("plain", count=16), _MAKES),
    "followed": Scene(_followed("rename"), ordered=False, live=True),
    "grown": Scene(_followed("marker"), ordered=False, live=True),
    "mixed": Scene(_mixed, ordered=False, live=True),
    "retained": Scene(_one("plain", count=13), (*_RETAINS, *_AHEAD), per_chunk=2, behind=2),
    # A chunk with its seal takes some 400 bytes.
    "small disk": Scene(_one("plain", count=13), (*_RETAINS, "--max-disk", "2500"), per_chunk=2, behind=2),
    "retained while followed": Scene(_followed("rename"), (*_RETAINS, *_AHEAD), 2, ordered=False, live=True, behind=1),
    "encoded": Scene(_one("plain"), _ENCODES, encoded=True),
    "encoded retained": Scene(
        _one("plain", count=13), (*_ENCODES, *_RETENTION, *_AHEAD), per_chunk=2, behind=2, encoded=True
    ),
    "split": Scene(_one("plain", count=11), (*_WHERE, "--transform", f"{_ROWS}:tokenized", "--split", "5")),
    "stream": Scene(_whole("stream")),
}
"""By name. `behind` is less than what the limits let the producer be ahead, so no run waits for ever."""


def _numbered(first: int, last: int) -> list[bytes]:
    return [b'{"id":%d}' % number for number in range(first, last)]


def _file(name: str, rows: list[bytes], *more: bytes) -> Callable[[Path], list[FedSource]]:
    def make(folder: Path) -> list[FedSource]:
        path = folder / f"{name}.jsonl"
        path.write_bytes(b"\n".join([*rows, *more, b""]))
        return [FedSource(str(path), rows)]

    return make


def _two_members(folder: Path) -> list[FedSource]:
    path = folder / "packed.jsonl.gz"
    rows = _numbered(0, 8)
    data = b"\n".join([*rows, b"worse", b""])
    path.write_bytes(gzip.compress(data[:30]) + gzip.compress(data[30:]))
    return [FedSource(str(path), rows)]


def _finished(folder: Path) -> list[FedSource]:
    directory = folder / "followed"
    directory.mkdir()
    rows = []
    for number in range(3):
        part = [*_numbered(4 * number, 4 * number + 4), b"bad"]
        rows += part
        (directory / f"{number}.jsonl").write_bytes(b"\n".join([*part, b""]))
        (directory / f"{number}.jsonl.done").touch()
    (directory / "_END").touch()
    source = FedSource(str(directory), rows, "--follow")
    source.arguments += ["--finished-by", "marker"]
    return [source]


CONSUMED: Final = Scene(_file("consumed", _numbered(0, 24)), _RETENTION, per_chunk=4)  # Deleted behind the consumer

POWER: Final[dict[str, Scene]] = {
    # Two chunks and a part of one, a bad row in a chunk and one behind the last row.
    "plain": Scene(_file("plain", [*_numbered(0, 3), b"bad", *_numbered(3, 12)], b"worse"), per_chunk=5),
    "gzipped": Scene(_two_members, per_chunk=4),  # The end of rows is that of a chunk
    "followed": Scene(_finished, per_chunk=5, journal=True),
    "retained": Scene(_file("retained", _numbered(0, 14)), _RETENTION, per_chunk=2, behind=2),
    "encoded": Scene(_file("encoded", _numbered(4, 12)), _ENCODES),  # One row is refused, one chunk without a byte
    "encoded retained": Scene(_file("both", _numbered(8, 18)), (*_ENCODES[2:], *_RETENTION), per_chunk=2, behind=2),
}
