"""What is produced while the power is cut: little, since every call of it is a place to cut."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.harness.power.trials import RETAINS, Scenario
from tests.harness.scenes.sources import FedSource

_KEEPS: Final = ("--on-bad-row", "quarantine")
_ENCODES: Final = ("--encode", "tests.harness.scenes.arrays:encoded")


def _lines(first: int, last: int) -> list[bytes]:
    return [b'{"id":%d}' % number for number in range(first, last)]


def plain(folder: Path) -> Scenario:
    """A file: two chunks and a part of one, a bad row in a chunk and one behind the last row."""
    path = folder / "plain.jsonl"
    rows = _lines(0, 12)
    rows[3:3] = [b"bad"]
    path.write_bytes(b"\n".join([*rows, b"worse", b""]))
    return Scenario("plain", FedSource(str(path), rows), 5, _KEEPS)


def gzipped(folder: Path) -> Scenario:
    """A packed file of two members: two chunks, so that the end of rows is that of a chunk, and a bad row behind."""
    path = folder / "packed.jsonl.gz"
    rows = _lines(0, 8)
    data = b"\n".join([*rows, b"worse", b""])
    path.write_bytes(gzip.compress(data[:30]) + gzip.compress(data[30:]))
    return Scenario("gzipped", FedSource(str(path), rows), 4, _KEEPS)


def followed(folder: Path) -> Scenario:
    """A directory of three files which are finished, and the end marker."""
    directory = folder / "followed"
    directory.mkdir()
    rows = []
    for number in range(3):
        part = [*_lines(4 * number, 4 * number + 4), b"bad"]
        rows += part
        (directory / f"{number}.jsonl").write_bytes(b"\n".join([*part, b""]))
        (directory / f"{number}.jsonl.done").touch()
    (directory / "_END").touch()
    source = FedSource(str(directory), rows, "--follow")
    source.arguments += ["--finished-by", "marker"]
    return Scenario("followed", source, 5, _KEEPS, journal=True)


def retained(folder: Path) -> Scenario:
    """A file of 14 rows in chunks of two, which are deleted behind a consumer."""
    path = folder / "retained.jsonl"
    path.write_bytes(b"\n".join([*_lines(0, 14), b""]))
    return Scenario("retained", FedSource(str(path), _lines(0, 14)), 2, RETAINS, commits=True)


def encoded(folder: Path) -> Scenario:
    """A file whose rows get arrays: two chunks and a part of one, a row that is refused, a chunk without a byte."""
    path = folder / "encoded.jsonl"
    path.write_bytes(b"\n".join([*_lines(4, 12), b""]))
    return Scenario("encoded", FedSource(str(path), _lines(4, 12)), 3, (*_KEEPS, *_ENCODES))


def encoded_retained(folder: Path) -> Scenario:
    """A file of ten rows in chunks of two, which are deleted behind a consumer together with their side files."""
    path = folder / "encoded-retained.jsonl"
    path.write_bytes(b"\n".join([*_lines(8, 18), b""]))
    source = FedSource(str(path), _lines(8, 18))
    return Scenario("encoded retained", source, 2, (*_ENCODES, *RETAINS), commits=True)


SCENARIOS: Final[dict[str, Callable[[Path], Scenario]]] = {
    "plain": plain,
    "gzipped": gzipped,
    "followed": followed,
    "retained": retained,
    "encoded": encoded,
    "encoded retained": encoded_retained,
}
