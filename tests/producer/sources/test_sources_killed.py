"""Sources of every kind that change after a run was killed: refused by name, or read on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import pytest

from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import (
    assert_one_line,
)
from tests.harness.scenes.rows import lines, made
from tests.harness.scenes.sources import KINDS, PipedSource
from tests.harness.scenes.streams import Stream

FILES: Final = ["plain", "gzip", "zstd", "parquet", "arrow", "hugging face", "foreign stream"]
PIPES: Final = ["pipe", "stdin"]
GROWING: Final = ["plain", "gzip", "zstd", *PIPES]

SKIPS: Final = ("--on-bad-row", "skip")
SHUFFLES: Final = (*SKIPS, "--shuffle", "16")


@pytest.mark.few(7)
@pytest.mark.parametrize("options", [SKIPS, SHUFFLES], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", [*FILES, *PIPES])
def test_another_source_or_none_is_refused_until_the_old_one_is_back_or_has_grown(
    kind: str, options: tuple[str, ...], nursery: Commands, tmp_path: Path
) -> None:
    source = KINDS[kind](tmp_path, 0)
    stream = Stream(nursery, tmp_path / "out", [source], options)
    # After so many calls some chunks are published, and not all.
    assert stream.run(kill_at=90)[0] == -signal.SIGKILL
    before = stream.chunk_bytes()
    assert 2 <= stream.chunks <= 10

    def change(rows: list[bytes]) -> None:
        if isinstance(source, PipedSource):
            source.rows = rows
        else:
            KINDS[kind](tmp_path, 0, rows)

    def check_refused(says: str) -> None:
        status, err = stream.run()
        assert status == 4, err
        assert_one_line(err, source.arguments[1], says)
        assert stream.chunk_bytes() == before
        assert not (stream.out / "stream.end").exists()

    rows, others = source.rows, lines(1000, bad=kind in (*GROWING, "foreign stream"))
    for other in (others, others[:1]):
        change(other)
        check_refused("expected" if options == SKIPS else "")
    if kind in FILES:
        path = Path(source.arguments[1])
        away = path.rename(tmp_path / "away")
        check_refused("no such file")
        away.rename(path)
    back = rows + lines(1000) if kind in GROWING else rows
    change(back)
    status, err = stream.run()
    assert status == 0, err
    found, expected = stream.rows(), made(back, transform=False, where=False)
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert found == expected or options == SHUFFLES
