"""Compressed JSON lines: every member and frame, every row once, and nothing torn taken for the end."""

import gzip
import io
import random
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from lazyshard_producer.errors import ExtraMissing, SourceRefused
from lazyshard_producer.sources.sequential import CompressedJsonLines
from lazyshard_producer.sources.source import Line
from tests.producer.sources.reading import TEXT, lines, open_kind, plain_lines, refusal

Pack = Callable[[bytes], bytes]


def zstd(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(text)


PACKERS: list[Pack] = [gzip.compress, zstd]
both = pytest.mark.parametrize("pack", PACKERS, ids=["gz", "zst"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a"


def open_at(path: Path, limit: int = 100_000) -> "closing[CompressedJsonLines]":
    return closing(open_kind(CompressedJsonLines, path, limit=limit))


def read_all(path: Path) -> list[Line]:
    with open_at(path, limit=1 << 20) as source:
        return lines(source)


def read_until_refused(path: Path) -> tuple[list[Line], SourceRefused | None]:
    """The rows that a file gives, and why it gives no more, None at its end. Refusing is for good."""
    found: list[Line] = []
    try:
        with open_at(path) as source:
            try:
                while (rows := source.read()) is not None:
                    found += rows.lines
            except SourceRefused as error:
                refusal(source.read)
                return found, error
    except SourceRefused as error:
        return found, error
    return found, None


@both
def test_all_members_are_read_and_lines_go_on_across_them(pack: Pack, path: Path) -> None:
    path.write_bytes(b"".join(pack(TEXT[start : start + 7]) for start in range(0, len(TEXT), 7)))
    assert read_all(path) == plain_lines(TEXT)
    # Members that are smaller than a read by far, and NUL bytes behind some of gzip's.
    padding = bytes(10_000) if pack is gzip.compress else b""
    path.write_bytes(b"".join(pack(b"%d\n" % number) + padding * (number % 1000 == 0) for number in range(3000)))
    assert read_all(path) == [b"%d\n" % number for number in range(3000)]


def test_frames_that_are_skipped_and_frames_of_every_kind(path: Path) -> None:
    noise = bytes(range(256)).replace(b"\n", b"-") * 600 + b"\n"
    packed = io.BytesIO()
    for level, checksum, size in ((1, True, True), (19, False, False), (3, True, False)):
        compressor = zstandard.ZstdCompressor(level, write_checksum=checksum, write_content_size=size)
        packed.write(b"\x53\x2a\x4d\x18\x03\0\0\0abc")
        packed.write(compressor.compress(noise + b"x" * 300_000 + b"\n"))
    path.write_bytes(packed.getvalue())
    assert read_all(path) == [noise, b"x" * 300_000 + b"\n"] * 3


@both
def test_a_file_cut_anywhere_is_refused_after_its_whole_rows(pack: Pack, path: Path) -> None:
    first, second = pack(b"1\n22\n"), pack(b"333\n4444\n")
    packed = first + second
    for size in range(1, len(packed)):
        path.write_bytes(packed[:size])
        found, error = read_until_refused(path)
        assert (error is None) == (size == len(first))
        assert found == [b"1\n", b"22\n", b"333\n", b"4444\n"][: len(found)]
        assert len(found) >= 2 * (size >= len(first))


@both
def test_a_damaged_byte_is_never_taken_for_text_in_order(pack: Pack, path: Path) -> None:
    text = b"1\n22\n333\n4444\n55555\n666666\n" * 3
    packed = pack(text)
    refused = 0
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 0x24
        path.write_bytes(damaged)
        found, error = read_until_refused(path)
        refused += error is not None
        # The time and the system in a gzip header are nobody's concern, for instance.
        assert error is not None or found == plain_lines(text)
    assert refused > len(packed) // 2


@pytest.mark.parametrize(
    ("packed", "rows", "byte"),
    [
        (b"", 0, 0),
        (gzip.compress(b"1\n", mtime=0) + b"tail", 1, 22),
        (zstd(b"1\n") + b"tail", 1, 15),
        (gzip.compress(b"1\n", mtime=0)[:-8] + bytes(8), 0, 22),
        (gzip.compress(b"1\n", mtime=0) + b"\x1f", 1, 23),
    ],
)
def test_what_is_not_compressed_text_is_refused_after_what_is(packed: bytes, rows: int, byte: int, path: Path) -> None:
    path.write_bytes(packed)
    found, error = read_until_refused(path)
    assert len(found) == rows
    assert f": byte {byte} of the compressed file: " in str(error)


def test_zstd_without_its_package_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path.write_bytes(zstd(b"1\n"))
    with pytest.raises(ExtraMissing) as error:
        open_at(path)
    assert error.value.package == "zstandard"


@both
def test_a_large_file_is_decompressed_in_a_thread_that_ends(pack: Pack, path: Path) -> None:
    dice = random.Random(0)
    noise = [b"%x\n" % dice.getrandbits(800) for _ in range(60_000)]
    path.write_bytes(gzip.compress(b"".join(noise), 1) if pack is gzip.compress else pack(b"".join(noise)))
    threads = threading.active_count()
    with open_at(path) as source:
        assert lines(source, 1000) == noise[:1000]
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    with open_at(path) as source:
        assert lines(source) == noise
        assert source.read() is None
    damaged = bytearray(path.read_bytes())
    damaged[-2] ^= 1
    path.write_bytes(damaged)
    with open_at(path) as source:
        for _ in range(2):
            assert "a sound" in str(refusal(lines, source).expected)
