"""A blend with a schedule: three streams with weights that change over steps, also across a stop and a resume.

    python examples/blend_schedule.py [FOLDER]

A run begins on web text alone. Until step 40 the share of maths grows to a fifth, and from step 60 to step 80 the share
of code grows to a half. After step 30 the run is stopped and resumes from its state with another micro batch size. For
every ten steps it prints the expected and the actual number of samples of each stream. At no step may they differ by
more than three samples, the limit of the blend's rule.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from lazyshard import Batches, BlendedDataset, ChunkWriter, LazyShardedDataset, Order

NAMES = ("web", "maths", "code")
SCHEDULE = [
    *((step, (1 - step / 200, step / 200, 0.0)) for step in range(1, 41)),
    *((step, (0.8 - (step - 60) / 40, 0.2, (step - 60) / 40)) for step in range(61, 81)),
]
STEPS = 100
STOPPED_AFTER = 30
STEP_SAMPLES = 24
"""Samples per step. The number of micro batches and ranks may change."""


def open_blend(folder: Path, batch_size: int) -> BlendedDataset:
    """Returns the three streams as one data set with scheduled weights."""
    streams = [LazyShardedDataset(folder / name, dp_rank=0, dp_size=1) for name in NAMES]
    return BlendedDataset(
        list(zip(streams, (1.0, 0.0, 0.0), strict=True)),
        batch_size=batch_size,
        num_samples=STEPS * STEP_SAMPLES,
        order=Order(micro_batches_per_step=STEP_SAMPLES // batch_size),
        schedule=SCHEDULE,
    )


class Mixture:
    """Counts the actual and the expected samples of each stream."""

    def __init__(self) -> None:
        self.steps = 0
        self.came: Counter[str] = Counter()
        self.wanted = dict.fromkeys(NAMES, 0.0)
        self.farthest = 0.0
        self._shown = self.came.copy(), self.wanted.copy()

    def add(self, names: list[str], shares: tuple[float, ...]) -> None:
        """Adds the stream names of a step's samples and the shares at that step; prints a line every ten steps."""
        self.steps += 1
        self.came.update(names)
        for name, share in zip(NAMES, shares, strict=True):
            self.wanted[name] += share * STEP_SAMPLES
            self.farthest = max(self.farthest, abs(self.came[name] - self.wanted[name]))
        if self.steps % 10 == 0:
            came, wanted = self._shown
            columns = [f"{self.wanted[n] - wanted[n]:9.1f} {self.came[n] - came[n]:6}" for n in NAMES]
            print(f"{self.steps - 9:3} to {self.steps:3}", *columns, sep="  ")
            self._shown = self.came.copy(), self.wanted.copy()


def train(batches: Batches, stop: int, mixture: Mixture, blend: BlendedDataset) -> None:
    """Reads batches up to a step. The training itself is omitted."""
    names: list[str] = []
    for batch in batches:
        names += [row["stream"] for row in batch]
        if batches.step_complete:
            mixture.add(names, blend.shares_at(mixture.steps))
            names = []
            if batches.step == stop:
                return


def main() -> None:
    """Writes three streams, trains on the blend, stops, resumes, and checks the result."""
    folder = Path(*sys.argv[1:] or ["runs/blend_schedule"])
    if folder.exists():
        sys.exit(f"{folder} already exists: remove it, or give another folder")
    for name, samples in zip(NAMES, (2000, 600, 800), strict=True):
        with ChunkWriter(folder / name, samples_per_chunk=50) as writer:
            for number in range(samples):
                writer.write({"stream": name, "id": number})

    print("             " + "".join(f"{name:^18}" for name in NAMES))
    print("steps      " + "   expected actual" * 3)
    mixture = Mixture()
    blend = open_blend(folder, batch_size=8)
    batches = blend.batches(collate_fn=list)
    train(batches, STOPPED_AFTER, mixture, blend)
    (folder / "state.json").write_text(json.dumps(batches.state_dict()))

    print("           stopped; resumes with micro batches of 4")
    blend = open_blend(folder, batch_size=4)
    batches = blend.batches(collate_fn=list)
    batches.load_state_dict(json.loads((folder / "state.json").read_bytes()))
    train(batches, STEPS, mixture, blend)

    assert mixture.steps == STEPS, f"it reached only step {mixture.steps}"
    assert mixture.came.total() == STEPS * STEP_SAMPLES, mixture.came
    assert mixture.farthest <= len(NAMES), f"a stream was {mixture.farthest:.1f} samples away from its share"
    print(f"\nok: no stream was ever more than {mixture.farthest:.1f} samples away from its share")


if __name__ == "__main__":
    main()
