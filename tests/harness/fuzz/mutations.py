"""How bytes are spoilt: as a disk, a crash or a hand would do it, and by the structure of JSON. Each function takes a
`random.Random` and draws all that it decides from it: a plain one in the sweep, one of Hypothesis'
(`strategies.randoms`) in CI, which can then make a failing case smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import orjson

__all__ = ["alter_json", "spoil", "spoil_more"]

_PIECES: Final = (
    b"-",
    b"9",
    b"0",
    b'"',
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b"\\",
    b"\n",
    b"\r\n",
    b"\0",
    b"null",
    b"true",
    b"1e999",
    b"NaN",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\\ud800",
    b"\xed\xa0\x80",
    b"\xe2\x80\xa8",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"0" * 40,
    b"9" * 400,
    b"[" * 2000,
    b'{"a":' * 1100,
    b'"format":2,',
    b"{}\n",
    b"\n\n",
)
"""What has been the trouble of some reader of JSON or of lines."""

_NUMBERS: Final = (
    0,
    1,
    2,
    3,
    -1,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    10**15,
    10**15 + 1,
    10**8,
    10**8 + 1,
    1.5,
    -0.0,
    1e18,
    -1e18,
    1e300,
    -1e300,
    5e-324,
)

_VALUES: Final[tuple[Any, ...]] = (
    *_NUMBERS,
    None,
    True,
    False,
    "",
    "x",
    "AAAAAAAAAAA=",
    "0" * 32,
    "0" * 31,
    "\u0000",
    "\u001b[31m",
    "\u2028",
    "\U0001f600",
    "running",
    "..",
    "../../etc/passwd",
    "x" * 300,
    [],
    [[]],
    {},
    {"a": None},
    [0, 1],
    [[0, 5], [3, 4]],
    [1.5, None],
)


def spoil(data: bytes, random: Random) -> tuple[str, bytes]:
    """Returns what was done, in a few words, and the bytes: another piece somewhere, or a piece less, or moved."""
    kind = random.choice(_WAYS)
    return kind.__name__.lstrip("_"), kind(data, random)


def spoil_more(data: bytes, random: Random) -> bytes:
    for _ in range(random.randint(1, 4)):
        _, data = spoil(data, random)
    return data


def alter_json(data: bytes, random: Random, *, values: Sequence[Any] = ()) -> bytes:
    """Returns a file of JSON with fields changed, missing, added, given twice, or of another type. `data`: the file.
    What is no JSON object is spoilt as any bytes are. `values`: values that may be put in, besides the usual ones."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not found:
        return spoil(data, random)[1]
    places = list(_places(found))
    for _ in range(random.randint(1, 3)):
        holder, key = random.choice(places)
        if key not in (holder if isinstance(holder, dict) else range(len(holder))):
            continue  # an earlier change has removed it
        way = random.randrange(6)
        value = holder[key]
        if way == 0 and isinstance(holder, dict):
            del holder[key]
        elif way == 1 and type(value) is int:
            more = value + random.choice((-1, 1, 2, -value - 1, 10**15))
            holder[key] = more if -(2**63) <= more < 2**64 else 0
        elif way == 2 and isinstance(value, str):
            holder[key] = spoil(value.encode(), random)[1].decode("utf-8", "replace")
        elif way == 3 and isinstance(value, list):
            holder[key] = value + value if random.randrange(2) else value[:-1]
        else:
            holder[key] = random.choice((*_VALUES, *values))
    if not random.randrange(8):
        # The same key twice: the second one, with the value of another field, is in front or behind.
        key, other = random.choice(list(found) or ["format"]), random.choice(_VALUES)
        twice = orjson.dumps({key: other})[1:-1]
        text = orjson.dumps(found)
        return text[:-1] + b"," + twice + b"}\n" if random.randrange(2) and found else b"{" + twice + b"," + text[1:]
    return orjson.dumps(found) + random.choice((b"\n", b"", b"\n\n", b" "))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns (object or list, key or index) of everything in a value."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        one = pending.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, inner in items:
            found.append((one, key))
            pending.append(inner)
    return found


def _flip_bit(data: bytes, random: Random) -> bytes:
    at = random.randrange(max(1, len(data)))
    return data[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _other_bytes(data: bytes, random: Random) -> bytes:
    start, stop = _region(data, random)
    return data[:start] + random.randbytes(min(stop - start, 64)) + data[stop:]


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(max(1, len(data)))]


def _zeros(data: bytes, random: Random) -> bytes:
    start, stop = _region(data, random)
    return data[:start] + bytes(stop - start) + data[stop:]


def _zeros_to_the_end(data: bytes, random: Random) -> bytes:
    start, _ = _region(data, random)
    return data[:start] + bytes(len(data) - start)


def _twice(data: bytes, random: Random) -> bytes:
    start, stop = _region(data, random)
    return data[:stop] + data[start:]


def _without(data: bytes, random: Random) -> bytes:
    start, stop = _region(data, random)
    return data[:start] + data[stop:]


def _moved(data: bytes, random: Random) -> bytes:
    start, stop = _region(data, random)
    piece, rest = data[start:stop], data[:start] + data[stop:]
    at = random.randrange(len(rest) + 1)
    return rest[:at] + piece + rest[at:]


def _more(data: bytes, random: Random) -> bytes:
    return data + random.choice((b"\n", b"\0", b" ", b"{}\n", b"x", data))


def _piece(data: bytes, random: Random) -> bytes:
    start, stop = _region(data, random)
    return data[:start] + random.choice(_PIECES) + data[random.choice((start, min(start + 1, len(data)), stop)) :]


def _nothing_left(data: bytes, random: Random) -> bytes:
    return b""


_WAYS: Final[tuple[Callable[[bytes, Random], bytes], ...]] = (
    _flip_bit,
    _flip_bit,
    _other_bytes,
    _cut,
    _zeros,
    _zeros_to_the_end,
    _twice,
    _without,
    _moved,
    _more,
    _piece,
    _piece,
    _nothing_left,
)


def _region(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(max(1, len(data)))
    return start, min(len(data), start + (random.randint(1, 8) if random.randrange(3) else random.randint(1, 1 << 12)))
