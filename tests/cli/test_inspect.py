"""`lazyshard inspect`, also of arrays; what it reads: tests/inspection/test_inspection."""

import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from lazyshard import BFLOAT16, ChunkWriter
from lazyshard.cli.inspect import half_blocks, show_image
from lazyshard.inspection import inspection
from lazyshard.stream.listing import retire
from lazyshard_producer.cli import main as produce
from tests.cli.commands import lazyshard, on_terminal
from tests.stream import damage
from tests.stream.damage import delete, put, stream
from tests.stream.streams import foreign, publish_rows, seal_rows, sealed

MOMENT = "2023-11-14 22:13:20 UTC"


def inspect(*arguments: object) -> list[str]:
    done = lazyshard("inspect", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def values(*arguments: object) -> Any:
    [line] = inspect(*arguments, "--json")
    return json.loads(line)


def written(directory: Path, *, end: bool = True) -> str:
    writer = ChunkWriter(directory, 2, clock=lambda: 1700000000.0)
    for number in range(6):
        row = {"id": number, "text": "ü" * 10**number} | ({"tags": [1, "x"]} if number % 2 else {})
        writer.write(row, tokens=number + 1, source={"in.jsonl": number})
    writer.close(end)
    return writer.stream_id


def test_overview(tmp_path: Path) -> None:
    stream_id = written(tmp_path)
    lines = inspect(tmp_path)
    for line in (
        f"  last sealed at     {MOMENT}",
        "  rows 6  min 21  p5 21  median 219  p95 199,936  max 200,034  mean 37,064",
        "            10 to 99  2  ########################################",
        "  100,000 to 999,999  1  ####################",
        "  tags  1  array of integer, string",
    ):
        assert line in lines
    assert values(tmp_path) == {"stream": str(tmp_path), "stream_id": stream_id} | json.loads(JSON)


def test_overview_of_many_chunks_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0, 1, 8, 9 and 18, the last a byte longer: 46 bytes of 180."""
    monkeypatch.setattr(inspection, "SAMPLED_CHUNKS", 3)
    stream(tmp_path, 19)
    for options, size, exact, chunks, rows in (([], 175, False, 3, 5), (["--all"], 180, True, 10, 19)):
        found = values(tmp_path, *options)
        assert (found["bytes"], found["bytes_exact"], found["looked_at"]) == (size, exact, chunks)
        assert (found["row_bytes"]["rows"], found["retired"], found["unread"]) == (rows, 0, 0)


def test_overviews_of_streams_in_each_state(tmp_path: Path) -> None:
    """Published chunks, samples in them, whether it has ended, what the producer does, chunks not looked at."""

    def summed_up(directory: Path) -> tuple[Any, ...]:
        return tuple(values(directory)[name] for name in ("chunks", "samples", "ended", "state", "unread"))

    with ChunkWriter(tmp_path / "live", 2) as writer:
        assert summed_up(tmp_path / "live") == (0, 0, False, "running", 0)
        writer.heartbeat("waiting", "the disk")
        assert "  state              waiting: the disk" in inspect(tmp_path / "live")
    assert summed_up(stream(tmp_path / "empty", 0)) == (0, 0, True, "finished", 0)
    written(tmp_path / "left", end=False)
    retire(tmp_path / "left", 1, 3)
    assert summed_up(tmp_path / "left") == (3, 6, False, "idle", 0)
    assert "  retired            1" in inspect(tmp_path / "left")
    assert summed_up(foreign(tmp_path / "foreign", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n'))[3:] == (None, 0)
    assert len(inspect(tmp_path / "foreign")) > 4
    put("chunk_00001.jsonl.completed", b"{}")(stream(tmp_path / "damaged"))
    assert summed_up(tmp_path / "damaged") == (3, 5, True, "finished", 1)
    assert "chunk_00001.jsonl.completed: " in inspect(tmp_path / "damaged")[-1]
    # One whose producer is gone is not waited for.
    stream(tmp_path / "gone", 4, end=False)
    delete("chunk_00001.jsonl.completed")(tmp_path / "gone")
    damage.edit("head.json", state="running", pid=os.getpid(), updated_at=time.time())(tmp_path / "gone")
    assert lazyshard("inspect", tmp_path / "gone", 2).returncode == 5


JSON = r"""
{"samples_per_chunk": 2, "retired": 0, "chunks": 3, "samples": 6, "bytes": 222381, "bytes_exact": true,
 "begun_at": 1700000000.0, "last_sealed_at": 1700000000.0, "ended": true, "state": "finished", "looked_at": 3,
 "unread": 0, "row_bytes": {"rows": 6, "min": 21, "p5": 21, "median": 219, "p95": 199936, "max": 200034,
  "mean": 37063.5,
  "bins": [[10, 100, 2], [100, 1000, 1], [1000, 10000, 1], [10000, 100000, 1], [100000, 1000000, 1]]},
 "row_tokens": {"sum": 21, "p90": 6, "p99": 6, "rows": 6, "min": 1, "p5": 1, "median": 3, "p95": 6, "max": 6,
  "mean": 3.5, "bins": [[1, 2, 1], [2, 3, 1], [3, 5, 2], [5, 7, 2]]},
 "encoding": null, "packs": null, "source_rows": null, "dealt": null, "advice": [],
 "keys": {"rows": 2, "by_name": {
  "id": {"rows": 2, "kinds": ["integer"]},
  "text": {"rows": 2, "kinds": ["string"]},
  "tags": {"rows": 1, "kinds": ["array of integer, string"]}}}}
"""


def packed(folder: Path, lengths: list[int], *options: str) -> Path:
    rows = "".join(json.dumps({"id": number, "length": length}) + "\n" for number, length in enumerate(lengths))
    (folder / "rows.jsonl").write_text(rows)
    asked = ["--samples-per-chunk", "2", "--pack", "10", "--encode", "tests.producer.recipes:counted", *options]
    arguments = ["run", "--source", str(folder / "rows.jsonl"), "--out", str(folder / "s"), *asked, "--no-progress"]
    assert produce(arguments) == 0
    return folder / "s"


def test_overview_of_packs_tells_of_the_rows_in_them_and_of_their_encoding(tmp_path: Path) -> None:
    out = packed(tmp_path, [6, 4, 3, 99, 7], "--on-bad-row", "skip")
    lines = inspect(out)
    assert "  packs              tokens 10, looked at 2, rows 4" in lines
    assert "  source rows        read 5, refused 1, exact yes" in lines
    assert lines[lines.index("encoded with") + 2] == "  function  tests.producer.recipes:counted"
    found = values(out)
    assert found["encoding"] == {"kind": "function", "function": "tests.producer.recipes:counted"}
    assert found["packs"] == {"tokens": 10, "looked_at": 2, "rows": 4}
    assert found["source_rows"] == {"read": 5, "refused": 1, "exact": True}


def test_overview_of_many_packs_looks_at_evenly_spaced_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first half of them hold one row each, the others two.
    out = packed(tmp_path, [10] * 20 + [5] * 40, "--pack-buffer", "10")
    for most, looked_at, rows in ((100_000, 40, 60), (8, 8, 12)):
        monkeypatch.setattr(inspection, "LOOKED_AT_PACKS", most)
        assert values(out)["packs"] == {"tokens": 10, "looked_at": looked_at, "rows": rows}


def test_what_is_long_is_cut(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"system": "x" * 500, "max_length": 512, "strict": None}
    publish_rows(tmp_path / "s", 2, [{f"key {number}": number for number in range(5000)}], arrays=True, encoding=facts)
    lines = inspect(tmp_path / "s")
    at = lines.index("encoded with")
    assert lines[at + 1 : at + 4] == [f"  system      {'x' * 97}...", "  max_length  512", "  strict      null"]
    assert max(len(lines), len(inspect(tmp_path / "s", 0))) < 150


def test_samples_with_their_long_strings_shortened(tmp_path: Path) -> None:
    written(tmp_path)
    lines = inspect(tmp_path, 1)
    assert lines[0] == "sample 1: chunk 0, row 1 (byte 21), 54 bytes, 2 tokens"
    assert json.loads("\n".join(lines[1:])) == {"id": 1, "text": "ü" * 10, "tags": [1, "x"]}
    assert inspect(tmp_path, 4)[2:4] == ['  "id": 4,', f'  "text": "{"ü" * 200}... (10,000 characters)"']
    assert inspect(tmp_path, 4, "--full")[3] == f'  "text": "{"ü" * 10_000}"'
    found = [line.split(",")[0] for line in inspect(tmp_path, 3, "--rows", 100) if line.startswith("sample")]
    assert found == ["sample 3: chunk 1", "sample 4: chunk 2", "sample 5: chunk 2"]


def test_chunk(tmp_path: Path) -> None:
    written(tmp_path / "s")
    lines = inspect(tmp_path / "s", "--chunk", 0, "--rows", 1)
    assert (lines[0], lines[5]) == (f"{tmp_path}/s/chunk_00000.jsonl", f"  sealed at     {MOMENT}")
    found = values(tmp_path / "s", "--chunk", 0, "--rows", 1)
    row = {"sample": 0, "chunk": 0, "row": 0, "byte": 0, "bytes": 21, "tokens": 1, "value": {"id": 0, "text": "ü"}}
    assert found.pop("rows") == [row]
    assert (found.pop("row_bytes")["max"], found.pop("row_tokens")["max"]) == (54, 2)
    file = f"{tmp_path}/s/chunk_00000.jsonl"
    counts = {"chunk": 0, "first_sample": 0, "samples": 2, "bytes": 75}
    assert found == counts | {"file": file, "sealed_at": 1700000000.0, "source": {"in.jsonl": 1}}
    foreign(tmp_path / "f", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n', end=True)
    lines = inspect(tmp_path / "f", "--chunk", 1)
    assert lines[2:5] == ["  first sample  2", "  samples       1", "  bytes         9 bytes"]


def test_rows_as_json_are_whole_and_exact_however_deep(tmp_path: Path) -> None:
    """As the row writes it: digits, and characters that a terminal might take for a command."""
    row = '{"a" : 1.50,\t"b":"\x7f\u009b\u2028😀ü"}\n'.encode()
    deep = b'{"a":' * 300 + b"1" + b"}" * 300 + b"\n"
    seal_rows(stream(tmp_path, 2), 0, row, deep, tokens=[7, 8])
    [line] = inspect(tmp_path, 0, "--json")
    assert line == (
        '{"rows": [{"sample": 0, "chunk": 0, "row": 0, "byte": 0, "bytes": 33, "tokens": 7, '
        '"value": {"a" : 1.50, "b":"\\u007f\\u009b\\u2028\\ud83d\\ude00\\u00fc"}}]}'
    )
    assert json.loads(line)["rows"][0]["value"] == json.loads(row)
    assert "... (1 key)" in "".join(inspect(tmp_path, 1))
    assert inspect(tmp_path, 1, "--full")[1:] == [deep.decode().rstrip()]
    assert deep.decode().rstrip() in inspect(tmp_path, 1, "--json")[0]


def test_control_characters_do_not_reach_the_terminal_and_colours_do(tmp_path: Path) -> None:
    publish_rows(tmp_path / "stream", 1, [{"a": "\x9b31mred\x1b[0m\u202e\x07[link=x]y[/link]"}])
    assert inspect(tmp_path / "stream", 0)[2] == r'  "a": "\x9b31mred\u001b[0m\u202e\u0007[link=x]y[/link]"'
    code, shown = on_terminal("inspect", tmp_path / "stream", 0)
    assert (code, "\x1b[" in shown, "[link=x]" in shown) == (0, True, True)
    # Nothing but our own colours.
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert text.replace("\r\n", "").isprintable()
    assert text.splitlines()[3] == "}"
    # JSON is plain there too.
    for options in ((), (0,), ("--chunk", 0)):
        code, shown = on_terminal("inspect", tmp_path / "stream", *options, "--json")
        assert code == 0 and json.loads(shown)


def test_what_to_change_stands_at_the_end(tmp_path: Path) -> None:
    sealed(tmp_path, [1 + number % 7 * 100 for number in range(400)], 50)
    lines = inspect(tmp_path)
    at = lines.index("what to change")
    assert [line.split()[-2:] for line in lines[at + 2 :: 2]] == [["--pack", "1024"], ["--micro-batch-size", "1"]]
    shown = [line.strip() for line in lines[at + 1 :]]
    assert [text for one in values(tmp_path)["advice"] for text in (one["text"], one["setting"])] == shown


def test_inspected_arrays(tmp_path: Path) -> None:
    arrays = tmp_path / "stream"
    row = {"x": np.arange(30, dtype=np.int16).reshape(2, 15), "b": [np.array([0x3FC0], np.uint16).view(BFLOAT16)]}
    publish_rows(arrays, 2, ({"id": number, **row} for number in range(3)), [2, 2, 2], arrays=True)
    text = "\n".join(inspect(arrays, 1))
    assert "sample 1: chunk 0, row 1 (byte 80), 80 bytes and 72 bytes of arrays, 2 tokens" in text
    numbers = ", ".join(map(str, range(20)))
    assert f'"x": "array of int16, shape 2 x 15: {numbers}, ..."' in text
    assert '"array of bfloat16, shape 1: 1.5"' in text
    text = "\n".join(inspect(arrays, 1, "--full"))
    assert json.loads(text.partition("\n")[2]) == {"id": 1, "x": [list(range(15)), list(range(15, 30))], "b": [[1.5]]}
    [found] = values(arrays, 1)["rows"]
    assert (found["arrays_bytes"], found["value"]["x"]) == (72, {"$array": ["int16", [2, 15], 0]})
    text = "\n".join(inspect(arrays))
    assert "arrays of a row in bytes\n  rows 3  min 72  p5 72  median 72  p95 72  max 72  mean 72" in text
    assert "x   2  int16 array\n" in text and "array of bfloat16 array" in text
    assert "arrays bytes  144 bytes" in "\n".join(inspect(arrays, "--chunk", 0))
    assert values(arrays, "--chunk", 0)["arrays_bytes"] == 144
    assert values(arrays)["row_arrays_bytes"]["max"] == 72
    assert "2 chunks, 3 samples, 456 bytes, ended: no damage" in lazyshard("verify", arrays).stdout


def test_inspected_bytes_tell_their_type_and_number(tmp_path: Path) -> None:
    publish_rows(tmp_path / "stream", 1, [{"images": [b"GIF89a"], "rest": b"-"}], arrays=True)
    for full in ((), ("--full",)):
        told = json.loads("\n".join(inspect(tmp_path / "stream", 0, *full)).partition("\n")[2])
        assert told == {"images": ["image/gif, 6 bytes"], "rest": "bytes of an unknown type, 1 byte"}
    assert "array of image/gif\n" in "\n".join(inspect(tmp_path / "stream"))
    [row] = values(tmp_path / "stream", 0)["rows"]
    assert row["value"] == {"images": [{"$bytes": [6, 0, "image/gif"]}], "rest": {"$bytes": [1, 8, None]}}


def test_terminals_with_colours_show_images_in_half_blocks(tmp_path: Path) -> None:
    image, file, large = Image.new("RGB", (2, 3), "white"), io.BytesIO(), io.BytesIO()
    for x, y, colour in ((0, 0, "red"), (1, 0, "lime"), (0, 1, "blue"), (0, 2, "black")):
        image.paste(colour, (x, y, x + 1, y + 1))
    image.save(file, "PNG")
    Image.new("RGB", (600, 700)).save(large, "JPEG")
    images = [file.getvalue()], [b"GIF89a", b"<svg>"], [large.getvalue()]
    publish_rows(tmp_path, 3, ({"images": blobs} for blobs in images), arrays=True)
    drawn = ["", "\x1b[31;44m▀\x1b[0m\x1b[32;107m▀\x1b[0m", "\x1b[30;49m▀\x1b[0m\x1b[97;49m▀\x1b[0m", ""]
    assert on_terminal("inspect", tmp_path, 0)[1].split("\r\n")[-4:] == drawn
    shown = on_terminal("inspect", tmp_path, "--chunk", 0, "--rows", 2)[1].split("\r\n")
    assert shown[-2].startswith("no thumbnail, the image is damaged: ") and "thumbnail" not in shown[-3]
    assert [line.count("▀") for line in on_terminal("inspect", tmp_path, 2)[1].split("\r\n")[-25:]] == [41] * 24 + [0]
    assert "▀" not in "".join([*inspect(tmp_path, 0), on_terminal("inspect", tmp_path, 0, "--json")[1]])
    for encoding, plain, silent in (("utf-8", False, False), ("utf-8", True, True), ("ascii", False, True)):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        console = Console(file=out, force_terminal=True, color_system="truecolor", no_color=plain)
        show_image(console, file.getvalue())
        assert (out.tell() == 0) == silent
    [line] = half_blocks(bytes([255, 0, 0, 0, 9, 255]), 1)
    assert line.markup == "[#ff0000 on #0009ff]▀[/#ff0000 on #0009ff]"
