"""One process of `scripts/bench_loaders`: reads all rows once, or converts them, in the environment of that loader.

`python -m scripts.benchmarks.bench_loaders_process WHAT NAME SETTINGS`, where WHAT is `read` or `convert`, NAME the
loader and SETTINGS the JSON of `bench_loaders_cases.Settings`. What it found is the last line that it prints: JSON. The
start of the interpreter and the imports are not counted; the construction of the loader and the start of its workers
are.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from scripts.benchmarks.bench_loaders_cases import Row, Settings
from scripts.benchmarks.bench_loaders_tree import memory, processor_s

MODULES = {
    "lazyshard": "ours",
    "lazyshard-dicts": "ours",
    "bytes": "floors",
    "orjson": "floors",
    "minimal": "floors",
    "torchdata": "floors",
    "datasets": "arrow",
    "datasets-streaming": "arrow",
    "mosaicml-streaming": "shards",
    "litdata": "shards",
    "grain": "records",
    "webdataset": "tars",
    "megatron-energon": "tars",
}
"""Where each loader is: `bench_loaders_` and this."""


def count(rows: Iterable[Row], probe: int) -> tuple[int, int, Row | None]:
    """Takes rows one by one; returns their number, the sum of their ids, and the one with the id `probe`."""
    number = ids = 0
    kept = None
    for row in rows:
        found = row["id"]
        number += 1
        ids += found
        if found == probe:
            kept = row
    return number, ids, kept


def count_batches(batches: Iterable[list[Row]], probe: int) -> tuple[int, int, Row | None]:
    """The same for batches."""
    return count(itertools.chain.from_iterable(batches), probe)


def read(module: Any, name: str, settings: Settings) -> dict[str, Any]:
    """Reads everything once and returns what came and what it took."""
    opened, batched = module.READERS[name](settings)
    probe = settings.probe
    processor, clock = processor_s(), time.perf_counter()
    if batched is None:
        # A floor that makes no rows.
        number, ids, kept, first_s = opened(), 0, None, 0.0
    else:
        # Asked for its iterator once: some begin anew each time.
        rows = itertools.islice(opened(), None)
        first = list(itertools.islice(rows, 1))
        first_s = time.perf_counter() - clock
        number, ids, kept = (count_batches if batched else count)(itertools.chain(first, rows), probe)
    seconds = time.perf_counter() - clock
    used = processor_s() - processor
    # Workers that wait for the next epoch are still there.
    held = memory(os.getsid(0))
    getattr(module, "CLEANERS", {}).get(name, lambda: None)()
    import orjson

    if kept is not None:
        # webdataset adds fields of its own.
        kept = {name: value for name, value in kept.items() if not name.startswith("__")}
    # NumPy's integers are integers too.
    text = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()
    found = {"rows": int(number), "ids": int(ids), "probe": text}
    return found | {"seconds": seconds, "first_s": first_s, "processor_s": used, "memory": held}


def convert(module: Any, name: str, settings: Settings) -> dict[str, Any]:
    """Makes the format of this loader and returns what it took."""
    processor, clock = processor_s(), time.perf_counter()
    module.CONVERTERS[name](settings)
    return {"seconds": time.perf_counter() - clock, "processor_s": processor_s() - processor}


def main() -> int:
    """Does what the arguments say."""
    what, name, text = sys.argv[1:]
    module = importlib.import_module(f"scripts.benchmarks.bench_loaders_{MODULES[name]}")
    found = {"read": read, "convert": convert}[what](module, name, Settings(**json.loads(text)))
    if MODULES[name] != "ours" and "lazyshard" in sys.modules:
        raise AssertionError(f"{name} has imported lazyshard")
    print("\n" + json.dumps(found), flush=True)
    # Some loaders leave threads and processes behind that take seconds to end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
