"""The course: what every lane draws equals the oracle's lists, through any chain of changed ranks, and back again.

And what every lane is done with: no sample below that number comes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.part import Part, SplitOf
from lazyshard.plan.course import Course, Draw, Place, Run
from lazyshard.plan.deal import Rules
from tests.plan import oracle
from tests.plan.cases import PROPERTY, Case, cases
from tests.stream.streams import refusal_of


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
        others = tuple((sample, sample + 1) for sample in sorted(self.other_splits))
        parts[0] = (*parts[0][:3], (*parts[0][3], *others))
        return oracle.course_of_draws(self.rules.unit, self.rules.window, self.rules.seed, parts, self.total)

    @property
    def left_out(self) -> set[int]:
        skipped = {sample for part in self.parts for start, stop in part.skip for sample in range(start, stop)}
        return skipped | self.other_splits

    @property
    def other_splits(self) -> set[int]:
        if (split := self.rules.split) is None:
            return set()
        owners = oracle.split_owners(split.shares, self.total)
        return {sample for sample, owner in enumerate(owners) if owner != split.number}


@st.composite
def chains(draw: st.DrawFn, epochs: int = 3) -> Chain:
    """Up to five parts over a stream of up to 80 samples; small numbers meet every border soonest."""
    unit = draw(st.integers(1, 4))
    split = draw(st.none() | st.sampled_from([SplitOf((3, 2, 1), 0), SplitOf((3, 2, 1), 1), SplitOf((1, 4), 1)]))
    rules = Rules(unit, unit * draw(st.integers(0, 3)), draw(st.integers(0, 2)), split)
    total = draw(st.integers(30, 80))
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        dp, batch_size = draw(st.integers(1, 5)), draw(st.integers(1, 2))
        ranges: tuple[tuple[int, int], ...] = ()
        if draw(st.booleans()):
            start = draw(st.integers(0, total - 1))
            ranges = ((start, start + draw(st.integers(1, 4))),)
        draws = draw(st.integers(0, epochs * rules.gaps.kept(0, total) // dp // 5))
        parts.append(Part(dp, batch_size, draws // batch_size * batch_size, skip=ranges))
    return Chain(rules, tuple(parts), total)


def drawn(course: Course, total: int | None) -> Sequence[Sequence[tuple[int, int]]]:
    current = course.current
    return [[course.draw(lane, p, total) for p in range(current.draws)] for lane in range(current.dp)]


def samples_of(course: Course, lane: int, positions: range, total: int | None) -> list[int]:
    return [course.draw(lane, position, total).sample for position in positions]


def rescaled(course: Course, dp: int, batch_size: int, draws: int) -> Course:
    ended = replace(course.current, draws=draws)
    if (dp, batch_size) == (course.dp, course.batch_size):
        return Course(course.rules, (*course.parts[:-1], ended))
    return Course(course.rules, (*course.parts[:-1], ended, Part(dp, batch_size)))


@pytest.mark.parametrize(
    ("rules", "parts", "total", "lanes"),
    [
        (Rules(3), [Part(2, draws=4), Part(3, draws=4)], 60, "0 1 2 6, 3 4 5 9, 7 8 12 13, 10 15 16 17, 11 18 19 20"),
        (
            Rules(2, window=4, seed=1),
            [Part(2, draws=3), Part(3, draws=5), Part(1, draws=9)],
            None,
            "0 5 1, 3 2 7, 4 8 15 9 14, 6 11 10 17 16, 19 18 13 12 25, 27 26 21 20 28 23 29 22 30",
        ),
    ],
)
def test_draws_golden(rules: Rules, parts: list[Part], total: int | None, lanes: str) -> None:
    course = Course(rules, parts)
    found = [lane for number in range(len(parts)) for lane in drawn(course.until(number), total)]
    assert ", ".join(" ".join(str(sample) for _, sample in lane) for lane in found) == lanes
    assert course.consumed_before == sum(part.dp * part.draws for part in parts[:-1])


@PROPERTY
@given(cases(filled=True), st.integers(0, 3))
def test_any_epoch_is_that_of_the_oracle_begun_there_or_met_on_the_way(case: Case, epoch: int) -> None:
    expected, total = case.drawn(epoch), case.total
    begun, first, length = case.course(epoch), case.course(), len(expected[0])
    assert begun.begin(total).length == first.begin(total).length == first.begin(total).full == length
    for lane, samples in enumerate(expected):
        assert samples_of(begun, lane, range(length), total) == samples
        assert samples_of(first, lane, range(epoch * length, (epoch + 1) * length), total) == samples
    assert begun.leftover(total) == total - sum(map(len, expected)) < case.part.dp * case.part.batch_size


@PROPERTY
@given(cases(), st.integers(0, 30))
def test_needed_is_what_window_and_batch_ask_for_and_no_more(case: Case, position: int) -> None:
    dp, batch, span = case.part.dp, case.part.batch_size, case.rules.window or case.rules.unit
    assert case.course().needed(position) == dp * max((position // size + 1) * size for size in (span, batch))


@pytest.mark.parametrize(
    ("rules", "part", "position", "total", "run"),
    [
        (Rules(4), Part(2), 5, None, Run(4, 8, 12, 0)),
        (Rules(4), Part(2), 12, 27, Run(12, 13, 25, 0)),
        (Rules(4), Part(2), 14, 27, Run(13, 17, 4, 1)),
        (Rules(4), Part(2, 3), 5, None, Run(4, 6, 12, 0)),
        (Rules(4), Part(2, 7), 5, 16, Run(4, 7, 12, 0)),
        (Rules(4, window=4), Part(2), 5, 27, Run(5, 6, 12, 0)),
    ],
)
def test_run_golden(rules: Rules, part: Part, position: int, total: int | None, run: Run) -> None:
    assert Course(rules, [part]).run(part.dp - 1, position, total) == run


@PROPERTY
@given(chains())
def test_every_part_draws_what_the_oracle_draws_in_arrays_too(chain: Chain) -> None:
    for number, lanes in enumerate(chain.expected()):
        course = chain.course.until(number)
        assert drawn(course, chain.total) == lanes
        epochs, samples = course.draws(np.arange(course.dp)[:, None], np.arange(course.current.draws), chain.total)
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
    last = course.current.draws + course.begin(total).length + course.dp
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
    whole = [epoch for epoch in by_epoch if epoch < max(by_epoch)]
    left = [len(set(range(total)) - chain.left_out - set(by_epoch[epoch])) for epoch in whole]
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
                assert found.part == len(chain.parts) - 1 and found.position >= course.current.draws
                assert course.draw(found.lane, found.position, total) == Draw(epoch, sample)


@PROPERTY
@given(chains(epochs=1), st.integers(0, 20), st.integers(0, 30), st.integers(0, 100))
def test_what_is_drawn_live_is_what_is_drawn_later(chain: Chain, position: int, more: int, samples: int) -> None:
    course = chain.course
    needed = course.needed(position)
    assert (needed <= samples) == (position < course.drawable(samples))
    assert needed <= course.needed(position + 1)
    total = max([course.until(n).needed(p.draws - 1) for n, p in enumerate(chain.parts) if p.draws] or [0])
    total = max(total, needed) + more
    for lane in range(course.dp):
        live = course.draw(lane, position, None)
        assert live == course.draw(lane, position, total)
        assert (live.epoch, live.sample < needed) == (0, True)
        run = course.run(lane, position, None)
        assert run.first <= position < run.stop
        assert course.needed(run.stop - 1) <= needed
        consecutive = list(range(run.sample, run.sample + run.stop - run.first))
        assert samples_of(course, lane, range(run.first, run.stop), None) == consecutive


@PROPERTY
@given(chains())
def test_runs_are_consecutive_samples_and_a_window_is_drawn_in_one_epoch_from_what_one_needs(chain: Chain) -> None:
    course, total = chain.course, chain.total
    for lane in range(course.dp):
        for position in range(course.begin(total).length + 5):
            run = course.run(lane, position, total)
            assert run.first <= position < run.stop
            got = [tuple(course.draw(lane, p, total)) for p in range(run.first, run.stop)]
            assert got == [(run.epoch, run.sample + i) for i in range(run.stop - run.first)]
            stop = course.window_stop(lane, position, total)
            assert stop > position
            assert {course.draw(lane, p, total).epoch for p in range(position, stop)} == {run.epoch}
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
    assert Course(Rules(2, window=4), [Part(2)]).window_stop(1, 49, 100) == 50
    assert Course(Rules(2), [Part(2)]).window_stop(1, 3, 100) == 50


def still_kept(case: Case, position: int) -> list[int]:
    """What lanes draw from a position on; windows and stripes that are open whole, and with what is left over."""
    if position > len(case.drawn(0)[0]):
        return []
    dp, unit, window = case.part.dp, case.rules.unit, case.rules.window
    in_stripes = case.total // (dp * unit) * unit
    row_by_row = not window and position >= in_stripes
    first = position if row_by_row else position - position % (window or unit)
    left_over = position < len(case.drawn(0)[0]) or any(lane[position:] for lane in case.lanes())
    return [sample for lane in case.lanes() for sample in lane[first:]] if left_over else []


@PROPERTY
@given(cases())
def test_done_is_the_first_sample_that_is_still_kept_and_never_falls(case: Case) -> None:
    found = [case.course().done_before(position, case.total) for position in range(len(case.drawn(0)[0]) + 3)]
    assert found == [min(still_kept(case, position), default=case.total) for position in range(len(found))]
    assert found == sorted(found)
    assert found[-1] == case.total


@PROPERTY
@given(cases(), st.integers(0, 30), st.integers(0, 40))
def test_what_is_said_live_to_be_done_holds_after_the_end(case: Case, position: int, more: int) -> None:
    course = case.course()
    certain = course.needed(position - 1) if position else 0
    live, total = course.done_before(position, None), certain + more
    assert 0 <= live <= certain
    assert live <= course.done_before(position, total)
    if total >= course.needed(position):
        assert live == course.done_before(position, total)


@PROPERTY
@given(chains())
def test_nothing_below_what_is_done_is_drawn_again(chain: Chain) -> None:
    course, total = chain.course, chain.total
    length, epoch = course.begin(total).length, course.epoch(total)
    for position in range(length + 1):
        done = course.done_before(position, total)
        later = [course.draw(lane, p, total) for lane in range(course.dp) for p in range(position, length)]
        assert all(draw.sample >= done and draw.epoch == epoch for draw in later)


@PROPERTY
@given(chains(epochs=1), st.integers(1, 6), st.integers(1, 2))
def test_nothing_below_what_is_done_is_drawn_by_any_other_number_of_ranks(chain: Chain, dp: int, batch: int) -> None:
    course, total = chain.course, chain.total
    draws = min(course.current.draws, course.begin(total).length)
    done = course.done_before(draws, None)
    other = rescaled(course, dp, batch, draws)
    if other.epoch(total) == course.epoch(total):
        for lane in range(dp):
            begun = draws if other.parts == rescaled(course, course.dp, course.batch_size, draws).parts else 0
            for position in range(begun, other.begin(total).length):
                assert other.draw(lane, position, total).sample >= done
    if course.epoch(total):
        return
    # Nor is what is left over done with, as other ranks may draw it.
    length = course.begin(total).length
    done = course.done_before(length, total)
    assert done <= total and (done == total or course.leftover(total))
    other = rescaled(course, dp, batch, length)
    if other.parts[-1].draws == 0:
        rest = [other.draw(lane, p, total) for lane in range(dp) for p in range(other.begin(total).length)]
        assert all(draw.sample >= done and draw.epoch == 0 for draw in rest)
    assert course.done_before(length + 1, total) == total


def test_history_that_does_not_matter_any_more_is_let_go_and_a_far_position_is_no_more_work() -> None:
    # Of the last two, the second begins two windows later, at a boundary of all lanes.
    for parts, carried in (
        ([Part(2, draws=3), Part(3, draws=8), Part(2, draws=6), Part(4)], [0, 2, 2, 6]),
        ([Part(2, draws=3), Part(1, draws=6), Part(2)], [0, 2, 0]),
    ):
        course = Course(Rules(4, window=4), parts)
        segments = [course.until(number).begin(None).segment for number in range(len(parts))]
        assert [segment.carried for segment in segments] == carried
        assert [segment.before is None for segment in segments] == [not count for count in carried]
    assert Course(Rules(1000, 4000), [Part(8)]).done_before(2**59, None) == 2**59 // 4000 * 4000 * 8


def test_parts_go_on_in_the_same_order_and_skipped_steps_are_drawn_by_nobody() -> None:
    rules = Rules(3, window=6, seed=42)
    one, two = Course(rules, [Part(2)]), Course(rules, [Part(2, draws=8, batch_size=2), Part(2, draws=3), Part(2, 4)])
    for lane in range(2):
        assert samples_of(two, lane, range(20), None) == samples_of(one, lane, range(11, 31), None)
    assert (two.needed(0), two.needed(1), two.needed(4)) == (30, 36, 38)
    found = [two.place(one.draw(1, p, None).sample, None, 0) for p in (7, 8, 10, 11, 30)]
    assert found == [Place(0, 1, 7), Place(1, 1, 0), Place(1, 1, 2), Place(2, 1, 0), Place(2, 1, 19)]
    course = Course(Rules(3), [Part(2, draws=2), Part(2, draws=2, trained=False), Part(2)])
    assert [samples_of(course, lane, range(3), None) for lane in range(2)] == [[7, 8, 12], [10, 11, 15]]
    assert (course.consumed_before, course.place(6, 60, 0)) == (4, Place(1, 0, 1))
    course, alone = (Course(Rules(3), [*before, Part(3, epoch=4)]) for before in ([Part(2, draws=5)], []))
    for lane in range(3):
        assert [course.draw(lane, p, 20) for p in range(9)] == [alone.draw(lane, p, 20) for p in range(9)]


PLAIN = Course(Rules(3), [Part(2, draws=4), Part(3)])
SHORT = Course(Rules(4), [Part(2, 3)])  # Of whose epochs, with five samples, none has a batch for each lane


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (lambda: Part(0), ValueError, "'dp'"),
        (lambda: Part(1, draws=-1), ValueError, "'draws'"),
        (lambda: Part(1, skip=((3, 3),)), ValueError, r"skip\[0\]\[1\]"),
        (lambda: Rules(2, 3), ValueError, "window .* got 3"),
        (lambda: Rules(4, -4), ValueError, "window .* got -4"),
        (lambda: Rules(4, seed=2**63), ValueError, "seed .* got 9223372036854775808"),
        (lambda: Rules(4, seed=1.0), ValueError, "seed .* got 1.0"),  # type: ignore[arg-type]
        (lambda: Course(Rules(1), [Part(2, draws=9), Part(1)]).draw(0, 0, 0), ValueError, "9 positions .* 2 lanes"),
        (lambda: PLAIN.place(-1, None, 0), IndexError, "sample .* got -1"),
        (lambda: SHORT.draw(0, 0, 5), IndexError, "an epoch is empty"),
        (lambda: SHORT.draws(0, [0], 5), IndexError, "an epoch is empty"),
        (lambda: SHORT.run(0, 0, 5), IndexError, "an epoch is empty"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], error: type[Exception], what: str) -> None:
    assert [found.shape for found in PLAIN.draws(1, 4, 40)] == [(), ()]
    assert [found.dtype for found in PLAIN.draws(0, [], 40)] == [np.int64, np.int64]
    assert (SHORT.begin(5).length, SHORT.leftover(5)) == (0, 5)
    refusal_of(error, what, make)
