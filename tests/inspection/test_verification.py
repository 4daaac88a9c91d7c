"""What a verification finds in a stream at rest; one that is being written: test_verification_live."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import FileInvalid, StreamMismatch, StreamMissing
from lazyshard.format.records import chunk_name, seal_name
from lazyshard.inspection import verification_files
from lazyshard.inspection.verification import Verified, verify
from lazyshard.inspection.verification_files import StreamFiles, chunks_to_check, leftovers, missing_chunks, sort_names
from tests.cli.commands import as_other_user, contents
from tests.stream.damage import Damage, copy, cut, delete, each, edit, flip, found, move, put, stream, swap
from tests.stream.streams import cursor, foreign, needs_root, produce, publish_rows, python, raised, reading, seal_rows

C0, C1, C2, C3 = (f"chunk_0000{chunk}.jsonl" for chunk in range(4))
S0, S1, S2, S3 = (f"chunk_0000{chunk}.jsonl.completed" for chunk in range(4))
C7, S7 = "chunk_00007.jsonl", "chunk_00007.jsonl.completed"
ROWS = (b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', b'{"id":4}\n')
chunks = st.sets(st.integers(0, 12))


def test_streams_of_any_length_that_are_as_they_should_be(tmp_path: Path) -> None:
    before = contents(stream(tmp_path))
    verified = verify(tmp_path)
    counts = {"samples_per_chunk": 2, "retired": 0, "chunks": 3, "samples": 5, "size": 45}
    assert verified == Verified(
        native=True, stream_id=verified.stream_id, ended=True, running=False, quick=False, findings=(), **counts
    )
    assert len(verified.stream_id or "") == 32
    assert contents(tmp_path) == before
    assert not found(tmp_path, quick=True, samples_per_chunk=2)
    for samples, end in ((0, True), (1, True), (0, False), (4, False)):
        assert not found(stream(tmp_path / f"{samples} {end}", samples, end=end))


@pytest.mark.parametrize(
    ("damage", "kind", "file", "expected", "actual"),
    [
        (flip(C1, 10), "digest", f"{C1} row 1", "XXH3 dabf1e4ca7f659b6 as sealed", "d9fd6f4cf524f861"),
        (each(flip(C1, 1), flip(C1, 10)), "digest", f"{C1} row 0 of 2", "XXH3 964cfaf49568ec35 as sealed", None),
        (flip(C0, 8), "digest", f"{C0} row 0", "XXH3 6c9e5883f786f2b1 as sealed", "574ae75bbafe8f6f"),
        (cut(C1, 10), "size", C1, "18 bytes as sealed", "10 bytes"),
        (put(C2, b'{"id":4}\n{"id":5}\n'), "size", C2, "9 bytes as sealed", "18 bytes"),
        (cut(S1, 0), "invalid", S1, "a JSON object", "b'' (Input is a zero-length, empty document: line 1 "),
        (edit(S1, format=4), "version", S1, "format 3", "format 4"),
        (edit(S1, samples=1), "invalid", f"{S1} offsets", "2 numbers of 8 bytes", "24 bytes"),
        (edit(S1, bytes=7), "invalid", f"{S1} bytes", "18, where the last row ends", "7"),
        (delete(C1), "data-missing", C1, "the rows of the chunk", "no such file although a seal exists"),
        (delete(S1), "seal-missing", S1, "a seal", "no such file although the chunk counts as published"),
        (delete(C0, S0), "missing", C0, "the chunk and its seal", "neither"),
        (delete(C1, S1, C2, S2), "missing", C1, "the chunks 1 to 2 and their seals", "none of these 2"),
        (copy(C1, "chunk_1.jsonl"), "doubled", C1, "one file for chunk 1", "also chunk_1.jsonl"),
        (copy(S1, "chunk_1.jsonl.completed"), "doubled", S1, "one file for chunk 1", "also chunk_1.jsonl.completed"),
        (move(C1, "chunk_1.jsonl"), "misnamed", "chunk_1.jsonl", f"the name {C1}", None),
        (move(S1, "chunk_000001.jsonl.completed"), "misnamed", "chunk_000001.jsonl.completed", f"the name {S1}", None),
        (put(S3), "beyond-end", S3, "no chunk from 3 on, by stream.end", "a seal"),
        (delete("stream.json"), "manifest-missing", "stream.json", "the manifest", "no such file"),
        (put("stream.json", b"{}"), "invalid", "stream.json format", "an integer from 1 to 2147483648", None),
        (edit("head.json", samples=4), "head", "head.json", "3 chunks of 2 rows", "4 rows"),
        (edit("head.json", chunks=4, samples=8), "head", "head.json", "3 chunks with 5 rows, as in stream.end", None),
        (edit("head.json", chunks=2, samples=3), "head", "head.json", None, "2 chunks with 3 rows"),
        (put("stream.end"), "invalid", "stream.end", "a JSON object", None),
        (put("retired.json", b"{"), "invalid", "retired.json", "a JSON object", None),
        (put("cursors/a.json", b"{"), "invalid", "cursors/a.json", "a JSON object", None),
    ],
)
def test_one(damage: Damage, kind: str, file: str, expected: str | None, actual: str | None, tmp_path: Path) -> None:
    damage(stream(tmp_path))
    [(found_kind, found_file, found_expected, found_actual)] = found(tmp_path)
    assert (found_kind, found_file) == (f"damage {kind}", file)
    assert found_expected == expected or expected is None
    assert actual is None or found_actual.startswith(actual)


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (swap(S0, S1), [("damage invalid", f"{S0} chunk"), ("damage invalid", f"{S1} chunk")]),
        # The rows fit neither seal, although all sizes are right.
        (swap(C0, C1), [("damage digest", f"{C0} row 0 of 2"), ("damage digest", f"{C1} row 0 of 2")]),
        (each(move(C2, C7), move(S2, S7)), [("damage missing", C2), ("damage beyond-end", S7)]),
        (edit("stream.end", chunks=2, samples=4), [("damage head", "head.json"), ("damage beyond-end", S2)]),
        (each(edit("stream.end", samples=6), edit("head.json", samples=6)), [("damage end", "stream.end")]),
        (delete("stream.end"), [("damage end-missing", "stream.end"), ("leftover unended", C2)]),
        (
            each(delete("stream.end"), edit("head.json", chunks=2, samples=4, ended=False, state="failed")),
            [("leftover unended", C2)],
        ),
        (edit("head.json", chunks=10**15, samples=2 * 10**15, ended=False), [("damage head", "head.json")]),
        (put(C3, b"x"), [("leftover unpublished", C3)]),
        (put(f".tmp/{C3}.0123456789abcdef", b"x"), [("leftover temporary", f".tmp/{C3}.0123456789abcdef")]),
        (delete("head.json"), [("leftover head-missing", "head.json")]),
        (put("head.json", b""), [("leftover invalid", "head.json")]),
        (edit("head.json", chunks=2, samples=4, ended=False), [("leftover head-behind", "head.json")]),
        (put("stream.owner"), [("leftover invalid", "stream.owner")]),
        (put("cursors/a.reading.json", b"[]"), [("leftover invalid", "cursors/a.reading.json")]),
    ],
)
def test_damage_in_several_places_and_leftovers(damage: Damage, wanted: list[tuple[str, str]], tmp_path: Path) -> None:
    damage(stream(tmp_path))
    assert [finding[:2] for finding in found(tmp_path)] == wanted


@pytest.mark.parametrize("short", [0, 1])
def test_short_chunk_in_the_middle(short: int, tmp_path: Path) -> None:
    """A stream whose writer was told another number of rows: each file by itself is in order."""
    other = stream(tmp_path / "other", 6, per_chunk=3)
    stream(tmp_path / "stream", 6)
    for name in (f"chunk_0000{short}.jsonl", f"chunk_0000{short}.jsonl.completed"):
        (tmp_path / "stream" / name).write_bytes((other / name).read_bytes())
    assert ("damage samples", f"chunk_0000{short}.jsonl", "2 rows", "3 rows") in found(tmp_path / "stream")


def test_next_start_of_the_producer_removes_the_leftovers(tmp_path: Path) -> None:
    stream(tmp_path, 4, end=False)
    put(C2, b"x")(tmp_path)
    put(".tmp/x", b"x")(tmp_path)
    edit("head.json", chunks=1, samples=2)(tmp_path)
    kinds = [finding[0] for finding in found(tmp_path)]
    assert kinds == ["leftover temporary", "leftover head-behind", "leftover unpublished"]
    produce(tmp_path, 4, end=False)
    assert not found(tmp_path)


def test_rows_are_parsed_even_where_their_digest_is_right_and_are_not_read_for_a_quick_look(tmp_path: Path) -> None:
    seal_rows(stream(tmp_path), 1, b'{"id":2}\n', b'{"n":18446744073709551616}\n')
    [(kind, file, _, actual)] = found(tmp_path)
    assert (kind, file, actual.endswith("(byte 14)")) == ("damage row", f"{C1} row 1", True)
    seal_rows(tmp_path, 1, b"[]\n", b'{"id":3}')
    assert [finding[:2] for finding in found(tmp_path)] == [("damage row", f"{C1} row 0 of 2")]
    assert not found(tmp_path, quick=True)
    cut(C0, 10)(tmp_path)
    assert found(tmp_path, quick=True) == [("damage size", C0, "18 bytes as sealed", "10 bytes")]


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
        ("damage ahead", "cursors/b.json", "at most 2 chunks", "3 chunks done"),
        ("damage ahead", "cursors/c.json", "at most 4 samples", "5 samples consumed"),
        ("damage other-stream", "cursors/d.json", f"stream {stream_id}", f"stream {'0' * 32}"),
        ("leftover other-stream", "cursors/d.reading.json", f"stream {stream_id}", "a stream without manifest"),
    ]
    put("cursors/.d.0123456789abcdef", b"x")(tmp_path)
    assert len(found(tmp_path)) == 4
    cursor(stream(tmp_path / "ended"), "a", consumed=12, chunks_before=3)  # One in another epoch is not ahead
    assert not found(tmp_path / "ended")


def test_no_stream_or_another(tmp_path: Path) -> None:
    for name, error in (("", StreamMissing), ("nowhere", FileNotFoundError)):
        raised(error, verify, tmp_path / name)
    for per_chunk, refusal in ((3, StreamMismatch), (0, ValueError)):
        raised(refusal, verify, stream(tmp_path / str(per_chunk)), per_chunk)


@needs_root
def test_what_may_not_be_read_is_told_and_the_rest_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(C2, 3)(stream(tmp_path))
    (tmp_path / C1).chmod(0)

    def work() -> None:
        kinds = [finding[:2] for finding in found(Path())]
        assert kinds == [("unchecked unreadable", C1), ("damage digest", f"{C2} row 0")]

    as_other_user(tmp_path, monkeypatch, work)


PEAK = """
import sys
from pathlib import Path
from lazyshard.inspection.verification import verify
assert verify(Path(sys.argv[1])).findings == ()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_chunk(tmp_path: Path) -> None:
    large = publish_rows(tmp_path / "large", 50, ({"id": number, "text": "x" * (1 << 20)} for number in range(50)))
    peaks = [int(python(PEAK, directory).stdout) for directory in (stream(tmp_path / "small"), large)]
    assert peaks[1] - peaks[0] < 20_000, "kB for a chunk of 50 MB"


def listed(*names: str, native: bool = True, first: int = 0, stop: int = 3, running: bool = False) -> StreamFiles:
    files = StreamFiles(Path(), native, running=running, first=first, stop=stop, names=list(names))
    sort_names(files)
    return files


def chunk_files(data: set[int], seals: set[int], first: int, stop: int, *, running: bool = False) -> StreamFiles:
    return listed(*map(chunk_name, data), *map(seal_name, seals), first=first, stop=stop, running=running)


@given(data=chunks, seals=chunks, there=chunks, first=st.integers(0, 12), count=st.integers(0, 12))
def test_missing_chunks_are_told_once(data: set[int], seals: set[int], there: set[int], first: int, count: int) -> None:
    """Against a list: each published chunk of which nothing is there is in exactly one gap, and no other is."""
    stop = first + count
    found = list(missing_chunks(chunk_files(data, seals, first, stop), first, dict.fromkeys(there)))
    told: list[int] = []
    for finding in found:
        words = finding.expected.split()
        assert finding.chunk is not None
        told += range(finding.chunk, int(words[4]) + 1) if words[1] == "chunks" else [finding.chunk]
    assert told == [chunk for chunk in range(first, stop) if chunk not in data | seals | there]


@given(data=chunks, seals=chunks, first=st.integers(0, 6), count=st.integers(0, 6))
def test_each_file_is_looked_at_or_left_over(data: set[int], seals: set[int], first: int, count: int) -> None:
    stop = first + count
    files = chunk_files(data, seals, first, stop)
    looked_at = [one.chunk for one in chunks_to_check(files)]
    assert count < verification_files.LAGGING  # So few are all among the newest, which are looked for by name
    assert looked_at == list(range(first, stop))
    told = {(finding.file, finding.kind) for finding in leftovers(files)}
    assert told == (
        {(chunk_name(chunk), "retired") for chunk in data if chunk < first}
        | {(seal_name(chunk), "retired") for chunk in seals if chunk < first}
        | {(chunk_name(chunk), "unpublished") for chunk in data - seals if chunk >= stop}
        | {(seal_name(chunk), "beyond-end") for chunk in seals if chunk >= stop}
    )
    assert not list(leftovers(chunk_files(data, seals, first, stop, running=True)))


def test_only_the_newest_chunks_are_looked_for_where_they_are_not_listed() -> None:
    listed = {3, 100_000}
    looked_at = [one.chunk for one in chunks_to_check(chunk_files(listed, listed, 0, 10**15))]
    assert looked_at == [3, 100_000, *range(10**15 - verification_files.LAGGING, 10**15)]


def test_allowances_of_a_foreign_directory(tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines, no newline at the end, any padding, markers of any content."""
    foreign(tmp_path, b'\xef\xbb\xbf{"id":0}\r\n\n{"id":1}', b'\n{"id":2}\n \n{"id":3}\n\n', ROWS[2], end=True)
    move(C1, "chunk_1.jsonl")(tmp_path)
    put(S0, b"done")(tmp_path)
    verified = verify(tmp_path)
    assert (verified.native, verified.stream_id, verified.samples_per_chunk) == (False, None, 2)
    assert (verified.chunks, verified.samples, verified.ended, verified.findings) == (3, 5, True, ())
    assert verified.size == sum(path.stat().st_size for path in tmp_path.glob("chunk_*.jsonl"))


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (put(C1, b'{"id":2}\n{"id"}\n'), ("damage row", f"{C1} row 1", "a JSON object on a line", "(byte 14)")),
        (put(C1, b'{"id":2}\n'), ("damage samples", C1, "2 rows", "1 row")),
        (put(C1, b""), ("damage samples", C1, "2 rows", "0 rows")),
        (put(C2, ROWS[0] * 2), ("damage samples", C2, "1 to 2 rows", "4 rows")),
        (delete(C1), ("damage data-missing", C1, "the rows of the chunk", "no such file although a marker exists")),
        (delete(S1), ("damage seal-missing", S1, "a marker", "no such file although the chunk counts as published")),
        (delete(C1, S1), ("damage missing", C1, "the chunk and its marker", "neither")),
        (put("chunk_1.jsonl", ROWS[1]), ("damage doubled", C1, "one file for chunk 1", "also chunk_1.jsonl")),
        (put(C3, ROWS[0]), ("damage unpublished", C3, "a marker for it", "none, so it was never published")),
        (
            put("stream.owner", b"x"),
            ("damage manifest-missing", "stream.json", "the manifest", "no such file, although stream.owner exists"),
        ),
        (delete("stream.end"), ("leftover unended", C2, "2 rows, or stream.end after fewer", "1 row")),
        (
            each(delete("stream.end", C2, S2), put(C2, b'{"id')),
            ("leftover unpublished", C2, "a marker for it", "none, so it was never published"),
        ),
    ],
)
def test_one_damage_of_a_foreign_directory(damage: Damage, wanted: tuple[str, str, str, str], tmp_path: Path) -> None:
    damage(foreign(tmp_path, *ROWS, end=True))
    [(kind, file, expected, actual)] = found(tmp_path)
    assert (kind, file, expected) == wanted[:3]
    assert actual.endswith(wanted[3])


def test_quick_counts_foreign_rows_and_leaves_them_unparsed_and_their_number_can_be_told(tmp_path: Path) -> None:
    put(C1, b'{"id":2}\n{"id"}\n')(foreign(tmp_path, *ROWS, end=True))
    assert not found(tmp_path, quick=True)
    put(C1, b'{"id":2}\n')(tmp_path)
    assert found(tmp_path, quick=True) == [("damage samples", C1, "2 rows", "1 row")]
    put(C0, ROWS[2])(tmp_path)
    put(C1, ROWS[0])(tmp_path)
    assert found(tmp_path) == [("damage samples", C1, "1 row", "2 rows")]
    assert found(tmp_path, samples_per_chunk=2) == [("damage samples", C0, "2 rows", "1 row")]
    delete(S0, S1, S2)(tmp_path)
    raised(FileInvalid, verify, tmp_path)
