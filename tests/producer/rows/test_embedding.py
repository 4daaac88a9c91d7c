"""`--embed`: media that rows name are published in the rows, and those that cannot be refuse their row."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard import StreamReader
from lazyshard.errors import RowInvalid
from lazyshard_producer.cli import main
from lazyshard_producer.rows.embedding import embed
from tests.harness.processes.producing import refused, run_arguments
from tests.stream.streams import raised

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\0IEND\xaeB`\x82"
JPEG = b"\xff\xd8\xff\xe0 a picture \xff\xd9"
WAV = b"RIFF" + (12).to_bytes(4, "little") + b"WAVEfmt data"
MP4 = b"\0\0\0\x10ftypisom\0\0\0\0" + b"\0\0\0\x0amdat.." + b"\0\0\0\x01free\0\0\0\0\0\0\0\x11." + b"\0\0\0\0mdat..."


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in (("a.png", PNG), ("b.jpg", JPEG), ("c.wav", WAV), ("d.mp4", MP4), ("e.txt", b"text"), ("f", b"")):
        Path(name).write_bytes(data)


@pytest.mark.parametrize(
    ("value", "media"),
    [
        ("a.png", PNG),
        (["a.png", "b.jpg", None], [PNG, JPEG, None]),
        (None, None),
        ([], []),
        ("c.wav", WAV),
        (["d.mp4", ["e.txt"]], [MP4, [b"text"]]),
        ({"bytes": text(PNG), "path": "gone.png"}, PNG),
        ({"bytes": None, "path": "b.jpg"}, JPEG),
        ({"path": "b.jpg"}, JPEG),
        (f"data:image/png;base64,{text(PNG)}", PNG),
        (text(JPEG), JPEG),
        (JPEG, JPEG),
    ],
)
def test_media_are_found(value: Any, media: Any) -> None:
    row = {"id": 1, "images": value, "path": "a.png"}
    assert embed(row, ["images", "audios"], 100) == {"id": 1, "images": media, "path": "a.png"}


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("gone.png", "gone.png: No such file"),
        (["a.png", "gone.png"], "images[1]: gone.png"),
        (text(b"no picture, but base64"), "No such file"),
        ("f", "f: the file is empty"),
        ("", "no path"),
        (".", "directory"),
        ("a\0b", "null"),
        ("https://example.org/a.png", "no path"),
        (5, "found int"),
        ({"path": "a.png", "more": 1}, "found dict"),
        ({"bytes": None, "path": None}, "found dict"),
        ({"bytes": "not base64!", "path": None}, "expected base64"),
        ("data:image/png;base64,???", "expected base64"),
        (PNG + bytes(101), "at most 100 bytes"),
        (PNG[:-8], "bad: the image/png is truncated"),
        (JPEG[:-1], "image/jpeg is truncated"),
        (WAV[:-2], "audio/wav is truncated: it has 18 of 20 bytes"),
        (MP4[:42], "video/mp4 is truncated: a box at byte 26"),
        (MP4[:24], "video/mp4 is truncated: a box at byte 16"),
    ],
)
def test_media_that_cannot_be_trained_refuse_the_row(value: Any, fact: str) -> None:
    if isinstance(value, bytes):
        Path("bad").write_bytes(value)
        value = "bad"
    error = raised(RowInvalid, embed, {"images": value}, ["images"], 100)
    assert str(error.reason).startswith("--embed images")
    assert fact in str(error.reason)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_are_published_with_their_media_and_bad_ones_are_quarantined(workers: int) -> None:
    rows = [{"id": 0, "images": ["a.png"]}, {"id": 1, "images": ["gone"]}, {"id": 2}, {"id": 3, "audio": "c.wav"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--embed", "images, audio", "--on-bad-row", "quarantine", "--workers", workers, "--no-progress")
    assert main(run_arguments(Path("out"), [Path("rows.jsonl")], 2, *more)) == 0
    assert list(StreamReader("out")) == [{"id": 0, "images": [PNG]}, {"id": 2}, {"id": 3, "audio": WAV}]
    (entry,) = refused(Path("out"))
    assert (entry["line"], entry["row"]) == (2, json.dumps(rows[1]))
    # A stream is a source of such rows.
    assert main(run_arguments(Path("copy"), [Path("out")], 5, "--no-progress")) == 0
    assert list(StreamReader("copy")) == list(StreamReader("out"))


def test_binary_columns_of_tables_are_media() -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"image": pa.array([{"bytes": PNG, "path": "x.png"}, {"bytes": None, "path": "b.jpg"}], kind)}
    columns |= {"raw": pa.array([JPEG, None], pa.binary())}
    pq.write_table(pa.table(columns), "rows.parquet")
    assert main(run_arguments(Path("out"), [Path("rows.parquet")], 2, "--embed", "image,raw", "--no-progress")) == 0
    assert list(StreamReader("out")) == [{"image": PNG, "raw": JPEG}, {"image": JPEG, "raw": None}]


def test_option_that_has_no_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run_arguments(Path("out"), [Path("e.txt")], 2, "--embed", "")) == 2
    assert "--embed" in capsys.readouterr().err
