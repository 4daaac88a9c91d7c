"""One process of `scripts/bench_encode`'s features: writes the arrays in one form, or reads them all.

`python -m scripts.benchmarks.bench_encode_reading WHAT NAME PLACE`, where WHAT is `write` or `read`, NAME one of those
of `bench_encode_readers`, and PLACE where its files are. When it reads, the last line that it prints is JSON: seconds
of processor of this process, threads included, for all rows but for a first pass that is not counted; and a digest of
what it has read, taken in a pass of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def look(batches: Any) -> tuple[int, int]:
    """Looks at one byte of each page, as the arrays come; returns the rows and the sum of those bytes.

    So that what is read lazily, as a mapped file is, is read here too.
    """
    count = total = 0
    for batch in batches:
        for array in batch:
            count += 1
            total += int(array.reshape(-1).view(np.uint8)[::4096].sum())
    return count, total


def digest(batches: Any) -> str:
    """Returns a digest of all that is read."""
    found = hashlib.blake2b()
    for batch in batches:
        for array in batch:
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def main() -> int:
    """Does what the arguments say."""
    what, name, place = sys.argv[1:]
    readers: Any = importlib.import_module("scripts.benchmarks.bench_encode_readers")
    if what == "write":
        Path(place).mkdir()
        readers.WRITERS[name](Path(place))
        return 0
    opened = readers.READERS[name](Path(place))
    first = look(opened())
    start = time.process_time()
    counted = look(opened())
    seconds = time.process_time() - start
    if counted != first or counted[0] != readers.ROWS:
        raise RuntimeError(f"{name}: read {counted[0]} rows, and other bytes than before")
    print("\n" + json.dumps({"seconds": seconds, "digest": digest(opened())}), flush=True)
    # Some of them leave threads and processes behind that take seconds to end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
