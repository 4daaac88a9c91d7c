"""Sources on the command line: several files after one --source, quoted patterns, weights."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.configuration.command_line import SourceArgument, sort_arguments
from lazyshard_producer.configuration.source_paths import expand_path


@pytest.mark.parametrize(
    ("arguments", "rest", "sources"),
    [
        ([], [], []),
        (["run"], ["run"], []),
        (["run", "--source", "a"], ["run"], [("--source", ["a"], [])]),
        (["run", "--source", "a", "b", "--out", "c"], ["run", "--out", "c"], [("--source", ["a", "b"], [])]),
        (["run", "--source=a", "b"], ["run", "b"], [("--source", ["a"], [])]),
        (["run", "--source", "a", "--rate", "1", "b"], ["run", "--rate", "1", "b"], [("--source", ["a"], [])]),
        (
            ["run", "--source", "a", "--follow", "d", "--source", "b"],
            ["run"],
            [("--source", ["a"], []), ("--follow", ["d"], []), ("--source", ["b"], [])],
        ),
        (
            ["check", "--source", "a", "b", "--weight", "0.7", "--follow=d", "--weight=3", "--debug"],
            ["check", "--debug"],
            [("--source", ["a", "b"], ["0.7"]), ("--follow", ["d"], ["3"])],
        ),
        (["run", "--source", "a", "--weight", "-1"], ["run"], [("--source", ["a"], ["-1"])]),
        (
            ["run", "--source", "a", "--rate", "5", "--weight", "2"],
            ["run", "--rate", "5"],
            [("--source", ["a"], ["2"])],
        ),
        # Standard input is a path.
        (["run", "--source", "-", "--out", "o"], ["run", "--out", "o"], [("--source", ["-"], [])]),
        (["run", "--source", ""], ["run"], [("--source", [""], [])]),
        (["run", "--source", "a", "--", "--source", "b"], ["run", "--", "--source", "b"], [("--source", ["a"], [])]),
        # Other commands have no sources.
        (["init", "--source", "a"], ["init", "--source", "a"], []),
    ],
)
def test_sources_are_taken_out(
    arguments: list[str], rest: list[str], sources: list[tuple[str, list[str], list[str]]]
) -> None:
    found = sort_arguments(arguments)
    assert found.rest == rest
    assert found.sources == [SourceArgument(*source) for source in sources]
    assert found.problems == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--source"], "--source: a path is needed behind it, got none"),
        (["--source", "--out", "a"], "--source: a path is needed behind it, got none"),
        (["--follow", "--source", "a"], "--follow: a path is needed behind it, got none"),
        (["--weight", "1", "--source", "a"], "--weight: it belongs behind the --source that it is for, got 1 first"),
        (["--source", "a", "--weight"], "--weight: a number is needed behind it, got none"),
        (
            ["--source", "a", "b", "--weight", "1", "--weight", "2", "--weight", "3"],
            "--weight: one for each --source or --follow, got two behind --source a b",
        ),
    ],
)
def test_sources_that_cannot_be(arguments: list[str], problem: str) -> None:
    (found,) = sort_arguments(["run", *arguments]).problems
    assert f"{found.option}: {found.text}" == problem


@given(st.lists(st.sampled_from(["--source", "--source=a", "--weight", "--weight=1", "--out", "a", "-", "--", "b"])))
def test_no_command_line_breaks_it_and_no_argument_comes_twice(arguments: list[str]) -> None:
    found = sort_arguments(["run", *arguments])
    taken = sum(len(source.paths) + len(source.weights) for source in found.sources)
    assert len(found.rest) + taken <= 1 + len(arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.jsonl", "a.jsonl", "part-10", "part-2", ".hidden.jsonl", "x[1].jsonl", "deep/er/c.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "d.jsonl").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("missing.jsonl", ["missing.jsonl"]),
        ("?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[ba].jsonl", ["a.jsonl", "b.jsonl"]),
        # By their characters, as a shell does it; not by the numbers in them.
        ("part-*", ["part-10", "part-2"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "deep/er/c.jsonl", "x[1].jsonl"]),
        # A file of just this name is meant, whatever else its brackets would match.
        ("x[1].jsonl", ["x[1].jsonl"]),
        ("nothing*", ["nothing*"]),
        ("a\0*", ["a\0*"]),
        ("", [""]),
        ("-", ["-"]),
    ],
)
def test_patterns_and_their_files(path: str, files: list[str], folder: Path) -> None:
    assert expand_path(path) == files
