"""Rows dealt by cost: going on from the position after any row gives the rest, each once, in the same places."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid, SourceRefused
from tests.producer.rows import draining

HERE = "tests.producer.recipes"


def write(directory: Path, counts: Sequence[int], bad: bool = False) -> list[Path]:
    """Files of rows {"id": [file, number], "length": ...}, if wanted with bad rows and rows without a length."""
    paths = []
    for file, count in enumerate(counts):
        dice = random.Random(file)
        lines = [b'{"id":[%d,%d],"length":%d}\n' % (file, n, dice.randrange(1, 9)) for n in range(count)]
        if bad:
            lines = [line for n, line in enumerate(lines) for line in ([b"bad\n", b"{}\n", line] if n % 3 else [line])]
        path = directory / f"{file}.jsonl"
        path.write_bytes(b"".join(lines))
        paths.append(path)
    return paths


def make(out: Path, paths: Sequence[Path], weights: Sequence[float] | None = None, **more: Any) -> Settings:
    return draining.make(out, paths, weights, **{"samples_per_chunk": 4, "balance": 2, "micro_batch_size": 2, **more})


def drain(
    settings: Settings, start: Any = None, samples: int = 0, warnings: list[str] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yields (row, position after it) as the loop would, from a stream of so many samples on."""
    for taken in draining.take(settings, start, samples, warnings):
        assert taken.tokens == taken.row["length"]
        yield taken.row, taken.position


def check_every_place(settings: Settings) -> list[Any]:
    whole = list(drain(settings))
    rows = [row for row, _ in whole]
    for taken, (_, position) in enumerate(whole, 1):
        rest = list(drain(settings, position, taken))
        assert [row for row, _ in rest] == rows[taken:]
        # The same rows make the same positions, so seals come out the same too.
        assert [after for _, after in rest] == [after for _, after in whole[taken:]]
    return rows


@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 14), min_size=1, max_size=3),
    weighted=st.booleans(),
    ranks=st.integers(1, 3),
    transform=st.sampled_from([None, "twice", "some", "none", "five"]),
    bad=st.booleans(),
    seed=st.integers(0, 3),
)
def test_going_on_after_any_row(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    weighted: bool,
    ranks: int,
    transform: str | None,
    bad: bool,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    weights = [random.Random(seed).uniform(0.1, 2) for _ in counts] if weighted else None
    settings = make(
        directory / "out",
        write(directory, counts, bad),
        weights,
        samples_per_chunk=2,
        balance=ranks,
        seed=seed,
        transform=transform and f"{HERE}:{transform}",
        on_bad_row="skip",
    )
    rows = [row["id"] for row in check_every_place(settings)]
    ids = [[file, number] for file, count in enumerate(counts) for number in range(count)]
    if transform == "some":
        assert {tuple(found) for found in rows} <= {tuple(found) for found in ids}
    else:
        times = {None: 1, "twice": 2, "none": 0, "five": 5}[transform]
        assert sorted(rows) == sorted(ids * times)


def test_the_order_is_pinned(tmp_path: Path) -> None:
    rows = check_every_place(make(tmp_path / "out", write(tmp_path, [13]), seed=7))
    # Two ranks with chunks of four rows and micro batches of two: 8 + 1 tokens meet 7 + 5, and 7 + 7 meet 8 + 5. Of the
    # five rows at the end, which are dealt row by row, 5 + 3 meet 6 + 3.
    assert [row["length"] for row in rows] == [8, 1, 7, 7, 7, 5, 8, 5, 5, 6, 3, 3, 4]
    assert [row["id"][1] for row in rows] == [7, 2, 0, 5, 1, 3, 4, 6, 11, 8, 12, 10, 9]


def test_rows_that_fill_no_stripe_are_published_and_the_next_ones_begin_a_whole_one(tmp_path: Path) -> None:
    """A source that grows after its last rows were dealt: two chunks of four were begun with five rows."""
    paths = write(tmp_path, [5])
    settings = make(tmp_path / "out", paths)
    short = list(drain(settings))
    _, position = short[3]  # the first chunk was published
    write(tmp_path, [16])
    rest = list(drain(settings, position, 4))
    assert [row for row, _ in rest[:1]] == [row for row, _ in short[4:]]
    # In order up to the end of the stripe, then a stripe that is dealt.
    assert [row["id"][1] for row, _ in rest[1:4]] == [5, 6, 7]
    assert sorted(row["id"][1] for row, _ in rest[4:]) == list(range(8, 16))
    assert [row["id"][1] for row, _ in rest[4:]] != list(range(8, 16))
    for taken in range(1, len(rest)):
        assert [row for row, _ in drain(settings, rest[taken - 1][1], 4 + taken)] == [row for row, _ in rest[taken:]]


def test_rows_that_were_changed_since_are_refused(tmp_path: Path) -> None:
    """The order follows from every length of a stripe: one that changes where nothing was published moves the rest."""
    paths = write(tmp_path, [8])
    settings = make(tmp_path / "out", paths)
    _, position = list(drain(settings))[3]
    text = paths[0].read_bytes()
    paths[0].write_bytes(text.replace(b'"length":', b'"length":7'))
    with pytest.raises(SourceRefused):
        list(drain(settings, position, 4))


def test_going_on_in_the_middle_of_a_stripe_with_another_order_is_refused(tmp_path: Path) -> None:
    settings = make(tmp_path / "out", write(tmp_path, [8]))
    _, position = list(drain(settings))[3]
    for changed in ({"balance": 4}, {"micro_batch_size": 1}, {"cost_per_token_squared": 1.0}, {"seed": 1}):
        with pytest.raises(SettingInvalid, match="was") as refused:
            list(drain(make(tmp_path / "out", write(tmp_path, [8]), **changed), position, 4))
        assert refused.value.option in {"--balance", "--micro-batch-size", "--cost-per-token-squared", "--seed"}


def test_between_stripes_another_order_is_taken_with_a_warning(tmp_path: Path) -> None:
    settings = make(tmp_path / "out", write(tmp_path, [16]))
    *_, (_, position) = [pair for pair, _ in zip(drain(settings), range(8), strict=False)]
    warnings: list[str] = []
    changed = make(tmp_path / "out", write(tmp_path, [16]), micro_batch_size=1)
    rest = [row["id"][1] for row, _ in drain(changed, position, 8, warnings)]
    assert sorted(rest) == list(range(8, 16))
    assert warnings == [
        "from here on rows are made or ordered in another way than before: micro_batch_size (was 2, now 1)"
    ]


@pytest.mark.parametrize("workers", [2])
def test_workers_deal_the_same_rows(tmp_path: Path, workers: int) -> None:
    paths = write(tmp_path, [9, 4], bad=True)
    here = make(tmp_path / "out", paths, transform=f"{HERE}:some", on_bad_row="skip")
    there = make(tmp_path / "out", paths, transform=f"{HERE}:some", on_bad_row="skip", workers=workers)
    assert list(drain(there)) == list(drain(here))


@pytest.mark.parametrize(
    "row", [b'{"id":1}', b'{"length":-1}', b'{"length":"12"}', b'{"length":true}', b'{"length":4294967296}']
)
def test_a_row_without_a_length_is_a_bad_row(row: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(row + b"\n")
    with pytest.raises(RowInvalid, match="--length-field length: "):
        list(drain(make(tmp_path / "out", [path])))


def test_the_length_is_that_of_the_row_made(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":"ab","tokens":2}\n')
    settings = make(tmp_path / "out", [path], columns=(("length", "tokens"),))
    assert [row for row, _ in drain(settings)] == [{"length": 2}]
