"""Rows and the positions after them, as a run would write them, without a stream."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import fill_row
from lazyshard.format.batch import EncodedRow
from lazyshard.format.row import encode_row
from lazyshard_producer.configuration.settings import Settings, SourceSettings
from lazyshard_producer.rows.pipeline import Pipeline


class Taken(NamedTuple):
    """A row as it would be written, and the position after it."""

    line: bytes
    arrays: bytes
    tokens: int | None
    position: Any

    @property
    def row(self) -> dict[str, Any]:
        """Its values; those that are arrays as lists."""
        row = json.loads(self.line)
        fill_row(row, np.frombuffer(self.arrays, np.uint8))
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


def write(directory: Path, *files: Sequence[int], labels: bool = False, bad: bool = False) -> list[Path]:
    """Files of rows {"id": [file, number], "length": ..., "input_ids": [...]} of these lengths; no token comes twice.

    The second begins with a byte order mark; blank lines are among the rows, and bad ones, if wanted.
    """
    paths, token = [], 10
    for file, lengths in enumerate(files):
        text = b"\xef\xbb\xbf" if file == 1 else b""
        for number, length in enumerate(lengths):
            tokens = list(range(token, token + length))
            token += length
            more = {"labels": [-100, *tokens[1:]]} if labels else {}
            text += b"bad\n" * (bad and number % 3 == 1) + b"\n" * (number % 4 == 2)
            text += encode_row({"id": [file, number], "length": length, "input_ids": tokens, **more})
        path = directory / f"{file}.jsonl"
        path.write_bytes(text)
        paths.append(path)
    return paths


def make(out: Path, paths: Sequence[Path], weights: Sequence[float] | None = None, **more: Any) -> Settings:
    """Settings of a run that reads these files, mixed by weights if there are any."""
    shares = weights if weights is not None else [None] * len(paths)
    sources = tuple(SourceSettings(path=str(path), weight=w) for path, w in zip(paths, shares, strict=True))
    return Settings(sources=sources, out=str(out), **{"samples_per_chunk": 2, **more})


def making(**options: Any) -> Settings:
    """Settings of which only what is made of rows counts."""
    return make(Path("out"), [Path("a.jsonl")], **options)


def take(settings: Settings, start: Any = None, samples: int = 0, warnings: list[str] | None = None) -> Iterator[Taken]:
    """Yields the rows as the loop would, from a stream of so many samples on, refusing what is no row."""
    warn = (lambda text: None) if warnings is None else warnings.append
    with closing(Pipeline(settings, start, samples=samples, warn=warn)) as pipeline:
        while (batch := pipeline.read()) is not None:
            if not batch.lines:
                pipeline.mixer.wait(1.0)
            for index, line in enumerate(batch.lines):
                assert not isinstance(line, RowInvalid)
                made = line if isinstance(line, EncodedRow) else EncodedRow(line, b"")
                try:
                    json.loads(made.line)
                except ValueError as error:
                    batch.refuse(index, RowInvalid("no row", reason=str(error)))
                    continue
                assert isinstance(line, EncodedRow) == (settings.encode is not None)
                position = json.loads(json.dumps(batch.position(index).encode(pipeline.mixer.names)))
                yield Taken(made.line, made.arrays, None if batch.tokens is None else batch.tokens[index], position)


def samples(taken: Sequence[Taken]) -> list[dict[str, Any]]:
    return [sample for one in taken for sample in one.row.get("pack", [one.row])]


def numbers(taken: Sequence[Taken]) -> list[int]:
    return [sample["id"][1] for sample in samples(taken)]
