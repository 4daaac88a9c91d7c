"""Whatever is mixed, made, dropped and shuffled: going on from the position after any row gives the rest, each once."""

from __future__ import annotations

import gzip
import itertools
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard_producer.configuration.settings import Settings, SourceSettings
from lazyshard_producer.errors import SettingInvalid
from tests.producer.rows.draining import drain, make

HERE = "tests.producer.recipes"


def write(directory: Path, lengths: Sequence[int], bad: bool = False) -> list[Path]:
    """Files of rows {"id": [file, number]}, with blank lines, a byte order mark and, if wanted, bad rows among them."""
    paths = []
    for file, length in enumerate(lengths):
        lines = [b'{"id":[%d,%d]}\n' % (file, number) for number in range(length)]
        if bad:
            lines = [line for n, line in enumerate(lines) for line in ([b"bad\n", line] if n % 3 == 1 else [line])]
        lines = [line for n, line in enumerate(lines) for line in ([b"\n", line] if n % 4 == 2 else [line])]
        path = directory / f"{file}.jsonl"
        path.write_bytes((b"\xef\xbb\xbf" if file == 1 else b"") + b"".join(lines))
        paths.append(path)
    return paths


def check_every_place(settings: Settings, *, same_positions: bool = True) -> list[Any]:
    whole = list(drain(settings))
    rows = [row for row, _ in whole]
    journals = Path(settings.out) / ".producer.sources"
    kept = {path: path.read_bytes() for path in journals.glob("*")}
    for taken, (_, position) in enumerate(whole, 1):
        # As the first run would have left it; a run that goes on deletes the journals of those before it.
        shutil.rmtree(journals, ignore_errors=True)
        for path, data in kept.items():
            journals.mkdir(exist_ok=True)
            path.write_bytes(data)
        rest = list(drain(settings, position))
        assert [row for row, _ in rest] == rows[taken:]
        # The same rows make the same positions, so seals come out the same too.
        assert not same_positions or [after for _, after in rest] == [after for _, after in whole[taken:]]
    return rows


def ids(lengths: Sequence[int]) -> list[list[int]]:
    return [[file, number] for file, length in enumerate(lengths) for number in range(length)]


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    weighted=st.booleans(),
    shuffle=st.sampled_from([0, 1, 4, 100]),
    transform=st.sampled_from([None, "twice", "some", "none"]),
    bad=st.booleans(),
    seed=st.integers(0, 3),
)
def test_going_on_after_any_row(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    weighted: bool,
    shuffle: int,
    transform: str | None,
    bad: bool,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    weights = [random.Random(seed).uniform(0.1, 2) for _ in lengths] if weighted else None
    settings = make(
        directory / "out",
        write(directory, lengths, bad),
        weights,
        shuffle=shuffle,
        seed=seed,
        transform=transform and f"{HERE}:{transform}",
        on_bad_row="skip",
    )
    rows = check_every_place(settings)
    times = {None: 1, "twice": 2, "some": 1, "none": 0}[transform]
    if transform == "some":
        # Of which a third is dropped and a third doubled: as many as before, but for the last ones.
        assert {tuple(row["id"]) for row in rows} <= {tuple(found) for found in ids(lengths)}
    else:
        assert sorted(row["id"] for row in rows) == sorted(ids(lengths) * times)


def test_sources_come_in_order_without_weights(tmp_path: Path) -> None:
    rows = check_every_place(make(tmp_path / "out", write(tmp_path, [3, 0, 2])))
    assert [row["id"] for row in rows] == [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1]]


def test_sources_come_by_their_weights_and_the_rest_when_one_is_finished(tmp_path: Path) -> None:
    rows = check_every_place(make(tmp_path / "out", write(tmp_path, [8, 2]), [0.5, 0.5]))
    assert [row["id"][0] for row in rows] == [0, 1, 0, 1, 0, 0, 0, 0, 0, 0]


def test_a_mixed_source_that_was_finished_and_has_grown_is_read_on(tmp_path: Path) -> None:
    paths = write(tmp_path, [3, 1])
    settings = make(tmp_path / "out", paths, [1, 1])
    *_, (_, position) = drain(settings)
    with paths[1].open("ab") as file:
        file.write(b'{"id":[1,1]}\n')
    assert [row["id"] for row, _ in drain(settings, position)] == [[1, 1]]


def test_shuffled_rows_are_those_of_a_block_in_another_order(tmp_path: Path) -> None:
    rows = [row["id"][1] for row in check_every_place(make(tmp_path / "out", write(tmp_path, [12]), shuffle=8, seed=1))]
    assert sorted(rows[:8]) == list(range(8))
    assert rows[:8] != list(range(8))
    assert sorted(rows[8:]) == [8, 9, 10, 11]


def test_shuffled_order_is_pinned(tmp_path: Path) -> None:
    settings = make(tmp_path / "out", write(tmp_path, [10]), shuffle=5, seed=7)
    assert [row["id"][1] for row, _ in drain(settings)] == [3, 1, 4, 0, 2, 8, 6, 5, 7, 9]


@pytest.mark.parametrize("shuffle", [0, 6])
def test_workers_keep_the_order_and_every_position(tmp_path: Path, shuffle: int) -> None:
    paths = write(tmp_path, [9, 4], bad=True)
    here = make(tmp_path / "out", paths, transform=f"{HERE}:some", on_bad_row="skip", shuffle=shuffle)
    there = make(tmp_path / "out", paths, transform=f"{HERE}:some", on_bad_row="skip", shuffle=shuffle, workers=2)
    expected = list(drain(here))
    assert list(drain(there)) == expected
    middle = expected[len(expected) // 2][1]
    assert list(drain(there, middle)) == expected[len(expected) // 2 + 1 :]


def test_another_recipe_in_the_middle_of_a_source_row_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, [2])
    first, second = itertools.islice(drain(make(tmp_path / "out", paths, transform=f"{HERE}:twice")), 2)
    other = make(tmp_path / "out", paths)
    with pytest.raises(SettingInvalid, match=r"transform \(was 'tests.producer.recipes:twice', now None\)"):
        list(drain(other, first[1]))
    assert [row["id"] for row, _ in drain(other, second[1])] == [[0, 1]]


def as_gzip(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(gzip.compress(b"".join(lines[:5])) + gzip.compress(b"".join(lines[5:])))
    return path


def as_zstd(path: Path, lines: list[bytes]) -> Path:
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(zstandard.compress(b"".join(lines)))
    return path


def as_parquet(path: Path, lines: list[bytes]) -> Path:
    pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(table(lines), path.with_suffix(".parquet"), row_group_size=4)
    return path.with_suffix(".parquet")


def as_arrow(path: Path, lines: list[bytes]) -> Path:
    ipc = pytest.importorskip("pyarrow.ipc")
    with ipc.new_file(path.with_suffix(".arrow"), table(lines).schema) as file:
        file.write_table(table(lines), max_chunksize=3)
    return path.with_suffix(".arrow")


def table(lines: list[bytes]) -> Any:
    return pytest.importorskip("pyarrow").Table.from_pylist([orjson.loads(line) for line in lines])


def as_python(path: Path, lines: list[bytes]) -> str:
    return f"python:{HERE}:numbered"


def as_followed(path: Path, lines: list[bytes]) -> SourceSettings:
    path.mkdir()
    (path / "a.jsonl").write_bytes(b"".join(lines[:6]))
    (path / "b.jsonl").write_bytes(b"".join(lines[6:]))
    (path / "_END").touch()
    return SourceSettings(path=str(path), follow=True)


@pytest.mark.parametrize("shuffle", [0, 4])
@pytest.mark.parametrize("kind", [as_gzip, as_zstd, as_parquet, as_arrow, as_python, as_followed])
def test_every_kind_of_source_goes_on_after_any_row(
    tmp_path: Path, kind: Callable[[Path, list[bytes]], Any], shuffle: int
) -> None:
    lines = [b'{"id":[0,%d]}\n' % number for number in range(11)]
    made = kind(tmp_path / "source", lines)
    source = made if isinstance(made, SourceSettings) else SourceSettings(path=str(made))
    settings = Settings(sources=(source,), out=str(tmp_path / "out"), samples_per_chunk=10, shuffle=shuffle)
    (tmp_path / "out").mkdir()
    # Each run that follows a directory has a journal of its own.
    rows = check_every_place(settings, same_positions=kind is not as_followed)
    assert sorted(row["id"] for row in rows) == ids([11])
