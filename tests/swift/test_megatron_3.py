"""The Megatron path of ms-swift 3.12, with stand-ins for its trainer and for Megatron-LM's loop.

Both are of the shape of their models: what is called by which name, with what, and in which order.
"""

import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.data.rank import Rank
from lazyshard_swift import megatron_3
from lazyshard_swift.errors import ResumeRefused, SettingsRefused
from lazyshard_swift.megatron_3 import as_in_4, extend
from lazyshard_swift.parallel import Facts, data_parallel_rank
from lazyshard_swift.planning import decide
from lazyshard_swift.stream import TrainStream
from tests.swift.defaults import DEFAULTS

SAMPLES_PER_CHUNK = 4
MICRO_BATCH = 2
GLOBAL_BATCH = 8
ALONE = Rank(0, 1)


def write(directory: Path, first: int, last: int, *, end: bool) -> None:
    writer = ChunkWriter(directory, SAMPLES_PER_CHUNK)
    for number in range(first, last):
        writer.write({"n": number})
    writer.close(end=end)


def number_of(row: dict[str, Any], **options: Any) -> Any:
    return row["n"]


class Sampler:
    """In the order of 3.12's `MegatronPretrainingRandomSampler` without shuffle."""

    def __init__(self, total: int, consumed: int, rank: Rank) -> None:
        self.total, self.consumed, self.rank = total, consumed, rank

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed % self.total + self.rank.dp_rank, self.total, self.rank.dp_size):
            batch.append(index)
            if len(batch) == MICRO_BATCH:
                self.consumed += MICRO_BATCH * self.rank.dp_size
                yield batch
                batch = []


def make_module(megatron: SimpleNamespace, rank: Rank) -> types.ModuleType:
    """`swift.megatron.trainers.base`, extended, whose `get_args` gives `megatron`."""
    training = types.ModuleType("training")

    class BaseMegatronTrainer:
        def __init__(self) -> None:
            self.trained: list[int] = []
            self.saved: list[int] = []

        def build_pretraining_data_loader(self, dataset: Any, consumed_samples: int, data_collator: Any = None) -> Any:
            # The sampler's way through the data is decided by these.
            assert megatron.dataloader_type == "cyclic"
            assert not megatron.train_dataloader_shuffle
            assert not megatron.data_sharding
            sampler = Sampler(len(dataset), consumed_samples, rank)
            return lambda: ([dataset[index] for index in batch] for batch in sampler)

        def save_checkpoint(self, iteration: int, model: Any, *rest: Any) -> None:
            folder = Path(megatron.save) / f"checkpoint-{iteration}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
            self.saved.append(iteration)

        def train(self, train_dataset: Any, val_dataset: Any, data_collator: Any) -> None:
            self.pretrain(train_dataset)

        def pretrain(self, dataset: Any) -> None:
            loader = self.build_pretraining_data_loader(dataset, megatron.consumed_train_samples, None)
            batches = (batch for _ in iter(int, 1) for batch in loader())
            iteration = megatron.iteration
            while iteration < megatron.train_iters:
                megatron.curr_iteration = iteration
                for _ in range(GLOBAL_BATCH // (MICRO_BATCH * rank.dp_size)):
                    self.trained += next(batches)
                iteration += 1
                megatron.consumed_train_samples += GLOBAL_BATCH
                if vars(training)["checkpoint_and_decide_exit"](self, iteration):
                    return
            if iteration != 0 and iteration % megatron.save_interval != 0:
                self.save_checkpoint(iteration, [])

    def checkpoint_and_decide_exit(trainer: BaseMegatronTrainer, iteration: int) -> bool:
        if iteration % megatron.save_interval == 0:
            trainer.save_checkpoint(iteration, [])
        return bool(iteration == megatron.exit_interval)

    vars(training).update(checkpoint_and_decide_exit=checkpoint_and_decide_exit)
    module = types.ModuleType("swift.megatron.trainers.base")
    vars(module).update(BaseMegatronTrainer=BaseMegatronTrainer, training=training, get_args=lambda: megatron)
    return module


def swift_args(save: Path, **changed: Any) -> SimpleNamespace:
    """The arguments that ms-swift parses."""
    values: dict[str, Any] = {
        "micro_batch_size": MICRO_BATCH,
        "global_batch_size": GLOBAL_BATCH,
        "train_iters": None,
        "max_epochs": None,
        "save": str(save),
        "save_strategy": "steps",
        "load": None,
        "adapter_load": None,
        "adapters": [],
        "model": None,
        "finetune": False,
        "async_save": False,
        "no_data_sharding": False,
        "train_dataloader_shuffle": True,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_seed": 42,
        **DEFAULTS,
        "sharded_lazy": True,
        "sharded_lazy_consumer": "run",
    }
    return SimpleNamespace(**{**values, **changed})


class Job:
    """One rank of a job: arguments, stream, trainer."""

    def __init__(self, directory: Path, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, rank: Rank) -> None:
        self.given = rank
        monkeypatch.setattr(megatron_3, "_coming_rank", lambda args: rank)
        self._patch = monkeypatch
        reader = StreamReader(directory)
        published = reader.refresh()
        facts = Facts(str(reader.stream_id), reader.samples_per_chunk, published.samples, published.ended)
        encoder: Any = number_of
        named = as_in_4(args)
        self.stream = TrainStream(
            decide(named, str(directory), facts, data_parallel_rank(named)),
            encoder,
            max_wait=20.0,
            on_bad_sample="raise",
            samples_per_chunk=None,
        )
        train_iters = args.train_iters
        if args.max_epochs is not None:
            train_iters = len(self.stream) * args.max_epochs // GLOBAL_BATCH
        # Megatron-LM's, of which ms-swift's are a part.
        self.megatron = SimpleNamespace(
            **{
                **vars(args),
                "train_iters": train_iters,
                "iteration": 0,
                "consumed_train_samples": 0,
                "dataloader_type": "cyclic",
                "data_sharding": True,
                "group_by_length": False,
                "save_interval": 1000,
                "exit_interval": None,
            }
        )
        self.module = make_module(self.megatron, rank)
        extend(self.module)
        self.trainer = self.module.BaseMegatronTrainer()

    def train(self) -> list[int]:
        self._patch.setattr(megatron_3, "resolve_rank", lambda: self.given)
        self.trainer.train(self.stream, None, None)
        trained: list[int] = self.trainer.trained
        return trained


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Makes a rank that trains on the stream in tmp_path / "stream"."""

    def make(rank: Rank = ALONE, **changed: Any) -> Job:
        args = swift_args(tmp_path / f"output{rank.dp_rank}", **changed)
        return Job(tmp_path / "stream", args, monkeypatch, rank)

    return make


def position(checkpoint: Path) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads((checkpoint / "lazyshard.json").read_bytes())
    return saved


def test_live_stream_stops_at_last_whole_step(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 24, end=False)
    jobs = [job(Rank(rank, 2), train_iters=100) for rank in (0, 1)]
    write(tmp_path / "stream", 24, 45, end=True)
    trained = [each.train() for each in jobs]
    assert [len(ids) for ids in trained] == [20, 20]
    assert len(set(trained[0] + trained[1])) == 40
    # Whole stripes: chunk k is read by rank k % 2.
    assert all(number // 4 % 2 == rank for rank in (0, 1) for number in trained[rank] if number < 40)
    assert [(each.trainer.saved, each.megatron.train_iters) for each in jobs] == [([5], 5), ([5], 5)]
    saved = position(tmp_path / "output0" / "checkpoint-5")
    assert (saved["consumed"], saved["step"], saved["dp_size"], saved["layout"]) == (40, 5, 2, "strided")
    assert json.loads((tmp_path / "stream" / "cursors" / "run.json").read_bytes())["consumed"] == 40


def test_ended_stream_by_epochs(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 32, end=True)
    trained = job(max_epochs=2).train()
    assert sorted(trained[:32]) == sorted(trained[32:]) == list(range(32))
    assert trained[:32] != trained[32:]


def test_stops_where_megatron_stops(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 16, end=False)
    one = job(train_iters=2)
    # After the last step nothing is waited for; the stream has no more.
    assert sorted(one.train()) == list(range(16))
    assert one.trainer.saved == [2]
    other = job(train_iters=100)
    other.megatron.exit_interval = 2
    assert sorted(other.train()) == list(range(16))


@pytest.mark.parametrize("iteration", [3, 0])
def test_resume_goes_on_exactly(iteration: int, job: Callable[..., Job], tmp_path: Path) -> None:
    """Megatron-LM sets the iteration to 0 where ms-swift has restored the samples alone."""
    write(tmp_path / "stream", 0, 64, end=True)
    before = job(train_iters=3).train()
    checkpoint = tmp_path / "output0" / "checkpoint-3"
    resumed = job(train_iters=8 - (3 - iteration), load=str(checkpoint))
    resumed.megatron.iteration, resumed.megatron.consumed_train_samples = iteration, 24
    assert sorted(before + resumed.train()) == list(range(64))


def test_resume_at_the_end_trains_nothing(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 20, end=True)
    assert len(job(train_iters=9).train()) == 16
    resumed = job(train_iters=9, load=str(tmp_path / "output0" / "checkpoint-2"))
    resumed.megatron.iteration, resumed.megatron.consumed_train_samples = 2, 16
    assert resumed.train() == []
    assert resumed.megatron.train_iters == 2


def test_resume_elsewhere_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 64, end=True)
    job(train_iters=3).train()
    resumed = job(train_iters=8, load=str(tmp_path / "output0" / "checkpoint-3"))
    resumed.megatron.iteration, resumed.megatron.consumed_train_samples = 4, 32
    with pytest.raises(ResumeRefused, match=r"24 samples were trained in 3 steps, .* go on after 32"):
        resumed.train()
    assert resumed.trainer.trained == []


@pytest.mark.parametrize(
    ("process", "world", "sizes", "rank"),
    [
        (0, 1, (1, 1, 1), Rank(0, 1)),
        (3, 4, (1, 1, 1), Rank(3, 4)),
        (3, 4, (2, 1, 1), Rank(1, 2)),
        (2, 4, (1, 1, 2), Rank(0, 2)),
        (13, 16, (2, 2, 2), Rank(1, 2)),
        (9, 16, (2, 2, 2), Rank(0, 2)),
    ],
)
def test_coming_rank(
    process: int, world: int, sizes: tuple[int, int, int], rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `megatron.core.parallel_state` deals processes in its order tp-cp-ep-dp-pp."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: process)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world)
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    args = swift_args(tmp_path, train_iters=1, **dict(zip(names, sizes, strict=True)))
    assert as_in_4(args).lazyshard_rank == rank


def test_processes_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsRefused, match="1 processes cannot be divided by tensor_model_parallel_size 2"):
        as_in_4(swift_args(tmp_path, train_iters=1, tensor_model_parallel_size=2))


def test_other_rank_than_planned_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 32, end=True)
    one = job(Rank(1, 2), train_iters=1)
    one.given = Rank(0, 2)
    with pytest.raises(SettingsRefused, match=r"made this process data-parallel rank 0 of 2, its data .* rank 1 of 2"):
        one.train()


def test_epochs_of_a_live_stream_are_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 32, end=False)
    with pytest.raises(SettingsRefused, match="still being produced, so an epoch has no length yet"):
        job(max_epochs=2)


@pytest.mark.parametrize("lengths", [{}, {"train_iters": 4, "max_epochs": 2}])
def test_no_length_or_two_are_refused(lengths: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(SettingsRefused, match="either with --train_iters N or"):
        as_in_4(swift_args(tmp_path, **lengths))


@pytest.mark.parametrize("name", sorted(megatron_3._UNCERTAIN))
def test_uncertain_settings_are_refused(name: str, job: Callable[..., Job], tmp_path: Path) -> None:
    """Those of ms-swift before anything is read, those of Megatron-LM alone before the first step."""
    with pytest.raises(SettingsRefused, match=f"--{name} cannot work .* upgrade to ms-swift 4"):
        as_in_4(swift_args(tmp_path, train_iters=1, **{name: [1]}))
    write(tmp_path / "stream", 0, 32, end=True)
    one = job(train_iters=1)
    setattr(one.megatron, name, [1])
    with pytest.raises(SettingsRefused, match=f"--{name} cannot work"):
        one.train()


def test_arguments_stay_as_they_are(tmp_path: Path) -> None:
    args = swift_args(tmp_path, train_iters=5)
    before = dict(vars(args))
    renamed = as_in_4(args)
    renamed.num_train_epochs = 3
    assert vars(args) == before
    assert renamed.output_dir == str(tmp_path)


def test_ordinary_data_take_the_ordinary_way(job: Callable[..., Job], tmp_path: Path) -> None:
    write(tmp_path / "stream", 0, 32, end=True)
    one = job(train_iters=2)
    one.megatron.train_dataloader_shuffle = one.megatron.data_sharding = False
    one.trainer.train(list(range(100, 116)), None, None)
    assert one.trainer.trained == list(range(100, 116))
    assert one.trainer.saved == [2]
    assert not (tmp_path / "output0" / "checkpoint-2" / "lazyshard.json").exists()


@pytest.mark.parametrize("missing", ["checkpoint_and_decide_exit", "get_args", "save_checkpoint"])
def test_missing_hook_point_changes_nothing(missing: str) -> None:
    module = make_module(SimpleNamespace(), ALONE)
    trainer = module.BaseMegatronTrainer
    for owner in (module.training, module):
        vars(owner).pop(missing, None)
    if missing in vars(trainer):
        delattr(trainer, missing)
    before = dict(vars(trainer))
    with pytest.raises(AttributeError, match=f"has no {missing}"):
        extend(module)
    assert dict(vars(trainer)) == before
