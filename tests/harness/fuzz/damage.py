"""How bytes are spoilt, as a disk, a crash or a hand does it and by the structure of JSON, and whole directories."""

import itertools
import os
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from lazyshard.cli.output import pretty
from lazyshard.format.arrays import pack_row
from lazyshard.format.records import MANIFEST, End, Head, Manifest, Owner, Retired, arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.format.state import Cursor, ReadingHint, RunState
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
    values: tuple[Any, ...] | None = None  # as they are to be read; None where that is what they parse to

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
    writer = "node1", 4711, AT, "" if ended else "stopped"
    files = {
        "stream.json": Manifest(ID, per_chunk, AT).encode(),
        "stream.owner": Owner(1, "0123456789abcdef", "node1", 4711, AT).encode(),
        "head.json": Head(len(cuts), count, ended, "finished" if ended else "idle", 0.0, *writer).encode(),
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
        files[f"cursors/{consumer}.reading.json"] = ReadingHint(consumer, ID, 1, 0, len(cuts), AT).encode()
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


def with_lists(row: Any) -> Any:
    return orjson.loads("".join(pretty(row, full=True)))


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


_PIECES: Final = (  # What has been the trouble of some reader of JSON or of lines
    *(b"-", b"9", b"0", b'"', b"[", b"]", b"{", b"}", b",", b":", b"\\", b"\n", b"\r\n", b"\0", b"null", b"true"),
    *(b"1e999", b"NaN", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\\ud800", b"\xed\xa0\x80", b"\xe2\x80\xa8"),
    *(b"18446744073709551616", b"-9223372036854775809", b"0" * 40, b"9" * 400, b"[" * 2000, b'{"a":' * 1100),
    *(b'"format":2,', b"{}\n", b"\n\n"),
)

_NUMBERS: Final = (
    *(0, 1, 2, 3, -1, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**15),
    *(10**15 + 1, 10**8, 10**8 + 1, 1.5, -0.0, 1e18, -1e18, 1e300, -1e300, 5e-324),
)

_VALUES: Final[tuple[Any, ...]] = (
    *_NUMBERS,
    *(None, True, False, "", "x", "AAAAAAAAAAA=", "0" * 32, "0" * 31, "\u0000", "\u001b[31m", "\u2028"),
    *("\U0001f600", "running", "..", "../../etc/passwd", "x" * 300, [], [[]], {}, {"a": None}, [0, 1]),
    *([[0, 5], [3, 4]], [1.5, None]),
)


def spoil(data: bytes, random: Random) -> tuple[str, bytes]:
    """Returns what was done, in a few words, and the bytes: another piece somewhere, or a piece less, or moved."""
    way = random.choice(list(_WAYS))
    start = random.randrange(max(1, len(data)))
    stop = min(len(data), start + (random.randint(1, 8) if random.randrange(3) else random.randint(1, 1 << 12)))
    return way, _WAYS[way](data, start, stop, random)


def spoil_more(data: bytes, random: Random) -> bytes:
    for _ in range(random.randint(1, 4)):
        _, data = spoil(data, random)
    return data


def alter_json(data: bytes, random: Random, *, values: Sequence[Any] = ()) -> bytes:
    """Changes, removes, adds and doubles fields; spoils what is no JSON object as bytes. `values`: more to put in."""
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
        key, other = random.choice(list(found) or ["format"]), random.choice(_VALUES)
        twice = orjson.dumps({key: other})[1:-1]
        text = orjson.dumps(found)
        return text[:-1] + b"," + twice + b"}\n" if random.randrange(2) and found else b"{" + twice + b"," + text[1:]
    return orjson.dumps(found) + random.choice((b"\n", b"", b"\n\n", b" "))


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        one = pending.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, inner in items:
            found.append((one, key))
            pending.append(inner)
    return found


def _moved(data: bytes, start: int, stop: int, random: Random) -> bytes:
    rest = data[:start] + data[stop:]
    at = random.randrange(len(rest) + 1)
    return rest[:at] + data[start:stop] + rest[at:]


def _piece(data: bytes, start: int, stop: int, random: Random) -> bytes:
    return data[:start] + random.choice(_PIECES) + data[random.choice((start, min(start + 1, len(data)), stop)) :]


_WAYS: Final[dict[str, Callable[[bytes, int, int, Random], bytes]]] = {
    "flip bit": lambda data, at, _, random: data[:at] + _flipped(data[at : at + 1], random) + data[at + 1 :],
    "other bit": lambda data, at, _, random: data[:at] + _flipped(data[at : at + 1], random) + data[at + 1 :],
    "other bytes": lambda data, at, to, random: data[:at] + random.randbytes(min(to - at, 64)) + data[to:],
    "cut": lambda data, at, to, random: data[:at],
    "zeros": lambda data, at, to, random: data[:at] + bytes(to - at) + data[to:],
    "zeros to the end": lambda data, at, to, random: data[:at] + bytes(len(data) - at),
    "twice": lambda data, at, to, random: data[:to] + data[at:],
    "without": lambda data, at, to, random: data[:at] + data[to:],
    "moved": _moved,
    "more": lambda data, at, to, random: data + random.choice((b"\n", b"\0", b" ", b"{}\n", b"x", data)),
    "piece": _piece,
    "other piece": _piece,
    "nothing left": lambda data, at, to, random: b"",
}


def _flipped(byte: bytes, random: Random) -> bytes:
    return bytes(one ^ 1 << random.randrange(8) for one in byte)


_NAMES: Final = (  # Where a file may be copied to, besides the names that there are
    *("chunk_00000.jsonl", "chunk_00001.jsonl", "chunk_00002.jsonl", "chunk_00003.jsonl", "chunk_00004.jsonl"),
    *("chunk_1.jsonl", "chunk_000002.jsonl", "chunk_99999.jsonl", "chunk_100000.jsonl"),
    *("chunk_" + "9" * 200 + ".jsonl", "chunk_-1.jsonl", "stream.json", "head.json", "stream.end", "retired.json"),
    *("stream.owner", "cursors/run0.json", "cursors/other.json", "cursors/run0.reading.json", "cursors/.run0.lock"),
    *(".producer.lock", "quarantine.jsonl", ".tmp/chunk_00003.jsonl.0123456789abcdef", "unknown"),
)

_CLAIMS: Final = ("head.json", "stream.end", "stream.json", "retired.json")  # They are believed, not digested
# What may be there in the place of a file; a folder is a directory that is not empty
KINDS: Final = ("directory", "folder", "pipe", "socket", "device", "hole", "link out", "link to itself", "link within")


@dataclass
class Damaged:
    what: list[str]  # it, in a line
    lies: bool  # whether a file that is believed may say something else now, in good form; never by damage to bytes


def damage(directory: Path, known: Known, random: Random) -> Damaged:
    done = Damaged([], False)
    if random.randrange(3):
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            _damage_once(directory, known, random, done)
    else:
        # By the structure of JSON, and nothing else: two such changes could forge a chunk, which no digest keeps out.
        name = random.choice([name for name, data in known.files.items() if data.startswith(b"{") or not data])
        _write(directory / name, alter_json(known.files[name], random, values=(1, 2, 3, 4, 5, 6, 8)))
        done.what.append(f"alter {name}")
        done.lies = name in _CLAIMS
    return done


def damage_cursor(directory: Path, known: Known, random: Random) -> Damaged:
    names = [name for name in known.files if name.startswith("cursors/run")]
    done = Damaged([], False)
    ahead = random.choice((None, None, None, 4, 5, 10**6))  # All far ahead of the data, or each as it comes
    for name in names:
        data = known.files[name]
        if ahead is not None and not name.endswith(".reading.json"):
            data = orjson.dumps(orjson.loads(data) | {"chunks_before": ahead})
        elif random.randrange(4):
            data = alter_json(data, random, values=(3, 4, 5, 10**6))
        else:
            data = spoil(data, random)[1]
        _write(directory / name, data)
        done.what.append(f"alter {name}" if ahead is None else f"{name} done with {ahead}")
    return done


def _damage_once(directory: Path, known: Known, random: Random, done: Damaged) -> None:
    names = list(known.files)
    name = random.choice(names)
    path = directory / name
    way = random.randrange(12)
    if way < 6:
        what, data = spoil(_read(path), random)
        _write(path, data)
        done.what.append(f"{what} {name}")
    elif way == 6:
        other = random.choice(names)
        both = name.startswith("chunk_") and other.startswith("chunk_") and random.randrange(2)
        for end in ("", ".completed") if both else (None,):
            one = directory / (name if end is None else name.removesuffix(".completed") + end)
            two = directory / (other if end is None else other.removesuffix(".completed") + end)
            first, second = _read(one), _read(two)
            _write(one, second)
            _write(two, first)
        done.what.append(f"swap {name} {other}{' with their seals' if both else ''}")
    elif way == 7:
        other = random.choice((*names, *_NAMES, *(name + ".completed" for name in _NAMES[:10])))
        _write(directory / other, _read(path))
        done.what.append(f"copy {name} to {other}")
        done.lies = done.lies or other in _CLAIMS
    elif way < 10:
        kind = random.choice(KINDS)
        replace_by(path, kind, directory / random.choice(names))
        done.what.append(f"{kind} for {name}")
        done.lies = done.lies or (kind == "link within" and name in _CLAIMS)  # As good as a copy
    elif way == 10:
        other = random.choice((*_NAMES, *(name + ".completed" for name in _NAMES[:10])))
        if not os.path.lexists(directory / other):
            _write(directory / other, random.choice((b"", b"{}\n", b"\0" * 40, b'{"format":1}\n')))
            done.what.append(f"make {other}")
    else:
        _remove(path)
        done.what.append(f"remove {name}")


def replace_by(path: Path, kind: str, target: Path) -> None:
    """Puts something of another kind in the place of a file; `target` is where a link within the stream leads."""
    _remove(path)
    if kind in ("directory", "folder"):
        path.mkdir()
        if kind == "folder":
            (path / "x").write_bytes(b"x")
    elif kind != "device":
        _MAKES[kind](path, target)
    elif os.geteuid() == 0:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # Without end, and without bound


_MAKES: Final[dict[str, Callable[[Path, Path], object]]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: _make_socket(path),
    "hole": lambda path, _: _make_hole(path),
    "link out": lambda path, _: path.symlink_to("/etc/hostname"),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link within": lambda path, target: path.symlink_to(os.path.relpath(target, path.parent)),
}


def _make_hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 39)  # Half a terabyte of zeros, which take no room


def _make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # A relative path is short: 107 bytes are the most
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else b""
    except OSError:
        return b""


def _write(path: Path, data: bytes) -> None:
    if os.path.lexists(path) and not (path.is_file() and not path.is_symlink()):
        _remove(path)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    elif os.path.lexists(path):
        path.unlink()
