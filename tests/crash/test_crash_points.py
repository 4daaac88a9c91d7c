"""Writers, and the deletion of old chunks, killed at every call, and what the next producer makes of it."""

import itertools
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.format.records import HEAD_RESERVE, chunk_name, seal_name, tokens_name
from lazyshard.stream import listing, read_retired
from lazyshard.stream.listing import list_kept
from tests.harness.planted import power as power_mutants
from tests.harness.planted.writers import MUTANTS, MUTANTS_OF_ARRAYS
from tests.harness.points.sealed import SealedChunks
from tests.harness.processes.kill_points import WHENS
from tests.harness.processes.nursery import Nursery
from tests.harness.writers.crashes import Mutant, finish, killed, killed_over_and_over, sweep, sweep_recovery
from tests.stream.streams import names, raised, rows

pytestmark = pytest.mark.full
LOADED: Final = ("tests.harness.writers.crashes",)  # By the process that is forked
CHUNKS: Final = 6
GONE: Final = 4  # Chunks of two rows, of which so many are deleted, in two passes
LINES: Final = [f'{{"id":{sample}}}' for sample in range(2 * CHUNKS)]
Files = dict[str, bytes]


def live(directory: Path) -> Files:
    """A stream that continues, with measured lengths; returns the files of its chunks."""
    writer = ChunkWriter(directory, 2)
    for row in rows(0, 2 * CHUNKS):
        writer.write(row, source=row["id"] + 1)
    writer.close(end=False)
    for chunk in range(CHUNKS):
        (directory / tokens_name(chunk)).write_bytes(b"{}")
    return {path.name: path.read_bytes() for path in directory.glob("chunk_*")}


def both_passes(directory: Path) -> None:
    listing.retire(directory, GONE - 1, CHUNKS)
    listing.retire(directory, GONE, CHUNKS)


def clear_up(directory: Path) -> None:
    ChunkWriter(directory).close(end=False)


def check(directory: Path, files: Files) -> int:
    """Checks what every instant must keep; returns the first chunk that counts."""
    known = {name(chunk): files[name(chunk)] for chunk in range(CHUNKS) for name in (chunk_name, seal_name)}
    sealed = SealedChunks(directory, LINES, 2, ordered=True, known=known)
    sealed.look(GONE)
    mark = read_retired(directory)
    if not all((directory / tokens_name(chunk)).exists() for chunk in range(mark, CHUNKS)):
        raise AssertionError(f"lengths are gone, and retired are only the chunks below {mark}")
    head = (directory / "head.json").read_bytes()
    for _ in range(2):
        assert sealed.read_through().samples == 2 * CHUNKS, "a reader is told of other samples"
        (directory / "head.json").unlink(missing_ok=True)
    (directory / "head.json").write_bytes(head)
    return mark


def go_on(directory: Path, files: Files) -> None:
    mark = check(directory, files)
    with ChunkWriter(directory) as writer:
        assert (writer.published_samples, writer.source) == (2 * CHUNKS, 2 * CHUNKS)
        assert check(directory, files) == mark, "opening the stream has retired chunks"
        listing = list_kept(directory)
        own = (writer.check_owner(), writer.check_owner() / HEAD_RESERVE)
        temporary = [str(path) for path in (directory / ".tmp").rglob("*") if path not in own]
        assert (listing.leftovers, listing.first, temporary) == ([], mark, [])
        both_passes(directory)
        writer.write({"id": 2 * CHUNKS}, source=2 * CHUNKS + 1)
    reader = StreamReader(directory)
    kept = [reader.read(sample) for sample in range(2 * GONE, 2 * CHUNKS + 1)]
    assert (kept, reader.seen.ended) == (rows(2 * GONE, 2 * CHUNKS + 1), True)
    expected = {"stream.json", "head.json", "stream.end", "stream.owner", "retired.json", ".producer.lock"}
    expected |= {name(chunk) for chunk in range(GONE, CHUNKS + 1) for name in (chunk_name, seal_name)}
    expected |= {tokens_name(chunk) for chunk in range(GONE, CHUNKS)}
    assert set(names(directory)) - {"cursors"} == expected


def sweep_deleting(root: Path, mutant: Mutant | None = None) -> int:
    for at in itertools.count(1):
        directory = root / f"{at}"
        files = live(directory)
        if killed(at, "half", partial(both_passes, directory), mutant) is not None:
            break
        go_on(directory, files)
    return at - 1


def sweep_clearing(root: Path) -> int:
    for at in itertools.count(1):
        directory = root / f"stream_{at}"
        files = live(directory)
        assert killed(16, "before", partial(listing.retire, directory, GONE, CHUNKS)) is None
        if killed(at, WHENS[at % 3], partial(clear_up, directory)) is not None:
            break
        go_on(directory, files)
    return at


def test_deleting_killed_at_any_step_loses_nothing_above_the_mark(forks: Nursery, root: Path) -> None:
    assert forks.result(sweep_deleting, root) > 20


def test_next_producer_killed_at_any_step_while_it_clears_up_gets_through(forks: Nursery, root: Path) -> None:
    assert forks.result(sweep_clearing, root) > 15


def test_harness_detects_files_that_go_before_the_mark(forks: Nursery, root: Path) -> None:
    raised(
        AssertionError,
        lambda: forks.result(sweep_deleting, root, partial(power_mutants.plant, "deleted_before_the_mark")),
    )


def test_any_files_that_a_power_cut_brings_back_are_cleared(root: Path) -> None:
    files = live(root / "stream")
    listing.retire(root / "stream", 2, CHUNKS)
    gone = sorted(set(files) - set(names(root / "stream")))
    assert len(gone) == 6
    for number in range(1 << len(gone)):
        for name in (name for bit, name in enumerate(gone) if number >> bit & 1):
            (root / "stream" / name).write_bytes(files[name])
        assert check(root / "stream", files) == 2
        clear_up(root / "stream")
        assert set(names(root / "stream")).isdisjoint(gone)
    go_on(root / "stream", files)


@pytest.mark.parametrize(("overlap", "arrays", "steps"), [(False, False, 60), (True, False, 60), (True, True, 80)])
def test_writer_killed_at_any_step_loses_nothing(
    overlap: bool, arrays: bool, steps: int, forks: Nursery, root: Path
) -> None:
    assert forks.result(sweep, root, overlap=overlap, arrays=arrays) > steps


@pytest.mark.parametrize(
    ("overlap", "arrays", "first", "second"), [(False, False, 11, 13), (True, False, 17, 19), (False, True, 23, 29)]
)
def test_writer_killed_as_it_recovers(
    overlap: bool, arrays: bool, first: int, second: int, forks: Nursery, root: Path
) -> None:
    forks.result(sweep_recovery, root, first, second, overlap=overlap, arrays=arrays)


def test_writer_killed_over_and_over_at_its_first_steps_gets_through(forks: Nursery, root: Path) -> None:
    forks.result(killed_over_and_over, root / "stream", 40)


@pytest.mark.parametrize("name", [*MUTANTS, *MUTANTS_OF_ARRAYS])
def test_harness_detects_a_writer_that_makes_a_mistake(name: str, forks: Nursery, root: Path) -> None:
    arrays = name in MUTANTS_OF_ARRAYS
    mutant, first = (MUTANTS | MUTANTS_OF_ARRAYS)[name]
    forks.result(finish, root / "whole", {}, mutant, arrays=arrays)  # it works as long as nothing happens
    with pytest.raises(AssertionError):
        forks.result(sweep, root, mutant, arrays=arrays, first=first)
