"""What the processes of a training consumed: checks that hold for every run over a stream."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.stream import read_cursor
from tests.swift.commands import Batch, Run, Training, ids_by_dp, start_megatron_sft
from tests.swift.streams import producing, write_jsonl

SIZE: Final = 4
"""Samples per chunk."""

MICRO: Final = 2
"""Samples of a rank in a micro batch: the harness's default for both commands."""

TP2_DP2: Final = {"tensor_model_parallel_size": 2}
PP2_DP2: Final = {"pipeline_model_parallel_size": 2}

STOPPED: Final = re.compile(
    r"lazyshard: the stream has ended with (\d+) samples: training stops after step (\d+) of (\d+), "
    r"on all ranks alike, with (\d+) samples trained and (\d+) left over, fewer than the (\d+) of a step"
    r"(?:\. Checkpoint: (\S+))?$",
    re.MULTILINE,
)


def assert_dealt(by_dp: Mapping[int, Sequence[int]], samples: int) -> set[int]:
    """Checks one epoch: no sample twice, each rank as many, its own ones alone. Returns the samples that are left over.

    Own are the chunks k with k % ranks == rank; of the end, what fills no whole stripe of ranks chunks, every ranks-th
    row.
    """
    ranks = len(by_dp)
    assert sorted(by_dp) == list(range(ranks))
    assert len({len(ids) for ids in by_dp.values()}) == 1, "ranks that trained more than others"
    times = Counter(chain.from_iterable(by_dp.values()))
    assert not {number: n for number, n in times.items() if n > 1}, "samples that were trained more than once"
    assert not set(times) - set(range(samples)), "samples that the stream does not have"
    tail = samples // (ranks * SIZE) * ranks * SIZE
    for rank, ids in by_dp.items():
        foreign = [number for number in ids if (number // SIZE if number < tail else number) % ranks != rank]
        assert not foreign, f"rank {rank} of {ranks} trained samples of others"
    return set(range(samples)) - set(times)


def by_epoch(by_dp: Mapping[int, Sequence[int]], samples: int) -> list[dict[int, list[int]]]:
    """Cuts what the ranks trained into epochs, of which each rank has as many whole micro batches as fit."""
    length = samples // (len(by_dp) * MICRO) * MICRO
    longest = max(map(len, by_dp.values()))
    return [{dp: list(ids[first : first + length]) for dp, ids in by_dp.items()} for first in range(0, longest, length)]


def assert_places(batches: Iterable[Batch], **sizes: int) -> None:
    """Checks that 4 processes were fed, and what their ranks are in groups of these sizes."""
    places = {batch.rank: {name: getattr(batch, name) for name in ("dp", "tp", "pp", "cp")} for batch in batches}
    assert sorted(places) == [0, 1, 2, 3]
    found = {name: 1 + max(place[name] for place in places.values()) for name in places[0]}
    assert found == {"dp": 1, "tp": 1, "pp": 1, "cp": 1} | sizes
    assert len({tuple(place.values()) for place in places.values()}) == 4, "two processes in one place"


def position_of(checkpoint: Path) -> dict[str, Any]:
    position: dict[str, Any] = json.loads((checkpoint / "lazyshard.json").read_bytes())
    return position


class Sealed(NamedTuple):
    """When a chunk was published, in seconds since 1970."""

    first: int
    stop: int
    time: float


def sealed_in(directory: Path) -> list[Sealed]:
    """The chunks of a stream, in order."""
    found = []
    for path in sorted(directory.glob("*.completed")):
        seal = json.loads(path.read_bytes())
        first = seal["chunk"] * SIZE
        found.append(Sealed(first, first + seal["samples"], seal["sealed_at"]))
    return found


def assert_read_while_written(run: Run, directory: Path, samples: int) -> None:
    """Checks that training began before half of a stream was there, and that no sample was trained too early."""
    chunks = sealed_in(directory)
    assert chunks[-1].stop == samples
    begun = sum(chunk.stop - chunk.first for chunk in chunks if chunk.time <= run.batches[0].time)
    assert begun < samples / 2, f"{begun} of {samples} samples were published when training began"
    since = {number: chunk.time for chunk in chunks for number in range(chunk.first, chunk.stop)}
    early = [batch for batch in run.batches if batch.train and batch.time < max(since[number] for number in batch.ids)]
    assert not early, "batches with samples that were not published yet"


def assert_stopped_at_end(run: Run, directory: Path, samples: int, ranks: int, step_samples: int, planned: int) -> None:
    """Checks that all ranks stopped after the last whole step, said so once, and saved a checkpoint and the cursor."""
    steps = samples // (ranks * MICRO) * MICRO // (step_samples // ranks)
    trained = steps * step_samples
    last = {batch.rank: batch.step for batch in run.batches}
    assert set(last.values()) == {steps}, "steps that the ranks have trained"
    assert list(run.losses) == list(range(1, steps + 1))
    left_over = assert_dealt(ids_by_dp(run.batches), samples)
    assert len(left_over) == samples - trained < step_samples
    checkpoint = run.output_dir / f"checkpoint-{steps}"
    said = [(*map(int, numbers), Path(path)) for *numbers, path in STOPPED.findall(run.output)]
    assert said == [(samples, steps, planned, trained, len(left_over), step_samples, checkpoint)], run.tail()
    assert_cursor(checkpoint, directory, trained, set(range(samples)) - left_over)


def assert_cursor(checkpoint: Path, directory: Path, consumed: int, trained: set[int]) -> None:
    """Checks a checkpoint's position, and that the stream's cursor tells it and gives up no chunk that is needed."""
    position = position_of(checkpoint)
    assert (position["consumed"], f"checkpoint-{position['step']}") == (consumed, checkpoint.name)
    cursor = read_cursor(directory, position["consumer"])
    assert cursor is not None and cursor.consumed == consumed
    assert set(range(cursor.chunks_before * SIZE)) <= trained, "chunks given up before they were trained"


@contextmanager
def fed_live(
    training: Training, directory: Path, samples: int, rate: float, processes: int, *arguments: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A producer that starts once all training processes have begun, seconds before they ask for the stream."""
    training.wait_for(lambda: len(list(training.trace.glob("rank_*.jsonl"))) == processes, "all processes")
    source = directory.with_suffix(".source.jsonl")
    source = source if source.exists() else write_jsonl(source, 0, samples)
    with producing(directory, source, SIZE, rate, *arguments) as producer:
        yield producer


def train_live(work: Path, model: Path, samples: int, **options: Any) -> Run:
    """Runs `megatron sft` on `work / "stream"` from before it is there until it has ended."""
    directory = work / "stream"
    with (
        start_megatron_sft(work / "run", model, dataset=directory, sharded_lazy=True, **options) as training,
        fed_live(training, directory, samples, 12, processes=4),
    ):
        run = training.wait()
    assert run.returncode == 0, run.tail()
    assert_read_while_written(run, directory, samples)
    return run
