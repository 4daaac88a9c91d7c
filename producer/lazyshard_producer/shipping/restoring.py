"""Makes a spool of what is in the store, for a machine that has none, or one that others have published past.

What is made is the directory as it would be had a producer here published everything and deleted all chunks but the
newest: the manifest, the newest chunk with its seal (whose `source` says where to go on), `retired.json` for those
before it, `stream.end`, and what belongs to the sources. From there on it is a start like any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lazyshard.errors import ChunkMissing
from lazyshard.format.names import END, HEAD, MANIFEST, QUARANTINE, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.format.retired import Retired
from lazyshard.store.objects import ObjectStore
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import is_journal_name
from lazyshard_producer.shipping.found import Found, get, names_in
from lazyshard_producer.shipping.spool import write_durably
from lazyshard_producer.shipping.tries import Tries

_OF_THE_STREAM: Final = (MANIFEST, END, QUARANTINE)


def restore(store: ObjectStore, tries: Tries, found: Found, folder: Path, now: float, *, ended: bool = False) -> None:
    """Fills a new folder from what is in the store.

    Args:
        store: of the stream, which is there.
        tries: calls it.
        found: what is in it.
        folder: which does not exist yet.
        now: seconds since 1970.
        ended: the stream has ended, and the folder is to show that only: with the head, without rows.

    Raises:
        ChunkMissing: the newest chunk has been deleted since.
        StoreRefused, StoreUnavailable, OSError: see `Tries`; the folder may be left in part.
    """
    assert found.manifest is not None
    folder.mkdir()
    last = found.chunks - 1
    if last >= 0:
        rows = (chunk_name(last), *((arrays_name(last),) if found.manifest.arrays else ()))
        for name in (*(() if ended else rows), seal_name(last)):
            data = get(store, tries, name)
            if data is None:
                url = store.name_of(name)
                raise ChunkMissing(f"{url}: was deleted a moment ago; restore it from a copy", file=url, chunk=last)
            write_durably(folder / name, data)
    if last > 0:
        write_durably(folder / RETIRED, Retired(found.manifest.stream_id, last, now).encode())
    journals = names_in(store, tries, JOURNALS)
    if journals:
        (folder / JOURNALS).mkdir()
    names = [f"{JOURNALS}/{name}" for name in journals if is_journal_name(name)]
    for name in (*_OF_THE_STREAM, *((HEAD,) if ended else ()), *names):
        data = get(store, tries, name)
        if data is not None:
            write_durably(folder / name, data)
