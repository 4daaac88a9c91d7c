"""Damage to a whole stream directory: to the bytes of a file, to which file is where, and to what kind a file is of."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import orjson

from tests.harness.fuzz.mutations import alter_json, spoil
from tests.harness.fuzz.streams import Known

__all__ = ["KINDS", "Damaged", "damage", "damage_cursor", "replace_by"]

_NAMES: Final = (
    "chunk_00000.jsonl",
    "chunk_00001.jsonl",
    "chunk_00002.jsonl",
    "chunk_00003.jsonl",
    "chunk_00004.jsonl",
    "chunk_1.jsonl",
    "chunk_000002.jsonl",
    "chunk_99999.jsonl",
    "chunk_100000.jsonl",
    "chunk_" + "9" * 200 + ".jsonl",
    "chunk_-1.jsonl",
    "stream.json",
    "head.json",
    "stream.end",
    "retired.json",
    "stream.owner",
    "cursors/run0.json",
    "cursors/other.json",
    "cursors/run0.reading.json",
    "cursors/.run0.lock",
    ".producer.lock",
    "quarantine.jsonl",
    ".tmp/chunk_00003.jsonl.0123456789abcdef",
    "unknown",
)
"""Where a file may be copied to, besides the names that there are."""

_CLAIMS: Final = ("head.json", "stream.end", "stream.json", "retired.json")
"""Files that are not digested: what they say, where it can be read, is believed."""


KINDS: Final = ("directory", "folder", "pipe", "socket", "device", "hole", "link out", "link to itself", "link within")
"""What may be there in the place of a file; a folder is a directory that is not empty."""


@dataclass
class Damaged:
    what: list[str]  # it, in a line
    # whether a file that is believed was rewritten so that it may say something else in good form; then the stream may
    # be told to end early, or a chunk to be deleted. Damage to bytes is never taken for that.
    lies: bool
    others: set[str]  # files that were touched


def damage(directory: Path, known: Known, random: Random) -> Damaged:
    """Damages the stream in a directory, once or a few times."""
    done = Damaged([], False, set())
    if random.randrange(3):
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            _damage_once(directory, known, random, done)
    else:
        # By the structure of JSON, and nothing else: two such changes could forge a chunk, which no digest keeps out.
        name = random.choice([name for name, data in known.files.items() if data.startswith(b"{") or not data])
        _write(directory / name, alter_json(known.files[name], random, values=(1, 2, 3, 4, 5, 6, 8)))
        done.what.append(f"alter {name}")
        done.lies = name in _CLAIMS
        done.others.add(name)
    return done


def damage_cursor(directory: Path, known: Known, random: Random) -> Damaged:
    """Damages all cursors of a stream, most of them by the structure of JSON."""
    names = [name for name in known.files if name.startswith("cursors/run")]
    done = Damaged([], False, set(names))
    # All of them far ahead of the data, or each as it comes: chunks go as soon as the last one lets them.
    ahead = random.choice((None, None, None, 4, 5, 10**6))
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
        # A chunk is moved with its seal, as by a hand that renames.
        both = name.startswith("chunk_") and other.startswith("chunk_") and random.randrange(2)
        for end in ("", ".completed") if both else (None,):
            one = directory / (name if end is None else name.removesuffix(".completed") + end)
            two = directory / (other if end is None else other.removesuffix(".completed") + end)
            first, second = _read(one), _read(two)
            _write(one, second)
            _write(two, first)
        done.what.append(f"swap {name} {other}{' with their seals' if both else ''}")
        done.others.add(other)
    elif way == 7:
        other = random.choice((*names, *_NAMES, *(name + ".completed" for name in _NAMES[:10])))
        _write(directory / other, _read(path))
        done.what.append(f"copy {name} to {other}")
        # An end for a stream that has none: what it says is true of the moment.
        done.lies = done.lies or other in _CLAIMS
        done.others.add(other)
    elif way < 10:
        kind = _replace(directory, name, names, random)
        done.what.append(f"{kind} for {name}")
        # As good as a copy: a cursor reads as a mark of what is deleted.
        done.lies = done.lies or (kind == "link within" and name in _CLAIMS)
    elif way == 10:
        other = random.choice((*_NAMES, *(name + ".completed" for name in _NAMES[:10])))
        if not os.path.lexists(directory / other):
            _write(directory / other, random.choice((b"", b"{}\n", b"\0" * 40, b'{"format":1}\n')))
            done.what.append(f"make {other}")
            done.others.add(other)
    else:
        _remove(path)
        done.what.append(f"remove {name}")
    done.others.add(name)


def _replace(directory: Path, name: str, names: list[str], random: Random) -> str:
    kind = random.choice(KINDS)
    replace_by(directory / name, kind, directory / random.choice(names))
    return kind


def replace_by(path: Path, kind: str, target: Path) -> None:
    """Puts something of another kind in the place of a file; `target` is where a link within the stream leads."""
    _remove(path)
    if kind in ("directory", "folder"):
        path.mkdir()
        if kind == "folder":
            (path / "x").write_bytes(b"x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _make_socket(path)
    elif kind == "device":
        if os.geteuid() == 0:
            # Without end, and without bound.
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    elif kind == "hole":
        path.write_bytes(b"")
        # Half a terabyte of zeros, which take no room.
        os.truncate(path, 1 << 39)
    elif kind == "link out":
        path.symlink_to("/etc/hostname")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "link within":
        path.symlink_to(os.path.relpath(target, path.parent))
    else:
        raise ValueError(f"there is no {kind!r}")


def _make_socket(path: Path) -> None:
    # The path of a socket has at most 107 bytes; relative to its folder it is short.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
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
