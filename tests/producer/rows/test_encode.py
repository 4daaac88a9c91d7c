"""`--encode`, `--measure`, `--embed`: what is published, lengths in seals, refusals. Kills: test_exactly_once."""

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import StreamReader
from lazyshard.errors import RowInvalid, SkipSample
from lazyshard_producer.cli import main
from lazyshard_producer.rows.encoding import load_counter
from lazyshard_producer.rows.recipe import embed
from tests.harness.processes.producing import assert_one_line, lengths, refused, rows, run_arguments
from tests.producer.rows.draining import making
from tests.stream.streams import raised, seal, sealed

HERE = "tests.producer.recipes"
ROWS = 60
PER_CHUNK = 7
SKIP = ("--on-bad-row", "skip")
GOOD = [number for number in range(ROWS) if number % 10 != 7]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [{"id": number, "text": chr(97 + number % 26) * (number % 9)} for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


def encode(source: Path, *options: object, name: str = "tokens", out: str = "out") -> int:
    more = ("--no-progress", "--encode", f"{HERE}:{name}", *options)
    return main(run_arguments(source.parent / out, [source], PER_CHUNK, *more))


@pytest.mark.parametrize("shuffle", [(), ("--shuffle", 16)])
def test_rows_hold_arrays_and_seals_the_lengths(source: Path, tmp_path: Path, shuffle: tuple[object, ...]) -> None:
    assert encode(source, *SKIP, *shuffle) == 0
    reader = StreamReader(tmp_path / "out")
    rows = [reader.read(sample) for sample in range(len(GOOD))]
    ids = [row["id"] for row in rows]
    assert (sorted(ids), ids == GOOD) == (GOOD, not shuffle)
    for row in rows:
        text = chr(97 + row["id"] % 26) * (row["id"] % 9)
        assert row["input_ids"].dtype == np.int32
        assert row["input_ids"].tolist() == list(text.encode())
        assert row["mask"].tolist() == [letter > 100 for letter in text.encode()]
    assert lengths(tmp_path / "out") == [number % 9 for number in ids]
    facts = {"vocabulary": "bytes", "size": 256, "kind": "function", "function": f"{HERE}:tokens"}
    assert reader.encoding == facts


def test_what_encoders_get_and_tell(source: Path, tmp_path: Path) -> None:
    assert encode(source, "--workers", 1, name="pid", out="worker") == 0
    assert StreamReader(tmp_path / "worker").read(0)["pid"] != os.getpid()
    # What a transform makes need not be JSON.
    assert encode(source, "--transform", f"{HERE}:features", name="nested") == 0
    row = StreamReader(tmp_path / "out").read(3)
    assert row["features"]["mel"].tolist() == [[3.0] * 3] * 2
    assert row["features"]["mel"].dtype == np.float16
    assert encode(source, name="without_length", out="untold") == 0
    assert seal(tmp_path / "untold", 0).tokens is None


def test_bad_row_ends_a_run_which_only_the_same_encoder_may_continue(
    source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Row 7 ends it, behind the first chunk.
    assert encode(source) == 3
    assert_one_line(capsys.readouterr().err, f"{source}:8: --encode raised ValueError")
    assert encode(source, name="otherwise") == 5
    assert_one_line(capsys.readouterr().err, "size is 256 there and 512 here")
    arguments = run_arguments(out, [source], PER_CHUNK)
    assert main([*arguments, "--no-progress"]) == 5
    assert main(["check", *arguments[1:], "--encode", f"{HERE}:otherwise"]) == 5
    assert encode(source, "--on-bad-row", "quarantine") == 0
    assert [one["line"] for one in refused(out)] == [8, 18, 28, 38, 48, 58]
    assert json.loads(refused(out)[0]["row"])["id"] == 7


def tenfold(row: dict[str, Any]) -> int:
    return 10 * int(row["id"]) + 1


def odd(row: dict[str, Any]) -> Any:
    """Neither a length nor a sample of some rows."""
    number = row["id"]
    if number == 1:
        raise SkipSample("too long")
    if number == 2:
        raise ValueError("no such \udc80 image")
    return {3: "3", 4: True, 5: -1, 6: 2**32, 7: None}.get(number, number)


def publish(out: Path, ten: Path, measure: object, *more: object) -> int:
    name = f"{__name__}:{measure}" if isinstance(measure, str) else measure
    return main(run_arguments(out, [ten], 4, "--measure", name, *more))


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(rows(0, 10))
    return tmp_path / "a.jsonl"


def test_rows_that_are_measured_stay_as_they_are_or_make_packs_and_stripes(ten: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    assert publish(plain, ten, "tenfold") == 0
    assert b"".join(path.read_bytes() for path in sorted(plain.glob("chunk_*.jsonl"))) == rows(0, 10)
    assert lengths(plain) == list(range(1, 101, 10))
    assert publish(tmp_path / "packs", ten, "tenfold", "--pack", 91) == 0
    packs = [[10 * row["id"] + 1 for row in pack["pack"]] for pack in StreamReader(tmp_path / "packs")]
    assert sorted(length for pack in packs for length in pack) == list(range(1, 101, 10))
    assert all(sum(pack) <= 91 for pack in packs)
    # Lengths that an earlier run has sealed count no longer.
    runs = (("dealt", ten, ("--balance", 2)), ("anew", sealed(tmp_path / "old", [7] * 5), ("--shuffle", 3)))
    for name, source, option in runs:
        assert publish(tmp_path / name, source, "tenfold", *option) == 0
        assert lengths(tmp_path / name) == [10 * row["id"] + 1 for row in StreamReader(tmp_path / name)]


def test_rows_without_a_length_are_bad_rows(ten: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    for place in (out, other):
        assert publish(place, ten, "odd") == 3
        assert_one_line(capfd.readouterr().err, f"{ten}:2", "too long")
    assert publish(out, ten, "odd", "--on-bad-row", "quarantine") == 0
    assert lengths(out) == [0, 8, 9]
    reasons = [entry["reason"] for entry in refused(out)]
    assert reasons[1].startswith("--measure raised ValueError: no such \\udc80 image")
    assert all("--measure returned" in reason for reason in reasons[2:]) and len(reasons) == 7
    # Another measure may continue, and the stream has ended then.
    assert (publish(other, ten, "tenfold"), publish(other, ten, "odd")) == (0, 2)


def test_tokenizer_measures_text_and_messages(tmp_path: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("one", "two", "three", "four", "<m>", "<unk>"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}<m> {{ message.content }} {% endfor %}"
    fast.save_pretrained(tmp_path)
    count = load_counter(making(measure=str(tmp_path)))
    assert count({"text": "one two three"}) == (3, 0)
    talk = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "four"}]
    assert count({"messages": talk})[0] == 5
    named = load_counter(making(measure=str(tmp_path), measure_field="answer"))
    assert named({"text": "one two three", "answer": "one"})[0] == 1
    for row in ({"id": 1}, {"text": 3}):
        raised(RowInvalid, count, row)


def test_what_is_no_tokenizer_is_refused(ten: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for measure in (tmp_path / "nothing", tmp_path, "nothing"):
        assert publish(tmp_path / "out", ten, measure) == 2
        assert_one_line(capfd.readouterr().err, "--measure")


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\0IEND\xaeB`\x82"
JPEG = b"\xff\xd8\xff\xe0\0\x06JFIF\xff\xda a scan \xff\xd9"
MOTION = JPEG + bytes(60)  # with a video behind the picture
THUMBNAIL = b"\xff\xd8\xff\xff\xe1\0\x06..\xff\xd9\xff\xda a scan"  # cut off; what is in a segment ends nothing
WAV = b"RIFF" + (12).to_bytes(4, "little") + b"WAVEfmt data"
PIPED = b"RIFF\x24\xf0\xff\x7fWAVEfmt data"  # of a program that did not know the size
MP4 = b"\0\0\0\x10ftypisom\0\0\0\0" + b"\0\0\0\x0amdat.." + b"\0\0\0\x01free\0\0\0\0\0\0\0\x11." + b"\0\0\0\0mdat..."


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in (("a.png", PNG), ("b.jpg", JPEG), ("c.wav", WAV), ("d.mp4", MP4), ("e.txt", b"text"), ("f", b"")):
        Path(name).write_bytes(data)


@pytest.mark.usefixtures("media")
@pytest.mark.parametrize(
    ("value", "found"),
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
        (MOTION, MOTION),
        (PIPED, PIPED),
    ],
)
def test_media_are_found(value: Any, found: Any) -> None:
    row = {"id": 1, "images": value, "path": "a.png"}
    assert embed(row, ["images", "audios"], 100) == {"id": 1, "images": found, "path": "a.png"}


@pytest.mark.usefixtures("media")
@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("gone.png", "gone.png: No such file"),
        (["a.png", "gone.png"], "images[1]: gone.png"),
        (text(b"no picture, but base64"), "No such file"),
        ("f", "f: the file is empty"),
        ("", "no path"),
        ("a\0b", "null"),
        ("https://example.org/a.png", "no path"),
        (5, "found int"),
        ({"path": "a.png", "more": 1}, "found dict"),
        ({"bytes": "not base64!", "path": None}, "expected base64"),
        ("data:image/png;base64,???", "expected base64"),
        (PNG + bytes(101), "at most 100 bytes"),
        (PNG[:-8], "bad: the image/png is truncated"),
        (JPEG[:-1], "image/jpeg is truncated"),
        (THUMBNAIL, "image/jpeg is truncated"),
        (WAV[:-2], "audio/wav is truncated: it has 18 of 20 bytes"),
        (MP4[:42], "video/mp4 is truncated: a box at byte 26"),
    ],
)
def test_media_that_cannot_be_trained_refuse_the_row(value: Any, fact: str) -> None:
    if isinstance(value, bytes):
        Path("bad").write_bytes(value)
        value = "bad"
    error = raised(RowInvalid, embed, {"images": value}, ["images"], 100)
    assert str(error.reason).startswith("--embed images")
    assert fact in str(error.reason)


@pytest.mark.usefixtures("media")
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


@pytest.mark.usefixtures("media")
@pytest.mark.parametrize(("keys", "told"), [("image,images", "image"), ("images", "")])
def test_a_key_that_no_row_has_is_told(keys: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"images":["a.png"]}\n{"id":1}\n')
    assert main(run_arguments(Path("out"), [Path("rows.jsonl")], 2, "--embed", keys, "--no-progress")) == 0
    assert re.findall(r"--embed (\S+):", capsys.readouterr().err) == [told] * bool(told)


@pytest.mark.usefixtures("media")
def test_binary_columns_of_tables_are_media() -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"image": pa.array([{"bytes": PNG, "path": "x.png"}, {"bytes": None, "path": "b.jpg"}], kind)}
    columns |= {"raw": pa.array([JPEG, None], pa.binary())}
    pq.write_table(pa.table(columns), "rows.parquet")
    assert main(run_arguments(Path("out"), [Path("rows.parquet")], 2, "--embed", "image,raw", "--no-progress")) == 0
    assert list(StreamReader("out")) == [{"image": PNG, "raw": JPEG}, {"image": JPEG, "raw": None}]
