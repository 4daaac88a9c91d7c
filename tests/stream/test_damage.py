"""What people see of a damaged chunk directory: every case, by the reader, the data set and the commands."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from lazyshard import BadRows, LazyShardedDataset, StreamReader, errors
from lazyshard.cli.main import main
from lazyshard.errors import ChunkCorrupt, ChunkMissing, FileInvalid, FileRefused, VersionUnsupported
from lazyshard.inspection.verification import verify
from lazyshard.stream import list_consumers, read_cursor
from lazyshard.stream.listing import retire
from tests.harness.fuzz.damage import replace_by
from tests.stream.damage import Damage, copy, cut, delete, each, edit, flip, move, put, stream
from tests.stream.streams import cursor, foreign, needs_root, raised, refusal_of

C0, C1 = (f"chunk_0000{number}.jsonl" for number in range(2))
S0, S1 = (f"{name}.completed" for name in (C0, C1))


def instead(kind: str, name: str) -> Damage:
    return lambda directory: replace_by(directory / name, kind, directory / C0)


@dataclass(frozen=True)
class Case:
    """A damage: what a read of sample 3, in chunk 1, raises, and the findings of a verification: kind and file.

    `verify` is None where nothing but the error can be told, as of a later format, and `status` where that is so of it;
    else `status` is how many problems it tells.
    """

    what: str
    damage: Damage
    error: type[errors.LazyShardError]
    fields: dict[str, Any]
    verify: tuple[tuple[str, str], ...] | None
    status: int | None = 0
    inspect: int = 5
    marks: tuple[pytest.MarkDecorator, ...] = ()


def seal_case(what: str, damage: Damage, **fields: Any) -> Case:
    return Case(what, damage, errors.ChunkCorrupt, fields, (("invalid", S1),))


def kind_case(kind: str, found: str, name: str) -> Case:
    marks: tuple[pytest.MarkDecorator, ...] = (needs_root,) if kind == "device" else ()
    if name != C1 and kind != "link to itself":
        # In the quick tier each kind once, and each name once.
        marks = (*marks, pytest.mark.full)
    damage, told, problems = instead(kind, name), [("not-a-file", name)], 1
    if name in (C1, S1):
        problems = int(kind == "link to itself")
    elif name == "stream.end":
        damage, told, problems = each(delete("head.json"), damage), [NO_HEAD, *told], 2
    elif name == "retired.json":
        damage, told, problems = each(delete(C1), damage), [*told, ("data-missing", C1)], 2
    return Case(f"{kind} for {name}", damage, FileRefused, {"kind": found}, tuple(told), problems, marks=marks)


NO_HEAD = ("head-missing", "head.json")
SIZE = {"chunk": 1, "expected": "18 bytes as sealed"}
FORMAT_2 = {"field": "format", "expected": "2", "actual": "3"}
FORMAT_3 = {"field": "format", "expected": "3", "actual": "4"}
FORMAT_1 = {"field": "format", "expected": "1", "actual": "2"}
ROW_1 = {"chunk": 1, "row": 1, "byte": 9, "expected": "XXH3 dabf1e4ca7f659b6 as sealed", "actual": "964cfaf49568ec35"}
KINDS = (
    ("directory", "a directory"),
    ("pipe", "a named pipe"),
    ("device", "a device"),
    ("socket", "a named pipe, socket or device"),
    ("link out", "a link to /etc/hostname, out of the stream"),
    ("link to itself", "a link that leads to itself"),
)

CASES = [
    Case("data shorter than the seal", cut(C1, 17), ChunkCorrupt, SIZE | {"actual": "17 bytes"}, (("size", C1),)),
    Case("data longer than the seal", put(C1, b"x" * 19), ChunkCorrupt, SIZE | {"actual": "19 bytes"}, (("size", C1),)),
    Case("digest wrong", flip(C1, 15), ChunkCorrupt, ROW_1, (("digest", C1),)),
    seal_case("count too small", edit(S1, samples=1), field="offsets", actual="24 bytes"),
    seal_case("seal not JSON", put(S1, b"x")),
    seal_case("seal of another chunk", copy(S0, S1), field="chunk", expected="1, as in the file's name", actual="0"),
    Case("later format of a seal", edit(S1, format=4), VersionUnsupported, FORMAT_3, (("version", S1),)),
    Case("later format of the manifest", edit("stream.json", format=3), VersionUnsupported, FORMAT_2, None, None),
    Case(
        "later format of the head", edit("head.json", format=2), VersionUnsupported, FORMAT_1,
        (("version", "head.json"),), None,
    ),
    Case(
        "later format of the end", each(edit("stream.end", format=2), delete("head.json")), VersionUnsupported,
        FORMAT_1, (NO_HEAD, ("version", "stream.end")), None,
    ),
    Case("seal without data", delete(C1), ChunkMissing, {"chunk": 1}, (("data-missing", C1),), 1),
    Case("data without seal", delete(S1), ChunkMissing, {"chunk": 1}, (("seal-missing", S1),), 1),
    Case("a gap", delete(C1, S1), ChunkMissing, {"chunk": 1}, (("missing", C1),), 1),
    Case(
        "odd zero-padding", each(move(C1, "chunk_1.jsonl"), move(S1, "chunk_1.jsonl.completed")), ChunkMissing,
        {"chunk": 1}, (("misnamed", "chunk_1.jsonl"), ("misnamed", "chunk_1.jsonl.completed")), 1,
    ),
    Case("no manifest", delete("stream.json"), errors.StreamInvalid, {}, (("manifest-missing", "stream.json"),), 1, 3),
    Case(
        "neither manifest nor head", delete("stream.json", "head.json"), errors.StreamInvalid, {},
        (("manifest-missing", "stream.json"),), 2, 3,
    ),
    Case("manifest torn", put("stream.json"), FileInvalid, {}, (("invalid", "stream.json"),), 1),
    Case(
        "end torn, and no head", each(put("stream.end"), delete("head.json")), FileInvalid, {},
        (NO_HEAD, ("invalid", "stream.end")), 2,
    ),
    Case(
        "mark of deleted chunks torn", each(put("retired.json"), delete(C1)), FileInvalid, {},
        (("invalid", "retired.json"), ("data-missing", C1)), 2,
    ),
    *(kind_case(kind, found, name)
      for name in (C1, S1, "stream.json", "head.json", "stream.end", "retired.json") for kind, found in KINDS),
]  # fmt: skip

by_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.what, marks=case.marks) for case in CASES])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stream(tmp_path_factory.mktemp("whole") / "s")


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "s"))


@by_case
def test_reader_and_data_set_raise_the_same_error(case: Case, place: Path) -> None:
    case.damage(place)
    caught = raised(case.error, lambda: StreamReader(place, max_wait=0).read(3))
    assert type(caught) is case.error
    assert str(place) in str(caught)
    assert {name: getattr(caught, name) for name in case.fields} == case.fields
    with pytest.raises(case.error) as again:
        dataset = LazyShardedDataset(place, dp_rank=0, dp_size=1, max_wait=0, bad_rows=BadRows("raise"))
        dataset[3]
    assert str(again.value) == str(caught)


@pytest.mark.few(13)
@by_case
def test_commands_tell_it(case: Case, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.damage(place)
    assert main(["verify", str(place), "--jobs", "1"]) == 5
    shown = capsys.readouterr()
    if case.verify is None:
        assert (shown.out, shown.err.count("\n")) == ("", 1)
    else:
        assert [(finding.kind, finding.file) for finding in verify(place).findings] == list(case.verify)
        assert (len(shown.out.splitlines()) - 1, shown.err) == (len(case.verify), "")
    code = main(["status", str(place), "--json"])
    shown = capsys.readouterr()
    if case.status is None:
        assert (code, shown.out, shown.err.count("\n")) == (5, "", 1)
    else:
        assert (code, shown.err, len(orjson.loads(shown.out)["problems"])) == (0, "", case.status)
    assert main(["inspect", str(place), "3"]) == case.inspect
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith(f"lazyshard: error: {place}")


def test_another_samples_per_chunk_is_refused_at_the_start(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for opened in (StreamReader, partial(LazyShardedDataset, dp_rank=0, dp_size=1)):
        caught = raised(errors.StreamMismatch, opened, place, samples_per_chunk=3)
        assert (caught.directory, caught.expected, caught.actual) == (str(place), "3", "2")
    assert main(["inspect", str(place), "--samples-per-chunk", "3"]) == 5


def test_file_with_a_hole_is_not_read_into_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(place / S1, 1 << 39)
    refusal_of(FileRefused, "4294967296", StreamReader(place, max_wait=0).read, 3)
    # Nor is a line without an end, in a foreign directory.
    monkeypatch.setattr("lazyshard.stream.chunk.MAX_ROW_BYTES", 1 << 20)
    others = foreign(place / "foreign", b'{"id":0}\n', end=True)
    os.truncate(others / C0, 1 << 39)
    raised(ChunkCorrupt, StreamReader, others, 1, max_wait=0)


@pytest.mark.parametrize(("kind", "found"), [one for one in KINDS if one[0] not in ("device", "socket")])
def test_what_is_no_cursor(kind: str, found: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cursor(place, "sft", consumed=4, chunks_before=2)
    replace_by(place / "cursors" / "sft.json", kind, place)
    path = place / "cursors" / "sft.json"
    caught = raised(FileRefused, read_cursor, place, "sft")
    assert (caught.file, caught.kind) == (str(path), found)
    _check_nothing_is_deleted(place, path, found, capsys)


def _torn(data: bytes) -> Iterator[tuple[bytes, str]]:
    yield b"", ""
    yield bytes(8), ""
    yield data.replace(b'"chunks_before":2', b'"chunks_before":9'), "9 chunks, but only 3"
    yield data.replace(b'"chunks_before":2', b'"chunks_before":-2'), "'chunks_before'"
    yield data.replace(b'"consumer":"sft"', b'"consumer":"dpo"'), "'consumer'"
    start = data.index(b'"stream_id":"') + len(b'"stream_id":"')
    yield data[:start] + b"0" * 32 + data[start + 32 :], "0" * 32


def test_cursor_that_cannot_be_believed_deletes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cursor(place, "sft", consumed=4, chunks_before=2)
    path = place / "cursors" / "sft.json"
    for data, told in _torn(path.read_bytes()):
        path.write_bytes(data)
        _check_nothing_is_deleted(place, path, told, capsys)


def _check_nothing_is_deleted(place: Path, path: Path, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    [consumer] = list_consumers(place, 3)
    assert (consumer.chunks_before, consumer.cursor) == (0, None)
    assert retire(place, consumer.chunks_before, 3) == 0
    assert main(["status", str(place), "--json"]) == 0
    [problem] = orjson.loads(capsys.readouterr().out)["problems"]
    for text in (consumer.problem or "", problem):
        assert f"{path}: " in text and told in text
    assert f"`lazyshard forget {place} sft`" in problem
