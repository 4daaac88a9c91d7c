"""The course: what every lane draws equals the oracle's lists, through any chain of changed ranks, and back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.part import Part
from lazyshard.plan.course import Course, Draw, Place, Run
from lazyshard.plan.deal import Rules
from tests.plan import oracle
from tests.plan.cases import PROPERTY, Case, cases


@dataclass(frozen=True)
class Chain:
    """A course whose parts have all come to their end, and the end of its stream."""

    rules: Rules
    parts: tuple[Part, ...]
    total: int

    @property
    def course(self) -> Course:
        return Course(self.rules, self.parts)

    def expected(self) -> list[list[list[tuple[int, int]]]]:
        parts = [(part.dp, part.batch_size, part.draws, part.skip) for part in self.parts]
        return oracle.course_of_draws(self.rules.unit, self.rules.window, self.rules.seed, parts, self.total)


@st.composite
def chains(draw: st.DrawFn, epochs: int = 3) -> Chain:
    """Up to five parts over a stream of up to 80 samples; small numbers meet every border soonest."""
    unit = draw(st.integers(1, 4))
    rules = Rules(unit, unit * draw(st.integers(0, 3)), draw(st.integers(0, 2)))
    total = draw(st.integers(30, 80))
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        dp, batch_size = draw(st.integers(1, 5)), draw(st.integers(1, 2))
        ranges: tuple[tuple[int, int], ...] = ()
        if draw(st.booleans()):
            start = draw(st.integers(0, total - 1))
            ranges = ((start, start + draw(st.integers(1, 4))),)
        draws = draw(st.integers(0, epochs * total // dp // 5))
        parts.append(Part(dp, batch_size, draws // batch_size * batch_size, skip=ranges))
    return Chain(rules, tuple(parts), total)


def drawn(course: Course, total: int | None) -> Sequence[Sequence[tuple[int, int]]]:
    current = course.current
    return [[course.draw(lane, p, total) for p in range(current.draws)] for lane in range(current.dp)]


def rescaled(course: Course, dp: int, batch_size: int, draws: int) -> Course:
    """The course with other lanes after so many draws of its current part."""
    ended = replace(course.current, draws=draws)
    if (dp, batch_size) == (course.dp, course.batch_size):
        return Course(course.rules, (*course.parts[:-1], ended))
    return Course(course.rules, (*course.parts[:-1], ended, Part(dp, batch_size)))


def test_draws_golden_of_the_documented_example() -> None:
    course = Course(Rules(3), [Part(2, draws=4), Part(3, draws=4)])
    assert [[sample for _, sample in lane] for lane in drawn(course.until(0), 60)] == [[0, 1, 2, 6], [3, 4, 5, 9]]
    assert [[sample for _, sample in lane] for lane in drawn(course, 60)] == [
        [7, 8, 12, 13],
        [10, 15, 16, 17],
        [11, 18, 19, 20],
    ]
    assert course.consumed_before == 8


def test_draws_golden_with_windows_through_two_changes() -> None:
    course = Course(Rules(2, window=4, seed=1), [Part(2, draws=3), Part(3, draws=5), Part(1, draws=9)])
    assert [[s for _, s in lane] for number in range(3) for lane in drawn(course.until(number), None)] == GOLDEN


GOLDEN = [
    [0, 5, 1],
    [3, 2, 7],
    [4, 8, 15, 9, 14],
    [6, 11, 10, 17, 16],
    [19, 18, 13, 12, 25],
    [27, 26, 21, 20, 28, 23, 29, 22, 30],
]


def of_epoch(course: Course, lane: int, total: int, turn: int = 0) -> list[int]:
    length = course.full_epoch_length(total)
    return [course.draw(lane, turn * length + p, total).sample for p in range(length)]


def test_draws_golden_of_two_epochs_and_in_order_cut_to_whole_batches() -> None:
    course = Course(Rules(4, window=8), [Part(2)])
    assert of_epoch(course, 0, 27) == [9, 2, 3, 10, 0, 1, 8, 11, 16, 17, 18, 19, 24]
    assert of_epoch(course, 1, 27) == [13, 15, 12, 4, 5, 14, 6, 7, 21, 20, 22, 23, 25]
    assert of_epoch(course, 0, 27, turn=1) == [2, 10, 8, 9, 1, 3, 11, 0, 26, 18, 19, 17, 24]
    assert of_epoch(course, 1, 27, turn=1) == [14, 7, 12, 4, 6, 5, 13, 15, 25, 20, 23, 22, 21]
    assert course.leftover(27) == 1
    course = Course(Rules(3), [Part(2, batch_size=2)])
    assert of_epoch(course, 0, 19) == [0, 1, 2, 6, 7, 8, 12, 13]
    assert of_epoch(course, 1, 19) == [3, 4, 5, 9, 10, 11, 15, 16]
    assert course.leftover(19) == 3


def test_order_of_a_window_is_that_of_seed_epoch_lane_and_window() -> None:
    # oracle.permutation(4, (9, 5, 1, 2)) is [1, 0, 2, 3]; samples of window 2 of lane 1 are 20 to 23.
    course = Course(Rules(4, window=4, seed=9), [Part(2, epoch=5)])
    assert [course.draw(1, 8 + p, None).sample for p in range(4)] == [21, 20, 22, 23]


@PROPERTY
@given(cases(filled=True), st.integers(0, 3))
def test_any_epoch_is_that_of_the_oracle_begun_there_or_met_on_the_way(case: Case, epoch: int) -> None:
    expected, total = case.drawn(epoch), case.total
    begun, first = case.course(epoch), case.course()
    assert [of_epoch(begun, lane, total) for lane in range(case.part.dp)] == expected
    assert [of_epoch(first, lane, total, epoch) for lane in range(case.part.dp)] == expected
    assert begun.epoch_length(total) == first.epoch_length(total) == len(expected[0])
    assert begun.leftover(total) == total - sum(map(len, expected)) < case.part.dp * case.part.batch_size


@PROPERTY
@given(cases(), st.integers(0, 30))
def test_needed_is_what_window_and_batch_ask_for_and_no_more(case: Case, position: int) -> None:
    dp, batch, span = case.part.dp, case.part.batch_size, case.rules.window or case.rules.unit
    assert case.course().needed(position) == dp * max((position // size + 1) * size for size in (span, batch))


@pytest.mark.parametrize(
    ("rules", "part", "needed"),
    [
        (Rules(3), Part(2), [6, 6, 6, 12, 12, 12, 18]),
        (Rules(3), Part(2, 4), [8, 8, 8, 12, 16, 16, 18]),
        (Rules(3, window=6), Part(2), [12, 12, 12, 12, 12, 12, 24]),
        (Rules(3, window=6), Part(2, 4), [12, 12, 12, 12, 16, 16, 24]),
    ],
)
def test_needed_golden(rules: Rules, part: Part, needed: list[int]) -> None:
    assert [Course(rules, [part]).needed(p) for p in range(7)] == needed


@pytest.mark.parametrize(
    ("rules", "part", "position", "total", "run"),
    [
        (Rules(4), Part(2), 5, None, Run(4, 8, 12, 0)),
        (Rules(4), Part(2), 5, 27, Run(4, 8, 12, 0)),
        (Rules(4), Part(2), 12, 27, Run(12, 13, 25, 0)),
        (Rules(4), Part(2), 14, 27, Run(13, 17, 4, 1)),
        (Rules(4), Part(2, 3), 5, None, Run(4, 6, 12, 0)),
        (Rules(4), Part(2, 3), 6, None, Run(4, 8, 12, 0)),
        (Rules(4), Part(2, 7), 5, 16, Run(4, 7, 12, 0)),
        (Rules(4, window=4), Part(2), 5, 27, Run(5, 6, 12, 0)),
        (Rules(4), Part(1), 5, 27, Run(4, 8, 4, 0)),
    ],
)
def test_run_golden(rules: Rules, part: Part, position: int, total: int | None, run: Run) -> None:
    assert Course(rules, [part]).run(part.dp - 1, position, total) == run


def test_stream_too_short_for_one_batch_a_lane_is_refused_past_its_first_epoch() -> None:
    course = Course(Rules(4), [Part(2, 3)])
    assert (course.epoch_length(5), course.leftover(5)) == (0, 5)
    for call in (lambda: course.draw(0, 0, 5), lambda: course.draws(0, [0], 5), lambda: course.run(0, 0, 5)):
        with pytest.raises(IndexError, match="an epoch is empty"):
            call()


@PROPERTY
@given(chains())
def test_every_part_draws_what_the_oracle_draws(chain: Chain) -> None:
    for number, lanes in enumerate(chain.expected()):
        assert drawn(chain.course.until(number), chain.total) == lanes


@PROPERTY
@given(chains())
def test_arrays_draw_what_single_positions_do(chain: Chain) -> None:
    for number, lanes in enumerate(chain.expected()):
        course = chain.course.until(number)
        positions = np.arange(course.current.draws)
        epochs, samples = course.draws(np.arange(course.dp)[:, None], positions, chain.total)
        assert epochs.tolist() == [[epoch for epoch, _ in lane] for lane in lanes]
        assert samples.tolist() == [[sample for _, sample in lane] for lane in lanes]


@pytest.mark.parametrize("window", [0, 2000])
def test_arrays_of_any_length_and_order_draw_what_single_positions_do(window: int) -> None:
    # Epochs of 33,000 positions, of which some are carried over, in more pieces than one.
    course = Course(Rules(500, window, 1), [Part(2, draws=7), Part(3)])
    positions = np.arange(40_000)
    epochs, samples = course.draws(np.arange(3)[:, None], positions, 99_001)
    assert epochs.shape == samples.shape == (3, 40_000)
    some = (0, 665, 1326, 1327, 2000, 16_383, 16_384, 32_767, 32_768, 32_994, 32_995, 39_999)
    for lane in range(3):
        for position in some:
            assert (epochs[lane, position], samples[lane, position]) == course.draw(lane, position, 99_001)
    mixed = np.random.default_rng(0).permutation(40_000)
    assert (course.draws(1, mixed, 99_001)[1] == samples[1, mixed]).all()
    assert (course.draws(np.arange(3), positions[:, None], 99_001)[1] == samples.T).all()


@PROPERTY
@given(chains())
def test_no_sample_is_drawn_twice_in_an_epoch_and_what_is_not_is_left_over_or_left_out(chain: Chain) -> None:
    course, total = chain.course, chain.total
    last = course.current.draws + course.epoch_length(total) + course.dp
    by_epoch: dict[int, list[int]] = {}
    for number in range(len(chain.parts)):
        part = course.until(number)
        ends = part.current.draws if number < len(chain.parts) - 1 else last
        for lane in range(part.dp):
            for position in range(ends):
                epoch, sample = part.draw(lane, position, total)
                by_epoch.setdefault(epoch, []).append(sample)
    for samples in by_epoch.values():
        assert len(set(samples)) == len(samples)
    out = {s for part in chain.parts for start, stop in part.skip for s in range(start, stop)}
    whole = [epoch for epoch in by_epoch if epoch < max(by_epoch)]
    left = [len(set(range(total)) - out - set(by_epoch[epoch])) for epoch in whole]
    step = max(part.dp * part.batch_size for part in chain.parts)
    assert all(count < step for count in left)


@PROPERTY
@given(chains())
def test_places_lead_back_to_their_samples(chain: Chain) -> None:
    course, total = chain.course, chain.total
    places: dict[tuple[int, int], Place] = {}
    for number, lanes in enumerate(chain.expected()):
        for lane, row in enumerate(lanes):
            for position, (epoch, sample) in enumerate(row):
                places[epoch, sample] = Place(number, lane, position)
    for epoch in {epoch for epoch, _ in places}:
        for sample in range(total):
            found = course.place(sample, total, epoch)
            if (epoch, sample) in places:
                assert found == places[epoch, sample]
            elif found is not None:
                # Still to come, in the current part.
                assert found.part == len(chain.parts) - 1 and found.position >= course.current.draws
                assert course.draw(found.lane, found.position, total) == Draw(epoch, sample)


@PROPERTY
@given(chains(epochs=1), st.integers(0, 20), st.integers(0, 30))
def test_what_is_drawn_live_is_what_is_drawn_after_the_end(chain: Chain, position: int, more: int) -> None:
    course = chain.course
    total = max([course.until(n).needed(p.draws - 1) for n, p in enumerate(chain.parts) if p.draws] or [0])
    total = max(total, course.needed(position)) + more
    for lane in range(course.dp):
        live = course.draw(lane, position, None)
        assert live == course.draw(lane, position, total)
        assert live.epoch == 0
        assert live.sample < course.needed(position)


@PROPERTY
@given(chains(), st.integers(0, 40), st.integers(0, 100))
def test_drawable_is_needed_turned_round(chain: Chain, position: int, samples: int) -> None:
    course = chain.course
    assert (course.needed(position) <= samples) == (position < course.drawable(samples))
    assert course.needed(position) <= course.needed(position + 1)


@PROPERTY
@given(chains())
def test_runs_are_consecutive_samples(chain: Chain) -> None:
    course, total = chain.course, chain.total
    for lane in range(course.dp):
        for position in range(course.epoch_length(total) + 5):
            run = course.run(lane, position, total)
            assert run.first <= position < run.stop
            got = [tuple(course.draw(lane, p, total)) for p in range(run.first, run.stop)]
            assert got == [(run.epoch, run.sample + i) for i in range(run.stop - run.first)]


@PROPERTY
@given(chains(epochs=1), st.integers(0, 20))
def test_live_runs_need_no_more_than_their_position(chain: Chain, position: int) -> None:
    course = chain.course
    needed = course.needed(position)
    for lane in range(course.dp):
        run = course.run(lane, position, None)
        assert run.first <= position < run.stop
        assert course.needed(run.stop - 1) <= needed
        got = [course.draw(lane, p, None).sample for p in range(run.first, run.stop)]
        assert got == list(range(run.sample, run.sample + run.stop - run.first))


@PROPERTY
@given(chains())
def test_a_window_is_drawn_in_one_epoch_and_from_what_one_needs(chain: Chain) -> None:
    course, total = chain.course, chain.total
    for lane in range(course.dp):
        for position in range(course.epoch_length(total) + 5):
            stop = course.window_stop(lane, position, total)
            assert stop > position
            assert {course.draw(lane, p, total).epoch for p in range(position, stop)} == {
                course.draw(lane, position, total).epoch
            }
            stop = course.window_stop(lane, position, None)
            assert stop > position
            assert course.needed(stop - 1) <= course.needed(position)


def test_what_is_carried_over_counts_as_one_window() -> None:
    # Each lane has drawn 3 of its first window of 4; of the 2 that are left, each new lane gets one or none.
    course = Course(Rules(2, window=4, seed=1), [Part(2, draws=3), Part(3)])
    stops = [[course.window_stop(lane, position, 100) for position in range(7)] for lane in range(3)]
    assert stops == [[1, 5, 5, 5, 5, 9, 9], [1, 5, 5, 5, 5, 9, 9], [4, 4, 4, 4, 8, 8, 8]]
    # In batches of 2 one position more would have to be certain.
    assert Course(Rules(2, window=4), [Part(2, batch_size=2)]).window_stop(0, 5, None) == 8
    # The epoch of 100 samples ends at 50.
    assert Course(Rules(2, window=4), [Part(2)]).window_stop(1, 49, 100) == 50
    assert Course(Rules(2), [Part(2)]).window_stop(1, 3, 100) == 50


@pytest.mark.parametrize(("lane", "position"), [(2, 0), (-1, 0), (0, -1)])
@pytest.mark.parametrize("total", [None, 30])
def test_a_window_of_no_lane_or_position_is_refused(lane: int, position: int, total: int | None) -> None:
    with pytest.raises(IndexError, match="must be"):
        Course(Rules(2, window=4), [Part(2)]).window_stop(lane, position, total)


@PROPERTY
@given(chains())
def test_nothing_below_what_is_done_is_drawn_again(chain: Chain) -> None:
    course, total = chain.course, chain.total
    length, epoch = course.epoch_length(total), course.epoch(total)
    for position in range(length + 1):
        done = course.done_before(position, total)
        later = [course.draw(lane, p, total) for lane in range(course.dp) for p in range(position, length)]
        assert all(draw.sample >= done and draw.epoch == epoch for draw in later)


@PROPERTY
@given(chains(epochs=1), st.integers(1, 6), st.integers(1, 2))
def test_nothing_below_what_is_done_is_drawn_by_any_other_number_of_ranks(chain: Chain, dp: int, batch: int) -> None:
    course, total = chain.course, chain.total
    draws = min(course.current.draws, course.epoch_length(total))
    done = course.done_before(draws, None)
    other = rescaled(course, dp, batch, draws)
    if other.epoch(total) == course.epoch(total):
        for lane in range(dp):
            begun = draws if other.parts == rescaled(course, course.dp, course.batch_size, draws).parts else 0
            for position in range(begun, other.epoch_length(total)):
                assert other.draw(lane, position, total).sample >= done


@PROPERTY
@given(chains(epochs=1), st.integers(1, 6), st.integers(1, 2))
def test_what_is_left_over_is_not_done_with_as_other_ranks_may_draw_it(chain: Chain, dp: int, batch: int) -> None:
    course, total = chain.course, chain.total
    if course.epoch(total):
        return
    length = course.epoch_length(total)
    done = course.done_before(length, total)
    assert done <= total and (done == total or course.leftover(total))
    other = rescaled(course, dp, batch, length)
    if other.parts[-1].draws == 0:
        drawn = [other.draw(lane, p, total) for lane in range(dp) for p in range(other.epoch_length(total))]
        assert all(draw.sample >= done and draw.epoch == 0 for draw in drawn)
    assert course.done_before(length + 1, total) == total


def test_history_that_does_not_matter_any_more_is_let_go() -> None:
    parts = [Part(2, draws=3), Part(3, draws=8), Part(2, draws=6), Part(4)]
    course = Course(Rules(4, window=4), parts)
    segments = [begin.segment for begin in course._all(None)]
    assert [segment.carried for segment in segments] == [0, 2, 2, 6]
    assert [segment.before is None for segment in segments] == [True, False, False, False]
    # Two windows later, at a boundary of all lanes.
    course = Course(Rules(4, window=4), [Part(2, draws=3), Part(1, draws=6), Part(2)])
    assert [begin.segment.before is None for begin in course._all(None)] == [True, False, True]


def test_a_part_with_as_many_ranks_goes_on_in_the_same_order() -> None:
    rules = Rules(3, window=6, seed=42)
    one, two = Course(rules, [Part(2)]), Course(rules, [Part(2, draws=8, batch_size=2), Part(2, draws=3), Part(2, 4)])
    for lane in range(2):
        assert [two.draw(lane, p, None) for p in range(20)] == [one.draw(lane, p + 11, None) for p in range(20)]
    assert (two.needed(0), two.needed(1), two.needed(4)) == (30, 36, 38)
    assert [two.place(one.draw(1, p, None).sample, None, 0) for p in (7, 8, 10, 11, 30)] == [
        Place(0, 1, 7),
        Place(1, 1, 0),
        Place(1, 1, 2),
        Place(2, 1, 0),
        Place(2, 1, 19),
    ]


def test_skipped_steps_are_drawn_by_nobody() -> None:
    course = Course(Rules(3), [Part(2, draws=2), Part(2, draws=2, trained=False), Part(2)])
    assert [course.draw(lane, p, None).sample for lane in range(2) for p in range(3)] == [7, 8, 12, 10, 11, 15]
    assert course.consumed_before == 4
    assert course.place(6, 60, 0) == Place(1, 0, 1)


def test_a_part_that_begins_an_epoch_does_not_depend_on_those_before() -> None:
    course = Course(Rules(3), [Part(2, draws=5), Part(3, epoch=4)])
    alone = Course(Rules(3), [Part(3, epoch=4)])
    for lane in range(3):
        for position in range(9):
            assert course.draw(lane, position, 20) == alone.draw(lane, position, 20)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Course(Rules(1), []), "a course has at least one part"),
        (lambda: Part(0), "field 'dp': expected an integer from 1"),
        (lambda: Part(1, draws=-1), "field 'draws'"),
        (lambda: Part(1, skip=((3, 3),)), r"skip\[0\]\[1\]"),
        (lambda: Rules(2, 3), "window must be a multiple of unit = 2, got 3"),
        (lambda: Rules(4, -4), "window must be an int >= 0, got -4"),
        (lambda: Rules(4, seed=2**63), r"seed must be an int in \[0, 9223372036854775808\), got 9223372036854775808"),
        (lambda: Rules(4, seed=cast(int, 1.0)), "seed must be an int in .*, got 1.0"),
        (lambda: Course(Rules(1), [Part(2, draws=9), Part(1)]).draw(0, 0, 0), "9 positions of 2 lanes were drawn, but"),
    ],
)
def test_what_cannot_be_is_refused(make: object, expected: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=expected):
        make()


def test_lane_and_position_outside_are_refused() -> None:
    course: Sequence[Course] = [Course(Rules(3), [Part(2, draws=4), Part(3)])]
    with pytest.raises(IndexError, match=r"lane must be in \[0, 3\), got 3"):
        course[0].draw(3, 0, 40)
    with pytest.raises(IndexError, match="position must be >= 0, got -1"):
        course[0].draw(0, -1, 40)
