"""What runs in DataLoader workers, and functions of steps. Kept light, since spawned workers import it."""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader, Dataset

DEADLINE_S: Final = 60  # How long a test waits for a batch; only a failing one ever waits so long

PICKLED: Final = "forkserver"
"""How workers are started that get the data set as a pickle; with "spawn" each imports torch anew, for seconds."""

multiprocessing.set_forkserver_preload(["torch.utils.data"])


def ids(rows: Iterable[dict[str, Any]]) -> list[Any]:
    return [row["id"] for row in rows]


class RecordOpened:
    """A `worker_init_fn`: writes down of which chunks a worker opens a file, as Python asks the kernel for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def __call__(self, worker: int) -> None:
        log = os.open(self.directory / str(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def hook(event: str, arguments: Any) -> None:
            if event == "open" and not isinstance(arguments[0], int):
                name = os.path.basename(os.fsdecode(arguments[0]))
                if name.startswith("chunk_"):
                    os.write(log, f"{int(name[6:].partition('.')[0])}\n".encode())

        sys.addaudithook(hook)

    def chunks(self) -> list[int]:
        """Returns the chunk of each file that was opened: seals and data."""
        return [int(line) for path in self.directory.iterdir() for line in path.read_text().split()]


def loader(
    dataset: Dataset[Any], sampler: Sequence[int] | None, workers: int, kind: Any = DataLoader, **options: Any
) -> DataLoader[Any]:
    waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
    # A data set of its own pickles as it is: nothing of the test goes to a spawned worker.
    arguments = {"sampler": sampler, "num_workers": workers, "collate_fn": ids, **waiting, **options}
    opened: DataLoader[Any] = kind(dataset, **arguments)
    return opened


def first_error(batches: DataLoader[Any]) -> Exception:
    """Returns what a loader raises first. Asks it for the rest too: torch takes 5 s to end workers in the middle."""
    iterator = iter(batches)
    found: Exception | None = None
    while True:
        try:
            next(iterator)
        except StopIteration:
            assert found is not None, "nothing was raised"
            return found
        except Exception as error:
            found = found or error


Row = dict[str, Any]


def to_messages(row: Row) -> Row:
    return {"id": row["id"], "messages": [{"role": "user", "content": f"row {row['id']}"}]}


def even(row: Row) -> bool:
    return bool(row["id"] % 2 == 0)


def even_index(row: Row, index: int) -> bool:
    assert row["id"] == index
    return index % 2 == 0


def nothing(row: Row) -> bool:
    return False


def no_answer(row: Row) -> None:
    return None


def add_square(row: Row) -> Row:
    return {"square": row["id"] ** 2}


def add_index(row: Row, index: int) -> Row:
    return {"index": index}


def fail_on_two(row: Row) -> Row:
    if row["id"] == 2:
        raise KeyError("text")
    return {}


def encode(row: Row) -> Row:
    return {"id": row["id"], "input_ids": [row["id"]] * 3}


no_function = 3


def count(rows: list[Row]) -> int:
    return len(rows)


def tell(worker: int) -> None:
    # In one write: the other worker's goes into the same file.
    os.write(1, b"%d\n" % os.getpid())


def collate(rows: list[dict[str, Any]]) -> tuple[list[int], str]:
    # Far more than a pipe holds: what nobody takes must not keep a worker from leaving.
    return [row["id"] for row in rows], "x" * 300_000


def main() -> None:
    from lazyshard import LazyShardedDataset

    # `used`: what is done before; `size`: batches read ahead; `said`: the file of all that is said.
    directory, method, used, size, said = sys.argv[1:]
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    dataset = LazyShardedDataset(directory, dp_rank=0, dp_size=1, batch_size=2, num_samples=1000, max_wait=float("inf"))
    if used == "used":
        print(dataset[0]["id"], file=sys.stderr)
    if used.startswith("early"):
        training = os.getpid()

        def lag() -> None:
            # Continues only when the training process has been killed.
            tell(0)
            while os.getppid() == training:
                time.sleep(0.01)

        os.register_at_fork(after_in_child=lag)
    kind: Any = DataLoader
    if used == "early-stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    options = {"num_workers": 2, "multiprocessing_context": method, "prefetch_factor": int(size)}
    loader = kind(
        dataset, sampler=dataset.rank_indices, batch_size=2, collate_fn=collate, worker_init_fn=tell, **options
    )
    for ids, _ in loader:
        print(*ids, file=sys.stderr, flush=True)
        if size != "2":
            # Takes no more: what the workers have got ready stays in the pipe.
            time.sleep(600)
