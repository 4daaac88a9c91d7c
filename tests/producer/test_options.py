import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lazyshard
from lazyshard_producer import cli, exits
from lazyshard_producer.cli import main
from lazyshard_producer.command import app, spread_sources
from lazyshard_producer.settings import Settings
from tests.producer.commands import assert_one_line, environment, ids, rows, run, run_arguments


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(0, 30))
    return path


def test_help() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "lazyshard-producer run --source data.jsonl" in done.stdout


def test_help_of_run() -> None:
    done = run("run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--source", "--out", "--samples-per-chunk", "--rate", "--max-row-bytes", "--no-progress", "--debug"):
        assert option in done.stdout
    assert "--source a.jsonl --source b.jsonl" in done.stdout
    shown = {int(code) for code in re.findall(r"^ +(\d+)  \S", done.stdout, re.MULTILINE)}
    assert shown == codes()


def codes() -> set[int]:
    return {value for value in vars(exits).values() if isinstance(value, int)}


def test_every_exit_code_is_in_the_table() -> None:
    assert cli.__doc__ is not None
    assert {int(code) for code in re.findall(r"^ +(\d+)  \S", cli.__doc__, re.MULTILINE)} == codes()


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lazyshard-producer {lazyshard.__version__}\n", "")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: " in capsys.readouterr().out


def test_parsing_alone() -> None:
    assert CliRunner().invoke(app, ["run", "--help"]).exit_code == 0
    assert CliRunner().invoke(app, ["run", "--samples-per-chunk", "ten"]).exit_code == 2


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_typer_the_extra_is_named(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from lazyshard_producer.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"lazyshard-producer needs {module}, which is not installed: pip install 'lazyshard[producer]'\n"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rate", "0"], "--rate is a number of samples a second above 0, got 0"),
        (["--rate", "-1"], "above 0, got -1"),
        (["--rate", "nan"], "above 0, got nan"),
        (["--rate", "inf"], "above 0, got inf"),
        (["--rate", "fast"], "--rate"),
        (["--samples-per-chunk", "0"], "from 1 to 100000000, got 0"),
        (["--samples-per-chunk", "-3"], "got -3"),
        (["--max-row-bytes", "0"], "--max-row-bytes is from 1 to"),
        (["--out", ""], "--out: a path is needed"),
        (["--out", "a\0b"], r"cannot hold a NUL character, got 'a\x00b'"),
        (["--out", "x" * 300], "a name of 300 characters is too long"),
        (["--source", ""], "--source: a path is needed"),
        (["--source", "a\0b"], "NUL"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_usage_errors_are_one_line(
    more: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*run_arguments(tmp_path / "out", [source]), *more]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert_one_line(captured.err, message)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_missing_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert_one_line(capsys.readouterr().err, "Missing option '--source'", "run --help")


def test_settings_need_a_source() -> None:
    with pytest.raises(ValueError, match="at least one file"):
        Settings(sources=(), out="out", samples_per_chunk=1)


@pytest.mark.parametrize("kind", ["file", "below a file", "link to nothing", "loop"])
def test_out_that_cannot_be_a_directory(
    kind: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_bytes(b"precious")
    elif kind == "below a file":
        out = source / "out"
    else:
        out.symlink_to("out" if kind == "loop" else "nowhere")
    assert main(run_arguments(out, [source])) == 5
    assert_one_line(capsys.readouterr().err, str(out))
    assert kind != "file" or out.read_bytes() == b"precious"


def test_other_samples_per_chunk_than_the_stream(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_bytes(rows(0, 25) + b"bad\n")
    assert main(run_arguments(tmp_path / "out", [source], 10)) == 3
    capsys.readouterr()
    assert main(run_arguments(tmp_path / "out", [source], 5)) == 5
    assert_one_line(capsys.readouterr().err, "10 samples per chunk, asked for 5")


def test_a_directory_of_foreign_chunks_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "chunk_00000.jsonl").write_bytes(rows(0, 3))
    assert main(run_arguments(out, [source])) == 5
    shown = capsys.readouterr().err
    assert_one_line(shown, "somebody else made them")
    assert f"`lazyshard adopt {out} --no-end`" in shown


def test_several_files_after_one_source_keep_their_order(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 5), ("c", 10)):
        (tmp_path / name).write_bytes(rows(first, first + 5))
    arguments = [
        "run",
        "--source",
        tmp_path / "a",
        tmp_path / "b",
        "--out",
        tmp_path / "out",
        "--source",
        tmp_path / "c",
    ]
    assert main([*map(str, arguments), "--samples-per-chunk", "4"]) == 0
    assert ids(tmp_path / "out") == list(range(15))


@pytest.mark.parametrize(
    ("arguments", "spread"),
    [
        ([], []),
        (["run", "x", "--source", "a"], ["run", "x", "--source", "a"]),
        (["--source=a", "b"], ["--source=a", "b"]),
        (["--source", "a", "--rate", "1", "b"], ["--source", "a", "--rate", "1", "b"]),
        (["--source", "a", "b", "c"], ["--source", "a", "--source", "b", "--source", "c"]),
    ],
)
def test_spread_sources(arguments: list[str], spread: list[str]) -> None:
    assert spread_sources(arguments) == spread


def test_unexpected_error_is_one_line_and_debug_shows_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("oops\nnext line")

    monkeypatch.setattr("lazyshard_producer.command.run", fail)
    arguments = run_arguments(tmp_path / "out", [source])
    assert main(arguments) == 70
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert_one_line(err, "unexpected KeyError: ", "--debug")
    assert main([*arguments, "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_nothing_is_imported_with_the_package() -> None:
    code = "import sys, lazyshard_producer.cli; print('lazyshard' in sys.modules, 'typer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_the_command_never_imports_torch() -> None:
    code = "import sys, lazyshard_producer.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
