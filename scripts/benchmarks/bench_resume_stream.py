"""A stream of very many chunks of which only those are there that will be read.

The facts of the stream, which its reader asks for, name all of them; a chunk that is asked for is made first, as a copy
of one and the same with its own number. So a million chunks of a thousand rows take a few megabytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from lazyshard.format import Manifest
from lazyshard.format.names import END, HEAD, MANIFEST, chunk_name, seal_name
from scripts.benchmarks.bench_read import SAMPLES_PER_CHUNK, make_stream

_PATTERN: Final = "pattern"
"""Beside the stream: the files of the one chunk that is copied."""


class SparseStream:
    """A stream of `chunks` full chunks that has ended, or has so many so far.

    Args:
        directory: where to make it; must not be there yet.
        chunks: how many chunks its facts name.
        ended: whether nothing follows.

    Attributes:
        directory: as given.
        total: samples in it.
        stream_id: its identity.
    """

    def __init__(self, directory: Path, chunks: int, *, ended: bool = True) -> None:
        self.directory = directory
        self.total = chunks * SAMPLES_PER_CHUNK
        make_stream(directory, SAMPLES_PER_CHUNK, "prose")
        self._pattern = directory.with_name(f"{directory.name}.{_PATTERN}")
        self._pattern.mkdir()
        for name in (chunk_name(0), seal_name(0)):
            (directory / name).rename(self._pattern / name)
        self._seal = json.loads((self._pattern / seal_name(0)).read_bytes())
        facts: dict[str, object] = {"chunks": chunks, "samples": self.total}
        head = facts if ended else facts | {"ended": False, "state": "running"}
        self._change(HEAD, head)
        if ended:
            self._change(END, facts)
        else:
            (directory / END).unlink()
        self.stream_id = Manifest.decode((directory / MANIFEST).read_bytes()).stream_id

    def _change(self, name: str, facts: dict[str, object]) -> None:
        path = self.directory / name
        path.write_text(json.dumps(json.loads(path.read_bytes()) | facts))

    def add_names(self) -> None:
        """Makes an empty file for every name, so that the directory is as large as it says."""
        for chunk in range(self.total // SAMPLES_PER_CHUNK):
            for name in (chunk_name(chunk), seal_name(chunk)):
                (self.directory / name).touch()

    def add(self, sample: int) -> None:
        """Makes the chunk of a sample readable. Its rows are those of every other one: row i has the id i."""
        chunk = sample // SAMPLES_PER_CHUNK
        (self.directory / chunk_name(chunk)).write_bytes((self._pattern / chunk_name(0)).read_bytes())
        (self.directory / seal_name(chunk)).write_text(json.dumps(self._seal | {"chunk": chunk}))
