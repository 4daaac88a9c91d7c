"""What a waiting reader says of the producer, from true processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import WaitTimeout
from tests.storage.streams import produce


def test_producer_that_was_killed_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killed.kill()
    killed.communicate()
    path = tmp_path / "head.json"
    head = json.loads(path.read_bytes())
    beat = {"state": "running", "rate": 100.0, "host": socket.gethostname(), "updated_at": time.time() - 100}
    path.write_text(json.dumps(head | beat | {"pid": killed.pid}))
    with pytest.raises(
        WaitTimeout, match=f"pid {killed.pid} on .* is not there any more, and did not say that it stops"
    ):
        StreamReader(tmp_path, max_wait=0).read(5)
    path.write_text(json.dumps(head | beat | {"pid": os.getpid()}))
    with pytest.raises(WaitTimeout, match=r"is running, but has told of no new row for 1 min 4\d s"):
        StreamReader(tmp_path, max_wait=0).read(5)


def test_writer_that_is_open_but_idle_is_said_to_be_silent_with_rows_in_its_open_chunk(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 2, clock=lambda: time.time() - 100)
    for row in range(5):
        writer.write({"id": row})
    reader = StreamReader(tmp_path, max_wait=0)
    silent = r"is running, but has told of no new row for 1 min 4\d s, with {} in its open chunk"
    with pytest.raises(WaitTimeout, match=silent.format("rows, if any,")):
        reader.read(5)
    writer.heartbeat()
    with pytest.raises(WaitTimeout, match=silent.format("1 row or more")):
        reader.read(5)
    writer.close()
    assert reader.read(4) == {"id": 4}
