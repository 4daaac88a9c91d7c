"""Real runs on a stream in a bucket: each rank its own chunks, a resume that goes on exactly, a cursor there too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="needs the extra objects, and moto")
pytest.importorskip("s3fs", reason="needs the extra objects")

from lazyshard.format.names import chunk_name
from lazyshard.store.urls import UrlPath
from lazyshard.stream import list_consumers
from tests.store.conftest import bucket, running, server
from tests.store.server import Server
from tests.store.streams import upload
from tests.swift.commands import ids_by_dp, swift_sft
from tests.swift.consumption import audited
from tests.swift.streams import write_stream

pytestmark = [pytest.mark.timeout(400)]

__all__ = ["bucket", "running", "server"]

SIZE = 5


def test_swift_with_2_processes_then_1_on_a_bucket(
    tmp_path: Path, model: Path, server: Server, bucket: UrlPath
) -> None:
    upload(write_stream(tmp_path / "stream", 0, 60, SIZE), bucket)
    server.asked.clear()
    options: dict[str, Any] = {
        "dataset": str(bucket),
        "output_dir": tmp_path / "output",
        "sharded_lazy": True,
        "train_dataloader_shuffle": False,
        "save_strategy": "steps",
        "save_steps": 5,
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("AWS_", "LAZYSHARD_")) or name == "PYTHONPATH"
        },
    }
    first = swift_sft(tmp_path / "run1", model, processes=2, max_steps=5, **options)
    assert ids_by_dp(first.batches) == {
        rank: [number for number in range(20) if number // SIZE % 2 == rank] for rank in (0, 1)
    }
    assert max(server.gets(".jsonl").values()) == 1
    second = swift_sft(
        tmp_path / "run2",
        model,
        processes=1,
        max_steps=100,
        resume_from_checkpoint=tmp_path / "output" / "checkpoint-5",
        **options,
    )
    assert ids_by_dp(second.batches) == {0: list(range(20, 60))}
    # By both runs together.
    assert server.gets(".jsonl") == {chunk_name(chunk): 1 for chunk in range(12)}
    (consumer,) = list_consumers(bucket, 12)
    assert consumer.problem is None
    assert consumer.cursor is not None
    assert consumer.cursor.consumed == 60
    epoch = audited(str(bucket), tmp_path / "output")
    assert (epoch["trained"], epoch["proven"]) == (60, True)
