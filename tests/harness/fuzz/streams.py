"""Small valid streams to be damaged, the same bytes on every machine, and what their rows truly are."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from lazyshard.cli.output import with_lists
from lazyshard.format.arrays import pack_row
from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.format.names import MANIFEST, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Head, Manifest, Owner, Retired
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.format.state import RunState
from lazyshard.part import Part

ID: Final = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
AT: Final = 1700000000.0

ROWS: Final = tuple(
    orjson.dumps(row) + b"\n"
    for row in (
        {"id": 0, "text": "a"},
        {"id": 1, "text": "\u00fc\u2028\U0001f600", "n": [1, 2.5, None, True]},
        {"id": 2, "text": "x" * 300},
        {"id": 3, "messages": [{"role": "user", "content": "h\u00e9llo"}, {"role": "assistant", "content": "{}"}]},
        {"id": 4, "text": '"\\\n'},
        {"id": 5, "big": 2**64 - 1, "small": -(2**63), "float": 1e-300},
        {"id": 6, "text": "b"},
        {"id": 7, "text": "c"},
    )
)


@dataclass(frozen=True)
class Known:
    name: str  # what to call it
    files: dict[str, bytes]  # its files by their names in the directory
    rows: tuple[bytes | None, ...]  # the true rows, by sample; None for those that are deleted
    per_chunk: int  # rows in a chunk
    native: bool = True  # whether it has a manifest
    ended: bool = True  # whether it has ended
    done: int = 0  # the chunks of [0, done) may be deleted: every cursor says so
    folders: tuple[str, ...] = field(default=(".tmp", "cursors"))
    # the rows as they are to be read, with lists for their arrays; None where that is what they parse to.
    values: tuple[Any, ...] | None = None

    @property
    def size(self) -> int | None:
        """Rows in a chunk, where whoever reads it has to be told."""
        return None if self.native else self.per_chunk

    def put(self, directory: Path) -> None:
        directory.mkdir()
        for folder in self.folders:
            (directory / folder).mkdir()
        for name, data in self.files.items():
            (directory / name).write_bytes(data)


def _stream(name: str, count: int, per_chunk: int, *, ended: bool = True, retired: int = 0, cursors: int = 0) -> Known:
    rows = ROWS[:count]
    cuts = [rows[start : start + per_chunk] for start in range(0, count, per_chunk)]
    state, note = ("finished", "") if ended else ("idle", "stopped")
    files = {
        "stream.json": Manifest(ID, per_chunk, AT).encode(),
        "stream.owner": Owner(1, "0123456789abcdef", "node1", 4711, AT).encode(),
        "head.json": Head(len(cuts), count, ended, state, 0.0, "node1", 4711, AT, note).encode(),
        ".producer.lock": b"",
    }
    if ended:
        files["stream.end"] = End(len(cuts), count).encode()
    for chunk in range(retired, len(cuts)):
        cut = list(cuts[chunk])
        tokens = np.array(list(map(len, cut)), np.uint32) if chunk % 2 else None
        source = {"path": "rows.jsonl", "byte": 100 * chunk}
        seal = Seal(chunk, _starts(cut), _digests(cut), tokens=tokens, source=source, sealed_at=AT + chunk)
        files[chunk_name(chunk)], files[seal_name(chunk)] = b"".join(cut), seal.encode()
    if retired:
        files["retired.json"] = Retired(ID, retired, AT).encode()
    for number in range(cursors):
        consumer, draws = f"run{number}", per_chunk * (retired + number)
        state = RunState(ID, per_chunk, per_chunk, 0, 0, None, (Part(1, 1, draws),), draws)
        owner, layout = "1/0123456789abcdef process 1 on a", {"dp_size": 1, "seed": 0}
        cursor = Cursor(consumer, ID, draws, retired + number, layout, AT, state, owner)
        files[f"cursors/{consumer}.json"] = cursor.encode()
        files[f"cursors/{consumer}.reading.json"] = ReadingMark(consumer, ID, 1, 0, len(cuts), AT).encode()
        files[f"cursors/.{consumer}.lock"] = f"{owner}\n".encode()
    deleted = retired * per_chunk
    return Known(name, files, (None,) * deleted + rows[deleted:], per_chunk, True, ended, retired)


def _foreign(name: str, *, end: bool) -> Known:
    files = {}
    for chunk, start in enumerate(range(0, 8, 3)):
        files[chunk_name(chunk)] = b"".join(ROWS[start : start + 3])
        files[seal_name(chunk)] = b""
    if end:
        files["stream.end"] = b""
    return Known(name, files, ROWS if end else ROWS[:6], 3, False, end, 0, ())


def _with_arrays(name: str) -> Known:
    rows: list[dict[str, Any]] = [
        {"id": 0, "x": np.arange(5, dtype=np.int32)},
        {"id": 1, "n": [{"y": np.full((2, 3), 0.5, np.float16)}, np.array(True)]},
        {"id": 2, "text": "none"},
        {"id": 3, "x": np.zeros((0, 4)), "z": np.arange(40, dtype=np.uint8)},
        {"id": 4, "x": np.array([2**63], np.uint64)},
        {"id": 5, "x": np.array(-1, np.int8), "y": np.array([1.5, 2.5])},
        {"id": 6, "x": np.array([[7]], np.int64)},
    ]
    packed = [pack_row(row) for row in rows]
    known = _stream(name, len(rows), 3)
    files = known.files | {MANIFEST: Manifest(ID, 3, AT, arrays=True).encode()}
    for chunk, start in enumerate(range(0, len(rows), 3)):
        lines, sides = ([getattr(row, what) for row in packed[start : start + 3]] for what in ("line", "arrays"))
        files[chunk_name(chunk)], files[arrays_name(chunk)] = b"".join(lines), b"".join(sides)
        arrays = SealedArrays(_starts(sides), _digests(sides))
        seal = Seal(chunk=chunk, offsets=_starts(lines), digests=_digests(lines), sealed_at=AT, arrays=arrays)
        files[seal_name(chunk)] = seal.encode()
    rest = tuple(row.line for row in packed)
    return replace(known, files=files, rows=rest, values=tuple(map(with_lists, rows)))


def _starts(parts: list[bytes]) -> npt.NDArray[np.uint64]:
    return np.array([0, *itertools.accumulate(map(len, parts))], np.uint64)


def _digests(parts: list[bytes]) -> npt.NDArray[np.uint64]:
    return np.array([xxhash.xxh3_64_intdigest(part) for part in parts], np.uint64)


STREAMS: Final = {
    known.name: known
    for known in (
        *(_stream("ended", 5, 2), _stream("live", 6, 2, ended=False, cursors=2)),
        *(_stream("retired", 8, 2, ended=False, retired=2, cursors=2), _stream("one", 1, 3), _stream("empty", 0, 4)),
        *(_foreign("foreign", end=True), _foreign("foreign-live", end=False)),
    )
}

ARRAYS: Final = _with_arrays("arrays")  # A stream whose rows hold arrays, damaged by itself
