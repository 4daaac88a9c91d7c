"""`lazyshard inspect`; what it reads: tests/inspection/test_inspection."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from lazyshard.cli.main import main
from lazyshard.inspection import inspection
from lazyshard.stream.retire import retire
from lazyshard_producer.cli import main as produce
from tests.cli.commands import contents, lazyshard, on_terminal
from tests.stream import damage
from tests.stream.damage import delete, flip, put, stream
from tests.stream.foreign_seals import seal_rows
from tests.stream.streams import foreign


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main(["inspect", *map(str, arguments)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out.splitlines()


def written(directory: Path, *, end: bool = True) -> str:
    """A stream of six rows, published at a known moment; returns its identity."""
    writer = ChunkWriter(directory, 2, clock=lambda: 1700000000.0)
    for number in range(6):
        writer.write(
            {"id": number, "text": "ü" * 10**number} | ({"tags": [1, "x"]} if number % 2 else {}),
            tokens=number + 1,
            source={"in.jsonl": number},
        )
    writer.close(end)
    return writer.stream_id


def test_overview(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream_id = written(tmp_path)
    assert inspect(capsys, tmp_path) == [
        str(tmp_path),
        f"  stream             {stream_id}",
        "  samples per chunk  2",
        "  chunks             3",
        "  samples            6",
        "  bytes              222.4 kB",
        "  begun              2023-11-14 22:13:20 UTC",
        "  last published     2023-11-14 22:13:20 UTC",
        "  ended              yes",
        "",
        "row length in bytes, of 6 rows",
        "  min 21  p5 21  median 219  p95 199,936  max 200,034  mean 37,064",
        "            10 to 99  2  ########################################",
        "          100 to 999  1  ####################",
        "      1,000 to 9,999  1  ####################",
        "    10,000 to 99,999  1  ####################",
        "  100,000 to 999,999  1  ####################",
        "",
        "row length in tokens, of 6 rows: 21 tokens in all",
        "  min 1  median 3  p90 6  p99 6  max 6  mean 4",
        "       1  1  ####################",
        "       2  1  ####################",
        "  3 to 4  2  ########################################",
        "  5 to 6  2  ########################################",
        "",
        "keys at the top level, in the first 2 rows",
        "  id    integer                   all",
        "  text  string                    all",
        "  tags  array of integer, string  1",
    ]


def test_overview_of_many_chunks_says_that_it_is_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream(tmp_path, 201, per_chunk=1)
    lines = inspect(capsys, tmp_path)
    assert "  bytes              about 2.1 kB" in lines
    said = "row length in bytes, of 200 rows in 200 of 201 chunks, evenly spaced (--all takes all)"
    assert said in lines
    lines = inspect(capsys, tmp_path, "--all")
    assert "  bytes              2.1 kB" in lines
    assert "row length in bytes, of 201 rows" in lines


def summed_up(capsys: pytest.CaptureFixture[str], directory: Path) -> tuple[Any, ...]:
    """Published chunks, samples in them, whether it has ended, what the producer does, chunks not looked at."""
    found = json.loads(inspect(capsys, directory, "--json")[0])
    assert len(inspect(capsys, directory)) > 4
    return tuple(found[name] for name in ("chunks", "samples", "ended", "state", "unread"))


def test_overviews_of_streams_in_each_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChunkWriter(tmp_path / "live", 2) as writer:
        assert summed_up(capsys, tmp_path / "live") == (0, 0, False, "running", 0)
        writer.write({"id": 0})
        writer.write({"id": 1})
        writer.heartbeat("waiting", "the disk")
        assert summed_up(capsys, tmp_path / "live") == (1, 2, False, "waiting", 0)
        assert "  ended              no; the producer is waiting: the disk" in inspect(capsys, tmp_path / "live")
    assert summed_up(capsys, stream(tmp_path / "empty", 0)) == (0, 0, True, "finished", 0)
    written(tmp_path / "left", end=False)
    retire(tmp_path / "left", 1, 3)
    assert summed_up(capsys, tmp_path / "left") == (3, 6, False, "idle", 0)
    assert inspect(capsys, tmp_path / "left")[3].endswith("2, from 1 on: those before are deleted")
    foreign(tmp_path / "foreign", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n')
    assert summed_up(capsys, tmp_path / "foreign") == (1, 2, False, None, 0)
    written(tmp_path / "damaged")
    put("chunk_00001.jsonl.completed", b"{}")(tmp_path / "damaged")
    assert summed_up(capsys, tmp_path / "damaged") == (3, 6, True, "finished", 1)
    assert (
        f"{tmp_path}/damaged/chunk_00001.jsonl.completed: field 'format'" in inspect(capsys, tmp_path / "damaged")[-1]
    )


def test_overview_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream_id = written(tmp_path)
    [line] = inspect(capsys, tmp_path, "--json")
    assert json.loads(line) == {
        "stream": str(tmp_path),
        "stream_id": stream_id,
        "samples_per_chunk": 2,
        "retired": 0,
        "chunks": 3,
        "samples": 6,
        "bytes": 222_381,
        "bytes_exact": True,
        "begun_at": 1700000000.0,
        "last_sealed_at": 1700000000.0,
        "ended": True,
        "state": "finished",
        "looked_at": 3,
        "unread": 0,
        "row_bytes": {
            "rows": 6,
            "min": 21,
            "p5": 21,
            "median": 219,
            "p95": 199_936,
            "max": 200_034,
            "mean": 37_063.5,
            "bins": [[10, 100, 2], [100, 1000, 1], [1000, 10_000, 1], [10_000, 100_000, 1], [100_000, 1_000_000, 1]],
        },
        "row_tokens": {
            "sum": 21,
            "p90": 6,
            "p99": 6,
            "rows": 6,
            "min": 1,
            "p5": 1,
            "median": 3,
            "p95": 6,
            "max": 6,
            "mean": 3.5,
            "bins": [[1, 2, 1], [2, 3, 1], [3, 5, 2], [5, 7, 2]],
        },
        "encoding": None,
        "packs": None,
        "source_rows": None,
        "keys": {
            "rows": 2,
            "by_name": {
                "id": {"rows": 2, "kinds": ["integer"]},
                "text": {"rows": 2, "kinds": ["string"]},
                "tags": {"rows": 1, "kinds": ["array of integer, string"]},
            },
        },
        "dealt": None,
        "advice": [],
    }


def packed(folder: Path, lengths: list[int], *options: str) -> Path:
    rows = "".join(json.dumps({"id": number, "length": length}) + "\n" for number, length in enumerate(lengths))
    (folder / "rows.jsonl").write_text(rows)
    asked = ["--samples-per-chunk", "2", "--pack", "10", "--encode", "tests.producer.encoders:counted", *options]
    arguments = ["run", "--source", str(folder / "rows.jsonl"), "--out", str(folder / "s"), *asked, "--no-progress"]
    assert produce(arguments) == 0
    return folder / "s"


def test_overview_of_packs_tells_of_the_rows_in_them_and_of_their_encoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = packed(tmp_path, [6, 4, 3, 99, 7], "--on-bad-row", "skip")
    capsys.readouterr()
    lines = inspect(capsys, out)
    assert lines[4:6] == [
        "  samples            2 packs of at most 10 tokens, with 4 rows: 2.0 each",
        "  source rows        5 read, 1 of them refused",
    ]
    assert lines[11:15] == [
        "encoded with",
        "  kind      function",
        "  function  tests.producer.encoders:counted",
        "",
    ]
    (line,) = inspect(capsys, out, "--json")
    found = json.loads(line)
    assert found["encoding"] == {"kind": "function", "function": "tests.producer.encoders:counted"}
    assert found["packs"] == {"tokens": 10, "looked_at": 2, "rows": 4}
    assert found["source_rows"] == {"read": 5, "refused": 1, "exact": True}


def test_overview_of_many_packs_looks_at_evenly_spaced_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first half of them hold one row each, the others two.
    out = packed(tmp_path, [10] * 20 + [5] * 40, "--pack-buffer", "10")
    for most, looked_at, rows in ((100_000, 40, 60), (8, 8, 12)):
        monkeypatch.setattr(inspection, "LOOKED_AT_PACKS", most)
        capsys.readouterr()
        found = json.loads(inspect(capsys, out, "--json")[0])
        assert found["packs"] == {"tokens": 10, "looked_at": looked_at, "rows": rows}
        assert "with about 60 rows" in inspect(capsys, out)[4] or looked_at == 40


def test_long_fact_of_an_encoding_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = {"system": "x" * 500, "max_length": 512, "strict": None}
    with ChunkWriter(tmp_path / "s", 2, arrays=True, encoding=facts) as writer:
        writer.write({"id": 1})
    lines = inspect(capsys, tmp_path / "s")
    at = lines.index("encoded with")
    assert lines[at + 1 : at + 4] == [f"  system      {'x' * 97}...", "  max_length  512", "  strict      null"]


def test_sample_with_its_long_strings_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    lines = inspect(capsys, tmp_path, 1)
    assert lines[0] == "sample 1: chunk 0, row 1 (byte 21), 54 bytes, 2 tokens"
    assert json.loads("\n".join(lines[1:])) == {"id": 1, "text": "ü" * 10, "tags": [1, "x"]}
    assert inspect(capsys, tmp_path, 4)[2:4] == ['  "id": 4,', f'  "text": "{"ü" * 200}... (10,000 characters)"']
    assert inspect(capsys, tmp_path, 4, "--full")[3] == f'  "text": "{"ü" * 10_000}"'


def test_samples_of_several_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream(tmp_path)
    lines = inspect(capsys, tmp_path, 1, "--rows", 3)
    assert [line for line in lines if line.startswith("sample")] == [
        "sample 1: chunk 0, row 1 (byte 9), 9 bytes",
        "sample 2: chunk 1, row 0 (byte 0), 9 bytes",
        "sample 3: chunk 1, row 1 (byte 9), 9 bytes",
    ]
    assert lines.count("") == 2
    # No more than there are.
    assert sum(line.startswith("sample") for line in inspect(capsys, tmp_path, 3, "--rows", 100)) == 2


def test_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "s")
    lines = inspect(capsys, tmp_path / "s", "--chunk", 0, "--rows", 1)
    assert lines[:5] == [
        f"{tmp_path}/s/chunk_00000.jsonl",
        "  chunk    0",
        "  samples  2: 0 to 1",
        "  bytes    75",
        "  sealed   2023-11-14 22:13:20 UTC",
    ]
    headings = [line for line in lines[5:] if line and line[0].isalpha()]
    assert [line.split(",")[0] for line in headings] == [
        *("row length in bytes", "row length in tokens", "source position after it"),
        "sample 0: chunk 0",
    ]
    foreign(tmp_path / "f", b'{"id":0}\n{"id":1}\n', b'{"id":2}\n', end=True)
    lines = inspect(capsys, tmp_path / "f", "--chunk", 1)
    assert lines[2:5] == ["  samples  1: 2 to 2", "  bytes    9", "  seal     a marker only, without digests"]


def test_rows_as_json_are_whole_and_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the row writes it: digits, and characters that a terminal might take for a command."""
    row = '{"a" : 1.50,\t"b":"\x7f\u009b\u2028😀ü"}\n'.encode()
    seal_rows(stream(tmp_path, 2), 0, row, b"{}\n", tokens=[7, 8])
    [line] = inspect(capsys, tmp_path, 0, "--json")
    assert line == (
        '{"rows": [{"sample": 0, "chunk": 0, "row": 0, "byte": 0, "bytes": 33, "tokens": 7, '
        '"value": {"a" : 1.50, "b":"\\u007f\\u009b\\u2028\\ud83d\\ude00\\u00fc"}}]}'
    )
    assert json.loads(line)["rows"][0]["value"] == json.loads(row)


def test_chunk_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    [line] = inspect(capsys, tmp_path, "--chunk", 0, "--rows", 1, "--json")
    values = json.loads(line)
    assert values.pop("rows") == [
        {"sample": 0, "chunk": 0, "row": 0, "byte": 0, "bytes": 21, "tokens": 1, "value": {"id": 0, "text": "ü"}}
    ]
    assert (values.pop("row_bytes")["max"], values.pop("row_tokens")["max"]) == (54, 2)
    assert values == {
        "file": f"{tmp_path}/chunk_00000.jsonl",
        "chunk": 0,
        "first_sample": 0,
        "samples": 2,
        "bytes": 75,
        "sealed_at": 1700000000.0,
        "source": {"in.jsonl": 1},
    }


def test_nesting_deeper_than_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another producer may seal it, and readers read it."""
    row = b'{"a":' * 300 + b"1" + b"}" * 300 + b"\n"
    seal_rows(stream(tmp_path, 2), 0, row, b"{}\n")
    assert "... (1 key)" in "".join(inspect(capsys, tmp_path, 0))
    assert inspect(capsys, tmp_path, 0, "--full")[1:] == [row.decode().rstrip()]
    assert row.decode().rstrip() in inspect(capsys, tmp_path, 0, "--json")[0]


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "stream", 1) as writer:
        writer.write({"a": "\x9b31mred\x1b[0m‮"})
    done = lazyshard("inspect", tmp_path / "stream", 0)
    assert done.stdout.splitlines()[2] == r'  "a": "\x9b31mred\u001b[0m\u202e"'
    code, shown = on_terminal("inspect", tmp_path / "stream", 0)
    assert code == 0
    assert "\x9b" not in shown and "‮" not in shown


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    code, shown = on_terminal("inspect", stream(tmp_path / "stream"), 3)
    assert code == 0
    assert "\x1b[" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()[1:] == ["{", '  "id": 3', "}"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument 'STREAM'"),
        ([""], 2, "'' is not a directory"),
        (["{stream}", "5"], 2, "no sample 5: 5 samples are published, from 0 to 4"),
        (["{stream}", "--chunk", "3"], 2, "no chunk 3: 3 chunks are published, from 0 to 2"),
        (["{empty}", "0"], 2, "no sample 0: none is published"),
        (["{stream}", "many"], 2, "Invalid value for 'N'"),
        (["{stream}", "0", "--chunk", "0"], 2, "give either N or --chunk"),
        (["{stream}", "--rows", "1"], 2, "goes with N or --chunk"),
        (["{stream}", "0", "--all"], 2, "goes with neither N nor --chunk"),
        (["{stream}", "--chunk", "-1"], 2, "--chunk"),
        (["{tmp}"], 5, "there is no stream"),
        (["{stream}", "--samples-per-chunk", "3"], 5, "has 2 samples per chunk, asked for 3"),
        (["{damaged}", "1"], 5, "chunk_00000.jsonl: row 1 (byte 9): expected XXH3 "),
        (["{damaged}", "2"], 5, "chunk_00001.jsonl: chunk 1 is published, but this file of it is not there"),
        (["{damaged}", "--chunk", "2"], 5, "chunk_00002.jsonl.completed: chunk 2 is published, but this file"),
        (["{retired}", "0"], 5, "chunk 0 was deleted by the stream's producer, as were all chunks below 1"),
        (["{retired}", "--chunk", "0"], 5, "chunk 0 was deleted by the stream's producer, as were all chunks below 1"),
        (["{doubled}"], 3, "chunk_0.jsonl and chunk_00000.jsonl are both chunk 0"),
    ],
)
def test_refusal(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places: dict[str, Any] = {name: tmp_path / name for name in ("stream", "empty", "damaged", "retired", "doubled")}
    stream(places["stream"])
    stream(places["empty"], 0)
    flip("chunk_00000.jsonl", 10)(stream(places["damaged"]))
    delete("chunk_00001.jsonl", "chunk_00002.jsonl.completed")(places["damaged"])
    retire(stream(places["retired"], 4, end=False), 1, 2)
    put("chunk_0.jsonl")(foreign(places["doubled"], b"{}\n"))
    before = {name: contents(place) for name, place in places.items()}
    assert main(["inspect", *(argument.format(tmp=tmp_path, **places) for argument in arguments)]) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("lazyshard: error: ")
    assert message in shown.err
    assert {name: contents(place) for name, place in places.items()} == before


def test_live_stream_of_a_producer_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    stream(tmp_path, 4, end=False)
    delete("chunk_00001.jsonl.completed")(tmp_path)
    damage.edit("head.json", state="running", pid=os.getpid(), updated_at=time.time())(tmp_path)
    done = lazyshard("inspect", tmp_path, 2)
    assert done.returncode == 5
    assert "chunk 1 is published, but this file of it is not there" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("0",)])
def test_a_row_of_many_keys_is_shown_in_a_page(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChunkWriter(tmp_path / "s", samples_per_chunk=1) as writer:
        writer.write({f"key {number}": number for number in range(5000)})
    assert main(["inspect", str(tmp_path / "s"), *arguments]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 150


def test_what_to_change_stands_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChunkWriter(tmp_path, 50) as writer:
        for number in range(400):
            writer.write({"id": number}, tokens=1 + number % 7 * 100)
    lines = inspect(capsys, tmp_path)
    at = lines.index("what to change")
    settings = [line.split()[-2:] for line in lines[at + 2 :: 2]]
    assert settings == [["--pack", "1024"], ["--micro-batch-size", "1"]]
    found = json.loads(inspect(capsys, tmp_path, "--json")[0])["advice"]
    assert [one["setting"] for one in found] == [line.strip() for line in lines[at + 2 :: 2]]
    assert [one["text"] for one in found] == [line.strip() for line in lines[at + 1 :: 2]]
