"""Training that waits for data: it gives up in time, having saved what it trained, and nothing of it stays.

The streams have a producer that was killed, so every step past what it published waits.
"""

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.stream.streams import wait_until
from tests.swift.commands import Run, Training, ids_by_dp, start_megatron_sft, start_swift_sft, swift_sft
from tests.swift.consumption import SIZE, assert_dealt, position_of
from tests.swift.streams import producing, published, write_jsonl

pytestmark = [pytest.mark.timeout(600)]
SAMPLES: Final = 140  # rows that the producer has, most of which it has not published when it is killed
MAX_WAIT_S: Final = 6.0
TO_THE_END_S: Final = 60.0
"""What a command may take beyond that: 3 s in which a rank lets the others come to their own end, some for torchrun."""

UNTIL_GONE_S: Final = 60.0
WAITING: Final[dict[str, Any]] = {"sharded_lazy": True, "dataloader_num_workers": 2, "max_steps": 100}
GIVING_UP: Final[dict[str, Any]] = WAITING | {"sharded_lazy_max_wait": MAX_WAIT_S}


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """A stream whose producer was killed when 40 samples or some more were there."""
    directory = tmp_path / "stream"
    source = write_jsonl(tmp_path / "rows.jsonl", 0, SAMPLES)
    with producing(directory, source, SIZE, 60) as producer:
        wait_until(lambda: published(directory) >= 40, "40 samples")
        producer.kill()
        producer.wait()
    return directory


def files(directory: Path) -> list[str]:
    """What is in a stream, without the files of the run that registers there: they stay for when it comes back."""
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    own = [name for name in found if re.fullmatch(r"cursors(/[^.][^/]*\.json|/\.[^/]*\.lock)?", name)]
    assert len(own) in (0, 4), own
    return [name for name in found if name not in own]


def wait_until_it_waits(training: Training, directory: Path, ranks: int) -> None:
    """Waits until everything that is certain was trained, and every process and worker is at a loss."""
    span = 2 * SIZE * ranks
    certain = published(directory) // span * span // (2 * ranks)
    training.wait_for(lambda: set(training.losses) >= set(range(1, certain + 1)), f"loss of step {certain}")
    time.sleep(1)
    trainers = [process for process in training.processes() if process.trains]
    assert len(trainers) == ranks * (1 + WAITING["dataloader_num_workers"]), "ranks and their DataLoader workers"


def assert_gave_up(training: Training, stream: Path, ranks: tuple[str, ...]) -> tuple[Run, Path]:
    """Checks the ends of the processes: each said why, in time, and left nothing.

    Returns what was trained, and the checkpoint that was saved of its last step.
    """
    run = training.wait()
    took = time.time() - max(batch.time for batch in run.batches)
    assert MAX_WAIT_S - 1 < took < MAX_WAIT_S + TO_THE_END_S
    said = Counter(re.findall(r"^lazyshard(?:: (rank \d+))?: error: (.*) \(exit code 75\)$", run.output, re.MULTILINE))
    assert sorted(who for who, _ in said.elements()) == sorted(ranks), run.tail()
    for _, message in said:
        assert "waiting for chunk" in message and str(stream) in message and "--sharded_lazy_max_wait" in message
    tracebacks = re.findall(r"Traceback \(most recent call last\):(?:\n  .*)*", run.output)
    assert all("torch/distributed/run.py" in text for text in tracebacks), "a traceback that is not torchrun's own"
    assert not training.leftover_processes()
    checkpoint = run.output_dir / f"checkpoint-{max(batch.step for batch in run.batches)}"
    stops = f"lazyshard: no data arrived in time: training stops after step {checkpoint.name[11:]} of"
    assert run.output.count(stops) == 1
    assert f"samples trained. Checkpoint: {checkpoint}\n" in run.output
    told = f"trained {position_of(checkpoint).consumed} of {published(stream)} published samples"
    assert run.output.count(told) == 1, "once, at the checkpoint"
    return run, checkpoint


def test_every_megatron_rank_gives_up_with_75_and_a_checkpoint(tmp_path: Path, model: Path, stream: Path) -> None:
    before = files(stream)
    options = {**GIVING_UP, "max_steps": None, "train_iters": 100, "global_batch_size": 4}
    # torchrun ends the other ranks once it sees that one has ended: on a busy machine before they could say why.
    options["environment"] = {"PET_MONITOR_INTERVAL": "5"}
    with start_megatron_sft(tmp_path / "run", model, processes=2, dataset=stream, **options) as training:
        run, _ = assert_gave_up(training, stream, ("rank 0", "rank 1"))
        assert run.returncode == 1
    # torchrun's report.
    codes = re.findall(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+)", run.output)
    assert set(codes) == {("0", "75"), ("1", "75")}
    assert files(stream) == before


def test_swift_ends_with_75_and_a_checkpoint(tmp_path: Path, model: Path, stream: Path) -> None:
    before = files(stream)
    options: dict[str, Any] = {**GIVING_UP, "dataset": stream, "processes": 1}
    options |= {"save_strategy": "steps", "save_steps": 1000}
    with start_swift_sft(tmp_path / "run", model, **options) as training:
        run, checkpoint = assert_gave_up(training, stream, ("",))
        # Without torchrun the rank's own code is passed on.
        assert run.returncode == 75
    assert files(stream) == before
    # It continues with exactly the rest, once the producer has published that.
    with producing(stream, stream.parent / "rows.jsonl", SIZE, 1000):
        pass
    options |= {"resume_from_checkpoint": checkpoint, "output_dir": run.output_dir}
    resumed = swift_sft(tmp_path / "run2", model, **options)
    assert min(batch.step for batch in resumed.batches) == max(batch.step for batch in run.batches) + 1
    last = resumed.output_dir / f"checkpoint-{max(batch.step for batch in resumed.batches)}"
    left_over = assert_dealt(ids_by_dp([*run.batches, *resumed.batches]), SAMPLES)
    assert len(left_over) == SAMPLES - position_of(last).consumed < 8


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGKILL)])
def test_all_end_with_torchrun(tmp_path: Path, model: Path, stream: Path, ranks: int, number: signal.Signals) -> None:
    before = files(stream)
    options: dict[str, Any] = {**WAITING, "processes": ranks, "dataset": stream, "cold": True}
    with start_swift_sft(tmp_path / "run", model, **options) as training:
        wait_until_it_waits(training, stream, ranks)
        if number == signal.SIGINT:
            os.killpg(training.process.pid, number)
        else:
            (launcher,) = {one.pid for one in training.processes() if "torch.distributed.run" in one.argv}
            os.kill(launcher, number)
        assert training.wait(UNTIL_GONE_S).returncode == 128 + number
        assert not training.leftover_processes()
        assert ("lazyshard: interrupted (exit code 130)" in training.output) == (number == signal.SIGINT)
    assert files(stream) == before
