"""A stream of several writers in an object store, as its sequencer publishes into it.

A writer publishes from a spool into `URL/.writers/NAME/`, as any producer does into a URL. The sequencer has no spool.
For each turn of the writers it puts, and each step begins when the previous one is confirmed:

1. `.writers/intent.json`, in place of the version that it has read or put last: which pieces are the next chunks;
2. the chunks' data and side files, which the store copies from the pieces; remainders are copied through this process;
3. their seals, in order, each on condition that there is none: this publishes a chunk;
4. `head.json` and `.writers/committed.json`, in place of its last versions.

Whoever takes over publishes what the intent says before anything else. So two sequencers never copy different pieces to
one chunk, although a store cannot refuse a late copy, even by one that was stopped for an hour. The chunks are chosen
anew only if a piece was damaged since.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded
from lazyshard.format import records
from lazyshard.format.batch import CheckedLines
from lazyshard.format.records import END, HEAD, MANIFEST, End, Manifest, arrays_name, chunk_name, seal_name
from lazyshard.format.seal import SealBytes
from lazyshard.format.writers import WRITERS, Committed, EndRequest, Intent, Sequenced, WriterRows, is_writer_name
from lazyshard.store.files import UrlPath, read_file, read_record
from lazyshard.stream import ChunkWriter
from lazyshard.stream.chunk import damaged
from lazyshard.stream.head import Announcer
from lazyshard.stream.listing import Published, invalid, read_manifest
from lazyshard.stream.members import RETRY_S, SequencedWriter
from lazyshard.stream.publishing import SealedPiece
from lazyshard.stream.sequencer import BEAT_S, Gate, Sequencer
from lazyshard_producer.shipping.store import StoreShelf, StreamStore, next_owner, read_stream

_COPIES: Final = 8  # that the store makes at the same time: a copy takes 50 ms or more, whatever its size
_TRIES: Final = 5  # each notices what another process has put since
_INTENT: Final = f"{WRITERS}/{Intent.NAME}"


class StoreWriter:
    """The writer of the shared stream: what `Sequencer` needs of a `ChunkWriter`, whose methods those here are like.

    Chunks are published by `settle`, many at once; `published_chunks` and `published_samples` count them before that.

    Args:
        directory: the stream's URL.
        store: its store, which this process takes.

    Attributes:
        intent: what a sequencer before may not have completed.
        listed: sizes of the objects below `.writers`, when they were last listed.
        alive: called while the store copies.

    Raises:
        StreamEnded: the stream has ended.
        ProducerFenced: another process is taking it at this moment.
    """

    def __init__(self, directory: UrlPath, store: StreamStore) -> None:
        self.directory, self.store = directory, store
        manifest = read_manifest(directory, None)
        assert manifest is not None
        self.samples_per_chunk = manifest.samples_per_chunk
        self.arrays, self.encoding = manifest.arrays, manifest.encoding
        self.listed: dict[str, int] = {}
        self.alive: Callable[[], None] = lambda: None
        self.failed = self._closed = False
        self.state: records.ProducerState = "running"
        self._chosen = list[SealedPiece]()  # in a folder of the store, or made here
        self._rest: ChunkWriter | None = None  # the chunk of remainders that is being filled
        before, tag = store.find_owner()
        store.take(next_owner(before), tag)
        self._tags = {name: store.tagged(name)[1] for name in (HEAD, f"{WRITERS}/{Committed.NAME}")}
        # Before the listing: chunks of this intent may be listed, and no chunk of a later one.
        data, self._tags[_INTENT] = store.tagged(_INTENT)
        self.intent = None if data is None else Intent.decode(data, store.name_of(_INTENT))
        found = read_stream(store, None)
        self.full_chunks = self.published_chunks = found.listing.sealed
        self.source, short = None, 0
        if found.listing.sealed > found.listing.first:
            path = directory / seal_name(self.full_chunks - 1)
            last = SealBytes.decode(read_file(path), self.full_chunks - 1, str(path))
            self.source, short = last.source, self.samples_per_chunk - last.samples
        self.published_samples = self.full_chunks * self.samples_per_chunk - short
        self.shelf = StoreShelf(store, directory, found)
        self._folder = tempfile.TemporaryDirectory(prefix="lazyshard-")
        place, size = Path(self._folder.name), self.samples_per_chunk
        self._announcer = Announcer(place, lambda name: place / f".{name}", size, self.published_samples, time.time)
        self._head = place / HEAD
        if found.end is not None or short:
            # If the last chunk is a partial one, only `stream.end` and the head may be missing.
            self.close()
            samples = self.published_samples
            what = f"{directory}: the stream has ended with {samples:,} samples; write a new one to another place"
            raise StreamEnded(what, directory=str(directory), samples=samples)

    def publish_pieces(self, pieces: Sequence[SealedPiece]) -> None:
        """Chooses pieces as the next chunks."""
        for one in pieces:
            self._chosen.append(one)
            self.full_chunks = self.published_chunks = self.full_chunks + 1
            self.published_samples += one.seal.samples
            self.source = one.source

    def write_lines(self, lines: CheckedLines, *, source: Any = None) -> None:
        """Adds rows to a chunk that is made here."""
        if self._rest is None:
            place = Path(self._folder.name, f"rest-{self.full_chunks}")
            self._rest = ChunkWriter(place, self.samples_per_chunk, arrays=self.arrays, encoding=self.encoding)
        self._rest.write_lines(lines, source=source)
        if self._rest.published_chunks:
            self._choose_rest(self._rest, end=False)

    def heartbeat(self, state: records.ProducerState | None = None, note: str = "") -> None:
        """Puts the head."""
        self.state = state or self.state
        self._tell(self.state, note)

    def settle(self) -> None:
        """Publishes what was chosen."""
        if self._chosen:
            self._publish(end=False)

    def check_owner(self) -> Path:
        """Raises ProducerFenced if another process has taken the stream."""
        self.store.check_owner()
        return self.directory

    def close(self, end: bool = True) -> None:
        """Publishes the chosen rows and ends the stream; or leaves them to the next sequencer."""
        if self._closed:
            return
        try:
            if end:
                if self._rest is not None:
                    self._choose_rest(self._rest, end=True)
                self._publish(end=True)
            elif not self.failed:
                with contextlib.suppress(OSError, LazyShardError):
                    self._tell("idle")
        finally:
            self._closed = True
            if self._rest is not None:
                self._rest.close(end=False)
            self._folder.cleanup()

    def put_record(self, name: str, data: bytes) -> None:
        """Replaces a record that sequencers put. Raises ProducerFenced: another one has put it since."""
        for _ in range(_TRIES):
            if tag := self.store.swap(name, data, self._tags[name]):
                self._tags[name] = tag
                return
            # By one that has been fenced since, unless this one was: the tag is read before the owner.
            self._tags[name] = self.store.tagged(name)[1]
            self.store.check_owner()
        raise self.store.invalid(name, "another process keeps overwriting this object; find it and stop it")

    def _choose_rest(self, rest: ChunkWriter, *, end: bool) -> None:
        rest.close(end=end)
        path = rest.directory / seal_name(0)
        self._rest = None
        seal = SealBytes.decode(read_file(path), 0, str(path))
        self.publish_pieces([SealedPiece(rest.directory, seal, rest.source)])

    def _publish(self, *, end: bool) -> None:
        chosen, self._chosen = self._chosen, []
        first = self.full_chunks - len(chosen)
        self.failed = True
        rows = tuple(tuple((one.writer, one.first, one.count) for one in _rows(each.source)) for each in chosen)
        intent = Intent(first, rows, end)
        if not (tag := self.store.swap(_INTENT, intent.encode(), self._tags[_INTENT])):
            self.store.check_owner()
            what = f"{self.directory}: another sequencer has chosen the next chunks; this one reads what they are"
            raise ProducerFenced(what, directory=str(self.directory))
        self._tags[_INTENT] = tag
        with ThreadPoolExecutor(_COPIES, thread_name_prefix="lazyshard-copy") as pool:
            copies = [pool.submit(self._copy, one, number) for number, one in enumerate(chosen, first)]
            while wait(copies, BEAT_S).not_done:
                self.alive()
            for copy in copies:
                copy.result()
        for number, one in enumerate(chosen, first):
            self._put_seal(number, one)
        if end:
            self._put_end()
        self.failed = False
        self._tell("finished" if end else self.state)

    def _copy(self, one: SealedPiece, number: int) -> None:
        for name_of in (chunk_name, arrays_name)[: 1 + (one.seal.arrays_size is not None)]:
            name = name_of(one.seal.chunk)
            if isinstance(one.folder, UrlPath):
                self.store.copy(f"{WRITERS}/{one.folder.name}/{name}", name_of(number))
            else:
                # The same bytes, whoever makes them: no condition is needed.
                self.store.put(name_of(number), (one.folder / name).read_bytes())

    def _put_seal(self, number: int, one: SealedPiece) -> None:
        name, data = seal_name(number), one.seal.encode(number, one.source, time.time())
        if not self.store.put_new(name, data):
            found = SealBytes.decode(self.store.find(name) or b"", number, self.store.name_of(name))
            if (found.size, _rows(found.source)) != (one.seal.size, _rows(one.source)):
                self.store.check_owner()
                raise self.store.invalid(name, "another program has published this chunk; nothing was changed", number)
        self.shelf.add(len(data) + one.seal.size + (one.seal.arrays_size or 0))

    def _put_end(self) -> None:
        found = read_stream(self.store, None)
        self.store.remove(*found.unsealed, *found.listing.leftovers)
        end = End(self.full_chunks, self.published_samples, self.source)
        self.store.put_once(END, end.encode(), "ended this stream with other contents")

    def _tell(self, state: records.ProducerState, note: str = "") -> None:
        samples = self.published_samples
        self._announcer.tell(self.full_chunks, samples, samples, state, note)
        self.put_record(HEAD, self._head.read_bytes())


def _rows(source: Any) -> tuple[WriterRows, ...]:
    found = Sequenced.read_source(source)
    return () if found is None else found.rows


class StoredWriter(SequencedWriter):
    """A writer whose pieces are in an object store; `listed` are its objects with their sizes."""

    def __init__(self, name: str, folder: Path, stream_id: str, size: int) -> None:
        super().__init__(name, folder, stream_id)
        self.listed: dict[str, int] = {}
        self._names, self._checked, self._size = frozenset[str](), False, size

    def look(self, now: float, *, fresh: bool) -> None:
        """Refreshes what is published, by the names of its seals; once a second if its pieces are not taken."""
        seen = frozenset(self.listed)
        if not fresh and seen == self._names and (not self.trouble or now < self._due):
            return
        self._due = now + RETRY_S
        if not self._checked and MANIFEST in self.listed:
            self._check_identity(read_record(self.folder / MANIFEST, Manifest.decode).stream_id)
            self._checked = True
        if not self._checked:
            return
        if END in self.listed:
            end = read_record(self.folder / END, End.decode)
            self.published = Published(end.chunks, end.samples, True)
        else:
            parsed = (records.parse_chunk_name(name) for name in self.listed)
            chunks = 1 + max((one[0] for one in parsed if one is not None and one[1]), default=-1)
            self.published = Published(chunks, chunks * self._size, False)
        self._check_published()
        self._names, self.trouble = seen, ""


class StoreSequencer(Sequencer):
    """The sequencer of a stream in an object store, whose writer is a `StoreWriter`."""

    _writer: StoreWriter  # type: ignore[assignment]

    def __init__(self, writer: StoreWriter, gate: Gate | None, beat: int) -> None:
        self._last: Committed | None = None
        writer.alive = self._show_alive
        super().__init__(writer, gate, beat)  # type: ignore[arg-type]
        self._resumed = False

    def turn(self) -> int:
        """As `Sequencer.turn`; the first one publishes what a sequencer before has chosen."""
        if self._resumed:
            return super().turn()
        self._resumed = True
        # What is chosen must be published, at any limit.
        gate, self._gate = self._gate, None
        try:
            return self._resume(self._writer.intent)
        finally:
            self._gate = gate

    def _resume(self, intent: Intent | None) -> int:
        self._look(time.monotonic())
        before = self._writer.full_chunks
        rows = () if intent is None else intent.rows[max(0, before - intent.chunks) :]
        for parts in rows:
            members = [self.members[name] for name, _, _ in parts if name in self.members]
            at = [(one.name, one.taken) for one in members]
            if at != [(name, first) for name, first, _ in parts] or not self._choose(members, parts):
                # A piece was damaged since; what follows it is chosen anew.
                break
        else:
            if intent is not None and intent.end:
                self._writer.close()
                self.ended = True
                return len(rows)
        self._writer.settle()
        self._tell()
        return self._writer.full_chunks - before

    def _choose(self, members: list[SequencedWriter], parts: tuple[tuple[str, int, int], ...]) -> bool:
        chunks = self._writer.full_chunks
        if len(parts) == 1 and parts[0][2] == self._size:
            self._take(members[:1], 1)
            return self._writer.full_chunks > chunks
        if len(self._sound(members)) < len(members):
            return False
        self._fill([(member, count) for member, (_, _, count) in zip(members, parts, strict=True)])
        return True

    def _add(self, name: str) -> SequencedWriter:
        folder = self.directory / WRITERS / name
        self.members[name] = StoredWriter(name, folder, self._manifest.stream_id, self._size)
        return self.members[name]

    def _look(self, now: float) -> bool:
        listed = self._writer.listed = self._writer.store.list(WRITERS, below=True)
        by_writer = dict[str, dict[str, int]]()
        for path, size in listed.items():
            name, _, rest = path.partition("/")
            if rest and is_writer_name(name):
                by_writer.setdefault(name, {})[rest] = size
        requested = EndRequest.NAME in listed
        for name in sorted(by_writer.keys() - self.members.keys()):
            self._add(name)
        for name, member in self.members.items():
            with self._trouble(member):
                assert isinstance(member, StoredWriter)
                member.listed = by_writer.get(name, {})
                member.look(now, fresh=requested)
        return requested

    def _seal(self, member: SequencedWriter, number: int) -> SealBytes | None:
        path = member.folder / seal_name(number)
        seal = SealBytes.decode(read_file(path), number, str(path))
        if seal.samples < self._size:
            # Its last piece, whose end is not there yet.
            member.published = Published(number, number * self._size, False)
            return None
        if (seal.arrays_size is not None) is not self._writer.arrays:
            raise invalid(member.folder, f"chunk {number} is of another kind than the stream's chunks", number)
        for name, size in ((chunk_name(number), seal.size), (arrays_name(number), seal.arrays_size)):
            if size is not None and (found := self._writer.listed.get(f"{member.name}/{name}")) != size:
                actual = "no object" if found is None else f"{found} bytes"
                raise damaged(member.folder / name, number, None, None, f"{size} bytes as sealed", actual)
        return seal

    def _end(self, rests: list[SequencedWriter]) -> None:
        if rests:
            self._merge(rests)
        self._writer.close()
        self.ended = True

    def _tell(self, *, stopped: bool = False) -> None:
        # What is told is durable: writers delete their pieces by it.
        if not self._writer.failed:
            self._writer.settle()
            super()._tell(stopped=stopped)

    def _show_alive(self) -> None:
        if not self.ended and self._last is not None and time.monotonic() - self._beaten >= BEAT_S:
            self._beaten, self._beat = time.monotonic(), self._beat + 1
            self._put_told(replace(self._last, beat=self._beat, updated_at=time.time()))

    def _put_told(self, told: Committed) -> None:
        self._last = told
        self._writer.put_record(f"{WRITERS}/{Committed.NAME}", told.encode())
