"""What a verification finds in directories that other programs fill: names, numbers and rows, as far as they go."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyshard.errors import StreamUnsealed
from lazyshard.inspection.verification import verify
from tests.stream.damage import Damage, delete, each, found, move, put
from tests.stream.streams import foreign

C0, C1, C2, C3 = (f"chunk_0000{chunk}.jsonl" for chunk in range(4))
S0, S1, S2, S3 = (f"chunk_0000{chunk}.jsonl.completed" for chunk in range(4))

ROWS = (b'{"id":0}\n{"id":1}\n', b'{"id":2}\n{"id":3}\n', b'{"id":4}\n')


def test_directory_that_is_as_it_should_be(tmp_path: Path) -> None:
    verified = verify(foreign(tmp_path, *ROWS, end=True))
    assert (verified.native, verified.stream_id, verified.samples_per_chunk) == (False, None, 2)
    assert (verified.chunks, verified.samples, verified.size) == (3, 5, 45)
    assert (verified.ended, verified.findings) == (True, ())


def test_allowances(tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines, no newline at the end, any padding, markers of any content."""
    foreign(tmp_path, b'\xef\xbb\xbf{"id":0}\r\n\n{"id":1}', b'\n{"id":2}\n \n{"id":3}\n\n', end=True)
    move(C1, "chunk_1.jsonl")(tmp_path)
    put(S0, b"done")(tmp_path)
    assert not found(tmp_path)


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (
            put(C1, b'{"id":2}\n{"id"}\n'),
            ("damage row", f"{C1} row 1", "a JSON object on a line", "unexpected character (byte 14)"),
        ),
        (put(C1, b'{"id":2}\n'), ("damage samples", C1, "2 rows", "1 row")),
        (put(C1, b""), ("damage samples", C1, "2 rows", "0 rows")),
        (put(C2, ROWS[0] * 2), ("damage samples", C2, "1 to 2 rows", "4 rows")),
        (delete(C1), ("damage data-missing", C1, "the rows of the chunk", "no such file although a marker is there")),
        (delete(S1), ("damage seal-missing", S1, "a marker", "no such file although the chunk counts as published")),
        (delete(C1, S1), ("damage missing", C1, "the chunk and its marker", "neither")),
        (put("chunk_1.jsonl", ROWS[1]), ("damage doubled", C1, "one file for chunk 1", "also chunk_1.jsonl")),
        # Readers do not take it for ended as long as that is there.
        (put(C3, ROWS[0]), ("damage unpublished", C3, "a marker beside it", "none, so it was never published")),
        (
            put("stream.owner", b"x"),
            ("damage manifest-missing", "stream.json", "the manifest", "no such file, although stream.owner is there"),
        ),
        (delete("stream.end"), ("leftover unended", C2, "2 rows, or stream.end after fewer", "1 row")),
        (
            each(delete("stream.end", C2, S2), put(C2, b'{"id')),
            ("leftover unpublished", C2, "a marker beside it", "none, so it was never published"),
        ),
    ],
)
def test_one_damage(damage: Damage, wanted: tuple[str, str, str, str], tmp_path: Path) -> None:
    damage(foreign(tmp_path, *ROWS, end=True))
    [(kind, file, expected, actual)] = found(tmp_path)
    assert (kind, file, expected) == wanted[:3]
    assert actual.startswith(wanted[3].removesuffix("unexpected character (byte 14)"))
    assert actual.endswith("(byte 14)") or kind != "damage row"


def test_rows_of_a_chunk_can_be_told(tmp_path: Path) -> None:
    foreign(tmp_path, ROWS[2], ROWS[0], end=True)
    assert found(tmp_path) == [("damage samples", C1, "1 row", "2 rows")]
    assert found(tmp_path, samples_per_chunk=2) == [("damage samples", C0, "2 rows", "1 row")]


def test_quick_counts_rows_and_leaves_them_unparsed(tmp_path: Path) -> None:
    put(C1, b'{"id":2}\n{"id"}\n')(foreign(tmp_path, *ROWS, end=True))
    assert not found(tmp_path, quick=True)
    put(C1, b'{"id":2}\n')(tmp_path)
    assert found(tmp_path, quick=True) == [("damage samples", C1, "2 rows", "1 row")]


def test_no_marker_at_all(tmp_path: Path) -> None:
    delete(S0, S1, S2)(foreign(tmp_path, *ROWS))
    with pytest.raises(StreamUnsealed, match=r"3 chunk files.*`lazyshard-producer run --source"):
        verify(tmp_path)
