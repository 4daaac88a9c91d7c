"""`--encode`: what is published, in worker processes and out of them, what is refused, and what outlives a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import StreamReader
from lazyshard.format.batch import EncodedRow
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.row_settings import EncodingSettings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.rows.encoding import load_encoder
from lazyshard_producer.rows.recipe import Maker, Recipe
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, run_arguments

HERE = "tests.producer.encoders"
ROWS = 60
PER_CHUNK = 7


def write_rows(path: Path, rows: int = ROWS) -> Path:
    lines = [{"id": number, "text": chr(97 + number % 26) * (number % 9)} for number in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def encode(folder: Path, *options: object, name: str = "tokens", out: str = "out") -> int:
    source = folder / "rows.jsonl"
    if not source.exists():
        write_rows(source)
    return main(
        [
            *run_arguments(folder / out, [source], PER_CHUNK),
            "--no-progress",
            "--encode",
            f"{HERE}:{name}",
            *map(str, options),
        ]
    )


def files(out: Path) -> dict[str, Any]:
    """All that is published, of seals what does not tell the time."""
    found: dict[str, Any] = {
        path.name: path.read_bytes() for path in out.glob("chunk_*") if path.suffix != ".completed"
    }
    for path in out.glob("*.completed"):
        values = json.loads(path.read_bytes())
        values.pop("sealed_at")
        found[path.name] = values
    return found


def test_rows_hold_arrays_and_seals_the_lengths(tmp_path: Path) -> None:
    assert encode(tmp_path, "--on-bad-row", "skip") == 0
    reader = StreamReader(tmp_path / "out")
    expected = [number for number in range(ROWS) if number % 10 != 7]
    rows = [reader.read(sample) for sample in range(len(expected))]
    assert [row["id"] for row in rows] == expected
    for row in rows:
        text = chr(97 + row["id"] % 26) * (row["id"] % 9)
        assert row["input_ids"].dtype == np.int32
        assert row["input_ids"].tolist() == list(text.encode())
        assert row["mask"].tolist() == [letter > 100 for letter in text.encode()]
    path = tmp_path / "out" / seal_name(1)
    tokens = Seal.decode(path.read_bytes(), 1).tokens
    assert tokens is not None
    assert tokens.tolist() == [number % 9 for number in expected[7:14]]
    assert reader.encoding == {
        "vocabulary": "bytes",
        "size": 256,
        "kind": "function",
        "function": f"{HERE}:tokens",
    }


def test_worker_processes_publish_the_same_bytes(tmp_path: Path) -> None:
    assert encode(tmp_path, "--on-bad-row", "skip", out="here") == 0
    assert encode(tmp_path, "--on-bad-row", "skip", "--workers", 2, out="there") == 0
    assert files(tmp_path / "here") == files(tmp_path / "there")
    assert encode(tmp_path, "--workers", 1, name="pid", out="pids") == 0
    assert StreamReader(tmp_path / "pids").read(0)["pid"] != os.getpid()


def test_encoder_gets_what_a_transform_makes_although_it_is_no_json(tmp_path: Path) -> None:
    assert encode(tmp_path, "--transform", f"{HERE}:features", name="nested") == 0
    row = StreamReader(tmp_path / "out").read(3)
    assert row["features"]["mel"].tolist() == [[3.0] * 3] * 2
    assert row["features"]["mel"].dtype == np.float16


def test_lengths_that_are_not_told_are_not_in_the_seals(tmp_path: Path) -> None:
    assert encode(tmp_path, name="without_length") == 0
    assert Seal.decode((tmp_path / "out" / seal_name(0)).read_bytes(), 0).tokens is None


def test_shuffled_rows_keep_their_arrays_and_lengths(tmp_path: Path) -> None:
    assert encode(tmp_path, "--on-bad-row", "skip", "--shuffle", 16) == 0
    reader = StreamReader(tmp_path / "out")
    rows = [reader.read(sample) for sample in range(54)]
    assert sorted(row["id"] for row in rows) == [number for number in range(ROWS) if number % 10 != 7]
    assert all(len(row["input_ids"]) == row["length"] == row["id"] % 9 for row in rows)


def test_bad_row_ends_the_run_with_its_place_or_is_quarantined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert encode(tmp_path) == 3
    assert_one_line(capsys.readouterr().err, "rows.jsonl:8: --encode raised ValueError: seven (encoders.py:")
    assert encode(tmp_path, "--on-bad-row", "quarantine") == 0
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_bytes().splitlines()]
    assert [one["line"] for one in quarantined] == [8, 18, 28, 38, 48, 58]
    assert json.loads(quarantined[0]["row"])["id"] == 7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("number", "--encode returned int 3, expected a dict"),
        ("text_array", "--encode made what is no row: expected an array of bool"),
        (
            "left_over",
            "--encode made what is no row: cannot be written as JSON: Type is not JSON serializable: numpy.float32 "
            "under 'scores.best[1]'; a row holds what JSON has, and numpy arrays: convert it, with .item()",
        ),
        ("endless", "--encode returned a length of -1, expected one from 0 to 4294967295"),
        ("too_short", "--encode returned a length of 2, but 3 input_ids"),
        ("too_short_array", "--encode returned a length of 2, but 3 input_ids"),
    ],
)
def test_what_cannot_be_published_is_refused(name: str, reason: str) -> None:
    made = Maker(Recipe(encoding=EncodingSettings(encode=f"{HERE}:{name}"))).make(b'{"id":1}', 0)
    assert made.refused is not None
    assert str(made.refused.reason).startswith(reason)


def test_row_is_no_longer_than_allowed_with_its_arrays() -> None:
    recipe = Recipe(encoding=EncodingSettings(encode=f"{HERE}:without_length"), max_row_bytes=8000)
    made = Maker(recipe).make(b'{"id":1001}', 0)
    assert made.refused is not None
    assert str(made.refused.reason).startswith("--encode made a row of 8061 bytes, longer than the 8000 bytes of")
    (row,) = Maker(recipe).make(b'{"id":2}', 0).lines
    assert row == EncodedRow(b'{"id":2,"input_ids":{"$array":["int64",[2],0]}}\n', bytes(8) + b"\1" + bytes(7), None)


def test_going_on_with_another_encoder_is_refused_naming_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Row 7 ends it, behind the first chunk.
    assert encode(tmp_path) == 3
    arguments = run_arguments(tmp_path / "out", [tmp_path / "rows.jsonl"], PER_CHUNK)
    capsys.readouterr()
    assert encode(tmp_path, name="otherwise") == 5
    assert_one_line(capsys.readouterr().err, "size is 256 there and 512 here", "take another directory")
    assert main([*arguments, "--no-progress"]) == 5
    assert_one_line(capsys.readouterr().err, "its rows are encoded, and those that are to come are not")
    assert main(["check", *arguments[1:], "--encode", f"{HERE}:otherwise"]) == 5
    assert_one_line(capsys.readouterr().err, "size is 256 there and 512 here")
    assert encode(tmp_path, "--on-bad-row", "skip") == 0


def test_check_shows_the_first_rows_as_they_would_be_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl")
    arguments = run_arguments(tmp_path / "out", [source], PER_CHUNK, "--encode", f"{HERE}:tokens")
    assert main(["check", "--rows", "2", *arguments[1:]]) == 0
    shown = capsys.readouterr().out
    assert f"encoded by {HERE}:tokens" in shown
    assert (
        '{"id":1,"copy":null,"length":1,"input_ids":{"$array":["int32",[1],0]},"mask":{"$array":["bool",[1],8]}}'
        in shown
    )


def test_ended_stream_whose_end_was_not_told_is_completed(tmp_path: Path) -> None:
    assert encode(tmp_path, "--on-bad-row", "skip") == 0
    (tmp_path / "out" / "head.json").unlink()
    assert encode(tmp_path, "--on-bad-row", "skip") == 0
    assert json.loads((tmp_path / "out" / "head.json").read_bytes())["ended"] is True


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{HERE}:missing", "has no missing"),
        (f"{HERE}:broken", r"the attribute fingerprint of \S+:broken is .*, got \[1, 2\] \(list\) under 'of'"),
        (
            f"{HERE}:takes_our_name",
            "its fingerprint has a fact 'kind', which lazyshard tells itself: give yours another",
        ),
        (f"{HERE.replace('.', '/')}.py:missing", f"a module is named without .py: is {HERE}:missing meant?"),
        (f"{HERE}:undescribed", "its fingerprint is a dict of plain values, got str 'v1'"),
    ],
)
def test_encoder_that_cannot_be_had_is_a_setting_that_cannot_be(name: str, text: str) -> None:
    with pytest.raises(SettingInvalid, match=text):
        load_encoder(EncodingSettings(encode=name))


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_again_and_again_it_publishes_the_same_bytes(workers: int, nursery: Commands, tmp_path: Path) -> None:
    """A transform makes several rows of one, so that chunks end in the middle of them."""
    source = write_rows(tmp_path / "rows.jsonl")
    options = ["--encode", f"{HERE}:tokens", "--transform", "tests.harness.scenes.rows:thirds"]
    options += ["--on-bad-row", "quarantine", "--no-progress"]
    whole = run_arguments(tmp_path / "whole", [source], PER_CHUNK, *options)
    assert nursery.run(*whole)[0] == 0
    killed = run_arguments(tmp_path / "out", [source], PER_CHUNK, *options, "--workers", workers)
    if not workers:
        del killed[-2:]
    kills = 0
    for kill_at in (30, 41, 53, 60, 71, 47, 38):
        status, said = nursery.run(*killed, kill_at=kill_at, when=("before", "after")[kills % 2])
        if status == 0:
            break
        assert status == -signal.SIGKILL, said
        kills += 1
    assert kills >= 4
    status, said = nursery.run(*killed)
    assert status == 0, said
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert {chunk_name(0), arrays_name(0), seal_name(0)} <= files(tmp_path / "out").keys()
