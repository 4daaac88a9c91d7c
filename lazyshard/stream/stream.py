"""The two kinds of stream directory, which of them a directory is, and what it holds now.

`NativeStream` has a manifest and seals. `ForeignStream` reads the output of other programs: `chunk_*.jsonl` with empty
`.completed` files, with or without an empty `stream.end`.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from lazyshard.errors import ChunkCorrupt, FileInvalid, LengthUnknown, StreamMismatch
from lazyshard.format.records import END, FORMAT, HEAD, MANIFEST, OWNER, End, Head, Manifest, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.part import UInt32Array
from lazyshard.store.durable import refused
from lazyshard.store.files import UrlPath, again_if_stale, find_record, is_there, read_record, read_seal
from lazyshard.stream import listing
from lazyshard.stream.chunk import Chunk, open_copy, open_foreign, open_sealed
from lazyshard.stream.listing import Published, invalid, names_in, read_manifest, sort_names

if TYPE_CHECKING:
    from lazyshard.store.mirror import Mirror
    from lazyshard.stream.reader import StreamReader

_MANY: Final = 1000
_OURS: Final = (MANIFEST, HEAD, OWNER)
_decode_head: Final = lru_cache(maxsize=64)(Head.decode)  # most polls find the same bytes again
Stream: TypeAlias = "NativeStream | ForeignStream"  # a stream directory or URL, open for reading


def open_stream(directory: Path, samples_per_chunk: int | None) -> Stream | None:
    """Opens the stream in a directory, or returns None if there is none yet.

    Args:
        directory: the stream's directory.
        samples_per_chunk: needed for a foreign directory; otherwise None or the value in the manifest.

    Raises:
        StreamMismatch: the manifest has another samples_per_chunk.
        FileInvalid: there are chunk files but no marker.
        StreamInvalid: there are files of a native stream but no manifest.
        ValueError: samples_per_chunk is missing or invalid.
        FileRefused, AccessRefused, OSError: the path is a file, or cannot be read.
    """
    try:
        manifest = read_manifest(directory, samples_per_chunk)
    except NotADirectoryError as cause:
        way = f"; publish its rows: lazyshard-producer run --source {directory} --out DIR --samples-per-chunk 1000"
        raise refused(directory, "the directory of a stream", "a file", way) from cause
    return NativeStream(directory, manifest) if manifest else _open_foreign(directory, samples_per_chunk)


def open_now(directory: Path, samples_per_chunk: int | None = None) -> Stream:
    """Opens the stream in a directory, a foreign one by its first chunk. Raises as `open_stream`; StreamMissing."""
    if (stream := open_stream(directory, samples_per_chunk or rows_of_first_chunk(directory))) is None:
        raise listing.stream_missing(directory)
    return stream


def rows_of_first_chunk(directory: Path) -> int | None:
    """Returns the number of rows in the first chunk of a foreign directory; None if it is not foreign or has no marker.

    A directory with an owner file may be native, so None. StreamInvalid: the first chunk is incomplete or empty.
    """
    try:
        if read_manifest(directory, None) is not None or is_there(directory / OWNER):
            return None
        found = listing.list_chunks(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not found.seals:
        return None
    what = "chunk 0 is not complete"
    if found.complete:
        if rows := len(open_foreign(directory / found.data[0], 0)):
            return rows
        what = f"{found.data[0]} holds no rows"
    raise invalid(directory, f"{what}, so the number of samples per chunk is unknown; give it", 0)


def _open_foreign(directory: Path, samples_per_chunk: int | None) -> ForeignStream | None:
    of_store, ours = isinstance(directory, UrlPath), (_is_there(directory / name) for name in _OURS)
    # If the first chunk has its usual names and no file is native, the directory can be read without listing it.
    if samples_per_chunk is not None and not of_store and _is_complete(directory, _NOTHING, 0) and not any(ours):
        return ForeignStream(directory, samples_per_chunk)
    try:
        found = look_foreign(directory)
    except FileNotFoundError:
        return None
    # A listed manifest was created just now, or the filesystem has cached it as missing.
    if MANIFEST in found.ours or not (found.data or found.seals):
        return None
    # Earlier releases could leave an owner file in a foreign directory; callers that give the numbers may read it.
    for beside in (HEAD, OWNER) if samples_per_chunk is None else (HEAD,):
        if beside in found.ours:
            raise listing.manifest_lost(directory, beside)
    if not found.seals:
        raise listing.stream_unsealed(directory, found.data)
    if of_store:
        what = f"there is no {MANIFEST}, and only native streams can be read from a store. Copy it into a directory"
        raise invalid(directory, f"{what}, and make a stream of that: `lazyshard-producer run --source DIR --out URL`")
    if samples_per_chunk is None:
        what = "so samples_per_chunk must be given: how many rows every chunk but the last holds"
        raise ValueError(f"{directory}: there is no {MANIFEST}, {what}")
    return ForeignStream(directory, samples_per_chunk, found)


class Scan(NamedTuple):
    """What is known about a foreign directory, as numbers instead of names."""

    complete: int = 0  # the chunks [0, complete) have a marker and data
    data: int = 0
    seals: int = 0
    odd: Mapping[int, str] = {}  # data files whose names differ from `chunk_name`
    ours: frozenset[str] = frozenset()  # names of files that only native producers write
    ended: bool = False  # whether there was an end before it was listed
    listed: int = 0  # complete chunks in the last listing, without chunks looked up since; 0 if it was not listed
    again_at: float = 0.0  # when it may be listed again, by `time.monotonic`

    @property
    def gap(self) -> int | None:
        """As `Listing.gap`."""
        return self.complete if self.seals > self.complete else None

    def data_name(self, chunk: int) -> str:
        """Returns the file name of a chunk's rows."""
        return self.odd.get(chunk, chunk_name(chunk))


_NOTHING: Final = Scan()


def look_foreign(directory: Path) -> Scan:
    """Checks for an end, then lists the directory. Raises as `list_chunks`."""
    started = time.monotonic()
    # A foreign directory in an object store is refused, or does not exist yet.
    ended = not isinstance(directory, UrlPath) and _is_there(directory / END)
    listed = names_in(directory)
    found, now = sort_names(listed, directory), time.monotonic()
    odd = {chunk: name for chunk, name in found.data.items() if name != chunk_name(chunk)}
    ours = frozenset(_OURS).intersection(listed)
    # Listing may take a twentieth of the time; a waiting reader lists again after at most a minute.
    again_at = now + min(20 * (now - started), 60.0)
    return Scan(found.complete, len(found.data), len(found.seals), odd, ours, ended, found.complete, again_at)


def _is_there(path: Path) -> bool:
    return again_if_stale(path.exists)


def _is_complete(directory: Path, known: Scan, chunk: int) -> bool:
    return _is_there(directory / seal_name(chunk)) and _is_there(directory / known.data_name(chunk))


class ForeignStream:
    """A directory that another program fills. A chunk is looked up by name, and scanned once when it is opened.

    Only a listing shows exactly how many chunks exist: other programs may make them in any order and leave gaps. It
    takes 0.9 s for 200,000 chunks on a local disk. So unless a reader waits for more chunks than are known, names are
    looked up: in doubling steps at first, then one by one. A gap that this overlooks is found when its chunk is opened,
    and counts from then on. Rows after an end would be lost silently. So an end that appears is confirmed by a listing;
    an end that existed from the start is confirmed when the last chunk is opened, or by `check_end` if it never is.
    """

    arrays = False
    stream_id = encoding = mirror = None

    def __init__(self, directory: Path, samples_per_chunk: int, found: Scan = _NOTHING) -> None:
        self.directory, self.samples_per_chunk = directory, samples_per_chunk
        self._known = found
        self._newest = (-1, 0)  # a chunk and its number of rows

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out when to list again: another machine has another clock."""
        return self.__dict__ | {"_known": self._known._replace(again_at=0.0)}

    def published(self, wanted: int | None = None) -> Published:
        """Polls how many chunks are complete, and counts the rows of the newest one; lists if `wanted` is None."""
        self._known = known = self._look(wanted)
        gap, size, chunks, short = known.gap, self.samples_per_chunk, known.complete, None
        if known.ended and gap is None and known.data > chunks:
            # Rows that were written but never marked complete: the end must not drop them silently.
            gap = chunks
        ended, newest = known.ended and gap is None, chunks - 1
        try:
            if chunks and self._newest[0] != newest:
                if (rows := len(self._open(newest))) > size:
                    what = f"chunk {newest}: expected at most {size} rows (samples_per_chunk), found {rows}"
                    raise invalid(self.directory, what, newest)
                self._newest = newest, rows
            rows = self._newest[1] if chunks else size
        except FileNotFoundError:
            # Listed, but the filesystem has cached it as missing.
            chunks, ended, gap, rows = newest, False, newest, size
        if rows < size and not ended:
            # The marker of the last chunk precedes `stream.end`; until that exists, a short chunk does not count.
            chunks, short, rows = newest, rows, size
        return Published(chunks, chunks * size - (size - rows), ended, gap=gap, short=short)

    def check_identity(self) -> None:
        """Does nothing: a foreign stream has no identity."""

    def check_end(self) -> None:
        """Lists the directory if an end was not yet confirmed. Raises StreamInvalid: there is more, or less."""
        known = self._known
        if not known.ended or known.listed:
            return
        found = look_foreign(self.directory)
        if found.gap is not None or max(found.data, found.complete) != known.complete:
            what = f"there is an end, and {known.complete} chunks were found by name, but a listing shows"
            more = f"{found.data} data files and {found.seals} markers; complete chunk {found.complete}, start again"
            raise invalid(self.directory, f"{what} {more}", found.complete)
        self._known = found

    def open_chunk(self, chunk: int, share: float = 0.0) -> Chunk:
        """Opens a published chunk and finds its rows. If it is the last one, raises as `check_end`."""
        if chunk == self._known.complete - 1:
            self.check_end()
        return self._open(chunk)

    def _open(self, chunk: int) -> Chunk:
        try:
            if chunk >= self._known.listed:
                # A chunk that was looked up in doubling steps may still be incomplete.
                os.stat(self.directory / seal_name(chunk))
            return open_foreign(self.directory / self._known.data_name(chunk), chunk)
        except FileNotFoundError:
            self._known = look_foreign(self.directory)
            if chunk >= self._known.listed:
                raise
        return open_foreign(self.directory / self._known.data_name(chunk), chunk)

    def retired(self) -> int:
        """Returns 0: a foreign stream has no rule by which a reader could know of deleted chunks."""
        return 0

    def _look(self, wanted: int | None) -> Scan:
        known = found = self._known
        if wanted is None:
            return look_foreign(self.directory)
        ended = _is_there(self.directory / END)
        # Chunks that arrive one by one are looked up one by one: they may arrive out of order.
        complete, step, growth = known.complete, 1, 1 if known.complete else 2
        while _is_complete(self.directory, known, complete + step - 1):
            complete, step = complete + step, growth * step
        # The first missing chunk is less than `step` further on.
        while step := step // 2:
            complete += step * _is_complete(self.directory, known, complete + step - 1)
        if complete > known.complete:
            found = known._replace(complete=complete, data=max(known.data, complete), seals=max(known.seals, complete))
        # A smaller directory that has an end is listed at once: that takes 2 ms.
        if known is _NOTHING and found.complete >= _MANY:
            return found._replace(ended=ended)
        missing = wanted > found.complete * self.samples_per_chunk and time.monotonic() >= known.again_at
        if known.ended != ended or (found is not known if ended else missing):
            return look_foreign(self.directory)
        return found


class NativeStream:
    """A stream with a manifest. A poll takes one open and one read, or one request, regardless of its length."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.samples_per_chunk = directory, manifest.samples_per_chunk
        self.arrays, self.encoding = manifest.arrays, manifest.encoding
        self.stream_id: str | None = manifest.stream_id
        self.mirror: Mirror | None = None
        if isinstance(directory, UrlPath):
            # Code for object stores that readers of directories need not import.
            from lazyshard.store.mirror import Mirror

            self.mirror = Mirror(directory, manifest.stream_id, self.check_identity)
        else:
            self._manifest = os.path.join(directory, MANIFEST)
            self._manifest_file = self._identify()

    def _identify(self) -> tuple[int, int, int]:
        status = again_if_stale(lambda: os.stat(self._manifest))
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def published(self, wanted: int | None = None) -> Published:
        """Polls what is published, from `head.json`, or if that is lost by listing the seals."""
        try:
            head = read_record(self.directory / HEAD, _decode_head)
        except (FileNotFoundError, FileInvalid):
            return self._listed()
        self._check(head, ended=head.ended)
        return Published(head.chunks, head.samples, head.ended, head)

    def _check(self, found: Head | End, *, ended: bool) -> None:
        if not found.is_whole(size := self.samples_per_chunk, ended=ended):
            self.check_identity()
            file, expected, actual = self.directory / found.NAME, str(found.chunks * size), str(found.samples)
            what = f"{file}: expected {found.chunks} chunks of {size} samples, found {actual}"
            fields = {"file": str(file), "field": "samples", "expected": expected, "actual": actual}
            raise FileInvalid(f"{what}; start the producer again, or restore it", **fields)

    def _listed(self) -> Published:
        found = listing.list_kept(self.directory, self.stream_id)
        if (end := find_record(self.directory / END, End.decode)) is not None:
            self._check(end, ended=True)
            return Published(end.chunks, end.samples, True)
        chunks, gap, size = found.complete, found.gap, self.samples_per_chunk
        if chunks > found.first:
            # The last seal may be of a partial chunk whose stream.end does not exist yet.
            try:
                chunks -= len(self.open_chunk(chunks - 1)) < size
            except FileNotFoundError:
                # Listed, but the filesystem has cached it as missing.
                chunks = gap = chunks - 1
        return Published(chunks, chunks * size, False, gap=gap)

    def check_identity(self) -> None:
        """Compares the manifest. Raises StreamMismatch: another stream has taken its place."""
        found = read_record(self.directory / MANIFEST, Manifest.decode).stream_id
        if found != self.stream_id:
            what = f"{self.directory}: stream {self.stream_id} was replaced by stream {found}; open the directory again"
            raise StreamMismatch(what, directory=str(self.directory), expected=str(self.stream_id), actual=found)

    def check_end(self) -> None:
        """Does nothing: the end states how many chunks there are."""

    def open_chunk(self, chunk: int, share: float = 0.0) -> Chunk:
        """Opens a published chunk by its seal, after checking that the stream is still the one that was opened.

        `share`: of its rows that will be read, see `Mirror.open`.
        Raises FileNotFoundError: a file of it does not exist (yet). ChunkCorrupt, FileRefused, OSError.
        """
        if self.mirror is not None:
            seal, file, arrays = self.mirror.open(chunk, share)
            opened = open_copy(file, seal, arrays)
        else:
            if (found := self._identify()) != self._manifest_file:
                self.check_identity()
                self._manifest_file = found
            opened = open_sealed(self.directory / chunk_name(chunk), read_seal(self.directory, chunk))
        if (opened.arrays is not None) is not self.arrays:
            # Its format contradicts the manifest, so its rows would be read incorrectly.
            path = str(self.directory / seal_name(chunk))
            expected, actual = f"{FORMAT + self.arrays}, as in {MANIFEST}", str(FORMAT + (not self.arrays))
            what = f"{path}: field 'format': expected {expected}, found {actual}; restore the file from a copy"
            raise ChunkCorrupt(what, file=path, field="format", expected=expected, actual=actual, chunk=chunk)
        return opened

    def retired(self) -> int:
        """Returns which chunks the producer has retired: the chunks [0, n)."""
        return listing.read_retired(self.directory, self.stream_id)


def read_lengths(stream: Stream, samples: int) -> UInt32Array:
    """Returns the tokens of the first `samples` samples, u32. Raises LengthUnknown: a chunk has none, or was deleted.

    Reads the seal of each chunk, some 30 bytes per row, in every process that calls this.
    """
    directory = stream.directory
    # In place: a long stream leaves no room for a second copy.
    lengths = np.zeros(samples, np.uint32)
    for chunk, begin in enumerate(range(0, samples, stream.samples_per_chunk)):
        try:
            part = sealed_tokens(directory, read_seal(directory, chunk))[: samples - begin]
        except FileNotFoundError:
            if chunk >= stream.retired():
                raise
            what = f"{directory}: the producer has deleted chunk {chunk}, and the lengths of its samples with it"
            raise LengthUnknown(what, directory=str(directory), chunk=chunk) from None
        lengths[begin : begin + len(part)] = part
    return lengths


def sealed_tokens(directory: Path, seal: Seal) -> UInt32Array:
    """Returns the tokens of each row of a chunk. Raises LengthUnknown: they were not measured."""
    if seal.tokens is None:
        raise lengths_missing(directory, seal.chunk)
    return seal.tokens


class ChunkLengths:
    """Reads lengths chunk by chunk, on demand. LengthUnknown: the stream is foreign."""

    def __init__(self, reader: StreamReader) -> None:
        if reader.stream_id is None:
            raise lengths_missing(reader.directory)
        self._reader = reader
        self._kept: dict[int, UInt32Array] = {}

    def of(self, chunk: int) -> UInt32Array:
        """Returns u32 of shape (rows,), waiting until the chunk is published; empty after the end of the stream."""
        if (lengths := self._kept.get(chunk)) is None:
            reader, size = self._reader, self._reader.samples_per_chunk
            rows = min(size, reader.wait_for((chunk + 1) * size).samples - chunk * size)
            lengths = sealed_tokens(reader.directory, self._seal(chunk))[:rows] if rows > 0 else np.zeros(0, np.uint32)
            if len(self._kept) >= 4:
                self._kept.pop(min(self._kept), None)
            self._kept[chunk] = lengths
        return lengths

    def source(self, chunk: int) -> Any:
        """Returns the field `source` of a published chunk's seal: the producer's position."""
        return self._seal(chunk).source

    def _seal(self, chunk: int) -> Seal:
        try:
            return read_seal(self._reader.directory, chunk)
        except FileNotFoundError:
            # Waits until its files are visible, or raises what has become of them.
            self._reader.chunk(chunk)
            return read_seal(self._reader.directory, chunk)


def lengths_missing(directory: object, chunk: int | None = None) -> LengthUnknown:
    """Returns the error for a chunk without lengths; None: for a whole stream that another program fills."""
    who = "another program fills it" if chunk is None else f"the producer of chunk {chunk} did not seal them"
    what = f"{directory}: the lengths of its samples in tokens are unknown: {who}. Make a stream that has them:"
    command = f"lazyshard-producer run --source {shlex.quote(str(directory))} --out NEW --samples-per-chunk N"
    way = f"`{command} --measure TOKENIZER` (the folder of a tokenizer, swift, or MODULE:FUNCTION)"
    if chunk is not None:
        way += "; or have the producer seal them with --measure, --encode, or `ChunkWriter.write(row, tokens=N)`"
    return LengthUnknown(f"{what} {way}", directory=str(directory), chunk=chunk)
