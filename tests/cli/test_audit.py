"""`lazyshard audit`: histories that are in order are proven, and each mutation of a state is found or refused."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.stream.listing import retire
from tests.cli.commands import changed, commit, lazyshard, make_stream, run_of, save, two_ranks, with_parts
from tests.stream.damage import edit

THREE = Part(3, 1, 2, first_step=2, draws_per_step=1)  # Two steps of three ranks, after two steps of two
BEGUN_AGAIN = Part(2, 1, 2, 0, first_step=4, draws_per_step=2)


def audited(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = lazyshard("audit", *arguments, "--json")
    [line] = done.stdout.splitlines()
    return done.returncode, json.loads(line)


def report(*arguments: object) -> tuple[int, list[str]]:
    done = lazyshard("audit", *arguments)
    return done.returncode, done.stdout.splitlines()


def findings(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["kind"], Path(one["where"]).parent.name) for one in values["findings"]]


class History(NamedTuple):
    stream: Path
    out: Path
    first: Path  # Where the checkpoints of the first start are
    newest: Path
    state: RunState  # The newest one


@pytest.fixture
def history(tmp_path: Path) -> History:
    """A run of two starts: checkpoints 1 and 2 of two ranks, 4 of three."""
    stream, out = tmp_path / "stream", tmp_path / "out"
    state = run_of(make_stream(stream), two_ranks(2), THREE)
    first = out / "v0-20251121-101500"
    for steps in (1, 2):
        save(first, steps, run_of(state.stream_id, two_ranks(steps)))
    newest = save(out / "v1-20251121-111500", 4, state)
    commit(stream, state)
    return History(stream, out, first, newest, state)


def stream_and_runs(folder: Path, samples: int = 24, *, end: bool = True, **runs: tuple[Part, ...]) -> str:
    stream_id = make_stream(folder / "stream", samples, end=end)
    for step, parts in runs.items():
        save(folder / "out", int(step.removeprefix("step")), run_of(stream_id, *parts))
    return stream_id


JSON = r"""
{"ok": true, "proven": true, "consistent": true, "samples_per_chunk": 3, "chunks": 8, "samples": 24, "ended": true,
 "retired": 0, "consumed": 14, "steps": 4, "findings": [], "notes": [],
 "epochs": [{"epoch": 0, "proven": true, "samples": 24, "trained": 14,
  "to_come": {"samples": 9, "ranges": [[12, 15], [16, 18], [19, 23]]},
  "left_over": {"samples": 1, "ranges": [[23, 24]]},
  "skipped": {"samples": 0, "ranges": []},
  "twice": {"samples": 0, "ranges": []},
  "again": {"samples": 0, "ranges": []},
  "missing": {"samples": 0, "ranges": []},
  "other_splits": {"samples": 0, "ranges": []},
  "fewer_than_step": null}]}
"""
ABANDONED = r"""
{"relation": "abandoned", "cursor": null, "consumed": 12, "steps": 3, "left_after": 8, "trained_beyond": 4,
 "trained_again": {"0": {"samples": 4, "ranges": [[7, 9], [10, 12]]}}}
"""


def test_json_tells_a_branch_that_was_given_up_apart(history: History) -> None:
    """Lanes 0 1 2 6 | 7 8 and 3 4 5 9 | 10 11, of which the three ranks trained 7 8, 10 and 11 again."""
    stream, out, first, newest, state = history
    save(first, 3, run_of(state.stream_id, two_ranks(3)))
    code, values = audited(stream, out)
    states = values.pop("states")
    course = "on the course"
    assert [one["relation"] for one in states] == [course, course, "abandoned", course, "audited"]
    assert states[2] == {"file": f"{first}/checkpoint-3/lazyshard.json"} | json.loads(ABANDONED)
    names = {"stream": str(stream), "stream_id": state.stream_id, "audited": f"{newest}/lazyshard.json"}
    assert (code, values) == (0, names | json.loads(JSON))
    code, values = audited(stream, out, "--state", first / "checkpoint-1")
    assert (code, [one["relation"] for one in values["states"]]) == (0, ["audited", *["beyond"] * 4])
    assert [(one["trained"], one["to_come"]["samples"]) for one in values["epochs"]] == [(4, 20)]
    told = "\n".join(report(stream, out)[1])
    assert f"{first}/checkpoint-3 was abandoned after 8 samples: it trained 4 more" in told
    assert "in epoch 0 by the audited run: 7 to 8, 10 to 11" in told


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        # Ahead and behind: by a step, by a micro batch.
        (lambda state: changed(state, 1, draws=3), "steps"),
        (lambda state: changed(state, 1, draws=1), "steps"),
        (lambda state: changed(state, 0, draws=5), "steps"),
        # Draws of an earlier part.
        (lambda state: changed(state, 0, draws=6), "steps"),
        (lambda state: with_parts(state, state.parts[1:]), "steps"),
        (lambda state: replace(state, seed=1), "other-settings"),
        (lambda state: replace(state, unit=1), "other-settings"),
        (lambda state: with_parts(state, [*state.parts, BEGUN_AGAIN]), "twice"),
    ],
)
def test_mutations_of_a_state_are_found(tmp_path: Path, mutate: Callable[[RunState], RunState], expected: str) -> None:
    stream_id = stream_and_runs(tmp_path, step1=(two_ranks(1),))
    save(tmp_path / "out", 4, mutate(run_of(stream_id, two_ranks(2), THREE)))
    code, values = audited(tmp_path / "stream", tmp_path / "out")
    assert (code, expected in {kind for kind, _ in findings(values)}) == (5, True), values["findings"]


def test_samples_that_were_trained_twice_or_passed_over_are_named(tmp_path: Path) -> None:
    stream_and_runs(tmp_path, step3=(two_ranks(2), Part(2, 1, 2, 0, first_step=2, draws_per_step=2)))
    code, lines = report(tmp_path / "stream", tmp_path / "out")
    file = f"{tmp_path}/out/checkpoint-3/lazyshard.json"
    assert code == 5
    assert lines[-4:] == [
        "epoch 0: 24 samples: 8 trained, 16 to come, 4 TRAINED TWICE (0 to 1, 3 to 4), 4 TRAINED AND COMING AGAIN "
        "(2, 5 to 6, 9)",
        f"problem: {file}: epoch 0: 4 samples were trained more than once",
        f"problem: {file}: epoch 0: 4 samples were trained and drawn again",
        "NOT proven: see the samples above that were trained twice or passed over",
    ]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "lazyshard.json").write_text("{")
    assert report(tmp_path / "stream", tmp_path / "torn") == (5, [])


@pytest.mark.parametrize(
    ("change", "expected", "proven", "newest"),
    [
        ({"state": {"parts": []}}, "unusable", True, False),
        ({"state": {"consumed": 13}}, "samples", False, False),
        ({"state": {"consumed": 13}}, "samples", False, True),
        ({"consumed": 13}, "samples", False, True),
        ({"step": 5}, "steps", False, False),
        ({"step": 5}, "steps", False, True),
        ({"state": {"stream_id": "f" * 32}}, "other-stream", True, False),
    ],
)
def test_damage_is_found(history: History, change: dict[str, Any], expected: str, proven: bool, newest: bool) -> None:
    """Of one that is not audited, and of the newest, which is."""
    folder = history.newest if newest else save(history.out, 4, history.state, saved_at=50.0)
    values = json.loads((folder / "lazyshard.json").read_text())
    state = values["state"] | change.get("state", {})
    (folder / "lazyshard.json").write_text(json.dumps(values | change | {"state": state}))
    code, found = audited(history.stream, history.out)
    assert (code, findings(found)[0], found["proven"]) == (5, (expected, "checkpoint-4"), proven)


def test_a_checkpoint_ahead_of_a_live_stream_is_found_or_refused_and_not_counted(tmp_path: Path) -> None:
    stream_id = stream_and_runs(tmp_path, 15, end=False, step2=(two_ranks(2),))
    code, values = audited(tmp_path / "stream", tmp_path / "out")
    [epoch] = values["epochs"]
    assert (code, values["ended"], epoch["samples"], epoch["to_come"]["samples"]) == (0, False, 15, 7)
    ahead = save(tmp_path / "out", 5, run_of(stream_id, two_ranks(5)), saved_at=1.0)
    head = run_of(stream_id, two_ranks(1), replace(THREE, draws=1, first_step=1))
    save(tmp_path / "out" / "v1", 2, head, saved_at=9e9)
    code, values = audited(tmp_path / "stream", tmp_path / "out")
    assert (code, findings(values)) == (5, [("ahead", "checkpoint-5")])
    states = [(one["relation"], one["left_after"], one["trained_beyond"]) for one in values["states"]]
    assert states == [("audited", None, None), ("abandoned", 4, 4), ("abandoned", 4, None)]
    done = lazyshard("audit", tmp_path / "stream", "--state", ahead)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1)


@pytest.mark.parametrize(("before", "checkpoints"), [(2, 1), (4, 2), (8, 5)])
def test_chunks_that_only_older_checkpoints_need_may_go(before: int, checkpoints: int, tmp_path: Path) -> None:
    """Of 2 ranks, whose first steps stand in chunks 0 to 3. One note tells of all, and names a few of many."""
    stream, out = tmp_path / "stream", tmp_path / "out"
    stream_id = make_stream(stream)
    steps = range(1, 7)
    files = [save(out, step, run_of(stream_id, two_ranks(step))) / "lazyshard.json" for step in steps]
    commit(stream, run_of(stream_id, two_ranks(len(steps))), chunks_before=before)
    for retired in (0, before):
        retire(stream, min(retired, 7), 8)
        code, values = audited(stream, out)
        assert (code, values["proven"], values["findings"]) == (0, True, [])
        [note] = values["notes"]
        assert (note["files"] or [note["where"]]) == [str(file) for file in files[:checkpoints]][:5]


def test_what_is_too_little_for_a_step_is_said_to_be(tmp_path: Path) -> None:
    """Two steps of 8 and one of 6 leave 3: a micro batch of 2, which no step takes that is whole, and one sample."""
    parts = Part(2, 2, 8, draws_per_step=4), Part(1, 2, 6, first_step=2, draws_per_step=6)
    stream_and_runs(tmp_path, 25, step3=parts)
    assert "fewer than the 6 of a step" in report(tmp_path / "stream", tmp_path / "out")[1][-2]
    code, values = audited(tmp_path / "stream", tmp_path / "out")
    [epoch] = values["epochs"]
    assert (code, epoch["to_come"]["samples"], epoch["fewer_than_step"]) == (0, 2, 6)


def test_cursors_that_are_not_looked_at_are_named(history: History) -> None:
    stream, _, _, _, state = history
    plain = stream.parent / "checkpoint-4" / "lazyshard.json"
    plain.parent.mkdir()
    plain.write_text(json.dumps(state.to_dict()))
    commit(stream, state, consumer="other")
    save(stream.parent / "named", 4, state, consumer="gone")
    for arguments, names in (([plain], ["other, sft"]), ([stream.parent / "named"], ["gone", "other, sft"])):
        code, values = audited(stream, *arguments)
        [note] = values["notes"]
        assert (code, note["where"], all(name in note["what"] for name in names)) == (0, str(stream), True)
    assert audited(stream, plain, "--consumer", "sft")[1]["notes"] == []


def test_a_count_that_no_steps_bear_out_is_consistent_and_not_proven(tmp_path: Path) -> None:
    """Two ranks trained 0 to 11, then 2 to 13: the first loop counted the samples of one rank for those of both."""
    stream_id = stream_and_runs(tmp_path, step12=(Part(2, 1, 3), Part(2, 1, 6)))
    code, values = audited(tmp_path / "stream", tmp_path / "out")
    assert (code, values["ok"], values["consistent"], values["proven"]) == (9, True, True, False)
    assert report(tmp_path / "stream", tmp_path / "out")[1][-1].startswith("consistent, but not proven: ")
    # With steps it is found, where something says how many there were.
    seeing = run_of(stream_id, Part(2, 1, 3, draws_per_step=1), Part(2, 1, 6, first_step=3, draws_per_step=1))
    save(tmp_path / "seeing", 12, seeing)
    (tmp_path / "out" / "checkpoint-12" / "lazyshard.json").write_text(json.dumps(seeing.to_dict()))
    (tmp_path / "state.json").write_text(json.dumps(seeing.to_dict()))
    codes = [report(tmp_path / "stream", tmp_path / name)[0] for name in ("seeing", "out/checkpoint-12", "state.json")]
    assert codes == [5, 5, 9]


def test_a_copied_folder_is_audited_from_the_state_that_trained_most(history: History) -> None:
    """Without times in the files, and those of the files the wrong way round; then all of one time."""
    stream, _, _, _, state = history
    copy, same = stream.parent / "copy", stream.parent / "same"
    for step, saved, at in ((10, state, 500.0), (2, run_of(state.stream_id, two_ranks(2)), 501.0)):
        save(copy, step, saved, saved_at=None)
        os.utime(copy / f"checkpoint-{step}" / "lazyshard.json", (1e9 - 100 * step, 1e9 - 100 * step))
        save(same, step, saved, saved_at=at)
    for folder, noted in ((copy, [f"{copy}/checkpoint-10/lazyshard.json"]), (same, [])):
        values = audited(stream, folder)[1]
        assert values["audited"] == f"{folder}/checkpoint-10/lazyshard.json"
        assert [note["where"] for note in values["notes"]] == noted


@pytest.mark.parametrize("newest", [{"chunks_before": 7}, {"state": None, "consumed": 20}])
def test_cursors_of_another_or_of_no_state_are_compared(history: History, newest: dict[str, Any]) -> None:
    """The newest checkpoint needs chunks below 7, and has consumed 14."""
    values: dict[str, Any] = {"state": history.state}
    commit(history.stream, **(values | newest))
    code, values = audited(history.stream, history.out)
    assert (code, findings(values), values["proven"]) == (5, [("cursor", "cursors")], True)
    retire(history.stream, 7, 8)
    code, values = audited(history.stream, history.out)
    assert (code, ("deleted", "checkpoint-4") in findings(values)) == (5, True)
    # How many samples there are is looked up.
    for name in ("head.json", "stream.end"):
        edit(name, samples=23)(history.stream)
    code, values = audited(history.stream, history.out)
    assert (code, values["findings"][0]["kind"]) == (5, "stream")


def test_the_cursor_alone(history: History) -> None:
    stream, state = history.stream, history.state
    code, values = audited(stream)
    assert (code, values["audited"], values["steps"]) == (9, f"{stream}/cursors/sft.json", 4)
    commit(stream, state, consumer="other")
    for arguments, code in (((), 2), (("--consumer", "other"), 9), (("--consumer", "third"), 2)):
        assert report(stream, *arguments)[0] == code


def test_a_run_that_begins_its_epochs_by_itself_has_states_of_one_epoch_each(tmp_path: Path) -> None:
    stream_id = make_stream(tmp_path / "stream")
    for step, part in ((6, two_ranks(6)), (8, replace(two_ranks(2), epoch=1))):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "lazyshard.json").write_text(json.dumps(run_of(stream_id, part).to_dict()))
    code, values = audited(tmp_path / "stream", tmp_path, "--state", tmp_path / "checkpoint-8")
    assert (code, [one["relation"] for one in values["states"]]) == (9, ["audited", "another epoch"])
    assert [(one["epoch"], one["trained"], one["to_come"]["samples"]) for one in values["epochs"]] == [(1, 8, 16)]
