"""Tracing: what a step took, and what became of a sample, as the oracle's lists have it; states that are saved."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import StateInvalid, StateMismatch, VersionUnsupported
from lazyshard.format.state import Cursor, RunState
from lazyshard.inspection import auditing_counts as counting
from lazyshard.inspection.auditing_counts import Counts, Ranges, count_epochs, ranges_where, shared_draws
from lazyshard.inspection.tracing import Became, Fate, StreamFacts, Stretch, Tracing
from lazyshard.inspection.tracing_states import SavedState, checkpoint_files, read_state, state_of_cursor
from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Rules
from tests.plan import oracle
from tests.plan.cases import PROPERTY
from tests.stream.streams import raised, refusal_of

ID = "0" * 32


def run_state(*parts: Part, per_chunk: int = 3, unit: int = 3, window: int = 0, seed: int = 0) -> RunState:
    consumed = sum(part.dp * part.draws for part in parts if part.trained)
    return RunState(ID, per_chunk, unit, window, seed, None, parts, consumed)


def facts(samples: int, ended: bool = True, per_chunk: int = 3, retired: int = 0) -> StreamFacts:
    return StreamFacts(ID, per_chunk, -(-samples // per_chunk), samples, ended, retired)


def traced(state: RunState, known: StreamFacts, step: int | None = None) -> Tracing:
    return Tracing(SavedState(state, Path("state"), step=step), known, "stream")


@st.composite
def states(draw: st.DrawFn) -> tuple[RunState, int]:
    """Up to four parts with steps of one or two micro batches; a part in three is skipped."""
    unit = draw(st.integers(1, 4))
    total, parts, first = draw(st.integers(30, 70)), [], 0
    for number in range(draw(st.integers(1, 4))):
        dp, batch, accumulation = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
        draws = draw(st.integers(0, total // dp // 4)) * batch * accumulation
        skip: tuple[tuple[int, int], ...] = ()
        if draw(st.booleans()):
            start = draw(st.integers(0, total - 1))
            skip = ((start, start + draw(st.integers(1, 4))),)
        trained = number == 0 or draw(st.integers(0, 2)) > 0
        parts.append(Part(dp, batch, draws, None, trained, skip, first, batch * accumulation))
        first += draws // (batch * accumulation) if trained else 0
    window, seed = unit * draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return run_state(*parts, unit=unit, window=window, seed=seed), total


def lists(state: RunState, total: int) -> list[list[list[tuple[int, int]]]]:
    parts = [(part.dp, part.batch_size, part.draws, part.skip) for part in state.parts]
    return oracle.course_of_draws(state.unit, state.window, state.seed, parts, total)


@PROPERTY
@given(states())
def test_steps_take_what_the_oracle_draws(case: tuple[RunState, int]) -> None:
    state, total = case
    tracing = traced(state, facts(total))
    assert tracing.steps.breaks() == []
    for number, (part, lanes) in enumerate(zip(state.parts, lists(state, total), strict=True)):
        each = part.draws_per_step
        for step in range(part.draws // each if part.trained else 0):
            expected = [
                Fate(*lane[at], "trained", number, part.first_step + step, rank, at)
                for rank, lane in enumerate(lanes)
                for at in range(step * each, (step + 1) * each)
            ]
            assert list(tracing.at_step(part.first_step + step)) == expected
            assert list(tracing.at_step(part.first_step + step, part.dp - 1)) == expected[-each:]


@PROPERTY
@given(states())
def test_fates_are_what_the_oracle_draws_and_all_else_has_a_reason(case: tuple[RunState, int]) -> None:
    state, total = case
    tracing = traced(state, facts(total))
    expected: dict[tuple[int, int], Fate] = {}
    for number, (part, lanes) in enumerate(zip(state.parts, lists(state, total), strict=True)):
        for rank, lane in enumerate(lanes):
            for at, (epoch, sample) in enumerate(lane):
                step = part.first_step + at // part.draws_per_step if part.trained else None
                became: Became = "trained" if part.trained else "skipped"
                expected[epoch, sample] = Fate(epoch, sample, became, number, step, rank, at)
    for sample in range(total):
        fates = list(tracing.fates(sample))
        assert [fate.epoch for fate in fates] == list(tracing.epochs)
        for fate in fates:
            drawn = expected.get((fate.epoch, sample))
            if drawn is not None:
                assert fate == drawn
            else:
                assert fate.became in ("to come", "left over", "skipped")
                assert fate.became != "to come" or fate.epoch == tracing.epochs[-1]
    drawn_by = [fate for sample in range(total) for fate in tracing.fates(sample) if fate.rank is not None]
    assert len(expected) == sum(fate.became != "to come" for fate in drawn_by)


TWO_PARTS = run_state(Part(2, 1, 4, draws_per_step=2), Part(3, 1, 2, first_step=2, draws_per_step=1))
"""Part 0: [0, 1, 2, 6], [3, 4, 5, 9]; part 1: [7, 8, ...], [10, 15, ...], [11, 18, ...]."""


def test_left_out_skipped_and_left_over_are_told_apart() -> None:
    state = run_state(
        Part(2, 2, 2, draws_per_step=2),
        Part(2, 2, 2, trained=False, first_step=1, draws_per_step=2),
        Part(2, 2, 6, skip=((8, 9),), first_step=1, draws_per_step=2),
    )
    tracing = traced(state, facts(24))
    became = {sample: next(iter(tracing.fates(sample))) for sample in range(24)}  # 8 is left out
    assert [s for s, fate in became.items() if fate.became == "skipped"] == [2, 5, 6, 8, 9]
    assert became[2] == Fate(0, 2, "skipped", 1, None, 0, 0)
    assert became[8] == Fate(0, 8, "skipped", 2)
    assert [s for s, fate in became.items() if fate.became == "left over"] == [19, 20, 23]


def test_a_live_stream_tells_what_is_certain() -> None:
    tracing = traced(TWO_PARTS, facts(21, ended=False))
    assert tracing.total is None
    assert list(tracing.fates(20)) == [Fate(0, 20, "to come", 1, 5, 2, 3)]
    assert list(tracing.fates(21)) == [Fate(0, 21, "not published")]
    # Published, but of a stripe that is not: if the stream ends now, another rank may draw it.
    assert list(traced(TWO_PARTS, facts(24, ended=False)).fates(23)) == [Fate(0, 23, "to come")]
    refusal_of(StateMismatch, "30 samples", lambda: list(tracing.at_step(7)))
    limited = traced(replace(TWO_PARTS, max_total_samples=30), facts(40, ended=False))
    assert (limited.total, list(limited.fates(30))) == (30, [Fate(0, 30, "beyond the end")])


# An epoch that is begun anew cuts the one before short; of 13 samples 2 ranks leave one over.
ANEW = run_state(Part(2, 1, 3, draws_per_step=1), Part(2, 1, 2, 1, first_step=3, draws_per_step=1))
OVER = run_state(Part(2, 1, 8, draws_per_step=1), Part(2, 1, 1, skip=((12, 13),), first_step=8, draws_per_step=1))


@pytest.mark.parametrize(
    ("state", "samples", "sample", "fates"),
    [
        *((ANEW, 12, 0, ["trained", "trained"]), (ANEW, 12, 7, ["cut short", "to come"])),
        (OVER, 13, 12, ["left over", "skipped"]),
    ],
)
def test_fates_in_two_epochs(state: RunState, samples: int, sample: int, fates: list[str]) -> None:
    found = traced(state, facts(samples)).fates(sample)
    assert [(fate.epoch, fate.became) for fate in found] == list(enumerate(fates))


def test_steps_that_end_with_epochs_are_known_by_the_number_that_the_file_says_and_others_are_not() -> None:
    """12 samples, 2 ranks: epochs of 6 positions, steps of 4 and 2."""
    state = run_state(Part(2, 1, 12, draws_per_step=4))
    even, cut = traced(state, facts(12), step=3), traced(state, facts(12), step=4)
    assert [(even.place(2).start, even.place(2).stop), (cut.place(1).start, cut.place(1).stop)] == [(8, 12), (4, 6)]
    assert cut.steps.trained == 4
    blind = traced(run_state(Part(2, 1, 4), Part(3, 1, 2, first_step=2, draws_per_step=1)), facts(60))
    assert [drawn.sample for drawn in blind.at_step(2)] == [7, 10, 11]
    refusal_of(StateMismatch, "step 2", blind.place, 1)
    assert next(iter(blind.fates(5))) == Fate(0, 5, "trained", 0, None, 1, 2)


@pytest.mark.parametrize(
    ("change", "known"),
    [({"stream_id": "1" * 32}, facts(60)), ({"samples_per_chunk": 4}, facts(60)), ({}, facts(15, ended=False))],
)
def test_a_state_that_does_not_fit_the_stream_is_refused(change: Any, known: StreamFacts) -> None:
    raised(StateMismatch, lambda: traced(replace(TWO_PARTS, **change), known))


STATE = run_state(Part(2, 1, 6, draws_per_step=2))

FORMAT_1 = {"format": 1, "stream": ID, "samples_per_chunk": 3, "consumed": 12, "step": 3, "dp_size": 2, "batch_size": 1}
FORMAT_1 |= {"layout": "strided", "window": 2, "seed": 7, "consumer": "sft", "saved_at": 5.0}


def save(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lazyshard.json").write_text(json.dumps(values))
    return folder


def test_a_checkpoint_tells_its_step_and_consumer(tmp_path: Path) -> None:
    values = {"step": 3, "consumed": 12, "consumer": "sft", "saved_at": 5, "state": STATE.to_dict()}
    folder = save(tmp_path / "checkpoint-3", values)
    for path in (folder, folder / "lazyshard.json"):
        found = read_state(path)
        assert (found.state, found.step, found.consumer, found.saved_at) == (STATE, 3, "sft", 5.0)
        assert (found.folder_step, found.file) == (3, folder / "lazyshard.json")
    assert read_state(save(tmp_path, {"data": STATE.to_dict(), "step": 3})).state == STATE  # Under `data`
    alone = tmp_path / "state.json"
    alone.write_text(json.dumps(STATE.to_dict()))
    found = read_state(alone)
    assert (found.state, found.step, found.consumer, found.folder_step) == (STATE, None, None, None)
    assert found.saved_at == alone.stat().st_mtime
    of_cursor = state_of_cursor(tmp_path, Cursor("sft", ID, 12, 0, {}, 5.0, STATE))  # That of a cursor
    assert of_cursor is not None
    assert (of_cursor.state, of_cursor.consumer, of_cursor.file) == (STATE, "sft", tmp_path / "cursors" / "sft.json")
    assert state_of_cursor(tmp_path, Cursor("sft", ID, 12, 0, {}, 5.0)) is None


def test_the_state_of_format_1_follows_from_its_numbers_and_a_later_format_is_refused(tmp_path: Path) -> None:
    state = read_state(save(tmp_path, FORMAT_1)).state
    assert state == run_state(Part(2, 1, 6, draws_per_step=2), window=6, seed=7)
    save(tmp_path, FORMAT_1 | {"step": 4})  # One at an epoch's end was shorter, so steps are not even
    assert read_state(tmp_path).state.parts[0].draws_per_step == 0
    save(tmp_path, FORMAT_1 | {"stream": "first-row-0123", "step": 0, "consumed": 0})
    assert read_state(tmp_path).state.stream_id is None
    raised(VersionUnsupported, lambda: read_state(save(tmp_path, {"state": STATE.to_dict() | {"format": 2}})))


@pytest.mark.parametrize(
    ("content", "field", "actual"),
    [
        ({"state": STATE.to_dict(), "consumed": 11}, "consumed", None),  # The field is told; of no JSON what it is
        ({"state": STATE.to_dict() | {"consumed": 11}}, "state.consumed", None),
        ({"state": STATE.to_dict(), "layout": "block"}, "layout", None),
        ({"state": None, "layout": "grouped"}, "layout", None),
        ({"step": 3, "model": 1}, "state", None),
        ({}, "state", None),
        (FORMAT_1 | {"consumed": 11}, None, None),
        (FORMAT_1 | {"seed": None}, None, None),
        (b'{"state": {"form', None, "16 bytes that are torn or not JSON (unexpected"),
        (b"[]", None, "list"),
        (None, None, None),
        (b"PK\x03\x04rest", None, "a file of torch.save"),  # Of torch.save, new and old
        (b"\x80\x02}q\x00.", None, "a file of torch.save"),
    ],
)
def test_files_without_a_state_are_refused(
    tmp_path: Path, content: dict[str, Any] | bytes | None, field: str | None, actual: str | None
) -> None:
    file = tmp_path / "lazyshard.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    refused = raised(StateInvalid, read_state, tmp_path)
    assert (refused.file, refused.field) == (str(file), field)
    assert isinstance(content, dict) or (refused.actual or "").startswith(actual or "")


def test_checkpoints_are_found_in_a_run_and_in_its_versions(tmp_path: Path) -> None:
    found = ("checkpoint-10", "checkpoint-9", "v0-20251121-101500/checkpoint-3")
    for name in (*found, ".hidden/checkpoint-1", "a/b/checkpoint-2"):
        save(tmp_path / name, {})
    (tmp_path / "checkpoint-11").mkdir()
    names = [str(file.parent.relative_to(tmp_path)) for file in checkpoint_files(tmp_path)]
    assert names == ["checkpoint-9", "checkpoint-10", "v0-20251121-101500/checkpoint-3"]
    file = tmp_path / "checkpoint-9" / "lazyshard.json"
    assert checkpoint_files(file.parent) == checkpoint_files(file) == [file]


@PROPERTY
@given(states())
def test_counts_are_what_the_oracle_draws(case: tuple[RunState, int]) -> None:
    state, total = case
    tracing = traced(state, facts(total))
    drawn: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for part, lanes in zip(state.parts, lists(state, total), strict=True):
        drawn[part.trained] += [draw for lane in lanes for draw in lane]
    audits = count_epochs(tracing)
    assert [one.epoch for one in audits] == list(tracing.epochs)
    for one in audits:
        assert one.proven
        trained = [sample for epoch, sample in drawn[True] if epoch == one.epoch]
        assert one.trained == len(trained)
        named = {kind: samples_of(getattr(one, kind)) for kind in ("to_come", "left_over", "skipped")}
        assert sorted(sum(named.values(), trained)) == list(range(total))
        assert {sample for epoch, sample in drawn[False] if epoch == one.epoch} <= set(named["skipped"])
        assert not named["to_come"] or one.epoch == tracing.epochs[-1]
        for kind, samples in named.items():  # The same as of a single sample: the first and the last of each kind
            for sample in samples[:1] + samples[-1:]:
                (became,) = [fate.became for fate in tracing.fates(sample) if fate.epoch == one.epoch]
                assert became == kind.replace("_", " ")


@PROPERTY
@given(states(), st.integers(0, 30))
def test_what_is_counted_live_is_what_is_counted_after_the_end(case: tuple[RunState, int], more: int) -> None:
    state, total = case
    ended = traced(state, facts(total))
    if ended.epochs != range(1):
        return
    course = ended.course
    needed = max([course.until(n).needed(one.draws - 1) for n, one in enumerate(state.parts) if one.draws], default=0)
    [live] = count_epochs(traced(state, facts(needed + more, ended=False)))
    [whole] = count_epochs(ended)
    assert live.proven
    assert live.trained == whole.trained
    assert live.left_over == Ranges()


def samples_of(found: Ranges) -> list[int]:
    samples = [sample for start, stop in found.ranges for sample in range(start, stop)]
    assert len(samples) == found.samples
    return samples


def test_an_epoch_that_was_cut_short_passes_samples_over() -> None:
    first, second = count_epochs(traced(ANEW, facts(12)))
    assert (first.proven, first.missing) == (False, Ranges(6, ((6, 12),)))
    assert (second.proven, second.to_come) == (True, Ranges(8, ((2, 3), (5, 12))))


def mark(counts: Counts, course: Course, start: int, stop: int, kind: int) -> Counts:
    for samples, epochs in Stretch(0, course, start, stop, "trained").blocks(counts.total):
        counts.mark(samples, epochs, kind)
    return counts


def test_counting_does_not_trust_the_arithmetic_and_ranges_go_on_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.inspection.auditing_counts._LOOKED_AT", 3)
    picked = np.array([0, 1, 1, 1, 1, 0, 0, 1], dtype=np.bool_)
    assert ranges_where(8, lambda first, last: picked[first:last]) == Ranges(5, ((1, 5), (7, 8)))
    often = Counts(1, 0)
    for _ in range(256):
        mark(often, Course(Rules(1), [Part(1)]), 0, 1, counting.TRAINED)
    assert not often.is_whole(), "more than 255 times passes for none"
    course = Course(Rules(2), [Part(2, draws=3)])
    counts = mark(Counts(8, 0), course, 0, 3, counting.TRAINED)
    mark(counts, course, 2, 3, counting.TRAINED)
    mark(counts, course, 2, 3, counting.TO_COME)
    assert ranges_where(8, lambda first, last: counts.trained[first:last] > 1) == Ranges(2, ((4, 5), (6, 7)))
    assert counts.is_whole()
    assert not mark(counts, course, 2, 3, counting.SKIPPED).is_whole()
    left = Counts(6, 0)  # What is left out is only what nothing else is known of
    left.trained[1], left.kinds[2] = 1, counting.TO_COME
    left.leave_out([(1, 9)], None)
    assert left.kinds.tolist() == [0, 0, counting.TO_COME, counting.LEFT_OUT, counting.LEFT_OUT, counting.LEFT_OUT]
    other_epoch = mark(Counts(8, 1), course, 0, 3, counting.TRAINED)
    assert (other_epoch.impossible, other_epoch.is_whole()) == (6, False)


A = run_state(Part(4, 1, 10, draws_per_step=1), Part(2, 1, 3, first_step=10, draws_per_step=1))


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (A, (10, 3)),
        (run_state(Part(4, 1, 7, draws_per_step=1)), (7, 0)),
        (run_state(Part(4, 1, 12, draws_per_step=1)), (10, 0)),
        (run_state(Part(4, 1, 10), Part(3, 1, 5)), (10, 0)),
        (run_state(Part(4, 1, 10), Part(2, 1, 5, skip=((1, 2),))), (10, 0)),
        (run_state(Part(4, 2, 10)), (0, 0)),
        (run_state(Part(4, 1, 10), Part(3)), (10, 0)),  # Nothing is drawn in its last part yet, so it decides nothing
        (run_state(Part(4)), (0, 0)),
    ],
)
def test_what_two_states_share(other: RunState, shared: tuple[int, ...]) -> None:
    assert shared_draws(A, other) == shared
    assert sum(shared_draws(other, A)) == sum(shared)


@PROPERTY
@given(states(), states())
def test_two_states_share_as_much_of_one_as_of_the_other(a: tuple[RunState, int], b: tuple[RunState, int]) -> None:
    one, other = a[0], replace(b[0], unit=a[0].unit, window=a[0].window, seed=a[0].seed)
    pairs = ((one, shared_draws(one, other)), (other, shared_draws(other, one)))
    trained = [[part.dp * some for part, some in zip(run.parts, shared, strict=True) if some] for run, shared in pairs]
    assert trained[0] == trained[1]
    assert all(draws <= part.draws for run, shared in pairs for part, draws in zip(run.parts, shared, strict=True))
