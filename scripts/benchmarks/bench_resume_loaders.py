"""Stopping and resuming each loader after a number of rows, as its documentation shows.

All read the same rows in order, in batches of 8 parsed rows, without worker processes. For each there is a way to leave
the state of a run that has consumed a number of rows, and one to construct it anew, load that state and get the next
batch; only the latter is measured. Runs in the environments of these packages: each is imported where it is used.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_formats import Row, rows_of, streaming, write_mds
from scripts.benchmarks.bench_loaders_rows import MapRows, RowsInTurn, chunk_files
from scripts.benchmarks.bench_process import forget_peak, memory_mb, peak_mb, timed

BATCH: Final = 8

Settings = dict[str, Any]
"""`data`: directory of the rows; `offsets`: file that says where each of them begins; `state`: file of the state;
`consumed`: rows; `save`: whether to leave the state or continue; `saved`: ranks before; `rank`, `ranks`: after it."""

Made = tuple[Callable[[], Any], Callable[[Any], Iterator[list[Row]]]]
"""Makes a loader that has `state_dict` and `load_state_dict`; returns its batches."""


def saved_state(settings: Settings) -> Any:
    """Returns the state of the run that stopped."""
    return pickle.loads(Path(settings["state"]).read_bytes())


def opened(settings: Settings, rank: int, ranks: int) -> Any:
    """Returns our data set."""
    lazyshard = importlib.import_module("lazyshard")
    return lazyshard.LazyShardedDataset(settings["data"], batch_size=BATCH, dp_rank=rank, dp_size=ranks)


def ours(settings: Settings) -> Made:
    """`LazyShardedDataset` in torch's DataLoader."""
    loader_of = importlib.import_module("torch.utils.data").DataLoader
    # Imported when first asked for.
    _ = importlib.import_module("lazyshard").LazyShardedDataset

    def batches(dataset: Any) -> Iterator[list[Row]]:
        return iter(loader_of(dataset, batch_size=BATCH, sampler=dataset.rank_indices, collate_fn=list))

    return lambda: opened(settings, settings["rank"], settings["ranks"]), batches


def _stateful(make: Callable[[], Any]) -> Made:
    importlib.import_module("orjson")
    loaders = importlib.import_module("torchdata.stateful_dataloader")
    return lambda: loaders.StatefulDataLoader(make(), batch_size=BATCH, collate_fn=list), iter


def stateful_map(settings: Settings) -> Made:
    """torchdata's StatefulDataLoader over a map-style data set: it iterates its sampler again."""
    return _stateful(lambda: MapRows(settings["data"], settings["offsets"]))


def stateful_iterable(settings: Settings) -> Made:
    """torchdata's StatefulDataLoader over an iterable data set without a state: it reads everything again."""
    from torch.utils.data import IterableDataset

    class Stateless(IterableDataset[Row]):
        def __iter__(self) -> Iterator[Row]:
            return itertools.chain.from_iterable(map(rows_of, chunk_files(settings["data"])))

    return _stateful(Stateless)


def stateful_stateful(settings: Settings) -> Made:
    """torchdata's StatefulDataLoader over an iterable data set with its own state."""
    from torch.utils.data import IterableDataset

    class Stateful(RowsInTurn, IterableDataset[Row]):
        pass

    return _stateful(lambda: Stateful(settings["data"]))


def hugging_face(settings: Settings) -> Made:
    """`datasets` streaming the JSON lines."""
    load = importlib.import_module("datasets").load_dataset

    def batches(dataset: Any) -> Iterator[list[Row]]:
        rows = iter(dataset)
        return iter(lambda: list(itertools.islice(rows, BATCH)), [])

    return lambda: load("json", data_files=chunk_files(settings["data"]), split="train", streaming=True), batches


def mosaicml(settings: Settings) -> Made:
    """MosaicML's StreamingDataLoader over MDS; without a directory of shards yet, it makes that first."""
    package = streaming()
    shards = f"{settings['data']}.mds"
    if not Path(shards).exists():
        # About a thousand rows a shard, as the others have in a file.
        write_mds(chunk_files(settings["data"]), shards, 2_000_000)

    def loader() -> Any:
        dataset = package.StreamingDataset(local=shards, batch_size=BATCH, shuffle=False)
        # It counts the rows of a batch by the first of its columns.
        return package.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=lambda rows: {"rows": rows})

    return loader, lambda made: (batch["rows"] for batch in made)


LOADERS: Final[dict[str, Callable[[Settings], Made]]] = {
    "ours": ours,
    "stateful_map": stateful_map,
    "stateful_iterable": stateful_iterable,
    "stateful_stateful": stateful_stateful,
    "hugging_face": hugging_face,
    "mosaicml": mosaicml,
}


def resume(settings: Settings) -> dict[str, Any]:
    """In a process of that loader: leaves the state, or continues and returns the ids of the first batch."""
    make, batches = LOADERS[settings["loader"]](settings)
    if settings["save"]:
        if settings["loader"] == "ours":
            # Arithmetic: nothing need be read to know where a run stands.
            state = opened(settings, 0, settings["saved"]).state_dict(settings["consumed"])
        else:
            loader = make()
            for _ in itertools.islice(batches(loader), settings["consumed"] // BATCH):
                pass
            state = loader.state_dict()
        Path(settings["state"]).write_bytes(pickle.dumps(state))
        return {}
    state = saved_state(settings)
    ids: list[int] = []

    def first() -> None:
        loader = make()
        loader.load_state_dict(state)
        ids.extend(int(row["id"]) for row in next(batches(loader)))

    return _ms(first) | {"ids": ids}


def _ms(work: Callable[[], None]) -> dict[str, float]:
    taken = timed(work)
    return {"ms": taken["us"] / 1e3, "processor ms": taken["processor us"] / 1e3}


def first_sample(directory: str, window: int, arguments: dict[str, Any], state: dict[str, Any]) -> dict[str, float]:
    """In a fresh process: ours continues and reads one sample; memory counts from before the import of ours."""
    for name in ("numpy", "torch"):
        importlib.import_module(name)
    idle = memory_mb()["resident"]
    package = importlib.import_module("lazyshard")
    dataset_of, order_of = package.LazyShardedDataset, package.Order
    forget_peak()
    rows: list[int] = []

    def first() -> None:
        dataset = dataset_of(directory, order=order_of(shuffle_window=window), **arguments)
        dataset.load_state_dict(state)
        rows.append(dataset[dataset.rank_indices[0]]["id"])

    return _ms(first) | {"MB": peak_mb() - idle, "id": rows[0]}
