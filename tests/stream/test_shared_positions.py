"""The position of the sequencer in each seal: which rows of which writer a chunk has, and where each writer stands."""

from pathlib import Path

import pytest

from lazyshard.format.seal import producer_source
from lazyshard.format.writers import Sequenced, check_writer_name
from lazyshard.store.files import read_seal
from tests.stream.streams import owners, refusal_of, sequence, write_pieces


def positions(stream: Path) -> list[tuple[dict[str, tuple[int, int]], list[tuple[str, int, int]]]]:
    told = []
    for chunk in range(len(owners(stream))):
        position = Sequenced.read_source(read_seal(stream, chunk).source)
        assert position is not None
        told.append((dict(position.taken), [(one.writer, one.first, one.count) for one in position.rows]))
    return told


def test_remainders_that_fill_several_chunks(tmp_path: Path) -> None:
    for name in "abcd":
        write_pieces(stream := tmp_path / "s", name, 3, 4)
    sequence(stream)
    assert positions(stream) == [
        ({"a": (3, 0), "b": (1, 0)}, [("a", 0, 3), ("b", 0, 1)]),
        ({"a": (3, 0), "b": (3, 1), "c": (2, 1)}, [("b", 1, 2), ("c", 0, 2)]),
        ({"a": (3, 0), "b": (3, 1), "c": (3, 2), "d": (3, 2)}, [("c", 2, 1), ("d", 0, 3)]),
    ]
    assert (stream / "stream.end").exists()


def test_remainders_after_whole_pieces(tmp_path: Path) -> None:
    for name, rows in (("a", 9), ("b", 3), ("c", 10)):
        write_pieces(stream := tmp_path / "s", name, rows, 3)
    sequence(stream)
    assert positions(stream)[-2:] == [
        ({"a": (9, 4), "c": (8, 2), "b": (3, 4)}, [("a", 8, 1), ("b", 0, 3)]),
        ({"a": (9, 4), "b": (3, 4), "c": (10, 5)}, [("c", 8, 2)]),
    ]


def test_position_of_the_producer_of_a_chunk(tmp_path: Path) -> None:
    for name, rows in (("a", 5), ("b", 5)):
        write_pieces(stream := tmp_path / "s", name, rows, 2)
    sequence(stream)
    found = [producer_source(read_seal(stream, chunk).source) for chunk in range(3)]
    assert [one and one["rows"] for one in found] == [4, 4, None]
    assert producer_source({"rows": 7, "writers": 2}) == {"rows": 7, "writers": 2}


@pytest.mark.parametrize("name", ["committed.json", "end.json"])
def test_names_of_the_files_beside_the_folders_of_writers(name: str) -> None:
    refusal_of(ValueError, "name", check_writer_name, name)
