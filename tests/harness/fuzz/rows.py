"""Lines of JSON as targets of fuzzing: what the producer takes, what readers parse, and what a seal of them says.
Another reader of JSON, Python's own, stands beside ours: what is taken as a row must be one object for it too, of the
same value, number by number."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson
import xxhash

from lazyshard.errors import ChunkCorrupt, RowInvalid
from lazyshard.format.batch import check_lines
from lazyshard.format.row import check_line, check_row, encode_row, has_duplicate_keys, parse_row
from lazyshard.stream.chunk import open_foreign
from tests.harness.fuzz.mutations import spoil_more

__all__ = ["check_batch", "check_foreign", "check_one", "drawn_lines", "drawn_row"]

_STRINGS: Final = (
    "",
    "id",
    "text",
    "a:b",
    '"',
    "\\",
    "\u2028",
    "\u0085",
    "\U0001f600",
    "x" * 40,
    "\\u0022",
    "{}",
    "\x7f",
    "\x00",
)
_LEAVES: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**53 + 1,
    2**63,
    2**64 - 1,
    -(2**63),
    10**18,
    1.5,
    1e300,
    -0.0,
    1e-320,
    *_STRINGS,
)


def drawn_row(random: Random) -> dict[str, Any]:
    return {random.choice(_STRINGS): _drawn(random, 3) for _ in range(random.randint(0, 4))}


def drawn_lines(random: Random) -> list[bytes]:
    lines = []
    for _ in range(random.choice((1, 2, 3, 40))):
        line = encode_row(drawn_row(random))
        way = random.randrange(12)
        if way == 0:
            line = spoil_more(line, random)
        elif way == 1:
            line = line[:-1] + random.choice((b"\r\n", b"", b" \n", b"\t\n"))
        elif way == 2:
            # The same member again, with blanks about the colon.
            line = b'{"id"' + random.choice((b":", b" :", b": ")) + b"1," + line[1:]
        elif way == 3:
            line = b'{"n":' + random.choice((b"18446744073709551616", b"-9223372036854775809", b"1e400")) + b"}\n"
        lines.append(line)
    return lines


def check_one(line: bytes) -> bool:
    """Asserts what must hold for any line; returns whether it was taken."""
    try:
        row = check_row(line)
    except RowInvalid as error:
        _check_refusal(error, line)
        return False
    assert parse_row(line) == row
    other = json.loads(line, parse_constant=_refuse_constant)
    assert _equal(row, other), f"{line[:200]!r} is {str(row)[:200]}, another reader finds {str(other)[:200]}"
    published, again = check_line(line)
    assert published.endswith(b"\n"), "no newline at the end"
    assert published.count(b"\n") == 1, "more than one line"
    assert again == row
    text = json.loads(line, object_pairs_hook=_Twice)
    assert has_duplicate_keys(published, row) == _twice(text), f"duplicate keys in {line[:200]!r}"
    return True


def check_batch(lines: list[bytes]) -> None:
    """Asserts that many lines are checked as one by one."""
    found = check_lines(lines)
    rows: list[bytes] = []
    refused = None
    for index, line in enumerate(lines):
        try:
            rows.append(check_line(line)[0])
        except RowInvalid as error:
            refused = (index, error.reason)
            break
    assert found.data == b"".join(rows), "other rows"
    assert found.ends.tolist() == list(itertools.accumulate(map(len, rows)))
    assert found.digests.tolist() == [xxhash.xxh3_64_intdigest(row) for row in rows]
    told = None if found.refused is None else (found.refused.index, found.refused.reason)
    assert told == refused, f"{told} instead of {refused}"
    twice = tuple(index for index, row in enumerate(rows) if has_duplicate_keys(row, orjson.loads(row)))
    assert found.duplicates == twice, f"duplicate keys in {found.duplicates} instead of {twice}"


def check_foreign(data: bytes, path: Path) -> None:
    """Asserts that a file without seal has the rows that its lines are, or says which line is none."""
    path.write_bytes(data)
    text = data[3:] if data.startswith(b"\xef\xbb\xbf") else data
    lines = [line for line in text.split(b"\n") if line.strip(b" \t\r")]
    chunk = open_foreign(path, 0)
    assert len(chunk) == len(lines), f"{len(chunk)} rows in {len(lines)} lines"
    for number, line in enumerate(lines):
        try:
            wanted: Any = check_row(line.strip(b" \t\r\n"))
        except RowInvalid:
            wanted = None
        try:
            row: Any = chunk.row(number)
        except RowInvalid as error:
            row = None
            assert error.file == str(path), "names another file"
            assert error.line is not None, "no line"
            assert 0 <= (error.byte or 0) <= len(data), "no byte of the file"
        except ChunkCorrupt as error:
            raise AssertionError("corrupt, but nobody has changed it") from error
        assert row == wanted, f"row {number} is {str(row)[:100]} instead of {str(wanted)[:100]}"


def _check_refusal(error: RowInvalid, line: bytes) -> None:
    assert error.reason, "no reason"
    assert len(str(error)) <= 500, f"a message of {len(str(error))} characters"
    assert error.byte is None or 0 <= error.byte <= len(line), f"byte {error.byte} of {len(line)}"
    str(error).encode()


def _drawn(random: Random, depth: int) -> Any:
    kind = random.randrange(8 if depth else 6)
    if kind < 6:
        return random.choice(_LEAVES)
    if kind == 6:
        return [_drawn(random, depth - 1) for _ in range(random.randint(0, 3))]
    return {random.choice(_STRINGS): _drawn(random, depth - 1) for _ in range(random.randint(0, 3))}


class _Twice(list[Any]):
    """The members of an object, as they were given."""


def _twice(value: Any) -> bool:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, _Twice):
            if len({key for key, _ in one}) < len(one):
                return True
            pending.extend(inner for _, inner in one)
        elif isinstance(one, list):
            pending.extend(one)
    return False


def _equal(one: Any, other: Any) -> bool:
    pending = [(one, other)]
    while pending:
        first, second = pending.pop()
        if type(first) is not type(second):
            return False
        if isinstance(first, dict):
            if first.keys() != second.keys():
                return False
            pending.extend((first[key], second[key]) for key in first)
        elif isinstance(first, list):
            if len(first) != len(second):
                return False
            pending.extend(zip(first, second, strict=True))
        elif first != second or (isinstance(first, float) and math.copysign(1, first) != math.copysign(1, second)):
            return False
    return True


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} was taken")
