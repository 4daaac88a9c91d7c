"""The cache of encoded samples of a node, as a data set uses it: encoded once, the same samples, never in the way."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from lazyshard import BadRows, BlendedDataset, ChunkWriter, EncodeCache, Filter, LazyShardedDataset, Map
from lazyshard.data import encode_cache
from lazyshard.data.settings import ENCODE_CACHE_BYTES
from lazyshard.data.shared import Stats
from lazyshard.errors import SkipSample
from lazyshard.format.records import Encoding
from lazyshard.store.kept_samples import FOLDER
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S, loader
from tests.harness.disks import SmallDisk
from tests.stream.streams import foreign, forked, produce, reap, rows

FACTS: Final[Encoding] = {"tokenizer": "bytes", "max_length": 512}
SAMPLES: Final = 24


class Counting:
    """An encoder that writes down each row that it encodes, for all processes."""

    def __init__(self, log: Path, at: Callable[[int], object] | None = None) -> None:
        self.log = log
        self.at = at

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, f"{row['id']}\n".encode())
        os.close(fd)
        if self.at is not None:
            self.at(row["id"])
        return {"id": row["id"], "input_ids": list(range(row["id"], row["id"] + 20)), "t": torch.tensor([row["id"]])}

    def calls(self) -> list[int]:
        """Returns the rows encoded so far, in order, and forgets them."""
        found = sorted(map(int, self.log.read_text().split())) if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def encode(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "log")


def opened(tmp_path: Path, encode: Any, **options: Any) -> LazyShardedDataset:
    directory = tmp_path / "s"
    if not directory.exists():
        produce(directory, SAMPLES, 8)
    given: dict[str, Any] = {
        "dp_rank": 0,
        "dp_size": 1,
        "batch_size": 4,
        **options,
    }
    cache: dict[str, Any] = {"directory": tmp_path / "cache", "fingerprint": FACTS}
    cache |= {name: given.pop(name) for name in ("directory", "size", "fingerprint", "memory_bytes") if name in given}
    return LazyShardedDataset(directory, encode, **grouped(given), cache=EncodeCache(**cache))


def ids(dataset: LazyShardedDataset, batch: int = 4) -> list[int]:
    """Draws all samples in batches, and returns their ids once they are found to be right."""
    found: list[int] = []
    for first in range(0, len(dataset), batch):
        for sample in dataset.__getitems__(list(range(first, first + batch))):
            number = sample["id"]
            tokens = list(range(number, number + 20))
            assert (sample["input_ids"], sample["length"]) == (tokens, 20)
            assert sample["t"].tolist() == [number]
            found.append(number)
    return found


def test_later_epochs_and_starts_encode_nothing(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode, shuffle_window=2)
    orders = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        orders.append(ids(dataset))
    assert orders[0] != orders[1]
    assert dataset.stats()[5:] == (SAMPLES, SAMPLES, 0)
    again = opened(tmp_path, encode)
    assert ids(again) == [again[number]["id"] for number in range(SAMPLES)] == list(range(SAMPLES))
    assert again.stats()[5:] == (0, 2 * SAMPLES, 0)
    assert encode.calls() == list(range(SAMPLES))


def test_without_a_cache_nothing_is_counted_or_written(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode, directory=None, fingerprint=None)
    assert ids(dataset) == list(range(SAMPLES))
    assert dataset.stats() == Stats(0, 3, 0.0)
    assert not (tmp_path / "cache").exists()


def test_what_was_encoded_by_other_facts_is_not_found(tmp_path: Path, encode: Counting) -> None:
    for facts in (FACTS, {**FACTS, "max_length": 1024}, FACTS):
        assert ids(opened(tmp_path, encode, fingerprint=facts)) == list(range(SAMPLES))
    assert encode.calls() == sorted(2 * list(range(SAMPLES)))


def test_stream_that_was_made_anew_has_rows_of_its_own(tmp_path: Path, encode: Counting) -> None:
    ids(opened(tmp_path, encode))
    os.rename(tmp_path / "s", tmp_path / "old")
    with ChunkWriter(tmp_path / "s", 8) as writer:
        for row in rows(100, 100 + SAMPLES):
            writer.write(row)
    assert ids(opened(tmp_path, encode)) == list(range(100, 100 + SAMPLES))
    assert encode.calls() == [*range(SAMPLES), *range(100, 100 + SAMPLES)]


def test_copy_of_a_stream_shares_what_is_kept(tmp_path: Path, encode: Counting) -> None:
    ids(opened(tmp_path, encode))
    os.rename(tmp_path / "s", tmp_path / "old")
    produce(tmp_path / "s", SAMPLES, 8)
    assert ids(opened(tmp_path, encode)) == list(range(SAMPLES))
    assert encode.calls() == list(range(SAMPLES))


def test_directory_of_another_program_is_cached_by_its_lines(tmp_path: Path, encode: Counting) -> None:
    line = b'{"id":%d}\n'
    foreign(tmp_path / "s", *(b"".join(line % n for n in range(first, first + 4)) for first in (10, 14)), end=True)
    for _ in range(2):
        assert ids(opened(tmp_path, encode, samples_per_chunk=4)) == list(range(10, 18))
    # Nobody has taken digests: what stands at the same bytes of the same file is another row all the same.
    (tmp_path / "s" / "chunk_00001.jsonl").write_bytes(b"".join(line % n for n in (14, 25, 16, 17)))
    assert ids(opened(tmp_path, encode, samples_per_chunk=4)) == [10, 11, 12, 13, 14, 25, 16, 17]
    assert encode.calls() == [*range(10, 18), 25]


def test_rows_with_arrays_are_known_by_those_too(tmp_path: Path) -> None:
    calls = []

    def encode(row: dict[str, Any]) -> list[float]:
        calls.append(float(row["x"][0]))
        return [float(row["x"][0]), row["id"]]

    for start in (0, 10, 0):
        with ChunkWriter(tmp_path / f"s{len(calls)}{start}", 2, arrays=True) as writer:
            for number in range(4):
                writer.write({"id": number, "x": np.array([start + number], np.float32)})
        (tmp_path / "s").unlink(missing_ok=True)
        (tmp_path / "s").symlink_to(writer.directory)
        dataset = opened(tmp_path, encode)
        assert [dataset[number] for number in range(4)] == [[float(start + n), n] for n in range(4)]
    assert calls == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]


def test_workers_find_what_others_have_encoded(tmp_path: Path, encode: Counting) -> None:
    for expected in ((SAMPLES, 0), (0, SAMPLES)):
        dataset = opened(tmp_path, encode)
        batches = list(loader(dataset, dataset.rank_indices, 2, batch_size=4))
        assert [number for batch in batches for number in batch] == list(range(SAMPLES))
        assert dataset.stats()[5:7] == expected
    assert encode.calls() == list(range(SAMPLES))


def test_copy_that_a_spawned_worker_gets_finds_it_too(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode)
    dataset[0]
    twin = pickle.loads(pickle.dumps(dataset))
    assert ids(twin) == list(range(SAMPLES))
    assert twin.stats().encoded - dataset.stats().encoded == SAMPLES - 1
    assert encode.calls() == list(range(SAMPLES))


def peers(count: int, work: Callable[[int], object]) -> list[int]:
    """Runs as many processes, which begin at the same moment, and returns how each ended."""
    ready, begin = os.pipe()
    pids = []
    for number in range(count):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.close(begin)
                os.read(ready, 1)
                work(number)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(begin)
    os.close(ready)
    return [os.waitstatus_to_exitcode(reap(pid)) for pid in pids]


def test_peers_that_draw_the_same_rows_encode_each_once(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode, batch_size=8)
    len(dataset)

    def work(number: int) -> None:
        assert ids(dataset, 8) == list(range(SAMPLES))

    assert peers(5, work) == [0] * 5
    assert encode.calls() == list(range(SAMPLES))
    assert dataset.stats()[5:] == (SAMPLES, 4 * SAMPLES, 0)


@pytest.mark.parametrize("row", [0, 7, 8, 23])
def test_peer_that_is_killed_while_it_encodes_holds_nobody_up(tmp_path: Path, row: int) -> None:
    first = tmp_path / "first"

    def die_once(number: int) -> None:
        if number == row:
            try:
                os.mkdir(first)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    encode = Counting(tmp_path / "log", die_once)
    dataset = opened(tmp_path, encode, batch_size=8)
    len(dataset)

    def work(number: int) -> None:
        assert ids(dataset, 8) == list(range(SAMPLES))

    assert sorted(peers(3, work)) == [-signal.SIGKILL, 0, 0]
    assert encode.calls() == sorted([*range(SAMPLES), row])
    assert ids(dataset) == list(range(SAMPLES))
    assert encode.calls() == []


def test_peer_that_is_stopped_is_not_waited_for_for_ever(
    tmp_path: Path, encode: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_cache, "_WAIT_S", 0.05)
    dataset = opened(tmp_path, encode)
    len(dataset)
    said, hears = os.pipe()

    def stop(number: int) -> None:
        os.write(hears, b"x")
        signal.pause()

    pid = os.fork()
    if not pid:
        encode.at = stop
        ids(dataset)
        os._exit(1)
    assert os.read(said, 1) == b"x"
    os.close(said)
    os.close(hears)
    try:
        assert ids(dataset) == list(range(SAMPLES))
        assert encode.calls() == sorted([0, *range(SAMPLES)])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_threads_get_the_same_samples(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode)
    len(dataset)
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(ids(dataset))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [list(range(SAMPLES))] * 4
    assert set(encode.calls()) == set(range(SAMPLES))


def test_dropped_rows_are_remembered_and_bad_ones_are_not(tmp_path: Path) -> None:
    calls: list[int] = []

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        if row["id"] == 1:
            raise SkipSample("too long")
        if row["id"] == 5:
            raise ValueError("bad")
        return row

    orders = []
    for _ in range(2):
        dataset = opened(tmp_path, encode)
        orders.append([dataset[number]["id"] for number in range(8)])
        stats = dataset.stats()
        assert (stats.bad_samples, stats.dropped, stats.filled) == (1, 1, 2)
    without = opened(tmp_path, encode, directory=None, fingerprint=None)
    assert orders == [[without[number]["id"] for number in range(8)]] * 2
    assert sorted(calls[:8]) == list(range(8))
    assert calls[8] == 5


def test_sample_that_cannot_be_kept_is_counted_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "x": {1, 2} if row["id"] % 2 else [1]}

    with caplog.at_level(logging.WARNING, "lazyshard"):
        for encoded in (SAMPLES, SAMPLES // 2):
            dataset = opened(tmp_path, encode)
            assert [dataset[number]["x"] for number in range(4)] == [[1], {1, 2}, [1], {1, 2}]
            assert [dataset[number]["id"] for number in range(4, SAMPLES)] == list(range(4, SAMPLES))
            assert dataset.stats()[5:] == (encoded, SAMPLES - encoded, SAMPLES // 2)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "a sample holds what would not come back as it is, and is not cached: a builtins.set"
    ] * 2


def test_steps_count_too(tmp_path: Path) -> None:
    calls: list[int] = []

    def numbered(row: dict[str, Any], index: int) -> dict[str, Any]:
        calls.append(index)
        return {"index": index}

    def even(row: dict[str, Any]) -> bool:
        return bool(row["id"] % 2 == 0)

    steps = [Filter(even), Map(numbered, with_indices=True)]
    for encoded in (SAMPLES, 0):
        dataset = opened(tmp_path, None, steps=steps)
        found = [dataset[number] for number in range(SAMPLES)]
        assert found[0::2] == [{"id": n, "index": n} for n in range(0, SAMPLES, 2)]
        assert dataset.stats().encoded == encoded
    assert sorted(calls) == list(range(0, SAMPLES, 2))
    assert opened(tmp_path, None, steps=[Map(numbered, with_indices=True)])[1] == {"id": 1, "index": 1}


def test_blends_share_it(tmp_path: Path, encode: Counting) -> None:
    for expected in ((12, 0), (0, 12)):
        parts = []
        for number, name in enumerate("ab"):
            directory = tmp_path / name
            if not directory.exists():
                with ChunkWriter(directory, 4) as writer:
                    for row in rows(100 * number, 100 * number + 6):
                        writer.write(row)
            cache = EncodeCache(tmp_path / "cache", fingerprint=FACTS)
            parts.append((LazyShardedDataset(directory, encode, dp_rank=0, dp_size=1, cache=cache), 1.0))
        blend = BlendedDataset(parts)
        assert sorted(blend[number]["id"] for number in range(12)) == [*range(6), *range(100, 106)]
        stats = blend.stats()
        assert (sum(one.encoded for one in stats), sum(one.from_cache for one in stats)) == expected
    assert encode.calls() == [*range(6), *range(100, 106)]


def test_samples_in_memory_come_first(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode, memory_bytes=1 << 20)
    for _ in range(3):
        assert ids(dataset) == list(range(SAMPLES))
    assert dataset.stats()[5:] == (SAMPLES, 0, 0)


def test_fingerprint_of_the_encoder_stands_for_one_that_is_not_given(tmp_path: Path, encode: Counting) -> None:
    encode.fingerprint = {"v": 1}  # type: ignore[attr-defined]
    ids(opened(tmp_path, encode, fingerprint=None))
    encode.fingerprint = {"v": 2}  # type: ignore[attr-defined]
    ids(opened(tmp_path, encode, fingerprint=None))
    ids(opened(tmp_path, encode, fingerprint=None))
    assert encode.calls() == sorted(2 * list(range(SAMPLES)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fingerprint": None}, "needs to know by what rows are encoded.*fingerprint={...}"),
        ({"fingerprint": {}}, "the fingerprint of an encode cache is 1 to 1000 facts by name.*, got 0 of them"),
        (
            {"fingerprint": {"a": 1, "b": [1]}},
            r"fingerprint of an encode cache is .*, got \[1\] \(list\) under 'b'",
        ),
        ({"fingerprint": {1: 1}}, "the fingerprint of an encode cache is .*, got the name 1"),
        ({"fingerprint": "v1"}, r"fingerprint of an encode cache is .*, got 'v1' \(str\)"),
        ({"size": 0}, "size of an encode cache is a number of bytes from 4096 on, .* got 0"),
        ({"size": 4095}, "size of an encode cache is a number of bytes from 4096 on, .* got 4095"),
        ({"size": "4kB"}, "size of an encode cache is a number of bytes from 4096 on, .* got '4kB'"),
        ({"size": "20 apples"}, "size of an encode cache is .* such as '20GB' or '512MiB', got '20 apples'"),
        ({"size": 1e9}, "size of an encode cache is a number of bytes"),
        ({"size": True}, "size of an encode cache is a number of bytes"),
        ({"encode_fn": None}, "an encode cache keeps what encode_fn or steps make of rows"),
        ({"directory": 5}, "an encode cache is the path of a directory of this node, got 5"),
        ({"directory": ""}, "an encode cache is the path of a directory of this node, got ''"),
        ({"directory": b"c"}, "an encode cache is the path of a directory of this node, got b'c'"),
        ({"directory": None}, "fingerprint is that of an encode cache with a directory"),
        (
            {"directory": None, "fingerprint": None, "size": "20GB"},
            "size is that of an encode cache with a directory",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, encode: Counting, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        opened(tmp_path, options.pop("encode_fn", encode), **options)


@pytest.mark.parametrize("name", ["function", "lazyshard.steps"])
def test_fact_that_is_told_here_is_no_fact_of_the_users(tmp_path: Path, encode: Counting, name: str) -> None:
    text = f"a fingerprint has no fact '{name}', which lazyshard tells itself: give yours another name"
    options: dict[str, Any] = {"fingerprint": {name: 1}, "steps": [Filter("builtins:bool")]}
    if name == "function":
        encode.fingerprint = {name: 1}  # type: ignore[attr-defined]
        options = {"fingerprint": None}
    with pytest.raises(ValueError, match=text):
        opened(tmp_path, encode, **options)


def test_place_where_no_directory_can_be_is_refused_at_once(tmp_path: Path, encode: Counting) -> None:
    file, nowhere, link = tmp_path / "file", tmp_path / "nowhere", tmp_path / "link"
    file.touch()
    nowhere.symlink_to("gone")
    link.symlink_to("file")
    for place, what in (
        (file, f"{file} is a file"),
        (file / "cache", f"{file} is a file"),
        (nowhere, f"{nowhere} is a link to gone, which is not there"),
        (link, f"{link} is a link to file, which is a file"),
    ):
        with pytest.raises(
            ValueError, match=f"the encode cache '{place}' cannot be a directory: {what}; remove it, or"
        ):
            opened(tmp_path, encode, directory=place)
    # One that is not there yet is made when it is needed.
    assert ids(opened(tmp_path, encode, directory=tmp_path / "a" / "b")) == list(range(SAMPLES))


def test_fingerprint_of_the_encoder_that_is_none_is_named_as_such(tmp_path: Path, encode: Counting) -> None:
    encode.fingerprint = {"tokenizer": object}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"the attribute fingerprint of encode_fn is .* under 'tokenizer'"):
        opened(tmp_path, encode, fingerprint=None)


def test_size_is_taken_as_text_as_the_flag_takes_it(tmp_path: Path, encode: Counting) -> None:
    assert ids(opened(tmp_path, encode, size="64 MiB")) == list(range(SAMPLES))
    assert ids(opened(tmp_path, encode, size=4096)) == list(range(SAMPLES))


def test_cache_in_an_object_store_is_refused(tmp_path: Path, encode: Counting) -> None:
    with pytest.raises(ValueError, match=r"directory of this node, .* got the URL 's3://bucket/cache'"):
        opened(tmp_path, encode, directory="s3://bucket/cache")


@pytest.mark.parametrize("within", [".", "cache", "cursors/cache"])
def test_cache_in_the_folder_of_the_stream_is_refused(tmp_path: Path, encode: Counting, within: str) -> None:
    (tmp_path / "link").symlink_to("s")
    for stream in (tmp_path / "s", tmp_path / "link"):
        with pytest.raises(ValueError, match=r"lies in the stream's own directory, .*name a directory of this node"):
            opened(tmp_path, encode, directory=stream / within)
    # Beside it, under a name that begins alike, it is none of the stream's.
    assert ids(opened(tmp_path, encode, directory=tmp_path / "s2")) == list(range(SAMPLES))


def test_sample_larger_than_the_cache_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "x": "x" * (5000 if row["id"] % 2 else 5)}

    with caplog.at_level(logging.WARNING, "lazyshard"):
        dataset = opened(tmp_path, encode, size=4096)
        assert [len(dataset[number]["x"]) for number in range(SAMPLES)] == [5, 5000] * (SAMPLES // 2)
        assert dataset.stats()[5:] == (SAMPLES, 0, SAMPLES // 2)
    (record,) = caplog.records
    assert re.fullmatch(
        r".*: a sample of 50\d\d bytes in a chunk of 8 rows is larger than the whole cache, .* and is not cached; give "
        "it a larger size",
        record.getMessage(),
    )


def test_directory_that_everybody_may_write_to_is_left_alone(
    tmp_path: Path, encode: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert ids(opened(tmp_path, encode)) == list(range(SAMPLES))
    (record,) = caplog.records
    assert "the cache cannot be used, and all rows are encoded from here on" in record.getMessage()
    assert "found one of uid" in record.getMessage()
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_is_read_only_is_left_alone_though_all_is_in_it(
    tmp_path: Path, encode: Counting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids(opened(tmp_path, encode))
    encode.calls()
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if FOLDER in str(path) and flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert ids(opened(tmp_path, encode)) == list(range(SAMPLES))
    assert encode.calls() == list(range(SAMPLES))
    (record,) = caplog.records
    assert "the cache cannot be used, and all rows are encoded from here on" in record.getMessage()


def test_steps_need_a_fingerprint_that_says_so(tmp_path: Path, encode: Counting) -> None:
    encode.fingerprint = {"v": 1}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="whenever encode_fn or steps would make another sample"):
        opened(tmp_path, encode, fingerprint=None, steps=[Filter(bool)])


def test_bound_is_kept(tmp_path: Path, encode: Counting) -> None:
    for _ in range(2):
        dataset = opened(tmp_path, encode, size=6000)
        for first in range(0, SAMPLES, 4):
            dataset.__getitems__(list(range(first, first + 4)))
            assert sum(path.stat().st_size for path in (tmp_path / "cache" / FOLDER).glob("*.kept")) <= 6000
    assert ENCODE_CACHE_BYTES == 16 << 30


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_cache_that_cannot_be_written_is_told_once_and_training_goes_on(
    tmp_path: Path, encode: Counting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    dataset = opened(tmp_path, encode)
    dataset.__getitems__([0, 1, 2, 3])

    def refused(fd: int, data: bytes, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refused)
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert ids(dataset) == list(range(SAMPLES))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"nothing more is cached, what is there is still read: [Errno {code}] {os.strerror(code)}"
    ]
    assert encode.calls() == list(range(SAMPLES))


def test_cache_that_cannot_be_had_is_told_once_and_training_goes_on(
    tmp_path: Path, encode: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = opened(tmp_path, encode)
    # Since it was looked at: one that is there already is refused.
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING, "lazyshard"):
        assert ids(dataset) == list(range(SAMPLES))
    (record,) = caplog.records
    assert "the cache cannot be used, and all rows are encoded from here on: " in record.getMessage()
    assert "unless it is sticky, found no directory; name another place" in record.getMessage()
    assert dataset.stats()[5:] == (SAMPLES, 0, SAMPLES)


def test_disk_that_fills_up_stops_nothing(tmp_path: Path, encode: Counting) -> None:
    with SmallDisk(tmp_path / "disk", "size=64k", all_closed=True):
        for _ in range(2):
            dataset = opened(tmp_path, encode, directory=tmp_path / "disk" / "cache")
            dataset.reader.refresh()
            big = Counting(encode.log)

            def padded(row: dict[str, Any], big: Counting = big) -> dict[str, Any]:
                return {**big(row), "pad": "x" * 4000}

            dataset = opened(tmp_path, padded, directory=tmp_path / "disk" / "cache")
            assert ids(dataset) == list(range(SAMPLES))
        encoded = encode.calls()
        assert SAMPLES < len(encoded) < 2 * SAMPLES
        del dataset


def test_chunk_that_goes_while_its_rows_are_kept_is_an_error_of_the_stream(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode)
    ids(dataset)
    (tmp_path / "s" / "chunk_00001.jsonl").write_bytes(b"damaged\n")
    again = opened(tmp_path, encode, bad_rows=BadRows("raise"))
    assert again[0]["id"] == 0
    with pytest.raises(Exception, match=r"chunk_00001\.jsonl"):
        again[8]


def test_fork_of_a_data_set_in_use_counts_for_itself(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode)
    dataset[0]

    def child() -> None:
        assert ids(dataset) == list(range(SAMPLES))

    assert forked(child) == 0
    assert dataset.stats()[5:] == (SAMPLES, 1, 0)
    assert multiprocessing.active_children() == []
