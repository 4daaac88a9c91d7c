"""Files and folders have the permissions that the user's umask leaves: no more, and no less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.stream import CursorOwner
from lazyshard.stream.consumers import write_reading
from lazyshard.stream.retire import retire
from lazyshard_producer.following.journal import Journal
from lazyshard_producer.ray.pieces import PieceWriter
from lazyshard_swift.checkpoints import save_position
from lazyshard_swift.position import Position
from tests.security.hostile import producer

MASKS: Final = (0o077, 0o022, 0o002, 0o027)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def assert_kept(place: Path, mask: int, made: int) -> None:
    found = [path for path in place.rglob("*") if not path.is_symlink()]
    assert len(found) >= made, found
    for path in found:
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o7777 == expected, f"{path}: {path.stat().st_mode & 0o7777:o}, not {expected:o}"


@pytest.mark.parametrize("mask", MASKS, ids="{:03o}".format)
def test_everything_that_is_made_keeps_the_umask(mask: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "all"
    with umask(mask):
        place.mkdir()
        (place / "incoming").mkdir()
        (place / "incoming" / "a.jsonl").write_bytes(b'{"id":0}\nbad\n{"id":1}\n{"id":2}\n')
        (place / "incoming" / "end").touch()
        stream, bad = place / "stream", ("--on-bad-row", "quarantine")
        run = ("run", "--follow", place / "incoming", "--end-marker", "end", "--samples-per-chunk", 1)
        assert producer(*run, "--out", stream, *bad, "--finished-by", "rename") == 0, capfd.readouterr().err
        assert (stream / "quarantine.jsonl").exists()
        assert producer("init", place / "stream.toml") == 0
        writer = ChunkWriter(place / "live", 2)
        for number in range(7):
            writer.write({"id": number})
        assert (place / "live" / ".tmp").is_dir()
        assert_kept(place, mask, 10)  # with what is being written
        with CursorOwner(place / "live", "sft") as owner:
            owner.put(Cursor("sft", writer.stream_id, 0, 0, {}, 1.0))
        assert write_reading(place / "live", ReadingMark("sft", writer.stream_id, 1, 0, 1, 1.0))
        assert retire(place / "live", 2, 3) == 2
        writer.close()
        copied = ("run", "--source", stream, "--samples-per-chunk", 2, "--out", place / "copied")
        assert producer(*copied) == 0, capfd.readouterr().err
        Journal(place / "journals", "in").close()
        piece = PieceWriter(place, 1)
        piece.add([b"{}\n"])
        piece.commit()
        save_position(Position("s", "d", 1, 0, 0, 1, 1, "strided", 0, 0, 1, True, "sft", 1.0), place / "checkpoint-1")
    assert_kept(place, mask, 35)


def test_file_that_is_replaced_keeps_nothing_of_the_old_one(tmp_path: Path) -> None:
    with umask(0o022):
        ChunkWriter(tmp_path / "s", 1).close(end=False)
    (tmp_path / "s" / "head.json").chmod(0o666)
    with umask(0o077):
        ChunkWriter(tmp_path / "s", 1).close(end=False)
    assert (tmp_path / "s" / "head.json").stat().st_mode & 0o777 == 0o600


def test_two_users_of_a_group_take_turns(tmp_path: Path) -> None:
    with umask(0o002):
        ChunkWriter(tmp_path / "s", 1).close(end=False)
    for name in (".producer.lock", "stream.owner", "head.json"):
        assert (tmp_path / "s" / name).stat().st_mode & 0o060 == 0o060, name
