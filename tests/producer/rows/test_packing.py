"""`--pack`: rows come out as packs, each once, the same ones wherever a run stopped; what fits into none is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.errors import RowInvalid
from lazyshard.format.names import seal_name
from lazyshard.format.row import encode_row
from lazyshard.format.seal import Seal
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.rows.measure import Measure
from tests.harness.processes.producing import run_arguments
from tests.producer.rows import draining
from tests.producer.rows.draining import drain, write_lengths

HERE = "tests.producer.recipes"


def write(directory: Path, *files: list[int]) -> list[Path]:
    return write_lengths(directory, files)


def make(directory: Path, paths: list[Path], **more: Any) -> Settings:
    return draining.make(directory / "out", paths, more.pop("weights", None), **{"pack": 10, **more})


def packs_of(rows: list[Any]) -> list[list[list[int]]]:
    return [[row["id"] for row in pack["pack"]] for pack in rows]


lengths_of_rows = st.lists(st.integers(1, 10), max_size=12)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(lengths_of_rows, min_size=1, max_size=3),
    buffer=st.sampled_from([1, 5, 100]),
    transform=st.sampled_from([None, "twice"]),
    weighted=st.booleans(),
)
def test_going_on_after_any_pack(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], buffer: int, transform: str | None, weighted: bool
) -> None:
    directory = tmp_path_factory.mktemp("run")
    more: dict[str, Any] = {"pack_buffer": buffer, "transform": transform and f"{HERE}:{transform}"}
    more["weights"] = [1.0 + file for file in range(len(files))] if weighted else None
    settings = make(directory, write(directory, *files), **more)
    whole = list(drain(settings))
    found = [tuple(one) for pack in packs_of([row for row, _ in whole]) for one in pack]
    there = [(file, number) for file, lengths in enumerate(files) for number in range(len(lengths))]
    assert sorted(found) == sorted(there * (2 if transform else 1))
    for row, _ in whole:
        assert row["lengths"] == [one["length"] for one in row["pack"]]
        assert sum(row["lengths"]) <= 10
    for taken, (_, position) in enumerate(whole, 1):
        assert list(drain(settings, position)) == whole[taken:]


def test_packs_are_made_of_one_buffer_after_the_other(tmp_path: Path) -> None:
    settings = make(tmp_path, write(tmp_path, [6, 5, 4, 5, 4, 9]), pack_buffer=4)
    assert packs_of([row for row, _ in drain(settings)]) == [[[0, 0], [0, 2]], [[0, 1], [0, 3]], [[0, 4]], [[0, 5]]]


def test_a_buffer_that_is_begun_is_packed_as_before_though_its_file_has_grown(tmp_path: Path) -> None:
    paths = write(tmp_path, [6, 5, 4])
    settings = make(tmp_path, paths)
    first, second = drain(settings)
    with paths[0].open("ab") as file:
        file.write(encode_row({"id": [0, 3], "length": 5}))
    assert packs_of([first[0]]) == [[[0, 0], [0, 2]]]
    assert [row for row, _ in drain(settings, first[1])] == [
        second[0],
        {"pack": [{"id": [0, 3], "length": 5}], "lengths": [5]},
    ]


@pytest.mark.parametrize("changed", [{"pack": 11}, {"pack_buffer": 4}, {"pack": 0}])
def test_a_buffer_that_is_begun_is_not_packed_otherwise(tmp_path: Path, changed: dict[str, int]) -> None:
    paths = write(tmp_path, [6, 5, 4])
    (_, position), *_ = drain(make(tmp_path, paths))
    with pytest.raises(SettingInvalid, match="made in another way"):
        list(drain(make(tmp_path, paths, **changed), position))


@pytest.mark.parametrize("before", [0, 10])
def test_a_stream_holds_packs_or_rows_and_never_both(tmp_path: Path, before: int) -> None:
    paths = write(tmp_path, [6, 4])
    *_, (_, position) = drain(make(tmp_path, paths, pack=before))
    was = "packs" if before else "rows"
    with pytest.raises(SettingInvalid, match=f"--pack: the stream holds {was}"):
        list(drain(make(tmp_path, paths, pack=10 - before), position))


def test_another_capacity_between_two_buffers_is_told(tmp_path: Path) -> None:
    paths, warnings = write(tmp_path, [6, 4]), list[str]()
    *_, (_, position) = drain(make(tmp_path, paths))
    paths += [tmp_path / "1.jsonl"]
    paths[1].write_bytes(encode_row({"id": [1, 0], "length": 12}))
    found = [row for row, _ in drain(make(tmp_path, paths, pack=12), position, warnings=warnings)]
    assert packs_of(found) == [[[1, 0]]]
    assert any("pack (was 10, now 12)" in text for text in warnings)


def test_lengths_of_packs_are_in_the_seals(tmp_path: Path) -> None:
    lengths = [6, 5, 4, 5, 4, 9]
    paths, out = write(tmp_path, lengths), tmp_path / "out"
    assert main(run_arguments(out, paths, 2, "--pack", 10, "--pack-buffer", 4, "--no-progress")) == 0
    seals = [Seal.decode((out / seal_name(chunk)).read_bytes(), chunk) for chunk in range(2)]
    assert [None if seal.tokens is None else seal.tokens.tolist() for seal in seals] == [[10, 10], [4, 9]]
    rows = list(StreamReader(out))
    assert [sum(row["lengths"]) for row in rows] == [10, 10, 4, 9]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "--pack: the tokens of a row are a whole number from 1 under 'length', found none"),
        ({"length": "7"}, "--pack: the tokens of a row are a whole number from 1 under 'length', found '7'"),
        ({"length": 7.0}, "--pack: the tokens of a row are a whole number from 1 under 'length', found 7.0"),
        ({"length": True}, "--pack: the tokens of a row are a whole number from 1 under 'length', found True"),
        ({"length": 0}, "--pack: the tokens of a row are a whole number from 1 under 'length', found 0"),
        ({"length": 2, "input_ids": [1, 2, 3]}, "--pack: 2 tokens under 'length', but 3 input_ids"),
        ({"length": 11}, "--pack: 11 tokens under 'length', more than the 10 of a pack"),
    ],
)
def test_a_row_that_goes_into_no_pack_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], reason: str
) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_bytes(
        encode_row({"id": 0, "length": 4}) + encode_row({"id": 1, **row}) + encode_row({"id": 2, "length": 6})
    )
    arguments = run_arguments(out, [path], 10, "--pack", 10, "--no-progress")
    assert main(arguments) == 3
    assert f"{path}:2: {reason}. Mend the row" in capsys.readouterr().err
    assert main([*arguments, "--on-bad-row", "quarantine"]) == 0
    assert [[one["id"] for one in pack["pack"]] for pack in StreamReader(out)] == [[0, 2]]
    (entry,) = map(json.loads, (out / "quarantine.jsonl").read_bytes().splitlines())
    assert (entry["line"], entry["reason"]) == (2, reason)


def test_the_length_may_have_another_name_and_come_from_a_transform(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"tokens": 4}) + encode_row({"tokens": 6}))
    for more in ({"length_field": "tokens"}, {"columns": (("length", "tokens"),)}):
        (found, _), *rest = drain(make(tmp_path, [path], **more))
        assert (found["lengths"], rest) == ([4, 6], [])


def test_a_row_with_fewer_token_ids_than_tokens_has_images() -> None:
    row = {"length": 9, "input_ids": [1, 2, 3]}
    assert Measure("length", 10).tokens(row, encode_row(row)) == 9


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"length": 0}, "--length-field length: expected a whole number of tokens from 1 to 4294967295, found 0"),
        ({"length": 1, "input_ids": [7, 7]}, "--balance: 1 tokens under 'length', but 2 input_ids"),
    ],
)
def test_a_row_without_a_length_that_is_true_is_not_dealt_by_cost(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowInvalid) as caught:
        Measure("length", 0).tokens(row, encode_row(row))
    assert caught.value.reason == reason


@pytest.mark.parametrize(("levels", "fits"), [(1022, True), (1023, False)])
def test_a_row_is_nested_no_deeper_than_a_pack_can_hold(levels: int, fits: bool) -> None:
    line = b'{"length":1,"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}\n"
    measure = Measure("length", 10)
    if fits:
        assert measure.tokens({"length": 1}, line) == 1
    else:
        with pytest.raises(RowInvalid, match="nested more than 1022 levels deep"):
            measure.tokens({"length": 1}, line)


def test_check_shows_the_packs_that_a_run_would_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, [6, 5, 4])
    assert main(["check", *run_arguments(tmp_path / "out", paths, 10, "--pack", 10)[1:]]) == 0
    shown = capsys.readouterr().out
    assert "packed to 10 tokens by 'length', among 10,000 rows at a time" in shown
    assert f'{paths[0]}:1  {{"pack":[' in shown


def test_workers_pack_as_one_process_does(tmp_path: Path) -> None:
    paths = write(tmp_path, [6, 5, 4, 5, 4, 9, 1, 2])
    here = make(tmp_path, paths, transform=f"{HERE}:twice", pack_buffer=3)
    there = make(tmp_path, paths, transform=f"{HERE}:twice", pack_buffer=3, workers=1)
    assert list(itertools.islice(drain(there), 99)) == list(drain(here))
