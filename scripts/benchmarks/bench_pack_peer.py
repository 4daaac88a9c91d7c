"""Packs samples with the package binpacking, as ms-swift does. Needs nothing else; run by `bench_pack.py`.

Reads JSON lines {"lengths": [...], "capacity": N} from standard input, and answers each with {"seconds", "packs",
"version"}: processor time, and how many packs there are. Checks that every sample is in one of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from importlib import metadata


def main() -> int:
    """Answers until the input ends; returns the exit code."""
    pack = importlib.import_module("binpacking").to_constant_volume
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.process_time()
        # ms-swift 4.6, `calculate_matched_group` in swift/dataset/packing.py.
        packs = pack(list(enumerate(asked["lengths"])), asked["capacity"], weight_pos=1)
        seconds = time.process_time() - start
        if sorted(index for one in packs for index, _ in one) != list(range(len(asked["lengths"]))):
            print("binpacking lost samples", file=sys.stderr)
            return 1
        answer = {"seconds": seconds, "packs": len(packs), "version": metadata.version("binpacking")}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
