"""The index of Megatron's IndexedDataset: literal bytes, and what is refused before memory is taken for it."""

import os
import struct
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard.conversion.indexed import HEADER_BYTES, IndexedReader, IndexHeader, check_boundaries, check_sequences
from lazyshard.errors import FileInvalid, FileRefused
from tests.conversion import megatron_core
from tests.conversion.megatron_core import content, corpora, write
from tests.stream.streams import raised, refusal_of

GOLDEN = b"MMIDIDX\0\0" + b"\1\0\0\0\0\0\0\0" + b"\x08" + b"\3\0\0\0\0\0\0\0" + b"\2\0\0\0\0\0\0\0"
"""Version 1, uint16, 3 sequences, 2 boundaries."""

THREE = IndexHeader("uint16", 3, 1, has_modes=False)
SIZE = 34 + 3 * 4 + 3 * 8 + 2 * 8


def index(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def test_header_byte_for_byte() -> None:
    assert THREE.starts == (34, 46, 70, 86)
    assert IndexHeader.decode(GOLDEN, SIZE, "a.idx") == THREE
    assert IndexHeader.decode(GOLDEN, SIZE + 3, "a.idx") == IndexHeader("uint16", 3, 1, has_modes=True)
    found = {IndexHeader.decode(packed(code=code), SIZE, "a.idx").dtype: code for code in range(1, 9)}
    assert found == {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


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
        (packed(code=9), SIZE, "from 1 to 8, found code 9"),
        (packed(boundaries=0), 70, "found none"),
        (GOLDEN, SIZE - 1, "expected 86 bytes, or 89 with modes, for 3 sequences and 1 documents, found 85"),
        (packed(boundaries=2**64 - 1), SIZE, "18446744073709551614"),
    ],
)
def test_no_index(head: bytes, size: int, says: str) -> None:
    error = raised(FileInvalid, IndexHeader.decode, head, size, "a.idx")
    assert str(error).startswith("a.idx: expected ") and says in str(error)


@given(st.binary(max_size=2 * HEADER_BYTES), st.integers(0, 2**64))
def test_no_bytes_break_it(tail: bytes, size: int) -> None:
    for head in (tail, GOLDEN[:17] + tail[:17]):
        try:
            header = IndexHeader.decode(head, size, "a.idx")
        except FileInvalid:
            continue
        assert size == header.starts[-1] + header.sequences * header.has_modes


@pytest.mark.parametrize(
    ("boundaries", "first", "documents", "found"),
    [((1, 2), 0, 1, "1"), ((0, 2), 0, 1, "2"), ((0, 4), 0, 1, "4"), ((4, 3, 9), 2, 5, "boundary 3 .* 4 to 9, found 3")],
)
def test_boundaries_that_cannot_be(boundaries: tuple[int, ...], first: int, documents: int, found: str) -> None:
    header = IndexHeader("int32", 9, 5, has_modes=False)
    check_boundaries(index(0, 0, 4, 4, 9, 9), 0, header, "a.idx")
    with pytest.raises(FileInvalid, match=rf"^a\.idx: .*{found}"):
        check_boundaries(index(*boundaries), first, THREE if documents == 1 else header, "a.idx")


@pytest.mark.parametrize(
    ("length", "pointer", "end"), [(-1, 0, ""), (1, -2, ""), (1, 9, "byte 11"), (0, 11, ""), (2**31 - 1, 2**63 - 1, "")]
)
def test_sequences_outside_of_the_data(length: int, pointer: int, end: str) -> None:
    check_sequences(index(5, 0, 1), index(0, 10, 8), 0, THREE, 10, "a.idx")
    error = raised(FileInvalid, check_sequences, index(5, length), index(0, pointer), 7, THREE, 10, "a.idx")
    assert f"found {length} tokens of uint16 at byte {pointer}" in str(error) and end in str(error)
    assert error.sequence == 8


@settings(max_examples=40)
@given(corpora())
def test_read_as_megatron_core_writes_it(corpus: tuple[str, Any, Any]) -> None:
    dtype, documents, modes = corpus
    megatron_core.module()
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
        expected = megatron_core.build(theirs, dtype, documents, modes)
        assert content(theirs) == expected
        write(ours, dtype, documents, modes)
        for suffix in (".bin", ".idx"):
            assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


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
    assert raised(FileInvalid, IndexedReader, f"{pair}.idx").sequence == 999
    os.truncate(f"{pair}.bin", 10)
    refusal_of(FileInvalid, r"a\.bin: .* 12 bytes at byte 8.* byte 10", reader.tokens, 8, 3)
    os.truncate(f"{pair}.idx", 2000)
    refusal_of(FileInvalid, r"a\.idx: .* 20042 bytes", reader.sequences, 400, 600)
    (tmp_path / "a.idx").rename(tmp_path / "index")
    refusal_of(FileInvalid, r"\.idx", IndexedReader, tmp_path / "index")


def test_data_that_are_no_file(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").unlink()
    raised(FileNotFoundError, IndexedReader, f"{pair}.idx")
    os.mkfifo(tmp_path / "a.bin")
    raised(FileRefused, IndexedReader, f"{pair}.idx")
