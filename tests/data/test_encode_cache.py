"""The cache of encoded samples of a node, as a data set uses it: encoded once, the same samples, never in the way."""

import errno
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from lazyshard import BadRows, EncodeCache, Filter, LazyShardedDataset, Map
from lazyshard.data import encode_cache
from lazyshard.data.encode_cache import FOLDER
from lazyshard.data.rank import Stats
from lazyshard.data.settings import ENCODE_CACHE_BYTES
from lazyshard.errors import ChunkCorrupt, SkipSample
from lazyshard.format.records import Encoding
from tests.data.runs import open_rank
from tests.data.workers import loader
from tests.stream.streams import fail_when, foreign, fork, produce, publish_rows, raised, reap, refusal_of, wait_until

FACTS: Final[Encoding] = {"tokenizer": "bytes", "max_length": 512}
SAMPLES: Final = 24
ALL: Final = list(range(SAMPLES))


class Counting:
    """An encoder that writes down each row that it encodes, for all processes."""

    def __init__(self, log: Path, at: Callable[[int], object] | None = None) -> None:
        self.log = log
        self.at = at

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        with self.log.open("a") as log:
            log.write(f"{row['id']}\n")
        if self.at is not None:
            self.at(row["id"])
        return {"id": row["id"], "input_ids": list(range(row["id"], row["id"] + 20)), "t": torch.tensor([row["id"]])}

    def calls(self) -> list[int]:
        found = sorted(map(int, self.log.read_text().split())) if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def encode(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "log")


def opened(tmp_path: Path, encode: Any, **options: Any) -> LazyShardedDataset:
    if not (tmp_path / "s").exists():
        produce(tmp_path / "s", SAMPLES, 8)
    cache: dict[str, Any] = {"directory": tmp_path / "cache", "fingerprint": FACTS}
    for name in {"directory", "size", "fingerprint", "memory_bytes"} & options.keys():
        cache[name] = options.pop(name)
    return open_rank(tmp_path / "s", encode_fn=encode, cache=EncodeCache(**cache), **{"batch_size": 4, **options})


def ids(dataset: LazyShardedDataset, batch: int = 4) -> list[int]:
    """Draws all samples in batches, and returns their ids once they are found to be right."""
    found: list[int] = []
    for first in range(0, len(dataset), batch):
        for sample in dataset.__getitems__(list(range(first, first + batch))):
            found.append(sample["id"])
            assert (sample["input_ids"], sample["length"]) == (list(range(found[-1], found[-1] + 20)), 20)
            assert sample["t"].tolist() == found[-1:]
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
    assert ids(again) == [again[number]["id"] for number in ALL] == ALL
    assert again.stats()[5:] == (0, 2 * SAMPLES, 0)
    assert encode.calls() == ALL


def test_samples_in_memory_come_first_and_without_a_cache_nothing_is_counted(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode, memory_bytes=1 << 20)
    assert [ids(dataset) for _ in range(3)] == [ALL] * 3
    assert dataset.stats()[5:] == (SAMPLES, 0, 0)
    dataset = opened(tmp_path, encode, directory=None, fingerprint=None)
    assert (ids(dataset), dataset.stats()._replace(waited_s=0.0)) == (ALL, Stats(0, 3, 0.0))


def test_what_was_encoded_by_other_facts_is_not_found(tmp_path: Path, encode: Counting) -> None:
    other = {**FACTS, "max_length": 1024}
    for of_encoder in (False, True):
        for facts in (FACTS, other, FACTS):
            encode.fingerprint = facts  # type: ignore[attr-defined]
            assert ids(opened(tmp_path, encode, fingerprint=None if of_encoder else facts)) == ALL
        assert encode.calls() == sorted(2 * ALL)


def test_copy_of_a_stream_shares_what_is_kept_and_another_one_does_not(tmp_path: Path, encode: Counting) -> None:
    for first, encoded in ((0, ALL), (0, []), (100, list(range(100, 100 + SAMPLES)))):
        publish_rows(tmp_path / "s", 8, ({"id": number} for number in range(first, first + SAMPLES)))
        assert ids(opened(tmp_path, encode)) == list(range(first, first + SAMPLES))
        assert encode.calls() == encoded
        shutil.rmtree(tmp_path / "s")


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

    for turn, start in enumerate((0, 10, 0)):
        rows = ({"id": number, "x": np.array([start + number], np.float32)} for number in range(4))
        publish_rows(tmp_path / str(turn) / "s", 2, rows, arrays=True)
        dataset = opened(tmp_path / str(turn), encode, directory=tmp_path / "cache")
        assert [dataset[number] for number in range(4)] == [[float(start + n), n] for n in range(4)]
    assert calls == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]


def test_workers_and_copies_find_what_others_have_encoded(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode)
    dataset[0]
    twin = pickle.loads(pickle.dumps(dataset))
    for counts in ((SAMPLES, 1), (0, SAMPLES)):
        assert [number for batch in loader(twin, twin.rank_indices, 2, batch_size=4) for number in batch] == ALL
        assert twin.stats()[5:7] == counts
        twin = opened(tmp_path, encode)
    assert encode.calls() == ALL


def peers(count: int, dataset: LazyShardedDataset) -> list[int]:
    ready, begin = os.pipe()

    def draw() -> None:
        os.close(begin)
        os.read(ready, 1)
        assert ids(dataset, 8) == ALL

    pids = [fork(draw) for _ in range(count)]
    os.close(begin)
    os.close(ready)
    return [os.waitstatus_to_exitcode(reap(pid)) for pid in pids]


def test_peers_that_draw_the_same_rows_encode_each_once(tmp_path: Path, encode: Counting) -> None:
    dataset = opened(tmp_path, encode, batch_size=8)
    assert dataset[0]["id"] == 0
    assert peers(4, dataset) == [0] * 4
    assert encode.calls() == ALL
    assert dataset.stats()[5:] == (SAMPLES, 4 * SAMPLES - SAMPLES + 1, 0)


@pytest.mark.parametrize("row", [0, 23])
def test_peer_that_is_killed_while_it_encodes_holds_nobody_up(tmp_path: Path, row: int) -> None:
    def die_once(number: int) -> None:
        if number == row and not (tmp_path / "first").exists():
            (tmp_path / "first").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    encode = Counting(tmp_path / "log", die_once)
    dataset = opened(tmp_path, encode, batch_size=8)
    assert len(dataset) == SAMPLES
    assert sorted(peers(3, dataset)) == [-signal.SIGKILL, 0, 0]
    assert encode.calls() == sorted([*ALL, row])
    assert ids(dataset) == ALL
    assert encode.calls() == []


def test_peer_that_is_stopped_is_left_alone(tmp_path: Path, encode: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_cache, "_WAIT_S", 0.05)
    dataset = opened(tmp_path, encode)
    len(dataset)
    stopped = tmp_path / "stopped"

    def stop(number: int) -> None:
        stopped.touch()
        signal.pause()

    def draw() -> None:
        encode.at = stop
        ids(dataset)

    pid = fork(draw)
    try:
        wait_until(stopped.exists, "a peer that is stopped")
        assert ids(dataset) == ALL
        assert encode.calls() == [0, *ALL]
    finally:
        os.kill(pid, signal.SIGKILL)
        reap(pid)


def test_dropped_rows_are_remembered_and_bad_ones_are_not(tmp_path: Path) -> None:
    calls: list[int] = []

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        if row["id"] in (1, 5):
            raise SkipSample("too long") if row["id"] == 1 else ValueError("bad")
        return row

    caches: list[dict[str, Any]] = [{}, {}, {"directory": None, "fingerprint": None}]
    datasets = [opened(tmp_path, encode, **options) for options in caches]
    orders = [[dataset[number]["id"] for number in range(8)] for dataset in datasets]
    counts = [dataset.stats() for dataset in datasets]
    assert [(one.bad_samples, one.dropped, one.filled) for one in counts] == [(1, 1, 2)] * 3
    assert orders[0] == orders[1] == orders[2]
    assert sorted(calls[:8]) == list(range(8))
    assert calls[8] == 5


@pytest.mark.parametrize(
    ("odd", "size", "says"),
    [({1, 2}, ENCODE_CACHE_BYTES, "a builtins.set"), ("x" * 5000, 4096, "exceed the size of the cache")],
)
def test_sample_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture, odd: Any, size: int, says: str) -> None:
    assert ENCODE_CACHE_BYTES == 16 << 30

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "x": odd if row["id"] % 2 else [1]}

    for kept in (0, SAMPLES // 2):
        caplog.clear()
        dataset = opened(tmp_path, encode, size=size)
        assert [dataset[number]["x"] for number in ALL] == [[1], odd] * (SAMPLES // 2)
        if size > 4096 or not kept:
            assert dataset.stats()[5:] == (SAMPLES - kept, kept, SAMPLES // 2)
        (message,) = caplog.messages
        assert says in message


def test_steps_count_too(tmp_path: Path) -> None:
    calls: list[int] = []

    def numbered(row: dict[str, Any], index: int) -> dict[str, Any]:
        calls.append(index)
        return {"index": index}

    even, number = Filter(lambda row: row["id"] % 2 == 0), Map(numbered, with_indices=True)
    for encoded in (SAMPLES, 0):
        dataset = opened(tmp_path, None, steps=[even, number])
        assert [dataset[n] for n in ALL][0::2] == [{"id": n, "index": n} for n in ALL[0::2]]
        assert dataset.stats().encoded == encoded
    assert sorted(calls) == ALL[0::2]
    assert opened(tmp_path, None, steps=[number])[1] == {"id": 1, "index": 1}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"fingerprint": None}, "fingerprint="),
        ({"fingerprint": {}}, "got 0"),
        ({"fingerprint": {"a": 1, "b": [1]}}, r"got \[1\] \(list\) under 'b'"),
        ({"fingerprint": {1: 1}}, "got the name 1"),
        ({"fingerprint": "v1"}, "got 'v1'"),
        ({"fingerprint": {"lazyshard.steps": 1}, "steps": [Filter("builtins:bool")]}, "'lazyshard.steps'"),
        ({"fingerprint": None, "of_encoder": {"function": 1}}, "'function'"),
        ({"fingerprint": None, "of_encoder": {"tokenizer": object}}, "encode_fn .* under 'tokenizer'"),
        # Where there are steps that of the encoder does not tell all.
        ({"fingerprint": None, "of_encoder": {"v": 1}, "steps": [Filter(bool)]}, "encode_fn or steps"),
        *(({"size": size}, f"got {size!r}") for size in (4095, "4kB", "20 apples", 1e9, True)),
        ({"encode_fn": None}, "encode_fn"),
        *(({"directory": place}, f"got {place!r}") for place in (5, "", b"c")),
        ({"directory": "s3://bucket/cache"}, "got the URL 's3://bucket/cache'"),
        ({"directory": None}, "fingerprint"),
        ({"directory": None, "fingerprint": None, "size": "20GB"}, "size"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, encode: Counting, options: dict[str, Any], names: str) -> None:
    given = dict(options)
    if "of_encoder" in given:
        encode.fingerprint = given.pop("of_encoder")  # type: ignore[attr-defined]
    refusal_of(ValueError, names, opened, tmp_path, given.pop("encode_fn", encode), **given)


def test_place_where_no_directory_can_be_is_refused_at_once(tmp_path: Path, encode: Counting) -> None:
    produce(tmp_path / "s", SAMPLES, 8)
    (tmp_path / "file").touch()
    for link, target in (("nowhere", "gone"), ("link", "file"), ("of_stream", "s")):
        (tmp_path / link).symlink_to(target)
    for place, what in (
        ("file/cache", "file is a file"),
        ("nowhere", "a link to gone"),
        ("link", "a link to file"),
        ("s", "stream's own directory"),
        ("of_stream/a/b", "stream's own directory"),
    ):
        refusal_of(ValueError, what, opened, tmp_path, encode, directory=tmp_path / place)
    # One that is not there yet is made when it is needed; beside the stream, under a name that begins alike, too.
    for place, size in (("a/b", "64 MiB"), ("s2", 4096)):
        assert ids(opened(tmp_path, encode, directory=tmp_path / place, size=size)) == ALL


@pytest.mark.parametrize("name", ["file", "writable by all", "open", "pwrite"])
def test_cache_that_cannot_be_used_is_told_once_and_training_goes_on(
    tmp_path: Path, encode: Counting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cache, kept, says = tmp_path / "cache", 0, "cannot be used"
    if name in ("open", "pwrite"):
        opened(tmp_path, encode).__getitems__(ALL[:4])
        encode.calls()
    dataset = opened(tmp_path, encode)
    if name == "file":
        # Since it was looked at: one that is there already is refused.
        cache.touch()
    elif name == "writable by all":
        cache.mkdir()
        cache.chmod(0o777)
    elif name == "open":
        to_write = OSError(errno.EROFS, "Read-only file system")
        fail_when(monkeypatch, "open", lambda path, flags, *_: FOLDER in str(path) and flags & os.O_RDWR, to_write)
    else:
        fail_when(monkeypatch, "pwrite", lambda *_: True, OSError(errno.ENOSPC, "No space left on device"))
        kept, says = 4, f"[Errno {errno.ENOSPC}]"
    assert ids(dataset) == ALL
    assert encode.calls() == ALL[kept:]
    assert dataset.stats().not_cached == len(ALL[kept:])
    (message,) = caplog.messages
    assert says in message


def test_chunk_that_goes_while_its_rows_are_kept_is_an_error_of_the_stream(tmp_path: Path, encode: Counting) -> None:
    ids(opened(tmp_path, encode))
    (tmp_path / "s" / "chunk_00001.jsonl").write_bytes(b"damaged\n")
    again = opened(tmp_path, encode, bad_rows=BadRows("raise"))
    assert again[0]["id"] == 0
    raised(ChunkCorrupt, lambda: again[8])


def test_keys_may_be_cleared_by_another_thread_at_any_time(tmp_path: Path, encode: Counting) -> None:
    class Cleared(dict[int, Any]):
        def __setitem__(self, number: int, key: Any) -> None:
            """Keeps nothing."""

    dataset: Any = opened(tmp_path, encode)
    dataset._samples._keys = Cleared()
    assert ids(dataset) == ALL
