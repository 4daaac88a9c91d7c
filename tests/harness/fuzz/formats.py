"""Files and rows as targets of fuzzing: taken and written again, or refused in few words; rows as `json` takes them."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import xxhash

from lazyshard import errors
from lazyshard.format.batch import check_lines
from lazyshard.format.records import End, Head, Manifest, Owner, Retired
from lazyshard.format.row import check_line, check_row, encode_row, has_duplicate_keys, parse_row
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor, ReadingHint, RunState
from lazyshard.part import Part
from lazyshard.stream.chunk import open_foreign
from tests.harness.fuzz.damage import STREAMS, alter_json, spoil_more

FILE: Final = "/some/stream/the-file"
MAX_MESSAGE: Final = 1000  # Characters of a message that a person is to read, whatever the file held


class FileFormat(NamedTuple):
    name: str  # of the target
    files: list[bytes]  # what a producer or a run may write
    decode: Callable[[bytes], Any]  # reads them; the file is called `FILE`
    error: type[errors.FormatInvalid] = errors.FileInvalid  # the class of the error with which they are refused


def check_bytes(target: FileFormat, data: bytes) -> bool:
    """Asserts what must hold for any bytes; returns whether they were taken."""
    try:
        value = target.decode(data)
    except errors.FormatInvalid as error:
        assert isinstance(error, (target.error, errors.VersionUnsupported)), f"{type(error).__name__} for {target.name}"
        assert error.file == FILE, f"names {error.file!r}"
        assert str(error).startswith(FILE), str(error)[:200]
        assert len(str(error)) <= MAX_MESSAGE, f"a message of {len(str(error))} characters"
        str(error).encode()
        return False
    again = _bytes_of(value)
    second = target.decode(again)
    assert same(second, value), f"{target.name}: {data[:300]!r} is taken, and written otherwise: {again[:300]!r}"
    assert _bytes_of(second) == again
    kept = {name: one for name, one in orjson.loads(again).items() if name != "source"}
    assert (least := min(_integers(kept))) >= 0, f"{target.name}: counts from 0, got {least}"
    return True


def _integers(value: Any) -> Iterator[int]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from itertools.chain([value] if type(value) is int else [0], *map(_integers, parts))


def _bytes_of(value: Any) -> bytes:
    return orjson.dumps(value.to_dict()) if isinstance(value, RunState) else bytes(value.encode())


def mutated(target: FileFormat, random: Random) -> bytes:
    data = random.choice(target.files)
    way = random.randrange(4)
    if way < 3:
        data = alter_json(data, random)
    if way > 1:
        data = spoil_more(data, random)
    return data


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    if is_dataclass(one) and not isinstance(one, type):
        pairs = ((getattr(one, field.name), getattr(other, field.name, None)) for field in fields(one))
        return type(one) is type(other) and all(same(*pair) for pair in pairs)
    return type(one) is type(other) and bool(one == other)


def _written(name: str) -> list[bytes]:
    return [data for one in STREAMS.values() if (data := one.files.get(name))]


def _states() -> list[bytes]:
    found = [Cursor.decode(data, "run1").state for data in _written("cursors/run1.json")]
    states = [state for state in found if state is not None]
    parts = (
        Part(1, 3, 256, None, True, ((0, 2), (8, 9)), 0, 32),
        Part(2, 1, 0, 1, False, (), 50, 0),
        Part(2**31, 2**62, 1, 2**62, True, (), 100, 1),
    )
    consumed = parts[0].dp * parts[0].draws
    states += [replace(state, seed=7, parts=parts[:2], consumed=consumed) for state in states]
    most = replace(states[-1], seed=2**63 - 1, max_total_samples=2**62, parts=parts, consumed=consumed + 2**31)
    return [_bytes_of(state) for state in (*states, most)]


def _state_of_dict(data: bytes) -> RunState:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = data
    return RunState.from_dict(value, FILE)


_SEAL: Final = _written("chunk_00001.jsonl.completed")
_READING: Final = _written("cursors/run0.reading.json")
FORMATS: Final = {
    target.name: target
    for target in (
        FileFormat("manifest", _written("stream.json"), lambda data: Manifest.decode(data, FILE)),
        FileFormat("head", _written("head.json"), lambda data: Head.decode(data, FILE)),
        FileFormat("end", _written("stream.end"), lambda data: End.decode(data, FILE)),
        FileFormat("owner", _written("stream.owner"), lambda data: Owner.decode(data, FILE)),
        FileFormat("retired", _written("retired.json"), lambda data: Retired.decode(data, FILE)),
        FileFormat("seal", _SEAL, lambda data: Seal.decode(data, 1, FILE), errors.ChunkCorrupt),
        FileFormat("cursor", _written("cursors/run0.json"), lambda data: Cursor.decode(data, "run0", FILE)),
        FileFormat("reading", _READING, lambda data: ReadingHint.decode(data, "run0", FILE)),
        FileFormat("state", _states(), _state_of_dict, errors.StateInvalid),
        FileFormat("state-dict", _states(), _state_of_dict, errors.StateInvalid),
    )
}


_STRINGS: Final = (
    *("", "id", "text", "a:b", '"', "\\", "\u2028", "\u0085", "\U0001f600", "x" * 40, "\\u0022", "{}", "\x7f", "\0"),
)
_LEAVES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 10**18, 1.5, 1e300, -0.0, 1e-320),
    *_STRINGS,
)


def drawn_lines(random: Random) -> list[bytes]:
    lines = []
    for _ in range(random.choice((1, 2, 3, 40))):
        line = encode_row({random.choice(_STRINGS): _drawn(random, 3) for _ in range(random.randint(0, 4))})
        way = random.randrange(12)
        if way == 0:
            line = spoil_more(line, random)
        elif way == 1:
            line = line[:-1] + random.choice((b"\r\n", b"", b" \n", b"\t\n"))
        elif way == 2:
            line = b'{"id"' + random.choice((b":", b" :", b": ")) + b"1," + line[1:]  # The same member, with blanks
        elif way == 3:
            line = b'{"n":' + random.choice((b"18446744073709551616", b"-9223372036854775809", b"1e400")) + b"}\n"
        lines.append(line)
    return lines


def check_one(line: bytes) -> bool:
    try:
        row = check_row(line)
    except errors.RowInvalid as error:
        assert error.reason, "no reason"
        assert len(str(error)) <= 500, f"a message of {len(str(error))} characters"
        assert error.byte is None or 0 <= error.byte <= len(line), f"byte {error.byte} of {len(line)}"
        str(error).encode()
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
    found = check_lines(lines)
    rows: list[bytes] = []
    refused = None
    for index, line in enumerate(lines):
        try:
            rows.append(check_line(line)[0])
        except errors.RowInvalid as error:
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
    path.write_bytes(data)
    text = data[3:] if data.startswith(b"\xef\xbb\xbf") else data
    lines = [line for line in text.split(b"\n") if line.strip(b" \t\r")]
    chunk = open_foreign(path, 0)
    assert len(chunk) == len(lines), f"{len(chunk)} rows in {len(lines)} lines"
    for number, line in enumerate(lines):
        try:
            wanted: Any = check_row(line.strip(b" \t\r\n"))
        except errors.RowInvalid:
            wanted = None
        try:
            row: Any = chunk.parse([chunk.line(number)], number)[0]
        except errors.RowInvalid as error:
            row = None
            assert error.file == str(path), "names another file"
            assert error.line is not None, "no line"
            assert 0 <= (error.byte or 0) <= len(data), "no byte of the file"
        except errors.ChunkCorrupt as error:
            raise AssertionError("corrupt, but nobody has changed it") from error
        assert row == wanted, f"row {number} is {str(row)[:100]} instead of {str(wanted)[:100]}"


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
    if isinstance(value, _Twice):
        return len({key for key, _ in value}) < len(value) or any(_twice(inner) for _, inner in value)
    return isinstance(value, list) and any(map(_twice, value))


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} was taken")
