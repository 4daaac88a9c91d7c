"""What the processes of a training consumed, killed and resumed or not: checks for every run over a stream."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

from lazyshard.format.state import BlendState
from lazyshard.stream import read_cursor
from lazyshard.stream.run_parts import course_of
from lazyshard_swift.checkpoints import Position, load_position
from tests.swift.commands import Batch, Run, Training, ids_by_dp
from tests.swift.streams import producing, write_jsonl

SIZE: Final = 4  # samples per chunk
MICRO: Final = 2  # samples of a rank in a micro batch: the harness's default for both commands
TP2_DP2: Final[dict[str, Any]] = {"tensor_model_parallel_size": 2}


def assert_dealt(by_dp: Mapping[int, Sequence[int]], samples: int, unit: int = SIZE) -> set[int]:
    """Checks one epoch: no sample twice, each rank as many, its own ones alone. Returns the samples that are left over.

    Own are the units k with k % ranks == rank; of what fills no whole stripe of ranks units, every ranks-th row.
    """
    ranks = len(by_dp)
    assert sorted(by_dp) == list(range(ranks))
    assert len({len(ids) for ids in by_dp.values()}) == 1, "ranks that trained more than others"
    times = Counter(chain.from_iterable(by_dp.values()))
    assert not {number: n for number, n in times.items() if n > 1}, "samples that were trained more than once"
    assert not set(times) - set(range(samples)), "samples that the stream does not have"
    tail = samples // (ranks * unit) * ranks * unit
    for rank, ids in by_dp.items():
        foreign = [number for number in ids if (number // unit if number < tail else number) % ranks != rank]
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


def position_of(checkpoint: Path) -> Position:
    position = load_position(checkpoint)
    assert position is not None
    return position


def encoded_in(log: Path) -> Counter[int]:
    """How often each row was encoded, by what a run with `$ENCODED` has written down."""
    return Counter(map(int, log.read_text().split()) if log.exists() else ())


def sealed_in(directory: Path) -> dict[int, float]:
    found: dict[int, float] = {}
    for path in directory.glob("*.completed"):
        seal = json.loads(path.read_bytes())
        first = seal["chunk"] * SIZE
        found |= dict.fromkeys(range(first, first + seal["samples"]), seal["sealed_at"])
    return found


def assert_read_while_written(run: Run, directory: Path, samples: int) -> None:
    """Checks that training began before half of a stream was there, and that no sample was trained too early."""
    since = sealed_in(directory)
    assert sorted(since) == list(range(samples))
    begun = sum(time <= run.batches[0].time for time in since.values())
    assert begun < samples / 2, f"{begun} of {samples} samples were published when training began"
    early = [batch for batch in run.batches if batch.train and batch.time < max(since[number] for number in batch.ids)]
    assert not early, "batches with samples that were not published yet"


def assert_cursor(checkpoint: Path, directory: Path, consumed: int, trained: set[int]) -> None:
    """Checks a checkpoint's position, and that the stream's cursor tells it and gives up no chunk that is needed."""
    position = position_of(checkpoint)
    assert (position.consumed, f"checkpoint-{position.step}") == (consumed, checkpoint.name)
    cursor = read_cursor(directory, position.consumer)
    assert cursor is not None and cursor.consumed == consumed
    assert set(range(cursor.chunks_before * SIZE)) <= trained, "chunks given up before they were trained"


@contextmanager
def fed_live(
    training: Training, directory: Path, samples: int, rate: float, processes: int, *arguments: object
) -> "Iterator[subprocess.Popen[str]]":
    """A producer that starts once all training processes have begun, seconds before they ask for the stream."""
    training.wait_for(lambda: len(list(training.trace.glob("rank_*.jsonl"))) == processes, "all processes")
    source = directory.with_suffix(".source.jsonl")
    source = source if source.exists() else write_jsonl(source, 0, samples)
    with producing(directory, source, SIZE, rate, *arguments) as producer:
        yield producer


def killed_at(training: Training, directory: Path, consumer: str, step: int) -> tuple[Run, Path]:
    """Kills a training after a step has its loss, and returns the newest checkpoint that is safe, as the cursor says.

    If the training ends before, it is not killed.
    """
    run, cursor = training.killed_after(step), read_cursor(directory, consumer)
    assert cursor is not None and cursor.state is not None
    files = training.output_dir.glob("checkpoint-*/lazyshard.json")
    saved = {file.parent: position_of(file.parent) for file in files}
    (newest,) = (folder for folder, position in saved.items() if consumed_of_first(position) == cursor.consumed)
    return run, newest


def consumed_of_first(position: Position) -> int:
    """How many samples of the stream, or of the first one of a blend, were trained."""
    return position.blend.members[0].consumed if isinstance(position.blend, BlendState) else position.consumed


def assert_every_sample_once(runs: Sequence[Run], checkpoints: Sequence[Path], samples: int, epochs: int = 1) -> None:
    """Checks what each start trained up to its checkpoint: the declared order, and together every sample once an epoch.

    Each start has other ranks or batches than the one before. Fewer than a step may be left over at the stream's end,
    and of a micro batch of all ranks at that of an epoch.
    """
    final = position_of(checkpoints[-1]).state
    assert final is not None
    course, first = course_of(final), 0
    assert len(final.parts) == len(runs)
    trained: list[tuple[int, int]] = []
    for number, (run, checkpoint) in enumerate(zip(runs, checkpoints, strict=True)):
        position, part, here = position_of(checkpoint), final.parts[number], course.until(number)
        batches = [batch for batch in run.batches if first < batch.step <= position.step]
        assert min(batch.step for batch in run.batches) == first + 1
        declared = {lane: [here.draw(lane, at, samples) for at in range(part.draws)] for lane in range(part.dp)}
        by_dp = {lane: [drawn.sample for drawn in draws] for lane, draws in declared.items() if draws}
        assert ids_by_dp(batches) == by_dp, f"start {number}"
        trained += ((drawn.epoch, drawn.sample) for draws in declared.values() for drawn in draws)
        assert (len(trained), part.first_step) == (position.consumed, first)
        first = position.step
    assert not {where: n for where, n in Counter(trained).items() if n > 1}, "samples that were trained more than once"
    largest = max(part.dp * max(part.draws_per_step, part.batch_size) for part in final.parts)
    found = Counter(epoch for epoch, _ in trained)
    assert set(found) == set(range(epochs))
    assert all(samples - largest < number <= samples for number in found.values()), found
