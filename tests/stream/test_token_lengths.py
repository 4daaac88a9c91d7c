"""Lengths in tokens: from the seals, and what an earlier release has left beside chunks, which nobody reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LengthsMissing
from lazyshard.format.names import tokens_name
from lazyshard.inspection.inspection import overview
from lazyshard.inspection.row_facts import mean_tokens
from lazyshard.inspection.survey import take_survey
from lazyshard.stream.listing import list_chunks
from lazyshard.stream.retire import list_kept, retire
from tests.stream.damage import found
from tests.stream.lengths import lengths_of, put_lengths, sealed
from tests.stream.streams import names, produce, rows


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Chunks of 2, 2 and 1 rows."""
    return produce(tmp_path / "s", 5)


def leave_tokens(directory: Path, *chunks: int) -> Path:
    """Puts files there as `lazyshard measure` of an earlier release has."""
    for chunk in chunks:
        (directory / tokens_name(chunk)).write_bytes(b'{"format":1,"chunk":%d}\n' % chunk)
    (directory / ".measure").mkdir(exist_ok=True)
    (directory / ".measure" / "lock").touch()
    return directory


def tokens_files(directory: Path) -> list[str]:
    return [name for name in names(directory) if name.endswith(".tokens")]


def test_lengths_are_those_of_the_seals(tmp_path: Path) -> None:
    directory = sealed(tmp_path / "s", [1, 2, 3, 4, 5])
    assert lengths_of(directory) == [1, 2, 3, 4, 5]
    assert mean_tokens(directory) == 3
    assert overview(directory).tokens.total == 15


def test_chunk_without_lengths_is_named(stream: Path) -> None:
    put_lengths(stream, [1, 2])
    with pytest.raises(LengthsMissing, match=r"chunk 1 are in tokens is not known.*lazyshard-producer run") as caught:
        lengths_of(stream)
    assert (caught.value.chunk, caught.value.directory) == (1, str(stream))


def test_chunk_that_was_deleted_is_named(tmp_path: Path) -> None:
    directory = sealed(tmp_path / "s", list(range(10)), end=False)
    retire(directory, 1, 5)
    with pytest.raises(LengthsMissing, match="chunk 0 was deleted by the stream's producer"):
        lengths_of(directory)


def test_files_of_measured_lengths_are_passed_over(tmp_path: Path) -> None:
    directory = leave_tokens(sealed(tmp_path / "s", [1, 2, 3, 4, 5]), 0, 1, 9)
    assert lengths_of(directory) == [1, 2, 3, 4, 5]
    assert found(directory) == found(directory, quick=True) == []
    assert take_survey(directory, 0.0).problems == ()
    assert list(StreamReader(directory)) == rows(0, 5)
    leave_tokens(produce(tmp_path / "t", 5), 0, 1, 2)
    with pytest.raises(LengthsMissing):
        lengths_of(tmp_path / "t")


def test_they_go_with_their_chunk(tmp_path: Path) -> None:
    directory = leave_tokens(produce(tmp_path / "s", 10, end=False), 0, 1, 2)
    assert retire(directory, 2, 5) == 2
    assert tokens_files(directory) == [tokens_name(2)]
    assert list_chunks(directory).complete == 0


def test_what_a_killed_deletion_has_left_the_next_start_removes(tmp_path: Path) -> None:
    directory = leave_tokens(produce(tmp_path / "s", 10, end=False), 2)
    retire(directory, 2, 5)
    leave_tokens(directory, 0)
    assert list_kept(directory).leftovers == [tokens_name(0)]
    ChunkWriter(directory, 2).close(end=False)
    assert tokens_files(directory) == [tokens_name(2)]


def test_next_start_of_a_producer_leaves_the_others_alone(tmp_path: Path) -> None:
    directory = leave_tokens(produce(tmp_path / "s", 4, end=False), 0, 1)
    produce(directory, 6)
    assert tokens_files(directory) == [tokens_name(0), tokens_name(1)]
    assert list(StreamReader(directory)) == rows(0, 6)
