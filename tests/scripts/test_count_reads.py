"""`count_reads`: what it counts, over streams whose reads are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.checks import count_reads


def counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """Runs it; returns the fields of each unit's line."""
    monkeypatch.setattr("sys.argv", ["count_reads", "--rows", "320", "--row-bytes", "100", *arguments])
    assert count_reads.main() == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines if line and not line.startswith(("320 rows", "unit"))]


def test_one_file_for_eight_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = counted(capsys, monkeypatch, "--chunks", "1", "--dir", str(tmp_path), "--units", "chunk", "batch", "auto")
    # Unit, samples, files, reads, MB, of its own, MB of seals; and what the first step waits for.
    assert [line[:4] for line in lines] == [
        ["chunk", "320", "1", "40"],
        ["batch", "4", "1", "10"],
        ["auto", "4", "1", "10"],
    ]
    assert {line[5] for line in lines} == {"1.00x"}
    assert [line[7:] for line in lines] == [["2,560", "rows"], ["32", "rows"], ["32", "rows"]]
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_every_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = counted(capsys, monkeypatch, "--chunks", "8", "--units", "chunk", "sample", "auto")
    assert [line[:3] for line in lines] == [["chunk", "40", "1"], ["sample", "1", "8"], ["auto", "40", "1"]]


def test_a_file_without_a_seal_is_read_to_find_its_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = counted(capsys, monkeypatch, "--chunks", "1", "--units", "batch", "--foreign")
    # An eighth of it is this rank's. The last file is read to count its rows, and to find them.
    assert (line[5], line[6]) == ("17.00x", "0.00")


@pytest.mark.parametrize("arguments", [["--chunks", "0"], ["--units", "row"], ["--ranks", "400"], ["--batch", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["count_reads", "--rows", "320", *arguments])
    with pytest.raises(SystemExit) as ended:
        count_reads.main()
    assert ended.value.code == 2
