"""Reads a very long stream in some places, each in a process of its own, and says what that took: a JSON line each.

    python -m tests.harness.soak.million_reading STREAM first last state 0 1 ...

`state` writes the state of a run of 8 ranks that stands in the middle; a number goes on there as that one of 6 ranks.
The processes are forks of one that has loaded torch: neither time nor files of that are counted.
"""

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

import orjson
from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset
from tests.data.options import grouped
from tests.harness.soak.million import AFTER, BATCH, BEFORE, SEED, STEPS, WINDOW, count_touched
from tests.harness.soak.rows import row

ORDER: Final[dict[str, Any]] = {"batch_size": BATCH, "shuffle_window": WINDOW, "seed": SEED}


def half(samples: int) -> int:
    """Returns the samples that are trained before the resume: whole steps, but no whole stripes."""
    step = BEFORE * BATCH * 2
    return samples // 2 // step * step + step // 2


def read(stream: Path, task: str) -> dict[str, Any]:
    touched = count_touched(stream)
    started = time.perf_counter()
    resumes = task.isdecimal()
    if resumes:
        dataset = LazyShardedDataset(stream, dp_rank=int(task), dp_size=AFTER, **grouped(ORDER))
        dataset.load_state_dict(orjson.loads(state_of(stream).read_bytes()))
        indices = dataset.rank_indices[: STEPS * BATCH]
    else:
        dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=1)
        indices = dataset.rank_indices[:1] if task == "first" else dataset.rank_indices[-1:]
    found = [dataset[indices[0]]]
    first = time.perf_counter()
    before_first = dict(touched)
    if resumes:
        loader = DataLoader(dataset, sampler=indices[1:], batch_size=BATCH, num_workers=1, collate_fn=list)
        found += [one for batch in loader for one in batch]
    for one in found:
        assert one == row(one["id"]), one
    return {
        "samples": [one["id"] for one in found],
        "first_ms": (first - started) * 1000,
        "touched": before_first,
        "mb": peak_bytes() / 1e6,
    }


def write_state(stream: Path) -> dict[str, Any]:
    """Writes the state of a run of 8 ranks that stands in the middle, beside the stream; returns its samples."""
    dataset = LazyShardedDataset(stream, dp_rank=0, dp_size=BEFORE, **grouped(ORDER))
    consumed = half(dataset.published().samples)
    state_of(stream).write_bytes(orjson.dumps(dataset.state_dict(consumed)))
    return {"consumed": consumed}


def state_of(stream: Path) -> Path:
    return stream.with_name("state.json")


def peak_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def main() -> int:
    stream, *tasks = sys.argv[1:]
    for task in tasks:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                found = write_state(Path(stream)) if task == "state" else read(Path(stream), task)
                print(orjson.dumps(found).decode(), flush=True)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            print(f"task {task} ended with {status}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
