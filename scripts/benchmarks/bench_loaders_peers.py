"""What `scripts/bench_loaders` compares, and a process of each: in its own environment, watched from outside."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_loaders_cases import CASES, Settings
from scripts.benchmarks.bench_loaders_tree import Memory, end, memory

ROOT: Final = Path(__file__).resolve().parents[2]
OURS: Final = "lazyshard"
FLOOR: Final = "orjson"
SAMPLE_S: Final = 0.05
"""How often the memory is looked at."""
_SHARE: Final = 20
"""At most one part in so many of a processor goes into looking at the memory."""

_TRACKER_S: Final = 2.0
"""How long what clears up after a process may take."""

_ALL: Final = frozenset(CASES)


class LoaderFailed(Exception):
    """A loader did not do what it was asked for.

    Attributes:
        reason: the last of what it said.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Loader:
    """One of them.

    Attributes:
        name: what it is called on the command line and in the tables.
        package: the one that its environment has and is named for; "" where it runs in ours.
        settings: what it was told, for the report.
        cases: those that it has.
        native: the loader whose conversion it reads; "" where it reads the rows as they are.
        reference: whether it shows what is possible, and is no loader to be ahead of.
    """

    name: str
    package: str
    settings: str
    cases: frozenset[str] = field(default=_ALL)
    native: str = ""
    reference: bool = False

    def python(self, environments: Path) -> str:
        """Returns its interpreter."""
        return str(environments / self.package / "bin" / "python") if self.package else sys.executable

    def version(self, environments: Path) -> str:
        """Returns the version of its package."""
        if not self.package:
            return f"orjson {importlib.metadata.version('orjson')}" if self.name == FLOOR else "this release"
        code = f"import importlib.metadata; print(importlib.metadata.version({self.package!r}))"
        version = subprocess.check_output([self.python(environments), "-c", code], text=True)
        return f"{self.package} {version.strip()}"


_NO_RANDOM: Final = _ALL - {"random"}
_WORKERS: Final = frozenset({"loader", "loader-shuffled"})
_ONE: Final = frozenset({"order"})

LOADERS: Final = (
    Loader(FLOOR, "", "orjson.loads over the memory-mapped lines", _ONE, reference=True),
    Loader("bytes", "", "reads the chunk files, 1 MiB at a time", _ONE, reference=True),
    Loader("minimal", "torchdata", "row offsets known, files mapped, orjson; nothing else", reference=True),
    Loader(
        OURS,
        "",
        "ds[i]; __getitems__ of 8 with shuffle_window=4; torch DataLoader, late_parsing; digests checked, no encoder",
    ),
    Loader("lazyshard-dicts", "", "the same without late_parsing", _WORKERS, reference=True),
    Loader("torchdata", "torchdata", "StatefulDataLoader over `minimal`", _WORKERS),
    Loader(
        "datasets",
        "datasets",
        "Dataset, Arrow, a file a chunk; shuffle() in one process, the sampler's in a DataLoader",
        native="datasets",
    ),
    Loader(
        "datasets-streaming",
        "datasets",
        "Dataset.to_iterable_dataset, a shard a chunk; shuffle buffer of 4 chunks",
        _NO_RANDOM,
        "datasets",
    ),
    Loader(
        "mosaicml-streaming",
        "mosaicml-streaming",
        "MDS, 64 MB a shard, uncompressed; py1e over 4 chunks; StreamingDataLoader",
        native="mosaicml-streaming",
    ),
    Loader("litdata", "litdata", "64 MB a chunk, shuffle=True; StreamingDataLoader", native="litdata"),
    Loader(
        "webdataset",
        "webdataset",
        "tar of 64 MB, orjson; shards shuffled and a buffer of 4 chunks; WebLoader, batches made in the workers",
        _NO_RANDOM,
        "webdataset",
    ),
    Loader(
        "grain",
        "grain",
        "ArrayRecord, group_size:1, pickled rows; no threads; global shuffle; mp_prefetch of batches",
        native="grain",
    ),
    Loader(
        "megatron-energon",
        "megatron-energon",
        "crude tar of 64 MB, orjson; in order as for validation, shuffled with a buffer of 4 chunks",
        _NO_RANDOM,
        "megatron-energon",
    ),
)
"""In the order of the rounds; the floor first."""


@dataclass(frozen=True)
class Taken:
    """What reading everything once took.

    Attributes:
        seconds: by the clock, per row.
        first_s: to the first row or batch, the start of the workers included.
        processor_s: of all processes, per row.
        pss_mb: the peak of all processes together.
        anonymous_mb: the peak of what of it is no file's.
    """

    seconds: float
    first_s: float
    processor_s: float
    pss_mb: float
    anonymous_mb: float


def run_process(
    loader: Loader, environments: Path, what: str, settings: Settings, timeout_s: float
) -> tuple[dict[str, Any], Memory]:
    """Runs one process to its end, and returns what it reports and the peaks of its memory.

    Raises:
        LoaderFailed: it ended with an error, or took too long.
    """
    place = Path(settings.data).parent
    # This repository is on the path for these scripts. Its own packages are there too, but nobody else imports them.
    variables = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts' / 'benchmarks'}",
        "HF_HUB_OFFLINE": "1",
    }
    command = [loader.python(environments), "-m", "scripts.benchmarks.bench_loaders_process", what, loader.name]
    command.append(json.dumps(settings.to_dict()))
    peak = Memory(0.0, 0.0)
    with (
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+") as errors,
        # What loaders leave in such places is of no use to anybody, and some of it changes what the next one does.
        tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as home,
    ):
        variables |= dict.fromkeys(("HF_HOME", "HOME", "TMPDIR", "XDG_CACHE_HOME"), home)
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=variables,
            cwd=place,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + timeout_s
            pause = SAMPLE_S
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause)
                    break
                if time.monotonic() > deadline:
                    raise LoaderFailed(f"not finished within {timeout_s:g} s")
                began = time.thread_time()
                peak = Memory(*map(max, zip(peak, memory(process.pid), strict=True)))
                pause = max(SAMPLE_S, _SHARE * (time.thread_time() - began))
        finally:
            # Workers that it left behind, too.
            end(process.pid, _TRACKER_S)
            process.wait()
        said.seek(0)
        errors.seek(0)
        lines, complaints = said.read().splitlines(), errors.read().splitlines()
    if process.returncode or not lines:
        complaint = next((line for line in reversed(complaints) if line.strip()), f"exit code {process.returncode}")
        raise LoaderFailed(complaint.strip())
    found: dict[str, Any] = json.loads(lines[-1])
    # The last look at it is that of the process itself.
    return found, Memory(*map(max, zip(peak, found.get("memory", peak), strict=True)))


class WrongRows(Exception):
    """A loader did not return the rows that are there."""


def checked(name: str, found: dict[str, Any], peak: Memory, settings: Settings, size: int, probe: str) -> Taken:
    """Returns what a run took, if it did the work.

    Args:
        name: the loader's.
        found: what it reports.
        peak: of its memory, MB.
        settings: what it was told.
        size: of the chunk files together, bytes.
        probe: the row with the id `settings.probe`, as text.

    Raises:
        WrongRows: the number of rows, the sum of their ids, or one of them is not as it should be.
    """
    drawn = settings.drawn()
    if name == "bytes":
        if found["rows"] != size:
            raise WrongRows(f"bytes: expected {size:,} bytes, read {found['rows']:,}")
    else:
        case = f"{name}, data {settings.which}, {CASES[settings.case]}"
        expected = {"rows": len(drawn), "ids": sum(drawn)}
        for key, words in (("rows", "rows"), ("ids", "as the sum of ids")):
            if found[key] != expected[key]:
                raise WrongRows(f"{case}: expected {expected[key]:,} {words}, read {found[key]:,}")
        if found["probe"] != probe:
            raise WrongRows(
                f"{case}: row {settings.probe} is not that of the source: expected {probe[:100]}..., "
                f"read {found['probe'][:100]}..."
            )
    count = len(drawn)
    return Taken(found["seconds"] / count, found["first_s"], found["processor_s"] / count, *peak)
