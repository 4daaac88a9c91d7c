"""`check`: what a run would do, without doing any of it."""

import json
import os
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.run import MAX_SHOWN
from tests.harness.processes.producing import rows

ARGUMENTS = ["--source", "a.jsonl", "--out", "out", "--samples-per-chunk", "10"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(rows(0, 25))
    Path("in").mkdir()
    return tmp_path


def tree() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def begun() -> None:
    """A stream of two chunks, behind which the source has a bad row."""
    Path("a.jsonl").write_bytes(rows(0, 25) + b"bad\n")
    assert main(["run", *ARGUMENTS]) == 3


def test_a_run_from_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    before = tree()
    assert main(["check", *ARGUMENTS]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "stream    out: does not exist yet; 10 samples per chunk",
        "sources   1 source",
        "       1  a.jsonl, jsonl, 630 bytes",
        "run       defaults",
        "rows      defaults",
        "encoding  defaults",
        "limits    defaults",
        "next      3 rows",
        '  a.jsonl:1  {"id":0,"text":"row 0"}',
        '  a.jsonl:2  {"id":1,"text":"row 1"}',
        '  a.jsonl:3  {"id":2,"text":"row 2"}',
    ]
    assert tree() == before


def test_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    begun()
    before = tree()
    capsys.readouterr()
    assert main(["check", *ARGUMENTS, "--rows", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("stream    out: holds 20 samples in 2 chunks; ")
    assert shown[-1] == '  a.jsonl:21  {"id":20,"text":"row 20"}'
    assert tree() == before


def test_what_would_end_a_run_ends_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.jsonl").write_bytes(b"[1]\n")
    Path("a.jsonl").write_bytes(b"")
    before = tree()
    for more, code, messages in (
        (["--rate", "0", "--shuffle", "-1"], 2, ["--rate", "--shuffle"]),
        (["--transform", "nowhere:f"], 2, ["--transform: "]),
        (["--source", "bad.jsonl"], 3, ["bad.jsonl:1: "]),
        (["--source", "missing.jsonl"], 4, ["missing.jsonl: "]),
        (["--out", "a.jsonl"], 5, ["a.jsonl: "]),
    ):
        assert main(["check", *ARGUMENTS, *more]) == code
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert [message in error for message, error in zip(messages, errors, strict=True)] == [True] * len(messages)
        assert tree() == before


def test_a_configuration_file_is_given_once() -> None:
    Path("run.toml").write_text('out = "out"\nsamples_per_chunk = 10\n[[source]]\npath = "a.jsonl"\n')
    assert main(["check", "run.toml"]) == 0
    assert main(["check", "--config", "run.toml"]) == 0
    assert main(["check", "run.toml", "--config", "run.toml"]) == 2


def test_nothing_is_taken_from_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    # Nobody writes to it: whoever opened it would wait for ever.
    assert main(["check", "--source", "pipe", "--out", "out", "--samples-per-chunk", "10"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("next      not read: ")


COUNTED = "tests.producer.recipes:counted"
TWICE = "tests.producer.recipes:twice"
MIX = ["--weight", "3", "--follow", "in", "--weight", "1", "--rows", "0", "--finished-by", "idle"]
LIMITS = ["--max-disk", "500GB", "--min-free-disk", "1GB", "--retain", "100", "--consumers", "train,eval"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--transform", TWICE, "--workers", "2"], [f"transform = {TWICE}; workers = 2", '{"id":0,"length":6']),
        (["--columns", "n=id,length"], ["columns = n=id, length=length", '{"n":0,"length":6}']),
        (["--encode", COUNTED], [f"encode = {COUNTED}", '{"id":0,"copy":null,"length":6,"input_ids":{"$array":']),
        (["--pack", "10", "--balance", "2", "--pack-buffer-bytes", "2kB"], ["balance = 2; pack = 10; pack_buffer_byt"]),
        (["--split", "4", "--split-bos", "0"], ["split = 4; split_bos = 0", '{"input_ids":[0,10,11,12],"position_i']),
        (["--shuffle", "5000", "--seed", "7", "--rate", "2.5"], ["rate = 2.5", "shuffle = 5000; seed = 7"]),
        (["--on-bad-row", "skip", "--metrics-port", "9464"], ["on_bad_row = skip; max_bad_rows = 1000", "port = 9464"]),
        (LIMITS, ["max_disk = 500.0 GB; min_free_disk = 1.0 GB; retain = 100; consumers = train, eval"]),
        (
            [*MIX, "--idle-seconds", "2.5"],
            ["2 sources, mixed by weight", "weight = 3.0", "  in, follow, weight = 1.0, fi"],
        ),
    ],
)
def test_settings_are_told_and_rows_shown(more: list[str], told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_bytes(
        b'{"id":0,"length":6,"input_ids":[10,11,12,13,14,15]}\n{"id":1,"length":2,"input_ids":[16,17]}\n'
    )
    assert main(["check", *ARGUMENTS, *more]) == 0
    shown = capsys.readouterr().out
    assert [text for text in told if text not in shown] == []


def test_of_many_sources_the_first_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"{number:02}.jsonl" for number in range(25)]
    for path in paths:
        Path(path).touch()
    sources = [part for path in paths for part in ("--source", path)]
    assert main(["check", *sources, "--out", "out", "--samples-per-chunk", "10"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "sources   25 sources, one after another"
    assert shown[21:23] == ["      20  19.jsonl, jsonl, 0 bytes", "     ...  and 5 more"]


def test_a_long_row_is_cut_a_strange_one_stays_on_its_line_and_a_refused_one_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.jsonl").write_text(
        "[1]\n" + json.dumps({"text": "\u2028" + "x" * 1000}, ensure_ascii=False) + "\n", "utf-8"
    )
    assert main(["check", *ARGUMENTS, "--on-bad-row", "quarantine"]) == 0
    refused, shown = capsys.readouterr().out.splitlines()[-2:]
    assert refused.startswith("  a.jsonl:1  refused: ")
    assert shown.startswith('  a.jsonl:2  {"text": "\\u2028xxx')
    assert shown.endswith(" ... (1,016 bytes)")
    assert len(shown) < MAX_SHOWN + 40
