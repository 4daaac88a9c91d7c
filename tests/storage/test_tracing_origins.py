"""From a row back to its line: on streams that the producer has made."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lazyshard.errors import StateMismatch
from lazyshard.storage.opening import open_now
from lazyshard.storage.retire import retire
from lazyshard.storage.tracing_origins import Origin, Origins
from tests.producer.commands import run
from tests.storage.streams import produce

A = [f'{{"a": {number}}}\n' for number in range(7)]
B = [f'  {{"b": {number}}} \r\n' for number in range(6)]


def produced(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: object) -> Origins:
    """A stream of a.jsonl and b.jsonl, 13 rows in chunks of 4; the folder is then the current one."""
    (folder / "a.jsonl").write_text("".join([*A[:2], "\n", *A[2:]]), encoding="utf-8")
    (folder / "b.jsonl").write_bytes("".join(B).encode())
    sources = more or ("--source", "a.jsonl", "b.jsonl")
    done = run("run", *sources, "--out", "stream", "--samples-per-chunk", 4, cwd=folder)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(folder)
    return Origins(folder / "stream", range(4))


def told(origins: Origins, samples: int = 13) -> list[str]:
    return [" or ".join(map(str, origins.of(*divmod(sample, 4)))) for sample in range(samples)]


IN_ORDER = [
    *("a.jsonl:1", "a.jsonl:2", "a.jsonl:4", "a.jsonl:5"),
    *("a.jsonl:6", "a.jsonl:7", "a.jsonl:8", "b.jsonl:1"),
    *("b.jsonl:2", "b.jsonl:3", "b.jsonl:4", "b.jsonl:5"),
    "b.jsonl:6",
]


def test_the_line_of_every_row_of_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(produced(tmp_path, monkeypatch)) == IN_ORDER


def test_files_mixed_by_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = ("--source", "a.jsonl", "--weight", 1, "--source", "b.jsonl", "--weight", 1)
    found = told(produced(tmp_path, monkeypatch, *mixed))
    assert found[:4] == ["a.jsonl:1", "b.jsonl:1", "a.jsonl:2", "b.jsonl:2"]
    assert sorted(found) == sorted(IN_ORDER)


@pytest.mark.parametrize("block", [4, 6, 100])
def test_rows_shuffled_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    shuffled = ("--source", "a.jsonl", "b.jsonl", "--shuffle", block)
    origins = produced(tmp_path, monkeypatch, *shuffled)
    reader = open_now(tmp_path / "stream")
    lines = {"a": (tmp_path / "a.jsonl").read_text().splitlines(), "b": [line.strip() for line in B]}
    for sample, place in enumerate(told(origins)):
        name, number = place.split(".jsonl:")
        assert lines[name][int(number) - 1] == reader.open_chunk(sample // 4).line(sample % 4).decode().strip()
    # The first chunk alone ends within a block, unless that has its very size: what was read for it cannot be told yet.
    (of_first,) = {len(Origins(tmp_path / "stream", range(1)).of(0, row)) for row in range(4)}
    assert of_first == (1 if block == 4 else 0)


def test_lines_that_are_alike_are_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "A", ["{}\n", '{"a": 1}\n', "{}\n"])
    assert told(produced(tmp_path, monkeypatch), 3) == ["a.jsonl:1 or a.jsonl:4", "a.jsonl:2", "a.jsonl:1 or a.jsonl:4"]


def test_what_a_chunk_was_made_of_where_no_line_equals_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = produced(tmp_path, monkeypatch)
    (tmp_path / "b.jsonl").write_bytes("".join(B).replace("3", "8").encode())
    assert origins.of(2, 1) == (Origin("b.jsonl", (3,), (2, 6)),)
    assert origins.of(2, 2) == (Origin("b.jsonl", (), (2, 6), "no line there equals the row"),)
    (tmp_path / "b.jsonl").unlink()
    why = "the file cannot be read: No such file or directory"
    # Of a chunk that two files went into: either, as long as the row is in none of them.
    origins = Origins(tmp_path / "stream", range(4))
    assert told(origins)[6:9] == [
        "a.jsonl:8",
        f"a.jsonl, lines 6 to 8 (no line there equals the row) or b.jsonl, line 1 ({why})",
        f"b.jsonl, lines 2 to 5 ({why})",
    ]


def test_compressed_files_tell_the_lines_that_come_into_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(f'{{"a":{n}}}\n' for n in range(13)).encode()))
    found = told(produced(tmp_path, monkeypatch, "--source", "a.jsonl.gz"))
    assert found[0] == "a.jsonl.gz, lines 1 to 4 (the file is compressed)"
    assert found[12] == "a.jsonl.gz, line 13 (the file is compressed)"


def test_sources_without_lines_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users.py").write_text("def rows(at):\n for n in range(13):\n  yield {'id': n}, n\n")
    found = told(produced(tmp_path, monkeypatch, "--source", "python:users:rows"))
    assert set(found) == {"python:users:rows (a source of kind python has no lines)"}


def test_after_deletion_nothing_is_told_of_the_first_chunk_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produced(tmp_path, monkeypatch)
    retire(tmp_path / "stream", 1, 4)
    origins = Origins(tmp_path / "stream", range(1, 4))
    assert (origins.of(0, 0), origins.of(1, 0)) == ((), ())
    assert str(origins.of(2, 0)[0]) == "b.jsonl:2"


def test_a_stream_of_another_program_is_refused(tmp_path: Path) -> None:
    produce(tmp_path / "plain", 4)
    with pytest.raises(
        StateMismatch, match="the seal of chunk 0 does not say which sources it was read from; leave out"
    ):
        Origins(tmp_path / "plain", range(2)).of(0, 0)
