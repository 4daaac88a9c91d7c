"""What people see of a damaged chunk directory: every case, by the reader, the data set and the commands.

The table is the list of damages to a directory. Told elsewhere, and not here again:

    names past 99999, odd padding, doubled names      test_stream, test_verification_names, cli/test_inspect
    gap and missing marker of a foreign directory     test_stream
    unreadable: path and uid, as another user         test_files, cli/test_verify, cli/test_status
    files that appear late, or never                  test_reader
    cursors as problems of their consumers            test_consumers, cli/test_status; below: nothing is deleted
    every byte, and several damages at once           faults/test_fuzz
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from lazyshard import LazyShardedDataset, StreamReader
from lazyshard.cli.main import main
from lazyshard.errors import (
    ChunkCorrupt,
    ChunkMissing,
    EndInvalid,
    FileRefused,
    LazyShardError,
    ManifestInvalid,
    RetiredInvalid,
    SealInvalid,
    StreamInvalid,
    StreamMismatch,
    VersionUnsupported,
    WaitTimeout,
)
from lazyshard.storage import CursorOwner, list_consumers, read_cursor
from lazyshard.storage.retire import retire
from tests.faults.fuzz_damage import replace_by
from tests.storage.consuming import cursor
from tests.storage.damage import Damage, copy, cut, delete, each, edit, flip, move, put, stream
from tests.storage.streams import foreign, needs_root

C0, C1, C2 = (f"chunk_0000{number}.jsonl" for number in range(3))
S0, S1, S2 = (f"{name}.completed" for name in (C0, C1, C2))

SEALED = "; the file was changed or damaged after it was sealed. Restore it from a copy"
RESTORE = "; restore the file from a copy"
LATER = ": written in stream format 2, this release of lazyshard reads format 1; install a newer lazyshard"
LATER_SEAL = ": written in stream format 3, this release of lazyshard reads formats 1 to 2; install a newer lazyshard"
NEVER = (
    ": chunk 1 is published, but this file of it has not appeared within 0 s: restore it from a copy; "
    "`lazyshard verify` tells what else is missing"
)
LOST = "chunk 1 is published, but its files are not all there: run `lazyshard verify {d}`"
NO_HEAD = "{d}/head.json: missing, so the chunks were counted by listing them"
NO_HEAD_LINE = (
    "leftover: head.json: expected the head, found no such file, so readers list the directory; start the producer "
    "again, it puts that right"
)
EMPTY = "expected a JSON object, found b'' (Input is a zero-length, empty document: line 1 column 1 (char 0))"

ADOPT = "; or, if `lazyshard adopt` was interrupted, run that again"
DIGEST = "chunk_00001.jsonl: row 1 (byte 9): expected XXH3 dabf1e4ca7f659b6 as sealed, found 964cfaf49568ec35"
NO_JSON = "expected a JSON object, found b'x' (unexpected character, expected a JSON value: line 1 column 1 (char 0))"
NO_ROWS = f"damage: {C1}: expected the rows of the chunk, found no such file although a seal is there{RESTORE}"
END_LATER = "damage: stream.end: expected stream format 1, found format 2; install a newer lazyshard"


def grow(name: str) -> Damage:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes() + b"\0")


def instead(kind: str, name: str) -> Damage:
    return lambda directory: replace_by(directory / name, kind, directory / C0)


@dataclass(frozen=True)
class Case:
    """A damage, and what is said of it; "{d}" stands for the directory.

    `error` and `message` are what a read of sample 3 raises, in chunk 1; `fields` are those of the error, but for file
    and directory. `verify` are its lines but the last, `status` what it calls problems, None where it tells nothing.
    """

    what: str
    damage: Damage
    error: type[LazyShardError]
    message: str
    fields: dict[str, Any]
    verify: tuple[str, ...]
    status: tuple[str, ...] | None = ()
    inspect: int = 5
    marks: tuple[pytest.MarkDecorator, ...] = field(default=())


def seal_case(what: str, damage: Damage, told: str, **fields: Any) -> Case:
    """A seal that cannot be used."""
    where = f"{S1}: field {fields['field']!r}: " if fields.get("field") else f"{S1}: "
    message = where + told + RESTORE
    return Case(what, damage, SealInvalid, "{d}/" + message, fields, (f"damage: {message}",))


def kind_case(kind: str, found: str, name: str) -> Case:
    """Something that is no plain file, in the place of one."""
    told = f"{name}: expected a plain file, found {found}"
    marks = (needs_root,) if kind == "device" else ()
    damage, lines, problems = instead(kind, name), [f"damage: {told}{RESTORE}"], ["{d}/" + told]
    if name in (C1, S1):
        problems = [LOST] if kind == "link to itself" else []
    elif name == "stream.end":
        damage, lines, problems = each(delete("head.json"), damage), [NO_HEAD_LINE, *lines], [NO_HEAD, *problems]
    elif name == "retired.json":
        damage, lines, problems = each(delete(C1), damage), [*lines, NO_ROWS], [*problems, LOST]
    return Case(
        f"{kind} for {name}", damage, FileRefused, "{d}/" + told, {"kind": found}, tuple(lines), tuple(problems),
        marks=marks,
    )  # fmt: skip


MISNAMED = (
    "expected the name chunk_00001{end}, found another padding, under which readers do not look; rename it: `mv "
    "chunk_1{end} chunk_00001{end}`"
)
INTEGER = "expected an integer from 1 to 100000000, found "

CASES = [
    Case(
        "data shorter than the seal", cut(C1, 17), ChunkCorrupt,
        "{d}/chunk_00001.jsonl: expected 18 bytes as sealed, found 17 bytes" + SEALED,
        {"chunk": 1, "expected": "18 bytes as sealed", "actual": "17 bytes"},
        ("damage: chunk_00001.jsonl: expected 18 bytes as sealed, found 17 bytes" + RESTORE,),
    ),
    Case(
        "data longer than the seal", grow(C1), ChunkCorrupt,
        "{d}/chunk_00001.jsonl: expected 18 bytes as sealed, found 19 bytes" + SEALED,
        {"chunk": 1, "expected": "18 bytes as sealed", "actual": "19 bytes"},
        ("damage: chunk_00001.jsonl: expected 18 bytes as sealed, found 19 bytes" + RESTORE,),
    ),
    Case(
        "digest wrong", flip(C1, 15), ChunkCorrupt,
        "{d}/" + DIGEST + SEALED,
        {"chunk": 1, "row": 1, "byte": 9, "expected": "XXH3 dabf1e4ca7f659b6 as sealed", "actual": "964cfaf49568ec35"},
        ("damage: " + DIGEST + RESTORE,),
    ),
    seal_case("count too small", edit(S1, samples=1), "expected 2 numbers of 8 bytes, found 24 bytes", field="offsets",
              expected="2 numbers of 8 bytes", actual="24 bytes"),
    seal_case("count too large", edit(S1, samples=3), "expected 4 numbers of 8 bytes, found 24 bytes", field="offsets",
              expected="4 numbers of 8 bytes", actual="24 bytes"),
    seal_case("seal not JSON", put(S1, b"x"), NO_JSON),
    seal_case("seal empty", put(S1), EMPTY),
    seal_case("seal of another chunk", copy(S0, S1), "expected 1, as in the file's name, found 0", field="chunk",
              expected="1, as in the file's name", actual="0"),
    seal_case("negative count", edit(S1, samples=-1), INTEGER + "-1", field="samples", actual="-1"),
    seal_case("negative size", edit(S1, bytes=-18), "expected an integer from 1 to 4611686018427387904, found -18",
              field="bytes", actual="-18"),
    seal_case("count with a fraction", edit(S1, samples=2.0), INTEGER + "2.0", field="samples", actual="2.0"),
    seal_case("count in quotes", edit(S1, samples="2"), INTEGER + "'2'", field="samples", actual="'2'"),
    Case("later format of a seal", edit(S1, format=3), VersionUnsupported, "{d}/" + S1 + LATER_SEAL,
         {"field": "format", "expected": "2", "actual": "3"},
         (f"damage: {S1}: expected stream format 2, found format 3; install a newer lazyshard",)),
    Case("later format of the manifest", edit("stream.json", format=3), VersionUnsupported,
         "{d}/stream.json" + LATER_SEAL, {"field": "format", "expected": "2", "actual": "3"}, (), None),
    Case("later format of the head", edit("head.json", format=2), VersionUnsupported, "{d}/head.json" + LATER,
         {"field": "format", "expected": "1", "actual": "2"},
         ("damage: head.json: expected stream format 1, found format 2; install a newer lazyshard",), None),
    Case("later format of the end", each(edit("stream.end", format=2), delete("head.json")), VersionUnsupported,
         "{d}/stream.end" + LATER, {"field": "format", "expected": "1", "actual": "2"},
         (NO_HEAD_LINE, END_LATER), None),
    Case("seal without data", delete(C1), ChunkMissing, "{d}/" + C1 + NEVER, {"chunk": 1},
         (NO_ROWS,), (LOST,)),
    Case("data without seal", delete(S1), ChunkMissing, "{d}/" + S1 + NEVER, {"chunk": 1},
         (f"damage: {S1}: expected a seal, found no such file although the chunk counts as published{RESTORE}",),
         (LOST,)),
    Case("a gap", delete(C1, S1), ChunkMissing, "{d}/" + S1 + NEVER, {"chunk": 1},
         (f"damage: {C1}: expected the chunk and its seal, found neither; restore the files from a copy",), (LOST,)),
    Case("odd zero-padding", each(move(C1, "chunk_1.jsonl"), move(S1, "chunk_1.jsonl.completed")), ChunkMissing,
         "{d}/" + S1 + NEVER, {"chunk": 1},
         tuple(f"damage: chunk_1{end}: {MISNAMED.format(end=end)}" for end in (".jsonl", ".jsonl.completed")),
         (LOST,)),
    Case("no manifest", delete("stream.json"), StreamInvalid,
         "{d}: there are chunks and head.json, but stream.json is missing; restore it from a copy", {},
         ("damage: stream.json: expected the manifest, found no such file; restore the file from a copy",),
         ("{d}/stream.json: missing; restore it from a copy",), 3),
    Case("neither manifest nor head", delete("stream.json", "head.json"), StreamInvalid,
         "{d}: there are chunks and stream.owner, but stream.json is missing; restore it from a copy" + ADOPT, {},
         ("damage: stream.json: expected the manifest, found no such file, although stream.owner is there" + RESTORE
          + ADOPT,),
         ("{d}/stream.json: missing; restore it from a copy", NO_HEAD), 3),
    Case("manifest torn", put("stream.json"), ManifestInvalid,
         "{d}/stream.json: " + EMPTY + "; restore it from a copy", {},
         ("damage: stream.json: " + EMPTY + RESTORE,), ("{d}/stream.json: " + EMPTY + "; restore it from a copy",)),
    Case("end torn, and no head", each(put("stream.end"), delete("head.json")), EndInvalid,
         "{d}/stream.end: " + EMPTY, {}, (NO_HEAD_LINE, "damage: stream.end: " + EMPTY + RESTORE),
         (NO_HEAD, "{d}/stream.end: " + EMPTY)),
    Case("mark of deleted chunks torn", each(put("retired.json"), delete(C1)), RetiredInvalid,
         "{d}/retired.json: " + EMPTY, {},
         ("damage: retired.json: " + EMPTY + RESTORE,
          NO_ROWS),
         ("{d}/retired.json: " + EMPTY, LOST)),
    *(kind_case(kind, found, name)
      for name in (C1, S1, "stream.json", "head.json", "stream.end", "retired.json")
      for kind, found in (
          ("directory", "a directory"), ("pipe", "a named pipe"), ("device", "a device"),
          ("socket", "a named pipe, socket or device"), ("link out", "a link to /etc/hostname, out of the stream"),
          ("link to itself", "a link that leads to itself"),
      )),
]  # fmt: skip

by_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.what, marks=case.marks) for case in CASES])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stream(tmp_path_factory.mktemp("whole") / "s")


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "s"))


@by_case
def test_reader(case: Case, place: Path) -> None:
    case.damage(place)
    with pytest.raises(case.error) as caught:
        StreamReader(place, max_wait=0).read(3)
    assert str(caught.value) == case.message.format(d=place)
    assert type(caught.value) is case.error
    assert {name: getattr(caught.value, name) for name in case.fields} == case.fields


@by_case
def test_data_set(case: Case, place: Path) -> None:
    case.damage(place)
    with pytest.raises(case.error) as caught:
        dataset = LazyShardedDataset(place, dp_rank=0, dp_size=1, max_wait=0, on_bad_sample="raise")
        dataset[3]
    assert str(caught.value) == case.message.format(d=place)


@by_case
def test_verify(case: Case, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.damage(place)
    assert main(["verify", str(place), "--jobs", "1"]) == 5
    shown = capsys.readouterr()
    if case.verify:
        assert (shown.out.splitlines()[:-1], shown.err) == ([line.format(d=place) for line in case.verify], "")
    else:
        # Of a later format nothing else can be told.
        assert (shown.out, shown.err) == ("", f"lazyshard: error: {case.message.format(d=place)}\n")


@by_case
def test_status(case: Case, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.damage(place)
    code = main(["status", str(place), "--json"])
    shown = capsys.readouterr()
    if case.status is None:
        assert (code, shown.out, shown.err) == (5, "", f"lazyshard: error: {case.message.format(d=place)}\n")
    else:
        assert (code, shown.err) == (0, "")
        assert orjson.loads(shown.out)["problems"] == [line.format(d=place) for line in case.status]


@by_case
def test_inspect(case: Case, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.damage(place)
    assert main(["inspect", str(place), "3"]) == case.inspect
    shown = capsys.readouterr()
    assert shown.out == ""
    if case.error is ChunkMissing:
        start = case.message.partition(" has not appeared")[0]
        wanted = f"{start} is not there; on a network filesystem it may still have to appear. `lazyshard verify` looks "
        assert shown.err == f"lazyshard: error: {wanted.format(d=place)}for more\n"
    else:
        assert shown.err == f"lazyshard: error: {case.message.format(d=place)}\n"


def test_unknown_fields_are_passed_over(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (S0, S1, S2, "stream.json", "head.json", "stream.end", "stream.owner"):
        edit(name, later={"than": "this"})(place)
    assert list(StreamReader(place, max_wait=0)) == [{"id": number} for number in range(5)]
    assert main(["verify", str(place), "--jobs", "1"]) == 0


def test_head_that_is_torn_stops_nobody(place: Path) -> None:
    put("head.json", b'{"fo')(place)
    assert StreamReader(place, max_wait=0).read(4) == {"id": 4}


def test_another_samples_per_chunk_is_refused_at_the_start(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = f"{place}: the stream has 2 samples per chunk, asked for 3; that never changes. Use 2, or another directory"
    for opened in (StreamReader, partial(LazyShardedDataset, dp_rank=0, dp_size=1)):
        with pytest.raises(StreamMismatch) as caught:
            opened(place, samples_per_chunk=3)
        assert str(caught.value) == told
        assert (caught.value.directory, caught.value.expected, caught.value.actual) == (str(place), "3", "2")
    assert main(["inspect", str(place), "--samples-per-chunk", "3"]) == 5
    assert capsys.readouterr().err == f"lazyshard: error: {told}\n"


@pytest.mark.parametrize("missing", [C1, S1])
def test_gap_without_a_head_says_which_chunk_and_how_long(missing: str, tmp_path: Path) -> None:
    place = foreign(tmp_path / "s", *(b'{"id":0}\n' for _ in range(3)))
    delete(missing)(place)
    with pytest.raises(WaitTimeout) as caught:
        StreamReader(place, 1, max_wait=0).read(1)
    assert str(caught.value) == (
        f"waiting for chunk 1 of {place} (0 s of at most 0 s): 1 chunk is complete, nothing is known of the producer"
        f"; chunk 1 lacks its data or its marker. Gave up: start its producer, or wait longer with max_wait"
    )
    assert (caught.value.chunk, caught.value.state, caught.value.heartbeat_age) == (1, None, None)


def test_file_with_a_hole_is_not_read_into_memory(place: Path) -> None:
    os.truncate(place / S1, 1 << 39)
    with pytest.raises(FileRefused) as caught:
        StreamReader(place, max_wait=0).read(3)
    told = f"{place}/{S1}: expected at most 4294967296 bytes, found a file of 549755813888 bytes; "
    assert str(caught.value).startswith(told)


def test_foreign_line_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.storage.foreign_rows.MAX_ROW_BYTES", 1 << 20)
    place = foreign(tmp_path / "s", b'{"id":0}\n', end=True)
    os.truncate(place / C0, 1 << 39)
    with pytest.raises(ChunkCorrupt) as caught:
        StreamReader(place, 1, max_wait=0)
    assert str(caught.value) == (
        f"{place}/{C0}: row 1 (byte 9): expected a line of at most 1048576 bytes, found no end of it; restore the file "
        f"from a copy"
    )


CURSOR_KINDS = [
    ("directory", "a directory"),
    ("pipe", "a named pipe"),
    ("link out", "a link to /etc/hostname, out of the stream"),
    ("link to itself", "a link that leads to itself"),
]


@pytest.mark.parametrize(("kind", "found"), CURSOR_KINDS)
def test_what_is_no_cursor_is_refused_and_deletes_nothing(
    kind: str, found: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cursor(place, "sft", consumed=4, chunks_before=2)
    replace_by(place / "cursors" / "sft.json", kind, place)
    told = f"{place}/cursors/sft.json: expected a plain file, found {found}"
    with pytest.raises(FileRefused) as caught:
        read_cursor(place, "sft")
    assert (str(caught.value), caught.value.kind) == (told, found)
    _check_nothing_is_deleted(place, told, capsys)


def _torn(data: bytes) -> Iterator[tuple[bytes, str]]:
    yield b"", EMPTY
    yield bytes(8), "expected a JSON object, found b'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00' ("
    yield (
        data.replace(b'"chunks_before":2', b'"chunks_before":9'),
        ("is done with 9 chunks, of which only 3 are published"),
    )
    yield (
        data.replace(b'"chunks_before":2', b'"chunks_before":-2'),
        ("field 'chunks_before': expected an integer from 0 to 1000000000000000, found -2"),
    )
    yield data.replace(b'"consumer":"sft"', b'"consumer":"dpo"'), "field 'consumer': expected one of sft, found 'dpo'"
    start = data.index(b'"stream_id":"') + len(b'"stream_id":"')
    yield data[:start] + b"0" * 32 + data[start + 32 :], f"of stream {'0' * 32}, in the directory is stream "


def test_cursor_that_is_torn_ahead_or_of_another_deletes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cursor(place, "sft", consumed=4, chunks_before=2)
    path = place / "cursors" / "sft.json"
    for data, told in _torn(path.read_bytes()):
        path.write_bytes(data)
        _check_nothing_is_deleted(place, f"{path}: {told}", capsys)


def _check_nothing_is_deleted(place: Path, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    [consumer] = list_consumers(place, 3)
    assert (consumer.chunks_before, consumer.cursor) == (0, None)
    assert (consumer.problem or "").startswith(told)
    assert retire(place, consumer.chunks_before, 3) == 0
    assert main(["status", str(place), "--json"]) == 0
    [problem] = orjson.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith(f"consumer 'sft': {told}")
    assert problem.endswith(
        f"; it counts as done with nothing, so no chunk is deleted: mend that, or, if it will not come back, run "
        f"`lazyshard forget {place} sft`"
    )


@pytest.mark.parametrize("kind", ["directory", "link out", "link to itself", "pipe"])
def test_what_is_no_lock_of_a_cursor_hangs_nobody(kind: str, place: Path) -> None:
    cursor(place, "sft", consumed=0, chunks_before=0)
    replace_by(place / "cursors" / ".sft.lock", kind, place)
    try:
        CursorOwner(place, "sft").close()
    except OSError as error:
        # Of the filesystem's own kind, or ours: it names the file.
        assert ".sft.lock" in str(error)
        assert kind != "pipe"
