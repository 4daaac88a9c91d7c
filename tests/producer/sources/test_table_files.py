import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.errors import ExtraMissing, SourceRefused
from tests.producer.sources.table_sources import open_table_source, read_rows, values

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, *ids: int) -> None:
    pq.write_table(pa.table({"id": list(ids)}), path)


def directory_read_up_to(tmp_path: Path, rows: int) -> dict[str, Any]:
    """A directory of the files b, d and f, of two rows each, and the position after some of these."""
    for number, name in enumerate("bdf"):
        write(tmp_path / f"{name}.parquet", 2 * number, 2 * number + 1)
    source = open_table_source("parquet", tmp_path)
    position = source.entry(read_rows(source)[rows - 1].position)
    source.close()
    return position


def test_the_position(tmp_path: Path) -> None:
    position = directory_read_up_to(tmp_path, 3)
    assert position.keys() == {"kind", "path", "files", "row", "xxh3"}
    assert [position[name] for name in ("kind", "path", "files", "row")] == ["parquet", str(tmp_path), 1, 1]
    assert len(position["xxh3"]) == 24


@pytest.mark.parametrize(("rows", "rest"), [(2, [2, 3, 8, 4, 5, 9]), (3, [3, 8, 4, 5, 9]), (4, [8, 4, 5, 9])])
def test_later_files_may_come(tmp_path: Path, rows: int, rest: list[int]) -> None:
    position = directory_read_up_to(tmp_path, rows)
    write(tmp_path / "e.parquet", 8)
    write(tmp_path / "g.parquet", 9)
    assert values(open_table_source("parquet", tmp_path, position)) == [{"id": number} for number in rest]


def test_files_that_were_not_begun_may_change(tmp_path: Path) -> None:
    position = directory_read_up_to(tmp_path, 4)
    write(tmp_path / "f.parquet", 7)
    assert values(open_table_source("parquet", tmp_path, position)) == [{"id": 7}]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda path: write(path / "a.parquet", 9),
            r"file 1 the one .* found a\.parquet, which is new",
        ),
        (
            lambda path: write(path / "c.parquet", 9),
            r"file 2 the one .* found c\.parquet, which is new",
        ),
        (lambda path: (path / "b.parquet").unlink(), "file 1 the one whose rows were read, found that one gone"),
        (lambda path: (path / "d.parquet").unlink(), r"found .*|d\.parquet: expected the file whose rows were read"),
        (lambda path: (path / "b.parquet").rename(path / "e.parquet"), "file 1 .* found that one gone"),
        (
            lambda path: write(path / "b.parquet", 0, 7),
            r"b\.parquet: expected the file .* found another",
        ),
        (
            lambda path: write(path / "d.parquet", 2, 7),
            r"d\.parquet: expected the file .* found another",
        ),
        (lambda path: os.truncate(path / "d.parquet", 9), r"d\.parquet: expected the file whose rows were read"),
    ],
)
def test_what_was_begun_must_stay_as_it_was(tmp_path: Path, change: Callable[[Path], Any], match: str) -> None:
    position = directory_read_up_to(tmp_path, 3)
    change(tmp_path)
    with pytest.raises(SourceRefused, match=match):
        open_table_source("parquet", tmp_path, position)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, 1)
    source = open_table_source("parquet", path)
    (first, _) = read_rows(source, most=2)
    write(tmp_path / "new", 5, 6)
    os.replace(tmp_path / "new", path)
    with pytest.raises(SourceRefused, match=r"a\.parquet: expected the file whose rows were read, found another one"):
        source.entry(first.position)
    with pytest.raises(SourceRefused, match="found another one"):
        source.read()
    source.close()


def test_a_file_that_is_written_anew_with_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, 1)
    source = open_table_source("parquet", path)
    (first, _) = read_rows(source, most=2)
    os.utime(path, ns=(1, 1))
    position = source.entry(first.position)
    source.close()
    assert values(open_table_source("parquet", path, position)) == [{"id": 1}]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kind", ["arrow"]),
        ("path", ["elsewhere"]),
        ("files", [-1]),
        ("row", [None, True, 0]),  # at row 0 no fingerprint of a second file is expected
        ("xxh3", ["AAA", "AAAA", 7]),
    ],
)
def test_a_position_that_is_none_of_this_source(tmp_path: Path, field: str, values: list[Any]) -> None:
    position = directory_read_up_to(tmp_path, 3)
    for value in values:
        with pytest.raises(SourceRefused, match="no position to go on from"):
            open_table_source("parquet", tmp_path, position | {field: value})


def test_a_directory_without_tables(tmp_path: Path) -> None:
    with pytest.raises(SourceRefused, match=r"expected files \*\.parquet, found none$"):
        open_table_source("parquet", tmp_path)
    (tmp_path / "year=2025").mkdir()
    (tmp_path / "year=2026").mkdir()
    with pytest.raises(SourceRefused, match=r"it has folders \(year=2025, year=2026\), give each as a source"):
        open_table_source("parquet", tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_named_pipe_or_nothing_at_all(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, match in (("pipe", "expected a plain file, found a named pipe"), ("none", "no such file")):
        with pytest.raises(SourceRefused, match=match):
            open_table_source(kind, tmp_path / name)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_without_pyarrow(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ExtraMissing, match=r"a: reading it needs pyarrow, .*: pip install 'lazyshard\[arrow\]'"
    ) as error:
        open_table_source(kind, tmp_path / "a")
    assert (error.value.package, error.value.extra) == ("pyarrow", "arrow")
