"""What readers find of a stream whose oldest chunks were deleted."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ChunkMissing, ChunkRetired
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.storage.adoption import adopt
from lazyshard.storage.native_stream import NativeStream
from lazyshard.storage.retire import list_kept, retire
from lazyshard.storage.stream import open_stream
from tests.storage.streams import head, produce, python


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Five chunks of two rows, that goes on."""
    return produce(tmp_path / "s", 10, end=False)


def files(*chunks: int) -> set[str]:
    return {name(chunk) for chunk in chunks for name in (chunk_name, seal_name)}


def test_sample_of_a_retired_chunk_is_an_error_at_once(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamReader(stream)
    retire(stream, 3, 5)

    def sleep(_: float) -> None:
        raise AssertionError("waited for a chunk that is gone")

    for module in ("reader", "waiting"):
        monkeypatch.setattr(f"lazyshard.storage.{module}.time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    for sample in (0, 5):
        with pytest.raises(ChunkRetired, match=r"chunk \d was deleted .* all chunks below 3") as caught:
            reader.read(sample)
        assert (caught.value.chunk, caught.value.chunks_before) == (sample // 2, 3)
        assert caught.value.file == str(stream / seal_name(sample // 2))
    assert isinstance(caught.value, FileNotFoundError)
    assert "--retain all" in str(caught.value) and "--consumers" in str(caught.value)
    assert [reader.read(sample)["id"] for sample in range(6, 10)] == [6, 7, 8, 9]
    with pytest.raises(ChunkRetired):
        next(iter(reader))


def test_data_that_goes_between_seal_and_data_is_retired_and_not_missing(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = StreamReader(stream)
    open_sealed = NativeStream.open_chunk.__globals__["open_sealed"]

    def late(path: Path, seal: Any) -> Any:
        retire(stream, 3, 5)
        return open_sealed(path, seal)

    monkeypatch.setitem(NativeStream.open_chunk.__globals__, "open_sealed", late)
    with pytest.raises(ChunkRetired):
        reader.read(4)


def test_chunk_that_is_open_is_read_on(stream: Path) -> None:
    reader = StreamReader(stream)
    reader.read(0)
    retire(stream, 3, 5)
    assert reader.read(1) == {"id": 1}
    with pytest.raises(ChunkRetired):
        pickle.loads(pickle.dumps(reader)).read(1)


def test_lost_chunk_above_the_mark_is_still_missing(stream: Path) -> None:
    retire(stream, 2, 5)
    (stream / chunk_name(3)).unlink()
    reader = StreamReader(stream, max_wait=0)
    with pytest.raises(ChunkMissing, match="chunk 3 is published"):
        reader.read(6)
    with pytest.raises(ChunkMissing, match=r"chunk_00003\.jsonl: sealed, but its data file is missing"):
        ChunkWriter(stream)


COUNTED = """
import sys
from lazyshard import StreamReader
from lazyshard.storage import reader as module
module._LET_GO_S = float(sys.argv[2])
reader = StreamReader(sys.argv[1])
opened = []
sys.addaudithook(lambda event, arguments: opened.append(arguments[0]) if event == "open" else None)
for sample in range(4, 10):
    reader.read(sample)
print(*(str(path).rpartition("/")[2] for path in opened))
"""


@pytest.mark.parametrize(("every_s", "looks"), [("inf", 0), ("0", 2)])
def test_mark_is_looked_at_no_more_often_than_deleted_chunks_are_closed(stream: Path, every_s: str, looks: int) -> None:
    retire(stream, 2, 5)
    done = python(COUNTED, stream, every_s)
    assert done.stderr == ""
    found = done.stdout.split()
    assert found.count("retired.json") == looks
    assert [name for name in found if name != "retired.json"] == [
        name(chunk) for chunk in (2, 3, 4) for name in (seal_name, chunk_name)
    ]


@pytest.mark.parametrize("chunks_before", [0, 2, 4])
@pytest.mark.parametrize("end", [False, True])
def test_lost_head_of_a_retired_stream_is_made_up_for_by_the_listing(
    tmp_path: Path, chunks_before: int, end: bool
) -> None:
    stream = produce(tmp_path, 9, end=end)
    # Four full chunks; the partial one is only there once the stream has ended.
    published = 5 if end else 4
    retire(stream, chunks_before, published)
    kept = min(chunks_before, published - 1)
    (stream / "head.json").unlink()
    opened = open_stream(stream, None)
    assert isinstance(opened, NativeStream)
    found = opened.published()
    assert (found.chunks, found.samples, found.ended, found.gap) == (published, 9 if end else 8, end, None)
    reader = StreamReader(stream, max_wait=0)
    assert [reader.read(n)["id"] for n in range(2 * kept, found.samples)] == list(range(2 * kept, found.samples))
    adopt(stream)
    assert (head(stream).chunks, head(stream).samples, head(stream).ended) == (published, 9 if end else 8, end)


def test_chunks_that_go_while_the_directory_is_listed_make_no_gap(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.listdir

    def slow(path: Any) -> list[str]:
        # A listing is no snapshot: it may have passed the first names before they went, and not the later ones.
        found = listed(path)
        retire(stream, 3, 5)
        return [name for name in found if name not in files(1, 2)]

    monkeypatch.setattr(os, "listdir", slow)
    found = list_kept(stream)
    assert (found.first, found.complete, found.gap) == (3, 5, None)
