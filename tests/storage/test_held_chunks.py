"""Chunks in memory: whose memory is used again, and that a process never sees what another one reads."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from lazyshard.storage.held_chunks import HeldChunks


def filled(data: bytes) -> Callable[[memoryview], None]:
    def read(memory: memoryview) -> None:
        memory[:] = data

    return read


def test_slices_are_the_bytes_of_the_chunk() -> None:
    chunks = HeldChunks()
    chunks.read(3, 5, {3}, filled(b"abcde"))
    assert chunks.data[3][1:4] == b"bcd"
    assert type(chunks.data[3][1:4]) is bytes


def test_a_chunk_that_is_not_wanted_leaves_its_memory_to_the_next() -> None:
    chunks = HeldChunks()
    chunks.read(0, 5, {0, 1}, filled(b"abcde"))
    chunks.read(1, 2, {0, 1}, filled(b"xy"))
    memory = chunks.data[0]
    chunks.read(2, 7, {1, 2}, filled(b"0123456"))
    assert chunks.data[2] is memory
    assert {number: data[:2] for number, data in chunks.data.items()} == {1: b"xy", 2: b"01"}


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_memory_of_another_size_is_given_up_for_each_that_is_had(size: int) -> None:
    chunks = HeldChunks()
    for number in range(3):
        chunks.read(number, 1 << 20, {0, 1, 2}, filled(bytes(1 << 20)))
    for number, spare in ((3, 2), (4, 1), (5, 0)):
        chunks.read(number, size, {3, 4, 5}, filled(bytes(size)))
        assert len(chunks._spare) == spare
    assert [len(data) for data in chunks.data.values()] == [max(size, 256 << 10)] * 3


def test_a_chunk_that_cannot_be_read_is_not_held_and_its_memory_is_used_again() -> None:
    def fail(memory: memoryview) -> None:
        memory[0] = 1
        raise OSError("no")

    chunks = HeldChunks()
    with pytest.raises(OSError, match="no"):
        chunks.read(0, 5, {0}, fail)
    assert chunks.data == {}
    (memory,) = chunks._spare
    chunks.read(0, 5, {0}, filled(b"abcde"))
    assert chunks.data[0] is memory


def test_a_forked_process_reads_over_its_own_copy_alone() -> None:
    chunks = HeldChunks()
    chunks.read(0, 5, {0}, filled(b"abcde"))
    pid = os.fork()
    if not pid:
        chunks.read(1, 5, {1}, filled(b"01234"))
        os._exit(chunks.data[1][:5] != b"01234")
    assert os.waitpid(pid, 0)[1] == 0
    assert chunks.data[0][:5] == b"abcde"
