"""What the files of a stream say in the model: their names, and what a reader makes of them at one instant. Contents:
("manifest",), ("owner",), ("rows", n) for the n-th piece of the source, ("seal", chunk, position after it, whether it
is full), ("head", chunks, ended), ("end", chunks), ("retired", chunks before), ("cursor", chunks before)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lazyshard.format.names import END, HEAD, MANIFEST, RETIRED, TEMPORARY, chunk_name, parse_chunk_name, seal_name
from tests.harness.model.disk import FOLDER, Content

STREAM: Final = "stream"
TMP: Final = f"{STREAM}/{TEMPORARY}"
CURSORS: Final = f"{STREAM}/cursors"
CURSOR: Final = f"{CURSORS}/run.json"
Seen = Mapping[str, Content]


def at(name: str) -> str:
    return f"{STREAM}/{name}"


MANIFEST_PATH: Final = at(MANIFEST)
HEAD_PATH: Final = at(HEAD)
END_PATH: Final = at(END)
RETIRED_PATH: Final = at(RETIRED)


def data_path(chunk: int) -> str:
    return at(chunk_name(chunk))


def seal_path(chunk: int) -> str:
    return at(seal_name(chunk))


@dataclass(frozen=True)
class Plan:
    chunks: int = 2  # of the stream
    partial: bool = False  # whether the last one holds fewer rows than the others
    keeps: int = 1  # how many checkpoints the consumer keeps; the cursor stands at the oldest

    def seal(self, chunk: int, position: int) -> Content:
        """Returns the seal of a chunk that holds the piece of the source before a position."""
        return ("seal", chunk, position, not (self.partial and position == self.chunks))


@dataclass(frozen=True)
class Listed:
    mark: int  # those below it are retired
    seals: frozenset[int]  # chunks at or above it with a seal
    data: frozenset[int]  # chunks at or above it with rows
    below: tuple[str, ...]  # paths of what is there of retired chunks, seals first
    sealed: int  # chunks [mark, sealed) have a seal


class Broken(Exception):
    """Files that no reader, or no producer, can do anything with."""


def value_of(seen: Seen, path: str, kind: str) -> Content | None:
    value = seen.get(path)
    if value is not None and value[0] != kind:
        raise Broken(f"{path} is torn")
    return value


def list_stream(seen: Seen) -> Listed:
    retired = value_of(seen, RETIRED_PATH, "retired")
    mark = 0 if retired is None else retired[1]
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in seen:
        parsed = parse_chunk_name(path.removeprefix(f"{STREAM}/"))
        if parsed is not None:
            found[parsed[1]].add(parsed[0])
    seals, data = found[True], found[False]
    below = [seal_path(chunk) for chunk in sorted(seals) if chunk < mark]
    below += [data_path(chunk) for chunk in sorted(data) if chunk < mark]
    sealed = mark
    while sealed in seals:
        sealed += 1
    kept = [frozenset(chunk for chunk in chunks if chunk >= mark) for chunks in (seals, data)]
    return Listed(mark, kept[0], kept[1], tuple(below), sealed)


def told(seen: Seen) -> tuple[int, bool] | None:
    """Returns what a reader is told now: how many chunks, and whether that is all. None where there is no stream."""
    if value_of(seen, MANIFEST_PATH, "manifest") is None:
        return None
    head = seen.get(HEAD_PATH)
    if head is not None and head[0] == "head":
        return head[1], head[2]
    listed = list_stream(seen)
    end = value_of(seen, END_PATH, "end")
    if end is not None:
        return end[1], True
    chunks = listed.mark
    while chunks in listed.seals and chunks in listed.data:
        chunks += 1
    if chunks > listed.mark:
        seal = value_of(seen, seal_path(chunks - 1), "seal")
        assert seal is not None
        chunks -= not seal[3]
    return chunks, False


def is_folder(seen: Seen, path: str) -> bool:
    return seen.get(path) == FOLDER
