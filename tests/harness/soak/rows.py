"""The rows of a soak, as a source: row n is the same in every run. It ends with the row that a file says, its own."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

SOURCE: Final = "python:tests.harness.soak.rows:rows"
STOP: Final = "LAZYSHARD_SOAK_STOP"  # Environment variable: a file that asks the source to end by being there
TOTAL: Final = "LAZYSHARD_SOAK_ROWS"  # Environment variable: the rows, where that is known from the start
# Texts of different lengths, so that no two neighbours are of the same size
_WORDS: Final = tuple(f"{'lorem ipsum dolor sit amet '[: 3 + n % 24]}" * (n % 7) for n in range(97))


def line(sample: int) -> bytes:
    return b'{"id":%d,"text":"%s"}\n' % (sample, _WORDS[sample % 97].encode())


def row(sample: int) -> dict[str, Any]:
    return {"id": sample, "text": _WORDS[sample % 97]}


def longest(stop: int) -> int:
    return max(len(line(sample)) for sample in range(97)) + len(str(stop))


def rows(position: int | None) -> Iterator[tuple[bytes, int]]:
    sample = position or 0
    total = int(os.environ[TOTAL]) if TOTAL in os.environ else None
    stop = Path(os.environ[STOP]) if STOP in os.environ else None
    while total is None or sample < total:
        if stop is not None and total is None:
            total = _asked_to_end(stop, sample)
        for _ in range(256):  # So many rows are given between two looks for the file
            if total is not None and sample >= total:
                return
            sample += 1
            yield line(sample - 1), sample


def _asked_to_end(stop: Path, sample: int) -> int | None:
    if not stop.exists():
        return None
    decided = stop.with_name(stop.name + ".at")
    if not decided.exists():
        part = stop.with_name(f"{stop.name}.{os.getpid()}")
        part.write_text(str(sample))
        os.replace(part, decided)
    return int(decided.read_text())
