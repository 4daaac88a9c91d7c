"""How each loader is stopped after so many rows and goes on: ours, and the others, each as its documentation shows.

All read the same rows in order, in batches of 8 parsed rows, without worker processes. For each there is a way to leave
the state of a run that has consumed a number of rows, and one to construct it anew, load that state and get the next
batch; only the latter is measured. Run by `bench_resume_process.py` within those environments: each function imports
its loader before it returns what is to be measured.
"""

from __future__ import annotations

import importlib
import itertools
import mmap
import pickle
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

BATCH: Final = 8

Settings = dict[str, Any]
"""`data`: directory of the rows; `offsets`: file that says where each row of the chunks begins, u64 of shape (chunks,
rows + 1); `state`: file of the state; `consumed`: rows; `save`: whether to leave the state, or to go on; `saved`: ranks
before; `rank`, `ranks`: afterwards."""

Rows = list[dict[str, Any]]

First = Callable[[], list[int]]
"""Goes on and returns the ids of the first batch."""


def chunk_files(data: str) -> list[str]:
    """Returns the files with the rows, in order."""
    return sorted(str(path) for path in Path(data).glob("chunk_*.jsonl"))


def stopped_after(batches: Iterator[Any], settings: Settings, state: Callable[[], Any]) -> None:
    """Consumes batches as a training loop does, and leaves the state then."""
    for _ in itertools.islice(batches, settings["consumed"] // BATCH):
        pass
    Path(settings["state"]).write_bytes(pickle.dumps(state()))


def going_on(settings: Settings, first: Callable[[Any], Rows]) -> First:
    """Returns what is to be measured; `first` gets the state and returns the first batch."""
    state = pickle.loads(Path(settings["state"]).read_bytes())
    return lambda: [row["id"] for row in first(state)]


def ours(settings: Settings) -> First | None:
    """`LazyShardedDataset` in torch's DataLoader."""
    from torch.utils.data import DataLoader

    import lazyshard

    # Imported when first asked for.
    _ = lazyshard.LazyShardedDataset

    def dataset(rank: int, ranks: int) -> Any:
        return lazyshard.LazyShardedDataset(settings["data"], batch_size=BATCH, dp_rank=rank, dp_size=ranks)

    if settings["save"]:
        # Arithmetic: nothing need be read to know where a run stands.
        stopped_after(iter(()), settings, lambda: dataset(0, settings["saved"]).state_dict(settings["consumed"]))
        return None

    def first(state: Any) -> Rows:
        resumed = dataset(settings["rank"], settings["ranks"])
        resumed.load_state_dict(state)
        loader = DataLoader(resumed, batch_size=BATCH, sampler=resumed.rank_indices, collate_fn=list)
        rows: Rows = next(iter(loader))
        return rows

    return going_on(settings, first)


class MapRows:
    """The least that a map-style data set of JSON lines is: the rows' places, and the files mapped."""

    def __init__(self, data: str, offsets: str) -> None:
        self._files = chunk_files(data)
        self._offsets = array("Q", Path(offsets).read_bytes())
        self._rows = len(self._offsets) // len(self._files) - 1
        self._maps: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        """Rows."""
        return self._rows * len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Parses a row."""
        import orjson

        number, row = divmod(index, self._rows)
        mapped = self._maps.get(number)
        if mapped is None:
            with open(self._files[number], "rb") as file:
                mapped = self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = number * (self._rows + 1) + row
        found: dict[str, Any] = orjson.loads(mapped[self._offsets[at] : self._offsets[at + 1]])
        return found


class RowsInTurn:
    """Rows of files one after the other, and where it stands: file and byte."""

    def __init__(self, data: str) -> None:
        self.files = chunk_files(data)
        self.place = (0, 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Parses rows from where it stands."""
        import orjson

        first, byte = self.place
        for number in range(first, len(self.files)):
            with open(self.files[number], "rb", buffering=1 << 20) as file:
                file.seek(byte)
                for line in file:
                    byte += len(line)
                    self.place = (number, byte)
                    yield orjson.loads(line)
            byte = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns where it stands."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.place = tuple(state["place"])


def _stateful(settings: Settings, make: Callable[[], Any]) -> First | None:
    import orjson  # noqa: F401

    loaders = importlib.import_module("torchdata.stateful_dataloader")

    def loader() -> Any:
        return loaders.StatefulDataLoader(make(), batch_size=BATCH, collate_fn=list)

    if settings["save"]:
        saved = loader()
        stopped_after(iter(saved), settings, saved.state_dict)
        return None

    def first(state: Any) -> Rows:
        resumed = loader()
        resumed.load_state_dict(state)
        rows: Rows = next(iter(resumed))
        return rows

    return going_on(settings, first)


def stateful_map(settings: Settings) -> First | None:
    """torchdata's StatefulDataLoader over a map-style data set: it goes through its sampler again."""
    return _stateful(settings, lambda: MapRows(settings["data"], settings["offsets"]))


def stateful_iterable(settings: Settings) -> First | None:
    """torchdata's StatefulDataLoader over an iterable data set without a state: it reads everything again."""
    from torch.utils.data import IterableDataset

    class Stateless(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(RowsInTurn(settings["data"]))

    return _stateful(settings, Stateless)


def stateful_stateful(settings: Settings) -> First | None:
    """torchdata's StatefulDataLoader over an iterable data set that keeps its place itself."""
    from torch.utils.data import IterableDataset

    class Stateful(RowsInTurn, IterableDataset[dict[str, Any]]):
        pass

    return _stateful(settings, lambda: Stateful(settings["data"]))


def hugging_face(settings: Settings) -> First | None:
    """`datasets` streaming the JSON lines."""
    from datasets import load_dataset

    def dataset() -> Any:
        return load_dataset("json", data_files=chunk_files(settings["data"]), split="train", streaming=True)

    if settings["save"]:
        saved = dataset()
        rows = iter(saved)
        batches = iter(lambda: list(itertools.islice(rows, BATCH)), [])
        stopped_after(batches, settings, saved.state_dict)
        return None

    def first(state: Any) -> Rows:
        resumed = dataset()
        resumed.load_state_dict(state)
        return list(itertools.islice(resumed, BATCH))

    return going_on(settings, first)


def mosaicml(settings: Settings) -> First | None:
    """MosaicML's StreamingDataLoader over MDS; without a directory of shards yet, it makes that first."""
    from bench_producer_peers import rows_of, stand_in_for_torchvision

    stand_in_for_torchvision()
    streaming = importlib.import_module("streaming")
    # What a process that was killed may have left behind.
    streaming.base.util.clean_stale_shared_memory()
    shards = Path(settings["data"]) / "mds"
    if not shards.exists():
        columns = {"id": "int", "messages": "json"}
        # About a thousand rows a shard, as the others have in a file.
        with streaming.MDSWriter(out=str(shards), columns=columns, size_limit=2_000_000) as writer:
            for path in chunk_files(settings["data"]):
                for row in rows_of(path):
                    writer.write(row)

    def loader() -> Any:
        dataset = streaming.StreamingDataset(local=str(shards), batch_size=BATCH, shuffle=False)
        # It counts the rows of a batch by the first of its columns.
        return streaming.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=lambda rows: {"rows": rows})

    if settings["save"]:
        saved = loader()
        stopped_after(iter(saved), settings, saved.state_dict)
        return None

    def first(state: Any) -> Rows:
        resumed = loader()
        resumed.load_state_dict(state)
        rows: Rows = next(iter(resumed))["rows"]
        return rows

    return going_on(settings, first)


LOADERS: Final[dict[str, Callable[[Settings], First | None]]] = {
    "ours": ours,
    "stateful_map": stateful_map,
    "stateful_iterable": stateful_iterable,
    "stateful_stateful": stateful_stateful,
    "hugging_face": hugging_face,
    "mosaicml": mosaicml,
}
