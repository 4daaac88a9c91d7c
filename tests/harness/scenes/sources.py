"""Sources of every kind, and who feeds those that are live while a run is killed and started again."""

import errno
import gzip
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pytest

from lazyshard import ChunkWriter
from tests.harness.scenes.rows import lines, text
from tests.stream.streams import foreign

Entry = dict[str, Any]  # A source's position in a seal
Rows = list[bytes] | None  # Other rows than those of `scenes.rows.lines`


class FedSource:
    stdin: Path | None = None  # what is to be the command's standard input
    ordered = True  # whether its rows come in one order whatever happens

    def __init__(self, argument: str, rows: list[bytes], option: str = "--source") -> None:
        self.arguments = [option, argument]  # what the command line says of it
        self.rows = rows  # its rows, in order

    @contextmanager
    def fed(self, entry: Entry | None) -> Iterator[None]:
        over = threading.Event()
        feeder = threading.Thread(target=self._feed, args=(over, entry))
        feeder.start()
        try:
            yield
        finally:
            over.set()
            feeder.join()

    def _feed(self, over: threading.Event, entry: Entry | None) -> None:
        """Feeds until it is over, in a thread."""


class PipedSource(FedSource):
    """A named pipe, as a source or as standard input. Its feeder sends all again, or continues where the run does."""

    def __init__(self, pipe: Path, rows: list[bytes], *, as_stdin: bool, append: bool) -> None:
        os.mkfifo(pipe)
        super().__init__("-" if as_stdin else str(pipe), rows)
        self.stdin = pipe if as_stdin else None
        self._pipe = pipe
        self._append = append
        if append:
            self.arguments += ["--resume", "append"]

    def _feed(self, over: threading.Event, entry: Entry | None) -> None:
        begin = 0
        if self._append and entry is not None and entry["kind"] is not None:
            begin = entry["offset"] + entry["bytes_before"]
        while True:
            try:
                fd = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)  # The run may have ended without opening it
                break
            except OSError as cause:
                if cause.errno != errno.ENXIO:
                    raise
                if over.wait(0.002):
                    return
        os.set_blocking(fd, True)
        try:
            view = memoryview(text(self.rows)[begin:])
            while view:
                view = view[os.write(fd, view[:1000]) :]
        except BrokenPipeError:
            pass
        finally:
            os.close(fd)


class FollowedSource(FedSource):
    """A directory into which files are written, a few bytes at a time in any order, and at last the end marker."""

    ordered = False

    def __init__(self, directory: Path, base: int, finished_by: str, rows: Rows = None, per_file: int = 35) -> None:
        directory.mkdir()
        rows = rows or lines(base)
        super().__init__(str(directory), rows, "--follow")
        self.arguments += ["--finished-by", finished_by]
        self.files = [rows[begin : begin + per_file] for begin in range(0, len(rows), per_file)]
        self._left = list(self._steps(directory, finished_by))

    def _feed(self, over: threading.Event, entry: Entry | None) -> None:
        while self._left and not over.is_set():
            self._left.pop(0)()
            time.sleep(0.001)

    def _steps(self, directory: Path, finished_by: str) -> Iterator[Callable[[], object]]:
        dice = random.Random(finished_by)
        queues: list[list[Callable[[], object]]] = []
        for number, rows in enumerate(self.files):
            path = directory / f"{number}.jsonl"
            data, packed = text(rows) + b"\n", number == 3
            if packed:
                path, data = path.with_suffix(".jsonl.gz"), gzip.compress(data)
            if finished_by == "rename":
                hidden = directory / f".{path.name}"
                queues.append([partial(hidden.write_bytes, data), partial(hidden.rename, path)])
            else:
                parts = [data[begin : begin + 100] for begin in range(0, len(data), 100)]
                queues.append([partial(_append, path, part) for part in parts])
                queues[-1].append((directory / f"{path.name}.done").touch)
        while any(queues):
            queue = dice.choice([queue for queue in queues if queue])
            yield queue.pop(0)
        yield (directory / "_END").touch


class StreamSource(FedSource):
    """A stream of ours; where it is live its producer publishes while a run reads it, and is stopped with the run."""

    def __init__(self, directory: Path, rows: list[bytes], *, live: bool, arrays: bool) -> None:
        super().__init__(str(directory), rows)
        self._directory = directory
        self._arrays = arrays
        shutil.rmtree(directory, ignore_errors=True)
        ChunkWriter(directory, 11, arrays=arrays).close(end=False)
        if not live:
            self._write(threading.Event(), 0.0)

    def _feed(self, over: threading.Event, entry: Entry | None) -> None:
        self._write(over, 0.001)

    def _write(self, over: threading.Event, pause: float) -> None:
        if (self._directory / "stream.end").exists():
            return
        writer = ChunkWriter(self._directory, 11, arrays=self._arrays)
        for line in self.rows[writer.published_samples :]:
            if over.is_set():
                writer.close(end=False)
                return
            row = orjson.loads(line)
            tokens = len(row["text"]) + 1
            writer.write(row | {"mel": np.full(tokens, row["id"], np.int32)} if self._arrays else line, tokens)
            time.sleep(pause)
        writer.close()


def _append(path: Path, part: bytes) -> None:
    with path.open("ab") as file:
        file.write(part)


def _file(suffix: str, pack: Callable[[bytes], bytes] = bytes) -> Callable[..., FedSource]:
    def make(folder: Path, base: int, rows: Rows = None) -> FedSource:
        rows, path = rows or lines(base), folder / f"{base}.jsonl{suffix}"
        data = text(rows)
        path.write_bytes(pack(data[:999]) + pack(data[999:]))
        return FedSource(str(path), rows)

    return make


def _piped(*, as_stdin: bool, append: bool = False) -> Callable[..., FedSource]:
    def make(folder: Path, base: int, rows: Rows = None) -> FedSource:
        return PipedSource(folder / f"{base}.pipe", rows or lines(base), as_stdin=as_stdin, append=append)

    return make


def parquet(folder: Path, base: int, rows: Rows = None) -> FedSource:
    rows, table = _table(rows or lines(base, bad=False))
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / f"{base}.parquet", row_group_size=23)
    return FedSource(str(folder / f"{base}.parquet"), rows)


def arrow(folder: Path, base: int, rows: Rows = None) -> FedSource:
    rows, table = _table(rows or lines(base, bad=False))
    with pytest.importorskip("pyarrow.ipc").new_file(folder / f"{base}.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=23)
    return FedSource(str(folder / f"{base}.arrow"), rows)


def hugging_face(folder: Path, base: int, rows: Rows = None) -> FedSource:
    """As `datasets.Dataset.save_to_disk` writes it: two files in Arrow's stream format."""
    rows, table = _table(rows or lines(base, bad=False))
    directory = folder / f"{base}"
    directory.mkdir(exist_ok=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in (0, 1)]
    for name, part in zip(names, (table.slice(0, 41), table.slice(41)), strict=True):
        with pytest.importorskip("pyarrow.ipc").new_stream(directory / name, table.schema) as file:
            file.write_table(part, max_chunksize=23)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
    (directory / "state.json").write_bytes(orjson.dumps(state))
    (directory / "dataset_info.json").write_bytes(b"{}")
    return FedSource(str(directory), rows)


def _followed(finished_by: str) -> Callable[..., FedSource]:
    return lambda folder, base: FollowedSource(folder / f"{base}", base, finished_by)


def _published(*, live: bool = False, arrays: bool = False) -> Callable[..., FedSource]:
    def make(folder: Path, base: int, rows: Rows = None) -> FedSource:
        return StreamSource(folder / f"{base}.stream", rows or lines(base, bad=False), live=live, arrays=arrays)

    return make


def foreign_stream(folder: Path, base: int, rows: Rows = None) -> FedSource:
    rows = rows or lines(base)
    directory = folder / f"{base}.stream"
    shutil.rmtree(directory, ignore_errors=True)
    parts = [rows[begin : begin + 9] for begin in range(0, len(rows), 9)]
    foreign(directory, *(b"\r\n".join(part) + b"\n\n" for part in parts), end=True)
    return FedSource(str(directory), rows)


def _table(rows: list[bytes]) -> tuple[list[bytes], Any]:
    return rows, pytest.importorskip("pyarrow").Table.from_pylist([orjson.loads(row) for row in rows])


KINDS: Final[dict[str, Callable[..., FedSource]]] = {
    **{"plain": _file(""), "gzip": _file(".gz", gzip.compress)},
    "zstd": _file(".zst", lambda data: bytes(pytest.importorskip("zstandard").compress(data))),
    **{"pipe": _piped(as_stdin=False), "stdin": _piped(as_stdin=True)},
    "stdin that appends": _piped(as_stdin=True, append=True),
    "generator": lambda *_: FedSource("python:tests.harness.scenes.rows:numbered", lines()),
    **{"parquet": parquet, "arrow": arrow, "hugging face": hugging_face},
    **{"stream": _published(), "live stream": _published(live=True), "stream with arrays": _published(arrays=True)},
    **{"foreign stream": foreign_stream, "followed": _followed("rename")},
    "followed while it grows": _followed("marker"),
}
