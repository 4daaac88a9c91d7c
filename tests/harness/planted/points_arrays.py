"""Mistakes of a producer with the files of its rows' arrays, of which the harness must find each."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lazyshard.format.batch import CheckedArrays
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.format.seal import SealedArrays
from lazyshard.store import durable
from lazyshard.stream import publishing, recovery, retire
from lazyshard.stream.listing import Listing
from lazyshard.stream.lock import WriterLock
from lazyshard.stream.open_chunk import OpenArrays, OpenChunk
from tests.harness.planted.planting import everywhere, keep_begun, on_restart


def side_file_named_after_the_seal() -> None:
    """Seals a chunk, then gives the file of its arrays its name."""

    def publish(
        directory: Path, chunk: OpenChunk, source: Any, now: float, *, lock: WriterLock, temporary: Path
    ) -> None:
        assert chunk.arrays is not None
        chunk.finish()
        durable.rename(chunk.path, directory / chunk_name(chunk.number))
        durable.publish_bytes(chunk.seal(source, now).encode(), directory / seal_name(chunk.number), temporary)
        durable.rename(chunk.arrays.file.path, directory / arrays_name(chunk.number))

    everywhere(publishing.publish_chunk, publish)


def torn_side_file_kept() -> None:
    """Goes on with a side file that was begun, without cutting off what is in it."""
    keep_begun(".arrays")


def side_file_error_ignored() -> None:
    """Seals a chunk whatever became of the file of its arrays."""

    def finish(self: OpenChunk) -> None:
        self._file.finish()
        if self.arrays is not None:
            with contextlib.suppress(OSError):
                self.arrays.file.finish()

    OpenChunk.finish = finish  # type: ignore[method-assign]


def side_file_made_again() -> None:
    """A restart writes the last side file anew, with other bytes."""
    original = recovery.recover

    def recover(directory: Path, *given: Any) -> Any:
        found = original(directory, *given)
        if found.last is not None:
            path = directory / arrays_name(found.last.chunk)
            durable.publish_bytes(bytes(path.stat().st_size), path, directory / ".again")
        return found

    everywhere(original, recover)


def other_arrays_after_a_restart() -> None:
    """A run that goes on seals arrays that are whole, and none of its rows': only who knows the rows can tell."""
    original = OpenArrays.extend

    def extend(self: OpenArrays, rows: CheckedArrays | None, count: int) -> None:
        if rows is not None:
            begins = [0, *rows.ends.tolist()]
            data = bytes(len(rows.data))
            digests = [xxhash.xxh3_64_intdigest(data[one:other]) for one, other in itertools.pairwise(begins)]
            rows = CheckedArrays(data, rows.ends, np.asarray(digests, np.uint64))
        original(self, rows, count)

    on_restart(lambda: setattr(OpenArrays, "extend", extend))


def other_digests_after_a_restart() -> None:
    """A run that goes on seals the digests of arrays in the wrong order."""
    original = OpenArrays.sealed

    def sealed(self: OpenArrays) -> SealedArrays:
        found = original(self)
        return SealedArrays(found.offsets, found.digests[::-1])

    on_restart(lambda: setattr(OpenArrays, "sealed", sealed))


def side_file_leftovers_stay() -> None:
    """A restart clears away what the last run has left, but for the files of arrays."""

    def clear(folder: Path) -> bool:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix != ".arrays" and not path.is_dir():
                path.unlink()
        return True

    everywhere(durable.clear_folder, clear)


def side_files_never_deleted() -> None:
    """Deletes chunks, and leaves their side files."""
    original = durable.remove

    def remove(path: Path) -> None:
        if path.suffix != ".arrays":
            original(path)

    retire.remove = remove  # type: ignore[attr-defined]


def side_files_deleted_only_once() -> None:
    """A deletion that was stopped between a chunk and its side file is taken for done."""
    there, starting_at = retire._is_there, Listing.starting_at
    retire._is_there = lambda directory, chunk, arrays: there(directory, chunk, False)

    def kept(self: Listing, first: int) -> Listing:
        found = starting_at(self, first)
        return replace(found, leftovers=[name for name in found.leftovers if not name.endswith(".arrays")])

    Listing.starting_at = kept  # type: ignore[method-assign]
