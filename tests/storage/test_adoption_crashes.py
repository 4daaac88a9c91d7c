"""Adoption stopped at each of its steps, and run again."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import StreamInvalid, StreamUnsealed
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.storage import adoption_publishing, durable
from lazyshard.storage.adoption import adopt
from tests.storage.adoptable import FULL, KEPT, SHORT, bare, data, marked
from tests.storage.streams import forked, head, names, produce, rows


def test_failing_disk_leaves_what_can_be_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare(tmp_path, *FULL)
    before = data(tmp_path)

    def full(fd: int, content: bytes) -> None:
        if b'"chunk":1' in content:
            raise OSError(28, "No space left on device")
        os.write(fd, content)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            adopt(tmp_path)
    assert set(names(tmp_path)) == {*(chunk_name(i) for i in range(3)), seal_name(0), *KEPT}
    first = (tmp_path / seal_name(0)).read_bytes()
    adopt(tmp_path)
    assert (tmp_path / seal_name(0)).read_bytes() == first
    assert list(StreamReader(tmp_path)) == rows(0, 6)
    assert data(tmp_path) == before


STEPS: Final = ("create", "write_all", "sync", "rename", "sync_directory", "remove")


def killed_at(step: int, directory: Path, end: bool) -> int:
    """Adopts in a child that gets SIGKILL in front of a durable step, or half way through if it is a write."""
    left = step

    def wrapped(name: str, original: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            if name == "write_all":
                fd, content = arguments
                original(fd, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    def work() -> None:
        for name in STEPS:
            original = getattr(durable, name)
            for module in (durable, adoption_publishing):
                if hasattr(module, name):
                    setattr(module, name, functools.partial(wrapped, name, original))
        adopt(directory, end=end)

    return forked(work)


def samples_seen(directory: Path) -> int | None:
    """How many samples a reader is told of, all of which it reads and finds right; None: refused as without markers."""
    try:
        reader = StreamReader(directory, 2, max_wait=0)
    except StreamUnsealed:
        return None
    seen = reader.seen
    read = [row for n in range(0, seen.samples, 2) for row in reader.read_published(n, min(n + 2, seen.samples), 2)]
    assert read == rows(0, seen.samples)
    return seen.samples


def stages(directory: Path, end: bool) -> Iterator[list[str]]:
    """Kills a run at the first step, the next one at the second, and so on each on what the one before has left."""
    for step in range(1000):
        code = killed_at(step, directory, end)
        yield names(directory)
        if code == 0:
            return
        assert code == -signal.SIGKILL
    raise AssertionError("never done")


@pytest.mark.parametrize("make", [bare, marked])
@pytest.mark.parametrize(("chunks", "end"), [(SHORT, True), (FULL, False)])
def test_killed_at_each_step_and_run_again(
    make: Callable[..., Path], chunks: tuple[bytes, ...], end: bool, tmp_path: Path
) -> None:
    total = sum(chunk.count(b"\n") for chunk in chunks)
    for step in range(1000):
        stream = make(tmp_path / str(step), *chunks)
        before = data(stream)
        code = killed_at(step, stream, end)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        left = names(stream)
        seen = samples_seen(stream)
        if make is marked:
            # A full last chunk counts at once, and a short one with the end.
            assert seen in (
                (5,) if "stream.end" in left else (4,) if end else (4, 6) if "stream.json" in left else (6,)
            )
        if "stream.json" not in left:
            # The next start of a producer must not clear away what has no seal yet.
            with pytest.raises(StreamInvalid, match=r"somebody else made them; .* `lazyshard adopt \S+ --no-end`"):
                ChunkWriter(stream, 2)
        adopted = adopt(stream, end=end)
        assert (adopted.samples, adopted.chunks, adopted.ended) == (total, 3, end)
        # Once the head is there, what else was left is for the next writer to clear.
        assert ".tmp" not in names(stream) or "head.json" in left
        assert (head(stream).samples, samples_seen(stream)) == (total, total)
        assert data(stream) == before
        if not end:
            produce(stream, 7)
            assert list(StreamReader(stream)) == rows(0, 7)
    assert step > 35, "the steps were not met"


@pytest.mark.parametrize("make", [bare, marked])
def test_run_again_after_run_again(make: Callable[..., Path], tmp_path: Path) -> None:
    stream = make(tmp_path / "stream", *SHORT)
    seen = -1
    for _ in stages(stream, True):
        now = samples_seen(stream)
        # What was visible stays so.
        assert (-1 if now is None else now) >= seen
        seen = -1 if now is None else now
    assert seen == 5


@pytest.mark.parametrize("end", [True, False])
def test_killed_before_the_head(end: bool, tmp_path: Path) -> None:
    stream = bare(tmp_path, *FULL)
    adopt(stream, end=end)
    (stream / "head.json").unlink()
    adopted = adopt(stream)
    assert (adopted.samples, adopted.ended, adopted.new) == (6, end, False)
    assert (head(stream).samples, head(stream).ended) == (6, end)
    (stream / "head.json").unlink()
    (stream / seal_name(1)).unlink()
    with pytest.raises(StreamInvalid, match="chunk 1 lacks its data or its seal"):
        adopt(stream)


def test_lost_head_of_a_partial_chunk_without_an_end_names_no_partial_chunk(tmp_path: Path) -> None:
    produce(tmp_path, 5)
    (tmp_path / "stream.end").unlink()
    (tmp_path / "head.json").unlink()
    assert adopt(tmp_path).samples == 4
    assert head(tmp_path).samples == 4
