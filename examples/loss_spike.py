"""Tracing a loss spike: from a step of the loss curve to the lines of a file, and a second run without them.

    python examples/loss_spike.py [FOLDER]

Two files with prices are published as a stream and trained in shuffled windows. In eight lines of the second file the
prices are in another unit. The loss has a spike, and there is no log of which samples were trained when. From a
checkpoint `lazyshard trace` computes which samples these steps trained, and from which line of which file each sample
is. Then the run resumes from the checkpoint before the spike, skips the bad samples, and trains all others.
"""

from __future__ import annotations

import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import torch

from lazyshard import Batches, LazyShardedDataset, Order

LINES = 200
"""Lines in each of the two files."""

BAD_LINES = range(81, 89)
"""Bad lines of the second file, counted from 1."""

BATCH = 8
SAVE_STEPS = 10


def write_sources(folder: Path) -> None:
    """Writes a.jsonl and b.jsonl: flats with their prices, some of them in another unit."""
    folder.mkdir(parents=True)
    numbers = random.Random(0)
    for name in ("a", "b"):
        with (folder / f"{name}.jsonl").open("w") as file:
            for line in range(1, LINES + 1):
                rooms, age = numbers.randint(1, 5), numbers.randint(0, 60)
                price = round(0.5 + 0.4 * rooms - 0.01 * age, 2)
                if name == "b" and line in BAD_LINES:
                    price = round(price * 1000)
                file.write(json.dumps({"rooms": rooms, "age": age, "price": price}) + "\n")


def train(folder: Path, run: str, start: Path | None = None, without: Collection[int] = ()) -> dict[int, float]:
    """Trains to the end of the stream, from the start or a checkpoint; returns the loss of each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    dataset = LazyShardedDataset(
        folder / "stream", batch_size=BATCH, dp_rank=0, dp_size=1, order=Order(shuffle_window=4)
    )
    batches = dataset.batches(collate_fn=list)
    if start is not None:
        model.load_state_dict(torch.load(start / "model.pt"))
        batches.load_state_dict(json.loads((start / "lazyshard.json").read_bytes())["state"])
        dataset.skip(samples=[(sample, sample + 1) for sample in without])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = {}
    for rows in batches:
        features = torch.tensor([[row["rooms"] / 5, row["age"] / 60] for row in rows])
        loss = (model(features) - torch.tensor([[row["price"]] for row in rows])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[batches.step] = loss.item()
        if batches.step % SAVE_STEPS == 0:
            save(folder / run, model, batches)
    if batches.step % SAVE_STEPS:
        save(folder / run, model, batches)
    return losses


def save(run: Path, model: torch.nn.Module, batches: Batches) -> None:
    """Writes a checkpoint."""
    checkpoint = run / f"checkpoint-{batches.step}"
    checkpoint.mkdir(parents=True)
    torch.save(model.state_dict(), checkpoint / "model.pt")
    values = {"state": batches.state_dict(), "step": batches.step, "saved_at": time.time()}
    (checkpoint / "lazyshard.json").write_text(json.dumps(values))


def step_of(checkpoint: Path) -> int:
    """Returns the step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def find_spike(losses: dict[int, float]) -> int:
    """Returns the first step whose loss is over 100 times the median of the previous ten steps."""
    for step in list(losses)[10:]:
        if losses[step] > 100 * statistics.median(losses[step - back] for back in range(1, 11)):
            return step
    raise AssertionError("there is no spike")


def show(losses: dict[int, float], steps: range) -> None:
    """Prints a part of the loss curve."""
    print("  step " + "".join(f"{step:>12}" for step in steps))
    print("  loss " + "".join(f"{losses[step]:>12.3f}" for step in steps) + "\n")


def command(text: str, folder: Path) -> str:
    """Prints a command of lazyshard, runs it in a folder, and returns its output."""
    name, *arguments = shlex.split(text)
    module = {"lazyshard": "lazyshard.cli", "lazyshard-producer": "lazyshard_producer"}[name]
    print(f"$ {text}")
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def main() -> None:
    """Trains into the spike, traces it, and trains again without the samples that caused it."""
    folder = Path(*sys.argv[1:] or ["runs/loss_spike"]).absolute()
    if folder.exists():
        sys.exit(f"{folder} already exists: remove it, or give another folder")
    write_sources(folder)
    command("lazyshard-producer run --source a.jsonl b.jsonl --out stream --samples-per-chunk 8 --no-progress", folder)

    print("\nthe first run:")
    first = train(folder, "first")
    spike = find_spike(first)
    window = range(spike - 2, spike + 5)
    show(first, window)

    print(f"Which samples did step {spike} train?")
    newest = max((folder / "first").iterdir(), key=step_of).relative_to(folder)
    print(command(f"lazyshard trace stream --state {newest} --step {spike} --origins", folder))

    print("Which rows of the steps around it are outliers?")
    about = f"lazyshard trace stream --state {newest} --step {window.start}:{window.stop} --origins --rows --json"
    bad = {}
    for line in command(about, folder).splitlines():
        told = json.loads(line)
        if told["value"]["price"] > 10:
            sample, (origin,) = told["sample"], told["origins"]
            bad[sample] = origin["path"], origin["lines"][0]
            print(f"  step {told['step']}  sample {sample}  {origin['path']}:{origin['lines'][0]}  {told['value']}")

    before = max((path for path in (folder / "first").iterdir() if step_of(path) < spike), key=step_of)
    print(f"\nthe second run, from {before.name}, without these {len(bad)} samples:")
    second = train(folder, "second", before, sorted(bad))
    show(second, window)
    newest = max((folder / "second").iterdir(), key=step_of).relative_to(folder)
    trace = command(f"lazyshard trace stream --state {newest} --sample {min(bad)}", folder)
    print(trace)
    audit = command(f"lazyshard audit stream first second --state {newest}", folder)
    print(audit)

    assert sorted(bad.values()) == [("b.jsonl", line) for line in BAD_LINES], bad
    assert max(second.values()) < 1, f"there is a spike again: {second}"
    assert "skipped on purpose from part 1 on" in trace, trace
    assert f"{len(bad)} skipped on purpose ({min(bad)} to {max(bad)})" in audit, audit
    assert "proven: no sample was trained twice, and none was passed over" in audit, audit
    print(f"ok: {len(bad)} lines of b.jsonl caused the spike, all other samples were trained once")


if __name__ == "__main__":
    main()
