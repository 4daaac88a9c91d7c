"""Training steps that read a stream, ended or live, beside steps on the same batches in memory.

A small decoder is trained by AdamW: in bfloat16 on a GPU, or a smaller one on the CPU. A row is 2 KB of text, of which
`encode` makes token ids, one a byte. Another process publishes the rows of a live stream a tenth faster than they are
trained, so training stays close to the head. A step ends when the device has finished it. `% waiting` is the share of
wall time spent in `next(loader)`, `% after the end` the share of steps that ended after the live stream had. The first
steps of a run, in which workers start, are not counted. Wall time has no goal: on a GPU it differs by several percent
between runs of the same batches, those in memory included. The digests of the trained rows are compared with those in
memory: in the same order, or if shuffled by windows each row once. There are goals on a GPU only: on a CPU the
processes that read and write take cores from the model.
"""

from __future__ import annotations

import base64
import functools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from xxhash import xxh3_64_intdigest

from lazyshard import ChunkWriter, LazyShardedDataset, Order
from lazyshard.format.records import END
from scripts.benchmarks.bench_harness import Benchmark, Failed, Figures, Row, Setting, Side

WARM_UP: Final = 16
CHUNK_STEPS: Final = 4
WINDOW_CHUNKS: Final = 4
"""All steps of a run are whole windows: a shuffled run draws each row once, too."""

PACE: Final = 1.1
"""Rows published for each row trained meanwhile."""

ROW_BYTES: Final = 1_500
"""Random, before base64."""

GPU: Final = torch.cuda.is_available()
SIZES: Final = (16, 1024, 768, 12) if GPU else (4, 128, 128, 2)
"""Rows of a step, tokens of a row, width and layers of the model."""

MEMORY: Final = "in memory"
_fork: Final = multiprocessing.get_context("fork")


def row(number: int) -> dict[str, Any]:
    """Returns a row, by its number."""
    return {"id": number, "text": base64.b64encode(random.Random(number).randbytes(ROW_BYTES)).decode()}


def encode(tokens: int, row: Mapping[str, Any]) -> torch.Tensor:
    """Returns the ids of a row's first tokens and of the one that follows, int64 of shape (tokens + 1,)."""
    return torch.from_numpy(np.frombuffer(row["text"].encode(), np.uint8)[: tokens + 1].astype(np.int64))


class Decoder(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(tokens, width)
        options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, **options)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(tokens))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of the next token, of ids of shape (rows, tokens + 1)."""
        hidden = self.layers(self.embedding(ids[:, :-1]) + self.places.weight, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids[:, 1:].flatten())


class Trainer:
    """The model on its device, and the batches in memory.

    Args:
        steps: of each run, those that are not counted included.
    """

    def __init__(self, steps: int) -> None:
        # One core for the processes that read and write.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
        self._steps, (self.batch, tokens, width, layers) = steps, SIZES
        self._device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
        self._model = Decoder(tokens, width, layers).to(self._device, dtype)
        self._optimiser = torch.optim.AdamW(self._model.parameters(), 1e-4, fused=True)
        self._encode = functools.partial(encode, tokens)
        self.encoded = torch.stack([self._encode(row(number)) for number in range(self.batch * steps)])
        self.ends: list[float] = []
        self._orders = {False: [xxh3_64_intdigest(one.numpy()) for one in self.encoded]}
        millions = sum(one.numel() for one in self._model.parameters()) / 1e6
        device = torch.cuda.get_device_name() if GPU else f"the CPU, threads: {torch.get_num_threads()}"
        told = f"{device}; {millions:.1f} million parameters, {self.batch} rows of {tokens} tokens a step"
        print(f"training on {told}, {steps - WARM_UP} steps", file=sys.stderr, flush=True)

    def run(self, batches: Iterable[torch.Tensor], shuffled: bool = False) -> dict[str, float]:
        """Makes the steps.

        Raises:
            Failed: other rows came than are in memory, or in another order.
        """
        iterator, digests = iter(batches), []
        waits, ends, self.ends = [], [], []
        for _ in range(self._steps):
            asked = time.perf_counter()
            ids = next(iterator)
            waits.append(time.perf_counter() - asked)
            self._model(ids.to(self._device, non_blocking=True)).backward()
            self._optimiser.step()
            self._optimiser.zero_grad()
            if GPU:
                torch.cuda.synchronize()
            digests += [xxh3_64_intdigest(one.numpy()) for one in ids]
            ends.append(time.perf_counter())
            self.ends.append(time.time())
        written, expected = self._orders[False], self._orders.setdefault(shuffled, digests)
        if digests != expected or sorted(digests) != sorted(written) or shuffled == (digests == written):
            raise Failed("other rows were trained than written, or in another order")
        each = np.diff(ends[WARM_UP - 1 :]) * 1e3
        median, p99 = (float(np.percentile(each, at)) for at in (50, 99))
        waiting = 100e3 * sum(waits[WARM_UP:]) / float(each.sum())
        return {"ms a step": float(each.mean()), "median ms": median, "p99 ms": p99, "% waiting": waiting}

    def memory(self, workers: int = 0) -> dict[str, float]:
        """Trains on the batches in memory, or on ones that workers make of them."""
        ready = self.encoded.pin_memory() if GPU else self.encoded
        return self._load(self.encoded, workers=workers) if workers else self.run(torch.split(ready, self.batch))

    def read(self, directory: Path, window: int = 0, workers: int = 2) -> dict[str, float]:
        """Trains on a stream."""
        options: dict[str, Any] = {
            "max_wait": 60,
            "batch_size": self.batch,
            "max_total_samples": self.batch * self._steps,
        }
        order = Order(shuffle_window=window)
        dataset = LazyShardedDataset(directory, self._encode, dp_rank=0, dp_size=1, order=order, **options)
        return self._load(dataset, workers, dataset.rank_indices, window > 0)

    def _load(self, rows: Any, workers: int, order: Any = None, shuffled: bool = False) -> dict[str, float]:
        loader: DataLoader[Any] = DataLoader(rows, self.batch, sampler=order, num_workers=workers, pin_memory=GPU)
        return self.run(loader, shuffled)

    def write(self, directory: Path, per_second: float = float("inf")) -> None:
        """Writes the stream, at this rate."""
        began = time.monotonic()
        with ChunkWriter(directory, CHUNK_STEPS * self.batch) as writer:
            for number in range(self.batch * self._steps):
                time.sleep(max(0.0, began + number / per_second - time.monotonic()))
                writer.write(row(number))


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides, which share a model."""
    trainer = functools.cache(lambda: Trainer(WARM_UP + setting.size(96, 16)))
    paces: list[float] = []

    @functools.cache
    def ended() -> Path:
        trainer().write(setting.place / "ended")
        return setting.place / "ended"

    def memory() -> Figures:
        found = trainer().memory()
        paces.append(PACE * trainer().batch / found["ms a step"] * 1e3)
        return found

    def live(window: int) -> Figures:
        if not paces:
            memory()
        with tempfile.TemporaryDirectory(dir=setting.place) as folder:
            directory = Path(folder, "live")
            writer = _fork.Process(target=trainer().write, args=(directory, paces[-1]))
            writer.start()
            try:
                found = trainer().read(directory, window)
                writer.join()
            finally:
                writer.kill()
            after = [end > (directory / END).stat().st_mtime for end in trainer().ends[WARM_UP:]]
        return found | {"% after the end": 100 * sum(after) / len(after)}

    return {
        MEMORY: memory,
        "ended": lambda: trainer().read(ended()),
        "ended, windows": lambda: trainer().read(ended(), WINDOW_CHUNKS),
        "live": lambda: live(0),
        "live, windows": lambda: live(WINDOW_CHUNKS),
        "ended, no workers": lambda: trainer().read(ended(), workers=0),
        "memory, workers": lambda: trainer().memory(2),
    }


def _rows() -> Iterator[Row]:
    """Yields the rows: with workers over a stream, and for comparison without workers, and without a stream."""
    sides = ("ended", "ended, windows", "live", "live, windows", "ended, no workers", "memory, workers")
    for number, side in enumerate(sides):
        name, goal = side.replace(", ", "-").replace(" ", "-"), 1.0 if GPU and number < 4 else None
        yield Row(name, side, MEMORY, "ms a step")
        yield Row(f"{name}.median", side, MEMORY, "median ms")
        yield Row(f"{name}.p99", side, MEMORY, "p99 ms")
        yield Row(f"{name}.waiting", side, 1.0, "% waiting", goal)
        if side.startswith("live"):
            yield Row(f"{name}.after-end", side, 50.0, "% after the end", goal)


TRAIN: Final = Benchmark(
    "training",
    "steps of a small transformer, on a GPU or else the CPU: streams in a DataLoader, beside batches in memory",
    tuple(_rows()),
    prepare,
)
