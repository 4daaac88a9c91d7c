"""Kill -9 at a random step, and on with other ranks: what the surviving history trained of a stream, and of blends,
also with ordinary data sets, while one is written too.

Of each start counts what was trained up to the checkpoint that the next one continues from.
"""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import StreamReader
from lazyshard.plan.blend import BlendTable
from lazyshard.stream import read_cursor
from tests.stream.streams import cursor_of
from tests.swift.commands import RESUMABLE, Run, ids_by_dp, start_megatron_sft, start_swift_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, TP2_DP2, assert_every_sample_once, killed_at, position_of
from tests.swift.streams import write_jsonl, write_rows, write_stream

pytestmark = [pytest.mark.timeout(400)]
CONSUMER: Final = "rescaled"
OTHER: Final = 500  # rows of the second stream of a blend are numbered from here on


def options_of(work: Path, *streams: Path, **more: Any) -> dict[str, Any]:
    own = {"dataset": streams, "output_dir": work / "output", "sharded_lazy": True, "save_steps": 2}
    return {**own, "sharded_lazy_consumer": CONSUMER, **more}


def test_swift_with_4_then_2_then_3_processes(tmp_path: Path, model: Path) -> None:
    choose, samples = random.Random(11), 221
    directory = write_stream(tmp_path / "stream", 0, 96, SIZE, end=False)
    options = options_of(tmp_path, directory, max_steps=60, save_strategy="steps")
    with start_swift_sft(tmp_path / "run1", model, processes=4, **options) as training:
        first, checkpoint = killed_at(training, directory, CONSUMER, choose.randint(4, 8))
    checkpoints = [checkpoint]
    write_stream(directory, 96, 160, SIZE, end=False)
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "resume_from_checkpoint": checkpoint}
    begun = position_of(checkpoint).step
    with start_swift_sft(tmp_path / "run2", model, processes=2, **options, **more) as training:
        second, checkpoint = killed_at(training, directory, CONSUMER, begun + choose.randint(3, 5))
    checkpoints.append(checkpoint)
    write_stream(directory, 160, samples, SIZE)
    more = {"per_device_train_batch_size": 1, "resume_from_checkpoint": checkpoint, "max_steps": 200}
    with start_swift_sft(tmp_path / "run3", model, processes=3, **options | {"save_steps": 1000} | more) as training:
        third = training.end()
    last = max(batch.step for batch in third.batches)
    checkpoints.append(tmp_path / "output" / f"checkpoint-{last}")
    assert_every_sample_once([first, second, third], checkpoints, samples)
    assert "ranks: 2, micro batch: 2 (before the restart ranks: 4" in second.output


def consumed(directory: Path) -> int:
    cursor = read_cursor(directory, CONSUMER)
    return 0 if cursor is None else cursor.consumed


def of_streams(ids: Sequence[int]) -> list[int]:
    """Which stream of a blend each of these samples is of."""
    return [int(number >= OTHER) for number in ids]


def trained_by(run: Run, until: int = 10_000) -> list[int]:
    by_dp = ids_by_dp(batch for batch in run.batches if batch.step <= until)
    return [number for ids in by_dp.values() for number in ids]


def test_swift_blends_a_live_stream_with_an_ended_one_then_with_other_weights(tmp_path: Path, model: Path) -> None:
    first = write_stream(tmp_path / "first", 0, 32, SIZE, end=False)
    second = write_stream(tmp_path / "second", OTHER, OTHER + 60, SIZE)
    options = options_of(tmp_path, first, second, interleave_prob=[0.25, 0.75], save_strategy="steps", max_steps=200)
    with start_swift_sft(tmp_path / "run1", model, processes=2, **options) as training:
        begun, checkpoint = killed_at(training, first, CONSUMER, random.Random(3).randint(4, 7))
    for ids in ids_by_dp(begun.batches).values():
        assert of_streams(ids) == BlendTable((1, 3)).streams(0, len(ids)), "the shares of the first start"
    saved = position_of(checkpoint)
    trained = trained_by(begun, saved.step)
    assert saved.consumed == len(trained) == saved.step * 2 * MICRO
    more: dict[str, Any] = {"interleave_prob": [0.75, 0.25], "resume_from_checkpoint": checkpoint, "save_steps": 1000}
    with start_swift_sft(tmp_path / "run2", model, processes=1, **options | more) as training:
        training.wait_for(lambda: saved.step + 3 in training.losses, "three steps")
        write_stream(first, 32, 50, SIZE)
        ended = training.end()
    rest = trained_by(ended)
    assert of_streams(rest[:16]) == BlendTable((3, 1)).streams(0, 16), "the shares of the second start"
    trained += rest
    assert len(set(trained)) == len(trained)
    counts = Counter(of_streams(trained))
    assert 50 - 2 * MICRO < counts[0] <= 50, "it ends with the live stream"
    assert f"lazyshard: {first} has ended with 50 samples: training stops after step" in ended.output
    assert f"; not trained: {60 - counts[1]} of the 60 of {second}" in ended.output
    for number, directory in enumerate((first, second)):
        assert consumed(directory) == counts[number]
        cursor = cursor_of(directory, CONSUMER)
        assert cursor.chunks_before * SIZE <= cursor.consumed
        told = [(one.stream, one.weight, one.consumed) for one in cursor.blend]
        assert told == [(str(first), 0.75, counts[0]), (str(second), 0.25, counts[1])], "what watch shows of it"
    last = max(batch.step for batch in ended.batches)
    assert position_of(tmp_path / "output" / f"checkpoint-{last}").consumed == len(trained)


def test_megatron_blends_with_tp2_dp2_and_async_saves_then_dp2(tmp_path: Path, model: Path) -> None:
    first = write_stream(tmp_path / "first", 0, 64, SIZE)
    second = write_stream(tmp_path / "second", OTHER, OTHER + 60, SIZE)
    # The last one, or Megatron cannot load its optimizer with another tensor parallelism.
    own = {"interleave_prob": [2, 1], "save_safetensors": False, "dist_ckpt_optim_fully_reshardable": True}
    options = {**RESUMABLE, **options_of(tmp_path, first, second, train_iters=60, **own)}
    with start_megatron_sft(tmp_path / "run1", model, async_save=True, **options, **TP2_DP2) as training:
        training.wait_for(lambda: consumed(first) > 0, "cursor")
        begun, checkpoint = killed_at(training, first, CONSUMER, 1)
    # The position lies there from the beginning of the save on, Megatron's metadata only at its end.
    saved = position_of(checkpoint).step
    assert (checkpoint / f"iter_{saved:07d}" / "metadata.json").exists()
    assert max(batch.step for batch in begun.batches) > saved, "training continued during the save"
    # When it was killed not all peers had as much.
    for ids in ids_by_dp(batch for batch in begun.batches if batch.step <= saved).values():
        assert of_streams(ids) == BlendTable((2, 1)).streams(0, len(ids))
    trained = trained_by(begun, saved)
    assert position_of(checkpoint).consumed == len(trained)
    more = {"mcore_model": checkpoint, "finetune": False, "save_steps": 1000, "micro_batch_size": 1}
    with start_megatron_sft(tmp_path / "run2", model, processes=2, **options | more) as training:
        trained += trained_by(training.end())
    assert len(set(trained)) == len(trained)
    counts = Counter(of_streams(trained))
    assert counts[0] > 64 - 12, "it ends with the first stream, which is the shorter one for its share"
    assert abs(counts[0] - 2 * counts[1]) <= 8


def spool_of(work: Path) -> Path:
    (found,) = (work / "output" / "lazyshard-spools").iterdir()
    return found


def test_stream_and_file_blended_killed_and_resumed_with_one_process(tmp_path: Path, model: Path) -> None:
    stream = write_stream(tmp_path / "stream", 0, 32, SIZE, end=False)
    file = write_jsonl(tmp_path / "file.jsonl", OTHER, OTHER + 63)
    more: dict[str, Any] = {"interleave_prob": [0.25, 0.75], "save_strategy": "steps", "max_steps": 200}
    options = options_of(tmp_path, stream, file, dataset_shuffle=False, train_dataloader_shuffle=False, **more)
    with start_swift_sft(tmp_path / "run1", model, processes=2, **options) as training:
        begun, checkpoint = killed_at(training, stream, CONSUMER, 5)
    saved = position_of(checkpoint)
    trained = trained_by(begun, saved.step)
    assert saved.consumed == len(trained) == saved.step * 2 * MICRO
    for rank, ids in ids_by_dp(begun.batches).items():
        assert of_streams(ids) == BlendTable((1, 3)).streams(0, len(ids)), "the shares"
        # The stream is dealt in chunks; the rows of the spool, which has only one, in turn.
        expected = [n for n in range(32) if n // SIZE % 2 == rank], list(range(OTHER + rank, OTHER + 63, 2))
        for which, numbers in enumerate(expected):
            own = [number for number in ids if int(number >= OTHER) == which]
            assert own == numbers[: len(own)]
    spool = spool_of(tmp_path)
    written = {path.name: path.stat().st_ino for path in spool.glob("chunk_*")}
    assert StreamReader(spool).refresh()[1:3] == (63, True)
    # The same rows are found again, other ones are not trained as if they were the same.
    content = file.read_bytes()
    write_jsonl(file, OTHER, OTHER + 64)
    more = {"resume_from_checkpoint": checkpoint, "save_steps": 1000}
    with start_swift_sft(tmp_path / "changed", model, processes=2, **options | more) as training:
        changed = training.wait()
    assert changed.returncode != 0 and changed.output.count("exitcode  : 2 ") >= 1, changed.tail()
    assert f"{checkpoint}: --dataset {file}: " in changed.output
    file.write_bytes(content)
    with start_swift_sft(tmp_path / "run2", model, processes=1, **options | more) as training:
        training.wait_for(lambda: saved.step + 3 in training.losses, "three steps")
        write_stream(stream, 32, 41, SIZE)
        rest = trained_by(training.end())
    trained += rest
    begun_at = saved.consumed // 2
    assert of_streams(rest[:16]) == BlendTable((1, 3)).streams(begun_at, begun_at + 16), "the same order goes on"
    assert len(set(trained)) == len(trained)
    counts = Counter(of_streams(trained))
    assert 63 - 2 * MICRO < counts[1] <= 63, "it ends with the file, which is the shorter one for its share"
    assert {path.name: path.stat().st_ino for path in spool.glob("chunk_*")} == written


def test_killed_while_it_writes_the_spool(tmp_path: Path, model: Path) -> None:
    samples = 4_000
    stream = write_stream(tmp_path / "stream", 20_000, 20_032, SIZE)
    file = write_jsonl(tmp_path / "file.jsonl", 0, samples)
    options = options_of(tmp_path, stream, file, interleave_prob=[0.5, 0.5], max_steps=3, dataset_shuffle=False)
    options |= {"sharded_lazy_samples_per_chunk": SIZE, "save_steps": 1000}
    spools = tmp_path / "output" / "lazyshard-spools"
    with start_swift_sft(tmp_path / "run1", model, processes=2, **options) as training:
        training.wait_for(lambda: any(spools.glob("*/chunk_00009.jsonl.completed")), "ten chunks of the spool")
        training.kill()
    spool = spool_of(tmp_path)
    assert not (spool / "stream.end").exists(), "it was killed too late"
    before = {path.name: path.stat().st_ino for path in spool.glob("chunk_*.jsonl.completed")}
    run = swift_sft(tmp_path / "run2", model, processes=2, **options)
    assert [len(ids) for ids in ids_by_dp(run.batches).values()] == [3 * MICRO] * 2
    assert spool_of(tmp_path) == spool
    after = {path.name: path.stat().st_ino for path in spool.glob("chunk_*.jsonl.completed")}
    assert len(after) == samples // SIZE > len(before)
    assert after | before == after, "chunks were written again"
    found = [rows["messages"][0]["content"].split()[1] for rows in StreamReader(spool)]
    assert found == [f"{number:05d}" for number in range(samples)]


@pytest.mark.parametrize("entry", ["hf::org/unknown#5", "nothing.jsonl"])
def test_data_that_cannot_be_trained_end_the_run_with_2(entry: str, tmp_path: Path, model: Path) -> None:
    stream = write_stream(tmp_path / "stream", 0, 8, SIZE)
    # Rows that ms-swift drops.
    file = write_rows(tmp_path / "nothing.jsonl", [{"messages": []}] * 3)
    given = str(file) if entry == file.name else entry
    options = options_of(tmp_path, stream, interleave_prob=[0.5, 0.5], max_steps=3) | {"dataset": [stream, given]}
    with start_swift_sft(tmp_path / "run", model, processes=2, **options) as training:
        run = training.wait()
    assert run.returncode != 0
    assert f"error: --dataset {given}: " in run.output, run.tail()
    assert "exitcode  : 2 " in run.output
    assert not (tmp_path / "output" / "lazyshard-spools").exists()
