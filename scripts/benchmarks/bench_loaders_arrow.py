"""Hugging Face `datasets` in `scripts/bench_loaders`: Arrow files, map-style and streaming.

As its documentation advises for speed: memory-mapped Arrow; streaming by `to_iterable_dataset` with a shard for each
chunk, so that the shards can be shuffled and dealt to the workers; map-style shuffled within a loader by its sampler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.benchmarks.bench_loaders_cases import BATCH, WORKERS, Opened, Settings
from scripts.benchmarks.bench_resume_loaders import chunk_files


def convert(settings: Settings) -> None:
    """Leaves Arrow files, as many as there are chunks."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = chunk_files(settings.data)
    dataset = load_dataset("json", data_files=files, cache_dir=settings.native + ".cache", split="train")
    dataset.save_to_disk(settings.native, num_shards=len(files))


def map_style(settings: Settings) -> tuple[Opened, bool]:
    """`Dataset`, by itself, or in torch's DataLoader."""
    from datasets import load_from_disk

    if settings.in_workers:
        from torch.utils.data import DataLoader
    drawn = settings.drawn()

    def opened() -> Iterable[Any]:
        dataset = load_from_disk(settings.native)
        if settings.in_workers:
            return DataLoader(
                dataset, BATCH, shuffle=settings.shuffled, num_workers=WORKERS, collate_fn=list, drop_last=False
            )
        if settings.case == "random":
            return map(dataset.__getitem__, drawn)
        found: Iterable[Any] = dataset.shuffle(seed=0, keep_in_memory=True) if settings.shuffled else dataset
        return found

    return opened, settings.in_workers


def streaming(settings: Settings) -> tuple[Opened, bool]:
    """`IterableDataset` over the same files, by itself, or in torch's DataLoader."""
    from datasets import load_from_disk

    # It imports torch itself, when it is first iterated: imports are not counted.
    from torch.utils.data import DataLoader

    shards = len(chunk_files(settings.data))

    def opened() -> Iterable[Any]:
        dataset: Any = load_from_disk(settings.native).to_iterable_dataset(num_shards=shards)
        if settings.shuffled:
            dataset = dataset.shuffle(seed=0, buffer_size=settings.window_rows)
        if settings.in_workers:
            return DataLoader(dataset, BATCH, num_workers=WORKERS, collate_fn=list)
        found: Iterable[Any] = dataset
        return found

    return opened, settings.in_workers


READERS = {"datasets": map_style, "datasets-streaming": streaming}
CONVERTERS = {"datasets": convert, "datasets-streaming": convert}
