"""The attacks fail; and with a weakness planted, each is found to succeed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.store import durable, files
from lazyshard.stream import cursor, pacing
from lazyshard_producer.following import journal
from tests.security import guards

Guard = Callable[[Path], None]

GUARDS: Final = (
    guards.link_out_of_the_stream_is_not_read,
    guards.temporary_file_is_always_new,
    guards.recovery_removes_nothing_elsewhere,
    guards.cursors_folder_leads_nowhere,
    guards.journal_names_no_other_directory,
    guards.umask_is_kept,
    guards.no_error_moves_the_cursor,
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_attack_fails(guard: Guard, tmp_path: Path) -> None:
    guard(tmp_path)


def follows_links(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "open_inside", lambda path: os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def truncates_what_is_there(patch: pytest.MonkeyPatch) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    patch.setattr(durable, "create", lambda path: os.open(path, flags, 0o666))


def follows_a_planted_link(patch: pytest.MonkeyPatch) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    patch.setattr(durable, "create", lambda path: os.open(path, flags, 0o666))


def clears_by_name(patch: pytest.MonkeyPatch) -> None:
    def clear(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()

    patch.setattr(durable, "clear_folder", clear)


def takes_any_folder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cursor, "check_folder", lambda folder: folder)


def joins_any_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal, "decode_name", str)


def gives_everybody_everything(patch: pytest.MonkeyPatch) -> None:
    create = durable.create

    def wide(path: Path) -> int:
        fd = create(path)
        os.fchmod(fd, 0o666)
        return fd

    patch.setattr(durable, "create", wide)


def takes_away_what_the_umask_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(durable, "NEW_FILE_MODE", 0o600)


def shows_what_it_is_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pacing, "printable", str)


WEAKNESSES: Final = (
    (follows_links, guards.link_out_of_the_stream_is_not_read),
    (truncates_what_is_there, guards.temporary_file_is_always_new),
    (follows_a_planted_link, guards.temporary_file_is_always_new),
    (clears_by_name, guards.recovery_removes_nothing_elsewhere),
    (takes_any_folder, guards.cursors_folder_leads_nowhere),
    (joins_any_name, guards.journal_names_no_other_directory),
    (gives_everybody_everything, guards.umask_is_kept),
    (takes_away_what_the_umask_leaves, guards.umask_is_kept),
    (shows_what_it_is_told, guards.no_error_moves_the_cursor),
)


@pytest.mark.parametrize(("weakness", "guard"), WEAKNESSES, ids=lambda one: one.__name__)
def test_planted_weakness_is_found(
    weakness: Callable[[pytest.MonkeyPatch], None], guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weakness(monkeypatch)
    failures: tuple[Any, ...] = (AssertionError, pytest.fail.Exception, OSError)
    with pytest.raises(failures):
        guard(tmp_path)


def test_every_attack_has_a_weakness_that_it_finds() -> None:
    assert {guard for _, guard in WEAKNESSES} == set(GUARDS)
