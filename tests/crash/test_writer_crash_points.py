"""A writer killed at every durable step, and again while it recovers; and a proof that the harness sees mistakes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard.format.manifest import Manifest
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.storage import chunk_sequence, durable, publishing, recovery, writer_opening
from lazyshard.storage import lock as locking
from lazyshard.storage.chunk_sequence import ChunkSequence
from lazyshard.storage.listing import Listing
from lazyshard.storage.lock import WriterLock
from lazyshard.storage.open_chunk import OpenChunk
from lazyshard.storage.steps import StepsAtOnce
from tests.harness.disks import fast_folder
from tests.harness.tally import Violation
from tests.harness.writers.crashes import WHEN, Mutant, check, finish, run, sweep

pytestmark = pytest.mark.full


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as directory:
        yield directory


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", WHEN)
def test_writer_killed_at_any_step_loses_repeats_and_tears_nothing(when: str, overlap: bool, root: Path) -> None:
    assert sweep(root, when, overlap=overlap) > 60


@pytest.mark.parametrize("overlap", [False, True])
def test_writer_killed_again_while_it_recovers_loses_repeats_and_tears_nothing(overlap: bool, root: Path) -> None:
    total = run(root / "whole", overlap=overlap)
    assert total is not None
    for first in range(2, total, 5):
        for second in range(1 + first % 4, total, 9):
            directory = root / f"{first}_{second}"
            run(directory, first, WHEN[first % 3], overlap=overlap)
            sealed = check(directory, {})
            run(directory, second, WHEN[second % 3], overlap=overlap)
            finish(directory, check(directory, sealed))


def test_writer_killed_over_and_over_at_its_first_steps_gets_through(root: Path) -> None:
    sealed: dict[str, bytes] = {}
    for at in range(1, 40):
        run(root / "stream", at, WHEN[at % 3])
        sealed = check(root / "stream", sealed)
    finish(root / "stream", sealed)


def seal_before_data() -> None:
    def publish(
        directory: Path, chunk: OpenChunk, source: Any, now: float, *, lock: WriterLock, temporary: Path
    ) -> None:
        chunk.finish()
        durable.publish_bytes(chunk.seal(source, now).encode(), directory / seal_name(chunk.number), temporary)
        durable.rename(chunk.path, directory / chunk_name(chunk.number))

    chunk_sequence.publish_chunk = publish  # type: ignore[attr-defined]


def head_before_seal() -> None:
    original = ChunkSequence._publish_chunk

    def publish(self: ChunkSequence, chunk: OpenChunk, *given: Any) -> None:
        self.published_chunks += 1
        self.published_samples += len(chunk)
        self.tell(self.state)
        self.published_chunks -= 1
        self.published_samples -= len(chunk)
        original(self, chunk, *given)

    ChunkSequence._publish_chunk = publish  # type: ignore[method-assign, assignment]


def data_in_place() -> None:
    """Writes rows under the chunk's own name, and takes what is there for published."""
    original = recovery.recover

    def recover(directory: Path, manifest: Manifest, lock: WriterLock) -> recovery.Recovered:
        for path in directory.glob("chunk_*.jsonl"):
            path.with_name(path.name + ".completed").touch()
        return original(directory, manifest, lock)

    writer_opening.recover = recover  # type: ignore[attr-defined]


def nothing_cleared() -> None:
    def clear(directory: Path, listing: Listing, lock: WriterLock) -> None:
        pass

    recovery._clear = clear
    locking.destroy = lambda directory: None  # type: ignore[attr-defined]


def end_before_last_chunk() -> None:
    original = ChunkSequence.end

    def end(self: ChunkSequence) -> None:
        samples = self.samples
        last = samples > self.published_samples
        publishing.publish_end(
            self._directory, self.published_chunks + last, samples, temporary=self._workplace.path("end")
        )
        original(self)

    ChunkSequence.end = end  # type: ignore[method-assign]


def torn_seal() -> None:
    """Writes the seal in its place instead of renaming it there."""

    def publish(data: bytes, target: Path, temporary: Path, **_: bool) -> None:
        fd = durable.create(target)
        durable.write_all(fd, data)
        os.close(fd)

    publishing.publish_bytes = publish  # type: ignore[attr-defined]


def next_chunk_overtakes() -> None:
    """Publishes a chunk before the one that is still on its way."""
    original = StepsAtOnce.do
    held: list[Callable[[], object]] = []

    def do(self: StepsAtOnce, step: Callable[[], object], size: int = 0) -> int:
        if size or not isinstance(step, functools.partial):
            return original(self, step, size)
        held.append(step)
        while len(held) > 1:
            held.pop()()
        return 0

    def wait(self: StepsAtOnce, number: int | None = None) -> None:
        if number is None:
            while held:
                held.pop()()

    StepsAtOnce.do = do  # type: ignore[method-assign]
    StepsAtOnce.wait = wait  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "mutant",
    [
        seal_before_data,
        head_before_seal,
        data_in_place,
        nothing_cleared,
        end_before_last_chunk,
        torn_seal,
        next_chunk_overtakes,
    ],
)
def test_harness_detects_a_writer_that_makes_a_mistake(mutant: Mutant, root: Path) -> None:
    finish(root / "whole", {}, mutant)  # it works as long as nothing happens
    with pytest.raises(Violation):
        for when in ("half", "after"):
            sweep(root, when, mutant)


def test_harness_finds_no_fault_where_nothing_was_changed(root: Path) -> None:
    def same() -> None:
        publishing.rename = durable.rename  # type: ignore[attr-defined]

    assert sweep(root, "after", same) > 60


@pytest.mark.parametrize(("when", "overlap"), [("half", True), ("after", False)])
def test_writer_of_arrays_killed_at_any_step_leaves_whole_chunks_and_nothing_else(
    when: str, overlap: bool, root: Path
) -> None:
    assert sweep(root, when, overlap=overlap, arrays=True) > 80


def test_writer_of_arrays_killed_again_while_it_recovers_leaves_whole_chunks_and_nothing_else(root: Path) -> None:
    total = run(root / "whole", arrays=True)
    assert total is not None
    for first in range(2, total, 17):
        for second in range(1 + first % 5, total, 23):
            directory = root / f"{first}_{second}"
            run(directory, first, WHEN[first % 3], arrays=True)
            sealed = check(directory, {})
            run(directory, second, WHEN[second % 3], arrays=True)
            finish(directory, check(directory, sealed), arrays=True)


def arrays_after_seal() -> None:
    """Gives the side file its name when the chunk is sealed already."""

    def publish(
        directory: Path, chunk: OpenChunk, source: Any, now: float, *, lock: WriterLock, temporary: Path
    ) -> None:
        arrays = chunk.arrays
        assert arrays is not None
        chunk.finish()
        sealed = chunk.seal(source, now)
        durable.rename(chunk.path, directory / chunk_name(chunk.number))
        durable.publish_bytes(sealed.encode(), directory / seal_name(chunk.number), temporary)
        durable.rename(arrays.file.path, directory / arrays_name(chunk.number))

    chunk_sequence.publish_chunk = publish  # type: ignore[attr-defined]


def side_files_not_cleared() -> None:
    original = recovery._clear

    def clear(directory: Path, listing: Listing, lock: WriterLock) -> None:
        listing.arrays.clear()
        original(directory, listing, lock)

    recovery._clear = clear


@pytest.mark.parametrize("mutant", [arrays_after_seal, side_files_not_cleared])
def test_harness_detects_a_writer_of_arrays_that_makes_a_mistake(mutant: Mutant, root: Path) -> None:
    finish(root / "whole", {}, mutant, arrays=True)
    with pytest.raises(Violation):
        sweep(root, "after", mutant, arrays=True)
