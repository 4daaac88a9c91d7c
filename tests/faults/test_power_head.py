"""What a power cut may take back of a stream that has ended, seen without a disk: which heads are synced."""

from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.records import Head
from lazyshard.stream import head


def test_only_the_head_of_a_stream_that_has_ended_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts a producer again that has finished: readers would wait for ever for what a cut took back."""
    publish, told = head.publish_bytes, []  # type: ignore[attr-defined]

    def publish_bytes(data: bytes, target: Path, temporary: Path, **named: Any) -> None:
        told.append((Head.decode(data).ended, named["durable"]))
        publish(data, target, temporary, **named)

    monkeypatch.setattr(head, "publish_bytes", publish_bytes)
    with ChunkWriter(tmp_path / "stream", 2) as writer:
        for number in range(3):
            writer.write({"id": number})
    assert told == [(False, False), (False, False), (True, True)]
