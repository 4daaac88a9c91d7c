"""Rows that another process has checked are read again, checked again, and never taken from what is gone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyshard.errors import ChunkCorrupt, ChunkMissing
from lazyshard.storage import StreamReader, places
from lazyshard.storage.places import Place, read_place
from tests.storage.streams import foreign, produce


@pytest.fixture(autouse=True)
def none_open() -> Iterator[None]:
    places._open_files.clear()
    yield
    places._open_files.clear()


def place_of(directory: Path, chunk: int, row: int) -> Place:
    place = StreamReader(directory).chunk(chunk).place(row)
    assert place is not None
    return place


def test_a_row_is_read_where_it_lies(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4)
    place = place_of(directory, 1, 1)
    assert place[:5] == (str(directory / "chunk_00001.jsonl"), 1, 1, 9, 9)
    assert [read_place(place_of(directory, *divmod(i, 2))) for i in (3, 0, 2)] == [
        b'{"id":3}\n',
        b'{"id":0}\n',
        b'{"id":2}\n',
    ]


def test_a_place_holds_after_the_process_has_gone_to_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(tmp_path / "s", 2)
    monkeypatch.chdir(tmp_path)
    place = place_of(Path("s"), 0, 0)
    monkeypatch.chdir("/")
    assert read_place(place) == b'{"id":0}\n'


def test_rows_without_digests_have_no_place(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "s", b'{"id":0}\n', end=True)
    assert StreamReader(directory, samples_per_chunk=1).chunk(0).place(0) is None


def test_a_row_that_was_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    with open(place.path, "r+b") as file:
        os.pwrite(file.fileno(), b"9", 9 + 6)
    with pytest.raises(ChunkCorrupt, match=r"row 1 \(byte 9\): expected XXH3 .* of 9 bytes as sealed, found .*changed"):
        read_place(place)


def test_a_file_that_was_cut_meanwhile_is_refused(tmp_path: Path) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    os.truncate(place.path, 13)
    with pytest.raises(ChunkCorrupt, match="found 4 bytes; the file was changed"):
        read_place(place)


@pytest.mark.parametrize("known", [False, True])
def test_a_row_whose_file_was_deleted_meanwhile(tmp_path: Path, known: bool) -> None:
    place = place_of(produce(tmp_path / "s", 2), 0, 1)
    if known:
        read_place(place)
    os.unlink(place.path)
    if known:
        # It is still open here.
        assert read_place(place) == b'{"id":1}\n'
        return
    with pytest.raises(ChunkMissing, match="row 1 was read by a DataLoader worker, and the file is gone since"):
        read_place(place)


def test_an_open_file_that_another_has_replaced_is_opened_again(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 2)
    assert read_place(place_of(directory, 0, 0)) == b'{"id":0}\n'
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "chunk_00000.jsonl").write_bytes(b'{"id":7}\n{"id":8}\n')
    other = produce(tmp_path / "other", 9)
    of_eight = place_of(other, 4, 0)._replace(path=str(directory / "chunk_00000.jsonl"), start=9)
    assert read_place(of_eight) == b'{"id":8}\n'


def test_few_files_stay_open_and_none_that_was_deleted(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 40)
    found = [place_of(directory, number, 0) for number in range(20)]
    for place in found[:10]:
        read_place(place)
    assert list(places._open_files) == [place.path for place in found[2:10]]
    for place in found[4:10]:
        os.unlink(place.path)
    read_place(found[10])
    assert list(places._open_files) == [found[3].path, found[10].path]
