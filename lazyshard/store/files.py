"""Opens and reads the files of a stream that another process writes, on caching filesystems or in an object store.

No function here blocks on a FIFO, follows a link out of the stream, or reads more into memory than a file of its kind
can hold. On ESTALE (the file was replaced since it was looked up) it is opened again. A path is local, or the URL of an
object store: `stream_path` decides which was given.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from lazyshard.errors import AccessRefused, FormatInvalid, StreamMissing, redact
from lazyshard.format.records import SEAL_SUFFIX, printable, seal_name
from lazyshard.format.seal import Seal
from lazyshard.store.durable import refused, write_all

if TYPE_CHECKING:
    from lazyshard.store.objects import ObjectStore

STALE_TRIES: Final = 5  # two are enough unless the file is replaced again at the same moment

_TOO_LARGE: Final = ", more than a file of this name may have"

PART_BYTES: Final = 16 << 20  # objects are fetched in parts, so that memory use is bounded: 16 ms at 1 GB/s

# Larger than the seal of the largest chunk (28 bytes per row). A sparse file may have any size at no cost
MAX_BYTES: Final = 4 << 30

# Other files are below 1 MiB; a cursor grows by some bytes with each change of ranks
MAX_PLAIN_BYTES: Final = 64 << 20

FOLDER_VARIABLE: Final = "LAZYSHARD_OBJECTS_CACHE"  # environment variable: the folder for copies of objects

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)", re.DOTALL)

_T = TypeVar("_T")
_Given = TypeVar("_Given")

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

# Kinds of files other than plain files
KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@cache
def _store(url: str, patience: str | None) -> ObjectStore:
    """Returns the store of a bucket; its streams share its connections."""
    from lazyshard.store.objects import ObjectStore

    return ObjectStore(url)


class UrlPath(PosixPath):
    """The URL of a stream or of an object in it. Supports path operations; its text does not contain credentials."""

    __slots__ = ()

    def __str__(self) -> str:
        """Returns the URL without its credentials."""
        return redact(self.url)

    @property
    def url(self) -> str:
        """The URL as given, with credentials: only to open it, never to be shown or stored."""
        scheme, *names = self.parts
        return f"{scheme}//{'/'.join(names)}"

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self}: an object store's URL is not a path of the local filesystem")

    @property
    def store(self) -> ObjectStore:
        """The store of its bucket."""
        return _store("//".join(self.parts[:2]), os.environ.get("LAZYSHARD_OBJECTS_PATIENCE_S"))

    @property
    def key(self) -> str:
        """The object's name in the store."""
        return "/".join(self.parts[2:])


def is_url(directory: str | os.PathLike[str]) -> bool:
    """Returns whether this is the URL of an object store; ``file://`` refers to a directory and is not."""
    return isinstance(stream_path(directory), UrlPath)


def stream_path(directory: str | os.PathLike[str]) -> Path:
    """Returns the path of a stream's directory: a `UrlPath` for URLs that fsspec accepts, except ``file://``."""
    if isinstance(directory, UrlPath):
        return directory
    text = os.fspath(directory)
    if (found := _URL.fullmatch(text)) is None:
        return Path(text)
    scheme, rest = found[1].lower(), found[2]
    return Path("/", rest) if scheme in ("file", "local") else UrlPath(f"{scheme}:", rest.strip("/"))


def stream_name(directory: str | os.PathLike[str]) -> str:
    """Returns a unique name with which the stream can be opened: its absolute path, or its URL as given."""
    path = stream_path(directory)
    return path.url if isinstance(path, UrlPath) else os.path.abspath(path)


def check_place(directory: str | os.PathLike[str]) -> None:
    """Raises StreamMissing if no stream can appear at a path: even its parent directory is missing.

    Directories further up are listed too: a network filesystem may cache for a minute that a name did not exist.
    """
    path = stream_path(directory)
    if isinstance(path, UrlPath):
        return
    parent = Path(os.path.abspath(path)).parent
    try:
        os.stat(parent)
        return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        # Opening the stream will report it.
        return
    missing = parent
    while not os.path.isdir(missing.parent):
        missing = missing.parent
    with contextlib.suppress(OSError):
        if missing.name in os.listdir(missing.parent):
            return
    what = f"{path}: there is no stream, and its parent directory {path.parent} does not exist; check the path"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        what += "; names of hub data sets are not supported: streams are directories, or URLs of object stores"
    raise StreamMissing(what, directory=str(path))


def is_folder(directory: str | os.PathLike[str]) -> bool:
    """Returns whether there is such a directory; True for any URL, which is not checked."""
    path = stream_path(directory)
    return isinstance(path, UrlPath) or os.path.isdir(path)


@dataclass(eq=False, slots=True)
class OpenFile:
    """A file descriptor: `size` bytes, beginning at byte `begin` of the file.

    It is closed with the last reference to this object, so never while a thread reads from it.
    """

    fd: int
    path: Path
    size: int
    begin: int = 0

    def read(self, start: int, size: int) -> bytes:
        """Reads `size` bytes from `start` on, usually in one system call; fewer at the end of the file."""
        data = self._retry_if_stale(os.pread, size, start)
        while len(data) < size and (part := self._retry_if_stale(os.pread, size - len(data), start + len(data))):
            data += part
        return data

    def read_into(self, memory: memoryview, start: int) -> int:
        """Reads bytes from `start` on into memory; returns how many. Raises as `read`."""
        done = 0
        while done < len(memory) and (read := self._retry_if_stale(os.preadv, [memory[done:]], start + done)):
            done += read
        return done

    def fetch(self, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop) of the object of which this file is a partial copy, else none."""
        return b""

    def _retry_if_stale(self, call: Callable[[int, _Given, int], _T], given: _Given, start: int) -> _T:
        """Calls `os.pread` or `os.preadv`; reopens the file and retries if the handle is stale."""
        for _ in range(STALE_TRIES):
            try:
                return call(self.fd, given, self.begin + start)
            except OSError as error:
                # The server no longer knows the file handle, or the client was stopped and may have been restarted.
                if error.errno not in (errno.ESTALE, errno.ENOTCONN):
                    raise
                # Replace the descriptor in place, since other threads may be reading from it.
                again = open_file(self.path)
                os.dup2(again.fd, self.fd, inheritable=False)
                self.begin = again.begin
        return call(self.fd, given, self.begin + start)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # A network filesystem whose client was stopped reports that here too; the data read remain valid.
        # At interpreter shutdown the names of this module are already None, so none is used here.
        try:  # noqa: SIM105
            close(self.fd)
        except OSError:
            pass


def open_file(path: Path) -> OpenFile:
    """Opens a plain file of a stream for reading.

    Raises:
        FileNotFoundError: there is no such file (yet).
        FileRefused: it is not a plain file, or a link that leads out of the stream's directory.
        AccessRefused, OSError: this process may not read it, or the filesystem failed.
    """
    return _copy(path) if isinstance(path, UrlPath) else again_if_stale(lambda: _open(path))


def open_unread(path: Path) -> OpenFile:
    """Opens a file whose size is needed but not its content: an object is not fetched. Raises as `open_file`."""
    if isinstance(path, UrlPath):
        return OpenFile(os.open(os.devnull, _FLAGS), path, path.store.size(path.key))
    return open_file(path)


def read_file(path: Path, most: int | None = None) -> bytes:
    """Reads a whole small file of a stream. Raises as `open_file`, and FileRefused: it is larger than `most`."""
    limit = (MAX_BYTES if path.name.endswith(SEAL_SUFFIX) else MAX_PLAIN_BYTES) if most is None else most
    if isinstance(path, UrlPath):
        data = path.store.get(path.key, limit + 1)
        if len(data) > limit:
            raise refused(path, f"at most {limit} bytes", "more", _TOO_LARGE)
        return data
    return again_if_stale(lambda: _read(_open(path), limit))


def read_seal(directory: Path, chunk: int, name: str = "") -> Seal:
    """Reads the seal of a published chunk, from the file `name` if given. Raises ChunkCorrupt, OSError."""
    path = directory / (name or seal_name(chunk))
    return Seal.decode(read_file(path), chunk, str(path))


def list_names(folder: Path) -> list[str]:
    """Returns the names in a folder of a stream, in any order. Raises OSError: it cannot be listed."""
    if isinstance(folder, UrlPath):
        return list(folder.store.list(folder.key))
    return again_if_stale(lambda: os.listdir(folder))


def is_there(path: Path) -> bool:
    """Returns whether the name exists."""
    return path.store.exists(path.key) if isinstance(path, UrlPath) else os.path.lexists(path)


def size_of(path: Path) -> int:
    """Returns the size of a file of a stream in bytes. Raises OSError: it is missing or cannot be accessed."""
    return path.store.size(path.key) if isinstance(path, UrlPath) else os.stat(path).st_size


def modified_at(path: Path) -> float:
    """Returns the modification time of a file of a stream, in seconds since 1970. Raises as `size_of`."""
    return path.store.modified(path.key) if isinstance(path, UrlPath) else os.stat(path).st_mtime


def read_record(path: Path, decode: Callable[[bytes, str], _T]) -> _T:
    """Reads a small file of a stream and returns `decode` of its bytes and its name for messages.

    If decoding fails, the file is read again: it may be being replaced, and a client that looks up the size by name,
    such as sshfs, may return the old content truncated to the size of the new file.
    """
    for _ in range(2):
        with contextlib.suppress(FormatInvalid):
            return decode(read_file(path), str(path))
    return decode(read_file(path), str(path))


def find_record(path: Path, decode: Callable[[bytes, str], _T]) -> _T | None:
    """As `read_record`; returns None if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return read_record(path, decode)
    return None


def read_given_file(path: Path, most: int = MAX_PLAIN_BYTES) -> bytes:
    """Reads a small file named by the user, following any link; otherwise as `read_file`."""
    return again_if_stale(lambda: _read(_open(path, links=True), most))


def open_given_file(path: Path) -> OpenFile:
    """Opens a plain file, following any link; otherwise as `open_file`."""
    return again_if_stale(lambda: _open(path, links=True))


def check_folder(folder: Path) -> Path:
    """Returns a folder of a stream's directory. Raises FileRefused: it is a link, which may lead to foreign files."""
    if not isinstance(folder, UrlPath) and folder.is_symlink():
        raise refused(folder, "a directory", "a link")
    return folder


def _read(file: OpenFile, most: int) -> bytes:
    parts, offset = [], 0
    # Request little more than the file's size: a buffer of 1 MiB for a seal of some kilobytes is costly each time.
    while part := os.pread(file.fd, min(1 << 20, max(file.size - offset, 0) + 1), offset):
        parts.append(part)
        offset += len(part)
        if max(offset, file.size) > most:
            raise refused(file.path, f"at most {most} bytes", f"a file of {max(offset, file.size)} bytes", _TOO_LARGE)
    return b"".join(parts)


def _copy(path: UrlPath) -> OpenFile:
    """Returns a copy of an object in an unnamed local file."""
    with tempfile.TemporaryFile(dir=cache_folder()) as file:
        size = fetch(path, file.fileno())
        return OpenFile(os.dup(file.fileno()), path, size)


def fetch(path: UrlPath, fd: int, begin: int = 0, most: int = sys.maxsize) -> int:
    """Writes the first `most` bytes of an object to a file, from byte `begin` on; returns how many there are."""
    size = 0
    while size < most:
        wanted = min(PART_BYTES, most - size)
        data = path.store.get_range(path.key, size, size + wanted)
        write_all(fd, data, begin + size)
        size += len(data)
        if len(data) < wanted:
            break
    return size


def again_if_stale(call: Callable[[], _T]) -> _T:
    """Calls a function that opens a file, and again while the file handle is stale."""
    for _ in range(STALE_TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


def _open(path: Path, *, links: bool = False) -> OpenFile:
    try:
        fd = os.open(path, _FLAGS) if links else open_inside(path)
    except PermissionError as cause:
        raise unreadable(path) from cause
    except OSError as cause:
        if cause.errno not in (errno.ENXIO, errno.ELOOP):
            raise
        kind = "a link that leads to itself" if cause.errno == errno.ELOOP else "a named pipe, socket or device"
        raise refused(path, "a plain file", kind) from cause
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise refused(path, "a plain file", KINDS.get(stat.S_IFMT(status.st_mode), "something else"))
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(fd, path, status.st_size)


def open_inside(path: Path) -> int:
    """Opens any kind of file without blocking; follows a link only if its target is inside the link's directory.

    Not guaranteed: protection against a directory on the way to the target that is replaced between check and open.
    """
    try:
        return os.open(path, _FLAGS | os.O_NOFOLLOW)
    except OSError as cause:
        if cause.errno != errno.ELOOP:
            raise
    # Unlike `Path.resolve`, `realpath` never raises RuntimeError for a loop of links in any release of Python.
    target = Path(os.path.realpath(path))
    if Path(os.path.realpath(path.parent)) not in target.parents:
        raise refused(path, "a plain file", f"a link to {printable(str(target))}, out of the stream")
    return os.open(target, _FLAGS | os.O_NOFOLLOW)


def unreadable(path: Path) -> AccessRefused:
    """Returns the error for a file that this process may not read."""
    uid = os.geteuid()
    what = f"{path}: uid {uid} may not read it; check the permissions of the file and of the directories above it"
    return AccessRefused(what, file=str(path), uid=uid)


def cache_folder() -> Path:
    """Returns the folder for copies of objects, created if missing.

    Raises FileRefused: it is not a folder, or others may write to it, who could replace rows.
    """
    # /var/tmp is on disk nearly everywhere, while /tmp is often in memory; fixed, since TMPDIR may differ in a job.
    uid, way = os.geteuid(), f"; set {FOLDER_VARIABLE} to another folder for the copies of chunks"
    folder = Path(os.environ.get(FOLDER_VARIABLE) or f"/var/tmp/lazyshard-objects-{uid}").absolute()  # noqa: S108
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as cause:
        raise refused(folder, "a folder", "a file", way) from cause
    found = folder.stat()
    if found.st_uid != uid or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        kind = f"one of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        raise refused(folder, f"a folder that only uid {uid} may write to", kind, way)
    return folder


def files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the files in a folder; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield path, path.lstat()


def evict(files: Iterable[tuple[Path, os.stat_result]], taken: int, most: int, drop: Callable[[Path], bool]) -> int:
    """Drops files, in order, until at most `most` bytes are used; returns how many bytes are left."""
    for path, found in files:
        if taken <= most:
            break
        taken -= found.st_size * drop(path)
    return taken
