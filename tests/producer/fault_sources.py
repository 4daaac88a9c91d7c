"""One text as a source of each kind, for the command in this process, and what its rows are called in messages."""

import gzip
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

KINDS: Final = ("plain", "gzip", "zstd", "standard input", "followed")


class TextSource:
    """A source whose text can be written anew."""

    def __init__(self, kind: str, folder: Path) -> None:
        names = {"gzip": "a.jsonl.gz", "zstd": "a.jsonl.zst", "followed": "incoming/a.jsonl"}
        self._kind: Final = kind
        self._path: Final = folder / names.get(kind, "a.jsonl")
        self._path.parent.mkdir(exist_ok=True)
        self.arguments = ["--source", str(self._path)]  # what the command line says of it
        # Its name in quarantine and in warnings, the same before the number of a line, and that of the whole source.
        self.name = self.shown = self.whole = str(self._path)
        self.unit = "file"  # what bytes are counted in, in messages
        if kind == "followed":
            self.whole = str(self._path.parent)
            self.arguments = ["--follow", self.whole]
            (self._path.parent / "_END").touch()
        elif kind == "standard input":
            self.arguments = ["--source", "-"]
            self.name = self.whole = "-"
            self.shown, self.unit = "standard input", "input"

    def write(self, text: bytes) -> None:
        """Makes this its text."""
        if self._kind == "gzip":
            text = gzip.compress(text, 1)
        elif self._kind == "zstd":
            text = importlib.import_module("zstandard").compress(text)
        self._path.write_bytes(text)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Makes it the standard input of this process, where it is that."""
        if self._kind != "standard input":
            yield
            return
        before = os.dup(0)
        fd = os.open(self._path, os.O_RDONLY)
        try:
            os.dup2(fd, 0)
            yield
        finally:
            os.dup2(before, 0)
            os.close(before)
            os.close(fd)
