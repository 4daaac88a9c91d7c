"""`lazyshard trace --origins`: from which line of which file a row has come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazyshard.stream.opening import open_now
from tests.cli.test_trace import answer
from tests.cli.traced_runs import run_of, save, two_ranks
from tests.producer.commands import run
from tests.stream.streams import foreign


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A stream that the producer has made of a file, and the checkpoint of a run over it; the folder is the current."""
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id":{number}}}\n' for number in range(23)))
    done = run("run", "--source", "in.jsonl", "--out", "stream", "--samples-per-chunk", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    stream = open_now(tmp_path / "stream")
    assert stream.stream_id is not None
    return tmp_path / "stream", save(tmp_path / "out", 2, run_of(stream.stream_id, two_ranks(2)))


def test_of_steps_and_samples(traced: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = traced
    code, lines, _ = answer(capsys, stream, "--state", checkpoint, "--step", 2, "--rank", 0, "--origins")
    assert (code, lines[1:]) == (
        0,
        [
            "   2     0     0         2      0       2      0    2  in.jsonl:3",
            "   2     0     0         3      0       6      2    0  in.jsonl:7",
        ],
    )
    assert answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--origins") == (
        0,
        [
            "sample 6: chunk 2, row 0",
            "  epoch 0: trained at step 2 by rank 0 (part 0, position 3)",
            "  from in.jsonl:7",
        ],
        "",
    )


def test_as_json(traced: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = traced
    for more in ([], ["--rows"]):
        _, (line,), _ = answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--origins", "--json", *more)
        assert json.loads(line)["origins"] == [{"path": "in.jsonl", "lines": [7], "among": [7, 10], "why": None}]
    _, (line,), _ = answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--json")
    assert "origins" not in json.loads(line)


def test_of_a_file_that_is_gone(traced: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = traced
    Path("in.jsonl").unlink()
    _, lines, _ = answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--origins")
    assert lines[2] == "  from in.jsonl, lines 7 to 9 (the file cannot be read: No such file or directory)"


def test_of_a_directory_that_another_program_fills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign(tmp_path / "stream", *[b'{"id":0}\n{"id":1}\n{"id":2}\n'] * 4)
    checkpoint = save(tmp_path / "out", 1, run_of(None, two_ranks(1)))
    code, _, err = answer(capsys, tmp_path / "stream", "--state", checkpoint, "--sample", 0, "--origins")
    assert code == 2
    assert "--origins: another program fills this directory, and keeps no positions in sources" in err
