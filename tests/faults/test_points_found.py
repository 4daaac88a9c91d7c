"""Faults that the sweeps of crash points and of power cuts have found, each as small as it gets."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.records import MANIFEST, Head, arrays_name, chunk_name, seal_name
from lazyshard.store.durable import publish_new_bytes
from lazyshard.stream import head, list_kept, listing
from lazyshard_producer.run import complete_end, find_end
from tests.stream.streams import names, produce, raising, refusal_of


def failing_link(monkeypatch: pytest.MonkeyPatch, error: int, target: Path, *, done: bool) -> None:
    """Has links to this target fail; if wanted, only after they were made."""
    link = os.link

    def fail(source: Path, name: Path, **options: Any) -> None:
        if name != target or done:
            link(source, name, **options)
        if name == target:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", fail)


@pytest.mark.parametrize(
    ("error", "before", "expected"),
    [
        (errno.EIO, None, "Input/output error"),  # Nor does what was written stay, on a full disk
        (errno.EPERM, b"old", "File exists"),  # A taken name, where the filesystem has no word for it
    ],
)
def test_a_link_that_fails(
    error: int, before: bytes | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is not None:
        (tmp_path / "new").write_bytes(before)
    failing_link(monkeypatch, error, tmp_path / "new", done=False)
    refusal_of(OSError, expected, publish_new_bytes, b"new", tmp_path / "new", tmp_path / "temporary")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before] * (before is not None)


@pytest.mark.parametrize("error", [errno.EIO, errno.EEXIST])
def test_a_link_whose_answer_was_lost_is_there(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    failing_link(monkeypatch, error, out / MANIFEST, done=True)
    ChunkWriter(out, 2).close()
    assert (out / MANIFEST).stat().st_nlink == 1


def test_chunks_that_were_not_deleted_are_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with ChunkWriter(out, 1) as writer:
        for number in range(3):
            writer.write({"id": number})
        with monkeypatch.context() as broken:
            broken.setattr("lazyshard.stream.listing.remove", raising(OSError(errno.EIO, "broken")))
            refusal_of(OSError, "broken", listing.retire, out, 2, 3)
    assert len(list_kept(out).leftovers) == 4
    end = find_end(str(out), 1)
    assert end is not None
    complete_end(str(out), end)
    assert list_kept(out).leftovers == []
    assert {name for name in names(out) if name.startswith("chunk_")} == {chunk_name(2), seal_name(2)}
    (out / arrays_name(0)).write_bytes(b"somebody's")  # No row holds arrays: it is somebody else's
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    complete_end(str(out), end)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_only_the_head_of_a_stream_that_has_ended_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts a producer again that has finished: readers would wait for ever for what a cut took back."""
    publish, told = head.publish_bytes, []  # type: ignore[attr-defined]

    def publish_bytes(data: bytes, target: Path, temporary: Path, **named: Any) -> None:
        told.append((Head.decode(data).ended, named["durable"]))
        publish(data, target, temporary, **named)

    monkeypatch.setattr(head, "publish_bytes", publish_bytes)
    produce(tmp_path / "stream", 3, 2)
    assert told == [(False, False), (False, False), (True, True)]
