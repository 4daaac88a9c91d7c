from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format import names


def test_names_of_the_stream_files() -> None:
    assert (names.MANIFEST, names.HEAD, names.LOCK) == ("stream.json", "head.json", ".producer.lock")
    assert (names.END, names.OWNER, names.TEMPORARY) == ("stream.end", "stream.owner", ".tmp")
    for name in (names.chunk_name, names.seal_name, names.arrays_name):
        with pytest.raises(ValueError):
            name(-1)


@pytest.mark.parametrize(
    ("chunk", "digits"), [(0, "00000"), (42, "00042"), (99999, "99999"), (100000, "100000"), (10**15, "1" + "0" * 15)]
)
def test_chunk_number_has_five_digits_and_grows(chunk: int, digits: str) -> None:
    assert names.chunk_name(chunk) == f"chunk_{digits}.jsonl"
    assert names.seal_name(chunk) == f"chunk_{digits}.jsonl.completed"


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("chunk_00012.jsonl.completed", (12, True)),
        ("chunk_7.jsonl", (7, False)),
        ("chunk_0000000007.jsonl.completed", (7, True)),
        ("chunk_00000000000000000001.jsonl", (1, False)),
        ("chunk_1700000000000000000.jsonl", (1700000000000000000, False)),
    ],
)
def test_chunk_name_is_parsed_however_it_is_padded(name: str, parsed: tuple[int, bool]) -> None:
    assert names.parse_chunk_name(name) == parsed


NUMBERS = ["", "-1", "+1", "1_000", " 1", "1e3", "\u0661", "²", "1" * 5000]
SUFFIXES = [".jsonl\n", ".json", "xjsonl", ".jsonl.gz", ".jsonl.completed.completed", ".jsonl.tmp"]


@pytest.mark.parametrize(
    "name",
    [
        *(f"chunk_{number}.jsonl" for number in NUMBERS),
        *(f"chunk_00001{suffix}" for suffix in SUFFIXES),
        *("", "\nchunk_00001.jsonl", ".chunk_00001.jsonl", "Chunk_00001.jsonl", "stream.json", "stream.end"),
    ],
)
def test_other_name_is_not_a_chunk(name: str) -> None:
    assert names.parse_chunk_name(name) is None


@given(st.integers(0, 10**18), st.text())
def test_names_round_trip_and_any_other_is_parsed_without_error(chunk: int, name: str) -> None:
    assert names.parse_chunk_name(names.chunk_name(chunk)) == (chunk, False)
    assert names.parse_chunk_name(names.seal_name(chunk)) == (chunk, True)
    names.parse_chunk_name(name)
    names.parse_chunk_name(f"chunk_{name}.jsonl")
