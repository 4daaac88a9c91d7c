"""Resuming on fewer GPUs: four ranks are killed in the middle of a run, three continue, each sample is trained once.

    python examples/fewer_gpus.py [FOLDER]

Four processes train on a stream that is still being produced, with a checkpoint every ten steps. After step 25 all of
them are killed with SIGKILL. Three processes continue from the newest checkpoint, without any setting for the change.
The samples of steps 21 to 25 are trained again, as their weights are lost, and everything else once. `lazyshard audit`
proves this from the checkpoints alone, `lazyshard trace` shows when a sample was trained, and the logs of the ranks
must agree.

Ranks are processes on the CPU that use gloo; `train` is what each process of torchrun would run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from lazyshard import Batches, ChunkWriter, LazyShardedDataset, Order

SAMPLES = 500
FIRST_SAMPLES = 200
"""Samples that are published before the kill: 25 steps of four ranks."""

BATCH = 2
SAVE_STEPS = 10


FORK = multiprocessing.get_context("fork")


def produce(stream: Path, stop: int) -> None:
    """Publishes the samples before `stop`, and ends the stream after the last one."""
    writer = ChunkWriter(stream, samples_per_chunk=10)
    for number in range(writer.published_samples, stop):
        writer.write({"id": number, "x": [number / SAMPLES, 1.0]})
    writer.close(end=stop == SAMPLES)


def start(ranks: int, folder: Path) -> Sequence[BaseProcess]:
    """Starts the ranks as processes."""
    processes = [FORK.Process(target=train, args=(rank, ranks, folder), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def train(rank: int, ranks: int, folder: Path) -> None:
    """Trains as one rank until the stream ends, from the newest checkpoint if there is one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet_{ranks}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    dataset = LazyShardedDataset(folder / "stream", batch_size=BATCH, order=Order(shuffle_window=1))
    batches = dataset.batches(collate_fn=list)
    if newest := max((folder / "run").glob("checkpoint-*"), key=step_of, default=None):
        model.load_state_dict(torch.load(newest / "model.pt"))
        batches.load_state_dict(json.loads((newest / "lazyshard.json").read_bytes())["state"])
    with (folder / f"rank_{rank}_of_{ranks}.txt").open("w", buffering=1) as log:
        for rows in batches:  # ends with the stream
            learn(model, torch.tensor([row["x"] for row in rows]))
            log.write(f"{batches.step} {' '.join(str(row['id']) for row in rows)}\n")
            if rank == 0 and batches.step % SAVE_STEPS == 0:
                save(folder / "run", model, batches)
    if rank == 0 and batches.step % SAVE_STEPS:
        save(folder / "run", model, batches)
    dist.destroy_process_group()


def learn(model: torch.nn.Linear, x: torch.Tensor) -> None:
    """Does one step with the mean of all ranks' gradients."""
    (model(x) - 1).square().mean().backward()
    for weight in model.parameters():
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        weight.data -= 0.05 * weight.grad / dist.get_world_size()
        weight.grad = None


def save(run: Path, model: torch.nn.Module, batches: Batches) -> None:
    """Writes a checkpoint atomically."""
    checkpoint, new = run / f"checkpoint-{batches.step}", run / ".new"
    new.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), new / "model.pt")
    (new / "lazyshard.json").write_text(json.dumps({"state": batches.state_dict(), "saved_at": time.time()}))
    os.replace(new, checkpoint)


def step_of(checkpoint: Path) -> int:
    """Returns the step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def trained(folder: Path, ranks: int) -> dict[int, list[int]]:
    """Returns the ids that the run with this number of ranks trained, by step."""
    steps: dict[int, list[int]] = {}
    for log in sorted(folder.glob(f"rank_*_of_{ranks}.txt")):
        for line in log.read_text().splitlines():
            step, *ids = map(int, line.split())
            steps.setdefault(step, []).extend(ids)
    return steps


def lazyshard(*arguments: str | Path) -> str:
    """Runs the command `lazyshard`, prints its output, and returns it."""
    command = [sys.executable, "-m", "lazyshard.cli", *map(str, arguments)]
    print("$ lazyshard", *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    done.check_returncode()
    return done.stdout


def main() -> None:
    """Trains with four ranks, kills them, continues with three, and checks the result."""
    folder = Path(*sys.argv[1:] or ["runs/fewer_gpus"]).absolute()
    if folder.exists():
        sys.exit(f"{folder} already exists: remove it, or give another folder")
    stream, run = folder / "stream", folder / "run"

    produce(stream, FIRST_SAMPLES)
    four = start(4, folder)
    while sum(map(len, trained(folder, 4).values())) < FIRST_SAMPLES:
        if any(process.exitcode is not None for process in four):
            sys.exit("a rank exited too early")
        time.sleep(0.05)
    for process in four:
        process.kill()
        process.join()
    first = trained(folder, 4)
    print(f"four ranks: killed after step {max(first)}; {', '.join(sorted(path.name for path in run.iterdir()))}")

    three = start(3, folder)
    produce(stream, SAMPLES)
    for process in three:
        process.join()
    if any(process.exitcode for process in three):
        sys.exit("a rank failed")
    second = trained(folder, 3)
    print(f"three ranks: continued with step {min(second)} and finished after step {max(second)}\n")

    last = max(run.glob("checkpoint-*"), key=step_of)
    audit = lazyshard("audit", stream, run)
    trace = lazyshard("trace", stream, "--state", last, "--sample", f"0,{first[25][0]}")

    lost = [number for step, ids in first.items() if step >= min(second) for number in ids]
    kept = [number for step, ids in first.items() if step < min(second) for number in ids]
    times = Counter(kept + [number for ids in second.values() for number in ids])
    assert set(times.values()) == {1}, f"trained more than once: {[n for n, count in times.items() if count > 1]}"
    assert SAMPLES - len(times) < 3 * BATCH, f"{len(times)} samples were trained; a step or more is missing"
    assert set(lost) <= set(times), "samples trained after the checkpoint must be trained again"
    assert "proven: no sample was trained twice, and none was passed over" in audit, audit
    assert f"trained at step {next(s for s, ids in second.items() if first[25][0] in ids)} by rank" in trace, trace
    print(f"ok: {len(times)} of {SAMPLES} samples were trained, each once, by four ranks and then by three")


if __name__ == "__main__":
    main()
