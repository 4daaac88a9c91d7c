"""The command line: help, exit codes, sources, patterns, weights, blend files, and what cannot be asked for."""

import os
import re
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
from tests.cli.commands import python
from tests.conversion import megatron_core
from tests.harness.processes.producing import rows, run, run_arguments
from tests.producer.commands import Fails
from tests.stream.streams import raised, raising, refusal_of


@pytest.fixture
def source(source: Path) -> Path:
    source.write_bytes(rows(0, 30))
    return source


def test_help_of_run_names_all_flags_and_exit_codes() -> None:
    done = run("run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    flags = [option.flag for option in (*SOURCE_OPTIONS, *OPTIONS)]
    for flag in ("--source", "--follow", "--config", "--no-progress", "--debug", *flags):
        assert f" {flag} " in done.stdout
    assert set(errors.CODES) == {value for value in vars(errors).values() if isinstance(value, int)}
    shown = re.findall(r"^[ |]+(\d+)  (\S.*?)(?=  +| +\||$)", done.stdout, re.MULTILINE)
    assert [(int(code), meaning.strip()) for code, meaning in shown] == list(errors.CODES.items())
    remedies = re.findall(r"^ +\d+  .*?  +(\S.*)$", errors.__doc__ or "", re.MULTILINE)
    assert len(remedies) == len(errors.CODES)


def test_version_no_command_and_all_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"lazyshard-producer {lazyshard.__version__}\n", "")
    assert main([]) == 2
    assert "Usage: " in capsys.readouterr().out
    assert main(["run"]) == 2
    told = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["--out:", "--samples-per-chunk:", "--source:"]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("typer", ["--help"]), ("pydantic", ["check", "--source", "a", "--out", "o", "--samples-per-chunk", "3"])],
)
def test_a_command_that_lacks_a_package_names_the_extra(module: str, arguments: list[str]) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from lazyshard_producer.cli import main; sys.exit(main())"
    done = python("-c", code, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"needs {module}," in done.stderr and "'lazyshard[producer]'" in done.stderr


def test_what_is_imported() -> None:
    code = "import sys, lazyshard_producer.cli; print('lazyshard' in sys.modules, 'typer' in sys.modules); "
    code += "import lazyshard_producer.command; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False False\nFalse\n"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--rate", "0"], "--rate: "),
        (["--source", "a\0b"], "NUL"),
        (["--nonsense"], "(see `lazyshard-producer run --help`)"),
        (["--no-progress", "stray"], "did you mean --source stray?"),
        (["--config", "nowhere.toml"], "nowhere.toml: "),
        (None, "(see `lazyshard-producer --help`)"),
    ],
)
def test_usage_error_is_one_line(more: list[str] | None, says: str, source: Path, tmp_path: Path, fails: Fails) -> None:
    arguments = ["walk"] if more is None else [*run_arguments(tmp_path / "out", [source]), *more]
    assert fails(arguments, 2, says).count("\n") == 1
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_path_that_no_stream_can_be_in(here: Path, source: Path, fails: Fails) -> None:
    for name in ("in", "foreign"):
        Path(name).mkdir()
    source.rename("in/a.jsonl")
    Path("foreign/chunk_00000.jsonl").write_bytes(rows(0, 3))
    Path("loop").symlink_to("loop")
    Path("link").symlink_to("nothing")
    assert main(run_arguments(Path("out"), [Path("in/a.jsonl")])) == 0
    for name in ("stream.end", "stream.json"):
        Path("out", name).unlink()
    before = sorted(Path().rglob("*"))
    for path, code, says in (
        ("", 2, ""),
        ("x" * 300, 2, "a name of 300 characters is too long"),
        ("a/b/" + "x" * 300, 2, ""),
        ("/x" * 3000 + "/", 2, ""),
        (".", 4, ""),  # above the source
        ("in/a.jsonl", 5, ""),
        ("in/a.jsonl/x", 5, ""),
        ("/dev/null", 5, ""),
        ("link", 5, ""),
        ("loop", 5, "loop"),
        ("out", 5, "stream.json is missing"),
        ("foreign", 5, "run --source foreign`"),
    ):
        fails(run_arguments(Path("out"), [Path("in/a.jsonl")], 10, "--out", path), code, says)
        assert sorted(Path().rglob("*")) == before


def test_unexpected_error_is_one_line_and_debug_shows_it(
    source: Path, out: Path, fails: Fails, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyshard_producer.command.run", raising(KeyError("oops\nnext line")))
    arguments = run_arguments(out, [source])
    assert fails(arguments, 70, "unexpected KeyError: ", "--debug").count("\n") == 1
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
    file = Given(values={"out": "o", "samples_per_chunk": 3}, file="x")
    error = raised(SettingsInvalid, assemble, sort_arguments(["run", *line.split()]), file)
    assert [found.option for found in error.problems] == [option]


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
def test_patterns_and_their_files(path: str, files: list[str], here: Path) -> None:
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
