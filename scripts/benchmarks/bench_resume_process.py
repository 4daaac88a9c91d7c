"""One process of `scripts/bench_resume`: how long a loader takes to its first samples, and how much memory.

Imports nothing but the standard library before it is told what to do, since it runs in the environments of other
loaders too. What it found is the last line that it prints: JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def memory_mb() -> dict[str, float]:
    """Returns MB of this process: resident, its proportional share, and the peak of the resident ones."""
    found = {}
    with open("/proc/self/smaps_rollup") as rollup, open("/proc/self/status") as status:
        for line in (*rollup, *status):
            name, *rest = line.split()
            if name in ("Rss:", "Pss:", "VmHWM:"):
                found[name] = int(rest[0]) * 1024 / 1e6
    return {"rss": found["Rss:"], "pss": found["Pss:"], "peak": found["VmHWM:"]}


def forget_peak() -> None:
    """Lets the peak be counted from here on."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measured(work: Callable[[], Any], idle: dict[str, float]) -> dict[str, Any]:
    """Returns the milliseconds that something takes, what it returned, and MB above those of an idle interpreter."""
    forget_peak()
    processor, clock = time.process_time(), time.perf_counter()
    result = work()
    ms, processor_ms = (time.perf_counter() - clock) * 1000, (time.process_time() - processor) * 1000
    after = memory_mb()
    return {
        "ms": ms,
        "processor_ms": processor_ms,
        "result": result,
        "peak_mb": after["peak"] - idle["rss"],
        "rss_mb": after["rss"] - idle["rss"],
        "pss_mb": after["pss"] - idle["pss"],
    }


def first_sample(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures construction and resume to the first sample; memory against the same interpreter before the import."""
    importlib.import_module("numpy")
    importlib.import_module("torch")
    idle = memory_mb()

    def work() -> Any:
        dataset = lazyshard.LazyShardedDataset(settings["directory"], **settings["arguments"])
        dataset.load_state_dict(settings["state"])
        return dataset[dataset.rank_indices[0]]["id"]

    import lazyshard

    # Imported when first asked for.
    _ = lazyshard.LazyShardedDataset
    return measured(work, idle)


def main() -> int:
    """Does what the first argument names with the JSON of the second one."""
    what, settings = sys.argv[1], json.loads(sys.argv[2])
    if what == "first":
        found = first_sample(settings)
    else:
        # Beside this file.
        loaders = importlib.import_module("bench_resume_loaders")
        first = loaders.LOADERS[what](settings)
        # Here memory counts from the end of the imports.
        found = {} if first is None else measured(first, memory_mb())
    print(json.dumps(found), flush=True)
    # Some loaders leave threads and processes behind that take seconds to end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
