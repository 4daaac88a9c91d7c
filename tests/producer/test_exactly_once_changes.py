"""Between two runs sources grow and are added, weights change: still each row once, wherever the first run stopped."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard_producer.configuration.settings import Settings, SourceSettings
from lazyshard_producer.errors import SettingInvalid, SourceRefused
from tests.producer.rows.draining import drain

HERE = "tests.producer.recipes"


def line(file: int, number: int) -> bytes:
    return b'{"id":[%d,%d]}\n' % (file, number)


def write(path: Path, file: int, *numbers: int) -> None:
    path.write_bytes(b"".join(line(file, number) for number in numbers))


def grow(directory: Path, lengths: Sequence[int]) -> list[Path]:
    """Files of so many rows each; those that are there are added to."""
    paths = [directory / f"{file}.jsonl" for file in range(len(lengths))]
    for file, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        with path.open("ab") as opened:
            begin = opened.tell() // len(line(file, 0))
            opened.write(b"".join(line(file, number) for number in range(begin, length)))
    return paths


def settings(
    directory: Path, paths: Sequence[Path | str], weights: Sequence[float] | None = None, **more: Any
) -> Settings:
    shares = weights if weights is not None else [None] * len(paths)
    sources = tuple(SourceSettings(path=str(p), weight=w) for p, w in zip(paths, shares, strict=True))
    return Settings(sources=sources, out=str(directory / "out"), samples_per_chunk=10, **more)


def rows(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(file, number) for file, length in enumerate(lengths) for number in range(length)]


weightings = st.one_of(st.none(), st.lists(st.integers(1, 5), min_size=5, max_size=5))


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    growth=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    added=st.lists(st.integers(0, 4), max_size=2),
    weights=weightings,
    weights_then=st.one_of(st.just("same"), weightings),
    shuffle=st.sampled_from([0, 4, 100]),
    transform=st.sampled_from([None, "twice"]),
    stop=st.integers(1, 40),
    again=st.integers(0, 10),
)
def test_growth_further_sources_and_other_weights(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[int],
    growth: list[int],
    added: list[int],
    weights: list[float] | None,
    weights_then: Any,
    shuffle: int,
    transform: str | None,
    stop: int,
    again: int,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    more: dict[str, Any] = {"shuffle": shuffle, "transform": transform and f"{HERE}:{transform}"}
    first = settings(directory, grow(directory, before), weights and weights[: len(before)], **more)
    taken = list(itertools.islice(drain(first), stop))
    position = taken[-1][1] if taken else None

    then = [*(length + more for length, more in zip(before, growth, strict=False)), *added]
    chosen = weights if weights_then == "same" else weights_then
    second = settings(directory, grow(directory, then), chosen and chosen[: len(then)], **more)
    middle = list(itertools.islice(drain(second, position), again))
    position = middle[-1][1] if middle else position
    rest = list(drain(second, position))
    found = Counter(tuple(row["id"]) for row, _ in [*taken, *middle, *rest])
    times = 2 if transform else 1
    assert found == Counter(dict.fromkeys(rows(then), times))
    # Where the second run stopped makes no difference either.
    whole = list(drain(second, taken[-1][1] if taken else None))
    assert [row for row, _ in whole] == [row for row, _ in [*middle, *rest]]


def stopped_in_a_block(directory: Path, taken: int, **more: Any) -> tuple[Settings, Any]:
    """Two files, of which a block of 8 holds 3 and 5 rows; so many of it are taken."""
    run = settings(directory, grow(directory, [3, 9]), shuffle=8, **more)
    *_, (_, position) = itertools.islice(drain(run), taken)
    assert (position["unit"], position["skip"]) == ([3, 5], taken)
    return run, position


def test_a_block_that_is_begun_stays_as_it_was(tmp_path: Path) -> None:
    run, position = stopped_in_a_block(tmp_path, 5)
    expected = [row for row, _ in drain(run, position)]
    assert len(expected) == 7
    grow(tmp_path, [6, 9])
    assert [row for row, _ in drain(run, position)][:3] == expected[:3]


@pytest.mark.parametrize("file", [0, 1])
def test_a_file_that_is_replaced_while_a_block_of_it_is_begun_is_refused(tmp_path: Path, file: int) -> None:
    run, position = stopped_in_a_block(tmp_path, 7)
    path = Path(run.sources[file].path)
    path.write_bytes(path.read_bytes().replace(b"[%d," % file, b"[7,"))
    names = re.escape(", ".join(source.path for source in run.sources))
    with pytest.raises(SourceRefused, match=f"^{names}: the last chunk ends within .* of 8 rows .* first 7 of them"):
        list(drain(run, position))


def test_a_file_that_is_cut_while_a_block_of_it_is_begun_is_refused(tmp_path: Path) -> None:
    run, position = stopped_in_a_block(tmp_path, 5)
    write(tmp_path / "1.jsonl", 1, 0)
    with pytest.raises(SourceRefused, match="come out otherwise now"):
        list(drain(run, position))


def test_a_function_that_gives_other_rows_than_before_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(tmp_path, grow(tmp_path, [3]), transform=f"{HERE}:twice")
    (_, position), _ = itertools.islice(drain(run), 2)
    monkeypatch.setattr(f"{HERE}.twice", lambda row: [row | {"new": 1}] * 2)
    with pytest.raises(SourceRefused, match="does not give the same rows for the same row"):
        list(drain(run, position))


def test_another_recipe_in_the_middle_of_a_block_is_refused(tmp_path: Path) -> None:
    run, position = stopped_in_a_block(tmp_path, 5)
    for changed in ({"shuffle": 9}, {"shuffle": 8, "seed": 1}, {"shuffle": 8, "where": f"{HERE}:even"}):
        other = settings(tmp_path, [source.path for source in run.sources], **changed)
        with pytest.raises(SettingInvalid, match="rows are to be made in another way"):
            list(drain(other, position))


def test_another_recipe_is_told_once_it_is_there(tmp_path: Path) -> None:
    """Not before its file is imported: where that fails, nothing goes on."""
    paths = grow(tmp_path, [3])
    (_, position), *_ = drain(settings(tmp_path, paths))
    warnings: list[str] = []
    with pytest.raises(SettingInvalid, match=r"a module is named without \.py"):
        list(drain(settings(tmp_path, paths, transform="recipes.py:twice"), position, warnings=warnings))
    assert warnings == []
    assert len(list(drain(settings(tmp_path, paths, transform=f"{HERE}:twice"), position, warnings=warnings))) == 4
    assert warnings == [
        f"from here on rows are made or ordered in another way than before: transform (was None, now '{HERE}:twice')"
    ]


def test_other_weights_are_warned_of_and_begin_behind_the_block(tmp_path: Path) -> None:
    paths = grow(tmp_path, [9, 9])
    run = settings(tmp_path, paths, [1, 1], shuffle=8)
    *_, (_, position) = itertools.islice(drain(run), 5)
    expected = [row for row, _ in drain(run, position)]
    warnings: list[str] = []
    found = [row for row, _ in drain(settings(tmp_path, paths, [1, 9], shuffle=8), position, warnings=warnings)]
    assert warnings == [
        "from here on rows are made or ordered in another way than before: weights (was [1, 1], now [1, 9])"
    ]
    assert found[:3] == expected[:3]
    # Of the next block one row of ten is of the first file.
    assert sorted(row["id"] for row in found[3:11]) == [[0, 4], [0, 5], [0, 6], *([1, n] for n in range(4, 9))]


def piped(numbers: Sequence[int], run: Settings, start: Any, warnings: list[str]) -> Iterator[Any]:
    """Rows and positions of a run whose pipe gives these rows."""
    pipe = Path(run.sources[0].path)
    feeder = threading.Thread(target=lambda: pipe.write_bytes(b"".join(line(0, number) for number in numbers)))
    feeder.start()
    yield from drain(run, start, warnings=warnings)
    feeder.join()


@pytest.mark.parametrize("new", [[5, 6, 7, 8], [0, 1, 2, 3, 4, 9]])
def test_an_input_that_is_appended_goes_on_with_new_rows_or_with_those_that_it_repeats(
    new: list[int], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    source = SourceSettings(path=str(tmp_path / "pipe"), resume="append")
    run = Settings(sources=(source,), out=str(tmp_path / "out"), samples_per_chunk=10, shuffle=5)
    warnings: list[str] = []
    first = list(piped(range(5), run, None, warnings))
    assert first[1][1]["skip"] == 2
    second = list(piped(new, run, first[1][1], warnings))
    found = sorted(row["id"][1] for row, _ in second)
    if new[0] == 0:
        # Begun by an earlier run, the block comes out as it did there.
        assert [row for row, _ in second[:3]] == [row for row, _ in first[2:]]
        assert len(found) == 4
        assert warnings == []
    else:
        assert found == new
        assert warnings == [
            f"{source.path}: goes on with new rows; what is not published of the last 5 that were read before is lost"
        ]
