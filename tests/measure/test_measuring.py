"""Which chunks are measured, what is kept, and what stops it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import ChunkCorrupt, MeasureRefused, TokensInvalid
from lazyshard.format.names import tokens_name
from lazyshard.measure import Measure, Measured, measure_stream
from lazyshard.measure.measures import checked_length, tokenizer_digest
from lazyshard.stream.retire import retire
from lazyshard.stream.token_lengths import chunk_tokens
from tests.stream.damage import Damage, flip
from tests.stream.lengths import HOSTILE, lengths_of, sealed
from tests.stream.streams import foreign, names, produce


def function(name: str) -> Measure:
    return Measure("function", f"tests.measure.measures:{name}")


def measure(directory: Path, name: str = "tenfold", **options: Any) -> Measured:
    return measure_stream(directory, function(name), **options)


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Chunks of 2, 2 and 1 rows."""
    return produce(tmp_path / "s", 5)


def test_every_row_is_measured_once(stream: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[str, int, int]] = []
    done = measure(stream, report=lambda *values: told.append(values))
    assert (done.measured, done.rows, done.tokens, done.known, done.ended) == (3, 5, 100, 0, True)
    assert lengths_of(stream) == [0, 10, 20, 30, 40]
    assert told[-1] == ("measuring", 3, 3)
    text = chunk_tokens(stream, 0).measure
    assert text == done.text
    assert text is not None and text.startswith("function tests.measure.measures:tenfold, source ")
    # What a function prints is for the user, and no answer.
    assert "measuring 4\n" in capfd.readouterr().err
    before = {name: (stream / name).stat().st_mtime_ns for name in names(stream)}
    again = measure(stream)
    assert (again.measured, again.known) == (0, 3)
    assert {name: (stream / name).stat().st_mtime_ns for name in before if name != ".measure"} == {
        name: at for name, at in before.items() if name != ".measure"
    }


def test_pieces_of_several_processes_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.measure.measuring.PIECE_ROWS", 3)
    directory = produce(tmp_path / "s", 50, 20)
    assert measure(directory, workers=3).measured == 3
    assert lengths_of(directory) == [10 * row for row in range(50)]


def test_live_stream_is_measured_as_far_as_it_is_published(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4, end=False)
    done = measure(directory)
    assert (done.measured, done.ended) == (2, False)
    produce(directory, 6)
    done = measure(directory)
    assert (done.known, done.measured, done.ended) == (2, 1, True)
    assert lengths_of(directory) == [0, 10, 20, 30, 40, 50]


def test_sealed_lengths_are_known_unless_they_are_to_be_replaced(tmp_path: Path) -> None:
    directory = sealed(tmp_path / "s", [1, 2, 3])
    # No process is started: a function that is not there is not missed.
    assert measure(directory, "not_there").known == 2
    assert measure(directory, replace=True).measured == 2
    assert lengths_of(directory) == [0, 10, 20]
    assert measure(directory, replace=True).known == 2


def test_another_measure_is_refused_unless_it_is_to_replace(stream: Path) -> None:
    measure(stream)
    with pytest.raises(MeasureRefused, match=r"chunk 2 was measured by function .*:tenfold.*:another.*--replace"):
        measure(stream, "another")
    assert measure(stream, "another", replace=True).measured == 3
    assert lengths_of(stream) == [1, 2, 3, 4, 5]


def test_row_of_which_no_sample_is_made_counts_0(stream: Path) -> None:
    done = measure(stream, "odd_ones")
    assert (done.dropped, done.bad) == (3, 0)
    assert lengths_of(stream) == [0, 1, 0, 3, 0]


def test_row_that_cannot_be_measured_is_named_and_what_came_before_stays(stream: Path) -> None:
    with pytest.raises(MeasureRefused) as caught:
        measure(stream, "fails_at_3")
    assert str(caught.value) == (
        f"{stream}/chunk_00001.jsonl: row 1 (byte 9) cannot be measured: ValueError: no such \\udc80 image; mend the "
        f"measure, or have such rows count 0 with --on-bad-row zero"
    )
    assert (caught.value.chunk, caught.value.row) == (1, 1)
    assert [name for name in names(stream) if name.endswith(".tokens")] == [tokens_name(0)]
    done = measure(stream, "fails_at_3", zero=True)
    assert (done.known, done.measured, done.bad) == (1, 2, 1)
    assert done.why == f"{stream}/chunk_00001.jsonl: row 1 (byte 9): ValueError: no such \\udc80 image"
    assert lengths_of(stream) == [1, 1, 1, 0, 1]


def test_rows_that_were_counted_as_0_are_looked_at_again_by_who_does_not_want_that(stream: Path) -> None:
    measure(stream, "fails_at_3", zero=True)
    # Whoever does, has nothing to do.
    assert (measure(stream, "fails_at_3", zero=True).measured, measure(stream, "fails_at_3", zero=True).known) == (0, 3)
    with pytest.raises(MeasureRefused, match=r"row 1 .* cannot be measured: ValueError: no such"):
        measure(stream, "fails_at_3")
    assert lengths_of(stream) == [1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("value", "shown"), [(-1, "-1"), (1.5, "1.5"), (None, "a NoneType"), (True, "True"), (2**32, "4294967296")]
)
def test_what_is_no_length_is_refused(value: object, shown: str) -> None:
    with pytest.raises(ValueError, match=f"a length is an integer from 0 to 4294967295, the function returned {shown}"):
        checked_length(value)


def test_damaged_row_is_an_error_or_counts_0(stream: Path) -> None:
    flip("chunk_00001.jsonl", 12)(stream)
    with pytest.raises(ChunkCorrupt, match=r"chunk_00001\.jsonl") as caught:
        measure(stream)
    assert (caught.value.chunk, caught.value.row) == (1, 1)
    assert measure(stream, zero=True).bad == 1
    assert lengths_of(stream) == [0, 10, 20, 0, 40]


@pytest.mark.parametrize("damage", HOSTILE)
def test_file_that_cannot_be_used_is_made_anew(damage: str, stream: Path) -> None:
    change: Damage = HOSTILE[damage]
    measure(stream)
    change(stream)
    with pytest.raises(TokensInvalid):
        lengths_of(stream)
    done = measure(stream)
    assert (done.known, done.measured) == (2, 1)
    assert lengths_of(stream) == [0, 10, 20, 30, 40]


def test_measure_that_cannot_be_used_is_named(stream: Path, tmp_path: Path) -> None:
    with pytest.raises(MeasureRefused, match=r"--function tests.measure.measures:tenfol: .*is tenfold meant\?"):
        measure(stream, "tenfol")
    with pytest.raises(MeasureRefused, match="--function nothing:at_all: importing nothing raised ModuleNotFoundError"):
        measure_stream(stream, Measure("function", "nothing:at_all"))
    with pytest.raises(MeasureRefused, match="there is no tokenizer in it"):
        measure_stream(stream, Measure("tokenizer", str(tmp_path)))
    assert [name for name in names(stream) if name.endswith(".tokens")] == []


def test_process_that_is_killed_is_told_of(stream: Path) -> None:
    with pytest.raises(ChildProcessError, match="was killed by signal 9; what is measured stays"):
        measure(stream, "killed_at_3")
    assert [name for name in names(stream) if name.endswith(".tokens")] == [tokens_name(0)]


def test_directory_that_another_program_fills_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasureRefused, match=r"another program fills it.*`lazyshard adopt`"):
        measure(foreign(tmp_path / "s", b'{"id":0}\n', end=True))


def test_chunks_that_were_deleted_are_passed_over(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 10, end=False)
    retire(directory, 3, 5)
    done = measure(directory)
    assert (done.chunks, done.measured, done.samples) == (2, 2, 4)


def test_tokenizer_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "weights.safetensors").write_bytes(b"1")
    first = tokenizer_digest(str(tmp_path))
    (tmp_path / "weights.safetensors").write_bytes(b"2")
    assert tokenizer_digest(str(tmp_path)) == first
    (tmp_path / "tokenizer_config.json").write_bytes(b"{}")
    assert tokenizer_digest(str(tmp_path)) != first


@pytest.mark.parametrize("options", [{"kind": "magic", "name": "x"}, {"kind": "function", "name": ""}])
def test_impossible_measure_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a measure is one of|has a name"):
        Measure(**options)
