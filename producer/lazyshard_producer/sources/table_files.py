"""Files of rows that never change once they are there, in an order of their own: opened, listed, known again.

A file's fingerprint is the XXH3 of its name, its size, its first 4 KiB and its last 64 KiB, where Parquet and Arrow
files keep their index. Not noticed: a change in the middle of a file that keeps its size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import plain_name
from lazyshard_producer.sources.regular_file import open_regular
from lazyshard_producer.sources.source_file import read_at, refuse_os_error

_HEAD_BYTES: Final = 4 << 10
_TAIL_BYTES: Final = 64 << 10
"""More than the whole footer of most Parquet files."""


class Version(NamedTuple):
    """What tells cheaply that a file is the one that was opened.

    Attributes:
        size: in bytes.
        modified_ns: when it was last written to, in nanoseconds since 1970.
    """

    size: int
    modified_ns: int


def list_table_files(directory: str, suffixes: tuple[str, ...]) -> list[str]:
    """Returns the paths of a directory's files with one of these endings, sorted by name.

    Names that begin with a dot or an underscore are passed over, as other programs do: they are not data.

    Raises:
        SourceRefused: there are none, or the directory cannot be listed.
    """
    wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
    try:
        with os.scandir(directory) as entries:
            found = [entry for entry in entries if not entry.name.startswith((".", "_"))]
            names = sorted(entry.name for entry in found if entry.name.endswith(suffixes) and not entry.is_dir())
            folders = sorted(entry.name for entry in found if entry.is_dir())
    except OSError as cause:
        raise refuse_os_error(directory, cause) from cause
    if names:
        return [os.path.join(directory, name) for name in names]
    actual = f"none; it has folders ({', '.join(folders[:3])}), give each as a source" if folders else "none"
    raise refuse_table(directory, f"files {wanted}", actual)


def fingerprint(path: str) -> tuple[int, Version]:
    """Returns a file's fingerprint and version.

    Raises:
        SourceRefused: it cannot be read.
    """
    with open_regular(path, 0) as file:
        status = os.fstat(file.fileno())
        tail = max(0, status.st_size - _TAIL_BYTES)
        parts = (read_at(file, path, _HEAD_BYTES, 0), read_at(file, path, _TAIL_BYTES, tail))
    digest = xxhash.xxh3_64(os.fsencode(os.path.basename(path)))
    digest.update(b"\0%d\0" % status.st_size)
    for part in parts:
        digest.update(part)
    return digest.intdigest(), Version(status.st_size, status.st_mtime_ns)


def file_version(path: str) -> Version:
    """Returns a file's version.

    Raises:
        SourceRefused: it is not there.
    """
    try:
        status = os.stat(path)
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause
    return Version(status.st_size, status.st_mtime_ns)


def check_read_files(name: str, paths: Sequence[str], read: Sequence[int]) -> None:
    """Checks that the files which were read are still there, as they were, with no other before or between them.

    Args:
        name: the source, for messages.
        paths: the files that are there, in order.
        read: fingerprints of those that were read (the last one perhaps in part), in order.

    Raises:
        SourceRefused: with what is wrong with the first that is not so.
    """
    for index, expected in enumerate(read):
        if index < len(paths) and fingerprint(paths[index])[0] == expected:
            continue
        raise _difference(name, paths, read, index)


def refuse_table(path: str, expected: str, actual: str, hint: str = "") -> SourceRefused:
    """Returns the error for a file or directory that is not what it has to be."""
    return SourceRefused(
        f"{path}: expected {expected}, found {actual}{hint}", file=path, expected=expected, actual=actual
    )


def refuse_changed(path: str) -> SourceRefused:
    """Returns the error for a file that is no longer the one of which rows were read."""
    hint = "; put the old file back, or choose another --out"
    return refuse_table(path, "the file whose rows were read", "another one: it was changed or replaced", hint)


def _difference(name: str, paths: Sequence[str], read: Sequence[int], index: int) -> SourceRefused:
    there = [fingerprint(path)[0] for path in paths[index:]]
    hint = "; put them back as they were (others may follow, by the order of names), or choose another --out"
    if there and read[index] in there:
        actual = f"{plain_name(os.path.basename(paths[index]))}, which is new and comes before files already read"
    elif not there or there[0] in read[index:]:
        actual = "that one gone"
    else:
        raise refuse_changed(paths[index])
    return refuse_table(name, f"as file {index + 1} the one whose rows were read", actual, hint)
