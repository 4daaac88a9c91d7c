"""A stream in a bucket is read as the same one in a directory: each sample once, as it comes, with the same errors."""

import os
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset, Order, StreamReader, errors
from lazyshard.errors import ChunkCorrupt, ChunkMissing, StreamInvalid
from lazyshard.format.records import HEAD, arrays_name, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor
from lazyshard.inspection.verification import verify
from lazyshard.store.files import UrlPath
from lazyshard.store.mirror import AHEAD_VARIABLE, BYTES_VARIABLE
from lazyshard.stream import CursorOwner
from lazyshard.stream import reader as reading
from lazyshard_producer.limits import Shelf
from lazyshard_producer.shipping.shipper import put_chunk
from lazyshard_producer.shipping.store import read_stream, restore
from tests.cli.commands import lazyshard
from tests.data.options import grouped
from tests.packaging.guide_programs import blocks
from tests.store.producing import Shipping
from tests.store.server import Gate, Server
from tests.store.streams import copies, publish, put, upload
from tests.stream.arrays import expected, values
from tests.stream.arrays import produce as produce_arrays
from tests.stream.damage import cut, delete, each, flip
from tests.stream.streams import DEADLINE_S, cursor, names, produce, raised, refusal_of, rows


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, dp_rank=rank, dp_size=dp, **grouped({"max_wait": DEADLINE_S, **options}))


def test_a_live_stream_is_waited_for_and_read_as_it_comes(tmp_path: Path, bucket: UrlPath) -> None:
    refusal_of(errors.WaitTimeout, f"^{bucket}: ", StreamReader, bucket, max_wait=0.1)
    folder, found = tmp_path / "local", []
    timer = threading.Timer(0.3, publish, (folder, bucket, 4), {"end": False})
    timer.start()
    for row in StreamReader(f"{bucket}/", max_wait=DEADLINE_S):
        found.append(row)
        if len(found) == 4:
            caught = raised(errors.WaitTimeout, StreamReader(bucket, max_wait=0.1).read, 4)
            told = caught.directory, caught.chunk, caught.state
            assert told == (str(bucket), 2, "idle")
        if len(found) in (4, 6):
            publish(folder, bucket, len(found) + 2, end=len(found) == 6)
    assert found == rows(0, 8)
    timer.join()
    # A string names it as well.
    assert f"'{bucket}'" in repr(open_rank(str(bucket)))  # type: ignore[arg-type]
    assert str(pickle.loads(pickle.dumps(StreamReader(bucket))).directory) == str(bucket)


def test_workers_of_two_ranks_fetch_each_chunk_once(tmp_path: Path, server: Server, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 32, 4)
    server.asked.clear()
    loaders = []
    for rank in range(2):
        dataset = open_rank(bucket, rank, 2, batch_size=2)
        loader = DataLoader(dataset, 2, sampler=dataset.rank_indices, num_workers=2, collate_fn=list)
        loaders.append(iter(loader))
    found = Counter(row["id"] for batches in zip(*loaders, strict=True) for batch in batches for row in batch)
    assert found == Counter(range(32))
    assert server.gets(".jsonl") == Counter({chunk_name(chunk): 1 for chunk in range(8)})


def test_damage_is_refused_as_in_a_directory(tmp_path: Path, bucket: UrlPath) -> None:
    folder = publish(tmp_path / "local", bucket, 14)
    changes: list[tuple[str, Callable[[bytes], bytes]]] = [
        (chunk_name(1), lambda data: data.replace(b"3", b"4")),
        (chunk_name(2), lambda data: data[:-1]),
        (chunk_name(3), lambda data: data + b"\n"),
        (chunk_name(4), lambda data: b""),
        (seal_name(5), lambda data: data[:20]),
    ]
    for name, change in changes:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        put(bucket / name, (folder / name).read_bytes())
    readers = [StreamReader(directory) for directory in (folder, bucket)]
    for number, (name, _) in enumerate(changes, 1):
        told = []
        for reader in readers:
            caught = raised(errors.ChunkCorrupt, reader.read, 2 * number + 1)
            assert vars(caught)["file"] == f"{reader.directory}/{name}"
            told.append((type(caught), str(caught).replace(str(reader.directory), "STREAM")))
        assert told[0] == told[1]
    assert [reader.read(sample) for reader in readers for sample in (0, 13)] == [{"id": 0}, {"id": 13}] * 2


def test_chunk_got_in_parts(tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of 27 bytes, and one of 9. If all parts are full, one more shows that the object ends there.
    for size, parts in ((7, 4), (9, 4)):
        monkeypatch.setattr("lazyshard.store.files.PART_BYTES", size)
        folder = publish(tmp_path / str(size), bucket / str(size), 7, 3)
        assert list(StreamReader(bucket / str(size))) == rows(0, 7)
        assert server.gets(f"{size}/{chunk_name(0)}") == {chunk_name(0): parts}
    seal = Seal.decode((folder / seal_name(1)).read_bytes(), 1)
    offsets = seal.offsets.copy()
    offsets[-1] = 2**50
    upload(folder, bucket / "false")
    put(bucket / "false" / seal_name(1), replace(seal, offsets=offsets).encode())
    reader = StreamReader(bucket / "false")
    caught = raised(errors.ChunkCorrupt, reader.read, 3)
    assert (caught.expected, caught.actual) == (f"{2**50} bytes as sealed", "27 bytes")
    assert not server.gets(f"false/{chunk_name(1)}")
    assert reader.read(0) == {"id": 0}


def test_a_stream_that_was_made_anew_is_not_taken_for_the_old_one(tmp_path: Path, bucket: UrlPath) -> None:
    publish(tmp_path / "old", bucket, 8)
    reader = StreamReader(bucket)
    assert reader.read(0) == {"id": 0}
    publish(tmp_path / "new", bucket, 8)
    refusal_of(errors.StreamMismatch, f"^{bucket}: ", reader.read, 7)
    # Under the same name, but with copies of its own.
    assert list(StreamReader(bucket)) == rows(0, 8)


def test_what_is_there_beside_whole_streams_of_ours(tmp_path: Path, bucket: UrlPath) -> None:
    put(bucket / "foreign" / chunk_name(0), b"{}\n")
    put(bucket / "foreign" / seal_name(0), b"")
    raised(errors.StreamInvalid, StreamReader, bucket / "foreign", 1)
    refusal_of(errors.AccessRefused, r"^s3://no-such-bucket/a/stream.json: ", StreamReader, "s3://no-such-bucket/a")
    publish(tmp_path / "local", bucket, 5)
    (bucket / HEAD).store.delete((bucket / HEAD).key)
    assert list(StreamReader(bucket)) == list(StreamReader(f"file://{tmp_path}/local")) == rows(0, 5)


def test_a_copy_is_fetched_ahead(tmp_path: Path, server: Server, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 12)
    gate = Gate()
    server.fault = lambda method, key: gate.hold if method == "GET" and key.endswith(chunk_name(2)) else None
    reader = StreamReader(bucket)
    try:
        assert [reader.read(sample)["id"] for sample in (0, 2)] == [0, 2]
        # Asked for although nobody has come to it yet.
        gate.wait()
    finally:
        gate.open()
    assert reader.read(4) == {"id": 4}
    assert server.gets(chunk_name(2)) == {chunk_name(2): 1}


def test_requests_of_a_reader(tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/object-storage.md says."""
    publish(tmp_path / "local", bucket, 8)
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    monkeypatch.setattr(reading, "_LET_GO_S", 60.0)  # A slow machine asks for deletions
    server.asked.clear()
    reader = StreamReader(bucket)
    assert server.asked.total() == 2
    server.asked.clear()
    assert [reader.read(sample)["id"] for sample in range(8)] == list(range(8))
    assert server.asked.total() == 3 * 4
    again = StreamReader(bucket)
    server.asked.clear()
    assert [again.read(sample)["id"] for sample in range(8)] == list(range(8))
    assert server.asked.total() == 0
    with CursorOwner(bucket, "run") as owner:
        owner.begin(Cursor("run", None, 0, 0, {}, 1.0))
        assert server.asked.total() == 3
        server.asked.clear()
        owner.write(Cursor("run", None, 2, 1, {}, 1.0))
        assert {method for method, _ in server.asked} == {"GET", "PUT"}
        assert server.asked.total() == 2


def test_uploaded_directory_is_the_same(tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/moving.md says."""
    (program,) = blocks("../moving.md", "python")
    produce(tmp_path / "stream", 5)
    monkeypatch.chdir(tmp_path)
    exec(program.replace("s3://training/chat", str(bucket)), {})
    assert lazyshard("verify", str(bucket)).returncode == 0
    there = StreamReader(bucket)
    assert there.stream_id == StreamReader(tmp_path / "stream").stream_id
    assert list(there) == rows(0, 5)


def read(url: UrlPath) -> list[Any]:
    return [values(row) for row in StreamReader(url, max_wait=0)]


def test_side_file_got_once(server: Server, bucket: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    upload(produce_arrays(tmp_path / "stream", 6), bucket)
    server.asked.clear()
    assert read(bucket) == read(bucket) == expected(0, 6)
    fetched = [key.rpartition("/")[2] for method, key in server.asked if method == "GET" and ".arrays" in key]
    assert sorted(fetched) == [arrays_name(number) for number in range(3)]
    assert copies(tmp_path / "cache") == [chunk_name(number) for number in range(3)]
    dataset = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, order=Order(shuffle_window=4))
    assert sorted(values(dataset[index]) for index in range(6)) == expected(0, 6)
    assert not verify(bucket).findings


def test_bound_of_side_files(server: Server, bucket: UrlPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    produce_arrays(tmp_path / "stream", 8)
    sizes = [Shelf(tmp_path / "stream").chunk_size(number) for number in range(4)]
    monkeypatch.setenv(BYTES_VARIABLE, str(sizes[0] + sizes[1] + 31))
    upload(tmp_path / "stream", bucket)
    reader = StreamReader(bucket)
    for sample in range(8):
        assert values(reader.read(sample)) == expected(sample, sample + 1)[0]
        taken = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*"))
        assert taken <= sizes[0] + sizes[1] + 31


def test_damaged_and_lost_side_files_are_fetched_again(server: Server, bucket: UrlPath, tmp_path: Path) -> None:
    folder = produce_arrays(tmp_path / "stream", 8)
    shutil.copytree(folder, tmp_path / "whole")
    each(flip(arrays_name(1), 17), cut(arrays_name(2), 8), delete(arrays_name(3)))(folder)
    upload(folder, bucket)
    reader = StreamReader(bucket, max_wait=0)
    assert [values(reader.read(sample)) for sample in range(3)] == expected(0, 3)
    for sample, error in ((3, ChunkCorrupt), (4, ChunkCorrupt), (6, ChunkMissing)):
        refusal_of(error, f"{bucket}/{arrays_name(sample // 2)}", reader.read, sample)
        assert chunk_name(sample // 2) not in copies(tmp_path / "cache")
    upload(tmp_path / "whole", bucket)
    assert read(bucket) == expected(0, 8)
    # A copy that is lost or cut is fetched again as well.
    [path] = (tmp_path / "cache").glob(f"*/{chunk_name(0)}")
    path.unlink()
    assert read(bucket) == expected(0, 8)
    os.truncate(path, 3)
    assert read(bucket) == expected(0, 8)
    # So is one that was changed, once that was told.
    flip(path.name, 3)(path.parent)
    raised(ChunkCorrupt, StreamReader(bucket).read, 0)
    assert read(bucket) == expected(0, 8)


@pytest.fixture
def shipping(server: Server, bucket: UrlPath, tmp_path: Path) -> Shipping:
    return Shipping(bucket, tmp_path / "spool")


def test_side_file_follows_its_chunk(server: Server, bucket: UrlPath, shipping: Shipping, tmp_path: Path) -> None:
    produce_arrays(shipping.spool.stream, 8, end=False)
    stream_id = StreamReader(shipping.spool.stream).stream_id
    used = sum(map(Shelf(shipping.spool.stream).chunk_size, range(4)))
    assert shipping.shelf.settle(4, print)
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
    assert shipping.left() == {arrays_name(3), chunk_name(3), seal_name(3)}
    shutil.rmtree(tmp_path / "cache")
    reader = StreamReader(bucket)
    caught = raised(errors.ChunkRetired, reader.read, 2)
    assert (caught.file, caught.chunk) == (f"{bucket}/{seal_name(1)}", 1)
    assert values(reader.read(6)) == expected(6, 7)[0]


def test_spool_is_made_of_the_store_with_its_arrays(bucket: UrlPath, shipping: Shipping, tmp_path: Path) -> None:
    produce_arrays(shipping.spool.stream, 4, end=False)
    assert shipping.shelf.settle(2, print)
    found = read_stream(shipping.store, 2)
    assert not found.unsealed
    restore(shipping.store, found, tmp_path / "restored")
    assert {arrays_name(1), chunk_name(1), seal_name(1)} <= set(names(tmp_path / "restored"))
    produce_arrays(tmp_path / "restored", 6)
    assert not verify(tmp_path / "restored").findings
    shipping.store.put(arrays_name(2), b"of a chunk that was never sealed")
    assert read_stream(shipping.store, 2).unsealed == [arrays_name(2)]
    shipping.store.delete(arrays_name(0))
    refusal_of(ChunkMissing, arrays_name(0), read_stream, shipping.store, 2)


def test_side_file_of_a_killed_producer_is_replaced_and_a_sealed_one_stays(shipping: Shipping, tmp_path: Path) -> None:
    ours, others = produce_arrays(tmp_path / "ours", 2), produce_arrays(tmp_path / "others", 4)
    rows, seal, arrays = ((ours / name(0)).read_bytes() for name in (chunk_name, seal_name, arrays_name))
    other_seal = (others / seal_name(1)).read_bytes().replace(b'"chunk":1', b'"chunk":0')
    other_arrays = (others / arrays_name(1)).read_bytes()
    shipping.store.put(arrays_name(0), other_arrays)
    put_chunk(shipping.store, 0, rows, seal, arrays)
    assert shipping.store.get(arrays_name(0)) == arrays
    # The same rows and seal with other arrays are another chunk.
    raised(StreamInvalid, put_chunk, shipping.store, 0, rows, other_seal, other_arrays)
    assert shipping.store.get(arrays_name(0)) == arrays
