"""Sources of every kind that change after a run was killed, or while one goes on: refused by name, or read on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import pytest

from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import (
    assert_one_line,
    ids,
    published,
    rows,
    run,
    run_arguments,
    start,
    wait_until,
)
from tests.harness.scenes.rows import lines, made
from tests.harness.scenes.sources import KINDS, FedSource, PipedSource
from tests.harness.scenes.streams import Stream

FILES: Final = ["plain", "gzip", "zstd", "parquet", "arrow", "hugging face", "foreign stream"]
PIPES: Final = ["pipe", "stdin"]

SKIPS: Final = ("--on-bad-row", "skip")
SHUFFLES: Final = (*SKIPS, "--shuffle", "16")

SOME_CALLS: Final = 90
"""After so many some chunks are published, and not all."""


class Killed:
    """A run of one source that was killed after some chunks."""

    def __init__(self, kind: str, options: tuple[str, ...], nursery: Commands, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.source: FedSource = KINDS[kind](folder, 0)
        self.rows = self.source.rows
        self.stream = Stream(nursery, folder / "out", [self.source], options)
        assert self.stream.run(kill_at=SOME_CALLS)[0] == -signal.SIGKILL
        self.before = self.stream.chunk_bytes()
        assert 2 <= self.stream.chunks <= 10

    def change(self, rows: list[bytes]) -> None:
        """Gives the source these rows."""
        if isinstance(self.source, PipedSource):
            self.source.rows = rows
        else:
            KINDS[self.kind](self.folder, 0, rows)

    def check_refused(self, *words: str) -> None:
        status, err = self.stream.run()
        assert status == 4, err
        assert_one_line(err, self.source.arguments[1], *words)
        assert self.stream.chunk_bytes() == self.before
        assert not (self.stream.out / "stream.end").exists()

    def check_goes_on(self, rows: list[bytes], ordered: bool = True) -> None:
        status, err = self.stream.run()
        assert status == 0, err
        expected = made(rows, transform=False, where=False)
        found = self.stream.rows()
        assert sorted(map(str, found)) == sorted(map(str, expected))
        assert not ordered or found == expected


@pytest.mark.parametrize("options", [SKIPS, SHUFFLES], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", [*FILES, *PIPES])
def test_another_source_is_refused_until_the_old_one_is_back(
    kind: str, options: tuple[str, ...], nursery: Commands, tmp_path: Path
) -> None:
    killed = Killed(kind, options, nursery, tmp_path)
    others = lines(1000, bad=kind in ("plain", "gzip", "zstd", "foreign stream", *PIPES))
    for other in (others, others[:1]):
        killed.change(other)
        killed.check_refused("expected" if options == SKIPS else "")
    killed.change(killed.rows)
    killed.check_goes_on(killed.rows, ordered=options == SKIPS)


@pytest.mark.parametrize("options", [SKIPS, SHUFFLES], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd", "pipe", "stdin"])
def test_a_source_that_has_grown_is_read_on(
    kind: str, options: tuple[str, ...], nursery: Commands, tmp_path: Path
) -> None:
    killed = Killed(kind, options, nursery, tmp_path)
    grown = killed.rows + lines(1000)
    killed.change(grown)
    killed.check_goes_on(grown, ordered=options == SKIPS)


@pytest.mark.parametrize("kind", FILES)
def test_a_source_that_is_gone_is_refused_until_it_is_back(kind: str, nursery: Commands, tmp_path: Path) -> None:
    killed = Killed(kind, SKIPS, nursery, tmp_path)
    path = Path(killed.source.arguments[1])
    away = path.rename(tmp_path / "away")
    killed.check_refused("no such file")
    away.rename(path)
    killed.check_goes_on(killed.rows)


@pytest.mark.parametrize("change", ["truncated", "replaced", "continued"])
def test_a_file_that_changes_while_it_is_read(change: str, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 100))
    process = start(*run_arguments(out, [source], 10, "--rate", 100))
    wait_until(lambda: published(out) >= 2, process)
    if change == "truncated":
        source.write_bytes(rows(0, 5))
    elif change == "replaced":
        source.write_bytes(rows(0, 100).replace(b"text", b"TEXT"))
    else:
        # What is behind what was read is read as well, or in the next run.
        with source.open("ab") as file:
            file.write(rows(100, 130))
    _, err = process.communicate(timeout=60)
    if change == "continued":
        assert process.returncode == 0, err
        assert ids(out) in (list(range(100)), list(range(130)))
        return
    assert process.returncode == 4
    assert_one_line(err, f"{source}: ")
    before = ids(out)
    assert before == list(range(len(before)))
    source.write_bytes(rows(0, 100))
    assert run(*run_arguments(out, [source], 10)).returncode == 0
    assert ids(out) == list(range(100))
