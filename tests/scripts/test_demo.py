"""`scripts/demo`: its options, its folder, its arithmetic, and the whole as a newcomer runs it."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from lazyshard import StreamReader
from scripts.demonstration import demo
from scripts.demonstration.demo_report import Findings, RankFindings, check
from scripts.demonstration.demo_settings import FolderRefused, take_folder

ROOT = Path(__file__).parents[2]


def test_a_folder_of_the_demo_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    with take_folder(folder):
        (folder / "stream").mkdir()
        (folder / "stream" / "chunk_00000.jsonl").touch()
        (folder / "elsewhere").symlink_to(tmp_path)
        marker = {path.name for path in folder.iterdir()} - {"stream", "elsewhere"}
    with take_folder(folder):
        assert {path.name for path in folder.iterdir()} == marker
    assert tmp_path.is_dir()


def test_a_folder_of_somebody_else_or_in_use_and_a_file_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with take_folder(tmp_path / "demo"):
        for path in (tmp_path, tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "below", tmp_path / "demo"):
            with pytest.raises(FolderRefused):
                take_folder(path)
    assert (tmp_path / "thesis.txt").exists()


def test_without_torch_it_says_so_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    handlers = {number: signal.getsignal(number) for number in demo.SIGNALS}
    assert demo.main(["--dir", str(tmp_path / "demo")]) == 1
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not (tmp_path / "demo").exists()


SOURCE = list(range(11))
CHUNKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
GOOD = [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]


def found(trained: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]] = CHUNKS) -> Findings:
    return check(SOURCE, chunks, trained, samples_per_chunk=2, step_samples=2)


@pytest.mark.parametrize(
    ("trained", "chunks", "field", "value"),
    [
        ([[0, 1, 4, 5], [2, 3, 6, 7]], CHUNKS, "missing", 2),
        ([[0, 1, 4, 4, 8], [2, 3, 6, 7, 9]], CHUNKS, "repeated", [4]),
        ([[0, 1, 4, 5, 8], [2, 3, 6, 7, 8]], CHUNKS, "repeated", [8]),
        ([[0, 1, 4, 5, 8], [2, 3, 6, 7, 11]], CHUNKS, "unknown", [11]),
        ([[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]], CHUNKS, "uneven", True),
        (GOOD, [[0, 1], [3, 2], *CHUNKS[2:]], "unlike_source", True),  # Other order; a chunk less; one more
        (GOOD, CHUNKS[:-1], "unlike_source", True),
        (GOOD, [*CHUNKS, [11]], "unlike_source", True),
    ],
)
def test_not_exactly_once(trained: list[list[int]], chunks: list[list[int]], field: str, value: object) -> None:
    findings = found(trained, chunks)
    assert getattr(findings, field) == value
    assert not findings.exactly_once


def test_a_good_run_is_found_good_and_a_chunk_of_another_rank_is_found() -> None:
    findings = found(GOOD)
    assert findings.exactly_once and findings.own_chunks
    assert findings.untrained == [10]
    assert findings.ranks == [RankFindings(5, 2, [], 1), RankFindings(5, 2, [], 1)]
    findings = found([[0, 1, 4, 6, 8], [2, 3, 5, 7, 9]])
    assert (findings.exactly_once, findings.own_chunks) == (True, False)
    assert [rank.foreign for rank in findings.ranks] == [[3], [2]]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_sample_of_the_source_is_published_and_every_check_holds(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    numbers = ["--samples", "1000", "--rate", "100", "--samples-per-chunk", "50", "--ranks", "2"]
    command = [str(ROOT / "scripts" / "demo"), *numbers, "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, "FAILED" in done.stdout) == (0, False), done.stdout + done.stderr
    source = [json.loads(line) for line in (folder / "source.jsonl").read_bytes().splitlines()]
    reader = StreamReader(folder / "stream", max_wait=0)
    assert len(source) == 1000
    assert [row["id"] for row in reader] == [row["id"] for row in source]
    assert reader.seen.ended and reader.samples_per_chunk == 50
