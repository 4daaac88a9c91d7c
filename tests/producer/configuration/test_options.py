"""The command line as a whole: help, what cannot be asked for, and which code and line that gives."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lazyshard
from lazyshard_producer import errors
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS
from tests.harness.processes.environment import environment
from tests.harness.processes.producing import assert_one_line, ids, rows, run, run_arguments


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(0, 30))
    return path


def python(code: str, *arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


def shown(text: str) -> list[tuple[int, str]]:
    """Codes and meanings of a table that looks like that of `lazyshard_producer.errors`, whatever follows in a row."""
    rows = re.findall(r"^[ |]+(\d+)  (\S.*)$", text, re.MULTILINE)
    return [(int(code), re.split(r"  +| +\|", meaning)[0].strip()) for code, meaning in rows]


def test_help_of_run_names_all_flags_and_exit_codes() -> None:
    done = run("run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    flags = [option.flag for option in (*SOURCE_OPTIONS, *OPTIONS)]
    for flag in ("--source", "--follow", "--config", "--no-progress", "--debug", *flags):
        assert f" {flag} " in done.stdout
    table = list(errors.CODES.items())
    assert set(errors.CODES) == {value for value in vars(errors).values() if isinstance(value, int)}
    assert shown(done.stdout) == table
    remedies = re.findall(r"^ +\d+  .*?  +(\S.*)$", errors.__doc__ or "", re.MULTILINE)
    assert len(remedies) == len(table)


def test_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"lazyshard-producer {lazyshard.__version__}\n", "")
    assert main([]) == 2
    assert "Usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("typer", ["--help"]), ("pydantic", ["check", "--source", "a", "--out", "o", "--samples-per-chunk", "3"])],
)
def test_a_command_that_lacks_a_package_names_the_extra(module: str, arguments: list[str], tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from lazyshard_producer.cli import main; sys.exit(main())"
    done = python(code, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"needs {module}," in done.stderr and "'lazyshard[producer]'" in done.stderr


def test_what_is_imported() -> None:
    code = "import sys, lazyshard_producer.cli; print('lazyshard' in sys.modules, 'typer' in sys.modules); "
    code += "import lazyshard_producer.command; print('torch' in sys.modules)"
    assert python(code).stdout == "False False\nFalse\n"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--rate", "0"], "--rate: "),
        (["--out", "x" * 300], "a name of 300 characters is too long"),
        (["--source", "a\0b"], "NUL"),
        (["--nonsense"], "(see `lazyshard-producer run --help`)"),
        (["--no-progress", "stray"], "did you mean --source stray?"),
        (["--config", "nowhere.toml"], "nowhere.toml: "),
        (None, "(see `lazyshard-producer --help`)"),
    ],
)
def test_usage_errors_are_one_line(
    more: list[str] | None, says: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["walk"] if more is None else [*run_arguments(tmp_path / "out", [source]), *more]) == 2
    captured = capsys.readouterr()
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert_one_line(captured.err, says)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_all_that_is_missing_is_said_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    told = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["--out:", "--samples-per-chunk:", "--source:"]


def test_directory_that_no_stream_can_be_in(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(run_arguments(out, [source])) == 0
    (out / "stream.end").unlink()
    (out / "stream.json").unlink()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "chunk_00000.jsonl").write_bytes(rows(0, 3))
    (tmp_path / "loop").symlink_to("loop")
    capsys.readouterr()
    refused = {"out": "stream.json is missing", "foreign": f"run --source {tmp_path}/foreign`", "loop": "loop"}
    for name, says in refused.items():
        assert main(run_arguments(tmp_path / name, [source])) == 5
        assert_one_line(capsys.readouterr().err, says)


def test_sources_patterns_and_a_configuration_file_on_one_command_line(tmp_path: Path) -> None:
    for name, first in (("b", 5), ("a", 0), ("c", 10), ("d", 15)):
        (tmp_path / f"{name}.jsonl").write_bytes(rows(first, first + 5))
    (tmp_path / "run.toml").write_text(f'out = "{tmp_path}/out"\nsamples_per_chunk = 7\n')
    arguments = ["run", "--source", f"{tmp_path}/[ab].jsonl", f"{tmp_path}/c.jsonl", "--config", f"{tmp_path}/run.toml"]
    assert main([*arguments, "--source", f"{tmp_path}/d.jsonl", "--samples-per-chunk", "4"]) == 0
    assert ids(tmp_path / "out") == list(range(20))
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
