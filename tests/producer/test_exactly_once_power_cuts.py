"""The power fails at any call that changes a file, again and again: what was not synced is gone, no row is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.harness.disks import FILESYSTEMS, Disk
from tests.harness.processes.commands import Commands
from tests.harness.scenes.rows import MANY, is_refused, made
from tests.harness.scenes.sources import KINDS
from tests.harness.scenes.streams import Stream

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a filesystem"),
]

MAKES: Final = ("--on-bad-row", "quarantine", "--transform", "tests.harness.scenes.rows:thirds")

MOST_CALLS: Final = 120


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Commands]:
    """One for each test: it must not outlive the disks that are mounted meanwhile."""
    (tmp_path / "nursery").mkdir()
    with Commands(tmp_path / "nursery") as nursery:
        yield nursery


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    with Disk(tmp_path, request.param) as disk:
        yield disk


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_a_file(nursery: Commands, disk: Disk, tmp_path: Path) -> None:
    source = KINDS["plain"](tmp_path, 0)
    whole = Stream(nursery, tmp_path / "whole", [source], MAKES)
    assert whole.run()[0] == 0
    stream = Stream(nursery, disk.point / "out", [source], MAKES)
    assert stream.run_killed("file", MOST_CALLS, disk) >= 4
    assert stream.lines() == whole.lines()
    assert stream.refused() == whole.refused()
    stream.check_ended()


@pytest.mark.parametrize("disk", FILESYSTEMS, indirect=True)
def test_a_followed_directory_mixed_with_a_file(nursery: Commands, disk: Disk, tmp_path: Path) -> None:
    sources = [KINDS["followed while it grows"](tmp_path, 0), KINDS["plain"](tmp_path, MANY)]
    for source in sources:
        source.arguments += ["--weight", "1"]
    stream = Stream(nursery, disk.point / "out", sources, (*MAKES, "--shuffle", "16"))
    assert stream.run_killed("followed", MOST_CALLS, disk) >= 4
    expected = made(sources[0].rows + sources[1].rows, transform=True, where=False)
    assert sorted(map(str, stream.rows())) == sorted(map(str, expected))
    bad = [(entry["source"], entry["line"]) for entry in stream.refused()]
    refused = [row for source in sources for row in source.rows if is_refused(row, transform=True)]
    assert len(set(bad)) == len(bad) == len(refused)
    stream.check_ended()
