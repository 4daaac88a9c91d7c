"""The mixture that a producer has made, read from what it publishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyshard.format.mixed import MixedSource
from lazyshard.storage import mixture
from lazyshard.storage.retire import retire
from lazyshard.storage.survey import take_survey
from lazyshard_producer.cli import main
from tests.producer.commands import rows
from tests.storage.streams import foreign, produce


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A stream of 30 rows, 3 of web to 1 of code until code, of 5 rows, is finished."""
    (tmp_path / "web.jsonl").write_bytes(rows(0, 25))
    (tmp_path / "code.jsonl").write_bytes(rows(100, 105))
    sources = ("--source", "web.jsonl", "--weight", "3", "--source", "code.jsonl", "--weight", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(["run", *sources, "--out", "stream", "--samples-per-chunk", "4", "--no-progress"]) == 0
    return tmp_path / "stream"


def newest(stream: Path, chunks: int) -> None:
    """Makes a chunk the newest one."""
    for number in range(chunks, 8):
        (stream / f"chunk_{number:05d}.jsonl.completed").unlink()
    (stream / "head.json").unlink()
    (stream / "stream.end").unlink()


def test_shares_are_those_of_the_rows_published_so_far(mixed: Path) -> None:
    newest(mixed, 3)
    assert take_survey(mixed, 0.0).mixture == (
        MixedSource("web.jsonl", 0.75, 0.75, 9, False),
        MixedSource("code.jsonl", 0.25, 0.25, 3, False),
    )


def test_at_the_end_both_are_finished(mixed: Path) -> None:
    assert [(one.finished, one.weight) for one in take_survey(mixed, 0.0).mixture] == [(True, 0.0), (True, 0.0)]


def test_large_seal_is_not_read(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "_MAX_SEAL_BYTES", 100)
    found = take_survey(mixed, 0.0)
    assert (found.mixture, found.problems) == ((), ())


def test_damaged_seal_tells_no_mixture(mixed: Path) -> None:
    (mixed / "chunk_00007.jsonl.completed").write_bytes(b"{}")
    assert take_survey(mixed, 0.0).mixture == ()


def test_other_streams_have_none(tmp_path: Path) -> None:
    plain = produce(tmp_path / "plain", 4, end=False)
    assert take_survey(plain, 0.0).mixture == ()
    retire(plain, 0, 2)
    assert take_survey(plain, 0.0).mixture == ()
    assert take_survey(foreign(tmp_path / "foreign", b'{"id":0}\n'), 0.0).mixture == ()
