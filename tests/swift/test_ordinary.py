"""Ordinary data sets beside a stream: real runs that are killed, while a data set is written too, and resumed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lazyshard import StreamReader
from lazyshard.plan.blend import BlendTable
from tests.swift.commands import ids_by_dp, start_swift_sft, swift_sft
from tests.swift.consumption import MICRO, SIZE, killed_at, position_of
from tests.swift.streams import write_jsonl, write_rows, write_stream
from tests.swift.test_rescale import CONSUMER, OTHER, of_streams, options_of, trained_by

pytestmark = [pytest.mark.timeout(400)]


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
