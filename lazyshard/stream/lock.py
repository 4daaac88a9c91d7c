"""How a writer opens its stream: the right to write, finding or creating the manifest, and recovery after a crash.

A stream has one writer: a lock keeps out a second producer on the same machine, fencing one on any machine. Files:
`.producer.lock` (held while a producer runs; stays, empty), `stream.owner` (see `lazyshard.format.records`), and
`.tmp/EPOCH.TOKEN/`, a producer's own directory for unpublished files; epoch and token are its fencing token.

A producer adds files to a stream, and removes files from it, by renaming them from or into its own directory. So a
producer that takes a stream over fences all earlier ones by destroying their directories: a rename that has not
happened by then will never happen. A check before the rename could not guarantee that, since a process may be stopped
between any two calls. This requires that a rename is atomic; that a removed directory is gone for all processes that
have used it; and that a process which makes a directory and then lists the parent sees all directories made before: if
two start at once, the one with the lower name gives up.

A crash can leave a file under `.tmp/`, or a data file or side file without a seal; none of them was published. It can
also leave seals that are visible but not yet durable, so the directory is synced before any seal is trusted. Chunks
below the retired mark may be missing; if some still exist, or exist again after a power cut, they are removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shlex
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import filelock

from lazyshard.errors import ChunkMissing, FileInvalid, LazyShardError, ProducerFenced, StreamEnded, StreamMismatch
from lazyshard.format import records
from lazyshard.format.records import END, HEAD, LOCK, MANIFEST, OWNER, TEMPORARY, Encoding, arrays_name, chunk_name
from lazyshard.format.seal import Seal
from lazyshard.format.writers import WRITERS
from lazyshard.store.durable import clear_folder, publish_bytes, publish_new_bytes, remove, rename, sync_directory
from lazyshard.store.files import check_folder, find_record, list_names, read_file, read_record, read_seal
from lazyshard.stream import listing as listings
from lazyshard.stream.chunk import open_sealed
from lazyshard.stream.head import Announcer
from lazyshard.stream.listing import Listing, Published, complete_retirement, invalid, list_kept, read_manifest
from lazyshard.stream.publishing import publish_end

REMEMBERED_S: Final = 60.0  # how long network filesystems may cache removed names; settings are 3 to 60 s
LISTING_S: Final = 60.0  # how long a listing may be outdated, for the same reason
_NAME: Final = re.compile(r"([0-9]{1,19})\.([0-9a-f]{16})(\.gone)?")
# Added to the name of a directory that is being destroyed, so that its owner no longer finds it
_GONE: Final = ".gone"
_UNSEEN: Final = "another producer has created a stream here that is not visible yet; start again in a minute"
_log = logging.getLogger("lazyshard")


class Wanted(NamedTuple):
    """What a writer expects of its stream, or creates it with. An existing stream must have been created like this."""

    samples_per_chunk: int | None  # needed for a new stream
    arrays: bool = False
    encoding: Encoding | None = None
    shared: bool = False  # whether the stream has several writers


def open_for_writing(
    directory: Path, wanted: Wanted, clock: Callable[[], float], stream_id: str | None = None
) -> tuple[records.Manifest, WriterLock, Announcer, Published, Any]:
    """Opens a stream for writing, creates it if needed, and notifies the readers. Raises as `ChunkWriter` does.

    Also returns what is published, and the position after that.
    """
    # Refuses what can be refused before anything is created and before another producer is fenced.
    find_manifest(directory, wanted)
    directory.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(directory, clock())
    try:
        manifest = find_manifest(directory, wanted)
        if manifest is None:
            manifest = new_manifest(wanted, clock(), stream_id)
            try:
                create_stream(directory, manifest, lock.path(MANIFEST))
            except FileExistsError as cause:
                raise invalid(directory, _UNSEEN) from cause
        if stream_id not in (None, manifest.stream_id):
            what = f"{directory}: holds a stream of identity {manifest.stream_id}, not {stream_id}; restore the folder"
            raise StreamMismatch(what, directory=str(directory), expected=stream_id, actual=manifest.stream_id)
        found, last = recover(directory, manifest, lock)
        chunks, samples, source = found.chunks, found.samples, None if last is None else last.source
        announcer = Announcer(directory, lock.path, manifest.samples_per_chunk, samples, clock)
        # If the last chunk is a partial one, only `stream.end` is missing.
        if closing := not found.ended and last is not None and last.samples < manifest.samples_per_chunk:
            publish_end(directory, chunks, samples, source, lock.path(END))
        if found.ended or closing:
            announcer.tell_end(chunks, samples)
            what = f"{directory}: the stream has ended with {samples:,} samples; write a new one to another directory"
            raise StreamEnded(what, directory=str(directory), samples=samples)
        # Recovering a long stream takes time: another producer may have taken over meanwhile.
        lock.check()
        announcer.tell(chunks, samples, samples, "running")
        return manifest, lock, announcer, found, source
    except BaseException as cause:
        try:
            # Another producer may have caused the error: a listing may be older than that producer's changes.
            fenced = lock.lost() if isinstance(cause, OSError | LazyShardError) else None
        finally:
            lock.release()
        if fenced is not None:
            raise fenced from cause
        raise


def new_manifest(
    wanted: Wanted, now: float, stream_id: str | None = None, writers: records.Declared | None = None
) -> records.Manifest:
    """Returns the manifest of a stream to be created, with a random identity if none is given."""
    size, arrays, encoding, _ = wanted
    assert size is not None
    return records.Manifest(stream_id or uuid.uuid4().hex, size, now, arrays, encoding, writers)


def find_manifest(directory: Path, wanted: Wanted) -> records.Manifest | None:
    """Returns a stream's manifest, None if there is none yet and it can be created. Changes nothing.

    Raises:
        StreamMismatch: the stream has another number of samples per chunk, other `arrays`, or another encoding.
        StreamInvalid: the directory holds chunks of another program, or a manifest that is not visible yet.
        ValueError: samples_per_chunk is invalid, or missing for a new stream.
    """
    manifest = read_manifest(directory, wanted.samples_per_chunk)
    # Another producer has created it since, or a network filesystem has cached it as missing.
    unseen = manifest is None and not _is_new(directory, wanted.samples_per_chunk)
    if unseen and (manifest := read_manifest(directory, wanted.samples_per_chunk)) is None:
        raise invalid(directory, _UNSEEN)
    if manifest is not None:
        _check_same(directory, manifest, wanted)
    return manifest


def _check_same(directory: Path, manifest: records.Manifest, wanted: Wanted) -> None:
    _, arrays, encoding, shared = wanted
    was, what, way = manifest.encoding, "", "continue with the original encoding"
    expected, actual = map(_named, (encoding, was))
    if was is not None and encoding is not None and (found := records.differences(was, encoding)):
        what = f"its rows are encoded differently: {'; '.join(found)}"
    elif (was is None) != (encoding is None):
        what = f"its rows are {'not ' * (was is None)}encoded, but new rows are{' not' * (was is not None)}"
    if not what and manifest.arrays != arrays:
        what = f"it was created {'to hold arrays' if manifest.arrays else 'without arrays'}"
        way = "open it with arrays=True" if manifest.arrays else "leave out arrays=True"
        expected, actual = f"arrays={arrays}", f"arrays={manifest.arrays}"
    if not what and (manifest.writers is not None) != shared:
        kinds = "one producer without a name", "several writers, each with a name"
        expected, actual = kinds[shared], kinds[not shared]
        what, way = f"it has {actual}", "leave out writer=" if shared else "open it with writer=NAME (--writer NAME)"
    if what:
        what = f"{directory}: {what}. This never changes for a stream: {way}, or use another directory"
        raise StreamMismatch(what, directory=str(directory), expected=expected, actual=actual)


def _named(encoding: Encoding | None) -> str:
    return "none" if encoding is None else ", ".join(f"{name}={value}" for name, value in encoding.items())[:1000]


def _is_new(directory: Path, samples_per_chunk: int | None) -> bool:
    """Returns whether a stream can be created there; False if a manifest is listed."""
    if samples_per_chunk is None:
        raise ValueError(f"{directory}: samples_per_chunk is needed to create a stream")
    with contextlib.suppress(FileNotFoundError):
        listing, names = listings.list_chunks(directory), list_names(directory)
        if MANIFEST in names:
            return False
        if listing.data or listing.seals:
            if HEAD in names:
                raise listings.manifest_lost(directory, HEAD)
            what = f"holds chunk files but no {MANIFEST}, so another program made them; choose another directory"
            command = f"lazyshard-producer run --source {shlex.quote(str(directory))}"
            raise invalid(directory, f"{what}, and run `{command}` to copy their rows there")
    return True


def create_stream(directory: Path, manifest: records.Manifest, temporary: Path) -> None:
    """Publishes a new stream's manifest after making the names of all parent directories durable: some may be new."""
    path = directory.absolute()
    while not os.path.ismount(path):
        path = path.parent
        # This process has not made a directory that it may not even list.
        with contextlib.suppress(PermissionError):
            sync_directory(path)
    publish_new_bytes(manifest.encode(), directory / MANIFEST, temporary)


def recover(directory: Path, manifest: records.Manifest, lock: WriterLock) -> tuple[Published, Seal | None]:
    """Removes unpublished files and returns what is published, and the last seal. The caller holds the writer's lock.

    Another producer may publish such a file meanwhile, so each is removed by a rename that only the owner can do.
    """
    sync_directory(directory)
    listing = _list(directory, manifest, lock)
    check_gaps(directory, listing, manifest.arrays)
    sealed, size, last, short = listing.sealed, manifest.samples_per_chunk, None, 0
    if sealed > listing.first:
        last = read_seal(directory, sealed - 1, listing.seals[sealed - 1])
        # This also checks that its files have the sealed sizes.
        open_sealed(directory / listing.data[sealed - 1], last)
        if (short := size - last.samples) < 0:
            what = f"chunk {last.chunk} holds {last.samples} samples, the stream has {size} per chunk"
            raise invalid(directory, what, last.chunk)
    samples, end = sealed * size - short, find_record(directory / END, records.End.decode)
    if end is not None and (end.chunks, end.samples) != (sealed, samples):
        what = f"{END} says {end.chunks} chunks with {end.samples} samples, the seals say {sealed} with {samples}"
        raise invalid(directory, what)
    _clear(directory, listing, lock)
    complete_retirement(directory, listing)
    return Published(sealed, samples, end is not None), last


def _list(directory: Path, manifest: records.Manifest, lock: WriterLock) -> Listing:
    """Lists the stream; waits while the listing is older than what is visible by name.

    With an old listing, a chunk that a producer on another machine has just sealed would be deleted as unpublished.
    """
    started, told = time.monotonic(), False
    while True:
        listing = list_kept(directory, manifest.stream_id, arrays=manifest.arrays)
        open_chunks = sorted({listing.sealed, *listing.data, *listing.arrays} - {*listing.seals})
        unlisted = next((chunk for chunk in open_chunks if os.path.lexists(directory / records.seal_name(chunk))), None)
        if unlisted is None:
            return listing
        lock.check()
        name, waited = records.seal_name(unlisted), time.monotonic() - started
        if waited > LISTING_S:
            what = f"{name} exists, but no listing has shown it for {waited:.0f} s; start again when one does"
            raise invalid(directory, f"{what}, or mount the filesystem with shorter caches", unlisted)
        if not told:
            _log.warning("%s/%s: is there, but not listed yet; waiting for the filesystem to list it", directory, name)
        told = True
        time.sleep(min(1.0, max(0.01, waited / 10)))


def check_gaps(directory: Path, listing: Listing, arrays: bool) -> None:
    """Raises StreamInvalid or ChunkMissing if a chunk from the first that is not retired to the newest lacks a file."""
    sealed, missing = listing.sealed, ""
    if beyond := [chunk for chunk in listing.seals if chunk >= sealed]:
        missing = f" although {listing.seals[min(beyond)]} exists"
    elif sealed == listing.first > 0:
        missing = ", the first that retired.json lists as not deleted"
    if missing:
        way = "restore it from a copy: a producer continues from the position in the newest seal"
        raise invalid(directory, f"{records.seal_name(sealed)} is missing{missing}; {way}", sealed)
    kinds = [("data file", listing.data, chunk_name), ("side file", listing.arrays, arrays_name)][: 1 + arrays]
    for chunk in range(listing.first, sealed):
        for kind, names, name_of in kinds:
            if chunk not in names:
                path = str(directory / name_of(chunk))
                what = f"{path}: sealed, but its {kind} is missing; restore it from a copy"
                raise ChunkMissing(what, file=path, chunk=chunk)


def _clear(directory: Path, listing: Listing, lock: WriterLock) -> None:
    lock.check()
    for names in (listing.data, listing.arrays):
        for chunk, name in names.items():
            if chunk not in listing.seals:
                lock.take_out(directory / name)
    # Written by releases in which producers had no directories of their own.
    clear_folder(directory / TEMPORARY)


def make_workplace(temporary: Path, least: int, token: str) -> int:
    """Makes the directory `EPOCH.TOKEN` in `.tmp` and returns its epoch: at least `least`, and above all existing ones.

    If a network filesystem still shows a `.tmp` that a producer elsewhere has removed, waits until it does not.
    """
    started = time.monotonic()
    while True:
        # Not `exist_ok`: it fails if another producer removes the directory at this moment.
        with contextlib.suppress(FileExistsError):
            temporary.mkdir()
        check_folder(temporary)
        try:
            epoch = max(least, *(found + 1 for found, _ in list_workplaces(temporary)), 1)
            with contextlib.suppress(FileExistsError):  # the response to a request that was sent twice
                (temporary / f"{epoch}.{token}").mkdir()
            return epoch
        except FileNotFoundError:
            if time.monotonic() - started > REMEMBERED_S:
                raise
            time.sleep(0.2)


def list_workplaces(temporary: Path) -> dict[tuple[int, str], str]:
    """Returns the names of all producers' directories, by epoch and token."""
    found = filter(None, map(_NAME.fullmatch, os.listdir(temporary)))
    return {(int(parsed[1]), parsed[2]): parsed[0] for parsed in found}


def destroy(directory: Path) -> None:
    """Removes another producer's directory permanently, if it exists, even while that producer uses it."""
    gone = directory.with_name(directory.name.removesuffix(_GONE) + _GONE)
    if gone != directory:
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, gone)
    started, left = time.monotonic(), False
    # If files stay, NFS keeps them because a process of this machine has them open; it cannot find them by this name.
    while not left:
        try:
            left = clear_folder(gone)
            os.rmdir(gone)
            return
        except FileNotFoundError:
            return
        except OSError as cause:
            # An NFS client that works by handles may still find its way in until the directory itself is gone.
            if cause.errno not in (errno.ENOTEMPTY, errno.EEXIST) or time.monotonic() - started > REMEMBERED_S:
                raise


class WriterLock:
    """The right to write to a stream. Files are added and removed only by way of `place`, this producer's directory.

    Takes the lock of this machine, then the ownership from its previous holder, which can change nothing from then on.
    Raises ProducerFenced: a producer on this machine is running on the stream, or another one is taking it over now.
    FileRefused, OSError: as `make_workplace`.
    """

    def __init__(self, directory: Path, now: float) -> None:
        self._directory, self._path = directory, directory / OWNER
        self._lock = filelock.FileLock(directory / LOCK, timeout=0, thread_local=False)
        self._owner: records.Owner | None = None
        self._written = b""  # `_owner` as it is in its file
        self._released = False
        temporary, token = directory / TEMPORARY, secrets.token_hex(8)
        try:
            self._lock.acquire()
        except filelock.Timeout as cause:
            holder = str(self._read() or "a process that has not written its name yet")
            what = f"{directory}: {holder} is already producing into this stream; stop it first, or choose another"
            what += " writer's name" if directory.parent.name == WRITERS else " directory"
            raise ProducerFenced(what, directory=str(directory), holder=holder) from cause
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.release)
            before = self._read()
            self._mine = make_workplace(temporary, before.epoch + 1 if before else 1, token), token
            self.place = temporary / f"{self._mine[0]}.{token}"
            try:
                # In this order: a producer that is gone by the first look is the owner by the second.
                others, mine = list_workplaces(temporary), self._mine
                if (found := self._read()) is not None:
                    # The owner's directory is added by name: a listing may be outdated.
                    others.setdefault((found.epoch, found.token), f"{found.epoch}.{found.token}")
                if max(others, default=mine) > mine:
                    raise self._fenced(found)
                for other, name in sorted(others.items()):
                    # The owner file may contain anything.
                    if other != mine and _NAME.fullmatch(name):
                        destroy(temporary / name)
                self._owner = records.Owner(*mine, socket.gethostname() or "unknown", os.getpid(), now)
                self._written = self._owner.encode()
                publish_bytes(self._written, self._path, self.path(OWNER))
            except BaseException as cause:
                if isinstance(cause, OSError) and self.is_gone():
                    raise self._fenced(self._read()) from cause
                self._remove_place()
                raise
            undo.pop_all()

    def path(self, name: str) -> Path:
        """Returns the path at which to write the file that will be published as `name`."""
        return self.place / name

    def is_gone(self) -> bool:
        """Returns whether our directory is gone. Asks the server, not the cache of this machine."""
        try:
            os.close(os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        except OSError as cause:
            return cause.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
        return False

    def take_out(self, path: Path) -> None:
        """Removes a file of the stream if it exists. Raises FileNotFoundError if another producer has taken over."""
        try:
            rename(path, self.path(path.name))
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
        else:
            remove(self.path(path.name))

    def check(self, *, closely: bool = False) -> None:
        """Raises ProducerFenced if another producer has taken the stream over, or the owner file is gone.

        `closely`, as after an error, also checks for our directory, which a producer that takes over removes first.
        """
        if (found := self._read()) is None:
            what = f"{self._path}: is gone or torn: the stream is being removed, or the file was changed. If the stream"
            way = "is still wanted, start this producer again: it continues after the last sealed chunk"
            raise ProducerFenced(f"{what} {way}", directory=str(self._directory))
        if found != self._owner or (closely and not self._released and self.is_gone()):
            raise self._fenced(found)

    def lost(self) -> ProducerFenced | None:
        """Returns the error of a close `check`; None if the stream is still ours or the filesystem fails."""
        with contextlib.suppress(OSError):
            try:
                self.check(closely=True)
            except ProducerFenced as fenced:
                return fenced
        return None

    def release(self) -> None:
        """Lets the next producer in, and removes unpublished files."""
        if not self._released:
            self._released = True
            self._remove_place()
        self._lock.release()

    def _remove_place(self) -> None:
        with contextlib.suppress(OSError):
            clear_folder(self.place)
            os.rmdir(self.place)
        with contextlib.suppress(OSError):
            os.rmdir(self.place.parent)

    def _fenced(self, found: records.Owner | None) -> ProducerFenced:
        """Returns the error for this producer; `found` is the owner, which may still be the previous one."""
        later = found is not None and found != self._owner and (found.epoch, found.token) >= self._mine
        holder = str(found) if later else None
        who = f"{holder} has taken this stream over" if holder else "another producer is taking this stream over"
        way = "this producer stops. Nothing is lost: the other one continues after the last sealed chunk"
        return ProducerFenced(f"{self._directory}: {who}; {way}", directory=str(self._directory), holder=holder)

    def _read(self) -> records.Owner | None:
        # An owner file that a power cut has emptied counts as none: the lock of this machine keeps a second producer
        # out here, and the next producer writes a new one.
        with contextlib.suppress(FileNotFoundError, FileInvalid):
            # Each publish checks twice whether the file is still ours; this spares the decoding.
            ours = read_file(self._path) == self._written
            return self._owner if ours else read_record(self._path, records.Owner.decode)
        return None
