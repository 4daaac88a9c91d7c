"""A stream as a source: native and foreign, arrays, lengths, damage, one that is still produced, refusals."""

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard import ChunkWriter, StreamReader
from lazyshard.stream.listing import retire
from lazyshard_producer.cli import main
from lazyshard_producer.sources import stream as stream_source
from lazyshard_producer.sources.stream import StreamSource
from tests.cli.commands import contents
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import refused, run_arguments, seal
from tests.producer.commands import Fails, Running
from tests.producer.sources.reading import lines, open_kind, position_after, refusal, take
from tests.stream.damage import Damage, cut, delete, each, edit, flip, found, put, stream
from tests.stream.streams import add, foreign, head, produce, publish_rows, seal_rows
from tests.stream.streams import seal as read_seal

RECIPES = "tests.producer.recipes"


def row_lines(*groups: Sequence[int]) -> list[bytes]:
    return [b"".join(b'{"id":%d}\n' % number for number in group) for group in groups]


def chunks(directory: Path) -> list[bytes]:
    """The chunks' rows; every one of them is as its seal says."""
    assert not found(directory)
    return [path.read_bytes() for path in sorted(directory.glob("chunk_*.jsonl"))]


def publish(out: Path, sources: Sequence[Path], per_chunk: int, *more: object) -> int:
    return main(run_arguments(out, sources, per_chunk, *more))


def with_text(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"text": str(row["mel"].sum())}


@settings(max_examples=8, deadline=None)
@given(samples=st.integers(1, 40), old=st.integers(1, 12), new=st.integers(1, 12))
def test_same_rows_whatever_chunks(samples: int, old: int, new: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("streams")
    before = contents(produce(directory / "old", samples, old))
    assert publish(directory / "new", [directory / "old"], new) == 0
    groups = [range(start, min(start + new, samples)) for start in range(0, samples, new)]
    assert chunks(directory / "new") == row_lines(*groups)
    assert contents(directory / "old") == before
    before = contents(directory / "new")
    assert publish(directory / "new", [directory / "old"], new) == 0
    assert contents(directory / "new") == before


def test_bytes_of_the_rows_are_kept(tmp_path: Path) -> None:
    odd = (b'{ "a" : 1.50,\t"b":"\\u00fc"}\n', '{"a":"ü"}\n'.encode())
    seal_rows(stream(tmp_path / "old", 4), 0, *odd)
    assert publish(tmp_path / "new", [tmp_path / "old"], 3) == 0
    assert (tmp_path / "new" / "chunk_00000.jsonl").read_bytes() == b"".join(odd) + b'{"id":2}\n'


@pytest.mark.parametrize("more", [(), ("--shuffle", "2"), ("--where", f"{RECIPES}:even")], ids=" ".join)
def test_lengths_are_kept_where_all_rows_of_a_chunk_have_them(more: tuple[str, ...], tmp_path: Path) -> None:
    publish_rows(tmp_path / "old", 2, ({"id": number} for number in range(10)), [*range(10, 18), None, None])
    assert publish(tmp_path / "new", [tmp_path / "old"], 2, *more) == 0
    for chunk, data in enumerate(chunks(tmp_path / "new")):
        ids = [json.loads(line)["id"] for line in data.splitlines()]
        tokens = read_seal(tmp_path / "new", chunk).tokens
        assert (None if tokens is None else tokens.tolist()) == ([10 + one for one in ids] if max(ids) < 8 else None)
    if not more:
        assert publish(tmp_path / "packs", [tmp_path / "old"], 2, "--pack", 21, "--on-bad-row", "skip") == 0
        assert sorted(len(pack["pack"]) for pack in StreamReader(tmp_path / "packs")) == [1] * 6 + [2]


def mel(number: int) -> Any:
    return np.arange(number % 4, dtype=np.float16)


def with_arrays(directory: Path, samples: int = 9, **facts: Any) -> Path:
    rows = ({"id": number, "mel": mel(number), "none": np.zeros((0, 3))} for number in range(samples))
    return publish_rows(directory, 4, rows, range(samples), arrays=True, encoding=facts or None)


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ((), True),
        (("--shuffle", "3"), True),
        (("--where", f"{RECIPES}:even"), True),
        (("--transform", f"{__name__}:with_text"), False),
        (("--columns", "id,mel"), False),
    ],
)
def test_arrays_are_kept_and_given_to_functions(more: tuple[str, ...], kept: bool, tmp_path: Path) -> None:
    with_arrays(tmp_path / "old", kind="function", function="m:f")
    assert publish(tmp_path / "new", [tmp_path / "old"], 2, *more) == 0
    reader = StreamReader(tmp_path / "new")
    assert reader.arrays
    assert reader.encoding == ({"kind": "function", "function": "m:f"} if kept else None)
    read = sorted(reader, key=lambda row: row["id"])
    assert [row["id"] for row in read] == (list(range(9)) if "--where" not in more else [0, 2, 4, 6, 8])
    for row in read:
        assert row["mel"].dtype == np.float16 and row["mel"].tolist() == mel(row["id"]).tolist()
        assert ("text" in row) == ("--transform" in more)
        assert ("none" in row) == ("--columns" not in more)
    assert (read_seal(tmp_path / "new", 0).tokens is not None) == kept


@pytest.mark.parametrize("more", [(), ("--where", "builtins:bool")])
def test_arrays_beside_rows_that_have_none(more: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_bytes(b'{"id":100}\n{"$array":1}\n{"id":101}\n')
    out = tmp_path / "new"
    sources = [produce(tmp_path / "plain", 5), with_arrays(tmp_path / "old"), tmp_path / "file.jsonl"]
    assert publish(out, sources, 4, *more) == 3
    assert publish(out, sources, 4, "--on-bad-row", "quarantine", *more) == 0
    assert [entry["line"] for entry in refused(out)] == [2]
    read = {row["id"]: row for row in list(StreamReader(out))[5:]}
    assert read.keys() == {*range(9), 100, 101}
    assert read[7]["mel"].tolist() == mel(7).tolist()
    assert "mel" not in read[101]


def test_rows_encoded_in_two_ways_do_not_come_together(tmp_path: Path, fails: Fails) -> None:
    one, other = with_arrays(tmp_path / "one", kind="a"), with_arrays(tmp_path / "other", kind="b")
    plain = produce(tmp_path / "plain", 5)
    encodes = ("--encode", f"{RECIPES}:without_length")
    for sources, more in (([one, other], ()), ([one, plain], ()), ([plain, other], ()), ([one], encodes)):
        says = "already encoded" if more else "different encodings"
        fails(run_arguments(tmp_path / "new", sources, 4, *more), 2, says)
    assert not (tmp_path / "new").exists()


def test_foreign_directory(tmp_path: Path) -> None:
    """What our format does not hold is left out: a byte order mark, carriage returns, blank lines; bad rows too."""
    first = b'\xef\xbb\xbf\n \n {"id":0}\r\n\n{"id":1}'
    old = foreign(
        tmp_path / "old", first, b'{"id":2}\n{"id":3} \n\n', b'[1]\n{"id":4}\n', b'{"id":5}\n{"id":\n', end=True
    )
    before = contents(old)
    assert publish(tmp_path / "new", [old], 3, "--on-bad-row", "skip") == 0
    assert chunks(tmp_path / "new") == [b' {"id":0}\n{"id":1}\n{"id":2}\n', *row_lines([3, 4, 5])]
    assert contents(old) == before


def test_places_and_positions(tmp_path: Path) -> None:
    old = stream(tmp_path / "old")
    places = [rows.place(index) for _, rows, index in take(open_kind(StreamSource, old))]
    names = [(Path(place.file).name, place.line) for place in places]
    assert names == [(f"chunk_0000{row // 2}.jsonl", row % 2 + 1) for row in range(5)]
    assert publish(tmp_path / "new", [old], 3) == 0
    of_all = {"kind": "stream", "path": str(old), "xxh3": ""}
    of_all["stream_id"] = json.loads((old / "stream.json").read_bytes())["stream_id"]
    for chunk, sample in enumerate((3, 5)):
        (entry,) = seal(tmp_path / "new", chunk)["source"]["sources"]
        assert entry == of_all | {"sample": sample, "bytes": 9 * sample}


@pytest.mark.parametrize(
    ("damage", "bad", "reason"),
    [
        (flip("chunk_00001.jsonl", 3), [2], "damaged: "),
        (flip("chunk_00001.jsonl", 12), [3], "damaged: "),
        (cut("chunk_00001.jsonl", 3), [2, 3], "its chunk cannot be read: "),
        (put("chunk_00003.jsonl.completed", b"{}"), [6, 7], "its chunk cannot be read: "),
        (delete("chunk_00001.jsonl"), [2, 3], "its chunk cannot be read: "),
    ],
)
def test_damaged_rows_are_bad_rows(
    damage: Damage, bad: list[int], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_source, "GRACE_S", 0.0)
    old, new = stream(tmp_path / "old", 9), tmp_path / "new"
    damage(old)
    assert publish(new, [old], 1) == 3
    assert b"".join(chunks(new)) == row_lines(range(bad[0]))[0]
    assert publish(new, [old], 1, "--on-bad-row", "quarantine") == 0
    assert b"".join(chunks(new)) == row_lines([i for i in range(9) if i not in bad])[0]
    kept = [(entry["source"], entry["line"]) for entry in refused(new)]
    assert kept == [(f"{old}/chunk_{number // 2:05d}.jsonl", number % 2 + 1) for number in bad]
    assert all(entry["reason"].startswith(reason) for entry in refused(new))


def test_bad_arrays_and_long_rows_are_bad_rows(tmp_path: Path) -> None:
    old, long, new = with_arrays(tmp_path / "old"), tmp_path / "long", tmp_path / "new"
    flip("chunk_00000.arrays", (old / "chunk_00000.arrays").stat().st_size - 1)(old)
    publish_rows(long, 4, [{"id": 50, "mel": np.zeros(200)}], arrays=True)
    assert publish(new, [old, long], 4, "--on-bad-row", "quarantine", "--max-row-bytes", 1000) == 0
    assert [row["id"] for row in StreamReader(new)] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert [entry["reason"].split()[0] for entry in refused(new)] == ["damaged:", "longer"]


@pytest.mark.parametrize(
    ("ours", "missing"),
    [(True, "chunk_00001.jsonl"), (False, "chunk_00001.jsonl"), (False, "chunk_00001.jsonl.completed")],
)
def test_a_file_that_appears_late_is_waited_for(ours: bool, missing: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    stream(old, 6) if ours else foreign(old, *row_lines([0, 1], [2, 3], [4, 5]))
    (old / missing).rename(tmp_path / "away")
    source = open_kind(StreamSource, old)
    assert [len(source.read().lines) for _ in range(4)] == [2, 0, 0, 0]
    assert "chunk 1" in source.waits_for()
    (tmp_path / "away").rename(old / missing)
    (old / "stream.end").touch()
    source.end()
    assert lines(source) == row_lines([2], [3], [4], [5])


def test_stream_that_is_still_produced(nursery: Commands, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with ChunkWriter(old, 2) as writer, Running(nursery, *run_arguments(new, [old], 3)) as run:
        add(writer, 0, 4)
        run.wait_until(lambda: (new / "head.json").exists() and head(new).samples == 3)
        run.wait_until(lambda: head(new).state == "waiting")
        assert head(new).note.startswith(f"sample 4 of {old}: 4 samples are published")
        assert (run.end(signal.SIGUSR1)[0], head(new).ended) == (0, True)
        assert chunks(new) == row_lines([0, 1, 2], [3])
        # Looked at and not waited for, whether there is more.
        assert publish(new, [old], 3) == 0
        add(writer, 4, 6)
    assert publish(new, [old], 3) == 5


def test_the_streams_own_directory_is_refused(tmp_path: Path, fails: Fails) -> None:
    before = contents(stream(tmp_path / "old"))
    (tmp_path / "link").symlink_to("old")
    fails(run_arguments(tmp_path / "new", [tmp_path / "old", tmp_path / "old" / "chunk_00001.jsonl"], 2), 4, "/old")
    for command, target in (("run", "old"), ("run", "old/inner"), ("check", "link"), ("run", "link/inner")):
        fails([command, *run_arguments(tmp_path / target, [tmp_path / "old"], 2)[1:]], 4, "other than --out")
    assert contents(tmp_path / "old") == before
    assert {path.name for path in (tmp_path / "old").iterdir()} == set(before)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda old: delete("chunk_00000.jsonl.completed")(foreign(old, *row_lines([0, 1]))), "chunk_*.jsonl"),
        (lambda old: delete("stream.json")(stream(old)), ""),
        (lambda old: foreign(old, *row_lines([0, 1], [2], [3, 4])), ""),
        (lambda old: old.mkdir(), "chunk_*.jsonl"),
        (lambda old: (retire(stream(old, 6, end=False), 2, 3), produce(old, 7)), ""),
    ],
    ids=["no marker", "lost manifest", "other numbers of rows", "empty", "deleted"],
)
def test_no_readable_stream_is_refused(make: Callable[[Path], object], says: str, tmp_path: Path, fails: Fails) -> None:
    make(tmp_path / "old")
    fails(run_arguments(tmp_path / "new", [tmp_path / "old"], 2), 4, str(tmp_path / "old"), says)


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (stream, edit("stream.json", stream_id="0" * 32)),
        (stream, each(edit("head.json", chunks=1, samples=2), edit("stream.end", chunks=1, samples=2))),
        (
            lambda old: foreign(old, *row_lines([0, 1], [2, 3]), end=True),
            put("chunk_00001.jsonl", row_lines([7, 8])[0]),
        ),
    ],
    ids=["another stream", "fewer rows", "other rows"],
)
def test_another_stream_is_not_gone_on_with(made: Callable[[Path], Path], change: Damage, tmp_path: Path) -> None:
    old = made(tmp_path / "old")
    source = open_kind(StreamSource, old)
    position = json.loads(json.dumps(source.entry(position_after(source, take(source, 3)))))
    change(old)
    assert refusal(lambda: lines(open_kind(StreamSource, old, position))).file == str(old)
