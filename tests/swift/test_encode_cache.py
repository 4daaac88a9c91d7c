"""`--sharded_lazy_encode_cache`: each row is encoded once on a node, and the losses are those without a cache."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.swift.commands import Run, megatron_sft, swift_sft
from tests.swift.encoding import produce
from tests.swift.streams import row, write_stream

pytestmark = [pytest.mark.timeout(1000)]

PLUGIN: Final = Path(__file__).with_name("count_plugin.py")
ROWS: Final = 24
TOLD: Final = re.compile(r"--sharded_lazy_encode_cache \S+: this rank encoded (\d+) rows and found (\d+) encoded")


def trained(run: Run) -> list[tuple[Any, ...]]:
    return sorted((batch.step, batch.micro, batch.rank, batch.ids, batch.tokens) for batch in run.batches)


def told(run: Run) -> list[tuple[int, int]]:
    return [(int(encoded), int(found)) for encoded, found in TOLD.findall(run.output)]


class Runs:
    """Runs of one kind over one stream, with what each of them encoded.

    Args:
        folder: for all of it.
        command: `swift_sft` or `megatron_sft`.
        model: the model.
        options: of all runs.
    """

    def __init__(self, folder: Path, command: Callable[..., Run], model: Path, **options: Any) -> None:
        self._folder = folder
        self._command = command
        self._model = model
        self._options = options
        write_stream(folder / "stream", 0, ROWS, 8)

    def run(self, name: str, **options: Any) -> tuple[Run, Counter[int]]:
        """Returns a run, and how often it encoded each row."""
        log = self._folder / f"{name}.encoded"
        run = self._command(
            self._folder / name,
            self._model,
            sharded_lazy=True,
            plugins=[PLUGIN],
            environment={"ENCODED": str(log)},
            timeout_s=400,
            **{"dataset": self._folder / "stream", **self._options, **options},
        )
        return run, Counter(map(int, log.read_text().split()) if log.exists() else ())

    @property
    def cache(self) -> dict[str, Any]:
        """Options of a cache."""
        return {"sharded_lazy_encode_cache": self._folder / "cache", "sharded_lazy_encode_cache_size": "64MiB"}


def test_swift_encodes_each_row_once_over_epochs_and_starts(tmp_path: Path, model: Path) -> None:
    runs = Runs(tmp_path, swift_sft, model, num_train_epochs=2)
    without, encoded = runs.run("without")
    # The first sample is shown, too.
    assert sum(encoded.values()) >= 2 * ROWS
    first, once = runs.run("first", **runs.cache)
    assert once == Counter(range(ROWS)), first.tail()
    second, nothing = runs.run("second", **runs.cache, dataloader_num_workers=2)
    assert nothing == Counter()
    assert trained(first) == trained(second) == trained(without)
    assert len(without.losses) == 2 * ROWS // 4
    assert first.losses == second.losses == without.losses
    assert (told(without), [encoded for encoded, _ in told(second)]) == ([], [0])


def test_raw_cached_and_encoded_rows_train_alike_on_four_processes(tmp_path: Path, model: Path) -> None:
    """Two tensor-parallel peers of each of two data-parallel ranks."""
    options = {"processes": 4, "tensor_model_parallel_size": 2, "num_train_epochs": 1}
    runs = Runs(tmp_path, megatron_sft, model, **options)
    raw, encoded = runs.run("raw")
    assert min(encoded[number] for number in range(ROWS)) >= 2
    cached, once = runs.run("cached", **runs.cache)
    assert once == Counter(range(ROWS)), cached.tail()
    made = produce(tmp_path / "made", list(map(row, range(ROWS))), model)
    assert made.returncode == 0, made.stderr
    ready, nothing = runs.run("ready", dataset=tmp_path / "made")
    assert nothing == Counter()
    assert trained(cached) == trained(ready) == trained(raw)
    assert len(raw.losses) == ROWS // 8
    assert cached.losses == ready.losses == raw.losses
