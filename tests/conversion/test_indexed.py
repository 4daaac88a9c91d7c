"""The index of Megatron's IndexedDataset: literal bytes, and what is refused before memory is taken for it."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard.conversion.indexed import (
    DTYPES,
    HEADER_BYTES,
    IndexedReader,
    IndexHeader,
    bounds_of,
    check_boundaries,
    check_sequences,
    smallest_dtype,
)
from lazyshard.conversion.indexed_writer import IndexedWriter
from lazyshard.errors import ConfigInvalid, FileInvalid, FileRefused, ProducerFenced
from tests.conversion import megatron_core
from tests.conversion.megatron_core import Content, content, corpora, write
from tests.stream.streams import forked, names, recorded, signalled_at

GOLDEN = b"MMIDIDX\0\0" + b"\1\0\0\0\0\0\0\0" + b"\x08" + b"\3\0\0\0\0\0\0\0" + b"\2\0\0\0\0\0\0\0"
"""Version 1, uint16, 3 sequences, 2 boundaries."""

THREE = IndexHeader("uint16", 3, 1, has_modes=False)
SIZE = 34 + 3 * 4 + 3 * 8 + 2 * 8


def index(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def test_header_byte_for_byte() -> None:
    assert THREE.encode() == GOLDEN
    assert THREE.size == SIZE == 86
    assert THREE.starts == (34, 46, 70, 86)
    assert IndexHeader.decode(GOLDEN, SIZE, "a.idx") == THREE
    assert IndexHeader.decode(GOLDEN, SIZE + 3, "a.idx") == IndexHeader("uint16", 3, 1, has_modes=True)
    codes = {name: IndexHeader(name, 0, 0, has_modes=False).encode()[17] for name in DTYPES}
    assert codes == {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def packed(version: int = 1, code: int = 8, sequences: int = 3, boundaries: int = 2) -> bytes:
    return struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, sequences, boundaries)


@pytest.mark.parametrize(
    ("head", "size", "says"),
    [
        (b"", 0, "expected an index"),
        (b'{"id": 1}\n' * 4, 40, "found b'{\"id\": 1}'"),
        (b"TNTIDX\0\0" + bytes(40), 48, "fairseq"),
        (GOLDEN[:20], 20, "34 bytes, found 20 bytes"),
        (packed(version=2), SIZE, "version 1, found version 2"),
        (packed(code=0), SIZE, "from 1 to 8, found code 0"),
        (packed(code=9), SIZE, "from 1 to 8, found code 9"),
        (packed(boundaries=0), 70, "found none"),
        (GOLDEN, SIZE - 1, "expected 86 bytes, or 89 with modes, for 3 sequences and 1 documents, found 85"),
        (GOLDEN, SIZE + 1, "expected 86 bytes, or 89 with modes, for 3 sequences and 1 documents, found 87"),
        (packed(sequences=2**64 - 1), SIZE, "18446744073709551615"),
        (packed(boundaries=2**64 - 1), SIZE, "18446744073709551614"),
    ],
)
def test_no_index(head: bytes, size: int, says: str) -> None:
    with pytest.raises(FileInvalid) as error:
        IndexHeader.decode(head, size, "a.idx")
    assert str(error.value).startswith("a.idx: expected ") and says in str(error.value)


@given(st.binary(max_size=2 * HEADER_BYTES), st.integers(0, 2**64))
def test_no_bytes_break_it(tail: bytes, size: int) -> None:
    for head in (tail, GOLDEN[:17] + tail[:17]):
        try:
            header = IndexHeader.decode(head, size, "a.idx")
        except FileInvalid:
            continue
        assert header.size == size


@pytest.mark.parametrize(
    ("boundaries", "first", "documents", "found"),
    [
        ((1, 2), 0, 1, "1"),
        ((0, 2), 0, 1, "2"),
        ((-1, 3), 0, 1, "-1"),
        ((0, 4), 0, 1, "4"),
        ((4, 3, 9), 2, 5, "boundary 3 .* 4 to 9, found 3"),
    ],
)
def test_boundaries_that_cannot_be(boundaries: tuple[int, ...], first: int, documents: int, found: str) -> None:
    header = IndexHeader("int32", 9, 5, has_modes=False)
    check_boundaries(index(0, 0, 4, 4, 9, 9), 0, header, "a.idx")
    with pytest.raises(FileInvalid, match=rf"^a\.idx: .*{found}"):
        check_boundaries(index(*boundaries), first, THREE if documents == 1 else header, "a.idx")


@pytest.mark.parametrize(
    ("length", "pointer", "end"),
    [
        (-1, 0, ""),
        (1, -2, ""),
        (1, 9, "byte 11"),
        (0, 11, ""),
        (2**31 - 1, 0, "byte 4294967294"),
        (2**31 - 1, 2**63 - 1, ""),
    ],
)
def test_sequences_outside_of_the_data(length: int, pointer: int, end: str) -> None:
    check_sequences(index(5, 0, 1), index(0, 10, 8), 0, THREE, 10, "a.idx")
    with pytest.raises(FileInvalid) as error:
        check_sequences(index(5, length), index(0, pointer), 7, THREE, 10, "a.idx")
    assert f"found {length} tokens of uint16 at byte {pointer}" in str(error.value) and end in str(error.value)
    assert error.value.sequence == 8


def test_types_by_their_tokens() -> None:
    assert bounds_of("int32") == (-(2**31), 2**31 - 1)
    assert bounds_of("uint8") == (0, 255)
    assert bounds_of("float32")[1] == int(np.finfo(np.float32).max)
    assert [smallest_dtype(0, high) for high in (0, 65498, 65499, 70000)] == ["uint16", "uint16", "int32", "int32"]


@settings(max_examples=40)
@given(corpora())
def test_read_and_written_as_megatron_core_does(corpus: tuple[str, Any, Any]) -> None:
    dtype, documents, modes = corpus
    megatron_core.module()
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
        expected = megatron_core.build(theirs, dtype, documents, modes)
        assert content(theirs) == expected
        write(ours, dtype, documents, modes)
        for suffix in (".bin", ".idx"):
            assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
        if expected.sequences:
            assert megatron_core.read(ours, multimodal=modes is not None) == expected
        assert sorted(os.listdir(folder)) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]


DOCUMENTS: Final = [[[1, 2], [3]], [], [[4, 5, 6]], [[]]]


def test_another_type_half_way(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    with IndexedWriter(prefix, "uint16", has_modes=False) as writer:
        writer.add_sequence(np.array([1, 65535]))
        writer.end_document()
        writer.widen("int32")
        writer.add_sequence(np.array([-7, 70000]))
        writer.end_document()
        writer.finish()
    assert content(prefix) == Content("int32", [[1, 65535], [-7, 70000]], [0, 1, 2], None)
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_writer_left_before_its_end_leaves_nothing_and_two_of_one_name_do_not_meet(tmp_path: Path) -> None:
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "a", "int32", has_modes=False) as writer:
        writer.add_sequence(np.array([1]))
        with pytest.raises(ProducerFenced):
            IndexedWriter(tmp_path / "a", "int32", has_modes=False)
        write(tmp_path / "b", "int32", DOCUMENTS)
        raise KeyError
    assert names(tmp_path) == ["b.bin", "b.idx"]


@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_what_is_there_is_replaced_only_when_told(suffix: str, meanwhile: bool, tmp_path: Path) -> None:
    there = tmp_path / f"a{suffix}"
    writer = IndexedWriter(tmp_path / "a", "int32", has_modes=False) if meanwhile else None
    there.write_bytes(b"precious")
    if writer is None:
        with pytest.raises(ConfigInvalid, match=there.name):
            IndexedWriter(tmp_path / "a", "int32", has_modes=False)
    else:
        with writer, pytest.raises(ConfigInvalid):
            writer.finish()
    assert names(tmp_path) == [there.name]
    assert there.read_bytes() == b"precious"
    write(tmp_path / "a", "int32", DOCUMENTS, replace=True)
    assert content(tmp_path / "a").sequences == [[1, 2], [3], [4, 5, 6], []]


def test_a_link_in_the_place_of_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_bytes(b"precious")
    (tmp_path / ".a.export").symlink_to("elsewhere")
    with pytest.raises(FileRefused):
        IndexedWriter(tmp_path / "a", "int32", has_modes=False)
    assert (tmp_path / "elsewhere" / "data").read_bytes() == b"precious"


def killed_at(step: int, work: Callable[[], None]) -> int:
    """Works in a child that gets SIGKILL in front of a call that changes files, or half way through a write."""

    def killed() -> None:
        signalled_at(step + 1, "half", "open", "write", "fsync", "replace", "unlink", "rmdir")
        work()

    return forked(killed)


@pytest.mark.few(1)
@pytest.mark.parametrize("older", [False, True], ids=["new", "in place of an older one"])
def test_killed_at_each_step_and_run_again(older: bool, tmp_path: Path) -> None:
    """Each run is killed a step later than the last, on what that one has left: whole, or not there, all the time."""
    prefix = tmp_path / "a"
    before = Content("int8", [[9]], [0, 1], None)
    expected = Content("int32", [[1, 2], [3], [4, 5, 6], []], [0, 2, 2, 3, 4], None)
    for step in itertools.count():
        for path in (f"{prefix}.bin", f"{prefix}.idx"):
            if older and not os.path.exists(path):
                write(prefix, "int8", [[[9]]], replace=True)
        code = killed_at(step, lambda: write(prefix, "int32", DOCUMENTS, replace=older))
        if (tmp_path / "a.idx").exists():
            assert content(prefix) in ([before, expected] if older else [expected])
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if not older and (tmp_path / "a.idx").exists():
            # It was killed when all was done: from now on the name is taken.
            break
    assert content(prefix) == expected
    assert step >= 15
    write(prefix, "int32", DOCUMENTS, replace=True)
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_data_left_without_index_are_taken_over_also_twice(tmp_path: Path) -> None:
    """Killed between the two names, then again at the start of the next run: the third one still goes through."""
    prefix = tmp_path / "a"
    for step in itertools.count():
        assert killed_at(step, lambda: write(prefix, "int32", DOCUMENTS)) == -signal.SIGKILL
        if (tmp_path / "a.bin").exists():
            break
    assert not (tmp_path / "a.idx").exists()
    for step in (0, 1, 2, 3, 4, 5, 6, 9):
        assert killed_at(step, lambda: write(prefix, "int32", DOCUMENTS)) == -signal.SIGKILL
    write(prefix, "int32", DOCUMENTS)
    assert content(prefix).sequences == [[1, 2], [3], [4, 5, 6], []]


def test_data_are_on_the_device_before_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    calls = recorded(monkeypatch)
    write(tmp_path / "s" / "a", "int32", DOCUMENTS)
    done = [call for call in calls if not call.startswith("unlink")]
    assert done == ["sync data", "sync index", "sync .a.export", "rename a.bin", "sync s", "rename a.idx", "sync s"]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write(tmp_path / "a", "int32", [[[number]] for number in range(1000)])
    return tmp_path / "a"


def test_opening_reads_no_more_of_a_large_file(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = Mock(wraps=os.pread)
    monkeypatch.setattr(os, "pread", pread)
    reader = IndexedReader(f"{pair}.idx")
    assert sum(call.args[1] for call in pread.call_args_list) == 34 + 8 + 8 + 4 + 8
    pread.reset_mock()
    reader.tokens(400, 3)
    assert [call.args[1] for call in pread.call_args_list] == [12]


def test_files_that_were_cut_before_or_while_they_are_read(pair: Path, tmp_path: Path) -> None:
    reader = IndexedReader(f"{pair}.idx")
    os.truncate(f"{pair}.bin", 3998)
    with pytest.raises(FileInvalid) as caught:
        IndexedReader(f"{pair}.idx")
    assert caught.value.sequence == 999
    os.truncate(f"{pair}.bin", 10)
    with pytest.raises(FileInvalid, match=r"a\.bin: .* 12 bytes at byte 8.* byte 10"):
        reader.tokens(8, 3)
    os.truncate(f"{pair}.idx", 2000)
    with pytest.raises(FileInvalid, match=r"a\.idx: .* 20042 bytes"):
        reader.sequences(400, 600)
    (tmp_path / "a.idx").rename(tmp_path / "index")
    with pytest.raises(FileInvalid, match=r"\.idx"):
        IndexedReader(tmp_path / "index")


def test_data_that_are_no_file(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError):
        IndexedReader(f"{pair}.idx")
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(FileRefused):
        IndexedReader(f"{pair}.idx")
