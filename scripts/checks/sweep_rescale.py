"""Chains of real trainings that are killed and resume with other numbers of ranks. Run by `scripts/sweep_rescale`."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.swift.commands import RESUMABLE, Run, start_megatron_sft, start_swift_sft  # noqa: E402
from tests.swift.consumption import SIZE, assert_every_sample_once, killed_at, position_of  # noqa: E402
from tests.swift.streams import write_stream  # noqa: E402
from tests.swift.warm import CPU  # noqa: E402

CONSUMER = "sweep"


def sizes(command: str, choose: random.Random) -> dict[str, Any]:
    """Returns random options for ranks, micro batch size and accumulation."""
    if command == "swift":
        return {
            "processes": choose.randint(1, 4),
            "per_device_train_batch_size": choose.randint(1, 2),
            "gradient_accumulation_steps": choose.randint(1, 2),
        }
    # Each step takes long here, and so does each checkpoint.
    tp, dp = choose.choice([(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)])
    batch, accumulation = choose.randint(1, 2), choose.randint(2, 3)
    return {
        "processes": tp * dp,
        "tensor_model_parallel_size": tp,
        "micro_batch_size": batch,
        "global_batch_size": dp * batch * accumulation,
    }


def run(command: str, seed: int, work: Path, model: Path) -> str:
    """Trains one chain; returns its description. Raises AssertionError if a check fails."""
    choose, samples = random.Random(f"{command} {seed}"), 0
    live, epochs = choose.random() < 0.5, choose.randint(1, 2)
    directory = work / "stream"
    options: dict[str, Any] = {
        "dataset": directory,
        "output_dir": work / "output",
        "sharded_lazy": True,
        "sharded_lazy_consumer": CONSUMER,
        "sharded_lazy_shuffle_window": choose.randint(0, 2),
        "save_steps": choose.randint(1, 3),
    }
    if command == "swift":
        options |= {"save_strategy": "steps"}
        options |= {"max_steps": 500} if live else {"num_train_epochs": epochs}
    else:
        options |= {**RESUMABLE, "save_safetensors": False, "dist_ckpt_optim_fully_reshardable": True}
        options |= {"train_iters": 500} if live else {"num_train_epochs": epochs}
    if not live:
        samples = choose.randint(240, 300) // (1 if command == "swift" else epochs)
        write_stream(directory, 0, samples, SIZE)
    start = start_swift_sft if command == "swift" else start_megatron_sft
    runs: list[Run] = []
    checkpoints: list[Path] = []
    told, before = [f"{'live' if live else f'{epochs} epochs'}, window {options['sharded_lazy_shuffle_window']}"], None
    starts = choose.randint(2, 3)
    for number in range(starts):
        last = number == starts - 1
        while (shape := sizes(command, choose)) == before:
            pass
        before = shape
        told.append(" ".join(str(value) for value in shape.values()))
        if live:
            write_stream(directory, samples, samples + 128 + (2 if last else 0), SIZE, end=last)
            samples += 128 + (2 if last else 0)
        more: dict[str, Any] = {}
        if checkpoints:
            go_on = {"resume_from_checkpoint": checkpoints[-1]}
            more = go_on if command == "swift" else {"mcore_model": checkpoints[-1], "finetune": False}
        if last:
            more["save_steps"] = 1000
        begun = position_of(checkpoints[-1]).step if checkpoints else 0
        with start(work / f"run{number}", model, **{**options, **shape, **more}) as training:
            if last:
                runs.append(training.wait())
                assert runs[-1].returncode == 0, runs[-1].tail()
                done = max((batch.step for batch in runs[-1].batches), default=begun)
                checkpoints.append(work / "output" / f"checkpoint-{done}")
                continue
            # The last checkpoint may be incomplete, the one before it is complete.
            kill = options["save_steps"] + choose.randint(1, 2)
            found, checkpoint = killed_at(training, directory, CONSUMER, begun + kill)
            runs.append(found)
            checkpoints.append(checkpoint)
    assert_every_sample_once(runs, checkpoints, samples, 1 if live else epochs)
    return "; ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sweep_rescale")
    parser.add_argument("--runs", type=int, default=1, help="runs of each command")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--command", choices=("swift", "megatron"), action="append")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sweep_rescale_"))
    model = folder / "model"
    subprocess.run([sys.executable, str(CPU / "tiny_model.py"), str(model), "2"], check=True)
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        for command in arguments.command or ("swift", "megatron"):
            work, begun = folder / f"{command}-{seed}", time.monotonic()
            try:
                told = run(command, seed, work, model)
            except AssertionError as error:
                failed += 1
                print(f"{command} {seed}: FAILED, see {work}\n{str(error)[:2000]}", flush=True)
                continue
            shutil.rmtree(work)
            print(f"{command} {seed}: ok in {time.monotonic() - begun:.0f} s ({told})", flush=True)
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
