"""Names of the files of a stream directory; docs/format.md tells what each is.

A chunk's number has at least five digits and grows past 99999. Only the canonical name is ever written; directories
that other programs fill may pad otherwise, so parsing takes any number of digits.
"""

from __future__ import annotations

import re
from typing import Final

MANIFEST: Final = "stream.json"
HEAD: Final = "head.json"
HEAD_RESERVE: Final = "head.json.reserve"  # Under `.tmp/` only: what keeps room for one head
END: Final = "stream.end"
OWNER: Final = "stream.owner"
RETIRED: Final = "retired.json"
QUARANTINE: Final = "quarantine.jsonl"
CURSORS: Final = "cursors"  # Folder of the cursors in a stream's directory
LOCK: Final = ".producer.lock"
TEMPORARY: Final = ".tmp"
DATA_SUFFIX: Final = ".jsonl"
SEAL_SUFFIX: Final = ".completed"
ARRAYS_SUFFIX: Final = ".arrays"
_CHUNK: Final = re.compile(r"chunk_([0-9]{1,255})\.jsonl(\.completed)?")  # 255: no file name is longer
_ARRAYS: Final = re.compile(r"chunk_([0-9]{5,255})\.arrays")
_TOKENS: Final = re.compile(r"chunk_([0-9]{1,255})\.jsonl\.tokens")


def chunk_name(chunk: int) -> str:
    """Returns the canonical name of a chunk's data file. Raises ValueError for a negative number."""
    if chunk < 0:
        raise ValueError(f"a chunk number is 0 or more, got {chunk}")
    return f"chunk_{chunk:05d}.jsonl"


def seal_name(chunk: int) -> str:
    """Returns the canonical name of a chunk's seal."""
    return chunk_name(chunk) + SEAL_SUFFIX


def tokens_name(chunk: int) -> str:
    """Returns the name of a file of lengths that an earlier release has left beside a chunk: it goes with its chunk."""
    return f"{chunk_name(chunk)}.tokens"


def parse_tokens_name(name: str) -> int | None:
    """Returns the chunk's number, or None where the name is not that of a file of lengths."""
    found = _TOKENS.fullmatch(name)
    return int(found[1]) if found else None


def parse_chunk_name(name: str) -> tuple[int, bool] | None:
    """Returns (chunk number, whether it is the seal), or None where the name is not that of a chunk or seal.

    >>> parse_chunk_name("chunk_00012.jsonl"), parse_chunk_name("chunk_7.jsonl.completed"), parse_chunk_name("x.jsonl")
    ((12, False), (7, True), None)
    """
    found = _CHUNK.fullmatch(name)
    return (int(found[1]), found[2] is not None) if found else None


def arrays_name(chunk: int) -> str:
    """Returns the name of a chunk's side file, which holds the arrays of its rows."""
    return chunk_name(chunk).removesuffix(DATA_SUFFIX) + ARRAYS_SUFFIX


def parse_arrays_name(name: str) -> int | None:
    """Returns the number of the chunk whose side file has this name, None where it is the name of none."""
    found = _ARRAYS.fullmatch(name)
    chunk = int(found[1]) if found else None
    return chunk if chunk is not None and name == arrays_name(chunk) else None
