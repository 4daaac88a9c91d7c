"""`check`: what a run would do; and what a run says of a stream that has ended, or into which nothing came."""

import gzip
import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lazyshard import StreamReader
from lazyshard.format.records import End
from lazyshard_producer.cli import main
from lazyshard_producer.run import MAX_SHOWN
from tests.harness.processes.producing import head, refused, rows, run_arguments
from tests.producer.commands import Fails, snapshot
from tests.producer.following.followed import append
from tests.stream.streams import produce as produced

Check = Callable[..., list[str]]
ARGUMENTS = ["--source", "a.jsonl", "--out", "out", "--samples-per-chunk", "10"]
RECIPES = "tests.producer.recipes"
ASKED = ("--pack", 8, "--encode", f"{RECIPES}:as_told")
COUNTED = "tests.producer.recipes:counted"
TWICE = "tests.producer.recipes:twice"
MIX = ["--weight", "3", "--follow", "in", "--weight", "1", "--rows", "0", "--finished-by", "idle"]
LIMITS = ["--max-disk", "500GB", "--min-free-disk", "1GB", "--retain", "100", "--consumers", "train,eval"]


@pytest.fixture
def check(here: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs `check`, which changes nothing; returns the lines that it prints, or those of its errors."""

    def run(*more: str, given: Sequence[str] = ARGUMENTS, code: int = 0) -> list[str]:
        before = snapshot(Path())
        capsys.readouterr()
        assert main(["check", *given, *more]) == code
        assert snapshot(Path()) == before
        printed, said = capsys.readouterr()
        assert code != 0 or said == ""
        return [line for line in said.splitlines() if "error: " in line] if code else printed.splitlines()

    (here / "a.jsonl").write_bytes(rows(0, 25))
    (here / "in").mkdir()
    return run


def test_a_run_from_its_start(check: Check) -> None:
    shown = check()
    assert shown[0] == "stream    out: does not exist yet; 10 samples per chunk"
    assert shown[2] == "       1  a.jsonl, jsonl, 630 bytes"
    assert shown[-3:] == [f'  a.jsonl:{line}  {{"id":{line - 1},"text":"row {line - 1}"}}' for line in (1, 2, 3)]


def test_a_run_that_goes_on(check: Check) -> None:
    Path("a.jsonl").write_bytes(rows(0, 25) + b"bad\n")
    assert main(["run", *ARGUMENTS]) == 3
    shown = check("--rows", "1")
    assert shown[0].startswith("stream    out: holds 20 samples in 2 chunks; ")
    assert shown[-1] == '  a.jsonl:21  {"id":20,"text":"row 20"}'


def test_what_would_end_a_run_ends_the_check(check: Check) -> None:
    Path("bad.jsonl").write_bytes(b"[1]\n")
    Path("a.jsonl").write_bytes(b"")
    for more, code, messages in (
        (["--rate", "0", "--shuffle", "-1"], 2, ["--rate", "--shuffle"]),
        (["--transform", "nowhere:f"], 2, ["--transform: "]),
        (["--source", "bad.jsonl"], 3, ["bad.jsonl:1: "]),
        (["--source", "missing.jsonl"], 4, ["missing.jsonl: "]),
        (["--out", "a.jsonl"], 5, ["a.jsonl: "]),
    ):
        errors = check(*more, code=code)
        assert [message in error for message, error in zip(messages, errors, strict=True)] == [True] * len(messages)


def test_a_configuration_file_is_given_once(check: Check) -> None:
    Path("run.toml").write_text('out = "out"\nsamples_per_chunk = 10\n[[source]]\npath = "a.jsonl"\n')
    check(given=["run.toml"])
    check(given=["--config", "run.toml"])
    check(given=["run.toml", "--config", "run.toml"], code=2)


def test_nothing_is_taken_from_a_pipe(check: Check) -> None:
    os.mkfifo("pipe")
    # Nobody writes to it: whoever opened it would wait for ever.
    assert check(given=["--source", "pipe", *ARGUMENTS[2:]])[-1].startswith("next      not read: ")


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
def test_settings_are_told_and_rows_shown(more: list[str], told: list[str], check: Check) -> None:
    Path("a.jsonl").write_bytes(
        b'{"id":0,"length":6,"input_ids":[10,11,12,13,14,15]}\n{"id":1,"length":2,"input_ids":[16,17]}\n'
    )
    shown = "\n".join(check(*more))
    assert [text for text in told if text not in shown] == []


def test_of_many_sources_the_first_are_told(check: Check) -> None:
    paths = [f"{number:02}.jsonl" for number in range(25)]
    for path in paths:
        Path(path).touch()
    shown = check(given=["--source", *paths, *ARGUMENTS[2:]])
    assert shown[1] == "sources   25 sources, one after another"
    assert shown[21:23] == ["      20  19.jsonl, jsonl, 0 bytes", "     ...  and 5 more"]


def test_a_long_row_is_cut_a_strange_one_stays_on_its_line_and_a_refused_one_is_told(check: Check) -> None:
    Path("a.jsonl").write_text('[1]\n{"text": "\u2028' + "x" * 1000 + '"}\n', "utf-8")
    refused, shown = check("--on-bad-row", "quarantine")[-2:]
    assert refused.startswith("  a.jsonl:1  refused: ")
    assert shown.startswith('  a.jsonl:2  {"text": "\\u2028xxx')
    assert shown.endswith(" ... (1,016 bytes)")
    assert len(shown) < MAX_SHOWN + 40


@pytest.fixture
def data(here: Path) -> Path:
    path = here / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": number, "length": 1 + number % 4}) + "\n" for number in range(20)))
    return path


def asked(data: Path, *options: object, command: str = "run", out: str = "out") -> list[str]:
    arguments = run_arguments(data.parent / out, [data], 4, *options)
    return [command, *arguments[1:], *(["--no-progress"] if command == "run" else [])]


def produce(data: Path, *options: object, **more: str) -> int:
    return main(asked(data, *options, **more))


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_stream_without_a_good_row(data: Path, policy: str, out: Path, fails: Fails) -> None:
    good = data.read_bytes()
    data.write_bytes(good.replace(b'"length"', b'"tokens"'))
    options = ("--pack", 8, "--on-bad-row", policy)
    for _ in range(2):
        fails(asked(data, *options), 3, "all 20 rows were refused", f"{data}:1: --pack: ")
    assert not (out / "stream.end").exists()
    assert head(out)["state"] == "failed"
    assert policy == "skip" or len(refused(out)) == 20
    data.write_bytes(good)
    assert produce(data, *options) == 0
    assert sum(len(row["pack"]) for row in StreamReader(out)) == 20
    assert policy == "skip" or refused(out) == []


def test_what_a_filter_leaves_out_is_told(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, none = data.read_text(), ("--transform", f"{RECIPES}:none")
    for out, text, options, code, said in (
        ("none", good, none, 0, "left out all of 20 rows"),
        ("some", good.splitlines()[0] + "\nno row\n", none, 3, "of 2 rows 1 were refused"),
        ("one", "no row\n", (), 3, "the only row was refused"),
    ):
        data.write_text(text)
        assert produce(data, *options, "--on-bad-row", "skip", out=out) == code
        err = capsys.readouterr().err
        assert said in err
        assert ("left out all" in err) == (out == "none")


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (("--pack", 9, *ASKED[2:]), 2, "pack (was 8, now 9)"),
        (ASKED[2:], 2, "pack (was 8, now None), length_field (was 'length', now None)"),
        ((*ASKED, "--balance", 2), 2, "balance (was None, now 2)"),
        ((*ASKED, "--samples-per-chunk", 5), 5, "got 5. Use 4"),
        (("--pack", 8), 5, "its rows are encoded"),
        (("--pack", 8, "--encode", f"{RECIPES}:counted"), 5, f"function is '{RECIPES}:as_told' there and"),
    ],
)
def test_ended_stream_that_was_made_otherwise_is_refused(
    data: Path, options: tuple[object, ...], code: int, reason: str, fails: Fails
) -> None:
    assert produce(data, *ASKED) == 0
    for command in ("run", "check"):
        assert "already ended" not in fails(asked(data, *options, command=command), code, reason)
    assert produce(data, *ASKED, command="check") == 0


def test_weights_and_sources_after_end(data: Path, out: Path, fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.jsonl").write_bytes(ROW)
    Path("other").mkdir()
    Path("empty.jsonl").touch()
    for weight in (1, 2):
        assert produce(data, "--weight", weight, out="weighted") == 0
    said = capsys.readouterr().err
    assert "already ended" in said and "weights (was [1.0], now [2.0])" in said
    assert produce(data) == 0
    for option, source, code, said in (
        ("--source", "other.jsonl", 5, "not in it: other.jsonl"),
        ("--follow", "other", 5, "not in it: other"),
        ("--source", f"python:{RECIPES}:rows", 5, f"not in it: python:{RECIPES}:rows"),
        ("--source", "-", 5, "not in it: standard input"),
        ("--source", "empty.jsonl", 0, "already ended"),
    ):
        assert produce(data, option, source) == code
        assert said in capsys.readouterr().err
    assert main(["run", "--source", "empty.jsonl", "--out", "out", "--samples-per-chunk", "4"]) == 0
    assert "made from other sources: source 1 was " in capsys.readouterr().err
    # An end without a position is one of an earlier release.
    (out / "stream.end").write_bytes(End(5, 20).encode())
    append(data, ROW)
    assert produce(data) == 0
    assert "are not detected" in capsys.readouterr().err
    produced(data.parent / "another program's", 1, 4)
    fails(asked(data, "--shuffle", 3, out="another program's"), 5, "another program")


def make_table(path: Path, first: int, last: int) -> None:
    pa = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pa.table({"id": list(range(first, last))}), path)


ROW = b'{"id": 99}\n'
PACKED = gzip.compress(ROW)
CHANGES: list[tuple[str, Callable[[Path], object], int, str | None]] = [
    ("rows.jsonl", lambda path: None, 0, None),
    ("rows.jsonl", lambda path: append(path, ROW), 5, "rows.jsonl (11 bytes behind byte 21)"),
    ("rows.jsonl", lambda path: append(path, b"\r\n\n"), 0, None),
    ("rows.jsonl", lambda path: path.write_bytes(b"{}\n" * 9), 4, None),
    ("rows.jsonl", lambda path: path.unlink(), 0, None),
    ("no newline.jsonl", lambda path: append(path, b"\n" + ROW), 5, "no newline.jsonl (12 bytes behind byte 20)"),
    ("bad.jsonl", lambda path: append(path, ROW), 5, "bad.jsonl (11 bytes behind byte 51)"),
    ("nothing.jsonl", lambda path: append(path, ROW), 5, "nothing.jsonl (11 bytes behind byte 2)"),
    ("rows.jsonl.gz", lambda path: append(path, PACKED), 5, f"rows.jsonl.gz ({len(PACKED)} bytes behind byte "),
    ("rows.jsonl.gz", lambda path: append(path, gzip.compress(b"\n")), 0, None),
    ("tables", lambda path: make_table(path / "b.parquet", 5, 6), 5, "tables. "),
    ("tables", lambda path: (path / "a.parquet").unlink(), 4, None),
    ("incoming", lambda path: (path / "b.jsonl").write_bytes(ROW), 5, "incoming/b.jsonl (11 bytes)"),
    ("incoming", lambda path: (path / "b.jsonl.gz").write_bytes(PACKED), 5, "incoming/b.jsonl.gz ("),
    ("incoming", lambda path: (path / "b.jsonl").write_bytes(b"\n{"), 0, None),
    ("incoming", lambda path: append(path / "a.jsonl", ROW), 5, "incoming/a.jsonl (11 bytes behind byte 21)"),
]


# With two rows a chunk, and with three, the last chunk being full and not.
@pytest.mark.parametrize(
    ("size", "source", "change", "code", "named"), [(2 + number % 2, *row) for number, row in enumerate(CHANGES)]
)
def test_a_finished_command_is_an_error_once_there_are_rows_that_are_not_in_the_stream(
    size: int, source: str, change: Any, code: int, named: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = b'{"id": 0}\n{"id":  1}\n'
    Path("rows.jsonl").write_bytes(text)
    Path("no newline.jsonl").write_bytes(text[:-1])
    Path("bad.jsonl").write_bytes(text + b"no row at all\n" * 2 + b"\n\n")
    Path("nothing.jsonl").write_bytes(b"\n\n")
    Path("rows.jsonl.gz").write_bytes(gzip.compress(text))
    Path("tables").mkdir()
    if source == "tables":
        make_table(Path("tables/a.parquet"), 0, 2)
    Path("incoming").mkdir()
    Path("incoming/a.jsonl").write_bytes(text)
    Path("incoming/_END").touch()
    option = "--follow" if source == "incoming" else "--source"
    flags = [option, source, "--out", "out", "--samples-per-chunk", str(size), "--on-bad-row", "skip"]
    run, check = ["run", *flags, "--no-progress"], ["check", *flags]
    assert [main(run), main(run), main(check)] == [0, 0, 0]
    change(Path(source))
    before = snapshot(Path())
    capsys.readouterr()
    assert main(run) == code
    if Path(source).exists():
        # Of what is not there it has nothing to say.
        assert main(check) == code
    said = capsys.readouterr().err
    if named is not None:
        assert said.count(f"these rows are not in it: {named}") == 2
    assert snapshot(Path()) == before


@pytest.mark.parametrize("ended", [False, True])
def test_stream_without_a_row_begins_anew_without_its_files(data: Path, ended: bool) -> None:
    if ended:
        assert produce(data, "--encode", f"{RECIPES}:tokens", "--transform", f"{RECIPES}:none") == 0
    else:
        assert produce(data, "--encode", f"{RECIPES}:broken_off") == 3
    mended = ("--encode", f"{RECIPES}:counted")
    assert (produce(data, *mended), produce(data, *mended, command="check")) == (5, 5)
    for name in ("stream.json", "head.json", "stream.end")[: 2 + ended]:
        os.remove(data.parent / "out" / name)
    assert produce(data, *mended) == 0
    assert [row["id"] for row in StreamReader(data.parent / "out")] == list(range(20))
