"""A stream in a bucket is read as the same one in a directory: each sample once, as it comes, with the same errors."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lazyshard import LazyShardedDataset, StreamReader, errors
from lazyshard.format.cursor import Cursor
from lazyshard.format.names import HEAD, chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.store.room import AHEAD_VARIABLE
from lazyshard.store.urls import UrlPath
from lazyshard.stream import CursorOwner, retention
from tests.data.options import grouped
from tests.store.server import BUSY, Gate, Server
from tests.store.streams import publish, put, upload
from tests.stream.streams import DEADLINE_S, rows


def open_rank(directory: Path, rank: int = 0, dp: int = 1, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(directory, dp_rank=rank, dp_size=dp, **grouped({"max_wait": DEADLINE_S, **options}))


def ids(dataset: LazyShardedDataset) -> list[int]:
    return [dataset[index]["id"] for index in dataset.rank_indices]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle_window": 2}, {"unit": "sample"}], ids=["chunks", "window", "samples"]
)
def test_ranks_read_what_they_read_in_a_directory(tmp_path: Path, bucket: UrlPath, options: dict[str, Any]) -> None:
    folder = publish(tmp_path / "local", bucket, 33, 3)
    for rank in range(2):
        assert ids(open_rank(bucket, rank, 2, **options)) == ids(open_rank(folder, rank, 2, **options))


def test_a_string_names_the_stream_as_well(tmp_path: Path, bucket: UrlPath) -> None:
    # It is not there yet, and waited for.
    timer = threading.Timer(0.3, publish, (tmp_path / "local", bucket, 5))
    timer.start()
    assert list(StreamReader(f"{bucket}/", max_wait=DEADLINE_S)) == rows(0, 5)
    timer.join()
    assert f"'{bucket}'" in repr(open_rank(str(bucket)))  # type: ignore[arg-type]
    assert str(pickle.loads(pickle.dumps(StreamReader(bucket))).directory) == str(bucket)


def test_workers_of_two_ranks_fetch_each_chunk_once(tmp_path: Path, server: Server, bucket: UrlPath) -> None:
    publish(tmp_path / "local", bucket, 64, 4)
    server.asked.clear()
    loaders = []
    for rank in range(2):
        dataset = open_rank(bucket, rank, 2, batch_size=2)
        loader = DataLoader(dataset, 2, sampler=dataset.rank_indices, num_workers=2, collate_fn=list)
        loaders.append(iter(loader))
    found = Counter(row["id"] for batches in zip(*loaders, strict=True) for batch in batches for row in batch)
    assert found == Counter(range(64))
    assert server.gets(".jsonl") == Counter({chunk_name(chunk): 1 for chunk in range(16)})


def test_a_live_stream_is_read_as_it_comes(tmp_path: Path, server: Server, bucket: UrlPath) -> None:
    folder = tmp_path / "local"
    publish(folder, bucket, 4, end=False)
    found: list[int] = []
    more = threading.Event()

    def read() -> None:
        for row in StreamReader(bucket, max_wait=DEADLINE_S):
            found.append(row["id"])
            more.set()

    thread = threading.Thread(target=read)
    thread.start()
    for samples in (6, 10, 11):
        publish(folder, bucket, samples, end=samples == 11)
        while len(found) < samples:
            assert more.wait(DEADLINE_S)
            more.clear()
    thread.join(DEADLINE_S)
    assert found == list(range(11))


def test_waits_end_as_for_a_directory(tmp_path: Path, bucket: UrlPath) -> None:
    with pytest.raises(errors.WaitTimeout, match=f"^{bucket}: "):
        StreamReader(bucket, max_wait=0.1)
    publish(tmp_path / "local", bucket, 4, end=False)
    with pytest.raises(errors.WaitTimeout) as caught:
        StreamReader(bucket, max_wait=0.1).read(4)
    assert (caught.value.directory, caught.value.chunk, caught.value.state) == (str(bucket), 2, "idle")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (chunk_name(1), lambda data: data.replace(b"3", b"4")),
        (chunk_name(1), lambda data: data[:-1]),
        (chunk_name(1), lambda data: data + b"\n"),
        (chunk_name(1), lambda data: b""),
        (seal_name(1), lambda data: data[:20]),
    ],
    ids=["row", "short", "long", "empty", "seal"],
)
def test_damage_is_refused_as_in_a_directory(tmp_path: Path, bucket: UrlPath, name: str, change: Any) -> None:
    folder = publish(tmp_path / "local", bucket, 6)
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    put(bucket / name, (folder / name).read_bytes())
    told = []
    for directory in (folder, bucket):
        reader = StreamReader(directory)
        assert [reader.read(sample) for sample in (0, 4)] == [{"id": 0}, {"id": 4}]
        with pytest.raises((errors.ChunkCorrupt, errors.SealInvalid)) as caught:
            reader.read(3)
        assert vars(caught.value)["file"] == f"{directory}/{name}"
        told.append((type(caught.value), str(caught.value).replace(str(directory), "STREAM")))
    assert told[0] == told[1]


def test_chunk_is_fetched_in_parts(
    tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyshard.store.mirror.PART_BYTES", 7)
    for samples, folder in ((6, "even"), (7, "odd")):
        url = bucket / folder
        assert isinstance(url, UrlPath)
        publish(tmp_path / folder, url, samples, 3)
        assert list(StreamReader(url)) == rows(0, samples)
    assert server.gets(f"even/{chunk_name(0)}") == {chunk_name(0): 4}


def test_false_seal_takes_no_room(
    tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyshard.store.mirror.PART_BYTES", 7)
    folder = publish(tmp_path / "local", bucket, 6, 3)
    seal = Seal.decode((folder / seal_name(1)).read_bytes(), 1)
    offsets = seal.offsets.copy()
    offsets[-1] = 2**50
    put(bucket / seal_name(1), replace(seal, offsets=offsets).encode())
    reader = StreamReader(bucket)
    with pytest.raises(errors.ChunkCorrupt) as caught:
        reader.read(3)
    assert (caught.value.expected, caught.value.actual) == (f"{2**50} bytes as sealed", "27 bytes")
    assert not server.gets(chunk_name(1))
    assert reader.read(0) == {"id": 0}


def test_an_object_that_was_mended_and_a_copy_that_was_spoilt_are_fetched_anew(tmp_path: Path, bucket: UrlPath) -> None:
    folder = publish(tmp_path / "local", bucket, 6)
    whole = (folder / chunk_name(1)).read_bytes()
    put(bucket / chunk_name(1), whole.replace(b"3", b"4"))
    reader = StreamReader(bucket)
    with pytest.raises(errors.ChunkCorrupt):
        reader.read(3)
    assert reader.read(2) == {"id": 2}
    put(bucket / chunk_name(1), whole)
    assert list(StreamReader(bucket)) == rows(0, 6)
    for copy in (tmp_path / "cache").glob(f"*/{chunk_name(1)}"):
        copy.write_bytes(copy.read_bytes().replace(b"3", b"4"))
    with pytest.raises(errors.ChunkCorrupt):
        StreamReader(bucket).read(3)
    assert StreamReader(bucket).read(3) == {"id": 3}


def test_a_chunk_that_the_producer_deleted_is_told_as_such(tmp_path: Path, bucket: UrlPath) -> None:
    folder = publish(tmp_path / "local", bucket, 8)
    retention.retire(folder, 2, 4)
    upload(folder, bucket)
    for chunk in range(2):
        for name in (chunk_name(chunk), seal_name(chunk)):
            (bucket / name).store.delete((bucket / name).key)
    reader = StreamReader(bucket)
    with pytest.raises(errors.ChunkRetired) as caught:
        reader.read(2)
    assert (caught.value.file, caught.value.chunk) == (f"{bucket}/{seal_name(1)}", 1)
    assert reader.read(4) == {"id": 4}


def test_a_stream_that_was_made_anew_is_not_taken_for_the_old_one(tmp_path: Path, bucket: UrlPath) -> None:
    publish(tmp_path / "old", bucket, 8)
    reader = StreamReader(bucket)
    assert reader.read(0) == {"id": 0}
    publish(tmp_path / "new", bucket, 8)
    with pytest.raises(errors.StreamMismatch, match=f"^{bucket}: "):
        reader.read(7)
    # Under the same name, but with copies of its own.
    assert list(StreamReader(bucket)) == rows(0, 8)


def test_what_is_there_beside_whole_streams_of_ours(tmp_path: Path, bucket: UrlPath) -> None:
    put(bucket / "foreign" / chunk_name(0), b"{}\n")
    put(bucket / "foreign" / seal_name(0), b"")
    with pytest.raises(errors.StreamInvalid):
        StreamReader(bucket / "foreign", 1)
    with pytest.raises(errors.AccessRefused, match=r"^s3://no-such-bucket/a/stream.json: "):
        StreamReader("s3://no-such-bucket/a")
    publish(tmp_path / "local", bucket, 5)
    (bucket / HEAD).store.delete((bucket / HEAD).key)
    assert list(StreamReader(bucket)) == list(StreamReader(f"file://{tmp_path}/local")) == rows(0, 5)


def test_a_store_that_stays_away_is_told_and_one_that_is_busy_for_a_while_costs_time_only(
    tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "local", bucket, 12)
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    seen: Counter[str] = Counter()

    def every_second(method: str, key: str) -> Any:
        seen[key] += 1
        return (503, BUSY) if seen[key] % 2 else None

    server.fault = every_second
    assert [StreamReader(bucket).read(sample)["id"] for sample in range(4)] == list(range(4))
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.5")
    server.fault = lambda method, key: None
    reader = StreamReader(str(bucket))
    server.fault = lambda method, key: (503, BUSY)
    with pytest.raises(errors.StoreUnavailable) as caught:
        reader.read(4)
    assert caught.value.url == f"{bucket}/{seal_name(2)}"
    server.fault = lambda method, key: None
    assert reader.read(4) == {"id": 4}


def test_errors_come_out_of_workers(
    tmp_path: Path, server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "local", bucket, 12)
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.3")
    dataset = open_rank(str(bucket))  # type: ignore[arg-type]
    server.fault = lambda method, key: (503, BUSY)
    with pytest.raises(errors.StoreUnavailable) as caught:
        list(DataLoader(dataset, 2, sampler=dataset.rank_indices, num_workers=1, collate_fn=list))
    assert str(caught.value.url).startswith(f"{bucket}/")
    assert caught.value.waited is not None


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
