"""The spool: a folder of this machine in which a run publishes what is then put to an object store.

Files, in a folder of its own for each URL:

```
lock          held while a producer of this machine runs on the URL; stays
owners.json   under which tokens this spool has owned the stream in the store
stream/       the newest chunks of the stream, a directory like any other; those put to the store are deleted from it
journals/     hard links to journals of followed directories that a chunk still to be put may name
restoring/    a `stream/` that is being made from what is in the store: as if all chunks but the newest were retired
```

The spool counts only as long as the owner in the store is one of `owners.json`: then nobody else has published since.
Otherwise it is thrown away, for what is in the store is newer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import filelock
import orjson
import xxhash

from lazyshard.errors import ChunkMissing, ProducerFenced
from lazyshard.format.names import END, HEAD, MANIFEST, QUARANTINE, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.format.records import Retired
from lazyshard.store.durable import publish_bytes, remove, rename, sync_directory
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import is_journal_name
from lazyshard_producer.shipping.store import Found, StreamStore

_OWNERS: Final = "owners.json"
_NAME_BYTES: Final = 60


def default_root() -> Path:
    """Returns the folder for the spools of this user: it outlives processes and reboots."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state, "lazyshard", "spool")


def folder_name(url: str) -> str:
    """Returns the folder for a URL, to be recognised by and unlike all others.

    >>> folder_name("s3://bucket/run 1")
    'bucket-run-1-3ed38f673c3ab8a0'
    """
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url.partition("://")[2]).strip("-")[:_NAME_BYTES]
    return f"{readable}-{xxhash.xxh3_64_hexdigest(url.rstrip('/').encode())}"


class Spool:
    """A spool, locked. `folder` is its own, `stream` the directory in which the run publishes."""

    def __init__(self, root: Path, url: str) -> None:
        self.folder: Final = root.absolute() / folder_name(url)
        self.stream: Final = self.folder / "stream"
        self._journals = self.folder / "journals"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self.folder / "lock", timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except filelock.Timeout as cause:
            raise ProducerFenced(
                f"{url}: a process of this machine is already producing into this stream (it holds "
                f"{self.folder / 'lock'}); stop it first, or choose another place",
                directory=url,
                holder="a process of this machine",
            ) from cause

    def release(self) -> None:
        """Lets the next producer in. May be called twice."""
        self._lock.release()

    def tokens(self) -> tuple[str, ...]:
        """Returns the tokens under which this spool may own the stream in the store; none where that is not known."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            tokens = orjson.loads((self.folder / _OWNERS).read_bytes())["tokens"]
            if all(isinstance(token, str) for token in tokens):
                return tuple(tokens)
        return ()

    def note_tokens(self, tokens: Iterable[str]) -> None:
        """Replaces these tokens durably."""
        data = orjson.dumps({"tokens": list(tokens)}, option=orjson.OPT_APPEND_NEWLINE)
        _write(self.folder / _OWNERS, data)

    def clear(self) -> None:
        """Throws away all of the stream that is here. What is left by an interrupted call is nobody's: see `tokens`."""
        remove(self.folder / _OWNERS)
        sync_directory(self.folder)
        for name in ("stream", "journals", "restoring"):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder / name)
        sync_directory(self.folder)

    def restore(self, store: StreamStore, found: Found) -> None:
        """Makes the stream's directory of what is in the store; raises as the function `restore`."""
        made = self.folder / "restoring"
        restore(store, found, made)
        sync_directory(made)
        rename(made, self.stream)
        sync_directory(self.folder)

    def keep_journals(self) -> None:
        """Keeps the journals that the stream has now until `drop_journals`: the run itself deletes them as it likes."""
        for path in _files(self.stream / JOURNALS):
            self._journals.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(path, self._journals / path.name)

    def journals(self) -> list[Path]:
        """Returns the journals that are kept, by name."""
        return _files(self._journals)

    def drop_journals(self) -> list[str]:
        """Lets go of the kept journals that the stream does not have any more, and returns their names."""
        there = {path.name for path in _files(self.stream / JOURNALS)}
        gone = [path for path in self.journals() if path.name not in there]
        for path in gone:
            remove(path)
        return [path.name for path in gone]

    @property
    def ended(self) -> bool:
        """Whether the stream has ended here."""
        return os.path.lexists(self.stream / END)


def restore(store: StreamStore, found: Found, folder: Path, *, ended: bool = False) -> None:
    """Fills a new folder from what is in the store, where a stream is. On an error it may be left in part.

    `ended` is for a folder that is to show only that the stream has ended: with the head, without rows.
    """
    assert found.manifest is not None
    folder.mkdir()
    last = found.chunks - 1
    if last >= 0:
        rows = (chunk_name(last), *((arrays_name(last),) if found.manifest.arrays else ()))
        for name in (*(() if ended else rows), seal_name(last)):
            if (data := store.get(name)) is None:
                url = store.objects.name_of(name)
                raise ChunkMissing(f"{url}: was deleted a moment ago; restore it from a copy", file=url, chunk=last)
            _write(folder / name, data)
    if last > 0:
        _write(folder / RETIRED, Retired(found.manifest.stream_id, last, time.time()).encode())
    journals = store.names(JOURNALS)
    if journals:
        (folder / JOURNALS).mkdir()
    names = [f"{JOURNALS}/{name}" for name in journals if is_journal_name(name)]
    for name in (MANIFEST, END, QUARANTINE, *((HEAD,) if ended else ()), *names):
        if (data := store.get(name)) is not None:
            _write(folder / name, data)


def _write(path: Path, data: bytes) -> None:
    publish_bytes(data, path, path.with_name(f".{path.name}.new"))


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except FileNotFoundError:
        return []
