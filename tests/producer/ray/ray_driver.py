"""A driver of Ray, for test_ray.py: `python -m tests.producer.ray.ray_driver DIRECTORY TEMPORARY SCENARIO...`.

Each scenario writes to the stream DIRECTORY/SCENARIO; what it has to say comes as a line of JSON on standard output.
TEMPORARY is where Ray keeps its sockets.
"""

import datetime
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
from ray.data import Dataset

from lazyshard_producer.ray import LazyShardSink

DEADLINE_S: Final = 90.0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)


def ids(rows: int, blocks: int) -> Dataset:
    return ray.data.range(rows, override_num_blocks=blocks)


def ids_of_which_the_last_wait(path: Path) -> Dataset:
    """Four blocks; the last one comes when this path is there."""

    def wait(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"][0] == 30:
            wait_for(path)
        return batch

    return ids(40, 4).map_batches(wait, batch_size=None)


def refusal(dataset: Dataset, sink: LazyShardSink) -> list[str]:
    try:
        dataset.write_datasink(sink)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


class DyingSink(LazyShardSink):
    """Some tasks kill their worker, the first time they run."""

    def __init__(self, directory: Path, samples_per_chunk: int, flags: Path) -> None:
        super().__init__(directory, samples_per_chunk)
        flags.mkdir()
        self._flags = flags

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        flag = self._flags / str(ctx.task_idx)
        if ctx.task_idx not in (1, 2) or flag.exists():
            return super().write(blocks, ctx)
        flag.touch()
        if ctx.task_idx % 2:
            return super().write(self._die_after_the_first(blocks), ctx)
        super().write(blocks, ctx)
        os._exit(1)

    def _die_after_the_first(self, blocks: Iterable[Any]) -> Iterator[Any]:
        for block in blocks:
            yield block
            os._exit(1)


def killed_workers(out: Path) -> None:
    ids(60, 6).write_datasink(DyingSink(out, 7, out.with_suffix(".flags")))


def finished_out_of_order(out: Path, dies: bool = True) -> None:
    done, died = out.with_suffix(".done"), out.with_suffix(".died")

    def second_last(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"][0] == 10 and not died.exists():
            wait_for(done)
            if dies:
                died.touch()
                os._exit(1)
        if batch["id"][0] > 10:
            done.touch()
        return batch

    # Other resources than the write has, so that Ray does not make one task of the two.
    ids(40, 4).map_batches(second_last, batch_size=None, num_cpus=0.5).write_datasink(LazyShardSink(out, 7))


def in_any_order(out: Path) -> None:
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = False
    finished_out_of_order(out, dies=False)
    options.preserve_order = True


def refused_and_mended(out: Path) -> list[str]:
    def spoil(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"x": np.where(batch["id"] == 37, np.nan, 1.0)}

    def mend(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"x": np.where(np.isnan(batch["x"]), 0.0, batch["x"])}

    spoiled = ids_of_which_the_last_wait(out / "chunk_00000.jsonl.completed").map_batches(spoil, batch_size=None)
    refused = refusal(spoiled, LazyShardSink(out, 5))
    state = json.loads((out / "head.json").read_bytes())["state"]
    spoiled.map_batches(mend, batch_size=None).write_datasink(LazyShardSink(out, 5))
    return [*refused, state]


def nothing(out: Path) -> None:
    ray.data.from_items([]).write_datasink(LazyShardSink(out, 5))


def used_twice(out: Path) -> list[str]:
    sink = LazyShardSink(out, 5)
    ids(3, 1).write_datasink(sink)
    sink.close()
    return [refusal(ids(3, 1), again)[0] for again in (sink, LazyShardSink(out, 5))]


def tensors(out: Path) -> None:
    data = np.arange(8).reshape(2, 2, 2)
    items = [{"id": size, "v": np.zeros((size, 2)), "data": data[size - 1]} for size in (1, 2)]
    ray.data.from_items(items).write_datasink(LazyShardSink(out, 5))


def pandas_and_bytes(out: Path) -> None:
    pa = importlib.import_module("pyarrow")
    columns = {"at": [datetime.datetime(2026, 1, 2)], "image": [b"\x89PNG"], "tags": [[1, 2]]}
    ray.data.from_pandas(pa.table(columns).to_pandas()).write_datasink(LazyShardSink(out, 5))


def python_objects(out: Path) -> list[str]:
    return refusal(ray.data.from_items([{"v": Path("a")}]), LazyShardSink(out, 5))


def killed_driver(out: Path) -> None:
    ids_of_which_the_last_wait(out.with_suffix(".go")).write_datasink(LazyShardSink(out, 5))


def killed_driver_with_a_key(out: Path) -> list[int]:
    """What was computed, by the ids in the names of files."""
    computed = out.with_suffix(f".{os.getpid()}")
    computed.mkdir()

    def generate(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"].max(initial=0) >= 30:
            wait_for(out.with_suffix(".go"))
        for number in batch["id"]:
            (computed / str(number)).touch()
        return batch

    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = False
    sink = LazyShardSink(out, 5, key="id")
    # Blocks that are no whole chunks, so that rows wait in pieces when the driver is killed.
    sink.remaining(ids(40, 5)).map_batches(generate, batch_size=None, num_cpus=0.5).write_datasink(sink)
    options.preserve_order = True
    return sorted(int(path.name) for path in computed.iterdir())


def main() -> None:
    directory, temporary, *names = sys.argv[1:]
    ray.init(
        num_cpus=4,  # with fewer Ray runs some tasks after each other that are to run beside each other
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=temporary,
    )
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    for name in names:
        scenario: Callable[[Path], list[str] | None] = globals()[name]
        print(json.dumps({name: scenario(Path(directory, name))}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
