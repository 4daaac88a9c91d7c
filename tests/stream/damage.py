"""Streams to damage, and what a verification says of them in short."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.inspection.verification import Verified, verify
from lazyshard.inspection.verification_files import Fault
from lazyshard.stream import write_cursor
from lazyshard.stream.cursor import write_reading
from tests.stream.streams import produce, stream_id_of

Damage = Callable[[Path], object]


def stream(directory: Path, samples: int = 5, per_chunk: int = 2, *, end: bool = True) -> Path:
    """Chunks of `{"id":0}\\n`, 9 bytes a row: five rows make chunks of 2, 2 and 1."""
    return produce(directory, samples, per_chunk, end=end)


def flip(name: str, byte: int) -> Damage:
    def change(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[byte] ^= 1
        (directory / name).write_bytes(data)

    return change


def cut(name: str, size: int) -> Damage:
    return lambda directory: os.truncate(directory / name, size)


def delete(*names: str) -> Damage:
    def change(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return change


def move(source: str, target: str) -> Damage:
    return lambda directory: (directory / source).rename(directory / target)


def copy(source: str, target: str) -> Damage:
    return lambda directory: (directory / target).write_bytes((directory / source).read_bytes())


def put(name: str, data: bytes = b"") -> Damage:
    def change(directory: Path) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)

    return change


def swap(first: str, second: str) -> Damage:
    def change(directory: Path) -> None:
        one, other = (directory / first).read_bytes(), (directory / second).read_bytes()
        (directory / first).write_bytes(other)
        (directory / second).write_bytes(one)

    return change


def edit(name: str, **fields: Any) -> Damage:
    def change(directory: Path) -> None:
        values = orjson.loads((directory / name).read_bytes())
        (directory / name).write_bytes(orjson.dumps(values | fields))

    return change


def each(*damages: Damage) -> Damage:
    def change(directory: Path) -> None:
        for damage in damages:
            damage(directory)

    return change


def found(directory: Path, **options: Any) -> list[tuple[str, str, str, str]]:
    """Severity, file and row, what was expected, what was found."""
    return shortened(verify(directory, **options))


def shortened(verified: Verified) -> list[tuple[str, str, str, str]]:
    return [(f"{one.severity} {one.kind}", _place(one), one.expected, one.found) for one in verified.findings]


def _place(one: Fault) -> str:
    rows = "" if one.row is None else f" row {one.row}" + (f" of {one.rows}" if one.rows > 1 else "")
    return one.file + (f" {one.field}" if one.field else "") + rows


PLAN = {"dp_size": 1, "batch_size": 1, "unit": 2, "window": 2, "seed": 0}


def checkpoint(directory: Path, name: str, consumed: int, chunks_before: int, at: float) -> None:
    write_cursor(directory, Cursor(name, stream_id_of(directory), consumed, chunks_before, PLAN, at))


def reads(directory: Path, name: str, needs_chunks: int, at: float) -> None:
    assert write_reading(directory, ReadingHint(name, stream_id_of(directory), 1, 0, needs_chunks, at))


def edit_head(directory: Path, **values: Any) -> None:
    edit("head.json", **values)(directory)
