"""A stream in an object store as a source of rows: read to its end, gone on with, and no longer there."""

from __future__ import annotations

from pathlib import Path

from lazyshard import StreamReader
from lazyshard.format.names import MANIFEST
from lazyshard.store.urls import UrlPath
from lazyshard_producer.cli import main
from tests.harness.processes.producing import run_arguments
from tests.store.streams import upload
from tests.stream.streams import produce


def publish(out: Path, source: UrlPath) -> int:
    return main(run_arguments(out, [source], 4))


def test_stream_in_a_store_is_a_source(bucket: UrlPath, tmp_path: Path) -> None:
    upload(produce(tmp_path / "old", 10, 3), bucket)
    assert publish(tmp_path / "new", bucket) == 0
    assert [row["id"] for row in StreamReader(tmp_path / "new")] == list(range(10))
    assert publish(tmp_path / "new", bucket) == 0
    # What was deleted since holds no rows that the stream lacks.
    (bucket / MANIFEST).store.delete((bucket / MANIFEST).key)
    assert publish(tmp_path / "new", bucket) == 0
    assert publish(tmp_path / "other", bucket) == 4
    assert not (tmp_path / "other").exists()
