"""Bad source lines, and odd ones that are none: alone they end the run, which goes on once they are mended."""

import gzip
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, chunk_files, ids, refused, rows, run_arguments
from tests.producer.commands import Fails, peak_growth

KINDS: Final = ("plain", "gzip", "zstd", "standard input", "followed")
SOME: Final = [(kind, name) for kind in KINDS[1:] for name in ("cut in a string", "UTF-16", "a NUL tail", "too long")]
BOM: Final = b"\xef\xbb\xbf"
LONG: Final = "longer than the 1000000 bytes of --max-row-bytes"
TEXT: Final = rows(0, 30)
PACKED: Final = gzip.compress(TEXT, mtime=0)


class TextSource:
    def __init__(self, kind: str, folder: Path) -> None:
        if kind == "zstd":
            pytest.importorskip("zstandard")
        names = {"gzip": "a.jsonl.gz", "zstd": "a.jsonl.zst", "followed": "incoming/a.jsonl"}
        self._kind: Final = kind
        self._path: Final = folder / names.get(kind, "a.jsonl")
        self._path.parent.mkdir(exist_ok=True)
        self.arguments = ["--source", str(self._path)]  # what the command line says of it
        # Its name in quarantine and in warnings, the same before the number of a line, and that of the whole source.
        self.name = self.shown = self.whole = str(self._path)
        self.unit = "file"  # what bytes are counted in, in messages
        if kind == "followed":
            self.whole = str(self._path.parent)
            self.arguments = ["--follow", self.whole]
            (self._path.parent / "_END").touch()
        elif kind == "standard input":
            self.arguments = ["--source", "-"]
            self.name = self.whole = "-"
            self.shown, self.unit = "standard input", "input"

    def write(self, text: bytes) -> None:
        if self._kind == "gzip":
            text = gzip.compress(text, 1)
        elif self._kind == "zstd":
            text = importlib.import_module("zstandard").compress(text)
        self._path.write_bytes(text)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Makes it the standard input of this process, where it is that."""
        if self._kind != "standard input":
            yield
            return
        before = os.dup(0)
        fd = os.open(self._path, os.O_RDONLY)
        try:
            os.dup2(fd, 0)
            yield
        finally:
            os.dup2(before, 0)
            os.close(before)
            os.close(fd)


class Bad(NamedTuple):
    line: bytes  # without its newline
    byte: int  # in it, as it is told
    reason: str = ""  # a part of it; none where the words are the parser's own, which differ from release to release


BAD: Final = {
    # malformed, cut or empty-but-for-blanks JSON
    "malformed": Bad(b'{"id":25 "text":1}', 9),
    "cut in a string": Bad(b'{"id":25,"te', 12),
    "first line of a pretty-printed object": Bad(b"{", 1),
    "blanks": Bad(b"   ", 0, "a blank line"),
    # invalid UTF-8, UTF-16, a BOM within, CR only
    "invalid UTF-8": Bad(b'{"id":"\xff"}', 7, "not UTF-8: byte 0xff"),
    "Latin-1": Bad(b'{"id":"caf\xe9"}', 10, "not UTF-8: byte 0xe9"),
    "UTF-16": Bad('{"id":25}'.encode("utf-16"), 0, "`iconv -f UTF-16 -t UTF-8`"),
    "UTF-16, no mark": Bad('{"id":25}'.encode("utf-16-be"), 0, "`iconv -f UTF-16BE -t UTF-8`"),
    "a BOM before the row": Bad(BOM + b'{"id":25}', 0, "a byte order mark"),
    "a BOM within the row": Bad(b'{"id":' + BOM + b"25}", 6, "a byte order mark"),
    "CR only": Bad(b'{"id":25}\r{"id":26}', 10, "carriage returns"),
    # lone surrogate, raw NUL, NaN and infinities, 1e999, an integer of 5,000 digits
    "a lone surrogate": Bad(b'{"id":"\\ud800"}', 7, "surrogate pair"),
    "a lone surrogate in UTF-8": Bad(b'{"id":"\xed\xa0\x80"}', 7, "not UTF-8: byte 0xed"),
    "a raw NUL": Bad(b'{"id":"\0"}', 7),
    "NaN": Bad(b'{"id":NaN}', 6, "NaN and infinities"),
    "-Infinity": Bad(b'{"id":-Infinity}', 7, "NaN and infinities"),
    "1e999": Bad(b'{"id":1e999}', 6, "64 bits"),
    "5,000 digits": Bad(b'{"id":' + b"9" * 5000 + b"}", 6, "64 bits"),
    # two values on a line, not an object, nesting
    "two values": Bad(b'{"id":25} {"id":26}', 10, "after the object"),
    "an array": Bad(b"[25]", 0, "found an array"),
    "a string": Bad(b'"25"', 0, "found a string"),
    "a number": Bad(b"25", 0, "found a number"),
    "true": Bad(b"true", 0, "found true or false"),
    "null": Bad(b"null", 0, "found null"),
    "objects 100,000 deep": Bad(b'{"id":' * 100_000 + b"1" + b"}" * 100_000, 6145, "1,024 levels"),
    "arrays 100,000 deep": Bad(b'{"id":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 1030, "1,024 levels"),
    "100,000 deep and cut": Bad(b"[" * 100_000, 1025, "1,024 levels"),
    # integers past 64 bits: refused, since many readers round them
    "2**64": Bad(b'{"id":18446744073709551616}', 6, "18446744073709551616"),
    "-2**63 - 1": Bad(b'{"id":-9223372036854775809}', 6, "-9223372036854775809"),
    # a NUL tail, and lines above --max-row-bytes
    "a NUL tail": Bad(b'{"id":25}' + b"\0" * 100, 9, "NUL bytes"),
    "a NUL tail after a cut": Bad(b'{"id":2' + b"\0" * 4096, 7, "NUL bytes"),
    "too long": Bad(b'{"id":"' + b"x" * 2_000_000 + b'"}', 0, LONG),
    "too long, CR": Bad(b"{}\r" * 700_000, 0, LONG + ", and it contains carriage returns as line ends"),
    "too long, NUL": Bad(b"\0" * 2_000_000, 0, LONG + ", and it contains NUL bytes"),
}
"""Mended, each is `rows(25, 26)`."""


class World(TextSource):
    def __init__(self, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(kind, folder)
        self.out = folder / "out"
        self._capsys = capsys

    def run(self, *more: object) -> tuple[int, str]:
        arguments = run_arguments(self.out, [], 10, *self.arguments, "--max-row-bytes", 1_000_000, *more)
        with self.given():
            code = main(arguments)
        return code, self._capsys.readouterr().err


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    return World(request.param, tmp_path, capsys)


@pytest.mark.parametrize(("world", "name"), [*((KINDS[0], name) for name in BAD), *SOME], indirect=["world"])
def test_a_bad_line_ends_the_run_and_the_mended_one_goes_on(name: str, world: World) -> None:
    before, bad = rows(0, 25), BAD[name]
    world.write(before + bad.line + b"\n" + rows(26, 40))
    code, said = world.run("--no-progress")
    assert code == 3
    assert_one_line(said, f"{world.shown}:26: byte {len(before) + bad.byte} of the {world.unit}: ")
    assert bad.reason in said
    assert ids(world.out) == list(range(20))  # two chunks; the five rows behind them are read again

    world.write(rows(0, 40))
    assert world.run()[0] == 0
    assert ids(world.out) == list(range(40))


@pytest.mark.parametrize("policy", ["quarantine", "skip"])
def test_bad_lines_are_quarantined_and_counted(policy: str, world: World) -> None:
    text, begins = bytearray(), []
    for number, bad in enumerate(BAD.values()):
        text += rows(number, number + 1)
        begins.append(len(text))
        text += bad.line + b"\n"
    world.write(bytes(text))
    code, said = world.run("--on-bad-row", policy)
    assert code == 0
    assert f"refused_rows={len(BAD)}\n" in said
    assert ids(world.out) == list(range(len(BAD)))
    places = [f"{world.shown}:{2 * number + 2}: byte " for number in range(10)]
    skipped = [line for line in said.splitlines() if "the row is skipped" in line]
    assert len(skipped) == (10 if policy == "skip" else 0)
    assert all(place in line for place, line in zip(places, skipped, strict=False))
    if policy == "skip":
        assert not (world.out / "quarantine.jsonl").exists()
        return
    for number, (entry, bad, begin) in enumerate(zip(refused(world.out), BAD.values(), begins, strict=True)):
        assert (entry["source"], entry["line"], entry["byte"]) == (world.name, 2 * number + 2, begin)
        assert bad.reason in entry["reason"]
        if bad.reason.startswith(LONG):
            assert entry["row"] == ""  # it was never held, so it cannot be kept
        elif "row" in entry:
            assert entry["row"].encode() == bad.line


def given_bytes(position: Any) -> Iterator[tuple[bytes, int]]:
    """All of `BAD`, each after a good row, as a generator's bytes."""
    given = [line for bad in BAD.values() for line in (b'{"id":0}', bad.line)]
    for number in range(position or 0, len(given)):
        yield given[number], number + 1


def test_bad_lines_of_a_generator_are_quarantined_with_the_same_reasons(tmp_path: Path) -> None:
    source, out = f"python:{__name__}:given_bytes", tmp_path / "out"
    options = ("--max-row-bytes", 1_000_000, "--on-bad-row", "quarantine")
    assert main(run_arguments(out, [Path(source)], 10, *options)) == 0
    assert ids(out) == [0] * len(BAD)
    for number, (entry, bad) in enumerate(zip(refused(out), BAD.values(), strict=True)):
        assert (entry["source"], entry["line"], entry["byte"]) == (source, 2 * number + 2, None)
        assert bad.reason.partition(", and")[0] in entry["reason"]


GOOD: Final = {
    "a BOM, CRLF, blank lines": (BOM + b'\n{"id":0}\r\n\r\n\n{"id":1}\n\n', b'{"id":0}\n{"id":1}\n', "blank_lines=4 "),
    "no newline at the end": (b'{"id":0}\n{"id":1}', b'{"id":0}\n{"id":1}\n', ""),
    "CRLF, the last cut to CR": (b'{"id":0}\r\n{"id":1}\r', b'{"id":0}\n{"id":1}\n', ""),
}
AS_THEY_ARE: Final = (
    '{"id":0,"t":"a\u2028b\u2029c\u0085d"}\n'
    '{"id":"\\u0000"}\n'
    '{"id":"\\ud83d\\ude00"}\n'
    '{"id":"\ufeff"}\n'
    '{"id":18446744073709551615,"n":-9223372036854775808}\n'
    # Exact: published to the digit, whatever a reader makes of them.
    '{"id":0.1234567890123456789012345}\n'
    f'{{"id":0.{"9" * 5000}}}\n'
).encode()
GOOD["published to the byte"] = (AS_THEY_ARE, AS_THEY_ARE, "")
OF_ALL_KINDS: Final = ("CRLF, the last cut to CR", "published to the byte")


@pytest.mark.parametrize(
    ("world", "name"),
    [*((KINDS[0], name) for name in GOOD), *((kind, name) for kind in KINDS[1:] for name in OF_ALL_KINDS)],
    indirect=["world"],
)
def test_a_text_that_is_taken(name: str, world: World) -> None:
    text, published, counted = GOOD[name]
    world.write(text)
    code, said = world.run()
    assert code == 0
    assert counted in said
    assert "refused_rows=0\n" in said
    assert " warning: " not in said
    assert chunk_files(world.out) == {"chunk_00000.jsonl": published}


@pytest.mark.parametrize("text", [b"", BOM + b"\n\r\n"], ids=["nothing", "a BOM and blank lines"])
def test_an_empty_text_is_a_clean_end_with_a_warning(text: bytes, world: World) -> None:
    world.write(text)
    code, said = world.run()
    assert code == 0
    assert f"lazyshard-producer: warning: {world.whole}: holds no rows\n" in said
    assert " event=end result=finished " in said and " samples=0 published=0 chunks=0 " in said
    assert (world.out / "stream.end").exists()


@pytest.mark.parametrize(
    ("name", "data", "published", "byte"),
    [
        ("a.jsonl.gz", PACKED[:-12], 20, len(PACKED) - 12),
        ("a.jsonl.gz", b"", 0, 0),
        ("a.jsonl.gz", PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], 0, len(PACKED)),
        ("a.jsonl.gz", PACKED + b"garbage", 30, len(PACKED)),
        ("a.jsonl.gz", b"garbage\n", 0, 0),
        ("a.jsonl.zst", bytes(20), 0, 0),
    ],
    ids=["cut", "nothing", "wrong CRC", "something behind it", "not gzip", "not zstd"],
)
def test_a_file_that_stops_the_run_and_the_sound_one_goes_on(
    name: str, data: bytes, published: int, byte: int, tmp_path: Path, fails: Fails
) -> None:
    source, out = tmp_path / name, tmp_path / "out"
    source.write_bytes(data)
    arguments = run_arguments(out, [source], 10, "--no-progress", "--on-bad-row", "quarantine")
    fails(arguments, 4, f"{source}: byte {byte} of the compressed file: ")
    assert ids(out) == list(range(published))
    assert not (out / "quarantine.jsonl").exists()

    source.write_bytes(PACKED)
    assert main(arguments) == 0
    assert ids(out) == list(range(30))


def test_one_bad_row_above_the_cap_of_all_runs_ends_the_run(source: Path, out: Path, fails: Fails) -> None:
    source.write_bytes(rows(0, 3) + b"bad1\n" + rows(3, 7) + b"bad2\n" + rows(7, 9) + b"bad3\n" + rows(9, 12))
    arguments = run_arguments(out, [source], 4, "--on-bad-row", "quarantine", "--max-bad-rows")
    byte = len(rows(0, 9)) + 10
    for _ in range(2):
        fails([*arguments, "2"], 3, "more than 2 bad rows", f"{source}:12: byte {byte} of the file: ")
        assert ids(out) == list(range(8))
        # What no seal counts yet is kept as well: somebody wants to know why the run has ended.
        assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2"]
    assert main([*arguments, "none"]) == 0
    assert ids(out) == list(range(12))
    assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2", "bad3"]


def test_rows_in_quarantine_outlast_runs_of_another_policy(source: Path, out: Path) -> None:
    first = rows(0, 2) + b"bad1\n" + rows(2, 4)
    second = first + rows(4, 6)
    # Each run but the last is ended by a bad row, or its stream would end.
    for data, options, code in (
        (first + b"x\n", ("quarantine", "--max-bad-rows", 1), 3),
        (first + b"skipped\n" + rows(4, 6), ("fail",), 3),
        (second + b"bad\n", ("fail",), 3),
        (second + b"bad2\n" + rows(6, 8), ("quarantine",), 0),
    ):
        source.write_bytes(data)
        assert main(run_arguments(out, [source], 2, "--on-bad-row", *options)) == code
    assert ids(out) == list(range(8))
    assert [entry["row"] for entry in refused(out)] == ["bad1", "bad2"]


def test_mended_rows_are_a_further_source_of_the_same_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, mended, out = tmp_path / "a.jsonl", tmp_path / "mended.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 10) + b'{"id":10\n' + rows(11, 30) + b'{"id":30\n' + rows(31, 40) + b"worse\n")
    options = ("--on-bad-row", "quarantine", "--shuffle", 4)
    assert main(run_arguments(out, [source], 5, *options, "--max-bad-rows", 2)) == 3
    capfd.readouterr()
    assert main(["quarantine", str(out), "--rows"]) == 0
    assert capfd.readouterr().out == '{"id":10\n{"id":30\n'
    source.write_bytes(source.read_bytes().removesuffix(b"worse\n") + rows(40, 50))
    mended.write_bytes(b'{"id":10}\n{"id":30}\n')
    assert main(run_arguments(out, [source, mended], 5, *options)) == 0
    assert sorted(ids(out)) == list(range(50))
    assert [entry["line"] for entry in refused(out)] == [11, 31]


def test_duplicate_keys_are_warned_of_once_and_all_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out"
    twice = b'\n{"id":0,"x":{"y":1,"y":2}}\n'
    a.write_bytes(rows(0, 1) + twice * 3)
    b.write_bytes(twice * 2 + b"bad\n")
    for code, last in ((3, b"bad\n"), (0, twice)):
        b.write_bytes(twice * 2 + last)
        assert main(run_arguments(out, [a, b], 5)) == code
        err = capsys.readouterr().err
        warned = [line for line in err.splitlines() if "warning" in line]
        files = [a, b] if code else [b]
        assert [f" {path}:" in line for path, line in zip(files, warned, strict=True)] == [True] * len(files)
    assert "blank_lines=6 duplicate_key_rows=6" in err


def test_packed_files_are_refused_by_their_first_bytes(source: Path, tmp_path: Path, fails: Fails) -> None:
    for begin, name in ((b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04", "zip")):
        source.write_bytes(begin + bytes(100))
        fails(run_arguments(tmp_path / "out", [source]), 4, str(source), name)
    assert not (tmp_path / "out").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_is_too_long_takes_no_memory(kind: str, nursery: Commands, tmp_path: Path) -> None:
    """Of the peak of the whole command. What a function, a generator or a table makes is in memory in any case."""
    source, out = TextSource(kind, tmp_path), tmp_path / "out"
    source.write(rows(0, 5) + b'{"id":"%s"}\n' % (b"x" * (96 << 20)) + rows(5, 9))
    options = ("--max-row-bytes", 1 << 20, "--on-bad-row", "quarantine")
    arguments = [*run_arguments(out, [], 4, *options), *source.arguments]
    stdin = tmp_path / "a.jsonl" if kind == "standard input" else None
    ended = nursery.reap(nursery.fork(peak_growth, main, arguments, stdin=stdin))
    assert ended.status == 0, ended.said
    assert ids(out) == list(range(9))
    (entry,) = refused(out)
    assert (entry["line"], entry["byte"], entry["row"]) == (6, len(rows(0, 5)), "")
    # Blocks that are in hand or read ahead, of a few MiB; the line is 96 MiB.
    assert int(ended.left) < 32 << 20
