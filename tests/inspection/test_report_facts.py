"""What is found for a report: chunks, course, packing, refused rows and how a stream is trained."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import ChunkWriter
from lazyshard.format import Cursor, PartState, ReadingMark, RunState
from lazyshard.format.dealt import DealtByCost
from lazyshard.inspection import report_chunks, report_refusals
from lazyshard.inspection.inspection import ShownChunk, describe_chunk
from lazyshard.inspection.report_chunks import ChunkPoint, Made, look_at_chunks, read_made
from lazyshard.inspection.report_course import (
    At,
    Dry,
    Pause,
    dry_points,
    mean_rate,
    pauses,
    published_bytes,
    published_rows,
    rates,
)
from lazyshard.inspection.report_facts import Asked, ReportFacts, gather
from lazyshard.inspection.report_packing import Packing, look_at_packing, pack_size, padding
from lazyshard.inspection.report_refusals import OTHERS, count_refusals, read_refusals
from lazyshard.inspection.report_trained import trained_points
from lazyshard.inspection.report_training import TrainingFacts, training_of
from lazyshard.inspection.row_facts import Lengths
from lazyshard.stream.consumers import Consumer
from lazyshard.stream.opening import open_now
from lazyshard.stream.retire import retire
from lazyshard.stream.stream import Stream
from tests.stream.lengths import sealed
from tests.stream.streams import foreign, produce

ID = "0" * 32


def counted(*lengths: int) -> Lengths:
    found = Lengths()
    found.add(np.array(lengths))
    return found


def points(*times: float, step: int = 1) -> list[ChunkPoint]:
    return [ChunkPoint(index * step, 10, 100, at) for index, at in enumerate(times)]


def looked(directory: Path, asked: Asked | None = None) -> ReportFacts:
    return gather(directory, None, asked or Asked(), 2e9, lambda phase, done, total: None)


def test_chunks_are_sampled_evenly_and_their_tokens_kept(tmp_path: Path) -> None:
    stream = open_now(sealed(tmp_path / "s", list(range(1, 41)), 4))
    steps: list[tuple[int, int]] = []
    found = look_at_chunks(stream, 0, 10, 4, lambda done, total: steps.append((done, total)))
    assert [point.chunk for point in found.points] == [0, 3, 6, 9]
    assert (found.looked_at, found.there, found.unread) == (4, 10, 0)
    assert found.kept.tolist() == [1, 2, 3, 4, 13, 14, 15, 16, 25, 26, 27, 28, 37, 38, 39, 40]
    assert (found.tokens.count, found.tokens.largest) == (16, 40)
    assert steps == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_tokens_of_large_chunks_are_kept_of_some_chunks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_chunks, "KEPT_ROWS", 6)
    stream = open_now(sealed(tmp_path / "s", list(range(1, 41)), 4))
    found = look_at_chunks(stream, 0, 10, 10, lambda done, total: None)
    assert found.kept.tolist() == [1, 2, 3, 4, 37, 38]
    assert found.tokens.count == 40


def test_chunks_that_cannot_be_read_are_counted_and_the_others_told(tmp_path: Path) -> None:
    directory = sealed(tmp_path / "s", [5] * 20, 4)
    (directory / "chunk_00001.jsonl.completed").write_text("{torn")
    os.remove(directory / "chunk_00003.jsonl.completed")
    found = look_at_chunks(open_now(directory), 0, 5, 200, lambda done, total: None)
    assert [point.chunk for point in found.points] == [0, 2, 4]
    assert found.unread == 2
    assert "chunk_00001.jsonl.completed" in found.reason


def test_of_a_stream_that_has_lost_its_chunks_the_looking_ends(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 2)
    found = look_at_chunks(open_now(directory), 1, 10_001, 1000, lambda done, total: None)
    assert (found.looked_at, found.unread) == (0, 1000)


def test_chunks_of_a_foreign_directory_tell_sizes_and_the_times_of_their_markers(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "s", b'{"a":1}\n{"a":2}\n', b'{"a":3}\n{"a":4}\n')
    os.utime(directory / "chunk_00001.jsonl.completed", (500.0, 500.0))
    found = look_at_chunks(open_now(directory, 2), 0, 2, 200, lambda done, total: None)
    assert found.points[1] == ChunkPoint(1, 2, 16, 500.0)
    assert found.tokens.count == 0


@pytest.mark.parametrize(
    ("source", "made"),
    [
        (None, Made()),
        ({"recipe": {"pack": 4096}}, Made("pack", 4096)),
        ({"recipe": {"split": {"size": 512}}}, Made("split", 512)),
        ({"recipe": {"pad": {"size": 512}, "shuffle": 100}}, Made("pad", 512, shuffled=True)),
        ({"recipe": {"pack": "much"}}, Made("pack", None)),
        ({"recipe": {"pack": True}}, Made("pack", None)),
        ({"recipe": [1]}, Made()),
    ],
)
def test_how_rows_were_made_is_read_from_the_source_of_a_seal(source: Any, made: Made) -> None:
    assert read_made(source) == made


def test_rows_are_counted_by_chunk_number_and_a_clock_set_back_is_evened_out() -> None:
    course = published_rows([ChunkPoint(0, 10, 1, 5.0), ChunkPoint(1, 10, 1, 3.0), ChunkPoint(2, 4, 1, 9.0)], 10)
    assert course == [At(5.0, 10), At(5.0, 20), At(9.0, 24)]


def test_bytes_between_chunks_that_were_not_looked_at_are_the_mean_of_both() -> None:
    assert published_bytes([ChunkPoint(0, 1, 100, 0.0), ChunkPoint(4, 1, 200, 8.0)]) == [At(0.0, 100), At(8.0, 750.0)]


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 1000)), min_size=1, max_size=50),
    most=st.integers(1, 80),
)
def test_rates_times_their_stretches_are_all_that_came(steps: list[tuple[float, int]], most: int) -> None:
    course = [At(0.0, 0)]
    for seconds, amount in steps:
        course.append(At(course[-1].time + seconds, course[-1].amount + amount))
    found = rates(course, most)
    assert len(found) == min(most, len(steps))
    stretch = course[-1].time / len(found)
    assert sum(one.amount * stretch for one in found) == pytest.approx(course[-1].amount)


def test_no_rate_of_one_moment() -> None:
    moment = [At(1.0, 5), At(1.0, 9)]
    assert (rates(moment, 10), mean_rate(moment), mean_rate(moment[:1])) == ([], None, None)


def test_a_pause_is_five_times_the_usual_and_ten_seconds() -> None:
    assert pauses(points(0, 1, 2, 11.9, 13)) == []
    assert pauses(points(0, 20, 40, 139, 159)) == []
    assert pauses(points(0, 1, 2, 12, 13, 53)) == [Pause(13, 53, 5), Pause(2, 12, 3)]
    assert pauses(points(0)) == []


def test_of_chunks_that_were_not_looked_at_the_usual_time_counts_for_each() -> None:
    # A second a chunk: a hundred chunks take a hundred seconds without any pause.
    assert pauses([ChunkPoint(0, 1, 1, 0), ChunkPoint(1, 1, 1, 1), ChunkPoint(101, 1, 1, 101)]) == []


def test_a_checkpoint_is_dry_where_less_than_a_step_was_left() -> None:
    published = [At(10.0, 8), At(20.0, 16), At(30.0, 24)]
    trained = [At(5.0, 0), At(11.0, 4), At(12.0, 5), At(25.0, 16), At(26.0, 20), At(40.0, 24)]
    assert dry_points("sft", trained, published, 4) == [Dry("sft", 12.0, 3), Dry("sft", 25.0, 0)]


def test_rows_are_packed_by_best_fit() -> None:
    found = look_at_packing(Made(), counted(6, 4, 2, 7, 3, 5), np.array([6, 4, 2, 7, 3, 5]), 10)
    assert found == Packing(None, 10, True, 6, 0.9, packs=3, padding=((1, 0.0), (2, 0.25), (4, 9 / 28)))
    assert found.saved == 0.5


def test_rows_longer_than_a_pack_are_counted_and_in_none() -> None:
    found = look_at_packing(Made(), counted(6, 4, 20, 0), np.array([6, 4, 20, 0]), 10)
    assert found is not None
    assert (found.rows, found.too_long, found.packs, found.filled, found.saved) == (3, 1, 1, 1.0, 0.5)


def test_without_a_size_the_power_of_two_that_holds_the_longest_row_is_tried() -> None:
    found = look_at_packing(Made(), counted(600, 300), np.array([600, 300]), None)
    assert found is not None
    assert (found.size, found.given, found.packs) == (1024, False, 1)
    assert [pack_size(longest) for longest in (0, 1, 512, 513, 10**9)] == [512, 512, 512, 1024, 1 << 20]


@pytest.mark.parametrize(
    ("made", "packed", "asked", "expected"),
    [
        (Made("pack", 100), False, None, ("pack", 100, 0.9)),
        (Made("pad", 120), False, 7, ("pad", 120, 0.75)),
        (Made(), True, 180, ("pack", 180, 0.5)),
        (Made(), True, None, None),
        (Made("pack"), False, None, None),
    ],
)
def test_made_sequences_are_as_full_as_their_tokens_say(
    made: Made, packed: bool, asked: int | None, expected: tuple[str, int, float] | None
) -> None:
    found = look_at_packing(made, counted(80, 100), np.array([80, 100]), asked, packed=packed)
    assert (None if found is None else (found.form, found.size, found.filled)) == expected


def test_nothing_is_told_of_packing_without_tokens() -> None:
    assert look_at_packing(Made(), Lengths(), np.zeros(0, np.int64), 10) is None
    assert look_at_packing(Made(), counted(0, 0), np.array([0, 0]), 10) is None


def test_padding_is_what_fills_rows_up_to_the_longest() -> None:
    assert padding(np.array([1, 3, 2, 2]), 2) == 0.2
    assert padding(np.array([1, 3, 2, 2]), 1) == 0.0
    assert padding(np.array([0, 0]), 2) == 0.0


def line(reason: str, number: int = 1, source: str = "a.jsonl", **values: Any) -> bytes:
    entry = {"source": source, "line": number, "byte": 0, "reason": reason, "row": "{", "at": 1.0}
    return json.dumps(entry | values).encode() + b"\n"


def test_reasons_that_differ_by_numbers_are_one() -> None:
    lines = [line("no answer", 3), line("byte 7: torn", 4), line("byte 19: torn", 9, "b.jsonl"), b"{", b"[]\n", b"x\n"]
    found = count_refusals(iter(lines), complete=True)
    assert [(one.reason, one.rows, one.sources, one.first.line) for one in found.reasons] == [
        ("byte 7: torn", 2, 2, 4),
        ("no answer", 1, 1, 3),
    ]
    assert (found.rows, found.unreadable, found.complete) == (3, 2, True)


def test_of_many_reasons_those_met_late_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_refusals, "MOST_TOLD_APART", 2)
    found = count_refusals((line(f"reason {name}") for name in "abcddd"), complete=True)
    assert [(one.reason, one.rows) for one in found.reasons] == [("reason a", 1), ("reason b", 1), (OTHERS, 4)]


def test_a_long_file_of_refused_rows_is_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_refusals, "_MOST_BYTES", 250)
    (tmp_path / "quarantine.jsonl").write_bytes(line("x") * 100)
    found = read_refusals(tmp_path)
    assert found is not None
    assert found.rows < 5
    assert not found.complete
    assert read_refusals(tmp_path / "elsewhere") is None


def test_a_row_that_is_no_text_has_no_beginning() -> None:
    entry = json.loads(line("not UTF-8"))
    del entry["row"]
    entry["row_base64"] = base64.b64encode(b"\xff").decode()
    found = count_refusals(iter([json.dumps(entry).encode() + b"\n"]), complete=True)
    assert found.reasons[0].first.row is None


def run(name: str, *, at: float, ranks: int = 2, per_step: int = 0, window: int = 0) -> Consumer:
    state = RunState(ID, 10, 10, window, 0, None, (PartState(ranks, 3, 5, draws_per_step=per_step),), 5 * ranks)
    cursor = Cursor(name, ID, 5 * ranks, 0, {}, at, state)
    return Consumer(name, cursor, None, None)


DEALT = DealtByCost(16, 2, "length", 1.0, 0.0)


def test_training_is_as_the_newest_consumer_does_it() -> None:
    found = training_of(
        [run("old", at=1.0, ranks=9), run("new", at=2.0, per_step=6, window=30)], DEALT, None, None, None, 10
    )
    assert found == TrainingFacts(2, 3, "consumer new", 6, 10, 3)
    assert found.step_samples == 12


def test_what_is_asked_for_counts_for_more() -> None:
    found = training_of([run("new", at=2.0, per_step=6)], None, 4, 1, 64, 10)
    assert (found.ranks, found.micro_batch_size, found.told_by, found.rank_step_samples) == (4, 1, "option", 16)


def test_without_consumers_training_is_as_the_stream_was_dealt_or_a_node() -> None:
    assert training_of([], DEALT, None, None, None, 10) == TrainingFacts(16, 2, "producer")
    assert training_of([], None, None, None, None, 10) == TrainingFacts(8, 1, "nobody")


def test_a_reading_mark_alone_tells_the_ranks_and_one_of_no_run_does_not_count() -> None:
    marks = [ReadingMark("sft", ID, ranks, 0, 0, 1.0) for ranks in (6, 2**31)]
    one, huge = (Consumer("sft", None, mark, None) for mark in marks)
    assert training_of([one], None, None, None, None, 10).ranks == 6
    assert training_of([huge], None, None, None, None, 10).told_by == "nobody"


def test_a_cursor_is_no_other_moment_than_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    state = RunState(ID, 10, 10, 0, 0, None, (PartState(2, 1, 5),), 10)
    (folder / "lazyshard.json").write_text(json.dumps({"state": state.to_dict(), "saved_at": 109.0}))
    assert trained_points(tmp_path, ID, [run("sft", at=110.0)], [folder], []) == {"sft": [At(109.0, 10)]}


def test_trained_samples_come_from_cursors_and_checkpoints(tmp_path: Path) -> None:
    for step, other in ((1, ID), (2, ID), (3, "1" * 32)):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        state = RunState(other, 10, 10, 0, 0, None, (PartState(2, 1, step),), 2 * step)
        values = {"state": state.to_dict(), "step": step, "saved_at": 100.0 + step}
        (folder / "lazyshard.json").write_text(json.dumps(values))
    (tmp_path / "none").mkdir()
    unread: list[str] = []
    found = trained_points(
        tmp_path, ID, [run("sft", at=110.0)], [tmp_path / "out", tmp_path / "none", tmp_path / "gone"], unread
    )
    assert found == {"sft": [At(101.0, 2), At(102.0, 4), At(110.0, 10)]}
    assert [text.replace(str(tmp_path), "") for text in unread] == [
        f"/out/checkpoint-3/lazyshard.json: is of stream {'1' * 32}, not of this one",
        "/none: holds no checkpoint with a lazyshard.json",
        "/gone: No such file or directory",
    ]


def test_a_whole_stream(tmp_path: Path) -> None:
    facts = looked(sealed(tmp_path / "s", [1, 2, 9, 4, 2, 2, 3, 4, 5, 5, 5, 5], 4), Asked(ranks=2, pack=12))
    assert facts.unread == []
    assert facts.packing is not None
    assert (facts.packing.packs, facts.packing.rows) == (4, 12)
    assert facts.balance is not None
    assert facts.balance.looked_at == 12
    assert facts.shuffle is not None
    assert [one.window for one in facts.shuffle.windows] == [0, 2, 8, "all"]
    assert [amount for _, amount in facts.rows] == [4, 8, 12]


def test_balance_takes_measured_lengths_and_those_of_a_field(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "s", 2)
    for length in (1, 2, 3, 4):
        writer.write({"n": length})
    writer.close()
    assert looked(tmp_path / "s", Asked(ranks=2)).balance is None
    found = looked(tmp_path / "s", Asked(ranks=2, length_field="n")).balance
    assert found is not None
    assert (found.looked_at, found.from_seals) == (4, 0)
    facts = looked(tmp_path / "s", Asked(ranks=2, length_field="m"))
    assert facts.balance is None
    assert "'m'" in facts.no_balance


def test_of_a_damaged_stream_the_rest_is_told(tmp_path: Path) -> None:
    directory = sealed(tmp_path / "s", [5, 9] * 16, 2)
    (directory / "chunk_00001.jsonl.completed").write_text("{torn")
    facts = looked(directory, Asked(ranks=1))
    assert facts.chunks.unread == 1
    assert facts.balance is not None
    # Pieces are of two chunks a rank; the one with the torn seal is left out.
    assert facts.balance.looked_at == 28
    assert any("chunk_00001" in text for text in facts.unread)


def test_of_a_stream_that_is_measured_in_part_that_part_is_told(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path / "s", 2)
    for number in range(16):
        writer.write({"id": number}, tokens=5 if number < 8 else None)
    writer.close()
    facts = looked(tmp_path / "s", Asked(ranks=1))
    assert facts.balance is not None
    assert (facts.balance.looked_at, facts.unread) == (8, [])


def test_of_a_stream_whose_manifest_is_torn_its_state_is_told(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 4)
    (directory / "stream.json").write_text("{")
    facts = looked(directory)
    assert facts.outlook.survey.census.chunks == 2
    assert (facts.chunks.there, facts.shuffle, facts.balance) == (0, None, None)
    assert any("stream.json" in text for text in facts.unread)


def test_deleted_chunks_are_not_looked_at(tmp_path: Path) -> None:
    directory = sealed(tmp_path / "s", [5] * 20, 4, end=False)
    retire(directory, 3, 5)
    facts = looked(directory, Asked(ranks=1))
    assert [point.chunk for point in facts.chunks.points] == [3, 4]
    assert facts.chunks.unread == 0
    assert [amount for _, amount in facts.rows] == [16, 20]


def test_chunks_that_are_deleted_meanwhile_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = sealed(tmp_path / "s", [5] * 20, 4, end=False)

    def deleted(stream: Stream, number: int) -> ShownChunk:
        retire(directory, 3, 5)
        return describe_chunk(stream, number)

    monkeypatch.setattr(report_chunks, "describe_chunk", deleted)
    facts = looked(directory, Asked(ranks=1))
    assert [point.chunk for point in facts.chunks.points] == [3, 4]
    assert (facts.chunks.there, facts.chunks.unread, facts.unread) == (2, 0, [])


def test_an_empty_stream_is_no_error(tmp_path: Path) -> None:
    facts = looked(produce(tmp_path / "s", 0, end=False))
    assert (facts.chunks.there, facts.balance, facts.shuffle, facts.packing, facts.rows) == (0, None, None, None, [])
    assert facts.unread == []
