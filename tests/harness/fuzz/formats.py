"""The files of JSON as targets of fuzzing: whatever the bytes, a decoder returns a value or its own error. What must
hold for each: bytes that are taken decode to a value whose bytes are taken again, for the same value; bytes that are
refused are refused with the file's own class of error, which names the file, in a message of bounded length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from random import Random
from typing import Any, Final

import numpy as np
import orjson

from lazyshard.errors import FileInvalid, FormatInvalid, SealInvalid, StateInvalid, VersionUnsupported
from lazyshard.format.cursor import Cursor, CursorToken, ReadingMark
from lazyshard.format.records import STATES, End, Head, Manifest, Owner, Retired
from lazyshard.format.seal import Seal
from lazyshard.format.state import RunState
from lazyshard.part import Part
from tests.harness.fuzz.mutations import alter_json, spoil_more

__all__ = ["FORMATS", "FileFormat", "check_bytes", "check_value", "mutated", "same"]
FILE: Final = "/some/stream/the-file"
MAX_MESSAGE: Final = 1000  # Characters of a message that a person is to read, whatever the file held
_ID: Final = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"


@dataclass(frozen=True)
class FileFormat:
    name: str  # of the target
    make: Callable[[Random], Any]  # draws a value that a producer or a run may write
    encode: Callable[[Any], bytes]  # its bytes
    decode: Callable[[bytes], Any]  # reads them; the file is called `FILE`
    error: type[FormatInvalid]  # the class of the error with which they are refused


def check_value(target: FileFormat, value: Any) -> None:
    data = target.encode(value)
    assert same(target.decode(data), value), f"{target.name}: read otherwise than written: {data[:300]!r}"
    assert target.encode(target.decode(data)) == data


def check_bytes(target: FileFormat, data: bytes) -> bool:
    """Asserts what must hold for any bytes; returns whether they were taken."""
    try:
        value = target.decode(data)
    except FormatInvalid as error:
        assert isinstance(error, (target.error, VersionUnsupported)), f"{type(error).__name__} for {target.name}"
        assert error.file == FILE, f"names {error.file!r}"
        assert str(error).startswith(FILE), str(error)[:200]
        assert len(str(error)) <= MAX_MESSAGE, f"a message of {len(str(error))} characters"
        str(error).encode()
        return False
    again = target.encode(value)
    second = target.decode(again)
    assert same(second, value), f"{target.name}: {data[:300]!r} is taken, and written otherwise: {again[:300]!r}"
    assert target.encode(second) == again
    return True


def mutated(target: FileFormat, random: Random) -> bytes:
    """Returns the bytes of a value, spoilt: by the structure of JSON, as bytes, or both."""
    data = target.encode(target.make(random))
    way = random.randrange(4)
    if way < 3:
        data = alter_json(data, random)
    if way > 1:
        data = spoil_more(data, random)
    return data


def same(one: Any, other: Any) -> bool:
    """Whether two values say the same; arrays are compared by their numbers."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    if is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    return type(one) is type(other) and bool(one == other)


def _time(random: Random) -> float:
    return random.choice((0.0, 1700000000.25, -1.5, 1e18, random.uniform(0, 2e9)))


def _number(random: Random, high: int, low: int = 0) -> int:
    return random.choice((low, high, random.randint(low, min(high, low + 9)), random.randint(low, high)))


def _text(random: Random) -> str:
    return random.choice(("x", "node7", "\u00fc\u2028\U0001f600", '"\\/', "a" * 200)) + random.choice(("", "1", "\n\t"))


def _manifest(random: Random) -> Manifest:
    return Manifest(f"{random.getrandbits(128):032x}", _number(random, 100_000_000, 1), _time(random))


def _head(random: Random) -> Head:
    end = _end(random)
    rate = random.choice((0.0, 1e-300, 12.5, 1e300))
    note = random.choice(("", _text(random)))
    state = random.choice(STATES)
    return Head(
        end.chunks,
        end.samples,
        bool(random.randrange(2)),
        state,
        rate,
        _text(random),
        _number(random, 2**31),
        _time(random),
        note,
        open=_number(random, 2**62),
        row_at=_time(random),
    )


def _end(random: Random) -> End:
    chunks = _number(random, 10**15)
    return End(chunks, 0 if chunks == 0 else _number(random, 2**62, chunks))


def _owner(random: Random) -> Owner:
    return Owner(
        _number(random, 2**62, 1), f"{random.getrandbits(64):x}", _text(random), _number(random, 2**31), _time(random)
    )


def _retired(random: Random) -> Retired:
    return Retired(f"{random.getrandbits(128):032x}", _number(random, 10**15), _time(random))


def _seal(random: Random) -> Seal:
    rows = random.randint(1, 5)
    offsets = [0]
    for _ in range(rows):
        offsets.append(offsets[-1] + _number(random, 2**40, 1))
    tokens = [_number(random, 2**32 - 1) for _ in range(rows)] if random.randrange(2) else None
    source = random.choice((None, 0, "x", [1, {"path": "a", "byte": 2**60}], {"\u00fc": [None, 1.5, True]}))
    return Seal(
        chunk=7,
        offsets=np.array(offsets, np.uint64),
        digests=np.array([_number(random, 2**64 - 1) for _ in range(rows)], np.uint64),
        tokens=None if tokens is None else np.array(tokens, np.uint32),
        source=source,
        sealed_at=_time(random),
    )


def _state(random: Random) -> RunState:
    parts = []
    steps = 0
    for number in range(random.randint(1, 3)):
        steps += _number(random, 50)
        skip = tuple((start, start + random.randint(1, 3)) for start in range(0, 12, 4) if random.randrange(2))
        epoch = random.choice((None, None, number, 2**62))
        parts.append(
            Part(
                random.choice((1, 2, 8, 2**31)),
                _number(random, 2**62, 1),
                random.choice((0, 1, 256, 10**6)),
                epoch,
                bool(random.randrange(4)),
                skip,
                steps,
                random.choice((0, 1, 32)),
            )
        )
    unit = random.choice((1, 4, 100))
    return RunState(
        random.choice((None, _ID)),
        _number(random, 100_000_000, 1),
        unit,
        unit * random.choice((0, 1, 4)),
        _number(random, 2**63 - 1),
        random.choice((None, 1, 2**62)),
        tuple(parts),
        sum(part.dp * part.draws for part in parts if part.trained),
    )


def _cursor(random: Random) -> Cursor:
    token = CursorToken(_number(random, 2**62, 1), f"{random.getrandbits(64):016x}", 14106, "node1").text
    cursor = Cursor(
        "sft",
        random.choice((None, _ID)),
        _number(random, 2**62),
        _number(random, 10**15),
        {"dp_size": _number(random, 2**31), "seed": _number(random, 2**63 - 1)},
        _time(random),
        owner=random.choice(("", token, "x")),
    )
    if random.randrange(2):
        return cursor
    state = _state(random)
    return replace(cursor, stream_id=state.stream_id, consumed=state.consumed, state=state)


def _reading(random: Random) -> ReadingMark:
    return ReadingMark(
        "sft",
        random.choice((None, _ID)),
        _number(random, 2**31, 1),
        _number(random, 2**62),
        _number(random, 10**15),
        _time(random),
    )


def _state_of_dict(data: bytes) -> RunState:
    """As a checkpoint gives it back: values, not bytes. What is no JSON is not for this one to refuse."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = data
    return RunState.from_dict(value, FILE)


def _encoded(value: Any) -> bytes:
    data: bytes = value.encode()
    return data


FORMATS: Final = {
    target.name: target
    for target in (
        FileFormat("manifest", _manifest, _encoded, lambda data: Manifest.decode(data, FILE), FileInvalid),
        FileFormat("head", _head, _encoded, lambda data: Head.decode(data, FILE), FileInvalid),
        FileFormat("end", _end, _encoded, lambda data: End.decode(data, FILE), FileInvalid),
        FileFormat("owner", _owner, _encoded, lambda data: Owner.decode(data, FILE), FileInvalid),
        FileFormat("retired", _retired, _encoded, lambda data: Retired.decode(data, FILE), FileInvalid),
        FileFormat("seal", _seal, _encoded, lambda data: Seal.decode(data, 7, FILE), SealInvalid),
        FileFormat("cursor", _cursor, _encoded, lambda data: Cursor.decode(data, "sft", FILE), FileInvalid),
        FileFormat("reading", _reading, _encoded, lambda data: ReadingMark.decode(data, "sft", FILE), FileInvalid),
        FileFormat("state", _state, _encoded, lambda data: RunState.decode(data, FILE), StateInvalid),
        FileFormat("state-dict", _state, _encoded, _state_of_dict, StateInvalid),
    )
}
