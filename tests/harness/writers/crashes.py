"""A writer in a fork that is killed at a call, and what it leaves: wrong orders, torn files; no missing fsync shows."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard import ChunkWriter
from lazyshard.errors import StreamEnded
from lazyshard.format.arrays import pack_row
from lazyshard.format.records import seal_name
from lazyshard.format.seal import Seal
from tests.harness.points.sealed import SealedChunks
from tests.harness.processes.kill_points import KillPoint, When
from tests.harness.scenes.streams import LASTING
from tests.stream.streams import forked, names

SAMPLES: Final = 7
PER_CHUNK: Final = 2  # Three full chunks and a partial one
_CHUNKS: Final = {f"chunk_0000{n}.jsonl{end}" for n in range(4) for end in ("", ".completed")}
Mutant = Callable[[], None]


def row(sample: int, arrays: bool) -> dict[str, Any]:
    """A row; its array, if it has one, is of another size than those beside it, or empty."""
    return {"id": sample} | ({"x": np.full(sample % 3, sample, np.int64)} if arrays else {})


_PACKED: Final = {arrays: [pack_row(row(sample, arrays)) for sample in range(SAMPLES)] for arrays in (False, True)}


def produce(directory: Path, *, arrays: bool, overlap: bool = False) -> None:
    with contextlib.suppress(StreamEnded), ChunkWriter(directory, PER_CHUNK, overlap=overlap, arrays=arrays) as stream:
        if (stream.source or 0) != stream.published_samples:
            raise AssertionError(f"continues from source {stream.source}, published are {stream.published_samples}")
        for sample in range(stream.published_samples, SAMPLES):
            stream.write(row(sample, arrays), tokens=sample, source=sample + 1)


def killed(at: int, when: When, work: Callable[[], object], mutant: Mutant | None = None) -> int | None:
    """Works in a fork that is killed at a call that changes a file; returns None if it was, else how many it made."""
    count, told = os.pipe()
    write = os.write

    def child() -> None:
        calls = 0

        def tell(number: int, name: str, begins: bool) -> None:
            nonlocal calls
            calls = max(calls, number)

        if mutant is not None:
            mutant()
        KillPoint(at, when, tell=tell).install()
        work()
        write(told, b"%d" % calls)

    try:
        code = forked(child)
        os.close(told)
        text = os.read(count, 20)
    finally:
        os.close(count)
    assert code in (0, -signal.SIGKILL), f"the process failed with exit code {code}"
    return None if code else int(text)


def run(directory: Path, at: int = 0, when: When = "half", mutant: Mutant | None = None, **how: bool) -> int | None:
    return killed(at, when, lambda: produce(directory, **how), mutant)


def check(directory: Path, before: dict[str, bytes], *, arrays: bool = False) -> dict[str, bytes]:
    """Checks what every instant must keep; returns what is sealed, for the next check."""
    packed = _PACKED[arrays]
    side = [one.arrays for one in packed] if arrays else None
    lines = [one.line.decode().removesuffix("\n") for one in packed]
    sealed = SealedChunks(directory, lines, PER_CHUNK, ordered=True, known=before, arrays=side)
    sealed.look_stopped(0)
    for chunk in range(sealed.chunks):
        source = Seal.decode(sealed.known[seal_name(chunk)], chunk).source
        assert source == min((chunk + 1) * PER_CHUNK, SAMPLES), f"the seal of chunk {chunk} says source {source}"
    if (directory / "stream.json").exists():
        sealed.read_through()
    return sealed.known


def check_clean(directory: Path, *, arrays: bool) -> None:
    clean = LASTING | _CHUNKS | ({f"chunk_0000{n}.arrays" for n in range(4)} if arrays else set())
    assert set(names(directory)) == clean, f"left over: {sorted(set(names(directory)) ^ clean)}"


def finish(directory: Path, before: dict[str, bytes], mutant: Mutant | None = None, *, arrays: bool = False) -> None:
    if arrays:
        _clear(directory, mutant)
    run(directory, mutant=mutant, arrays=arrays)
    check(directory, before, arrays=arrays)
    check_clean(directory, arrays=arrays)


def _clear(directory: Path, mutant: Mutant | None) -> None:
    def work() -> None:
        with contextlib.suppress(StreamEnded):
            ChunkWriter(directory, PER_CHUNK, arrays=True).close(end=False)

    killed(0, "half", work, mutant)
    sealed = {path.name.removesuffix(".jsonl.completed") for path in directory.glob("*.completed")}
    files = {path.stem for path in directory.iterdir() if path.suffix in (".jsonl", ".arrays")}
    assert not (files != sealed or (directory / ".tmp").exists()), f"left over by a start: {names(directory)}"


def sweep(
    root: Path, mutant: Mutant | None = None, *, overlap: bool = False, arrays: bool = False, first: int = 1
) -> int:
    """Kills at every call in turn, half way where it writes and before it where not; returns at how many."""
    for at in itertools.count(first):
        directory = root / f"{at}"
        ended = run(directory, at, "half", mutant, overlap=overlap, arrays=arrays) is not None
        finish(directory, check(directory, {}, arrays=arrays), mutant, arrays=arrays)
        if ended:
            break
    return at - 1


def sweep_recovery(root: Path, first_step: int, second_step: int, *, overlap: bool, arrays: bool) -> None:
    whens: tuple[When, ...] = ("before", "after", "half")
    total = run(root / "whole", overlap=overlap, arrays=arrays)
    assert total is not None
    for first in range(2, total, first_step):
        for second in range(1 + first % 4, total, second_step):
            directory = root / f"{first}_{second}"
            run(directory, first, whens[first % 3], overlap=overlap, arrays=arrays)
            sealed = check(directory, {}, arrays=arrays)
            run(directory, second, whens[second % 3], overlap=overlap, arrays=arrays)
            finish(directory, check(directory, sealed, arrays=arrays), arrays=arrays)


def killed_over_and_over(directory: Path, until: int) -> None:
    sealed: dict[str, bytes] = {}
    for at in range(1, until):
        run(directory, at, arrays=False)
        sealed = check(directory, sealed)
    finish(directory, sealed)
