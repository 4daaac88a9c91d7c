"""`lazyshard trace` and `audit` of runs over blends: what each stream has given at which step, as it was read."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshard.cli.main import main
from tests.data.blends import State, Stream, blend, take, write

STREAMS = (Stream("a", 120, 6), Stream("b", 90, 5), Stream("c", 80, 4))

Seen = dict[tuple[str, int], list[str]]
"""What each rank has read at each step, by letter and step from 1."""


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traced")
    for stream in STREAMS:
        write(directory, stream)
    return directory


def trained(directory: Path, stages: list[tuple[int, dict[str, float], int]], **options: Any) -> tuple[Seen, State]:
    """Trains stages of ranks, weights and steps of two batches of two; returns what was read when, and the state."""
    state: State | None = None
    seen: Seen = defaultdict(list)
    step = 0
    for dp, weights, steps in stages:
        ranks = [
            blend(
                directory, weights, rank, dp, state, num_samples=9000, batch_size=2, micro_batches_per_step=2, **options
            )
            for rank in range(dp)
        ]
        for one in ranks:
            for place, row in enumerate(take(one, 4 * steps, 2)):
                seen[row[0], step + place // 4 + 1].append(row)
        state = ranks[0].state_dict(ranks[0].consumed + dp * 4 * steps)
        step += steps
    assert state is not None
    return seen, state


def traced(
    capsys: pytest.CaptureFixture[str], directory: Path, letter: str, state: Path, *arguments: str
) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["trace", str(directory / letter), "--state", str(state), "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def save(place: Path, step: int, state: State) -> Path:
    folder = place / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "lazyshard.json").write_text(json.dumps({"state": state, "step": step, "consumed": state["consumed"]}))
    return folder


STAGE = st.tuples(
    st.integers(1, 3),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1).map(lambda one: {"a": 1, **one}),
    st.integers(1, 2),
)


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(STAGE, min_size=1, max_size=3), st.sampled_from([0, 2]))
def test_what_is_told_is_what_was_read(
    streams: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
    stages: list[tuple[int, dict[str, float], int]],
    window: int,
) -> None:
    seen, state = trained(streams, stages, shuffle_window=window)
    steps = sum(stage[2] for stage in stages)
    file = save(tmp_path_factory.mktemp("out"), steps, state)
    letters = {letter for _, weights, _ in stages for letter in weights}
    for letter in letters:
        told = defaultdict(list)
        for drawn in traced(capsys, streams, letter, file, "--step", f"1:{steps + 1}"):
            assert drawn["became"] == "trained"
            told[letter, drawn["step"]].append(f"{letter}{drawn['sample']}")
        assert told == {key: rows for key, rows in seen.items() if key[0] == letter}
        samples = {int(row[1:]): key[1] for key, rows in seen.items() if key[0] == letter for row in rows}
        asked = ",".join(map(str, samples))
        if asked:
            fates = traced(capsys, streams, letter, file, "--sample", asked)
            assert {one["sample"]: one["step"] for one in fates if one["became"] == "trained"} == samples


def test_what_is_to_come_and_what_is_left_out(
    streams: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, state = trained(streams, [(1, {"a": 1, "b": 1}, 2), (1, {"a": 1, "c": 1}, 1)])
    file = save(tmp_path, 3, state)
    (coming,) = traced(capsys, streams, "c", file, "--sample", "4")
    assert (coming["became"], coming["step"]) == ("to come", 5)
    (left,) = traced(capsys, streams, "b", file, "--sample", "7")
    assert (left["became"], left["step"]) == ("left out", None)
    assert traced(capsys, streams, "b", file, "--step", "3:6") == []
    assert main(["trace", str(streams / "b"), "--state", str(file), "--step", "3:6"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["Nothing of this stream was drawn at steps 3 to 5."]
    assert main(["trace", str(streams / "b"), "--state", str(file), "--sample", "7"]) == 0
    assert (
        capsys.readouterr().out == "sample 7: chunk 1, row 2\n  epoch 0: not trained: its stream is blended no more\n"
    )


def test_the_parts_of_a_run(streams: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, state = trained(streams, [(1, {"a": 3, "b": 1}, 2), (2, {"a": 1, "b": 1}, 1), (1, {"a": 1}, 1)])
    file = save(tmp_path, 4, state)
    lines = []
    for letter in "ab":
        assert main(["trace", str(streams / letter), "--state", str(file)]) == 0
        lines.append(capsys.readouterr().out.splitlines())
    name = file / "lazyshard.json"
    assert lines[0] == [
        f"{name}: 14 samples trained in 4 steps, the last of them in epoch 0",
        "of a blend of 1 stream, 20 samples of all; this one gives 100.00% now; positions and samples below are this "
        "stream's",
        "part  ranks  micro batch   steps  positions  samples",
        "   0      1            1  1 to 2          6        6",
        "   1      2            1  3 to 3          2        4",
        "   2      1            1  4 to 4          4        4",
    ]
    assert lines[1][:2] == [
        f"{name}: 6 samples trained in 4 steps, the last of them in epoch 0",
        "of a blend of 1 stream, 20 samples of all, in which this one is no more; positions and samples below are this "
        "stream's",
    ]


def test_an_audit_of_each_stream(streams: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stages: list[tuple[int, dict[str, float], int]] = [(1, {"a": 1, "b": 1}, 2), (2, {"a": 1, "b": 1, "c": 2}, 2)]
    for count in (1, 2):
        save(tmp_path, 2 * count, trained(streams, stages[:count])[1])
    for letter, samples in (("a", 8), ("b", 8), ("c", 8)):
        capsys.readouterr()
        assert main(["audit", str(streams / letter), str(tmp_path), "--json"]) == 0, capsys.readouterr().out
        found = json.loads(capsys.readouterr().out)
        assert (found["steps"], found["consumed"]) == (4, samples)
    other = write(tmp_path, Stream("z", 4, 2))
    assert main(["audit", str(other), str(tmp_path)]) == 3
    assert main(["trace", str(other), "--state", str(tmp_path / "checkpoint-2")]) == 5
    assert "none of these streams, or was added later: give" in capsys.readouterr().err
