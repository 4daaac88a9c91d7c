"""Scale on paper: what holds of every run, and of the closed forms beside the plan that they stand for."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.simulation.run import Polls, Timeline, WaitEnd, disk_use, done_chunks, first_look, simulate
from lazyshard.simulation.setting import Setting


@st.composite
def settings(draw: st.DrawFn, *, limited: bool = True) -> Setting:
    """Small runs of whole eighths of a second; `limited` with or without a limit of the producer."""
    ranks, batch, micro = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = draw(st.integers(1, 12))
    ahead = draw(st.none() | st.integers(0, 12)) if limited else None
    return Setting(
        ranks=ranks,
        batch=batch,
        micro_batches=micro,
        step_seconds=draw(st.integers(1, 16)) / 8,
        samples_per_chunk=size,
        # A chunk takes eighths of a second.
        producer_rate=size * 8 / draw(st.integers(1, 16)),
        rows=draw(st.integers(ranks * batch * micro, 400)),
        window=draw(st.integers(0, 4)),
        head_start=draw(st.integers(0, 10)) * size,
        max_ahead=None if ahead is None else f"{ahead} chunks",
        retain=draw(st.sampled_from(["all", "consumed"])),
        checkpoint_steps=draw(st.integers(0, 6)),
        keep_checkpoints=draw(st.integers(1, 3)),
        workers=0,
        latency_s=0.0,
        visibility_s=draw(st.sampled_from([0.0, 0.25])),
        woken=draw(st.booleans()),
    )


def run(setting: Setting) -> Timeline:
    """Simulates a run whose readers see everything at once."""
    with patch.object(Polls, "wait", lambda *_: WaitEnd(0.0, 1, 0, 0)):
        return simulate(setting)


def starts(timeline: Timeline) -> list[float]:
    steps = np.arange(timeline.setting.steps)
    return [float(end) - timeline.step_s for end in timeline.ends(steps)]


@given(settings(), st.data())
def test_what_a_step_needs_is_what_the_plan_says(setting: Setting, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, setting.steps - 1))
    rows = min(setting.course.needed((step + 1) * setting.draws - 1), setting.rows)
    assert setting.needed_chunks(step) == -(-rows // setting.samples_per_chunk)


@given(settings(), st.data())
def test_the_next_step_to_wait_for_is_the_first_that_needs_more(setting: Setting, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(0, setting.chunks))
    needing = (step for step in range(setting.steps) if setting.needed_chunks(step) > chunks)
    assert setting.first_step_after(chunks) == next(needing, setting.steps)


@given(settings(), st.integers(0, 500))
def test_what_a_checkpoint_frees_is_what_the_plan_says(setting: Setting, position: int) -> None:
    done = setting.course.done_before(position, None) // setting.samples_per_chunk
    assert done_chunks(setting, np.array([position])).tolist() == [done]


@given(settings(limited=False))
def test_steps_begin_when_a_walk_through_all_of_them_says_so(setting: Setting) -> None:
    timeline = run(setting)
    published = [
        max(0.0, min(chunk * setting.samples_per_chunk, setting.rows) - setting.head_start) / setting.producer_rate
        for chunk in range(1, setting.chunks + 1)
    ]
    assert np.allclose(timeline.published, published)
    end = 0.0
    for step, start in enumerate(starts(timeline)):
        earliest = max(end, published[setting.needed_chunks(step) - 1] + setting.visibility_s)
        assert abs(start - earliest) < 1e-6
        end = earliest + setting.step_seconds


@given(settings())
def test_no_step_begins_before_its_rows_are_there_or_the_step_before_has_ended(setting: Setting) -> None:
    timeline = simulate(setting)
    began = starts(timeline)
    assert setting.needed_chunks(setting.steps - 1) <= len(timeline.published) <= setting.chunks
    assert (np.diff(timeline.published) >= -1e-9).all()
    assert (timeline.begun <= timeline.published + 1e-9).all()
    for step, start in enumerate(began):
        assert start >= timeline.published[setting.needed_chunks(step) - 1] + setting.visibility_s - 1e-6
    assert all(late >= early + setting.step_seconds - 1e-6 for early, late in pairwise(began))


@given(settings(limited=False), st.integers(2, 5))
def test_a_faster_producer_never_makes_the_run_longer(setting: Setting, times: int) -> None:
    faster = run(replace(setting, producer_rate=setting.producer_rate * times))
    assert faster.end_s <= run(setting).end_s + 1e-6
    assert faster.stalled_s <= run(setting).stalled_s + 1e-6


@given(settings(limited=False), st.integers(1, 5))
def test_a_head_start_never_makes_the_run_longer(setting: Setting, chunks: int) -> None:
    sooner = run(replace(setting, head_start=setting.head_start + chunks * setting.samples_per_chunk))
    assert sooner.end_s <= run(setting).end_s + 1e-6


@given(settings(), st.integers(2, 4))
def test_rarer_checkpoints_never_take_less_disk(setting: Setting, times: int) -> None:
    timeline = simulate(setting)
    rarer = replace(timeline.setting, checkpoint_steps=setting.checkpoint_steps * times)
    later = disk_use(replace(timeline, setting=rarer))
    assert disk_use(timeline).peak_chunks <= later.peak_chunks <= setting.chunks


@given(settings(), st.integers(1, 4))
def test_more_checkpoints_that_are_kept_never_take_less_disk(setting: Setting, more: int) -> None:
    timeline = simulate(setting)
    kept = replace(timeline.setting, keep_checkpoints=setting.keep_checkpoints + more)
    assert disk_use(timeline).peak_chunks <= disk_use(replace(timeline, setting=kept)).peak_chunks


@given(settings(), st.integers(1, 20))
def test_a_producer_is_never_further_ahead_than_it_may_be(setting: Setting, ahead: int) -> None:
    timeline = simulate(replace(setting, max_ahead=f"{ahead} chunks"))
    began = np.array(starts(timeline))
    for chunk, at in enumerate(timeline.begun.tolist()):
        # A step is asked for when the one before has ended, so at most the one after those that have begun.
        step = min(int((began <= at + 1e-6).sum()), setting.steps - 1)
        assert chunk < setting.needed_chunks(step) + ahead


@given(st.integers(1, 40), st.floats(0.001, 100), st.floats(0.01, 1000), st.floats(0, 5), st.booleans())
def test_a_wait_is_found_to_be_over_after_a_tenth_of_it_and_five_seconds_at_the_latest(
    missing: int, period: float, share: float, blind: float, woken: bool
) -> None:
    setting = Setting(
        ranks=2, step_seconds=1, samples_per_chunk=10, producer_rate=10 / period, rows=1000, latency_s=0.0, woken=woken
    )
    first = min(1.0, share) * period
    found = Polls(setting).wait(missing, first, blind)
    waited = first + (missing - 1) * period
    assert 0 <= found.late_s <= min(5.0, max(0.005, 0.1 * max(waited + period, blind))) + 0.05
    assert found.own >= 1


@given(st.floats(0, 1e6))
def test_a_held_producer_looks_soon_enough(held_s: float) -> None:
    assert held_s - 1e-6 <= first_look(held_s) <= held_s + 2.0 + 1e-6
