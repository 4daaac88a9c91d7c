"""Lengths in tokens: from the seals, and what an earlier release has left beside chunks, which nobody reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import LengthUnknown
from lazyshard.format.names import tokens_name
from lazyshard.inspection.inspection import overview
from lazyshard.inspection.row_facts import mean_tokens
from lazyshard.inspection.survey import take_survey
from lazyshard.stream.listing import list_chunks
from lazyshard.stream.retention import list_kept, retire
from tests.stream.damage import found
from tests.stream.lengths import lengths_of, put_lengths, sealed
from tests.stream.streams import names, produce, rows


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


def test_chunk_without_lengths_and_one_that_was_deleted_are_named(tmp_path: Path) -> None:
    without = put_lengths(produce(tmp_path / "without", 5), [1, 2])
    deleted = sealed(tmp_path / "deleted", list(range(10)), end=False)
    retire(deleted, 1, 5)
    for directory, chunk in ((without, 1), (deleted, 0)):
        with pytest.raises(LengthUnknown) as caught:
            lengths_of(directory)
        assert (caught.value.chunk, caught.value.directory) == (chunk, str(directory))


def test_files_of_measured_lengths_are_passed_over(tmp_path: Path) -> None:
    directory = leave_tokens(sealed(tmp_path / "s", [1, 2, 3, 4, 5]), 0, 1, 9)
    assert lengths_of(directory) == [1, 2, 3, 4, 5]
    assert found(directory) == found(directory, quick=True) == []
    assert take_survey(directory, 0.0).problems == ()
    assert list(StreamReader(directory)) == rows(0, 5)
    leave_tokens(produce(tmp_path / "t", 5), 0, 1, 2)
    with pytest.raises(LengthUnknown):
        lengths_of(tmp_path / "t")


def test_they_go_with_their_chunk(tmp_path: Path) -> None:
    directory = leave_tokens(produce(tmp_path / "s", 10, end=False), 0, 1, 2)
    assert retire(directory, 2, 5) == 2
    assert tokens_files(directory) == [tokens_name(2)]
    assert list_chunks(directory).complete == 0
    # What a killed deletion has left the next start removes, and leaves the others alone.
    leave_tokens(directory, 0)
    assert list_kept(directory).leftovers == [tokens_name(0)]
    ChunkWriter(directory, 2).close(end=False)
    assert tokens_files(directory) == [tokens_name(2)]
