"""Real runs on a stream in a bucket: own chunks, a resume that leaves out what it is told to, a cursor there too."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="needs the extra objects, and moto")
pytest.importorskip("s3fs", reason="needs the extra objects")

from lazyshard.store.files import UrlPath
from lazyshard.stream import list_consumers
from tests.cli.commands import lazyshard
from tests.store.conftest import bucket, running, server
from tests.store.server import Server
from tests.store.streams import upload
from tests.swift.commands import ids_by_dp, swift_sft
from tests.swift.streams import write_stream

pytestmark = [pytest.mark.timeout(400)]
__all__ = ["bucket", "running", "server"]
SIZE = 5


def test_swift_with_2_processes_then_1_and_skip(tmp_path: Path, model: Path, server: Server, bucket: UrlPath) -> None:
    upload(write_stream(tmp_path / "stream", 0, 60, SIZE), bucket)
    server.asked.clear()
    own = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "LAZYSHARD_"))}
    options: dict[str, Any] = {"dataset": str(bucket), "output_dir": tmp_path / "output", "sharded_lazy": True}
    options |= {"train_dataloader_shuffle": False, "save_strategy": "steps", "save_steps": 5, "environment": own}
    first = swift_sft(tmp_path / "run1", model, processes=2, max_steps=6, **options)
    mine = {rank: [number for number in range(60) if number // SIZE % 2 == rank] for rank in (0, 1)}
    assert ids_by_dp(first.batches) == {rank: ids[:12] for rank, ids in mine.items()}
    assert max(server.gets(".jsonl").values()) == 1
    # What it trained after the checkpoint, and more.
    lost = {number for batch in first.batches if batch.step == 6 for number in batch.ids}
    told = lost | {41, 42} | set(range(50, 55))
    options |= {"sharded_lazy_skip": "steps 6:7, samples 41:43, chunks 10:11"}
    options |= {"resume_from_checkpoint": tmp_path / "output" / "checkpoint-5"}
    second = swift_sft(tmp_path / "run2", model, processes=1, max_steps=100, **options)
    (rest,) = ids_by_dp(second.batches).values()
    assert (len(rest), set(rest) - (set(range(20, 60)) - told)) == (len(set(rest)), set())
    assert 20 + len(rest) == (60 - len(told)) // 2 * 2
    assert max(server.gets(".jsonl").values()) == 1, "by both runs together"
    (consumer,) = list_consumers(bucket, 12)
    assert consumer.problem is None
    assert consumer.cursor is not None
    (epoch,) = json.loads(lazyshard("audit", bucket, tmp_path / "output", "--json").stdout)["epochs"]
    assert (epoch["trained"], epoch["proven"]) == (20 + len(rest), True)
    assert epoch["twice"]["samples"] == epoch["missing"]["samples"] == 0
    last = max(batch.step for batch in second.batches)
    for step, words, there in ((5, "trained at step", False), (last, "skipped on purpose", True)):
        checkpoint = tmp_path / "output" / f"checkpoint-{step}"
        traced = lazyshard("trace", bucket, "--state", checkpoint, "--sample", min(lost))
        assert (traced.returncode, words in traced.stdout) == (0, there)
