"""Sources that overlap, and settings that change between two runs: refused, or said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.producing import assert_one_line, chunk_files, ids, rows, run_arguments

HERE: Final = "tests.producer.recipes"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "incoming"
    path.mkdir()
    (path / "a.jsonl").write_bytes(rows(0, 10))
    (path / "a.csv").write_bytes(rows(10, 20))
    (path / "_END").touch()
    yield path


def run_mixed(out: Path, *sources: object) -> int:
    weighted = [part for source in sources for part in (*str(source).split(" "), "--weight", "1")]
    return main([*run_arguments(out, []), *weighted])


def test_a_file_of_a_followed_directory_is_not_a_source_too(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(directory)
    assert run_mixed(tmp_path / "out", f"--follow {directory}", f"--source {tmp_path}/link/a.jsonl") == 4
    found = f"link/a.jsonl: expected every source once, found a file of {directory}, which is given too"
    assert_one_line(capsys.readouterr().err, found)
    assert not (tmp_path / "out").exists()
    assert run_mixed(tmp_path / "out", f"--follow {directory}", f"--source {directory}/a.csv") == 0
    assert sorted(ids(tmp_path / "out")) == list(range(20))


def test_a_stream_is_not_followed_into_itself(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--follow", str(directory), "--out", str(directory), "--samples-per-chunk", "5"]) == 4
    assert_one_line(capsys.readouterr().err, "outside the stream's directory")


def test_a_table_of_a_directory_is_not_a_source_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "tables").mkdir()
    table = tmp_path / "tables" / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"id": 0}]), table)
    assert main(run_arguments(tmp_path / "out", [tmp_path / "tables", table])) == 4
    assert_one_line(capsys.readouterr().err, f"{table}: expected every source once, found a file of ")


class Halfway:
    """A stream of two sources, shuffled, that was stopped by a bad row; chunks of 5 rows end within blocks of 8."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / "a", folder / "b"]
        self.paths[0].write_bytes(rows(0, 20))
        self.paths[1].write_bytes(rows(20, 32) + b"bad\n" + rows(32, 40))
        self.out = folder / "out"

    def run(self, *more: object, per_chunk: int = 5, weights: str = "11", shuffle: int = 8) -> int:
        sources = [
            part
            for path, weight in zip(self.paths, weights, strict=True)
            for part in ("--source", path, "--weight", weight)
        ]
        options = run_arguments(self.out, [], per_chunk, "--shuffle", shuffle, *more)
        return main([*options, *map(str, sources)])

    def mend(self) -> None:
        self.paths[1].write_bytes(rows(20, 40))


@pytest.fixture
def halfway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Halfway:
    stream = Halfway(tmp_path)
    assert stream.run() == 3
    assert len(ids(stream.out)) == 20
    stream.mend()
    capsys.readouterr()
    return stream


@pytest.mark.parametrize(
    ("more", "shuffle", "name"),
    [
        (("--seed", 1), 8, "seed (was "),
        ((), 9, "shuffle (was "),
        (("--transform", f"{HERE}:twice"), 8, "transform (was "),
        (("--where", f"{HERE}:even"), 8, "where (was "),
        (("--columns", "id"), 8, "columns (was "),
    ],
)
def test_a_recipe_that_changes_within_a_block_is_refused_and_the_old_one_goes_on(
    more: tuple[object, ...], shuffle: int, name: str, halfway: Halfway, capsys: pytest.CaptureFixture[str]
) -> None:
    before = chunk_files(halfway.out)
    assert halfway.run(*more, shuffle=shuffle) == 2
    assert_one_line(capsys.readouterr().err, name, "go on with the settings of before")
    assert chunk_files(halfway.out) == before
    assert halfway.run() == 0
    assert sorted(ids(halfway.out)) == list(range(40))


def test_weights_may_change_within_a_block_and_are_warned_of(
    halfway: Halfway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert halfway.run(weights="12") == 0
    assert "in another way than before: weights (was [1.0, 1.0], now [1.0, 2.0])" in capsys.readouterr().err
    assert sorted(ids(halfway.out)) == list(range(40))


def test_a_recipe_that_changes_between_two_rows_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    source.write_bytes(rows(0, 4) + b"bad\n")
    assert main(run_arguments(out, [source], 2)) == 3
    source.write_bytes(rows(0, 6))
    capsys.readouterr()
    assert main(run_arguments(out, [source], 2, "--transform", f"{HERE}:twice")) == 0
    assert f"another way than before: transform (was None, now '{HERE}:twice')" in capsys.readouterr().err
    assert ids(out) == [0, 1, 2, 3, 4, 4, 5, 5]


def test_another_chunk_size_is_refused(halfway: Halfway, capsys: pytest.CaptureFixture[str]) -> None:
    before = chunk_files(halfway.out)
    assert halfway.run(per_chunk=4) == 5
    assert_one_line(capsys.readouterr().err, "5 samples per chunk, asked for 4")
    assert chunk_files(halfway.out) == before


def test_a_position_of_a_later_release_is_refused(halfway: Halfway, capsys: pytest.CaptureFixture[str]) -> None:
    path = halfway.out / "chunk_00003.jsonl.completed"
    seal = json.loads(path.read_bytes())
    seal["source"]["version"] = 2
    path.write_text(json.dumps(seal))
    assert halfway.run() == 5
    assert_one_line(capsys.readouterr().err, "source positions of version 1, found version 2")
