"""The wake-up call: a shortcut that must never cost a look."""

from __future__ import annotations

import time
from pathlib import Path

from lazyshard.storage.watch import Waker


def test_first_sleep_returns_at_once_since_what_came_before_the_watch_woke_nobody(tmp_path: Path) -> None:
    with Waker(tmp_path) as waker:
        started = time.monotonic()
        waker.sleep(60)
        assert time.monotonic() - started < 30


def test_sleeper_is_woken_by_a_new_head(tmp_path: Path) -> None:
    with Waker(tmp_path) as waker:
        waker.sleep(60)
        (tmp_path / "head.json").write_bytes(b"{}")
        started = time.monotonic()
        waker.sleep(60)
        assert time.monotonic() - started < 30


def test_directory_that_is_not_there_yet_is_slept_for(tmp_path: Path) -> None:
    with Waker(tmp_path / "later") as waker:
        waker.sleep(0)
        (tmp_path / "later").mkdir()
        waker.sleep(60)
