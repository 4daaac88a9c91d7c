"""The program of `docs/guides/torchdata.md`: stopped, gone on with the same ranks, then with another number."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from tests.packaging.guide_programs import blocks

pytestmark = [
    pytest.mark.timeout(120),
    # Which torchdata still calls, and torch has given up.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def test_program_goes_on_by_the_loader_and_then_by_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchdata")
    (text,) = blocks("torchdata.md", "python")
    program = compile(text, "program.py", "exec")
    monkeypatch.chdir(tmp_path)

    def call(*words: int) -> list[list[int]]:
        """Runs the program in this process and returns the ids of its steps."""
        monkeypatch.setattr(sys, "argv", ["program.py", *map(str, words)])
        exec(program, {"__name__": "__main__"})
        return [[int(word) for word in line.split()[1:]] for line in capsys.readouterr().out.splitlines()]

    writer = ChunkWriter("stream", 4)
    for i in range(40):  # more than is asked for, so that no worker waits when its loader is dropped
        writer.write({"id": i})
    calls = [call(rank, 2, 3) for rank in (1, 0)]
    calls += [call(rank, 2, 2) for rank in (1, 0)]
    assert [len(steps) for steps in calls] == [3, 3, 2, 2]
    writer.write({"id": 40})
    writer.close()
    calls += [call(0, 1, 2), call(0, 1, 1000)]
    assert [len(steps) for steps in calls[4:]] == [2, 8]
    trained = [i for steps in calls for ids in steps for i in ids]
    assert len(trained) == len(set(trained)) == 40
    assert set(trained) <= set(range(41))
    assert call(0, 1, 1000) == []
