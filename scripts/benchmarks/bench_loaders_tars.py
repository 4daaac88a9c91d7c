"""webdataset and megatron-energon in `scripts/bench_loaders`: tar files of about 64 MB, a member for each field.

As their documentations advise for speed: uncompressed; batches made in the workers; JSON parsed by orjson. A row of A
is one JSON member; of B the image is a member of its own, whose bytes become text again.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from scripts.benchmarks.bench_loaders_cases import BATCH, WORKERS, Opened, Row, Settings
from scripts.benchmarks.bench_resume_loaders import chunk_files

_SHARD_BYTES = 64 << 20
_LEAST_SHARDS = WORKERS
"""Each worker wants one of its own."""


def _row(sample: Row) -> Row:
    row: Row = orjson.loads(sample["json"])
    if "image" in sample:
        row["image"] = sample["image"].decode("ascii")
    return row


def _write(settings: Settings, folder: Path) -> None:
    writer_of = importlib.import_module("webdataset").ShardWriter
    files = chunk_files(settings.data)
    most = -(-settings.rows // _LEAST_SHARDS)
    folder.mkdir(parents=True)
    with writer_of(str(folder / "%05d.tar"), maxcount=most, maxsize=_SHARD_BYTES, verbose=0) as writer:
        for line in itertools.chain.from_iterable(open(path, "rb", buffering=1 << 20) for path in files):  # noqa: SIM115
            row = orjson.loads(line)
            sample = {"__key__": f"{row['id']:09d}"}
            if settings.which == "B":
                sample["image"] = row.pop("image").encode()
            writer.write(sample | {"json": orjson.dumps(row)})


def convert_webdataset(settings: Settings) -> None:
    """ShardWriter."""
    _write(settings, Path(settings.native))


def webdataset(settings: Settings) -> tuple[Opened, bool]:
    """`WebDataset`, by itself, or in its WebLoader."""
    package = importlib.import_module("webdataset")
    shards = sorted(str(path) for path in Path(settings.native).glob("*.tar"))

    def opened() -> Iterable[Any]:
        shuffle = len(shards) if settings.shuffled else False
        dataset = package.WebDataset(shards, shardshuffle=shuffle, seed=0)
        if settings.shuffled:
            dataset = dataset.shuffle(settings.window_rows)
        dataset = dataset.map(_row)
        found: Iterable[Any] = dataset
        if settings.in_workers:
            batches = dataset.batched(BATCH, collation_fn=list)
            found = package.WebLoader(batches, batch_size=None, num_workers=WORKERS)
        return found

    return opened, settings.in_workers


def convert_energon(settings: Settings) -> None:
    """The same tar files, and what `energon prepare` adds to them."""
    energon = importlib.import_module("megatron.energon")
    paths = importlib.import_module("megatron.energon.epathlib")
    root = Path(settings.native)
    _write(settings, root / "tars")
    names = sorted(str(path.relative_to(root)) for path in root.glob("tars/*.tar"))
    energon.BaseWebdatasetFactory.prepare_dataset(
        paths.EPath(root), names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    (root / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def energon(settings: Settings) -> tuple[Opened, bool]:
    """Its loader over crude samples, which a cooker parses; in order as for validation."""
    package = importlib.import_module("megatron.energon")

    @package.stateless  # type: ignore[untyped-decorator]
    def cook(sample: Row) -> Any:
        return package.TextSample(**package.basic_sample_keys(sample), text=_row(sample))

    class Rows(package.DefaultTaskEncoder):  # type: ignore[name-defined, misc]
        decoder = None
        cookers = (package.Cooker(cook),)

        @package.stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Any:
            return sample

        @package.stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Any]) -> list[Row]:
            return [sample.text for sample in samples]

    def opened() -> Iterable[Any]:
        workers = package.WorkerConfig(rank=0, world_size=1, num_workers=WORKERS if settings.in_workers else 0)
        options = {"split_part": "train", "worker_config": workers, "batch_size": BATCH, "task_encoder": Rows()}
        if settings.shuffled:
            options |= {"shuffle_buffer_size": settings.window_rows, "max_samples_per_sequence": 100, "repeat": False}
            dataset = package.get_train_dataset(settings.native, **options)
        else:
            dataset = package.get_val_dataset(settings.native, **options)
        found: Iterable[Any] = package.get_loader(dataset)
        return found

    return opened, True


READERS = {"webdataset": webdataset, "megatron-energon": energon}
CONVERTERS = {"webdataset": convert_webdataset, "megatron-energon": convert_energon}
