"""Scale on paper: the real runs beside it, and the counts of the product's operations that it rests on."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lazyshard.simulation.run import PUBLISH_OPENS, outcome
from lazyshard.simulation.setting import Setting
from tests.harness.simulated.check import CASES, Comparison, compare, lines
from tests.harness.simulated.real import Measured, RealRunFailed, kind, measure

TINY = Setting(
    ranks=2,
    batch=2,
    samples_per_chunk=8,
    producer_rate=400.0,
    step_seconds=0.01,
    rows=83,
    window=2,
    row_bytes=60,
    retain="consumed",
    checkpoint_steps=4,
    workers=0,
    latency_s=0.0,
)

# Opens that a writer makes for each chunk: the difference of two runs, so that what it opens once does not count.
PUBLISHES = """
import sys
from lazyshard import ChunkWriter
opens, found = [], []
sys.addaudithook(lambda event, arguments: opens.append(arguments[0]) if event == "open" else None)
for chunks in (1, 3, 13):  # the first one opens modules too
    before = len(opens)
    with ChunkWriter(f"{sys.argv[1]}/{chunks}", 2) as writer:
        for number in range(2 * chunks):
            writer.write({"id": number})
    found.append(len(opens) - before)
print((found[2] - found[1]) / 10)
"""


def measured(setting: Setting) -> Measured:
    """Returns what a real run would be like that is just as predicted."""
    found = outcome(setting)
    return Measured(
        setting=setting,
        first_step_s=found.timeline.first_step_s,
        end_s=found.timeline.end_s,
        stalled_s=found.timeline.stalled_s,
        peak_chunks=found.disk.peak_chunks,
        head_opens=found.files.head_opens,
        chunk_opens=found.files.chunk_opens,
    )


def test_a_real_run_trains_every_row_once_and_opens_chunks_as_often_as_predicted(tmp_path: Path) -> None:
    found = measure(TINY, tmp_path)
    # The last one, with three rows, goes to both ranks.
    assert found.chunk_opens == outcome(TINY).files.chunk_opens == 2 * 12
    assert 4 <= found.peak_chunks <= 11
    assert 0 < found.first_step_s < found.end_s
    # Each rank looks when it begins, and at the first window at the least.
    assert found.head_opens >= 4


def test_a_real_run_whose_producer_does_not_start_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness.simulated.real.sys.executable", "/bin/false")
    with pytest.raises(RealRunFailed, match="the producer published no 0 rows"):
        measure(TINY, tmp_path)


def test_a_publish_opens_as_many_files_as_is_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUBLISHES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == PUBLISH_OPENS


def test_files_are_told_apart_by_their_names() -> None:
    names = ["head.json", "retired.json", "chunk_00001.jsonl", "chunk_00001.jsonl.completed", "stream.json", "chunk_0"]
    assert [kind(name) for name in names] == ["head", "retired", "chunk", "chunk", "other", "other"]


def test_a_run_that_is_just_as_predicted_fits() -> None:
    assert all(one.fits for case in CASES for one in compare(measured(case), 0.01))


@pytest.mark.parametrize(
    ("field", "factor", "name"),
    [
        ("first_step_s", 10, "first step, s"),
        ("end_s", 2, "last step, s"),
        ("stalled_s", 3, "stalled, s"),
        ("peak_chunks", 3, "disk peak, chunks"),
        ("head_opens", 3, "opens of head.json"),
        ("chunk_opens", 2, "opens of chunks"),
    ],
)
def test_a_run_that_is_not_as_predicted_does_not_fit(field: str, factor: int, name: str) -> None:
    # The third of the cases that the producer limits.
    real = measured(CASES[5])
    other = replace(real, **{field: getattr(real, field) * factor})
    assert name in [one.name for one in compare(other, 0.15) if not one.fits]


def test_the_cases_are_limited_by_either_side_at_each_number_of_ranks() -> None:
    limits = {(case.ranks, outcome(case).limited_by) for case in CASES}
    assert limits == {(ranks, limit) for ranks in (2, 4, 8) for limit in ("producer", "training")}


def test_the_table_names_what_is_off() -> None:
    found = list(
        lines([Comparison("a", 3.0, 2.0, 0.5), Comparison("b", 1.5, 2.0, 0.5), Comparison("c", 1.0, 0.0, 2.0)])
    )
    assert found[1].split() == ["a", "3", "2", "+50.0%", "more", "than", "0.5"]
    assert found[2].split() == ["b", "1.500", "2.000", "-25.0%"]
    assert found[3].split() == ["c", "1", "0", "-"]
