"""Mistakes of a producer of which the harness must find each: installed in the command's process before all else."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from lazyshard.format.records import arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.store import durable
from lazyshard.stream import listing, lock, publishing
from lazyshard.stream.listing import Listing
from lazyshard.stream.publishing import OpenChunk, RowFile
from tests.harness.planted.planting import around, everywhere, keep_begun, on_restart
from tests.harness.processes.kill_points import When


class Mutant(NamedTuple):
    install: Callable[[], None]  # makes it
    found: str  # part of what the harness says
    scene: str = "plain"  # the scene that is played
    kind: str = "kill"  # of the faults
    when: When = "before"  # where in a call they come
    step: int = 2  # every how manieth call has one
    first: int = 1  # none before this one has

    @property
    def broken(self) -> tuple[str]:
        return (f"{self.install.__module__}:{self.install.__name__}",)


def seal_before_data() -> None:
    def publish(directory: Path, chunks: list[tuple[OpenChunk, Any]], now: float, held: lock.WriterLock) -> None:
        ((chunk, source),) = chunks
        name = seal_name(chunk.number)
        chunk.finish()
        durable.publish_bytes(chunk.seal(source, now), directory / name, held.path(name))
        durable.rename(chunk.rows.path, directory / chunk_name(chunk.number))

    everywhere(publishing.publish_chunks, publish)


def torn_chunk_kept() -> None:
    keep_begun(".jsonl")


def position_ahead(rows: int = 1) -> None:
    from lazyshard_producer.rows.reader import Batch

    def position(original: Any, self: Any, index: int) -> Any:
        return original(self, min(max(index + rows, 0), len(self.lines) - 1))

    around(Batch, "position", position)


def position_behind() -> None:
    position_ahead(-1)


def cut_forgotten() -> None:  # The position in a seal is behind the row that is cut, whatever of it is published
    from lazyshard_producer.rows.reader import Unit

    around(Unit, "position", lambda position, self, skip, **parts: replace(position(self, skip, **parts), cut=0))


def _deletable(before: Callable[[int], int]) -> None:
    from lazyshard_producer import limits

    kept = limits.why_kept
    everywhere(kept, lambda claims, rules, stop: kept(claims, rules, stop)._replace(before=before(stop)))


def deleted_before_acknowledged() -> None:
    _deletable(lambda published: max(0, published - 1))


def never_deleted() -> None:
    _deletable(lambda published: 0)


def refused_row_forgotten() -> None:
    _cut_at(0)


def refused_row_kept_twice() -> None:  # A restart cuts nothing off the quarantine, and meets again what no seal counts
    _cut_at(1 << 40)


def _cut_at(size: int) -> None:
    from lazyshard_producer.rows.refusals import Quarantine

    around(Quarantine, "__init__", lambda init, self, out, committed, **more: init(self, out, size, **more))


def leftovers_stay() -> None:
    lock._clear = lambda directory, listing, lock: None
    lock.destroy = lambda directory: None


def seal_in_place() -> None:
    def publish(data: bytes, target: Path, temporary: Path, **_: bool) -> None:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        durable.write_all(fd, data)
        os.close(fd)

    for name in ("publish_bytes", "publish_new_bytes"):
        if hasattr(publishing, name):
            setattr(publishing, name, publish)


def sealed_again() -> None:
    def seal_again(directory: Path, chunk: int) -> None:
        path = directory / seal_name(chunk)
        seal = replace(Seal.decode(path.read_bytes(), chunk), sealed_at=time.time() + 1)
        durable.publish_bytes(seal.encode(), path, directory / ".again")

    on_restart(seal_again)


def failed_sync_ignored() -> None:
    everywhere(durable.sync, _ignoring(lambda fd: os.fsync(fd)))  # A kill point takes the place of `os.fsync` later


def failed_write_ignored() -> None:
    everywhere(durable.write_all, _ignoring(durable.write_all))


def _ignoring(call: Callable[..., object]) -> Callable[..., None]:
    def ignoring(*arguments: Any) -> None:
        with contextlib.suppress(OSError):
            call(*arguments)

    return ignoring


def short_write_ignored() -> None:
    everywhere(durable.write_all, lambda fd, data: os.write(fd, data))


def journal_not_written() -> None:
    """In which order a followed directory's lines were read is only known as long as the run lasts."""
    from lazyshard_producer.following import journal

    module: Any = journal
    module.write_all = lambda fd, data: None


def traceback_shown() -> None:  # An error of the filesystem is none that the command knows

    def write_all(fd: int, data: bytes) -> None:
        try:
            os.write(fd, data)
        except OSError as cause:
            raise RuntimeError("write") from cause

    everywhere(durable.write_all, write_all)


def written_uncounted() -> None:  # Writes a file past every call that is counted; for the trace
    from lazyshard.stream.head import Announcer

    def tell(original: Any, self: Announcer, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self._path.with_name("note").write_text("told")

    around(Announcer, "tell", tell)


def side_file_named_after_the_seal() -> None:
    def publish(directory: Path, chunks: list[tuple[OpenChunk, Any]], now: float, held: lock.WriterLock) -> None:
        ((chunk, source),) = chunks
        assert chunk.arrays is not None
        name = seal_name(chunk.number)
        chunk.finish()
        durable.rename(chunk.rows.path, directory / chunk_name(chunk.number))
        durable.publish_bytes(chunk.seal(source, now), directory / name, held.path(name))
        durable.rename(chunk.arrays.path, directory / arrays_name(chunk.number))

    everywhere(publishing.publish_chunks, publish)


def torn_side_file_kept() -> None:
    keep_begun(".arrays")


def side_file_error_ignored() -> None:  # Seals a chunk whatever became of the file of its arrays

    def finish(self: OpenChunk) -> None:
        self.rows.finish()
        with contextlib.suppress(OSError):
            if self.arrays is not None:
                self.arrays.finish()

    OpenChunk.finish = finish  # type: ignore[method-assign]


def side_file_made_again() -> None:
    def write_again(directory: Path, chunk: int) -> None:
        path = directory / arrays_name(chunk)
        durable.publish_bytes(bytes(path.stat().st_size), path, directory / ".again")

    on_restart(write_again)


def other_arrays_after_a_restart() -> None:
    """A run that continues seals arrays that are whole, and none of its rows': only who knows the rows can tell."""

    def extend(original: Any, self: RowFile, data: bytes, ends: Any, digests: Any) -> None:
        if self.path.suffix == ".arrays":
            begins, data = [0, *ends.tolist()], bytes(len(data))
            found = [xxhash.xxh3_64_intdigest(data[one:other]) for one, other in itertools.pairwise(begins)]
            digests = np.asarray(found, np.uint64)
        original(self, data, ends, digests)

    on_restart(lambda *_: around(RowFile, "extend", extend))


def other_digests_after_a_restart() -> None:
    def sealed(original: Any, self: RowFile) -> Any:
        offsets, digests = original(self)
        return offsets, digests[::-1] if self.path.suffix == ".arrays" else digests

    on_restart(lambda *_: around(RowFile, "sealed", sealed))


def side_file_leftovers_stay() -> None:
    def clear(folder: Path) -> bool:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix != ".arrays" and not path.is_dir():
                path.unlink()
        return True

    everywhere(durable.clear_folder, clear)


def side_files_never_deleted() -> None:
    around(listing, "remove", lambda remove, path: None if path.suffix == ".arrays" else remove(path))


def side_files_deleted_only_once() -> None:
    """A deletion that was stopped between a chunk and its side file is taken for done."""

    def kept(original: Any, self: Listing, first: int) -> Any:
        found = original(self, first)
        return replace(found, leftovers=[name for name in found.leftovers if not name.endswith(".arrays")])

    around(listing, "_is_there", lambda is_there, directory, chunk, arrays: is_there(directory, chunk, False))
    around(Listing, "starting_at", kept)


_ALL: Final[Sequence[Mutant]] = (
    Mutant(seal_before_data, "missing", step=1, first=12),
    Mutant(torn_chunk_kept, "not what was sealed", when="half", step=1),
    Mutant(position_ahead, "has rows", first=35),
    Mutant(position_behind, "has rows", first=35),
    Mutant(cut_forgotten, "has a row that no source has", "split", first=35),
    Mutant(deleted_before_acknowledged, "acknowledged are those below", "small disk"),
    Mutant(never_deleted, "deleted are only those below", "retained", step=5, first=61),
    Mutant(refused_row_forgotten, "in quarantine is", step=3, first=34),
    Mutant(refused_row_kept_twice, "in quarantine is", step=3, first=28),
    Mutant(leftovers_stay, "leftover", step=3),
    Mutant(seal_in_place, "cannot be read", when="half", step=1),
    Mutant(sealed_again, "changed after it was sealed", step=3, first=34),
    Mutant(failed_sync_ignored, "exit status 0", kind="EIO"),
    Mutant(failed_write_ignored, "exit status", kind="ENOSPC", when="half", step=1),
    Mutant(short_write_ignored, "exit status", kind="short", when="half", step=1),
    Mutant(journal_not_written, "a run on the ended stream changes it", "followed", step=3),
    Mutant(traceback_shown, "exit status 70", kind="EIO", when="half", step=1),
    Mutant(side_file_named_after_the_seal, ".arrays missing", "encoded", step=1, first=24),
    Mutant(torn_side_file_kept, ".arrays is not what was to be sealed", "encoded", when="half", step=1),
    Mutant(side_file_error_ignored, "exit status 0", "encoded", kind="EIO", step=1, first=24),
    Mutant(side_file_made_again, ".arrays of chunk 0 changed after it was sealed", "encoded", step=5, first=24),
    Mutant(other_arrays_after_a_restart, ".arrays is not what was to be sealed", "encoded", step=5, first=24),
    Mutant(other_digests_after_a_restart, "tells of other arrays", "encoded", step=5, first=24),
    Mutant(side_file_leftovers_stay, "leftover", "encoded", step=3, first=24),
    Mutant(side_files_never_deleted, "leftover", "encoded retained", step=5),
    Mutant(side_files_deleted_only_once, "leftover", "encoded retained", step=1, first=80),
)

MUTANTS: Final[dict[str, Mutant]] = {mutant.install.__name__.replace("_", " "): mutant for mutant in _ALL}
