"""`--encode`: what is published, in worker processes and out of them, and what is refused. Kills: test_exactly_once."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lazyshard import StreamReader
from lazyshard_producer.cli import main
from tests.harness.processes.producing import assert_one_line, lengths, refused, run_arguments
from tests.stream.streams import seal

HERE = "tests.producer.encoders"
ROWS = 60
PER_CHUNK = 7
SKIP = ("--on-bad-row", "skip")
GOOD = [number for number in range(ROWS) if number % 10 != 7]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [{"id": number, "text": chr(97 + number % 26) * (number % 9)} for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


def encode(source: Path, *options: object, name: str = "tokens", out: str = "out") -> int:
    more = ("--no-progress", "--encode", f"{HERE}:{name}", *options)
    return main(run_arguments(source.parent / out, [source], PER_CHUNK, *more))


@pytest.mark.parametrize("shuffle", [(), ("--shuffle", 16)])
def test_rows_hold_arrays_and_seals_the_lengths(source: Path, tmp_path: Path, shuffle: tuple[object, ...]) -> None:
    assert encode(source, *SKIP, *shuffle) == 0
    reader = StreamReader(tmp_path / "out")
    rows = [reader.read(sample) for sample in range(len(GOOD))]
    ids = [row["id"] for row in rows]
    assert (sorted(ids), ids == GOOD) == (GOOD, not shuffle)
    for row in rows:
        text = chr(97 + row["id"] % 26) * (row["id"] % 9)
        assert row["input_ids"].dtype == np.int32
        assert row["input_ids"].tolist() == list(text.encode())
        assert row["mask"].tolist() == [letter > 100 for letter in text.encode()]
    assert lengths(tmp_path / "out") == [number % 9 for number in ids]
    facts = {"vocabulary": "bytes", "size": 256, "kind": "function", "function": f"{HERE}:tokens"}
    assert reader.encoding == facts


def test_worker_processes_encode(source: Path, tmp_path: Path) -> None:
    assert encode(source, "--workers", 1, name="pid") == 0
    assert StreamReader(tmp_path / "out").read(0)["pid"] != os.getpid()


def test_encoder_gets_what_a_transform_makes_although_it_is_no_json(source: Path, tmp_path: Path) -> None:
    assert encode(source, "--transform", f"{HERE}:features", name="nested") == 0
    row = StreamReader(tmp_path / "out").read(3)
    assert row["features"]["mel"].tolist() == [[3.0] * 3] * 2
    assert row["features"]["mel"].dtype == np.float16


def test_lengths_that_are_not_told_are_not_in_the_seals(source: Path, tmp_path: Path) -> None:
    assert encode(source, name="without_length") == 0
    assert seal(tmp_path / "out", 0).tokens is None


def test_bad_row_ends_a_run_or_is_quarantined(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert encode(source) == 3
    assert_one_line(capsys.readouterr().err, f"{source}:8: --encode raised ValueError")
    assert encode(source, "--on-bad-row", "quarantine") == 0
    assert [one["line"] for one in refused(tmp_path / "out")] == [8, 18, 28, 38, 48, 58]
    assert json.loads(refused(tmp_path / "out")[0]["row"])["id"] == 7


def test_going_on_with_another_encoder_is_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Row 7 ends it, behind the first chunk.
    assert encode(source) == 3
    arguments = run_arguments(source.parent / "out", [source], PER_CHUNK)
    capsys.readouterr()
    assert encode(source, name="otherwise") == 5
    assert_one_line(capsys.readouterr().err, "size is 256 there and 512 here")
    assert main([*arguments, "--no-progress"]) == 5
    assert main(["check", *arguments[1:], "--encode", f"{HERE}:otherwise"]) == 5
    assert encode(source, *SKIP) == 0
