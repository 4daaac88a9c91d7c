from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format import names


def test_names_of_the_stream_files() -> None:
    assert names.MANIFEST == "stream.json"
    assert names.HEAD == "head.json"
    assert names.END == "stream.end"
    assert names.OWNER == "stream.owner"
    assert names.LOCK == ".producer.lock"
    assert names.TEMPORARY == ".tmp"


@pytest.mark.parametrize(
    ("chunk", "name"),
    [
        (0, "chunk_00000.jsonl"),
        (42, "chunk_00042.jsonl"),
        (99999, "chunk_99999.jsonl"),
        (100000, "chunk_100000.jsonl"),
        (10**15, "chunk_1000000000000000.jsonl"),
    ],
)
def test_chunk_number_has_five_digits_and_grows(chunk: int, name: str) -> None:
    assert names.chunk_name(chunk) == name
    assert names.seal_name(chunk) == name + ".completed"


@pytest.mark.parametrize("name", [names.chunk_name, names.seal_name])
def test_negative_chunk_number_is_refused(name: object) -> None:
    assert callable(name)
    with pytest.raises(ValueError, match="a chunk number is 0 or more, got -1"):
        name(-1)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("chunk_00012.jsonl", (12, False)),
        ("chunk_00012.jsonl.completed", (12, True)),
        ("chunk_7.jsonl", (7, False)),
        ("chunk_0000000007.jsonl.completed", (7, True)),
        ("chunk_100000.jsonl", (100000, False)),
        ("chunk_00000000000000000001.jsonl", (1, False)),
        ("chunk_1700000000000000000.jsonl", (1700000000000000000, False)),
    ],
)
def test_chunk_name_is_parsed_however_it_is_padded(name: str, parsed: tuple[int, bool]) -> None:
    assert names.parse_chunk_name(name) == parsed


@pytest.mark.parametrize(
    "name",
    [
        "",
        "chunk_.jsonl",
        "chunk_-1.jsonl",
        "chunk_+1.jsonl",
        "chunk_1_000.jsonl",
        "chunk_ 1.jsonl",
        "chunk_1e3.jsonl",
        "chunk_00001.jsonl\n",
        "\nchunk_00001.jsonl",
        "chunk_00001.json",
        "chunk_00001xjsonl",
        "chunk_00001.jsonl.gz",
        "chunk_00001.jsonl.completed.completed",
        "chunk_00001.jsonl.tmp",
        ".chunk_00001.jsonl",
        "Chunk_00001.jsonl",
        "chunk_\u0661.jsonl",
        "chunk_².jsonl",
        "chunk_" + "1" * 5000 + ".jsonl",
        "stream.json",
        "head.json",
        "stream.end",
    ],
)
def test_other_name_is_not_a_chunk(name: str) -> None:
    assert names.parse_chunk_name(name) is None


@given(st.integers(0, 10**18))
def test_names_round_trip(chunk: int) -> None:
    assert names.parse_chunk_name(names.chunk_name(chunk)) == (chunk, False)
    assert names.parse_chunk_name(names.seal_name(chunk)) == (chunk, True)


@given(st.text())
def test_any_name_is_parsed_without_error(name: str) -> None:
    names.parse_chunk_name(name)
    names.parse_chunk_name(f"chunk_{name}.jsonl")
