"""`NativeStream`: a stream of ours, with manifest and seals, for reading; `MirroredChunks`: one in an object store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lazyshard.errors import FileInvalid, SealInvalid, StreamMismatch
from lazyshard.format.fields import FORMAT
from lazyshard.format.names import END, HEAD, MANIFEST, chunk_name, seal_name
from lazyshard.format.records import End, Head, Manifest
from lazyshard.format.seal import Seal
from lazyshard.store.files import again_if_stale, read_file, read_replaced_file
from lazyshard.store.urls import UrlPath
from lazyshard.stream.chunk import Chunk, open_copy, open_sealed
from lazyshard.stream.listing import Published
from lazyshard.stream.retire import list_kept, read_retired


class NativeStream:
    """A stream with a manifest. Looking costs one open and one read, or one request, however long the stream.

    Attributes:
        arrays: whether its rows may hold arrays.
        encoding: what its rows are encoded with; None where they are not.
        mirrored: its chunks, where they are in an object store; None for a directory.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.arrays = manifest.arrays
        self.encoding = manifest.encoding
        self.stream_id: str | None = manifest.stream_id
        self.samples_per_chunk = manifest.samples_per_chunk
        self.mirrored: MirroredChunks | None = None
        if isinstance(directory, UrlPath):
            self.mirrored = MirroredChunks(directory, manifest.stream_id, self.check_identity)
        else:
            self._manifest = os.path.join(directory, MANIFEST)
            self._manifest_file = self._identify()

    def _identify(self) -> tuple[int, int, int]:
        status = again_if_stale(lambda: os.stat(self._manifest))
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def published(self, wanted: int | None = None) -> Published:
        """Looks what is published now, by `head.json`; by listing the seals where that is lost."""
        path = self.directory / HEAD
        try:
            head = read_replaced_file(path, lambda data: Head.decode(data, str(path)))
        except (FileNotFoundError, FileInvalid):
            return self._listed()
        self._check_samples(path, head.chunks, head.samples, head.ended)
        return Published(head.chunks, head.samples, head.ended, head)

    def _check_samples(self, path: Path, chunks: int, samples: int, ended: bool) -> None:
        short = chunks * self.samples_per_chunk - samples
        if not 0 <= short < self.samples_per_chunk or (short and not ended):
            self.check_identity()
            raise FileInvalid(
                f"{path}: expected {chunks} chunks of {self.samples_per_chunk} samples, found {samples} samples in "
                f"all; start the producer again, or restore the file from a copy",
                file=str(path),
                field="samples",
                expected=str(chunks * self.samples_per_chunk),
                actual=str(samples),
            )

    def _listed(self) -> Published:
        listing = list_kept(self.directory, self.stream_id)
        try:
            path = self.directory / END
            end = End.decode(read_file(path), str(path))
        except FileNotFoundError:
            # The last seal may be that of a partial chunk whose stream.end is still to come.
            chunks = listing.complete
            gap = listing.gap
            if chunks > listing.first:
                try:
                    rows = len(self.open_chunk(chunks - 1))
                except FileNotFoundError:
                    # Listed, but the filesystem still remembers that it was not there.
                    rows, gap = 0, chunks - 1
                if rows < self.samples_per_chunk:
                    chunks -= 1
            return Published(chunks, chunks * self.samples_per_chunk, False, gap=gap)
        self._check_samples(path, end.chunks, end.samples, True)
        return Published(end.chunks, end.samples, True)

    def check_identity(self) -> None:
        """Compares the manifest."""
        path = self.directory / MANIFEST
        found = Manifest.decode(read_file(path), str(path))
        if found.stream_id != self.stream_id:
            raise StreamMismatch(
                f"{self.directory}: stream {self.stream_id} was replaced by stream {found.stream_id} while it was "
                f"being read; open the directory again to read the new one",
                directory=str(self.directory),
                expected=str(self.stream_id),
                actual=found.stream_id,
            )

    def check_end(self) -> None:
        """Does nothing: the end says how much there is."""

    def open_chunk(self, chunk: int) -> Chunk:
        """Opens a published chunk by its seal. Looks first whether the stream is still the one that was opened."""
        if self.mirrored is not None:
            return self._of_this_format(self.mirrored.open(chunk))
        found = self._identify()
        if found != self._manifest_file:
            self.check_identity()
            self._manifest_file = found
        path = self.directory / seal_name(chunk)
        try:
            seal = Seal.decode(read_file(path), chunk, str(path))
        except SealInvalid as error:
            error.args = (f"{error}; restore the file from a copy",)
            raise
        return self._of_this_format(open_sealed(self.directory / chunk_name(chunk), seal))

    def _of_this_format(self, chunk: Chunk) -> Chunk:
        """Returns the chunk, unless its seal is of another format than the manifest: its rows would be read wrongly."""
        if (chunk.arrays is not None) is self.arrays:
            return chunk
        path = self.directory / seal_name(chunk.number)
        expected, found = FORMAT + self.arrays, FORMAT + (not self.arrays)
        raise SealInvalid(
            f"{path}: field 'format': expected {expected}, as {MANIFEST} says, found {found}; restore the file from a "
            f"copy",
            file=str(path),
            field="format",
            expected=f"{expected}, as {MANIFEST} says",
            actual=str(found),
            chunk=chunk.number,
        )

    def retired(self) -> int:
        """Reads the retired mark."""
        return read_retired(self.directory, self.stream_id)


class MirroredChunks:
    """Opens chunks by number; each is fetched once for all processes of the node.

    Args:
        directory: the stream's URL.
        stream_id: its identity.
        check_identity: raises if another stream is at the URL now.
    """

    def __init__(self, directory: UrlPath, stream_id: str, check_identity: Callable[[], None]) -> None:
        # The machinery of object stores, which readers of directories need not import.
        from lazyshard.store.mirror import Mirror, ReadAhead
        from lazyshard.store.mirror_room import chunks_ahead

        self._mirror = Mirror(directory, stream_id, check_identity)
        self._ahead = ReadAhead(self._mirror.fetch, chunks_ahead())

    @property
    def folder(self) -> Path:
        """Where the copies lie: a folder of this node that is this stream's alone."""
        return self._mirror.folder

    @property
    def fetched(self) -> int:
        """How many chunks this process has fetched, those ahead included."""
        return self._mirror.fetched

    def open(self, number: int) -> Chunk:
        """Opens a published chunk. Raises as `Mirror.open` and `Chunk` do."""
        try:
            seal, file, arrays = self._mirror.open(number)
        except SealInvalid as error:
            error.args = (f"{error}; restore the file from a copy",)
            raise
        self._ahead.opened(number)
        return open_copy(file, seal, arrays)

    def distrust(self, number: int) -> None:
        """Removes the copy of a chunk that was found to be damaged: the object may be whole."""
        self._mirror.drop(number)
