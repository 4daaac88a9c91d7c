"""Sources on the command line: several files after one --source, quoted patterns, weights, Megatron's blend files."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.configuration.given import Given, assemble, expand_path, parse_blend, sort_arguments
from lazyshard_producer.errors import SettingsInvalid
from tests.conversion import megatron_core
from tests.stream.streams import refusal_of


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
