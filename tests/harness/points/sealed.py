"""What every instant must keep of a stream, whoever is writing to it or was killed while it did."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

from lazyshard import StreamReader
from lazyshard.errors import ChunkRetired, LazyShardError
from lazyshard.format.arrays import pack_row
from lazyshard.format.records import END, HEAD, End, Head, arrays_name, chunk_name, parse_chunk_name, seal_name
from lazyshard.format.row import parse_row
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.stream import read_retired
from lazyshard.stream.listing import Published


class SealedChunks:
    """All that was ever seen sealed. `lines`: the rows in the end. `arrays`: the bytes of each one's; None for none."""

    def __init__(
        self,
        out: Path,
        lines: Sequence[str],
        per_chunk: int,
        *,
        ordered: bool,  # whether their order is fixed; else only that each comes once
        known: dict[str, bytes],  # what was seen of it before, by file name
        arrays: Sequence[bytes] | None = None,
    ) -> None:
        self.known: Final[dict[str, bytes]] = dict(known)  # as they were seen first, by file name
        self._out = out
        self._lines = lines
        self._arrays = arrays
        self._places = {line: number for number, line in enumerate(lines)}
        self._per_chunk = per_chunk
        self._ordered = ordered
        self._chunks: dict[int, list[int]] = {}  # the numbers of its rows in `lines`
        for name, data in self.known.items():
            found = parse_chunk_name(name)
            if found is not None and not found[1]:
                self._take_rows(found[0], data)

    @property
    def chunks(self) -> int:
        """How many were ever sealed, as far as was seen; some may have come and gone unseen."""
        return max(self._chunks, default=-1) + 1

    def look(self, acknowledged: int) -> None:
        """May be called while the stream is written and deleted. `acknowledged`: the chunks below it may be gone."""
        try:
            names = os.listdir(self._out)
        except FileNotFoundError:
            if self.known:
                raise AssertionError("the stream's directory is gone") from None
            return
        sealed = {found[0] for found in map(parse_chunk_name, names) if found is not None and found[1]}
        for chunk in sorted(sealed | set(self._chunks)):
            self._look_at(chunk, acknowledged)
        for chunk in range(max(self._chunks, default=0)):  # A listing may miss what was renamed meanwhile
            if chunk not in self._chunks and chunk >= self._mark(acknowledged):
                self._look_at(chunk, acknowledged)

    def look_stopped(self, acknowledged: int) -> None:
        """Looks at what the stream says of itself as well; nobody may write to it meanwhile. Raises as `look`."""
        self.look(acknowledged)
        self._mark(acknowledged)
        self.check_claims()

    def check_claims(self) -> None:
        sealed = self.chunks
        samples = min(sealed * self._per_chunk, len(self._lines))
        try:
            end = _read(self._out / END)
            if end is not None and (told := End.decode(end)) != End(sealed, samples):
                raise AssertionError(f"{END} says {told}, sealed are {sealed} chunks with {samples} rows")
            head = _read(self._out / HEAD)
            if head is not None and head.strip(b"\0"):  # A cut may leave its name and nothing in it
                heard = Head.decode(head)
                if heard.chunks > sealed or heard.samples > samples or (heard.ended and end is None):
                    raise AssertionError(f"{HEAD} says {heard}, sealed are {sealed} chunks with {samples} rows")
        except LazyShardError as error:
            raise AssertionError(f"what is published cannot be read: {error}") from error

    def check_sample(self, sample: int, reader: StreamReader) -> int:
        """Reads a sample; returns its number in `lines`."""
        line = reader.line(sample).decode().removesuffix("\n")
        row = reader.read(sample)
        place = self._places.get(line)
        if place is None or (self._ordered and place != sample):
            raise AssertionError(f"the reader was given {line!r} as sample {sample}")
        if self._arrays is not None and pack_row(row) != (f"{line}\n".encode(), self._arrays[place]):
            raise AssertionError(f"the reader was given {row} as sample {sample}, whose line is {line!r}")
        return place

    def read_through(self) -> Published:
        try:
            reader = StreamReader(self._out, max_wait=0)
            for sample in range(reader.seen.samples):
                try:
                    self.check_sample(sample, reader)
                except ChunkRetired:
                    if sample // self._per_chunk >= read_retired(self._out):
                        raise AssertionError(f"sample {sample} is called retired") from None
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"a reader died: {type(error).__name__}: {error}") from error
        seen, samples = reader.seen, min(self.chunks * self._per_chunk, len(self._lines))
        if seen.chunks > self.chunks or seen.samples > samples or (seen.ended and seen.chunks != self.chunks):
            raise AssertionError(f"a reader is told of {seen}, sealed are {self.chunks} chunks")
        return seen

    def _look_at(self, chunk: int, acknowledged: int) -> None:
        names = [chunk_name(chunk), seal_name(chunk)]
        if self._arrays is not None:
            names.append(arrays_name(chunk))
        found = {name: content for name in names if (content := _read(self._out / name)) is not None}
        missing = [name for name in names if name not in found]
        if missing:
            if chunk < self._mark(acknowledged):
                return
            raise AssertionError(
                f"{' and '.join(missing)} missing: chunk {chunk} or one behind is sealed, nothing deleted"
            )
        before = {name: self.known[name] for name in names if name in self.known}
        if before == found:
            return
        if before:
            changed = [name for name in names if before[name] != found[name]]
            raise AssertionError(f"{' and '.join(changed)} of chunk {chunk} changed after it was sealed")
        data = found[names[0]]
        sealed = self._check(chunk, data, found[names[1]])
        self._take_rows(chunk, data)
        self._check_arrays(chunk, sealed.arrays, found.get(arrays_name(chunk)))
        self.known.update(found)

    def _check(self, chunk: int, data: bytes, seal: bytes) -> Seal:
        try:
            decoded = Seal.decode(seal, chunk)
            lines = data.splitlines(keepends=True)
            if [xxhash.xxh3_64_intdigest(line) for line in lines] != decoded.digests.tolist():
                raise AssertionError(f"chunk {chunk} is not what was sealed: {data!r}")
            for line in lines:
                parse_row(line)
        except LazyShardError as error:
            raise AssertionError(f"chunk {chunk} cannot be read: {error}") from error
        return decoded

    def _check_arrays(self, chunk: int, sealed: SealedArrays | None, data: bytes | None) -> None:
        if self._arrays is None or data is None:
            assert sealed is None, f"the seal of chunk {chunk} tells of a side file, its rows hold no arrays"
            return
        wanted = [self._arrays[row] for row in self._chunks[chunk]]
        if data != b"".join(wanted):
            raise AssertionError(f"{arrays_name(chunk)} is not what was to be sealed: {data!r}, expected {wanted}")
        assert sealed is not None, f"the seal of chunk {chunk} tells of no side file"
        ends = [0, *itertools.accumulate(map(len, wanted))]
        digests = [xxhash.xxh3_64_intdigest(part) for part in wanted]
        if (sealed.offsets.tolist(), sealed.digests.tolist()) != (ends, digests):
            raise AssertionError(f"the seal of chunk {chunk} tells of other arrays than {wanted}")

    def _take_rows(self, chunk: int, data: bytes) -> None:
        rows = []
        for line in data.decode().splitlines():
            assert line in self._places, f"chunk {chunk} has a row that no source has: {line}"
            rows.append(self._places[line])
        first = chunk * self._per_chunk
        expected = range(first, min(first + self._per_chunk, len(self._lines)))
        assert len(rows) == len(expected), f"chunk {chunk} has {len(rows)} rows, expected {len(expected)}"
        if self._ordered and rows != list(expected):
            raise AssertionError(f"chunk {chunk} has rows {rows}, expected {list(expected)}")
        again = set(rows).intersection(*[{row for taken in self._chunks.values() for row in taken}])
        if again or len(set(rows)) < len(rows):
            raise AssertionError(f"chunk {chunk} has rows {rows}, of which {sorted(again)} are in other chunks")
        self._chunks[chunk] = rows

    def _mark(self, acknowledged: int) -> int:
        try:
            mark = read_retired(self._out)
        except (LazyShardError, OSError) as error:
            raise AssertionError(f"what is deleted cannot be read: {error}") from error
        assert mark <= acknowledged, f"the chunks below {mark} are deleted, acknowledged are those below {acknowledged}"
        return mark


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
