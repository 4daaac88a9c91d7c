"""Megatron's IndexedDataset as a source of rows, one for each document: {"input_ids": [the tokens of its sequences]}.

Unless it has exactly one sequence, the row also has "lengths": [tokens of each sequence].
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Any, Final

import numpy as np
import orjson

from lazyshard.conversion.indexed import IndexedReader, IndexedSequences, data_path
from lazyshard.errors import FileInvalid, RowInvalid
from lazyshard.memory import dumps
from lazyshard.part import Int64Array
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import count
from lazyshard_producer.position import plain_name, read_entry, refuse_position
from lazyshard_producer.sources import source
from lazyshard_producer.sources.source import PIECE_BYTES, PIECE_ROWS, Context, KnownFile, Line, Rows, Source, bad_row

_PIECE_SEQUENCES: Final = 64 << 10  # Unless one document has more: empty sequences have no bytes in the data file
_LEAST_TOKEN_BYTES: Final = 2  # Fewest bytes of a number in JSON: a digit and a separator

KIND: Final = "megatron"
_ROWS: Final = "document"  # earlier releases also made rows of sequences


class IndexedSource(Source):
    """An IndexedDataset, by the path of its `.idx` file. Never live, since its files are complete."""

    def __init__(self, settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> None:
        self.name: Final = plain_name(settings.path)
        self._path, self._most = settings.path, context.max_row_bytes
        self.start = 0 if position is None else self._decode(position)
        with source.refusing(self._path):
            self._known = [KnownFile(path) for path in (self._path, data_path(self._path))]
            self._digests = [f"{file.digest:016x}" for file in self._known]
            if position is not None and self.start and position["xxh3"] != self._digests:
                raise source.refuse_changed(self._known[position["xxh3"][0] == self._digests[0]].path)
            self._reader = IndexedReader(self._path)
        # Make sure that the opened files are those that were fingerprinted.
        self._check_same()
        self._total: Final = self._reader.header.documents
        if self.start > self._total:
            raise refuse_position(self.name, f"at most {self._total} rows", str(self.start))
        self._reach(self.start)

    def _reach(self, row: int) -> None:
        size = self._reader.data_size
        self.reached, self.progress = row, (size * row // max(1, self._total), size)

    def read(self) -> Rows | None:
        """Returns the next rows, None when all are read. Raises SourceRefused if a file is damaged or has changed."""
        if (before := self.reached) == self._total:
            self._check_same()
            return None
        with source.refusing(self._path):
            try:
                lines = self._make(before)
            except FileInvalid:
                # If the file was replaced, this raises the more helpful error.
                self._check_same()
                raise
        self._reach(before + len(lines))
        return source.number_rows(lines, self.name, before, lambda index: before + index + 1)

    def entry(self, position: int) -> dict[str, Any]:
        """Returns the entry of a position, which is the number of rows before it."""
        if position:
            self._check_same()
        digests = self._digests if position else []
        return {"kind": KIND, "path": self.name, "rows": _ROWS, "row": position, "xxh3": digests}

    def close(self) -> None:
        """Closes both files."""
        self._reader.close()

    def _check_same(self) -> None:
        for file in self._known:
            file.check()

    def _decode(self, entry: dict[str, Any]) -> int:
        row, digests = read_entry(entry, self.name, KIND, row=int, xxh3=list)
        if not all(isinstance(digest, str) for digest in digests) or len(digests) != (2 if row else 0):
            raise refuse_position(self.name, "fingerprints of both files", repr(digests)[:120])
        if row and entry.get("rows") != _ROWS:
            raise refuse_position(self.name, "rows of documents", f"{entry.get('rows')!r} of an earlier release")
        return int(row)

    def _make(self, row: int) -> list[Line]:
        """Returns the rows from this one on: at least one, and more up to about 1 MiB of tokens."""
        # `first` is the number of the first sequence; row k has the sequences first + [bounds[k], bounds[k + 1]).
        bounds = self._reader.boundaries(row, min(row + PIECE_ROWS, self._total))
        first = int(bounds[0])
        # At least one document, whatever its size.
        documents = max(1, int(np.searchsorted(bounds, first + _PIECE_SEQUENCES, "right")) - 1)
        bounds = bounds[: documents + 1] - first
        sequences = int(bounds[-1])
        if len(bounds) == 2 and _LEAST_TOKEN_BYTES * sequences > self._most:
            # Not read: only a larger --max-row-bytes allows this much memory.
            return [self._too_long(count(sequences, "sequence"))]
        found: IndexedSequences | None = None
        try:
            found = self._reader.sequences(first, first + sequences)
            return self._lines(bounds, found)
        except FileInvalid as error:
            if error.sequence is None and error.byte is not None and found is not None:
                ends = found.pointers + found.lengths * self._reader.header.token.itemsize
                error.sequence = first + int(np.flatnonzero(ends > error.byte)[0])
            if error.sequence is not None:
                where = f"that is sequence {error.sequence}, in document {self._document_of(error.sequence)}"
                error.args = (f"{error}; {where}, both counted from 0",)
            raise

    def _lines(self, all_bounds: Int64Array, found: IndexedSequences) -> list[Line]:
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(found.lengths)])
        counts = np.diff(ends[all_bounds])
        if _LEAST_TOKEN_BYTES * int(counts[0]) > self._most:
            return [self._too_long(count(int(counts[0]), "token"))]
        sizes = np.cumsum(counts) * self._reader.header.token.itemsize
        bounds = all_bounds[: max(1, int(np.searchsorted(sizes, PIECE_BYTES, "right"))) + 1].tolist()
        tokens = self._tokens(found, bounds[-1])
        each = itertools.pairwise(bounds)
        return [self._line(tokens[ends[low] : ends[high]], found.lengths[low:high]) for low, high in each]

    def _tokens(self, found: IndexedSequences, stop: int) -> Any:
        """Returns the tokens of the first `stop` sequences, with one read for each contiguous part of the file."""
        lengths, pointers, token = found.lengths[:stop], found.pointers[:stop], self._reader.header.token
        apart = pointers[1:] != pointers[:-1] + lengths[:-1] * token.itemsize
        cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), stop]
        pairs = [(low, high) for low, high in itertools.pairwise(cuts) if high > low]
        parts = [self._reader.tokens(int(pointers[low]), int(lengths[low:high].sum())) for low, high in pairs]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, token), *parts])

    def _line(self, tokens: Any, lengths: Int64Array) -> Line:
        integral = tokens.dtype.kind in "iu"
        values = tokens.astype(np.int64 if integral else np.float64)
        if not integral and (bad := np.flatnonzero(~np.isfinite(values))).size:
            kind = "NaN" if np.isnan(values[bad[0]]) else "an infinity"
            return bad_row(f"token {bad[0]} is {kind}, which JSON does not have")
        row: dict[str, Any] = {"input_ids": values}
        if len(lengths) != 1:
            row["lengths"] = lengths
        line = dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        if len(line) - 1 <= self._most:
            return line
        return self._too_long(f"{count(len(tokens), 'token')} in {count(len(lengths), 'sequence')}")

    def _document_of(self, sequence: int) -> int:
        """Returns the document of a sequence by binary search, which takes a few reads of 8 bytes."""
        numbers = range(1, self._reader.header.documents)
        return bisect_right(numbers, sequence, key=lambda number: self._reader.boundaries(number, number)[0])

    def _too_long(self, what: str) -> RowInvalid:
        return bad_row(f"{what}: {source.too_long(self._most, ', as JSON')}")
