"""`--sharded_lazy_encode_cache`: each row is encoded once on a node, and trained as from a stream that was encoded."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.swift.commands import Run, ids_by_dp, megatron_sft, swift_sft
from tests.swift.consumption import MICRO
from tests.swift.programs import MAX_LENGTH, encode
from tests.swift.streams import write_jsonl, write_stream

pytestmark = [pytest.mark.timeout(1000)]

ROWS: Final = 24


def trained(run: Run) -> list[tuple[Any, ...]]:
    return sorted((batch.step, batch.micro, batch.rank, batch.ids, batch.tokens) for batch in run.batches)


def counting(log: Path) -> dict[str, Any]:
    """Options of a run that writes down which rows it encodes."""
    return {"sharded_lazy": True, "environment": {"ENCODED": str(log)}, "timeout_s": 400}


def encoded_in(log: Path) -> Counter[int]:
    """How often each row was encoded."""
    return Counter(map(int, log.read_text().split()) if log.exists() else ())


def test_swift_encodes_each_row_once_over_epochs_and_starts(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {
        "dataset": write_stream(tmp_path / "stream", 0, ROWS, 8),
        "num_train_epochs": 2,
        "sharded_lazy_encode_cache": tmp_path / "cache",
        "sharded_lazy_encode_cache_size": "64MiB",
    }
    first = swift_sft(tmp_path / "first", model, **options, **counting(tmp_path / "1"))
    assert encoded_in(tmp_path / "1") == Counter(range(ROWS)), first.tail()
    more = {"dataloader_num_workers": 2}
    second = swift_sft(tmp_path / "second", model, **options | more, **counting(tmp_path / "2"))
    assert encoded_in(tmp_path / "2") == Counter()
    assert trained(first) == trained(second)
    assert first.losses == second.losses
    assert len(first.losses) == 2 * ROWS // 4
    told = re.findall(r"--sharded_lazy_encode_cache \S+: this rank encoded (\d+) rows and found", second.output)
    assert told == ["0"]


def test_cached_and_encoded_rows_train_alike_on_four_processes(tmp_path: Path, model: Path) -> None:
    """Two tensor-parallel peers of each of two data-parallel ranks, which share one file."""
    options: dict[str, Any] = {"tensor_model_parallel_size": 2, "num_train_epochs": 1, "sharded_lazy_unit": "batch"}
    raw = write_stream(tmp_path / "raw", 0, ROWS, ROWS)
    cache = {"sharded_lazy_encode_cache": tmp_path / "cache"}
    cached = megatron_sft(tmp_path / "cached", model, dataset=raw, **options, **cache, **counting(tmp_path / "1"))
    assert encoded_in(tmp_path / "1") == Counter(range(ROWS)), cached.tail()
    source = write_jsonl(tmp_path / "rows.jsonl", 0, ROWS)
    encode(model, tmp_path, {"made": (source, ROWS, ("--encode", "swift", "--max-length", MAX_LENGTH))})
    ready = megatron_sft(tmp_path / "ready", model, dataset=tmp_path / "made", **options, **counting(tmp_path / "2"))
    assert encoded_in(tmp_path / "2") == Counter()
    assert trained(cached) == trained(ready)
    assert len(cached.losses) == ROWS // 8
    assert cached.losses == ready.losses
    # Each rank shuffles its own batches of the file.
    by_dp = ids_by_dp(cached.batches)
    assert sorted(by_dp[0] + by_dp[1]) == list(range(ROWS))
    assert all(number // MICRO % 2 == rank for rank, ids in by_dp.items() for number in ids)
    assert all(ids != sorted(ids) for ids in by_dp.values())
