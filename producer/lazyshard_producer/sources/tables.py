"""Tables on disk as a source: Parquet and Arrow files, alone, by the directory, or as `datasets` saves them.

Files that sort after those read may come later; all else that changes is refused. Of Parquet files pages are read as
they are needed. Arrow files are mapped, since pyarrow otherwise reads a record batch whole. Not guaranteed: that one
which somebody truncates at the very moment of reading leads to an error; the system then ends the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import pybase64

from lazyshard.memory import raise_if_short
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.position import plain_name, read_entry, refuse_position
from lazyshard_producer.sources import files
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder, load_pyarrow
from lazyshard_producer.sources.files import KnownFile, refuse_source, refusing
from lazyshard_producer.sources.source import PIECE_BYTES, PIECE_ROWS, Context, Rows, Source, number_rows

_Pieces = Generator[tuple[Any, float], None, None]
"""Pieces of rows, `pyarrow.RecordBatch` of about 1 MiB, and how much of the file is read with each, from 0 to 1."""


class TablePosition(NamedTuple):
    """Where the source stands between two rows: files before it, and rows of the next one."""

    file: int
    row: int


class TableSource(Source):
    """Files of rows of one kind.

    "parquet" or "arrow": a file, or a directory of them in the order of their names. "huggingface": a directory of
    `Dataset.save_to_disk`, whose `state.json` names the Arrow files in their order; every column is given, whatever
    format was set, as formats are views.
    """

    def __init__(self, kind: str, path: str, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(path)
        self._kind = kind
        if kind == "huggingface":
            self._files = find_data_files(path)
        else:
            self._files = list_table_files(path, f".{kind}") if os.path.isdir(path) else [path]
        self._max_row_bytes = context.max_row_bytes
        self._pa = load_pyarrow(path)
        load_pyarrow(path, "pyarrow.compute")
        self.start = TablePosition(0, 0)
        self._fingerprints: list[int] = []
        if position is not None:
            self.start, self._fingerprints = self._decode(position)
            self._check_read()
        self._known: dict[int, KnownFile] = {}
        self.reached: TablePosition = self.start
        self._stack = contextlib.ExitStack()  # what is open of a file
        self._rows: Iterator[tuple[Sequence[Any], float]] | None = None  # the pieces of one that is open, encoded
        self._ends = [0, *accumulate(map(files.file_size, self._files))]
        self.progress = self._ends[min(self.start.file, len(self._files))], self._ends[-1]
        # At once, so that what cannot be read is refused before anything is published.
        if self.start.file < len(self._files):
            self._rows = self._open(*self.start)

    def read(self) -> Rows | None:
        """Returns the next rows; None when all files are read."""
        ends = self._ends
        while self.reached.file < len(self._files):
            file, before = self.reached
            rows = self._rows = self._rows or self._open(file, before)
            lines, fraction = next(rows, ((), 1.0))
            self.progress = int(ends[file] * (1 - fraction) + ends[file + 1] * fraction), ends[-1]
            if lines:
                self.reached = TablePosition(file, before + len(lines))
                after = partial(_after, file, before)
                return number_rows(lines, plain_name(self._files[file]), before, after)
            self._known[file].check()
            self.close()
            self.reached = TablePosition(file + 1, 0)
        return None

    def entry(self, position: TablePosition) -> dict[str, Any]:
        """Returns the entry of a position. It grows by 11 bytes with each file that was begun."""
        begun = position.file + (position.row > 0)
        if position.row:
            self._known[position.file].check()
        digests = pybase64.b64encode(np.asarray(self._fingerprints[:begun], dtype="<u8").tobytes()).decode("ascii")
        entry = {"kind": self._kind, "path": self.name}
        return entry | {"files": position.file, "row": position.row, "xxh3": digests}

    def close(self) -> None:
        """Closes the file that is open."""
        self._rows = None
        self._stack.close()

    def _open(self, index: int, row: int) -> Iterator[tuple[Sequence[Any], float]]:
        """Opens a file; returns its rows from one on in pieces, and how much of the file is read with each."""
        path = self._files[index]
        file = self._known[index] = KnownFile(path)
        if index < len(self._fingerprints) and self._fingerprints[index] != file.digest:
            raise files.refuse_changed(path)
        self._fingerprints[index:] = [file.digest]
        with contextlib.ExitStack() as stack:
            schema, pieces = stack.enter_context((_open_parquet if self._kind == "parquet" else _open_arrow)(path, row))
            try:
                encoder = ArrowRowEncoder(self._pa, schema, self._max_row_bytes)
            except ValueError as cause:
                raise refuse_source(path, "every column under a name of its own", str(cause)) from None
            # What was opened is what the fingerprint is of.
            file.check()
            self._stack = stack.pop_all()
        return ((encoder.encode(batch), fraction) for batch, fraction in pieces)

    def _decode(self, entry: dict[str, Any]) -> tuple[TablePosition, list[int]]:
        file, row, digests = read_entry(entry, self.name, self._kind, files=int, row=int, xxh3=str)
        try:
            fingerprints = np.frombuffer(pybase64.b64decode(digests, validate=True), dtype="<u8").tolist()
        except ValueError:
            raise refuse_position(self.name, "fingerprints in base64", repr(digests)[:120]) from None
        if len(fingerprints) != file + (row > 0):
            raise refuse_position(self.name, "a fingerprint of each file that was begun", f"{len(fingerprints)}")
        return TablePosition(file, row), fingerprints

    def _check_read(self) -> None:
        """Checks that the files which were read are still there, as they were, with no other before or between them."""
        paths, read = self._files, self._fingerprints
        for index, expected in enumerate(read):
            if index < len(paths) and KnownFile(paths[index]).digest == expected:
                continue
            there = [KnownFile(path).digest for path in paths[index:]]
            if expected in there:
                new = plain_name(os.path.basename(paths[index]))
                actual = f"{new}, which is new and comes before files already read"
            elif not there or there[0] in read[index:]:
                actual = "that one gone"
            else:
                raise files.refuse_changed(paths[index])
            hint = "; put them back as they were (others may follow, by the order of names), or choose another --out"
            raise refuse_source(self.name, f"as file {index + 1} the one whose rows were read", actual, hint)


def _after(file: int, before: int, index: int) -> TablePosition:
    return TablePosition(file, before + index + 1)


def list_table_files(directory: str, suffix: str) -> list[str]:
    """Returns the paths of a directory's files with this ending, sorted by name.

    Names that begin with a dot or an underscore are passed over, as other programs do: they are not data.
    """
    with refusing(directory), os.scandir(directory) as entries:
        found = [entry for entry in entries if not entry.name.startswith((".", "_"))]
        names = sorted(entry.name for entry in found if entry.name.endswith(suffix) and not entry.is_dir())
        folders = sorted(entry.name for entry in found if entry.is_dir())
    if names:
        return [os.path.join(directory, name) for name in names]
    actual = f"none; it has folders ({', '.join(folders[:3])}), give each as a source" if folders else "none"
    raise refuse_source(directory, f"files *{suffix}", actual)


@contextlib.contextmanager
def _readable(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except SourceRefused:
        raise
    except (OSError, ValueError, NotImplementedError, EOFError) as cause:
        raise_if_short(cause)
        raise refuse_source(path, f"{what} that can be read", str(cause).splitlines()[0]) from cause


def _piece_rows(rows: int, size: int) -> int:
    return max(1, min(PIECE_ROWS, PIECE_BYTES * rows // max(1, size)))


_PARQUET: Final = "a Parquet file"
_MAGIC: Final = b"PAR1"

_BUFFER_BYTES: Final = 64 << 10
"""How much of each column is read ahead; without it pyarrow reads a row group's columns whole."""


@contextlib.contextmanager
def _open_parquet(path: str, row: int) -> Iterator[tuple[Any, _Pieces]]:
    """Opens a file; gives its columns, a `pyarrow.Schema`, and its rows from one on."""
    parquet = load_pyarrow(path, "pyarrow.parquet")
    with files.open_regular(path, 0) as handle:
        _check_magic(handle.fileno(), path)
        with _readable(path, _PARQUET):
            # No pre-buffering and no threads: both hold more of a row group than is asked for.
            file = parquet.ParquetFile(handle, pre_buffer=False, buffer_size=_BUFFER_BYTES)
            schema = file.schema_arrow
        yield schema, _parquet_pieces(path, file, row)


def _parquet_pieces(path: str, file: Any, row: int) -> _Pieces:
    """Yields from a row on: whole row groups before it are passed over, and in its own what is before."""
    metadata, read = file.metadata, row
    with _readable(path, _PARQUET):
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if row >= group.num_rows:
                row -= group.num_rows
                continue
            most = _piece_rows(group.num_rows, group.total_byte_size)
            for batch in file.iter_batches(batch_size=most, row_groups=[number], use_threads=False):
                if row < batch.num_rows:
                    read += batch.num_rows - row
                    yield batch.slice(row), read / metadata.num_rows
                row = max(0, row - batch.num_rows)


def _check_magic(fd: int, path: str) -> None:
    size = os.fstat(fd).st_size
    head, tail = (files.read_at(fd, path, len(_MAGIC), max(0, offset)) for offset in (0, size - len(_MAGIC)))
    if b"PARE" in (head, tail):
        raise refuse_source(path, _PARQUET, "an encrypted one, which is not read")
    if head != _MAGIC:
        raise refuse_source(path, _PARQUET, f"something else, which begins with {head!r}")
    if tail != _MAGIC or size <= 2 * len(_MAGIC):
        actual = f"one of {size} bytes without its end; is it still being written, or was it cut?"
        raise refuse_source(path, "a complete Parquet file", actual)


_ARROW: Final = "an Arrow IPC file or stream"
_MAGIC_FILE: Final = b"ARROW1"


@contextlib.contextmanager
def _open_arrow(path: str, row: int) -> Iterator[tuple[Any, _Pieces]]:
    """Opens a file; see `_open_parquet`."""
    pa, ipc = load_pyarrow(path), load_pyarrow(path, "pyarrow.ipc")
    with files.open_regular(path, 0) as handle, contextlib.ExitStack() as stack:
        size = os.fstat(handle.fileno()).st_size
        if size == 0:
            raise refuse_source(path, _ARROW, "an empty file")
        data = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        stack.callback(_unmap, data)
        start = data[: len(_MAGIC_FILE)]
        if start != _MAGIC_FILE and not start.startswith(b"\xff\xff\xff\xff"):
            raise refuse_source(path, _ARROW, f"something else, which begins with {start!r}")
        source = pa.BufferReader(pa.py_buffer(data))
        with _readable(path, _ARROW):
            reader = (ipc.open_file if start == _MAGIC_FILE else ipc.open_stream)(source)
        batches = _stream_batches(reader, source, size)
        if start == _MAGIC_FILE:
            count = reader.num_record_batches
            batches = ((reader.get_batch(number), number / count, (number + 1) / count) for number in range(count))

        def check() -> None:
            if os.fstat(handle.fileno()).st_size < size:
                raise files.refuse_changed(path)

        pieces = _arrow_pieces(path, batches, data, row, check)
        stack.callback(pieces.close)
        yield reader.schema, pieces


def _unmap(data: mmap.mmap) -> None:
    # Refused while a batch that was given is still in use; it is unmapped with the last of them.
    with contextlib.suppress(BufferError):
        data.close()


def _stream_batches(stream: Any, source: Any, size: int) -> Iterator[tuple[Any, float, float]]:
    before = source.tell()
    while (batch := next(stream, None)) is not None:
        after = source.tell()
        yield batch, before / size, after / size
        before = after


def _arrow_pieces(
    path: str, batches: Iterator[tuple[Any, float, float]], data: mmap.mmap, row: int, check: Callable[[], None]
) -> _Pieces:
    """Yields from a row on; of batches before it only the lengths are looked at."""
    pa, touched = load_pyarrow(path), 0
    check()
    with _readable(path, _ARROW):
        for batch, before, after in batches:
            if row >= batch.num_rows:
                row -= batch.num_rows
                continue
            batch.validate()
            most = _piece_rows(batch.num_rows, batch.nbytes)
            while row < batch.num_rows:
                piece = batch.slice(row, most)
                _check_piece(pa, piece)
                row += piece.num_rows
                yield piece, before + (after - before) * row / batch.num_rows
                touched += piece.nbytes
                # So that the mapped pages that were read do not count as this process's memory.
                if touched >= 16 << 20:
                    touched = 0
                    data.madvise(mmap.MADV_DONTNEED)
                check()
            row = 0


def _check_piece(pa: Any, piece: Any) -> None:
    # Offsets that point out of their buffers would have Python read whatever lies there. Nested columns are taken
    # on trust: pyarrow checks all of them, however small the piece.
    for column in piece.columns:
        try:
            column.validate(full=not pa.types.is_nested(column.type))
        except ValueError as cause:
            if "UTF8" not in str(cause):  # that is one row's affair
                raise


STATE: Final = "state.json"
INFO: Final = "dataset_info.json"
SPLITS: Final = "dataset_dict.json"

_HINT: Final = "; save it with `Dataset.save_to_disk`"


def is_hugging_face(path: str) -> bool:
    """Whether a directory holds what `datasets` writes: a data set, a dictionary of them, or a folder of its cache."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (STATE, INFO, SPLITS))


def find_data_files(directory: str) -> list[str]:
    """Returns the paths of a data set's Arrow files, in its order."""
    if os.path.isfile(os.path.join(directory, SPLITS)):
        splits = [os.path.join(directory, str(name)) for name in _load(directory, SPLITS).get("splits", [])]
        raise refuse_source(directory, "one data set", f"a DatasetDict; give one of its splits: {', '.join(splits)}")
    if not os.path.isfile(os.path.join(directory, STATE)):
        raise refuse_source(directory, "a saved data set", f"no {STATE}: a folder of the cache of `datasets`?", _HINT)
    state = _load(directory, STATE)
    if state.get("_indices_files"):
        hint = "; load it, call `flatten_indices()`, and save it again"
        raise refuse_source(directory, "a data set with its rows in order", "a selection of rows by indices", hint)
    entries = state.get("_data_files")
    listed = entries if isinstance(entries, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
    if not names or not all(isinstance(name, str) and name and name == os.path.basename(name) for name in names):
        raise refuse_source(os.path.join(directory, STATE), "the names of its data files", repr(entries)[:120], _HINT)
    return [os.path.join(directory, name) for name in names if name]


def _load(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    with refusing(path), open(path, "rb") as file:
        data = file.read()
    try:
        found: Any = json.loads(data)
    except ValueError as cause:
        raise refuse_source(path, "a JSON object", str(cause), _HINT) from cause
    if not isinstance(found, dict):
        raise refuse_source(path, "a JSON object", type(found).__name__, _HINT)
    return found
