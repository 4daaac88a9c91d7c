"""Resumes on the same rows: ours beside other loaders, each in an environment and in processes of its own.

What is compared is the time from construction to the first batch after a resume, imports not counted. Each must go on
with the very row that is next, or the benchmark fails. What the others do not do at all, such as going on with another
number of ranks, is told in words.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazyshard.format import Seal
from lazyshard.format.names import seal_name
from lazyshard.format.state import RunState
from lazyshard.storage.run_state import course_of, draws_of, resumed
from scripts.benchmarks.bench_read import make_stream
from scripts.benchmarks.bench_resume_first import PROCESS, Found, run

CONSUMED: Final = (10_000, 150_000)
_BATCH: Final = 8


@dataclass(frozen=True)
class Loader:
    """One of them.

    Attributes:
        name: what it is called in the table.
        what: its function in `bench_resume_loaders`.
        package: the one that its environment has; "" for ours.
        ranks: how far it goes on with another number of ranks.
        saved: ranks of the run that stopped.
        resumed: ranks of the one that goes on; one of them is measured.
    """

    name: str
    what: str
    package: str
    ranks: str
    saved: int = 1
    resumed: int = 1

    def python(self, environments: Path) -> str:
        """Returns its interpreter."""
        return str(environments / self.package / "bin" / "python") if self.package else sys.executable

    def version(self, environments: Path) -> str:
        """Returns the name and version of the package."""
        if not self.package:
            return "this release"
        code = f"import importlib.metadata; print(importlib.metadata.version({self.package!r}))"
        version = subprocess.check_output([self.python(environments), "-c", code], text=True)
        return f"{self.package} {version.strip()}"


_STATE_A_RANK: Final = "no: a state is one rank's"

LOADERS: Final = (
    Loader("LazyShardedDataset", "ours", "", "any"),
    Loader("LazyShardedDataset, 4 to 3 ranks", "ours", "", "any", 4, 3),
    Loader("StatefulDataLoader, map-style", "stateful_map", "torchdata", _STATE_A_RANK),
    Loader("StatefulDataLoader, iterable without a state", "stateful_iterable", "torchdata", _STATE_A_RANK),
    Loader("StatefulDataLoader, iterable with its own state", "stateful_stateful", "torchdata", _STATE_A_RANK),
    Loader("datasets, IterableDataset over JSON", "hugging_face", "datasets", _STATE_A_RANK),
    Loader(
        "MosaicML StreamingDataLoader over MDS",
        "mosaicml",
        "mosaicml-streaming",
        "as documented, the global batch kept",
    ),
)


def measure_peers(place: Path, rows: int, rounds: int, environments: Path) -> dict[tuple[Loader, int], list[Found]]:
    """Returns what the processes of each found, by loader and rows consumed; they take turns, the first is not counted.

    Args:
        place: an empty directory to work in.
        rows: how many there are, whole chunks and more than `CONSUMED`.
        rounds: processes of each.
        environments: the directory of the others' environments.

    Raises:
        SystemExit: one failed, or went on with other rows than those that are next.
    """
    data, offsets = place / "rows", place / "offsets"
    make_stream(data, rows, "prose")
    _write_offsets(data, offsets)
    cases: dict[tuple[Loader, int], tuple[dict[str, Any], list[int]]] = {}
    for loader in LOADERS:
        for consumed in CONSUMED:
            step = loader.saved * _BATCH
            settings = {
                "data": str(data),
                "offsets": str(offsets),
                "state": str(place / f"{len(cases)}.state"),
                "consumed": consumed // step * step,
                "saved": loader.saved,
                "rank": loader.resumed // 2,
                "ranks": loader.resumed,
            }
            _run(loader, environments, settings | {"save": True})
            cases[loader, consumed] = settings | {"save": False}, _expected(loader, settings)
    found: dict[tuple[Loader, int], list[Found]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for (loader, consumed), (settings, ids) in cases.items():
            one = _run(loader, environments, settings)
            if one["result"] != ids:
                raise SystemExit(f"{loader.name}: after {consumed} rows expected {ids}, read {one['result']}")
            if number:
                found[loader, consumed].append(one)
    return found


def _run(loader: Loader, environments: Path, settings: dict[str, Any]) -> Found:
    command = [loader.python(environments), str(PROCESS), loader.what, json.dumps(settings)]
    home = str(Path(settings["data"]).parent)
    return run(command, loader.name, env=os.environ | {"HF_HOME": home, "HF_HUB_OFFLINE": "1"}, cwd=home)


def _expected(loader: Loader, settings: dict[str, Any]) -> list[int]:
    """Returns the ids of the rows that are next: row i has the id i."""
    if loader.resumed == 1:
        return list(range(settings["consumed"], settings["consumed"] + _BATCH))
    state = RunState.from_dict(pickle.loads(Path(settings["state"]).read_bytes()), "the state")
    goes_on = resumed(state, loader.resumed, _BATCH)
    first = draws_of(goes_on, goes_on.consumed)
    _, samples = course_of(goes_on).draws(settings["rank"], range(first, first + _BATCH), None)
    return [int(sample) for sample in samples]


def _write_offsets(data: Path, offsets: Path) -> None:
    with offsets.open("wb") as file:
        for number in range(len(list(data.glob("chunk_*.jsonl")))):
            file.write(Seal.decode((data / seal_name(number)).read_bytes(), number).offsets.astype("=u8").tobytes())
