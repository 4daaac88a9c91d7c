"""The command line: help, exit codes, sources, patterns, weights, blend files, and what cannot be asked for."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazyshard
from lazyshard_producer import errors
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.given import Given, assemble, expand_path, parse_blend, sort_arguments
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS
from lazyshard_producer.errors import SettingsInvalid
from tests.conversion import megatron_core
from tests.harness.processes.environment import environment
from tests.harness.processes.producing import assert_one_line, ids, rows, run, run_arguments
from tests.stream.streams import refusal_of


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


@pytest.mark.parametrize(
    ("line", "rest", "sources"),
    [
        ("run --source a", "run", [{"path": ["a"]}]),
        ("run --source a b --out c", "run --out c", [{"path": ["a", "b"]}]),
        ("run --source=a b", "run b", [{"path": ["a"]}]),
        ("run --source a --rate 1 b", "run --rate 1 b", [{"path": ["a"]}]),
        ("run --source a --follow d --source b", "run", [{"path": ["a"]}, {"follow": ["d"]}, {"path": ["b"]}]),
        (
            "check --source a b --weight 0.7 --follow=d --weight=3 --debug",
            "check --debug",
            [{"path": ["a", "b"], "weight": "0.7"}, {"follow": ["d"], "weight": "3"}],
        ),
        ("run --source - --out o", "run --out o", [{"path": ["-"]}]),  # standard input is a path
        ("run --source a -- --source b", "run -- --source b", [{"path": ["a"]}]),
        ("init --source a", "init --source a", []),  # other commands have no sources
    ],
)
def test_sources_are_taken_out(line: str, rest: str, sources: list[dict[str, Any]]) -> None:
    found = sort_arguments(line.split())
    assert found.rest == rest.split()
    assert list(found.sources) == sources
    assert not found.problems


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--source --out a", "--source"),
        ("--follow --source a", "--follow"),
        ("--weight 1 --source a", "--weight"),
        ("--source a b --weight 1 --weight 2 --weight 3", "--weight"),
    ],
)
def test_sources_that_cannot_be(line: str, option: str) -> None:
    with pytest.raises(SettingsInvalid) as error:
        assemble(sort_arguments(["run", *line.split()]), Given(values={"out": "o", "samples_per_chunk": 3}, file="x"))
    assert [found.option for found in error.value.problems] == [option]


@given(st.lists(st.sampled_from(["--source", "--source=a", "--weight", "--weight=1", "--out", "a", "-", "--", "b"])))
def test_no_command_line_breaks_it_and_no_argument_comes_twice(arguments: list[str]) -> None:
    found = sort_arguments(["run", *arguments])
    taken = sum(len(source.get("path", source.get("follow", ()))) + ("weight" in source) for source in found.sources)
    assert len(found.rest) + taken <= 1 + len(arguments)


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("[ba].jsonl", ["a.jsonl", "b.jsonl"]),
        # By their characters, as a shell does it; not by the numbers in them.
        ("part-*", ["part-10", "part-2"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "deep/er/c.jsonl", "x[1].jsonl"]),
        # A file of just this name is meant, whatever else its brackets would match.
        ("x[1].jsonl", ["x[1].jsonl"]),
        *((path, [path]) for path in ("nothing*", "a\0*", "", "-")),
    ],
)
def test_patterns_and_their_files(path: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "part-10", "part-2", ".hidden.jsonl", "x[1].jsonl", "deep/er/c.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("d.jsonl").mkdir()
    assert expand_path(path) == files


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a", [("a", None)]),
        ("0.7 web/a\n 0.3\tb", [("web/a", 0.7), ("b", 0.3)]),
        # An odd number of words are prefixes, whatever they look like.
        ("1 2 3", [("1", None), ("2", None), ("3", None)]),
        ("a 1", [("a", None), ("1", None)]),
        ('[30, "a", 70.5, "b c"]', [("a", 30.0), ("b c", 70.5)]),
        ('{"train": "1 a 2 b", "valid": []}', [("a", 1.0), ("b", 2.0)]),
        ('\ufeff{"train": ["a"]}', [("a", None)]),
    ],
)
def test_blends(text: str, entries: list[tuple[str, float | None]]) -> None:
    assert parse_blend(text.encode()) == entries


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "got none"),
        (b"\xff\xfe", "not UTF-8"),
        (b"1 a b c", "got 'b'"),
        (b"1 a 0 b", "got '0'"),
        (b"[1, ", "JSON"),
        (b'{"valid": ["a"]}', "got 'valid'"),
        (b'[true, "a"]', "a list"),
        (b'["1", ""]', "got an empty one"),
    ],
)
def test_what_is_no_blend(data: bytes, says: str) -> None:
    refusal_of(ValueError, says, parse_blend, data)


@pytest.mark.full
@given(st.lists(st.sampled_from(["a", "b/c", "1", "0.5", "2e3", "7x"]), min_size=1, max_size=8))
def test_blends_are_taken_as_megatron_core_takes_them(words: list[str]) -> None:
    megatron_core.module()
    from megatron.core.datasets.utils import get_blend_from_list

    text = " ".join(words).encode()
    if len(words) % 2 == 0 and len({word in ("1", "0.5", "2e3") for word in words[::2]}) == 2:
        # Refused there too, but for some orders: what it asserts reads an iterator that was read before.
        refusal_of(ValueError, "a weight above 0", parse_blend, text)
        return
    prefixes, weights = get_blend_from_list(words)
    assert parse_blend(text) == [(prefix, weights and weights[at]) for at, prefix in enumerate(prefixes)]
