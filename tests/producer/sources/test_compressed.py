"""Compressed JSON lines: every member and frame, every row once, and nothing torn taken for the end."""

import gzip
import io
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import ExtraMissing, SourceRefused
from lazyshard_producer.sources.decompression import open_text
from lazyshard_producer.sources.sequential import CompressedJsonLines
from lazyshard_producer.sources.source import Line, RowOrigin
from tests.harness.processes.environment import environment
from tests.producer.sources.reading import lines, open_kind, position_after, take

BOM = b"\xef\xbb\xbf"
TEXT = BOM + b"\n" + b"\r\n".join(b"%d" % n * (n * 30) for n in range(1, 10)) + b"\n\r\n\nx"


def zstd(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(text)


PACKERS: list[Callable[[bytes], bytes]] = [gzip.compress, zstd]
both = pytest.mark.parametrize("pack", PACKERS, ids=["gz", "zst"])


def open_at(path: Path, position: dict[str, Any] | None = None, limit: int = 100_000) -> CompressedJsonLines:
    source: CompressedJsonLines = open_kind(CompressedJsonLines, path, position, limit)
    return source


def read_until_refused(path: Path) -> tuple[list[Line], str | None]:
    """The rows that a file gives, and why it gives no more, None at its end. Refusing is for good."""
    found: list[Line] = []
    try:
        source = open_at(path)
    except SourceRefused as error:
        return found, str(error)
    with closing(source):
        try:
            while (rows := source.read()) is not None:
                found += rows.lines
        except SourceRefused as error:
            with pytest.raises(SourceRefused):
                source.read()
            return found, str(error)
    return found, None


def plain_lines(text: bytes) -> list[bytes]:
    """What the text's rows are, in the plainest way."""
    split = [line + b"\n" for line in text.removeprefix(BOM).split(b"\n")]
    split[-1] = split[-1][:-1]
    return [line for line in split if line.strip(b"\r\n")]


@both
@pytest.mark.parametrize("text", [b"", b"\n", b"1\n2\n", b"1\r\n\r\n2", b"1\r2\n", b"{}\n" + bytes(5000), TEXT])
def test_lines(pack: Callable[[bytes], bytes], text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(text))
    with closing(open_at(path)) as source:
        taken = take(source)
        assert [line for line, _, _ in taken] == plain_lines(text)
        position = source.entry(source.reached)
        assert position["offset"] == len(text)
        assert position["line"] == len(taken) + source.blank
        assert source.progress == (len(path.read_bytes()), len(path.read_bytes()))


@both
def test_all_members_are_read_and_lines_go_on_across_them(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"".join(pack(TEXT[start : start + 7]) for start in range(0, len(TEXT), 7)))
    with closing(open_at(path)) as source:
        assert lines(source) == plain_lines(TEXT)


def test_members_smaller_than_a_read_by_far(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"".join(gzip.compress(b"%d\n" % number, 1) for number in range(3000)))
    with closing(open_at(path)) as source:
        assert lines(source) == [b"%d\n" % number for number in range(3000)]


def test_frames_that_are_skipped_and_frames_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "a"
    noise = bytes(range(256)).replace(b"\n", b"-") * 600 + b"\n"
    packed = io.BytesIO()
    for level, checksum, size in ((1, True, True), (19, False, False), (3, True, False)):
        compressor = zstandard.ZstdCompressor(level, write_checksum=checksum, write_content_size=size)
        packed.write(b"\x53\x2a\x4d\x18\x03\0\0\0abc")
        packed.write(compressor.compress(noise + b"x" * 300_000 + b"\n"))
    path.write_bytes(packed.getvalue())
    with closing(open_at(path, limit=1 << 20)) as source:
        assert lines(source) == [noise, b"x" * 300_000 + b"\n"] * 3


@both
def test_going_on_after_any_row_gives_the_rest(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(TEXT[:100]) + pack(TEXT[100:]))
    expected = plain_lines(TEXT)
    for count in range(len(expected) + 1):
        with closing(open_at(path)) as source:
            taken = take(source, count)
            position = source.entry(position_after(source, taken))
        with closing(open_at(path, position)) as source:
            # How large the file is it knows again when it has read it to its end.
            assert (position.pop("packed", None) == path.stat().st_size) == (count == len(expected))
            assert source.entry(source.start) == position
            rest = take(source)
            assert [line for line, _, _ in rest] == expected[count:]
            assert [rows.place(index).line for _, rows, index in rest] == [*range(2 + count, 11), 13][: len(rest)]
            assert (source.reached.lines.line, source.blank) == (13, 3)


@both
def test_place_of_a_row_is_in_the_text(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(BOM + b"\n11\n22\n"))
    with closing(open_at(path)) as source:
        assert [rows.place(index) for _, rows, index in take(source)] == [
            RowOrigin(str(path), 2, 4),
            RowOrigin(str(path), 3, 7),
        ]


@both
def test_a_file_cut_anywhere_is_refused_after_its_whole_rows(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    first, second = pack(b"1\n22\n"), pack(b"333\n4444\n")
    packed = first + second
    for size in range(1, len(packed)):
        path.write_bytes(packed[:size])
        found, refusal = read_until_refused(path)
        assert (refusal is None) == (size == len(first))
        assert found == [b"1\n", b"22\n", b"333\n", b"4444\n"][: len(found)]
        assert len(found) >= 2 * (size >= len(first))


@both
def test_a_damaged_byte_is_never_taken_for_text_in_order(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    packed = pack(b"1\n22\n333\n4444\n55555\n666666\n" * 3)
    refused = 0
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 0x24
        path.write_bytes(damaged)
        found, refusal = read_until_refused(path)
        refused += refusal is not None
        # The time and the system in a gzip header are nobody's concern, for instance.
        assert refusal is not None or found == plain_lines(b"1\n22\n333\n4444\n55555\n666666\n" * 3)
    assert refused > len(packed) // 2


@pytest.mark.parametrize(
    ("packed", "rows", "byte"),
    [
        (b"", 0, 0),
        (b"{}\n", 0, 0),
        (gzip.compress(b"1\n", mtime=0) + b"tail", 1, 22),
        (gzip.compress(b"1\n", mtime=0) + b"\0\0tail", 1, 24),
        (zstd(b"1\n") + b"tail", 1, 15),
        (gzip.compress(b"1\n", mtime=0)[:-8] + bytes(8), 0, 22),
        (gzip.compress(b"1\n", mtime=0) + b"\x1f", 1, 23),
    ],
)
def test_what_is_not_compressed_text_is_refused_after_what_is(
    packed: bytes, rows: int, byte: int, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_bytes(packed)
    found, refusal = read_until_refused(path)
    assert len(found) == rows
    assert refusal is not None
    assert f": byte {byte} of the compressed file: expected " in refusal


def test_nul_bytes_behind_a_gzip_member_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(b"1\n") + bytes(10_000) + gzip.compress(b"2\n") + bytes(3))
    with closing(open_at(path)) as source:
        assert lines(source) == [b"1\n", b"2\n"]


@both
def test_members_appended_since_are_read(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(b"1\n2"))
    with closing(open_at(path)) as source:
        assert lines(source) == [b"1\n", b"2"]
        position = source.entry(source.reached)
    assert position["open_end"]
    for newline in (b"\n", b"\r\n"):
        path.write_bytes(pack(b"1\n2") + pack(newline[:1]) + pack(newline[1:] + b"3\n"))
        with closing(open_at(path, position)) as source:
            assert lines(source) == [b"3\n"]
            assert source.reached.lines == (len(newline) + 5, 3, 0, False)
    path.write_bytes(pack(b"1\n2") + pack(b"3\n"))
    with closing(open_at(path, position)) as source, pytest.raises(SourceRefused, match=r"a:2: .*byte 3.*continued"):
        source.read()


@both
def test_another_text_than_the_published_one_is_refused(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(b"1\n2\n3\n"))
    with closing(open_at(path)) as source:
        position = source.entry(position_after(source, take(source, 2)))
    for text, message in ((b"1\n7\n3\n", "expected XXH3 .* of the first 4 bytes"), (b"1\n", "at least the 4 bytes")):
        path.write_bytes(pack(text))
        with closing(open_at(path, position)) as source, pytest.raises(SourceRefused, match=message):
            lines(source)
    for other in PACKERS:
        path.write_bytes(other(b"1\n2\n7\n"))
        with closing(open_at(path, position)) as source:
            assert lines(source) == [b"7\n"]


def test_a_position_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(b"1\n"))
    with closing(open_at(path)) as source:
        position = source.entry(source.start)
    for wrong in ({"kind": "jsonl"}, {"offset": -1}, {"digest": None}, {"open_end": 0}):
        with pytest.raises(SourceRefused, match="no position to go on from"):
            open_at(path, position | wrong)


@both
def test_a_line_that_is_too_long_is_passed_over(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(b"1\n" + b"x" * 5_000_000 + b"\n2\n"))
    with closing(open_at(path, limit=1000)) as source:
        first, error, last = lines(source)
        assert (first, last) == (b"1\n", b"2\n")
        assert isinstance(error, RowInvalid)
        assert error.reason == "longer than the 1000 bytes of --max-row-bytes"


def test_directory_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceRefused, match="expected a plain file"):
        open_at(tmp_path)
    with pytest.raises(SourceRefused, match="no such file"):
        open_at(tmp_path / "none")


def test_zstd_without_its_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "a"
    path.write_bytes(zstd(b"1\n"))
    with pytest.raises(ExtraMissing, match="pip install"):
        open_at(path)


@both
def test_a_large_file_is_decompressed_in_a_thread_that_ends(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    dice = random.Random(0)
    noise = [b"%x\n" % dice.getrandbits(800) for _ in range(60_000)]
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(b"".join(noise), 1) if pack is gzip.compress else pack(b"".join(noise)))
    threads = threading.active_count()
    with closing(open_at(path)) as source:
        assert lines(source, 1000) == noise[:1000]
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    with closing(open_at(path)) as source:
        assert lines(source) == noise
        assert source.read() is None
    damaged = bytearray(path.read_bytes())
    damaged[-2] ^= 1
    path.write_bytes(damaged)
    with closing(open_at(path)) as source:
        for _ in range(2):
            with pytest.raises(SourceRefused, match="expected a sound"):
                lines(source)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_line_of_a_gigabyte_takes_bounded_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        if kind == "gz":
            member = gzip.compress(bytes(1 << 24), 1)
            file.write(member * 64)
        else:
            file.write(zstd(bytes(1 << 30)))
    program = """
import resource, sys
from pathlib import Path
from lazyshard_producer.sources.sequential import CompressedJsonLines
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources.source import Context
source = CompressedJsonLines(SourceSettings(path=sys.argv[1]), None, Context(Path("out"), 1 << 20))
rows = source.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
errors = list(rows.lines)
while (rows := source.read()) is not None:
    errors += rows.lines
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, source.reached.lines.offset, *errors)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=environment(), capture_output=True, text=True, check=True
    )
    grown, offset, *words = done.stdout.split()
    assert int(offset) == 1 << 30
    assert "NUL" in words
    assert int(grown) < 32 << 10


def test_text_of_a_file_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    for pack in PACKERS:
        assert open_text(io.BufferedReader(io.BytesIO(pack(b"1")), 64), "a").read() == b"1"
