"""A writer killed at every durable step, and again while it recovers; and a proof that the harness sees mistakes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.storage import durable, recovery, writer
from lazyshard.storage.listing import Listing
from tests.crash.writer_harness import WHEN, Mutant, Violation, check, fast_directory, finish, run, sweep


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_directory(tmp_path) as directory:
        yield directory


@pytest.mark.parametrize("when", WHEN)
def test_writer_killed_at_any_step_loses_repeats_and_tears_nothing(when: str, root: Path) -> None:
    assert sweep(root, when) > 60


def test_writer_killed_again_while_it_recovers_loses_repeats_and_tears_nothing(root: Path) -> None:
    total = run(root / "whole")
    assert total is not None
    for first in range(2, total, 5):
        for second in range(1 + first % 4, total, 9):
            directory = root / f"{first}_{second}"
            run(directory, first, WHEN[first % 3])
            sealed = check(directory, {})
            run(directory, second, WHEN[second % 3])
            finish(directory, check(directory, sealed))


def test_writer_killed_over_and_over_at_its_first_steps_gets_through(root: Path) -> None:
    sealed: dict[str, bytes] = {}
    for at in range(1, 40):
        run(root / "stream", at, WHEN[at % 3])
        sealed = check(root / "stream", sealed)
    finish(root / "stream", sealed)


def seal_before_data() -> None:
    def publish(self: ChunkWriter, *, tell: bool = True) -> None:
        chunk = self._chunk
        chunk.finish()
        seal = chunk.seal(self._row_source, 0.0)
        target = self.directory / seal_name(chunk.number)
        durable.publish_bytes(seal.encode(), target, self._temporary / "seal")
        durable.rename(chunk.path, self.directory / chunk_name(chunk.number))
        count(self)
        if tell:
            self._write_head(self.state)

    ChunkWriter._publish = publish  # type: ignore[method-assign]


def head_before_seal() -> None:
    def publish(self: ChunkWriter, *, tell: bool = True) -> None:
        chunk = self._chunk
        chunk.finish()
        durable.rename(chunk.path, self.directory / chunk_name(chunk.number))
        seal = chunk.seal(self._row_source, 0.0)
        count(self)
        if tell:
            self._write_head(self.state)
        durable.publish_bytes(seal.encode(), self.directory / seal_name(chunk.number), self._temporary / "seal")

    ChunkWriter._publish = publish  # type: ignore[method-assign]


def count(self: ChunkWriter) -> None:
    self.published_chunks += 1
    self.published_samples += len(self._chunk)
    self.source = self._row_source
    self._chunk = self._new_chunk()


def data_in_place() -> None:
    """Writes rows under the chunk's own name, and takes what is there for published."""
    original = recovery.recover

    def recover(directory: Path, manifest: object) -> recovery.Recovered:
        for path in directory.glob("chunk_*.jsonl"):
            path.with_name(path.name + ".completed").touch()
        return original(directory, manifest)  # type: ignore[arg-type]

    writer.recover = recover  # type: ignore[attr-defined]


def nothing_cleared() -> None:
    def clear(directory: Path, listing: Listing) -> None:
        pass

    recovery._clear = clear


def end_before_last_chunk() -> None:
    def end(self: ChunkWriter) -> None:
        last = len(self._chunk)
        self.published_chunks, self.published_samples = self.published_chunks + 1, self.published_samples + last
        self._write_end()
        self.published_chunks, self.published_samples = self.published_chunks - 1, self.published_samples - last
        self._publish(tell=False)
        self._write_head("finished")

    ChunkWriter._end = end  # type: ignore[method-assign]


def torn_seal() -> None:
    """Writes the seal in its place instead of renaming it there."""

    def publish(data: bytes, target: Path, temporary: Path, **_: bool) -> None:
        fd = durable.create(target)
        durable.write_all(fd, data)
        os.close(fd)

    writer.publish_bytes = publish  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "mutant", [seal_before_data, head_before_seal, data_in_place, nothing_cleared, end_before_last_chunk, torn_seal]
)
def test_harness_detects_a_writer_that_makes_a_mistake(mutant: Mutant, root: Path) -> None:
    finish(root / "whole", {}, mutant)  # it works as long as nothing happens
    with pytest.raises(Violation):
        for when in ("half", "after"):
            sweep(root, when, mutant)


def test_harness_finds_no_fault_where_nothing_was_changed(root: Path) -> None:
    def same() -> None:
        writer.rename = durable.rename  # type: ignore[attr-defined]

    assert sweep(root, "after", same) > 60
