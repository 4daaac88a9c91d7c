"""The pieces of a write of Ray Data, and the thread that publishes them.

Files, in the stream's directory, or in the folder of the sink's writer if it has a name:

- `.ray/WRITE/PIECE/` is a piece, the rows of a write task. It gets this name when it is complete and durable; of two
  attempts of a task the first one does. It is removed when all its rows are published.
- `.ray/WRITE/PIECE/seals` has the seals of its chunks, one after another: one file costs one fsync.
- `.ray/WRITE/PIECE/piece.json` holds their lengths, and the keys of the rows if the sink has a key.
- `.ray/WRITE/.keys.json` has the keys of all rows that were durable when the write started.
- `.ray/keys/PIECE` is this file of a piece whose rows are all published.

Each start renames `.ray/WRITE`, so that tasks of an earlier write can add nothing to it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from lazyshard.errors import LazyShardError, ProducerFenced, StreamMismatch, WriterFailed
from lazyshard.format.records import chunk_name
from lazyshard.format.seal import Seal, SealBytes
from lazyshard.store.durable import rename, sync_directory, write_new
from lazyshard.store.files import check_folder, read_file, read_seal
from lazyshard.stream import ChunkWriter
from lazyshard.stream.chunk import open_sealed
from lazyshard.stream.publishing import OpenChunk, SealedPiece, WriteSteps
from lazyshard.stream.sequencer import checked_slices

POLL_S: Final = 0.5  # interval between polls for new pieces: chunks take longer to fill
MISSING_S: Final = 60.0  # how long a finished task's piece may stay invisible on a network filesystem
SEALS: Final = "seals"
_RECORD: Final = "piece.json"
_KEYS: Final = "keys"
_DURABLE: Final = ".keys.json"
_RECORD_BYTES: Final = 4 << 30  # keys are read as a whole


def piece_path(folder: Path, task: int) -> Path:
    """Returns the path of a task's piece; tasks of all writes have different names."""
    return folder / f"{folder.name}.{task:08d}"


def write_piece(folder: Path, task: int, lines: Iterable[bytes], samples_per_chunk: int, keys: Any = ()) -> None:
    """Writes the piece of a task durably and atomically, unless there is one already. Raises WriterFailed.

    Args:
        folder: the folder of the write.
        task: the number of the task.
        lines: its rows with their newlines.
        samples_per_chunk: rows per chunk; the last one may have fewer.
        keys: the keys of the rows, complete when all lines are read; empty if the sink has no key.
    """
    path = piece_path(folder, task)
    temporary = folder / f".{path.name}.{secrets.token_hex(8)}"
    try:
        temporary.mkdir()
        seals = list(_write_chunks(temporary, lines, samples_per_chunk))
        write_new(temporary / SEALS, b"".join(seals), durable=True)
        write_new(temporary / _RECORD, orjson.dumps({"seals": list(map(len, seals)), "keys": keys}), durable=True)
        sync_directory(temporary)
        try:
            os.rename(temporary, path)
        except OSError:
            if not path.exists():  # otherwise another attempt of the task was first
                raise
        sync_directory(folder)
    except FileNotFoundError as cause:
        directory = str(folder.parent.parent)
        why = f"the driver no longer publishes, or does not share {directory} with this machine; see its log"
        raise WriterFailed(f"{folder}: {why}", directory=directory) from cause
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_chunks(folder: Path, lines: Iterable[bytes], samples_per_chunk: int) -> Iterator[bytes]:
    """Writes rows as chunks, and yields their seals."""
    left, steps = iter(lines), WriteSteps()
    for number in itertools.count():
        chunk = OpenChunk(number, folder.joinpath, steps, arrays=False)
        try:
            for line in itertools.islice(left, samples_per_chunk):
                chunk.append(line, b"", None)
            if not len(chunk):
                return
            chunk.rows.pass_on()
            chunk.finish()
        except BaseException:
            chunk.discard()
            raise
        yield chunk.seal(None, time.time())


class Rest(NamedTuple):
    """The rows [first, stop) of a chunk of a piece, which wait until they fill a chunk of the stream."""

    piece: str
    chunk: int
    first: int
    stop: int
    seal: bytes


def _read(path: Path) -> Any:
    return orjson.loads(read_file(path, _RECORD_BYTES))


@functools.lru_cache(maxsize=1)
def durable_keys(folder: Path) -> frozenset[int | str]:
    """Returns the keys of the rows that were durable when the write of this folder started."""
    return frozenset(_read(folder / _DURABLE))


class Committer:
    """Publishes pieces in a separate thread, closes the writer, and finally removes the folder of pieces.

    With `ordered` it publishes the rows of the tasks in order. Otherwise it publishes pieces as they come, whole chunks
    first; rows that are left over wait until they fill a chunk.

    Without a key, when a write is restarted, published rows are recognised by their digests and skipped. With a key,
    the pieces of the earlier write stay, and each seal holds how many rows of each piece are published.
    """

    def __init__(self, writer: ChunkWriter, folder: Path, *, ordered: bool = False, key: str | None = None) -> None:
        self._writer, self._folder, self._ordered, self._key = writer, folder, ordered, key
        self._size, self._keys = writer.samples_per_chunk, folder.parent / _KEYS
        self._published, self._seen = writer.published_samples, 0  # rows of an earlier write, and those recognised
        self._taken: dict[str, int] = {}  # with a key: published rows of the pieces that are there
        self._done = set[str]()  # pieces of which all rows are published or wait
        self._rests, self._waiting = deque[Rest](), 0
        self._begin()
        self._news = threading.Event()
        self._beat_at = time.monotonic()
        self._tasks: list[int] | None = None
        self._stopping = self._ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"publish {writer.directory}", daemon=True)
        self._thread.start()

    def finish(self, tasks: Iterable[int]) -> None:
        """Publishes the pieces of these tasks, which are all done, and ends the stream."""
        self._tasks = sorted(tasks)
        self._news.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        if not self._ended:
            directory, published = str(self._writer.directory), self._writer.published_samples
            why = f"{directory}: stopped before the last row; write the same data set again to continue"
            raise WriterFailed(why, directory=directory, published_samples=published)

    def stop(self) -> None:
        """Stops after the current piece, so that the stream can be continued later. May be called twice."""
        self._stopping = True
        self._news.set()
        self._thread.join()

    def _begin(self) -> None:
        """Makes the folder; with a key, of what an earlier write has left."""
        source = self._writer.source
        if not self._published:
            source = {"kind": "ray", "key": self._key}
        elif not isinstance(source, dict) or source.get("kind") != "ray":
            raise self._mismatch("a stream begun by Ray", "one of another program")
        if (found := source.get("key")) != self._key:
            raise self._mismatch(f"rows with key={self._key!r}", f"key={found!r}")
        parent = check_folder(self._folder.parent)
        parent.mkdir(exist_ok=True)
        # These belong to writes that have died or are fenced by this one; later ones belong to writes that fence it.
        left = [one for one in parent.iterdir() if one.name != _KEYS]
        if self._key is None:
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            self._folder.mkdir()
            return
        self._seen = self._published
        self._keys.mkdir(exist_ok=True)
        self._done.update(os.listdir(check_folder(self._keys)))
        if left:
            os.rename(check_folder(left[0]), self._folder)
        else:
            self._folder.mkdir()
        sync_directory(parent)
        for name in os.listdir(self._folder):
            if name != _DURABLE and (name.startswith(".") or name in self._done):
                shutil.rmtree(self._folder / name)
        self._taken = {name: rows for name, rows in source.get("taken", {}).items() if name not in self._done}
        pieces = set(os.listdir(self._folder)) - {_DURABLE}
        if lost := sorted(self._taken.keys() - pieces):
            raise self._mismatch(f"{self._folder / lost[0]}, with rows that wait", "nothing")
        records = [self._keys / name for name in self._done] + [self._folder / name / _RECORD for name in pieces]
        keys = [key for path in records for key in _read(path)["keys"]]
        write_new(self._folder / _DURABLE, orjson.dumps(keys))

    def _run(self) -> None:
        try:
            for name in self._names():
                self._publish(name)
            if self._stopping:
                self._writer.close(end=False, state="failed")
            else:
                self._end()
        except BaseException as error:
            self.failure = error
            try:
                self._writer.check_owner()
            except ProducerFenced as fenced:
                self.failure = fenced
            with contextlib.suppress(LazyShardError, OSError):
                self._writer.close(end=False, state="failed")
        finally:
            # Tasks that still run find the folder gone, and stop.
            if self._key is None or self._ended:
                shutil.rmtree(self._folder, ignore_errors=True)
                shutil.rmtree(self._keys, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self._folder.parent.rmdir()

    def _names(self) -> Iterator[str]:
        """Yields the names of pieces to publish until the last one, or until `stop` is called."""
        missing_since, first = None, 0
        while not self._stopping:
            tasks = self._tasks
            found = {name for name in os.listdir(self._folder) if name[0] != "."} - self._done
            ready = sorted(found)
            if self._ordered:
                numbers = itertools.count(first) if tasks is None else iter(one for one in tasks if one >= first)
                ready = list(itertools.takewhile(found.__contains__, map(self._name, numbers)))
            for name in ready:
                if self._stopping:
                    return
                yield name
                first = int(name.rpartition(".")[2]) + 1
            if ready:
                missing_since = None
            elif tasks is None:
                self._wait()
            elif lost := next((name for name in map(self._name, tasks) if name not in self._done), ""):
                # The task is done, but its piece may not be visible on this machine yet.
                missing_since = missing_since or time.monotonic()
                if time.monotonic() - missing_since >= MISSING_S:
                    raise FileNotFoundError(f"{self._folder / lost}: the piece of a finished task is not there")
                self._wait()
            else:
                return

    def _name(self, task: int) -> str:
        return piece_path(self._folder, task).name

    def _wait(self) -> None:
        self._news.wait(POLL_S)
        self._news.clear()
        now = time.monotonic()
        if now - self._beat_at > 5.0:
            self._beat_at = now
            self._writer.heartbeat("waiting", "rows of Ray's write tasks")

    def _publish(self, name: str) -> None:
        """Publishes the whole chunks of a piece; the rows left over wait."""
        self._writer.state = "running"
        path, size, taken = check_folder(self._folder / name), self._size, self._taken.get(name, 0)
        seals, end = memoryview(read_file(path / SEALS, _RECORD_BYTES)), 0
        for chunk, length in enumerate(_read(path / _RECORD)["seals"]):
            data, end = bytes(seals[end : end + length]), end + length
            seal = SealBytes.decode(data, chunk, f"{path / SEALS}")
            first, stop = max(0, taken - chunk * size), seal.samples
            if self._seen < self._published:
                known = self._count_published(Seal.decode(data, chunk, f"{path / SEALS}").digests)
                first, self._seen = first + known, self._seen + known
            if first >= stop:
                continue
            rest = Rest(name, chunk, first, stop, data)
            if stop - first < size or (self._ordered and self._rests):
                self._rests.append(rest)
                self._waiting += stop - first
                if self._waiting >= size:
                    self._merge()
            else:
                piece = SealedPiece(path, seal, self._take(rest))
                piece.check(size, arrays=self._writer.arrays)
                self._writer.publish_pieces([piece])
        self._done.add(name)
        self._remove({name})

    def _take(self, *parts: Rest) -> dict[str, Any]:
        """Returns the position after the next chunk, which has these rows."""
        rows = self._writer.published_samples + sum(one.stop - one.first for one in parts)
        if self._key is None:
            return {"kind": "ray", "rows": rows}
        self._taken.update((one.piece, one.chunk * self._size + one.stop) for one in parts)
        return {"kind": "ray", "rows": rows, "key": self._key, "taken": dict(self._taken)}

    def _merge(self) -> Any:
        """Copies rows that wait into a chunk, or all of them if they are fewer; returns the position."""
        room, parts = min(self._size, self._waiting), list[Rest]()
        self._waiting -= room
        while room:
            rest = self._rests.popleft()
            parts.append(rest._replace(stop=min(rest.stop, rest.first + room)))
            room -= parts[-1].stop - rest.first
            if parts[-1].stop < rest.stop:
                self._rests.appendleft(rest._replace(first=parts[-1].stop))
        source = self._take(*parts)
        for one in parts:
            path = self._folder / one.piece / chunk_name(one.chunk)
            seal = Seal.decode(one.seal, one.chunk, str(path))
            for lines in checked_slices(open_sealed(path, seal), seal, one.first, one.stop):
                self._writer.write_lines(lines, source=source)
        if self._writer.samples == self._writer.published_samples:
            self._remove({one.piece for one in parts})
        return source

    def _remove(self, names: set[str]) -> None:
        """Removes those of the pieces of which all rows are published."""
        for name in (names & self._done).difference(one.piece for one in self._rests):
            if self._key is not None:
                rename(self._folder / name / _RECORD, self._keys / name)
                sync_directory(self._keys)
                self._taken.pop(name, None)
            shutil.rmtree(self._folder / name)

    def _end(self) -> None:
        if self._seen < self._published:
            raise self._mismatch(f"the {self._published} rows that are published", f"{self._seen} in all")
        source = self._merge() if self._rests else self._take()
        self._writer.close(end=True, source=source)
        self._ended = True

    def _count_published(self, digests: npt.NDArray[np.uint64]) -> int:
        """Returns how many of the next rows, which have these digests, an earlier write has published."""
        count = max(0, min(len(digests), self._published - self._seen))
        done = 0
        while done < count:
            chunk, at = divmod(self._seen + done, self._writer.samples_per_chunk)
            part = min(count - done, self._writer.samples_per_chunk - at)
            # A retired chunk is skipped: for any other missing chunk the writer would have refused the stream.
            with contextlib.suppress(FileNotFoundError):
                expected = read_seal(self._writer.directory, chunk).digests
                differ = np.flatnonzero(expected[at : at + part] != digests[done : done + part])
                if len(differ):
                    sample = self._seen + done + int(differ[0])
                    raise self._mismatch(f"as row {sample} the one published as sample {sample}", "another")
            done += part
        return count

    def _mismatch(self, expected: str, actual: str) -> StreamMismatch:
        directory, way = str(self._writer.directory), "(execution_options.preserve_order), or use another directory"
        text = f"{directory}: expected {expected}, found {actual}; give the same data set, key and order {way}"
        return StreamMismatch(text, directory=directory, expected=expected, actual=actual)
