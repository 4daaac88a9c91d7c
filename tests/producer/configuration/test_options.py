import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lazyshard
from lazyshard_producer import cli, errors
from lazyshard_producer.cli import main
from lazyshard_producer.command import app
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS
from tests.harness.processes.environment import ROOT, environment
from tests.harness.processes.producing import assert_one_line, ids, rows, run, run_arguments


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
    flags = [option.flag for option in (*SOURCE_OPTIONS, *OPTIONS)]
    for flag in ("--source", "--follow", "--config", "--no-progress", "--debug", *flags):
        assert f" {flag} " in done.stdout
    assert "--source a.jsonl --source b.jsonl" in done.stdout


@pytest.mark.parametrize("command", ["check", "init", "quarantine"])
def test_help_of_other_commands(command: str) -> None:
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: lazyshard-producer {command}" in done.stdout


def shown(text: str) -> list[tuple[int, str]]:
    """Codes and meanings of a table that looks like that of `lazyshard_producer.cli`, whatever follows in a row."""
    rows = re.findall(r"^[ |]+(\d+)(?:  | \| )(\S.*)$", text, re.MULTILINE)
    return [(int(code), re.split(r"  +| +\|", meaning)[0].strip()) for code, meaning in rows]


def test_the_table_of_exit_codes_is_the_same_everywhere() -> None:
    table = [(code, meaning) for code, meaning, _ in errors.TABLE]
    assert {code for code, _ in table} == {value for value in vars(errors).values() if isinstance(value, int)}
    assert shown(run("run", "--help").stdout) == table
    assert cli.__doc__ is not None
    assert shown(cli.__doc__) == table
    docs = (ROOT / "docs" / "producer.md").read_text("utf-8").partition("## Exit codes")[2]
    assert shown(docs) == table
    for _, _, remedy in errors.TABLE:
        assert f"  {remedy}\n" in cli.__doc__
        assert f"| {remedy} |\n" in docs


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lazyshard-producer {lazyshard.__version__}\n", "")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: " in capsys.readouterr().out


def test_parsing_alone() -> None:
    assert CliRunner().invoke(app, ["run", "--help"]).exit_code == 0
    assert CliRunner().invoke(app, ["run", "--nonsense"]).exit_code == 2


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--help"]),
        ("rich", ["--help"]),
        ("pydantic", ["--help"]),
        ("pydantic", ["init"]),
        ("pydantic", ["check", "--source", "a", "--out", "o", "--samples-per-chunk", "3"]),
    ],
)
def test_a_command_that_lacks_a_package_names_the_extra(module: str, arguments: list[str], tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from lazyshard_producer.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"lazyshard-producer needs {module}, which is not installed: pip install 'lazyshard[producer]'\n"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rate", "0"], "--rate: SAMPLES_PER_SECOND|none is needed, got '0': should be greater than 0"),
        (["--rate", "nan"], "--rate: "),
        (["--rate", "inf"], "--rate: "),
        (["--store-patience-seconds", "nan"], "got 'nan': should be a finite number"),
        (["--store-patience-seconds", "inf"], "got 'inf': should be a finite number"),
        (["--samples-per-chunk", "5.0"], "--samples-per-chunk: N is needed, got '5.0': should be a whole number"),
        (["--rate", "fast"], "--rate: "),
        (["--samples-per-chunk", "0"], "--samples-per-chunk: N is needed, got '0': should be greater than"),
        (["--max-row-bytes", "0"], "--max-row-bytes: SIZE is needed"),
        (["--out", ""], "--out: a path is needed"),
        (["--out", "a\0b"], r"cannot hold a NUL character, got 'a\x00b'"),
        (["--out", "x" * 300], "a name of 300 characters is too long"),
        (["--source", ""], "--source: a path is needed"),
        (["--source", "a\0b"], "NUL"),
        (["--nonsense"], "--nonsense"),
        (["--nonsense"], "(see `lazyshard-producer run --help`)"),
        (["--no-progress", "stray"], "run takes nothing without a flag before it, got stray; is --source stray meant?"),
        (["--no-progress", "a.toml"], "without a flag before it, got a.toml; is --config a.toml meant?"),
        (["--weight"], "--weight: a number is needed behind it"),
        (["--config", "nowhere.toml"], "nowhere.toml: cannot be read as a configuration file"),
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


def test_all_that_is_missing_is_said_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "lazyshard-producer: error: --out: needed, found none; give --out STREAM",
        "lazyshard-producer: error: --samples-per-chunk: needed, found none; give --samples-per-chunk N",
        "lazyshard-producer: error: --source: at least one source is needed, got none; give --source FILE or --follow "
        "DIRECTORY",
    ]


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["walk"]) == 2
    assert_one_line(capsys.readouterr().err, "No such command 'walk'", "(see `lazyshard-producer --help`)")


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
    assert f"`lazyshard-producer run --source {out}`" in shown


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


def test_a_quoted_pattern_and_a_configuration_file(tmp_path: Path) -> None:
    for name, first in (("b", 5), ("a", 0), ("c", 10)):
        (tmp_path / f"{name}.jsonl").write_bytes(rows(first, first + 5))
    config = tmp_path / "run.toml"
    config.write_text(f'out = "{tmp_path}/out"\nsamples_per_chunk = 7\n')
    assert (
        main(["run", "--config", str(config), "--source", str(tmp_path / "*.jsonl"), "--samples-per-chunk", "4"]) == 0
    )
    assert ids(tmp_path / "out") == list(range(15))
    assert len((tmp_path / "out" / "chunk_00000.jsonl").read_bytes().splitlines()) == 4


def test_unexpected_error_is_one_line_and_debug_shows_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **more: object) -> None:
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


def test_a_stream_that_has_lost_its_manifest_is_to_be_restored(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(run_arguments(out, [source])) == 0
    (out / "stream.end").unlink()
    (out / "stream.json").unlink()
    capsys.readouterr()
    assert main(run_arguments(out, [source])) == 5
    assert_one_line(
        capsys.readouterr().err, "there are chunks and head.json, but stream.json is missing; restore it from a copy"
    )
