"""What runs in DataLoader workers. Kept light, since spawned workers import it."""

from __future__ import annotations

import multiprocessing
import os
import sys
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


def loader(dataset: Dataset[Any], sampler: Sequence[int], workers: int, **options: Any) -> DataLoader[Any]:
    waiting: dict[str, Any] = {"timeout": DEADLINE_S, "multiprocessing_context": "fork"} if workers else {}
    # A data set of its own pickles as it is: nothing of the test goes to a spawned worker.
    arguments = {"sampler": sampler, "num_workers": workers, "collate_fn": ids, **waiting, **options}
    return DataLoader(dataset, **arguments)


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
