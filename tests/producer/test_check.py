"""`check`: what a run would do, without doing any of it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lazyshard_producer.check import MAX_SHOWN, describe_run
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.configuration.settings import Limits, Settings, SourceSettings
from tests.harness.processes.producing import assert_one_line, plain_sources, rows


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(rows(0, 25))
    return tmp_path


def tree() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


ARGUMENTS = ["--source", "a.jsonl", "--out", "out", "--samples-per-chunk", "10"]


def test_a_run_from_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    before = tree()
    assert main(["check", *ARGUMENTS]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "stream    out: not there yet; 10 samples a chunk",
        "sources   1 source",
        "       1  a.jsonl, jsonl, 630 bytes",
        "rows      as they are",
        "bad rows  the first one ends the run",
        "limits    every chunk stays",
        "next      3 rows",
        '  a.jsonl:1  {"id":0,"text":"row 0"}',
        '  a.jsonl:2  {"id":1,"text":"row 1"}',
        '  a.jsonl:3  {"id":2,"text":"row 2"}',
    ]
    assert tree() == before


def test_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_bytes(rows(0, 25) + b"bad\n")
    assert main(["run", *ARGUMENTS]) == 3
    before = tree()
    capsys.readouterr()
    assert main(["check", *ARGUMENTS, "--rows", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == ("stream    out: holds 20 samples in 2 chunks; a run would go on after them, 10 samples a chunk")
    assert shown[-1] == '  a.jsonl:21  {"id":20,"text":"row 20"}'
    assert tree() == before


def test_a_stream_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *ARGUMENTS]) == 0
    capsys.readouterr()
    assert main(["check", *ARGUMENTS]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "stream    out: has ended with 25 samples in 3 chunks; a run would do nothing"
    assert shown[-1].startswith("limits")


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--rate", "0", "--shuffle", "-1"], 2, None),
        (["--transform", "nowhere:f"], 2, "--transform: importing nowhere raised ModuleNotFoundError"),
        (["--source", "bad.jsonl"], 3, "bad.jsonl:1: "),
        (["--source", "missing.jsonl"], 4, "missing.jsonl: expected a readable file"),
        (["--out", "a.jsonl"], 5, "a.jsonl: expected a directory"),
    ],
)
def test_what_would_end_a_run_ends_the_check(
    more: list[str], code: int, message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.jsonl").write_bytes(b"[1]\n")
    Path("a.jsonl").write_bytes(b"")
    before = tree()
    assert main(["check", *ARGUMENTS, *more]) == code
    err = capsys.readouterr().err
    if message is None:
        assert err.count("error: ") == 2
    else:
        assert_one_line(err, message)
    assert tree() == before


def test_another_chunk_size_than_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_bytes(rows(0, 25) + b"bad\n")
    assert main(["run", *ARGUMENTS]) == 3
    capsys.readouterr()
    assert main(["check", "--source", "a.jsonl", "--out", "out", "--samples-per-chunk", "5"]) == 5
    assert_one_line(capsys.readouterr().err, "10 samples per chunk, asked for 5")


def test_a_source_that_is_not_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_bytes(rows(0, 25) + b"bad\n")
    assert main(["run", *ARGUMENTS]) == 3
    Path("a.jsonl").write_bytes(rows(100, 130))
    capsys.readouterr()
    assert main(["check", *ARGUMENTS]) == 4
    assert_one_line(capsys.readouterr().err, "not the file whose rows are published")


def test_a_refused_row_is_shown_where_it_would_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_bytes(b'[1]\n{"id":1}\n')
    assert main(["check", *ARGUMENTS, "--on-bad-row", "quarantine"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].startswith("  a.jsonl:1  refused: ")
    assert shown[-1] == '  a.jsonl:2  {"id":1}'
    assert not Path("out").exists()


def test_rows_after_the_transform(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--transform", "tests.producer.recipes:twice", "--columns", "n=id", "--rows", "2"]
    assert main(["check", *ARGUMENTS, *more]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "rows      columns n=id; transform tests.producer.recipes:twice" in shown
    assert shown[-2:] == ['  a.jsonl:1  {"n":0}', '  a.jsonl:1  {"n":0}']


def test_a_configuration_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('out = "out"\nsamples_per_chunk = 10\n[[source]]\npath = "a.jsonl"\n')
    assert main(["check", "run.toml", "--rows", "0"]) == 0
    assert main(["check", "--config", "run.toml", "--rows", "0"]) == 0
    first, second = capsys.readouterr().out.split("stream")[1:]
    assert first == second
    assert main(["check", "run.toml", "--config", "run.toml"]) == 2
    assert_one_line(capsys.readouterr().err, "given twice")


def test_nothing_is_taken_from_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    # Nobody writes to it: whoever opened it would wait for ever.
    assert main(["check", "--source", "pipe", "--out", "out", "--samples-per-chunk", "10"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "next      not looked at: what is read from standard input or a pipe is gone"


FULL = Settings(
    sources=(
        SourceSettings(path="a.jsonl", weight=3.0),
        SourceSettings(path="in", weight=1.0, follow=True, finished_by="idle", idle_s=2.5),
    ),
    out="out",
    samples_per_chunk=1000,
    rate=2.5,
    columns=(("n", "id"), ("text", "text")),
    where="m:g",
    transform="m:f",
    workers=4,
    shuffle=10_000,
    seed=7,
    on_bad_row="skip",
    max_bad_rows=1000,
    limits=Limits(
        max_ahead=Amount(number=64, unit="chunks"),
        max_disk=5 * 10**11,
        min_free_disk=10**9,
        retain=100,
        consumers=("train", "eval"),
    ),
    metrics_port=9464,
)


def test_all_settings_are_told() -> None:
    os.mkdir("in")
    assert list(describe_run(FULL, 0)) == [
        "stream    out: not there yet; 1,000 samples a chunk",
        "sources   2 sources, mixed by weight",
        "       1  a.jsonl, jsonl, 630 bytes, 75.0% of the rows",
        "       2  in, follow, files *.jsonl, complete when they have not grown for 2.5 s, until _END is there, "
        "25.0% of the rows",
        "rows      columns n=id, text; where m:g; transform m:f in 4 workers; shuffled 10,000 at a time with seed 7; "
        "at most 2.5 a second",
        "bad rows  left out, 1,000 at the most",
        "limits    at most 64 chunks ahead of the slowest reader; at most 500.0 GB on disk; 1.0 GB stay free; chunks "
        "that no consumer needs are deleted, but for the last 100; none before train, eval have registered",
        "metrics   http://127.0.0.1:9464/metrics",
    ]


def test_rows_that_are_dealt_by_cost_are_told_with_how_many_are_held() -> None:
    os.mkdir("in")
    settings = replace(FULL, shuffle=0, balance=64, micro_batch_size=4, length_field="tokens", rate=None)
    assert (
        "rows      columns n=id, text; where m:g; transform m:f in 4 workers; dealt by cost to 64 ranks, 64,000 at a "
        "time, micro batches of 4, lengths in 'tokens'"
    ) in list(describe_run(settings, 0))


def test_one_consumer_has_to_register() -> None:
    os.mkdir("in")
    settings = replace(FULL, limits=Limits(retain=1, consumers=("train",)))
    assert list(describe_run(settings, 0))[-2] == (
        "limits    chunks that no consumer needs are deleted, but for the last one; none before train has registered"
    )


def test_of_many_sources_the_first_are_told() -> None:
    paths = [f"{number:02}.jsonl" for number in range(25)]
    for path in paths:
        Path(path).touch()
    settings = Settings(sources=plain_sources(paths), out="out", samples_per_chunk=10)
    shown = list(describe_run(settings, 0))
    assert shown[1] == "sources   25 sources, one after another"
    assert shown[21:23] == ["      20  19.jsonl, jsonl, 0 bytes", "     ...  and 5 more"]


def test_a_long_row_is_cut_and_a_strange_one_stays_on_its_line() -> None:
    line = json.dumps({"text": "\u2028" + "x" * 1000}, ensure_ascii=False).encode() + b"\n"
    Path("a.jsonl").write_bytes(line)
    settings = Settings(sources=plain_sources(["a.jsonl"]), out="out", samples_per_chunk=10)
    shown = list(describe_run(settings, 1))[-1]
    assert shown.startswith('  a.jsonl:1  {"text": "\\u2028xxx')
    assert shown.endswith(" ... (1,016 bytes)")
    assert len(shown) < MAX_SHOWN + 40
