"""Of large arrays and media in an object store, only what is drawn is fetched; what was fetched stays on the node."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset, Order, StreamReader, errors
from lazyshard.format.records import MANIFEST, arrays_name, chunk_name
from lazyshard.format.seal import Seal
from lazyshard.store import mirror
from lazyshard.store.files import UrlPath
from lazyshard.store.mirror import AHEAD_VARIABLE, RANGED_BYTES
from tests.store.server import Answer, Server
from tests.store.streams import put, upload
from tests.stream.streams import publish_rows, raised

pytestmark = pytest.mark.full

ROWS = 16
SIZE = RANGED_BYTES + 8  # of a picture: a row's bytes in the side file are a multiple of 8


def picture(number: int) -> bytes:
    return bytes([number + 1]) * SIZE


def publish_pictures(directory: Path, url: UrlPath, pictures: range) -> None:
    rows = ({"id": number, "image": picture(shown)} for number, shown in enumerate(pictures))
    upload(publish_rows(directory, ROWS, rows, arrays=True), url)


def sharing(url: UrlPath, share: float = 0.0, **options: Any) -> StreamReader:
    """A reader that draws this share of the rows."""
    reader = StreamReader(url, **options)
    reader.share = share
    return reader


@pytest.fixture
def media(tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> UrlPath:
    """A stream of two chunks of 16 pictures."""
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    publish_pictures(tmp_path / "made", bucket, range(2 * ROWS))
    return bucket


@pytest.fixture
def fetched(server: Server, media: UrlPath) -> Iterator[list[int]]:
    """How many bytes of arrays each request got, in order."""
    sizes: list[int] = []

    def note(method: str, key: str) -> Any:
        def body(data: bytes) -> Answer:
            sizes.append(len(data))
            return [data]

        return body if method == "GET" and ".arrays" in key else None

    server.fault = note
    yield sizes
    server.fault = lambda method, key: None


def read(dataset: LazyShardedDataset, wanted: int) -> list[int]:
    found = [dataset[index] for index in list(dataset.rank_indices)[:wanted]]
    assert all(row["image"] == picture(row["id"]) for row in found)
    return [row["id"] for row in found]


def open_dataset(url: UrlPath, unit: int, dp: int, **more: Any) -> LazyShardedDataset:
    return LazyShardedDataset(url, dp_rank=0, dp_size=dp, order=Order(unit=unit, **more))


def test_only_drawn_pictures_are_fetched_and_only_once(media: UrlPath, fetched: list[int]) -> None:
    dataset = open_dataset(media, 1, 8)
    drawn = read(dataset, 4)
    assert drawn == [0, 8, 16, 24]
    assert fetched == [SIZE] * 4
    assert read(dataset, 4) == read(open_dataset(media, 1, 8), 4) == drawn
    assert fetched == [SIZE] * 4


def test_a_rank_that_draws_whole_chunks_fetches_them_whole(media: UrlPath, fetched: list[int]) -> None:
    assert read(open_dataset(media, ROWS, 2, shuffle_window=2), ROWS) != list(range(ROWS))
    assert fetched == [ROWS * SIZE]


def test_a_node_that_draws_most_fetches_all(
    media: UrlPath, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert read(open_dataset(media, 1, 8), 1) == [0]
    assert fetched == [ROWS * SIZE]


def test_a_small_split_is_fetched_by_ranges(media: UrlPath, fetched: list[int]) -> None:
    dataset = open_dataset(media, ROWS, 1, split="validation", splits=(7, 1))
    assert len(read(dataset, 4)) == 4
    assert fetched == [SIZE] * 4


def test_rows_in_order_are_fetched_ahead_in_doubling_ranges(media: UrlPath, fetched: list[int]) -> None:
    reader = sharing(media)
    assert [reader.read(number)["image"] == picture(number) for number in range(ROWS)] == [True] * ROWS
    assert [size // SIZE for size in fetched] == [1, 2, 4, 8, 1]
    reader.read(ROWS + 4)
    reader.read(ROWS)
    assert [size // SIZE for size in fetched[5:]] == [1, 1]


def test_rows_of_different_sizes_are_fetched_ahead_too(
    tmp_path: Path, bucket: UrlPath, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkWriter(tmp_path / "made", 64, arrays=True) as writer:
        for number in range(64):
            writer.write({"id": number, "image": bytes(SIZE + 1000 * (number % 7))})
    upload(tmp_path / "made", bucket)
    reader = sharing(bucket)
    assert [len(reader.read(number)["image"]) for number in range(64)] == [SIZE + 1000 * (n % 7) for n in range(64)]
    assert server.gets(arrays_name(0))[arrays_name(0)] < 10


def test_a_copy_that_is_read_keeps_its_holes(media: UrlPath, fetched: list[int]) -> None:
    some, whole = open_dataset(media, 1, 8), StreamReader(media)
    assert read(some, 1) == [0]
    assert [whole.read(number)["id"] for number in (8, 0, 9)] == [8, 0, 9]
    assert fetched == [SIZE, SIZE, 2 * SIZE]
    assert read(some, 2) == [0, 8]


def test_a_reader_of_whole_chunks_fetches_anew_what_another_drew_some_of(media: UrlPath, fetched: list[int]) -> None:
    assert read(open_dataset(media, 1, 8), 1) == [0]
    whole = StreamReader(media)
    for _ in range(2):
        assert [whole.read(number)["image"] for number in range(ROWS)] == [picture(number) for number in range(ROWS)]
        whole = StreamReader(media)
    assert fetched == [SIZE, ROWS * SIZE]


def test_the_copy_takes_no_more_room_than_what_was_drawn(media: UrlPath, tmp_path: Path) -> None:
    read(open_dataset(media, 1, 8), 1)
    (copy,) = (tmp_path / "cache").glob(f"*/{chunk_name(0)}")
    assert copy.stat().st_size > ROWS * SIZE > 4 * SIZE > 512 * copy.stat().st_blocks


def test_a_changed_picture_is_refused_and_those_beside_it_are_read(media: UrlPath, tmp_path: Path) -> None:
    data = bytearray((tmp_path / "made" / arrays_name(0)).read_bytes())
    data[8 * SIZE + 5] ^= 1
    put(media / arrays_name(0), bytes(data))
    reader = sharing(media)
    caught = raised(errors.ChunkCorrupt, reader.read, 8)
    assert (caught.file, caught.row, caught.byte) == (f"{media}/{arrays_name(0)}", 8, 8 * SIZE)
    assert reader.read(9)["image"] == picture(9)
    media.store.delete(f"{media.key}/{MANIFEST}")
    raised(errors.ChunkCorrupt, reader.read, 8)


def test_a_damaged_copy_that_others_read_is_passed_by(
    media: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StreamReader(media)
    other.read(0)
    (copy,) = (tmp_path / "cache").glob(f"*/{chunk_name(0)}")
    os.truncate(copy, copy.stat().st_size - 1)
    monkeypatch.setattr(mirror, "_STALLED_S", 0.1)
    assert StreamReader(media).read(1)["image"] == picture(1)


def test_a_shortened_object_is_refused(media: UrlPath, tmp_path: Path) -> None:
    reader = sharing(media)
    reader.read(0)
    put(media / arrays_name(0), (tmp_path / "made" / arrays_name(0)).read_bytes()[: 8 * SIZE + 5])
    assert raised(errors.ChunkCorrupt, reader.read, 8).row == 8


def test_a_recreated_stream_is_noticed(media: UrlPath, tmp_path: Path) -> None:
    reader = sharing(media)
    reader.read(0)
    publish_pictures(tmp_path / "other", media, range(100, 100 + 2 * ROWS))
    raised(errors.StreamMismatch, reader.read, 8)


def test_deleted_pictures_are_told(media: UrlPath, fetched: list[int]) -> None:
    read(open_dataset(media, 1, 8), 1)
    media.store.delete(f"{media.key}/{arrays_name(0)}")
    assert sharing(media, max_wait=0.0).read(0)["image"] == picture(0)
    for share in (0.0, 1.0):
        caught = raised(errors.ChunkMissing, sharing(media, share, max_wait=0.0).read, 8)
        assert (caught.file, caught.chunk) == (f"{media}/{arrays_name(0)}", 0)


def test_a_torn_range_is_fetched_again(media: UrlPath, tmp_path: Path, fetched: list[int]) -> None:
    """A process that is killed while it writes a range leaves a part of it."""
    read(open_dataset(media, 1, 8), 1)
    (copy,) = (tmp_path / "cache").glob(f"*/{chunk_name(0)}")
    begin = Seal.decode((tmp_path / "made" / "chunk_00000.jsonl.completed").read_bytes(), 0).size
    with open(copy, "r+b") as file:
        os.pwrite(file.fileno(), picture(8)[: SIZE // 2], begin + 8 * SIZE)
    assert read(open_dataset(media, 1, 8), 2) == [0, 8]
    assert fetched == [SIZE] * 2


def test_small_arrays_are_fetched_whole(tmp_path: Path, bucket: UrlPath, server: Server) -> None:
    rows = ({"id": number, "image": bytes(RANGED_BYTES - 8)} for number in range(ROWS))
    upload(publish_rows(tmp_path / "made", ROWS, rows, arrays=True), bucket)
    reader = sharing(bucket)
    assert [reader.read(number)["id"] for number in range(ROWS)] == list(range(ROWS))
    assert server.gets(arrays_name(0)) == {arrays_name(0): 1}
