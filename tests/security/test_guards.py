"""Attacks against the real code fail, with a weakness planted each succeeds; and permissions are kept."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.store import durable, files
from lazyshard.stream import CursorOwner, cursor, head
from lazyshard.stream.cursor import write_reading
from lazyshard.stream.listing import retire
from lazyshard_producer.following import journal
from lazyshard_producer.following.journal import Journal
from lazyshard_producer.ray_pieces import write_piece
from lazyshard_swift.checkpoints import Position, save_position
from tests.security import guards
from tests.security.guards import GUARDS, Guard, assert_kept, producer, umask


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_attack_fails(guard: Guard, tmp_path: Path) -> None:
    guard(tmp_path)


CREATE: Final = durable.create


def creates(*flags: int) -> Callable[[Path], int]:
    """Opens what is there."""
    opened = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | sum(flags)
    return lambda path: os.open(path, opened, 0o666)


def creates_for_everybody(path: Path) -> int:
    fd = CREATE(path)
    os.fchmod(fd, 0o666)
    return fd


def clear_by_name(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


WEAKNESSES: Final[tuple[tuple[Any, str, Any, Guard], ...]] = (
    (
        files,
        "open_inside",
        lambda path: os.open(path, os.O_RDONLY | os.O_NONBLOCK),
        guards.link_out_of_the_stream_is_not_read,
    ),
    (durable, "create", creates(os.O_NOFOLLOW), guards.temporary_file_is_always_new),
    (durable, "create", creates(), guards.temporary_file_is_always_new),
    (durable, "clear_folder", clear_by_name, guards.recovery_removes_nothing_elsewhere),
    (cursor, "check_folder", lambda folder: folder, guards.cursors_folder_leads_nowhere),
    (journal, "decode_name", str, guards.journal_names_no_other_directory),
    (durable, "create", creates_for_everybody, guards.umask_is_kept),
    (durable, "NEW_FILE_MODE", 0o600, guards.umask_is_kept),
    (head, "printable", str, guards.no_error_moves_the_cursor),
)
"""What is put in place of a check, and the attack that then succeeds."""


@pytest.mark.parametrize(("owner", "name", "weak", "guard"), WEAKNESSES)
def test_planted_weakness_is_found(
    owner: Any, name: str, weak: Any, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, weak)
    with pytest.raises((AssertionError, pytest.fail.Exception, OSError)):
        guard(tmp_path)


def test_every_attack_has_a_weakness_that_it_finds() -> None:
    assert {guard for *_, guard in WEAKNESSES} == set(GUARDS)


@pytest.mark.parametrize("mask", [0o077, 0o002], ids="{:03o}".format)
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
        assert write_reading(place / "live", ReadingHint("sft", writer.stream_id, 1, 0, 1, 1.0))
        assert retire(place / "live", 2, 3) == 2
        writer.close()
        copied = ("run", "--source", stream, "--samples-per-chunk", 2, "--out", place / "copied")
        assert producer(*copied) == 0, capfd.readouterr().err
        Journal(place / "journals", "in").close()
        write_piece(place, 1, [b"{}\n"], 1)
        save_position(Position("s", "d", 1, 0, 0, 1, 1, "strided", 0, 0, 1, True, "sft", 1.0), place / "checkpoint-1")
    assert_kept(place, mask, 35)
