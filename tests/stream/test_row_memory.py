"""The memory of rows: used again once nobody looks at it, by whatever means, and never before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch.utils.dlpack import from_dlpack

from lazyshard import ChunkWriter, StreamReader, as_tensor
from lazyshard.errors import ChunkCorrupt
from lazyshard.stream.chunk_files import LEAST_BYTES, ROW_MEMORY, RowMemory
from tests.stream.damage import flip

SIZE = LEAST_BYTES


def address(data: npt.NDArray[Any]) -> int:
    return int(data.ctypes.data)


def test_dropped_memory_is_used_again_what_was_dropped_last_first() -> None:
    memory = RowMemory()
    where = address(memory.take(5 * SIZE))
    # What is of nearly the same size fits.
    assert address(memory.take(5 * SIZE - 77)) == where
    assert address(memory.take(4 * SIZE)) == where
    assert address(memory.take(3 * SIZE)) != where
    assert address(memory.take(6 * SIZE)) != where
    memory = RowMemory()
    taken = [memory.take(SIZE) for _ in range(8)]
    where = address(taken[-1])
    del taken
    assert {address(memory.take(SIZE)) for _ in range(5)} == {where}


def test_small_memory_is_left_to_the_c_library_and_who_finds_another_thread_in_it_does_not_wait() -> None:
    memory = RowMemory()
    assert [memory.take(size).size for size in (0, 1, SIZE - 1)] == [0, 1, SIZE - 1]
    with memory._lock:
        assert memory.take(SIZE).size == SIZE
    assert memory.size == 0


def test_memory_that_is_kept_for_ever_does_not_hide_what_is_free() -> None:
    memory = RowMemory()
    taken = [memory.take(SIZE) for _ in range(40)]
    free = {address(taken.pop(20)) for _ in range(5)}
    found = [memory.take(SIZE) for _ in range(5)]
    assert {address(data) for data in found} & free
    assert not {address(data) for data in found} & {address(data) for data in taken}


@pytest.mark.parametrize(
    "look",
    [
        lambda data: data[8:16],
        lambda data: np.ndarray((2, 3), np.float32, data, 64).T[1:],
        lambda data: data.view(np.float16).reshape(2, -1)[::2],
        lambda data: as_tensor(data.view(np.float32))[3:],
        from_dlpack,
        lambda data: memoryview(data)[5:],
        lambda data: np.frombuffer(data.data, np.int32)[7:],
        lambda data: [data][:],
        lambda data: iter(data),
    ],
    ids=["slice", "array in a row", "other dtype", "tensor", "dlpack", "memoryview", "buffer", "list", "iterator"],
)
def test_memory_that_somebody_looks_at_is_left_alone(look: Any) -> None:
    memory = RowMemory()
    data = memory.take(SIZE)
    where = address(data)
    kept = look(data)
    del data
    others = [memory.take(SIZE) for _ in range(3)]
    assert where not in map(address, others)
    del kept, others
    assert where in [address(data) for data in [memory.take(SIZE) for _ in range(4)]]


def test_no_more_is_kept_than_the_limit_and_what_is_taken_at_once_is_each_its_own() -> None:
    memory = RowMemory(4 * SIZE)
    taken = [memory.take(size) for size in (SIZE, SIZE, SIZE + 1, 2 * SIZE, *[SIZE] * 5)]
    for number, data in enumerate(taken):
        data[:] = number
    assert [int(data.min()) for data in taken] == [int(data.max()) for data in taken] == list(range(9))
    del data, taken
    assert memory.size == 4 * SIZE
    assert memory.take(4 * SIZE + 1).size == 4 * SIZE + 1
    assert memory.size == 4 * SIZE


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_changes_nothing_in_its_parents_rows() -> None:
    memory = RowMemory()
    kept = memory.take(SIZE)
    kept[:] = 1
    free = address(memory.take(SIZE))
    child = os.fork()
    if not child:
        data = memory.take(SIZE)
        data[:] = 2
        os._exit(0 if address(data) == free and int(kept.max()) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(kept.tolist()) == {1}


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    with ChunkWriter(tmp_path / "stream", 6, arrays=True) as writer:
        for number in range(6):
            writer.write({"x": np.full(SIZE, number, np.uint8), "y": np.full(8, number, np.int64)})
    return tmp_path / "stream"


def test_rows_of_a_stream_are_read_into_memory_of_dropped_ones(stream: Path) -> None:
    reader = StreamReader(stream, max_wait=0)
    before = ROW_MEMORY.size
    for _ in range(5):
        for number in range(6):
            row = reader.read(number)
            assert (set(row["x"].tolist()), row["y"].tolist()) == ({number}, [number] * 8)
    # That of the row that is read, and of the one before it.
    assert ROW_MEMORY.size - before <= 3 * SIZE
    # One array of a row keeps it while others are read.
    kept = [reader.read(number)["y"] for number in range(6)]
    tensors = [as_tensor(reader.read(number)["x"])[-3:] for number in range(6)]
    for number in range(6):
        reader.read(number)
    assert [array.tolist() for array in kept] == [[number] * 8 for number in range(6)]
    assert [tensor.tolist() for tensor in tensors] == [[number] * 3 for number in range(6)]


def test_a_damaged_row_is_refused_in_memory_that_held_a_good_one(stream: Path) -> None:
    reader = StreamReader(stream, max_wait=0)
    assert reader.read(1)["x"].max() == 1
    flip("chunk_00000.arrays", SIZE + 64 + 100)(stream)
    with pytest.raises(ChunkCorrupt):
        reader.read(1)
    assert set(reader.read(2)["x"].tolist()) == {2}
