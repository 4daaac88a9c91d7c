"""`lazyshard audit`: histories that are in order are proven, and each mutation of a state is found or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard.cli.main import main
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.stream.retire import retire
from tests.cli.commands import lazyshard
from tests.cli.traced_runs import changed, commit, make_stream, run_of, save, two_ranks, with_parts

THREE = Part(3, 1, 2, first_step=2, draws_per_step=1)
"""Two steps of three ranks, after two steps of two."""


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    code = main(["audit", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def audited(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code, lines, _ = report(capsys, *arguments, "--json")
    [line] = lines
    return code, json.loads(line)


def findings(values: dict[str, Any]) -> list[tuple[str, str]]:
    """The kinds of what is not in order, each with the name of the file."""
    return [(one["kind"], Path(one["where"]).parent.name) for one in values["findings"]]


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, RunState]:
    """A run of two starts: checkpoints 1 and 2 of two ranks, 4 of three. Returns the stream and the newest state."""
    stream_id = make_stream(tmp_path / "stream")
    state = run_of(stream_id, two_ranks(2), THREE)
    for steps in (1, 2):
        save(tmp_path / "out" / "v0-20251121-101500", steps, run_of(stream_id, two_ranks(steps)))
    save(tmp_path / "out" / "v1-20251121-111500", 4, state)
    commit(tmp_path / "stream", state)
    return tmp_path / "stream", state


def test_a_history_that_is_in_order_is_proven(history: tuple[Path, RunState]) -> None:
    stream, _ = history
    out = stream.parent / "out"
    done = lazyshard("audit", stream, out)
    assert (done.returncode, done.stderr) == (0, "")
    width = len(f"{out}/v0-20251121-101500/checkpoint-1")
    assert done.stdout.splitlines() == [
        f"{stream}: 8 chunks, 24 samples, ended",
        f"  {out}/v0-20251121-101500/checkpoint-1  on the course  4 samples in 1 step",
        f"  {out}/v0-20251121-101500/checkpoint-2  on the course  8 samples in 2 steps",
        f"  {f'{stream}/cursors/sft.json':{width}}  on the course  14 samples in 4 steps",
        f"  {out}/v1-20251121-111500/checkpoint-4  audited        14 samples in 4 steps",
        "epoch 0: 24 samples: 14 trained, 9 to come, 1 left over (23)",
        "proven: no sample was trained twice, and none was passed over",
    ]


def test_a_branch_that_was_given_up_is_told_apart(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    """Lanes 0 1 2 6 | 7 8 and 3 4 5 9 | 10 11, of which the three ranks trained 7 8, 10 and 11 again."""
    stream, state = history
    out = stream.parent / "out"
    save(out / "v0-20251121-101500", 3, run_of(state.stream_id, two_ranks(3)))
    code, lines, _ = report(capsys, stream, out)
    assert code == 0
    assert f"  {out}/v0-20251121-101500/checkpoint-3  abandoned      12 samples in 3 steps" in lines
    assert lines[-4:] == [
        f"{out}/v0-20251121-101500/checkpoint-3 left the course after 8 samples: it trained 4 more, which are not in "
        f"the audited model",
        "  4 of them were trained again on the course in epoch 0: 7 to 8, 10 to 11",
        "epoch 0: 24 samples: 14 trained, 9 to come, 1 left over (23)",
        "proven: no sample was trained twice, and none was passed over",
    ]


def test_another_state_is_audited_on_request(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, _ = history
    out = stream.parent / "out"
    code, values = audited(capsys, stream, out, "--state", out / "v0-20251121-101500/checkpoint-1")
    assert (code, [one["relation"] for one in values["states"]]) == (0, ["audited", "beyond", "beyond", "beyond"])
    assert [(one["trained"], one["to_come"]["samples"]) for one in values["epochs"]] == [(4, 20)]


def test_what_was_skipped_and_left_over_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream_id = make_stream(tmp_path / "stream")
    parts = [
        Part(2, 2, 2, draws_per_step=2),
        Part(2, 2, 2, trained=False, first_step=1, draws_per_step=2),
        Part(2, 2, 6, skip=((8, 9),), first_step=1, draws_per_step=2),
    ]
    save(tmp_path / "out", 4, run_of(stream_id, *parts))
    [epoch] = audited(capsys, tmp_path / "stream", tmp_path / "out")[1]["epochs"]
    assert (epoch["trained"], epoch["left_over"]["ranges"]) == (16, [[19, 21], [23, 24]])
    assert epoch["skipped"]["ranges"] == [[2, 3], [5, 7], [8, 10]]


def test_json(history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]) -> None:
    stream, state = history
    out = stream.parent / "out"
    save(out, 3, run_of(state.stream_id, two_ranks(3)))
    code, lines, _ = report(capsys, stream, out, "--json")
    assert (code, len(lines)) == (0, 1)
    values = json.loads(lines[0])
    assert [one["relation"] for one in values.pop("states")] == [
        "on the course",
        "on the course",
        "abandoned",
        "on the course",
        "audited",
    ]
    [epoch] = values.pop("epochs")
    assert epoch == {
        "epoch": 0,
        "proven": True,
        "samples": 24,
        "trained": 14,
        "to_come": {"samples": 9, "ranges": [[12, 15], [16, 18], [19, 23]]},
        "left_over": {"samples": 1, "ranges": [[23, 24]]},
        "skipped": {"samples": 0, "ranges": []},
        "twice": {"samples": 0, "ranges": []},
        "again": {"samples": 0, "ranges": []},
        "missing": {"samples": 0, "ranges": []},
        "fewer_than_step": None,
    }
    assert values == {
        "stream": str(stream),
        "ok": True,
        "proven": True,
        "consistent": True,
        "stream_id": state.stream_id,
        "samples_per_chunk": 3,
        "chunks": 8,
        "samples": 24,
        "ended": True,
        "retired": 0,
        "audited": f"{out}/v1-20251121-111500/checkpoint-4/lazyshard.json",
        "consumed": 14,
        "steps": 4,
        "findings": [],
        "notes": [],
    }


def without_first_part(state: RunState) -> RunState:
    return with_parts(state, state.parts[1:])


def begun_again(state: RunState) -> RunState:
    return with_parts(state, [*state.parts, Part(2, 1, 2, 0, first_step=4, draws_per_step=2)])


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        # Ahead and behind: by a step, by a micro batch.
        (lambda state: changed(state, 1, draws=3), "steps"),
        (lambda state: changed(state, 1, draws=1), "steps"),
        (lambda state: changed(state, 0, draws=5), "steps"),
        # Draws of an earlier part.
        (lambda state: changed(state, 0, draws=6), "steps"),
        (without_first_part, "steps"),
        (lambda state: replace(state, seed=1), "other-settings"),
        (lambda state: replace(state, unit=1), "other-settings"),
        (begun_again, "twice"),
    ],
)
def test_mutations_of_the_newest_state_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mutate: Callable[[RunState], RunState], expected: str
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    save(tmp_path / "out", 1, run_of(stream_id, two_ranks(1)))
    save(tmp_path / "out", 4, mutate(run_of(stream_id, two_ranks(2), THREE)))
    code, values = audited(capsys, tmp_path / "stream", tmp_path / "out")
    assert (code, expected in {kind for kind, _ in findings(values)}) == (5, True), values["findings"]


def test_samples_that_were_trained_twice_or_passed_over_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    state = run_of(stream_id, two_ranks(2), Part(2, 1, 2, 0, first_step=2, draws_per_step=2))
    save(tmp_path / "out", 3, state)
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert code == 5
    file = f"{tmp_path}/out/checkpoint-3/lazyshard.json"
    assert lines[-4:] == [
        "epoch 0: 24 samples: 8 trained, 16 to come, 4 TRAINED TWICE (0 to 1, 3 to 4), 4 TRAINED AND COMING AGAIN "
        "(2, 5 to 6, 9)",
        f"not in order: {file}: epoch 0: 4 samples were trained more than once",
        f"not in order: {file}: epoch 0: 4 samples were trained and come again",
        "NOT proven: see what is trained twice or passed over",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"state": {"parts": []}}, "unusable"),
        ({"state": {"consumed": 13}}, "samples"),
        ({"consumed": 13}, "samples"),
        ({"step": 5}, "steps"),
        ({"state": {"stream_id": "f" * 32}}, "other-stream"),
    ],
)
def test_damaged_checkpoints_are_found(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: str
) -> None:
    stream, state = history
    out = stream.parent / "out"
    file = save(out, 4, state, saved_at=50.0) / "lazyshard.json"
    values = json.loads(file.read_text())
    state_values = values["state"] | change.get("state", {})
    file.write_text(json.dumps(values | change | {"state": state_values}))
    code, found = audited(capsys, stream, out)
    assert (code, findings(found)[0]) == (5, (expected, "checkpoint-4"))
    assert found["proven"] is (expected in ("unusable", "other-stream"))


def test_a_checkpoint_ahead_of_a_live_stream_is_found_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream", 12, end=False)
    save(tmp_path / "out", 2, run_of(stream_id, two_ranks(2)))
    save(tmp_path / "out", 5, run_of(stream_id, two_ranks(5)), saved_at=1.0)
    code, values = audited(capsys, tmp_path / "stream", tmp_path / "out")
    assert (code, findings(values)) == (5, [("ahead", "checkpoint-5")])
    code, lines, err = report(capsys, tmp_path / "stream", "--state", tmp_path / "out" / "checkpoint-5")
    assert (code, lines, err.count("\n")) == (5, [], 1)


def test_a_live_stream_is_counted_as_far_as_it_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream_id = make_stream(tmp_path / "stream", 15, end=False)
    save(tmp_path / "out", 2, run_of(stream_id, two_ranks(2)))
    code, values = audited(capsys, tmp_path / "stream", tmp_path / "out")
    [epoch] = values["epochs"]
    assert (code, values["ended"], epoch["samples"], epoch["trained"], epoch["to_come"]["samples"]) == (
        0,
        False,
        15,
        8,
        7,
    )


@pytest.mark.parametrize(("before", "checkpoints"), [(2, [1]), (4, [1, 2])])
def test_chunks_that_only_older_checkpoints_need_may_go(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str], before: int, checkpoints: list[int]
) -> None:
    """Checkpoints 1 and 2 stand in the first stripes, chunks 0 to 3; 4 needs chunk 4. One note tells of all."""
    stream, state = history
    out = stream.parent / "out"
    files = [f"{out}/v0-20251121-101500/checkpoint-{steps}/lazyshard.json" for steps in checkpoints]
    commit(stream, state, chunks_before=before)
    for retired in (0, before):
        if retired:
            retire(stream, retired, 8)
        code, values = audited(capsys, stream, out)
        assert (code, values["retired"], values["proven"], values["findings"]) == (0, retired, True, [])
        [note] = values["notes"]
        assert (note["files"] or [note["where"]]) == files
        assert f"below {before} {'are' if retired else 'may be'} deleted" in note["what"]


def test_of_many_checkpoints_whose_chunks_go_a_few_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    for steps in range(1, 7):
        save(tmp_path / "out", steps, run_of(stream_id, two_ranks(steps)))
    commit(tmp_path / "stream", run_of(stream_id, two_ranks(6)), chunks_before=8)
    [note] = audited(capsys, tmp_path / "stream", tmp_path / "out")[1]["notes"]
    assert len(note["files"]) == 5
    assert note["what"].endswith(f"/out/checkpoint-2, {tmp_path}/out/checkpoint-3 and 2 more")


def test_what_is_too_little_for_a_step_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of 8 and one of 6 leave 3: a micro batch of 2, which no step takes that is whole, and one sample."""
    stream_id = make_stream(tmp_path / "stream", 25)
    parts = [Part(2, 2, 8, draws_per_step=4), Part(1, 2, 6, first_step=2, draws_per_step=6)]
    save(tmp_path / "out", 3, run_of(stream_id, *parts))
    assert "fewer than the 6 of a step" in report(capsys, tmp_path / "stream", tmp_path / "out")[1][-2]
    code, values = audited(capsys, tmp_path / "stream", tmp_path / "out")
    [epoch] = values["epochs"]
    assert (code, epoch["to_come"]["samples"], epoch["fewer_than_step"]) == (0, 2, 6)


def test_chunks_that_the_newest_checkpoint_needs_must_be_kept(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, state = history
    commit(stream, state, chunks_before=7)
    code, values = audited(capsys, stream, stream.parent / "out")
    assert (code, findings(values), values["proven"]) == (5, [("cursor", "cursors")], True)
    retire(stream, 7, 8)
    code, values = audited(capsys, stream, stream.parent / "out")
    assert (code, ("deleted", "checkpoint-4") in findings(values)) == (5, True)


def test_cursors_that_are_not_looked_at_are_named(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, state = history
    plain = stream.parent / "checkpoint-4" / "lazyshard.json"
    plain.parent.mkdir()
    plain.write_bytes(state.encode())
    commit(stream, state, consumer="other")
    save(stream.parent / "named", 4, state, consumer="gone")
    for arguments, names in (([plain], ["other, sft"]), ([stream.parent / "named"], ["gone", "other, sft"])):
        code, values = audited(capsys, stream, *arguments)
        [note] = values["notes"]
        assert (code, note["where"], all(name in note["what"] for name in names)) == (0, str(stream), True)
    assert audited(capsys, stream, plain, "--consumer", "sft")[1]["notes"] == []


def test_a_count_that_no_steps_bear_out_is_consistent_and_not_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks trained 0 to 11, then 2 to 13: the first loop counted the samples of one rank for those of both."""
    stream_id = make_stream(tmp_path / "stream")
    blind = run_of(stream_id, Part(2, 1, 3), Part(2, 1, 6))
    saved = save(tmp_path / "blind", 12, blind)
    assert report(capsys, tmp_path / "stream", tmp_path / "blind")[1][-1].startswith("consistent, if `consumed` was")
    code, values = audited(capsys, tmp_path / "stream", tmp_path / "blind")
    assert (code, values["ok"], values["consistent"], values["proven"]) == (9, True, True, False)
    # With steps it is found, where something says how many there were.
    seeing = run_of(stream_id, Part(2, 1, 3, draws_per_step=1), Part(2, 1, 6, first_step=3, draws_per_step=1))
    save(tmp_path / "seeing", 12, seeing)
    assert report(capsys, tmp_path / "stream", tmp_path / "seeing")[0] == 5
    (saved / "lazyshard.json").write_bytes(seeing.encode())
    (tmp_path / "state.json").write_bytes(seeing.encode())
    assert report(capsys, tmp_path / "stream", saved)[0] == 5
    assert report(capsys, tmp_path / "stream", tmp_path / "state.json")[0] == 9


@pytest.mark.parametrize("values", [{"step": 40}, {"consumed": 13}])
def test_nothing_is_proven_where_states_are_contradicted(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    stream, _ = history
    out = stream.parent / "out"
    file = out / "v1-20251121-111500" / "checkpoint-4" / "lazyshard.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    assert report(capsys, stream, out)[1][-1].startswith("NOT proven: ")
    code, found = audited(capsys, stream, out)
    assert (code, found["proven"]) == (5, False)


def test_a_copied_folder_is_audited_from_the_state_that_trained_most(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without times in the files, and those of the files the wrong way round; then all of one time."""
    stream, state = history
    out = stream.parent / "copy"
    for step, saved in ((10, state), (2, run_of(state.stream_id, two_ranks(2)))):
        save(out, step, saved, saved_at=None)
        os.utime(out / f"checkpoint-{step}" / "lazyshard.json", (1e9 - 100 * step, 1e9 - 100 * step))
    values = audited(capsys, stream, out)[1]
    assert values["audited"] == f"{out}/checkpoint-10/lazyshard.json"
    assert [note["where"] for note in values["notes"]] == [values["audited"]]
    for step, saved, at in ((10, state, 500.0), (2, run_of(state.stream_id, two_ranks(2)), 501.0)):
        save(stream.parent / "same", step, saved, saved_at=at)
    values = audited(capsys, stream, stream.parent / "same")[1]
    assert (values["audited"].split("/")[-2], values["notes"]) == ("checkpoint-10", [])


def test_a_cursor_without_a_state_is_compared(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, _ = history
    commit(stream, None, consumed=20)
    code, values = audited(capsys, stream, stream.parent / "out")
    assert (code, findings(values)) == (5, [("cursor", "cursors")])


def test_how_many_samples_there_are_is_looked_up(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, _ = history
    for name in ("head.json", "stream.end"):
        values = json.loads((stream / name).read_bytes())
        (stream / name).write_text(json.dumps(values | {"samples": 23}))
    code, values = audited(capsys, stream, stream.parent / "out")
    assert (code, values["findings"][0]["kind"]) == (5, "stream")


def test_the_cursor_alone(history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]) -> None:
    stream, state = history
    code, values = audited(capsys, stream)
    assert (code, values["audited"], values["steps"]) == (9, f"{stream}/cursors/sft.json", 4)
    commit(stream, state, consumer="other")
    assert report(capsys, stream)[0] == 2
    assert report(capsys, stream, "--consumer", "other")[0] == 9
    assert report(capsys, stream, "--consumer", "third")[0] == 2


def test_nothing_to_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_stream(tmp_path / "stream")
    (tmp_path / "out").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "lazyshard.json").write_text("{")
    for code, *arguments in (
        (3, "stream", "out"),
        (3, "stream"),
        (5, "stream", "torn"),
        (2, "stream", "nowhere"),
        (2, "nowhere"),
    ):
        ended, lines, err = report(capsys, *(tmp_path / name for name in arguments))
        assert (ended, lines, err.startswith("lazyshard: error: ")) == (code, [], True)


def test_a_folder_without_checkpoints_is_not_passed_over_in_silence(
    history: tuple[Path, RunState], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is a cursor, which alone would be proven."""
    stream, _ = history
    (tmp_path / "other" / "step-5").mkdir(parents=True)
    (tmp_path / "other" / "step-5" / "lazyshard.json").write_text("{}")
    assert report(capsys, stream, tmp_path / "other")[:2] == (3, [])


def test_a_run_that_begins_its_epochs_by_itself_has_states_of_one_epoch_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    for step, epoch in ((6, None), (8, 1)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = run_of(stream_id, replace(two_ranks(step if epoch is None else step - 6), epoch=epoch))
        (folder / "lazyshard.json").write_bytes(state.encode())
    code, values = audited(capsys, tmp_path / "stream", tmp_path, "--state", tmp_path / "checkpoint-8")
    assert (code, [one["relation"] for one in values["states"]]) == (9, ["audited", "another epoch"])
    assert [(one["epoch"], one["trained"], one["to_come"]["samples"]) for one in values["epochs"]] == [(1, 8, 16)]


def test_a_branch_that_is_ahead_of_the_stream_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream", 15, end=False)
    head = run_of(stream_id, two_ranks(1), replace(THREE, draws=1, first_step=1))
    save(tmp_path / "out" / "v1", 2, head, saved_at=9e9)
    save(tmp_path / "out", 5, run_of(stream_id, two_ranks(5)))
    save(tmp_path / "out", 2, run_of(stream_id, two_ranks(2)))
    code, values = audited(capsys, tmp_path / "stream", tmp_path / "out")
    assert (code, findings(values)) == (5, [("ahead", "checkpoint-5")])
    states = [(one["relation"], one["left_after"], one["trained_beyond"]) for one in values["states"]]
    assert states == [("audited", None, None), ("abandoned", 4, 4), ("abandoned", 4, None)]
