"""What a verification finds in a stream at rest; one that is being written: test_verification_live."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.errors import StreamMismatch, StreamMissing
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.inspection.verification import Verified, verify
from lazyshard.inspection.verification_files import (
    LAGGING,
    ChunkNames,
    Extent,
    leftovers,
    missing_chunks,
    plan_batches,
    sort_names,
)
from tests.cli.commands import contents
from tests.stream.consuming import cursor, reading
from tests.stream.damage import Damage, copy, cut, delete, each, edit, flip, found, move, put, shortened, stream, swap
from tests.stream.foreign_seals import seal_rows
from tests.stream.streams import forked, needs_root, produce, python

C0, C1, C2, C3 = (f"chunk_0000{chunk}.jsonl" for chunk in range(4))
S0, S1, S2, S3 = (f"chunk_0000{chunk}.jsonl.completed" for chunk in range(4))

RESTORE = "restore the file from a copy"


def test_stream_that_is_as_it_should_be(tmp_path: Path) -> None:
    before = contents(stream(tmp_path))
    verified = verify(tmp_path)
    counts = {"samples_per_chunk": 2, "retired": 0, "chunks": 3, "samples": 5, "size": 45}
    assert verified == Verified(
        native=True, stream_id=verified.stream_id, ended=True, running=False, quick=False, findings=(), **counts
    )
    assert len(verified.stream_id or "") == 32
    assert contents(tmp_path) == before
    assert not found(tmp_path, quick=True, samples_per_chunk=2)


@pytest.mark.parametrize("samples", [0, 1, 4])
@pytest.mark.parametrize("end", [True, False])
def test_streams_of_any_length(samples: int, end: bool, tmp_path: Path) -> None:
    assert not found(stream(tmp_path, samples, end=end))


@pytest.mark.parametrize(
    ("damage", "kind", "file", "expected", "actual"),
    [
        (flip(C1, 10), "digest", f"{C1} row 1", "XXH3 dabf1e4ca7f659b6 as sealed", "d9fd6f4cf524f861"),
        (each(flip(C1, 1), flip(C1, 10)), "digest", f"{C1} row 0 of 2", "XXH3 964cfaf49568ec35 as sealed", None),
        # The newline between two rows: the second one is as it was.
        (flip(C0, 8), "digest", f"{C0} row 0", "XXH3 6c9e5883f786f2b1 as sealed", "574ae75bbafe8f6f"),
        (cut(C1, 10), "size", C1, "18 bytes as sealed", "10 bytes"),
        (cut(C1, 0), "size", C1, "18 bytes as sealed", "0 bytes"),
        (put(C2, b'{"id":4}\n{"id":5}\n'), "size", C2, "9 bytes as sealed", "18 bytes"),
        (cut(S1, 0), "invalid", S1, "a JSON object", "b'' (Input is a zero-length, empty document: line 1 "),
        (edit(S1, format=3), "version", S1, "stream format 2", "format 3"),
        (edit(S1, samples=1), "invalid", f"{S1} offsets", "2 numbers of 8 bytes", "24 bytes"),
        (edit(S1, samples=-1), "invalid", f"{S1} samples", "an integer from 1 to 100000000", "-1"),
        (edit(S1, bytes=7), "invalid", f"{S1} bytes", "18, where the last row ends", "7"),
        (edit(S1, xxh3="!"), "invalid", f"{S1} xxh3", "a base64 string", None),
        (edit(S1, tokens="AAAA"), "invalid", f"{S1} tokens", "2 numbers of 4 bytes", "3 bytes"),
        (delete(C1), "data-missing", C1, "the rows of the chunk", "no such file although a seal is there"),
        (delete(S1), "seal-missing", S1, "a seal", "no such file although the chunk counts as published"),
        (delete(S2), "seal-missing", S2, "a seal", "no such file although the chunk counts as published"),
        (delete(C0, S0), "missing", C0, "the chunk and its seal", "neither"),
        (delete(C2, S2), "missing", C2, "the chunk and its seal", "neither"),
        (delete(C1, S1, C2, S2), "missing", C1, "the chunks 1 to 2 and their seals", "none of these 2"),
        (copy(C1, "chunk_1.jsonl"), "doubled", C1, "one file for chunk 1", "also chunk_1.jsonl"),
        (copy(S1, "chunk_1.jsonl.completed"), "doubled", S1, "one file for chunk 1", "also chunk_1.jsonl.completed"),
        (move(C1, "chunk_1.jsonl"), "misnamed", "chunk_1.jsonl", f"the name {C1}", None),
        (move(S1, "chunk_000001.jsonl.completed"), "misnamed", "chunk_000001.jsonl.completed", f"the name {S1}", None),
        (put(S3), "beyond-end", S3, "no chunk from 3 on, as stream.end says", "a seal"),
        (delete("stream.json"), "manifest-missing", "stream.json", "the manifest", "no such file"),
        (put("stream.json", b"{}"), "invalid", "stream.json format", "an integer from 1 to 2147483648", None),
        (edit("head.json", samples=4), "head", "head.json", "3 chunks of 2 rows", "4 rows"),
        (edit("head.json", chunks=4, samples=8), "head", "head.json", "3 chunks with 5 rows, as stream.end says", None),
        (edit("head.json", chunks=2, samples=3), "head", "head.json", None, "2 chunks with 3 rows"),
        (put("stream.end"), "invalid", "stream.end", "a JSON object", None),
        (put("retired.json", b"{"), "invalid", "retired.json", "a JSON object", None),
        (put("cursors/a.json", b"{"), "invalid", "cursors/a.json", "a JSON object", None),
    ],
)
def test_one_damage(
    damage: Damage, kind: str, file: str, expected: str | None, actual: str | None, tmp_path: Path
) -> None:
    damage(stream(tmp_path))
    [(found_kind, found_file, found_expected, found_actual)] = found(tmp_path)
    assert (found_kind, found_file) == (f"damage {kind}", file)
    assert found_expected == expected or expected is None
    assert actual is None or found_actual.startswith(actual)


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (
            swap(S0, S1),
            [
                ("damage invalid", f"{S0} chunk", "0, as in the file's name", "1"),
                ("damage invalid", f"{S1} chunk", "1, as in the file's name", "0"),
            ],
        ),
        (
            # The rows fit neither seal, although all sizes are right.
            swap(C0, C1),
            [
                ("damage digest", f"{C0} row 0 of 2", "XXH3 6c9e5883f786f2b1 as sealed", "964cfaf49568ec35"),
                ("damage digest", f"{C1} row 0 of 2", "XXH3 964cfaf49568ec35 as sealed", "6c9e5883f786f2b1"),
            ],
        ),
        (
            each(move(C2, "chunk_00007.jsonl"), move(S2, "chunk_00007.jsonl.completed")),
            [
                ("damage missing", C2, "the chunk and its seal", "neither"),
                (
                    "damage beyond-end",
                    "chunk_00007.jsonl.completed",
                    "no chunk from 3 on, as stream.end says",
                    "a seal",
                ),
            ],
        ),
        (
            edit("stream.end", chunks=2, samples=4),
            [
                ("damage head", "head.json", "2 chunks with 4 rows, as stream.end says", "3 chunks with 5 rows"),
                ("damage beyond-end", S2, "no chunk from 2 on, as stream.end says", "a seal"),
            ],
        ),
        (
            each(edit("stream.end", samples=6), edit("head.json", samples=6)),
            [("damage end", "stream.end", "5 rows, as the seals say", "6 rows")],
        ),
        (
            delete("stream.end"),
            [
                (
                    "damage end-missing",
                    "stream.end",
                    "the end, after 3 chunks with 5 rows, as head.json says",
                    "no such file",
                ),
                ("leftover unended", C2, "2 rows, or stream.end after fewer", "1 row"),
            ],
        ),
        (
            # Far more than could ever be listed.
            edit("head.json", chunks=10**15, samples=2 * 10**15, ended=False),
            [
                (
                    "damage head",
                    "head.json",
                    "3 chunks with 5 rows, as stream.end says",
                    "1,000,000,000,000,000 chunks with 2,000,000,000,000,000 rows, and more to come",
                )
            ],
        ),
    ],
)
def test_damage_that_shows_in_several_places(
    damage: Damage, wanted: list[tuple[str, str, str, str]], tmp_path: Path
) -> None:
    damage(stream(tmp_path))
    assert found(tmp_path) == wanted


def test_gap_of_any_size_is_one_finding(tmp_path: Path) -> None:
    edit("head.json", chunks=10**15, samples=2 * 10**15)(stream(tmp_path, 4, end=False))
    expected = "the chunks 2 to 999999999999999 and their seals"
    assert found(tmp_path) == [("damage missing", C2, expected, "none of these 999,999,999,999,998")]


@pytest.mark.parametrize("short", [0, 1])
def test_short_chunk_in_the_middle(short: int, tmp_path: Path) -> None:
    """A stream whose writer was told another number of rows: each file by itself is in order."""
    other = stream(tmp_path / "other", 6, per_chunk=3)
    stream(tmp_path / "stream", 6)
    for name in (S0, C0) if short == 0 else (S1, C1):
        (tmp_path / "stream" / name).write_bytes((other / name).read_bytes())
    name = (C0, C1)[short]
    assert ("damage samples", name, "2 rows", "3 rows") in found(tmp_path / "stream")


@pytest.mark.parametrize(
    ("leave", "wanted"),
    [
        (put(C3, b"x"), ("unpublished", C3, "a seal beside it", "none, so it was never published")),
        (
            put(f".tmp/{C3}.0123456789abcdef", b"x"),
            ("temporary", f".tmp/{C3}.0123456789abcdef", "nothing", "what a producer was writing"),
        ),
        (delete("head.json"), ("head-missing", "head.json", "the head", "no such file, so readers list the directory")),
        (
            put("head.json", b""),
            ("invalid", "head.json", "a JSON object", "b'' (Input is a zero-length, empty document: line 1 column 1 "),
        ),
        (
            edit("head.json", chunks=2, samples=4, ended=False),
            (
                "head-behind",
                "head.json",
                "3 chunks with 5 rows, as stream.end says",
                "2 chunks with 4 rows, so readers wait for more",
            ),
        ),
        (put("stream.owner"), ("invalid", "stream.owner", "a JSON object", "b'' (Input is a zero-length, empty ")),
        (put("cursors/a.reading.json", b"[]"), ("invalid", "cursors/a.reading.json", "a JSON object", "[]")),
    ],
)
def test_leftover(leave: Damage, wanted: tuple[str, str, str, str], tmp_path: Path) -> None:
    leave(stream(tmp_path))
    [(kind, file, expected, actual)] = found(tmp_path)
    assert (kind, file, expected) == (f"leftover {wanted[0]}", *wanted[1:3])
    assert actual.startswith(wanted[3])


def test_next_start_of_the_producer_removes_the_leftovers(tmp_path: Path) -> None:
    stream(tmp_path, 4, end=False)
    put(C2, b"x")(tmp_path)
    put(".tmp/x", b"x")(tmp_path)
    edit("head.json", chunks=1, samples=2)(tmp_path)
    assert [finding[0] for finding in found(tmp_path)] == [
        "leftover temporary",
        "leftover head-behind",
        "leftover unpublished",
    ]
    produce(tmp_path, 4, end=False)
    assert not found(tmp_path)


def test_stream_that_was_killed_while_it_was_ended(tmp_path: Path) -> None:
    stream(tmp_path)
    delete("stream.end")(tmp_path)
    edit("head.json", chunks=2, samples=4, ended=False, state="failed")(tmp_path)
    verified = verify(tmp_path)
    assert shortened(verified) == [("leftover unended", C2, "2 rows, or stream.end after fewer", "1 row")]


def test_row_that_was_sealed_and_is_no_row(tmp_path: Path) -> None:
    """Its digest is right: a producer of somebody else's sealed it."""
    seal_rows(stream(tmp_path), 1, b'{"id":2}\n', b'{"n":18446744073709551616}\n')
    assert found(tmp_path) == [
        (
            "damage row",
            f"{C1} row 1",
            "a JSON object on a line",
            "the integer 18446744073709551616 does not fit into 64 bits; write it as a string (byte 14)",
        )
    ]
    seal_rows(tmp_path, 1, b"[]\n", b'{"id":3}')
    assert found(tmp_path) == [("damage row", f"{C1} row 0 of 2", "a JSON object on a line", "an array (byte 0)")]
    assert not found(tmp_path, quick=True)


def test_quick_leaves_the_rows_unread(tmp_path: Path) -> None:
    flip(C1, 10)(stream(tmp_path))
    cut(C0, 10)(tmp_path)
    assert found(tmp_path, quick=True) == [("damage size", C0, "18 bytes as sealed", "10 bytes")]


def test_every_bad_row_of_a_large_chunk_is_counted(tmp_path: Path) -> None:
    stream(tmp_path, 1000, per_chunk=1000)
    size = (tmp_path / C0).stat().st_size
    for byte in range(5, size, 20):
        flip(C0, byte)(tmp_path)
    bad = {(tmp_path / C0).read_bytes()[: byte + 1].count(b"\n") for byte in range(5, size, 20)}
    [finding] = verify(tmp_path).findings
    assert finding.rows >= len(bad) - 2 > 500


def test_cursors(tmp_path: Path) -> None:
    stream(tmp_path, 4, end=False)
    cursor(tmp_path, "a", consumed=4, chunks_before=2)
    reading(tmp_path, "a", needs_chunks=9)
    assert not found(tmp_path)
    cursor(tmp_path, "b", consumed=4, chunks_before=3)
    cursor(tmp_path, "c", consumed=5, chunks_before=1)
    cursor(tmp_path, "d", consumed=1, chunks_before=0, stream_id="0" * 32)
    reading(tmp_path, "d", needs_chunks=1, stream_id=None)
    stream_id = verify(tmp_path).stream_id
    assert found(tmp_path) == [
        ("damage ahead", "cursors/b.json", "at most the 2 published chunks", "done with the chunks below 3"),
        ("damage ahead", "cursors/c.json", "at most the 4 published samples", "5 samples consumed"),
        ("damage other-stream", "cursors/d.json", f"stream {stream_id}", f"stream {'0' * 32}"),
        ("leftover other-stream", "cursors/d.reading.json", f"stream {stream_id}", "a stream without manifest"),
    ]
    put("cursors/.d.0123456789abcdef", b"x")(tmp_path)
    assert len(found(tmp_path)) == 4


def test_cursor_in_another_epoch_is_not_ahead(tmp_path: Path) -> None:
    cursor(stream(tmp_path), "a", consumed=12, chunks_before=3)
    assert not found(tmp_path)


def test_no_stream(tmp_path: Path) -> None:
    with pytest.raises(StreamMissing, match="there is no stream"):
        verify(tmp_path)
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "nowhere")


def test_other_samples_per_chunk(tmp_path: Path) -> None:
    with pytest.raises(StreamMismatch, match="has 2 samples per chunk, asked for 3"):
        verify(stream(tmp_path), 3)
    with pytest.raises(ValueError, match="samples_per_chunk"):
        verify(tmp_path, 0)


@needs_root
def test_what_may_not_be_read_is_told_and_the_rest_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(C2, 3)(stream(tmp_path))
    (tmp_path / C1).chmod(0)
    tmp_path.chmod(0o755)
    # A relative path, as the directories above are closed to the other user; and all is imported before they are.
    monkeypatch.chdir(tmp_path)

    def other_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        assert found(Path()) == [
            ("unchecked unreadable", C1, "a readable file", "that uid 65534 may not read it"),
            ("damage digest", f"{C2} row 0", "XXH3 776d25f8eebc2e35 as sealed", "77b662278e323d27"),
        ]

    assert forked(other_user) == 0


PEAK = """
import sys
from pathlib import Path
from lazyshard.inspection.verification import verify
assert verify(Path(sys.argv[1])).findings == ()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_chunk(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "large", 100) as writer:
        for number in range(100):
            writer.write({"id": number, "text": "x" * (1 << 20)})
    peaks = [int(python(PEAK, directory).stdout) for directory in (stream(tmp_path / "small"), tmp_path / "large")]
    assert peaks[1] - peaks[0] < 20_000, "kB for a chunk of 100 MB"


def names_of(data: set[int], seals: set[int]) -> ChunkNames:
    return sort_names([*map(chunk_name, data), *map(seal_name, seals)], native=True)


def extent(first: int = 0, stop: int = 3, *, native: bool = True, ended: bool = False, running: bool = False) -> Extent:
    return Extent(first, stop, native, ended, running)


def test_names_that_are_no_chunks_are_passed_over() -> None:
    found = [
        "stream.json",
        "chunk_00000.jsonl.gz",
        "chunk_.jsonl",
        "xchunk_00000.jsonl",
        "chunk_00000.jsonl.completed.1",
    ]
    assert sort_names(found, native=True) == ChunkNames({}, {}, ())


def test_chunks_past_five_digits() -> None:
    names = sort_names(["chunk_100000.jsonl", "chunk_100000.jsonl.completed"], native=True)
    assert names == ChunkNames({100000: "chunk_100000.jsonl"}, {100000: "chunk_100000.jsonl.completed"}, ())
    assert names.sealed_before == 100001


def test_padding_is_free_in_a_foreign_directory() -> None:
    names = sort_names(["chunk_7.jsonl", "chunk_007.jsonl.completed"], native=False)
    assert names == ChunkNames({7: "chunk_7.jsonl"}, {7: "chunk_007.jsonl.completed"}, ())


def test_three_files_for_a_chunk() -> None:
    [finding] = sort_names(["chunk_7.jsonl", "chunk_007.jsonl", "chunk_00007.jsonl"], native=False).findings
    assert (finding.file, finding.found) == ("chunk_00007.jsonl", "also chunk_007.jsonl, chunk_7.jsonl")


chunks = st.sets(st.integers(0, 12))


@given(data=chunks, seals=chunks, there=chunks, first=st.integers(0, 12), count=st.integers(0, 12))
def test_missing_chunks_are_told_once_each(
    data: set[int], seals: set[int], there: set[int], first: int, count: int
) -> None:
    """Against a list: each published chunk of which nothing is there is in exactly one gap, and no other is."""
    stop = first + count
    found = list(missing_chunks(names_of(data, seals), extent(first, stop), {}, there))
    told: list[int] = []
    for finding in found:
        words = finding.expected.split()
        assert finding.chunk is not None
        told += range(finding.chunk, int(words[4]) + 1) if words[1] == "chunks" else [finding.chunk]
    assert told == [chunk for chunk in range(first, stop) if chunk not in data | seals | there]


@given(data=chunks, seals=chunks, first=st.integers(0, 6), count=st.integers(0, 6))
def test_each_file_is_looked_at_or_left_over(data: set[int], seals: set[int], first: int, count: int) -> None:
    names, stop = names_of(data, seals), first + count
    looked_at = [
        files.chunk
        for batch in plan_batches(Path(), names, extent(first, stop), 1000, quick=False)
        for files in batch.files
    ]
    # So few are all among the newest, which are looked for by name.
    assert count < LAGGING
    assert looked_at == list(range(first, stop))
    told = {(finding.file, finding.kind) for finding in leftovers(names, extent(first, stop))}
    assert told == (
        {(chunk_name(chunk), "retired") for chunk in data if chunk < first}
        | {(seal_name(chunk), "retired") for chunk in seals if chunk < first}
        | {(chunk_name(chunk), "unpublished") for chunk in data - seals if chunk >= stop}
        | {(seal_name(chunk), "beyond-end") for chunk in seals if chunk >= stop}
    )
    assert not list(leftovers(names, extent(first, stop, running=True)))


def test_only_the_newest_chunks_are_looked_for_unlisted() -> None:
    batches = plan_batches(Path(), names_of({3}, {3}), extent(0, 10**15), 4096, quick=False)
    looked_at = [files.chunk for batch in batches for files in batch.files]
    assert looked_at == [3, *range(10**15 - LAGGING, 10**15)]


def test_batches_are_of_chunks_or_rows() -> None:
    names = names_of(set(range(200)), set(range(200)))

    def sizes(per_chunk: int | None, *, quick: bool) -> list[int]:
        batches = plan_batches(Path(), names, extent(0, 200), per_chunk, quick=quick)
        return [len(batch.files) for batch in batches]

    assert sizes(10, quick=False) == [64, 64, 64, 8]
    assert sizes(1000, quick=False) == [4] * 50
    assert sizes(10**8, quick=False) == [1] * 200
    assert sizes(None, quick=False) == [1] * 200
    assert sizes(10**8, quick=True) == [64, 64, 64, 8]
