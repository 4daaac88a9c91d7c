"""Streams in a bucket: put there as a producer would, object after object, whole or as pieces of writers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lazyshard import ChunkWriter
from lazyshard.format.records import END, HEAD, MANIFEST, SEAL_SUFFIX, Manifest
from lazyshard.format.writers import WRITERS, piece_stream_id
from lazyshard.store.files import UrlPath
from tests.store.producing import ids, objects
from tests.stream.streams import produce

SIZE = 3
APART = 1000  # ids of the second writer begin here, of the third one at twice that, and so on
STREAM_ID = "7" * 32


def put(url: UrlPath, data: bytes) -> None:
    url.store.put(url.key, data)


def upload(directory: Path, url: UrlPath) -> None:
    """Puts what is in a directory: what a reader looks at first comes last."""

    def place(path: Path) -> tuple[int, str]:
        order = {MANIFEST: 0, END: 3, HEAD: 4}
        return order.get(path.name, 2 if path.name.endswith(SEAL_SUFFIX) else 1), path.name

    for path in sorted((path for path in directory.rglob("*") if path.is_file()), key=place):
        if not path.name.startswith("."):
            put(url / str(path.relative_to(directory)), path.read_bytes())


def publish(folder: Path, url: UrlPath, samples: int, per_chunk: int = 2, *, end: bool = True) -> Path:
    """Produces into a folder, and puts what is in it."""
    produce(folder, samples, per_chunk, end=end)
    upload(folder, url)
    return folder


def copies(cache: Path) -> list[str]:
    """What lies in a cache, locks apart."""
    return sorted(path.name for path in cache.glob("*/*"))


def put_stream(url: UrlPath, writers: int, *, arrays: bool = False) -> None:
    put(url / MANIFEST, Manifest(STREAM_ID, SIZE, 0.0, arrays, None, writers).encode())


def put_pieces(folder: Path, url: UrlPath, name: str, first: int, count: int, **more: Any) -> None:
    """Puts what a writer leaves: the rows from id `first` on in pieces without a number, and its end."""
    own = folder / name
    with ChunkWriter(own, more.pop("size", SIZE), **more) as writer:
        for index in range(first, first + count):
            writer.write({"id": index, **({"array": np.arange(index % APART)} if more else {})})
    made = json.loads((own / MANIFEST).read_bytes())
    (own / MANIFEST).write_text(json.dumps(made | {"stream_id": piece_stream_id(STREAM_ID, name)}))
    upload(own, url / WRITERS / name)


def put_all(folder: Path, url: UrlPath, rows: Mapping[str, int], **more: Any) -> None:
    """Puts a stream, and what so many rows of each writer leave."""
    put_stream(url, len(rows), **more)
    for number, (name, count) in enumerate(rows.items()):
        put_pieces(folder, url, name, number * APART, count, **more)


def shared(url: UrlPath) -> dict[str, bytes]:
    """The objects of the stream itself."""
    return {name: data for name, data in objects(url).items() if "/" not in name}


def check_rows(url: UrlPath, rows: Mapping[str, int]) -> list[int]:
    """Whether the stream holds all rows of each writer once and in order; returns their ids, in the stream's order."""
    found = ids(shared(url))
    for number, count in enumerate(rows.values()):
        first = number * APART
        assert [one for one in found if first <= one < first + APART] == list(range(first, first + count))
    assert len(found) == sum(rows.values())
    return found
