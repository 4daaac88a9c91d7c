"""Chains of starts with other ranks, micro batches and accumulations; what is skipped; the unit that is dealt."""

import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard.data.rank import Rank
from lazyshard.plan.deal import Rules
from lazyshard_swift.checkpoints import load_position
from lazyshard_swift.errors import ResumeRefused, SettingsRefused
from lazyshard_swift.run_plan import RunPlan
from tests.stream.streams import produce, raised
from tests.swift.unit.runs import checkpoint, decide_one, decided, facts_of, hugging_face, megatron, plan, tells
from tests.swift.unit.trainers import Trained, resumed, train

PER_CHUNK = 3
STEPS = {"swift": "max_steps", "megatron": "train_iters"}
Streams = dict[int, Path]
both = pytest.mark.parametrize("kind", ["swift", "megatron"])
TOTAL = 48


class Shape(NamedTuple):
    """How a start trains: ranks, samples of a rank in a micro batch, micro batches of a step."""

    dp: int
    batch: int
    accumulation: int

    @property
    def step(self) -> int:
        return self.dp * self.batch * self.accumulation


def shaped(kind: str, shape: Shape, checkpoint: Path | None, **options: Any) -> Any:
    """Arguments of a start, which saves after every step unless `save_steps` says otherwise."""
    save_steps, folder = options.pop("save_steps", 1), None if checkpoint is None else str(checkpoint)
    if kind == "swift":
        changes = {"per_device_train_batch_size": shape.batch, "gradient_accumulation_steps": shape.accumulation}
        args = hugging_face(**options, **changes, resume_from_checkpoint=folder)
    else:
        changes = {"micro_batch_size": shape.batch, "global_batch_size": shape.step}
        args = megatron(**options, **changes, finetune=folder is None, mcore_model=folder)
    args.save_steps = save_steps
    return args


class History:
    """The starts of one run, each killed and continued from its newest checkpoint, and what they have trained."""

    def __init__(self, kind: str, directory: Path, output: Path, **options: Any) -> None:
        self.kind, self.directory, self.output = kind, directory, output
        self.options = {"sharded_lazy_consumer": "run", "output_dir": str(output), **options}
        self.checkpoint: Path | None = None
        self.step = 0
        self.trained: list[tuple[int, int]] = []  # epoch and sample, of the steps that survive
        self.plans: list[RunPlan] = []
        self.last: list[Trained] = []

    def args(self, shape: Shape, **more: Any) -> Any:
        return shaped(self.kind, shape, self.checkpoint, **{**self.options, **more})

    def plan(self, shape: Shape, **more: Any) -> RunPlan:
        return plan(self.args(shape, **more), self.directory, 0, shape.dp)

    def start(self, shape: Shape, steps: int | None = None, **more: Any) -> bool:
        """Trains so many steps, or to the end; returns whether the run has come to its end."""
        kill = None if steps is None else self.step + steps
        plans, found = train(self.kind, self.directory, self.args(shape, **more), shape.dp, kill=kill)
        self.plans, self.last = plans, found
        if found[0].saved:
            self.step = found[0].saved[-1]
            self.checkpoint = self.output / f"checkpoint-{self.step}"
        # Of the last start nothing is lost: it is not killed.
        self._keep(plans, found, self.step if steps is not None else None)
        return found[0].ended

    def _keep(self, plans: list[RunPlan], found: list[Trained], until: int | None) -> None:
        """Takes what was trained up to a step, None for all, which must be what the course declares."""
        for run, each in zip(plans, found, strict=True):
            ids = [i for step, ids in each.steps.items() if until is None or step < until for i in ids]
            places = run.course.current.draws + np.arange(len(ids))
            epochs, samples = run.course.draws(run.rank.dp_rank, places, run.total)
            assert ids == samples.tolist(), f"rank {run.rank}"
            self.trained += zip(epochs.tolist(), ids, strict=True)


def assert_once(history: History, total: int, epochs: int, left_over: int) -> None:
    """Checks that each sample was trained once in each of so many epochs, but for fewer than `left_over`."""
    times = Counter(history.trained)
    assert not {where: n for where, n in times.items() if n > 1}, "trained more than once"
    for epoch in range(epochs):
        assert total - left_over < sum(1 for at, _ in times if at == epoch) <= total, epoch
    assert {epoch for epoch, _ in times} == set(range(epochs))
    assert {sample for _, sample in times} <= set(range(total))


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    folder = tmp_path_factory.mktemp("streams")
    return {total: produce(folder / str(total), total, PER_CHUNK if total != 47 else 47) for total in (25, 47, 48, 61)}


def any_shape(choose: random.Random) -> Shape:
    return Shape(choose.randint(1, 4), choose.randint(1, 2), choose.randint(1, 3))


@settings(max_examples=16, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["swift", "megatron"]))
def test_epochs_through_any_chain_of_starts(tmp_path_factory: Any, streams: Streams, seed: int, kind: str) -> None:
    choose = random.Random(seed)
    total, epochs = choose.choice(list(streams)), choose.randint(1, 3)
    # Of 47 samples, in one file, ranks are dealt batches.
    own: dict[str, Any] = {"num_train_epochs": epochs, "sharded_lazy_unit": "auto" if total == 47 else None}
    own |= {"sharded_lazy_shuffle_window": choose.randint(0, 2), "save_steps": choose.randint(1, 3)}
    history = History(kind, streams[total], tmp_path_factory.mktemp("run"), **own)
    shapes: list[Shape] = []
    units = set()
    for _ in range(choose.randint(1, 4)):
        shapes.append(any_shape(choose) if choose.random() < 0.8 or not shapes else shapes[-1])
        ended = history.start(shapes[-1], choose.randint(0, 6))
        if history.checkpoint is not None:
            units.add(history.plans[0].state.unit)
        if ended:
            break
    shapes.append(any_shape(choose))
    assert history.start(shapes[-1])
    assert len(units) <= 1, "the unit of the first checkpoint is kept"
    # An epoch ends with whole micro batches; Megatron's last step is a whole one too.
    most = max(shape.dp * shape.batch for shape in shapes)
    assert_once(history, total, epochs, max(most, shapes[-1].step if kind == "megatron" else 0))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["swift", "megatron"]))
def test_live_stream_through_any_chain_of_starts_to_its_end(tmp_path_factory: Any, seed: int, kind: str) -> None:
    choose, folder = random.Random(seed), tmp_path_factory.mktemp("run")
    directory, published = folder / "stream", 0
    own: dict[str, Any] = {"sharded_lazy_shuffle_window": choose.randint(0, 2), STEPS[kind]: 500}
    own["sharded_lazy_unit"] = choose.choice([None, "sample", "2", "7", "auto"])
    history = History(kind, directory, folder / "output", **own)
    for _ in range(choose.randint(1, 4)):
        published += PER_CHUNK * choose.randint(2, 9)
        produce(directory, published, PER_CHUNK, end=False)
        shape = any_shape(choose)
        run = history.plan(shape)
        left = run.course.drawable(published) - run.course.current.draws
        assert not history.start(shape, min(choose.randint(0, 5), max(0, left) // (shape.batch * shape.accumulation)))
    published += choose.randint(30, 50)
    produce(directory, published, PER_CHUNK)
    shape = any_shape(choose)
    assert history.start(shape)
    assert_once(history, published, 1, shape.step)
    last = load_position(history.output / f"checkpoint-{history.last[0].saved[-1]}")
    assert last is not None and last.consumed == len(history.trained)


@both
def test_repeated_stream_goes_on_with_other_ranks(tmp_path: Path, streams: Streams, kind: str) -> None:
    options: dict[str, Any] = {"sharded_lazy_on_end": "repeat", "sharded_lazy_shuffle_window": 1, STEPS[kind]: 20}
    history = History(kind, streams[25], tmp_path, **options)
    assert not history.start(Shape(2, 2, 1), 8)
    assert not history.start(Shape(3, 1, 1), 6)
    assert history.start(Shape(1, 2, 2))
    assert max(history.last[0].steps) == 19
    assert len(history.trained) == 8 * 4 + 6 * 3 + 6 * 4
    # 24 of 25 samples with 2 ranks; of the second epoch 8, and 15 of the other 17 with 3.
    assert len(set(history.trained)) == len(history.trained)
    assert [sum(1 for at, _ in history.trained if at == epoch) for epoch in range(4)] == [24, 23, 25, 2]


def test_steps_of_several_sizes_do_not_say_how_many_samples_a_step_has(tmp_path: Path, streams: Streams) -> None:
    history = History("swift", streams[25], tmp_path, num_train_epochs=3)
    # 12 micro batches: steps of 5, 5 and 2.
    history.start(Shape(1, 2, 5), 4)
    (part,) = history.plans[0].state.parts
    assert (part.draws, part.draws_per_step) == (0, 0)
    assert history.start(Shape(2, 1, 5))
    assert_once(history, 25, 3, 2)


@pytest.mark.parametrize(("epochs", "steps"), [(1.5, 12 + 6), (0.5, 6)])
def test_fractions_of_epochs(tmp_path: Path, streams: Streams, epochs: float, steps: int) -> None:
    history = History("swift", streams[48], tmp_path, num_train_epochs=epochs)
    history.start(Shape(4, 1, 1), 3)
    assert history.start(Shape(2, 1, 2))
    assert (len(history.trained), max(history.last[0].steps)) == (4 * steps, steps - 1)


def test_checkpoint_of_format_1_goes_on_with_other_ranks(tmp_path: Path, streams: Streams) -> None:
    history = History("megatron", streams[48], tmp_path, train_iters=40, save_steps=3)
    history.start(Shape(2, 1, 2), 3)
    assert history.checkpoint is not None
    file = history.checkpoint / "lazyshard.json"
    values = orjson.loads(file.read_bytes())
    del values["state"], values["skipped"]
    file.write_bytes(orjson.dumps(values | {"format": 1}))
    assert history.start(Shape(3, 2, 1))
    assert_once(history, 48, 1, 6)
    found = [(part.dp, part.draws, part.first_step, part.draws_per_step) for part in history.plans[0].state.parts]
    assert found == [(2, 6, 0, 2), (3, 0, 3, 2)]


def test_stream_that_was_cut_is_refused(tmp_path: Path, streams: Streams) -> None:
    history = History("swift", streams[61], tmp_path, max_steps=50)
    history.start(Shape(2, 1, 1), 10)
    history.start(Shape(4, 1, 1), 8)
    assert history.checkpoint is not None
    for samples in (1, 12, 51):
        facts = facts_of(streams[61])._replace(samples=samples)
        with pytest.raises(ResumeRefused) as error:
            resumed(decide_one(history.args(Shape(1, 1, 1)), facts, Rank(0, 1)))
        tells(error.value, checkpoint=str(history.checkpoint), actual=str(samples))


@pytest.fixture(params=["swift", "megatron"])
def history(request: pytest.FixtureRequest, tmp_path: Path, streams: Streams) -> History:
    options: dict[str, Any] = {"sharded_lazy_shuffle_window": 1, STEPS[request.param]: 500}
    return History(request.param, streams[TOTAL], tmp_path, **options)


def uninterrupted(history: History, shape: Shape) -> list[list[int]]:
    course = history.plan(shape).course
    per_step = shape.batch * shape.accumulation
    return [
        [course.draw(lane, place, TOTAL).sample for lane in range(shape.dp) for place in range(at, at + per_step)]
        for at in range(0, course.begin(TOTAL).length, per_step)
    ]


def assert_trained(history: History, out: set[int], step: int = 1) -> None:
    """Checks that all but these were trained once, but for fewer than a step at the end of the stream."""
    trained = [sample for _, sample in history.trained]
    assert len(trained) == len(set(trained))
    assert not out & set(trained)
    assert len(set(range(TOTAL)) - out - set(trained)) < step


@pytest.mark.parametrize("after", [Shape(3, 1, 1), Shape(1, 2, 1)])
def test_next_steps_are_passed_over(history: History, after: Shape) -> None:
    shape = Shape(2, 1, 2)
    steps = uninterrupted(history, shape)
    history.start(shape, 4)
    assert history.start(after, sharded_lazy_skip="steps 5:8")
    out = {sample for step in steps[4:7] for sample in step}
    assert len(out) == 12
    assert_trained(history, out, after.step)
    # Steps continue to be counted where they were.
    assert min(history.last[0].steps) == 4


def test_samples_and_chunks_are_left_out_of_what_is_left(history: History) -> None:
    history.start(Shape(2, 1, 2), 3)
    before = {sample for _, sample in history.trained}
    assert history.start(Shape(1, 1, 1), sharded_lazy_skip="samples 30:35, chunks 0:2, chunks 13:14")
    assert_trained(history, {*range(30, 35), *range(6), *range(39, 42)} - before)


def test_command_that_is_started_again_leaves_nothing_out_twice(history: History) -> None:
    shape, again = Shape(2, 1, 2), "steps 5:7, samples 40:42"
    steps = uninterrupted(history, shape)
    history.start(shape, 4)
    for _ in range(3):
        history.start(shape, 1, sharded_lazy_skip=again)
    assert history.start(shape, sharded_lazy_skip=again)
    assert_trained(history, {*(sample for step in steps[4:6] for sample in step), 40, 41}, shape.step)
    # Trained, passed over up to the end of a window, and what is left without the two samples.
    assert [part.skip for part in history.plans[0].state.parts] == [(), (), ((40, 42),)]


def test_what_cannot_be_left_out_is_refused_naming_the_argument(history: History) -> None:
    history.start(Shape(2, 1, 2), 3)
    error = raised(SettingsRefused, history.plan, Shape(2, 1, 2), sharded_lazy_skip="steps 3:5")
    tells(error, argument="sharded_lazy_skip")
    anew: dict[str, Any] = {"sharded_lazy_skip": "steps 2:3"}
    for args in (
        # Steps of a run that begins anew; and ms-swift's own shuffle leaves nothing out.
        megatron(train_iters=9, **anew),
        hugging_face(max_steps=9, **anew),
        megatron(train_iters=9, data_sharding=True, sharded_lazy_skip="samples 1:2"),
    ):
        tells(raised(SettingsRefused, decided, args), argument="sharded_lazy_skip")


def test_later_steps_of_a_live_stream_that_are_not_published_are_refused(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 24, PER_CHUNK, end=False)
    history = History("megatron", directory, tmp_path / "out", train_iters=50, sharded_lazy_shuffle_window=1)
    history.start(Shape(2, 1, 1), 3)
    assert history.plan(Shape(2, 1, 1), sharded_lazy_skip="steps 6:13").state.parts[-1].skip
    error = raised(SettingsRefused, history.plan, Shape(2, 1, 1), sharded_lazy_skip="steps 6:14")
    tells(error, "steps before 14", argument="sharded_lazy_skip")
    # What comes next is passed over, whatever it is.
    assert history.plan(Shape(2, 1, 1), sharded_lazy_skip="steps 4:41").state.parts[-2].draws == 37


def args_with(unit: Any, **changes: Any) -> Any:
    return megatron(**{"train_iters": 7, "micro_batch_size": 2, "sharded_lazy_unit": unit, **changes})


@pytest.mark.parametrize(
    ("unit", "samples"), [(None, 100), ("chunk", 100), ("batch", 2), ("sample", 1), ("30", 30), (30, 30), ("250", 250)]
)
def test_what_is_named_is_dealt(unit: Any, samples: int, notices: list[str]) -> None:
    run = decided(args_with(unit), dp=8, per_chunk=100)
    # Eight chunks' worth, in whole units.
    assert run.course.rules == Rules(samples, -(-800 // samples) * samples, 42)
    assert run.position(0, 0).unit == samples
    assert notices == []
    # ms-swift's own shuffle keeps whole chunks.
    run = decided(args_with(unit, data_sharding=True), 1600, dp=8, per_chunk=100)
    assert (run.layout, run.state.unit, len(notices)) == ("block", 100, unit not in (None, "chunk"))


def test_auto_goes_by_what_all_ranks_know(notices: list[str]) -> None:
    for samples, ended, iterations, unit in (
        # Eight ranks with chunks of 100; steps of 16.
        (800, True, 10, 100),
        (799, True, 10, 2),
        # Once it has ended its own length counts, not how much of it is trained.
        (5000, True, 1, 100),
        # Of a live stream nobody knows more than what the run is to train; what is published is of no account.
        (0, False, 50, 100),
        (0, False, 49, 2),
        (5000, False, 49, 2),
    ):
        run = decided(args_with("auto", train_iters=iterations), samples, ended, 8, 100)
        assert (run.state.unit, len(notices)) == (unit, unit == 2)
        if unit == 2:
            told = notices.pop()
            assert ("--sharded_lazy_shuffle_window 0" in told) == (not ended)
            assert f"{samples if ended else iterations * 16} samples" in told


def test_other_unit_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    where = checkpoint(tmp_path, decided(args_with("batch")).position(48, 3))
    again: dict[str, Any] = {"finetune": False, "mcore_model": where}
    assert decided(args_with("batch", **again)).state.unit == 2
    for args in (args_with("chunk", **again), args_with("batch", **again, micro_batch_size=4)):
        tells(raised(ResumeRefused, decided, args), "--sharded_lazy_unit", expected="2", actual="4")
