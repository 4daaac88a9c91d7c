"""Attacks against the real code fail, with a weakness planted each succeeds; and permissions are kept."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import FileRefused, LazyShardError
from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.store import durable, files
from lazyshard.stream import CursorOwner, cursor, head
from lazyshard.stream.cursor import write_cursor, write_reading
from lazyshard.stream.listing import retire
from lazyshard_producer.following import journal
from lazyshard_producer.following.journal import FollowState, Journal
from lazyshard_producer.ray_pieces import write_piece
from lazyshard_swift.checkpoints import Position, save_position
from tests.security import guards
from tests.security.guards import ESCAPES, SECRET, edit, link_to, outside, producer, unchanged, write_stream
from tests.stream.streams import add, raised


def link_out_of_the_stream_is_not_read(place: Path) -> None:
    """Who can make links in a stream's directory must not have a reader's files read by it."""
    elsewhere = outside(place / "elsewhere")
    stream = write_stream(place / "stream")
    data = stream / "chunk_00000.jsonl"
    (elsewhere / "secret").write_bytes(data.read_bytes())
    data.unlink()
    data.symlink_to(elsewhere / "secret")
    raised(FileRefused, StreamReader(stream, max_wait=0).read, 0)


def temporary_file_is_always_new(place: Path) -> None:
    """Whatever waits under the name of a temporary file: a second name, a link, a pipe; none is written to."""
    elsewhere = outside(place / "elsewhere")
    secret = elsewhere / "secret"
    plants = (guards.second_name_of(secret), link_to(secret), link_to(elsewhere / "new"), os.mkfifo)
    for number, plant in enumerate(plants):
        temporary, target = place / f"temporary-{number}", place / f"target-{number}"
        plant(temporary)
        durable.publish_bytes(b"published", target, temporary)
        assert target.read_bytes() == b"published"
        assert not target.is_symlink()
        assert target.stat().st_nlink == 1
    assert unchanged(elsewhere)


def recovery_removes_nothing_elsewhere(place: Path) -> None:
    """A producer that starts clears `.tmp`; it must be its own, also if it becomes a link after the look at it."""
    elsewhere = outside(place / "elsewhere")
    (place / ".tmp").symlink_to(elsewhere)
    raised(OSError, durable.clear_folder, place / ".tmp")
    assert unchanged(elsewhere)


def cursors_folder_leads_nowhere(place: Path) -> None:
    """A trainer writes its cursor with its own rights, so the folder must not be somebody else's choice."""
    elsewhere = outside(place / "elsewhere")
    stream = write_stream(place / "stream", end=False)
    (stream / "cursors").symlink_to(elsewhere)
    raised(FileRefused, write_cursor, stream, Cursor("sft", None, 0, 0, {}, 1.0))
    assert unchanged(elsewhere)


def journal_names_no_other_directory(place: Path) -> None:
    """A producer opens files by the names in its journal, and publishes what is in them."""
    elsewhere = outside(place / "elsewhere")
    (place / "incoming").mkdir()
    name = f"../{elsewhere.name}/secret"
    assert (place / "incoming" / name).read_bytes() == SECRET
    raised(ValueError, FollowState().apply, {"file": name, "offset": len(SECRET)})


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


def umask_is_kept(place: Path, mask: int = 0o027) -> None:
    with umask(mask), ChunkWriter(place / "stream", 2) as writer:
        add(writer, 0, 3)
        assert_kept(place, mask, 5)


def no_error_moves_the_cursor(place: Path) -> None:
    """What a producer writes of itself is shown by readers when they give up waiting."""
    stream = write_stream(place / "stream", end=False)
    edit(stream / "head.json", state="waiting", note=ESCAPES, host=ESCAPES)
    assert str(raised(LazyShardError, StreamReader(stream, max_wait=0).read, 100)).isprintable()


Guard = Callable[[Path], None]
GUARDS: Final[tuple[Guard, ...]] = (
    *(link_out_of_the_stream_is_not_read, temporary_file_is_always_new, recovery_removes_nothing_elsewhere),
    *(cursors_folder_leads_nowhere, journal_names_no_other_directory, umask_is_kept, no_error_moves_the_cursor),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_attack_fails(guard: Guard, tmp_path: Path) -> None:
    guard(tmp_path)


CREATE: Final = durable.create


def creates(*flags: int) -> Callable[[Path], int]:
    """Opens what is there."""
    opened = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | sum(flags)
    return lambda path: os.open(path, opened, 0o666)


def opens(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def creates_for_everybody(path: Path) -> int:
    fd = CREATE(path)
    os.fchmod(fd, 0o666)
    return fd


def clear_by_name(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


WEAKNESSES: Final[tuple[tuple[Any, str, Any, Guard], ...]] = (
    (files, "open_inside", opens, link_out_of_the_stream_is_not_read),
    (durable, "create", creates(os.O_NOFOLLOW), temporary_file_is_always_new),
    (durable, "create", creates(), temporary_file_is_always_new),
    (durable, "clear_folder", clear_by_name, recovery_removes_nothing_elsewhere),
    (cursor, "check_folder", lambda folder: folder, cursors_folder_leads_nowhere),
    (journal, "decode_name", str, journal_names_no_other_directory),
    (durable, "create", creates_for_everybody, umask_is_kept),
    (durable, "NEW_FILE_MODE", 0o600, umask_is_kept),
    (head, "printable", str, no_error_moves_the_cursor),
)
"""What is put in place of a check, and the attack that then succeeds."""


@pytest.mark.parametrize(("owner", "name", "weak", "guard"), WEAKNESSES)
def test_planted_weakness_is_found(
    owner: Any, name: str, weak: Any, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, weak)
    raised((AssertionError, pytest.fail.Exception, OSError), guard, tmp_path)


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
        add(writer, 0, 7)
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
