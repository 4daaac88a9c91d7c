"""What a run says of a stream that has ended, or into which nothing came, where that is not what was asked for."""

import gzip
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.format.records import End
from lazyshard_producer.cli import main
from tests.harness.processes.producing import assert_one_line, head, refused, run_arguments

ENCODERS = "tests.producer.recipes"
RECIPES = "tests.producer.recipes"
ASKED = ("--pack", 8, "--encode", f"{ENCODERS}:as_told")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": number, "length": 1 + number % 4}) + "\n" for number in range(20)))
    return path


def produce(rows: Path, *options: object, command: str = "run", out: str = "out") -> int:
    arguments = run_arguments(rows.parent / out, [rows], 4, *options)
    return main([command, *arguments[1:], *(["--no-progress"] if command == "run" else [])])


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_stream_without_a_good_row(rows: Path, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, good = tmp_path / "out", rows.read_bytes()
    rows.write_bytes(good.replace(b'"length"', b'"tokens"'))
    options = ("--pack", 8, "--on-bad-row", policy)
    for _ in range(2):
        assert produce(rows, *options) == 3
        assert_one_line(capsys.readouterr().err, "all 20 rows were refused", f"{rows}:1: --pack: ")
    assert not (out / "stream.end").exists()
    assert head(out)["state"] == "failed"
    assert policy == "skip" or len(refused(out)) == 20
    # Those that are mended are published by the same command.
    rows.write_bytes(good)
    assert produce(rows, *options) == 0
    assert sum(len(row["pack"]) for row in StreamReader(out)) == 20
    assert policy == "skip" or refused(out) == []


def test_what_a_filter_leaves_out_is_told(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, none = rows.read_text(), ("--transform", f"{RECIPES}:none")
    for out, text, options, code, said in (
        ("none", good, none, 0, "left out all of 20 rows"),
        ("empty", "", (), 0, "holds no rows"),
        ("some", good.splitlines()[0] + "\nno row\n", none, 3, "of 2 rows 1 were refused"),
        ("one", "no row\n", (), 3, "the only row was refused"),
    ):
        rows.write_text(text)
        assert produce(rows, *options, "--on-bad-row", "skip", out=out) == code
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
        (("--pack", 8, "--encode", f"{ENCODERS}:counted"), 5, f"function is '{ENCODERS}:as_told' there and"),
    ],
)
def test_ended_stream_that_was_made_otherwise_is_refused(
    rows: Path, options: tuple[object, ...], code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert produce(rows, *ASKED) == 0
    assert produce(rows, *ASKED) == 0
    assert "already ended" in capsys.readouterr().err
    for command in ("run", "check"):
        assert produce(rows, *options, command=command) == code
        captured = capsys.readouterr()
        assert_one_line(captured.err, reason)
        assert "already ended" not in captured.err
        assert captured.out == ""
    assert produce(rows, *ASKED, command="check") == 0


def test_other_weights_of_an_ended_stream_are_told(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert produce(rows, "--weight", 1) == 0
    assert produce(rows, "--weight", 2) == 0
    assert "weights (was [1.0], now [2.0])" in capsys.readouterr().err


def test_ended_stream_of_another_program_is_refused(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChunkWriter(rows.parent / "out", 4) as writer:
        writer.write({"id": 1})
    assert produce(rows, "--shuffle", 3) == 5
    assert_one_line(capsys.readouterr().err, "another program")


def grow(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)


def make_table(path: Path, first: int, last: int) -> None:
    pa = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pa.table({"id": list(range(first, last))}), path)


ROW = b'{"id": 99}\n'
PACKED = gzip.compress(ROW)
CHANGES: list[tuple[str, Callable[[Path], object], int, str | None]] = [
    ("rows.jsonl", lambda path: None, 0, None),
    ("rows.jsonl", lambda path: grow(path, ROW), 5, "rows.jsonl (11 bytes behind byte 21)"),
    ("rows.jsonl", lambda path: grow(path, b"\r\n\n"), 0, None),
    ("rows.jsonl", lambda path: path.write_bytes(b"{}\n" * 9), 4, None),
    ("rows.jsonl", lambda path: path.unlink(), 0, None),
    ("no newline.jsonl", lambda path: grow(path, b"\n" + ROW), 5, "no newline.jsonl (12 bytes behind byte 20)"),
    ("bad.jsonl", lambda path: grow(path, ROW), 5, "bad.jsonl (11 bytes behind byte 51)"),
    ("nothing.jsonl", lambda path: grow(path, ROW), 5, "nothing.jsonl (11 bytes behind byte 2)"),
    ("rows.jsonl.gz", lambda path: grow(path, PACKED), 5, f"rows.jsonl.gz ({len(PACKED)} bytes behind byte "),
    ("rows.jsonl.gz", lambda path: grow(path, gzip.compress(b"\n")), 0, None),
    ("tables", lambda path: make_table(path / "b.parquet", 5, 6), 5, "tables. "),
    ("tables", lambda path: (path / "a.parquet").unlink(), 4, None),
    ("incoming", lambda path: (path / "b.jsonl").write_bytes(ROW), 5, "incoming/b.jsonl (11 bytes)"),
    ("incoming", lambda path: (path / "b.jsonl.gz").write_bytes(PACKED), 5, "incoming/b.jsonl.gz ("),
    ("incoming", lambda path: (path / "b.jsonl").write_bytes(b"\n{"), 0, None),
    ("incoming", lambda path: grow(path / "a.jsonl", ROW), 5, "incoming/a.jsonl (11 bytes behind byte 21)"),
]


# With two rows a chunk, and with three, the last chunk being full and not.
@pytest.mark.parametrize(
    ("size", "source", "change", "code", "named"), [(2 + number % 2, *row) for number, row in enumerate(CHANGES)]
)
def test_a_finished_command_is_an_error_once_there_are_rows_that_are_not_in_the_stream(
    size: int,
    source: str,
    change: Callable[[Path], object],
    code: int,
    named: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
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
    before = {path.name: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    change(Path(source))
    capsys.readouterr()
    assert main(run) == code
    if Path(source).exists():
        # Of what is not there it has nothing to say.
        assert main(check) == code
    said = capsys.readouterr().err
    if named is not None:
        assert said.count(f"these rows are not in it: {named}") == 2
    assert {path.name: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_other_sources_after_the_end(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rows.parent)
    Path("other.jsonl").write_bytes(ROW)
    Path("other").mkdir()
    Path("empty.jsonl").touch()
    assert produce(rows) == 0
    capsys.readouterr()
    for option, source, code, said in (
        ("--source", "other.jsonl", 5, "not in it: other.jsonl"),
        ("--follow", "other", 5, "not in it: other"),
        ("--source", f"python:{RECIPES}:rows", 5, f"not in it: python:{RECIPES}:rows"),
        ("--source", "-", 5, "not in it: standard input"),
        ("--source", "empty.jsonl", 0, "already ended"),
    ):
        assert produce(rows, option, source) == code
        assert said in capsys.readouterr().err
    assert main(["run", "--source", "empty.jsonl", "--out", "out", "--samples-per-chunk", "4"]) == 0
    assert "made from other sources: source 1 was " in capsys.readouterr().err


def test_end_without_a_position_is_one_of_an_earlier_release(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert produce(rows) == 0
    (rows.parent / "out" / "stream.end").write_bytes(End(5, 20).encode())
    capsys.readouterr()
    grow(rows, ROW)
    assert produce(rows) == 0
    assert "are not detected" in capsys.readouterr().err


@pytest.mark.parametrize("ended", [False, True])
def test_stream_without_a_row_begins_anew_without_its_files(rows: Path, ended: bool) -> None:
    if ended:
        assert produce(rows, "--encode", f"{ENCODERS}:tokens", "--transform", f"{RECIPES}:none") == 0
    else:
        assert produce(rows, "--encode", f"{ENCODERS}:broken_off") == 3
    mended = ("--encode", f"{ENCODERS}:counted")
    assert (produce(rows, *mended), produce(rows, *mended, command="check")) == (5, 5)
    for name in ("stream.json", "head.json", "stream.end")[: 2 + ended]:
        os.remove(rows.parent / "out" / name)
    assert produce(rows, *mended) == 0
    assert [row["id"] for row in StreamReader(rows.parent / "out")] == list(range(20))
