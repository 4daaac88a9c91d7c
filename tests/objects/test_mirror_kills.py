"""Readers that share a small cache are killed one after another; what the others read is whole, within the bound."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lazyshard import StreamReader
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.storage.mirror_place import BYTES_VARIABLE
from lazyshard.storage.urls import UrlPath
from tests.objects.streams import publish
from tests.objects.test_mirror import copies, start, taken
from tests.storage.streams import DEADLINE_S, rows


def test_readers_that_are_killed_spoil_nothing(
    tmp_path: Path, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(tmp_path / "local", bucket, 120, 4)
    cache = tmp_path / "cache"
    chunk = (folder / chunk_name(29)).stat().st_size + (folder / seal_name(29)).stat().st_size
    monkeypatch.setenv(BYTES_VARIABLE, str(6 * chunk))
    survivor = start(bucket)
    assert survivor.stdin is not None
    survivor.stdin.write("\n")
    survivor.stdin.flush()
    for lines in (1, 5, 14, 30, 59):
        process = start(bucket)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert [int(process.stdout.readline()) for _ in range(lines)] == list(range(lines))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -signal.SIGKILL
        assert taken(cache) <= 6 * chunk
    printed, _ = survivor.communicate(timeout=DEADLINE_S)
    assert [int(line) for line in printed.split()] == list(range(120))
    monkeypatch.setenv("LAZYSHARD_OBJECTS_AHEAD", "0")
    assert list(StreamReader(bucket)) == rows(0, 120)
    assert not [name for name in copies(cache) if name.endswith(".part")]
