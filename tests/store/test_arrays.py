"""Streams whose rows hold arrays, in a bucket: put there, read through the cache of a node, deleted, restored."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset, Order, StreamReader
from lazyshard.errors import ChunkCorrupt, ChunkMissing, StreamInvalid
from lazyshard.format.records import arrays_name, chunk_name, seal_name
from lazyshard.inspection.verification import verify
from lazyshard.store.files import UrlPath
from lazyshard.store.mirror import AHEAD_VARIABLE, BYTES_VARIABLE
from lazyshard_producer.limits import Shelf
from lazyshard_producer.shipping.shipper import Shipper, put_chunk
from lazyshard_producer.shipping.store import Spool, read_stream, restore
from lazyshard_producer.stop import Stop
from tests.store.producing import taken
from tests.store.server import Server
from tests.store.streams import upload
from tests.stream.arrays import expected, produce, values
from tests.stream.consuming import cursor
from tests.stream.damage import cut, delete, each, flip
from tests.stream.streams import names, raised, refusal_of


def read(url: UrlPath) -> list[Any]:
    return [values(row) for row in StreamReader(url, max_wait=0)]


def copies(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").glob("*/*"))


def test_side_file_got_once(server: Server, bucket: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    upload(produce(tmp_path / "stream", 6), bucket)
    server.asked.clear()
    assert read(bucket) == read(bucket) == expected(0, 6)
    fetched = [key.rpartition("/")[2] for method, key in server.asked if method == "GET" and ".arrays" in key]
    assert sorted(fetched) == [arrays_name(number) for number in range(3)]
    assert copies(tmp_path) == [chunk_name(number) for number in range(3)]
    dataset = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, order=Order(shuffle_window=4))
    assert sorted(values(dataset[index]) for index in range(6)) == expected(0, 6)
    assert not verify(bucket).findings


def test_bound_of_side_files(server: Server, bucket: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    produce(tmp_path / "stream", 8)
    sizes = [Shelf(tmp_path / "stream").chunk_size(number) for number in range(4)]
    monkeypatch.setenv(BYTES_VARIABLE, str(sizes[0] + sizes[1] + 31))
    upload(tmp_path / "stream", bucket)
    reader = StreamReader(bucket)
    for sample in range(8):
        assert values(reader.read(sample)) == expected(sample, sample + 1)[0]
        taken = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*"))
        assert taken <= sizes[0] + sizes[1] + 31


def test_damaged_and_lost_side_files_are_fetched_again(server: Server, bucket: UrlPath, tmp_path: Path) -> None:
    folder = produce(tmp_path / "stream", 8)
    shutil.copytree(folder, tmp_path / "whole")
    each(flip(arrays_name(1), 17), cut(arrays_name(2), 8), delete(arrays_name(3)))(folder)
    upload(folder, bucket)
    reader = StreamReader(bucket, max_wait=0)
    assert [values(reader.read(sample)) for sample in range(3)] == expected(0, 3)
    for sample, error in ((3, ChunkCorrupt), (4, ChunkCorrupt), (6, ChunkMissing)):
        refusal_of(error, f"{bucket}/{arrays_name(sample // 2)}", reader.read, sample)
        assert chunk_name(sample // 2) not in copies(tmp_path)
    upload(tmp_path / "whole", bucket)
    assert read(bucket) == expected(0, 8)
    # A copy that is lost or cut is fetched again as well.
    [path] = (tmp_path / "cache").glob(f"*/{chunk_name(0)}")
    path.unlink()
    assert read(bucket) == expected(0, 8)
    os.truncate(path, 3)
    assert read(bucket) == expected(0, 8)


class Shipping:
    """What puts a spool to the store, without the command whose rows hold no arrays."""

    def __init__(self, url: UrlPath, root: Path) -> None:
        self.store = taken(url, 5.0)
        self.spool = Spool(root, self.store.url)
        self.shelf = Shipper(self.store, self.spool, read_stream(self.store, None), 1 << 30, Stop(), print)

    def ship(self, chunks: int) -> None:
        assert self.shelf.settle(chunks, lambda text: None)


@pytest.fixture
def shipping(server: Server, bucket: UrlPath, tmp_path: Path) -> Shipping:
    return Shipping(bucket, tmp_path / "spool")


def test_side_file_is_put_and_deleted_with_its_chunk(server: Server, bucket: UrlPath, shipping: Shipping) -> None:
    produce(shipping.spool.stream, 8, end=False)
    stream_id = StreamReader(shipping.spool.stream).stream_id
    used = sum(map(Shelf(shipping.spool.stream).chunk_size, range(4)))
    shipping.ship(4)
    put = [key.rpartition("/")[2] for method, key in server.asked if method == "PUT"]
    chunks = [name for name in put if name.startswith("chunk_")]
    assert chunks == [name(number) for number in range(4) for name in (arrays_name, chunk_name, seal_name)]
    reader = StreamReader(bucket)
    assert [values(reader.read(sample)) for sample in range(8)] == expected(0, 8)
    assert not verify(bucket).findings
    assert shipping.shelf.used_bytes(4) == used
    cursor(bucket, "run", consumed=6, chunks_before=3, stream_id=stream_id)
    shipping.shelf.retire(3, 4, lambda: None)
    shipping.shelf.finish()
    kept = [name for name in shipping.store.list() if name.startswith("chunk_")]
    assert sorted(kept) == sorted([arrays_name(3), chunk_name(3), seal_name(3)])


def test_spool_is_made_of_the_store_with_its_arrays(bucket: UrlPath, shipping: Shipping, tmp_path: Path) -> None:
    produce(shipping.spool.stream, 4, end=False)
    shipping.ship(2)
    found = read_stream(shipping.store, 2)
    assert not found.unsealed
    restore(shipping.store, found, tmp_path / "restored")
    assert {arrays_name(1), chunk_name(1), seal_name(1)} <= set(names(tmp_path / "restored"))
    produce(tmp_path / "restored", 6)
    assert not verify(tmp_path / "restored").findings
    shipping.store.put(arrays_name(2), b"of a chunk that was never sealed")
    assert read_stream(shipping.store, 2).unsealed == [arrays_name(2)]
    shipping.store.delete(arrays_name(0))
    refusal_of(ChunkMissing, arrays_name(0), read_stream, shipping.store, 2)


def test_side_file_of_a_killed_producer_is_replaced_and_a_sealed_one_stays(shipping: Shipping, tmp_path: Path) -> None:
    ours, others = produce(tmp_path / "ours", 2), produce(tmp_path / "others", 4)
    rows, seal, arrays = ((ours / name(0)).read_bytes() for name in (chunk_name, seal_name, arrays_name))
    other_seal = (others / seal_name(1)).read_bytes().replace(b'"chunk":1', b'"chunk":0')
    other_arrays = (others / arrays_name(1)).read_bytes()
    shipping.store.put(arrays_name(0), other_arrays)
    put_chunk(shipping.store, 0, rows, seal, arrays)
    assert shipping.store.get(arrays_name(0)) == arrays
    # The same rows and seal with other arrays are another chunk.
    raised(StreamInvalid, put_chunk, shipping.store, 0, rows, other_seal, other_arrays)
    assert shipping.store.get(arrays_name(0)) == arrays
