"""Rows for runs that are killed, and what is made of them: each row of a source gives 0, 1 or 3, or is refused."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import orjson

Row = dict[str, Any]
MANY: Final = 400  # First id of a second source
BAD: Final = b'{"id":'


def lines(base: int = 0, count: int = 120, bad: bool = True) -> list[bytes]:
    """Rows numbered from `base`; if wanted, some that are none among them."""
    found = []
    for number in range(count):
        found.append(b'{"id":%d,"text":"%s"}' % (base + number, b"x" * (number % 50)))
        if bad and number % 13 == 5:
            found.append(BAD + b"%d" % (base + number))
    return found


def text(rows: Sequence[bytes]) -> bytes:
    """These as the text of a file: with a byte order mark, blank lines, line ends of all kinds, and none at its end."""
    parts = [b"\xef\xbb\xbf"]
    for number, row in enumerate(rows):
        parts += [b"\n"] * (number % 10 == 3) + [row, b"\r\n" if number % 7 == 2 else b"\n"]
    return b"".join(parts)[:-1]


def thirds(row: Row) -> Any:
    number = row["id"]
    if number % 11 == 7:
        raise ValueError("seven")
    if number % 3 == 0:
        return None
    if number % 3 == 1:
        return row
    return [row | {"copy": copy} for copy in range(3)]


def measured(row: Row) -> Any:
    """As `thirds`, with lengths from 1 to 50."""
    return [one | {"length": len(one["text"]) + 1} for one in _listed(thirds(row))]


def tokenized(row: Row) -> Any:
    """As `thirds`, with tokens: the id, as often as `tokens_of` says, and the number of the copy for a label."""
    count = tokens_of(row["id"])
    made = _listed(thirds(row))
    return [{"input_ids": [one["id"]] * count, "labels": [one.get("copy", -100)] * count} for one in made]


def _listed(made: Any) -> list[Row]:
    return [] if made is None else [made] if isinstance(made, dict) else made


def tokens_of(number: int) -> int:
    return 1 + number % 5


def encoded_tokens(row: Row) -> Row:
    """An encoder of what `tokenized` makes. Refuses some."""
    if row["input_ids"][0] % 17 == 3:
        raise ValueError("three")
    return {name: np.array(values, np.int32) for name, values in row.items()}


def encoded(row: Row) -> Row:
    """An encoder: a token for each letter and one at the end, in an array, and the length. Refuses some."""
    if row["id"] % 17 == 3:
        raise ValueError("three")
    ids = np.frombuffer(row["text"].encode() + b"!", np.uint8).astype(np.int32)
    return {"id": row["id"], "copy": row.get("copy"), "length": len(ids), "input_ids": ids}


def four_of_five(row: Row, index: int) -> bool:
    return index % 5 != 4


def numbered(position: int | None) -> Iterator[tuple[Row | bytes, int]]:
    for number, line in enumerate(lines()):
        if number >= (position or 0):
            yield line, number + 1


def made(rows: Sequence[bytes], *, transform: bool, where: bool, encode: bool = False) -> list[tuple[int, int | None]]:
    """What comes of rows, in order: ids, and the numbers of copies; an encoder refuses what the transform does."""
    found: list[tuple[int, int | None]] = []
    for index, line in enumerate(rows):
        if is_refused(line, transform=False):
            continue
        row = orjson.loads(line)
        if (where and not four_of_five(row, index)) or is_refused(line, transform=transform or encode):
            continue
        copies = thirds(row) if transform else row
        for copy in _listed(copies):
            found.append((copy["id"], copy.get("copy")))
    return found


def is_refused(line: bytes, *, transform: bool) -> bool:
    """Whether it is no row, or one that the transform refuses."""
    if not line.endswith(b"}"):
        return True
    return transform and int(orjson.loads(line)["id"]) % 11 == 7


def with_arrays(row: Row) -> Any:
    """A row with two arrays, either of which may be empty, or one without any; some are refused."""
    number = row["id"]
    if number % 11 == 7:
        raise ValueError("seven")
    if _is_plain(number):
        return {"id": number}
    ids = np.full(number % 4, number, np.int32)
    mel = np.full((3, number % 3), number, np.float16)
    return {"id": number, "length": len(ids), "input_ids": ids, "audio": [{"mel": mel}]}


def side_bytes(number: int) -> bytes:
    if _is_plain(number):
        return b""
    ids = struct.pack("<i", number) * (number % 4)
    mel = struct.pack("<e", number) * (3 * (number % 3))
    return b"".join(part + bytes(-len(part) % 8) for part in (ids, mel))


def _is_plain(number: int) -> bool:
    return number // 2 % 4 == 1  # In pairs, so that there are chunks without any arrays
