"""Of large side files the rows that are drawn are fetched; in order as many bytes as before, in a few requests more."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from lazyshard import ChunkWriter, LazyShardedDataset, Order, StreamReader, errors
from lazyshard.format.records import RETIRED, arrays_name
from lazyshard.store.files import UrlPath
from lazyshard.store.mirror import AHEAD_VARIABLE, BYTES_VARIABLE, bytes_of
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.stream import listing
from tests.store.server import BUSY, Gate, Server
from tests.store.streams import put, upload
from tests.stream.streams import raised, running, wait_until

SIZE, ROWS = 8192, 32


def row(number: int, size: int = SIZE) -> dict[str, object]:
    return {"id": number, "image": (number + 1).to_bytes(8, "little") * (size // 8)}


def produce(folder: Path, per_chunk: int = ROWS, size: int = SIZE) -> Path:
    with ChunkWriter(folder, per_chunk, arrays=True) as writer:
        for number in range(4 * per_chunk):
            writer.write(row(number, size))
    return folder


@pytest.fixture
def sizes(server: Server) -> list[int]:
    """The bytes of each answer that the server has given for a side file, in rows."""
    found: list[int] = []

    def note(data: bytes) -> list[bytes]:
        found.append(len(data) // SIZE)
        return [data]

    server.fault = lambda method, key: note if method == "GET" and key.endswith(".arrays") else None
    return found


@pytest.fixture
def folder(tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stream with side files of four parts each, eight rows in a part."""
    for module in ("mirror", "side_file"):
        monkeypatch.setattr(f"lazyshard.store.{module}.PART_BYTES", 8 * SIZE)
    monkeypatch.setattr("lazyshard.store.side_file.LEAST_BYTES", 0)
    upload(produce(tmp_path / "local"), bucket)
    return tmp_path / "local"


def test_ten_of_a_thousand_rows(tmp_path: Path, bucket: UrlPath, sizes: list[int]) -> None:
    upload(produce(tmp_path / "local", 250, 100_000), bucket)
    reader, drawn = StreamReader(bucket), range(50, 1000, 100)
    assert [reader.read(number) for number in drawn] == [row(number, 100_000) for number in drawn]
    wait_until(lambda: "lazyshard-read-ahead" not in {one.name for one in threading.enumerate()}, "the prefetch ends")
    # The third row of a chunk brings the next one with it: as many bytes as were drawn there before.
    assert sizes == [12, 12, 12, 12, 24, 12, 12, 12, 12, 24]
    assert 1_000_000 < sum(bytes_of(path.stat()) for path in tmp_path.glob("cache/*/*")) < 1_400_000


@pytest.mark.usefixtures("folder")
def test_in_order(tmp_path: Path, bucket: UrlPath, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AHEAD_VARIABLE, "0")
    monkeypatch.setenv(BYTES_VARIABLE, str(most := 48 * SIZE))
    # The error of a missing retired.json would keep chunks open for a while.
    monkeypatch.setattr("lazyshard.stream.reader._LET_GO_S", 60.0)
    reader = StreamReader(bucket)
    for number in range(4 * ROWS):
        assert reader.read(number) == row(number)
        assert sum(bytes_of(path.stat()) for path in tmp_path.glob("cache/*/*")) <= most
    assert sizes == [1, 1, 2, 4, 8, 8, 8] + [8] * 12
    sizes.clear()
    assert [reader.read(number)["id"] for number in (6, 4, 5, 6, 0, 1, 2, 3, 7)] == [6, 4, 5, 6, 0, 1, 2, 3, 7]
    # From each row on as many as this process has drawn before of the chunk, up to rows that are there.
    assert sizes == [8, 2, 4]


@pytest.mark.usefixtures("folder")
def test_prefetched_once_all_were_drawn(bucket: UrlPath, sizes: list[int]) -> None:
    reader = StreamReader(bucket)
    assert [reader.read(number)["id"] for number in range(2 * ROWS)] == [*range(2 * ROWS)]
    wait_until(lambda: "lazyshard-read-ahead" not in {one.name for one in threading.enumerate()}, "the prefetch ends")
    assert (sum(sizes), len(sizes) <= 7 + 3 * 5) == (4 * ROWS, True)


@pytest.mark.full
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("order", [Order(), Order(unit="sample"), Order(shuffle_window=2)])
def test_workers(bucket: UrlPath, sizes: list[int], order: Order) -> None:
    loaders = []
    for rank in range(2):
        dataset = LazyShardedDataset(bucket, dp_rank=rank, dp_size=2, batch_size=4, order=order)
        loaders.append(iter(DataLoader(dataset, 4, sampler=dataset.rank_indices, num_workers=2, collate_fn=list)))
    found = [one for batches in zip(*loaders, strict=True) for batch in batches for one in batch]
    assert sorted(found, key=lambda one: one["id"]) == [row(number) for number in range(4 * ROWS)]
    assert sum(sizes) == 4 * ROWS


def test_errors(folder: Path, bucket: UrlPath, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.5")
    reader, name = StreamReader(bucket, max_wait=0), arrays_name(0)
    whole = (folder / name).read_bytes()
    assert reader.read(0) == row(0)
    server.fault = lambda method, key: (503, BUSY)
    assert raised(errors.StoreUnavailable, reader.read, 9).url == f"{bucket}/{name}"
    server.fault = lambda method, key: None
    put(bucket / name, whole[: 5 * SIZE] + b"x" + whole[5 * SIZE + 1 :])
    bad = raised(errors.ChunkCorrupt, reader.read, 5)
    assert (bad.file, bad.row, bad.byte) == (f"{bucket}/{name}", 5, 5 * SIZE)
    assert reader.read(4) == row(4)
    put(bucket / name, whole)
    assert reader.read(5) == row(5)
    bucket.store.delete((bucket / name).key)
    assert raised(errors.ChunkMissing, reader.read, 9).file == f"{bucket}/{name}"
    listing.retire(folder, 1, 4)
    put(bucket / RETIRED, (folder / RETIRED).read_bytes())
    assert raised(errors.ChunkRetired, reader.read, 9).chunk == 0
    upload(produce(tmp_path / "other"), bucket)
    put(bucket / name, whole[::-1])
    raised(errors.StreamMismatch, reader.read, 9)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("stop", "stalled"), [(signal.SIGKILL, 1e9), (signal.SIGSTOP, 0.2)])
def test_kills(bucket: UrlPath, server: Server, monkeypatch: pytest.MonkeyPatch, stop: int, stalled: float) -> None:
    monkeypatch.setattr("lazyshard.store.side_file.STALLED_S", stalled)
    held = iter([(gate := Gate()).hold])
    server.fault = lambda method, key: next(held, None) if method == "GET" and key.endswith(".arrays") else None
    with running(lambda: StreamReader(bucket).read(1)) as pid:
        gate.wait()
        os.kill(pid, stop)
        assert StreamReader(bucket).read(1) == row(1)
    gate.open()


@pytest.mark.usefixtures("folder")
def test_readers_of_one_row_fetch_it_once(bucket: UrlPath, server: Server) -> None:
    gate = Gate()
    server.fault = lambda method, key: gate.hold if method == "GET" and key.endswith(".arrays") else None
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda _: StreamReader(bucket).read(1), range(2))
        gate.wait()
        gate.open()
    assert ([*found], server.gets(".arrays")) == ([row(1)] * 2, {arrays_name(0): 1})
