"""The list of bad source lines, and of odd ones that are none: what is given, and what a person then reads.

`BAD` holds lines that are refused, `GOOD` texts that are taken, `STOPS` files that end the run whatever --on-bad-row
says. Every line of `BAD` goes through the command in a source of every kind: alone it ends the run, and once it is
mended the run goes on without a row lost or repeated; with all the others it is quarantined and counted.

Covered elsewhere:

    a line of 1 GB                          test_faults_long_lines, test_lines, test_follow, test_compressed
    rows made by --transform, --where       test_bad_input_functions
    duplicate keys, once a file, counted    test_bad_input
    rows of tables                          test_arrow_values, test_parquet, test_table_files
    a line cut at any byte, any bytes       tests/format/test_row, test_lines (Hypothesis)
    --max-bad-rows, mended rows             test_bad_input
    gzip and zstd cut at any byte           test_compressed
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.producing import chunk_files, ids, rows, run_arguments
from tests.producer.fault_sources import KINDS, TextSource

BOM: Final = b"\xef\xbb\xbf"

NOT_JSON: Final = "NaN and infinities are not JSON; write null or a string"
WITHIN: Final = "a byte order mark, which is only allowed at the start of a file"
RETURNS: Final = r"carriage returns as line ends: expected newlines; convert it with `tr '\r' '\n'`"
SURROGATE: Final = r"half of a surrogate pair (\ud800 to \udfff alone), which is no character"
TOO_LARGE: Final = "a number that does not fit into 64 bits; write it as a string"
DEEP: Final = "nested more than 1,024 levels deep"
BEHIND: Final = "something behind the object; expected one object on one line"
TORN: Final = "ends in NUL bytes; torn by a crash of the machine that wrote it?"
LONG: Final = "longer than the 1000000 bytes of --max-row-bytes"
NULS: Final = ", and it holds NUL bytes: space that was reserved but never written, or torn by a crash?"


class Bad(NamedTuple):
    """A line without its newline, the byte in it that is told, and why it is no row.

    `parser`: the words are those of orjson 3.13; another release may choose others.
    """

    line: bytes
    byte: int
    reason: str
    parser: bool = False


BAD: Final = {
    # malformed, cut or empty-but-for-blanks JSON
    "malformed": Bad(b'{"id":25 "text":1}', 9, "unexpected character, expected ',' or '}'", True),
    "other quotes": Bad(b"{'id':25}", 1, "unexpected character, expected a string key", True),
    "a comma at the end": Bad(b'{"id":25,}', 8, "trailing comma is not allowed", True),
    "cut in a string": Bad(b'{"id":25,"te', 12, "unexpected end of data", True),
    "cut before a value": Bad(b'{"id":', 6, "unexpected end of data", True),
    "first line of a pretty-printed object": Bad(b"{", 1, "unexpected end of data", True),
    "blanks": Bad(b"   ", 0, "nothing but blanks"),
    "a tab": Bad(b"\t", 0, "nothing but blanks"),
    # invalid UTF-8, UTF-16, a BOM within, CR only
    "invalid UTF-8": Bad(b'{"id":"\xff"}', 7, "not UTF-8: byte 0xff"),
    "Latin-1": Bad(b'{"id":"caf\xe9"}', 10, "not UTF-8: byte 0xe9"),
    "UTF-16": Bad(
        '{"id":25}'.encode("utf-16"), 0, "UTF-16 text: expected UTF-8; convert it with `iconv -f UTF-16 -t UTF-8`"
    ),
    "UTF-16, no mark": Bad(
        '{"id":25}'.encode("utf-16-be"), 0, "UTF-16 text: expected UTF-8; convert it with `iconv -f UTF-16BE -t UTF-8`"
    ),
    "a BOM before the row": Bad(BOM + b'{"id":25}', 0, WITHIN),
    "a BOM within the row": Bad(b'{"id":' + BOM + b"25}", 6, WITHIN),
    "CR only": Bad(b'{"id":25}\r{"id":26}', 10, RETURNS),
    # lone surrogate, raw NUL, NaN and infinities, 1e999, an integer of 5,000 digits
    "a lone surrogate": Bad(b'{"id":"\\ud800"}', 7, SURROGATE),
    "a lone surrogate in UTF-8": Bad(b'{"id":"\xed\xa0\x80"}', 7, "not UTF-8: byte 0xed"),
    "a raw NUL": Bad(b'{"id":"\0"}', 7, "unexpected control character in string", True),
    "NaN": Bad(b'{"id":NaN}', 6, NOT_JSON),
    "Infinity": Bad(b'{"id":Infinity}', 6, NOT_JSON),
    "-Infinity": Bad(b'{"id":-Infinity}', 7, NOT_JSON),
    "1e999": Bad(b'{"id":1e999}', 6, TOO_LARGE),
    "5,000 digits": Bad(b'{"id":' + b"9" * 5000 + b"}", 6, TOO_LARGE),
    "-5,000 digits": Bad(b'{"id":-' + b"9" * 5000 + b"}", 6, TOO_LARGE),
    # two values on a line, not an object, nesting
    "two values": Bad(b'{"id":25} {"id":26}', 10, BEHIND),
    "two values with a comma": Bad(b'{"id":25},{"id":26}', 9, BEHIND),
    "an array": Bad(b"[25]", 0, "expected a JSON object, found an array"),
    "a string": Bad(b'"25"', 0, "expected a JSON object, found a string"),
    "a number": Bad(b"25", 0, "expected a JSON object, found a number"),
    "true": Bad(b"true", 0, "expected a JSON object, found true or false"),
    "null": Bad(b"null", 0, "expected a JSON object, found null"),
    "a heading": Bad(b"id,text", 0, "unexpected character, expected a JSON value", True),
    "objects 100,000 deep": Bad(b'{"id":' * 100_000 + b"1" + b"}" * 100_000, 6145, DEEP),
    "arrays 100,000 deep": Bad(b'{"id":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 1030, DEEP),
    "100,000 deep and cut": Bad(b"[" * 100_000, 1025, DEEP),
    # integers past 64 bits: refused, since many readers round them
    "2**64": Bad(
        b'{"id":18446744073709551616}',
        6,
        "the integer 18446744073709551616 does not fit into 64 bits; write it as a string",
    ),
    "-2**63 - 1": Bad(
        b'{"id":-9223372036854775809}',
        6,
        "the integer -9223372036854775809 does not fit into 64 bits; write it as a string",
    ),
    # a NUL tail, and lines above --max-row-bytes
    "a NUL tail": Bad(b'{"id":25}' + b"\0" * 100, 9, TORN),
    "a NUL tail after a cut": Bad(b'{"id":2' + b"\0" * 4096, 7, TORN),
    "nothing but NUL": Bad(b"\0" * 100, 0, TORN),
    "too long": Bad(b'{"id":"' + b"x" * 2_000_000 + b'"}', 0, LONG),
    "too long, NUL": Bad(b"\0" * 2_000_000, 0, LONG + NULS),
}


def reason_of(bad: Bad) -> str:
    """Returns the reason, in the words of the parser that is installed where it is not of 3.13."""
    if bad.parser and not orjson.__version__.startswith("3.13."):
        with pytest.raises(orjson.JSONDecodeError) as caught:
            orjson.loads(bad.line)
        return caught.value.msg
    return bad.reason


class World:
    """A source and a stream, and the command that makes one of the other."""

    def __init__(self, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        if kind == "zstd":
            pytest.importorskip("zstandard")
        self.source = TextSource(kind, folder)
        self.out = folder / "out"
        self._capsys = capsys

    def run(self, *more: object) -> tuple[int, str]:
        """Returns the exit code and what is said."""
        arguments = run_arguments(self.out, [], 10, *self.source.arguments, "--max-row-bytes", 1_000_000, *more)
        with self.source.given():
            code = main(arguments)
        return code, self._capsys.readouterr().err

    def refused(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "quarantine.jsonl").read_bytes().splitlines()]


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    return World(request.param, tmp_path, capsys)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_ends_the_run_and_the_mended_one_goes_on(name: str, world: World) -> None:
    before, bad = rows(0, 25), BAD[name]
    world.source.write(before + bad.line + b"\n" + rows(26, 40))
    code, said = world.run("--no-progress")
    where = f"{world.source.shown}:26: byte {len(before) + bad.byte} of the {world.source.unit}"
    end = "" if bad.reason.endswith("?") else "."
    assert said == (
        f"lazyshard-producer: error: {where}: {reason_of(bad)}{end} Mend that line and run the same command again; "
        "nothing is lost\n"
    )
    assert code == 3
    assert ids(world.out) == list(range(20))  # two chunks; the five rows behind them are read again

    world.source.write(rows(0, 40))
    assert world.run()[0] == 0
    assert ids(world.out) == list(range(40))


def test_bad_lines_are_left_out_and_counted(world: World) -> None:
    lines = [line for number, bad in enumerate(BAD.values()) for line in (rows(number, number + 1), bad.line, b"\n")]
    world.source.write(b"".join(lines))
    code, said = world.run("--on-bad-row", "skip")
    assert code == 0
    assert f"refused_rows={len(BAD)}\n" in said
    assert ids(world.out) == list(range(len(BAD)))
    assert not (world.out / "quarantine.jsonl").exists()


def test_bad_lines_are_quarantined_and_counted(world: World) -> None:
    text, begins = bytearray(), []
    for number, bad in enumerate(BAD.values()):
        text += rows(number, number + 1)
        begins.append(len(text))
        text += bad.line + b"\n"
    world.source.write(bytes(text))
    code, said = world.run("--on-bad-row", "quarantine")
    assert code == 0
    assert f"refused_rows={len(BAD)}\n" in said
    assert ids(world.out) == list(range(len(BAD)))
    found = world.refused()
    for entry in found:
        entry["reason"] = entry["reason"].encode()
    for number, (entry, bad, begin) in enumerate(zip(found, BAD.values(), begins, strict=True)):
        assert (entry["source"], entry["line"], entry["byte"]) == (world.source.name, 2 * number + 2, begin)
        assert entry["reason"] == reason_of(bad).encode()
        if "--max-row-bytes" in bad.reason:
            assert entry["row"] == ""  # it was never held, so it cannot be kept
        elif "row" in entry:
            assert entry["row"].encode() == bad.line


def given_bytes(position: Any) -> Iterator[tuple[bytes, int]]:
    """All of `BAD` but what is too long, each after a good row, as a generator's bytes."""
    given = [line for bad in BAD.values() for line in (b'{"id":0}', bad.line)]
    for number in range(position or 0, len(given)):
        yield given[number], number + 1


def test_bad_lines_of_a_generator_are_quarantined_with_the_same_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = f"python:{__name__}:given_bytes", tmp_path / "out"
    options = ("--max-row-bytes", 1_000_000, "--on-bad-row", "quarantine")
    assert main(run_arguments(out, [Path(source)], 10, *options)) == 0
    assert f"refused_rows={len(BAD)}\n" in capsys.readouterr().err
    assert ids(out) == [0] * len(BAD)
    found = [json.loads(line) for line in (out / "quarantine.jsonl").read_bytes().splitlines()]
    assert [(entry["source"], entry["line"], entry["byte"]) for entry in found] == [
        (source, 2 * number + 2, None) for number in range(len(BAD))
    ]
    assert [entry["reason"] for entry in found] == [reason_of(bad).removesuffix(NULS) for bad in BAD.values()]


GOOD: Final = {
    "no newline at the end": (b'{"id":0}\n{"id":1}', b'{"id":0}\n{"id":1}\n', ""),
    "a BOM at the start": (BOM + b'{"id":0}\n', b'{"id":0}\n', ""),
    "CRLF": (b'{"id":0}\r\n{"id":1}\r\n', b'{"id":0}\n{"id":1}\n', ""),
    "CRLF, the last cut to CR": (b'{"id":0}\r\n{"id":1}\r', b'{"id":0}\n{"id":1}\n', ""),
    "blank lines": (b'\n\r\n{"id":0}\n\n\n{"id":1}\n\n', b'{"id":0}\n{"id":1}\n', "blank_lines=5 "),
    "U+2028, U+2029, U+0085": (
        '{"id":0,"t":"a\u2028b\u2029c\u0085d"}\n'.encode(),
        '{"id":0,"t":"a\u2028b\u2029c\u0085d"}\n'.encode(),
        "",
    ),
    "an escaped NUL": (b'{"id":"\\u0000"}\n', b'{"id":"\\u0000"}\n', ""),
    "an escaped pair of surrogates": (b'{"id":"\\ud83d\\ude00"}\n', b'{"id":"\\ud83d\\ude00"}\n', ""),
    "a BOM within a string": ('{"id":"\ufeff"}\n'.encode(), '{"id":"\ufeff"}\n'.encode(), ""),
    "integers of 64 bits": (
        b'{"id":18446744073709551615,"n":-9223372036854775808}\n',
        b'{"id":18446744073709551615,"n":-9223372036854775808}\n',
        "",
    ),
    # Exact: published to the digit, whatever a reader makes of them.
    "digits of a float": (b'{"id":0.1234567890123456789012345}\n', b'{"id":0.1234567890123456789012345}\n', ""),
    "5,000 digits of a float": (b'{"id":0.%s}\n' % (b"9" * 5000), b'{"id":0.%s}\n' % (b"9" * 5000), ""),
    "duplicate keys": (b'{"id":0,"id":1}\n', b'{"id":0,"id":1}\n', "duplicate_key_rows=1 "),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_text_that_is_taken(name: str, world: World) -> None:
    text, published, counted = GOOD[name]
    world.source.write(text)
    code, said = world.run()
    assert code == 0
    assert counted in said
    assert "refused_rows=0\n" in said
    assert chunk_files(world.out) == {"chunk_00000.jsonl": published}
    told = [line.partition(" warning: ")[2] for line in said.splitlines() if " warning: " in line]
    if name == "duplicate keys":
        assert told == [
            f"{world.source.name}:1: a key is named twice in one object (readers keep one of the values); further such "
            "rows of this source are only counted"
        ]
    else:
        assert told == []


@pytest.mark.parametrize("text", [b"", BOM, b"\n\r\n"], ids=["nothing", "a BOM", "blank lines"])
def test_an_empty_text_is_a_clean_end_with_a_warning(text: bytes, world: World) -> None:
    world.source.write(text)
    code, said = world.run()
    assert code == 0
    assert f"lazyshard-producer: warning: {world.source.whole}: holds no rows\n" in said
    assert " event=end result=finished " in said and " samples=0 published=0 chunks=0 " in said
    assert (world.out / "stream.end").exists()


class Stop(NamedTuple):
    """A file by its name and bytes, how many rows of 30 are published, and what is said of it."""

    name: str
    data: bytes
    published: int
    said: str


TEXT: Final = rows(0, 30)
PACKED: Final = gzip.compress(TEXT, mtime=0)
EMPTY: Final = "byte 0 of the compressed file: expected a file compressed by gzip or zstd, found "

STOPS: Final = {
    "gzip, cut": Stop(
        "a.jsonl.gz",
        PACKED[:-12],
        20,
        f"byte {len(PACKED) - 12} of the compressed file: expected the rest of the gzip member that begins at byte 0, "
        "found the end of the file: cut, or still being written",
    ),
    "gzip, cut to nothing": Stop("a.jsonl.gz", b"", 0, EMPTY + "an empty file: cut, or still being written"),
    "gzip, cut to a byte": Stop("a.jsonl.gz", b"\x1f", 0, EMPTY + r"a file that begins with b'\x1f'"),
    "gzip, its CRC wrong": Stop(
        "a.jsonl.gz",
        PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:],
        0,
        f"byte {len(PACKED)} of the compressed file: expected a sound gzip member (it begins at byte 0), found a wrong "
        f"checksum (CRC), in the {len(PACKED)} bytes before",
    ),
    "gzip, its length wrong": Stop(
        "a.jsonl.gz",
        PACKED[:-4] + b"\0\0\0\0",
        0,
        f"byte {len(PACKED)} of the compressed file: expected a sound gzip member (it begins at byte 0), found a wrong "
        f"length, in the {len(PACKED)} bytes before",
    ),
    "gzip, something behind it": Stop(
        "a.jsonl.gz",
        PACKED + b"garbage",
        30,
        f"byte {len(PACKED)} of the compressed file: expected the end of the file or another gzip member, found a part "
        "beginning b'garbage'",
    ),
    "not gzip": Stop("a.jsonl.gz", b"garbage\n", 0, EMPTY + "a file that begins with b'garb'"),
    "not zstd": Stop("a.jsonl.zst", bytes(20), 0, EMPTY + r"a file that begins with b'\x00\x00\x00\x00'"),
}


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
@pytest.mark.parametrize("name", STOPS)
def test_a_file_that_stops_the_run_and_the_sound_one_goes_on(
    name: str, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = STOPS[name]
    source, out = tmp_path / stop.name, tmp_path / "out"
    source.write_bytes(stop.data)
    arguments = run_arguments(out, [source], 10, "--no-progress", "--on-bad-row", policy)
    assert main(arguments) == 4
    assert capsys.readouterr().err == (
        f"lazyshard-producer: error: {source}: {stop.said}; what was published of it stays, and a sound file is gone "
        "on with\n"
    )
    assert ids(out) == list(range(stop.published))
    assert not (out / "quarantine.jsonl").exists()

    source.write_bytes(PACKED)
    assert main(arguments) == 0
    assert ids(out) == list(range(30))


def test_all_members_are_read_and_a_plain_text_by_whatever_name(tmp_path: Path) -> None:
    for name, data in (
        ("two.jsonl.gz", gzip.compress(TEXT[:100], mtime=0) + gzip.compress(TEXT[100:], mtime=0)),
        ("none.jsonl", PACKED),
        ("plain.jsonl.gz", TEXT),
    ):
        (tmp_path / name).write_bytes(data)
        assert main(run_arguments(tmp_path / f"{name}.out", [tmp_path / name])) == 0
        assert ids(tmp_path / f"{name}.out") == list(range(30))
